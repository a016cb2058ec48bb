"""The gate and the clock of a fleet, as the tuner's parts know them.

`FleetGate` verifies a tile on any worker of the right arch; when a worker is lost over it, on
another, up to three times. `RemoteBench` takes a problem's samples on one device and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from tilewright.errors import GateError
from tilewright.measure import Block, Comparison
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.fleet_floor import Device, Floor, WorkerLost
from tilewright.tune.fleet_hub import Hub
from tilewright.tune.outcome import Outcome, PlantedOutcome
from tilewright.tune.rounds import LaunchFailed, Timing

__all__ = ["ATTEMPTS", "FleetGate", "RemoteBench", "RemoteLaunchFailed"]

ATTEMPTS = 3
"""A candidate, or a problem, that this many workers were lost with is given up."""

GiveUp = Callable[[], bool]


def _never() -> bool:
    return False


class FleetGate:
    """A `Gatekeeper` over all workers of one group.

    Args:
        floor: the devices.
        hub: of the group.
        on_retry: called with problem, tile and reason when a candidate goes to another worker.
    """

    def __init__(
        self,
        floor: Floor,
        hub: Hub,
        on_retry: Callable[[Problem, Tile, str], Any] = lambda problem, tile, reason: None,
    ) -> None:
        self._floor = floor
        self._hub = hub
        self._on_retry = on_retry
        self._pool = ThreadPoolExecutor(len(floor.devices), thread_name_prefix="verify")
        self._lock = threading.Lock()
        self._jobs: dict[tuple[Problem, Tile], Future[Outcome]] = {}
        self._where: dict[tuple[Problem, Tile], str] = {}

    def prepare(self, problem: Problem) -> None:
        """Nothing: each worker prepares for itself, when its first tile comes."""

    def expect(self, problem: Problem, tiles: Sequence[Tile], near: Device | None = None) -> None:
        """Begin on tiles that `check` will be asked for, on as many workers as there are.

        Args:
            problem: of all of them.
            tiles: in the order in which they will be asked for.
            near: the device that they will be timed on; where it verifies one, it has compiled it.
        """
        with self._lock:
            for tile in tiles:
                key = problem, tile
                if key not in self._jobs:
                    self._jobs[key] = self._pool.submit(self._verify, problem, tile, near)

    def check(
        self,
        problem: Problem,
        tile: Tile,
        near: Device | None = None,
        give_up: GiveUp | None = None,
    ) -> Outcome:
        """Verify a tile; each is verified once, whoever asks.

        Args:
            problem, tile, near: as in `expect`.
            give_up: whether to wait no longer; None means after Ctrl-C.

        Raises:
            GateError: the op's operands or oracle fail.
            WorkerLost: no worker is left.
            KeyboardInterrupt: `give_up` said so.
        """
        self.expect(problem, [tile], near)
        with self._lock:
            job = self._jobs[problem, tile]
        try:
            return self._hub.wait(job, give_up or self._interrupted)
        except WorkerLost:
            with self._lock:
                self._jobs.pop((problem, tile), None)
            raise

    def verified_on(self, problem: Problem, tile: Tile) -> str:
        """Name of the device that verified a tile, told once; "" if none did since."""
        with self._lock:
            return self._where.pop((problem, tile), "")

    def planted(self, problem: Problem) -> list[PlantedOutcome]:
        """Verify an op's planted tiles on every worker, so that each gate is shown to work.

        Returns:
            Each tile once; only those that passed somewhere, if there are any.

        Raises:
            GateError: a worker's check of them failed.
            KeyboardInterrupt: Ctrl-C.
        """
        jobs = [(d, self._pool.submit(self._planted_on, d, problem)) for d in self._floor.devices]
        found: dict[tuple[Tile, str], Outcome] = {}
        passed: list[PlantedOutcome] = []
        for device, job in jobs:
            try:
                rows = self._hub.wait(job, self._interrupted)
            except WorkerLost:
                continue  # what became of it is in the log
            for tile, fault, outcome in rows:
                found[tile, fault] = outcome
                if outcome.passed:
                    fault = f"{fault}; by the gate on {device.name}"
                    passed.append(PlantedOutcome(tile, fault, outcome))
        return passed or [PlantedOutcome(*key, outcome) for key, outcome in found.items()]

    def close(self) -> None:
        """Take no more jobs; those that wait are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _interrupted(self) -> bool:
        return self._hub.interrupts.count > 0

    def _verify(self, problem: Problem, tile: Tile, near: Device | None) -> Outcome:
        reasons: list[str] = []
        while len(reasons) < ATTEMPTS:
            with self._floor.any_device(problem, near) as device:
                try:
                    answer = self._floor.call(
                        device, "check", dict(problem.__dict__), tile.as_dict()
                    )
                except WorkerLost as lost:
                    reasons.append(str(lost))
                    self._on_retry(problem, tile, str(lost))
                    continue
                except Exception as error:
                    raise GateError(f"{device.name}: {type(error).__name__}: {error}") from error
                device.verified += 1
            with self._lock:
                self._where[problem, tile] = device.name
            if "failed" in answer:
                raise GateError(answer["failed"])
            return Outcome.from_dict(answer["outcome"])
        return Outcome(False, "lost", f"{ATTEMPTS} workers were lost with it: {reasons[-1]}")

    def _planted_on(self, device: Device, problem: Problem) -> list[PlantedOutcome]:
        with self._floor.timing(device):
            answer = self._floor.call(device, "planted", dict(problem.__dict__))
        if "failed" in answer:
            raise GateError(f"{device.name}: {answer['failed']}")
        return [
            PlantedOutcome(Tile.from_mapping(tile), fault, Outcome.from_dict(out))
            for tile, fault, out in answer["planted"]
        ]


class RemoteLaunchFailed(LaunchFailed):
    """A tile that had passed the gate raised while a worker timed it."""

    def __init__(self, tile: Tile, reason: str) -> None:
        Exception.__init__(self, reason)
        self.tile = tile


class RemoteBench:
    """What `tilewright.tune.rounds.Bench` is, on a device of the fleet.

    Args:
        floor: the devices.
        hub: of the group.
        device: takes every sample.
        problem: M is a bucket.
        timing: how samples are taken.
        finalists: at most this many will be in the finals.
        left_us: time in which the finals should have ended.
        give_up: whether to leave a call that is under way.
        stop: whether to say, with the samples, that no more are wanted.

    Raises:
        WorkerLost: here and in every method: the device's worker died, or was started again since
            the problem was opened.
        GateError: the worker cannot draw the operands or take samples.
    """

    def __init__(
        self,
        floor: Floor,
        hub: Hub,
        device: Device,
        problem: Problem,
        timing: Timing,
        *,
        finalists: int,
        left_us: float,
        give_up: GiveUp = _never,
        stop: GiveUp = _never,
    ) -> None:
        self._floor = floor
        self._hub = hub
        self._device = device
        self._give_up = give_up
        self._stop = stop
        self._finals_us: list[float] = []
        self.faults: dict[Tile, tuple[str, str]] = {}
        self._life: int | None = None
        opened = self._ask("open", dict(problem.__dict__), asdict(timing), finalists, left_us)
        self.cold = bool(opened["cold"])

    def run(self, incumbent: Tile, tiles: Sequence[Tile], rounds: int) -> tuple[list[Block], bool]:
        """See `Bench.run`."""
        answer = self._ask("sample", incumbent.as_dict(), [t.as_dict() for t in tiles], rounds)
        self._finals_us = answer["finals_us"]
        return [Block.from_dict(block) for block in answer["blocks"]], self._stop()

    def finals(self, incumbent: Tile, finalists: Sequence[Tile]) -> dict[Tile, Comparison]:
        """See `Bench.finals`."""
        answer = self._ask("finals", incumbent.as_dict(), [t.as_dict() for t in finalists])
        self.faults = {Tile.from_mapping(t): (check, why) for t, check, why in answer["faults"]}
        found = map(Comparison.from_dict, answer["comparisons"])
        return dict(zip(finalists, found, strict=True))

    def finals_us(self, finalists: int) -> float:
        """See `Bench.finals_us`."""
        known = self._finals_us[:finalists]
        return known[-1] if known else 0.0

    def _ask(self, method: str, *arguments: Any) -> Any:
        answer: Future[Any] = Future()
        thread = threading.Thread(
            target=self._hold_and_call, args=(answer, method, arguments), daemon=True
        )
        thread.start()
        found = self._hub.wait(answer, self._give_up)
        if isinstance(found, dict) and "raised" in found:
            raise RemoteLaunchFailed(Tile.from_mapping(found["raised"]), found["reason"])
        return found

    def _hold_and_call(self, answer: Future[Any], method: str, arguments: tuple[Any, ...]) -> None:
        """Answers with what came of one call, the device held for it alone."""
        device = self._device
        try:
            with self._floor.timing(device):
                if self._life is None:
                    self._life = device.life
                if device.life != self._life:
                    raise WorkerLost(f"{device.name}: its worker was started again meanwhile")
                answer.set_result(self._floor.call(device, method, *arguments))
        except WorkerLost as lost:
            answer.set_exception(lost)
        except Exception as error:
            answer.set_exception(GateError(f"{device.name}: {type(error).__name__}: {error}"))
