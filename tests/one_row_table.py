"""A tile table of one row, or of none, that is in force on this machine."""

from __future__ import annotations

from pathlib import Path

from tilewright.device import cpu_device
from tilewright.ops.choose import running_of
from tilewright.ops.contract import Case
from tilewright.ops.mmq.spec import SPEC
from tilewright.tiles.table import TableHeader, TableRow, TileTable, save_table
from tilewright.tiles.tile import Tile

__all__ = ["CASE", "PROBLEM", "write_table"]

ARCH = cpu_device().arch
CASE = Case("mmq", "Q4_1", "float32", 5, 48, 64)
PROBLEM = CASE.problem(ARCH)


def write_table(path: Path, tile: Tile | None, units: int = 1) -> Path:
    running = running_of(SPEC)
    header = TableHeader(
        ARCH, (ARCH,), units, "test", running.compiler, running.kernel_hash,
        {"mmq": running.op_version}, "2026-01-01T00:00:00+00:00", "test",
    )  # fmt: skip
    rows = () if tile is None else (TableRow(PROBLEM.bucketed(), tile, 10.0, 0.1, 9, 1e-15, 3),)
    save_table(path, TileTable(header, rows))
    return path
