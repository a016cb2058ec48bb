"""A fleet of threads: each worker has its own toy machine and clock, and dies when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tilewright.tiles.tile import Tile
from tilewright.tune.fleet_floor import WorkerLost
from tilewright.tune.fleet_worker import DeviceWorker
from tilewright.tune.outcome import Outcome, PlantedOutcome
from tune.toy_op import Machine, ScriptedGate


@dataclass
class FakeWorker:
    """One worker.

    Attributes:
        machine: what its tiles cost.
        about: what it says of itself, over what a real one says here.
        verdicts: of its gate, for tiles that do not pass.
        restarts: how often it can be started again.
        starts: why it does not start; "" if it does.
    """

    machine: Machine
    about: dict[str, Any] = field(default_factory=dict)
    verdicts: Mapping[Tile, Outcome] = field(default_factory=dict)
    planted: list[PlantedOutcome] = field(default_factory=list)
    restarts: int = 0
    starts: str = ""
    asked: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    alive: bool = True

    def __post_init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)

    def open(self, setup: Mapping[str, Any]) -> None:
        self.gate = ScriptedGate(self.machine, self.verdicts, wrong_on_purpose=self.planted)
        self.inner = DeviceWorker(
            setup, specs={"toy": self.machine.spec()}, gate=self.gate, clock=self.machine.clock
        )
        self.alive = True


class FakeFleet:
    """An `Executor`.

    Args:
        workers: by handle.
        before: called with handle, method and arguments before each call, in the worker's thread.
    """

    def __init__(
        self,
        workers: Mapping[str, FakeWorker],
        before: Callable[[str, str, tuple[Any, ...]], Any] = lambda handle, method, args: None,
    ) -> None:
        self.workers = dict(workers)
        self.before = before
        self.closed = False
        self._lock = threading.Lock()
        self.now: dict[str, str] = {}
        self.together: list[dict[str, str]] = []

    def start(self, setup: Mapping[str, Any]) -> dict[str, str]:
        for worker in self.workers.values():
            worker.open(setup)
        return {handle: worker.starts for handle, worker in self.workers.items()}

    def name(self, handle: str) -> str:
        return f"worker {handle}"

    def kill(self, handle: str) -> None:
        self.workers[handle].alive = False

    def call(self, handle: str, method: str, *arguments: Any) -> Future[Any]:
        return self.workers[handle].thread.submit(self._call, handle, method, arguments)

    def restart(self, handle: str) -> None:
        worker = self.workers[handle]
        if worker.restarts <= 0:
            raise WorkerLost("its node is gone")
        worker.restarts -= 1
        worker.open({"seed": 0, "sources": {}})

    def close(self) -> None:
        self.closed = True
        for worker in self.workers.values():
            worker.alive = False
            worker.thread.shutdown(wait=True)

    def _call(self, handle: str, method: str, arguments: tuple[Any, ...]) -> Any:
        worker = self.workers[handle]
        with self._noted(handle, method):
            if worker.alive:
                worker.asked.append((method, arguments))
                self.before(handle, method, arguments)
            if worker.alive:
                answer = getattr(worker.inner, method)(*arguments)
                if method == "about":
                    answer = {**answer, "host": handle, "boot": handle, **worker.about}
        if not worker.alive:
            raise WorkerLost("it was killed")
        return answer

    @contextmanager
    def _noted(self, handle: str, method: str) -> Iterator[None]:
        """Keep what runs at the same time, whenever that changes."""
        with self._lock:
            self.now[handle] = method
            self.together.append(dict(self.now))
        try:
            yield
        finally:
            with self._lock:
                del self.now[handle]
