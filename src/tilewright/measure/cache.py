"""Cold-cache measurement: size of the last-level cache, and flushing it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.errors import MeasureError

__all__ = ["CpuFlusher", "GpuFlusher", "last_level_cache_bytes"]

_SYSFS = Path("/sys/devices/system/cpu")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FLUSH_FACTOR = 2


def last_level_cache_bytes(root: Path = _SYSFS) -> int:
    """Bytes of last-level cache that the CPUs share, all instances of it added up.

    Args:
        root: the kernel's folder of CPUs.

    Raises:
        MeasureError: the folder states no cache size.
    """
    instances: dict[tuple[int, str], int] = {}
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level = int((index / "level").read_text())
            shared = (index / "shared_cpu_list").read_text().strip()
            text = (index / "size").read_text().strip()
            instances[level, shared] = int(text.rstrip("KMG")) * _UNITS.get(text[-1:], 1)
        except (OSError, ValueError):
            continue
    if not instances:
        raise MeasureError(
            f"the size of the last-level cache is not stated under {root}; "
            "pass it as cache_bytes= to measure with a cold cache"
        )
    last = max(level for level, _ in instances)
    return sum(size for (level, _), size in instances.items() if level == last)


class CpuFlusher:
    """Evicts what the caches hold by writing twice the last-level cache, from every CPU.

    One thread a CPU streams through its own share, so that private caches turn over as well.

    Args:
        cache_bytes: size of the last-level cache; None asks the kernel.
        threads: streaming threads; None is one for each CPU this process may use.

    Raises:
        MeasureError: the size is unknown.
    """

    def __init__(self, cache_bytes: int | None = None, threads: int | None = None) -> None:
        cache = last_level_cache_bytes() if cache_bytes is None else cache_bytes
        if cache <= 0:
            raise MeasureError(f"cache_bytes is {cache}; give the last-level cache's size in bytes")
        self.flush_bytes = _FLUSH_FACTOR * cache
        count = threads or _usable_cpus()
        words = -(-self.flush_bytes // (8 * count))
        self._shares = [np.zeros(words, dtype=np.int64) for _ in range(count)]
        self._pool = ThreadPoolExecutor(count)

    def __call__(self) -> None:
        """Flush; returns when every line has been written."""
        for future in [self._pool.submit(_stream, share) for share in self._shares]:
            future.result()


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _stream(share: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    share += 1  # numpy frees the interpreter's lock here


class GpuFlusher:
    """Evicts a GPU's L2 by writing twice its size on the current stream.

    Args:
        device: torch device, its index or name; None is the current one.
        cache_bytes: size of the L2; None asks the driver.

    Raises:
        MeasureError: the driver does not state the size.
    """

    def __init__(self, device: Any = None, cache_bytes: int | None = None) -> None:
        import torch

        index = torch.cuda.current_device() if device is None else device
        place = torch.device("cuda", index) if isinstance(index, int) else torch.device(index)
        if cache_bytes is None:
            cache_bytes = getattr(torch.cuda.get_device_properties(place), "L2_cache_size", 0)
        if not cache_bytes or cache_bytes <= 0:
            raise MeasureError("the driver states no L2 size; pass it as cache_bytes=")
        self.flush_bytes = _FLUSH_FACTOR * cache_bytes
        self._buffer = torch.zeros(self.flush_bytes // 4, dtype=torch.int32, device=place)

    def __call__(self) -> None:
        """Queue the writes; stream order puts them before the next launch."""
        self._buffer.zero_()
