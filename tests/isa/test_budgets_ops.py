"""What tiles of mmq, moe and ssd may take of a chip: what loses the matrix form fails here.

As in test_budgets.py: static counts of what Triton 3.7 makes of a kernel, none of them a speed. A
limit is what was seen and a little more; where a kernel gets better, tighten it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import pytest

from isa.compiling import HAS_TRITON, NO_TRITON, Job, run_jobs

if not HAS_TRITON:
    pytest.skip(NO_TRITON, allow_module_level=True)
if metadata.version("triton").split(".")[:2] != ["3", "7"]:
    pytest.skip("budgets are of Triton 3.7", allow_module_level=True)

GGUF = Job("", op="mmq", weight_type="Q4_K", group=0)
INT8 = replace(
    GGUF,
    activations="int8",
    tile="int8(block_m=64, block_n=64, num_warps=4, schedule=data-parallel)",
)
FLOAT = replace(
    GGUF, tile="triton(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=1, split_k=1)"
)
MIXTURE = replace(
    GGUF, op="moe", n=768, k=2048,
    tile="triton(block_m=32, block_n=64, block_k=32, num_warps=4, num_stages=1, group_m=8)",
)  # fmt: skip
SCAN = Job(
    "", op="ssd", weight_type="p64", dtype="bfloat16", group=16, n=8192, k=128,
    tile="five(chunk=128, block=32, block_n=32, block_p=32, heads=1, num_stages=1, num_warps=4)",
)  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """Of one kernel of a launch.

    Attributes:
        job: what is launched.
        kernel: the one that it is about.
        matrix: how its matrix instruction's name begins.
        vgprs: vector registers a lane at most; `seen` were found.
        lds_bytes: a program, at most.
        programs: resident ones at least.
    """

    job: Job
    kernel: str
    matrix: str
    vgprs: int
    seen: int
    lds_bytes: int
    programs: int


def budget(job: Job, arch: str, *rest: Any) -> Budget:
    return Budget(replace(job, arch=arch), *rest)


INT8_MFMA, INT8_WMMA = "v_mfma_i32_32x32x8i8", "v_wmma_i32_16x16x16_iu8"
MFMA, WMMA = "v_mfma_f32_32x32x8f16", "v_wmma_f32_16x16x16_f16"
BF16_MFMA, BF16_WMMA = "v_mfma_f32_32x32x8bf16", "v_wmma_f32_16x16x16_bf16"
BUDGETS = {
    "mmq int8 gfx90a": budget(INT8, "gfx90a", "_mmq_int8_kernel", INT8_MFMA, 148, 134, 4096, 3),
    "mmq int8 gfx1151": budget(INT8, "gfx1151", "_mmq_int8_kernel", INT8_WMMA, 184, 167, 2048, 8),
    "mmq gfx90a": budget(FLOAT, "gfx90a", "_mmq_kernel", MFMA, 120, 106, 4096, 4),
    "mmq gfx1151": budget(FLOAT, "gfx1151", "_mmq_kernel", WMMA, 132, 119, 4096, 10),
    "moe gfx90a": budget(MIXTURE, "gfx90a", "_moe_kernel", MFMA, 126, 114, 4096, 4),
    "moe gfx1151": budget(MIXTURE, "gfx1151", "_moe_kernel", WMMA, 146, 133, 4096, 9),
    "ssd output gfx90a": budget(SCAN, "gfx90a", "_output_kernel", BF16_MFMA, 110, 97, 8192, 4),
    "ssd output gfx1151": budget(SCAN, "gfx1151", "_output_kernel", BF16_WMMA, 105, 94, 8192, 14),
    "ssd states gfx90a": budget(SCAN, "gfx90a", "_states_kernel", BF16_MFMA, 62, 55, 2048, 8),
    "ssd states gfx1151": budget(SCAN, "gfx1151", "_states_kernel", BF16_WMMA, 60, 53, 2048, 16),
    "ssd products gfx90a": budget(SCAN, "gfx90a", "_products_kernel", BF16_MFMA, 94, 84, 8192, 5),
    "ssd products gfx1151": budget(
        SCAN, "gfx1151", "_products_kernel", BF16_WMMA, 104, 93, 8192, 14
    ),
}
# Numbers of 32 bits never meet these instructions, and on RDNA none at all: what a change that
# loses the matrix form would compile to.
WITHOUT = {
    name: replace(b.job, dtype="float32", tile="", activations="float")
    for name, b in BUDGETS.items()
    if "int8" not in name
}


@pytest.fixture(scope="module")
def found() -> Mapping[str, dict[str, Any]]:
    jobs = {str(job): job for job in (*(b.job for b in BUDGETS.values()), *WITHOUT.values())}
    entries = run_jobs(jobs)
    assert [entry["error"] for entry in entries.values() if entry["error"]] == []
    return entries


def kernel_of(found: Mapping[str, dict[str, Any]], job: Job, name: str) -> Mapping[str, Any]:
    (kernel,) = (k for k in found[str(job)]["kernels"] if k["kernel"] == name)
    return kernel


def over(kernel: Mapping[str, Any], budget: Budget) -> list[str]:
    """The limits that a kernel breaks."""
    taken = kernel["resources"]
    return [
        what
        for what, broken in {
            f"multiplies with {kernel['matrix']!r}": not kernel["matrix"].startswith(budget.matrix),
            f"{taken['vgprs']} VGPRs, at most {budget.vgprs}": taken["vgprs"] > budget.vgprs,
            f"{taken['lds_bytes']} bytes of LDS, at most {budget.lds_bytes}":
                taken["lds_bytes"] > budget.lds_bytes,
            f"{taken['programs']} programs resident, at least {budget.programs}":
                taken["programs"] < budget.programs,
            f"{taken['spills']} spills": taken["spills"] != 0,
            f"{taken['scratch_bytes']} bytes of scratch": taken["scratch_bytes"] != 0,
        }.items()
        if broken
    ]  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_the_kernel_keeps_its_budget(found: Mapping[str, dict[str, Any]], name: str) -> None:
    budget = BUDGETS[name]
    assert over(kernel_of(found, budget.job, budget.kernel), budget) == []


@pytest.mark.parametrize("name", BUDGETS)
def test_the_budget_is_tight(found: Mapping[str, dict[str, Any]], name: str) -> None:
    """What was seen when the budget was written is still seen, about: tighten it otherwise."""
    budget = BUDGETS[name]
    taken = kernel_of(found, budget.job, budget.kernel)["resources"]
    assert budget.seen <= budget.vgprs <= 1.15 * budget.seen
    assert taken["vgprs"] >= 0.85 * budget.seen
    assert taken["lds_bytes"] == budget.lds_bytes


@pytest.mark.parametrize("name", WITHOUT)
def test_the_form_without_matrix_instructions_breaks_the_budget(
    found: Mapping[str, dict[str, Any]], name: str
) -> None:
    kernel = kernel_of(found, WITHOUT[name], BUDGETS[name].kernel)
    broken = over(kernel, BUDGETS[name])
    assert any("multiplies with" in what for what in broken)
    if "gfx1151" in name:
        assert kernel["counts"]["matrix"] == 0
        assert "multiplies with ''" in broken


def test_half_the_rows_and_warps_take_less_lds_and_leave_room_for_more() -> None:
    """The retune that the second field study found for gfx90a, on this package's kernel."""
    retuned = replace(INT8, arch="gfx90a")
    base = replace(retuned, tile=INT8.tile.replace("n=64, num_warps=4", "n=128, num_warps=8"))
    entries = run_jobs({str(job): job for job in (base, retuned)})
    before, after = (
        kernel_of(entries, job, "_mmq_int8_kernel")["resources"] for job in (base, retuned)
    )
    assert after["lds_bytes"] < before["lds_bytes"]
    assert after["programs"] > before["programs"]
    assert after["waves"] > before["waves"]
