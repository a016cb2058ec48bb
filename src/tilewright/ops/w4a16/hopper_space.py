"""The tile space of w4a16 on Hopper (sm_90): a prefill kernel and a decode kernel.

`tilewright.ops.w4a16.hopper_gemm` and `hopper_decode` say what their fields mean. Both read one
packed weight (`tilewright.layout.hopper`), so a table may choose either for any number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.ops.space import Rule, TileSpace
from tilewright.ops.w4a16.hopper_planted import HOPPER_PLANTED
from tilewright.tiles.tile import Problem, Tile

__all__ = ["HOPPER_SPACE", "decode_registers", "smem_bytes"]

_BLOCK = 64  # rows and columns of a block of words
_SMEM_LIMIT = 227 * 1024  # bytes that one program may allot
_SMEM_OF_MULTIPROCESSOR = 228 * 1024
_SMEM_RESERVED = 1024  # bytes that the system takes of it for each program
_ACCUMULATORS = 32768  # of a program of "hopper": half of the register file
_DECODE_WARPS = 16
_DECODE_REGISTERS = 255


def _decode(tile: Tile) -> bool:
    return bool(tile.algorithm == "hopper_decode")


def smem_bytes(tile: Tile) -> int:
    """An upper bound of the shared memory that a program of "hopper" allots.

    A ring of steps, each 64-wide blocks of K: x, words, scales and zero points (of two groups, and
    at least 128 bytes, which TMA writes whole), and two barriers; and one tile of y.
    """
    bn, bm = tile.block_n, tile.block_m
    block = bm * 128 + bn * 32 + bn * 4 + max(128, bn)
    step = tile.block_k // _BLOCK * block + 16
    return int(tile.num_stages * step + bm * bn * 2 + 1024)


def decode_registers(tile: Tile, problem: Problem) -> int:
    """Registers that a thread of "hopper_decode" needs, found by compiling for sm_90: the words and
    x of two steps, and two sets of sums. A tile that stays within the limit does not spill."""
    rows = tile.block_n // (16 * tile.warps_n)
    columns = tile.block_m // 8
    words = 4 * rows * tile.unroll
    x = 8 * columns * tile.unroll
    sums = 4 * rows * columns
    return int(2 * (words + x + sums))


def _tile_size(tile: Tile, problem: Problem) -> bool:
    return _decode(tile) or tile.block_n * tile.block_m <= _ACCUMULATORS


def _shared_memory(tile: Tile, problem: Problem) -> bool:
    if _decode(tile):
        return True
    bytes_ = smem_bytes(tile)
    each = bytes_ + _SMEM_RESERVED
    return bytes_ <= _SMEM_LIMIT and tile.ctas * each <= _SMEM_OF_MULTIPROCESSOR


def _rows(tile: Tile, problem: Problem) -> bool:
    return not _decode(tile) or problem.M <= tile.block_m


def _idle_rows(tile: Tile, problem: Problem) -> bool:
    least = 8 if _decode(tile) else 16
    return tile.block_m < 2 * max(problem.M, least)


def _warps(tile: Tile, problem: Problem) -> bool:
    if not _decode(tile):
        return True
    rows = tile.block_n // tile.warps_n
    return 16 <= rows <= 64 and tile.warps_n * tile.warps_k <= _DECODE_WARPS


def _registers(tile: Tile, problem: Problem) -> bool:
    return not _decode(tile) or decode_registers(tile, problem) <= _DECODE_REGISTERS


def _one_scale(tile: Tile, problem: Problem) -> bool:
    if problem.group in (-1, problem.K):
        return True
    columns = _BLOCK * (tile.unroll if _decode(tile) else 1)
    return problem.group % columns == 0 or columns % problem.group == 0


def _parts(tile: Tile, problem: Problem) -> bool:
    columns = _BLOCK * tile.unroll if _decode(tile) else tile.block_k
    steps = -(-problem.K // columns)
    return tile.split_k <= 1 or tile.split_k <= steps


def _sixteen_bits(tile: Tile, problem: Problem) -> bool:
    return problem.act_dtype in ("float16", "bfloat16")


RULES = (
    Rule(
        "16-bit activations",
        "tensor cores multiply the weights as float16 or bfloat16, as the activations are",
        _sixteen_bits,
    ),
    Rule("tile size", "the sums of a tile take at most half of the register file", _tile_size),
    Rule(
        "shared memory",
        "the ring of loads and a tile of y must fit what one program may allot, and all programs "
        "of a multiprocessor what it has",
        _shared_memory,
    ),
    Rule("rows of x", "the decode kernel multiplies all rows of x in one program", _rows),
    Rule(
        "idle rows",
        "a tile of twice the rows that there are does twice the work for nothing",
        _idle_rows,
    ),
    Rule(
        "warps",
        "a warp of the decode kernel holds 16 to 64 rows of the weight, and a program has at most "
        "16 warps",
        _warps,
    ),
    Rule(
        "registers",
        "two steps of words and x and two sets of sums must fit the registers of a thread",
        _registers,
    ),
    Rule(
        "one scale",
        "a step lies in one group, or holds whole ones, unless one group is all of K",
        _one_scale,
    ),
    Rule("parts of K", "each part of K gets at least one step", _parts),
)

_UNITS = 132  # multiprocessors of an H100 or H200: what defaults are made for
_MOST_DECODE = 16  # rows of x up to which a default is a decode tile


def _power_of_two(value: int, least: int, most: int) -> int:
    """The smallest power of two that is at least `value`, within bounds."""
    return min(max(1 << max(value - 1, 0).bit_length(), least), most)


def _default_decode(problem: Problem) -> Tile:
    """Programs enough to keep every multiprocessor's loads in flight, along the rows of the weight
    where there are many, else along K as well."""
    whole = problem.group in (-1, problem.K)
    unroll = 2 if whole or problem.group % 128 == 0 or 128 % problem.group == 0 else 1
    steps = -(-problem.K // (_BLOCK * unroll))
    block_m = 8 if problem.M <= 8 else 16
    if -(-problem.N // 64) >= 2 * _UNITS:
        return Tile.of(
            "hopper_decode", block_m=block_m, block_n=64, warps_n=1,
            warps_k=min(4, _power_of_two(steps, 1, 4)), unroll=unroll, split_k=1, x_load="pairs",
        )  # fmt: skip
    warps_k = _power_of_two(steps, 1, 8)
    programs = -(-problem.N // 32)
    split_k = 1
    while split_k < 8 and programs * split_k < 3 * _UNITS // 2 and (
        2 * split_k * warps_k <= steps
    ):  # fmt: skip
        split_k *= 2
    return Tile.of(
        "hopper_decode", block_m=block_m, block_n=32, warps_n=1, warps_k=warps_k, unroll=unroll,
        split_k=split_k, x_load="vectors",
    )  # fmt: skip


def _default_prefill(problem: Problem) -> Tile:
    """Tiles as large as the rows of x fill, cut along K where they are few."""
    block_m = _power_of_two(problem.M, 16, 256)
    block_n = {256: 128, 128: 256}.get(block_m, 128)
    tile = Tile.of(
        "hopper", block_n=block_n, block_m=block_m, block_k=64, num_stages=6, ctas=1, group_m=4,
        split_k=0,
    )  # fmt: skip
    while smem_bytes(tile) > _SMEM_LIMIT:
        tile = tile.replace(num_stages=tile.num_stages - 1)
    return tile


def _default(problem: Problem) -> Tile:
    """What a problem gets that no table names."""
    return (_default_decode if problem.M <= _MOST_DECODE else _default_prefill)(problem)


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    if _decode(tile):
        step = _BLOCK * tile.unroll
        k: tuple[int, ...] = (step, step * tile.warps_k * tile.split_k)
    else:
        k = (tile.block_k, tile.block_k * tile.num_stages)
    return {"M": (tile.block_m,), "N": (tile.block_n,), "K": k}


HOPPER_SPACE = TileSpace(
    name="w4a16/hopper",
    fields={
        "hopper": {
            "block_n": (64, 128, 256),
            "block_m": (16, 32, 64, 128, 256),
            "block_k": (64, 128),
            "num_stages": (2, 3, 4, 5, 6),
            "ctas": (1, 2),
            "group_m": (1, 4, 8),
            "split_k": (0, 1, 2, 4, 8),
        },
        "hopper_decode": {
            "block_m": (8, 16, 32),
            "block_n": (16, 32, 64, 128),
            "warps_n": (1, 2, 4),
            "warps_k": (1, 2, 4, 8, 16),
            "unroll": (1, 2, 4),
            "split_k": (1, 2, 4, 8),
            "x_load": ("pairs", "vectors"),
        },
    },
    rules=RULES,
    default=_default,
    extents=_extents,
    planted=HOPPER_PLANTED,
)
"""W4A16 on Hopper: prefill ("hopper") and decode ("hopper_decode")."""
