"""w4a16: activations times 4-bit weights with one scale a group, which stay packed."""

from __future__ import annotations

import torch

from tilewright.layout.cpu import PackedW4
from tilewright.ops.gemm import gemm
from tilewright.ops.w4a16.space import CPU_SPACE
from tilewright.tiles.tile import Tile

__all__ = ["w4a16_gemm"]


def w4a16_gemm(
    x: torch.Tensor,
    weight: PackedW4,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "float",
    tile: Tile | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """y = x @ W.T + bias, with W[n, k] = scale[n, k // G] * (code[n, k] - zero[n, k // G]).

    Args:
        x: [..., K] float32, float16 or bfloat16, any strides.
        weight: packed W [N, K], from `tilewright.layout.cpu.pack_w4`. With act-order its columns
            are permuted, and x is gathered to match.
        bias: [N] floating point, added in float32 before the result is cast; or None.
        activations: "float" multiplies x as it is (weight-only). "int8" rounds x to 8 bits per
            32 values when there is more than one row: faster, and less exact.
        tile: a tile of the op's space; None takes the table's.
        threads: None for torch's setting.

    Returns:
        [..., N] of x's dtype; sums are float32.

    Raises:
        ValueError, TypeError: a wrong shape or argument.
        UnsupportedError: a dtype or device no kernel serves.
        TileError: the tile breaks a rule of the space.
    """
    group = -1 if weight.group_size == weight.K else weight.group_size
    return gemm(
        "w4a16", CPU_SPACE, x, weight, bias, group=group, activations=activations, tile=tile,
        threads=threads,
    )  # fmt: skip
