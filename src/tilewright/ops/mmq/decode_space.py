"""The tiles of mmq's "decode", for one row of x on Hopper: its fields, its rules, its default.

A tile computes block_n rows of the weight; `num_warps` warps stand along K with 256 columns each a
step (`tilewright.ops.mmq.decode_gemv`). Defaults follow what one H200 measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.layout.blocks import BLOCK_FORMS
from tilewright.ops.space import Rule
from tilewright.tiles.tile import Problem, Tile

__all__ = ["FIELDS", "RULES", "TYPES", "default", "extents"]

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""The types that the kernel multiplies: codes less an offset, of 4 to 8 bits."""

_STEP = 256  # columns of a step of a warp
_UNITS = 132  # multiprocessors of an H100 or H200: what defaults are made for
_PROGRAMS = 4  # of 32 rows and 4 warps on each of them, from which a weight has many rows
_LONG = 16  # steps of K
_LONGER = 32
_ENOUGH = 1024  # warps that keep a GPU's memory busy

FIELDS: dict[str, tuple[Any, ...]] = {
    "block_n": (16, 32),
    "num_warps": (1, 2, 4, 8, 16),
}
"""What a "decode" tile says."""


def _hopper(tile: Tile, problem: Problem) -> bool:
    return problem.arch == "sm_90"


def _one_row(tile: Tile, problem: Problem) -> bool:
    return problem.M == 1


def _products_exact(tile: Tile, problem: Problem) -> bool:
    if problem.weight_type not in TYPES or problem.act_dtype == "float32":
        return False
    form = BLOCK_FORMS[problem.weight_type]
    return problem.act_dtype == "float16" or form.low.bits + form.high_bits <= 7


def _whole_steps(tile: Tile, problem: Problem) -> bool:
    return bool(problem.K % _STEP == 0 and problem.N % tile.block_n == 0)


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    return bool(tile.block_n * tile.num_warps <= 256)


_RULES = (
    Rule("sm_90", "the kernel was made for, and only ever ran on, compute capability 9.0", _hopper),
    Rule("one row", "the columns of a product are sub-blocks of the one row of x", _one_row),
    Rule(
        "exact products",
        "codes are multiplied as 16-bit numbers, which float16 holds of 4 to 8 bits and bfloat16 "
        "up to 7; tables of codes are no such numbers",
        _products_exact,
    ),
    Rule(
        "whole steps",
        "a warp takes 256 columns and a program block_n rows of the weight: K is a multiple of "
        "256, N of block_n",
        _whole_steps,
    ),
    Rule(
        "registers",
        "32 rows take up to 200 registers a thread: at most 8 warps",
        _fits_registers,
    ),
)


def _only_decode(rule: Rule) -> Rule:
    """The rule for "decode" tiles; every other tile obeys it."""
    return Rule(
        f"decode {rule.name}", rule.why,
        lambda tile, problem: tile.algorithm != "decode" or rule.holds(tile, problem),
    )  # fmt: skip


RULES: tuple[Rule, ...] = tuple(_only_decode(rule) for rule in _RULES)
"""What "decode" tiles must obey; no rule for others."""


def default(problem: Problem) -> Tile | None:
    """The tile of one row of x; None where no tile may.

    Of a weight of many rows a program takes 32 and 4 warps; else 16 and 8 warps, 4 where K is short
    or where registers for 8 let fewer programs run at once than there are.
    """
    steps = problem.K // _STEP
    many = problem.N >= 32 * _PROGRAMS * _UNITS
    crowded = problem.weight_type == "Q6_K" and problem.N > 16 * 2 * _UNITS and steps < _LONGER
    num_warps = 4 if many or crowded or steps < _LONG else 8
    while num_warps < 16 and num_warps * problem.N < 16 * _ENOUGH:
        num_warps *= 2
    while num_warps > max(1, steps):
        num_warps //= 2
    for block_n in (32, 16) if many else (16,):
        tile = Tile.of("decode", block_n=block_n, num_warps=num_warps)
        if all(rule.holds(tile, problem) for rule in RULES):
            return tile
    return None


def extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    """Rows of x, rows of W and columns of both that one piece of the tile covers."""
    return {
        "M": (1,),
        "N": (tile.block_n,),
        "K": (_STEP, _STEP * tile.num_warps),
    }
