"""conv1d on GPUs: choose the tile, launch. `ops.conv1d.op` has validated and allocated."""

from __future__ import annotations

import torch

from tilewright.device import INTERPRETER, arch_of, check_triton, launching_on
from tilewright.ops.choose import choose_tile
from tilewright.ops.conv1d.args import ConvArgs
from tilewright.ops.conv1d.shifted import conv_problem
from tilewright.ops.conv1d.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Tile

__all__ = ["gpu_conv", "gpu_conv_step"]


def gpu_conv(args: ConvArgs, tile: Tile | None = None) -> None:
    """Write `args.y` and `args.final_states` on a GPU, or in Triton's interpreter on the CPU.

    Raises:
        UnsupportedError: triton is not installed.
        TileError: the tile breaks a rule of the space.
    """
    check_triton("causal_conv1d")
    arch = INTERPRETER if args.x.device.type == "cpu" else arch_of(args.x.device)
    problem = conv_problem(args, arch)
    if tile is None:
        tile = choose_tile(problem, TRITON_SPACE).tile
    else:
        TRITON_SPACE.check(tile, problem)
    from tilewright.ops.conv1d.triton_conv import launch_conv

    with launching_on(args.x.device):
        launch_conv(args, tile)


def gpu_conv_step(
    state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    y: torch.Tensor,
) -> None:
    """Move the state on and write y, on a GPU or in Triton's interpreter on the CPU.

    Raises:
        UnsupportedError: triton is not installed.
    """
    check_triton("causal_conv1d_step")
    from tilewright.ops.conv1d.triton_conv import launch_conv_step

    with launching_on(x.device):
        launch_conv_step(state, x, weight, bias, silu, y)
