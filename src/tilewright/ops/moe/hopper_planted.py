"""Wrong tiles of moe's "hopper", one a kind of fault, which the gate must reject.

Each is a line of the kernel itself, chosen by its constexpr FAULT. They run on Hopper only, whose
space alone has them (`gpu_spec`).
"""

from __future__ import annotations

from tilewright.ops.contract import Case
from tilewright.ops.planted_run import run_moe
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile

__all__ = ["PLANTED"]


def _planted(
    name: str,
    fault: str,
    why_faster: str,
    caught_by: str,
    *,
    m: int = 16,
    n: int = 128,
    k: int = 512,
    mixture: tuple[int, int] = (4, 2),
    weight_type: str = "Q4_K",
) -> Planted:
    tile = Tile.of(
        "hopper", block_n=64, block_m=16, num_stages=3, programs=1, planted=f"hopper-{name}"
    )
    case = Case(
        "moe", weight_type, "float16", m, n, k, experts=mixture[0], top_k=mixture[1]
    )  # fmt: skip
    return Planted(tile, fault, why_faster, caught_by, run_moe, (case,))


PLANTED = (
    _planted(
        "scale-row",
        "each row of an expert's weight takes the scales of the next row",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _planted(
        "no-minimum",
        "the minimums of the sub-blocks are left out",
        "no minimums to unpack",
        "oracle",
    ),
    _planted(
        "stale-numbers",
        "all steps of K take the scales and minimums of the first",
        "nothing that they are made of is read a step ahead",
        "oracle",
    ),
    _planted(
        "expert-bounds",
        "every expert ends one row late, and takes the first row of the next",
        "as fast as the right tile: a bound is off by one",
        "oracle",
        m=12,
    ),
    _planted(
        "expert-rows",
        "an expert's words are looked for behind whole tiles of rows of those before",
        "as fast as the right tile: a product less, and right wherever tiles divide the rows",
        "ragged-shapes",
    ),
    _planted(
        "missing-tail",
        "the last rows of an expert are no whole tile, and are not stored",
        "less to store wherever a tile ends within them",
        "ragged-shapes",
        m=32,
        mixture=(1, 1),
    ),
    _planted(
        "partial-columns",
        "the columns of y behind the last whole tile are not stored",
        "nothing is stored under a mask of columns",
        "ragged-shapes",
    ),
    _planted(
        "k-tail",
        "the loop ends at the last whole step of K",
        "one step less wherever 256 columns do not divide K",
        "ragged-shapes",
        weight_type="Q4_0",
    ),
    _planted(
        "past-the-end",
        "one column too many is stored where a row of y ends within a tile",
        "as fast as the right tile: a comparison is off by one",
        "guard-bands",
        m=1,
        n=124,
        mixture=(4, 1),
    ),
)
"""Planted tiles of the algorithm "hopper"; of "expert-bounds" each expert's rows fit one tile."""
