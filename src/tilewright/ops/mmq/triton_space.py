"""The tile space of mmq on GPUs, over `tilewright.layout.blocks.GpuBlocks`.

"decode", "gemv", "int8", "hopper" and "dense" have files of their own (`decode_space` and so on);
here are the tiles of "triton": block_m x block_n outputs, K in steps of block_k, in `split_k`
shares; `num_warps` warps a program, loads `num_stages` steps ahead, bands of `group_m` rows of
tiles.

Rules and defaults follow what the compiler showed for all 13 types on sm_80, sm_90, gfx1151, gfx90a
and gfx942 (Triton 3.7): what spills, what waits for every product, what it allots. None was timed.
Triton 3.6 compiles them as well; there the K-quants but Q3_K, and IQ4_XS, still wait on sm_90.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from tilewright.layout.blocks import BLOCK_FORMS
from tilewright.ops.cross import warp_size
from tilewright.ops.mmq import decode_space, dense_space, gemv_space, hopper_space, int8_space
from tilewright.ops.mmq.triton_planted import PLANTED
from tilewright.ops.space import Rule, TileSpace
from tilewright.ops.w4a16.triton_space import smem_limit_bytes
from tilewright.tiles.tile import Problem, Tile

__all__ = ["TRITON_SPACE", "default_triton", "smem_bytes"]

_FEW = 32  # rows up to which K is split by default
_MOST_SPLIT_ROWS = 128
_ENOUGH = 384  # programs that keep a GPU's memory busy
_LIBRARY_FROM = 3072  # rows from which "dense" is as fast as "hopper" or faster, on an H200


def _itemsize(problem: Problem) -> int:
    return 4 if problem.act_dtype == "float32" else 2


def smem_bytes(tile: Tile, problem: Problem) -> int:
    """An upper bound of the shared memory that a tile makes the compiler allot: the weights of a
    step once, x and the words and scales of the steps ahead; or the outputs on their way."""
    form, size = BLOCK_FORMS[problem.weight_type], _itemsize(problem)
    w = tile.block_n * tile.block_k * size
    x = tile.block_m * tile.block_k * size
    words = tile.block_n * tile.block_k * form.low.bits // 8 * (2 if form.high is not None else 1)
    scales = 8 * tile.block_n * (tile.block_k // form.sub)
    loop = w + tile.num_stages * x + (tile.num_stages - 1) * (words + scales)
    return int(max(loop, 4 * tile.block_m * tile.block_n))


def _blocks(tile: Tile, problem: Problem) -> bool:
    sizes = ((tile.block_m, 16), (tile.block_n, 16), (tile.block_k, 32))
    return all(n >= least and n & (n - 1) == 0 for n, least in sizes)


def _few_rows(tile: Tile, problem: Problem) -> bool:
    return bool(tile.split_k == 1 or problem.M <= _MOST_SPLIT_ROWS)


def _fits_shared_memory(tile: Tile, problem: Problem) -> bool:
    limit = smem_limit_bytes(problem.arch)
    return limit is None or smem_bytes(tile, problem) <= limit


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    threads = tile.num_warps * warp_size(problem.arch)
    sums = tile.block_m * tile.block_n // threads
    weights = tile.block_n * tile.block_k // threads
    x = tile.block_m * tile.block_k // threads
    rdna = problem.arch.startswith("gfx1")
    if problem.act_dtype == "float32":
        return bool(sums <= (16 if rdna else 32) and weights <= 16 and x <= 16)
    return bool(sums <= 64 and weights <= 32 and x <= (32 if rdna else 64))


def _loads_ahead(tile: Tile, problem: Problem) -> bool:
    return bool(not problem.arch.startswith("gfx1") or tile.num_stages == 1)


def _pipelines(tile: Tile, problem: Problem) -> bool:
    by_wgmma = tile.block_n >= 64 and tile.num_warps >= 4 and problem.act_dtype != "float32"
    if problem.arch != "sm_90" or not by_wgmma:
        return True
    return bool(
        tile.block_n == 64 and tile.num_warps == 4 and tile.block_m >= 64
        and tile.block_k == 64 and tile.num_stages <= 3
    )  # fmt: skip


_TRITON_RULES = (
    Rule(
        "whole sub-blocks",
        "a step takes whole sub-blocks of 16 or 32 columns and whole words of every plane, and "
        "tl.arange and tl.dot take powers of two from 16 on: block_k is one from 32 on",
        _blocks,
    ),
    Rule(
        "few rows",
        "shares of K cost a float32 an output, written and read again; beyond 128 rows there are "
        "tiles enough without",
        _few_rows,
    ),
    Rule(
        "shared memory",
        "the tiles of x and w and the loads ahead must fit what one program may allot",
        _fits_shared_memory,
    ),
    Rule(
        "registers",
        "what a thread holds of sums, of weights in the making and of x must fit its registers: "
        "64, 32 and 64 numbers where weights have 16 bits, on RDNA 32 of x; 32, 16 and 16 in "
        "float32, on RDNA 16 sums",
        _fits_registers,
    ),
    Rule(
        "loads ahead",
        "on RDNA loads ahead stay in registers, and types with many scales spill: num_stages is 1",
        _loads_ahead,
    ),
    Rule(
        "one product after another",
        "where sm_90 multiplies by wgmma (64 rows of w and 4 warps on), ptxas waits for every "
        "product before the next (C7515), for one type or another, unless 4 warps take 64 rows of "
        "w, at least 64 of x, and steps of 64 columns at most 3 ahead",
        _pipelines,
    ),
)


def _only(algorithm: str, rule: Rule) -> Rule:
    """The rule for the tiles of one algorithm; every other tile obeys it."""
    return Rule(
        rule.name, rule.why,
        lambda tile, problem: tile.algorithm != algorithm or rule.holds(tile, problem),
    )  # fmt: skip


RULES = (
    *(_only("triton", rule) for rule in _TRITON_RULES),
    *decode_space.RULES,
    *gemv_space.RULES,
    *int8_space.RULES,
    *hopper_space.RULES,
    *dense_space.RULES,
)


def _tile(
    block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, split_k: int = 1
) -> Tile:
    return Tile.of(
        "triton", block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps,
        num_stages=num_stages, group_m=8, split_k=split_k,
    )  # fmt: skip


def _choices(problem: Problem) -> Iterator[Tile]:
    """Tiles for `problem`, the best first; one of them at least obeys the rules."""
    half, amd = problem.act_dtype != "float32", problem.arch.startswith("gfx")
    if problem.M <= _FEW:
        block_m = 16 if problem.M <= 16 else 32
        if not half:
            step = (32, 32, 4, 1)
        elif amd:
            step = (64, 64, 4, 1)
        else:
            step = (32, 64, 2, 3)
        split, tiles = 1, -(-problem.N // step[0])
        while split < 16 and split * tiles < _ENOUGH and 4 * split * step[1] <= problem.K:
            split *= 2
        yield _tile(block_m, *step, split_k=split)
    if half and amd:
        if problem.M > 256 and problem.N >= 128:
            yield _tile(128, 128, 32, 8, 1)
        yield _tile(64, 64, 32, 4, 1)
    elif half:
        if problem.M > 64:
            yield _tile(128, 64, 64, 4, 3)
        yield _tile(64, 64, 64, 4, 3)
        yield _tile(64, 64, 64, 4, 2)
    yield _tile(64, 32, 32, 4, 1)


def default_triton(problem: Problem) -> Tile:
    """The "triton" tile of a problem that no table and no other algorithm names."""
    return next(
        tile for tile in _choices(problem) if all(rule.holds(tile, problem) for rule in RULES)
    )


@functools.lru_cache(maxsize=4096)  # asked for at every launch that no table has a tile for
def _default(problem: Problem) -> Tile:
    for space in (decode_space, gemv_space, int8_space):
        few = space.default(problem)
        if few is not None:
            return few
    many = (hopper_space.default(problem), dense_space.default(problem))
    if problem.M >= _LIBRARY_FROM:
        many = many[::-1]
    for found in many:
        if found is not None and all(rule.holds(found, problem) for rule in RULES):
            return found
    return default_triton(problem)


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    if tile.algorithm == "decode":
        return decode_space.extents(tile)
    if tile.algorithm in ("gemv", "int8"):
        return (gemv_space if tile.algorithm == "gemv" else int8_space).extents(tile)
    if tile.algorithm in ("hopper", "dense"):
        return (hopper_space if tile.algorithm == "hopper" else dense_space).extents(tile)
    depths = (tile.block_k, tile.block_k * tile.split_k)
    return {"M": (tile.block_m,), "N": (tile.block_n,), "K": depths}


TRITON_SPACE = TileSpace(
    name="mmq/triton",
    fields={
        "triton": {
            "block_m": (16, 32, 64, 128),
            "block_n": (32, 64, 128),
            "block_k": (32, 64, 128, 256),
            "num_warps": (2, 4, 8),
            "num_stages": (1, 2, 3, 4),
            "group_m": (1, 4, 8),
            "split_k": (1, 2, 4, 8, 16),
        },
        "decode": decode_space.FIELDS,
        "gemv": gemv_space.FIELDS,
        "int8": int8_space.FIELDS,
        "hopper": hopper_space.FIELDS,
        "dense": dense_space.FIELDS,
    },
    rules=RULES,
    default=_default,
    extents=_extents,
    planted=(*PLANTED, *gemv_space.PLANTED, *int8_space.PLANTED, *dense_space.PLANTED),
)
"""The tiles of mmq, for every GPU and the interpreter."""
