"""The tiles of mmq's "int8": integer dots of codes and of x rounded to 8 bits.

A tile of block_m x block_n outputs, a block of 32 columns a step; `num_warps` warps a program,
loads `num_stages` steps ahead, bands of `group_m` rows of tiles. `schedule` says how tiles and
steps are shared among programs (`tilewright.ops.mmq.schedule`): whole tiles, `split_k` shares of K
each, or evenly among `units` programs, 0 for as many as the GPU has multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright.device import INTERPRETER
from tilewright.layout.blocks import BLOCK_FORMS
from tilewright.ops.mmq.int8_planted import PLANTED
from tilewright.ops.mmq.schedule import GUARD_ROWS, SCHEDULES, WARP_ROWS
from tilewright.ops.space import Rule
from tilewright.ops.w4a16.triton_space import smem_limit_bytes
from tilewright.tiles.tile import Problem, Tile

__all__ = ["FIELDS", "PLANTED", "RULES", "default", "extents"]

_FEWEST_ROWS = 17  # of x, for which a tile of x's rows is worth rounding it
_LEAST_UNITS = 64  # programs that are worth a GPU's while

FIELDS: dict[str, tuple[Any, ...]] = {
    "block_m": (16, 32, 64, 128),
    "block_n": (32, 64, 128, 256),
    "num_warps": (2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4),
    "group_m": (1, 8),
    "schedule": SCHEDULES,
    "split_k": (1, 2, 4, 8),
    "units": (0, 1, 7, 104, 132, 264, 304),
}
"""What an "int8" tile says."""


def smem_bytes(tile: Tile, problem: Problem) -> int:
    """An upper bound of the shared memory that a tile makes the compiler allot: codes and x of a
    step, x and words of the steps ahead; or the outputs on their way."""
    form = BLOCK_FORMS[problem.weight_type]
    x, codes = 32 * tile.block_m, 32 * tile.block_n
    words = tile.block_n * form.low.bits * 4 * (2 if form.high is not None else 1)
    loop = 2 * codes + tile.num_stages * (x + words)
    return int(max(loop, 4 * tile.block_m * tile.block_n))


def _asked(tile: Tile, problem: Problem) -> bool:
    return problem.activations == "int8"


def _rows_and_warps(tile: Tile, problem: Problem) -> bool:
    return bool(tile.block_n == WARP_ROWS * tile.num_warps)


def _guarded(tile: Tile, problem: Problem) -> bool:
    return bool(GUARD_ROWS % tile.block_n == 0)


def _own_fields(tile: Tile, problem: Problem) -> bool:
    split = (tile.split_k > 1) == (tile.schedule == "split-k")
    return bool(split and (tile.units == 0 or tile.schedule == "stream-k"))


def _busy(tile: Tile, problem: Problem) -> bool:
    return bool(tile.units == 0 or tile.units >= _LEAST_UNITS or problem.arch == INTERPRETER)


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    halves = BLOCK_FORMS[problem.weight_type].sub == 16
    most = 64 if halves or problem.arch.startswith("gfx1") else 128
    return bool(tile.block_m <= most)


def _fits_shared_memory(tile: Tile, problem: Problem) -> bool:
    limit = smem_limit_bytes(problem.arch)
    return limit is None or smem_bytes(tile, problem) <= limit


def _loads_ahead(tile: Tile, problem: Problem) -> bool:
    return bool(not problem.arch.startswith("gfx1") or tile.num_stages == 1)


_RULES = (
    Rule(
        "8 bits only when asked",
        "x is rounded to 8 bits here, and never for a product that asks for activations as they "
        "are",
        _asked,
    ),
    Rule(
        "rows and warps agree",
        "a tile has 16 rows of w for each of its warps, the height of a matrix instruction: "
        "block_n = 16 * num_warps; with fewer rows warps repeat each other, with more a warp has "
        "sums it lacks registers for, and a kernel that counts rows by its warps computes a part "
        "of the tile, faster and wrong",
        _rows_and_warps,
    ),
    Rule(
        "rows divide 128",
        "where N is a multiple of 128 the kernel compares no row with N, so whole tiles must end "
        "where N does: block_n divides 128, or the last tile writes past the end",
        _guarded,
    ),
    Rule(
        "fields of the schedule",
        "split_k is of split-k, where it is more than 1, and units of stream-k: elsewhere they are "
        "1 and 0",
        _own_fields,
    ),
    Rule(
        "busy units",
        "so few programs leave most of a GPU idle: numbers of units below 64 are for the "
        "interpreter",
        _busy,
    ),
    Rule(
        "registers",
        "a thread holds the float32 and the integer sums of its share of the tile: block_m is at "
        "most 128; on RDNA, and for types with two scales in 32 columns, who have two of the "
        "latter, 64",
        _fits_registers,
    ),
    Rule(
        "shared memory",
        "a step's codes and x, and the loads ahead, must fit what one program may allot",
        _fits_shared_memory,
    ),
    Rule("loads ahead", "on RDNA loads ahead stay in registers: num_stages is 1", _loads_ahead),
)


def _only_int8(rule: Rule) -> Rule:
    """The rule for "int8" tiles; every other tile obeys it."""
    return Rule(
        rule.name if rule.name not in ("registers", "shared memory", "loads ahead")
        else f"int8 {rule.name}",
        rule.why,
        lambda tile, problem: tile.algorithm != "int8" or rule.holds(tile, problem),
    )  # fmt: skip


RULES: tuple[Rule, ...] = tuple(_only_int8(rule) for rule in _RULES)
"""What "int8" tiles must obey; no rule for others."""


def _tile(block_m: int, block_n: int, num_stages: int, **more: Any) -> Tile:
    fields = {"group_m": 8, "schedule": "data-parallel", "split_k": 1, "units": 0, **more}
    return Tile.of(
        "int8", block_m=block_m, block_n=block_n, num_warps=block_n // WARP_ROWS,
        num_stages=num_stages, **fields,
    )  # fmt: skip


def _choices(problem: Problem) -> Iterator[Tile]:
    amd = problem.arch.startswith("gfx")
    stages = 1 if problem.arch.startswith("gfx1") else 2 if amd else 3
    block_m = 32 if problem.M <= 32 else 64
    tiles = -(-problem.M // block_m) * -(-problem.N // 64)
    if tiles < _LEAST_UNITS and problem.K >= 1024:
        yield _tile(block_m, 64, stages, schedule="split-k", split_k=4)
    if not amd and problem.M > 64:
        yield _tile(block_m, 128, stages)
    yield _tile(block_m, 64, stages)
    yield _tile(32, 32, 1)


def default(problem: Problem) -> Tile | None:
    """The tile of a problem that asks for 8-bit activations and has rows enough; else None.

    None on sm_90 too, where a tuned table may still name one: on an H200 the kernels that multiply
    x as it is were faster for each type measured, and they are more exact.
    """
    if problem.activations != "int8" or problem.M < _FEWEST_ROWS or problem.arch == "sm_90":
        return None
    return next(
        tile for tile in _choices(problem) if all(rule.holds(tile, problem) for rule in RULES)
    )


def extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    """Rows of x, rows of W and columns of both that one piece of the tile covers."""
    return {"M": (tile.block_m,), "N": (tile.block_n,), "K": (32, 32 * tile.split_k)}
