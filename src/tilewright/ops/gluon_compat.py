"""What Gluon calls differently between Triton 3.6 and 3.9, under one name each.

==================  =======================================================  =====
name here           what it stands for                                       since
==================  =======================================================  =====
`tma_load`          `tma.async_load`, before `async_copy_global_to_shared`     3.8
`tma_store`         `tma.async_store`, before `async_copy_shared_to_global`    3.8
`block_barrier`     `gl.barrier`, before `gl.thread_barrier`                   3.7
`wmma_layout`       `AMDWMMALayout(warp_bases=)`, before `warps_per_cta=`      3.7
`padded_layout`     `PaddedSharedLayout(cga_layout=)`, before `block_bases=`   3.7
==================  =======================================================  =====

`mbarrier.expect` renamed its second argument in 3.7: pass it by position. The modules of gfx1250
were renamed in 3.9; nothing here serves that chip.

The first three are called inside kernels, the others build layouts on the host. Importing this
module imports Triton: kernel modules import it, and they are imported when they are first used.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = [
    "GluonASTSource",
    "block_barrier",
    "padded_layout",
    "tma_load",
    "tma_store",
    "warp_bases",
    "wmma_layout",
]


def _either(module: Any, new: str, old: str) -> Any:
    """The name of today if `module` has it: the old one may still be there and raise."""
    return getattr(module, new) if hasattr(module, new) else getattr(module, old)


tma_load = _either(tma, "async_load", "async_copy_global_to_shared")
"""(descriptor, coordinates, barrier, shared memory, pred=True): global to shared memory."""

tma_store = _either(tma, "async_store", "async_copy_shared_to_global")
"""(descriptor, coordinates, shared memory): shared to global memory."""

block_barrier = _either(gl, "barrier", "thread_barrier")
"""(): every thread of the program waits for all of them."""


def _takes(layout: Any, argument: str) -> bool:
    return argument in inspect.signature(layout).parameters


def warp_bases(warps: Sequence[int]) -> list[list[int]]:
    """Bases of the warps of a program in units of one matrix instruction's tile.

    Args:
        warps: warps along each dimension, powers of two; the last dimension is counted first.

    Returns:
        One basis for each bit of the warp's number, the lowest bit first.
    """
    bases = []
    for dim in reversed(range(len(warps))):
        step = 1
        while step < warps[dim]:
            bases.append([step if d == dim else 0 for d in range(len(warps))])
            step *= 2
    return bases


def wmma_layout(version: int, warps: Sequence[int], transposed: bool = True) -> Any:
    """The accumulator of 16x16x16 WMMA.

    Args:
        version: 1 for gfx11, 2 for gfx12.
        warps: warps along the two dimensions, powers of two.
        transposed: a lane holds outputs of one row, else of one column.
    """
    layout = gl.amd.AMDWMMALayout
    if _takes(layout, "warp_bases"):
        return layout(version=version, transposed=transposed, warp_bases=warp_bases(warps))
    return layout(version=version, transposed=transposed, warps_per_cta=list(warps))


def padded_layout(
    interval_padding: Sequence[tuple[int, int]],
    bases: Sequence[Sequence[int]],
    shape: Sequence[int],
) -> Any:
    """Shared memory of one block with gaps.

    Args:
        interval_padding: (elements, gap): so many elements, then so many unused.
        bases: coordinates that each bit of the linear offset adds.
        shape: of the tensor.
    """
    layout = gl.PaddedSharedLayout
    block = "cga_layout" if _takes(layout, "cga_layout") else "block_bases"
    return layout(
        [list(pair) for pair in interval_padding],
        offset_bases=[list(b) for b in bases],
        shape=list(shape),
        **{block: []},
    )
