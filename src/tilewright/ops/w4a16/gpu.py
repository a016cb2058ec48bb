"""w4a16 on GPUs: validate, choose the tile, allocate, launch.

The class of the packed weight is its layout family, and each family has a space of its own; the
tile's algorithm, which comes from a table or from the space's default, says which kernel runs::

    WordsW4   tilewright.layout.triton   triton, skinny, amd
    HopperW4  tilewright.layout.hopper   hopper, hopper_decode
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from tilewright.device import INTERPRETER, arch_of, check_triton, launching_on
from tilewright.errors import UnsupportedError
from tilewright.layout.hopper import HopperW4
from tilewright.layout.triton import WordsW4
from tilewright.ops.choose import choose_tile
from tilewright.ops.cross import target_units
from tilewright.ops.space import TileSpace
from tilewright.ops.workspace import workspace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["Kernel", "allocate_and_launch", "gpu_gemm", "kernel_of", "space_of"]

OP = "w4a16"
_HERE = "tilewright.ops.w4a16"
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

_KERNELS = {
    "triton": ("triton_gemm", "launch_w4a16", None),
    "skinny": ("triton_skinny", "launch_w4a16_skinny", "workspace_skinny"),
    "amd": ("amd_gemm", "launch_w4a16_amd", "workspace_amd"),
    "hopper": ("hopper_gemm", "launch_w4a16_hopper", "workspace_hopper"),
    "hopper_decode": ("hopper_decode", "launch_w4a16_hopper_decode", "workspace_hopper_decode"),
}
"""By algorithm: module, launcher, and the function that says what workspace a tile needs."""


@dataclass(frozen=True)
class Kernel:
    """An algorithm's code.

    Attributes:
        launch: (x, weight, bias, y, tile, workspace) -> None.
        needs: (tile, M, N, K, units) -> floats and counters of its workspace; None for neither.
    """

    launch: Callable[..., None]
    needs: Callable[[Tile, int, int, int, int], tuple[int, int]] | None


@functools.cache
def kernel_of(algorithm: str) -> Kernel:
    """The launcher of an algorithm of any family; its module is imported when first asked for."""
    module, launch, needs = _KERNELS[algorithm]
    found = import_module(f"{_HERE}.{module}")
    return Kernel(getattr(found, launch), None if needs is None else getattr(found, needs))


def space_of(weight_class: type) -> TileSpace:
    """The tile space of a layout family."""
    if issubclass(weight_class, HopperW4):
        from tilewright.ops.w4a16.hopper_space import HOPPER_SPACE

        return HOPPER_SPACE
    from tilewright.ops.w4a16.triton_space import TRITON_SPACE

    return TRITON_SPACE


def _check(x: Any, weight: Any, bias: Any, activations: str, op: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: x is {type(x).__name__}; pass a torch.Tensor [..., K]")
    if activations != "float":
        raise UnsupportedError(
            f"{op}: activations={activations!r}; on a GPU activations stay as they are: 'float'"
        )
    allowed = _NAMES if isinstance(weight, WordsW4) else {weight.dtype: ""}
    if x.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise UnsupportedError(
            f"{op}: x has dtype {x.dtype}; this weight is packed for {names} - cast x, or pack "
            "the weight for that dtype"
        )
    if x.device != weight.words.device:
        raise ValueError(
            f"{op}: x is on {x.device}, the weight on {weight.words.device}; move one of them"
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
    if bias is not None and bias.device != x.device:
        raise ValueError(f"{op}: x is on {x.device}, the bias on {bias.device}; move one of them")
    check_triton(op)


def gpu_gemm(
    x: torch.Tensor,
    weight: WordsW4 | HopperW4,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "float",
    tile: Tile | None = None,
    op: str = OP,
) -> torch.Tensor:
    """y[..., N] = x[..., K] @ W.T + bias on a GPU, or in Triton's interpreter on the CPU.

    Args:
        op: name of the op in tables; see `tilewright.ops.w4a16.op` for the rest, and for errors.
    """
    _check(x, weight, bias, activations, op)
    m = x.numel() // weight.K
    if m == 0 or weight.N == 0:
        return x.new_empty(*x.shape[:-1], weight.N)
    group = -1 if weight.group_size == weight.K else weight.group_size
    arch = INTERPRETER if x.device.type == "cpu" else arch_of(x.device)
    problem = Problem(
        op, arch, _NAMES[x.dtype], weight.type_name, "float", m, weight.N, weight.K, group
    )
    space = space_of(type(weight))
    if tile is None:
        tile = choose_tile(problem, space).tile
    else:
        space.check(tile, problem)
    return allocate_and_launch(x, weight, bias, tile)


def allocate_and_launch(
    x: torch.Tensor,
    weight: WordsW4 | HopperW4,
    bias: torch.Tensor | None,
    tile: Tile,
) -> torch.Tensor:
    """The last two steps, of valid operands with at least one row and column."""
    x2 = x.detach().reshape(-1, weight.K)
    if weight.perm is not None:
        x2 = x2.index_select(1, weight.perm)
    if isinstance(weight, HopperW4):
        x2 = _aligned(x2)
    kernel = kernel_of(tile.algorithm)
    m = x2.shape[0]
    # Those of this very device, as launchers have it: GPUs of one arch may differ.
    units = target_units(x.device)
    needs = (0, 0) if kernel.needs is None else kernel.needs(tile, m, weight.N, weight.K, units)
    with launching_on(x.device):
        space = workspace(x.device, *needs)
        y = torch.empty(m, weight.N, dtype=x.dtype, device=x.device)
        added = None if bias is None else bias.detach().contiguous()
        kernel.launch(x2, weight, added, y, tile, space)
    return y.reshape(*x.shape[:-1], weight.N)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] as the tensor memory accelerator reads it: rows that start at multiples of 16 bytes;
    a copy if they do not."""
    step = 16 // x.element_size()
    if x.stride(1) == 1 and x.stride(0) % step == 0 and x.data_ptr() % 16 == 0 and (
        x.stride(0) >= x.shape[1]
    ):  # fmt: skip
        return x
    m, k = x.shape
    copy = torch.empty(m, -(-k // step) * step, dtype=x.dtype, device=x.device)
    copy[:, :k] = x
    return copy[:, :k]
