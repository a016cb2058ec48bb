"""Contests of workers, and the checks before and after their timing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.errors import GateError
from tilewright.measure import MachineState, ReportedClock, SamplePlan, StateProbe
from tilewright.tune.arms import Contest
from tilewright.tune.workers import Worker

__all__ = [
    "LogitsCheck",
    "WorkerProbe",
    "sample_launches",
    "verify_workers",
    "worker_contests",
]


class WorkerProbe(StateProbe):
    """Watches the machine; what the arms' processes use is not counted as others'.

    Args:
        workers: the arms; their processes may be restarted.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)
        super().__init__(pids=self._now())

    def _now(self) -> tuple[int, ...]:
        return tuple({worker.host.pid for worker in self._workers})

    def sample(self) -> MachineState:
        self._pids = self._now()
        return super().sample()


def sample_launches(
    worker: Worker, test: str, *, cold: bool = False, sample_us: float = 20_000.0
) -> tuple[int, int]:
    """(launches a reading, readings a sample) for products, whose launches may be microseconds.

    A reading lasts a tenth of `sample_us` at least, so that the clock's step does not matter.
    """
    us = max(float(worker.ask("run", test=test, cold=cold)["us"][0]), 1e-3)
    several = (
        3 if cold else max(3, min(64, int(1000.0 / us)))
    )  # the first launch pays for what later ones find
    us = float(worker.ask("run", test=test, cold=cold, launches=several)["us"][0]) or us
    launches = 1 if cold else max(1, round(sample_us / 10 / us))
    readings = min(15, max(1, int(sample_us / (us * launches))))
    return launches, readings - (readings + 1) % 2


def worker_contests(
    a: Worker,
    b: Worker,
    control: Worker | None,
    tests: Mapping[str, int],
    *,
    caches: Sequence[str] = ("as run",),
    post_check: Callable[[], Any] | None = None,
    sample_us: float = 20_000.0,
) -> Iterator[Contest]:
    """Contests of two workers.

    Args:
        a, b: the arms.
        control: A in another process; None runs A itself, in the process that all share.
        tests: tests that both know, and their tokens; 0 for a product.
        caches: "as run" for models; "hot", "cold" or both for products.
        post_check: as `measure.compare_many` takes it; None checks a product's last results.
        sample_us: time of one sample of a product.
    """
    workers = [w for w in (a, b, control) if w is not None]
    probe = WorkerProbe(workers)
    for test, tokens in tests.items():
        for cache in caches:
            options: dict[str, Any] = {}
            if not tokens:
                cold = cache == "cold"
                launches, readings = sample_launches(a, test, cold=cold, sample_us=sample_us)
                options = {"launches": launches, "readings": readings, "cold": cold}
            yield Contest(
                test,
                cache,
                a.launch(test, **options),
                b.launch(test, **options),
                control=None if control is None else control.launch(test, **options),
                clock=ReportedClock(),
                plan=SamplePlan(),
                probe=probe,
                post_check=post_check or functools.partial(_recheck, workers),
                tokens=tokens,
            )


def _recheck(workers: Sequence[Worker]) -> str | None:
    faults = [f"{w.name}: {fault}" for w in workers for fault in w.recheck()]
    return "; ".join(faults) or None


def verify_workers(workers: Sequence[Worker], seed: int = 0) -> dict[str, str]:
    """Verify each arm's products by the oracle; what each check said, by the arm's name.

    Raises:
        GateError: a product is wrong, so nothing is timed.
    """
    said = {}
    for worker in workers:
        rows, failures = worker.verify(seed)
        if failures:
            raise GateError(
                f"arm {worker.name}: {len(failures)} of {rows} products are not right, so nothing "
                "is timed\n" + "\n".join(f"FAILED {failure}" for failure in failures[:20])
            )
        said[worker.name] = f"{rows}/{rows} products right"
    return said


class LogitsCheck:
    """Whether arms still compute, after they were timed, the logits they computed before.

    Args:
        workers: the arms, verified and not yet timed.
        ids: what they are fed.
    """

    def __init__(self, workers: Sequence[Worker], ids: Sequence[int]) -> None:
        self._workers, self._ids = list(workers), list(ids)
        self._before = [worker.last(self._ids) for worker in self._workers]

    def __call__(self) -> str | None:
        """What has changed, or None."""
        for worker, before in zip(self._workers, self._before, strict=True):
            now = worker.last(self._ids)
            if not np.array_equal(now, before):
                far = float(np.abs(now.astype(np.float64) - before).max())
                return f"the logits of {worker.name} have changed by up to {far:.2g}"
        return None
