"""`tilewright tables validate`: which rows serve here, and the gate anew for those that do not.

A row of a table that ships is verified into the user's own table of its chip: what the package
brings is left as it is, and the next version of it replaces nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import note, progress_bar

if TYPE_CHECKING:
    from tilewright.ops.contract import OpSpec
    from tilewright.tiles.table import TableRow, TileTable
    from tilewright.tiles.tile import Problem

__all__ = ["IN_FORCE", "Verifying", "row_states", "validate"]

IN_FORCE = "in force"


@dataclass(frozen=True)
class Verifying:
    """How rows are verified anew.

    Attributes:
        every: rows that are in force too.
        write: write what passed, and drop the rest.
        out: where to; None for the table itself, or the user's own if it ships.
        spec: an op that is not the catalog's.
        seed: of the operands.
        threads: of the kernels on the CPU.
    """

    every: bool
    write: bool
    out: Path | None
    spec: str | None
    seed: int
    threads: int


def validate(paths: Sequence[Path], how: Verifying) -> tuple[int, bool, bool]:
    """Report on tables in the order in which lookup reads them, and verify rows if asked to.

    Returns:
        How many rows are not in force, or wrong; whether a table is left out, for it is of another
        machine or rows to verify are of an op that is not here; and whether Ctrl-C ended it.

    Raises:
        TileError: a table is damaged, or rows of it cannot join those of one's own.
    """
    from tilewright.tiles.table import load_table, problem_text, row_key

    faults, elsewhere = 0, False
    serving: dict[tuple[Any, ...], Path] = {}
    for path in paths:
        table = load_table(path)
        why = _left_out(table, how)
        if why:
            note(f"error: {path}: {why}")
            elsewhere = True
            continue
        states = dict(
            zip((row.problem for row in table.rows), row_states(table, how.spec), strict=True)
        )
        in_place = how.write and _target(path, table.header.arch, how.out) == path
        served = 0
        for problem, state in list(states.items()):
            key = (table.header.arch, row_key(problem))
            if state == IN_FORCE:
                serving.setdefault(key, path)
            elif key in serving and not in_place:
                # An earlier table's row comes first: what this one says is moot. Where the table
                # itself is written, its row would be lost.
                served += 1
                del states[problem]
        bad = {problem: state for problem, state in states.items() if state != IN_FORCE}
        if how.every or (how.write and bad):
            rows = tuple(row for row in table.rows if row.problem in states)
            wrong, interrupted = _verify(path, replace(table, rows=rows), bad, how)
            faults += wrong
            if interrupted:
                return faults, elsewhere, True
            continue
        for problem, state in bad.items():
            click.echo(f"{path}: {problem_text(problem)}: {state}")
        others = f", {served} more served by another table" if served else ""
        click.echo(f"{path}: {len(states) - len(bad)} of {len(states)} rows in force{others}")
        faults += len(bad)
    return faults, elsewhere, False


def row_states(table: TileTable, spec: str | None = None) -> list[str]:
    """Whether `lookup` would use each row on this machine, in words."""
    other = _of_another_machine(table)
    if other:
        return [other] * len(table.rows)
    specs = _specs(table.header.arch, spec)
    return [_row_state(table, row, specs) for row in table.rows]


def _row_state(table: TileTable, row: TableRow, specs: Mapping[str, OpSpec]) -> str:
    from tilewright.errors import TileError
    from tilewright.ops.catalog import SPECS
    from tilewright.ops.choose import running, running_of
    from tilewright.tiles.table import stale_reason

    op = row.problem.op
    if op not in specs:
        return f"there is no op {op}; name your own with --spec"
    now = running(op, table.header.arch) if op in SPECS else running_of(specs[op])
    stale = stale_reason(table.header, row, now)
    if stale:
        return f"stale: {stale}"
    space = specs[op].space
    if space is None:
        return f"op {op} has no tile space"
    try:
        space().check(row.tile, row.problem)
    except TileError as error:
        return f"illegal: {error}"
    return IN_FORCE


def _of_another_machine(table: TileTable) -> str:
    """For which machine a table is, in words; empty if it is for this one."""
    from tilewright.tiles.local import local_device

    device = next((d for arch in table.header.valid_for if (d := local_device(arch))), None)
    if device is None:
        return f"for {', '.join(table.header.valid_for)}, which this machine has not"
    if table.header.units not in (0, device.units):
        return f"for {table.header.units} units, here are {device.units}"
    return ""


def _left_out(table: TileTable, how: Verifying) -> str:
    """Why nothing of a table can be validated here, in words; empty if it can."""
    other = _of_another_machine(table)
    if other:
        return f"the table is {other}; validate it on its own machine"
    unknown = sorted(
        {row.problem.op for row in table.rows} - set(_specs(table.header.arch, how.spec))
    )
    if unknown and (how.write or how.every):
        # Rows of an op that is not here are neither right nor wrong.
        return f"the catalog has no op {', '.join(unknown)}; name yours with --spec"
    return ""


def _specs(arch: str, spec: str | None) -> dict[str, Any]:
    """Ops by name: those that the catalog has for an arch, and one's own."""
    from tilewright.ops.catalog import load_spec, specs_on

    found = specs_on(arch)
    if spec is not None:
        own = load_spec(spec)
        found[own.name] = own
    return found


def _verify(
    path: Path, table: TileTable, bad: Container[Problem], how: Verifying
) -> tuple[int, bool]:
    """Run the gate on rows of a table, of which `bad` are not in force; how many were wrong, and
    whether Ctrl-C ended it."""
    from tilewright.ops.catalog import SPECS
    from tilewright.tiles.table import problem_text, row_key
    from tilewright.tune.isolate import IsolatedGate, sources
    from tilewright.tune.refresh import existing_table, new_header, refresh

    arch = table.header.arch
    specs = _specs(arch, how.spec)
    target = _target(path, arch, how.out)
    own = None
    if how.write and target != path and target.exists():
        own = _own_rows(target, specs)
        held = {row_key(row.problem) for row in own.rows}
        table = replace(
            table, rows=tuple(row for row in table.rows if row_key(row.problem) not in held)
        )
    kept = () if own is None else own.rows
    asked = sum(how.every or row.problem in bad for row in table.rows)
    ops = {row.problem.op for row in (*table.rows, *kept)} & set(specs)
    header = new_header([specs[op] for op in sorted(ops)], arch)
    existing_table(path, header)  # of this machine, or an error
    foreign = {op: how.spec for op in specs if op not in SPECS and how.spec is not None}
    done_rows = 0
    with (
        IsolatedGate(sources(foreign, arch=arch), seed=how.seed, threads=how.threads) as gate,
        progress_bar("verifying", asked) as move,
    ):

        def verify(problem: Any, tile: Any) -> Any:
            nonlocal done_rows
            move(done_rows, asked, problem_text(problem))
            gate.prepare(problem)
            outcome = gate.check(problem, tile)
            done_rows += 1
            return outcome

        done = refresh(table, header, specs, verify, every=how.every, interruptible=True)
    for problem, tile, reason in done.dropped:
        what = "dropped" if how.write else "wrong"
        click.echo(f"{path}: {problem_text(problem)}: {what} {tile}: {reason}")
    total = done.verified + len(done.dropped)
    click.echo(f"{path}: {done.verified} of {total} rows passed the gate")
    if how.write:
        rows = (*kept, *done.table.rows)
        _write(path, target, replace(done.table, rows=rows), done.interrupted)
    return len(done.dropped), done.interrupted


def _target(path: Path, arch: str, out: Path | None) -> Path:
    """Where verified rows of a table go."""
    from tilewright.tiles.table import shipped_folder, user_table_path

    if out is not None:
        return out
    return user_table_path(arch) if path.resolve().parent == shipped_folder().resolve() else path


def _own_rows(target: Path, specs: Mapping[str, OpSpec]) -> TileTable:
    """A table that others' rows are to join: it must be of the kernels that are running."""
    from tilewright.errors import TileError
    from tilewright.tiles.table import load_table, problem_text
    from tilewright.tune.refresh import stale_rows

    table = load_table(target)
    stale = stale_rows(table, specs)
    if stale:
        (row, why), *_ = stale
        raise TileError(
            f"{target} has {len(stale)} rows that are not in force ({problem_text(row.problem)}: "
            f"{why}); run `tilewright tables validate --fix {target}` first, or name another file "
            "with --out"
        )
    return table


def _write(path: Path, target: Path, table: TileTable, interrupted: bool) -> None:
    from tilewright.tiles.table import save_table

    if interrupted and target == path:
        click.echo(f"{path}: left as it was, for rows that were not reached would be lost")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    save_table(target, table)
    click.echo(f"{target}: written, {len(table.rows)} rows in force")
