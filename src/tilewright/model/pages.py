"""Let go of pages of mapped files while a model loads.

A page that was read once stays resident, so a copied tensor would count twice: as the copy and as
the file's pages. The file still backs those pages; dropping them loses nothing.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["drop_file_pages", "drop_range"]


def drop_range(mapped: mmap.mmap, offset: int, nbytes: int) -> None:
    """Drop the whole pages within bytes [offset, offset + nbytes) of a read-only map."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    page = mmap.PAGESIZE
    first = -(-offset // page) * page  # a page at either end may be shared with a neighbour
    last = (offset + nbytes) // page * page
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def drop_file_pages(files: Iterable[Path]) -> None:
    """Drop the resident pages of every map of `files` in this process.

    For maps that another library made. Only for files that nobody writes through their map: a
    written page of a private map would be lost. Does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return
    names = {str(file.resolve()) for file in files}
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        place, *_, name = line.split(maxsplit=5)
        if name in names:
            low, high = (int(end, 16) for end in place.split("-"))
            _libc().madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), mmap.MADV_DONTNEED)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)
