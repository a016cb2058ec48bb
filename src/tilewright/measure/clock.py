"""Clocks behind one protocol: the CPU's, a GPU's event timer, another process's, a replayed one."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import cycle, repeat
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from tilewright.errors import MeasureError

__all__ = ["Clock", "CpuClock", "EventClock", "Launch", "ReplayClock", "ReportedClock"]

Launch = Callable[[], Any]
"""Code under measurement: called with no argument, its result is dropped."""


class Clock(Protocol):
    """What the measuring loop asks of a clock. All times are microseconds."""

    name: str

    @property
    def resolution_us(self) -> float:
        """The smallest time that the clock can tell apart."""
        ...

    def now_us(self) -> float:
        """Time since an arbitrary origin, all launched work finished."""
        ...

    def time_us(self, launch: Launch, launches: int) -> float:
        """Time of `launches` back-to-back calls of `launch`, together."""
        ...


class CpuClock:
    """`time.perf_counter_ns`, for code that has finished when its call returns."""

    name = "cpu"

    @cached_property
    def resolution_us(self) -> float:
        """The larger of the stated resolution and the smallest step seen between two readings."""
        stated = time.get_clock_info("perf_counter").resolution * 1e6
        steps = []
        for _ in range(2000):
            start = time.perf_counter_ns()
            step = time.perf_counter_ns() - start
            if step > 0:
                steps.append(step)
        return max(stated, min(steps, default=0) / 1e3)

    def now_us(self) -> float:
        return time.perf_counter_ns() / 1e3

    def time_us(self, launch: Launch, launches: int) -> float:
        start = time.perf_counter_ns()
        for _ in repeat(None, launches):
            launch()
        return (time.perf_counter_ns() - start) / 1e3


class EventClock:
    """CUDA or HIP events on one stream: time as the GPU saw it.

    A reading holds a pair of events around the launches. The GPU is kept busy before the first
    event, for longer than the host took to queue as many launches before, of this one and of any,
    so that all are queued by the time they run: the host's own overhead is not part of the reading
    unless a launch waits for the GPU. The first readings of a launch do not know yet what the host
    takes: warm up with them. torch serves HIP under the same names.

    Args:
        device: index or name of the device; None is the current one.

    Raises:
        MeasureError: torch sees no GPU.
    """

    name = "gpu-event"
    # CUDA's documentation of cudaEventElapsedTime: "a resolution of around 0.5 microseconds".
    resolution_us = 0.5
    # Head start of the host: what queueing takes, once and a launch, at about 2 cycles a ns.
    _LEAD_CYCLES, _LEAD_CYCLES_A_LAUNCH, _MOST_LEAD_CYCLES = 100_000, 40_000, 40_000_000
    _CYCLES_A_HOST_NS = 3.0  # a half more than that
    _HOST_READINGS = 9  # whose median one compilation cannot move

    def __init__(self, device: int | str | None = None) -> None:
        import torch

        if not torch.cuda.is_available():
            raise MeasureError(
                "EventClock: torch sees no CUDA or HIP device; use CpuClock for CPU code"
            )
        self._cuda = torch.cuda
        # A launch, of late: of whatever was timed, and of each by itself, which may be the slowest.
        self._host_ns: deque[float] = deque(maxlen=self._HOST_READINGS)
        self._own_ns: WeakKeyDictionary[Launch, deque[float]] = WeakKeyDictionary()
        index = torch.cuda.current_device() if device is None else device
        self.device = torch.device("cuda", index) if isinstance(index, int) else torch.device(index)

    @property
    def device_id(self) -> int | str:
        """What the management library calls this device: its UUID, or its index without one."""
        uuid = getattr(self._cuda.get_device_properties(self.device), "uuid", None)
        return f"GPU-{uuid}" if uuid is not None else (self.device.index or 0)

    def now_us(self) -> float:
        self._cuda.synchronize(self.device)
        return time.perf_counter_ns() / 1e3

    def _own(self, launch: Launch) -> deque[float]:
        """What the host took for this launch; empty for one that cannot be remembered."""
        try:
            return self._own_ns.setdefault(launch, deque(maxlen=self._HOST_READINGS))
        except TypeError:  # no hash, or no weak references
            return deque(maxlen=1)

    def time_us(self, launch: Launch, launches: int) -> float:
        own = self._own(launch)
        with self._cuda.device(self.device):
            start = self._cuda.Event(enable_timing=True)
            end = self._cuda.Event(enable_timing=True)
            host_ns = max(statistics.median_low(seen or [0.0]) for seen in (self._host_ns, own))
            each = max(self._LEAD_CYCLES_A_LAUNCH, self._CYCLES_A_HOST_NS * host_ns)
            lead = self._LEAD_CYCLES + int(each * launches)
            self._cuda._sleep(min(lead, self._MOST_LEAD_CYCLES))
            start.record()
            began_ns = time.perf_counter_ns()
            for _ in repeat(None, launches):
                launch()
            took_ns = (time.perf_counter_ns() - began_ns) / launches
            self._host_ns.append(took_ns)
            own.append(took_ns)
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


class ReportedClock:
    """For code that runs in another process: the call itself returns its time in microseconds.

    Args:
        resolution_us: resolution of the clock that the other process reads.
    """

    name = "reported"

    def __init__(self, resolution_us: float = 1.0) -> None:
        self._resolution_us = resolution_us

    @property
    def resolution_us(self) -> float:
        return self._resolution_us

    def now_us(self) -> float:
        return time.perf_counter_ns() / 1e3

    def time_us(self, launch: Launch, launches: int) -> float:
        total = 0.0
        for _ in repeat(None, launches):
            us = launch()
            if not isinstance(us, float) or not us > 0.0:
                raise MeasureError(
                    f"a launch reported {us!r} as its time; under ReportedClock it must return "
                    "a float above 0, in microseconds"
                )
            total += us
        return total


class ReplayClock:
    """A clock that moves only when told: the logic above it is tested without time passing.

    Args:
        resolution_us: what the clock claims to resolve.
    """

    name = "replay"

    def __init__(self, resolution_us: float = 0.01) -> None:
        self._now_us = 0.0
        self._resolution_us = resolution_us

    @property
    def resolution_us(self) -> float:
        return self._resolution_us

    def now_us(self) -> float:
        return self._now_us

    def advance(self, us: float) -> None:
        """Let `us` microseconds pass."""
        self._now_us += us

    def replay(self, durations_us: Iterable[float]) -> Launch:
        """A launch that takes the given times in turn, from the start again after the last."""
        times: Iterator[float] = cycle(durations_us)

        def launch() -> None:
            self.advance(next(times))

        return launch

    def time_us(self, launch: Launch, launches: int) -> float:
        start = self._now_us
        for _ in repeat(None, launches):
            launch()
        return self._now_us - start
