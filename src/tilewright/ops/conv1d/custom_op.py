"""The convolution and its step as operations of `torch.compile`: the compiler sees shapes, no
kernels."""

from __future__ import annotations

import torch

from tilewright.ops.w4a16.custom_op import detached, tile_from_text, tile_text
from tilewright.tiles.tile import Tile

__all__ = ["conv_compiled", "conv_step_compiled"]


@torch.library.custom_op("tilewright::causal_conv1d", mutates_args=())
def _conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    initial_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    tile: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    from tilewright.ops.conv1d.op import causal_conv1d

    return causal_conv1d(
        x, weight, bias, activation=activation or None, initial_states=initial_states,
        cu_seqlens=cu_seqlens, tile=tile_from_text(tile) if tile else None,
    )  # fmt: skip


@_conv.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    initial_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    tile: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty(count, x.shape[2], weight.shape[1] - 1)


@torch.library.custom_op("tilewright::causal_conv1d_step", mutates_args=("state",))
def _conv_step(
    state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    from tilewright.ops.conv1d.op import causal_conv1d_step

    return causal_conv1d_step(state, x, weight, bias, activation or None)


@_conv_step.register_fake
def _(
    state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def conv_compiled(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None,
    initial_states: torch.Tensor | None, cu_seqlens: torch.Tensor | None, tile: Tile | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`tilewright.ops.conv1d.op.causal_conv1d` as the compiler traces it: the same arguments."""
    y, states = torch.ops.tilewright.causal_conv1d(
        detached(x), detached(weight), detached(bias), activation or "", detached(initial_states),
        cu_seqlens, tile_text(tile),
    )  # fmt: skip
    return y, states


def conv_step_compiled(
    state: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:  # fmt: skip
    """`tilewright.ops.conv1d.op.causal_conv1d_step` as the compiler traces it: the same
    arguments."""
    # Not a detached state: Inductor would hand on memory that it never filled, in its place.
    y: torch.Tensor = torch.ops.tilewright.causal_conv1d_step(
        state, detached(x), detached(weight), detached(bias), activation or ""
    )
    return y
