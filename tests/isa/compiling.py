"""Runs the compiler in a process of its own: Triton either compiles or interprets, and the tests'
process may do the other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["HAS_TRITON", "NO_TRITON", "Job", "run_jobs", "run_python"]

HAS_TRITON = importlib.util.find_spec("triton") is not None
NO_TRITON = "triton is not installed: pip install 'tilewright[triton]'"

_JOBS = """
import json, sys
from tilewright.isa.survey import survey
from tilewright.tiles.tile import Problem
from tilewright.tune.tile_arms import parse_tile

found = {}
for name, job in json.load(sys.stdin).items():
    problem = Problem(job["op"], job["arch"], *job["problem"])
    tiles = [parse_tile(job["tile"])] if job["tile"] else []
    (entry,) = survey(job["op"], problem, [job["arch"]], tiles)
    found[name] = entry.as_dict()
json.dump(found, sys.stdout)
"""


@dataclass(frozen=True)
class Job:
    """One tile of an op for one arch; fields that the tile's text lacks are the default's."""

    arch: str
    tile: str = ""
    dtype: str = "float16"
    weight_type: str = "uint4"
    m: int = 512
    n: int = 4096
    k: int = 4096
    group: int = 128
    op: str = "w4a16"
    activations: str = "float"


def run_python(
    code: str, *arguments: str, stdin: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that runs `code`, without TRITON_INTERPRET unless it is asked for."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=stdin,
        env={**own, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )


def run_jobs(jobs: Mapping[str, Job]) -> dict[str, dict[str, Any]]:
    """What `survey` finds for each job, all from one process."""
    listed = {
        name: {
            "op": job.op,
            "arch": job.arch,
            "tile": job.tile,
            "problem": _problem(job),
        }
        for name, job in jobs.items()
    }
    done = run_python(_JOBS, stdin=json.dumps(listed))
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def _problem(job: Job) -> Sequence[Any]:
    return (job.dtype, job.weight_type, job.activations, job.m, job.n, job.k, job.group)
