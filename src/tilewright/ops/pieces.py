"""An oracle's work on a large product, several pieces of its rows or columns side by side.

Most of it is unpacking codes and squaring them, element by element, which takes one core each. The
products between are BLAS's, which would take every core for each of them at once: together they get
as many threads as there are cores.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

__all__ = ["THREADS", "in_pieces", "oracle_pool"]

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

    with oracle_pool() as pool:
        return np.concatenate(list(pool.map(piece, cuts)), axis=axis)


@functools.cache
def _libraries() -> ThreadpoolController:
    """Finds the BLAS that numpy has loaded; takes some milliseconds."""
    return ThreadpoolController().select(user_api="blas")


_LIMITING = threading.Lock()


@contextmanager
def oracle_pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for pieces of an oracle, whose products take one thread's share of the cores each, or
    fewer if fewer were allowed.

    Most BLAS have one limit for the process. Who finds another caller within leaves it to that one,
    which sets back what it found; what is left to do then takes all cores for each product.
    """
    share = max(1, (os.cpu_count() or 1) // THREADS)
    if not _LIMITING.acquire(blocking=False):
        with ThreadPoolExecutor(THREADS) as pool:
            yield pool
        return
    try:
        libraries = _libraries()
        counts = {one.prefix: one.num_threads for one in libraries.lib_controllers}
        limits = {name: min(share, count) for name, count in counts.items() if count}

        def limit_own() -> None:
            # OpenBLAS with OpenMP has a limit for each thread; others are told what they know.
            for one in libraries.lib_controllers:
                if one.prefix in limits:
                    one.set_num_threads(limits[one.prefix])

        with (
            libraries.limit(limits=limits),
            ThreadPoolExecutor(THREADS, initializer=limit_own) as pool,
        ):
            yield pool
    finally:
        _LIMITING.release()
