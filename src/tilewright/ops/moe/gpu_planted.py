"""Wrong tiles of moe on GPUs, one for each kind of fault, that the gate must reject.

Each is one line of the kernels themselves, chosen by their constexpr FAULT.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.contract import Case, Inputs
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile

__all__ = ["PLANTED"]


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    """Launch a planted tile, past the rules that would refuse it."""
    from tilewright.ops.moe.gpu import allocate_and_launch

    return allocate_and_launch(inputs.x, inputs.weight.experts, inputs.weight.ids, tile)


PLANTED: tuple[Planted, ...] = ()
"""The planted tiles of `gpu_space.MOE_SPACE`."""
