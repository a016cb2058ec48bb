"""Wrong Hopper tiles of w4a16, one a kind of fault, which the gate must reject.

Each is a line of the decode kernel, chosen by its constexpr FAULT. They run on Hopper only.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.contract import Case, Inputs
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile

__all__ = ["HOPPER_PLANTED"]


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    """Launch a planted tile, past the rules that would refuse it."""
    from tilewright.ops.w4a16.gpu import allocate_and_launch

    return allocate_and_launch(inputs.x, inputs.weight, inputs.bias, tile)


def _planted(
    name: str,
    fault: str,
    why_faster: str,
    caught_by: str,
    *,
    m: int = 8,
    group: int = 128,
    split_k: int = 1,
) -> Planted:
    tile = Tile.of(
        "hopper_decode", block_m=8, block_n=32, warps_n=1, warps_k=4, unroll=2, split_k=split_k,
        x_load="pairs", planted=name,
    )  # fmt: skip
    case = Case("w4a16", "uint4", "float16", m, 96, 1024, group)
    return Planted(tile, fault, why_faster, caught_by, _run, (case,))


HOPPER_PLANTED = (
    _planted(
        "partial-rows",
        "the rows of the weight behind the last whole 16 are not stored",
        "nothing is stored under a mask of rows",
        "ragged-shapes",
    ),
    _planted(
        "k-tail",
        "the loop ends at the last whole step of K",
        "no mask, and one step less wherever steps do not divide K",
        "ragged-shapes",
        group=-1,
    ),
    _planted(
        "group-straddled",
        "two groups of K share the scale and the zero point of the first",
        "half the scales and zero points to load",
        "oracle",
        group=64,
    ),
    _planted(
        "scale-row",
        "each row of the weight takes the scale of the next row",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _planted(
        "past-the-end",
        "one row too many is stored where y ends within a tile",
        "as fast as the right tile: a comparison is off by one",
        "guard-bands",
        m=5,
    ),
    _planted(
        "lost-partial",
        "the last part of K is left out when the parts are added",
        "one part less to read",
        "oracle",
        split_k=4,
    ),
    _planted(
        "stale-partial",
        "the last part of K leaves no sums, and older ones that lie in their place are added",
        "one part less to write: what an earlier launch of this product left there is right",
        "nan-fill",
        split_k=4,
    ),
)
"""Planted tiles of the algorithm "hopper_decode"."""
