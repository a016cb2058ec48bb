"""Wrong int8 tiles of mmq, one for each kind of fault, that the gate must reject.

The first four are what tuning llama.cpp's own kernel has measured as faster: "I = 64 alone"
(+29 %), "nthreads = 256 alone" (+23 %), "I = 96" (+2 %), "ITER_K = 512" (+25 %). All of them were
wrong. The tile that each of the first three pretends to be breaks a rule of `int8_space`; its fault
is what happens in a kernel that takes the rule for granted. The last two are faults of the
schedules.
"""

from __future__ import annotations

from typing import Any

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
    m: int = 16,
    n: int = 128,
    k: int = 256,
    weight_type: str = "Q4_0",
    **fields: Any,
) -> Planted:
    right: dict[str, Any] = {
        "block_m": 16, "block_n": 32, "num_warps": 2, "num_stages": 1, "group_m": 8,
        "schedule": "data-parallel", "split_k": 1, "units": 0,
    }  # fmt: skip
    tile = Tile.of("int8", **{**right, **fields}, planted=name)
    case = Case("mmq", weight_type, "float16", m, n, k, 0, "int8")
    return Planted(tile, fault, why_faster, caught_by, run_mmq, (case,))


PLANTED = (
    _planted(
        "rows-alone",
        "the tile has half the rows that its warps take, and the other half is stored as zeros",
        "half the weights to load and to multiply, in a grid for twice as many",
        "oracle",
        block_n=32,
        num_warps=4,
    ),
    _planted(
        "warps-alone",
        "the tile has twice the rows that its warps take, and the other half is stored as zeros",
        "half the warps, none of which has more to do than before",
        "oracle",
        block_n=64,
        num_warps=2,
    ),
    _planted(
        "rows-256",
        "rows of w are not compared with N, a multiple of 128, though a tile has more than 128",
        "no comparisons and no masks",
        "guard-bands",
        m=1,
        block_n=256,
        num_warps=16,
    ),
    _planted(
        "iter-k",
        "a step takes twice the columns, and the second half the scales of the first",
        "half the steps, and half the scales to load and apply",
        "oracle",
    ),
    _planted(
        "unit-edge",
        "the steps that do not divide evenly among the units belong to none",
        "every unit has as many steps",
        "ragged-shapes",
        schedule="stream-k",
        units=7,
        n=32,
        k=224,
    ),
    _planted(
        "lost-part",
        "the sum of the parts of a tile leaves out the last of them",
        "one part less to read",
        "oracle",
        schedule="stream-k",
        units=7,
    ),
)
"""The planted "int8" tiles of `triton_space.TRITON_SPACE`."""
