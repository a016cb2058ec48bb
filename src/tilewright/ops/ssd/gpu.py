"""ssd on GPUs: choose the tile, allocate scratch memory, launch. `ops.ssd.op` has validated."""

from __future__ import annotations

import torch

from tilewright.device import INTERPRETER, arch_of, check_triton, launching_on
from tilewright.errors import TileError
from tilewright.ops.choose import choose_tile
from tilewright.ops.ssd.args import ScanArgs, StepArgs
from tilewright.ops.ssd.triton_space import CHUNKS, TRITON_SPACE, with_chunk
from tilewright.ops.workspace import workspace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["allocate_and_launch", "gpu_scan", "gpu_step", "problem_of"]

OP = "ssd"
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def problem_of(args: ScanArgs) -> Problem:
    """The scan as tile tables see it: M tokens in all, N = H P, K the state's dimension, and as
    `group` the heads that share B and C."""
    arch = INTERPRETER if args.x.device.type == "cpu" else arch_of(args.x.device)
    return Problem(
        OP, arch, _NAMES[args.x.dtype], f"p{args.head_dim}", "float", args.batch * args.length,
        args.heads * args.head_dim, args.d_state, args.heads // args.groups,
    )  # fmt: skip


def gpu_scan(args: ScanArgs, chunk: int | None = None, tile: Tile | None = None) -> None:
    """Write `args.y` and `args.final_states` on a GPU, or in Triton's interpreter on the CPU.

    Args:
        args: valid; of no token, states leave as they entered.
        chunk: tokens a chunk, in place of the tile's; None for the tile's.
        tile: of `triton_space.TRITON_SPACE`; None for the table's.

    Raises:
        UnsupportedError: triton is not installed.
        TileError: the tile, or its chunk, is none of the space's.
    """
    check_triton("ssd_scan")
    if chunk is not None and chunk not in CHUNKS:
        raise TileError(f"ssd_scan: chunk is {chunk}; it must be one of {CHUNKS}, or None")
    problem = problem_of(args)
    if tile is None:
        tile = choose_tile(problem, TRITON_SPACE).tile
        if chunk is not None and tile.chunk != chunk:
            tile = with_chunk(tile, problem, chunk)
    else:
        if chunk is not None:
            tile = tile.replace(chunk=chunk)
        TRITON_SPACE.check(tile, problem)
    allocate_and_launch(args, tile)


def allocate_and_launch(args: ScanArgs, tile: Tile) -> None:
    """The last two steps, of valid operands with at least one token."""
    from tilewright.ops.ssd.triton_scan import launch_scan, workspace_scan

    with launching_on(args.x.device):
        launch_scan(args, tile, workspace(args.x.device, *workspace_scan(args, tile)))


def gpu_step(args: StepArgs) -> None:
    """Update `args.state` and write `args.y` on a GPU, or in Triton's interpreter on the CPU.

    Raises:
        UnsupportedError: triton is not installed.
    """
    check_triton("ssd_step")
    from tilewright.ops.ssd.triton_step import launch_step, step_tile

    with launching_on(args.x.device):
        launch_step(args, step_tile(args.head_dim, args.d_state))
