"""mmq's Triton kernels compiled for chips that are not here; a process of its own compiles them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from job_process import in_two_runs, some_slow
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.ops.contract import Case
from tilewright.ops.mmq.triton_space import default_triton, smem_bytes
from tilewright.tiles.tile import Problem

# Looked for, not imported: this process is the interpreter's.
if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_mmq.py")
ARCHS = ("sm_90", "sm_80", "gfx1151", "gfx90a", "gfx942")
BATCHES = (8, 32, 48, 512)  # the four defaults of an arch for numbers of 16 bits


def job(arch: str, name: str, m: int, dtype: str = "float16", **more: Any) -> dict[str, Any]:
    """The default tile of a product of 512 columns; compiled for 512 columns of K = 1024."""
    problem = Case("mmq", name, dtype, m, 512, 1024).problem(arch)
    tile = default_triton(problem)
    return {"arch": arch, "type": name, "m": m, "dtype": dtype, "tile": tile, **more}


JOBS: dict[str, dict[str, Any]] = {
    **{
        f"{arch} {name} M={m}": job(arch, name, m)
        for arch in ARCHS
        for i, name in enumerate(BLOCK_TYPES)
        for j, m in enumerate(BATCHES)
        if i % len(BATCHES) == j or name == "Q4_K"
    },
    **{
        f"{arch} {name} {dtype} M={m}": job(arch, name, m, dtype)
        for arch in ARCHS
        for name, dtype, m in (
            ("Q6_K", "bfloat16", 512), ("Q4_K", "float32", 8), ("Q3_K", "float32", 48),
        )
    },
    "gfx1151 wide offsets": job("gfx1151", "Q4_K", 48, wide=True),
    "sm_90 one output": job("sm_90", "Q4_K", 1, n=1),  # Triton makes constants of sizes of 1
    "gfx942 one output": job("gfx942", "Q5_0", 1, n=1),
}  # fmt: skip

QUICK = {"sm_80 Q4_K M=512", "gfx90a Q6_K bfloat16 M=512", "gfx942 Q4_K M=32", "gfx942 one output"}
SLOW = {n for n, job in JOBS.items() if job["arch"] not in ("sm_90", "gfx1151")} - QUICK


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return in_two_runs(SCRIPT, JOBS, SLOW, tmp_path_factory.mktemp("triton"))


by_job = pytest.mark.parametrize("name", some_slow(JOBS, SLOW))


@by_job
def test_it_compiles_and_does_not_spill(compiled, name):
    found = compiled[name]
    assert found["error"] == ""
    assert found["binary_bytes"] > 1000
    assert found["spilled"] == 0


@pytest.mark.parametrize("name", some_slow([n for n in JOBS if "float32" not in n], SLOW))
def test_it_multiplies_on_matrix_units(compiled, name):
    arch, tile = JOBS[name]["arch"], JOBS[name]["tile"]
    unit = {"gfx1": "v_wmma_f32", "gfx9": "v_mfma_f32", "sm_8": "mma.sync", "sm_9": "wgmma"}
    # Hopper's unit takes four warps and 64 rows of the left operand, which is w.
    small = arch == "sm_90" and (tile.block_n < 64 or tile.num_warps < 4)
    assert compiled[name]["matrix"].startswith("mma.sync" if small else unit[arch[:4]])


@by_job
def test_no_product_waits_for_the_one_before(compiled, name):
    assert compiled[name]["serialized"] == []


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("sm_90")])
def test_no_weight_is_written_while_a_product_reads_it(compiled, name):
    assert compiled[name]["overwritten"] == []


@by_job
def test_it_never_needs_more_shared_memory_than_the_space_reckons(compiled, name):
    job = JOBS[name]
    problem = Problem(
        "mmq", job["arch"], job["dtype"], job["type"], "float", job["m"], 512, 1024, 0
    )
    assert compiled[name]["shared_bytes"] <= smem_bytes(job["tile"], problem)


@pytest.mark.parametrize("name", ["sm_90 Q4_K M=8", "gfx1151 Q4_K M=8", "gfx942 Q4_K M=32"])
def test_shares_are_summed_by_a_second_kernel(compiled, name):
    assert JOBS[name]["tile"].split_k > 1
    assert compiled[name]["kernels"] == ["_mmq_kernel", "_sum_kernel"]
    assert compiled["sm_90 Q4_K M=512"]["kernels"] == ["_mmq_kernel"]


def test_64_bit_offsets_cost_something_and_are_there(compiled):
    narrow = compiled["gfx1151 Q4_K M=48"]["wide_multiplies"]
    assert compiled["gfx1151 wide offsets"]["wide_multiplies"] > narrow == 0


def test_a_planted_fault_leaves_no_trace_in_the_right_kernel(compiled):
    """FAULT is a constexpr: without one the kernel holds no code of any."""
    assert compiled["gfx1151 Q4_K M=48"]["mentions_fault"] is False
