"""First of the SSD's kernels: from raw dt to each token's step and its chunk's decays.

::

    dt[t, h]   = clamp(softplus(dt_raw[t, h] + dt_bias[h]))       the steps
    sum[t, h]  = sum of dt[u, h] * A[h] * log2(e), u <= t in t's chunk

Both are float32 [slots, H, CHUNK] (`triton_parts` says what a slot is): a decay between two tokens
of a chunk is 2 to the power of a difference of sums. Places behind the end of a sequence have a
step of 0 and exactly the last token's sum, so whoever reads a chunk needs no mask for them, and the
last token does not decay: where decays are strong, sums are in the thousands, and a unit in their
last place is a thousandth of a token. `units` [slots, H] is the largest
``dt[t] 2^(sum_last - sum_t)`` of a chunk, where a kernel asks for it.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.ops.ssd.args import ScanArgs
from tilewright.ops.ssd.triton_parts import SMALLEST, decay, locate, to_float32

__all__ = ["INTERPRETED", "launch_prepare", "step_of"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def step_of(dt, low, high, SOFTPLUS: tl.constexpr):
    """A step from dt + bias: softplus (the identity above 20), then the limits. NaN stays NaN."""
    if SOFTPLUS:
        # max(v, 0) + log(1 + e^-|v|), the logarithm as a series of atanh: the hardware's has an
        # absolute error, and steps are small. Above 20 nothing is left of it in float32.
        grown = tl.exp(-tl.abs(dt))
        s = grown / (2.0 + grown)
        s2 = s * s
        series = 1.0 / 11.0 + s2 * (1.0 / 13.0)
        series = 1.0 / 7.0 + s2 * (1.0 / 9.0 + s2 * series)
        series = 1.0 + s2 * (1.0 / 3.0 + s2 * (1.0 / 5.0 + s2 * series))
        dt = tl.maximum(dt, 0.0, propagate_nan=tl.PropagateNan.ALL) + 2.0 * s * series
    dt = tl.maximum(dt, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(dt, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _prepare_kernel(
    dt_ptr, a_ptr, bias_ptr, cu_ptr, steps_ptr, sums_ptr, units_ptr,
    L, H, S, NC, low, high,
    stride_db, stride_dl, stride_dh,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    HAS_UNITS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The steps and sums of BLOCK_H heads in one slot."""
    slot = tl.program_id(0)
    batch, start, end = locate(slot, cu_ptr, L, S, NC, CHUNK, PACKED)
    if start >= end:
        return
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    slope = tl.load(a_ptr + offs_h, mask=mask_h, other=0.0) * LOG2E
    dt_ptr += batch.to(tl.int64) * stride_db + start.to(tl.int64) * stride_dl
    base = (slot.to(tl.int64) * H + offs_h) * CHUNK
    carry = tl.zeros((BLOCK_H,), tl.float32)
    for first in range(0, CHUNK, BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        mask = (offs_t < end - start)[:, None] & mask_h[None, :]
        ptrs = dt_ptr + offs_t[:, None] * stride_dl + offs_h[None, :] * stride_dh
        dt = to_float32(tl.load(ptrs, mask=mask, other=0.0), INTERPRET)  # [BLOCK_T, BLOCK_H]
        if HAS_BIAS:
            bias = to_float32(tl.load(bias_ptr + offs_h, mask=mask_h, other=0.0), INTERPRET)
            dt += bias[None, :]
        dt = tl.where(mask, step_of(dt, low, high, SOFTPLUS), 0.0)
        steps = dt * slope[None, :]
        sums = tl.cumsum(steps, 0) + carry[None, :]
        # A GPU adds in a tree: what it has behind the last token is another rounding of the sum.
        last = tl.minimum(end - start, first + BLOCK_T) - 1
        at_last = tl.sum(tl.where((offs_t == last)[:, None], sums, 0.0), 0)
        carry = tl.where(last >= first, at_last, carry)
        sums = tl.where((offs_t <= last)[:, None], sums, carry[None, :])
        to = base[None, :] + offs_t[:, None]
        tl.store(steps_ptr + to, dt, mask=mask_h[None, :])
        tl.store(sums_ptr + to, sums, mask=mask_h[None, :])
        if HAS_UNITS:  # BLOCK_T is CHUNK
            weights = dt * decay(carry[None, :] - sums)
            unit = tl.maximum(tl.max(weights, 0), SMALLEST)
            tl.store(units_ptr + slot * H + offs_h, unit, mask=mask_h)


INTERPRETED: bool = not isinstance(_prepare_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


def launch_prepare(
    args: ScanArgs,
    chunk: int,
    slots: int,
    steps: torch.Tensor,
    sums: torch.Tensor,
    units: torch.Tensor | None = None,
) -> None:
    """Write steps and sums, float32 [slots, H, chunk], of every slot that is used, and units
    [slots, H] of chunks of at most 128."""
    block_t = chunk & -chunk  # the largest power of two that divides it
    block_t = min(block_t, 128)
    block_h = max(1, min(2048 // block_t, triton.next_power_of_2(args.heads), 32))
    grid = (slots, triton.cdiv(args.heads, block_h))
    packed = args.cu_seqlens is not None
    _prepare_kernel[grid](
        args.dt, args.A, args.A if args.dt_bias is None else args.dt_bias,
        args.cu_seqlens if packed else args.A, steps, sums, sums if units is None else units,
        args.length, args.heads, args.sequences, max(1, triton.cdiv(args.length, chunk)),
        float(args.dt_limit[0]), float(args.dt_limit[1]),
        *args.dt.stride(),
        CHUNK=chunk, BLOCK_T=block_t, BLOCK_H=block_h,
        SOFTPLUS=args.dt_softplus, HAS_BIAS=args.dt_bias is not None, PACKED=packed,
        HAS_UNITS=units is not None, INTERPRET=INTERPRETED, num_warps=4,
    )  # fmt: skip
