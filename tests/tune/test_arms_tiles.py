"""Tiles and tables as arms: parsed, gated before timing, checked after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from one_row_table import CASE, PROBLEM, write_table
from tilewright.device import cpu_device
from tilewright.errors import GateError, TileError
from tilewright.measure import Verdict
from tilewright.ops.choose import choose_tile
from tilewright.ops.contract import Inputs, OpSpec
from tilewright.ops.mmq.spec import SPEC
from tilewright.tiles.table import FOLDER_VARIABLE, forget
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.arms import CompareRow, Contest, Settings, run_contests
from tilewright.tune.tile_arms import given_tiles, parse_tile, table_tiles, tile_contests

ARCH = cpu_device().arch
A, B = "panel(mr=2, nv=1, block_parts=8)", "panel(mr=1, nv=1, block_parts=8)"


@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("dot(unroll=4)", Tile.of("dot", unroll=4)),
        (" panel ( mr = 8 , nv=3 ) ", Tile.of("panel", mr=8, nv=3)),
        ("blas", Tile.of("blas")),
        ("a(x=True, y=False, z=word, w=-1)", Tile.of("a", x=True, y=False, z="word", w=-1)),
        (str(Tile.of("panel", mr=8, threads=0)), Tile.of("panel", mr=8, threads=0)),
    ],
)
def test_a_tile_is_read_as_it_is_printed(text: str, tile: Tile) -> None:
    assert parse_tile(text) == tile


@pytest.mark.parametrize(
    "text", ["", "panel(", "panel(mr)", "panel(mr=8 nv=3)", "panel(mr=8, mr=4)", "8(x=1)x", "p(=1)"]
)
def test_what_is_no_tile_is_an_error(text: str) -> None:
    with pytest.raises(TileError, match=r"write it as algorithm\(field=value"):
        parse_tile(text)


def test_threads_may_be_left_out() -> None:
    a, b, note = given_tiles(SPEC, A, "dot(unroll=4, threads=2)")(PROBLEM)
    assert a == Tile.of("panel", mr=2, nv=1, block_parts=8, threads=0)
    assert b.threads == 2
    assert note == ""


def contests(spec: OpSpec = SPEC, a: str = A, b: str = B, **options: Any) -> Any:
    return tile_contests(
        spec, [CASE], given_tiles(spec, a, b), arch=ARCH, threads=1, **options
    )  # fmt: skip


def test_right_tiles_are_compared_hot_and_cold() -> None:
    found = list(contests())
    assert [(c.label, c.cache) for c in found] == [(CASE.id, "hot"), (CASE.id, "cold")]
    assert all(isinstance(c, Contest) for c in found)
    assert found[0].work.flops == 2 * 5 * 48 * 64
    rows, _ = run_contests(found[:1], Settings(blocks=6, sample_us=200.0, warm_up_us=1e4))
    (row,) = rows
    assert row.comparison is not None
    assert row.comparison.verdict is not Verdict.VOID, row.comparison.judgement.reasons
    assert row.comparison.settings["cache"] == "hot"


def test_one_tile_twice_is_not_timed() -> None:
    rows = list(contests(b=A))
    assert [type(row) for row in rows] == [CompareRow, CompareRow]
    assert "both arms run panel" in rows[0].note


def test_a_tile_that_breaks_a_rule_is_refused() -> None:
    with pytest.raises(TileError, match="registers"):
        list(contests(b="panel(mr=12, nv=4, block_parts=8)"))


def broken(when: Callable[[Tile], bool], factor: float = 1.01) -> OpSpec:
    """mmq, wrong where `when` says so."""

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        y = SPEC.run(inputs, tile=tile, threads=threads)
        return y * factor if when(tile) else y

    return SPEC.with_run(run)


@pytest.mark.parametrize(("wrong", "name"), [(2, "A"), (1, "B")])
def test_a_wrong_tile_is_never_timed(wrong: int, name: str) -> None:
    spec = broken(lambda tile: tile.mr == wrong)
    with pytest.raises(GateError, match=f"arm {name} is wrong, so nothing is timed.*'oracle'"):
        list(contests(spec))


def test_a_tile_that_goes_wrong_while_it_is_timed_voids_the_row() -> None:
    ready: list[bool] = []
    spec = broken(lambda tile: bool(ready) and tile.mr == 1)
    (hot,) = contests(spec, caches=("hot",))
    ready.append(True)
    (row,), _ = run_contests([hot], Settings(blocks=6, sample_us=200.0, warm_up_us=1e4))
    assert row.verdict == "VOID"
    assert row.exit_code == 6
    assert row.comparison is not None
    assert "the check after timing failed" in row.comparison.judgement.reasons[0]
    assert "mr=1" in row.comparison.judgement.reasons[0]


@pytest.fixture
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    forget()
    yield
    torch.set_num_threads(before)
    forget()


@pytest.mark.usefixtures("_one_thread")
def test_tables_give_the_tiles_that_lookup_would_take_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "mine"))
    space = SPEC.space() if SPEC.space else None
    assert space is not None
    tile = Tile.of("panel", mr=2, nv=1, block_parts=8, threads=0)
    a = write_table(tmp_path / "a.json", tile)
    b = write_table(tmp_path / "b.json", None)
    c = write_table(tmp_path / "c.json", tile, units=64)
    before = choose_tile(PROBLEM, space)
    got_a, got_b, note = table_tiles(SPEC, [PROBLEM], a, b)(PROBLEM)
    assert got_a == tile
    assert got_b == before.tile
    assert note.startswith(f"A {tile}, B {before.tile} (")
    _, got_c, note = table_tiles(SPEC, [PROBLEM], a, c)(PROBLEM)
    assert got_c == before.tile
    assert "tuned on 64 units" in note
    assert os.environ[FOLDER_VARIABLE] == str(tmp_path / "mine")
    assert choose_tile(PROBLEM, space) == before


def test_a_damaged_table_is_an_error_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(TileError, match=r"bad.json: is no valid JSON"):
        table_tiles(SPEC, [PROBLEM], bad, bad)
    assert FOLDER_VARIABLE not in os.environ


def test_an_op_without_a_space_has_no_tables(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.json", None)
    with pytest.raises(TileError, match="has no tile space"):
        table_tiles(replace(SPEC, space=None), [PROBLEM], path, path)


def test_the_problem_is_what_cases_say() -> None:
    assert Problem("mmq", ARCH, "float32", "Q4_1", "float", 5, 48, 64, 0) == PROBLEM
