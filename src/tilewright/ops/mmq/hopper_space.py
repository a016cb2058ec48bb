"""The tiles of mmq's "hopper": its fields, its rules, its defaults.

A tile computes block_n rows of the weight for block_m rows of x, in `split_k` shares of K (0: the
steps of all tiles are cut evenly among the multiprocessors), with
`num_stages` steps of 64 columns of x and `w_stages` of 128 columns of the weight in flight, and
walks bands of `group_m` rows of tiles (`tilewright.ops.mmq.hopper_gemm`).

Rules follow what the compiler showed for all 13 types on sm_90 (Triton 3.6 and 3.7), defaults an
estimate from what one H200 measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.layout.blocks import BLOCK_FORMS, BlockForm
from tilewright.ops.space import Rule
from tilewright.tiles.tile import Problem, Tile

__all__ = ["FIELDS", "RULES", "default", "extents", "smem_bytes"]

_UNITS = 132  # multiprocessors of an H100 or H200: what defaults are made for
_SMEM = 227 * 1024  # bytes that one program may allot
_STEP = 128  # columns of the weight in a step
_FEWEST_ROWS = 17  # of x, where no tile was measured

FIELDS: dict[str, tuple[Any, ...]] = {
    "block_n": (64, 128),
    "block_m": (16, 32, 64, 128, 256),
    "num_stages": (3, 4, 5, 6),
    "w_stages": (2, 3, 4),
    "split_k": (0, 1, 2, 4, 8),
    "group_m": (2, 4, 8),
}
"""What a "hopper" tile says."""


def _cut(size: int, piece: int) -> int:
    return -(-size // piece)


def _words_of_numbers(form: BlockForm, act_dtype: str) -> int:
    """Of a sub-block, as `tilewright.ops.mmq.hopper_scales` has them."""
    packed = act_dtype == "float16" and form.scaling != "exponent"
    both = form.minimum_at is not None
    return 2 if both and not (packed and form.scaling == "half") else 1


def smem_bytes(tile: Tile, problem: Problem) -> int:
    """An upper bound of the shared memory that a program allots: the rings of x and of the weight,
    a tile of y or its half, and barriers."""
    form = BLOCK_FORMS[problem.weight_type]
    x = tile.block_m * 128
    words = tile.block_n * 16 * (form.low.bits + form.high_bits)
    numbers = tile.block_n * (_STEP // form.sub) * 4
    numbers *= _words_of_numbers(form, problem.act_dtype)
    y = 2 * tile.block_n * min(tile.block_m, 128)
    return int(tile.num_stages * x + tile.w_stages * (words + numbers) + y + 1024)


def _hopper(tile: Tile, problem: Problem) -> bool:
    return problem.arch == "sm_90"


def _sixteen_bits(tile: Tile, problem: Problem) -> bool:
    return problem.act_dtype in ("float16", "bfloat16")


def _whole_rows(tile: Tile, problem: Problem) -> bool:
    return BLOCK_FORMS[problem.weight_type].high_bits != 1 or problem.K % 128 == 0


def _tile_size(tile: Tile, problem: Problem) -> bool:
    return bool(tile.block_n * tile.block_m <= (32768 if tile.block_n == 128 else 16384))


def _shared_memory(tile: Tile, problem: Problem) -> bool:
    return smem_bytes(tile, problem) <= _SMEM


def _idle_rows(tile: Tile, problem: Problem) -> bool:
    return bool(tile.block_m < 2 * max(problem.M, 8))


def _small_tiles(tile: Tile, problem: Problem) -> bool:
    return bool(tile.block_m >= min(128, problem.M // 4))


def _shares(tile: Tile, problem: Problem) -> bool:
    tiles = _cut(problem.M, tile.block_m) * _cut(problem.N, tile.block_n)
    steps = _cut(problem.K, _STEP)
    return bool(tile.split_k <= 1 or (tiles < _UNITS and 2 * tile.split_k <= steps))


_RULES = (
    Rule("sm_90", "wgmma and the tensor memory accelerator are of compute capability 9.0", _hopper),
    Rule(
        "16-bit activations",
        "wgmma multiplies the weights as float16 or bfloat16, as the activations are",
        _sixteen_bits,
    ),
    Rule(
        "whole words a row",
        "rows of words begin at multiples of 16 bytes, which for a plane of one bit are 128 "
        "columns: K is a multiple of 128 for Q5_0 and Q5_1",
        _whole_rows,
    ),
    Rule("tile size", "the sums of a tile take at most half of the register file", _tile_size),
    Rule(
        "shared memory",
        "the rings of x and of the weight and a tile of y must fit what one program may allot",
        _shared_memory,
    ),
    Rule(
        "idle rows",
        "a tile of twice the rows that there are does twice the work for nothing",
        _idle_rows,
    ),
    Rule(
        "small tiles",
        "each tile of rows dequantizes the weight again, so many rows take tiles of 128",
        _small_tiles,
    ),
    Rule(
        "shares",
        "K is cut in a number of shares, a program each, of a step of 256 columns at least, only "
        "where whole tiles leave multiprocessors without work; split_k=0 cuts the steps of all "
        "tiles evenly",
        _shares,
    ),
)


def _only_hopper(rule: Rule) -> Rule:
    """The rule for "hopper" tiles; every other tile obeys it."""
    return Rule(
        f"hopper {rule.name}", rule.why,
        lambda tile, problem: tile.algorithm != "hopper" or rule.holds(tile, problem),
    )  # fmt: skip


RULES: tuple[Rule, ...] = tuple(_only_hopper(rule) for rule in _RULES)
"""What "hopper" tiles must obey; no rule for others."""


_STEP_US = {16: 1.1, 32: 1.1, 64: 1.6, 128: 2.2, 256: 3.1}
"""About what 256 columns of a tile of 128 rows of the weight take, by block_m: from an H200's times
of 128 and 256; below them the weight, which is the same, takes most of it."""
_EVENLY_FROM = 128  # rows of a tile from which an even cut was measured


def _tile(problem: Problem, block_m: int, split_k: int) -> Tile | None:
    """The tile with the most steps in flight that obeys the rules; None if none does."""
    for stages, w_stages in ((4, 4), (4, 3), (3, 3), (4, 2), (3, 2)):
        tile = Tile.of(
            "hopper", block_n=128, block_m=block_m, num_stages=stages, w_stages=w_stages,
            split_k=split_k, group_m=4,
        )  # fmt: skip
        if all(rule.holds(tile, problem) for rule in RULES):
            return tile
    return None


def _about_us(tile: Tile, problem: Problem) -> float:
    """Steps and pieces of the multiprocessor that has the most of them, and what it takes to begin
    and to store a piece, and to leave shares and to add them."""
    tiles = _cut(problem.M, tile.block_m) * _cut(problem.N, tile.block_n)
    steps = _cut(problem.K, 256)
    if tile.split_k == 0:
        most = _cut(tiles * steps, _UNITS)
        pieces = _cut(most, steps)
        shares = 2 + 10 * tile.block_m / 256
    else:
        pieces = _cut(tiles * tile.split_k, _UNITS)
        most = pieces * _cut(steps, tile.split_k)
        shares = pieces * (2 + (2.5 * tile.split_k - 0.5) * tile.block_m / 256)
    us = most * _STEP_US[tile.block_m] + pieces
    return float(us + (0 if tile.split_k == 1 else shares))


def default(problem: Problem) -> Tile | None:
    """The tile of a problem of more rows than a decode kernel takes, on sm_90; else None."""
    if problem.M < _FEWEST_ROWS:
        return None
    found = (
        _tile(problem, block_m, split_k)
        for block_m in FIELDS["block_m"]
        for split_k in FIELDS["split_k"]
        if split_k > 0 or block_m >= _EVENLY_FROM
    )
    tiles = [tile for tile in found if tile is not None]
    return min(tiles, key=lambda tile: _about_us(tile, problem), default=None)


def extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    """Rows of x, rows of W and columns of both that one piece of the tile covers."""
    return {"M": (tile.block_m,), "N": (tile.block_n,), "K": (_STEP, _STEP * max(2, tile.split_k))}
