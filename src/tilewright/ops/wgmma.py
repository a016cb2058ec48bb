"""wgmma whose left operand lies in registers: wait before they are written again.

Hopper's wgmma runs on its own. Triton issues those of one `tl.dot` and, in a loop whose loads run
ahead, leaves all but one of them pending when the next step begins. If the left operand comes from
registers, that step writes them anew while products still read them. Triton 3.6 to 3.9 do not wait
for that, and ptxas neither waits nor warns: sums then hold products of half-made weights, and only
now and then, when another program keeps the matrix units busy.

So sums of such a dot pass through `awaited` in every step: what is no wgmma needs them, and Triton
waits for all products right after the dot. Or the dot is left pending, registers of its left
operand are written only of what needs the number that `waited` returns, and the step goes on
between the two. `tilewright.isa.hazards` looks at the machine code for what is left.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["has_wgmma"]


@triton.jit
def awaited(acc):
    """The float32 sums of a dot, once all its products are complete."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def waited(k):
    """0, once all products that were issued before are complete; k is any number of the step."""
    return tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;",
        "=r,r", [k], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def has_wgmma(arch: str) -> bool:
    """Whether Triton multiplies 16-bit numbers by wgmma on this chip."""
    return arch == "sm_90"
