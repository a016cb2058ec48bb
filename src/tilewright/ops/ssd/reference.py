"""The oracle of ssd: the recurrence itself, token by token, in float64.

For each head h of group g = h // (H / G), with S the state [P, N]::

    dt_t = clamp(softplus(dt_raw_t + dt_bias), low, high)
    S_t  = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T
    y_t  = S_t C_t + D x_t,    then times silu(z_t)

There are no chunks here, no cumulative sums and no differences of them: an error of a chunked form
cannot be in both. softplus is the identity above 20, as in torch.

Source: T. Dao, A. Gu, "Transformers are SSMs" (arXiv 2405.21060), equation 1 with scalar A.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Moments", "spans", "ssd_reference", "steps_of", "token_moments"]

_THRESHOLD = 20.0


def spans(batch: int, length: int, cu_seqlens: torch.Tensor | None) -> list[tuple[int, int, int]]:
    """(row of x, first token, token behind the last) of every sequence."""
    if cu_seqlens is None:
        return [(row, 0, length) for row in range(batch)]
    at = cu_seqlens.tolist()
    return [(0, first, last) for first, last in zip(at[:-1], at[1:], strict=True)]


def steps_of(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """dt as the recurrence uses it, float64 [..., H], from the raw one."""
    raw = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    if dt_softplus:
        bent = torch.log1p(torch.exp(torch.clamp(raw, max=_THRESHOLD)))
        raw = torch.where(raw > _THRESHOLD, raw, bent)
    return torch.clamp(raw, *dt_limit)


@dataclass(frozen=True, eq=False)
class Moments:
    """What the error model reads at one token of one sequence; float64, heads first.

    Attributes:
        token: its number within the row of x.
        decay: [H], exp(A dt).
        added: [H, P, N], dt x B^T.
        before: [H, P, N], the state that enters.
        state: [H, P, N], the state that leaves.
    """

    token: int
    decay: torch.Tensor
    added: torch.Tensor
    before: torch.Tensor
    state: torch.Tensor


def token_moments(
    x: torch.Tensor,
    steps: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    entering: torch.Tensor,
) -> Iterator[Moments]:
    """The recurrence of one sequence, token by token.

    Args:
        x: [T, H, P] float64.
        steps: [T, H] float64, from `steps_of`.
        A: [H] float64.
        B: [T, H, N] float64, a row a head.
        entering: [H, P, N] float64.
    """
    state = entering
    for t in range(x.shape[0]):
        decay = torch.exp(steps[t] * A)
        added = (steps[t, :, None] * x[t])[:, :, None] * B[t][:, None, :]
        before = state
        state = torch.addcmul(added, decay[:, None, None], before)
        yield Moments(t, decay, added, before, state)


def ssd_reference(
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
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    heads: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact scan, for the arguments of `tilewright.ops.ssd.op.ssd_scan`, on the device of x.

    Args:
        heads: compute only these heads; None for all.

    Returns:
        y [b, L, h, P] and states [S, h, P, N], float64, h the number of heads computed.
    """
    groups, count = B.shape[2], x.shape[2]
    chosen = torch.arange(count, device=x.device)
    if heads is not None:
        chosen = chosen[list(heads)]
    group = torch.div(chosen, count // groups, rounding_mode="floor")
    A = A.double()[chosen]
    bias = None if dt_bias is None else dt_bias[chosen]
    steps = steps_of(dt[:, :, chosen], bias, dt_softplus, dt_limit)
    shape = (len(chosen), x.shape[3], B.shape[3])
    y = torch.zeros(*x.shape[:2], *shape[:2], dtype=torch.float64, device=x.device)
    states = []
    for number, (row, first, last) in enumerate(spans(x.shape[0], x.shape[1], cu_seqlens)):
        if initial_states is None:
            state = torch.zeros(shape, dtype=torch.float64, device=x.device)
        else:
            state = initial_states[number, chosen].double()
        of_row = slice(first, last)
        x_row = x[row, of_row, chosen].double()
        B_row, C_row = (m[row, of_row][:, group].double() for m in (B, C))
        for at in token_moments(x_row, steps[row, of_row], A, B_row, state):
            state = at.state
            y[row, first + at.token] = (state * C_row[at.token][:, None, :]).sum(dim=2)
        states.append(state)
    x = x[:, :, chosen].double()
    if D is not None:
        y += D[chosen].double().reshape(len(chosen), -1) * x
    if z is not None:
        z = z[:, :, chosen].double()
        y *= z * torch.sigmoid(z)
    leaving = torch.stack(states) if states else y.new_zeros(0, *shape)
    return y, leaving
