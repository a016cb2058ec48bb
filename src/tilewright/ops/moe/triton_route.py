"""Routing on the device: slots sorted by expert, and which rows a tile of the product takes.

A slot is one (token, choice) pair: slot s is choice s % top_k of token s // top_k.

::

    ids   [R]         the expert of every slot
    bounds [E + 1, 2] where each expert's slots begin and end, those of unknown ones last
    slots [R]         the slots, ordered by expert, and as they came within an expert
    tiles [tiles, 3]  (expert, first, last + 1): rows of `slots`, BLOCK_M at most; expert -1: none

One program an expert, and one for ids that name none, each on its own: it counts the ids below its
own, which is where its slots begin, and its own. Its tiles begin at ``begin // BLOCK_M + expert``.
That leaves it room enough, for every expert and whatever the others have::

    (begin + n) // BLOCK_M + 1 - begin // BLOCK_M >= n // BLOCK_M + 1 >= ceil(n / BLOCK_M)

and what it does not need it marks as empty. So nothing is summed over experts, no program waits for
another, and the number of tiles, R // BLOCK_M + E + 1, depends on no id: a CUDA graph may hold it.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["launch_route", "tiles_of"]

_MOST_AT_A_TIME: int = 4096  # ids that a program looks at


@triton.jit
def experts_of(ids_ptr, offs, slots, experts):
    """The experts of some slots, int32: `experts` for an id that names none, one more past R."""
    ids = tl.load(ids_ptr + offs, mask=offs < slots, other=0)
    ids = tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)
    return tl.where(offs < slots, ids, experts + 1)


@triton.jit(do_not_specialize=["slots", "experts"])
def _route_kernel(
    ids_ptr, slots_ptr, bounds_ptr, tiles_ptr, slots, experts,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """The slots and the tiles of one expert."""
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    below = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, slots, BLOCK):
        ids = experts_of(ids_ptr, at + offs, slots, experts)
        below += (ids < expert).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    begin = tl.sum(below, 0)
    count = tl.sum(own, 0)

    place = begin
    for at in range(0, slots, BLOCK):
        mine = experts_of(ids_ptr, at + offs, slots, experts) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(slots_ptr + place + rank - 1, at + offs, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)

    tl.store(bounds_ptr + 2 * expert, begin)
    tl.store(bounds_ptr + 2 * expert + 1, begin + count)
    tile = begin // BLOCK_M + expert
    past = (begin + count) // BLOCK_M + expert + 1
    end = begin + count
    if FAULT == "expert-bounds":  # every expert ends one row late, and the next begins there
        begin += (begin > 0).to(tl.int32)
        end = tl.minimum(end + 1, slots)
    elif FAULT == "missing-tail":  # the last rows of an expert are no whole tile: left out
        end = begin + count // BLOCK_M * BLOCK_M
    elif FAULT == "empty-expert":  # one without rows takes the first of the next, which skips it
        before = tl.zeros((BLOCK,), tl.int32)
        for at in range(0, slots, BLOCK):
            ids = experts_of(ids_ptr, at + offs, slots, experts)
            before += (ids == expert - 1).to(tl.int32)
        begin += ((tl.sum(before, 0) == 0) & (expert > 0) & (count > 0)).to(tl.int32)
        end = tl.minimum(end + (count == 0).to(tl.int32), slots)
    offs_t = tl.arange(0, 64)
    for at in range(tile, past, 64):
        t = at + offs_t
        first = begin + (t - tile) * BLOCK_M
        mask = t < past
        tl.store(tiles_ptr + 3 * t, tl.where(first < end, expert, -1), mask=mask)
        tl.store(tiles_ptr + 3 * t + 1, first, mask=mask)
        tl.store(tiles_ptr + 3 * t + 2, tl.minimum(end, first + BLOCK_M), mask=mask)


def tiles_of(slots: int, experts: int, block_m: int) -> int:
    """Tiles that `launch_route` writes, the empty ones among them."""
    return slots // block_m + experts + 1


def launch_route(
    ids: torch.Tensor, experts: int, slots: torch.Tensor, bounds: torch.Tensor,
    tiles: torch.Tensor, block_m: int, fault: str = "",
) -> None:  # fmt: skip
    """Sort slots by expert and cut each expert's into tiles.

    Args:
        ids: int32 or int64 [R], contiguous, R from 1 to 2^31 - 1. Ids outside 0..experts-1 are
            taken for one expert more, number `experts`.
        experts: how many there are.
        slots: int32 [R], written.
        bounds: int32 [experts + 1, 2], written.
        tiles: int32 [tiles_of(R, experts, block_m), 3], written.
        block_m: rows of a tile.
        fault: of `planted`, for the gate.
    """
    block = min(_MOST_AT_A_TIME, max(64, triton.next_power_of_2(ids.numel())))
    _route_kernel[(experts + 1,)](
        ids, slots, bounds, tiles, ids.numel(), experts,
        BLOCK_M=block_m, BLOCK=block, FAULT=fault, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
