"""What the weight-quantized GEMM ops share: validate, choose the tile, allocate, launch, cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.device import cpu_device
from tilewright.errors import UnsupportedError
from tilewright.ops.choose import choose_tile
from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["gemm", "launched"]

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ACTIVATIONS = ("float", "int8")


def _check(op: str, x: Any, weight: Any, bias: Any, activations: str, threads: int | None) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: x is {type(x).__name__}; pass a torch.Tensor [..., K]")
    if x.dtype not in _DTYPES:
        raise UnsupportedError(
            f"{op}: x has dtype {x.dtype}; it must be float32, float16 or bfloat16 - cast it"
        )
    if x.device.type != "cpu":
        raise UnsupportedError(
            f"{op}: x is on {x.device}; this version multiplies on the CPU - call x.cpu()"
        )
    if x.dim() < 1 or x.shape[-1] != weight.K:
        raise ValueError(
            f"{op}: x has shape {list(x.shape)}; its last dimension must be K={weight.K}"
        )
    if bias is not None and (bias.shape != (weight.N,) or not bias.is_floating_point()):
        raise ValueError(
            f"{op}: bias has shape {list(bias.shape)} and dtype {bias.dtype}; it must be "
            f"floating point [N={weight.N}]"
        )
    if activations not in _ACTIVATIONS:
        raise ValueError(f"{op}: activations={activations!r}; use one of {_ACTIVATIONS}")
    if threads is not None and threads < 1:
        raise ValueError(f"{op}: threads={threads}; it must be at least 1, or None")


def gemm(
    op: str,
    space: TileSpace,
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    *,
    group: int,
    activations: str,
    tile: Tile | None,
    threads: int | None,
) -> torch.Tensor:
    """y[..., N] = x[..., K] @ W.T + bias on the CPU; see the ops for arguments and errors."""
    _check(op, x, weight, bias, activations, threads)
    m = x.numel() // weight.K
    if m == 0 or weight.N == 0:
        return x.new_empty(*x.shape[:-1], weight.N)
    problem = Problem(
        op, cpu_device().arch, _DTYPES[x.dtype], weight.type_name, activations, m, weight.N,
        weight.K, group,
    )  # fmt: skip
    if tile is None:
        tile = choose_tile(problem, space, units=threads).tile
    else:
        space.check(tile, problem)
    if threads is not None:
        tile = tile.replace(threads=threads)

    from tilewright.ops.cpu.launch import launch_gemm

    return launched(x, weight, bias, tile, launch_gemm)


def launched(
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    tile: Tile,
    launcher: Callable[..., None],
) -> torch.Tensor:
    """Allocate, launch and cast, of valid operands with at least one row and column.

    Args:
        launcher: called as `tilewright.ops.cpu.launch.launch_gemm`.
    """
    from tilewright.ops.cpu.launch import cpu_weight

    x2 = x.reshape(-1, weight.K)
    perm = getattr(weight, "perm", None)
    if perm is not None:
        x2 = x2.index_select(1, perm)
    y = torch.empty(x2.shape[0], weight.N, dtype=torch.float32)
    bias32 = None if bias is None else bias.detach().to(torch.float32).contiguous()
    launcher(x2.detach(), cpu_weight(weight), bias32, y, tile)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.N)
