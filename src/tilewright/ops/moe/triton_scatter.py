"""Rows of x sorted by expert, and the list of all tiles, in one launch, for some thousand slots.

What `triton_route` and `triton_gather` do in two launches that wait for each other::

    order[p] = s,  rows[p] = x[s // DIV], reordered      p: how many slots come before slot s
    plan = [T, (expert, first, last + 1) of each of T tiles]

A slot comes before another if its expert is lower, or is the same and the slot is. Each program
counts that for SLOTS slots, by looking at all ids, and writes their rows; the last one counts the
slots of every expert and writes the plan. The work grows with the square of the slots.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.ops.moe.triton_gather import reordered, row_columns, store_plan
from tilewright.ops.moe.triton_route import experts_of

__all__ = ["MOST_SLOTS", "launch_scatter"]

MOST_SLOTS: int = 2048
"""Slots up to which one launch is the faster: on an H200 4.1 us instead of 6.0 for 1024 of them,
but 12.2 instead of 11.0 for 4096."""

_LOG_SLOTS: int = 13  # of the slots that a key of 32 bits has room for, next to the expert
_SLOTS: int = 8


@triton.jit(do_not_specialize=["slots", "experts"])
def _scatter_kernel(
    x_ptr, ids_ptr, order_ptr, out_ptr, plan_ptr, slots, experts, K, stride_xm, stride_xk,
    DIV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
    SLOTS: tl.constexpr, LOG_SLOTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """SLOTS rows; the last program writes the plan."""
    offs = tl.arange(0, BLOCK)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        counts = tl.zeros((BLOCK_E,), tl.int32)
        for at in range(0, slots, BLOCK):
            counts += tl.histogram(experts_of(ids_ptr, at + offs, slots, experts), BLOCK_E)
        e = tl.arange(0, BLOCK_E)
        counts = tl.where(e <= experts, counts, 0)  # those past R are one expert more
        last = tl.cumsum(counts, 0)
        store_plan(plan_ptr, e, last - counts, last, BLOCK_M)
        return
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    there = slot < slots
    rows = x_ptr + (slot // DIV).to(tl.int64)[:, None] * stride_xm
    column = tl.arange(0, BLOCK_K)[None, :]
    mask = there[:, None] & (column < K)
    x = tl.load(rows + column.to(tl.int64) * stride_xk, mask=mask, other=0.0)  # needs no place
    mine = (experts_of(ids_ptr, slot, slots, experts) << LOG_SLOTS) + slot
    before = tl.zeros((SLOTS, BLOCK), tl.int32)
    for at in range(0, slots, BLOCK):
        others = (experts_of(ids_ptr, at + offs, slots, experts) << LOG_SLOTS) + at + offs
        before += (others[None, :] < mine[:, None]).to(tl.int32)
    place = tl.sum(before, 1)
    tl.store(order_ptr + place, slot, mask=there)
    width = tl.cdiv(K, 128) * 128
    to = out_ptr + place.to(tl.int64)[:, None] * width
    tl.store(to + column, reordered(x), mask=there[:, None] & (column < width))
    for k in range(BLOCK_K, K, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)[None, :]
        mask = there[:, None] & (column < K)
        x = tl.load(rows + column.to(tl.int64) * stride_xk, mask=mask, other=0.0)
        tl.store(to + column, reordered(x), mask=there[:, None] & (column < width))


def launch_scatter(
    x: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    order: torch.Tensor,
    out: torch.Tensor,
    plan: torch.Tensor,
    block_m: int,
    *,
    share: int,
) -> None:
    """Write order, rows and plan.

    Args:
        x: [slots / share, K], any strides.
        ids: int32 or int64 [slots], contiguous, 8192 of them at most. Ids outside
            0..experts-1 are taken for one expert more, number `experts`.
        experts: how many there are, fewer than 2^17.
        order: int32 [slots].
        out: [slots, row_columns(K)] of x's dtype, contiguous.
        plan: int32 [1 + 3 tiles], tiles as many as `triton_route.tiles_of` says.
        block_m: rows of a tile.
        share: consecutive slots that read one row of x.
    """
    count, k = ids.numel(), x.shape[1]
    _scatter_kernel[(triton.cdiv(count, _SLOTS) + 1,)](
        x, ids, order, out, plan, count, experts, k, *x.stride(),
        DIV=share, BLOCK_M=block_m, BLOCK=min(1024, max(256, triton.next_power_of_2(count))),
        BLOCK_E=triton.next_power_of_2(experts + 2), SLOTS=_SLOTS, LOG_SLOTS=_LOG_SLOTS,
        BLOCK_K=min(2048, triton.next_power_of_2(row_columns(k))), num_warps=8,
    )  # fmt: skip
