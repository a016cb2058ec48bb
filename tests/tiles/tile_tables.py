"""A small tile space and tables of it, for an arch that no machine has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.ops.space import Rule, TileSpace
from tilewright.tiles.table import Running, TableHeader, TableRow, TileTable, save_table
from tilewright.tiles.tile import Problem, Tile

ARCH = "test90"
UNITS = 4
RUNNING = Running("cc 1.2, lib 3.0", "abc123", 1, {"wide": ("cc",)})

SPACE = TileSpace(
    name="toy/test",
    fields={"wide": {"tile_k": (32, 64, 128, 256), "stages": (1, 2)}, "lib": {"level": (0, 1)}},
    rules=(
        Rule(
            "tile_k divides K",
            "a tile that does not divide K drops the tail",
            lambda tile, problem: tile.algorithm != "wide" or problem.K % tile.tile_k == 0,
        ),
    ),
    default=lambda problem: Tile.of("wide", tile_k=32, stages=1),
)


def problem(**changed: Any) -> Problem:
    plain = Problem("toy", ARCH, "float32", "Q4_0", "float", 16, 256, 512, 0)
    return replace(plain, **changed)


def wide(tile_k: int = 64, stages: int = 2) -> Tile:
    return Tile.of("wide", tile_k=tile_k, stages=stages)


def header(**changed: Any) -> TableHeader:
    plain = TableHeader(
        ARCH, (ARCH,), UNITS, "Some Chip", "cc 1.2, lib 3.0", "abc123", {"toy": 1},
        "2025-01-31T12:00:00+00:00", "tilewright 0.1.0", ("quiet machine",),
    )  # fmt: skip
    return replace(plain, **changed)


def row(tile: Tile | None = None, **changed: Any) -> TableRow:
    return TableRow(
        problem(**changed).bucketed(), wide() if tile is None else tile, 120.5, 2.25, 20, 0.125, 7,
        {"oracle": 2, "timeout": 1}, "tuned",
    )  # fmt: skip


def table(*rows: TableRow, **changed: Any) -> TileTable:
    return TileTable(header(**changed), rows or (row(),))


def put(folder: Path, *rows: TableRow, file: str = f"{ARCH}.json", **changed: Any) -> Path:
    """Save a table of these rows; the header is the plain one with some fields changed."""
    path = folder / file
    save_table(path, table(*rows, **changed))
    return path
