"""Commands as arms: the wall time of any two programs."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import time

from tilewright.errors import MeasureError, UnsupportedError
from tilewright.measure import ReportedClock, SamplePlan
from tilewright.tune.arms import Contest

__all__ = ["CommandArm", "command_contest"]


class CommandArm:
    """A command whose wall time is measured, process start included.

    Args:
        name: of the arm.
        command: split as a shell would, and run without one.
        time_limit_s: longest run that is waited for; None waits.

    Attributes:
        outputs: SHA-256 of each distinct standard output seen, by number of runs.
    """

    def __init__(self, name: str, command: str, time_limit_s: float | None = None) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise UnsupportedError(f"command {name} is {command!r}: {error}") from error
        if not self._words:
            raise UnsupportedError(f"command {name} is empty; give a program and its arguments")
        self.name, self.command = name, command
        self._limit = time_limit_s
        self.outputs: dict[str, int] = {}

    def __call__(self) -> float:
        """Run it once; its wall time in microseconds.

        Raises:
            MeasureError: it does not start, fails, or runs past its limit.
        """
        start = time.perf_counter_ns()
        try:
            done = subprocess.run(
                self._words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._limit,
                check=False,
            )
        except OSError as error:
            raise MeasureError(f"command {self.name}: {error}; pipes need sh -c '...'") from error
        except subprocess.TimeoutExpired as error:
            raise MeasureError(
                f"command {self.name} ran past its limit of {self._limit:g} s"
            ) from error
        us = (time.perf_counter_ns() - start) / 1e3
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip()[-500:]
            raise MeasureError(
                f"command {self.name} failed with code {done.returncode}: {self.command}"
                + (f"\n{words}" if words else "")
            )
        digest = hashlib.sha256(done.stdout).hexdigest()
        self.outputs[digest] = self.outputs.get(digest, 0) + 1
        return us


def command_contest(a: CommandArm, b: CommandArm, *, same_output: bool = False) -> Contest:
    """A against B.

    Args:
        same_output: after timing, every run of both must have printed the same.
    """

    def check() -> str | None:
        if same_output and len(a.outputs | b.outputs) != 1:
            return f"the runs printed {len(a.outputs | b.outputs)} different outputs"
        return None

    return Contest(
        "wall time", "as run", a, b, clock=ReportedClock(), plan=SamplePlan(), post_check=check
    )
