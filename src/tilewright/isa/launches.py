"""A launch of each op of the catalog on operands that have a shape and no memory.

Weights are packed as a user's are, small ones where the kernels only see a shape, and then moved to
the meta device; the launchers are those that run on a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from tilewright.errors import UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.formats.w4 import SYMMETRIC_ZERO, W4Codes
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.layout.experts import GpuExperts, pack_gpu_experts, pack_gpu_experts_w4
from tilewright.layout.hopper import HopperW4
from tilewright.layout.pack import pack_w4_for
from tilewright.layout.triton import WordsW4
from tilewright.ops.contract import DTYPES
from tilewright.ops.cross import target_units
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["CHOICES", "EXPERTS", "LAUNCHES"]

Launch = Callable[[], object]

EXPERTS, CHOICES = 128, 8
"""Experts of a mixture that `moe` is compiled for, and how many of them a row chooses. Kernels are
told both: what is compiled depends on whether they are multiples of 16, and on the second."""

_META = torch.device("meta")


def _w4a16(problem: Problem, tile: Tile) -> Launch:
    from tilewright.ops.w4a16 import gpu

    family = HopperW4 if tile.algorithm in gpu.space_of(HopperW4).fields else WordsW4
    return _product(problem, tile, _words(replace(problem, M=1), family), gpu.kernel_of)


def _mmq(problem: Problem, tile: Tile) -> Launch:
    from tilewright.ops.mmq.gpu import kernel_of

    weight = _blocks(problem.weight_type, problem.N, problem.K)
    return _product(problem, tile, weight, kernel_of)


def _product(problem: Problem, tile: Tile, weight: Any, kernel_of: Callable[[str], Any]) -> Launch:
    m, n, k = problem.M, problem.N, problem.K
    x, y = (_meta((m, size), DTYPES[problem.act_dtype]) for size in (k, n))

    def launch() -> None:
        kernel = kernel_of(tile.algorithm)
        needs = (0, 0)
        if kernel.needs is not None:
            needs = kernel.needs(tile, m, n, k, target_units(_META))
        kernel.launch(x, weight, None, y, tile, _scratch(*needs))

    return launch


def _moe(problem: Problem, tile: Tile) -> Launch:
    """The plain product of every slot, without an activation: the one that tables are about."""
    from tilewright.ops.moe.gpu import allocate_and_launch

    slots, dtype = problem.M, DTYPES[problem.act_dtype]
    choices = CHOICES if slots % CHOICES == 0 else 1
    x = _meta((slots // choices, problem.K), dtype)
    ids = _meta((slots // choices, choices), torch.int64)
    experts = _experts(replace(problem, M=1))
    return lambda: allocate_and_launch(x, experts, ids, tile)


def _ssd(problem: Problem, tile: Tile) -> Launch:
    """One sequence of M tokens with a skip, as a Mamba-2 layer has it: x, B, C and dt are views of
    one projection."""
    from tilewright.ops.ssd.args import ScanArgs

    m, n, p = problem.M, problem.K, int(problem.weight_type.removeprefix("p"))
    heads = problem.N // p
    if problem.group < 1 or problem.N % p or heads % problem.group or n % 8 or n > 256:
        raise UnsupportedError(
            f"N is {problem.N}, K is {n}, group is {problem.group}; of ssd with heads of {p} "
            "channels N is a whole number of heads, group divides their number, and K, the "
            "state's dimension, is a multiple of 8 up to 256"
        )
    groups, dtype = heads // problem.group, DTYPES[problem.act_dtype]
    widths = (problem.N, groups * n, groups * n, heads)
    x, b, c, dt = _meta((1, m, sum(widths)), dtype).split(widths, 2)
    args = ScanArgs(
        x=x.unflatten(2, (heads, p)), dt=dt, A=_meta((heads,)),
        B=b.unflatten(2, (groups, n)), C=c.unflatten(2, (groups, n)), D=_meta((heads,)),
        z=None, dt_bias=_meta((heads,)), dt_softplus=True, dt_limit=(0.0, math.inf),
        initial_states=None, cu_seqlens=None, y=_meta((1, m, heads, p), dtype),
        final_states=_meta((1, heads, p, n)),
    )  # fmt: skip

    def launch() -> None:
        from tilewright.ops.ssd.triton_scan import launch_scan, workspace_scan

        launch_scan(args, tile, _scratch(*workspace_scan(args, tile)))

    return launch


def _conv1d(problem: Problem, tile: Tile) -> Launch:
    """One sequence of M tokens with a bias and silu, as a Mamba-2 layer has it."""
    from tilewright.ops.conv1d.args import ConvArgs

    m, d, w = problem.M, problem.N, int(problem.weight_type.removeprefix("w"))
    if problem.K != w:
        raise UnsupportedError(
            f"weight type is {problem.weight_type!r}, K is {problem.K}; of conv1d K is the number "
            f"of taps, which this type says: pass K = {w}"
        )
    dtype = DTYPES[problem.act_dtype]
    args = ConvArgs(
        x=_meta((1, m, d), dtype), weight=_meta((d, w), dtype), bias=_meta((d,), dtype),
        silu=True, initial_states=None, cu_seqlens=None, y=_meta((1, m, d), dtype),
        final_states=_meta((1, d, w - 1), dtype),
    )  # fmt: skip

    def launch() -> None:
        from tilewright.ops.conv1d.triton_conv import launch_conv

        launch_conv(args, tile)

    return launch


LAUNCHES: Mapping[str, Callable[[Problem, Tile], Launch]] = {
    "w4a16": _w4a16,
    "mmq": _mmq,
    "moe": _moe,
    "ssd": _ssd,
    "conv1d": _conv1d,
}
"""By op: (problem, a tile that its space allows) -> what launches it. Kernels are imported when it
is called: errors of operands come first, with triton or without.

Raises:
    UnsupportedError: there is no weight of that type and shape.
    FormatError: the group does not divide K.
    LayoutError: the kernels' layout does not hold such a weight.
"""


def _meta(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _scratch(floats: int, counters: int) -> Workspace:
    return Workspace(
        _meta((floats,)) if floats else None, _meta((counters,), torch.int32) if counters else None
    )


def _codes(problem: Problem) -> W4Codes:
    """4-bit codes of the problem's shape, each of them the zero point."""
    n, k = problem.N, problem.K
    group = k if problem.group == -1 else problem.group
    shape = (n, k // group) if group else (n, 0)
    zeros = np.full(shape, SYMMETRIC_ZERO, np.uint8) if problem.weight_type == "uint4" else None
    return W4Codes(
        np.full((n, k), SYMMETRIC_ZERO, np.uint8), np.ones(shape, np.float32), zeros, group, None,
        DTYPES[problem.act_dtype],
    )  # fmt: skip


@functools.lru_cache(maxsize=4)
def _words(problem: Problem, family: type) -> Any:
    name = "hopper" if family is HopperW4 else "words"
    packed = pack_w4_for(
        _codes(problem), act_dtype=DTYPES[problem.act_dtype], arch=problem.arch, family=name
    )
    assert isinstance(packed, WordsW4 | HopperW4)
    return packed.to(_META)


def _raw(type_name: str, n: int, k: int) -> np.ndarray:
    """Rows of GGUF blocks of zeros."""
    block = BLOCK_TYPES.get(type_name)
    if block is None or k % block.block_size:
        raise UnsupportedError(
            f"weight type is {type_name!r}, K is {k}; it must be one of {', '.join(BLOCK_TYPES)}, "
            "and K whole blocks of it"
        )
    return np.zeros((n, k // block.block_size * block.block_bytes), np.uint8)


@functools.lru_cache(maxsize=4)
def _blocks(type_name: str, n: int, k: int) -> GpuBlocks:
    packed = pack_blocks_for(_raw(type_name, n, k), type_name, "cpu", "interpreter")
    assert isinstance(packed, GpuBlocks)
    return packed.to(_META)


@functools.lru_cache(maxsize=4)
def _experts(problem: Problem) -> GpuExperts:
    """`EXPERTS` matrices of which one was packed: the others lie behind it as they would."""
    if problem.weight_type.startswith("uint4"):
        one = pack_gpu_experts_w4([_codes(problem)])
    else:
        raw = _raw(problem.weight_type, problem.N, problem.K)[None]
        one = pack_gpu_experts(raw, problem.weight_type, arch=problem.arch)
    planes: Any = one.planes
    many = {
        field.name: torch.empty_strided(
            (EXPERTS, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device=_META
        )
        for field in fields(planes)
        if isinstance(tensor := getattr(planes, field.name), torch.Tensor)
    }
    return GpuExperts(replace(planes, **many), EXPERTS)
