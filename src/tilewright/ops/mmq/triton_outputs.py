"""Outputs of Triton kernels of mmq and moe: whose tile it is, how it is stored, sums of shares."""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.ops.w4a16.triton_parts import bfloat16_bits, to_float32

__all__ = ["launch_sum"]

_SUMMED: int = 256  # outputs of a program of the second pass


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: bands of GROUP_M rows of tiles, column after column, so that x and
    w stay in the cache."""
    band = tile // (GROUP_M * tiles_n)
    band_rows = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    in_band = tile % (GROUP_M * tiles_n)
    return band * GROUP_M + in_band % band_rows, in_band // band_rows


@triton.jit
def store(y_ptrs, v, mask, INTERPRET: tl.constexpr):
    """float32 rounded once to the dtype of y."""
    dtype: tl.constexpr = y_ptrs.dtype.element_ty
    if INTERPRET and dtype == tl.bfloat16:
        v = bfloat16_bits(v).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(y_ptrs, v.to(dtype), mask=mask)


@triton.jit
def _sum_kernel(
    p_ptr, b_ptr, y_ptr, M, N, stride_ym, stride_yn,
    SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
    FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK values of y, from the shares of K in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.cast(M, tl.int64) * N  # Triton makes constants of sizes of 1
    mask = at < size
    m = at // N
    n = at % N
    y = tl.zeros((BLOCK,), tl.float32)
    shares: tl.constexpr = SPLIT - 1 if FAULT == "lost-partial" else SPLIT
    for share in tl.static_range(shares):
        y += tl.load(p_ptr + share * size + at, mask=mask, other=0.0)
    if HAS_BIAS:
        y += to_float32(tl.load(b_ptr + n, mask=mask, other=0.0), INTERPRET)
    store(y_ptr + m * stride_ym + n * stride_yn, y, mask, INTERPRET)


_sum_of_few_rows: Any = triton.jit(_sum_kernel.fn, do_not_specialize=["M"])
"""One compiled kernel for every number of rows, of which 1 and 16 would have their own."""

_INTERPRETED: bool = not isinstance(_sum_kernel, triton.JITFunction)


def launch_sum(
    partials: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    split: int,
    fault: str = "",
    *,
    few_rows: bool = False,
) -> None:
    """Write the sum of `split` shares of K, `partials` [split, M, N] float32, and the bias to y.

    Args:
        fault: "lost-partial" to leave out the last share, for the gate to find.
        few_rows: whether one compiled kernel should serve every M.
    """
    m, n = y.shape
    kernel = _sum_of_few_rows if few_rows else _sum_kernel
    kernel[(triton.cdiv(m * n, _SUMMED),)](
        partials, partials if bias is None else bias, y, m, n, *y.stride(),
        SPLIT=split, HAS_BIAS=bias is not None, BLOCK=_SUMMED, INTERPRET=_INTERPRETED, FAULT=fault,
        num_warps=2,
    )  # fmt: skip
