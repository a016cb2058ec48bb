"""An oracle's work on a large product, several pieces of its rows or columns side by side.

Most of it is unpacking codes and squaring them, element by element, which takes one core each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

__all__ = ["THREADS", "in_pieces"]

F64 = npt.NDArray[np.float64]

THREADS = min(8, os.cpu_count() or 1)
"""Threads of an oracle."""

_LEAST = 1 << 21  # values of a piece: less is done before a thread has begun


def in_pieces(m: int, n: int, k: int, work: Callable[[slice, slice], F64]) -> F64:
    """What `work` makes of all rows of x [m, k] and of a weight [n, k]: [m, n].

    The larger of the two is cut, and the smaller one unpacked for each piece.

    Args:
        work: (rows of x, rows of the weight) -> [rows of x, rows of the weight]; pure, and called
            in several threads at once where there is much to do.
    """
    size, axis = (m, 0) if m > n else (n, 1)
    pieces = max(1, min(4 * THREADS, size * k // _LEAST))
    step = max(1, -(-size // pieces))
    cuts = [slice(at, min(at + step, size)) for at in range(0, size, step)]
    if len(cuts) < 2:
        return work(slice(0, m), slice(0, n))

    def piece(cut: slice) -> F64:
        return work(cut, slice(0, n)) if axis == 0 else work(slice(0, m), cut)

    with ThreadPoolExecutor(THREADS) as pool:
        return np.concatenate(list(pool.map(piece, cuts)), axis=axis)
