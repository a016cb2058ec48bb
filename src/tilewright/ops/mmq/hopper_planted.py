"""Wrong tiles of mmq's "decode" and "hopper", one a kind of fault, which the gate must reject.

Each is a line of the kernel itself, chosen by its constexpr FAULT. They run on Hopper only, whose
space alone has them (`gpu_spec`).
"""

from __future__ import annotations

from tilewright.ops.contract import Case
from tilewright.ops.planted_run import run_mmq
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile

__all__ = ["PLANTED"]


def _decode(
    name: str,
    fault: str,
    why_faster: str,
    caught_by: str,
    *,
    weight_type: str = "Q4_K",
    k: int = 1024,
) -> Planted:
    tile = Tile.of("decode", block_n=16, num_warps=4, planted=f"decode-{name}")
    case = Case("mmq", weight_type, "float16", 1, 96, k)
    return Planted(tile, fault, why_faster, caught_by, run_mmq, (case,))


def _hopper(
    name: str,
    fault: str,
    why_faster: str,
    caught_by: str,
    *,
    m: int = 32,
    n: int = 128,
    weight_type: str = "Q4_K",
    split_k: int = 1,
) -> Planted:
    tile = Tile.of(
        "hopper", block_n=64, block_m=32, num_stages=3, w_stages=2, split_k=split_k, group_m=4,
        planted=f"hopper-{name}",
    )  # fmt: skip
    case = Case("mmq", weight_type, "float16", m, n, 1024)
    return Planted(tile, fault, why_faster, caught_by, run_mmq, (case,))


PLANTED = (
    _decode(
        "scale-row",
        "each pair of rows of the weight takes the scales of the next pair",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _decode(
        "no-minimum",
        "the minimums of the sub-blocks are left out",
        "no minimums to unpack and to multiply with the sums of x",
        "oracle",
    ),
    _decode(
        "no-offset",
        "what codes are too large by is not taken off their sums",
        "one product with the sums of x less for every sub-block",
        "oracle",
        weight_type="Q4_0",
    ),
    _decode(
        "lost-warp",
        "the sums of the last warp along K are left out",
        "one warp less to meet at the end",
        "oracle",
    ),
    _decode(
        "k-tail",
        "the loop ends with the last step that every warp has",
        "no warp waits for others wherever steps do not divide evenly among them",
        "oracle",
        k=1280,
    ),
    _hopper(
        "scale-row",
        "each row of the weight takes the scales of the next row",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _hopper(
        "no-minimum",
        "the minimums of the sub-blocks are left out",
        "no minimums to unpack",
        "oracle",
    ),
    _hopper(
        "k-tail",
        "the loop ends at the last whole step of K",
        "one step less wherever 256 columns do not divide K",
        "ragged-shapes",
        weight_type="Q4_0",
    ),
    _hopper(
        "partial-rows",
        "the rows of the weight behind the last whole 16 are not stored",
        "less to store wherever a tile ends within them",
        "ragged-shapes",
    ),
    _hopper(
        "past-the-end",
        "one row too many is stored where y ends within a tile",
        "as fast as the right tile: a comparison is off by one",
        "guard-bands",
        m=21,
        n=124,
    ),
    _hopper(
        "lost-partial",
        "the last share but one of K is left out when the shares are added",
        "one share less to read",
        "oracle",
        split_k=2,
    ),
    _hopper(
        "lost-neighbour",
        "a tile whose steps two programs share leaves out what the first of them summed",
        "one share less to read",
        "oracle",
        n=640,
        split_k=0,
    ),
    _hopper(
        "stale-partial",
        "shares of K leave no sums, and older ones that lie in their place are added",
        "less to write: what an earlier launch of this product left there is right",
        "nan-fill",
        split_k=2,
    ),
)
"""Planted tiles of the algorithms "decode" and "hopper"."""
