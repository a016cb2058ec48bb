"""The causal convolution in Triton: each token of x is read once from memory, and W times nearby.

::

    y[t, d] = act(bias[d] + sum_j weight[d, j] x[t - (W - 1) + j, d])       float32 sums

A program makes BLOCK_L tokens of BLOCK_D channels of one row. In a packed batch each token looks
for its sequence in cu_seqlens, SEARCH halvings deep; what lies before its first token is the
entering state, or zero. A second kernel copies the last W - 1 tokens of each sequence.

The step has one program for BLOCK_D channels of one sequence: it reads W - 1 tokens of the state,
and writes them back moved on by one.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.errors import UnsupportedError
from tilewright.ops.conv1d.args import ConvArgs
from tilewright.ops.ssd.triton_output import silu
from tilewright.ops.ssd.triton_parts import store_narrow, to_float32
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "launch_conv", "launch_conv_step"]

_STEP_CHANNELS = 256


@triton.jit
def _sequence_of(t, cu_ptr, S, mask, SEARCH: tl.constexpr):
    """The last sequence that begins at or before each token."""
    low = tl.zeros_like(t)
    high = low + S
    for _ in tl.static_range(SEARCH):
        middle = (low + high) // 2
        begin = tl.load(cu_ptr + middle, mask=mask & (middle < S), other=0x7FFFFFFF)
        later = (begin > t) & (middle < high)
        high = tl.where(later, middle, high)
        low = tl.where(later, low, middle)
    return low


@triton.jit
def _conv_kernel(
    x_ptr, w_ptr, b_ptr, i_ptr, cu_ptr, y_ptr, L, D, S, stride_xb, stride_xl, stride_xd,
    W: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr, PACKED: tl.constexpr, SEARCH: tl.constexpr, SILU: tl.constexpr,
    INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK_L tokens of BLOCK_D channels of one row of x."""
    blocks = tl.cdiv(L, BLOCK_L)
    row32 = tl.program_id(0) // blocks  # a grid's other dimensions end at 65535
    row = row32.to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK_L
    t = first + tl.arange(0, BLOCK_L)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_t = t < L
    mask_d = d < D
    begin = tl.zeros_like(t)
    sequence = begin + row32
    if PACKED and FAULT != "no-reset":
        sequence = _sequence_of(t, cu_ptr, S, mask_t, SEARCH)
        begin = tl.load(cu_ptr + sequence, mask=mask_t, other=0)
    if FAULT == "block-edge":
        begin = tl.zeros_like(t) + first
    since = t - begin  # tokens of the same sequence before this one
    x_row = x_ptr + row * stride_xb + d.to(tl.int64)[None, :] * stride_xd
    i_row = i_ptr + (sequence.to(tl.int64)[:, None] * D + d[None, :]) * (W - 1)
    acc = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    if HAS_BIAS:
        acc += to_float32(tl.load(b_ptr + d, mask=mask_d, other=0.0), INTERPRET)[None, :]
    for j in tl.static_range(W):
        w_ptrs = w_ptr + d * W + j
        if FAULT == "reversed-taps":
            w_ptrs = w_ptr + d * W + (W - 1 - j)
        w = to_float32(tl.load(w_ptrs, mask=mask_d, other=0.0), INTERPRET)
        inside = (since >= W - 1 - j) & mask_t
        at = x_row + (t - (W - 1 - j)).to(tl.int64)[:, None] * stride_xl
        v = tl.load(at, mask=inside[:, None] & mask_d[None, :], other=0.0)
        v = to_float32(v, INTERPRET)
        if HAS_STATE and j < W - 1:
            before = mask_t & (since < W - 1 - j)
            at = i_row + (since + j)[:, None]
            u = tl.load(at, mask=before[:, None] & mask_d[None, :], other=0.0)
            v += to_float32(u, INTERPRET)  # one of the two is zero
        acc += w[None, :] * v
    if SILU:
        acc = silu(acc)
    if FAULT == "partial-block":
        mask_t = mask_t & (t < L // BLOCK_L * BLOCK_L)
    to = y_ptr + (row * L + t)[:, None] * D + d[None, :]
    store_narrow(to, acc, mask_t[:, None] & mask_d[None, :], INTERPRET)


@triton.jit
def _state_kernel(
    x_ptr, i_ptr, cu_ptr, s_ptr, L, D, stride_xb, stride_xl, stride_xd,
    W: tl.constexpr, BLOCK_D: tl.constexpr, HAS_STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The last W - 1 tokens of one sequence, entering ones among them where it is shorter."""
    sequence = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    begin = tl.cast(0, tl.int64)
    end = tl.cast(L, tl.int64)
    row = sequence
    if PACKED:
        begin = tl.load(cu_ptr + sequence).to(tl.int64)
        end = tl.load(cu_ptr + sequence + 1).to(tl.int64)
        row = tl.cast(0, tl.int64)
    to = (sequence * D + d) * (W - 1)
    x_row = x_ptr + row * stride_xb + d.to(tl.int64) * stride_xd
    for j in tl.static_range(W - 1):
        t = end - (W - 1) + j
        if t >= begin:
            v = tl.load(x_row + t * stride_xl, mask=mask, other=0.0)
            tl.store(s_ptr + to + j, v, mask=mask)
        elif HAS_STATE:
            v = tl.load(i_ptr + to + (end - begin) + j, mask=mask, other=0.0)
            tl.store(s_ptr + to + j, v, mask=mask)
        else:
            tl.store(s_ptr + to + j, tl.zeros((BLOCK_D,), s_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _step_kernel(
    s_ptr, x_ptr, w_ptr, b_ptr, y_ptr, D, stride_sb, stride_sd, stride_sj, stride_xb, stride_xd,
    W: tl.constexpr, BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One token of BLOCK_D channels of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    new = tl.load(x_ptr + row * stride_xb + d * stride_xd, mask=mask, other=0.0)
    w = tl.load(w_ptr + d * W + W - 1, mask=mask, other=0.0)
    acc = to_float32(new, INTERPRET) * to_float32(w, INTERPRET)
    state = s_ptr + row * stride_sb + d * stride_sd
    for j in tl.static_range(W - 1):
        v = tl.load(state + j * stride_sj, mask=mask, other=0.0)
        w = tl.load(w_ptr + d * W + j, mask=mask, other=0.0)
        acc += to_float32(v, INTERPRET) * to_float32(w, INTERPRET)
        if j > 0:
            tl.store(state + (j - 1) * stride_sj, v, mask=mask)
    if s_ptr.dtype.element_ty == x_ptr.dtype.element_ty:
        tl.store(state + (W - 2) * stride_sj, new, mask=mask)
    else:
        kept = to_float32(new, INTERPRET)
        store_narrow(state + (W - 2) * stride_sj, kept, mask, INTERPRET)
    if HAS_BIAS:
        acc += to_float32(tl.load(b_ptr + d, mask=mask, other=0.0), INTERPRET)
    if SILU:
        acc = silu(acc)
    store_narrow(y_ptr + row * D + d, acc, mask, INTERPRET)


INTERPRETED: bool = not isinstance(_conv_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


def _check(x: torch.Tensor) -> None:
    if x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            "conv1d: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before "
            "the first import of the kernels, or move the operands to a GPU"
        )


def launch_conv(args: ConvArgs, tile: Tile, workspace: Any = None) -> None:
    """Write `args.y` and `args.final_states`. Neither chooses, allocates nor checks a rule.

    Args:
        args: on one device, at least one token.
        tile: "triton", with block_l, block_d and num_warps. With the field `planted` it has that
            fault.
        workspace: none is needed.

    Raises:
        UnsupportedError: operands are on the CPU and kernels were not imported for the interpreter.
    """
    x, length, channels = args.x, args.length, args.channels
    _check(x)
    packed = args.cu_seqlens is not None
    initial = x if args.initial_states is None else args.initial_states
    places = x if args.cu_seqlens is None else args.cu_seqlens
    has_state = args.initial_states is not None
    grid = (triton.cdiv(length, tile.block_l) * args.batch, triton.cdiv(channels, tile.block_d))
    _conv_kernel[grid](
        x, args.weight, x if args.bias is None else args.bias, initial, places, args.y,
        length, channels, args.sequences, *x.stride(),
        W=args.width, BLOCK_L=tile.block_l, BLOCK_D=tile.block_d, HAS_BIAS=args.bias is not None,
        HAS_STATE=has_state, PACKED=packed, SEARCH=args.sequences.bit_length() if packed else 0,
        SILU=args.silu, INTERPRET=INTERPRETED, FAULT=tile.as_dict().get("planted", ""),
        num_warps=tile.num_warps,
    )  # fmt: skip
    _state_kernel[(args.sequences, triton.cdiv(channels, tile.block_d))](
        x, initial, places, args.final_states, length, channels, *x.stride(),
        W=args.width, BLOCK_D=tile.block_d, HAS_STATE=has_state, PACKED=packed,
        num_warps=tile.num_warps,
    )  # fmt: skip


def launch_conv_step(
    state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu_after: bool,
    y: torch.Tensor,
) -> None:
    """Move `state` [b, D, W - 1] on by x [b, D], and write y [b, D]; weight and bias contiguous.

    Raises:
        UnsupportedError: as `launch_conv`.
    """
    _check(x)
    rows, channels = x.shape
    block = min(_STEP_CHANNELS, triton.next_power_of_2(channels))
    _step_kernel[(rows, triton.cdiv(channels, block))](
        state, x, weight, x if bias is None else bias, y, channels, *state.stride(), *x.stride(),
        W=weight.shape[1], BLOCK_D=block, HAS_BIAS=bias is not None, SILU=silu_after,
        INTERPRET=INTERPRETED, num_warps=4 if block >= 256 else 1,
    )  # fmt: skip
