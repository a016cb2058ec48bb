"""The devices of a fleet, who uses which one when, and what became of those that were lost.

A device serves one call at a time. While one is timed, nothing else of ours runs on it, nor on one
that shares CPUs or a GPU with it (two workers of one machine): verifying waits, and of several that
want to time, one does. So a sample never competes with our own work.

A call whose worker is lost raises `WorkerLost`. The worker is started again where its node still
lives, a bounded number of times; otherwise the device is out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilewright.errors import TilewrightError
from tilewright.tiles.tile import Problem

__all__ = ["Device", "Executor", "Floor", "WorkerLost", "cpu_text"]

MOST_RESTARTS = 3
"""A device whose worker was lost more often than this is not used again."""

_POLL_S = 0.2


class WorkerLost(TilewrightError):
    """A worker died, its node went away, or it did not answer in time."""


class Executor(Protocol):
    """Starts workers and carries calls to them: Ray, or threads of this process in tests."""

    def start(self, setup: Mapping[str, Any]) -> dict[str, str]:
        """Start a worker on every device.

        Returns:
            handle of each worker -> "" or why it did not start.

        Raises:
            TilewrightError: there is no fleet.
        """
        ...

    def name(self, handle: str) -> str:
        """What messages call a worker before it has said what it is."""
        ...

    def call(self, handle: str, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of `DeviceWorker`; the future raises WorkerLost where there is no answer,
        and whatever the method raised."""
        ...

    def restart(self, handle: str) -> None:
        """Start a lost worker again on its node.

        Raises:
            WorkerLost: the node is gone or does not take it.
        """
        ...

    def close(self) -> None:
        """End every worker."""
        ...


@dataclass(eq=False)
class Device:
    """One device and its worker.

    Attributes:
        handle: of the worker, at the executor.
        about: what the worker said of itself; see `DeviceWorker.about`.
        name: host and CPUs or GPU, "node7/cpu0-15", "node7/gpu3": what logs and tables call it.
        state: "up", "starting" or "out".
        life: grows by one each time its worker is started again.
        prepared: the problem that its gate has the oracle's results of.
        verified, timed, losses: candidates, problems, and reasons why its worker was lost.
        doing: "verify", "time" or "".
        wanted: how many wait to time on it.
    """

    handle: str
    about: Mapping[str, Any]
    name: str = ""
    state: str = "up"
    life: int = 0
    prepared: Problem | None = None
    verified: int = 0
    timed: int = 0
    losses: list[str] = field(default_factory=list)
    doing: str = ""
    wanted: int = 0

    def __post_init__(self) -> None:
        self.name = self.name or f"{self.about['host']}/{self.about['place']}"

    @property
    def group(self) -> tuple[str, int]:
        """Arch and units: devices that agree in these share a table."""
        return str(self.about["arch"]), int(self.about["units"])

    def overlaps(self, other: Device) -> bool:
        """Whether the two use the same CPUs, or the same GPU, of the same machine."""
        return self is other or (
            self.about["boot"] == other.about["boot"]
            and not set(self.about["uses"]).isdisjoint(other.about["uses"])
        )

    def to_dict(self) -> dict[str, Any]:
        """Values of JSON, for reports."""
        names = ("host", "place", "arch", "device", "units", "python")
        return {
            "name": self.name,
            **{name: self.about[name] for name in names},
            "state": self.state,
            "verified": self.verified,
            "timed": self.timed,
            "losses": list(self.losses),
        }


class Floor:
    """Who may use which device now. Safe to call from any thread.

    Args:
        devices: of the fleet.
        executor: carries calls.
        limit_s: a call that takes longer counts as lost.
        on_loss: called with a device, its reason and what became of it: "restarted" or "out".
    """

    def __init__(
        self,
        devices: Sequence[Device],
        executor: Executor,
        *,
        limit_s: float = 900.0,
        on_loss: Callable[[Device, str, str], Any] = lambda device, reason, then: None,
    ) -> None:
        self.devices = list(devices)
        self._executor = executor
        self._limit_s = limit_s
        self._on_loss = on_loss
        self._change = threading.Condition()
        self._closed = False

    def close(self) -> None:
        """Whoever waits for a device gets WorkerLost."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    @property
    def lanes(self) -> int:
        """How many devices in use can be timed at once."""
        chosen: list[Device] = []
        for device in self.devices:
            if device.state != "out" and not any(device.overlaps(other) for other in chosen):
                chosen.append(device)
        return max(1, len(chosen))

    @contextmanager
    def any_device(self, problem: Problem, prefer: Device | None = None) -> Iterator[Device]:
        """A device for verifying a tile of `problem`.

        One that is idle and near no device that is timed or about to be: `prefer` if it is, else
        one that has the oracle's results already.

        Raises:
            WorkerLost: no device is left.
        """
        with self._change:
            while True:
                if self._closed or all(device.state == "out" for device in self.devices):
                    raise WorkerLost("no worker is left that could verify it")
                free = [device for device in self.devices if self._may_verify(device)]
                if free:
                    break
                self._change.wait(_POLL_S)
            device = min(free, key=lambda d: (d is not prefer, d.prepared != problem))
            device.doing = "verify"
            device.prepared = problem
        try:
            yield device
        finally:
            self._free(device)

    @contextmanager
    def timing(self, device: Device) -> Iterator[None]:
        """This device, with nothing else of ours on its CPUs.

        Raises:
            WorkerLost: it is out.
        """
        with self._change:
            device.wanted += 1
            try:
                while device.state != "up" or self._any_busy_near(device):
                    if self._closed or device.state == "out":
                        raise WorkerLost(f"{device.name} is out: {device.losses[-1:]}")
                    self._change.wait(_POLL_S)
                device.doing = "time"
            finally:
                device.wanted -= 1
        try:
            yield
        finally:
            self._free(device)

    def call(self, device: Device, method: str, *arguments: Any) -> Any:
        """The answer of a device that the caller holds.

        Raises:
            WorkerLost: there is none; the worker has been started again, or the device is out.
        """
        future = self._executor.call(device.handle, method, *arguments)
        try:
            return future.result(timeout=self._limit_s)
        except TimeoutError:
            reason = f"{method}: no answer within {self._limit_s:g} s"
        except WorkerLost as lost:
            reason = f"{method}: {lost}"
        self._lost(device, reason)
        raise WorkerLost(f"{device.name}: {reason}")

    def _may_verify(self, device: Device) -> bool:
        if device.state != "up" or device.doing:
            return False
        near = [other for other in self.devices if other.overlaps(device)]
        return not any(other.wanted or other.doing == "time" for other in near)

    def _any_busy_near(self, device: Device) -> bool:
        return any(other.doing for other in self.devices if other.overlaps(device))

    def _free(self, device: Device) -> None:
        with self._change:
            device.doing = ""
            self._change.notify_all()

    def _lost(self, device: Device, reason: str) -> None:
        with self._change:
            device.losses.append(reason)
            device.state, device.prepared = "starting", None
        state, then = "out", "out"
        if len(device.losses) <= MOST_RESTARTS and not self._closed:
            try:
                self._start_again(device)
                state, then = "up", "restarted"
            except WorkerLost as lost:
                then = f"out: {lost}"
        with self._change:
            device.state = state
            device.life += 1
            self._change.notify_all()
        self._on_loss(device, reason, then)

    def _start_again(self, device: Device) -> None:
        self._executor.restart(device.handle)
        try:
            now = self._executor.call(device.handle, "about").result(timeout=self._limit_s)
        except TimeoutError:
            raise WorkerLost("it did not say what it is") from None
        if any(now[name] != device.about[name] for name in ("boot", "uses", "running")):
            raise WorkerLost("it came back as another device, or with other code")


def cpu_text(cpus: Sequence[int]) -> str:
    """Numbers in short: [0, 1, 2, 5] is "0-2,5"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
