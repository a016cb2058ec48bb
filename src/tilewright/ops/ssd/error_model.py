"""How far a right scan may be from the recurrence, from the operands.

Everything is float32 with unit roundoff u = 2^-24; variances are counted in u^2 / 3, that of one
rounding of a number of size 1. Per head and token, with S the state, ``a = A dt``, ``T_s`` the term
that token s left in S after its decay since, and ``Q = sum_s T_s^2``:

Sums. A state is a sum of terms. Whatever the order, a partial sum is a walk with drift, so its
square stays within Q + S^2 (see `tilewright.ops.check`), and each addition rounds by that much:

    R_t = decay^2 R_{t-1} + ... + S_t^2           token by token, errors decaying with what they hit
    n (Q_t + S_t^2)                               within a chunk, n = min(t + 1, 512) terms + 8

Decays. A chunked scan takes exp of a difference of two sums of a, each as large as the sum W of
\\|a\\| over a chunk, 512 tokens at most. One rounding of such a sum is u W, absolute, and so
relative in the decay. In a running sum the two share all errors up to s, and one of u W comes with
each token since; a tree adds log2(512) = 9 of them on either side, and exp and its argument two:

    old_t = decay^2 (Q_{t-1} + S_{t-1}^2)         what decays at t
    R_t  += (W^2 + (a r)^2 + 3) old_t
    20 W^2 old_t

dt. Its relative error is r u: four roundings, and those of the argument v = dt + bias, which
softplus multiplies by v sigmoid(v) / softplus(v). It multiplies a, above, and the token's term:
``R_t += (r^2 + 4) T_t^2``.

The result. y = sum_n C_n S_n adds the variances of S times C^2, N more terms, and for what all of a
head's decays have in common ``(20 W^2 + G) (C . decay S_{t-1})^2``, with G the sum of decay^2 W^2
that R has, too. D x and silu(z) round a few times more.

Operands rounded to e before they are multiplied (kernels that use tensor cores) add
``e^2 / 3 (2 Q)`` to the state's variance and ``e^2 / 3 sum_n C_n^2 (3 Q_n + S_n^2)`` to that of y.

Where that type is float16, its smallest numbers lie a step of f = 2^-24 apart, which is absolute.
What is multiplied with B is counted in the largest ``U = dt decay`` of its chunk, and what with x
or C in nothing. They add ``f^2 / 12`` times ``U^2 sum_s B_s^2`` to the state's variance, and times
``sum_s x_s^2 + sum_n C_n^2`` to that of y, s being all tokens so far for B, and those of a longest
chunk for x.

A chip's own exp is off by a few u, say h: 4 for the 2^-22 of NVIDIA's. A decay within a chunk takes
one (``h^2 old_t``), what comes from chunks of 16 tokens and more one a chunk (``h^2 / 16`` more in
R's each), dt one (r is h more), and so does silu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.ssd.reference import spans, steps_of, token_moments

__all__ = ["LONGEST_CHUNK", "scan_sigma"]

LONGEST_CHUNK = 512
"""Tokens that one cumulative sum may run over."""

_UNIT = 2.0**-24
_TREE = 20.0
_FEW = 8.0
_TINY = 2.0**-120  # what may be flushed to zero on the way
_LEAST_UNIT = 2.0**-60  # what weights are counted in at least


@dataclass
class _Sums:
    """Running sums of one sequence, heads first: Q and R [h, P, N], G [h]."""

    squares: torch.Tensor
    rounded: torch.Tensor
    common: torch.Tensor


@dataclass
class _Steps:
    """Running sums of one sequence for a type whose smallest numbers lie apart: U [h], and of
    squares of B [h, N] and x [h, P]."""

    largest: torch.Tensor
    of_B: torch.Tensor
    of_x: torch.Tensor


def scan_sigma(
    operand: Any, x: torch.Tensor, heads: list[int], unit: float = 0.0, step: float = 0.0,
    exp: float = 0.0,
) -> Any:  # fmt: skip
    """Standard deviation of a right scan's error before y is rounded to its type.

    Args:
        operand: `tilewright.ops.ssd.spec.SsdOperand`.
        x: [b, L, H, P].
        heads: those to compute.
        unit: unit roundoff of the type that operands are rounded to before they are multiplied;
            0 for float32.
        step: distance of that type's smallest numbers, where it matters; 0 where it does not.
        exp: relative error of the chip's exp, in u; 0 where it rounds as the model's other
            operations do.

    Returns:
        Of y [b, L, h, P] and of the states [S, h, P, N], float64.
    """
    o = operand
    count, groups = x.shape[2], o.B.shape[2]
    per_group = count // groups
    group = torch.tensor([h // per_group for h in heads])
    bias = None if o.dt_bias is None else o.dt_bias[heads]
    raw = o.dt[:, :, heads].double()
    steps = steps_of(raw, bias, o.dt_softplus, o.dt_limit)
    relative = _relative(raw if bias is None else raw + bias.double(), o.dt_softplus, exp)
    A = o.A.double()[heads]
    n = o.B.shape[3]
    shape = (*x.shape[:2], len(heads), x.shape[3])
    of_y, ys = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    leaving = []
    for number, (row, first, last) in enumerate(spans(x.shape[0], x.shape[1], o.cu_seqlens)):
        part = slice(first, last)
        zeros = torch.zeros(len(heads), x.shape[3], n, dtype=torch.float64)
        entering = zeros
        if o.initial_states is not None:
            entering = o.initial_states[number, heads].double()
        sums = _Sums(entering**2, zeros.clone(), torch.zeros(len(heads), dtype=torch.float64))
        floors = _Steps(zeros[:, 0, 0], zeros[:, 0], zeros[..., 0])
        variance = zeros
        windows = _windows((steps[row, part] * A).abs())
        B, C = (m[row, part].double()[:, group] for m in (o.B, o.C))
        xs = x[row, part][:, heads].double()
        for at in token_moments(xs, steps[row, part], A, B, entering):
            t = at.token
            r = relative[row, first + t]
            terms = min(t + 1, LONGEST_CHUNK)
            variance, of_y[row, first + t] = _advance(
                sums, at, C[t], windows[t], steps[row, first + t] * A, r, terms, unit, exp
            )
            if step:
                before = xs[t - LONGEST_CHUNK] if t >= LONGEST_CHUNK else torch.zeros_like(xs[t])
                added, added_y = _floor(
                    floors, at.decay, steps[row, first + t], B[t], C[t], xs[t], before
                )
                variance = variance + step**2 / 12 * added
                of_y[row, first + t] += step**2 / 12 * added_y
            ys[row, first + t] = _with_C(at.state, C[t])
        leaving.append(variance)
    states = torch.stack(leaving) if leaving else torch.zeros(0, len(heads), x.shape[3], n)
    return _finished(of_y, ys, o, x, heads, exp), states.double().sqrt() + _TINY


def _windows(sizes: torch.Tensor) -> torch.Tensor:
    """Sums of |a| [T, h] over the tokens of a longest chunk that ends at each token."""
    total = sizes.cumsum(0)
    before = torch.zeros_like(total)
    before[LONGEST_CHUNK:] = total[:-LONGEST_CHUNK]
    return total - before


def _relative(argument: torch.Tensor, dt_softplus: bool, exp: float) -> torch.Tensor:
    """Relative error of dt, in u."""
    if not dt_softplus:
        return torch.full_like(argument, 4.0)
    size = argument.abs() * torch.sigmoid(argument) / torch.nn.functional.softplus(argument)
    return 4.0 + torch.where(argument > 20.0, 1.0, size + exp)


def _advance(
    sums: _Sums, at: Any, C: torch.Tensor, window: torch.Tensor, a: torch.Tensor, r: torch.Tensor,
    terms: int, unit: float, exp: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One token: the variance of the state [h, P, N], and that of y [h, P]."""
    d2 = (at.decay**2)[:, None, None]
    carried = d2 * at.before**2
    old = d2 * sums.squares + carried
    new = at.added**2
    state2 = at.state**2
    sums.squares = d2 * sums.squares + new
    both = sums.squares + state2
    each = window**2 + (a * r) ** 2 + 3.0 + exp**2 / 16
    sums.rounded = (
        d2 * sums.rounded + each[:, None, None] * old + (r**2 + 4.0)[:, None, None] * new + state2
    )
    sums.common = at.decay**2 * (sums.common + each)
    tree = _TREE * window**2 + exp**2
    variance = sums.rounded + tree[:, None, None] * old + (terms + _FEW) * both
    e2 = (unit / _UNIT) ** 2
    variance = (variance + 2.0 * e2 * sums.squares) * (_UNIT**2 / 3)

    C2 = C**2
    y2 = _with_C(at.state, C) ** 2
    carried_y = at.decay[:, None] * _with_C(at.before, C)
    of_y = (C.shape[1] + terms + _FEW) * (_with_C(both, C2) + y2)
    of_y += (tree + sums.common)[:, None] * carried_y**2
    if unit:
        of_y += e2 * _with_C(3.0 * sums.squares + state2, C2)
    return variance, _with_C(variance, C2) + of_y * (_UNIT**2 / 3)


def _floor(
    sums: _Steps, decay: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    x: torch.Tensor, gone: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One token: what steps add to the variances of the state [h, 1, N] and of y [h, P], in units
    of a step's own; `gone` is the x that the longest chunk no longer holds."""
    sums.largest = torch.maximum(decay * sums.largest, dt).clamp(min=_LEAST_UNIT)
    sums.of_B = sums.of_B + B**2
    sums.of_x = sums.of_x + x**2 - gone**2
    of_state = (sums.largest**2)[:, None] * sums.of_B
    alone = (C**2 * (1.0 + of_state)).sum(dim=1)
    return of_state[:, None, :], sums.of_x + alone[:, None]


def _with_C(state: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """[h, P] of [h, P, N] and [h, N]. No library's product, whose threads would cost more."""
    return (state * C[:, None, :]).sum(dim=2)


def _finished(
    variance: torch.Tensor, y: torch.Tensor, o: Any, x: torch.Tensor, heads: list[int], exp: float
) -> torch.Tensor:
    """Sigma of y [b, L, h, P] after skip and gate, from the variance before them."""
    if o.D is not None:
        skip = o.D[heads].double().view(len(heads), -1) * x[:, :, heads].double()
        y = y + skip
        variance = variance + _UNIT**2 / 3 * (3.0 * skip**2 + y**2)
    if o.z is not None:
        z = o.z[:, :, heads].double()
        gate2 = (z * torch.sigmoid(z)) ** 2
        # silu rounds relative to its result, and once more for each unit of its argument.
        variance = (variance + _UNIT**2 / 3 * (10.0 + exp**2 + z**2) * y**2) * gate2
    return variance.sqrt() + _TINY
