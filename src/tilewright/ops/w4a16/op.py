"""w4a16: activations times 4-bit weights with one scale a group, which stay packed."""

from __future__ import annotations

import torch

from tilewright.layout.cpu import PackedW4
from tilewright.layout.hopper import HopperW4
from tilewright.layout.triton import WordsW4
from tilewright.ops.gemm import gemm
from tilewright.ops.w4a16.gpu import gpu_gemm
from tilewright.ops.w4a16.space import CPU_SPACE
from tilewright.tiles.tile import Tile

__all__ = ["w4a16_gemm"]


def w4a16_gemm(
    x: torch.Tensor,
    weight: PackedW4 | WordsW4 | HopperW4,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "float",
    tile: Tile | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """y = x @ W.T + bias, with W[n, k] = scale[n, k // G] * (code[n, k] - zero[n, k // G]).

    Runs on the device of the operands, compiles as one operation under `torch.compile`, and on a
    GPU can be captured in a CUDA graph once it has run.

    Args:
        x: [..., K] float32, float16 or bfloat16, any strides; for a `HopperW4` the dtype that it
            was packed for.
        weight: packed W [N, K], from `tilewright.layout.pack.pack_w4_for`. With act-order its
            columns are permuted, and x is gathered to match.
        bias: [N] floating point, added in float32 before the result is cast; or None.
        activations: "float" multiplies x as it is (weight-only). "int8", on the CPU, rounds x to 8
            bits per 32 values when there is more than one row: faster, and less exact.
        tile: a tile of the weight's space; None takes the table's.
        threads: on the CPU, None for torch's setting; nothing else has any.

    Returns:
        [..., N] of x's dtype; sums are float32. On a GPU weights are rounded to that dtype before
        they are multiplied, or scaled after it.

    Raises:
        ValueError, TypeError: a wrong shape, device or argument.
        UnsupportedError: a dtype or device no kernel serves; no triton for a GPU.
        TileError: the tile breaks a rule of the space.
    """
    if torch.compiler.is_compiling():
        from tilewright.ops.w4a16.custom_op import w4a16_compiled

        return w4a16_compiled(x, weight, bias, activations, tile, threads)
    if isinstance(weight, WordsW4 | HopperW4):
        return gpu_gemm(x, weight, bias, activations=activations, tile=tile)
    group = -1 if weight.group_size == weight.K else weight.group_size
    return gemm(
        "w4a16", CPU_SPACE, x, weight, bias, group=group, activations=activations, tile=tile,
        threads=threads,
    )  # fmt: skip
