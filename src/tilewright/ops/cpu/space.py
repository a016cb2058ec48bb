"""The tile space of the CPU backend, shared by the ops that multiply packed weights.

Algorithms and their fields:

``dot``          a fused dequantizing dot product a row of x: `unroll` parts of 32 values.
``panel``        float32 GEMM on panels dequantized in the L2 cache: MR x 16 NV register tile,
                 `block_parts` parts of K a panel.
``int8``         as `panel`, on 8-bit activations and integer codes.
``blas``         dequantizes `panel_rows` rows to float32 and calls torch's GEMM.
``onnxruntime``  onnxruntime's MatMulNBits, float32 (`level` 0) or 8-bit activations (`level` 4).

`threads` is 0 for torch's own setting.
"""

from __future__ import annotations

import importlib.util

from tilewright.ops.cpu.planted import planted_tiles
from tilewright.ops.cpu.simd import has_avx512
from tilewright.ops.space import Rule, TileSpace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["ORT_TYPES", "cpu_space"]

ORT_TYPES = ("uint4", "uint4b8", "Q4_0", "Q4_1")
_EIGHT_BIT = ("int8",)
_THREADS = (0, 1, 2, 4, 8, 16, 32, 64)


def vector_registers() -> int:
    """How many 16-lane float32 values the CPU's registers hold."""
    return 32 if has_avx512() else 8


def _registers(tile: Tile, problem: Problem) -> bool:
    if tile.algorithm == "panel":  # accumulators, one panel row, one broadcast
        need = tile.mr * tile.nv + tile.nv + 1
    elif tile.algorithm == "int8":  # float and integer accumulators
        need = 2 * tile.mr * tile.nv + tile.nv + 1
    else:
        return True
    smallest = tile.mr * tile.nv <= 2  # there is always a legal tile
    return need <= vector_registers() or smallest


def _eight_bit_asked(tile: Tile, problem: Problem) -> bool:
    eight = tile.algorithm in _EIGHT_BIT or (tile.algorithm == "onnxruntime" and tile.level == 4)
    return not eight or problem.activations == "int8"


def _library_serves(tile: Tile, problem: Problem) -> bool:
    if tile.algorithm != "onnxruntime":
        return True
    group = 32 if problem.group in (0, 32) else problem.group
    power = group >= 16 and group & (group - 1) == 0
    whole = power and problem.K % group == 0
    return problem.weight_type in ORT_TYPES and whole and _have_onnxruntime()


def _have_onnxruntime() -> bool:
    return all(importlib.util.find_spec(m) is not None for m in ("onnx", "onnxruntime"))


def _library_rounds_by_32(tile: Tile, problem: Problem) -> bool:
    level4 = tile.algorithm == "onnxruntime" and tile.level == 4
    return not level4 or problem.group in (0, 32)


RULES = (
    Rule(
        "registers",
        "the accumulators of the register tile must fit the CPU's vector registers, or every "
        "step of the inner loop spills",
        _registers,
    ),
    Rule(
        "eight-bit activations only when asked",
        "an algorithm that rounds activations to 8 bits never stands in for the weight-only path",
        _eight_bit_asked,
    ),
    Rule(
        "library type",
        "onnxruntime's MatMulNBits holds 4-bit weights with a power-of-two group that divides K, "
        "and the packages onnx and onnxruntime must be installed",
        _library_serves,
    ),
    Rule(
        "library activation blocks",
        "MatMulNBits at level 4 rounds activations per weight group; the error model of 8-bit "
        "activations is for blocks of 32, so only groups of 32 may use it",
        _library_rounds_by_32,
    ),
)


def _default(problem: Problem) -> Tile:
    if problem.M == 1:
        return Tile.of("dot", unroll=4, threads=0)
    wide = has_avx512()
    if problem.activations == "int8" and problem.M > 4:
        mr, nv = (4, 3) if wide else (2, 1)
        return Tile.of("int8", mr=mr, nv=nv, block_parts=32, threads=0)
    if not wide:
        mr = 6 if problem.M > 4 else 4
        return Tile.of("panel", mr=mr, nv=1, block_parts=16, threads=0)
    mr, nv = (8, 3) if problem.M > 4 else (4, 4)
    return Tile.of("panel", mr=mr, nv=nv, block_parts=16, threads=0)


def extents(tile: Tile) -> dict[str, tuple[int, ...]]:
    """Rows of x, rows of W and columns of both that one piece of the tile covers."""
    if tile.algorithm in ("panel", "int8"):
        return {"M": (tile.mr,), "N": (16 * tile.nv,), "K": (32 * tile.block_parts,)}
    if tile.algorithm == "dot":
        return {"K": (32 * tile.unroll,)}
    return {"N": (tile.panel_rows,)} if tile.algorithm == "blas" else {}


def cpu_space(op: str) -> TileSpace:
    """The CPU tile space of `op` ("mmq" or "w4a16")."""
    return TileSpace(
        name=f"{op}/cpu",
        fields={
            "dot": {"unroll": (1, 2, 4, 8), "threads": _THREADS},
            "panel": {
                "mr": (1, 2, 4, 6, 8, 12),
                "nv": (1, 2, 3, 4),
                "block_parts": (8, 16, 32, 64),
                "threads": _THREADS,
            },
            "int8": {
                "mr": (1, 2, 3, 4, 5, 6, 8),
                "nv": (1, 2, 3),
                "block_parts": (16, 32, 64),
                "threads": _THREADS,
            },
            "blas": {"panel_rows": (64, 256, 1024), "threads": _THREADS},
            "onnxruntime": {"level": (0, 4), "threads": _THREADS},
        },
        rules=RULES,
        default=_default,
        extents=extents,
        planted=planted_tiles(op, wide=has_avx512()),
    )
