"""Bringing a table up to the kernels that are running: verify stale rows anew, drop the wrong."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tilewright import __version__
from tilewright.errors import TileError, UnsupportedError
from tilewright.ops.catalog import SPECS
from tilewright.ops.choose import compiler, running_of
from tilewright.ops.contract import OpSpec
from tilewright.tiles.local import local_device
from tilewright.tiles.table import (
    TableHeader,
    TableRow,
    TileTable,
    load_table,
    row_key,
    stale_reason,
)
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.outcome import Outcome

__all__ = ["Refreshed", "existing_table", "new_header", "refresh", "stale_rows"]

Verify = Callable[[Problem, Tile], Outcome]


@dataclass(frozen=True)
class Refreshed:
    """A table in force, and what became of the rows that were stale.

    Attributes:
        table: under the running kernels.
        verified: rows that passed the gate again.
        dropped: rows that did not, or are no longer legal: problem, tile, reason.
        interrupted: Ctrl-C ended it; stale rows that were not reached are not in the table.
    """

    table: TileTable
    verified: int = 0
    dropped: tuple[tuple[Problem, Tile, str], ...] = ()
    interrupted: bool = False


def new_header(specs: Iterable[OpSpec], arch: str, *, notes: Iterable[str] = ()) -> TableHeader:
    """The header of a table that this process makes on its device of this arch.

    Raises:
        TileError: an op that is not in the catalog beside others: it has a table of its own.
        UnsupportedError: this machine has no such device.
    """
    running = {spec.name: running_of(spec) for spec in specs}
    hashes = {op: now.kernel_hash for op, now in sorted(running.items())}
    if len(set(hashes.values())) != 1 and not set(hashes) <= set(SPECS):
        raise TileError(
            f"the ops {', '.join(running)} come from different sources; tune an op of your own by "
            "itself, with a table of its own"
        )
    device = local_device(arch)
    if device is None:
        raise UnsupportedError(
            f"arch is {arch!r}; this machine has no such device, and tiles are timed only on the "
            "device that they are for"
        )
    return TableHeader(
        arch=device.arch,
        valid_for=(device.arch,),
        units=device.units,
        device=device.name,
        compiler=compiler(),
        kernel_hash=_joined(hashes),
        op_versions={op: now.op_version for op, now in sorted(running.items())},
        date=_now(),
        source=f"tilewright {__version__}",
        notes=tuple(notes),
    )


def _joined(hashes: Mapping[str, str]) -> str:
    """One text for the hashes of all ops; see `TableHeader.kernel_hash`."""
    different = set(hashes.values())
    if len(different) == 1:
        return different.pop()
    return ", ".join(f"{op}={value}" for op, value in hashes.items())


def existing_table(path: Path, header: TableHeader) -> TileTable:
    """The table at `path`, or an empty one with `header` if there is none.

    Raises:
        TileError: it is damaged, or of another arch or unit count than `header`.
    """
    if not path.exists():
        return TileTable(header)
    table = load_table(path)
    for name in ("arch", "units"):
        theirs, ours = getattr(table.header, name), getattr(header, name)
        if theirs != ours and theirs != 0:
            raise TileError(
                f"{path} is of {name} {theirs}, here it is {ours}: its rows hold only there; "
                "name another table with --out"
            )
    return table


def stale_rows(table: TileTable, specs: Mapping[str, OpSpec]) -> list[tuple[TableRow, str]]:
    """Rows that are not in force, and why: stale, illegal, or of an op that there is not."""
    found = []
    for row in table.rows:
        why = _why_not(table, row, specs)
        if why:
            found.append((row, why))
    return found


def _why_not(table: TileTable, row: TableRow, specs: Mapping[str, OpSpec]) -> str:
    spec = specs.get(row.problem.op)
    if spec is None:
        return f"there is no op {row.problem.op}"
    stale = stale_reason(table.header, row, running_of(spec))
    if stale or spec.space is None:
        return stale or f"op {spec.name} has no tile space"
    try:
        spec.space().check(row.tile, row.problem)
    except TileError as error:
        return str(error)
    return ""


def refresh(
    table: TileTable,
    header: TableHeader,
    specs: Mapping[str, OpSpec],
    verify: Verify,
    *,
    every: bool = False,
    interruptible: bool = False,
) -> Refreshed:
    """The table under `header`, every stale row verified anew.

    A row that passes keeps its figures, and the header's notes say that they were measured with
    older kernels. A row that fails is dropped.

    Args:
        header: of the running kernels.
        specs: ops by name.
        verify: the gate.
        every: verify rows that are in force too.
        interruptible: Ctrl-C ends it with what was verified by then.
    """
    stale = [row for row, _ in stale_rows(table, specs)]
    asked = list(table.rows) if every else stale
    dropped: list[tuple[Problem, Tile, str]] = []
    verified = 0
    try:
        for row in asked:
            if row.problem.op not in specs:
                dropped.append((row.problem, row.tile, f"there is no op {row.problem.op}"))
                continue
            outcome = verify(row.problem, row.tile)
            if outcome.passed:
                verified += 1
            else:
                dropped.append((row.problem, row.tile, f"{outcome.kind}: {outcome.reason}"))
    except KeyboardInterrupt:
        if not interruptible:
            raise
    unreached = asked[verified + len(dropped) :]
    gone = [problem for problem, _, _ in dropped]
    gone += [row.problem for row in unreached if row in stale]
    for problem in gone:
        table = table.without(problem)
    old = table.header
    notes = list(old.notes)
    left = {row_key(row.problem) for row in table.rows}
    renewed = sum(row_key(row.problem) in left for row in stale)
    if renewed:
        notes.append(
            f"{header.date[:10]}: {renewed} rows verified anew; they were timed with kernels "
            f"{old.kernel_hash[:8]}, {old.compiler}"
        )
    held = {row.problem.op for row in table.rows} | set(header.op_versions)
    versions = {op: specs[op].version for op in sorted(held)}
    changed = replace(
        header,
        valid_for=old.valid_for,
        op_versions=versions,
        notes=tuple(dict.fromkeys([*notes, *header.notes])),
    )
    return Refreshed(replace(table, header=changed), verified, tuple(dropped), bool(unreached))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
