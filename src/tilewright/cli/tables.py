"""`tilewright tables`: look at tile tables, verify them anew, compare, join and export them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import epilog, set_threads, show, status, threads_option

if TYPE_CHECKING:
    from tilewright.tiles.table import TableRow, TileTable

_TABLE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(
    "tables",
    epilog=epilog(
        "tilewright tables show",
        "tilewright tables show --arch sm_90",
        "tilewright tables validate --fix",
        "tilewright tables diff before.json after.json -o md",
        "tilewright tables join gpu0.json gpu1.json --out sm_90.json",
        "tilewright tables export --t4 results.json",
    ),
)
def tables() -> None:
    """Show, verify, compare, join and export the tables that ops take their tiles from."""


@tables.command("show")
@click.argument("files", type=_TABLE, nargs=-1, metavar="[TABLE]...")
@click.option("--arch", help="The tables of another arch, such as sm_90.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["terminal", "md", "json", "jsonl", "csv"]),
    default="terminal",
    show_default=True,
    help="Form of the result.",
)
@threads_option
def show_command(files: Sequence[Path], arch: str | None, output: str, threads: int | None) -> None:
    """The rows of TABLEs, or of those in use here, each with whether it is in force and why not."""
    if files and arch is not None:
        raise click.UsageError("give tables or --arch, not both")
    set_threads(threads)
    from tilewright.report.tables import show_table
    from tilewright.tiles.table import load_table

    for path in _chosen(files, None if arch is None else [arch]):
        table = load_table(path)
        show(show_table(str(path), table, [_state(table, row) for row in table.rows]), output)


@tables.command("validate")
@click.argument("files", type=_TABLE, nargs=-1, metavar="[TABLE]...")
@click.option("--fix", is_flag=True, help="Verify stale rows anew, drop those that are wrong.")
@click.option("--all", "every", is_flag=True, help="Verify rows that are in force too.")
@click.option("--spec", help="Your own op, if the table is of one: file.py:NAME.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the operands.")
@threads_option
def validate_command(
    files: Sequence[Path],
    fix: bool,
    every: bool,
    spec: str | None,
    seed: int,
    threads: int | None,
) -> None:
    """Check that every row of TABLEs, or of those in use here, is legal and verified.

    A row is in force while its table is for this arch and unit count and the kernels, the compiler
    and the op are those under which it passed the gate. --fix verifies the others in a process of
    their own and writes the table; --all runs the gate on every row.

    Exit codes: 0 every row is in force, 1 a table is damaged or of another machine, 3 a row is
    stale, illegal or wrong.
    """
    used = set_threads(threads)
    from tilewright.tiles.table import load_table, problem_text

    faults = 0
    for path in _chosen(files):
        table = load_table(path)
        states = {row.problem: _state(table, row, spec) for row in table.rows}
        bad = {problem: state for problem, state in states.items() if state != _IN_FORCE}
        if not (fix and bad) and not every:
            for problem, state in bad.items():
                click.echo(f"{path}: {problem_text(problem)}: {state}")
            click.echo(f"{path}: {len(states) - len(bad)} of {len(states)} rows in force")
            faults += len(bad)
            continue
        faults += _verify(path, table, fix=fix, every=every, spec=spec, seed=seed, threads=used)
    if faults:
        sys.exit(3)


@tables.command("diff")
@click.argument("a", type=_TABLE)
@click.argument("b", type=_TABLE)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["terminal", "md", "json", "jsonl", "csv"]),
    default="terminal",
    show_default=True,
    help="Form of the result.",
)
def diff_command(a: Path, b: Path, output: str) -> None:
    """What changes from table A to table B: rows and what they were verified with."""
    from tilewright.report.tables import diff_tables
    from tilewright.tiles.table import load_table

    show(diff_tables(load_table(a), load_table(b)), output)


@tables.command("join")
@click.argument("files", type=_TABLE, nargs=-1, required=True, metavar="TABLE...")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True,
              help="The table to write; an older one is replaced.")  # fmt: skip
def join_command(files: Sequence[Path], out: Path) -> None:
    """Write the rows of TABLEs into one: of several GPUs of a kind that were tuned side by side.

    All must be of the same chip, compiler and kernels, and no two may have different rows for the
    same problem.
    """
    from tilewright.tiles.join import join_tables
    from tilewright.tiles.table import load_table, save_table

    joined = join_tables({str(path): load_table(path) for path in files})
    save_table(out, joined)
    click.echo(f"{out}: {len(joined.rows)} rows of {len(files)} tables")


@tables.command("export")
@click.option("--t4", type=click.Path(dir_okay=False, path_type=Path), required=True,
              help="File to write: T4, the exchange format of auto-tuners.")  # fmt: skip
@click.option("--log", type=_TABLE, help="Log of tuning.  [default: of the table in use here]")
@click.option("--run", "run", type=int, help="Only this run of the log.  [default: all]")
def export_command(t4: Path, log: Path | None, run: int | None) -> None:
    """Write every candidate that was tried, with its times, to a T4 file.

    Candidates that the gate rejected are in it, with "invalidity": "correctness".
    """
    from tilewright.errors import TilewrightError
    from tilewright.tiles.table_file import write_atomically
    from tilewright.tune.record import read_events, read_runs
    from tilewright.tune.t4 import to_t4

    if log is None:
        log = _log_in_use()
    runs = [info.run for info in read_runs(log)]
    if run is not None and run not in runs:
        known = ", ".join(map(str, runs)) or "none"
        raise TilewrightError(f"{log} has no run {run}; it has {known}")
    document = to_t4(read_events(log, run))
    write_atomically(t4, json.dumps(document, indent=1, allow_nan=False) + "\n")
    wrong = sum(r["invalidity"] == "correctness" for r in document["results"])
    click.echo(
        f"{t4}: {len(document['results'])} configurations, {wrong} of them wrong, from {log}"
    )


_IN_FORCE = "in force"


def _chosen(files: Sequence[Path], archs: Sequence[str] | None = None) -> Sequence[Path]:
    """The files that were named, else those that lookup considers for archs, or here."""
    from tilewright.errors import TilewrightError
    from tilewright.tiles.local import local_archs
    from tilewright.tiles.table import table_files, user_folder

    if files:
        return files
    archs = local_archs() if archs is None else archs
    found = list(dict.fromkeys(file for arch in archs for file in table_files(arch)))
    if not found:
        raise TilewrightError(
            f"there is no tile table for {' or '.join(archs)}: neither in {user_folder()} nor with "
            "the package; `tilewright tune` makes one"
        )
    return found


def _log_in_use() -> Path:
    from tilewright.device import cpu_device
    from tilewright.tiles.table import user_table_path
    from tilewright.tune.tuner import log_path

    return log_path(user_table_path(cpu_device().arch))


def _specs(arch: str, spec: str | None) -> dict[str, Any]:
    """Ops by name: those that the catalog has for an arch, and one's own."""
    from tilewright.ops.catalog import load_spec, specs_on

    found = specs_on(arch)
    if spec is not None:
        own = load_spec(spec)
        found[own.name] = own
    return found


def _state(table: TileTable, row: TableRow, spec: str | None = None) -> str:
    """Whether `lookup` would use a row on this machine, in words."""
    from tilewright.errors import TileError
    from tilewright.ops.catalog import SPECS
    from tilewright.ops.choose import running, running_of
    from tilewright.tiles.local import local_device
    from tilewright.tiles.table import stale_reason

    device = next((d for arch in table.header.valid_for if (d := local_device(arch))), None)
    if device is None:
        return f"for {', '.join(table.header.valid_for)}, which this machine has not"
    if table.header.units not in (0, device.units):
        return f"for {table.header.units} units, here are {device.units}"
    arch, op = table.header.arch, row.problem.op
    specs = _specs(arch, spec)
    if op not in specs:
        return f"there is no op {op}; name your own with --spec"
    now = running(op, arch) if op in SPECS else running_of(specs[op])
    stale = stale_reason(table.header, row, now)
    if stale:
        return f"stale: {stale}"
    if specs[op].space is None:
        return f"op {op} has no tile space"
    try:
        specs[op].space().check(row.tile, row.problem)
    except TileError as error:
        return f"illegal: {error}"
    return _IN_FORCE


def _verify(
    path: Path,
    table: TileTable,
    *,
    fix: bool,
    every: bool,
    spec: str | None,
    seed: int,
    threads: int,
) -> int:
    """Run the gate on rows; how many were wrong, and are dropped with `fix`."""
    from tilewright.ops.catalog import SPECS
    from tilewright.tiles.table import problem_text, save_table
    from tilewright.tune.isolate import IsolatedGate, sources
    from tilewright.tune.refresh import existing_table, new_header, refresh

    specs = _specs(table.header.arch, spec)
    ops = {row.problem.op: specs[row.problem.op] for row in table.rows if row.problem.op in specs}
    header = new_header(ops.values(), table.header.arch)
    existing_table(path, header)  # of this machine, or an error
    own = {op: spec for op in specs if op not in SPECS and spec is not None}
    with IsolatedGate(sources(own, arch=table.header.arch), seed=seed, threads=threads) as gate:

        def verify(problem: Any, tile: Any) -> Any:
            with status(f"verifying {problem_text(problem)}"):
                gate.prepare(problem)
                return gate.check(problem, tile)

        done = refresh(table, header, specs, verify, every=every)
    for problem, tile, reason in done.dropped:
        what = "dropped" if fix else "wrong"
        click.echo(f"{path}: {problem_text(problem)}: {what} {tile}: {reason}")
    total = done.verified + len(done.dropped)
    click.echo(f"{path}: {done.verified} of {total} rows passed the gate")
    if fix:
        save_table(path, done.table)
        click.echo(f"{path}: written, {len(done.table.rows)} rows in force")
    return len(done.dropped)
