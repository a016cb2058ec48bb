"""Scratch memory of GPU kernels, owned by the ops: launchers get it and allocate nothing.

A kernel that splits K writes partial sums to `partials` and counts arrivals in `counters`, which
are zero before every launch and zero again after it. Launches of one stream follow one another, so
they share one workspace; each thread and stream has its own.

A CUDA graph goes on using the addresses that it was captured with. A workspace that is handed out
during capture therefore serves captures only, and is never freed; graphs captured in one thread
share it, so they must not replay at the same time.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

__all__ = ["NO_WORKSPACE", "Workspace", "workspace"]


class Workspace(NamedTuple):
    """What a launch may write beside its output.

    Attributes:
        partials: float32 [>= the floats asked for], of any content; None if none were.
        counters: int32 [>= the counters asked for], zero before and after a launch; or None.
    """

    partials: torch.Tensor | None
    counters: torch.Tensor | None


NO_WORKSPACE = Workspace(None, None)

_GRAPHS = "graphs"
_LEAST_FLOATS = 1 << 16
_LEAST_COUNTERS = 1 << 10


class _Pools(threading.local):
    """Workspaces of this thread by (device, stream), and the one of its graphs."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[torch.device, int | str], Workspace] = {}


_POOLS = _Pools()
_CAPTURED: list[Workspace] = []


def workspace(device: torch.device, floats: int, counters: int) -> Workspace:
    """The workspace of the current stream of `device`, grown to what is asked for.

    Args:
        device: of the launch; the CPU, for the interpreter, has one workspace a thread.
        floats: partial sums needed, at least 0.
        counters: arrival counters needed, at least 0.
    """
    if not floats and not counters:
        return NO_WORKSPACE
    pools = _POOLS.by_place
    if device.type == "cpu":
        return _grown(pools, (device, 0), floats, counters)
    if not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device).cuda_stream
        return _grown(pools, (device, stream), floats, counters)
    key = (device, _GRAPHS)
    found = pools.get(key)
    if found is not None and _fits(found, floats, counters):
        return found
    # Warming up has made one that is large enough: from now on it belongs to the graphs.
    for place, made in list(pools.items()):
        if place[0] == device and place[1] != _GRAPHS and _fits(made, floats, counters):
            del pools[place]
            pools[key] = made
            _CAPTURED.append(made)
            return made
    # Allocated in the graph's own memory, and cleared at every replay, for this launch alone.
    made = _allocate(device, floats, counters)
    _CAPTURED.append(made)
    return made


def _fits(made: Workspace, floats: int, counters: int) -> bool:
    return made.partials is not None and made.counters is not None and (
        made.partials.numel() >= floats and made.counters.numel() >= counters
    )  # fmt: skip


def _grown(
    pools: dict[tuple[torch.device, int | str], Workspace],
    key: tuple[torch.device, int | str],
    floats: int,
    counters: int,
) -> Workspace:
    made = pools.get(key)
    if made is None or not _fits(made, floats, counters):
        if made is not None and made.partials is not None and made.counters is not None:
            floats = max(floats, made.partials.numel())
            counters = max(counters, made.counters.numel())
        made = pools[key] = _allocate(key[0], floats, counters)
    return made


def _allocate(device: torch.device, floats: int, counters: int) -> Workspace:
    return Workspace(
        torch.empty(max(floats, _LEAST_FLOATS), dtype=torch.float32, device=device),
        torch.zeros(max(counters, _LEAST_COUNTERS), dtype=torch.int32, device=device),
    )
