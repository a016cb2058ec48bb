"""An oracle's work on a large weight, several pieces of its rows side by side.

Most of it is unpacking codes and squaring them, element by element, which takes one core each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

__all__ = ["THREADS", "by_rows"]

F64 = npt.NDArray[np.float64]

THREADS = min(8, os.cpu_count() or 1)
"""Threads of an oracle."""

_LEAST = 1 << 21  # values of a piece: less is done before a thread has begun


def by_rows(n: int, k: int, work: Callable[[slice], F64]) -> F64:
    """What `work` makes of all rows of a weight [n, k]: [M, n] of pieces [M, rows of the slice].

    Args:
        work: pure; called in several threads at once where the weight is large.
    """
    pieces = max(1, min(4 * THREADS, n * k // _LEAST))
    step = -(-n // pieces)
    slices = [slice(at, min(at + step, n)) for at in range(0, n, step)]
    if len(slices) < 2:
        return work(slice(0, n))
    with ThreadPoolExecutor(THREADS) as pool:
        return np.concatenate(list(pool.map(work, slices)), axis=1)
