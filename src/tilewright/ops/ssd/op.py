"""ssd: the selective state space of Mamba-2, scanned over sequences, or advanced by one token.

For each head h of group g = h // (H / G), with S the state [P, N]::

    dt_t = clamp(softplus(dt_raw_t + dt_bias), low, high)
    S_t  = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T
    y_t  = S_t C_t + D x_t,    then times silu(z_t)
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import UnsupportedError
from tilewright.ops.ssd.args import ScanArgs, StepArgs
from tilewright.tiles.tile import Tile

__all__ = ["check_out", "check_packing", "scan_args", "ssd_scan", "ssd_step", "step_args"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NO_LIMIT = (0.0, float("inf"))
_MOST = 256
_STEP = 8


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    initial_states: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk: int | None = None,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan whole sequences: y for every token, and the state that each sequence leaves.

    Runs on the device of the operands. Nothing is copied: x, z, B, C and dt may be views of one
    projection.

    Args:
        x: [b, L, H, P] float32, float16 or bfloat16, any strides; P a multiple of 8 up to 256.
        dt: [b, L, H] floating point, before bias, softplus and limits.
        A: [H] floating point, negative, or a state would grow; read as float32. On a GPU its
            values are not checked, which would wait for it.
        B, C: [b, L, G, N] of x's dtype, N a multiple of 8 up to 256; G divides H, and head h reads
            group h // (H / G).
        D: [H] or [H, P] floating point: y += D x; or None.
        z: [b, L, H, P] floating point: y *= silu(z), last of all; or None.
        dt_bias: [H] floating point, added to dt; or None.
        dt_softplus: dt = softplus(dt + bias), which is the identity above 20.
        dt_limit: the range that dt is clamped to at the end; nothing negative may be left.
        initial_states: [S, H, P, N] floating point, the entering states; None for zeros.
        cu_seqlens: integers [S + 1], where packed sequences begin (b is 1 then), ascending from 0
            to L; the state begins anew at each. A sequence may be empty. On a GPU their values are
            not checked, which would wait for it. None for b sequences of length L.
        chunk: tokens a chunk, in place of the tile's; the result does not depend on it, but for
            rounding.
        tile: a tile of the space of x's device; None takes the table's.
        out: [b, L, H, P] of x's dtype, contiguous, to hold y, in memory of its own; None to
            allocate it.

    Returns:
        y [b, L, H, P] of x's dtype, and the leaving states [S, H, P, N] float32. States, sums and
        cumulative sums are float32.

        An Inf or NaN in dt, B, C or z reaches no token before its own. One in x reaches its
        channel from the first token of its chunk on: a chunk is one product, and zero times Inf
        is NaN; no other channel and no other head. Nothing reaches another sequence.

    Raises:
        ValueError, TypeError: a wrong shape, device or argument.
        UnsupportedError: a dtype, head dimension or state dimension no kernel serves.
        TileError: the tile, or its chunk, is none of the space's.

    Method: T. Dao, A. Gu, "Transformers are SSMs" (arXiv 2405.21060), section 6; decays are
    differences of cumulative sums within a chunk, at most 0.
    """
    if torch.compiler.is_compiling():
        from tilewright.ops.ssd.custom_op import scan_compiled

        return scan_compiled(
            x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, cu_seqlens,
            chunk, tile, out,
        )  # fmt: skip
    args = scan_args(
        x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
        initial_states=initial_states, cu_seqlens=cu_seqlens, out=out,
    )  # fmt: skip
    if args.y.numel() == 0:
        _pass_on(args)
    elif x.device.type == "cpu":
        from tilewright.ops.ssd.cpu import cpu_scan

        cpu_scan(args, chunk, tile)
    else:
        from tilewright.ops.ssd.gpu import gpu_scan

        gpu_scan(args, chunk, tile)
    return args.y, args.final_states


def _pass_on(args: ScanArgs) -> None:
    """Without a token, states leave as they entered."""
    if args.initial_states is None:
        args.final_states.zero_()
    else:
        args.final_states.copy_(args.initial_states)


def ssd_step(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance every sequence by one token; `state` is changed in place.

    Args:
        state: [slots, H, P, N] float32, the last two dimensions contiguous.
        x: [b, H, P]; dt: [b, H]; B, C: [b, G, N]; A, D, z (as x), dt_bias, dt_softplus, dt_limit:
            as for `ssd_scan`, without the dimension of tokens.
        state_indices: integers [b], the slot of each sequence, all different, or -1 for a row
            that is padding: no slot changes, and its y is zero. On a GPU their values are not
            checked. None for slot i of row i.

    Returns:
        y [b, H, P] of x's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: as `ssd_scan`.
    """
    if torch.compiler.is_compiling():
        from tilewright.ops.ssd.custom_op import step_compiled

        return step_compiled(
            state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, state_indices
        )
    args = step_args(
        state, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus,
        dt_limit=dt_limit, state_indices=state_indices,
    )  # fmt: skip
    if args.y.numel() == 0:
        return args.y
    if x.device.type == "cpu":
        from tilewright.ops.ssd.step import launch_step_torch

        launch_step_torch(args)
    else:
        from tilewright.ops.ssd.gpu import gpu_step

        gpu_step(args)
    return args.y


def scan_args(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    initial_states: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> ScanArgs:
    """The operands of `ssd_scan`, checked, with y and the final states allocated."""
    op = "ssd_scan"
    b, length, heads, p, _, n = _check(op, ("b", "L"), x, dt, A, B, C, D, z, dt_bias)
    _check_limit(op, dt_limit)
    _check_decays(op, A, dt_softplus, dt_limit)
    count = b
    if cu_seqlens is not None:
        count = check_packing(op, cu_seqlens, x)
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
    shape = (count, heads, p, n)
    if initial_states is not None:
        _floating(op, "initial_states", initial_states, [("S, H, P, N", shape)], x.device)
        initial_states = _float32(initial_states)
    if out is None:
        out = torch.empty(b, length, heads, p, dtype=x.dtype, device=x.device)
    else:
        check_out(op, out, x)
        for name, given in (("x", x), ("dt", dt), ("B", B), ("C", C), ("z", z)):
            if given is not None and _overlap(out, given):
                raise ValueError(
                    f"{op}: out lies in the memory of {name}, which is read again after a part of "
                    "out is written; pass a tensor of its own"
                )
    return ScanArgs(
        x=x.detach(), dt=dt.detach(), A=_float32(A), B=B.detach(), C=C.detach(),
        D=None if D is None else D.detach().contiguous(),
        z=None if z is None else z.detach(),
        dt_bias=None if dt_bias is None else dt_bias.detach().contiguous(),
        dt_softplus=bool(dt_softplus), dt_limit=(float(dt_limit[0]), float(dt_limit[1])),
        initial_states=initial_states, cu_seqlens=cu_seqlens, y=out,
        final_states=torch.empty(shape, dtype=torch.float32, device=x.device),
    )  # fmt: skip


def step_args(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    state_indices: torch.Tensor | None = None,
) -> StepArgs:
    """The operands of `ssd_step`, checked, with y allocated."""
    op = "ssd_step"
    b, heads, p, _, n = _check(op, ("b",), x, dt, A, B, C, D, z, dt_bias)
    _check_limit(op, dt_limit)
    slots = b if state_indices is None else state.shape[0]
    _floating(op, "state", state, [("slots, H, P, N", (slots, heads, p, n))], x.device)
    if state.dtype != torch.float32:
        raise UnsupportedError(f"{op}: state has dtype {state.dtype}; it must be float32")
    if state.stride(3) != 1 or state.stride(2) != n:
        raise ValueError(
            f"{op}: state has strides {state.stride()}; its last two dimensions, [P={p}, N={n}], "
            "must be contiguous"
        )
    if state_indices is not None:
        if state_indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"{op}: state_indices has dtype {state_indices.dtype}; it must be int32 or int64"
            )
        if state_indices.shape != (b,) or state_indices.device != x.device:
            raise ValueError(
                f"{op}: state_indices has shape {list(state_indices.shape)} and is on "
                f"{state_indices.device}; it must be [b={b}] on {x.device}"
            )
        if x.device.type == "cpu" and b:
            _check_slots(op, state_indices, slots)
    return StepArgs(
        state=state.detach(), x=x.detach(), dt=dt.detach(), A=_float32(A), B=B.detach(),
        C=C.detach(), D=None if D is None else D.detach().contiguous(),
        z=None if z is None else z.detach(),
        dt_bias=None if dt_bias is None else dt_bias.detach().contiguous(),
        dt_softplus=bool(dt_softplus), dt_limit=(float(dt_limit[0]), float(dt_limit[1])),
        state_indices=None if state_indices is None else state_indices.contiguous(),
        y=torch.empty(b, heads, p, dtype=x.dtype, device=x.device),
    )  # fmt: skip


def check_out(op: str, out: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless `out` can hold y."""
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"{op}: out has shape {list(out.shape)}, dtype {out.dtype}, and is on {out.device}; it "
            f"must be as x: {list(x.shape)}, {x.dtype}, {x.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"{op}: out has strides {out.stride()}; it must be contiguous")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the first and last bytes of two tensors enclose common ones."""
    if not one.numel() or not other.numel() or one.device.type == "meta":
        return False
    (a, b), (c, d) = (
        (t.data_ptr(), t.data_ptr() + t.element_size() * (
            1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
        ))
        for t in (one, other)
    )  # fmt: skip
    return a < d and c < b


def _float32(given: torch.Tensor) -> torch.Tensor:
    return given.detach().to(torch.float32).contiguous()


def _check(
    op: str, lead: tuple[str, ...], x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any,
    dt_bias: Any,
) -> tuple[int, ...]:  # fmt: skip
    """Raise unless the operands fit each other; the leading sizes, then H, P, G, N."""
    names = ", ".join(lead)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: x is {type(x).__name__}; pass a torch.Tensor [{names}, H, P]")
    if x.dtype not in _DTYPES:
        raise UnsupportedError(
            f"{op}: x has dtype {x.dtype}; it must be float32, float16 or bfloat16 - cast it"
        )
    if x.dim() != len(lead) + 2:
        raise ValueError(f"{op}: x has shape {list(x.shape)}; it must be [{names}, H, P]")
    *sizes, heads, p = x.shape
    for name, given in (("B", B), ("C", C)):
        if not isinstance(given, torch.Tensor) or given.dim() != len(lead) + 2:
            shape = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
            raise ValueError(f"{op}: {name} is {shape}; it must be [{names}, G, N]")
        if given.dtype != x.dtype:
            raise TypeError(f"{op}: {name} has dtype {given.dtype}, x has {x.dtype}; cast one")
    *_, groups, n = B.shape
    if groups == 0 or heads == 0 or heads % groups:
        raise ValueError(
            f"{op}: x has H={heads} heads, B has G={groups} groups; G must divide H, both positive"
        )
    for name, size, of in (("head dimension P", p, "x"), ("state dimension N", n, "B")):
        if not _STEP <= size <= _MOST or size % _STEP:
            raise UnsupportedError(
                f"{op}: the {name} of {of} is {size}; it must be a multiple of {_STEP} from "
                f"{_STEP} to {_MOST}"
            )
    full, state, each = (*sizes, heads, p), (*sizes, groups, n), (*sizes, heads)
    _floating(op, "B", B, [(f"{names}, G, N", state)], x.device)
    _floating(op, "C", C, [(f"{names}, G, N", state)], x.device)
    _floating(op, "dt", dt, [(f"{names}, H", each)], x.device)
    _floating(op, "A", A, [("H", (heads,))], x.device)
    if D is not None:
        _floating(op, "D", D, [("H", (heads,)), ("H, P", (heads, p))], x.device)
    if z is not None:
        _floating(op, "z", z, [(f"{names}, H, P", full)], x.device)
    if dt_bias is not None:
        _floating(op, "dt_bias", dt_bias, [("H", (heads,))], x.device)
    return (*sizes, heads, p, groups, n)


def _floating(
    op: str, name: str, given: Any, shapes: list[tuple[str, tuple[int, ...]]], device: torch.device
) -> None:
    """Raise unless `given` is a floating-point tensor of one of the shapes on the device."""
    if not isinstance(given, torch.Tensor) or not given.is_floating_point():
        kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(f"{op}: {name} is {kind}; it must be a floating-point tensor")
    if tuple(given.shape) not in [shape for _, shape in shapes]:
        allowed = " or ".join(f"[{names}] = {list(shape)}" for names, shape in shapes)
        raise ValueError(f"{op}: {name} has shape {list(given.shape)}; it must be {allowed}")
    if given.device != device:
        raise ValueError(f"{op}: x is on {device}, {name} on {given.device}; move one of them")


def _check_limit(op: str, limit: Any) -> None:
    if not isinstance(limit, tuple | list) or len(limit) != 2 or not limit[0] <= limit[1]:
        raise ValueError(f"{op}: dt_limit is {limit!r}; it must be (low, high) with low <= high")


def _check_decays(op: str, A: torch.Tensor, dt_softplus: bool, limit: Any) -> None:
    """Raise where a state could grow: decays of a chunk are clamped to at most 1."""
    if limit[1] < 0 or (limit[0] < 0 and not dt_softplus):
        raise ValueError(
            f"{op}: dt_limit is {limit!r} and lets steps be negative; a state must not grow: begin "
            "it at 0 or above"
        )
    if A.device.type == "cpu" and bool((A > 0).any()):
        raise ValueError(
            f"{op}: A reaches up to {float(A.max()):.3g}; it must not be positive - of a "
            "checkpoint's A_log it is -exp(A_log)"
        )


def check_packing(op: str, given: Any, x: torch.Tensor) -> int:
    """Raise unless cu_seqlens can pack x [b, L, ...]; the number of sequences."""
    b, length, *sizes = x.shape
    device = x.device
    if not isinstance(given, torch.Tensor) or given.dtype not in (torch.int32, torch.int64):
        kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(f"{op}: cu_seqlens is {kind}; it must be an int32 or int64 tensor [S + 1]")
    if given.dim() != 1 or len(given) < 1 or given.device != device:
        raise ValueError(
            f"{op}: cu_seqlens has shape {list(given.shape)} and is on {given.device}; it must be "
            f"[S + 1] on {device}"
        )
    if len(given) == 1 and length:
        raise ValueError(
            f"{op}: cu_seqlens has one element, which is no sequence, and x has {length} tokens"
        )
    if b != 1:
        raise ValueError(
            f"{op}: x has b={b} rows and cu_seqlens is given; packed sequences lie in one row: "
            f"pass x as {[1, b * length, *sizes]}"
        )
    if device.type == "cpu":
        at = given.tolist()
        if at[0] != 0 or at[-1] != length or any(i > j for i, j in zip(at, at[1:], strict=False)):
            raise ValueError(
                f"{op}: cu_seqlens is {at}; it must ascend from 0 to the number of tokens, {length}"
            )
    return len(given) - 1


def _check_slots(op: str, indices: torch.Tensor, slots: int) -> None:
    used = [int(i) for i in indices.tolist() if i >= 0]
    low, high = int(indices.min()), int(indices.max())
    if low < -1 or high >= slots:
        raise ValueError(
            f"{op}: state_indices reach from {low} to {high}; slots are 0..{slots - 1}, and -1 "
            "stands for none"
        )
    if len(set(used)) != len(used):
        raise ValueError(f"{op}: state_indices name a slot twice: {used}; each may be named once")
