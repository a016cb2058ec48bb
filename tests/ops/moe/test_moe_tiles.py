"""Which tile serves a product of experts: defaults, rows of tables, rules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import triton_interpreter  # noqa: F401
from tilewright.device import INTERPRETER
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import BLOCK_FORMS
from tilewright.layout.experts import pack_gpu_experts
from tilewright.ops.catalog import spec_for
from tilewright.ops.choose import running
from tilewright.ops.contract import Case
from tilewright.ops.moe.gpu import tile_for
from tilewright.ops.moe.gpu_space import MOE_SPACE, default_tile
from tilewright.tiles.table import TableHeader, TableRow, TileTable, forget, pin, save_table
from tilewright.tiles.tile import Problem, Tile

TYPES = spec_for("moe", INTERPRETER).weight_types
SORTED = Tile.of("triton", block_m=16, block_n=32, block_k=64, num_warps=4, num_stages=2, group_m=8)
HOPPER = Tile.of("hopper", block_n=64, block_m=16, num_stages=3, programs=1)
GEMV = Tile.of("gemv", block_n=32, block_k=64, num_warps=4, num_stages=1)
X = torch.zeros(2, 256)
RAW = np.zeros((3, 40, 144), np.uint8)
EXPERTS = pack_gpu_experts(RAW, "Q4_K", arch=INTERPRETER)
ARCHS = ("interpreter", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "gfx1151", "gfx90a", "gfx942")


@pytest.mark.parametrize("arch", ARCHS)
def test_every_problem_has_a_default_that_obeys_the_rules(arch):
    shapes = [(1, 256), (40, 512), (768, 2048), (512, 10752)]
    for name, dtype, m, (n, k), experts in itertools.product(
        TYPES, ("float16", "float32"), (1, 16, 17, 64, 1024, 70000), shapes, (1, 8, 128, 512)
    ):
        group = 128 if name.startswith("uint4") else 0
        problem = Case("moe", name, dtype, m, n, k, group, experts=experts, top_k=1).problem(arch)
        MOE_SPACE.check(default_tile(problem, experts), problem)
        MOE_SPACE.check(MOE_SPACE.default(problem), problem)


def test_the_height_of_a_tile_follows_the_rows_of_an_expert():
    def height(slots: int, experts: int) -> int:
        problem = Case("moe", "Q4_K", "float16", slots, 768, 2048, experts=experts, top_k=1)
        return int(default_tile(problem.problem("sm_90"), experts).block_m)

    assert [height(1024, e) for e in (256, 128, 64, 32, 16, 8)] == [16, 16, 32, 64, 64, 128]
    assert tile_for(X, EXPERTS, 2, None).algorithm == "gemv"


def test_slots_are_few_by_the_number_of_experts():
    def algorithm(slots: int, experts: int, name: str = "Q4_K", dtype: str = "float16") -> str:
        group = 128 if name == "uint4" else 0
        case = Case("moe", name, dtype, slots, 768, 2048, group, experts=experts, top_k=1)
        return default_tile(case.problem("sm_90"), experts).algorithm

    assert [algorithm(s, 128) for s in (1, 191, 192)] == ["slots", "slots", "hopper"]
    assert [algorithm(s, 4) for s in (16, 17)] == ["slots", "hopper"]
    assert algorithm(8, 128, "uint4") == algorithm(8, 128, dtype="float32") == "gemv"
    assert tile_for(X, EXPERTS, 2, SORTED) is SORTED


def test_a_tables_last_row_serves_as_many_slots_as_its_tile_can():
    problem = Problem("moe", INTERPRETER, "float32", "Q4_K", "float", 8192, 40, 256, 0)
    tile = Tile.of("gemv", block_n=8, block_k=256, num_warps=4, num_stages=1)
    with pin({problem: tile}):
        assert tile_for(X, EXPERTS, 8192, None) is tile
        assert tile_for(X, EXPERTS, 65535, None) is tile
        assert tile_for(X, EXPERTS, 65536, None).algorithm == "triton"


def test_a_tile_tuned_with_other_experts_does_not_serve_another_default(tmp_path, monkeypatch):
    now = running("moe", INTERPRETER)
    plain = Problem("moe", INTERPRETER, "float32", "Q4_K", "float", 64, 40, 256, 0)
    tile = Tile.of("triton", block_m=16, block_n=64, block_k=32, num_warps=4, num_stages=1,
                   group_m=1)  # fmt: skip

    def chosen(source: str, slots: int, experts: int) -> Tile:
        header = TableHeader(
            INTERPRETER, (INTERPRETER,), 1, "test", now.compiler, now.kernel_hash,
            {"moe": now.op_version}, "2026-01-01T00:00:00+00:00", "test",
        )  # fmt: skip
        row = TableRow(plain, tile, 10.0, 0.1, 9, 1e-7, 3, {}, source)
        save_table(tmp_path / f"{INTERPRETER}.json", TileTable(header, (row,)))
        forget()
        packed = pack_gpu_experts(np.zeros((experts, 40, 144), np.uint8), "Q4_K", arch=INTERPRETER)
        return tile_for(X, packed, slots, None)

    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    monkeypatch.setattr("tilewright.tiles.table.local_units", lambda arch: 1)
    try:
        # Of 128 experts and of 100 the default has 16 rows; of 2 it has 32 or 64.
        for slots in (64, 33, 128):  # the row's own bucket, and near it
            assert chosen("tuned", slots, 128) == chosen("tuned", slots, 100) == tile
            assert chosen("tuned", slots, 2) == default_tile(replace(plain, M=slots), 2) != tile
        assert chosen("published", 64, 2) == tile  # measured against no default
    finally:
        forget()


@pytest.mark.parametrize(
    ("arch", "name", "m", "change", "rule"),
    [
        ("gfx1151", "Q4_K", 64, {"num_stages": 2}, "loads ahead"),
        ("sm_90", "uint4", 64, {"block_k": 256}, None),
        ("sm_80", "Q4_K", 64, {"block_n": 128, "block_k": 256}, "registers"),
        ("sm_75", "Q8_0", 64,
         {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 5},
         "shared memory"),
    ],
)  # fmt: skip
def test_a_rule_and_what_breaks_it(arch, name, m, change, rule):
    group = 128 if name == "uint4" else 0
    problem = Case("moe", name, "float16", m, 512, 1024, group, experts=4, top_k=1).problem(arch)
    tile = SORTED.replace(num_stages=1).replace(**change)
    found = MOE_SPACE.broken_rule(tile, problem)
    assert (None if found is None else found.name) == rule


def test_rules_of_groups_and_of_few_slots():
    odd = Case("moe", "uint4", "float16", 64, 512, 960, 96, experts=4, top_k=1).problem("sm_90")
    found = MOE_SPACE.broken_rule(SORTED, odd)
    assert found is not None
    assert found.name == "whole groups"
    assert MOE_SPACE.broken_rule(SORTED.replace(block_k=32, num_stages=1), odd) is None
    many = Case("moe", "Q4_K", "float16", 65536, 512, 1024, experts=4, top_k=1).problem("sm_90")
    found = MOE_SPACE.broken_rule(GEMV, many)
    assert found is not None
    assert found.name == "few slots"


@pytest.mark.parametrize("name", BLOCK_FORMS)
def test_the_space_knows_which_experts_lie_below_each_other(name):
    """`hopper` refuses the others, so that the gate may not ask for them."""
    block = BLOCK_TYPES[name].block_size
    found = set()
    for n, k in itertools.product((40, 63, 64, 65), (block, 7 * block, 8 * block)):
        experts = pack_gpu_experts(
            np.zeros((2, n, BLOCK_TYPES[name].row_bytes(k)), np.uint8), name, arch="sm_90"
        )
        problem = Case("moe", name, "float16", 64, n, k, experts=2, top_k=1).problem("sm_90")
        serves = MOE_SPACE.broken_rule(HOPPER, problem) is None
        assert serves == experts.is_stacked, (n, k)
        found.add(serves)
    assert True in found
