"""Clocks: what each of them counts."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from tilewright.errors import MeasureError
from tilewright.measure import CpuClock, EventClock, ReplayClock, ReportedClock


def test_cpu_clock_times_all_launches_together() -> None:
    calls: list[int] = []

    def launch() -> None:
        calls.append(1)
        time.sleep(0.002)

    us = CpuClock().time_us(launch, 3)
    assert len(calls) == 3
    assert 6000.0 <= us < 1e6


def test_cpu_clock_resolution_is_small_and_above_zero() -> None:
    assert 0.0 < CpuClock().resolution_us < 100.0


def test_cpu_clock_moves_in_microseconds() -> None:
    clock = CpuClock()
    start = clock.now_us()
    time.sleep(0.01)
    assert 10_000.0 <= clock.now_us() - start < 2e6


def test_replay_clock_moves_only_when_told() -> None:
    clock = ReplayClock()
    launch = clock.replay([5.0, 7.0])
    assert clock.time_us(launch, 3) == 5.0 + 7.0 + 5.0
    assert clock.now_us() == 17.0
    clock.advance(3.0)
    assert clock.now_us() == 20.0


def test_reported_clock_adds_up_what_launches_return() -> None:
    times = iter([5.0, 6.0])
    assert ReportedClock().time_us(lambda: next(times), 2) == 11.0


@pytest.mark.parametrize("answer", [None, 0.0, -1.0, float("nan"), 3, "5"])
def test_reported_clock_refuses_what_is_no_time(answer: object) -> None:
    with pytest.raises(MeasureError, match="it must return a float above 0, in microseconds"):
        ReportedClock().time_us(lambda: answer, 1)


class FakeCuda:
    """torch.cuda without a GPU; it counts the cycles that the GPU is kept busy for."""

    def __init__(self) -> None:
        self.slept: list[int] = []

    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device = staticmethod(lambda device: contextlib.nullcontext())

    def _sleep(self, cycles: int) -> None:
        self.slept.append(cycles)

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, end: object) -> float:
            return 0.25


def test_event_clock_keeps_the_gpu_busy_while_the_host_queues(monkeypatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    clock = EventClock()
    for _ in range(6):
        assert clock.time_us(lambda: time.sleep(0.002), 2) == 250.0
    first, *_, last = fake.slept
    assert first < 1_000_000  # a launch is taken for a quick one
    assert last > 2 * 2e6 * 2.0  # two launches of 2 ms and more, 2 cycles a ns


def test_event_clock_forgets_one_compilation(monkeypatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    clock = EventClock()
    clock.time_us(lambda: time.sleep(0.2), 1)
    for _ in range(4):
        clock.time_us(lambda: None, 1)
    assert fake.slept[-1] < 1_000_000


def test_event_clock_knows_a_slow_launch_among_quick_ones(monkeypatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    clock = EventClock()

    def quick() -> None: ...

    def slow() -> None:
        time.sleep(0.002)

    for launch in [slow, *[quick] * 9] * 2 + [slow]:
        clock.time_us(launch, 1)
    assert fake.slept[-1] > 2e6 * 2.0  # what the median of all, which is quick, does not cover
    assert fake.slept[-2] < 1_000_000


def test_event_clock_times_what_it_cannot_remember(monkeypatch) -> None:
    class Launch:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None: ...

    monkeypatch.setattr(torch, "cuda", FakeCuda())
    assert EventClock().time_us(Launch(), 1) == 250.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_event_clock_without_a_gpu_says_so() -> None:
    with pytest.raises(MeasureError, match="torch sees no CUDA or HIP device; use CpuClock"):
        EventClock()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device")
def test_event_clock_counts_gpu_time() -> None:
    clock = EventClock()
    x = torch.randn(4096, 4096, device=clock.device)
    clock.time_us(lambda: x @ x, 3)
    one, ten = clock.time_us(lambda: x @ x, 1), clock.time_us(lambda: x @ x, 10)
    assert 5 * one < ten < 20 * one
