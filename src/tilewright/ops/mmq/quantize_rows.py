"""x to 8 bits for integer dots on a GPU: each 32 values of a row share one scale.

::

    d = max|x| / 127        q = x / d, rounded to the nearest integer, halves away from zero

Columns lie as the words of a weight type unpack four at a time (`int8_parts.column_of`), so that
nobody has to put weights in order again and again::

    codes   int8    [K / 32, MP, 32]   the 32 values of one row together, rows next to each other
    scales  float32 [K / 32, MP]       d
    sums    float32 [K / SUB, MP]      sum of q over the SUB columns that one minimum is added to:
                                       whole numbers up to 4064, whatever the size of x

MP is M rounded up to the rows of a tile, so that who reads them needs to clamp no row; past M all
of them are zero.

A block of zeros has d = 0 and q = 0. A block with an Inf or a NaN has d = NaN: every number of y
that it takes part in becomes NaN, and none is quietly wrong. Sums are of q, not of d q: there is no
x whose sum they could not hold.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.ops.mmq.int8_parts import column_of
from tilewright.ops.w4a16.triton_parts import to_float32

__all__ = ["launch_quantize_rows"]

_PAIRS = 128  # blocks of rows that a program rounds
_ROWS = 8


@triton.jit
def _quantize_rows_kernel(
    x_ptr, q_ptr, d_ptr, sum_ptr, M, MP, K, stride_xm, stride_xk,
    LOW: tl.constexpr, SUB: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """ROWS rows of PAIRS / ROWS blocks: codes, scales, and sums if the weight has minimums."""
    pair = tl.arange(0, PAIRS)
    block = tl.program_id(1) * (PAIRS // ROWS) + pair // ROWS
    m = tl.program_id(0) * ROWS + pair % ROWS
    blocks = K // 32
    mask = (m < MP) & (block < blocks)
    at = block.to(tl.int64) * MP + m
    stored = tl.arange(0, 32)

    x_ptrs = x_ptr + (m.to(tl.int64) * stride_xm + block.to(tl.int64) * 32 * stride_xk)[:, None]
    x_ptrs += (column_of(stored, LOW, SUB) * stride_xk)[None, :]
    x = to_float32(
        tl.load(x_ptrs, mask=(mask & (m < M))[:, None], other=0.0), INTERPRET
    )  # [PAIRS, 32]
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    finite = exponent != 0x7F800000
    lost = tl.max((exponent == 0x7F800000).to(tl.int32), axis=1)
    x = tl.where(finite, x, 0.0)
    top = tl.max(tl.abs(x), axis=1)
    # |x| / top is at most 1 however small x is; where top is 0, so is x.
    level = tl.abs(x) / tl.where(top > 0.0, top, 1.0)[:, None] * 127.0
    whole = tl.floor(level)
    whole += tl.where(level - whole >= 0.5, 1.0, 0.0)
    q = tl.where(x < 0.0, -whole, whole)
    d = tl.where(lost > 0, float("nan"), top / 127.0)

    tl.store(q_ptr + (at * 32)[:, None] + stored[None, :], q.to(tl.int8), mask=mask[:, None])
    tl.store(d_ptr + at, d, mask=mask)
    if SUMS and SUB == 32:
        tl.store(sum_ptr + at, tl.sum(q, axis=1), mask=mask)
    elif SUMS:  # stored columns 0 .. 15 are the first half of the block
        first = tl.sum(tl.where((stored < 16)[None, :], q, 0.0), axis=1)
        second = tl.sum(tl.where((stored < 16)[None, :], 0.0, q), axis=1)
        at = 2 * block.to(tl.int64) * MP + m
        tl.store(sum_ptr + at, first, mask=mask)
        tl.store(sum_ptr + at + MP, second, mask=mask)


INTERPRETED: bool = not isinstance(_quantize_rows_kernel, triton.JITFunction)


def launch_quantize_rows(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor | None,
    *,
    padded: int,
    low: int,
    sub: int,
) -> None:
    """Write the 8-bit form of x.

    Args:
        x: [M, K], M >= 1, K a multiple of 32, any strides and floating dtype.
        codes, scales, sums: as the module draws them, contiguous; `sums` None for a weight without
            minimums.
        padded: MP, at least M.
        low: bits of a code in the weight's words.
        sub: columns that one minimum is added to, 16 or 32.
    """
    m, k = x.shape
    grid = (triton.cdiv(padded, _ROWS), triton.cdiv(k // 32, _PAIRS // _ROWS))
    _quantize_rows_kernel[grid](
        x, codes, scales, scales if sums is None else sums, m, padded, k, *x.stride(),
        LOW=low, SUB=sub, SUMS=sums is not None, ROWS=_ROWS, PAIRS=_PAIRS, INTERPRET=INTERPRETED,
        num_warps=4,
    )  # fmt: skip
