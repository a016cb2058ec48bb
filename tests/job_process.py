"""Runs a test's jobs in a process of its own, which compiles: the tests' process may interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.tiles.tile import Tile

__all__ = ["run_script"]


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


def _fields(value: Any) -> Any:
    if isinstance(value, Tile):
        return value.as_dict()
    raise TypeError(f"{type(value).__name__} is no part of a job")
