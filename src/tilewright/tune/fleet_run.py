"""The tuning run of one table by several devices: each takes problems and tunes them by itself.

A problem belongs to one device from its first sample to its verdict: no round, no final and no
comparison mixes two. Candidates of any problem are verified wherever a worker is idle.

A device whose worker is lost gives its problem back. Another device (or the same one, started
again) begins it anew: verdicts of the gate hold everywhere and are kept, samples of another device
are left in the log but not used. A problem that was lost three times is given up with the reason.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.measure import StateProbe
from tilewright.tiles.table import TableRow, forget
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.fleet_floor import Device, Floor, WorkerLost
from tilewright.tune.fleet_hub import Hub
from tilewright.tune.fleet_parts import ATTEMPTS, FleetGate, RemoteBench
from tilewright.tune.host import Log, Progress, Target
from tilewright.tune.outcome import Gatekeeper, Outcome, PlantedOutcome
from tilewright.tune.problem_run import ProblemRun
from tilewright.tune.record import Memory
from tilewright.tune.result import ProblemReport
from tilewright.tune.tuner import Run

__all__ = ["FleetRun"]

_SAMPLES = ("problem", "timing", "sampled", "timed", "compared", "row", "done")


class _Work:
    """Problems that wait, problems that are under way, and their reports."""

    def __init__(self, targets: Sequence[Target], memories: Mapping[Problem, Memory]) -> None:
        self._change = threading.Condition()
        self._waiting = list(targets)
        self._under_way: set[Problem] = set()
        self._closed = False
        self.memories = dict(memories)
        self.begun = 0
        self.losses: dict[Problem, list[str]] = {}
        self.reports: dict[Problem, ProblemReport] = {}

    def take(self) -> tuple[Target, float] | None:
        """The next problem and its part of what is left; waits for one that may come back.

        None when every problem has its report.
        """
        with self._change:
            while not self._waiting and self._under_way and not self._closed:
                self._change.wait()
            if not self._waiting or self._closed:
                return None
            rest = sum(target.share for target in self._waiting)
            target = self._waiting.pop(0)
            self._under_way.add(target.problem)
            self.begun = len(self.reports) + len(self._under_way)
            return target, target.share / rest

    def finish(self, target: Target, report: ProblemReport) -> None:
        with self._change:
            self.reports[target.problem] = report
            self._under_way.discard(target.problem)
            self._change.notify_all()

    def give_back(self, target: Target, memory: Memory | None = None) -> None:
        """The problem is the next to be taken, with what the log knows of it by now."""
        with self._change:
            if memory is not None:
                self.memories[target.problem] = memory
            self._waiting.insert(0, target)
            self._under_way.discard(target.problem)
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()


@dataclass(kw_only=True)
class FleetRun(Run):
    """A run whose gate is a `FleetGate` over the devices of `floor`.

    Attributes:
        floor: the devices, all of the table's arch and units.
        hub: made in the thread that opened the log.
        fleet_gate: the gate.
        timed_on: by problem, the device that timed it.
        given_up: by problem, why no device could finish it.
    """

    floor: Floor
    hub: Hub
    fleet_gate: FleetGate
    timed_on: dict[Problem, str] = field(default_factory=dict)
    given_up: dict[Problem, str] = field(default_factory=dict)

    def stop_now(self) -> bool:
        """Whether calls that are under way are left as they are."""
        return self.hub.interrupts.count > 1 or self._broken

    def log_retry(self, problem: Problem, tile: Tile, reason: str) -> None:
        """Called by the gate, in any thread."""
        self.hub.do(lambda: self.record.add("retried", problem, tile, reason=reason))

    def log_loss(self, device: Device, reason: str, then: str) -> None:
        """Called by the floor, in any thread."""
        self.hub.do(lambda: self.record.add("lost", device=device.name, reason=reason, then=then))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._broken = False
        self._hosts: list[_DeviceHost] = []

    def _probe(self) -> StateProbe | None:
        return None  # this machine times nothing; comparisons hold the state of the one that does

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "fleet": True}

    def _problems(
        self, targets: Sequence[Target], memories: Mapping[Problem, Memory]
    ) -> list[ProblemReport]:
        work = _Work(targets, memories)
        self._hosts = [_DeviceHost(self, d) for d in self.floor.devices if d.state != "out"]
        serve = self._serve_or_close
        served = [_in_thread(functools.partial(serve, host, work)) for host in self._hosts]
        failed: BaseException | None = None
        for one in served:
            try:
                self.hub.wait(one)
            except BaseException as error:
                self._broken, failed = True, failed or error
                work.close()
        if failed is not None:
            raise failed
        self.stopping = self.stopping or self.hub.interrupts.count > 0
        forget()  # a lookup may have read the table while another thread changed it
        found = []
        for target in targets:
            report = work.reports.get(target.problem)
            if report is None:
                reason = "no worker is left"
                self.given_up[target.problem] = reason
                report = ProblemReport(target.problem, target.name, target.share, reason=reason)
            found.append(report)
        return found

    def _serve_or_close(self, host: _DeviceHost, work: _Work) -> None:
        """`_serve`; after an error that is no worker's, no other device may wait for the problem,
        which does not come back."""
        try:
            self._serve(host, work)
        except BaseException:
            work.close()
            raise

    def _serve(self, host: _DeviceHost, work: _Work) -> None:
        """Tune problems on one device until there are none left, or it is out."""
        device = host.device
        while device.state != "out" and (taken := work.take()) is not None:
            target, part = taken
            if device.state == "out":
                work.give_back(target)
                return
            began_us, left_s = self.clock.now_us(), self.left_s
            slice_s = max(self.settings.least_slice_s, left_s * part * self.floor.lanes)
            memory = _of_device(work.memories.get(target.problem, Memory()), device)
            host.begin(target, work.begun)
            try:
                run = _FleetProblem(host, target, memory, min(left_s, slice_s))
                report = run.go()
            except WorkerLost as lost:
                self._take_back(work, target, device, str(lost))
                continue
            report.seconds = (self.clock.now_us() - began_us) / 1e6
            if report.row is not None and memory.done is None:
                report.row = host.stamped(report.row)
            if report.status != "skipped":
                self.timed_on[target.problem] = _device_of(memory) or device.name
                device.timed += memory.done is None
            work.finish(target, report)

    def _take_back(self, work: _Work, target: Target, device: Device, reason: str) -> None:
        """A problem whose device was lost: another turn, or the end of it."""
        problem = target.problem
        losses = work.losses.setdefault(problem, [])
        losses.append(reason)
        last = len(losses) >= ATTEMPTS
        then = "given up" if last else "another turn"

        def log() -> Memory:
            self.record.add(
                "lost", problem, device=device.name, reason=reason, then=then, attempt=len(losses)
            )
            return self.record.recall().get(problem, Memory())

        memory = self.hub.do(log)
        if not last:
            work.give_back(target, memory)
            return
        reason = f"given up: {ATTEMPTS} workers were lost with it: {reason}"
        self.given_up[problem] = reason
        work.finish(target, ProblemReport(problem, target.name, target.share, reason=reason))

    def tell_of(self, host: _DeviceHost, kind: str, text: str) -> None:
        """Progress of one device, in the owner's thread."""
        own, whole = host.progress, self.progress
        whole.index, whole.problem = max(whole.index, own.index), own.problem
        whole.best, whole.best_tile = own.best, own.best_tile
        whole.tried = sum(other.progress.tried for other in self._hosts)
        whole.rejected = sum(other.progress.rejected for other in self._hosts)
        self.tell(kind, f"{host.device.name}: {text}" if text else "")


class _FleetProblem(ProblemRun):
    """A problem whose tiles are verified by the fleet and timed by one device of it."""

    def __init__(self, host: _DeviceHost, target: Target, memory: Memory, slice_s: float) -> None:
        super().__init__(host, target, memory, slice_s)
        self._of = host

    def _open_bench(self) -> RemoteBench:
        host = self._of
        return RemoteBench(
            host.run.floor,
            host.run.hub,
            host.device,
            self._problem,
            self._settings.timing,
            finalists=self._settings.finalists,
            left_us=self._ends_us - host.clock.now_us(),
            give_up=host.run.stop_now,
            stop=host.interrupted,
        )

    def _expect(self, tiles: list[Tile]) -> None:
        fresh = [
            tile
            for tile in tiles
            if tile not in self._memory.outcomes and tile not in self._memory.lost
        ]
        self._of.run.fleet_gate.expect(self._problem, fresh, self._of.device)


class _DeviceHost:
    """The `Host` of the problems that one device tunes."""

    def __init__(self, run: FleetRun, device: Device) -> None:
        self.run = run
        self.device = device
        self.specs = run.specs
        self.strategy = run.strategy
        self.seed = run.seed
        self.units = run.units
        self.settings = run.settings
        self.clock = run.clock
        self.gate: Gatekeeper = _DeviceGate(self)
        self.record: Log = _DeviceLog(self)
        self.progress = Progress()
        self._heard = 0

    @property
    def stopping(self) -> bool:
        return self.run.stopping or self.run.hub.interrupts.count > 0

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._heard = self.run.hub.interrupts.count

    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed and this device's problem has not been told."""
        return self.run.hub.interrupts.count > self._heard or self.run.stop_now()

    def begin(self, target: Target, index: int) -> None:
        self.progress.index, self.progress.problem = index, target.problem
        self.progress.best = self.progress.best_tile = None

    def tell(self, kind: str, text: str = "") -> None:
        self.run.hub.do(lambda: self.run.tell_of(self, kind, text))

    def put(self, row: TableRow) -> None:
        self.run.hub.do(lambda: self.run.put(self.stamped(row)))

    def stamped(self, row: TableRow) -> TableRow:
        """The row with the device that it was timed on."""
        return replace(row, source=f"tuned on {self.device.name}")


class _DeviceGate:
    """The fleet's gate as one device's problems use it."""

    def __init__(self, host: _DeviceHost) -> None:
        self._host = host

    def prepare(self, problem: Problem) -> None:
        pass  # each worker does for itself

    def check(self, problem: Problem, tile: Tile) -> Outcome:
        host = self._host
        return host.run.fleet_gate.check(problem, tile, host.device, host.interrupted)

    def planted(self, problem: Problem) -> list[PlantedOutcome]:
        return self._host.run.fleet_gate.planted(problem)

    def close(self) -> None:
        pass  # the run's to close


class _DeviceLog:
    """The log as one device's problems write it: with the device that each figure is from."""

    def __init__(self, host: _DeviceHost) -> None:
        self._host = host

    def add(
        self, kind: str, problem: Problem | None = None, tile: Tile | None = None, **data: Any
    ) -> None:
        host = self._host
        if kind in _SAMPLES:
            data["device"] = host.device.name
        elif kind in ("passed", "rejected") and problem is not None and tile is not None:
            data["device"] = host.run.fleet_gate.verified_on(problem, tile) or host.device.name
        if data.get("row") is not None:
            data["row"] = {**data["row"], "source": f"tuned on {host.device.name}"}
        host.run.hub.do(lambda: host.run.record.add(kind, problem, tile, **data))


def _of_device(memory: Memory, device: Device) -> Memory:
    """What the log knows, without the samples of other devices."""
    if memory.done is not None:
        return memory
    return replace(
        memory,
        rounds=[row for row in memory.rounds if row.get("device") == device.name],
        compared=[row for row in memory.compared if row.get("device") == device.name],
    )


def _device_of(memory: Memory) -> str:
    """The device of a problem that an earlier part of the run has finished."""
    return "" if memory.done is None else str(memory.done.get("device", ""))


def _in_thread(work: Any) -> Future[None]:
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done
