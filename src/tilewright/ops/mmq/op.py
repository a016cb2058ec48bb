"""mmq: activations times GGUF blocks, which stay packed."""

from __future__ import annotations

import torch

from tilewright.layout.cpu import PackedBlocks
from tilewright.ops.gemm import gemm
from tilewright.ops.mmq.space import CPU_SPACE
from tilewright.tiles.tile import Tile

__all__ = ["mmq_gemm"]


def mmq_gemm(
    x: torch.Tensor,
    weight: PackedBlocks,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "float",
    tile: Tile | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """y = x @ W.T + bias, with W in GGUF blocks.

    Args:
        x: [..., K] float32, float16 or bfloat16, any strides.
        weight: the blocks of W [N, K], from `tilewright.layout.cpu.pack_blocks`.
        bias: [N] floating point, added in float32 before the result is cast; or None.
        activations: "float" multiplies x as it is (weight-only). "int8" rounds x to 8 bits per
            32 values when there is more than one row: faster, and less exact.
        tile: a tile of the op's space; None takes the table's.
        threads: None for torch's setting.

    Returns:
        [..., N] of x's dtype; sums are float32 (integer sums are exact).

    Raises:
        ValueError, TypeError: a wrong shape or argument.
        UnsupportedError: a dtype or device no kernel serves.
        TileError: the tile breaks a rule of the space.

    Method: the block formats and 8-bit activation rule of ggml; kernels as described in
    `tilewright.ops.cpu`.
    """
    return gemm(
        "mmq", CPU_SPACE, x, weight, bias, group=0, activations=activations, tile=tile,
        threads=threads,
    )  # fmt: skip
