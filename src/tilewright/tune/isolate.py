"""Verifying candidates in a process of their own.

One worker process serves many candidates. It is killed and started anew when a candidate crashes
it, hangs past its time limit, grows past its memory limit, is caught writing outside its output
(what such a kernel did to the rest of the process, nobody knows), or makes the GPU's driver report
a fault (every later launch of that process would meet the same one). Each of these is an `Outcome`
with its reason, never an exception.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.device import kind_of
from tilewright.errors import GateError, TilewrightError
from tilewright.ops.catalog import specs_on
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.outcome import Outcome, PlantedOutcome

__all__ = ["IsolatedGate", "Limits", "sources"]

_POLL_S = 0.05
_TAIL = 400
_DISTRUSTED = ("guard-bands",)
# As torch and Triton begin the messages of a driver. A fault is reported by whatever call comes
# next, and by all that follow.
_DRIVER = ("CUDA error", "HIP error", "Triton Error [CUDA]", "Triton Error [HIP]")


@dataclass(frozen=True)
class Limits:
    """What one request to the worker may take.

    Attributes:
        start_s: starting the process and importing what it needs.
        prepare_s: drawing a problem's operands and computing the oracle's results.
        check_s: compiling, running and verifying one candidate.
        memory_bytes: growth of the process during one candidate.
    """

    start_s: float = 120.0
    prepare_s: float = 300.0
    check_s: float = 60.0
    memory_bytes: int = 4 << 30


class _Ended(Exception):
    """The worker is gone; `kind` and `reason` of the Outcome that this makes."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class IsolatedGate:
    """A gatekeeper whose checks run in a worker process.

    Args:
        sources: by op, what the worker loads it from: the op's name for one of the catalog, else
            what `tilewright.ops.catalog.load_spec` reads, such as "my_kernel.py:SPEC".
        seed: draws the operands.
        threads: threads of the kernels.
        limits: time and memory.
        python: interpreter; None for this one.

    Use it as a context, or `close` it.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        seed: int = 0,
        threads: int = 1,
        limits: Limits | None = None,
        python: str | None = None,
    ) -> None:
        self._sources = dict(sources)
        self._seed = seed
        self._threads = threads
        self.limits = limits or Limits()
        self._python = python or sys.executable
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._pending = b""
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """Of the worker, while there is one."""
        return None if self._process is None else self._process.pid

    def prepare(self, problem: Problem) -> None:
        """See `Gatekeeper`. Where the tile in use ends the worker, that is for `check` to find.

        Raises:
            GateError: the op's operands fail on this problem.
            TilewrightError: the worker cannot be started.
        """
        request = {"do": "prepare", "problem": dict(problem.__dict__)}
        try:
            answer = self._ask(request, self.limits.prepare_s, None)
        except _Ended:
            return
        if "failed" in answer:
            self._kill_after(answer["failed"])
            raise GateError(answer["failed"].removeprefix("GateError: "))

    def check(self, problem: Problem, tile: Tile) -> Outcome:
        """Verify a tile; see `tilewright.tune.outcome.DirectGate.check`."""
        start = time.perf_counter()
        request = {"do": "check", "problem": dict(problem.__dict__), "tile": tile.as_dict()}
        try:
            answer = self._ask(request, self.limits.check_s, self.limits.memory_bytes)
        except _Ended as ended:
            return Outcome(False, ended.kind, ended.reason, seconds=time.perf_counter() - start)
        if "failed" in answer:
            self._kill_after(answer["failed"])
            return Outcome(False, "error", answer["failed"], seconds=time.perf_counter() - start)
        outcome = Outcome.from_dict(answer["outcome"])
        if outcome.kind in _DISTRUSTED:
            self._kill()
        self._kill_after(outcome.reason)
        return outcome

    def planted(self, problem: Problem) -> list[PlantedOutcome]:
        """See `Gatekeeper`.

        Raises:
            GateError: the worker died over it.
        """
        request = {"do": "planted", "problem": dict(problem.__dict__)}
        try:
            answer = self._ask(request, self.limits.prepare_s, None)
        except _Ended as ended:
            answer = {"failed": ended.reason}
        if "failed" in answer:
            raise GateError(f"{problem.op}: verifying its planted tiles failed: {answer['failed']}")
        return [
            PlantedOutcome(Tile.from_mapping(tile), fault, Outcome.from_dict(outcome))
            for tile, fault, outcome in answer["planted"]
        ]

    def close(self) -> None:
        """End the worker."""
        self._kill()

    def __enter__(self) -> IsolatedGate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self, request: dict[str, Any], limit_s: float, memory_bytes: int | None
    ) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._send({**request, "limit_s": limit_s, "memory_bytes": memory_bytes})
            return self._receive(limit_s, memory_bytes)
        except KeyboardInterrupt:
            self._kill()  # an answer that nobody waits for must not be taken for the next one
            raise

    def _start(self) -> None:
        self._kill()
        root = str(Path(__file__).parents[2])
        paths = [root, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
        self._errors = tempfile.TemporaryFile()
        self._pending = b""
        try:
            self._process = subprocess.Popen(
                [self._python, "-m", "tilewright.tune.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
                start_new_session=True,  # Ctrl-C is the tuner's to handle
            )
        except OSError as error:
            raise TilewrightError(f"{self._python} cannot be started: {error}") from error
        self.starts += 1
        try:
            self._send(
                {
                    "threads": self._threads,
                    "seed": self._seed,
                    "sources": self._sources,
                    "parent": os.getpid(),
                }
            )
            answer = self._receive(self.limits.start_s, None)
        except _Ended as ended:
            raise TilewrightError(
                f"the process that verifies candidates does not start: {ended.reason}"
            ) from None
        if not answer.get("ready"):
            raise TilewrightError(f"the process that verifies candidates answered {answer}")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer that does not come says why

    def _receive(self, limit_s: float, memory_bytes: int | None) -> dict[str, Any]:
        """The next answer.

        Raises:
            _Ended: there is none: the worker crashed, or was killed for its time or memory.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        before = _resident_bytes(self._process.pid)
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if ready.select(_POLL_S):
                    piece = os.read(self._process.stdout.fileno(), 1 << 16)
                    if not piece:
                        raise self._crashed()
                    self._pending += piece
                    continue
                if time.monotonic() > deadline:
                    self._kill()
                    raise _Ended("timeout", f"no answer within {limit_s:g} s; it was ended")
                now = _resident_bytes(self._process.pid)
                if memory_bytes is not None and now is not None and before is not None:
                    grown = now - before
                    if grown > memory_bytes:
                        self._kill()
                        raise _Ended(
                            "memory",
                            f"it had taken {grown / 2**20:.0f} MiB, "
                            f"{memory_bytes / 2**20:.0f} MiB are allowed; it was ended",
                        )
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _crashed(self) -> _Ended:
        assert self._process is not None
        code = self._process.wait()
        how = f"exit code {code}"
        if code < 0:
            how = signal.Signals(-code).name
        if code == -signal.SIGALRM:
            return _Ended("timeout", "it did not end by itself after its time limit")
        tail = self._tail()
        self._kill()
        return _Ended("crash", f"its process ended with {how}{tail}")

    def _tail(self) -> str:
        """The last words of the worker's standard error."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _TAIL))
        text = self._errors.read().decode(errors="replace").strip()
        return f": {' '.join(text.split())}" if text else ""

    def _kill_after(self, reason: str) -> None:
        """End the worker if the GPU's driver has reported a fault in it."""
        if any(text in reason for text in _DRIVER):
            self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except BrokenPipeError:
                        pass
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def sources(own: Mapping[str, str] | None = None, *, arch: str = "cpu") -> dict[str, str]:
    """What a worker loads each op of the catalog from, and those of one's own.

    Args:
        own: by op, what `tilewright.ops.catalog.load_spec` reads; a path is made absolute.
        arch: the device that the catalog's ops run on.
    """
    kind = kind_of(arch)
    found = {op: op if kind == "cpu" else f"{op}@{kind}" for op in specs_on(arch)}
    for op, text in (own or {}).items():
        path, colon, name = text.rpartition(":")
        is_file = bool(colon) and Path(path).is_file()
        found[op] = f"{Path(path).resolve()}:{name}" if is_file else text
    return found


def _resident_bytes(pid: int) -> int | None:
    """Memory that a process holds; None where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import psutil

        return int(psutil.Process(pid).memory_info().rss)
    except Exception:  # not installed, or the process is gone
        return None
