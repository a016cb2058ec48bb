"""w4a16 as one operation of `torch.compile`: the compiler sees its shape, never its kernels."""

from __future__ import annotations

import ast
from typing import Any

import torch

from tilewright.layout.cpu import PackedW4
from tilewright.layout.hopper import HopperW4
from tilewright.layout.triton import WordsW4
from tilewright.tiles.tile import Tile

__all__ = ["detached", "tile_from_text", "tile_text", "w4a16_compiled"]


@torch.library.custom_op("tilewright::w4a16", mutates_args=())
def _w4a16(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
    family: str,
    n: int,
    k: int,
    group_size: int,
    activations: str,
    tile: str,
    threads: int,
) -> torch.Tensor:
    from tilewright.ops.w4a16.op import w4a16_gemm

    weight: Any
    if family == "cpu":
        weight = PackedW4(words, scales, zeros, n, k, group_size, perm)
    elif family == "hopper":
        weight = HopperW4(words, scales, zeros, n, k, group_size, perm, scales.dtype)
    else:
        weight = WordsW4(words, scales, zeros, n, k, group_size, perm, family)
    return w4a16_gemm(
        x, weight, bias, activations=activations,
        tile=tile_from_text(tile) if tile else None,
        threads=threads or None,
    )  # fmt: skip


@_w4a16.register_fake
def _(x, words, scales, zeros, perm, bias, family, n, k, group_size, activations, tile, threads):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], n)


def detached(given: Any) -> Any:
    """A tensor without its gradient, as the ops take theirs: a compiler that met one would look for
    a derivative, and there is none. What is no tensor stays as it is, for the op to judge."""
    return given.detach() if isinstance(given, torch.Tensor) else given


def tile_text(tile: Tile | None) -> str:
    """A tile as one "name=value" a line, which the compiler's tracer can write; "" for None."""
    return "" if tile is None else "\n".join([f"{name}={value!r}" for name, value in tile.fields])


def tile_from_text(text: str) -> Tile:
    """The tile of `tile_text`."""
    pairs = [line.split("=", 1) for line in text.split("\n")]
    return Tile.from_mapping({name: ast.literal_eval(value) for name, value in pairs})


def w4a16_compiled(
    x: torch.Tensor,
    weight: PackedW4 | WordsW4 | HopperW4,
    bias: torch.Tensor | None,
    activations: str,
    tile: Tile | None,
    threads: int | None,
) -> torch.Tensor:
    """`tilewright.ops.w4a16.op.w4a16_gemm` as the compiler traces it: the same arguments."""
    if isinstance(weight, PackedW4):
        family, words = "cpu", weight.codes
    else:
        family = "hopper" if isinstance(weight, HopperW4) else weight.order
        words = weight.words
    made: torch.Tensor = torch.ops.tilewright.w4a16(
        detached(x), words, weight.scales, weight.zeros, weight.perm, detached(bias), family,
        weight.N, weight.K, weight.group_size, activations, tile_text(tile), threads or 0,
    )  # fmt: skip
    return made
