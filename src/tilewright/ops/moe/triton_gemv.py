"""Few slots times their experts in portable Triton: no sorting, no matrix unit.

::

    y[s, n] = sum_k x[s // DIV, k] * W[ids[s]][n, k]                   for every slot s
    y[s, n] = act(gate) * up,  gate = .. W[e][n, k], up = .. W[e][N + n, k]     if FUSED

A program takes one slot and BLOCK_N rows of its expert, which the id itself names: no map is
needed. BLOCK_N is small enough for the few slots to fill a GPU, and the warps of a program share K:
every thread sums its own columns in float32, and the sums are added at the end. Weights are not
rounded. An expert that several slots name is read by each of them, from the cache but for the
first. A slot whose id names no expert gets NaN.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.layout.experts import GpuExperts
from tilewright.ops.mmq.triton_outputs import store
from tilewright.ops.moe.triton_parts import (
    activated,
    call_of,
    rows_of,
    step_columns,
    weight_pointers,
    weight_tile,
)
from tilewright.ops.w4a16.triton_parts import to_float32
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "launch_moe_gemv"]


@triton.jit(do_not_specialize=["experts"])
def _moe_gemv_kernel(
    x_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, perm_ptr, y_ptr, ids_ptr,
    N, K, experts,
    stride_xm, stride_xk, stride_le, stride_ln, stride_he, stride_hn, stride_se, stride_sn,
    stride_sb, stride_me, stride_mn, stride_mb, stride_te, stride_tn, stride_tb, stride_pe, group,
    stride_ym, stride_yn,
    DIV: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr,
    OFFSET: tl.constexpr, SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr,
    SUB_OFFSET: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, HAS_PERM: tl.constexpr,
    FUSED: tl.constexpr, ACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of one slot."""
    H: tl.constexpr = BLOCK_N // 2 if FUSED else BLOCK_N  # columns of y
    pid_n = tl.program_id(0)
    slot = tl.program_id(1)
    expert = tl.load(ids_ptr + slot)
    if FAULT == "first-choice":  # the other choices of a token go to its first
        expert = tl.load(ids_ptr + slot // DIV * DIV)
    offs_n = pid_n * H + tl.arange(0, H)
    mask_y = offs_n < N
    y_ptrs = y_ptr + slot.to(tl.int64) * stride_ym + offs_n * stride_yn
    if (expert < 0) | (expert >= experts):
        store(y_ptrs, tl.full((H,), float("nan"), tl.float32), mask_y, INTERPRET)
        return

    e = expert.to(tl.int64)
    row_n = rows_of(pid_n, N, BLOCK_N, FUSED, EVEN_N)
    offs_k = tl.arange(0, BLOCK_K)
    if WIDE:  # x spans 2^31 elements
        offs_k = offs_k.to(tl.int64)
    x_row = x_ptr + (slot // DIV).to(tl.int64) * stride_xm
    low_ptrs, high_ptrs, s_ptrs, m_ptrs, t_ptrs = weight_pointers(
        low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, e, row_n, stride_le, stride_ln, stride_he,
        stride_hn, stride_se, stride_sn, stride_me, stride_mn, stride_te, stride_tn, LOW, SCALING,
        BLOCK_K,
    )  # fmt: skip
    perm_ptr += e * stride_pe

    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        k = step * BLOCK_K
        column = offs_k + k
        of_x = step_columns(perm_ptr, column, K, HAS_PERM, EVEN_K) * stride_xk
        if EVEN_K:
            x = tl.load(x_row + of_x)
        else:
            x = tl.load(x_row + of_x, mask=column < K, other=0.0)
        w = weight_tile(
            low_ptrs, high_ptrs, s_ptrs, m_ptrs, t_ptrs, row_n, k, K, group, stride_sb, stride_mb,
            stride_tb, tl.float32, LOW, HIGH, CODES, OFFSET, SCALING, MINIMUMS, BYTES, SUB_OFFSET,
            SUB, BLOCK, BLOCK_K, EVEN_K, INTERPRET,
        )  # fmt: skip
        acc += w * to_float32(x, INTERPRET)[None, :]

    y = tl.sum(acc, 1)
    if FUSED:
        gate, up = tl.split(y.reshape(2, H).permute(1, 0))
        y = activated(gate, up, ACT)
    if FAULT == "partial-columns":  # the last columns are no whole tile: skipped
        mask_y = offs_n < N // H * H
    store(y_ptrs, y, mask_y, INTERPRET)


INTERPRETED: bool = not isinstance(_moe_gemv_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


def launch_moe_gemv(
    x: torch.Tensor,
    experts: GpuExperts | torch.Tensor,
    ids: torch.Tensor,
    y: torch.Tensor,
    tile: Tile,
    *,
    share: int,
    act: str = "",
) -> None:
    """Write the product of every slot. Neither chooses, allocates nor checks a rule.

    Args:
        x: [slots / share, K], any strides.
        experts: [E, N, K], on the device of x; fused, [E, 2 N, K]: gate's rows before up's. A
            dense tensor has contiguous rows.
        ids: int32 or int64 [slots], contiguous; at most 65535 of them.
        y: [slots, N] of any floating dtype and strides.
        tile: algorithm "gemv" of `gpu_space.MOE_SPACE`. Fused, a block_n of 1 counts as 2: a row
            of gate, and its of up.
        share: consecutive slots that read one row of x.
        act: "" for a plain product; fused, a value of `triton_parts.ACTIVATIONS`.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    rows = max(tile.block_n, 2) if act else tile.block_n  # gate and up are two at least
    call = call_of(x, experts, y, tile, rows, share=share, act=act, interpreted=INTERPRETED)
    _moe_gemv_kernel[(triton.cdiv(y.shape[1], call.columns), ids.numel())](
        *call.tensors, ids, *call.sizes, *call.strides, **call.constants, STAGES=tile.num_stages,
        FAULT=tile.as_dict().get("planted", ""),
    )  # fmt: skip
