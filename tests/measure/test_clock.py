"""Clocks: what each of them counts."""

from __future__ import annotations

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
