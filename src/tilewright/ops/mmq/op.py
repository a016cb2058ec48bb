"""mmq: activations times GGUF blocks, which stay packed."""

from __future__ import annotations

import torch

from tilewright.layout.blocks import GpuBlocks
from tilewright.layout.cpu import PackedBlocks
from tilewright.ops.gemm import gemm
from tilewright.ops.mmq.gpu import gpu_mmq
from tilewright.ops.mmq.space import CPU_SPACE
from tilewright.tiles.tile import Tile

__all__ = ["mmq_gemm"]


def mmq_gemm(
    x: torch.Tensor,
    weight: PackedBlocks | GpuBlocks,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "float",
    tile: Tile | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """y = x @ W.T + bias, with W in GGUF blocks.

    Runs on the device of the operands, and compiles as one operation under `torch.compile`.

    Args:
        x: [..., K] float32, float16 or bfloat16, any strides.
        weight: the blocks of W [N, K], from `tilewright.layout.blocks.pack_blocks_for`, or on the
            CPU from `tilewright.layout.cpu.pack_blocks`.
        bias: [N] floating point, added in float32 before the result is cast; or None. "dense" tiles
            of a GPU round it to x's dtype first.
        activations: "float" multiplies x as it is (weight-only). "int8" allows x to be rounded to 8
            bits per 32 values, which is less exact, where there are rows enough and that is the
            faster way; a row with an Inf or a NaN in it becomes NaN then.
        tile: a tile of the weight's space; None takes the table's.
        threads: on the CPU, None for torch's setting; nothing else has any.

    Returns:
        [..., N] of x's dtype; sums are float32 (integer sums are exact). On a GPU weights are
        rounded to that dtype before they are multiplied.

    Raises:
        ValueError, TypeError: a wrong shape, device or argument.
        UnsupportedError: a dtype or device no kernel serves; no triton for a GPU.
        TileError: the tile breaks a rule of the space.

    Method: the block formats and 8-bit activation rule of ggml; kernels as described in
    `tilewright.ops.cpu` and `tilewright.ops.mmq.triton_gemm`.
    """
    if torch.compiler.is_compiling():
        from tilewright.ops.mmq.custom_op import mmq_compiled

        return mmq_compiled(x, weight, bias, activations, tile, threads)
    if isinstance(weight, GpuBlocks):
        return gpu_mmq(x, weight, bias, activations=activations, tile=tile)
    return gemm(
        "mmq", CPU_SPACE, x, weight, bias, group=0, activations=activations, tile=tile,
        threads=threads,
    )  # fmt: skip
