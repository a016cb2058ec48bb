"""Recording a step, with a stand-in for CUDA's streams."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.model.cuda_step import record


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Streams that are current, and a capture that ends as torch's does: a stream stays current if
    ending fails."""
    state = SimpleNamespace(current=Stream(), own=Stream(), fails=False)

    @contextlib.contextmanager
    def stream(which: Stream) -> Iterator[None]:
        before, state.current = state.current, which
        try:
            yield
        finally:
            state.current = before

    class Capture:
        def __init__(self, graph: Any) -> None:
            self._before = state.current

        def __enter__(self) -> None:
            state.current = state.own

        def __exit__(self, *args: object) -> None:
            if state.fails:
                raise RuntimeError("operation failed due to a previous error during capture")
            state.current = self._before

    for name, value in {
        "Stream": lambda device: Stream(),
        "current_stream": lambda device: state.current,
        "stream": stream,
        "synchronize": lambda device: None,
        "CUDAGraph": object,
        "graph": Capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return state


def test_a_step_is_warmed_up_set_back_and_captured(cuda: SimpleNamespace) -> None:
    here, seen = cuda.current, []

    def step() -> torch.Tensor:
        seen.append("captured" if cuda.current is cuda.own else "ahead")
        return torch.ones(1)

    _, logits = record(step, torch.device("cuda", 0), lambda: seen.append("set back"))
    assert seen == ["ahead", "ahead", "set back", "captured"]
    assert logits == 1
    assert cuda.current is here


def test_a_capture_that_fails_leaves_the_stream_as_it_was(cuda: SimpleNamespace) -> None:
    here, cuda.fails = cuda.current, True
    with pytest.raises(RuntimeError, match="during capture"):
        record(lambda: torch.ones(1), torch.device("cuda", 0))
    assert cuda.current is here


def test_two_threads_capture_one_after_the_other(cuda: SimpleNamespace) -> None:
    within: list[int] = []
    most: list[int] = []

    def step() -> torch.Tensor:
        within.append(1)
        most.append(len(within))
        time.sleep(0.01)
        within.pop()
        return torch.ones(1)

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(record, step, torch.device("cuda", 0)) for _ in range(2)]
        assert all(job.result(60)[1] == 1 for job in jobs)
    assert most == [1] * 6
