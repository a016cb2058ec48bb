"""conv1d: the causal depthwise convolution before a selective state space, with its state.

    y[t, d] = act(bias[d] + sum_j weight[d, j] x[t - (W - 1) + j, d])

Tokens before the first of a sequence are those of its entering state, or zero.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import UnsupportedError
from tilewright.ops.conv1d.args import ConvArgs
from tilewright.tiles.tile import Tile

__all__ = ["causal_conv1d", "causal_conv1d_step", "conv_args", "pass_on"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDTHS = range(2, 9)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_states: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve whole sequences, each channel with its own taps.

    Args:
        x: [b, L, D] float32, float16 or bfloat16, any strides.
        weight: [D, W] floating point, W from 2 to 8; the last tap meets the token itself.
        bias: [D] floating point, or None.
        activation: "silu", or None.
        initial_states: [S, D, W - 1], the tokens before each sequence, the oldest first; None for
            zeros.
        cu_seqlens: integers [S + 1], where packed sequences begin (b is 1 then), ascending from 0
            to L. On a GPU their values are not checked. None for b sequences of length L.
        tile: a tile of the space; None takes the table's.

    Returns:
        y [b, L, D] of x's dtype, and the last W - 1 tokens of each sequence [S, D, W - 1], of x's
        dtype, bit for bit. Sums are float32.

    Raises:
        ValueError, TypeError: a wrong shape, device or argument.
        UnsupportedError: a dtype or width no kernel serves; no triton for a GPU.
        TileError: the tile is none of the space's.

    Method: the convolution of Mamba; state and packing as in its `causal_conv1d_fn`.
    """
    if torch.compiler.is_compiling():
        from tilewright.ops.conv1d.custom_op import conv_compiled

        return conv_compiled(x, weight, bias, activation, initial_states, cu_seqlens, tile)
    args = conv_args(
        x, weight, bias, activation=activation, initial_states=initial_states,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if args.y.numel() == 0:
        pass_on(args)
    elif x.device.type == "cpu":
        from tilewright.ops.conv1d.shifted import convolve

        convolve(args, tile)
    else:
        from tilewright.ops.conv1d.gpu import gpu_conv

        gpu_conv(args, tile)
    return args.y, args.final_states


def pass_on(args: ConvArgs) -> None:
    """Without a token, states leave as they entered."""
    if args.initial_states is None:
        args.final_states.zero_()
    else:
        args.final_states.copy_(args.initial_states)


def causal_conv1d_step(
    state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """One token of each sequence; `state` is moved on by it in place.

    Args:
        state: [b, D, W - 1] floating point, the tokens before, the oldest first.
        x: [b, D]; weight, bias, activation: as for `causal_conv1d`.

    Returns:
        y [b, D] of x's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: as `causal_conv1d`.
    """
    if torch.compiler.is_compiling():
        from tilewright.ops.conv1d.custom_op import conv_step_compiled

        return conv_step_compiled(state, x, weight, bias, activation)
    op = "causal_conv1d_step"
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{op}: x is {got}; it must be a tensor [b, D]")
    _check(op, x, weight, bias, activation)
    shape = (x.shape[0], *weight.shape[:1], weight.shape[1] - 1)
    _floating(op, "state", state, "b, D, W - 1", shape, x.device)
    if x.device.type != "cpu":
        from tilewright.ops.conv1d.gpu import gpu_conv_step

        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if y.numel():
            weight = weight.detach().contiguous()
            bias = None if bias is None else bias.detach().contiguous()
            gpu_conv_step(state.detach(), x.detach(), weight, bias, activation == "silu", y)
        return y
    state, x, weight = state.detach(), x.detach(), weight.detach()
    bias = None if bias is None else bias.detach()
    tokens = torch.cat([state.to(torch.float32), x.to(torch.float32)[..., None]], dim=2)
    state[..., :-1] = state[..., 1:].clone()
    state[..., -1] = x
    y = (tokens * weight.to(torch.float32)).sum(dim=2)
    if bias is not None:
        y = y + bias.to(torch.float32)
    if activation == "silu":
        y = torch.nn.functional.silu(y)
    return y.to(x.dtype)


def conv_args(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_states: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> ConvArgs:
    """The operands of `causal_conv1d`, checked, with y and the final states allocated."""
    from tilewright.ops.ssd.op import check_packing

    op = "causal_conv1d"
    if not isinstance(x, torch.Tensor) or x.dim() != 3:
        got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{op}: x is {got}; it must be a tensor [b, L, D]")
    _check(op, x, weight, bias, activation)
    b, length, channels = x.shape
    count = b
    if cu_seqlens is not None:
        count = check_packing(op, cu_seqlens, x)
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
    states = (count, channels, weight.shape[1] - 1)
    if initial_states is not None:
        _floating(op, "initial_states", initial_states, "S, D, W - 1", states, x.device)
        initial_states = initial_states.detach().to(x.dtype).contiguous()
    return ConvArgs(
        x=x.detach(), weight=weight.detach().contiguous(),
        bias=None if bias is None else bias.detach().contiguous(), silu=activation == "silu",
        initial_states=initial_states, cu_seqlens=cu_seqlens,
        y=torch.empty(b, length, channels, dtype=x.dtype, device=x.device),
        final_states=torch.empty(states, dtype=x.dtype, device=x.device),
    )  # fmt: skip


def _check(op: str, x: torch.Tensor, weight: Any, bias: Any, activation: Any) -> None:
    if x.dtype not in _DTYPES:
        raise UnsupportedError(
            f"{op}: x has dtype {x.dtype}; it must be float32, float16 or bfloat16 - cast it"
        )
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        shape = list(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise ValueError(
            f"{op}: weight is {shape}; it must be a tensor [D, W] (squeeze a weight [D, 1, W])"
        )
    channels, width = x.shape[-1], weight.shape[1]
    _floating(op, "weight", weight, "D, W", (channels, width), x.device)
    if width not in _WIDTHS:
        raise UnsupportedError(
            f"{op}: weight has W={width} taps; there must be {_WIDTHS[0]} to {_WIDTHS[-1]}"
        )
    if bias is not None:
        _floating(op, "bias", bias, "D", (channels,), x.device)
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: activation={activation!r}; use 'silu' or None")


def _floating(
    op: str, name: str, given: Any, names: str, shape: tuple[int, ...], device: torch.device
) -> None:
    if not isinstance(given, torch.Tensor) or not given.is_floating_point():
        kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(f"{op}: {name} is {kind}; it must be a floating-point tensor")
    if tuple(given.shape) != shape:
        raise ValueError(
            f"{op}: {name} has shape {list(given.shape)}; it must be [{names}] = {list(shape)}"
        )
    if given.device != device:
        raise ValueError(f"{op}: x is on {device}, {name} on {given.device}; move one of them")
