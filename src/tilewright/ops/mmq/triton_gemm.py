"""mmq in portable Triton: GGUF blocks become weights in registers. NVIDIA, AMD, the interpreter.

::

    y[m, n] = sum_k x[m, k] * (scale[n, k / SUB] * code[n, k] + minimum[n, k / SUB]) + bias[n]

    w [BLOCK_N, BLOCK_K] . x^T [BLOCK_K, BLOCK_M]     acc [BLOCK_N, BLOCK_M] float32

One program computes BLOCK_M x BLOCK_N of y. A step of its K loop loads x, the words of the codes
and what their scales are made of, dequantizes (`triton_parts`), rounds the weights once to the
dtype of x, and multiplies. Weights lie as `tilewright.layout.blocks` draws them, for all 13 types;
what differs between types is a constexpr. K is a multiple of 32, or of 256, BLOCK_K of 32.

With SPLIT > 1 the grid has a second dimension, of shares of K: few rows of x are read by many
programs at once. Sums of shares go to `partials` [SPLIT, M, N] float32, and a second kernel adds
them in their order: two launches agree bit for bit. A share without a step writes zeros.

Rows past M and N repeat the last row, and are not stored: no load needs a mask for them. Columns
past K are masked where BLOCK_K does not divide K (EVEN_K). On Hopper each step waits for its
products (AWAIT, see `tilewright.ops.wgmma`).

The interpreter holds bfloat16 as integers, and would multiply the bit patterns. There (INTERPRET)
the kernel rounds by hand and multiplies in float32, which changes no product.

FAULT plants one of the errors of `triton_planted` for the gate to find. It is "" in every tile of
the space, and the compiler then sees none of it.
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
from tilewright.ops.cross import target_arch
from tilewright.ops.mmq.triton_outputs import launch_sum, store, tile_of
from tilewright.ops.mmq.triton_parts import bias_of, codes_of, scales_of, weights_of
from tilewright.ops.w4a16.triton_gemm import spans_wide
from tilewright.ops.w4a16.triton_parts import to_float32
from tilewright.ops.wgmma import awaited, has_wgmma
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "launch_mmq", "workspace_mmq"]


@triton.jit
def _mmq_kernel(
    x_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, b_ptr, y_ptr, p_ptr,
    M, N, K,
    stride_xm, stride_xk, stride_ln, stride_hn, stride_sn, stride_sb, stride_mn, stride_mb,
    stride_tn, stride_tb, stride_ym, stride_yn,
    LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr,
    SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr, SUB_OFFSET: tl.constexpr,
    SUB: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, AWAIT: tl.constexpr,
    INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """One tile of y, or of one share of it."""
    pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_w = tl.arange(0, BLOCK_K * LOW // 32)
    offs_s = tl.arange(0, BLOCK_K // SUB)
    row_m = tl.minimum(offs_m, M - 1)
    row_n = tl.minimum(offs_n, N - 1)
    if WIDE:  # some operand spans 2^31 elements
        offs_m = offs_m.to(tl.int64)
        offs_n = offs_n.to(tl.int64)
        offs_k = offs_k.to(tl.int64)
        offs_s = offs_s.to(tl.int64)
        row_m = row_m.to(tl.int64)
        row_n = row_n.to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    x_ptrs = x_ptr + row_m[None, :] * stride_xm + offs_k[:, None] * stride_xk
    low_ptrs = low_ptr + row_n[:, None] * stride_ln + offs_w[None, :]
    high_ptrs = high_ptr + row_n[:, None] * stride_hn
    s_ptrs = s_ptr + row_n[:, None] * stride_sn
    m_ptrs = m_ptr + row_n[:, None] * stride_mn
    t_ptrs = t_ptr + row_n[:, None] * stride_tn
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    steps = tl.cdiv(K, BLOCK_K)
    if FAULT == "k-tail":
        steps = K // BLOCK_K
    first = 0
    if SPLIT > 1:
        each = tl.cdiv(steps, SPLIT)
        first = tl.program_id(1) * each
        steps = tl.minimum(first + each, steps)

    for step in range(first, steps):
        k = step * BLOCK_K
        word = k * LOW // 32
        x_k = k
        if WIDE:
            x_k = k.to(tl.int64)
        if EVEN_K:
            x = tl.load(x_ptrs + x_k * stride_xk)
            low = tl.load(low_ptrs + word)
        else:
            x = tl.load(x_ptrs + x_k * stride_xk, mask=(offs_k < K - k)[:, None], other=0.0)
            mask_w = (offs_w < K * LOW // 32 - word)[None, :]
            low = tl.load(low_ptrs + word, mask=mask_w, other=0)
        high = low
        if HIGH > 0:
            WORDS: tl.constexpr = LOW // HIGH  # of low that a word of high serves
            at = (word + offs_w) // WORDS
            if EVEN_K:
                high = tl.load(high_ptrs + at[None, :])
            else:
                high = tl.load(high_ptrs + at[None, :], mask=mask_w, other=0)
            high = high >> (HIGH * (16 // LOW) * (offs_w % WORDS))[None, :]
        code = codes_of(low, high, LOW, HIGH, CODES, OFFSET)
        scale, minimum = scales_of(
            s_ptrs, m_ptrs, t_ptrs, k // SUB + offs_s, K // SUB, stride_sb, stride_mb, stride_tb,
            SCALING, MINIMUMS, BYTES, SUB_OFFSET, SUB, BLOCK, EVEN_K, FAULT,
        )  # fmt: skip
        KEPT: tl.constexpr = MINIMUMS and FAULT != "no-minimum"
        w = weights_of(code, scale, minimum, dtype, KEPT, SUB, INTERPRET)
        if INTERPRET and dtype == tl.bfloat16:
            x = to_float32(x, INTERPRET)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if AWAIT:
            acc = awaited(acc)

    mask_y = (offs_m < M)[None, :] & (offs_n < N)[:, None]
    if SPLIT > 1:
        row_p = (tl.program_id(1).to(tl.int64) * M + offs_m) * N
        tl.store(p_ptr + row_p[None, :] + offs_n[:, None], acc, mask=mask_y)
        return
    if HAS_BIAS:
        acc += bias_of(b_ptr + row_n, INTERPRET)[:, None]
    if FAULT == "partial-rows":  # the last rows are no whole tile: skipped
        mask_y = mask_y & (offs_m < M // BLOCK_M * BLOCK_M)[None, :]
    elif FAULT == "past-the-end":  # one row too many
        mask_y = (offs_m < M + 1)[None, :] & (offs_n < N)[:, None]
    y_ptrs = y_ptr + offs_m[None, :] * stride_ym + offs_n[:, None] * stride_yn
    store(y_ptrs, acc, mask_y, INTERPRET)


INTERPRETED: bool = not isinstance(_mmq_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


def workspace_mmq(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """Floats of partial sums and arrival counters that a tile needs: the shares, and none."""
    return (tile.split_k * M * N if tile.split_k > 1 else 0), 0


def launch_mmq(
    x: torch.Tensor,
    weight: GpuBlocks,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses, allocates nor checks a rule.

    Args:
        x: [M, K], M >= 1, any strides.
        weight: on the device of x.
        bias: [N] of any floating dtype, contiguous.
        y: [M, N] of the dtype of x, any strides.
        tile: of `triton_space.TRITON_SPACE`, or a planted one.
        workspace: `partials` of what `workspace_mmq` says; any content.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    if x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            "mmq: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before "
            "the first import of the kernel, or move x to a GPU"
        )
    m, k = x.shape
    n, form, block = weight.N, weight.form, BLOCK_TYPES[weight.type_name].block_size
    high, scales = weight.high, weight.scales
    minimums, subs = weight.minimums, weight.sub_scales
    fault = tile.as_dict().get("planted", "")
    partials = workspace.partials if tile.split_k > 1 else scales
    _mmq_kernel[(triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), tile.split_k)](
        x, weight.low, weight.low if high is None else high, scales,
        scales if minimums is None else minimums, scales if subs is None else subs,
        scales if bias is None else bias, y, partials,
        m, n, k,
        *x.stride(), weight.low.stride(0), 0 if high is None else high.stride(0),
        *scales.stride(), *(scales if minimums is None else minimums).stride(),
        *(scales if subs is None else subs).stride(), *y.stride(),
        LOW=form.low.bits, HIGH=form.high_bits, CODES=form.codes, OFFSET=form.offset,
        SCALING=form.scaling, MINIMUMS=minimums is not None, BYTES=form.sub_bytes,
        SUB_OFFSET=form.sub_offset, SUB=form.sub, BLOCK=block, HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        SPLIT=tile.split_k, EVEN_K=k % tile.block_k == 0,
        WIDE=any(spans_wide(t) for t in (x, y, *weight.tensors)),
        AWAIT=has_wgmma(target_arch(x.device)), INTERPRET=INTERPRETED, FAULT=fault,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if tile.split_k > 1:
        launch_sum(partials, bias, y, tile.split_k, fault)
