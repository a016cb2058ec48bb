"""Rows of x in the order of the sorted slots, and the list of all tiles, for `hopper_gemm`.

::

    out[p] = x[slots[p] // DIV], reordered
    plan = [T, (expert, first, last + 1) of each of T tiles]

`triton_route` says where each expert's slots begin and end; here the tiles of one follow those of
the one before without a gap, so that all of them are work. Rows end with zeros at a multiple of 128
columns, and every 128 of them lie as `hopper_parts` takes them.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["launch_gather", "row_columns"]


def row_columns(k: int) -> int:
    """Columns of a gathered row of `k`."""
    return -(-k // 128) * 128


@triton.jit
def reordered(x):
    """Column 32 lk + 4 s + 2 kh + i of every 128 to place 16 s + 8 kh + 2 lk + i, [R, C]."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    x = x.reshape(R, C // 128, 4, 8, 2, 2)
    return x.permute(0, 1, 3, 4, 2, 5).reshape(R, C)


@triton.jit
def store_plan(plan_ptr, e, first, last, BLOCK_M: tl.constexpr):
    """The tiles of experts `e`, whose slots begin at `first` and end before `last`, all [E]."""
    tiles = tl.cdiv(last - first, BLOCK_M)
    place = tl.cumsum(tiles, 0) - tiles
    tl.store(plan_ptr, tl.sum(tiles, 0))
    for t in range(0, tl.max(tiles, 0)):
        to = plan_ptr + 1 + 3 * (place + t)
        row = first + t * BLOCK_M
        tl.store(to, e, mask=t < tiles)
        tl.store(to + 1, row, mask=t < tiles)
        tl.store(to + 2, tl.minimum(row + BLOCK_M, last), mask=t < tiles)


@triton.jit(do_not_specialize=["slots", "experts"])
def _gather_kernel(
    x_ptr, slots_ptr, bounds_ptr, out_ptr, plan_ptr, slots, experts, K, stride_xm, stride_xk,
    DIV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """ROWS rows; the last program writes the plan."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        e = tl.arange(0, BLOCK_E)
        first = tl.load(bounds_ptr + 2 * e, mask=e <= experts, other=0)
        last = tl.load(bounds_ptr + 2 * e + 1, mask=e <= experts, other=0)
        store_plan(plan_ptr, e, first, last, BLOCK_M)
        return
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + p, mask=p < slots, other=0)
    rows = x_ptr + (slot // DIV).to(tl.int64)[:, None] * stride_xm
    width = tl.cdiv(K, 128) * 128
    to = out_ptr + p.to(tl.int64)[:, None] * width
    for k in range(0, K, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)[None, :]
        there = (p < slots)[:, None]
        x = tl.load(rows + column.to(tl.int64) * stride_xk, mask=there & (column < K), other=0.0)
        tl.store(to + column, reordered(x), mask=there & (column < width))


def launch_gather(
    x: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor,
    out: torch.Tensor,
    plan: torch.Tensor,
    block_m: int,
    *,
    share: int,
) -> None:
    """Write rows and plan.

    Args:
        x: [slots / share, K], any strides.
        slots, bounds: of `triton_route.launch_route`.
        out: [slots, row_columns(K)] of x's dtype, contiguous.
        plan: int32 [1 + 3 tiles], tiles as many as `triton_route.tiles_of` says.
        block_m: rows of a tile.
        share: consecutive slots that read one row of x.
    """
    count, k, experts = len(slots), x.shape[1], len(bounds) - 1
    rows = 4
    _gather_kernel[(triton.cdiv(count, rows) + 1,)](
        x, slots, bounds, out, plan, count, experts, k, *x.stride(),
        DIV=share, BLOCK_M=block_m, BLOCK_E=triton.next_power_of_2(experts + 1), ROWS=rows,
        BLOCK_K=min(1024, triton.next_power_of_2(row_columns(k))), num_warps=4,
    )  # fmt: skip
