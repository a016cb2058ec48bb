"""The oracle of conv1d: each token's sum over its taps, in float64.

v[t, d] = bias[d] + sum_j weight[d, j] x[t - (W - 1) + j, d]      y = v, or v sigmoid(v)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["conv_reference", "conv_terms"]

F64 = npt.NDArray[np.float64]


def conv_terms(
    x: F64, weight: F64, initial: F64 | None, bounds: list[tuple[int, int, int]]
) -> tuple[F64, F64]:
    """What each tap adds to each token, and the states that sequences leave.

    Args:
        x: [b, L, D].
        weight: [D, W].
        initial: [S, D, W - 1], or None for zeros.
        bounds: (row of x, first token, token behind the last) of every sequence.

    Returns:
        [b, L, D, W] and [S, D, W - 1].
    """
    d, w = weight.shape
    terms = np.zeros((*x.shape, w))
    states = np.zeros((len(bounds), d, w - 1))
    for number, (row, first, last) in enumerate(bounds):
        before = np.zeros((w - 1, d)) if initial is None else initial[number].T
        tokens = np.concatenate([before, x[row, first:last]])
        for t in range(last - first):
            terms[row, first + t] = tokens[t : t + w].T * weight
        states[number] = tokens[len(tokens) - (w - 1) :].T
    return terms, states


def conv_reference(
    x: F64, weight: F64, bias: F64 | None, silu: bool, initial: F64 | None,
    bounds: list[tuple[int, int, int]],
) -> tuple[F64, F64]:  # fmt: skip
    """y [b, L, D] and the leaving states [S, D, W - 1]; arguments as for `conv_terms`."""
    terms, states = conv_terms(x, weight, initial, bounds)
    y = terms.sum(axis=-1)
    if bias is not None:
        y = y + bias
    if silu:
        y = y / (1.0 + np.exp(-y))
    return y, states
