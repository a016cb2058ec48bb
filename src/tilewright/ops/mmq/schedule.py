"""Who sums which steps of which tile of y: the arithmetic of the three schedules, in plain Python.

A product has `tiles` tiles of y, and each is a sum over `steps` steps of K. ::

    "data-parallel"  a program a tile, all of its steps.
    "split-k"        `split_k` programs a tile, cdiv(steps, split_k) steps each; the last may have
                     fewer, or none.
    "stream-k"       `units` programs share tiles * steps evenly, tile after tile: one takes up
                     where the one before it stops, in the middle of a tile or not::

                         steps   0 1 2 3 | 0 1 2 3 | 0 1 2 3        3 tiles of 4 steps
                         units   0 0 0 1   1 1 2 2   2 3 3 3        4 programs, 3 steps each

What one program sums of one tile is a segment. One of a whole tile goes to y. Any other goes to a
slot of the workspace, and a second pass adds the slots of a tile in the order of their steps, which
is the same at every launch: results depend on the number of units, never on timing.

A unit of stream-k has at most two segments that are not whole: one at its first step and one at its
last. Unit u's slots are 2 u, for the tile of its first step, and 2 u + 1.

The kernel does this arithmetic on the device (`int8_parts`), and tests hold it to these functions.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "GUARD_ROWS",
    "SCHEDULES",
    "WARP_ROWS",
    "Segment",
    "first_step",
    "segments",
    "slots",
    "slots_of",
    "unit_of",
]

WARP_ROWS = 16
"""Rows of w to a warp: the height of a matrix instruction."""

GUARD_ROWS = 128
"""Where N is a multiple of it, the kernel compares no row of w with N."""

SCHEDULES = ("data-parallel", "split-k", "stream-k")
"""How tiles and steps may be shared among programs."""


@dataclass(frozen=True)
class Segment:
    """Steps of one tile that one program sums.

    Attributes:
        unit: the program, counted along the grid's first dimension, then its second.
        tile: of y, counted as programs of "data-parallel" are.
        first, last: its steps are first .. last - 1.
        slot: of the workspace that takes the sum; None for y itself.
    """

    unit: int
    tile: int
    first: int
    last: int
    slot: int | None


def first_step(unit: int, total: int, units: int) -> int:
    """The first of `total` steps that is `unit`'s of `units`; `total` for unit == units.

    The first total % units of them have a step more than the others: no product is formed that
    could pass 2^31.
    """
    return unit * (total // units) + min(unit, total % units)


def unit_of(step: int, total: int, units: int) -> int:
    """The unit that sums a step: first_step(unit) <= step < first_step(unit + 1)."""
    least, longer = total // units, total % units
    edge = longer * (least + 1)
    if step < edge:
        return step // (least + 1)
    return longer + (step - edge) // least


def slots(schedule: str, tiles: int, *, split_k: int = 1, units: int = 1) -> int:
    """Tiles of partial sums that the workspace must hold."""
    if schedule == "split-k":
        return split_k * tiles
    return 2 * units if schedule == "stream-k" else 0


def segments(
    schedule: str, tiles: int, steps: int, *, split_k: int = 1, units: int = 1
) -> list[Segment]:
    """What every program sums, program after program.

    Args:
        schedule: one of SCHEDULES.
        tiles, steps: of the product, at least 1 each.
        split_k: of "split-k".
        units: of "stream-k".
    """
    if schedule == "data-parallel":
        return [Segment(tile, tile, 0, steps, None) for tile in range(tiles)]
    if schedule == "split-k":
        each = -(-steps // split_k)
        return [
            Segment(
                share * tiles + tile, tile, min(share * each, steps),
                min((share + 1) * each, steps), share * tiles + tile,
            )
            for share in range(split_k)
            for tile in range(tiles)
        ]  # fmt: skip
    found, total = [], tiles * steps
    for unit in range(units):
        start = at = first_step(unit, total, units)
        end = first_step(unit + 1, total, units)
        while at < end:
            tile, first = divmod(at, steps)
            last = min(steps, first + end - at)
            whole = last - first == steps
            slot = None if whole else 2 * unit + (tile != start // steps)
            found.append(Segment(unit, tile, first, last, slot))
            at += last - first
    return found


def slots_of(
    schedule: str, tile: int, tiles: int, steps: int, *, split_k: int = 1, units: int = 1
) -> list[int]:
    """The slots of a tile's sums, in the order of their steps; none if y holds them already."""
    if schedule == "data-parallel":
        return []
    if schedule == "split-k":
        return [share * tiles + tile for share in range(split_k)]
    total = tiles * steps
    first = unit_of(tile * steps, total, units)
    last = unit_of((tile + 1) * steps - 1, total, units)
    if first == last:
        return []
    return [
        2 * unit + (tile != first_step(unit, total, units) // steps)
        for unit in range(first, last + 1)
    ]
