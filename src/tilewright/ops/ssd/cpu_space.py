"""The tile space of the SSD scan on the CPU: how many tokens make a chunk.

A chunk costs q^2 of H heads within it, and P N of H heads at its end: short ones do less work on
decays, long ones larger products and fewer of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.ops.contract import Case, Inputs, Results
from tilewright.ops.space import Planted, TileSpace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["CHUNKS", "CPU_SPACE"]

CHUNKS = (16, 32, 64, 128, 192, 256, 512)
"""Tokens a chunk may have, on every device."""

_DEFAULT = 64


def _default(problem: Problem) -> Tile:
    return Tile.of("chunked", chunk=_DEFAULT)


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    return {"M": (tile.chunk,), "N": (32,), "K": (32,)}


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Results:
    """Launch a planted tile, past the space that would refuse it."""
    from tilewright.ops.ssd.cpu import launch_scan_cpu
    from tilewright.ops.ssd.spec import operands, results

    args = operands(inputs)
    launch_scan_cpu(args, tile)
    return results(args)


def _planted(name: str, fault: str, why_faster: str, caught_by: str, m: int = 128) -> Planted:
    # 6 heads in 3 groups: repeating groups in place of each of their heads moves four of them.
    case = Case("ssd", "p16", "float32", m, 96, 32, 2)
    return Planted(
        Tile.of("chunked", chunk=32, planted=name), fault, why_faster, caught_by, _run, (case,)
    )


PLANTED = (
    _planted(
        "wrong-groups",
        "head h reads B and C of group h % G, not of group h // (H / G)",
        "as fast as the right tile: heads are split the other way round",
        "oracle",
    ),
    _planted(
        "no-clamp",
        "decays are not clamped, and those of later tokens are multiplied by zero",
        "one pass less over the decays",
        "oracle",
    ),
    _planted(
        "no-reset",
        "a packed sequence begins with the state that the one before it left",
        "no entering state to read or to clear",
        "ragged-shapes",
    ),
    _planted(
        "partial-chunk",
        "the tokens behind the last whole chunk are dropped",
        "no short last chunk",
        "ragged-shapes",
    ),
)
"""Wrong tiles that the gate must reject."""

CPU_SPACE = TileSpace(
    name="ssd/cpu",
    fields={"chunked": {"chunk": CHUNKS}},
    rules=(),
    default=_default,
    extents=_extents,
    planted=PLANTED,
)
