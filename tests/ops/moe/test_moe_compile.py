"""moe's Triton kernels compiled for chips that are not here; a process of its own compiles them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from job_process import in_two_runs, some_slow
from tilewright.layout.blocks import BLOCK_FORMS
from tilewright.ops.contract import Case
from tilewright.ops.moe.gpu_space import default_tile, smem_bytes
from tilewright.tiles.tile import Problem

# Looked for, not imported: this process is the interpreter's.
if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_moe.py")


def problem(arch: str, name: str, slots: int, dtype: str = "float16") -> Problem:
    group = 128 if name.startswith("uint4") else 0
    case = Case("moe", name, dtype, slots, 512, 1024, group, experts=64, top_k=1)
    return case.problem(arch)


def job(arch: str, name: str, slots: int, dtype: str = "float16", **more: Any) -> dict[str, Any]:
    """The default tile where 64 experts share so many slots."""
    tile = default_tile(problem(arch, name, slots, dtype), 64)
    return {"arch": arch, "type": name, "slots": slots, "dtype": dtype, "tile": tile, **more}


JOBS: dict[str, dict[str, Any]] = {
    **{
        f"sm_90 {name} slots={slots}": job("sm_90", name, slots)
        for i, name in enumerate(("Q4_K", "Q6_K", "Q3_K", "Q2_K", "Q5_1", "Q8_0", "MXFP4", "uint4"))
        for slots in ((8, 512, 4096) if name == "Q4_K" else ((8, 512, 4096)[i % 3],))
    },
    **{
        f"sm_90 {name} slots={8 << (3 * (i % 2))} {dtype}": job(
            "sm_90", name, 8 << (3 * (i % 2)), dtype
        )
        for i, name in enumerate(BLOCK_FORMS)
        for dtype in (("float16", "bfloat16")[i // 2 % 2],)
    },
    **{
        f"{arch} {name} slots={slots}": job(arch, name, slots)
        for arch in ("sm_80", "gfx1151", "gfx942")
        for name, slots in (("Q4_K", 8), ("IQ4_XS", 512))
    },
    "sm_90 Q4_K bfloat16": job("sm_90", "Q4_K", 512, "bfloat16"),
    "gfx90a Q5_0 float32": job("gfx90a", "Q5_0", 512, "float32"),
    "sm_90 Q4_K fused": job("sm_90", "Q4_K", 4096, act="silu"),
    "sm_90 uint4 fused": job("sm_90", "uint4", 8, act="silu"),
    "gfx1151 Q4_K fused": job("gfx1151", "Q4_K", 512, act="gelu"),
    "sm_90 dense slots=8": job("sm_90", "dense", 8),
    "sm_90 dense fused": job("sm_90", "dense", 512, act="silu"),
    "gfx942 dense bfloat16": job("gfx942", "dense", 4096, "bfloat16"),
}  # fmt: skip
# Further types of the same path, and chips beside sm_90 and gfx1151; of each path some are quick.
SLOW = {
    name
    for name in JOBS
    if name.startswith(("sm_80", "gfx942")) or name.endswith(("float16", "bfloat16"))
} | {
    "sm_90 Q4_K slots=512", "sm_90 Q3_K slots=4096", "sm_90 Q5_1 slots=512",
    "sm_90 Q8_0 slots=4096", "sm_90 Q2_K slots=8",
}  # fmt: skip
SLOW -= {
    "sm_90 Q4_1 slots=64 float16", "sm_90 Q3_K slots=8 bfloat16", "gfx942 Q4_K slots=8",
    "sm_80 IQ4_XS slots=512",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return in_two_runs(SCRIPT, JOBS, SLOW, tmp_path_factory.mktemp("triton"))


by_job = pytest.mark.parametrize("name", some_slow(JOBS, SLOW))


@by_job
def test_it_compiles_and_does_not_spill(compiled, name):
    found = compiled[name]
    assert found["error"] == ""
    # Two programs of 64 rows keep one value aside while they store, outside of every loop.
    tile = JOBS[name]["tile"]
    tight = tile.algorithm == "hopper" and (tile.block_m, tile.programs) == (64, 2)
    assert found["spilled"] <= (4 if tight else 0)


@by_job
def test_sorted_slots_go_to_matrix_units(compiled, name):
    arch, tile = JOBS[name]["arch"], JOBS[name]["tile"]
    if tile.algorithm in ("gemv", "slots"):
        assert compiled[name]["matrix"] == ("mma.sync" if tile.algorithm == "slots" else "")
        assert len(compiled[name]["kernels"]) == 2  # the product, and that which adds choices up
        return
    sorting = "_scatter_kernel" if tile.algorithm == "hopper" else "_route_kernel"
    assert compiled[name]["kernels"][0] == sorting
    unit = {"gfx1": "v_wmma_f32", "gfx9": "v_mfma_f32", "sm_8": "mma.sync", "sm_9": "wgmma"}
    if JOBS[name]["dtype"] != "float32":
        assert compiled[name]["matrix"].startswith(unit[arch[:4]])


@by_job
def test_no_product_waits_for_the_one_before(compiled, name):
    assert compiled[name]["serialized"] == []


@by_job
def test_it_never_needs_more_shared_memory_than_the_space_reckons(compiled, name):
    job = JOBS[name]
    if job["tile"].algorithm in ("gemv", "slots"):
        return
    reckoned = smem_bytes(
        job["tile"], problem(job["arch"], job["type"], job["slots"], job["dtype"])
    )
    assert compiled[name]["shared_bytes"] <= reckoned
