"""Wrong Triton tiles of ssd, one for each kind of fault and form, that the gate must reject.

Each is one line of a kernel itself, chosen by its constexpr FAULT, or one of its launch. With 16
heads in 4 groups, repeating groups in place of each of their heads moves most of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewright.ops.contract import Case, Inputs, Results
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile

__all__ = ["PLANTED"]

_NO_RESET = "no-reset"


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Results:
    """Launch a planted tile, past the rules that would refuse it."""
    from tilewright.ops.ssd.gpu import allocate_and_launch
    from tilewright.ops.ssd.spec import operands, results

    args = operands(inputs)
    if tile.planted == _NO_RESET and args.cu_seqlens is not None:
        first = None if args.initial_states is None else args.initial_states[:1]
        one = replace(
            args, cu_seqlens=None, initial_states=first, final_states=args.final_states[:1]
        )
        allocate_and_launch(one, tile)
        args.final_states[1:] = args.final_states[:1]
    else:
        allocate_and_launch(args, tile)
    return results(args)


def _planted(name: str, tile: Tile, fault: str, why_faster: str, caught_by: str) -> Planted:
    case = Case("ssd", "p16", "float16", 128, 96, 32, 2)
    wrong = Tile.of(tile.algorithm, **{k: v for k, v in tile if k != "algorithm"}, planted=name)
    return Planted(wrong, fault, why_faster, caught_by, _run, (case,))


_FUSED = Tile.of(
    "fused", chunk=32, block=32, block_p=16, block_n=32, heads=1, num_warps=4, num_stages=2
)
_FIVE = Tile.of(
    "five", chunk=64, block=32, block_p=16, block_n=32, heads=1, num_warps=4, num_stages=2
)
_WALK = Tile.of("persistent", chunk=32, block_p=16, segments=2, num_warps=4, num_stages=2)

PLANTED = (
    _planted(
        "wrong-groups",
        _FUSED,
        "head h reads B and C of group h % G, not of group h // (H / G)",
        "as fast as the right tile: heads are split the other way round",
        "oracle",
    ),
    _planted(
        "no-clamp",
        _FIVE,
        "decays are not clamped, and those of later tokens are multiplied by zero",
        "no minimum of each difference of sums",
        "oracle",
    ),
    _planted(
        "no-clamp",
        _WALK,
        "decays are not clamped, and those of later tokens are multiplied by zero",
        "no minimum of each difference of sums",
        "oracle",
    ),
    _planted(
        _NO_RESET,
        _FUSED,
        "a packed sequence begins with the state that the one before it left",
        "no sequence to look for, and no chunk that one ends early",
        "ragged-shapes",
    ),
    _planted(
        "partial-chunk",
        _WALK,
        "the tokens behind the last whole chunk are dropped",
        "no short last chunk",
        "ragged-shapes",
    ),
)
"""The planted tiles of `triton_space.TRITON_SPACE`."""
