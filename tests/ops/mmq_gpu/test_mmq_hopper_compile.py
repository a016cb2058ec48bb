"""mmq's Hopper kernel compiled for sm_90 with no GPU; a process of its own compiles it."""

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
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.ops.mmq.hopper_space import FIELDS, smem_bytes
from tilewright.tiles.tile import Problem, Tile

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_mmq_hopper.py")


def tile(block_n: int = 128, block_m: int = 256, **rest: int) -> Tile:
    fields = {"num_stages": 3, "w_stages": 2, "split_k": 1, "group_m": 4, **rest}
    return Tile.of("hopper", block_n=block_n, block_m=block_m, **fields)


def job(name: str, of: Tile, dtype: str = "float16", m: int = 512, n: int = 512) -> dict[str, Any]:
    return {"type": name, "tile": of, "dtype": dtype, "m": m, "n": n}


# A type of every kind of words, numbers and arithmetic.
JOBS = {
    "Q4_K": job("Q4_K", tile()),
    "Q6_K": job("Q6_K", tile(block_m=128, num_stages=4)),
    "Q8_0 bf16": job("Q8_0", tile(), "bfloat16"),
    "Q5_1, y not in 16 bytes": job("Q5_1", tile(block_m=64), n=500),
    "IQ4_XS, few rows": job("IQ4_XS", tile(64, 16, num_stages=4), m=16),
    "Q2_K in shares": job("Q2_K", tile(block_m=128, split_k=2), m=130),
    "Q4_K in shares": job("Q4_K", tile(num_stages=4, w_stages=4, split_k=2)),
    "Q4_K cut evenly": job("Q4_K", tile(num_stages=4, w_stages=4, split_k=0)),
}
MORE = {"Q8_0 bf16", "IQ4_XS, few rows", "Q4_K in shares"}  # slow
# Every type with every size of tile, in both dtypes.
SLOW = {
    f"{name} {n}x{m} {dtype}": job(name, tile(n, m), dtype)
    for name, n, m, dtype in itertools.product(
        BLOCK_TYPES, FIELDS["block_n"], FIELDS["block_m"], ("float16", "bfloat16")
    )
}


def compile_all(jobs: dict[str, dict[str, Any]], cache: Path) -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    jobs = {name: {**one, "tile": one["tile"].as_dict()} for name, one in jobs.items()}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(jobs), env=environment,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def hold(name: str, one: dict[str, Any], found: dict[str, Any]) -> None:
    assert found["error"] == "", name
    assert found["warnings"] == [], name  # wgmma that ptxas serialized
    assert found["overwritten"] == [], name
    assert sum(found["spilled"]) == 0, name
    assert found["from_registers"] >= 8, name
    assert found["from_shared"] == 0, name
    problem = Problem("mmq", "sm_90", one["dtype"], one["type"], "float", one["m"], 512, 1024, 0)
    assert found["shared_bytes"] <= smem_bytes(one["tile"], problem), name


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return in_two_runs(SCRIPT, JOBS, MORE, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", some_slow(JOBS, MORE))
def test_weights_stay_in_registers(compiled: Mapping[str, dict[str, Any]], name: str) -> None:
    hold(name, JOBS[name], compiled[name])


def test_programs_are_as_many_as_multiprocessors_or_pieces(
    compiled: Mapping[str, dict[str, Any]],
) -> None:
    assert compiled["Q4_K"]["grid"] == [8]
    assert compiled["Q2_K in shares"]["grid"] == [16]
    assert compiled["Q4_K cut evenly"]["grid"] == [32]  # as many as steps


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_size_of_tile_keeps_weights_in_registers(name: str, tmp_path: Path) -> None:
    jobs = {key: one for key, one in SLOW.items() if one["type"] == name}
    assert len(jobs) == 20
    for key, found in compile_all(jobs, tmp_path).items():
        hold(key, jobs[key], found)
