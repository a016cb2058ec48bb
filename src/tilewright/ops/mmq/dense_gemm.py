"""mmq of many rows: a slab of weights dequantized once, then multiplied by the vendor's library.

::

    w[r, k] = scale * code + minimum        slab_n rows of W at a time, in scratch memory
    y[:, slab] = x . w^T                    torch.mm: cuBLAS, hipBLASLt

With thousands of rows of x a weight is used thousands of times, and what it costs to dequantize it
once and to write and read it again is little beside its products: for 4096 rows 5 % of them. The
weights in memory stay packed; the scratch holds one slab, which the last-level cache can keep.

Weights are rounded once to the dtype of x, as in `triton_gemm`, whose device functions do it. K is
a multiple of 32, or of 256. The library sums in float32; sums of shares of K it may round to the
dtype of x before it adds them, as in torch's own products, unless `torch.backends.cuda.matmul`
forbids that (`allow_fp16_reduced_precision_reduction` and its like for bfloat16).

FAULT plants one of the errors of `dense_space` for the gate to find. It is "" in every tile of the
space, and the compiler then sees none of it.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.errors import UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks
from tilewright.ops.mmq.triton_parts import codes_of, scales_of, weights_of
from tilewright.ops.w4a16.triton_parts import bfloat16_bits
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "launch_dense", "workspace_dense"]


@triton.jit
def _dequantize_kernel(
    low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, w_ptr, first, rows, K,
    stride_ln, stride_hn, stride_sn, stride_sb, stride_mn, stride_mb, stride_tn, stride_tb,
    LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr,
    SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr, SUB_OFFSET: tl.constexpr,
    SUB: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N x BLOCK_K weights of the slab that begins at row `first` and has `rows` rows."""
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    k = tl.program_id(0) * BLOCK_K
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(offs_n, rows - 1).to(tl.int64)
    if FAULT != "first-slab":
        row += first
    offs_k = k + tl.arange(0, BLOCK_K)
    offs_w = k * LOW // 32 + tl.arange(0, BLOCK_K * LOW // 32)
    sub = k // SUB + tl.arange(0, BLOCK_K // SUB)

    low_ptrs = low_ptr + row[:, None] * stride_ln + offs_w[None, :]
    mask_w = (offs_w < K * LOW // 32)[None, :]
    if EVEN_K:
        low = tl.load(low_ptrs)
    else:
        low = tl.load(low_ptrs, mask=mask_w, other=0)
    high = low
    if HIGH > 0:
        WORDS: tl.constexpr = LOW // HIGH  # of low that a word of high serves
        high_ptrs = high_ptr + row[:, None] * stride_hn + (offs_w // WORDS)[None, :]
        if EVEN_K:
            high = tl.load(high_ptrs)
        else:
            high = tl.load(high_ptrs, mask=mask_w, other=0)
        high = high >> (HIGH * (16 // LOW) * (offs_w % WORDS))[None, :]
    code = codes_of(low, high, LOW, HIGH, CODES, OFFSET)
    scale, minimum = scales_of(
        s_ptr + row[:, None] * stride_sn, m_ptr + row[:, None] * stride_mn,
        t_ptr + row[:, None] * stride_tn, sub, K // SUB, stride_sb, stride_mb, stride_tb,
        SCALING, MINIMUMS, BYTES, SUB_OFFSET, SUB, BLOCK, EVEN_K, FAULT,
    )  # fmt: skip
    KEPT: tl.constexpr = MINIMUMS and FAULT != "no-minimum"
    w = weights_of(code, scale, minimum, dtype, KEPT, SUB, INTERPRET)
    if INTERPRET and dtype == tl.bfloat16:
        w = bfloat16_bits(w).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    mask = (offs_n < rows)[:, None] & (offs_k < K)[None, :]
    if FAULT == "partial-rows":  # the last rows are no whole tile: skipped
        mask = mask & (offs_n < rows // BLOCK_N * BLOCK_N)[:, None]
    tl.store(w_ptr + offs_n[:, None].to(tl.int64) * K + offs_k[None, :], w, mask=mask)


INTERPRETED: bool = not isinstance(_dequantize_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


def workspace_dense(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """Floats of scratch and arrival counters that a tile needs: a slab of 16-bit weights, none."""
    return -(-min(N, tile.slab_n) * K // 2), 0


def launch_dense(
    x: torch.Tensor,
    weight: GpuBlocks,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses nor checks a rule; allocates what the library
    allots for itself, and a copy of a bias of another dtype.

    Args:
        x: [M, K] float16 or bfloat16, M >= 1, any strides.
        weight: on the device of x.
        bias: [N] of any floating dtype, contiguous; rounded to that of x, as the library asks.
        y: [M, N] of the dtype of x, rows contiguous.
        tile: "dense" of `triton_space.TRITON_SPACE`, or a planted one.
        workspace: `partials` of what `workspace_dense` says; any content.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    if x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            "mmq: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before "
            "the first import of the kernel, or move x to a GPU"
        )
    k = x.shape[1]
    scratch = workspace.partials.view(x.dtype)
    added = None if bias is None else bias.to(x.dtype)
    for first in range(0, weight.N, tile.slab_n):
        rows = min(tile.slab_n, weight.N - first)
        slab = scratch[: rows * k].view(rows, k)
        _dequantize(weight, first, slab, tile)
        out = y[:, first : first + rows]
        if x.device.type == "cpu":
            product = x.float() @ slab.float().T  # sums as the library's on GPUs: float32
            out.copy_(product if bias is None else product + bias[first : first + rows].float())
        elif added is None:
            torch.mm(x, slab.T, out=out)
        else:
            torch.addmm(added[first : first + rows], x, slab.T, out=out)


def _dequantize(weight: GpuBlocks, first: int, slab: torch.Tensor, tile: Tile) -> None:
    """Write rows `first` .. `first` + len(slab) - 1 of a weight to slab [rows, K]."""
    rows, k = slab.shape
    form, block = weight.form, BLOCK_TYPES[weight.type_name].block_size
    high, scales = weight.high, weight.scales
    minimums, subs = weight.minimums, weight.sub_scales
    _dequantize_kernel[(triton.cdiv(k, tile.block_k), triton.cdiv(rows, tile.block_n))](
        weight.low, weight.low if high is None else high, scales,
        scales if minimums is None else minimums, scales if subs is None else subs, slab,
        first, rows, k,
        weight.low.stride(0), 0 if high is None else high.stride(0), *scales.stride(),
        *(scales if minimums is None else minimums).stride(),
        *(scales if subs is None else subs).stride(),
        LOW=form.low.bits, HIGH=form.high_bits, CODES=form.codes, OFFSET=form.offset,
        SCALING=form.scaling, MINIMUMS=minimums is not None, BYTES=form.sub_bytes,
        SUB_OFFSET=form.sub_offset, SUB=form.sub, BLOCK=block,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN_K=k % tile.block_k == 0,
        INTERPRET=INTERPRETED, FAULT=tile.as_dict().get("planted", ""), num_warps=tile.num_warps,
    )  # fmt: skip
