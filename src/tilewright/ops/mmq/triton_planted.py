"""Wrong Triton tiles of mmq, one for each kind of fault, that the gate must reject.

Each is one line of the kernel itself, chosen by its constexpr FAULT, and gives the right result on
the product it would be tuned for as long as one check of the gate is left out.
"""

from __future__ import annotations

from tilewright.ops.contract import Case
from tilewright.ops.planted_run import run_mmq
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile

__all__ = ["PLANTED"]


def _planted(
    name: str,
    fault: str,
    why_faster: str,
    caught_by: str,
    *,
    m: int = 32,
    weight_type: str = "Q4_K",
    k: int = 256,
    split_k: int = 1,
) -> Planted:
    tile = Tile.of(
        "triton", block_m=16, block_n=32, block_k=64, num_warps=2, num_stages=2, group_m=8,
        split_k=split_k, planted=name,
    )  # fmt: skip
    case = Case("mmq", weight_type, "float16", m, 64, k)
    return Planted(tile, fault, why_faster, caught_by, run_mmq, (case,))


PLANTED = (
    _planted(
        "partial-rows",
        "the rows of y behind the last whole tile are not stored",
        "nothing is stored under a mask of rows",
        "ragged-shapes",
    ),
    _planted(
        "k-tail",
        "the loop ends at the last whole step of K",
        "one step less wherever block_k does not divide K",
        "ragged-shapes",
        weight_type="Q5_0",
    ),
    _planted(
        "sub-scale",
        "each sub-block takes the scale and the minimum of its neighbour in the block",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _planted(
        "no-minimum",
        "the minimums of the sub-blocks are left out",
        "no minimums to load, unpack and add",
        "oracle",
    ),
    _planted(
        "past-the-end",
        "one row too many is stored where y ends within a tile",
        "as fast as the right tile: a comparison is off by one",
        "guard-bands",
        m=17,
    ),
    _planted(
        "lost-partial",
        "the sum of the shares of K leaves out the last of them",
        "one share less to read",
        "oracle",
        m=16,
        split_k=2,
    ),
)
"""The planted tiles of `triton_space.TRITON_SPACE`."""
