"""Runs a test's jobs in a process of its own, which compiles: the tests' process may interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tilewright.tiles.tile import Tile

__all__ = ["in_two_runs", "run_script", "some_slow", "two_runs"]


def run_script(
    script: Path, jobs: Mapping[str, Any], cache: Path, timeout: float = 600
) -> dict[str, dict[str, Any]]:
    """Every job's result, from one process: starting it costs more than a kernel.

    Args:
        script: reads the jobs as JSON, tiles as their fields, and writes results by name.
        cache: folder of Triton's cache, the process's own.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(jobs, default=_fields), env=environment,
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def in_two_runs(
    script: Path, jobs: Mapping[str, Any], slow: Container[str], cache: Path, timeout: float = 600
) -> Mapping[str, dict[str, Any]]:
    """The results as `run_script` has them, quick jobs and slow ones each run when first needed."""
    return two_runs(lambda some: run_script(script, some, cache, timeout), jobs, slow)


def two_runs(
    run: Callable[[dict[str, Any]], Mapping[str, dict[str, Any]]],
    jobs: Mapping[str, Any],
    slow: Container[str],
) -> Mapping[str, dict[str, Any]]:
    """What `run` makes of the jobs, quick ones and slow ones each run when first needed."""
    return _TwoRuns(run, jobs, slow)


def some_slow(names: Iterable[str], slow: Container[str]) -> list[Any]:
    """The names as parameters of a test, those among `slow` marked so."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names]


class _TwoRuns(Mapping[str, dict[str, Any]]):
    def __init__(self, run: Any, jobs: Mapping[str, Any], slow: Container[str]) -> None:
        self._run = run
        self._waiting = [
            {name: job for name, job in jobs.items() if (name in slow) is late}
            for late in (False, True)
        ]
        self._names = list(jobs)
        self._found: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        for jobs in self._waiting:
            if name in jobs:
                self._waiting.remove(jobs)
                self._found.update(self._run(jobs))
                break
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _fields(value: Any) -> Any:
    if isinstance(value, Tile):
        return value.as_dict()
    raise TypeError(f"{type(value).__name__} is no part of a job")
