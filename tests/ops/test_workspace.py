"""Workspaces grow, stay with their thread, and begin with counters of zero."""

from __future__ import annotations

import threading

import torch

from tilewright.ops.workspace import NO_WORKSPACE, Workspace, workspace

CPU = torch.device("cpu")


def in_a_thread(*asked: tuple[int, int]) -> list[Workspace]:
    found: list[Workspace] = []
    thread = threading.Thread(target=lambda: found.extend(workspace(CPU, *a) for a in asked))
    thread.start()
    thread.join()
    return found


def test_a_kernel_that_needs_none_gets_none() -> None:
    assert workspace(CPU, 0, 0) is NO_WORKSPACE


def test_it_is_kept_until_more_is_asked_for() -> None:
    first, again, more = in_a_thread((100, 7), (1 << 16, 1 << 10), ((1 << 16) + 1, 3))
    assert first is again  # the least that is allotted holds both
    assert more.partials is not None
    assert more.counters is not None
    assert more.partials.numel() == (1 << 16) + 1
    assert more.counters.numel() == 1 << 10  # never fewer than before
    assert more.partials.dtype is torch.float32
    assert not more.counters.any()


def test_threads_do_not_share() -> None:
    (one,), (other,) = in_a_thread((10, 10)), in_a_thread((10, 10))
    assert one.partials is not None
    assert other.partials is not None
    assert one.partials.data_ptr() != other.partials.data_ptr()
