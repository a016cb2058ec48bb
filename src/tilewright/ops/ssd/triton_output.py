"""The outputs of the SSD from the states that enter its chunks.

::

    y[i, p] = 2^sum_i sum_n C[i, n] S[p, n]                                 what entered the chunk
              + sum_{j <= i} (C_i . B_j) 2^(sum_i - sum_j) dt[j] x[j, p]    the chunk itself
              + D x[i, p],      then times silu(z[i, p])

A program computes BLOCK tokens of one chunk for HEADS heads of one group, one after the other: they
share C, and where a chunk is one block (CB "once") the products C B^T, which stay in registers.
Else these are made anew for each head ("anew"), or read from what `_products_kernel` wrote, in the
dtype of x ("read"). What is multiplied with x is rounded to its dtype once.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.ops.cross import target_arch
from tilewright.ops.ssd.args import ScanArgs
from tilewright.ops.ssd.triton_parts import (
    as_operand,
    decay,
    locate,
    operand,
    store_narrow,
    to_float32,
)
from tilewright.ops.ssd.triton_prepare import INTERPRETED, LOG2E
from tilewright.ops.wgmma import awaited, has_wgmma

__all__ = ["launch_output", "launch_products", "silu"]


@triton.jit
def silu(z):
    """z * sigmoid(z), float32."""
    return z / (1.0 + tl.exp2(z * -LOG2E))


@triton.jit
def _products_kernel(
    b_ptr, c_ptr, cu_ptr, cb_ptr,
    L, N, S, NC, G,
    stride_bb, stride_bl, stride_bg, stride_bn, stride_cb, stride_cl, stride_cg, stride_cn,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """A BLOCK x BLOCK tile of C B^T of one chunk and group, on or below the diagonal."""
    slot = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = CHUNK // BLOCK
    row = tl.program_id(2) // blocks * BLOCK
    column = tl.program_id(2) % blocks * BLOCK
    batch, start, end = locate(slot, cu_ptr, L, S, NC, CHUNK, PACKED)
    if (column > row) | (start + row >= end):
        return
    offs = tl.arange(0, BLOCK)
    offs_n = tl.arange(0, BLOCK_N)
    c_ptr += batch.to(tl.int64) * stride_cb + (start + row).to(tl.int64) * stride_cl + g * stride_cg
    b_ptr += batch.to(tl.int64) * stride_bb + g * stride_bg
    b_ptr += (start + column).to(tl.int64) * stride_bl
    live_n = offs_n < N
    c = tl.load(c_ptr + offs[:, None] * stride_cl + offs_n[None, :] * stride_cn,
                mask=(start + row + offs < end)[:, None] & live_n[None, :], other=0.0)  # fmt: skip
    b = tl.load(b_ptr + offs[None, :] * stride_bl + offs_n[:, None] * stride_bn,
                mask=(start + column + offs < end)[None, :] & live_n[:, None],
                other=0.0)  # fmt: skip
    cb = tl.dot(as_operand(c, INTERPRET), as_operand(b, INTERPRET), input_precision="ieee")
    cb_ptr += (slot.to(tl.int64) * G + g) * CHUNK * CHUNK
    to = cb_ptr + (row + offs)[:, None] * CHUNK + (column + offs)[None, :]
    store_narrow(to, cb, None, INTERPRET)


@triton.jit
def _output_kernel(
    x_ptr, z_ptr, b_ptr, c_ptr, cb_ptr, d_ptr, steps_ptr, sums_ptr, states_ptr, cu_ptr, y_ptr,
    L, H, P, N, S, NC, GROUP, stride_dh, stride_dp,
    stride_xb, stride_xl, stride_xh, stride_xp, stride_zb, stride_zl, stride_zh, stride_zp,
    stride_bb, stride_bl, stride_bg, stride_bn, stride_cb, stride_cl, stride_cg, stride_cn,
    CB: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, PACKED: tl.constexpr, INTERPRET: tl.constexpr,
    FAULT: tl.constexpr, STAGES: tl.constexpr, WGMMA: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens x BLOCK_P of y, for HEADS heads. CB is "once", "anew" or "read"."""
    # Which part: heads first, so that those that share B and C run together.
    rows: tl.constexpr = CHUNK // BLOCK
    head_blocks = H // HEADS
    first_head = tl.program_id(0) % head_blocks * HEADS
    slot = tl.program_id(0) // (head_blocks * rows)
    row = tl.program_id(0) // head_blocks % rows * BLOCK
    batch, start, end = locate(slot, cu_ptr, L, S, NC, CHUNK, PACKED)
    if FAULT == "partial-chunk":
        end = start + (end - start) // CHUNK * CHUNK
    left = end - start  # tokens from here to the end of the sequence
    if row >= left:
        return
    offs = tl.arange(0, BLOCK)
    offs_i = row + offs
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_i = offs_i < left
    mask_n = offs_n < N
    mask_p = offs_p < P
    mask_ip = mask_i[:, None] & mask_p[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    group = first_head // GROUP
    if FAULT == "wrong-groups":
        group = first_head % (H // GROUP)
    start64, group64 = start.to(tl.int64), group.to(tl.int64)
    x_ptr += batch.to(tl.int64) * stride_xb + start64 * stride_xl
    z_ptr += batch.to(tl.int64) * stride_zb + start64 * stride_zl
    y_ptr += (batch.to(tl.int64) * L + start64) * H * P
    b_ptr += batch.to(tl.int64) * stride_bb + start64 * stride_bl + group64 * stride_bg
    c_ptr += batch.to(tl.int64) * stride_cb + start64 * stride_cl + group64 * stride_cg
    cb_ptr += (slot.to(tl.int64) * (H // GROUP) + group) * CHUNK * CHUNK

    c = tl.load(c_ptr + offs_i[:, None] * stride_cl + offs_n[None, :] * stride_cn,
                mask=mask_i[:, None] & mask_n[None, :], other=0.0)  # fmt: skip
    c = as_operand(c, INTERPRET)  # [BLOCK, BLOCK_N]
    b_ptrs = b_ptr + offs[None, :] * stride_bl + offs_n[:, None] * stride_bn
    if CB == "once":
        b = tl.load(b_ptrs, mask=mask_n[:, None] & (offs < left)[None, :], other=0.0)
        cb_once = tl.dot(c, as_operand(b, INTERPRET), input_precision="ieee")

    for k in tl.range(0, HEADS, num_stages=STAGES if CB == "once" else 1):
        h = first_head + k
        h64 = h.to(tl.int64)  # tokens may be the fastest dimension
        line = (slot.to(tl.int64) * H + h) * CHUNK
        sums_i = tl.load(sums_ptr + line + offs_i)
        at = (slot.to(tl.int64) * H + h) * P * N
        s = tl.load(states_ptr + at + offs_p[None, :] * N + offs_n[:, None],
                    mask=mask_p[None, :] & mask_n[:, None], other=0.0)  # fmt: skip
        acc = tl.dot(c, as_operand(s, INTERPRET), input_precision="ieee")  # [BLOCK, BLOCK_P]
        acc *= tl.exp2(sums_i)[:, None]
        x_ptrs = x_ptr + h64 * stride_xh + offs_p[None, :] * stride_xp + offs[:, None] * stride_xl
        for column in tl.range(0, BLOCK if CB == "once" else row + BLOCK, BLOCK,
                               num_stages=1 if CB == "once" else STAGES):  # fmt: skip
            offs_j = column + offs
            sums_j = tl.load(sums_ptr + line + offs_j)
            steps_j = tl.load(steps_ptr + line + offs_j)
            mask_j = offs_j < left
            x = tl.load(x_ptrs + column * stride_xl, mask=mask_j[:, None] & mask_p[None, :],
                        other=0.0)  # fmt: skip
            if CB == "once":
                cb = cb_once
            elif CB == "read":
                cb = tl.load(cb_ptr + offs_i[:, None] * CHUNK + offs_j[None, :],
                             mask=mask_i[:, None] & mask_j[None, :], other=0.0)  # fmt: skip
                cb = to_float32(cb, INTERPRET)
            else:
                b = tl.load(b_ptrs + column * stride_bl, mask=mask_n[:, None] & mask_j[None, :],
                            other=0.0)  # fmt: skip
                cb = tl.dot(c, as_operand(b, INTERPRET), input_precision="ieee")
            below = offs_i[:, None] >= offs_j[None, :]
            difference = sums_i[:, None] - sums_j[None, :]
            if FAULT == "no-clamp":  # infinite above the diagonal, and NaN times the mask
                m = cb * tl.exp2(difference) * steps_j[None, :] * below.to(tl.float32)
            else:
                m = tl.where(below, cb * decay(difference) * steps_j[None, :], 0.0)
            m = operand(m, dtype, INTERPRET)
            acc = tl.dot(m, as_operand(x, INTERPRET), acc, input_precision="ieee")
            if WGMMA:  # m lies in registers
                acc = awaited(acc)
        if HAS_D:
            skip = to_float32(tl.load(x_ptrs + row * stride_xl, mask=mask_ip, other=0.0), INTERPRET)
            d = tl.load(d_ptr + h * stride_dh + offs_p * stride_dp, mask=mask_p, other=0.0)
            acc += to_float32(d, INTERPRET)[None, :] * skip
        if HAS_Z:
            z = tl.load(z_ptr + h64 * stride_zh + offs_i[:, None] * stride_zl
                        + offs_p[None, :] * stride_zp, mask=mask_ip, other=0.0)  # fmt: skip
            acc *= silu(to_float32(z, INTERPRET))
        to = y_ptr + (offs_i * H + h)[:, None] * P + offs_p[None, :]
        store_narrow(to, acc, mask_ip, INTERPRET)


def launch_products(
    args: ScanArgs, slots: int, cb: torch.Tensor, *, chunk: int, block: int
) -> None:
    """Write C B^T of every chunk and group, [slots, G, chunk, chunk] in the dtype of x, as far as
    it is read."""
    packed = args.cu_seqlens is not None
    if args.x.dtype == torch.float32:  # without matrix units a thread holds whole rows
        block = 16
    grid = (slots, args.groups, (chunk // block) ** 2)
    _products_kernel[grid](
        args.B, args.C, args.cu_seqlens if packed else cb, cb,
        args.length, args.d_state, args.sequences, max(1, triton.cdiv(args.length, chunk)),
        args.groups, *args.B.stride(), *args.C.stride(),
        CHUNK=chunk, BLOCK=block, BLOCK_N=max(16, triton.next_power_of_2(args.d_state)),
        PACKED=packed, INTERPRET=INTERPRETED, num_stages=1,
        num_warps=8 if block >= 128 or args.x.dtype == torch.float32 else 4,
    )  # fmt: skip


def launch_output(
    args: ScanArgs,
    slots: int,
    steps: torch.Tensor,
    sums: torch.Tensor,
    states: torch.Tensor,
    cb: torch.Tensor | None,
    *,
    chunk: int,
    block: int,
    block_p: int,
    heads: int,
    num_warps: int,
    num_stages: int,
    fault: str = "",
) -> None:
    """Write y.

    Args:
        steps, sums: as `launch_prepare` leaves them.
        states: that enter the chunks, [slots, H, P, N] in the dtype of x.
        cb: as `launch_products` leaves it, or None to make the products here.
    """
    packed = args.cu_seqlens is not None
    x, z, d = args.x, args.z, args.D
    grid = (
        slots * (chunk // block) * (args.heads // heads),
        triton.cdiv(args.head_dim, block_p),
    )
    _output_kernel[grid](
        x, x if z is None else z, args.B, args.C, x if cb is None else cb, sums if d is None else d,
        steps, sums, states, args.cu_seqlens if packed else sums, args.y,
        args.length, args.heads, args.head_dim, args.d_state, args.sequences,
        max(1, triton.cdiv(args.length, chunk)), args.heads // args.groups,
        0 if d is None else d.stride(0), 0 if d is None or d.dim() == 1 else d.stride(1),
        *x.stride(), *(x if z is None else z).stride(), *args.B.stride(), *args.C.stride(),
        CB="read" if cb is not None else "once" if chunk == block else "anew",
        HEADS=heads, CHUNK=chunk, BLOCK=block, BLOCK_P=block_p,
        BLOCK_N=max(16, triton.next_power_of_2(args.d_state)),
        HAS_D=d is not None, HAS_Z=z is not None, PACKED=packed, INTERPRET=INTERPRETED,
        FAULT=fault, STAGES=num_stages,
        WGMMA=x.dtype != torch.float32 and has_wgmma(target_arch(x.device)),
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
