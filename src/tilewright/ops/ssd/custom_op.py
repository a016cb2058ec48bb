"""The SSD scan and step as operations of `torch.compile`: the compiler sees shapes, no kernels."""

from __future__ import annotations

import torch

from tilewright.ops.w4a16.custom_op import detached, tile_from_text, tile_text
from tilewright.tiles.tile import Tile

__all__ = ["scan_compiled", "step_compiled"]


@torch.library.custom_op("tilewright::ssd_scan", mutates_args=())
def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    low: float,
    high: float,
    initial_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk: int,
    tile: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    from tilewright.ops.ssd.op import ssd_scan

    return ssd_scan(
        x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=(low, high),
        initial_states=initial_states, cu_seqlens=cu_seqlens, chunk=chunk or None,
        tile=tile_from_text(tile) if tile else None,
    )  # fmt: skip


@_scan.register_fake
def _(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    low: float,
    high: float,
    initial_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk: int,
    tile: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = x.new_empty(count, *x.shape[2:], B.shape[3], dtype=torch.float32)
    return x.new_empty(x.shape), states


@torch.library.custom_op("tilewright::ssd_step", mutates_args=("state",))
def _step(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    low: float,
    high: float,
    state_indices: torch.Tensor | None,
) -> torch.Tensor:
    from tilewright.ops.ssd.op import ssd_step

    return ssd_step(
        state, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus,
        dt_limit=(low, high), state_indices=state_indices,
    )  # fmt: skip


@_step.register_fake
def _(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    low: float,
    high: float,
    state_indices: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def scan_compiled(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor | None, z: torch.Tensor | None, dt_bias: torch.Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], initial_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, chunk: int | None, tile: Tile | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`tilewright.ops.ssd.op.ssd_scan` as the compiler traces it: the same arguments."""
    from tilewright.ops.ssd.op import check_out

    if out is not None:  # copying to it would broadcast and cast
        check_out("ssd_scan", out, x)
    y, states = torch.ops.tilewright.ssd_scan(
        *map(detached, (x, dt, A, B, C, D, z, dt_bias)), dt_softplus, float(dt_limit[0]),
        float(dt_limit[1]), detached(initial_states), cu_seqlens, chunk or 0, tile_text(tile),
    )  # fmt: skip
    if out is None:
        return y, states
    return out.copy_(y), states


def step_compiled(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    C: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None,
    dt_bias: torch.Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float],
    state_indices: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`tilewright.ops.ssd.op.ssd_step` as the compiler traces it: the same arguments."""
    # Not a detached state: Inductor would hand on memory that it never filled, in its place.
    y: torch.Tensor = torch.ops.tilewright.ssd_step(
        state, *map(detached, (x, dt, A, B, C, D, z, dt_bias)), dt_softplus, float(dt_limit[0]),
        float(dt_limit[1]), state_indices,
    )  # fmt: skip
    return y
