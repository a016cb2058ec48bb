"""The tile space of the Triton kernel of w4a16.

A tile of BLOCK_M x BLOCK_N outputs, K in steps of BLOCK_K; `num_warps` warps a program, loads
`num_stages` steps ahead; `dequant` as the kernel's docstring says. Limits of chips are by arch:
`smem_limit_bytes` says what a program may allot, `smem_bytes` bounds what the compiler does allot.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.ops.space import Rule, TileSpace
from tilewright.ops.w4a16.triton_planted import PLANTED
from tilewright.tiles.tile import Problem, Tile

__all__ = ["INTERPRETER", "TRITON_SPACE", "smem_bytes", "smem_limit_bytes", "warp_size"]

INTERPRETER = "interpreter"
"""The arch of problems that Triton's interpreter runs on the CPU."""

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
_NVIDIA_REGISTERS = 65536  # of one multiprocessor


def smem_limit_bytes(arch: str) -> int | None:
    """Shared memory (LDS) that one program may allot on `arch`; None for the interpreter's CPU."""
    if arch == INTERPRETER or arch.startswith("cpu"):
        return None
    if arch in _SMEM_LIMITS:
        return _SMEM_LIMITS[arch]
    return _SMEM_LIMITS["gfx"] if arch.startswith("gfx") else _SMEM_UNKNOWN


def warp_size(arch: str) -> int:
    """Lanes of a warp: 64 on CDNA (gfx9), 32 elsewhere."""
    return 64 if arch.startswith("gfx9") else 32


def smem_bytes(tile: Tile, problem: Problem) -> int:
    """An upper bound of the shared memory that a tile makes the compiler allot.

    The dequantized tile of w once, the loads of `num_stages` steps of x and of one fewer of words,
    scales and zero points; or half of the outputs, which NVIDIA's compiler exchanges before it
    stores them. Found by compiling for gfx90a, gfx1151, sm_80 and sm_90 (Triton 3.7).
    """
    size = 4 if problem.act_dtype == "float32" else 2
    x = tile.block_m * tile.block_k * size
    w = tile.block_k * tile.block_n * size
    if problem.arch.startswith("gfx"):
        return int(w + max(1, tile.num_stages - 1) * x)
    ahead = tile.block_k * tile.block_n // 2 + 6 * tile.block_n
    loop = w + tile.num_stages * x + (tile.num_stages - 1) * ahead
    return int(max(loop, tile.block_m * tile.block_n * size // 2))


def _power_of_two(value: int, least: int) -> bool:
    return value >= least and value & (value - 1) == 0


def _blocks(tile: Tile, problem: Problem) -> bool:
    return all(_power_of_two(n, 16) for n in (tile.block_m, tile.block_n, tile.block_k))


def _whole_words(tile: Tile, problem: Problem) -> bool:
    return tile.block_k % 8 == 0


def _one_scale(tile: Tile, problem: Problem) -> bool:
    return problem.group in (-1, problem.K) or problem.group % tile.block_k == 0


def _sixteen_bits(tile: Tile, problem: Problem) -> bool:
    return tile.dequant != "packed" or problem.act_dtype != "float32"


def _fits_shared_memory(tile: Tile, problem: Problem) -> bool:
    limit = smem_limit_bytes(problem.arch)
    return limit is None or smem_bytes(tile, problem) <= limit


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    outputs = tile.block_m * tile.block_n
    each = outputs / (tile.num_warps * warp_size(problem.arch))
    if problem.arch.startswith("sm_") and 2 * outputs > _NVIDIA_REGISTERS:
        return False
    return each <= _ACCUMULATORS


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
        "shared memory",
        "the tiles of x and w and the loads ahead must fit what one program may allot",
        _fits_shared_memory,
    ),
    Rule(
        "registers",
        "more than 128 accumulators a thread spill, and on NVIDIA they may take at most half of "
        "the register file",
        _fits_registers,
    ),
)


def _default(problem: Problem) -> Tile:
    """Small enough for every chip; nobody has tuned it."""
    whole = problem.group in (-1, problem.K)
    wide = problem.M <= 32 and (whole or problem.group % 64 == 0)
    block_m = 16 if problem.M <= 16 else 32 if problem.M <= 32 else 64
    return Tile.of(
        "triton", block_m=block_m, block_n=64, block_k=64 if wide else 32, num_warps=4,
        num_stages=2, dequant="scalar" if problem.act_dtype == "float32" else "packed",
    )  # fmt: skip


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
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
            "dequant": ("scalar", "packed"),
        }
    },
    rules=RULES,
    default=_default,
    extents=_extents,
    planted=PLANTED,
)
