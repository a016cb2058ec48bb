"""W4A16 for few rows of x in portable Triton: every weight is read once, and K is split.

::

    y[m, n] = sum_k x[m, k] * s[n, k // G] * (q[n, k] - z[n, k // G]) + bias[n]

Decoding reads far more weights than it multiplies; what counts is how many loads are in flight.
The grid is (tiles of y) x (split_k shares of K). With split_k > 1 sums go to `partials` [split_k,
M, N] float32, and a second kernel adds the shares in their order, so that two launches agree bit
for bit; no atomics, no counters. A share without a step of K writes zeros.

block_m >= 16   the kernel of `triton_gemm`, weights as the left operand of its dot.
block_m < 16    no matrix units. A program walks its share in steps of BLOCK_K and keeps one sum a
                row of x, a row of w and a word: no reduction, no exchange within the loop::

    q [BLOCK_N, BLOCK_K / 8]  -> 4 pairs of codes q - z, exact in float16, then float32
    part += (q - z) * x       BLOCK_M tensors [BLOCK_N, BLOCK_K / 8] float32
    acc  += part * s          once a step: a step lies in one group

There weights are not rounded at all. At the end each acc is summed over the words. Every row of x
has sums of its own, so M is at most BLOCK_M, and BLOCK_M x BLOCK_N x BLOCK_K / 8 sums live in
registers. Rows of x past M repeat the last one.

FAULT is as in `triton_gemm`.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there. Its tuples
# grow.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.layout.triton import WordsW4
from tilewright.ops.cross import target_arch
from tilewright.ops.w4a16.triton_defaults import LEAST_DOT
from tilewright.ops.w4a16.triton_gemm import (
    INTERPRETED,
    asm_of,
    check_device,
    launch_shares,
    spans_wide,
    weight_arguments,
    weight_strides,
    weight_tensors,
)
from tilewright.ops.w4a16.triton_parts import (
    bfloat16_bits,
    bits_to_float,
    code_pair,
    halves,
    to_float32,
)
from tilewright.tiles.tile import Tile

__all__ = ["launch_w4a16_skinny", "workspace_skinny"]

_SUMMED: int = 256  # outputs of a program of the second pass


@triton.jit
def _store(y_ptrs, v, mask, INTERPRET: tl.constexpr):
    """float32 rounded once to the dtype of y."""
    dtype: tl.constexpr = y_ptrs.dtype.element_ty
    if INTERPRET and dtype == tl.bfloat16:
        v = bfloat16_bits(v).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(y_ptrs, v.to(dtype), mask=mask)


@triton.jit
def _two_columns(
    x_ptr, at_k, K, stride_xk, X_PAIRS: tl.constexpr, EVEN_K: tl.constexpr, INTERPRET: tl.constexpr
):
    """Columns at_k, which are even, and at_k + 1 of a row of x as float32; 0 past K."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if X_PAIRS:
        pairs = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at_k // 2
        if EVEN_K:
            pair = tl.load(pairs)
        else:
            pair = tl.load(pairs, mask=at_k < K, other=0)
        if dtype == tl.bfloat16:
            return bits_to_float(pair & 0xFFFF), bits_to_float((pair >> 16) & 0xFFFF)
        else:
            x0, x1 = halves(pair, dtype)
            return x0.to(tl.float32), x1.to(tl.float32)
    else:
        if EVEN_K:
            x0 = tl.load(x_ptr + at_k * stride_xk)
            x1 = tl.load(x_ptr + (at_k + 1) * stride_xk)
        else:
            x0 = tl.load(x_ptr + at_k * stride_xk, mask=at_k < K, other=0.0)
            x1 = tl.load(x_ptr + (at_k + 1) * stride_xk, mask=at_k < K - 1, other=0.0)
        return to_float32(x0, INTERPRET), to_float32(x1, INTERPRET)


@triton.jit
def _w4a16_skinny_kernel(
    x_ptr, q_ptr, s_ptr, z_ptr, b_ptr, y_ptr, p_ptr,
    M, N, K,
    stride_xm, stride_xk, stride_qn, stride_qk, stride_sn, stride_sg, stride_zn, stride_zg,
    stride_ym, stride_yn,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    X_PAIRS: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, INTERPRET: tl.constexpr,
    FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of y, or of one share of it."""
    pid_n = tl.program_id(0)
    share = tl.program_id(1)
    steps = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(steps, SPLIT)
    if FAULT == "split-boundary":  # whole shares only: what is left over belongs to nobody
        each = steps // SPLIT
    first = share * each
    last = tl.minimum(first + each, steps)

    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_w = tl.arange(0, BLOCK_K // 8)
    row_n = tl.minimum(offs_n, N - 1)
    mask_n = offs_n < N
    shift_z = (row_n % 8) * 4
    if WIDE:
        offs_n = offs_n.to(tl.int64)
        offs_w = offs_w.to(tl.int64)
        row_n = row_n.to(tl.int64)
    # The column of code 0 of a word; those of the others follow at 8 p + h, or at 2 p + h.
    PAIR: tl.constexpr = 2 if WORDS == "k8" else 8
    WORD_K: tl.constexpr = 8 if WORDS == "k8" else 32
    offs_x = offs_w * 8 if WORDS == "k8" else offs_w // 4 * 32 + offs_w % 4 * 2

    q_ptrs = q_ptr + row_n[:, None] * stride_qn
    s_ptrs = s_ptr + row_n * stride_sn
    z_ptrs = z_ptr
    if ZEROS == "bytes":
        z_ptrs = z_ptr + row_n * stride_zn
    elif ZEROS == "packed":
        z_ptrs = z_ptr + (row_n // 8) * stride_zn
    zero = tl.full((BLOCK_N,), 8, tl.int32)
    none = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    acc = (none,) * BLOCK_M

    for step in range(first, last):
        k = step * BLOCK_K
        at_w = (offs_w + k // 8)[None, :]
        if EVEN_K:
            q = tl.load(q_ptrs + at_w * stride_qk)
        else:
            mask_w = at_w < tl.cdiv(K, WORD_K) * (WORD_K // 8)
            q = tl.load(q_ptrs + at_w * stride_qk, mask=mask_w, other=0)
        g = 0
        if GROUP > 0:
            g = k // GROUP
        scale = to_float32(tl.load(s_ptrs + g * stride_sg), INTERPRET)[:, None]
        if ZEROS == "bytes":
            zero = tl.load(z_ptrs + g * stride_zg).to(tl.int32)
        elif ZEROS == "packed":
            zero = (tl.load(z_ptrs + g * stride_zg) >> shift_z) & 0xF
        offset = (zero + 1024).to(tl.float16)[:, None]
        part = (none,) * BLOCK_M
        for p in tl.static_range(4):
            low, high = halves(code_pair(q, p, tl.float16, ASM), tl.float16)
            low = (low - offset).to(tl.float32)  # [BLOCK_N, BLOCK_K / 8]
            high = (high - offset).to(tl.float32)
            at_k = offs_x + (k + p * PAIR)
            added = ()
            for m in tl.static_range(BLOCK_M):
                x_row = x_ptr + tl.cast(tl.minimum(m, M - 1), tl.int64) * stride_xm
                x0, x1 = _two_columns(x_row, at_k, K, stride_xk, X_PAIRS, EVEN_K, INTERPRET)
                added = added + (part[m] + low * x0[None, :] + high * x1[None, :],)
            part = added
        scaled = ()
        for m in tl.static_range(BLOCK_M):
            scaled = scaled + (acc[m] + part[m] * scale,)
        acc = scaled

    if FAULT == "stale-partial":  # a share without a step leaves its place as it was
        mask_n = mask_n & (first < last)
    for m in tl.static_range(BLOCK_M):
        y = tl.sum(acc[m], axis=1)  # [BLOCK_N]
        if SPLIT > 1:
            row_p = (m + share * M) * (N + tl.zeros((1,), tl.int64))
            tl.store(p_ptr + row_p + offs_n, y, mask=mask_n & (m < M))
        else:
            if HAS_BIAS:
                y += to_float32(tl.load(b_ptr + row_n), INTERPRET)
            row_y = tl.cast(tl.minimum(m, M - 1), tl.int64)
            y_ptrs = y_ptr + row_y * stride_ym + offs_n * stride_yn
            _store(y_ptrs, y, mask_n & (m < M), INTERPRET)


@triton.jit
def _sum_kernel(
    p_ptr, b_ptr, y_ptr, M, N, stride_ym, stride_yn,
    SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
    FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK values of y, from the shares of K in their order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < M * N
    m = (at // N).to(tl.int64)
    n = (at % N).to(tl.int64)
    y = tl.zeros((BLOCK,), tl.float32)
    shares: tl.constexpr = SPLIT - 1 if FAULT == "lost-partial" else SPLIT
    for share in tl.static_range(shares):
        y += tl.load(p_ptr + (m + share * M) * N + n, mask=mask, other=0.0)
    if HAS_BIAS:
        y += to_float32(tl.load(b_ptr + n, mask=mask, other=0.0), INTERPRET)
    y_ptrs = y_ptr + m * stride_ym + n * stride_yn
    _store(y_ptrs, y, mask, INTERPRET)


def _in_pairs(x: torch.Tensor) -> bool:
    """Whether columns 2i and 2i + 1 of x are one aligned 32-bit number in every row."""
    row, column = x.stride()
    return (
        x.element_size() == 2 and column == 1 and row % 2 == 0 and x.shape[1] % 2 == 0
        and x.storage_offset() % 2 == 0
    )  # fmt: skip


def workspace_skinny(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """Floats of partial sums and arrival counters that a tile needs: the shares, and none."""
    return (tile.split_k * M * N if tile.split_k > 1 else 0), 0


def launch_w4a16_skinny(
    x: torch.Tensor,
    weight: WordsW4,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses, allocates nor checks a rule.

    Args:
        x: [M, K], any strides, columns in the weight's order; M at most tile.block_m, if that is
            less than 16.
        weight: on the device of x.
        bias: [N] of any floating dtype, contiguous.
        y: [M, N] of the dtype of x, any strides.
        tile: "skinny" of `triton_space.TRITON_SPACE`, or a planted one.
        workspace: `partials` of what `workspace_skinny` says; any content.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    check_device(x)
    m, n = x.shape[0], weight.N
    partials = None
    if tile.split_k > 1:
        partials = workspace.partials[: tile.split_k * m * n].view(tile.split_k, m, n)
    if tile.block_m >= LEAST_DOT:
        dequant = "scalar" if x.dtype == torch.float32 else "asm"
        launch_shares(x, weight, bias, y, partials, tile, order="wx", dequant=dequant)
    else:
        _launch_sums(x, weight, bias, y, partials, tile)
    if partials is not None:
        _sum_kernel[(triton.cdiv(m * n, _SUMMED),)](
            partials, weight.scales if bias is None else bias, y, m, n, *y.stride(),
            SPLIT=tile.split_k, HAS_BIAS=bias is not None, BLOCK=_SUMMED, INTERPRET=INTERPRETED,
            FAULT=tile.as_dict().get("planted", ""), num_warps=2,
        )  # fmt: skip


def _launch_sums(
    x: torch.Tensor,
    weight: WordsW4,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    partials: torch.Tensor | None,
    tile: Tile,
) -> None:
    k = x.shape[1]
    arguments = weight_arguments(weight, x.dtype, "packed", "")
    _w4a16_skinny_kernel[(triton.cdiv(weight.N, tile.block_n), tile.split_k)](
        x, weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias, y, weight.scales if partials is None else partials,
        x.shape[0], weight.N, k,
        *x.stride(), *weight_strides(weight), *y.stride(),
        GROUP=arguments["GROUP"], ZEROS=arguments["ZEROS"], WORDS=arguments["WORDS"],
        ASM=asm_of(target_arch(x.device), torch.float16), HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLIT=tile.split_k,
        X_PAIRS=_in_pairs(x), EVEN_K=k % max(tile.block_k, 32) == 0,
        WIDE=any(spans_wide(t) for t in (x, y, *weight_tensors(weight))),
        INTERPRET=INTERPRETED, FAULT=tile.as_dict().get("planted", ""),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
