"""The tile space of w4a16 on Hopper (sm_90): a prefill kernel and a decode kernel.

`tilewright.ops.w4a16.hopper_gemm` and `hopper_decode` say what their fields mean. Both read one
packed weight (`tilewright.layout.hopper`), so a table may choose either for any number of rows.
Rules leave out what cannot run, what registers do not hold, and what another tile does as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.ops.space import Rule, TileSpace
from tilewright.ops.w4a16.hopper_planted import HOPPER_PLANTED
from tilewright.tiles.tile import Problem, Tile

__all__ = ["HOPPER_SPACE", "decode_registers", "smem_bytes"]

_BLOCK = 64  # rows and columns of a block of words
_UNITS = 132  # multiprocessors of an H100 or H200: what defaults are made for
_SMEM = 227 * 1024  # bytes that one program may allot
_SMEM_OF_UNIT = 228 * 1024  # bytes of a multiprocessor, of which each program costs one KiB more
_REGISTERS = 65536  # of a multiprocessor
_THREAD_REGISTERS = 255
_DECODE_WARPS = 16
_DECODE_ROWS = 16  # of x, up to which a default is a decode tile
_STEP_US = {128: 0.36, 256: 0.67}  # of 64 columns of a tile of 128 x block_m, seen on an H200
_HAND_OVER = 3  # such steps, that it takes to leave a part or to add one
_PROGRAMS = 4  # of the decode kernel on a multiprocessor, beyond which K is not cut


def _is_decode(tile: Tile) -> bool:
    return bool(tile.algorithm == "hopper_decode")


def _cut(size: int, piece: int) -> int:
    return -(-size // piece)


def smem_bytes(tile: Tile) -> int:
    """An upper bound of the shared memory that a program of "hopper" allots.

    A ring of steps, each 64-wide blocks of K: x, words, scales and zero points (of two groups, and
    at least 128 bytes, which TMA writes whole), and two barriers; and one tile of y.
    """
    bn, bm = tile.block_n, tile.block_m
    block = bm * 128 + bn * 32 + bn * 4 + max(128, bn)
    step = tile.block_k // _BLOCK * block + 16
    return int(tile.num_stages * step + bm * bn * 2 + 1024)


def decode_registers(tile: Tile) -> int:
    """About what a thread of "hopper_decode" holds at once: words and x of two steps ("vectors"
    take x once more, as it was loaded), and two sets of sums. Found by compiling for sm_90; masks
    at the ends of K and more than one group a step take up to 100 more."""
    rows = tile.block_n // (16 * tile.warps_n)
    columns = tile.block_m // 8
    words = 4 * rows * tile.unroll
    x = (12 if tile.x_load == "vectors" else 8) * columns * tile.unroll
    return int(2 * (words + x + 4 * rows * columns))


def _sixteen_bits(tile: Tile, problem: Problem) -> bool:
    return problem.act_dtype in ("float16", "bfloat16")


def _tile_size(tile: Tile, problem: Problem) -> bool:
    if _is_decode(tile):
        return True
    return tile.block_n * tile.block_m <= _REGISTERS // (2 if tile.ctas == 1 else 4 * tile.ctas)


def _shared_memory(tile: Tile, problem: Problem) -> bool:
    if _is_decode(tile):
        return True
    each = smem_bytes(tile)
    return each <= _SMEM and tile.ctas * (each + 1024) <= _SMEM_OF_UNIT


def _loads_ahead(tile: Tile, problem: Problem) -> bool:
    return _is_decode(tile) or 256 <= tile.num_stages * tile.block_k <= 512


def _rows(tile: Tile, problem: Problem) -> bool:
    return not _is_decode(tile) or problem.M <= tile.block_m


def _idle_rows(tile: Tile, problem: Problem) -> bool:
    return bool(tile.block_m < 2 * max(problem.M, 8))


def _small_tiles(tile: Tile, problem: Problem) -> bool:
    return bool(tile.block_m >= min(128, problem.M // 4))


def _warps(tile: Tile, problem: Problem) -> bool:
    if not _is_decode(tile):
        return True
    rows = tile.block_n // tile.warps_n
    return 16 <= rows <= 64 and tile.warps_n * tile.warps_k <= _DECODE_WARPS


def _registers(tile: Tile, problem: Problem) -> bool:
    if not _is_decode(tile):
        return True
    threads = 32 * tile.warps_n * tile.warps_k
    return decode_registers(tile) <= min(_THREAD_REGISTERS, _REGISTERS // threads)


def _columns(tile: Tile) -> int:
    """Columns of K in a step."""
    return int(_BLOCK * tile.unroll if _is_decode(tile) else tile.block_k)


def _one_scale(tile: Tile, problem: Problem) -> bool:
    if problem.group in (-1, problem.K):
        return True
    columns = _columns(tile)
    return problem.group % columns == 0 or columns % problem.group == 0


def _parts(tile: Tile, problem: Problem) -> bool:
    return tile.split_k <= 1 or tile.split_k <= _cut(problem.K, _columns(tile))


def _few_programs(tile: Tile, problem: Problem) -> bool:
    if tile.split_k <= 1:
        return True
    tiles = _cut(problem.N, tile.block_n)
    if _is_decode(tile):
        return tiles * tile.split_k < 2 * _PROGRAMS * _UNITS
    return tiles * _cut(problem.M, tile.block_m) < _UNITS * tile.ctas


RULES = (
    Rule(
        "16-bit activations",
        "tensor cores multiply the weights as float16 or bfloat16, as the activations are",
        _sixteen_bits,
    ),
    Rule(
        "tile size",
        "the sums of a tile take at most half of the register file, a quarter in all where "
        "programs share a multiprocessor",
        _tile_size,
    ),
    Rule(
        "shared memory",
        "the ring of loads and a tile of y must fit what one program may allot, and all programs "
        "of a multiprocessor what it has",
        _shared_memory,
    ),
    Rule(
        "loads ahead",
        "fewer than 256 columns in flight leave wgmma waiting, more than 512 gain nothing",
        _loads_ahead,
    ),
    Rule("rows of x", "the decode kernel multiplies all rows of x in one program", _rows),
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
        "warps",
        "a warp of the decode kernel holds 16 to 64 rows of the weight, and a program has at most "
        "16 warps",
        _warps,
    ),
    Rule(
        "registers",
        "two steps of words and x and two sets of sums must fit the registers that a thread gets",
        _registers,
    ),
    Rule(
        "one scale",
        "a step lies in one group, or holds whole ones, unless one group is all of K",
        _one_scale,
    ),
    Rule("parts of K", "each part of K gets at least one step", _parts),
    Rule(
        "few programs",
        "K is cut in parts only where whole tiles leave multiprocessors without enough to do",
        _few_programs,
    ),
)


def _default_decode(problem: Problem) -> Tile:
    """Programs of 64 rows of the weight where there are enough of them; else of 32, with K cut."""
    whole = problem.group in (-1, problem.K)
    coarse = whole or problem.group % 128 == 0
    regular = (
        coarse and problem.K % (4 * 2 * _BLOCK) == 0
    )  # neither masks nor groups take registers
    two_steps = coarse or 128 % problem.group == 0
    few = problem.M <= 8
    if _cut(problem.N, 64) >= 2 * _UNITS:
        return Tile.of(
            "hopper_decode", block_m=8 if few else 16, block_n=64, warps_n=1, warps_k=4,
            unroll=2 if two_steps and (few or regular) else 1, split_k=1, x_load="pairs",
        )  # fmt: skip
    unroll = 2 if few and two_steps else 1
    warps_k, split_k = 8, 1
    tiles, steps = _cut(problem.N, 32), _cut(problem.K, _BLOCK * unroll)
    while split_k < 8 and 2 * tiles * split_k <= 3 * _UNITS and 2 * split_k * warps_k <= steps:
        split_k *= 2
    masked = problem.K % (_BLOCK * unroll * warps_k * split_k) != 0
    return Tile.of(
        "hopper_decode", block_m=8 if few else 16, block_n=32, warps_n=1, warps_k=warps_k,
        unroll=unroll, split_k=split_k, x_load="vectors" if few or not masked else "pairs",
    )  # fmt: skip


def _estimated_us(problem: Problem, block_m: int, split_k: int) -> float:
    """About what tiles of 128 rows of the weight take: their steps of K, and handing over parts."""
    tiles = _cut(problem.M, block_m) * _cut(problem.N, 128)
    steps = float(_cut(problem.K, _BLOCK))
    rounds, rest = divmod(tiles, _UNITS)
    if split_k == 1:
        steps *= _cut(tiles, _UNITS)
    elif rounds == 0:
        steps = steps * tiles / min(_UNITS, 8 * tiles) + 4 * _HAND_OVER
    elif 2 * rest <= _UNITS:  # halves of tiles fill the last round
        steps = steps * (rounds + 0.5) + 2 * _HAND_OVER
    else:
        steps = steps * tiles / _UNITS + 5 * _HAND_OVER
    return steps * _STEP_US[block_m]


def _prefill(block_n: int, block_m: int, stages: int, split_k: int, **other: int) -> Tile:
    fields = {"block_k": 64, "ctas": 1, "group_m": 4, **other}
    return Tile.of(
        "hopper", block_n=block_n, block_m=block_m, num_stages=stages, split_k=split_k, **fields
    )


def _default_prefill(problem: Problem) -> Tile:
    """Up to 64 rows two programs a multiprocessor, one of which loads while the other multiplies;
    then whole tiles or tiles cut along K, whichever should take less time."""
    m, n = problem.M, problem.N
    wide = problem.group in (-1, problem.K) or (
        problem.group % 128 == 0 or 128 % problem.group == 0
    )
    if m <= 64:
        block_m = 32 if m <= 32 else 64
        block_n = 64 if _cut(n, 128) * 2 <= _UNITS else 128
        if wide:
            return _prefill(block_n, block_m, 3, 0, block_k=128, ctas=2)
        return _prefill(block_n, block_m, 6, 0)
    choices = [(128, 1), (128, 0)] + ([(256, 1), (256, 0)] if m > 128 else [])
    block_m, split_k = min(choices, key=lambda choice: _estimated_us(problem, *choice))
    if block_m == 128 and wide:
        return _prefill(128, 128, 4, split_k, block_k=128)
    return _prefill(128, block_m, 4 if block_m == 256 else 6, split_k)


def _default(problem: Problem) -> Tile:
    """What a problem gets that no table names: what measured well on an H200."""
    return (_default_decode if problem.M <= _DECODE_ROWS else _default_prefill)(problem)


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    columns = _columns(tile)
    along_k = tile.warps_k * tile.split_k if _is_decode(tile) else tile.num_stages
    return {"M": (tile.block_m,), "N": (tile.block_n,), "K": (columns, columns * along_k)}


HOPPER_SPACE = TileSpace(
    name="w4a16/hopper",
    fields={
        "hopper": {
            "block_n": (64, 128, 256),
            "block_m": (16, 32, 64, 128, 256),
            "block_k": (64, 128),
            "num_stages": (2, 3, 4, 5, 6),
            "ctas": (1, 2),
            "group_m": (4, 8),
            "split_k": (0, 1, 2, 4),
        },
        "hopper_decode": {
            "block_m": (8, 16),
            "block_n": (16, 32, 64),
            "warps_n": (1, 2),
            "warps_k": (4, 8, 16),
            "unroll": (1, 2),
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
