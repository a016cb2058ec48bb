"""The persistent form of the SSD: one program walks over a run of chunks with its state on chip.

::

    CB^T [j, i] = B_j . C_i                                              BLOCK_T x BLOCK_T
    M^T  [j, i] = CB^T[j, i] 2^(sum_i - sum_j) dt[j]   for j <= i
    y^T  [p, i] = 2^sum_i sum_n S[p, n] C[i, n] + sum_j x[j, p] M^T[j, i]
    S    [p, n] = 2^sum_last S[p, n] + sum_j (dt[j] 2^(sum_last - sum_j) x[j, p]) B[j, n]

Everything is transposed, so that the state, which the program holds as float32 sums, is the left
operand of the next product as it lies: on Hopper it never leaves the registers. The skip D x is
added to the diagonal of M where D is a number a head. What is multiplied is rounded to the dtype
of x once.

Where there are fewer heads than a chip has units, a sequence is cut into SEGMENTS runs, whose
entering states two kernels of `triton_states` find first.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.ops.ssd.args import ScanArgs
from tilewright.ops.ssd.triton_output import silu
from tilewright.ops.ssd.triton_parts import (
    as_operand,
    decay,
    extent,
    first_slot,
    operand,
    store_narrow,
    to_float32,
    unit_of,
)
from tilewright.ops.ssd.triton_prepare import INTERPRETED

__all__ = ["launch_walk"]


@triton.jit
def _walk_kernel(
    x_ptr, z_ptr, b_ptr, c_ptr, d_ptr, steps_ptr, sums_ptr, enter_ptr, cu_ptr, y_ptr, final_ptr,
    L, H, P, N, NC, GROUP, stride_dh, stride_dp,
    stride_xb, stride_xl, stride_xh, stride_xp, stride_zb, stride_zl, stride_zh, stride_zp,
    stride_bb, stride_bl, stride_bg, stride_bn, stride_cb, stride_cl, stride_cg, stride_cn,
    SEGMENTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, HAS_Z: tl.constexpr, HAS_ENTER: tl.constexpr, PACKED: tl.constexpr,
    INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK_P of one head over one segment. D is "none", "head" or "full"."""
    # Which part: heads come first, so that those that share B and C run together.
    h = tl.program_id(0) % H
    place = tl.program_id(0) // H
    seq = place // SEGMENTS
    segment = place % SEGMENTS
    batch, begin, end = extent(seq, cu_ptr, L, PACKED)
    share = tl.cdiv(tl.cdiv(end - begin, CHUNK), SEGMENTS)
    slot = first_slot(seq, begin, NC, CHUNK, PACKED) + segment * share
    start = begin + segment * share * CHUNK
    if SEGMENTS > 1:
        end = tl.minimum(start + share * CHUNK, end)
    if FAULT == "partial-chunk":
        end = start + (end - start) // CHUNK * CHUNK
    offs = tl.arange(0, CHUNK)
    offs_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    mask_p = offs_p < P
    mask_n = offs_n < N
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    group = h // GROUP
    if FAULT == "wrong-groups":
        group = h % (H // GROUP)

    start64 = start.to(tl.int64)
    # Pointers move as numbers, and offsets stay: pointers of every element would fill registers.
    h64, group64 = h.to(tl.int64), group.to(tl.int64)  # tokens may be the fastest dimension
    x_ptr += batch.to(tl.int64) * stride_xb + start64 * stride_xl + h64 * stride_xh
    z_ptr += batch.to(tl.int64) * stride_zb + start64 * stride_zl + h64 * stride_zh
    y_ptr += ((batch.to(tl.int64) * L + start64) * H + h) * P
    b_ptr += batch.to(tl.int64) * stride_bb + start64 * stride_bl + group64 * stride_bg
    c_ptr += batch.to(tl.int64) * stride_cb + start64 * stride_cl + group64 * stride_cg
    line = (slot.to(tl.int64) * H + h) * CHUNK
    steps_ptr += line
    sums_ptr += line
    offs_x = offs_p[:, None] * stride_xp + offs[None, :] * stride_xl
    offs_z = offs_p[:, None] * stride_zp + offs[None, :] * stride_zl
    offs_y = offs_p[:, None] + (offs * H)[None, :] * P
    offs_b = offs[:, None] * stride_bl + offs_n[None, :] * stride_bn
    offs_c = offs[None, :] * stride_cl + offs_n[:, None] * stride_cn
    offs_s = offs_p[:, None] * N + offs_n[None, :]
    mask_s = mask_p[:, None] & mask_n[None, :]
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if HAS_ENTER:
        at = (place.to(tl.int64) * H + h) * P * N
        state = tl.load(enter_ptr + at + offs_s, mask=mask_s, other=0.0)
    if D == "head":
        d = to_float32(tl.load(d_ptr + h * stride_dh), INTERPRET)
    elif D == "full":
        d_ptrs = d_ptr + h * stride_dh + offs_p * stride_dp
        d = to_float32(tl.load(d_ptrs, mask=mask_p, other=0.0), INTERPRET)
    # Carried along beside the state, so that the state's product ends where it began: in flight
    # over the loop's end, it would make ptxas wait for every other product (C7515).
    entered = operand(state, dtype, INTERPRET)
    below = offs[:, None] <= offs[None, :]  # [j, i]
    diagonal = offs[:, None] == offs[None, :]

    for first in range(0, end - start, CHUNK):
        mask_t = offs < end - start - first
        sums = tl.load(sums_ptr + offs)
        steps = tl.load(steps_ptr + offs)
        last = tl.load(sums_ptr + CHUNK - 1)
        mask_x = mask_p[:, None] & mask_t[None, :]
        x = tl.load(x_ptr + offs_x, mask=mask_x, other=0.0)  # [BLOCK_P, CHUNK]
        b = tl.load(b_ptr + offs_b, mask=mask_t[:, None] & mask_n[None, :], other=0.0)
        c = tl.load(c_ptr + offs_c, mask=mask_n[:, None] & mask_t[None, :], other=0.0)
        b = as_operand(b, INTERPRET)  # [CHUNK, BLOCK_N]
        c = as_operand(c, INTERPRET)  # [BLOCK_N, CHUNK]
        # The products first, then the outputs, then the state: few sums are alive at a time.
        m = tl.dot(b, c, input_precision="ieee")  # [j, i]
        difference = sums[None, :] - sums[:, None]
        if FAULT == "no-clamp":  # infinite above the diagonal, and NaN times the mask
            m = m * tl.exp2(difference) * steps[:, None] * below.to(tl.float32)
        else:
            m = tl.where(below, m * decay(difference) * steps[:, None], 0.0)
        if D == "head":
            m = tl.where(diagonal, m + d, m)
        m = operand(m, dtype, INTERPRET)
        y = tl.dot(entered, c, input_precision="ieee")  # [BLOCK_P, i]
        y *= tl.exp2(sums)[None, :]
        y = tl.dot(as_operand(x, INTERPRET), m, y, input_precision="ieee")
        wide = to_float32(x, INTERPRET)
        if D == "full":
            y += d[:, None] * wide
        if HAS_Z:
            z = tl.load(z_ptr + offs_z, mask=mask_x, other=0.0)
            y *= silu(to_float32(z, INTERPRET))
        store_narrow(y_ptr + offs_y, y, mask_x, INTERPRET)
        weights = steps * decay(last - sums)
        unit = unit_of(weights, dtype)
        scaled = operand(wide * (weights * (1.0 / unit))[None, :], dtype, INTERPRET)
        state *= tl.exp2(last) / unit
        state = tl.dot(scaled, b, state, input_precision="ieee")
        state *= unit
        entered = operand(state, dtype, INTERPRET)
        x_ptr += CHUNK * stride_xl
        z_ptr += CHUNK * stride_zl
        b_ptr += CHUNK * stride_bl
        c_ptr += CHUNK * stride_cl
        y_ptr += CHUNK * H * P
        steps_ptr += CHUNK * H
        sums_ptr += CHUNK * H

    if segment == SEGMENTS - 1:
        at = (seq.to(tl.int64) * H + h) * P * N
        tl.store(final_ptr + at + offs_s, state, mask=mask_s)


def launch_walk(
    args: ScanArgs,
    steps: torch.Tensor,
    sums: torch.Tensor,
    enter: torch.Tensor | None,
    *,
    chunk: int,
    block_p: int,
    segments: int,
    num_warps: int,
    num_stages: int,
    fault: str = "",
) -> None:
    """Write y and the final states.

    Args:
        steps, sums: as `launch_prepare` leaves them.
        enter: float32 [sequences * segments, H, P, N], the states that enter the segments; None for
            the initial states of the sequences, or zeros.
    """
    x, z, d, packed = args.x, args.z, args.D, args.cu_seqlens is not None
    if enter is None and args.initial_states is not None:
        enter = args.initial_states
    grid = (args.heads * args.sequences * segments, triton.cdiv(args.head_dim, block_p))
    _walk_kernel[grid](
        x, x if z is None else z, args.B, args.C, sums if d is None else d, steps, sums,
        sums if enter is None else enter, args.cu_seqlens if packed else sums, args.y,
        args.final_states,
        args.length, args.heads, args.head_dim, args.d_state,
        max(1, triton.cdiv(args.length, chunk)), args.heads // args.groups,
        0 if d is None else d.stride(0), 0 if d is None or d.dim() == 1 else d.stride(1),
        *x.stride(), *(x if z is None else z).stride(), *args.B.stride(), *args.C.stride(),
        SEGMENTS=segments, CHUNK=chunk, BLOCK_P=block_p,
        BLOCK_N=max(16, triton.next_power_of_2(args.d_state)),
        D="none" if d is None else "head" if d.dim() == 1 else "full",
        HAS_Z=z is not None, HAS_ENTER=enter is not None, PACKED=packed, INTERPRET=INTERPRETED,
        FAULT=fault, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
