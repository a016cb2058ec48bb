"""The tiles of mmq's "dense": weights dequantized by slabs, products by the vendor's library.

`slab_n` rows of W are dequantized at a time, block_n x block_k of them by a program of `num_warps`
warps.
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

_FEWEST_ROWS = 64
_PAYS_FROM = 1024  # rows of x, where no tile was measured

FIELDS: dict[str, tuple[Any, ...]] = {
    "block_n": (16, 32, 64),
    "block_k": (64, 128, 256),
    "num_warps": (2, 4, 8),
    "slab_n": (512, 2048, 4096, 8192, 16384),
}
"""What a "dense" tile says."""


def _sixteen_bits(tile: Tile, problem: Problem) -> bool:
    return problem.act_dtype != "float32"


def _many_rows(tile: Tile, problem: Problem) -> bool:
    return bool(problem.M >= _FEWEST_ROWS)


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    return bool(tile.block_n * tile.block_k <= 2048 * tile.num_warps)


_RULES = (
    Rule(
        "weights of 16 bits",
        "the scratch holds weights of 16 bits, and a library may round float32 operands to fewer",
        _sixteen_bits,
    ),
    Rule(
        "many rows",
        "a weight is written and read again before it is used: with fewer than 64 rows of x that "
        "takes longer than its products",
        _many_rows,
    ),
    Rule(
        "registers",
        "a thread holds its weights as they are made: 64 of them, so block_n * block_k is at most "
        "2048 a warp",
        _fits_registers,
    ),
)


def _only_dense(rule: Rule) -> Rule:
    """The rule for "dense" tiles; every other tile obeys it."""
    return Rule(
        f"dense {rule.name}", rule.why,
        lambda tile, problem: tile.algorithm != "dense" or rule.holds(tile, problem),
    )  # fmt: skip


RULES: tuple[Rule, ...] = tuple(_only_dense(rule) for rule in _RULES)
"""What "dense" tiles must obey; no rule for others."""


def _tile(**changes: Any) -> Tile:
    fields = {"block_n": 32, "block_k": 256, "num_warps": 4, "slab_n": 16384, **changes}
    return Tile.of("dense", **fields)


def default(problem: Problem) -> Tile | None:
    """The tile of a problem of 16 bits with so many rows that it pays on NVIDIA GPUs; else None."""
    pays = problem.M >= _PAYS_FROM and problem.arch.startswith("sm_")
    if not pays or problem.act_dtype == "float32":
        return None
    # Measured on an H200: types with a scale for every 16 columns do better with fewer rows.
    return _tile(block_n=16 if BLOCK_FORMS[problem.weight_type].sub == 16 else 32)


def extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    """Rows of x from which on it may be used; rows of W and columns that one piece covers."""
    return {"M": (_FEWEST_ROWS,), "N": (tile.block_n, tile.slab_n), "K": (tile.block_k,)}


def _planted(
    name: str, fault: str, why_faster: str, caught_by: str, n: int = 96, weight_type: str = "Q4_K"
) -> Planted:
    tile = _tile(block_n=16, block_k=64, num_warps=2, slab_n=512, planted=name)
    return Planted(
        tile, fault, why_faster, caught_by, run_mmq,
        (Case("mmq", weight_type, "float16", 64, n, 256),),
    )  # fmt: skip


PLANTED = (
    _planted(
        "partial-rows",
        "the rows of a slab behind its last whole tile are not dequantized: what the scratch held "
        "before is multiplied",
        "nothing is stored under a mask of rows",
        "ragged-shapes",
    ),
    _planted(
        "first-slab",
        "every slab is dequantized from the first rows of W",
        "the words of the first slab are in the cache",
        "oracle",
        n=528,
    ),
    _planted(
        "no-minimum",
        "the minimums of the sub-blocks are left out",
        "no minimums to load, unpack and add",
        "oracle",
    ),
)
"""The planted tiles of "dense"."""
