"""What a mixture does beside products: the last step, and the middle one where it stands apart.

::

    out[t, n] = sum_j weights[t, j] * y[t * top_k + j, n]       what the choices of a token gave
    h[s, n] = act(y[s, n]) * y[s, N + n]                        gate and up of a slot

in float32, choice after choice: the sum has one order, whatever other tokens are in the batch, and
is rounded once.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.ops.mmq.triton_outputs import store
from tilewright.ops.moe.triton_parts import activated
from tilewright.ops.w4a16.triton_parts import to_float32

__all__ = ["launch_activate", "launch_combine"]


@triton.jit
def _combine_kernel(
    y_ptr, w_ptr, out_ptr, N, choices, stride_wt, stride_wj,
    BLOCK: tl.constexpr, INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token."""
    token = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    out = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, choices):
        w = to_float32(tl.load(w_ptr + token * stride_wt + j * stride_wj), INTERPRET)
        if FAULT == "no-router-weight":
            w = 1.0
        out += w * tl.load(y_ptr + (token * choices + j) * N + offs, mask=mask, other=0.0)
    store(out_ptr + token * N + offs, out, mask, INTERPRET)


INTERPRETED: bool = not isinstance(_combine_kernel, triton.JITFunction)


@triton.jit
def _activate_kernel(
    y_ptr, h_ptr, size, N, ACT: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr
):
    """BLOCK values of h."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    gate = y_ptr + at // N * (2 * N) + at % N
    g = tl.load(gate, mask=mask, other=0.0)
    u = tl.load(gate + N, mask=mask, other=0.0)
    store(h_ptr + at, activated(g, u, ACT), mask, INTERPRET)


def launch_activate(y: torch.Tensor, h: torch.Tensor, act: str) -> None:
    """Write act(gate) * up.

    Args:
        y: float32 [slots, 2 N], contiguous: gate's columns before up's.
        h: [slots, N], contiguous, of any floating dtype.
        act: a value of `triton_parts.ACTIVATIONS`.
    """
    size = h.numel()
    _activate_kernel[(triton.cdiv(size, 1024),)](
        y, h, size, h.shape[1], ACT=act, BLOCK=1024, INTERPRET=INTERPRETED, num_warps=4
    )


def launch_combine(
    y: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, fault: str = ""
) -> None:
    """Write the weighted sums.

    Args:
        y: float32 [T * top_k, N], contiguous, T and top_k at least 1.
        weights: [T, top_k] of any floating dtype and strides.
        out: [T, N], contiguous, of any floating dtype.
        fault: "no-router-weight", for a test to find.
    """
    tokens, n = out.shape
    # The second dimension of a grid ends at 65535.
    for at in range(0, tokens, 65535):
        some = out[at : at + 65535]
        count = len(some)
        choices = weights.shape[1]
        block = min(512, max(16, triton.next_power_of_2(n)))
        _combine_kernel[(triton.cdiv(n, block), count)](
            y[at * choices :], weights[at:], some, n, choices, *weights.stride(),
            BLOCK=block, INTERPRET=INTERPRETED, FAULT=fault, num_warps=4,
        )  # fmt: skip
