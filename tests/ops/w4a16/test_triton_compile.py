"""The Triton kernel compiled for chips that are not here; a process of its own, which compiles."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewright.ops.w4a16.triton_space import TRITON_SPACE, smem_bytes
from tilewright.tiles.tile import Problem, Tile

# Looked for, not imported: this process is the interpreter's.
if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_triton.py")
BASE = Tile.of(
    "triton",
    block_m=64,
    block_n=64,
    block_k=32,
    num_warps=4,
    num_stages=2,
    group_m=8,
    dequant="packed",
    order="xw",
)
TILES = {
    "default": BASE,
    "scalar": BASE.replace(dequant="scalar"),
    "decode": BASE.replace(block_m=16, block_k=64),
    "one stage": BASE.replace(num_stages=1),
    "deep": BASE.replace(num_stages=4, block_k=64),
    "large": BASE.replace(block_m=128, block_n=128, num_warps=8, num_stages=3),
    "wide": BASE.replace(block_m=128, block_n=256, num_warps=8, num_stages=1),
    "narrow": BASE.replace(block_n=16, block_k=64, num_warps=1),
}
ARCHS = ("gfx1151", "gfx1201", "gfx90a", "gfx942", "sm_80", "sm_90")
JOBS: dict[str, dict[str, Any]] = {
    **{f"{arch} {name}": {"arch": arch, "tile": t} for arch in ("gfx1151", "sm_90")
       for name, t in TILES.items()},
    **{f"{arch} default": {"arch": arch, "tile": BASE} for arch in ARCHS},
    "gfx90a large": {"arch": "gfx90a", "tile": TILES["large"]},
    "sm_80 wide": {"arch": "sm_80", "tile": TILES["wide"]},
    "gfx1151 bfloat16": {"arch": "gfx1151", "tile": BASE, "dtype": "bfloat16"},
    "sm_90 bfloat16": {"arch": "sm_90", "tile": BASE, "dtype": "bfloat16"},
    "sm_80 float32": {"arch": "sm_80", "tile": TILES["scalar"], "dtype": "float32"},
    "gfx942 bytes": {"arch": "gfx942", "tile": BASE, "zeros": "bytes"},
    "gfx942 symmetric": {"arch": "gfx942", "tile": BASE, "zeros": "none"},
    "gfx1151 wide offsets": {"arch": "gfx1151", "tile": BASE, "wide": True},
    "gfx1151 one group": {"arch": "gfx1151", "tile": BASE, "group": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every job's result, from one process: starting it costs more than a kernel."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    jobs = {name: {**job, "tile": job["tile"].as_dict()} for name, job in JOBS.items()}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(jobs), env=environment,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", JOBS)
def test_it_compiles(compiled, name):
    found = compiled[name]
    assert found["error"] == ""
    assert found["binary_bytes"] > 1000


@pytest.mark.parametrize("name", [name for name in JOBS if "float32" not in name])
def test_it_multiplies_on_matrix_units(compiled, name):
    arch, tile = JOBS[name]["arch"], JOBS[name]["tile"]
    unit = {"gfx1": "v_wmma_f32", "gfx9": "v_mfma_f32", "sm_8": "mma.sync", "sm_9": "wgmma"}
    # Hopper's unit takes four warps and 64 rows of the left operand.
    small = arch == "sm_90" and (tile.block_m < 64 or tile.num_warps < 4)
    assert compiled[name]["matrix"].startswith("mma.sync" if small else unit[arch[:4]])


@pytest.mark.parametrize("name", JOBS)
def test_it_never_needs_more_shared_memory_than_the_space_reckons(compiled, name):
    job = JOBS[name]
    problem = Problem(
        "w4a16_triton", job["arch"], job.get("dtype", "float16"), "uint4", "float", 512, 4096,
        4096, job.get("group", 128) or -1,
    )  # fmt: skip
    TRITON_SPACE.check(job["tile"], problem)
    assert compiled[name]["shared_bytes"] <= smem_bytes(job["tile"], problem)


@pytest.mark.parametrize(
    "name",
    [name for name in JOBS if name.startswith("gfx") and name.endswith((" default", " decode"))],
)
def test_defaults_do_not_spill_on_amd(compiled, name):
    """The rules bound accumulators, not what else a thread holds: the clock rejects the rest."""
    assert compiled[name]["spilled"] == 0


def test_64_bit_offsets_cost_something_and_are_there(compiled):
    assert compiled["gfx1151 wide offsets"]["wide_multiplies"] > 0
    assert compiled["gfx1151 default"]["wide_multiplies"] == 0


def test_a_planted_fault_leaves_no_trace_in_the_right_kernel(compiled):
    """FAULT is a constexpr: without one the kernel holds no code of any."""
    assert compiled["gfx1151 default"]["mentions_fault"] is False
