"""The tables that come with the package: whole, legal, of these kernels, and found by lookup."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from isa.compiling import HAS_TRITON, NO_TRITON, Job, run_jobs
from tilewright.device import cpu_device
from tilewright.isa.compile import space_for
from tilewright.ops.catalog import spec_for
from tilewright.ops.choose import running
from tilewright.ops.space import TileSpace
from tilewright.tiles import table as tables
from tilewright.tiles.table import (
    Choice,
    Running,
    TableRow,
    TileTable,
    load_table,
    lookup,
    shipped_folder,
)
from tilewright.tiles.tile import Problem, Tile, m_bucket

FILES = sorted(shipped_folder().glob("*.json"))
PUBLISHED = {
    "gfx1151.json": ("gfx1151",),
    "gfx11.json": ("gfx1100", "gfx1101"),
    "gfx12.json": ("gfx1201", "gfx1200"),
    "gfx90a.json": ("gfx90a",),
    "gfx942.json": ("gfx942",),
}

OPS = ("w4a16", "mmq", "moe", "ssd")

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
    for row in table.rows:
        assert (row.source, row.samples, row.median_us) == ("published", 0, 0.0)
        assert 0 < row.oracle_error < 1e-4
        assert row.problem.op in OPS
        assert row.problem.M == m_bucket(row.problem.M)
        if row.problem.op == "w4a16":
            assert row.tile.block_k <= row.problem.group
    assert {note.partition(": ")[0] for note in header.notes} == set(header.op_versions)
    for op in header.op_versions:
        assert any(
            note.startswith(f"{op}: ") and "never timed by this package" in note
            for note in header.notes
        )


@published
def test_a_published_table_covers_both_dtypes_and_every_group(name: str) -> None:
    rows = rows_of(name, "w4a16")
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
    choice = lookup(problem, space(), running=as_made("w4a16", arch))
    assert (choice.how, choice.tile.algorithm) == ("exact", "triton")
    assert choice.row is not None
    assert choice.row.source == "published"


def as_made(op: str, arch: str) -> Running:
    """The kernels of the table that is valid for an arch: others rightly make its rows stale."""
    name = next(name for name, archs in PUBLISHED.items() if arch in archs)
    header = read(shipped_folder() / name).header
    return replace(running(op, arch), compiler=header.compiler, kernel_hash=header.hash_of(op))


def rows_of(name: str, op: str) -> list[TableRow]:
    return [row for row in read(shipped_folder() / name).rows if row.problem.op == op]


def chosen(
    op: str, arch: str, kind: str, activations: str, m: int, n: int, k: int, group: int = 0
) -> Choice:
    """What lookup answers in float16, by the kernels that the table was made with."""
    problem = Problem(op, arch, "float16", kind, activations, m, n, k, group)
    space = space_for(op, arch)
    assert space is not None
    return lookup(problem, space, running=as_made(op, arch))


# llama.cpp's tables and the study of it, written down here once more: rows of the weight, warps and
# schedule of a tile for 32 rows of x, and for 64 and more.
GGUF_TILES = {
    "gfx90a": ((64, 4), (64, 4), "data-parallel"),
    "gfx942": ((128, 8), (128, 8), "stream-k"),
    "gfx1151": ((64, 4), (128, 8), "data-parallel"),
    "gfx1100": ((64, 4), (128, 8), "data-parallel"),
    "gfx1201": ((64, 4), (64, 4), "data-parallel"),
}


@pytest.mark.usefixtures("only_shipped")
@pytest.mark.parametrize("arch", GGUF_TILES)
def test_products_in_8_bits_get_the_published_tile(arch: str) -> None:
    few, many, schedule = GGUF_TILES[arch]
    for kind in ("Q4_K", "Q5_0", "Q8_0", "MXFP4"):
        for m, rows, step in ((20, 32, few), (64, 64, many), (500, 64, many), (9000, 64, many)):
            found = chosen("mmq", arch, kind, "int8", m, 6144, 4096)
            tile = found.tile
            assert found.how == "near" or found.note.startswith("as in the row of mmq")
            assert (tile.algorithm, tile.block_m, tile.schedule) == ("int8", rows, schedule)
            assert (tile.block_n, tile.num_warps) == step


@pytest.mark.usefixtures("only_shipped")
@pytest.mark.parametrize("arch", GGUF_TILES)
def test_what_nothing_is_published_of_gets_the_default(arch: str) -> None:
    """Activations as they are, up to 8 rows of x, and up to 8 tokens of 8 experts each."""
    assert chosen("mmq", arch, "Q4_K", "float", 512, 4096, 4096).how == "default"
    assert chosen("mmq", arch, "Q4_K", "int8", 8, 4096, 4096).how == "default"
    assert chosen("moe", arch, "Q4_K", "float", 64, 768, 2048).how == "default"
    assert chosen("ssd", arch, "p64", "float", 64, 8192, 128, 16).how == "default"


@pytest.mark.usefixtures("only_shipped")
@pytest.mark.parametrize("arch", GGUF_TILES)
def test_a_mixture_gets_tiles_by_the_rows_of_an_expert(arch: str) -> None:
    """2048 slots are 16 rows for each of Qwen3-30B-A3B's 128 experts, 8192 are 64."""
    few, many, _ = GGUF_TILES[arch]
    for slots, rows, step in ((2048, 16, few), (4096, 32, few), (8192, 64, many)):
        found = chosen("moe", arch, "Q4_K", "float", slots, 1536, 2048)
        assert found.how == "exact"
        assert (found.tile.algorithm, found.tile.block_m) == ("triton", rows)
        assert (found.tile.block_n, found.tile.num_warps) == step


@pytest.mark.usefixtures("only_shipped")
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1151"])
def test_scans_go_in_chunks_of_128_tokens(arch: str) -> None:
    for kind, n, group in (("p64", 8192, 16), ("p80", 10240, 16), ("p64", 5120, 80)):
        for m in (200, 4096, 16384):
            found = chosen("ssd", arch, kind, "float", m, n, 128, group)
            assert found.row is not None
            assert (found.row.source, found.tile.chunk) == ("published", 128)


@pytest.mark.parametrize("name", ["gfx11.json", "gfx12.json"])
def test_no_chunk_is_published_for_other_chips(name: str) -> None:
    assert rows_of(name, "ssd") == []


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
@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
@published
def test_a_sample_compiles_without_spills(name: str) -> None:
    table = read(shipped_folder() / name)
    kinds = sorted({_kind(row) for row in table.rows})
    wanted = {kind for op in OPS for kind in _some([k for k in kinds if k[0] == op])}
    jobs, seen = {}, set()
    for row in table.rows:
        key = _kind(row)
        if key not in wanted or key in seen:
            continue
        seen.add(key)
        p = row.problem
        n, k = (p.N, p.K) if p.op == "ssd" else (1024, 1024)
        for arch in table.header.valid_for:
            jobs[f"{key} {arch}"] = Job(
                arch, str(row.tile), p.act_dtype, p.weight_type, p.M, n, k, p.group, p.op,
                p.activations,
            )  # fmt: skip
    assert seen == wanted
    for job, entry in run_jobs(jobs).items():
        assert not entry["error"], job
        assert entry["kernels"], job
        for kernel in entry["kernels"]:
            found = kernel["resources"]
            assert not found["spills"], job
            assert not found["scratch_bytes"], job
            assert found["programs"] is None or found["programs"] >= 1, job


def _kind(row: TableRow) -> tuple[str, str, str, str]:
    """What is compiled anew: of products, whichever type of weight comes first."""
    problem = row.problem
    return (problem.op, str(row.tile), problem.act_dtype, problem.weight_type)


def _some(kinds: list[tuple[str, str, str, str]]) -> list[tuple[str, str, str, str]]:
    few = 4 if kinds and kinds[0][0] == "w4a16" else 2
    return random.Random(0).sample(kinds, min(few, len(kinds)))


@published
def test_dropped_rows_are_told_with_their_reason(name: str) -> None:
    text = json.loads((shipped_folder() / name).read_text())["header"]["notes"]
    # A group has rows for the shapes whose K it divides: 128 does not divide K = 576.
    whole = {
        "w4a16": sum(2 * 2 * 11 * sum(k % g == 0 for g in (32, 64, 128)) for k in _depths()),
        "mmq": 13 * 4 * 2 * 5,  # types, shapes, dtypes, buckets of M
        "moe": 2 * 3 * 2 * 6,
        "ssd": 5 * 2 * 6 if name in ("gfx90a.json", "gfx942.json", "gfx1151.json") else 0,
    }
    for op, rows in whole.items():
        dropped = [note for note in text if note.startswith(f"{op}: dropped ")]
        lost = sum(int(note.split()[2]) for note in dropped)
        assert len(rows_of(name, op)) + lost == rows
        assert all(note.count(": ") > 1 for note in dropped)


def _depths() -> list[int]:
    """K of every product that a table is made for."""
    return [
        2560, 4096, 2560, 9728, 4096, 4096, 4096, 12288, 5120, 8192, 5120, 25600, 4096, 14336,
        8192, 8192, 8192, 28672, 576, 576, 576, 1536,
    ]  # fmt: skip
