"""The tables of published rows: what they are made of, how ops share a file, and what is kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from by_path import module_once
from tilewright.isa.compile import space_for
from tilewright.ops.catalog import SPECS
from tilewright.tiles.table import Running, TableHeader, TableRow, TileTable
from tilewright.tiles.tile import Problem, Tile, m_bucket

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="benchmarks/ is not part of this copy")
FILES = ("gfx1151.json", "gfx11.json", "gfx12.json", "gfx90a.json", "gfx942.json")


@pytest.fixture(scope="module", autouse=True)
def _folder() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def module(name: str) -> ModuleType:
    return module_once(name, FOLDER / f"{name}.py")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("op", ["mmq", "moe", "ssd"])
def test_a_plan_names_legal_tiles_for_buckets_and_says_where_they_are_from(
    op: str, file: str
) -> None:
    table = next(t for t in module("published_ladders").TABLES if t.file == file)
    plan = next(plan for plan in module("published_plans").PLANS if plan.op == op)
    wanted = list(plan.wanted(table))
    assert bool(wanted) == bool(plan.notes(table))
    assert bool(wanted) == (op != "ssd" or file not in ("gfx11.json", "gfx12.json"))
    for problem, tiles in wanted:
        assert problem.M == m_bucket(problem.M)
        assert problem.weight_type in SPECS[op].weight_types
        for arch in table.archs:
            space = space_for(op, arch, tiles[0])
            assert space is not None
            space.check(tiles[0], replace(problem, arch=arch))
    assert len({problem for problem, _ in wanted}) == len(wanted)


def test_a_product_is_gated_once_a_type_and_tile() -> None:
    table = next(t for t in module("published_ladders").TABLES if t.file == "gfx942.json")
    plan = next(plan for plan in module("published_plans").PLANS if plan.op == "mmq")
    pairs = [(problem, tile) for problem, tiles in plan.wanted(table) for tile in tiles]
    orders = module("make_published_tables").gate_orders(plan, pairs)
    assert len(orders) == 13 * 2
    # One unit of the interpreter would share out nothing.
    assert {order["tile"]["units"] for order in orders.values()} == {7}


def problem(op: str) -> Problem:
    return Problem(op, "gfx90a", "float16", "Q4_K", "int8", 64, 4096, 4096, 0)


def row(op: str, block: int = 64) -> TableRow:
    tile = Tile.of("int8", block_m=block)
    return TableRow(problem(op), tile, 0.0, 0.0, 0, 1e-5, 1, {}, "published")


def old_table(compiler: str = "torch 2.13.0, triton 3.7.1") -> TileTable:
    """A table of the time when there was one op."""
    header = TableHeader(
        "gfx90a", ("gfx90a",), 0, "CDNA2", compiler, "a" * 64, {"w4a16": 1}, "2026-01-01",
        "published, not measured here", ("tiles from a ladder", "dropped 3 rows of x: why"),
    )  # fmt: skip
    return TileTable(header, (row("w4a16"),))


def made(op: str, *rows: TableRow) -> object:
    table = next(t for t in module("published_ladders").TABLES if t.file == "gfx90a.json")
    plan = next(plan for plan in module("published_plans").PLANS if plan.op == op)
    return module("make_published_tables").Made(table, plan, rows=list(rows))


def now(op: str, hashed: str = "b" * 64) -> dict[str, Running]:
    return {op: Running("torch 2.14.0, triton 3.7.1", hashed, 1)}


def test_rows_of_ops_that_are_not_made_stay_as_they_are() -> None:
    whole_table = module("make_published_tables").whole_table
    whole = whole_table(old_table(), [made("mmq", row("mmq"))], now("mmq"))
    assert whole.rows == (row("mmq"), row("w4a16"))
    assert (whole.header.hash_of("w4a16"), whole.header.hash_of("mmq")) == ("a" * 64, "b" * 64)
    assert whole.header.op_versions == {"mmq": 1, "w4a16": 1}
    assert whole.header.notes[-2:] == (
        "w4a16: tiles from a ladder", "w4a16: dropped 3 rows of x: why",
    )  # fmt: skip
    assert all(note.startswith("mmq: ") for note in whole.header.notes[:-2])
    again = whole_table(whole, [made("mmq", row("mmq", 32))], now("mmq", "c" * 64))
    assert again.rows == (row("mmq", 32), row("w4a16"))
    assert again.header.hash_of("mmq") == "c" * 64
    assert again.header.notes == whole.header.notes


def test_an_op_that_loses_every_row_says_why_and_leaves_no_hash() -> None:
    part = made("mmq")
    part.drop(problem("mmq"), "int8(block_m=64): spills")  # type: ignore[attr-defined]
    whole = module("make_published_tables").whole_table(old_table(), [part], now("mmq"))
    assert whole.rows == (row("w4a16"),)
    assert whole.header.op_versions == {"w4a16": 1}
    assert "mmq: dropped 1 rows of Q4_K float16 int8(block_m=64): spills" in whole.header.notes


def test_rows_of_another_triton_cannot_stand_beside_new_ones() -> None:
    with pytest.raises(SystemExit, match=r"has rows of triton 3\.6\.0, here is triton 3\.7\.1"):
        module("make_published_tables").whole_table(
            old_table("triton 3.6.0"), [made("mmq", row("mmq"))], now("mmq")
        )


KERNELS = """
from tilewright.layout.blocks import BLOCK_FORMS
SIZE = 4

def launch(x):
    return part(x) + SIZE + len(BLOCK_FORMS)

def part(x):
    return x

def other(x):
    return -x
"""


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("    return x\n", "    return 2 * x\n", True),
        ("SIZE = 4", "SIZE = 5", True),
        ("return -x", "return +x", False),
        ("import BLOCK_FORMS", "import BLOCK_FORMS, GpuBlocks", False),
        ("    return part", "    # why\n    return part", True),
    ],
    ids=["used function", "used constant", "unused function", "unused import", "its own text"],
)
def test_a_digest_follows_what_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, changes: bool
) -> None:
    digests = []
    for name, text in (
        ("one", KERNELS),
        ("two", KERNELS.replace(before, after)),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernels_of_test.py").write_text(text)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / name))
            digest = module("source_digest")
            for cached in (digest._tree, digest._definitions, digest._imports):
                cached.cache_clear()
            digests.append(digest.digest_of(["kernels_of_test:launch"]))
    assert (digests[0] != digests[1]) == changes


def test_a_digest_follows_imports_of_this_package() -> None:
    """`launch_int8` uses a function of w4a16's kernels, and nothing else of that file."""
    digest = module("source_digest")
    used = digest._imports("tilewright.ops.mmq.triton_int8")
    assert ("tilewright.ops.w4a16.triton_gemm", "spans_wide") in used["spans_wide"]
    scan = ["tilewright.ops.ssd.triton_scan:launch_scan"]  # one of its plans is Hopper's
    assert digest.digest_of(scan) != digest.digest_of(scan, without="hopper_")
    with pytest.raises(ValueError, match="defines no launch_nothing"):
        digest.digest_of(["tilewright.ops.mmq.triton_int8:launch_nothing"])
