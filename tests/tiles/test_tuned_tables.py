"""Tuned tables that come with the package: their rows are measured, legal, found, and of one chip.

The same is asked of a table of several ops that is made here, and of its faulty copies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import TileError
from tilewright.ops.catalog import spec_for, specs_on
from tilewright.ops.choose import compiler, running
from tilewright.ops.space import TileSpace
from tilewright.tiles import table as tables
from tilewright.tiles.table import (
    Running,
    TableHeader,
    TableRow,
    TileTable,
    load_table,
    lookup,
    save_table,
    shipped_folder,
)
from tilewright.tiles.tile import Problem, Tile, m_bucket

ARCH = "sm_90"
PROBLEMS = (
    Problem("w4a16", ARCH, "float16", "uint4", "float", 1, 4096, 4096, 128),
    Problem("w4a16", ARCH, "bfloat16", "uint4", "float", 512, 24576, 4096, 128),
    Problem("mmq", ARCH, "float16", "Q4_K", "float", 1, 28672, 4096, 0),
    Problem("mmq", ARCH, "float16", "Q6_K", "float", 512, 4096, 14336, 0),
    Problem("moe", ARCH, "float16", "Q4_K", "float", 64, 1536, 2048, 0),
    Problem("moe", ARCH, "bfloat16", "uint4", "float", 1024, 2048, 768, 128),
    Problem("ssd", ARCH, "bfloat16", "p80", "float", 4096, 10240, 128, 16),
    Problem("conv1d", ARCH, "float16", "w4", "float", 1024, 10240, 4, 0),
)


@functools.cache
def read(path: Path) -> TileTable:
    return load_table(path)


def is_tuned(table: TileTable) -> bool:
    return any(row.source == "tuned" for row in table.rows)


SHIPPED = [path for path in sorted(shipped_folder().glob("*.json")) if is_tuned(read(path))]


def made() -> TileTable:
    """A table of several ops, as the tuner leaves it: every row has the default of its space."""
    ops = specs_on(ARCH)
    hashes = ", ".join(f"{op}={running(op, ARCH).kernel_hash}" for op in sorted(ops))
    header = TableHeader(
        ARCH, (ARCH,), 132, "Some GPU", compiler(), hashes,
        {op: spec.version for op, spec in ops.items()}, "2026-01-31T12:00:00+00:00",
        "tilewright 0.1.0",
    )  # fmt: skip
    rows = (TableRow(p, space_of(p).default(p), 12.5, 0.25, 40, 1e-8, 5, {}) for p in PROBLEMS)
    return TileTable(header, tuple(rows))


def space_of(problem: Problem) -> TileSpace:
    spec = spec_for(problem.op, problem.arch)
    assert spec.space is not None
    return spec.space()


@pytest.fixture(params=["made", *(path.stem for path in SHIPPED)])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> Iterator[Path]:
    """A tuned table where lookup finds it, and no other."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(tables, "shipped_folder", lambda: folder)
    monkeypatch.setenv(tables.FOLDER_VARIABLE, str(tmp_path))
    if request.param == "made":
        path = folder / f"{ARCH}.json"
        save_table(path, made())
    else:
        path = folder / f"{request.param}.json"
        path.write_bytes(next(p for p in SHIPPED if p.stem == request.param).read_bytes())
    tables.forget()
    yield path
    tables.forget()


def then(table: TileTable, op: str) -> Running:
    """What the op ran with when the table was made."""
    header = table.header
    now = running(op, header.arch)
    return replace(
        now, compiler=header.compiler, kernel_hash=header.hash_of(op),
        op_version=header.op_versions[op],
    )  # fmt: skip


def found(table: TileTable, problem: Problem) -> tables.Choice:
    return lookup(
        problem, space_of(problem), units=table.header.units, running=then(table, problem.op)
    )


def check(table: TileTable) -> None:
    """What a tuned table says of itself and of each row."""
    header = table.header
    assert header.source.startswith("tilewright ")
    assert header.units > 0
    assert header.device
    assert header.valid_for == (header.arch,)
    assert "triton " in header.compiler or header.arch.startswith("cpu")
    for row in table.rows:
        problem = row.problem
        assert row.source == "tuned", problem
        assert row.samples >= 1, problem
        assert row.median_us > 0, problem
        assert 0 < row.oracle_error < 1e-3, problem  # NMSE of bfloat16 results is some 1e-6
        assert row.tried >= 1, problem
        assert problem.M == m_bucket(problem.M)
        assert len(header.hash_of(problem.op)) == 64, problem
        assert header.op_versions[problem.op] == spec_for(problem.op, header.arch).version
        space_of(problem).check(row.tile, problem)


def test_what_a_tuned_table_says(file: Path) -> None:
    check(load_table(file))


def test_every_row_is_found_by_lookup(file: Path) -> None:
    table = load_table(file)
    for row in table.rows:
        choice = found(table, row.problem)
        assert (choice.how, choice.tile) == ("exact", row.tile), row.problem


def test_what_lies_near_a_row_gets_a_legal_tile(file: Path) -> None:
    """Rows serve shapes around them, those that keep a default by saying so; no lookup raises."""
    table = load_table(file)
    hows = set()
    better = any(row.tile != space_of(row.problem).default(row.problem) for row in table.rows)
    for row in table.rows:
        p = row.problem
        double = replace(p, M=m_bucket(2 * p.M), N=2 * p.N)
        for other in (double, replace(double, N=p.N), replace(p, N=2 * p.N)):
            choice = found(table, other)
            space_of(other).check(choice.tile, other.bucketed())
            hows.add(choice.how)
    assert ("near" in hows) == better


def test_rows_of_other_kernels_are_not_used(file: Path) -> None:
    """Nor are those of one op when another's kernels have changed."""
    table = load_table(file)
    ops = sorted({row.problem.op for row in table.rows})
    for op in ops:
        row = next(row for row in table.rows if row.problem.op == op)
        stale = replace(then(table, op), kernel_hash="0" * 64)
        tables.forget()
        choice = lookup(row.problem, space_of(row.problem), units=table.header.units, running=stale)
        assert choice.how == "default"
        assert "its kernels have changed" in choice.note
    assert ops


def changed(table: TileTable, **fields: Any) -> TileTable:
    return replace(table, rows=(replace(table.rows[2], **fields), *table.rows[3:]))


@pytest.mark.parametrize(
    "fields",
    [
        {"samples": 0, "median_us": 0.0, "source": "published"},
        {"oracle_error": 0.01},
        {"oracle_error": 0.0},
        {"tried": 0},
        {"tile": Tile.of("dot", unroll=2, threads=0)},
        {"tile": Tile.of("gemv", ahead=1, block_m=8, block_n=16, num_warps=4, split_k=3, units=2)},
    ],
    ids=["published", "wrong", "not-verified", "not-tried", "of-the-cpu", "of-no-value"],
)
def test_a_faulty_row_is_seen(fields: dict[str, Any]) -> None:
    table = made()
    check(table)
    with pytest.raises((AssertionError, TileError)):
        check(changed(table, **fields))


def test_a_row_that_breaks_a_rule_is_seen() -> None:
    table = made()
    row = table.rows[2]
    many = replace(row.problem, M=8192)  # kernels for few rows hold all rows of x at once
    with pytest.raises(TileError, match="breaks rule '(all rows at once|decode one row)'"):
        check(changed(table, problem=many))


def test_a_header_that_lacks_an_op_is_seen() -> None:
    table = made()
    hashes = ", ".join(
        part for part in table.header.kernel_hash.split(", ") if not part.startswith("mmq=")
    )
    with pytest.raises(AssertionError):
        check(replace(table, header=replace(table.header, kernel_hash=hashes)))
