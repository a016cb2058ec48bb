"""mmq as one operation of `torch.compile`: the compiler sees its shape, never its kernels."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.layout.blocks import GpuBlocks
from tilewright.layout.cpu import PackedBlocks
from tilewright.ops.w4a16.custom_op import detached, tile_from_text, tile_text
from tilewright.tiles.tile import Tile

__all__ = ["mmq_compiled"]


@torch.library.custom_op("tilewright::mmq", mutates_args=())
def _mmq(
    x: torch.Tensor,
    codes: torch.Tensor,
    high: torch.Tensor | None,
    scales: torch.Tensor | None,
    minimums: torch.Tensor | None,
    sub_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    type_name: str,
    n: int,
    k: int,
    activations: str,
    tile: str,
    threads: int,
) -> torch.Tensor:
    from tilewright.ops.mmq.op import mmq_gemm

    weight: Any
    if scales is None:
        weight = PackedBlocks(type_name, codes, n, k)
    else:
        weight = GpuBlocks(type_name, codes, high, scales, minimums, sub_scales, n, k)
    return mmq_gemm(
        x, weight, bias, activations=activations,
        tile=tile_from_text(tile) if tile else None,
        threads=threads or None,
    )  # fmt: skip


@_mmq.register_fake
def _(x: torch.Tensor, *others: Any) -> torch.Tensor:
    n = others[7]
    return x.new_empty(*x.shape[:-1], n)


def mmq_compiled(
    x: torch.Tensor,
    weight: PackedBlocks | GpuBlocks,
    bias: torch.Tensor | None,
    activations: str,
    tile: Tile | None,
    threads: int | None,
) -> torch.Tensor:
    """`tilewright.ops.mmq.op.mmq_gemm` as the compiler traces it: the same arguments."""
    if isinstance(weight, PackedBlocks):
        parts: tuple[torch.Tensor | None, ...] = (weight.data, None, None, None, None)
    else:
        parts = (weight.low, weight.high, weight.scales, weight.minimums, weight.sub_scales)
    made: torch.Tensor = torch.ops.tilewright.mmq(
        detached(x), *parts, detached(bias), weight.type_name, weight.N, weight.K, activations,
        tile_text(tile), threads or 0,
    )  # fmt: skip
    return made
