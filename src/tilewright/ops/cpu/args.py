"""The argument array that every CPU kernel reads, and how threads share work."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["ARGS", "arguments"]

# The argument array: slot names in order. Addresses and byte strides unless stated.
ARGS = (
    "w", "w_stride", "s", "s_stride", "z", "z_stride",  # packed rows, scales, zero points
    "group_parts",  # parts that share one scale (W4A16)
    "parts", "n", "m",  # K / 32, N, M
    "x", "x_stride",  # float32 rows, or uint8 rows for int8
    "x_scale", "x_scale_stride", "x_sum", "x_sum_stride",  # of quantized or summed rows
    "y", "y_stride", "bias", "accumulate",  # float32; bias 0 for none
    "scratch", "scratch_stride",  # bytes a thread
    "block_parts",  # parts of K in one panel
)  # fmt: skip
INDEX = {name: 8 * i for i, name in enumerate(ARGS)}
(W, W_STRIDE, S, S_STRIDE, Z, Z_STRIDE, GROUP_PARTS, PARTS, N, M, X, X_STRIDE,
 X_SCALE, X_SCALE_STRIDE, X_SUM, X_SUM_STRIDE, Y, Y_STRIDE, BIAS, ACCUMULATE, SCRATCH,
 SCRATCH_STRIDE, BLOCK_PARTS) = INDEX.values()  # fmt: skip


def arguments(**slots: int) -> np.ndarray:
    """The argument array of a launch; slots left out are 0."""
    args = np.zeros(len(ARGS), dtype=np.int64)
    for name, value in slots.items():
        args[INDEX[name] // 8] = value
    return args


@njit
def share(total, thread, threads):  # type: ignore[no-untyped-def]
    """The half-open range of `total` items that belongs to this thread."""
    return total * thread // threads, total * (thread + 1) // threads
