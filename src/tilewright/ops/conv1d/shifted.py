"""The causal convolution on the CPU, in torch: one product a tap, a block of tokens at a time.

block + the W - 1 tokens before it, float32 [b, W - 1 + q, D]
    y[:, t] = bias + sum_j weight[:, j] block[:, t + j]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilewright.device import cpu_device
from tilewright.ops.choose import choose_tile
from tilewright.ops.conv1d.args import ConvArgs
from tilewright.ops.conv1d.space import CPU_SPACE
from tilewright.tiles.tile import Problem, Tile

__all__ = ["conv_problem", "convolve", "launch_conv_torch"]

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def conv_problem(args: ConvArgs, arch: str) -> Problem:
    """The convolution as a tile table sees it: M tokens in all, N channels, K taps."""
    return Problem(
        "conv1d", arch, _NAMES[args.x.dtype], f"w{args.width}", "float", args.batch * args.length,
        args.channels, args.width, 0,
    )  # fmt: skip


def convolve(args: ConvArgs, tile: Tile | None = None) -> None:
    """Choose the tile, and launch.

    Raises:
        TileError: the tile is none of the space's.
    """
    problem = conv_problem(args, cpu_device().arch)
    if tile is None:
        tile = choose_tile(problem, CPU_SPACE).tile
    else:
        CPU_SPACE.check(tile, problem)
    launch_conv_torch(args, tile)


def launch_conv_torch(args: ConvArgs, tile: Tile) -> None:
    """Write `args.y` and `args.final_states`. A tile with the field `planted` has that fault."""
    fault = tile.as_dict().get("planted", "")
    weight = args.weight.to(torch.float32)
    taps = weight.flip(1) if fault == "reversed-taps" else weight
    bias = None if args.bias is None else args.bias.to(torch.float32)
    behind = args.width - 1
    entering = None
    for rows, tokens, states in _sequences(args):
        if entering is None or fault != "no-reset":
            entering = _entering(args, states)
        x = args.x[rows, tokens]
        length = x.shape[1]
        last = length - length % tile.block if fault == "partial-block" else length
        before = entering
        for first in range(0, last, tile.block):
            q = min(tile.block, last - first)
            block = torch.cat([before, x[:, first : first + q].to(torch.float32)], dim=1)
            before = block[:, q:] if fault != "block-edge" else torch.zeros_like(before)
            y = block[:, :q] * taps[:, 0]
            for j in range(1, args.width):
                y.addcmul_(block[:, j : j + q], taps[:, j])
            if bias is not None:
                y += bias
            if args.silu:
                y = torch.nn.functional.silu(y)
            at = tokens.start + first
            args.y[rows, at : at + q] = y.to(args.y.dtype)
        kept = torch.cat([entering, x[:, max(length - behind, 0) :].to(torch.float32)], dim=1)
        entering = kept[:, kept.shape[1] - behind :]
        args.final_states[states] = entering.transpose(1, 2).to(args.final_states.dtype)


def _sequences(args: ConvArgs) -> Iterator[tuple[slice, slice, slice]]:
    """Sequences that are convolved together: rows of x, tokens of these, and states."""
    if args.cu_seqlens is None:
        yield slice(0, args.batch), slice(0, args.length), slice(0, args.batch)
        return
    at = args.cu_seqlens.tolist()
    for number, (first, last) in enumerate(zip(at[:-1], at[1:], strict=True)):
        yield slice(0, 1), slice(first, last), slice(number, number + 1)


def _entering(args: ConvArgs, states: slice) -> torch.Tensor:
    """The W - 1 tokens before, float32 [b, W - 1, D]."""
    if args.initial_states is None:
        count = states.stop - states.start
        return args.x.new_zeros(count, args.width - 1, args.channels, dtype=torch.float32)
    return args.initial_states[states].transpose(1, 2).to(torch.float32)
