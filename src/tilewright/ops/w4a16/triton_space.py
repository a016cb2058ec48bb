"""The tile space of the portable kernels of w4a16, over `tilewright.layout.triton.WordsW4`.

"triton" (`triton_gemm`)
    A tile of block_m x block_n outputs, K in steps of block_k; `num_warps` warps a program, loads
    `num_stages` steps ahead; bands of `group_m` rows of tiles; `dequant` and `order` as the
    kernel's docstring says.

"skinny" (`triton_skinny`)
    M up to block_m, block_n columns a program, K in steps of block_k, in `split_k` shares.

"amd" (`amd_gemm`)
    Fields and rules of its own in `amd_space`.

Limits of chips are by arch: `smem_limit_bytes` says what a program may allot, `smem_bytes` bounds
what the compiler does allot.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.device import INTERPRETER
from tilewright.ops.cross import warp_size
from tilewright.ops.space import Rule, TileSpace
from tilewright.ops.w4a16.amd_space import AMD_FIELDS, AMD_RULES
from tilewright.ops.w4a16.triton_planted import PLANTED
from tilewright.tiles.tile import Problem, Tile

__all__ = ["INTERPRETER", "TRITON_SPACE", "smem_bytes", "smem_limit_bytes", "warp_size"]

_KIB = 1024
_SMEM_LIMITS = {
    "gfx950": 160 * _KIB,
    "gfx": 64 * _KIB,
    "sm_70": 96 * _KIB,
    "sm_75": 64 * _KIB,
    "sm_80": 163 * _KIB,
    "sm_86": 99 * _KIB,
    "sm_87": 163 * _KIB,
    "sm_89": 99 * _KIB,
    "sm_90": 227 * _KIB,
    "sm_100": 227 * _KIB,
    "sm_103": 227 * _KIB,
    "sm_120": 99 * _KIB,
    "sm_121": 99 * _KIB,
}
_SMEM_UNKNOWN = 48 * _KIB  # what every GPU of the last ten years grants
_ACCUMULATORS = 128  # of a thread's 255 or 256 registers
_SUMS = 64  # of "skinny", which holds as many of one step beside them
_NVIDIA_REGISTERS = 65536  # of one multiprocessor


def smem_limit_bytes(arch: str) -> int | None:
    """Shared memory (LDS) that one program may allot on `arch`; None for the interpreter's CPU."""
    if arch == INTERPRETER or arch.startswith("cpu"):
        return None
    if arch in _SMEM_LIMITS:
        return _SMEM_LIMITS[arch]
    return _SMEM_LIMITS["gfx"] if arch.startswith("gfx") else _SMEM_UNKNOWN


def smem_bytes(tile: Tile, problem: Problem) -> int:
    """An upper bound of the shared memory that a "triton" tile makes the compiler allot.

    The dequantized tile of w once, the loads of `num_stages` steps of x and of one fewer of words,
    scales and zero points; or half of the outputs, which NVIDIA's compiler exchanges before it
    stores them. Found by compiling for gfx90a, gfx1151, sm_80 and sm_90 (Triton 3.7). Words of the
    order "k32" need less: their weights stay in registers.
    """
    size = 4 if problem.act_dtype == "float32" else 2
    x = tile.block_m * tile.block_k * size
    w = tile.block_k * tile.block_n * size
    if problem.arch.startswith("gfx"):
        return int(w + max(1, tile.num_stages - 1) * x)
    ahead = tile.block_k * tile.block_n // 2 + 8 * tile.block_n
    if tile.order == "wx" and problem.arch.startswith("sm_"):
        w = 0
    loop = w + tile.num_stages * x + (tile.num_stages - 1) * ahead
    return int(max(loop, tile.block_m * tile.block_n * size))


def _power_of_two(value: int, least: int) -> bool:
    return value >= least and value & (value - 1) == 0


def _blocks(tile: Tile, problem: Problem) -> bool:
    least = 16 if tile.algorithm == "triton" else 1
    sizes = ((tile.block_m, least), (tile.block_n, 16), (tile.block_k, 16))
    return all(_power_of_two(n, at_least) for n, at_least in sizes)


def _whole_words(tile: Tile, problem: Problem) -> bool:
    return tile.block_k % 8 == 0


def _one_scale(tile: Tile, problem: Problem) -> bool:
    return problem.group in (-1, problem.K) or problem.group % tile.block_k == 0


def _sixteen_bits(tile: Tile, problem: Problem) -> bool:
    return tile.algorithm != "triton" or tile.dequant == "scalar" or problem.act_dtype != "float32"


def _has_asm(tile: Tile, problem: Problem) -> bool:
    if tile.algorithm != "triton" or tile.dequant != "asm":
        return True
    arch = problem.arch
    if problem.act_dtype == "bfloat16":
        return arch == INTERPRETER or (arch.startswith("sm_") and int(arch[3:]) >= 90)
    return True


def _few_rows(tile: Tile, problem: Problem) -> bool:
    return tile.algorithm != "skinny" or problem.M <= tile.block_m


def _fits_shared_memory(tile: Tile, problem: Problem) -> bool:
    limit = smem_limit_bytes(problem.arch)
    return tile.algorithm != "triton" or limit is None or smem_bytes(tile, problem) <= limit


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    threads = tile.num_warps * warp_size(problem.arch)
    outputs = tile.block_m * tile.block_n
    if tile.algorithm == "skinny":
        return outputs * (tile.block_k // 8) <= _SUMS * threads
    if problem.arch.startswith("sm_") and 2 * outputs > _NVIDIA_REGISTERS:
        return False
    return outputs <= _ACCUMULATORS * threads


RULES = (
    Rule(
        "powers of two",
        "tl.arange takes only powers of two, and tl.dot at least 16 in each dimension",
        _blocks,
    ),
    Rule("whole words", "a step of K unpacks whole words of 8 codes", _whole_words),
    Rule(
        "one scale a step",
        "a step reads one scale a column, so block_k divides the group unless one group is all of "
        "K",
        _one_scale,
    ),
    Rule(
        "packed for 16 bits",
        "pairs of codes become pairs of 16-bit numbers; float32 activations take 'scalar'",
        _sixteen_bits,
    ),
    Rule(
        "packed maths",
        "only NVIDIA's chips from sm_90 on multiply pairs of bfloat16; take 'packed' elsewhere",
        _has_asm,
    ),
    Rule(
        "few rows",
        "a skinny tile holds every row of x: M is at most its block_m",
        _few_rows,
    ),
    Rule(
        "shared memory",
        "the tiles of x and w and the loads ahead must fit what one program may allot",
        _fits_shared_memory,
    ),
    Rule(
        "registers",
        "more than 128 accumulators a thread (64 of a skinny tile) spill, and on NVIDIA they may "
        "take at most half of the register file",
        _fits_registers,
    ),
)


def _skinny(problem: Problem) -> Tile:
    """Enough programs to keep the memory of a large chip busy; nobody has tuned it."""
    whole = problem.group in (-1, problem.K)
    block_m = 1 if problem.M == 1 else 2 if problem.M == 2 else 4
    block_k = next(k for k in (128, 64, 32, 16) if whole or problem.group % k == 0)
    block_n = 32
    tiles = -(-problem.N // block_n)
    split = 1
    while split < 8 and split * tiles < 512 and 4 * split * block_k <= problem.K:
        split *= 2
    return Tile.of(
        "skinny", block_m=block_m, block_n=block_n, block_k=block_k, split_k=split, num_warps=4,
        num_stages=2,
    )  # fmt: skip


def _default(problem: Problem) -> Tile:
    """Small enough for every chip; nobody has tuned it."""
    whole = problem.group in (-1, problem.K)
    if problem.M <= 4:
        return _skinny(problem)
    arch = problem.arch
    nvidia = arch.startswith("sm_")
    dequant = "scalar" if problem.act_dtype == "float32" else "packed"
    if problem.act_dtype == "float16" and (nvidia or arch.startswith("gfx")):
        dequant = "asm"
    if problem.act_dtype == "bfloat16" and nvidia and int(arch[3:]) >= 90:
        dequant = "asm"
    wide = problem.M <= 32 and (whole or problem.group % 64 == 0)
    block_m = 16 if problem.M <= 16 else 32 if problem.M <= 32 else 64
    return Tile.of(
        "triton", block_m=block_m, block_n=64, block_k=64 if wide else 32, num_warps=4,
        num_stages=2, group_m=8, order="wx" if nvidia else "xw", dequant=dequant,
    )  # fmt: skip


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    if tile.algorithm == "skinny":  # it never has more rows than block_m
        depths = (tile.block_k, tile.block_k * tile.split_k)
        return {"M": (max(1, tile.block_m // 2),), "N": (tile.block_n,), "K": depths}
    return {"M": (tile.block_m,), "N": (tile.block_n,), "K": (tile.block_k,)}


TRITON_SPACE = TileSpace(
    name="w4a16/triton",
    fields={
        "triton": {
            "block_m": (16, 32, 64, 128, 256),
            "block_n": (16, 32, 64, 128, 256, 512),
            "block_k": (32, 64, 128, 256),
            "num_warps": (1, 2, 4, 8, 16),
            "num_stages": (1, 2, 3, 4),
            "group_m": (1, 4, 8, 16),
            "dequant": ("scalar", "packed", "asm"),
            "order": ("xw", "wx"),
        },
        "skinny": {
            "block_m": (1, 2, 4, 8, 16),
            "block_n": (16, 32, 64, 128),
            "block_k": (32, 64, 128, 256, 512),
            "split_k": (1, 2, 4, 8, 16),
            "num_warps": (1, 2, 4, 8),
            "num_stages": (1, 2, 3, 4),
        },
        **AMD_FIELDS,
    },
    rules=(*RULES, *AMD_RULES),
    default=_default,
    extents=_extents,
    planted=PLANTED,
)
