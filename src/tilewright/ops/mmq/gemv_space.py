"""The tiles of mmq's "gemv", for few rows of x: its fields, its rules, its planted tiles.

A tile computes block_n rows of the weight for up to block_m rows of x, in `split_k` shares of K;
`num_warps` warps stand along K, each with `units` units of 64 to 256 columns a step
(`tilewright.ops.mmq.gemv_parts`). From 8 rows on 16-bit x goes through matrix units. `ahead` says
whether words and scales of the next step are loaded before one is multiplied: 0 no, 1 wherever the
assembler puts these loads, 2 at the top of the loop, which takes more registers.

Rules follow what the compiler showed for all 13 types on sm_90 (Triton 3.6 and 3.7): what spills.
Defaults follow what one H200 measured; other chips keep the tiles of "triton".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.layout.blocks import BLOCK_FORMS
from tilewright.ops.contract import Case
from tilewright.ops.planted_run import run_mmq
from tilewright.ops.space import Planted, Rule
from tilewright.tiles.tile import Problem, Tile

__all__ = ["FIELDS", "PLANTED", "RULES", "default", "extents"]

LEAST_DOT = 8
"""Rows of x from which matrix units multiply."""

_LONG = 8192  # columns from which a program has 8 warps by default
_ENOUGH = 1024  # warps that keep a GPU's memory busy

FIELDS: dict[str, tuple[Any, ...]] = {
    "block_m": (1, 2, 4, 8, 16),
    "block_n": (8, 16, 32, 64),
    "num_warps": (1, 2, 4, 8, 16),
    "units": (1, 2, 4),
    "ahead": (0, 1, 2),
    "split_k": (1, 2, 4, 8, 16),
}
"""What a "gemv" tile says."""


def _dots(tile: Tile, problem: Problem) -> bool:
    return bool(tile.block_m >= LEAST_DOT and problem.act_dtype != "float32")


def _as_asked(tile: Tile, problem: Problem) -> bool:
    return problem.M <= tile.block_m


def _matrix_units(tile: Tile, problem: Problem) -> bool:
    if not _dots(tile, problem):
        return True
    least = 16 if problem.arch.startswith("gfx") else LEAST_DOT
    return bool(tile.block_n >= 16 and tile.block_m >= least)


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    lane = 128 // BLOCK_FORMS[problem.weight_type].low.bits  # columns of a lane in a unit
    rows = tile.block_n // 8  # of the weight, of a lane
    if not _dots(tile, problem):
        return bool(rows * lane <= 64 and tile.units <= 2 and tile.num_warps <= 8)
    words = rows * tile.units * (1 + min(tile.ahead, 1))
    sums = rows * tile.block_m // 8
    if lane == 64 and tile.ahead and tile.units > 2:
        return False
    return bool((words + sums) * max(1, tile.num_warps // 8) <= 18)


_RULES = (
    Rule(
        "all rows at once",
        "a program holds a sum for every row of x, so that weights are read once: M is at most "
        "block_m",
        _as_asked,
    ),
    Rule(
        "matrix units",
        "from 8 rows on 16-bit x goes through matrix units, which take 16 rows of the weight at "
        "once, on AMD's chips 16 rows of x too",
        _matrix_units,
    ),
    Rule(
        "gemv registers",
        "what a lane holds of weights and of x must fit its registers",
        _fits_registers,
    ),
)


def _only_gemv(rule: Rule) -> Rule:
    """The rule for "gemv" tiles; every other tile obeys it."""
    return Rule(
        rule.name, rule.why,
        lambda tile, problem: tile.algorithm != "gemv" or rule.holds(tile, problem),
    )  # fmt: skip


RULES: tuple[Rule, ...] = tuple(_only_gemv(rule) for rule in _RULES)
"""What "gemv" tiles must obey; no rule for others."""


def _tile(
    block_m: int, block_n: int, num_warps: int, units: int = 1, ahead: int = 0, split_k: int = 1
) -> Tile:
    return Tile.of(
        "gemv", block_m=block_m, block_n=block_n, num_warps=num_warps, units=units, ahead=ahead,
        split_k=split_k,
    )  # fmt: skip


def _measured(problem: Problem) -> bool:
    """Whether one GPU has shown that "gemv" is the right choice for such products."""
    return problem.arch == "sm_90" and problem.M <= 16 and problem.act_dtype != "float32"


def default(problem: Problem) -> Tile | None:
    """The tile of a product of few rows on a chip that was measured; else None.

    More warps along a long K, and shares of it until warps enough keep the memory busy.
    """
    if not _measured(problem):
        return None
    lane = 128 // BLOCK_FORMS[problem.weight_type].low.bits  # columns of a lane in a unit
    num_warps = 8 if problem.K >= _LONG else 4
    units = 1 if lane == 64 else 2
    steps = max(1, problem.K // (4 * lane * units * num_warps))
    warps, split_k = num_warps * -(-problem.N // 16), 1
    while split_k < 16 and split_k * warps < _ENOUGH and 2 * split_k <= steps:
        split_k *= 2
    return _tile(8 if problem.M <= 8 else 16, 16, num_warps, units, 1, split_k)


def extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    """Rows of x, rows of W and columns of both that one piece of the tile covers; never more rows
    of x than block_m."""
    step = 64 * tile.num_warps * tile.units
    return {"M": (max(1, tile.block_m // 2),), "N": (tile.block_n,), "K": (step, 4 * step)}


def _planted(
    name: str,
    fault: str,
    why_faster: str,
    caught_by: str,
    *,
    m: int = 8,
    weight_type: str = "Q4_K",
    split_k: int = 1,
) -> Planted:
    tile = Tile.of(**_tile(8, 16, 2, split_k=split_k).as_dict(), planted=name)
    case = Case("mmq", weight_type, "float16", m, 48, 512)
    return Planted(tile, fault, why_faster, caught_by, run_mmq, (case,))


PLANTED = (
    _planted(
        "gemv-lost-partial",
        "the sum of the shares of K leaves out the last of them",
        "one share less to read",
        "oracle",
        split_k=2,
    ),
    _planted(
        "gemv-no-minimum",
        "the minimums of the sub-blocks are left out",
        "no minimums to unpack and to multiply",
        "oracle",
    ),
    _planted(
        "gemv-k-tail",
        "the loop ends at the last whole unit of K",
        "one unit less wherever K holds no whole number of them",
        "ragged-shapes",
        weight_type="Q5_0",
    ),
    _planted(
        "gemv-past-the-end",
        "one row too many is stored where x has fewer than the tile",
        "as fast as the right tile: a comparison is off by one",
        "guard-bands",
        m=5,
    ),
)
"""The planted "gemv" tiles of `triton_space.TRITON_SPACE`."""
