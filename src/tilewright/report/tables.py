"""Tile tables as people read them: rows with their state, and what differs between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tilewright.report.table import Column, Table
from tilewright.tiles.table import TableRow, TileTable, problem_text, row_key

__all__ = ["diff_tables", "show_table"]

_HEADER = ("arch", "valid_for", "units", "device", "compiler", "kernel_hash", "op_versions")


def show_table(title: str, table: TileTable, states: Sequence[str]) -> Table:
    """A table's rows, one a line, with the header as notes.

    Args:
        title: its file.
        states: of each row: "in force", or why it is not.
    """
    rows = [
        {**row.as_dict(), "problem": problem_text(row.problem), "text": str(row.tile),
         "state": state} for row, state in zip(table.rows, states, strict=True)
    ]  # fmt: skip
    header = table.header
    notes = [
        f"{header.device}, {header.units or 'any number of'} units, {header.compiler}, kernels "
        f"{_short(header.kernel_hash)}; {header.source}, {header.date}"
    ]
    if set(header.valid_for) != {header.arch}:
        notes.append(f"made for {header.arch}, valid for {', '.join(header.valid_for)}")
    return Table(title, _ROWS, rows, notes=[*notes, *header.notes], provenance=asdict(header))


def _short(kernel_hash: str) -> str:
    """The first figures of a hash, or of each op's."""
    parts = (part.rpartition("=") for part in kernel_hash.split(", "))
    return ", ".join(f"{name}{equals}{value[:12]}" for name, equals, value in parts)


_ROWS = (
    Column("problem", "problem"),
    Column("tile", hidden=True),
    Column("text", "tile"),
    Column("median_us", "median us", right=True, show=lambda row: _us(row, "median_us", 5)),
    Column("spread_us", "spread us", right=True, show=lambda row: _us(row, "spread_us", 3)),
    Column("samples", "samples", right=True),
    Column("oracle_error", "error", right=True, show=lambda row: f"{row['oracle_error']:.2g}"),
    Column("tried", "tried", right=True),
    Column("rejected", "rejected", right=True, show=lambda row: str(sum(row["rejected"].values()))),
    Column("source", "source"),
    Column("state", "state"),
)


def diff_tables(a: TileTable, b: TileTable) -> Table:
    """What differs from A to B: header fields, rows added, removed, and changed in their tile."""
    rows = [
        {"what": "header", "problem": name, "a": str(x), "b": str(y)}
        for name, x, y in (
            (name, getattr(a.header, name), getattr(b.header, name)) for name in _HEADER
        )
        if x != y
    ]
    old, new = _by_problem(a), _by_problem(b)
    for key in sorted({*old, *new}):
        row = _change(old.get(key), new.get(key))
        if row is not None:
            rows.append(row)
    kept = sum(old[key].tile == new[key].tile for key in {*old} & {*new})
    notes = [f"{kept} rows have the same tile in both"]
    return Table("", _CHANGES, rows, notes=notes, key="changes")


def _by_problem(table: TileTable) -> Mapping[tuple[Any, ...], TableRow]:
    return {row_key(row.problem): row for row in table.rows}


def _change(old: TableRow | None, new: TableRow | None) -> dict[str, Any] | None:
    if old is not None and new is not None and old.tile == new.tile:
        return None
    one = old or new
    assert one is not None
    what = "added" if old is None else "removed" if new is None else "changed"
    return {"what": what, "problem": problem_text(one.problem), "a": _cell(old), "b": _cell(new)}


def _cell(row: TableRow | None) -> str:
    if row is None:
        return "-"
    return f"{row.tile}, {f'{row.median_us:.5g} us' if row.samples else 'not measured'}"


def _us(row: Mapping[str, Any], name: str, digits: int) -> str:
    return f"{row[name]:.{digits}g}" if row["samples"] else "-"


_CHANGES = (
    Column("what", "what"),
    Column("problem", "problem or field"),
    Column("a", "A"),
    Column("b", "B"),
)
