"""Wrong tiles of moe on GPUs, one for each kind of fault, that the gate must reject.

Each is one line of the kernels themselves, chosen by their constexpr FAULT.
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
    n: int = 32,
    mixture: tuple[int, int] = (4, 2),
    routing: str = "even",
    algorithm: str = "triton",
    weight_type: str = "Q5_0",
    k: int = 64,
) -> Planted:
    fields = {"block_n": 32, "num_warps": 4, "planted": name}
    if algorithm != "slots":
        fields |= {"block_k": 64, "num_stages": 2}
    if algorithm == "triton":
        fields |= {"block_m": 16, "group_m": 8}
    case = Case(
        "moe", weight_type, "float16", m, n, k,
        experts=mixture[0], top_k=mixture[1], routing=routing,
    )  # fmt: skip
    return Planted(Tile.of(algorithm, **fields), fault, why_faster, caught_by, run_moe, (case,))


PLANTED = (
    _planted(
        "expert-bounds",
        "every expert ends one row late, and takes the first row of the next",
        "as fast as the right tile: a bound is off by one",
        "oracle",
    ),
    _planted(
        "missing-tail",
        "the last rows of an expert are no whole tile, and are left out",
        "no tile has rows that it does not need",
        "ragged-shapes",
        m=32,
        mixture=(1, 1),
    ),
    _planted(
        "empty-expert",
        "an expert without rows takes the first row of the next one",
        "as fast as the right tile: no expert is looked at twice",
        "oracle",
        mixture=(5, 1),
        routing="few",
    ),
    _planted(
        "first-choice",
        "every choice of a token is multiplied with the expert of its first",
        "an expert's weight is read once for all choices of a token",
        "oracle",
        m=2,
        algorithm="gemv",
    ),
    _planted(
        "partial-columns",
        "the columns of y behind the last whole tile are not stored",
        "nothing is stored under a mask of columns",
        "ragged-shapes",
        m=2,
        algorithm="gemv",
    ),
    _planted(
        "slots-first-choice",
        "every choice of a token is multiplied with the expert of its first",
        "an expert's weight is read once for all choices of a token",
        "oracle",
        m=2,
        algorithm="slots",
    ),
    _planted(
        "slots-no-minimum",
        "the minimums of the sub-blocks are left out",
        "no minimums to read, and no sums of x to take",
        "oracle",
        m=2,
        algorithm="slots",
        weight_type="Q4_1",
    ),
    _planted(
        "slots-k-tail",
        "the loop ends at the last whole unit of K",
        "one unit less wherever K holds no whole number of them",
        "ragged-shapes",
        m=2,
        algorithm="slots",
        k=256,
    ),
)
"""The planted tiles of `gpu_space.MOE_SPACE`."""
