"""The Hopper decode kernel: layouts, workspace, and its machine code, compiled with no GPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewright.ops.w4a16.hopper_planted import DECODE_PLANTED
from tilewright.ops.w4a16.hopper_space import HOPPER_SPACE
from tilewright.tiles.tile import Problem, Tile

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_hopper_decode.py")
BASE = Tile.of(
    "hopper_decode", block_m=8, block_n=64, warps_n=1, warps_k=4, unroll=2, split_k=1,
    x_load="pairs",
)  # fmt: skip
VECTORS = BASE.replace(block_n=32, warps_k=8, split_k=2, x_load="vectors")


def job(
    tile: Tile,
    M: int = 8,
    N: int = 4096,
    K: int = 4096,
    group: int = 128,
    dtype: str = "float16",
    asym: bool = True,
) -> dict[str, Any]:
    return {
        "tile": tile.as_dict(), "M": M, "N": N, "K": K, "group": group, "dtype": dtype,
        "asym": asym,
    }  # fmt: skip


def compile_all(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(jobs), env=environment,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


JOBS = {
    "pairs": job(BASE),
    "pairs bf16": job(BASE, dtype="bfloat16"),
    "vectors": job(VECTORS),
    "16 rows": job(BASE.replace(block_m=16), M=16),
    "two warps along N": job(BASE.replace(warps_n=2, block_n=32), asym=False),
    "two groups a block": job(VECTORS, group=32),
    "one group, ragged": job(VECTORS.replace(unroll=1), M=3, N=100, K=4095, group=-1),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    return compile_all(JOBS)


@pytest.mark.parametrize("name", JOBS)
def test_nothing_spills(compiled: dict[str, dict[str, Any]], name: str) -> None:
    assert compiled[name]["error"] == ""
    assert compiled[name]["spilled"] == 0


@pytest.mark.parametrize("name", JOBS)
def test_products_of_a_step(compiled: dict[str, dict[str, Any]], name: str) -> None:
    tile = Tile.from_mapping(JOBS[name]["tile"])
    rows = tile.block_n // (16 * tile.warps_n)
    # Each k16 step once for each 16 rows of the weight, and once for the sums of x.
    assert compiled[name]["products"] == 4 * tile.unroll * (rows + 1) * tile.block_m // 8


@pytest.mark.parametrize("name", JOBS)
def test_words_are_loaded_16_bytes_at_a_time(
    compiled: dict[str, dict[str, Any]], name: str
) -> None:
    tile = Tile.from_mapping(JOBS[name]["tile"])
    rows = tile.block_n // (16 * tile.warps_n)
    # Before the loop and in it, and never through shared memory.
    assert compiled[name]["word_loads"] == 2 * tile.unroll * rows


def test_only_vectors_of_x_meet_in_the_loop(compiled: dict[str, dict[str, Any]]) -> None:
    # Warps along K meet once, when their sums are added.
    assert compiled["pairs"]["barriers"] == 1
    assert compiled["vectors"]["barriers"] >= 3


def test_grid(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled["pairs"]["grid"] == [64, 1]
    assert compiled["vectors"]["grid"] == [128, 2]
    assert compiled["one group, ragged"]["grid"] == [4, 2]


def test_planted_tiles_compile() -> None:
    jobs = {}
    for planted in DECODE_PLANTED:
        case = planted.cases[0]
        jobs[planted.name] = job(planted.tile, case.M, case.N, case.K, case.group)
    found = compile_all(jobs)
    assert {name: r["error"] for name, r in found.items()} == dict.fromkeys(jobs, "")


def _basis_vectors(layout: Any) -> list[tuple[int, ...]]:
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    return sorted(tuple(b) for b in bases if any(b))


@pytest.mark.parametrize(
    "tile",
    [
        BASE,
        VECTORS,
        BASE.replace(block_m=32, block_n=64, warps_n=4),
        BASE.replace(block_n=16, warps_k=16),
    ],
    ids=str,
)
def test_layouts_hold_every_element_once(tile: Tile) -> None:
    from tilewright.ops.w4a16 import hopper_decode_parts as parts

    along_n, along_k, blocks, mb = (
        tile.warps_n, tile.warps_k, tile.block_n // 16, tile.block_m // 8
    )  # fmt: skip
    layouts = (
        parts.words_layout(along_n, along_k, blocks),
        parts.sums_layout(along_n, along_k, blocks, mb),
        parts.loaded_layout(along_n, along_k, mb, 2 * tile.unroll),
        parts.turned_layout(along_n, along_k, mb, 2 * tile.unroll),
        parts.meeting_layout(along_n * along_k, along_k, blocks, mb),
    )
    for layout in layouts:
        expected = sorted(
            tuple(1 << i if d == dim else 0 for d in range(len(layout.shape)))
            for dim, size in enumerate(layout.shape)
            for i in range(size.bit_length() - 1)
        )
        assert _basis_vectors(layout) == expected
        assert len(layout.lane_bases) == 5
        assert 1 << len(layout.warp_bases) == tile.warps_n * tile.warps_k


def test_workspace() -> None:
    from tilewright.ops.w4a16.hopper_decode import workspace_hopper_decode

    assert workspace_hopper_decode(BASE, 8, 4096, 4096, 132) == (0, 0)
    # 4 tiles of 32 rows of the weight by 8 rows of x, in two parts.
    assert workspace_hopper_decode(VECTORS, 3, 100, 4096, 132) == (4 * 2 * 32 * 8, 4)


def defaults() -> dict[str, dict[str, Any]]:
    shapes = ((24576, 4096), (4096, 12288), (100, 4095))
    jobs = {}
    for i, (m, (n, k), group) in enumerate(
        itertools.product((1, 16, 64, 128, 512), shapes, (32, 64, 128, -1))
    ):
        if group != -1 and k % group:
            continue
        dtype, kind = ("float16", "bfloat16")[i % 2], ("uint4", "uint4b8")[i // 2 % 2]
        problem = Problem("w4a16", "sm_90", dtype, kind, "float", m, n, k, group)
        tile = HOPPER_SPACE.default(problem)
        jobs[str(problem)] = job(tile, m, n, k, group, dtype, kind == "uint4")
    return jobs


@pytest.mark.slow
def test_defaults_compile_and_do_not_spill() -> None:
    found = compile_all(defaults())
    assert {name: r for name, r in found.items() if r["error"] or r["spilled"]} == {}
