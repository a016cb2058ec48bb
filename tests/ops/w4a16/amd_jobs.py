"""Tiles that the tests of "amd" share, and the process that runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isa.compiling import run_python

__all__ = ["ARCHS", "TILES", "run_amd"]

ARCHS = ("gfx1151", "gfx1100", "gfx1201", "gfx90a", "gfx942")
_SQUARE: dict[str, Any] = {
    "algorithm": "amd", "block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4,
    "warps_m": 1, "num_stages": 1, "x_path": "shared", "scale": "weights",
}  # fmt: skip
TILES = {
    "square": _SQUARE,
    "ahead": {**_SQUARE, "block_m": 32, "block_k": 32, "num_stages": 2, "scale": "steps"},
    "direct": {**_SQUARE, "block_m": 16, "num_stages": 2, "x_path": "direct", "scale": "steps"},
    "two by two": {**_SQUARE, "block_m": 32, "block_n": 32, "block_k": 128, "warps_m": 2},
    "small": {
        **_SQUARE,
        "block_m": 16,
        "block_n": 16,
        "block_k": 32,
        "num_warps": 1,
        "scale": "steps",
    },
    "long steps": {**_SQUARE, "block_m": 32, "block_k": 256, "num_stages": 2, "scale": "steps"},
}
_SCRIPT = Path(__file__).with_name("run_amd.py")


def run_amd(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What `run_amd.py` finds for each job."""
    done = run_python(_SCRIPT.read_text(), stdin=json.dumps(jobs))
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found
