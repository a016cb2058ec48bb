"""The tile space of the causal convolution in torch: how many tokens are taken at once.

Taps run over a block one after the other: a block that stays in the cache is read from memory once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.ops.contract import Case, Inputs, Results
from tilewright.ops.space import Planted, TileSpace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["CPU_SPACE"]

_BLOCKS = (8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_CACHED_VALUES = 1 << 15


def _default(problem: Problem) -> Tile:
    """The longest block whose float32 values stay in a core's second-level cache."""
    fitting = [block for block in _BLOCKS if block * problem.N <= _CACHED_VALUES]
    return Tile.of("shifted", block=max(fitting, default=_BLOCKS[0]))


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    return {"M": (tile.block,), "N": (16,), "K": (1,)}


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Results:
    """Launch a planted tile, past the space that would refuse it."""
    from tilewright.ops.conv1d.shifted import launch_conv_torch
    from tilewright.ops.conv1d.spec import operands, results

    args = operands(inputs)
    launch_conv_torch(args, tile)
    return results(args)


def _planted(name: str, fault: str, why_faster: str, caught_by: str) -> Planted:
    case = Case("conv1d", "w4", "float32", 64, 48, 4)
    return Planted(
        Tile.of("shifted", block=16, planted=name), fault, why_faster, caught_by, _run, (case,)
    )


PLANTED = (
    _planted(
        "reversed-taps",
        "the first tap meets the token itself, and the last the oldest one",
        "as fast as the right tile: taps are read in the other order",
        "oracle",
    ),
    _planted(
        "block-edge",
        "the first tokens of a block see zeros in place of the tokens before it",
        "no tokens to keep from block to block",
        "oracle",
    ),
    _planted(
        "no-reset",
        "a packed sequence sees the last tokens of the one before it",
        "no entering state to read or to clear",
        "ragged-shapes",
    ),
    _planted(
        "partial-block",
        "the tokens behind the last whole block are dropped",
        "no short last block",
        "ragged-shapes",
    ),
)
"""Wrong tiles that the gate must reject."""

CPU_SPACE = TileSpace(
    name="conv1d/cpu",
    fields={"shifted": {"block": _BLOCKS}},
    rules=(),
    default=_default,
    extents=_extents,
    planted=PLANTED,
)
