"""The tile space of the causal convolution in Triton: tokens and channels a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.ops.contract import Case, Inputs, Results
from tilewright.ops.space import Planted, Rule, TileSpace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["TRITON_SPACE"]

_MOST_SUMS = 16  # of a thread: more of them spill in packed batches


def _tile(block_l: int, block_d: int, num_warps: int) -> Tile:
    return Tile.of("triton", block_l=block_l, block_d=block_d, num_warps=num_warps)


def _registers(tile: Tile, problem: Problem) -> bool:
    return bool(tile.block_l * tile.block_d <= 32 * tile.num_warps * _MOST_SUMS)


def _default(problem: Problem) -> Tile:
    return _tile(16, 128, 4)


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    return {"M": (tile.block_l,), "N": (tile.block_d,), "K": (1,)}


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Results:
    """Launch a planted tile, past the rules that would refuse it."""
    from tilewright.ops.conv1d.spec import operands, results
    from tilewright.ops.conv1d.triton_conv import launch_conv

    args = operands(inputs)
    launch_conv(args, tile)
    return results(args)


def _planted(name: str, fault: str, why_faster: str, caught_by: str) -> Planted:
    tile = Tile.of("triton", block_l=16, block_d=32, num_warps=1, planted=name)
    case = Case("conv1d", "w4", "float16", 64, 48, 4)
    return Planted(tile, fault, why_faster, caught_by, _run, (case,))


TRITON_SPACE = TileSpace(
    name="conv1d/triton",
    fields={
        "triton": {
            "block_l": (4, 8, 16, 32, 64, 128),
            "block_d": (32, 64, 128, 256),
            "num_warps": (1, 2, 4, 8),
        },
    },
    rules=(
        Rule(
            "registers",
            "the sums of a program must fit its threads' registers: 16 a thread of 32-wide warps",
            _registers,
        ),
    ),
    default=_default,
    extents=_extents,
    planted=(
        _planted(
            "reversed-taps",
            "the first tap meets the token itself, and the last the oldest one",
            "as fast as the right tile: taps are read in the other order",
            "oracle",
        ),
        _planted(
            "block-edge",
            "the first tokens of a block see no tokens of the block before it",
            "no reads across the edges of blocks",
            "oracle",
        ),
        _planted(
            "no-reset",
            "a packed sequence sees the last tokens of the one before it",
            "no search for the sequence of a token",
            "ragged-shapes",
        ),
        _planted(
            "partial-block",
            "the tokens behind the last whole block are not stored",
            "no mask of tokens",
            "ragged-shapes",
        ),
    ),
)
"""The tiles of "triton", for every GPU and the interpreter."""
