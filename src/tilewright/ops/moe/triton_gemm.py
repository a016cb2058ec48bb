"""Products of sorted rows with their experts in portable Triton: one launch for all experts.

::

    y[s, n] = sum_k x[s // DIV, k] * W[expert of s][n, k]              for every slot s
    y[s, n] = act(gate) * up,  gate = .. W[e][n, k], up = .. W[e][N + n, k]     if FUSED

    w [BLOCK_N, BLOCK_K] . x^T [BLOCK_K, BLOCK_M]     acc [BLOCK_N, BLOCK_M] float32

A program takes one tile of `triton_route`'s map: BLOCK_M slots at most of one expert, whose rows of
x it gathers (DIV is top_k where choices share a token's row, 1 where each slot has its own), and
BLOCK_N rows of the expert's weight. Tiles without rows end at once. Slots of ids that name no
expert get NaN. Results go to the rows of y that belong to the slots, each written once.

The grid is bands of GROUP_M tiles, column after column: tiles of one expert follow one another, and
read its weight from the cache. Weights are dequantized to the dtype of x, rounded once, as the left
operand of the dot. On Hopper that operand lies in registers under wgmma: each step then waits for
its products (AWAIT, see `tilewright.ops.wgmma`).
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.layout.experts import GpuExperts
from tilewright.ops.cross import target_arch
from tilewright.ops.mmq.triton_outputs import store, tile_of
from tilewright.ops.moe.triton_parts import (
    activated,
    call_of,
    rows_of,
    step_columns,
    weight_pointers,
    weight_tile,
)
from tilewright.ops.w4a16.triton_parts import to_float32
from tilewright.ops.wgmma import awaited, has_wgmma
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "launch_moe"]


@triton.jit(do_not_specialize=["experts", "tiles_m"])
def _moe_kernel(
    x_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, perm_ptr, y_ptr, slots_ptr, tiles_ptr,
    N, K, experts, tiles_m,
    stride_xm, stride_xk, stride_le, stride_ln, stride_he, stride_hn, stride_se, stride_sn,
    stride_sb, stride_me, stride_mn, stride_mb, stride_te, stride_tn, stride_tb, stride_pe, group,
    stride_ym, stride_yn,
    DIV: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr,
    OFFSET: tl.constexpr, SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr,
    SUB_OFFSET: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, HAS_PERM: tl.constexpr,
    FUSED: tl.constexpr, ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    WIDE: tl.constexpr, AWAIT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of y."""
    H: tl.constexpr = BLOCK_N // 2 if FUSED else BLOCK_N  # columns of y
    pid_m, pid_n = tile_of(tl.program_id(0), tiles_m, tl.cdiv(N, H), GROUP_M)

    expert = tl.load(tiles_ptr + 3 * pid_m)
    if expert < 0:
        return
    first = tl.load(tiles_ptr + 3 * pid_m + 1)
    last = tl.load(tiles_ptr + 3 * pid_m + 2)
    offs_m = first + tl.arange(0, BLOCK_M)
    slot = tl.load(slots_ptr + tl.minimum(offs_m, last - 1))
    offs_n = pid_n * H + tl.arange(0, H)
    y_ptrs = y_ptr + slot.to(tl.int64)[None, :] * stride_ym + offs_n[:, None] * stride_yn
    mask_y = (offs_m < last)[None, :] & (offs_n < N)[:, None]
    if expert >= experts:  # an id that names none
        store(y_ptrs, tl.full((H, BLOCK_M), float("nan"), tl.float32), mask_y, INTERPRET)
        return

    e = expert.to(tl.int64)
    row_n = rows_of(pid_n, N, BLOCK_N, FUSED, EVEN_N)
    offs_k = tl.arange(0, BLOCK_K)
    if WIDE:  # x spans 2^31 elements
        offs_k = offs_k.to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_rows = x_ptr + (slot // DIV).to(tl.int64)[None, :] * stride_xm
    low_ptrs, high_ptrs, s_ptrs, m_ptrs, t_ptrs = weight_pointers(
        low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, e, row_n, stride_le, stride_ln, stride_he,
        stride_hn, stride_se, stride_sn, stride_me, stride_mn, stride_te, stride_tn, LOW, SCALING,
        BLOCK_K,
    )  # fmt: skip
    perm_ptr += e * stride_pe

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        column = offs_k + k
        of_x = step_columns(perm_ptr, column, K, HAS_PERM, EVEN_K)[:, None] * stride_xk
        if EVEN_K:
            x = tl.load(x_rows + of_x)
        else:
            x = tl.load(x_rows + of_x, mask=(column < K)[:, None], other=0.0)
        w = weight_tile(
            low_ptrs, high_ptrs, s_ptrs, m_ptrs, t_ptrs, row_n, k, K, group, stride_sb, stride_mb,
            stride_tb, dtype, LOW, HIGH, CODES, OFFSET, SCALING, MINIMUMS, BYTES, SUB_OFFSET, SUB,
            BLOCK, BLOCK_K, EVEN_K, INTERPRET,
        )  # fmt: skip
        if INTERPRET and dtype == tl.bfloat16:
            x = to_float32(x, INTERPRET)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if AWAIT:
            acc = awaited(acc)

    if FUSED:
        gate, up = tl.split(acc.reshape(2, H, BLOCK_M).permute(1, 2, 0))
        store(y_ptrs, activated(gate, up, ACT), mask_y, INTERPRET)
    else:
        store(y_ptrs, acc, mask_y, INTERPRET)


INTERPRETED: bool = not isinstance(_moe_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


def launch_moe(
    x: torch.Tensor,
    experts: GpuExperts | torch.Tensor,
    slots: torch.Tensor,
    tiles: torch.Tensor,
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
        slots, tiles: of `triton_route.launch_route`, with the tile's block_m.
        y: [slots, N] of any floating dtype and strides.
        tile: algorithm "triton" of `gpu_space.MOE_SPACE`.
        share: consecutive slots that read one row of x.
        act: "" for a plain product; fused, a value of `triton_parts.ACTIVATIONS`.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    call = call_of(x, experts, y, tile, tile.block_n, share=share, act=act, interpreted=INTERPRETED)
    _moe_kernel[(len(tiles) * triton.cdiv(y.shape[1], call.columns),)](
        *call.tensors, slots, tiles, *call.sizes, len(tiles), *call.strides, **call.constants,
        BLOCK_M=tile.block_m, GROUP_M=tile.group_m, AWAIT=has_wgmma(target_arch(x.device)),
    )  # fmt: skip
