"""mmq on GPUs: validate, choose the tile, allocate, launch.

The tile's algorithm, which comes from a table or from the space's default, says which kernel runs.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch

from tilewright.device import INTERPRETER, arch_of, check_triton, launching_on
from tilewright.errors import UnsupportedError
from tilewright.layout.blocks import GpuBlocks
from tilewright.ops.choose import choose_tile
from tilewright.ops.cross import target_units
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.ops.w4a16.gpu import Kernel, _aligned
from tilewright.ops.workspace import workspace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["allocate_and_launch", "gpu_mmq", "kernel_of"]

OP = "mmq"
_HERE = "tilewright.ops.mmq"
_ACTIVATIONS = ("float", "int8")
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

_KERNELS = {
    "triton": ("triton_gemm", "launch_mmq", "workspace_mmq"),
    "decode": ("decode_gemv", "launch_decode", "workspace_decode"),
    "gemv": ("triton_gemv", "launch_gemv", "workspace_gemv"),
    "int8": ("triton_int8", "launch_int8", "workspace_int8"),
    "hopper": ("hopper_gemm", "launch_mmq_hopper", "workspace_mmq_hopper"),
    "dense": ("dense_gemm", "launch_dense", "workspace_dense"),
}
"""By algorithm: module, launcher, and the function that says what workspace a tile needs."""


@functools.cache
def kernel_of(algorithm: str) -> Kernel:
    """The launcher of an algorithm; its module is imported when first asked for."""
    module, launch, needs = _KERNELS[algorithm]
    found = import_module(f"{_HERE}.{module}")
    return Kernel(getattr(found, launch), getattr(found, needs))


def _check(x: Any, weight: GpuBlocks, bias: Any, activations: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{OP}: x is {type(x).__name__}; pass a torch.Tensor [..., K]")
    if activations not in _ACTIVATIONS:
        raise ValueError(f"{OP}: activations={activations!r}; use one of {_ACTIVATIONS}")
    if x.dtype not in _NAMES:
        raise UnsupportedError(
            f"{OP}: x has dtype {x.dtype}; it must be float32, float16 or bfloat16 - cast it"
        )
    if x.device != weight.low.device:
        raise ValueError(
            f"{OP}: x is on {x.device}, the weight on {weight.low.device}; move one of them"
        )
    if x.dim() < 1 or x.shape[-1] != weight.K:
        raise ValueError(
            f"{OP}: x has shape {list(x.shape)}; its last dimension must be K={weight.K}"
        )
    if bias is not None and (bias.shape != (weight.N,) or not bias.is_floating_point()):
        raise ValueError(
            f"{OP}: bias has shape {list(bias.shape)} and dtype {bias.dtype}; it must be "
            f"floating point [N={weight.N}]"
        )
    if bias is not None and bias.device != x.device:
        raise ValueError(f"{OP}: x is on {x.device}, the bias on {bias.device}; move one of them")
    check_triton(OP)


def gpu_mmq(
    x: torch.Tensor,
    weight: GpuBlocks,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "float",
    tile: Tile | None = None,
) -> torch.Tensor:
    """y[..., N] = x[..., K] @ W.T + bias on a GPU, or in Triton's interpreter on the CPU; see
    `tilewright.ops.mmq.op` for arguments and errors."""
    _check(x, weight, bias, activations)
    m = x.numel() // weight.K
    if m == 0 or weight.N == 0:
        return x.new_empty(*x.shape[:-1], weight.N)
    arch = INTERPRETER if x.device.type == "cpu" else arch_of(x.device)
    problem = Problem(
        OP, arch, _NAMES[x.dtype], weight.type_name, activations, m, weight.N, weight.K, 0
    )
    if tile is None:
        tile = choose_tile(problem, TRITON_SPACE).tile
    else:
        TRITON_SPACE.check(tile, problem)
    return allocate_and_launch(x, weight, bias, tile)


def allocate_and_launch(
    x: torch.Tensor,
    weight: GpuBlocks,
    bias: torch.Tensor | None,
    tile: Tile,
) -> torch.Tensor:
    """The last two steps, of valid operands with at least one row and column."""
    x2 = x.detach().reshape(-1, weight.K)
    if tile.algorithm in ("hopper", "decode"):
        x2 = _aligned(x2)
    m = x2.shape[0]
    kernel = kernel_of(tile.algorithm)
    # Those of this very device, as launchers have it: GPUs of one arch may differ.
    units = target_units(x.device)
    needs = (0, 0) if kernel.needs is None else kernel.needs(tile, m, weight.N, weight.K, units)
    with launching_on(x.device):
        space = workspace(x.device, *needs)
        y = torch.empty(m, weight.N, dtype=x.dtype, device=x.device)
        added = None if bias is None else bias.detach().contiguous()
        kernel.launch(x2, weight, added, y, tile, space)
    return y.reshape(*x.shape[:-1], weight.N)
