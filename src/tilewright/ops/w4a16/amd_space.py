"""Tiles of the Gluon W4A16 kernel for AMD (`amd_gemm`): its fields, and the rules that chips set.

`triton_space.TRITON_SPACE` takes them in as its algorithm "amd"; its own rules on powers of two,
and on one scale a step, hold for these tiles as well. Rules pass tiles of other algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilewright.errors import UnsupportedError
from tilewright.ops.space import Rule
from tilewright.tiles.tile import Problem, Tile

__all__ = [
    "AMD_ARCHS",
    "AMD_FIELDS",
    "AMD_RULES",
    "PADDING",
    "AmdFamily",
    "amd_family",
    "lds_bytes",
    "registers",
]

PADDING = 8
"""Elements of 2 bytes between two rows of x in shared memory."""

_LDS_BYTES = 64 * 1024  # of one program on every chip that is served

AMD_FIELDS = {
    "amd": {
        "block_m": (16, 32, 64, 128, 256),
        "block_n": (16, 32, 64, 128, 256),
        "block_k": (32, 64, 128, 256),
        "num_warps": (1, 2, 4, 8),
        "warps_m": (1, 2),
        "num_stages": (1, 2),
        "x_path": ("shared", "direct"),
        "scale": ("weights", "steps"),
    }
}
"""The algorithm's fields and their values; `amd_gemm` says what each does."""


@dataclass(frozen=True)
class AmdFamily:
    """Chips whose matrix units are alike.

    Attributes:
        instruction: "wmma1" (gfx11), "wmma2" (gfx12) or "mfma" (gfx9).
        version: of the layout that Triton describes them by.
        warp_size: lanes of a warp.
        k_lanes: lanes that share a column of an operand and hold different k.
        budget: what `registers` may come to in a program of up to 4 warps: 7/8 of the 256 vector
            registers that a thread of RDNA may have, 3/4 of the 512 of CDNA, since it estimates
            what is a compiler's choice.
    """

    instruction: str
    version: int
    warp_size: int
    k_lanes: int
    budget: int

    def budget_of(self, num_warps: int) -> int:
        """The budget in a program of `num_warps` warps.

        On CDNA those that share one of a compute unit's four SIMDs share its 512; RDNA has more
        than a program of 8 warps can use.
        """
        return self.budget // max(1, num_warps // 4) if self.instruction == "mfma" else self.budget

    def k_width(self, block_k: int) -> int:
        """Consecutive k of a thread in an operand, as Triton's layouts understand it.

        On gfx12 Triton accepts 16 and multiplies wrong numbers (seen by executing its code).
        """
        if self.instruction == "mfma":
            return min(32, block_k // self.k_lanes)
        return 16 if self.instruction == "wmma1" else 8


_GFX11 = AmdFamily("wmma1", 1, 32, 1, 224)
_GFX12 = AmdFamily("wmma2", 2, 32, 2, 224)
_FAMILIES = {
    "gfx1100": _GFX11,
    "gfx1101": _GFX11,
    "gfx1102": _GFX11,
    "gfx1103": _GFX11,
    "gfx1150": _GFX11,
    "gfx1151": _GFX11,
    "gfx1200": _GFX12,
    "gfx1201": _GFX12,
    "gfx90a": AmdFamily("mfma", 2, 64, 4, 384),
    "gfx942": AmdFamily("mfma", 3, 64, 4, 384),
}

AMD_ARCHS = tuple(_FAMILIES)
"""The archs that the kernel serves."""


def amd_family(arch: str) -> AmdFamily:
    """The family of `arch`.

    Raises:
        UnsupportedError: the kernel does not serve it.
    """
    if arch not in _FAMILIES:
        raise UnsupportedError(
            f"w4a16 amd: the kernel serves {', '.join(AMD_ARCHS)}, not {arch!r}; "
            "use a tile of the algorithm 'triton'"
        )
    return _FAMILIES[arch]


def _one_group(problem: Problem) -> bool:
    return problem.group in (-1, problem.K)


def lds_bytes(tile: Tile) -> int:
    """Shared memory that the compiler allots at most: x of one step, later y on its way out."""
    x = tile.block_m * (tile.block_k + PADDING) * 2 if tile.x_path == "shared" else 0
    return int(max(x, tile.block_m * tile.block_n * 2))


def registers(tile: Tile, problem: Problem) -> int:
    """An estimate of the vector registers that a thread needs.

    The sums, twice where those of each step are scaled; a step's words; its x, whole if it is
    loaded as an operand, else a row of fragments; with num_stages 2 the next step's as well; and
    some for each column and for addresses. Held to what compiling for every family came to.
    """
    family = amd_family(problem.arch)
    threads = tile.num_warps * family.warp_size
    lanes = 16 * family.k_lanes  # that hold different parts of an operand
    rows = tile.block_m // tile.warps_m
    columns = tile.block_n * tile.warps_m // tile.num_warps
    sums = tile.block_m * tile.block_n // threads
    words = tile.block_k // 8 * columns // lanes
    operand = rows * tile.block_k // 2 // lanes
    x_step = max(1, tile.block_m * tile.block_k // 2 // threads)  # on its way to shared memory
    total = 24 + 6 * columns // 16 + words
    total += sums * (2 if tile.scale == "steps" and not _one_group(problem) else 1)
    if tile.x_path == "direct":
        total += operand
    else:
        total += max(min(operand, 8 * rows // 16), x_step)
    if tile.num_stages > 1:
        total += words + (operand if tile.x_path == "direct" else x_step)
    return int(total)


def _of_amd(holds: Callable[[Tile, Problem], bool]) -> Callable[[Tile, Problem], bool]:
    return lambda tile, problem: tile.algorithm != "amd" or holds(tile, problem)


def _served(tile: Tile, problem: Problem) -> bool:
    return problem.arch in _FAMILIES


def _sixteen_bits(tile: Tile, problem: Problem) -> bool:
    return problem.act_dtype in ("float16", "bfloat16")


def _warps_have_work(tile: Tile, problem: Problem) -> bool:
    along_n = tile.num_warps // tile.warps_m
    return bool(along_n and tile.block_m >= 16 * tile.warps_m and tile.block_n >= 16 * along_n)


def _scales(tile: Tile, problem: Problem) -> bool:
    return tile.scale == "steps" or (problem.act_dtype == "float16" and not _one_group(problem))


def _fits_lds(tile: Tile, problem: Problem) -> bool:
    return lds_bytes(tile) <= _LDS_BYTES


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    family = _FAMILIES.get(problem.arch)
    return family is None or registers(tile, problem) <= family.budget_of(tile.num_warps)


AMD_RULES = (
    Rule(
        "amd: chips",
        f"the kernel is written for the matrix units of {', '.join(AMD_ARCHS)}",
        _of_amd(_served),
    ),
    Rule(
        "amd: 16 bits",
        "the matrix units multiply float16 or bfloat16; float32 activations take 'triton'",
        _of_amd(_sixteen_bits),
    ),
    Rule(
        "amd: warps",
        "each warp multiplies at least 16 x 16 outputs: warps_m of them share block_m, the others "
        "block_n",
        _of_amd(_warps_have_work),
    ),
    Rule(
        "amd: scale",
        "bfloat16 has no packed multiplication on these chips, and one group for all of K is "
        "scaled behind the loop: scale=weights is for float16 with several groups",
        _of_amd(_scales),
    ),
    Rule(
        "amd: shared memory",
        "a step of x, and y on its way out, must fit the 64 KiB that one program may allot",
        _of_amd(_fits_lds),
    ),
    Rule(
        "amd: registers",
        "sums, words, x and what is loaded ahead must fit a thread's vector registers: 256 on "
        "RDNA, on CDNA 512 divided by the warps that share a SIMD",
        _of_amd(_fits_registers),
    ),
)
"""What a tile of "amd" must obey; every rule passes tiles of other algorithms."""
