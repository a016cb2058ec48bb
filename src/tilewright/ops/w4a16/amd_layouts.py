"""Who holds what in the Gluon W4A16 kernel for AMD: layouts of a program's threads.

The matrix units take w [BLOCK_K, BLOCK_N] as their right operand, and a thread holds runs of
K_WIDTH consecutive values of one column. Eight of them are one word of `WordsW4`, so the words of
exactly those values are what the thread loads: the operand's layout without its three lowest
register bits is the layout of the words, and nothing has to move between threads.

==============  ==================  =========================================  =================
matrix units    a lane's column     lanes that share a column hold             K_WIDTH
==============  ==================  =========================================  =================
gfx11  WMMA     lane % 16           the same values, twice                     16
gfx12  WMMA     lane % 16           halves of each 2 K_WIDTH values            up to 32
gfx9   MFMA     lane % 16           quarters of each 4 K_WIDTH values          up to 32
==============  ==================  =========================================  =================

A wide K_WIDTH makes consecutive words of a lane's column, which it loads 16 bytes at a time. Which
k is called which within a step makes no difference to a sum over k, as long as both operands agree;
they do, since x is read with the same K_WIDTH.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.ops.gluon_compat import padded_layout, wmma_layout
from tilewright.ops.w4a16.amd_space import PADDING, amd_family
from tilewright.tiles.tile import Tile

__all__ = ["AmdLayouts", "layouts_of", "words_layout"]

_BYTES = 16  # the widest access of a thread


@dataclass(frozen=True)
class AmdLayouts:
    """The layouts of one tile on one arch.

    Attributes:
        acc: of the sums [BLOCK_M, BLOCK_N]: the matrix units' own.
        k_width: consecutive k of a thread in an operand.
        split: parts of a step's words that an operand takes in turns; see `words_layout`.
        x: in which x [BLOCK_M, BLOCK_K] comes from memory on its way to shared memory.
        shared: of x there.
        y: in which y [BLOCK_M, BLOCK_N] is stored.
    """

    acc: Any
    k_width: int
    split: int
    x: Any
    shared: Any
    y: Any


@lru_cache(maxsize=256)
def layouts_of(tile: Tile, arch: str, scales_steps: bool) -> AmdLayouts:
    """The layouts of `tile` on `arch`.

    Args:
        scales_steps: a step's sums are multiplied by the scale of their column. A lane then holds
            sums of one column, and needs one scale; else of one row, which is better to store.

    Raises:
        UnsupportedError: the kernel does not serve `arch`.
    """
    family = amd_family(arch)
    warps = [tile.warps_m, tile.num_warps // tile.warps_m]
    if family.instruction == "mfma":
        acc = gl.amd.AMDMFMALayout(
            version=family.version,
            instr_shape=[16, 16, 16],
            transposed=not scales_steps,
            warps_per_cta=warps,
        )
    else:
        acc = wmma_layout(family.version, warps, transposed=not scales_steps)
    return AmdLayouts(
        acc=acc,
        k_width=family.k_width(tile.block_k),
        split=family.k_lanes if family.k_width(tile.block_k) == 8 else 1,
        x=_row_major(tile.block_m, tile.block_k, tile.num_warps, family.warp_size),
        shared=_padded(tile.block_m, tile.block_k),
        y=_row_major(tile.block_m, tile.block_n, tile.num_warps, family.warp_size),
    )


def _padded(rows: int, columns: int) -> Any:
    """Rows with a gap of 16 bytes: 8 lanes that read the same columns of 8 rows then read all banks
    once, at addresses that differ by constants."""
    bases = [[0, 1 << i] for i in range(columns.bit_length() - 1)]
    bases += [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    return padded_layout([(columns, PADDING)], bases, [rows, columns])


def _row_major(rows: int, columns: int, warps: int, warp_size: int) -> Any:
    """16-bit numbers, up to 16 bytes a thread, neighbours along a row."""
    each = min(_BYTES // 2, max(1, rows * columns // (warps * warp_size)))
    across = min(warp_size, columns // each)
    return gl.BlockedLayout([1, each], [warp_size // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def words_layout(operand: Any, split: int) -> Any:
    """The layout of words [BLOCK_K / 8, BLOCK_N], in memory's order, whose codes a thread needs.

    Args:
        operand: the DistributedLinearLayout of the right operand [BLOCK_K, BLOCK_N].
        split: word `part * BLOCK_K / 8 / split + i` of memory is word `i * split + part` of the
            operand.
    """
    split = getattr(split, "value", split)
    if operand.reg_bases[:3] != [[1, 0], [2, 0], [4, 0]]:
        raise ValueError(
            f"a thread's first 8 values must be consecutive in K, but its registers hold "
            f"{operand.reg_bases}"
        )
    words, columns = operand.shape[0] // 8, operand.shape[1]

    def in_memory(bases: Any) -> list[list[int]]:
        return [[k // 8 % split * (words // split) + k // 8 // split, n] for k, n in bases]

    return gl.DistributedLinearLayout(
        in_memory(operand.reg_bases[3:]),
        in_memory(operand.lane_bases),
        in_memory(operand.warp_bases),
        [],
        [words, columns],
    )
