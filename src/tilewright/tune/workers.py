"""Arms that live in a process of their own: another revision, environment, table or setting.

`Worker` starts `model/worker.py` and talks to it in JSON lines. The child leads a session of its
own, so that Ctrl-C reaches only this process, which then keeps the finished blocks.

Two processes of the same code differ by where their memory happens to lie, for as long as they
live. So every sample of a contest is taken on buffers that were allocated anew, which makes that
difference part of the noise from block to block; and the control runs in a third process, so that
what is left of it shows as a control that differs, and voids the run.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tilewright import errors
from tilewright.errors import GateError, MeasureError, TilewrightError
from tilewright.measure import ReportedClock, SamplePlan, StateProbe
from tilewright.tune.arms import Contest

__all__ = [
    "WORKER",
    "LogitsCheck",
    "Worker",
    "sample_launches",
    "verify_workers",
    "worker_contests",
]

WORKER = Path(__file__).parents[1] / "model" / "worker.py"
"""The script that a worker process runs."""

# Threads of the arm that ran last spin for a few milliseconds before they sleep.
_PAUSE_S = 0.05
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TAIL = 1500


class Worker:
    """A process that opens one model or one op's products and runs them on request.

    Args:
        name: what messages call this arm.
        opening: what it opens: see `ModelArm` and `OpsArm` in `tilewright.model.worker`.
        source: folder that holds the `tilewright` package to measure; None for this one.
        python: interpreter; None for this one.
        env: further environment variables.

    Raises:
        MeasureError: the process does not start, or loads another package than `source`'s.
        TilewrightError: of the kind that opening raised in the process.
    """

    def __init__(
        self,
        name: str,
        opening: Mapping[str, Any],
        *,
        source: Path | None = None,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.opening = dict(opening)
        source = Path(__file__).parents[2] if source is None else source
        threads = opening.get("threads")
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), *_inherited()]),
            "TQDM_DISABLE": "1",
            **(dict.fromkeys(_THREAD_VARIABLES, str(threads)) if threads else {}),
            **(env or {}),
        }
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=variables,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise MeasureError(f"arm {name}: {python} does not start: {error}") from error
        try:
            self.about = self.ask("open", **self.opening)
            loaded = Path(self.about["source"])
            if not loaded.is_relative_to(source.resolve()) and not loaded.is_relative_to(source):
                raise MeasureError(
                    f"arm {name}: its process loaded the package from {loaded}, not from {source}; "
                    "is another one installed in a way that comes before PYTHONPATH?"
                )
        except BaseException:
            self.kill()
            raise
        self._pause_s = _PAUSE_S if self.about.get("threads", 1) > 1 else 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            TilewrightError: of the kind the request raised there; MeasureError for every other
                kind, and when the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({verb: arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise MeasureError(f"arm {self.name}: its process ended with code {code}{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._error(answer["error"])
        found: dict[str, Any] = answer["ok"]
        return found

    def _error(self, error: Mapping[str, Any]) -> TilewrightError:
        kind, message = str(error["kind"]), f"arm {self.name}: {error['message']}"
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, TilewrightError):
            return known(message)
        return MeasureError(message if kind == "ValueError" else f"{message} ({kind})")

    def _tail(self) -> str:
        self._log.seek(0)
        text = self._log.read().strip()
        return f"; its last words:\n{text[-_TAIL:]}" if text else ""

    def launch(
        self, test: str, *, launches: int = 1, readings: int = 1, cold: bool = False
    ) -> Callable[[], float]:
        """A call that takes one sample of `test`, on new buffers, and returns its microseconds a
        launch."""

        def launch() -> float:
            if self._pause_s:
                time.sleep(self._pause_s)
            answer = self.ask(
                "run", test=test, launches=launches, readings=readings, cold=cold, renew=True
            )
            return float(median(answer["us"]))

        return launch

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = self.ask("tokens", texts=list(texts))["ids"]
        return found

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        found: list[list[int]] = self.ask(
            "greedy", prompts=[list(p) for p in prompts], count=count
        )["ids"]
        return found

    def last(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits [V] after the last of `ids`."""
        raw = base64.b64decode(self.ask("last", ids=list(ids))["logits"])
        return np.frombuffer(raw, np.float32)

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits [T, V] after each of `ids`."""
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            path = Path(folder) / "logits"
            shape = self.ask("logits", ids=list(ids), path=str(path))["shape"]
            return np.fromfile(path, np.float32).reshape(shape)

    def verify(self, seed: int = 0) -> tuple[int, list[str]]:
        """(products verified, what is wrong with those that failed)."""
        answer = self.ask("verify", seed=seed)
        return int(answer["rows"]), list(answer["failures"])

    def recheck(self) -> list[str]:
        """What is wrong with the results of the last timed launches; for products."""
        return list(self.ask("recheck")["failures"])

    def close(self) -> None:
        """End the process by ending its input; kill it if that takes too long."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """End the process and whatever it started, at once."""
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _inherited() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def sample_launches(
    worker: Worker, test: str, *, cold: bool = False, sample_us: float = 20_000.0
) -> tuple[int, int]:
    """(launches a reading, readings a sample) for products, whose launches may be microseconds.

    A reading lasts a tenth of `sample_us` at least, so that the clock's step does not matter.
    """
    us = max(float(worker.ask("run", test=test, cold=cold)["us"][0]), 1e-3)
    us = float(worker.ask("run", test=test, cold=cold, launches=3)["us"][0]) or us
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
        control: another process of A; None runs A itself.
        tests: tests that both know, and their tokens; 0 for a product.
        caches: "as run" for models; "hot", "cold" or both for products.
        post_check: as `measure.compare_many` takes it; None checks a product's last results.
        sample_us: time of one sample of a product.
    """
    workers = [w for w in (a, b, control) if w is not None]
    probe = StateProbe(pids=tuple(w.pid for w in workers))
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
