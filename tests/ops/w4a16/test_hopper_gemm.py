"""The Hopper GEMM: how a tile covers a problem, and its machine code, compiled with no GPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from job_process import in_two_runs, some_slow
from tilewright.tiles.tile import Tile

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_hopper_gemm.py")
SIZES = [(n, m) for n in (64, 128, 256) for m in (16, 32, 64, 128, 256) if n * m <= 32768]


def stages(n: int, m: int, k: int, ctas: int) -> int:
    """The most steps, up to 6, whose buffers fit shared memory beside a tile of y."""
    step = k // 64 * (m * 128 + n * 32 + n * 4 + max(128, n)) + 16
    return min(6, (228 * 1024 // ctas - 2048 - n * m * 2) // step)


def job(block_n: int, block_m: int, **rest: Any) -> dict[str, Any]:
    fields = {"block_n": block_n, "block_m": block_m, "block_k": 64, "ctas": 1}
    return {**fields, "num_stages": stages(block_n, block_m, 64, 1), **rest}


JOBS: dict[str, dict[str, Any]] = {
    "prefill whole tiles": job(128, 256, cut=False, bias=False),
    "prefill": job(128, 256),
    "prefill bf16": job(128, 256, dtype="bf16"),
    "tall bf16 two groups": job(256, 128, dtype="bf16", groups=2),
    "two groups masked": job(128, 256, groups=2, tma_y=False),
    "symmetric": job(64, 64, asym=False),
    "small": job(64, 16, groups=2),
    "long steps": job(128, 128, block_k=128, num_stages=3),
    "long steps, four groups": job(64, 64, block_k=128, num_stages=3, groups=4),
    "two programs": job(128, 64, block_k=128, num_stages=2, groups=2, ctas=2),
    "one group": job(128, 128, group_steps=0),
    "parts in bfloat16": job(64, 64, partials="bf16"),  # planted: `hopper_planted`
}
MORE = {  # slow
    "prefill whole tiles", "prefill bf16", "two groups masked", "long steps, four groups",
    "one group",
}  # fmt: skip
# Every size, in both steps of K and as one program of a multiprocessor or two, at its most stages.
SLOW = {
    f"{n}x{m} block_k={k} ctas={ctas} {dtype}": job(
        n, m, block_k=k, num_stages=stages(n, m, k, ctas), ctas=ctas, dtype=dtype,
        groups=1 if dtype == "fp16" else k // 32, asym=dtype == "fp16",
    )
    for (n, m), k, ctas, dtype in itertools.product(SIZES, (64, 128), (1, 2), ("fp16", "bf16"))
    if n * m <= (32768, 8192)[ctas - 1] and stages(n, m, k, ctas) >= 2
}  # fmt: skip


def compile_all(jobs: dict[str, dict[str, Any]], cache: Path) -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(jobs), env=environment,
        capture_output=True, text=True, timeout=290,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def hold(name: str, job: dict[str, Any], found: dict[str, Any]) -> None:
    assert found["error"] == "", name
    assert found["warnings"] == [], name  # wgmma that ptxas serialized
    assert found["spilled"] == [0], name
    assert found["registers_a"] >= 4, name
    assert found["shared_a"] == 0, name
    # Only y goes to shared memory by a store; the weights never do.
    assert found["stores_to_shared"] <= int(job.get("tma_y", True)), name


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return in_two_runs(SCRIPT, JOBS, MORE, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", some_slow(JOBS, MORE))
def test_weights_stay_in_registers(compiled: Mapping[str, dict[str, Any]], name: str) -> None:
    hold(name, JOBS[name], compiled[name])


@pytest.mark.parametrize("name", some_slow(JOBS, MORE))
def test_shared_memory_is_within_what_the_space_is_told(
    compiled: Mapping[str, dict[str, Any]], name: str
) -> None:
    from tilewright.ops.w4a16.hopper_gemm import smem_hopper

    one = JOBS[name]
    fields = ("block_n", "block_m", "block_k", "num_stages")
    tile = Tile.of("hopper", **{field: one[field] for field in fields})
    assert compiled[name]["shared_bytes"] <= smem_hopper(tile) <= 227 * 1024 // one["ctas"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("rows", [64, 128, 256])
def test_every_size_of_tile_keeps_weights_in_registers(
    rows: int, dtype: str, tmp_path: Path
) -> None:
    jobs = {n: one for n, one in SLOW.items() if (one["block_n"], one["dtype"]) == (rows, dtype)}
    assert len(jobs) >= 12
    for name, found in compile_all(jobs, tmp_path).items():
        hold(name, jobs[name], found)


BASE = Tile.of(
    "hopper", block_n=128, block_m=256, block_k=64, num_stages=4, split_k=1, ctas=1,
    group_m=4,
)  # fmt: skip
SHAPES = [(1, 97, 100), (300, 1024, 4096), (1024, 6144, 4096), (1000, 24576, 64), (4096, 4096, 288)]


def items(tile: Tile, m: int, n: int, k: int, units: int) -> list[list[tuple[int, int, int]]]:
    """What each program sums, in its order, as (tile, first step, end): the kernel's walk."""
    from tilewright.ops.w4a16.hopper_gemm import _plan

    plan = _plan(tile, m, n, k, units)
    tiles, steps = tiles_of(tile, m, n), -(-k // tile.block_k)
    found = []
    for program in range(plan.programs):
        parts: list[tuple[int, int, int]] = []
        if program < plan.sharers:
            start = program * plan.cut * steps // plan.sharers
            end = (program + 1) * plan.cut * steps // plan.sharers
            for t in reversed(range(start // steps, -(-end // steps))):
                first, last = max(start, t * steps), min(end, (t + 1) * steps)
                parts.append((t, first - t * steps, last - t * steps))
        late = parts[-1:] if parts and parts[-1][1] > 0 and parts[-1][2] == steps else []
        whole = [(t, 0, steps) for t in range(plan.cut + program, tiles, plan.programs)]
        found.append(parts[: len(parts) - len(late)] + whole + late)
    return found


def tiles_of(tile: Tile, m: int, n: int) -> int:
    return int(-(-m // tile.block_m) * -(-n // tile.block_n))


@pytest.mark.parametrize("split_k", [0, 1, 2, 3, 8])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=lambda v: str(v))
def test_a_plan_sums_every_step_of_every_tile_once(m: int, n: int, k: int, split_k: int) -> None:
    tile, steps = BASE.replace(split_k=split_k), -(-k // 64)
    pieces: dict[int, list[tuple[int, int]]] = {}
    for mine in items(tile, m, n, k, 132):
        for t, first, last in mine:
            pieces.setdefault(t, []).append((first, last))
    tiles = tiles_of(tile, m, n)
    assert sorted(pieces) == list(range(tiles))
    for found in map(sorted, pieces.values()):
        assert found[0][0] == 0
        assert found[-1][1] == steps
        assert all(a < b for a, b in found)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
        if split_k:
            assert len(found) == (min(split_k, steps) if tiles < 132 else 1)


@pytest.mark.parametrize(
    ("m", "n", "k", "most"),
    [
        (512, 6144, 4096, 47),
        (1024, 6144, 4096, 96),
        (512, 4096, 12288, 94),
        (256, 24576, 12288, 280),
    ],
    ids=lambda v: str(v),
)
def test_cut_tiles_share_the_work_of_the_last_round(m: int, n: int, k: int, most: int) -> None:
    """Whole tiles take 64, 128, 192 and 384 steps; equal shares are 46.5, 93.1, 93.1 and 279.3."""
    sums = [sum(b - a for _, a, b in mine) for mine in items(BASE.replace(split_k=0), m, n, k, 132)]
    assert max(sums) <= most


@pytest.mark.parametrize("split_k", [0, 2, 3, 8])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=lambda v: str(v))
def test_a_program_leaves_one_part_at_most_and_leaves_it_first(
    m: int, n: int, k: int, split_k: int
) -> None:
    """One slot of the workspace is enough for each, and who waits for parts waits for programs of
    lower numbers, none of which waits before it has left its own."""
    from tilewright.ops.w4a16.hopper_gemm import _plan, workspace_hopper

    tile, steps = BASE.replace(split_k=split_k), -(-k // 64)
    plan = _plan(tile, m, n, k, 132)
    left: dict[int, tuple[int, int]] = {}
    for program, mine in enumerate(items(tile, m, n, k, 132)):
        unfinished = [item for item in mine if item[2] < steps]
        assert unfinished in ([], mine[:1])
        for t, first, _ in unfinished:
            left[program] = (t, first)
        waiting = [item for item in mine if item[1] > 0 and item[2] == steps]
        assert waiting in ([], mine[-1:])
        for t, _, _ in waiting:
            first = ((t * steps + 1) * plan.sharers - 1) // (plan.cut * steps)
            added = [left[p] for p in range(first, program)]
            assert added == sorted(part for part in left.values() if part[0] == t)
            assert added[0] == (t, 0)
    if left:
        floats, counters = workspace_hopper(tile, m, n, k, 132)
        assert max(left) < floats // (128 * 256)
        assert counters == plan.cut


def test_workspace_is_asked_for_only_when_tiles_are_cut() -> None:
    from tilewright.ops.w4a16.hopper_gemm import workspace_hopper

    assert workspace_hopper(BASE, 1024, 6144, 4096, 132) == (0, 0)
    floats, counters = workspace_hopper(BASE.replace(split_k=3), 300, 1024, 4096, 132)
    assert (floats, counters) == (48 * 128 * 256, 16)
    floats, counters = workspace_hopper(BASE.replace(split_k=0), 1024, 6144, 4096, 132)
    assert (floats, counters) == (120 * 128 * 256, 60)
    floats, counters = workspace_hopper(
        BASE.replace(split_k=0, ctas=2, block_m=64, block_k=128), 128, 4096, 4096, 132
    )
    assert (floats, counters) == (264 * 128 * 64, 64)
