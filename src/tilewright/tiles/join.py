"""Tables that were tuned apart, on several GPUs or on several days, made one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.errors import TileError
from tilewright.tiles.table_file import TableRow, TileTable, problem_text, row_key

__all__ = ["join_tables"]

_ALIKE = ("arch", "valid_for", "units", "device", "compiler")


def join_tables(tables: Mapping[str, TileTable]) -> TileTable:
    """One table with the rows of all.

    What rows were verified with stands in the header, so headers must say the same of it: the chip,
    its units, the compiler, and for every op that both have rows of its version and kernels.

    Args:
        tables: by name, for messages; at least one. The same row may stand in several.

    Returns:
        The rows of all; the latest date, every source and every note.

    Raises:
        TileError: two headers say different things; or two tables have another tile for the same
            problem. The message names both tables.
    """
    (name, table), *others = tables.items()
    held = {row_key(row.problem): (name, row) for row in table.rows}
    header, earlier = table.header, {name: table}
    for other_name, other in others:
        for earlier_name, one in earlier.items():
            _check_alike(earlier_name, one, other_name, other)
        earlier[other_name] = other
        for row in other.rows:
            key = row_key(row.problem)
            first_name, first = held.setdefault(key, (other_name, row))
            if first != row:
                raise TileError(_differ(first_name, first, other_name, row))
        header = replace(
            header,
            kernel_hash=_joined_hashes(header.kernel_hash, other.header.kernel_hash),
            op_versions={**other.header.op_versions, **header.op_versions},
            date=max(header.date, other.header.date),
            source=_each_once(header.source, other.header.source),
            notes=tuple(dict.fromkeys([*header.notes, *other.header.notes])),
        )
    return TileTable(header, tuple(row for _, row in held.values()))


def _check_alike(name: str, table: TileTable, other_name: str, other: TileTable) -> None:
    for field in _ALIKE:
        mine, theirs = getattr(table.header, field), getattr(other.header, field)
        if mine != theirs:
            raise TileError(
                f"{other_name}: {field} is {theirs!r}, that of {name} is {mine!r}; a table has one "
                "header for all its rows: join tables of the same machine and versions"
            )
    if ("=" in table.header.kernel_hash) != ("=" in other.header.kernel_hash):
        raise TileError(
            f"{other_name}: kernel_hash is of one op or of several, that of {name} is not; tune "
            "both with the same version of tilewright"
        )
    for op in sorted(table.header.op_versions.keys() | other.header.op_versions.keys()):
        for what, mine, theirs in (
            ("kernel_hash", table.header.hash_of(op), other.header.hash_of(op)),
            ("version", table.header.op_versions.get(op), other.header.op_versions.get(op)),
        ):
            if mine and theirs and mine != theirs:
                raise TileError(
                    f"{other_name}: {what} of {op} is {theirs}, that of {name} is {mine}; their "
                    "rows are of different kernels: `tilewright tables validate --fix` each first"
                )


def _joined_hashes(mine: str, theirs: str) -> str:
    if "=" not in mine:
        return mine
    pairs = [part.strip() for text in (mine, theirs) for part in text.split(",")]
    return ", ".join(sorted(dict.fromkeys(pairs)))


def _each_once(mine: str, theirs: str) -> str:
    return mine if theirs in mine.split("; ") else f"{mine}; {theirs}"


def _differ(name: str, row: TableRow, other_name: str, other: TableRow) -> str:
    what = f"{row.tile} in {name}, {other.tile} in {other_name}"
    if row.tile == other.tile:
        what = f"{row.tile} with other figures in {name} and {other_name}"
    return (
        f"{problem_text(row.problem)}: {what}; which one is faster only a tuner can tell: leave "
        "one of the rows out, or tune the problem again"
    )
