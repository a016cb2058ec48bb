"""Wrong tiles of the Gluon W4A16 kernel for AMD, one a kind of fault, which the gate must reject.

Each is a line of the kernel, chosen by its constexpr FAULT. They run on the chips that the kernel
serves, and in the emulator.
"""

from __future__ import annotations

from tilewright.ops.contract import Case
from tilewright.ops.planted_run import run_w4a16
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile

__all__ = ["AMD_PLANTED"]


def _planted(
    name: str, fault: str, why_faster: str, caught_by: str, *, m: int = 32, group: int = 128
) -> Planted:
    tile = Tile.of(
        "amd", block_m=16, block_n=32, block_k=64, num_warps=2, warps_m=1, num_stages=2,
        x_path="shared", scale="steps", planted=name,
    )  # fmt: skip
    case = Case("w4a16", "uint4", "float16", m, 64, 256, group)
    return Planted(tile, fault, why_faster, caught_by, run_w4a16, (case,))


AMD_PLANTED = (
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
        "each row of W takes the scale of the next row",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _planted(
        "no-start",
        "sums are added to what y holds, which nobody set to zero",
        "one kernel serves the parts of a split K as well",
        "nan-fill",
    ),
    _planted(
        "past-the-end",
        "one row too many is stored where y ends within a tile",
        "as fast as the right tile: a comparison is off by one",
        "guard-bands",
        m=17,
    ),
)
"""Planted tiles of the algorithm "amd"."""
