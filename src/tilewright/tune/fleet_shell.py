"""The actor that a fleet starts on each device. Importing this module loads nothing heavy.

The number of threads is settled before torch is imported, because torch reads it once. Ray gives
its workers an OMP_NUM_THREADS of its own; a table holds for the threads that a plain process on
that machine would use, so Ray's number is taken back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Shell", "settle_threads"]

_VARIABLE = "OMP_NUM_THREADS"


class Shell:
    """Passes calls on to a `tilewright.tune.fleet_worker.DeviceWorker`.

    Args:
        setup: see `DeviceWorker`; "threads" is the number of threads, or None for the machine's.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        settle_threads(setup.get("threads"))
        from tilewright.tune.fleet_worker import DeviceWorker

        self._worker = DeviceWorker(setup)

    def do(self, method: str, *arguments: Any) -> Any:
        """Call a public method of the worker."""
        return getattr(self._worker, method)(*arguments)


def settle_threads(threads: int | None) -> None:
    """Set OMP_NUM_THREADS to `threads`, or to what the process that started this one has."""
    own = str(threads) if threads is not None else _of_the_parent()
    if own is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = own


def _of_the_parent() -> str | None:
    """The variable in the environment that Ray's own process was started with (Linux)."""
    try:
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{_VARIABLE}=".encode()
    return next((e[len(prefix) :].decode() for e in entries if e.startswith(prefix)), None)
