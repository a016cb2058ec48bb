"""The tables that come with the package: whole, legal, of these kernels, and found by lookup."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.device import cpu_device
from tilewright.isa.compile import space_for
from tilewright.ops.catalog import spec_for
from tilewright.ops.choose import running
from tilewright.ops.space import TileSpace
from tilewright.tiles import table as tables
from tilewright.tiles.table import TableHeader, TileTable, load_table, lookup, shipped_folder
from tilewright.tiles.tile import Problem, Tile, m_bucket

FILES = sorted(shipped_folder().glob("*.json"))
PUBLISHED = {
    "gfx1151.json": ("gfx1151",),
    "gfx11.json": ("gfx1100", "gfx1101"),
    "gfx12.json": ("gfx1201", "gfx1200"),
    "gfx90a.json": ("gfx90a",),
    "gfx942.json": ("gfx942",),
}

each = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
published = pytest.mark.parametrize("name", PUBLISHED)


def test_the_published_tables_are_there() -> None:
    assert set(PUBLISHED) <= {path.name for path in FILES}


@functools.cache
def read(path: Path) -> TileTable:
    return load_table(path)


def space_of(problem: Problem, tile: Tile) -> TileSpace:
    if problem.op == "w4a16" and not problem.arch.startswith("cpu"):
        found = space_for("w4a16", problem.arch, tile)
        assert found is not None
        return found
    spec = spec_for(problem.op, problem.arch)
    assert spec.space is not None
    return spec.space()


@pytest.fixture
def only_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lookup sees the package's tables and no user's."""
    monkeypatch.setenv(tables.FOLDER_VARIABLE, str(tmp_path))
    tables.forget()
    yield
    tables.forget()


@each
def test_every_row_obeys_the_rules_on_every_arch_of_its_table(path: Path) -> None:
    table = read(path)
    assert table.rows
    for row in table.rows:
        for arch in table.header.valid_for:
            problem = replace(row.problem, arch=arch)
            space_of(problem, row.tile).check(row.tile, problem)


@pytest.mark.slow  # after a change of a kernel, until tables are made anew: that takes minutes
@each
def test_rows_are_of_the_kernels_as_they_are(path: Path) -> None:
    header = read(path).header
    for op in {row.problem.op for row in read(path).rows}:
        now = running(op, header.arch)
        assert header.op_versions[op] == now.op_version
        assert header.hash_of(op) == now.kernel_hash, (
            f"the kernels of {op} have changed since {path.name} was made: its rows are not used; "
            "make it anew (benchmarks/make_published_tables.py, or benchmarks/gpu/tune_*.py)"
        )


@published
def test_a_published_table_says_that_nothing_was_measured(name: str) -> None:
    table = read(shipped_folder() / name)
    header = table.header
    assert header.source == "published, not measured here"
    assert header.valid_for == PUBLISHED[name]
    assert header.units == 0
    assert any("never timed by this package" in note for note in header.notes)
    for row in table.rows:
        assert (row.source, row.samples, row.median_us) == ("published", 0, 0.0)
        assert 0 < row.oracle_error < 1e-4
        assert row.problem.op == "w4a16"
        assert row.problem.M == m_bucket(row.problem.M)
        assert row.tile.block_k <= row.problem.group


@published
def test_a_published_table_covers_both_dtypes_and_every_group(name: str) -> None:
    rows = read(shipped_folder() / name).rows
    kinds = {(r.problem.act_dtype, r.problem.weight_type, r.problem.group) for r in rows}
    assert len(kinds) == 2 * 2 * 3
    assert {r.problem.M for r in rows} == {2**i for i in range(3, 14)}
    assert {(24576, 4096), (4096, 12288), (57344, 8192), (576, 576)} <= {
        (r.problem.N, r.problem.K) for r in rows
    }


@pytest.mark.usefixtures("only_shipped")
@pytest.mark.parametrize("arch", [arch for archs in PUBLISHED.values() for arch in archs])
def test_lookup_finds_them_without_the_chip(arch: str) -> None:
    problem = Problem("w4a16", arch, "float16", "uint4", "float", 200, 24576, 4096, 128)
    space = spec_for("w4a16", "gfx1151").space
    assert space is not None
    made = header_of(arch)  # as it was made: another compiler or kernel rightly makes rows stale
    now = replace(running("w4a16", arch), compiler=made.compiler, kernel_hash=made.kernel_hash)
    choice = lookup(problem, space(), running=now)
    assert (choice.how, choice.tile.algorithm) == ("exact", "triton")
    assert choice.row is not None
    assert choice.row.source == "published"


def header_of(arch: str) -> TableHeader:
    """The header of the published table that is valid for an arch."""
    name = next(name for name, archs in PUBLISHED.items() if arch in archs)
    return read(shipped_folder() / name).header


@pytest.mark.usefixtures("only_shipped")
def test_the_cpu_reads_no_rows_of_other_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> TileTable:
        raise AssertionError(f"{path} was read for a CPU")

    monkeypatch.setattr(tables, "load_table", refuse)
    spec = spec_for("w4a16", cpu_device().arch)
    assert spec.space is not None
    problem = Problem("w4a16", cpu_device().arch, "float32", "uint4", "float", 16, 256, 256, 64)
    assert lookup(problem, spec.space()).how == "default"


@published
def test_the_published_choice_is_what_the_ladder_says(name: str) -> None:
    """A few rows against the published ladders, written down here once more."""
    right = {
        "gfx1151.json": {
            ("float16", 256, 4096, 4096, 128): (128, 128, 32, 8, 1),
            ("float16", 4096, 24576, 4096, 32): (128, 256, 32, 8, 1),
            ("float16", 32, 28672, 4096, 128): (32, 32, 128, 4, 2),
            ("bfloat16", 32, 28672, 4096, 64): (32, 32, 64, 4, 2),
            ("bfloat16", 1024, 28672, 4096, 64): (128, 64, 64, 8, 2),
            ("float16", 128, 6144, 4096, 128): (128, 64, 128, 8, 1),
            ("float16", 256, 576, 576, 64): (128, 32, 32, 8, 1),
        },
        "gfx11.json": {("float16", 32, 4096, 4096, 128): (32, 64, 32, 4, 2)},
        "gfx12.json": {
            ("bfloat16", 16, 4096, 4096, 128): (16, 16, 128, 4, 2),
            ("float16", 512, 4096, 12288, 64): (128, 64, 64, 8, 2),
        },
        "gfx90a.json": {("float16", 64, 4096, 4096, 32): (64, 64, 32, 4, 2)},
        "gfx942.json": {("bfloat16", 64, 4096, 4096, 32): (64, 64, 32, 4, 2)},
    }[name]
    table = read(shipped_folder() / name)
    for (dtype, m, n, k, group), numbers in right.items():
        problem = Problem("w4a16", table.header.arch, dtype, "uint4", "float", m, n, k, group)
        row = table.row(problem)
        assert row is not None, problem
        fields = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
        assert tuple(row.tile.as_dict()[f] for f in fields) == numbers


@pytest.mark.slow
@published
def test_a_sample_compiles_without_spills(name: str) -> None:
    pytest.importorskip("triton")
    from tilewright.isa.compile import compile_tile
    from tilewright.isa.resources import resources

    table = read(shipped_folder() / name)
    kinds = sorted({(str(r.tile), r.problem.act_dtype) for r in table.rows})
    wanted = set(random.Random(0).sample(kinds, min(4, len(kinds))))
    seen = set()
    for row in table.rows:
        key = (str(row.tile), row.problem.act_dtype)
        if key not in wanted or key in seen:
            continue
        seen.add(key)
        for arch in table.header.valid_for:
            problem = replace(row.problem, arch=arch, N=1024, K=1024)
            for kernel in compile_tile("w4a16", problem, row.tile):
                found = resources(kernel)
                assert not found.spills
                assert not found.scratch_bytes
                assert found.programs is None or found.programs >= 1
    assert seen == wanted


@published
def test_dropped_rows_are_told_with_their_reason(name: str) -> None:
    text = json.loads((shipped_folder() / name).read_text())["header"]["notes"]
    dropped = [note for note in text if note.startswith("dropped ")]
    table = read(shipped_folder() / name)
    # A group has rows for the shapes whose K it divides: 128 does not divide K = 576.
    whole = sum(2 * 2 * 11 * sum(k % g == 0 for g in (32, 64, 128)) for k in _depths())
    assert len(table.rows) + sum(int(note.split()[1]) for note in dropped) == whole
    assert all(": " in note for note in dropped)


def _depths() -> list[int]:
    """K of every product that a table is made for."""
    return [
        2560, 4096, 2560, 9728, 4096, 4096, 4096, 12288, 5120, 8192, 5120, 25600, 4096, 14336,
        8192, 8192, 8192, 28672, 576, 576, 576, 1536,
    ]  # fmt: skip
