"""x to 8 bits for integer dots on a GPU: each 32 values of a row share one scale.

::

    d = max|x| / 127        q = x / d, rounded to the nearest integer, halves away from zero

Columns lie in the order in which the codes of a weight type come out of their words, four at a time
(`int8_parts`), so that no code has to be moved::

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
    mask = (m < MP) & (block < K // 32)
    at = block.to(tl.int64) * MP + m
    column = tl.arange(0, 32)

    x_ptrs = x_ptr + (m.to(tl.int64) * stride_xm + block.to(tl.int64) * 32 * stride_xk)[:, None]
    x = tl.load(x_ptrs + (column * stride_xk)[None, :], mask=(mask & (m < M))[:, None], other=0.0)
    x = to_float32(x, INTERPRET)  # [PAIRS, 32]
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    lost = tl.max(exponent, axis=1) == 0x7F800000
    x = tl.where(exponent == 0x7F800000, 0.0, x)
    top = tl.max(tl.abs(x), axis=1)
    d = tl.where(lost, float("nan"), top / 127.0)
    # 127 / top would overflow where x is as small as float32 can be: there x is made larger first.
    larger = tl.where(top < 1e-30, 1.8446744073709552e19, 1.0)
    inverse = 127.0 / tl.where(top > 0.0, top * larger, 1.0)
    level = tl.abs(x * larger[:, None]) * inverse[:, None]
    whole = tl.floor(level + 0.5)
    q = tl.where(x < 0.0, -whole, whole)

    # Column j of a block is (word r, b % 2, field f, b / 2) in digits of LOW, 2, F and 2.
    F: tl.constexpr = 8 // LOW
    codes = q.to(tl.int8).reshape(PAIRS, LOW, 2, F, 2)
    if SUB == 32 and LOW == 4:
        codes = codes.permute(0, 3, 1, 4, 2)
    else:
        codes = codes.permute(0, 1, 3, 4, 2)
    q_ptrs = q_ptr + (at * 32)[:, None] + column[None, :]
    tl.store(q_ptrs, codes.reshape(PAIRS, 32), mask=mask[:, None])
    tl.store(d_ptr + at, d, mask=mask)
    if SUMS and SUB == 32:
        tl.store(sum_ptr + at, tl.sum(q, axis=1), mask=mask)
    elif SUMS:
        half = tl.arange(0, 2)
        sums = tl.sum(q.reshape(PAIRS, 2, 16), axis=2)
        sum_ptrs = sum_ptr + (2 * block.to(tl.int64) * MP + m)[:, None] + (half * MP)[None, :]
        tl.store(sum_ptrs, sums, mask=mask[:, None])


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
