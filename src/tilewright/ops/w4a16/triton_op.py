"""w4a16 on Triton: validate, choose the tile, allocate, launch."""

from __future__ import annotations

import torch

from tilewright.device import check_triton
from tilewright.errors import UnsupportedError
from tilewright.layout.triton import WordsW4
from tilewright.ops.cross import target_arch
from tilewright.ops.w4a16.gpu import allocate_and_launch
from tilewright.ops.w4a16.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Problem, Tile

__all__ = ["OP", "w4a16_triton"]

OP = "w4a16_triton"
"""The op's name in tables: rows of these kernels never meet those of the CPU's w4a16."""

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _check(x: torch.Tensor, weight: WordsW4, bias: torch.Tensor | None) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{OP}: x is {type(x).__name__}; pass a torch.Tensor [..., K]")
    if not isinstance(weight, WordsW4):
        raise TypeError(
            f"{OP}: weight is {type(weight).__name__}; pack it with "
            "tilewright.layout.triton.pack_w4_words"
        )
    if x.dtype not in _DTYPES:
        raise UnsupportedError(
            f"{OP}: x has dtype {x.dtype}; it must be float32, float16 or bfloat16 - cast it"
        )
    if x.device != weight.words.device:
        raise ValueError(
            f"{OP}: x is on {x.device}, the weight on {weight.words.device}; move one of them"
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


def w4a16_triton(
    x: torch.Tensor,
    weight: WordsW4,
    bias: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    """y = x @ W.T + bias, with W[n, k] = scale[n, k // G] * (code[n, k] - zero[n, k // G]).

    Args:
        x: [..., K] float32, float16 or bfloat16, any strides, on a GPU; or on the CPU when
            TRITON_INTERPRET=1 is set, which is for tests.
        weight: packed W [N, K] on the device of x, from `tilewright.layout.triton.pack_w4_words`.
        bias: [N] floating point, added in float32 before the result is rounded; or None.
        tile: a tile of `TRITON_SPACE`; None takes the space's default.

    Returns:
        [..., N] of x's dtype. Weights are rounded to it before they are multiplied; sums are
        float32.

    Raises:
        ValueError, TypeError: a wrong shape, device or argument.
        UnsupportedError: a dtype or device that the kernel does not serve; no triton.
        TileError: the tile breaks a rule of the space.
    """
    _check(x, weight, bias)
    m = x.numel() // weight.K
    if m == 0 or weight.N == 0:
        return x.new_empty(*x.shape[:-1], weight.N)
    group = -1 if weight.group_size == weight.K else weight.group_size
    arch = target_arch(x.device)
    problem = Problem(
        OP, arch, _DTYPES[x.dtype], weight.type_name, "float", m, weight.N,
        weight.K, group,
    )  # fmt: skip
    if tile is None:
        tile = TRITON_SPACE.default(problem)
    TRITON_SPACE.check(tile, problem)
    return allocate_and_launch(x, weight, bias, tile)
