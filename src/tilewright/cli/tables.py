"""`tilewright tables`: look at tile tables, verify them anew, compare, join and export them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from tilewright.cli.common import epilog, set_threads, show, threads_option
from tilewright.cli.params import ReportPath, SeedParam

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


@tables.command("show", short_help="Rows, and whether each is in force.")
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
@click.option("--spec", help="Your own op, if a table is of one: file.py:NAME.")
@threads_option
def show_command(
    files: Sequence[Path], arch: str | None, output: str, spec: str | None, threads: int | None
) -> None:
    """The rows of TABLEs, or of those in use here, each with whether it is in force and why not."""
    if files and arch is not None:
        raise click.UsageError("give tables or --arch, not both")
    set_threads(threads)
    from tilewright.cli.validated import row_states
    from tilewright.report.tables import show_table
    from tilewright.tiles.table import load_table

    for path in _chosen(files, None if arch is None else [arch]):
        table = load_table(path)
        show(show_table(str(path), table, row_states(table, spec)), output)


@tables.command("validate", short_help="Check that every row is legal and verified.")
@click.argument("files", type=_TABLE, nargs=-1, metavar="[TABLE]...")
@click.option("--fix", is_flag=True, help="Verify stale rows anew, drop those that are wrong.")
@click.option("--all", "every", is_flag=True, help="Verify rows that are in force too.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path),
              help="The table that --fix writes.  [default: the one it reads; for one that ships, "
              "your own]")  # fmt: skip
@click.option("--spec", help="Your own op, if the table is of one: file.py:NAME.")
@click.option("--seed", type=SeedParam(), default=0, show_default=True, help="Of the operands.")
@threads_option
def validate_command(
    files: Sequence[Path],
    fix: bool,
    every: bool,
    out: Path | None,
    spec: str | None,
    seed: int,
    threads: int | None,
) -> None:
    """Check that every row of TABLEs, or of those in use here, is legal and verified.

    A row is in force while its table is for this arch and unit count and the kernels, the compiler
    and the op are those under which it passed the gate. --fix verifies the others in a process of
    their own and writes the table; rows of a table that ships go to your own table of its chip.
    --all runs the gate on every row. Ctrl-C ends either with what was verified by then.

    Exit codes: 0 every row is in force, 1 a table is damaged or of another machine, 3 a row is
    stale, illegal or wrong.
    """
    from tilewright.cli.validated import Verifying, validate

    if out is not None and not fix:
        raise click.UsageError("--out says where --fix writes; give both")
    how = Verifying(every, fix, out, spec, seed, set_threads(threads))
    chosen = _chosen(files)
    if out is not None and len(chosen) > 1:
        raise click.UsageError(f"--out takes one table, here are {len(chosen)}; name it")
    faults, elsewhere, interrupted = validate(chosen, how)
    if elsewhere:
        sys.exit(1)
    if faults:
        sys.exit(3)
    if interrupted:
        sys.exit(130)


@tables.command("diff", short_help="What changes from table A to table B.")
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


@tables.command("join", short_help="Write the rows of several tables into one.")
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
    tables = "1 table" if len(files) == 1 else f"{len(files)} tables"
    click.echo(f"{out}: {len(joined.rows)} rows of {tables}")


@tables.command("export", short_help="Write all that was tried to a T4 file.")
@click.option("--t4", type=ReportPath(), required=True,
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


def _chosen(files: Sequence[Path], archs: Sequence[str] | None = None) -> Sequence[Path]:
    """The files that were named, else those that lookup considers for archs, or here."""
    from tilewright.errors import TilewrightError
    from tilewright.tiles.local import local_archs
    from tilewright.tiles.table import shipped_folder, table_files, user_folder

    if files:
        return files
    archs = local_archs() if archs is None else archs
    found = list(dict.fromkeys(file for arch in archs for file in table_files(arch)))
    if not found:
        shipped = ", ".join(sorted(file.stem for file in shipped_folder().glob("*.json")))
        raise TilewrightError(
            f"there is no tile table for {' or '.join(archs)}: neither in {user_folder()} nor with "
            f"the package; `tilewright tune` makes one, and those of the package are for {shipped}"
        )
    return found


def _log_in_use() -> Path:
    from tilewright.device import cpu_device
    from tilewright.tiles.table import user_table_path
    from tilewright.tune.tuner import log_path

    return log_path(user_table_path(cpu_device().arch))
