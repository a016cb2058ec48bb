"""W4A16 in portable Triton on Hopper: weights are made while the products of the step before run.

The sums of `triton_gemm` with the weights as the left operand ("wx"), and its numbers bit for bit.
There a step makes its weights, multiplies, and waits; the matrix units stand still while weights
are made, unless another program keeps them busy. Here a step ::

    issues   acc += w x^T          wgmma, w in registers; it runs on its own
    makes    codes - zeros         of the step after, in registers of their own
    waits    for the products
    scales   w = (codes - zeros) * scale

so that one program of a multiprocessor suffices, and its tile may be as large as the registers:
256 x 128 reads half as much through the L2 cache as two of 256 x 64.

Nothing may write the registers of w before the wait. So the last operation on every weight needs
the number 0 that the wait returns (`tilewright.ops.wgmma.waited`), and takes no instruction that
`triton_gemm` does not take. `tilewright.isa.hazards` tells whether the compiler kept to that.

Words, scales and zero points are loaded another step ahead, each by the thread that makes weights
of it: rows n and n + 8 of 16, and one word of four, which is a fragment of wgmma's left operand for
words of the order "k32". x is loaded by Triton, `num_stages` steps ahead.

FAULT plants one of the errors that running ahead invites, for the gate to find (see
`triton_planted`). It is "" in every tile of the space, and the compiler then sees none of it.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.layout.triton import WordsW4
from tilewright.ops.w4a16.triton_parts import (
    bfloat16_bits,
    bits_to_float,
    code_pair,
    halves,
    high_to_float,
    offset_pair,
    to_float32,
    twice,
)
from tilewright.ops.wgmma import waited
from tilewright.tiles.tile import Tile

__all__ = ["launch_ahead", "serves"]


@triton.jit
def _of_pairs(a, b, MINUS: tl.constexpr, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """a - b or a * b on both 16-bit halves of int32 lanes, each rounded once."""
    if not INTERPRET:
        name: tl.constexpr = "sub.rn." if MINUS else "mul.rn."
        kind: tl.constexpr = "f16x2" if dtype == tl.float16 else "bf16x2"
        return tl.inline_asm_elementwise(
            name + kind + " $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    if dtype == tl.float16:
        a_low, a_high = halves(a, dtype)
        b_low, b_high = halves(b, dtype)
    else:
        a_low, a_high = bits_to_float(a & 0xFFFF), high_to_float(a)
        b_low, b_high = bits_to_float(b & 0xFFFF), high_to_float(b)
    low = a_low - b_low if MINUS else a_low * b_low
    high = a_high - b_high if MINUS else a_high * b_high
    if dtype == tl.float16:
        low = low.to(tl.uint16, bitcast=True).to(tl.int32)
        high = high.to(tl.uint16, bitcast=True).to(tl.int32)
    else:
        low = bfloat16_bits(low).to(tl.int32)
        high = bfloat16_bits(high).to(tl.int32)
    return low | (high << 16)


@triton.jit
def _two_rows(q0, q1, at, there):
    """Words of rows n and n + 8: int32 [BLOCK_N / 2, 4, 2]."""
    there = tl.full(q0.shape, 1, tl.int1) & there
    return tl.join(tl.load(q0 + at, mask=there, other=0), tl.load(q1 + at, mask=there, other=0))


@triton.jit
def _step_words(q0, q1, stride, there, KK: tl.constexpr):
    """The words of 32 KK columns: int32 [BLOCK_N / 2, 4, 2, ..], the order of columns last."""
    q = _two_rows(q0, q1, 0, there)
    if KK == 2:
        q = tl.join(q, _two_rows(q0, q1, 4 * stride, there))
    elif KK == 4:
        even = tl.join(q, _two_rows(q0, q1, 8 * stride, there))
        odd = tl.join(_two_rows(q0, q1, 4 * stride, there), _two_rows(q0, q1, 12 * stride, there))
        q = tl.join(even, odd)
    return q


@triton.jit
def _as_words(v0, v1, q):
    """[BLOCK_N / 2] numbers of rows n and of rows n + 8, each where its words are in q."""
    v = tl.join(tl.expand_dims(v0, 1), tl.expand_dims(v1, 1))
    for _ in tl.static_range(len(q.shape) - 3):
        v = tl.expand_dims(v, len(v.shape))
    return tl.broadcast_to(v, q.shape)


@triton.jit
def _offset(zero, shift, ZEROS: tl.constexpr, dtype: tl.constexpr):
    """A loaded zero point as `code_pair` would give it."""
    if ZEROS == "bytes":
        z = zero.to(tl.int32)
    elif ZEROS == "packed":
        z = (zero >> shift) & 0xF
    else:
        z = tl.full(zero.shape, 8, tl.int32)
    return offset_pair(z, dtype)


@triton.jit
def _factor(scale, shift, SCALES: tl.constexpr):
    """A loaded scale in both halves of int32 lanes."""
    if SCALES == "two":
        return twice((scale >> shift) & 0xFFFF)
    else:
        return twice(scale.to(tl.uint16, bitcast=True).to(tl.int32))


@triton.jit
def _less_zeros(q, offset, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """Words as four tensors of pairs code - zero."""
    asm: tl.constexpr = "none" if INTERPRET else "nv"
    return (
        _of_pairs(code_pair(q, 0, dtype, asm), offset, True, dtype, INTERPRET),
        _of_pairs(code_pair(q, 1, dtype, asm), offset, True, dtype, INTERPRET),
        _of_pairs(code_pair(q, 2, dtype, asm), offset, True, dtype, INTERPRET),
        _of_pairs(code_pair(q, 3, dtype, asm), offset, True, dtype, INTERPRET),
    )


@triton.jit
def _scaled(p0, p1, p2, p3, factor, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    return (
        _of_pairs(p0, factor, False, dtype, INTERPRET),
        _of_pairs(p1, factor, False, dtype, INTERPRET),
        _of_pairs(p2, factor, False, dtype, INTERPRET),
        _of_pairs(p3, factor, False, dtype, INTERPRET),
    )


@triton.jit
def _split_pair(p, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    if INTERPRET and dtype == tl.bfloat16:
        return bits_to_float(p & 0xFFFF), high_to_float(p)
    else:
        return halves(p, dtype)


@triton.jit
def _operand(
    p0, p1, p2, p3, dtype: tl.constexpr, INTERPRET: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    """Pairs of weights as w [N, K]; only registers are renamed."""
    j0, j1 = _split_pair(p0, dtype, INTERPRET)
    j2, j3 = _split_pair(p1, dtype, INTERPRET)
    j4, j5 = _split_pair(p2, dtype, INTERPRET)
    j6, j7 = _split_pair(p3, dtype, INTERPRET)
    low = tl.join(tl.join(j0, j4), tl.join(j2, j6))
    high = tl.join(tl.join(j1, j5), tl.join(j3, j7))
    # Row 16 b + 8 r + i, column 32 kk + 16 p1 + 8 p0 + 2 c + h: [b, i, c, r, kk, p1, p0, h].
    w = tl.join(low, high).reshape(N // 16, 8, 4, 2, K // 32, 2, 2, 2)
    return w.permute(0, 3, 1, 4, 5, 6, 2, 7).reshape(N, K)


@triton.jit
def _w4a16_ahead_kernel(
    x_ptr, q_ptr, s_ptr, z_ptr, b_ptr, y_ptr,
    M, N, K,
    stride_xm, stride_xk, stride_qn, stride_qk, stride_sn, stride_sg, stride_zn, stride_zg,
    stride_ym, stride_yn,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    AWAIT: tl.constexpr, INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """One tile of y. Constants as of `triton_gemm`; BLOCK_K divides K."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = pid // (GROUP_M * tiles_n)
    band_rows = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    in_band = pid % (GROUP_M * tiles_n)
    pid_m = band * GROUP_M + in_band % band_rows
    pid_n = in_band // band_rows
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    KK: tl.constexpr = BLOCK_K // 32

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + tl.minimum(offs_m, M - 1)[None, :] * stride_xm + offs_k[:, None] * stride_xk
    row = tl.arange(0, BLOCK_N // 2)
    n0 = pid_n * BLOCK_N + row // 8 * 16 + row % 8
    n1 = tl.minimum(n0 + 8, N - 1)
    n0 = tl.minimum(n0, N - 1)
    word = tl.arange(0, 4)
    q0 = q_ptr + n0[:, None] * stride_qn + word[None, :] * stride_qk
    q1 = q_ptr + n1[:, None] * stride_qn + word[None, :] * stride_qk
    if SCALES == "two":
        s0 = s_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + n0 // 2
        s1 = s_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + n1 // 2
        stride_sg = stride_sg // 2
    else:
        s0 = s_ptr + n0 * stride_sn
        s1 = s_ptr + n1 * stride_sn
    z0 = z_ptr
    z1 = z_ptr
    if ZEROS == "bytes":
        z0 = z_ptr + n0 * stride_zn
        z1 = z_ptr + n1 * stride_zn
    elif ZEROS == "packed":
        z0 = z_ptr + (n0 // 8) * stride_zn
        z1 = z_ptr + (n1 // 8) * stride_zn
    shift_s0 = (n0 % 2) * 16
    shift_s1 = (n1 % 2) * 16
    shift_z0 = (n0 % 8) * 4
    shift_z1 = (n1 % 8) * 4
    eight = tl.full((BLOCK_N // 2,), 8, tl.int32)
    unit = tl.full((BLOCK_N // 2,), 0x3C00 if dtype == tl.float16 else 0x3F80, tl.int32)
    unit = twice(unit)

    # The first step's weights, and what the second's are made of.
    q = _step_words(q0, q1, stride_qk, True, KK)
    scale0 = tl.load(s0) if GROUP > 0 else eight
    scale1 = tl.load(s1) if GROUP > 0 else eight
    zero0 = tl.load(z0) if ZEROS != "none" else eight
    zero1 = tl.load(z1) if ZEROS != "none" else eight
    factor0 = _factor(scale0, shift_s0, SCALES) if GROUP > 0 else unit
    factor1 = _factor(scale1, shift_s1, SCALES) if GROUP > 0 else unit
    offset0 = _offset(zero0, shift_z0, ZEROS, dtype)
    offset1 = _offset(zero1, shift_z1, ZEROS, dtype)
    p0, p1, p2, p3 = _less_zeros(q, _as_words(offset0, offset1, q), dtype, INTERPRET)
    w0, w1, w2, w3 = _scaled(p0, p1, p2, p3, _as_words(factor0, factor1, q), dtype, INTERPRET)
    if FAULT != "first-twice":  # the second step multiplies with the first one's codes again
        q0 += BLOCK_K // 8 * stride_qk
        q1 += BLOCK_K // 8 * stride_qk
    q = _step_words(q0, q1, stride_qk, BLOCK_K < K, KK)
    if GROUP > 0:
        g = tl.minimum(BLOCK_K, K - 1) // GROUP
        scale0 = tl.load(s0 + g * stride_sg)
        scale1 = tl.load(s1 + g * stride_sg)
        if ZEROS != "none":
            zero0 = tl.load(z0 + g * stride_zg)
            zero1 = tl.load(z1 + g * stride_zg)

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    end_k = K
    if FAULT == "last-step":  # what was made ahead for the last step is never multiplied
        end_k = K - BLOCK_K
    elif FAULT == "odd-step":  # steps come in pairs, and one left over is dropped
        end_k = K // (2 * BLOCK_K) * (2 * BLOCK_K)
    for k in range(0, end_k, BLOCK_K):
        x = tl.load(x_ptrs)
        x_ptrs += BLOCK_K * stride_xk
        q0 += BLOCK_K // 8 * stride_qk
        q1 += BLOCK_K // 8 * stride_qk
        next_q = _step_words(q0, q1, stride_qk, k + 2 * BLOCK_K < K, KK)
        next_s0, next_s1, next_z0, next_z1 = scale0, scale1, zero0, zero1
        if GROUP > 0:
            g = tl.minimum(k + 2 * BLOCK_K, K - 1) // GROUP
            if FAULT == "scale-behind":  # the scales of the step before
                g = tl.minimum(k + BLOCK_K, K - 1) // GROUP
            next_s0 = tl.load(s0 + g * stride_sg)
            next_s1 = tl.load(s1 + g * stride_sg)
            if FAULT == "scale-behind":
                g = tl.minimum(k + 2 * BLOCK_K, K - 1) // GROUP
            elif FAULT == "zero-ahead":  # the zero points of the step after
                g = tl.minimum(k + 3 * BLOCK_K, K - 1) // GROUP
            if ZEROS != "none":
                next_z0 = tl.load(z0 + g * stride_zg)
                next_z1 = tl.load(z1 + g * stride_zg)
        w = _operand(w0, w1, w2, w3, dtype, INTERPRET, BLOCK_N, BLOCK_K)
        if INTERPRET:
            x = to_float32(x, INTERPRET) if dtype == tl.bfloat16 else x
        acc = tl.dot(w, x, acc, input_precision="ieee")
        offset0 = _offset(zero0, shift_z0, ZEROS, dtype)
        offset1 = _offset(zero1, shift_z1, ZEROS, dtype)
        p0, p1, p2, p3 = _less_zeros(q, _as_words(offset0, offset1, q), dtype, INTERPRET)
        factor0 = _factor(scale0, shift_s0, SCALES) if GROUP > 0 else unit
        factor1 = _factor(scale1, shift_s1, SCALES) if GROUP > 0 else unit
        if FAULT == "row-pair":  # rows n and n + 8 share the scale of the first
            factor1 = factor0
        nought = 0
        if AWAIT:
            # Always so, which LLVM sees; Triton puts what is conditional last, behind the copies
            # of x that it starts here.
            if k < K:
                nought = waited(k)
        factor = _as_words(factor0 | nought, factor1 | nought, q)
        w0, w1, w2, w3 = _scaled(p0, p1, p2, p3, factor, dtype, INTERPRET)
        q = next_q
        scale0, scale1, zero0, zero1 = next_s0, next_s1, next_z0, next_z1

    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_n = tl.minimum(offs_n, N - 1)
    if GROUP == 0:
        acc *= to_float32(tl.load(s_ptr + row_n * stride_sn), INTERPRET)[:, None]
    if HAS_BIAS:
        acc += to_float32(tl.load(b_ptr + row_n), INTERPRET)[:, None]
    if INTERPRET and dtype == tl.bfloat16:
        acc = bfloat16_bits(acc).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    y_ptrs = y_ptr + offs_m[None, :] * stride_ym + offs_n[:, None] * stride_yn
    rows = M
    if FAULT == "whole-tiles":  # the last rows are no whole tile: skipped
        rows = M // BLOCK_M * BLOCK_M
    elif FAULT == "row-beyond":  # one row too many
        rows = M + 1
    tl.store(y_ptrs, acc.to(dtype), mask=(offs_m < rows)[None, :] & (offs_n < N)[:, None])


def serves(
    tile: Tile,
    x: torch.Tensor,
    weight: WordsW4,
    arguments: Mapping[str, Any],
    *,
    wide: bool,
    interpreted: bool,
) -> bool:
    """Whether the kernel serves a product.

    It asks for words of the order "k32", scales of the dtype of x, which has 16 bits, a K of whole
    steps, and offsets of 32 bits.

    Args:
        arguments: of `triton_gemm.weight_arguments`.
        wide: some operand spans 2^31 elements.
    """
    made = arguments["ASM"] == "nv" or (interpreted and x.dtype != torch.float32)
    return (
        made and weight.order == "k32" and weight.scales.dtype == x.dtype
        and tile.block_k in (32, 64, 128) and weight.K % tile.block_k == 0 and not wide
    )  # fmt: skip


def launch_ahead(
    x: torch.Tensor,
    weight: WordsW4,
    strides: tuple[int, ...],
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    arguments: Mapping[str, Any],
    *,
    awaited: bool,
    interpreted: bool,
) -> None:
    """Write x @ W.T + bias to y; `serves` holds.

    Args:
        strides: of words, scales and zero points.
        arguments: of `triton_gemm.weight_arguments`.
        awaited: whether the chip multiplies by wgmma.
    """
    m, k = x.shape
    _w4a16_ahead_kernel[(triton.cdiv(m, tile.block_m) * triton.cdiv(weight.N, tile.block_n),)](
        x, weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias, y,
        m, weight.N, k,
        *x.stride(), *strides, *y.stride(),
        GROUP=arguments["GROUP"], ZEROS=arguments["ZEROS"], SCALES=arguments["SCALES"],
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        AWAIT=awaited, INTERPRET=interpreted, FAULT=tile.as_dict().get("planted", ""),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
