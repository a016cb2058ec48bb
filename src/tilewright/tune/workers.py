"""Arms that live in other processes: models, revisions, environments, tables.

A `Host` is a process that runs `model/worker.py`; a `Worker` is an arm in it. They talk in JSON
lines. A host leads a session of its own, so that Ctrl-C reaches only this process, which then
keeps the finished blocks.

Where memory happens to lie makes two runs of the same code differ by a per cent or two, for as
long as the memory lives. Every sample is therefore taken on buffers that were allocated anew, which
makes that difference part of the noise from block to block. Arms that can share a process do.
Arms that cannot (two revisions, say) differ by the rest of their processes as well: they take
every sample in a process that was started for it, and so does the control.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright import errors
from tilewright.errors import MeasureError, TilewrightError

__all__ = ["WORKER", "Host", "Place", "Pool", "Worker"]

WORKER = Path(__file__).parents[1] / "model" / "worker.py"
"""The script that a worker process runs."""

# Threads of the arm that ran last spin for a few milliseconds before they sleep.
_PAUSE_S = 0.05
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TAIL = 1500
_HERE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """What kind of process an arm needs; arms of equal places may share one.

    Attributes:
        source: folder that holds the `tilewright` package to run; None for this one.
        python: interpreter; None for this one.
        threads: None leaves them to the process.
        env: further environment variables, sorted pairs.
    """

    source: Path | None = None
    python: str | None = None
    threads: int | None = None
    env: tuple[tuple[str, str], ...] = ()


class Host:
    """A process that holds arms.

    Args:
        place: what it runs.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._arms: dict[str, Mapping[str, Any]] = {}
        self._asking = self._sent = False
        self._start()

    def _start(self) -> None:
        place = self.place
        source = _HERE if place.source is None else place.source
        threads = place.threads
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), *_inherited()]),
            "TQDM_DISABLE": "1",
            **(dict.fromkeys(_THREAD_VARIABLES, str(threads)) if threads else {}),
            **dict(place.env),
        }
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")
        python = place.python or sys.executable
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=variables,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise MeasureError(f"interpreter {python} does not start: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def answers(self) -> bool:
        """Whether it can be asked: it runs, and no request was left without its answer, as one
        is that Ctrl-C fell into."""
        return not self._asking and self._process.poll() is None

    def open(self, name: str, opening: Mapping[str, Any]) -> dict[str, Any]:
        """Open an arm; what it says about itself.

        Raises:
            MeasureError: the process loads another package than its place's.
            TilewrightError: of the kind that opening raised in the process.
        """
        about = self.ask(name, "open", **opening, threads=self.place.threads)
        source = (_HERE if self.place.source is None else self.place.source).resolve()
        loaded = Path(about["source"]).resolve()
        if not loaded.is_relative_to(source):
            raise MeasureError(
                f"arm {name}: its process loaded the package from {loaded}, not from {source}; "
                "is another one installed in a way that comes before PYTHONPATH?"
            )
        self._arms[name] = dict(opening)
        return about

    def close_arm(self, name: str) -> bool:
        """Close an arm; True if none is left."""
        if self._arms.pop(name, None) is not None:
            self.ask(name, "close")
        return not self._arms

    def ask(self, arm: str, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its answer.

        An answer that Ctrl-C kept from being read is waited for and dropped before the next request
        is sent: it would be taken for the answer to that.

        Raises:
            TilewrightError: of the kind the request raised there; MeasureError for every other
                kind, and when the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._asking and not self._sent:
            raise MeasureError(f"arm {arm}: an earlier request was cut off; start the run again")
        try:
            if self._asking:
                self._process.stdout.readline()
            self._asking, self._sent = True, False
            request = json.dumps({verb: {"arm": arm, **arguments}})
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            self._sent = True
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            code = self._process.wait()
            raise MeasureError(f"arm {arm}: its process ended with code {code}{self._tail()}")
        self._asking = False
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _error(arm, answer["error"])
        found: dict[str, Any] = answer["ok"]
        return found

    def _tail(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        text = self._log.read().strip()
        return f"; its last words:\n{text[-_TAIL:]}" if text else ""

    def restart(self) -> None:
        """End the process and start another with the same arms."""
        self.close()
        self._asking = self._sent = False
        self._start()
        for name, opening in self._arms.items():
            self.ask(name, "open", **opening, threads=self.place.threads)

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


def _error(arm: str, error: Mapping[str, Any]) -> TilewrightError:
    kind, message = str(error["kind"]), f"arm {arm}: {error['message']}"
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, TilewrightError):
        return known(message)
    return MeasureError(message if kind == "ValueError" else f"{message} ({kind})")


class Worker:
    """An arm in a host.

    Args:
        name: what messages call it; no other arm of the host has it.
        opening: what it opens: see `ModelArm` and `OpsArm` in `tilewright.model.worker`.
        host: the process.
        fresh: take every sample in a process that is started for it.

    Raises:
        TilewrightError: as `Host.open`.
    """

    def __init__(
        self, name: str, opening: Mapping[str, Any], host: Host, *, fresh: bool = False
    ) -> None:
        self.name, self.opening, self.host = name, dict(opening), host
        self._fresh = fresh
        self.about = host.open(name, self.opening)
        self._pause_s = _PAUSE_S if self.about.get("threads", 1) > 1 else 0.0

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its answer: `Host.ask`."""
        return self.host.ask(self.name, verb, **arguments)

    def launch(
        self, test: str, *, launches: int = 1, readings: int = 1, cold: bool = False
    ) -> Callable[[], float]:
        """A call that takes one sample of `test`, on new buffers, and returns its microseconds a
        launch."""

        def launch() -> float:
            if self._fresh:
                self.host.restart()
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


class Pool:
    """Opens arms, and puts those that can share a process into one.

    Args:
        places: of all arms that will be opened. If they are equal, one process holds them all, and
            an arm is its own control. Otherwise each arm has a process of its own, started
            anew for every sample.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.shared = len(set(places)) == 1
        self._hosts: dict[Place, Host] = {}

    @contextmanager
    def open(self, name: str, opening: Mapping[str, Any], place: Place) -> Iterator[Worker]:
        """An arm for as long as the block runs.

        Raises:
            MeasureError, TilewrightError: as `Host` and `Host.open`.
        """
        host = self._hosts.get(place) if self.shared else None
        if host is None:
            host = Host(place)
            if self.shared:
                self._hosts[place] = host
        try:
            yield Worker(name, opening, host, fresh=not self.shared)
        finally:
            if not host.answers:
                host.kill()
            elif host.close_arm(name):
                host.close()
            if not host.answers:
                self._hosts.pop(place, None)


def _inherited() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
