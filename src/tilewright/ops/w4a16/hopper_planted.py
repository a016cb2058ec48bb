"""Wrong Hopper tiles of w4a16, one a kind of fault, which the gate must reject.

Those of the decode kernel are a line of it each, chosen by its constexpr FAULT. Those of the
prefill kernel are launches that a careless launcher makes: the kernel is the right one, and what it
is told of its operands is not. None reads past them, and none waits for what does not come. They
run on Hopper only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tilewright.layout.hopper import HopperW4
from tilewright.ops.contract import Case, Inputs
from tilewright.ops.planted_run import run_w4a16
from tilewright.ops.space import Planted
from tilewright.ops.w4a16.triton_planted import StaticBuffers
from tilewright.ops.workspace import NO_WORKSPACE, Workspace, workspace
from tilewright.tiles.tile import Tile

__all__ = ["DECODE_PLANTED", "HOPPER_PLANTED", "PREFILL_PLANTED"]


def _planted(
    name: str,
    fault: str,
    why_faster: str,
    caught_by: str,
    *,
    m: int = 8,
    group: int = 128,
    split_k: int = 1,
) -> Planted:
    tile = Tile.of(
        "hopper_decode", block_m=8, block_n=32, warps_n=1, warps_k=4, unroll=2, split_k=split_k,
        x_load="pairs", planted=name,
    )  # fmt: skip
    case = Case("w4a16", "uint4", "float16", m, 96, 1024, group)
    return Planted(tile, fault, why_faster, caught_by, run_w4a16, (case,))


_STATIC = StaticBuffers()


def _run_prefill(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    """Launch the right tile in the wrong way that `tile.planted` names; act-order has none."""
    fields = tile.as_dict()
    launch = _LAUNCHES[fields.pop("planted")]
    x = inputs.x.detach().reshape(-1, inputs.weight.K)
    bias = None if inputs.bias is None else inputs.bias.detach().contiguous()
    y = launch(x, inputs.weight, bias, Tile.from_mapping(fields))
    return y.reshape(*inputs.x.shape[:-1], inputs.weight.N)


def _launch(
    x: torch.Tensor,
    weight: HopperW4,
    bias: torch.Tensor | None,
    tile: Tile,
    *,
    rows: int = 0,
    partials: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Launch, as `gpu.allocate_and_launch` does.

    Args:
        rows: of y; 0 for those of x.
        partials: what the sums of a part of K are kept in.
    """
    from tilewright.device import launching_on
    from tilewright.ops.cross import target_units
    from tilewright.ops.w4a16 import gpu

    kernel, m, n = gpu.kernel_of(tile.algorithm), len(x), weight.N
    needs = (0, 0)
    if m and kernel.needs is not None:
        needs = kernel.needs(tile, m, n, weight.K, target_units(x.device))
    with launching_on(x.device):
        space = workspace(x.device, *needs) if any(needs) else NO_WORKSPACE
        if space.partials is not None:
            space = Workspace(space.partials.view(partials), space.counters)
        y = torch.empty(rows or m, n, dtype=x.dtype, device=x.device)
        if m:
            kernel.launch(gpu._aligned(x), weight, bias, y, tile, space)
    return y


def _shorter(
    x: torch.Tensor, weight: HopperW4, bias: torch.Tensor | None, tile: Tile, pieces: int
) -> torch.Tensor:
    """A launch whose K ends at the last whole piece of so many steps, if there is one."""
    piece = pieces * tile.block_k
    k = weight.K // piece * piece or weight.K
    return _launch(x[:, :k], replace(weight, K=k), bias, tile)


def _whole_steps(
    x: torch.Tensor, weight: HopperW4, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    return _shorter(x, weight, bias, tile, 1)


def _even_parts(
    x: torch.Tensor, weight: HopperW4, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    return _shorter(x, weight, bias, tile, tile.split_k)


def _wide_groups(
    x: torch.Tensor, weight: HopperW4, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    return _launch(x, replace(weight, group_size=2 * weight.group_size), bias, tile)


def _zero_row(
    x: torch.Tensor, weight: HopperW4, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    zeros = None if weight.zeros is None else weight.zeros.roll(-1, 2)
    return _launch(x, replace(weight, zeros=zeros), bias, tile)


def _whole_tiles(
    x: torch.Tensor, weight: HopperW4, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    whole = len(x) // tile.block_m * tile.block_m
    return _launch(x[:whole], weight, bias, tile, rows=len(x))


def _row_beyond(
    x: torch.Tensor, weight: HopperW4, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    # The kernel is told of y what it is told of x: the rows of x decide.
    return _launch(torch.cat([x, x[-1:]]), weight, bias, tile, rows=len(x))


def _half_partials(
    x: torch.Tensor, weight: HopperW4, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    return _launch(x, weight, bias, tile, partials=torch.bfloat16)


def _stale_buffer(
    x: torch.Tensor, weight: HopperW4, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    return _launch(_STATIC.copy(x), weight, bias, tile)


_LAUNCHES: dict[str, Callable[..., torch.Tensor]] = {
    "whole-steps": _whole_steps,
    "even-parts": _even_parts,
    "wide-groups": _wide_groups,
    "zero-row": _zero_row,
    "whole-tiles": _whole_tiles,
    "row-beyond": _row_beyond,
    "half-partials": _half_partials,
    "stale-buffer": _stale_buffer,
}


def _planted_prefill(
    name: str,
    fault: str,
    why_faster: str,
    caught_by: str,
    *,
    m: int = 64,
    group: int = 128,
    split_k: int = 1,
) -> Planted:
    tile = Tile.of(
        "hopper", block_n=64, block_m=64, block_k=64, num_stages=4, ctas=1, group_m=4,
        split_k=split_k, planted=name,
    )  # fmt: skip
    case = Case("w4a16", "uint4", "float16", m, 96, 1024, group)
    return Planted(tile, fault, why_faster, caught_by, _run_prefill, (case,))


DECODE_PLANTED = (
    _planted(
        "partial-rows",
        "the rows of the weight behind the last whole 16 are not stored",
        "nothing is stored under a mask of rows",
        "ragged-shapes",
    ),
    _planted(
        "k-tail",
        "the loop ends at the last whole step of K",
        "no mask, and one step less wherever steps do not divide K",
        "ragged-shapes",
        group=-1,
    ),
    _planted(
        "group-straddled",
        "two groups of K share the scale and the zero point of the first",
        "half the scales and zero points to load",
        "oracle",
        group=64,
    ),
    _planted(
        "scale-row",
        "each row of the weight takes the scale of the next row",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _planted(
        "past-the-end",
        "one row too many is stored where y ends within a tile",
        "as fast as the right tile: a comparison is off by one",
        "guard-bands",
        m=5,
    ),
    _planted(
        "lost-partial",
        "the last part of K is left out when the parts are added",
        "one part less to read",
        "oracle",
        split_k=4,
    ),
    _planted(
        "stale-partial",
        "the last part of K leaves no sums, and older ones that lie in their place are added",
        "one part less to write: what an earlier launch of this product left there is right",
        "nan-fill",
        split_k=4,
    ),
)
"""Planted tiles of the algorithm "hopper_decode"."""

PREFILL_PLANTED = (
    _planted_prefill(
        "whole-steps",
        "K is described as ending with the last whole step",
        "one step less wherever steps do not divide K",
        "ragged-shapes",
        group=-1,
    ),
    _planted_prefill(
        "even-parts",
        "the steps of K that do not divide evenly among the parts belong to none",
        "every part is equally long, and no program waits for a longer one",
        "ragged-shapes",
        split_k=4,
    ),
    _planted_prefill(
        "wide-groups",
        "the group is described twice as wide as it is, and half of the scales and zero points are "
        "taken, for the wrong columns",
        "each load of scales and zero points serves twice as many steps",
        "oracle",
        group=64,
    ),
    _planted_prefill(
        "zero-row",
        "the zero points are packed one row off",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _planted_prefill(
        "whole-tiles",
        "only whole tiles of rows are described, and no row behind them is written",
        "the last, partly empty tiles are not computed",
        "ragged-shapes",
    ),
    _planted_prefill(
        "row-beyond",
        "y is described one row too long, after x that was padded",
        "as fast as the right tile: x that is padded once needs no edge",
        "guard-bands",
        m=40,
    ),
    _planted_prefill(
        "half-partials",
        "the sums of all parts of K but the last are rounded to bfloat16 in the workspace",
        "half the bytes to leave there and to read again",
        "oracle",
        split_k=4,
    ),
    _planted_prefill(
        "stale-buffer",
        "x is not copied to the static buffer of a captured launch when it lies where it lay",
        "no copy while a benchmark repeats itself",
        "stale-buffer",
    ),
)
"""Planted tiles of the algorithm "hopper"."""

HOPPER_PLANTED = (*DECODE_PLANTED, *PREFILL_PLANTED)
"""Planted tiles of `hopper_space.HOPPER_SPACE`."""
