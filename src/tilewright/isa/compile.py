"""A tile compiled for a chip that is not there, through the launcher that would run it.

An op of the catalog is launched on operands without memory (`tilewright.isa.launches`); a user's op
is run on its own operands, the same done to them. What the launcher passes to its kernels is what
is compiled, so that nothing here repeats a kernel's arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.errors import TileError, TilewrightError, UnsupportedError
from tilewright.isa.launches import LAUNCHES
from tilewright.layout.hopper import HopperW4
from tilewright.layout.pack import family_of
from tilewright.layout.triton import WordsW4
from tilewright.ops.contract import DTYPES, Case, OpSpec
from tilewright.ops.conv1d.triton_space import TRITON_SPACE as CONV1D_SPACE
from tilewright.ops.cross import Compiled, check_arch, check_triton, cross_compile
from tilewright.ops.mmq.triton_space import TRITON_SPACE as MMQ_SPACE
from tilewright.ops.moe.gpu_space import MOE_SPACE
from tilewright.ops.space import TileSpace
from tilewright.ops.ssd.triton_space import TRITON_SPACE as SSD_SPACE
from tilewright.ops.w4a16 import gpu
from tilewright.tiles.tile import Problem, Tile

__all__ = ["OPS", "compile_tile", "default_tile", "space_for"]

OPS = tuple(LAUNCHES)
"""Ops of the catalog with kernels for GPUs."""

_META = torch.device("meta")
_FAMILIES = (WordsW4, HopperW4)
_SPACES = {"mmq": MMQ_SPACE, "moe": MOE_SPACE, "ssd": SSD_SPACE, "conv1d": CONV1D_SPACE}


def compile_tile(op: str | OpSpec, problem: Problem, tile: Tile) -> tuple[Compiled, ...]:
    """Every kernel that one launch of `tile` launches, compiled for `problem.arch`.

    Args:
        op: a name of `OPS`, or a user's op.
        problem: its arch is the chip to compile for; its sizes are those of the operands, which
            decide as they do in a launch (alignment, whether 2 GB are passed), and M >= 1. Of moe
            M counts the slots of `launches.EXPERTS` experts.
        tile: of the op's space for that arch.

    Raises:
        UnsupportedError: no such op or arch; the op has no kernels for a GPU; triton is missing.
        FormatError: the group does not divide K.
        LayoutError: the kernels' layout does not hold such a weight.
        TileError: the tile breaks a rule, or the compiler refuses it.
    """
    check_arch(problem.arch)
    if isinstance(op, OpSpec):
        return _compile_spec(op, problem, tile)
    if op not in OPS:
        raise UnsupportedError(
            f"op is {op!r}; of the catalog {', '.join(OPS)} have kernels for GPUs. A kernel of "
            "your own is compiled through its spec"
        )
    space = space_for(op, problem.arch, tile)
    assert space is not None
    if op == "w4a16" and space is gpu.space_of(HopperW4) and family_of(problem.arch) != "hopper":
        raise TileError(
            f"tile {tile}: its kernel is written for the matrix units of sm_90, not of "
            f"{problem.arch}; {', '.join(gpu.space_of(WordsW4).fields)} serve other chips"
        )
    space.check(tile, problem)
    launch = LAUNCHES[op](problem, tile)
    check_triton()
    return cross_compile(launch, problem.arch)


def space_for(op: str | OpSpec, arch: str, tile: Tile | None = None) -> TileSpace | None:
    """The space that a tile belongs to; without a tile, that of the arch's own layout family.

    None for a user's op that has no space.

    Raises:
        TileError: no space of the op has the tile's algorithm.
    """
    if isinstance(op, OpSpec):
        return None if op.space is None else op.space()
    if op in _SPACES:
        return _SPACES[op]
    if tile is not None:
        return _family_of(tile)
    return gpu.space_of(HopperW4 if family_of(arch) == "hopper" else WordsW4)


def default_tile(op: str | OpSpec, problem: Problem) -> Tile:
    """The tile that the op gives a problem of that arch where no table names one.

    Raises:
        UnsupportedError: a user's op without a tile space.
    """
    if isinstance(op, OpSpec):
        if op.space is None:
            raise UnsupportedError(
                f"op {op.name} has no tile space, so there is no tile to compile; give its spec one"
            )
        return op.space().default(problem)
    if op in _SPACES:
        return _SPACES[op].default(problem)
    hopper = family_of(problem.arch, DTYPES[problem.act_dtype]) == "hopper"
    return gpu.space_of(HopperW4 if hopper else WordsW4).default(problem)


def _family_of(tile: Tile) -> TileSpace:
    known: list[str] = []
    for family in _FAMILIES:
        space = gpu.space_of(family)
        if tile.algorithm in space.fields:
            return space
        known += space.fields
    raise TileError(
        f"tile {tile}: algorithm is {tile.algorithm!r}; the kernels for GPUs are {', '.join(known)}"
    )


def _compile_spec(spec: OpSpec, problem: Problem, tile: Tile) -> tuple[Compiled, ...]:
    case = Case(
        spec.name, problem.weight_type, problem.act_dtype, problem.M, problem.N, problem.K,
        problem.group, problem.activations,
    )  # fmt: skip
    space = space_for(spec, problem.arch)
    if space is not None:
        space.check(tile, problem)
    inputs = spec.make_inputs(case, 0)
    bare = dataclasses.replace(
        inputs, x=_moved(inputs.x), weight=_moved(inputs.weight), bias=_moved(inputs.bias)
    )

    def launch() -> None:
        try:
            spec.run(bare, tile=tile)
        except (TilewrightError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise UnsupportedError(
                f"op {spec.name}: its run raises {type(error).__name__} on operands of the meta "
                f"device: {str(error).rstrip('.')}. To be compiled it must launch a Triton kernel "
                "on the device of x, and read no values"
            ) from error

    return cross_compile(launch, problem.arch)


def _moved(value: Any) -> Any:
    """`value` with every tensor in it without its memory, strides kept."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **{name: _moved(v) for name, v in fields.items()})
    if isinstance(value, Mapping):
        return {name: _moved(v) for name, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(v) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(_moved(v) for v in value)
    return value.to(_META) if hasattr(value, "to") else value
