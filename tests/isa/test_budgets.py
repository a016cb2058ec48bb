"""What the inner loops may cost: a change that loses the packed form fails here.

Static counts of what Triton 3.7 makes of a kernel; none is a speed. A budget is the figure that was
seen and a little more, less than what the scalar form takes. Where a kernel gets better, tighten
its budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pytest

from isa.compiling import HAS_TRITON, NO_TRITON, Job, run_jobs

if not HAS_TRITON:
    pytest.skip(NO_TRITON, allow_module_level=True)
if metadata.version("triton").split(".")[:2] != ["3", "7"]:
    pytest.skip("budgets are of Triton 3.7", allow_module_level=True)

SQUARE = "block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=2, group_m=8"
ASM = f"triton({SQUARE}, order=xw, dequant=asm)"
PLAIN = f"triton({SQUARE}, order=xw, dequant=packed)"
SCALAR = f"triton({SQUARE}, order=xw, dequant=scalar)"
AMD = (
    "amd(block_m=64, block_n=64, block_k=64, num_warps=4, warps_m=1, num_stages=2, "
    "x_path=shared, scale=weights)"
)
SKINNY = "skinny(block_m=16, block_n=64, block_k=32, num_warps=4, num_stages=2, split_k=8)"
DECODE = (
    "hopper_decode(block_m=8, block_n=32, split_k=2, unroll=2, warps_k=8, warps_n=1, "
    "x_load=vectors)"
)
HOPPER = "hopper(block_n=256, block_m=128, block_k=64, num_stages=4, ctas=1, group_m=4, split_k=1)"


@dataclass(frozen=True)
class Budget:
    """Of one iteration, a wave; asymmetric, G=128.

    Attributes:
        job: what is compiled.
        valu: VALU instructions at most; `seen` were found.
        packed, and_or: at least so many: the forms that unpack two codes at once.
        lds_write: at most so many.
        vgprs: at most so many.
        matrix: how its matrix instruction's name begins.
    """

    job: Job
    valu: int
    seen: int
    packed: int
    and_or: int
    lds_write: int
    vgprs: int
    matrix: str


WMMA, MFMA = "v_wmma_f32_16x16x16_f16", "v_mfma_f32_32x32x8"
BUDGETS = {
    "gfx1151 asm": Budget(Job("gfx1151", ASM), 82, 75, 32, 16, 8, 192, WMMA),
    "gfx1100 asm": Budget(Job("gfx1100", ASM), 82, 75, 32, 16, 8, 192, WMMA),
    "gfx1201 asm": Budget(Job("gfx1201", ASM), 82, 75, 32, 16, 8, 140, WMMA),
    "gfx90a asm": Budget(Job("gfx90a", ASM), 50, 46, 16, 8, 6, 128, MFMA),
    "gfx942 asm": Budget(Job("gfx942", ASM), 50, 46, 16, 8, 6, 128, MFMA),
    "sm_90 asm": Budget(Job("sm_90", ASM), 102, 94, 32, 16, 4, 96, "HGMMA.64x64x16.F32"),
    # Weights never pass through LDS: what is written there is x.
    "gfx1151 amd": Budget(Job("gfx1151", AMD), 122, 116, 64, 32, 4, 120, WMMA),
    "gfx1100 amd": Budget(Job("gfx1100", AMD), 122, 116, 64, 32, 4, 120, WMMA),
    "gfx1201 amd": Budget(Job("gfx1201", AMD), 67, 62, 32, 16, 4, 104, WMMA),
    "gfx90a amd": Budget(Job("gfx90a", AMD), 39, 36, 16, 8, 2, 96, "v_mfma_f32_16x16x16"),
    "gfx942 amd": Budget(Job("gfx942", AMD), 39, 36, 16, 8, 2, 96, "v_mfma_f32_16x16x16"),
    "gfx1151 skinny": Budget(Job("gfx1151", SKINNY, m=4), 57, 52, 16, 8, 1, 80, WMMA),
    "gfx90a skinny": Budget(
        Job("gfx90a", SKINNY, m=4), 36, 33, 8, 4, 1, 40, "v_mfma_f32_16x16x16"
    ),
    # Codes are multiplied as they are, and zero points come off the sums: nothing is packed maths.
    "sm_90 hopper_decode": Budget(
        Job("sm_90", DECODE, m=2), 200, 183, 0, 64, 4, 128, "HMMA.16816.F32"
    ),
    # Weights go from registers into wgmma: nothing is written to shared memory.
    "sm_90 hopper": Budget(
        Job("sm_90", HOPPER), 140, 129, 64, 32, 0, 168, "HGMMA.64x128x16.F32 (A in registers)"
    ),
    "sm_90 hopper bfloat16": Budget(
        Job("sm_90", HOPPER, "bfloat16"), 158, 147, 64, 32, 0, 168,
        "HGMMA.64x128x16.F32.BF16 (A in registers)",
    ),
    # Plain source: the compiler finds and_or itself on gfx11 and gfx12, and packs only in part.
    "gfx1151 plain": Budget(Job("gfx1151", PLAIN), 125, 122, 16, 16, 8, 192, WMMA),
    "gfx1100 plain": Budget(Job("gfx1100", PLAIN), 125, 122, 16, 16, 8, 192, WMMA),
    "gfx1201 plain": Budget(Job("gfx1201", PLAIN), 125, 122, 16, 16, 8, 140, WMMA),
    "gfx90a plain": Budget(Job("gfx90a", PLAIN), 58, 54, 16, 0, 6, 128, MFMA),
    "gfx942 plain": Budget(Job("gfx942", PLAIN), 58, 54, 16, 0, 6, 128, MFMA),
}  # fmt: skip
UNPACKED = {f"{arch} scalar": Job(arch, SCALAR) for arch in
            ("gfx1151", "gfx1100", "gfx1201", "gfx90a", "gfx942", "sm_90")}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Mapping[str, dict[str, Any]]:
    entries = run_jobs({**{name: b.job for name, b in BUDGETS.items()}, **UNPACKED})
    assert [entry["error"] for entry in entries.values() if entry["error"]] == []
    return {name: entry["kernels"][0] for name, entry in entries.items()}


def over(kernel: Mapping[str, Any], budget: Budget) -> list[str]:
    """The limits that a kernel breaks."""
    counts, taken = kernel["counts"], kernel["resources"]
    return [
        what
        for what, broken in {
            f"{counts['valu']} VALU, at most {budget.valu}": counts["valu"] > budget.valu,
            f"{counts['packed']} packed, at least {budget.packed}":
                counts["packed"] < budget.packed,
            f"{counts['and_or']} and_or, at least {budget.and_or}":
                counts["and_or"] < budget.and_or,
            f"{counts['lds_write']} LDS writes, at most {budget.lds_write}":
                counts["lds_write"] > budget.lds_write,
            f"{taken['vgprs']} VGPRs, at most {budget.vgprs}": taken["vgprs"] > budget.vgprs,
            f"{taken['spills']} spills": taken["spills"] != 0,
            f"{taken['scratch_bytes']} bytes of scratch": taken["scratch_bytes"] != 0,
            f"multiplies with {kernel['matrix']!r}": not kernel["matrix"].startswith(budget.matrix),
            f"ptxas: {taken['failures']}": bool(taken["failures"]),
        }.items()
        if broken
    ]  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_the_kernel_keeps_its_budget(found: Mapping[str, dict[str, Any]], name: str) -> None:
    assert over(found[name], BUDGETS[name]) == []


@pytest.mark.parametrize("name", BUDGETS)
def test_the_budget_is_tight(found: Mapping[str, dict[str, Any]], name: str) -> None:
    """What was seen when the budget was written is still seen, about: tighten it otherwise."""
    budget = BUDGETS[name]
    assert budget.seen <= budget.valu <= 1.1 * budget.seen
    assert found[name]["counts"]["valu"] >= 0.85 * budget.seen


@pytest.mark.parametrize("name", [name for name in BUDGETS if "hopper" not in name])
def test_the_scalar_form_breaks_the_budget(found: Mapping[str, dict[str, Any]], name: str) -> None:
    """Of the portable kernel, on the same tile."""
    broken = over(found[f"{BUDGETS[name].job.arch} scalar"], BUDGETS[name])
    assert any("VALU" in what for what in broken)
    assert any("packed" in what for what in broken)
