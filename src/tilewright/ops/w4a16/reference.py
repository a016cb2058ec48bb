"""The oracle of w4a16: float64 from the codes, never from a kernel's layout.

y[m, n] = sum_k x[m, perm[k]] * scales[n, k // G] * (codes[n, k] - zero[n, k // G]) + bias[n]
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tilewright.formats.w4 import SYMMETRIC_ZERO, W4Codes
from tilewright.ops.check import WeightRows

__all__ = ["w4a16_reference", "w4a16_rows"]

F64 = npt.NDArray[np.float64]

# Weights that are held in float64 at a time: few enough for a core's cache.
_VALUES_AT_A_TIME = 1 << 19


def w4a16_rows(codes: W4Codes) -> Iterator[WeightRows]:
    """The weight in float64, a few rows at a time, as scale * code and -scale * zero [n, K]."""
    n, k = codes.codes.shape
    step = max(1, _VALUES_AT_A_TIME // k)
    for at in range(0, n, step):
        scales = codes.scales[at : at + step].astype(np.float64)
        zeros = SYMMETRIC_ZERO if codes.zeros is None else codes.zeros[at : at + step]
        main = codes.codes[at : at + step].astype(np.float64)
        main.reshape(len(main), -1, codes.group_size)[...] *= scales[:, :, None]
        yield WeightRows(main, np.repeat(-scales * zeros, codes.group_size, axis=1))


def w4a16_reference(x: F64, codes: W4Codes, bias: F64 | None = None) -> F64:
    """x @ W.T + bias in float64.

    Args:
        x: float64 [M, K], columns in the order of the activations (perm is applied here).
        codes: the weight.
        bias: [N] or None.

    Returns:
        float64 [M, N].
    """
    ordered = x if codes.perm is None else x[:, codes.perm]
    y = np.empty((len(x), codes.N))
    at = 0
    for rows in w4a16_rows(codes):
        weight = rows.value()
        y[:, at : at + len(weight)] = ordered @ weight.T
        at += len(weight)
    return y if bias is None else y + bias
