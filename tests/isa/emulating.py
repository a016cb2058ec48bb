"""Jobs of `emulate_jobs.py`, and the process that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from job_process import run_script
from tilewright.ops.w4a16.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Tile

__all__ = ["ARCHS", "emulated", "tile_of", "w4a16"]

ARCHS = ("gfx1151", "gfx1100", "gfx1201", "gfx90a", "gfx942")
SCRIPT = Path(__file__).with_name("emulate_jobs.py")


def tile_of(algorithm: str, **values: Any) -> Tile:
    """A tile of w4a16; fields that are not given take their first value."""
    fields = TRITON_SPACE.fields[algorithm]
    return Tile.of(algorithm, **{name: options[0] for name, options in fields.items()} | values)


def w4a16(arch: str, tile: Tile, dtype: str, shape: tuple[int, ...], *flags: str,
          weight_type: str = "uint4") -> dict[str, Any]:  # fmt: skip
    return {"kernel": "w4a16", "arch": arch, "tile": tile.as_dict(), "dtype": dtype,
            "shape": shape, "flags": flags, "type": weight_type}  # fmt: skip


def emulated(
    jobs: Mapping[str, Any], cache: Path, timeout: float = 280
) -> dict[str, dict[str, Any]]:
    """Every job's result, from one process that compiles: starting it costs more than a kernel."""
    return run_script(SCRIPT, jobs, cache, timeout)
