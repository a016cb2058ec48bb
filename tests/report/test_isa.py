"""`isa` as text: figures in, lines out, written by hand here."""

from __future__ import annotations

import json
from typing import Any

from report.isa_data import kernel
from tilewright.isa.count import FORMS, KINDS
from tilewright.isa.figures import LABEL
from tilewright.isa.survey import Entry
from tilewright.report.isa import isa_json, isa_tables
from tilewright.report.render import to_markdown

TITLE = "w4a16 uint4 float16 g=128 M=512 N=4096 K=4096"


def entry(arch: str = "gfx1151", tile: str = "t(a=1)", *kernels: dict[str, Any]) -> Entry:
    return Entry(arch, tile, "", kernels or (kernel(arch),))


def lines_of(entries: list[Entry]) -> list[list[str]]:
    return [to_markdown(table).splitlines() for table in isa_tables(TITLE, entries)]


def cells(lines: list[str], label: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(f"| {label} ")]
    return [cell.strip() for cell in line.strip("| ").split("|")][1:]


def test_archs_of_one_tile_stand_side_by_side() -> None:
    (lines,) = lines_of([entry(), entry("sm_90", "t(a=1)", kernel("sm_90", vgprs=168, sgprs=None))])
    assert lines[0] == f"{TITLE}: {LABEL}"
    assert cells(lines, "inner loop, an iteration a wave") == ["gfx1151", "sm_90"]
    assert cells(lines, "VGPRs") == ["96", "168"]
    assert cells(lines, "SGPRs") == ["34", "-"]
    assert cells(lines, "VALU a weight pair") == ["4.69", "4.69"]
    assert not any(line.startswith("| AGPRs") for line in lines)  # neither has any


def test_two_tiles_stand_side_by_side_one_table_an_arch() -> None:
    tables = lines_of([entry(arch, tile) for arch in ("gfx1151", "gfx90a") for tile in ("a", "b")])
    assert [lines[0] for lines in tables] == [
        f"{TITLE}, gfx1151: {LABEL}", f"{TITLE}, gfx90a: {LABEL}"
    ]  # fmt: skip
    for lines in tables:
        assert cells(lines, "inner loop, an iteration a wave") == ["A", "B"]
        assert "A: a" in lines
        assert "B: b" in lines


def test_every_kernel_of_a_launch_has_a_column() -> None:
    (lines,) = lines_of([entry("gfx1151", "t", kernel(name="_parts"), kernel(name="_sum"))])
    assert cells(lines, "inner loop, an iteration a wave") == ["gfx1151 parts", "gfx1151 sum"]


def test_notes_name_revision_loop_warnings_and_failures() -> None:
    serialized = "ptxas info : (C7515) Potential Performance Loss"
    bad = kernel("sm_90", warnings=(serialized, "ptxas warning : x"), failures=(serialized,))
    (lines,) = lines_of(
        [
            Entry("sm_90", "t(a=1)", "main (0123456789)", (bad,)),
            Entry("sm_90", "t(a=9)", "", (), "tile t(a=9) breaks rule 'x': y"),
        ]
    )
    assert "A: revision main (0123456789), t(a=1)" in lines
    assert "  _gemm: loop .LBB0_4, v_wmma_f32_16x16x16_f16, triton 3.7.1" in lines
    assert "  warning: ptxas warning : x" in lines
    assert [line for line in lines if serialized in line] == [f"  FAILED _gemm: {serialized}"]
    assert "  FAILED tile t(a=9) breaks rule 'x': y" in lines


def test_json_holds_every_figure_and_the_label() -> None:
    whole = json.loads(json.dumps(isa_json(TITLE, [entry()], {"command": "isa"})))
    assert whole["label"] == LABEL == "legality and resources, not speed"
    assert whole["provenance"] == {"command": "isa"}
    (found,) = whole["results"]
    assert found["arch"] == "gfx1151"
    (one,) = found["kernels"]
    assert set(one["counts"]) == {"total", *KINDS, *FORMS}
    assert one["resources"]["vgprs"] == 96
