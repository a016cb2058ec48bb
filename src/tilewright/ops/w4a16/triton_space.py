"""The tile space of the portable kernels of w4a16, over `tilewright.layout.triton.WordsW4`.

"triton" (`triton_gemm`)
    A tile of block_m x block_n outputs, K in steps of block_k; `num_warps` warps a program, loads
    `num_stages` steps ahead; bands of `group_m` rows of tiles; `dequant` and `order` as the
    kernel's docstring says.

"skinny" (`triton_skinny`)
    block_m x block_n outputs, K in steps of block_k, in `split_k` shares. Below a block_m of 16 it
    does without matrix units, and M is at most block_m.

"amd" (`amd_gemm`)
    Fields and rules of its own in `amd_space`.

Limits of chips are by arch: `smem_limit_bytes` says what a program may allot, `smem_bytes` bounds
what the compiler does allot.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from tilewright.device import INTERPRETER
from tilewright.ops.cross import warp_size
from tilewright.ops.space import Rule, TileSpace
from tilewright.ops.w4a16.amd_space import AMD_FIELDS, AMD_RULES
from tilewright.ops.w4a16.triton_defaults import LEAST_DOT, choices, has_asm
from tilewright.ops.w4a16.triton_planted import AHEAD_PLANTED, PLANTED
from tilewright.tiles.tile import Problem, Tile

__all__ = [
    "INTERPRETER",
    "TRITON_SPACE",
    "ahead_registers",
    "amd_registers",
    "smem_bytes",
    "smem_limit_bytes",
    "space_on",
    "warp_size",
]

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
_THREAD_REGISTERS = 256  # of a thread of NVIDIA's, the zero register among them
_AMD_REGISTERS = 256  # of a thread of RDNA
_WARPGROUP = 4  # warps that issue one wgmma
_AHEAD_ARCHS = ("sm_90", INTERPRETER)
_CDNA_OTHERS = 100  # that tiles of 16 warps needed beside what `amd_registers` counts


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
    order "k32" need less: their weights stay in registers; with "ahead" so do their words, unless
    the product is multiplied as "wx".
    """
    size = 4 if problem.act_dtype == "float32" else 2
    x = tile.block_m * tile.block_k * size
    w = tile.block_k * tile.block_n * size
    if problem.arch.startswith("gfx"):
        return int(w + max(1, tile.num_stages - 1) * x)
    ahead = tile.block_k * tile.block_n // 2 + 8 * tile.block_n
    if tile.order != "xw" and tile.dequant != "scalar":
        w //= 4
    loop = w + tile.num_stages * x + (tile.num_stages - 1) * ahead
    return int(max(loop, tile.block_m * tile.block_n * (4 if "split_k" in dict(tile) else size)))


def amd_registers(tile: Tile, problem: Problem) -> int:
    """About how many vector registers a "triton" tile takes of a thread on an AMD chip.

    Sums, both operands of a step, and x on its way from memory for each step ahead, over the warps
    as Triton spreads them. gfx11 holds operands twice, once in either half of a warp. With loads
    ahead the compiler keeps all of that at once: of 57 tiles compiled for gfx1151 (Triton 3.7) it
    spilled every one from 256 on and none below. Without, it loads operands piece by piece, and
    spilled none below 500. Of 40 for gfx90a those of 16 warps spilled, the others did not.
    """
    lanes = warp_size(problem.arch)
    unit = 16 if lanes == 32 or min(tile.block_m, tile.block_n) < 32 else 32
    m = n = 1
    while m * n < tile.num_warps:
        wide = tile.block_m // (2 * unit) // m < tile.block_n // unit // n
        if wide or m >= tile.block_m // unit:
            n *= 2
        else:
            m *= 2
    rows, columns = max(unit, tile.block_m // m), max(unit, tile.block_n // n)
    words = 4 // (4 if problem.act_dtype == "float32" else 2)
    copies = 2 if problem.arch.startswith("gfx11") else 1
    operands = (rows + columns) * tile.block_k * copies // words // lanes
    ahead = tile.block_m * tile.block_k // words // (tile.num_warps * lanes)
    return int(rows * columns // lanes + operands + max(1, tile.num_stages - 1) * ahead)


def ahead_registers(tile: Tile, problem: Problem) -> int:
    """How many registers of a thread a tile of the order "ahead" keeps busy on sm_90, counted once.

    Its sums; the weights of a step, two to a register (and x, where fewer than four warps multiply
    without wgmma); the copies of x, 16 bytes each, three times where no loads run ahead and x
    passes through registers; and two zero points where each group has its own. The weights of the
    step after and their words come on top, so that a tile spills long before this count reaches the
    registers that there are. Found by compiling float16 and bfloat16 (Triton 3.6, 3.7 and 3.9):
    below 11/16 of them no tile spilled. Above, all that multiply by wgmma did, but for one or two
    of 94 in bfloat16 with one group for all of K; and 36 of 40 with fewer warps than wgmma takes
    (groups of 128 with zero points).
    """
    threads = 32 * tile.num_warps
    sums = tile.block_m * tile.block_n // threads
    rows = tile.block_n + (tile.block_m if tile.num_warps < _WARPGROUP else 0)
    operands = rows * tile.block_k // 2 // threads
    copies = tile.block_m * tile.block_k // 8 // threads * (3 if tile.num_stages == 1 else 1)
    several = problem.group not in (-1, problem.K) and problem.weight_type == "uint4"
    return int(sums + operands + copies + (2 if several else 0))


def _by_dots(tile: Tile, problem: Problem) -> Tile | None:
    """The tile of the kernel that multiplies by tl.dot, in the fields of "triton"; None for one
    that multiplies otherwise."""
    if tile.algorithm == "triton":
        return tile
    if tile.algorithm != "skinny" or tile.block_m < LEAST_DOT:
        return None
    dequant = "scalar" if problem.act_dtype == "float32" else "packed"
    return Tile.from_mapping({**tile.as_dict(), "order": "wx", "dequant": dequant})


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
    return tile.algorithm != "triton" or tile.dequant != "asm" or has_asm(problem)


def _few_rows(tile: Tile, problem: Problem) -> bool:
    return tile.algorithm != "skinny" or tile.block_m >= LEAST_DOT or problem.M <= tile.block_m


def _fits_shared_memory(tile: Tile, problem: Problem) -> bool:
    limit, dots = smem_limit_bytes(problem.arch), _by_dots(tile, problem)
    return limit is None or dots is None or smem_bytes(dots, problem) <= limit


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    threads = tile.num_warps * warp_size(problem.arch)
    outputs = tile.block_m * tile.block_n
    if _by_dots(tile, problem) is None:
        sums = outputs * (tile.block_k // 8)
        return tile.algorithm != "skinny" or bool(sums <= _SUMS * threads)
    if problem.arch.startswith("sm_") and 2 * outputs > _NVIDIA_REGISTERS:
        return False
    return bool(outputs <= _ACCUMULATORS * threads)


def _does_not_spill(tile: Tile, problem: Problem) -> bool:
    dots = _by_dots(tile, problem)
    if dots is None or not problem.arch.startswith("gfx"):
        return True
    if problem.arch.startswith("gfx9"):  # 512 a lane of a SIMD unit, shared by every fourth warp
        most = 2 * _AMD_REGISTERS // max(1, tile.num_warps // 4) - _CDNA_OTHERS
    else:
        most = _AMD_REGISTERS * (2 if tile.num_stages == 1 else 1)
        sums = tile.block_m * tile.block_n // (tile.num_warps * warp_size(problem.arch))
        if sums >= _ACCUMULATORS and dots.dequant != "asm":
            return False  # by 3 to 5 registers
    return amd_registers(dots, problem) < most


def _pipelines(tile: Tile, problem: Problem) -> bool:
    dots = _by_dots(tile, problem)
    if dots is None or dots.order == "xw" or problem.arch != "sm_90":
        return True
    if tile.block_m < 64 or tile.block_n < 64 or tile.num_warps < 4:
        return True  # bound by memory, or too small for wgmma
    return bool(tile.block_n == 16 * tile.num_warps)


def _ahead(tile: Tile, problem: Problem) -> bool:
    if tile.algorithm != "triton" or tile.order != "ahead":
        return True
    if problem.arch not in _AHEAD_ARCHS or tile.dequant != "asm":
        return False
    least = 64 if problem.arch == "sm_90" else 16
    return bool(min(tile.block_m, tile.block_n) >= least and tile.block_k in (32, 64, 128))


def _two_steps_fit(tile: Tile, problem: Problem) -> bool:
    if tile.algorithm != "triton" or tile.order != "ahead" or problem.arch != "sm_90":
        return True
    most = min(_THREAD_REGISTERS, _NVIDIA_REGISTERS // (32 * tile.num_warps))
    return 16 * ahead_registers(tile, problem) <= 11 * most


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
        "without matrix units a tile holds every row of x: M is at most a block_m below 16",
        _few_rows,
    ),
    Rule(
        "shared memory",
        "the tiles of x and w and the loads ahead must fit what one program may allot",
        _fits_shared_memory,
    ),
    Rule(
        "one product after another",
        "as the left operand on sm_90, each warp takes 16 rows of w; else ptxas waits for every "
        "wgmma before the next (C7515)",
        _pipelines,
    ),
    Rule(
        "made ahead",
        "only wgmma, of sm_90, multiplies on its own while weights are made: 'asm', tiles from "
        "64 x 64 on, steps of 32 to 128 columns",
        _ahead,
    ),
    Rule(
        "two steps in registers",
        "with 'ahead' a thread holds the weights of one step while it makes those of the next: "
        "sums, weights and copies of x beyond 11/16 of its registers, of which 16 warps get half, "
        "spill",
        _two_steps_fit,
    ),
    Rule(
        "spills",
        "on AMD's chips operands, sums and loads ahead must fit a thread's registers: 256 on RDNA, "
        "where num_stages=1 loads operands piece by piece and twice as much fits, 128 sums though "
        "only with 'asm'; 512 on CDNA, 256 with 8 warps, 128 with 16",
        _does_not_spill,
    ),
    Rule(
        "registers",
        "more than 128 accumulators a thread (64 of a skinny tile) spill, and on NVIDIA they may "
        "take at most half of the register file",
        _fits_registers,
    ),
)


def _default(problem: Problem) -> Tile:
    """The first choice of `triton_defaults.choices` that obeys the rules."""
    return next(
        tile
        for tile in choices(problem)
        if all(rule.holds(tile, problem) for rule in (*RULES, *AMD_RULES))
    )


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    depths = (tile.block_k, tile.block_k * tile.as_dict().get("split_k", 1))
    if tile.algorithm == "skinny" and tile.block_m < LEAST_DOT:  # never more rows than block_m
        return {"M": (max(1, tile.block_m // 2),), "N": (tile.block_n,), "K": depths}
    return {"M": (tile.block_m,), "N": (tile.block_n,), "K": depths}


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
            "order": ("xw", "wx", "ahead"),
        },
        "skinny": {
            "block_m": (1, 2, 4, 16, 32, 64, 128),
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


@functools.cache
def space_on(arch: str) -> TileSpace:
    """The same space, with the planted tiles of the order "ahead" where its kernel serves."""
    if arch not in _AHEAD_ARCHS:
        return TRITON_SPACE
    return replace(TRITON_SPACE, planted=(*PLANTED, *AHEAD_PLANTED))
