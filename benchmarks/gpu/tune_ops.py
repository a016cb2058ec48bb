"""Tune mmq, moe, ssd, and conv1d if asked to, on an NVIDIA Hopper GPU for the table that ships.

    python benchmarks/gpu/tune_ops.py --out sm_90.json --report reports --limit 340

What is tuned, and which tiles are tried, `tune_problems.py` says; how, `tuning.py`. All tiles are
warmed up first, and those that do not pass on small products are left out. Then comes one op after
another.

Rows that the table has of other ops stay, if they are of the kernels as they are. The table is
whole after every row; SIGTERM, Ctrl-C and `--limit` end the run with what it has, and its reports.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tune_problems import ARCH, OPS, Wanted, shortlists, wanted
from tuning import compiled, jobs_of, kind_of_problem, settings, show, told

from tilewright.errors import TilewrightError
from tilewright.ops.catalog import spec_for, specs_on
from tilewright.report.provenance import provenance
from tilewright.tiles.table import load_table, save_table, shipped_folder
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.isolate import IsolatedGate, sources
from tilewright.tune.outcome import Gatekeeper
from tilewright.tune.refresh import stale_rows
from tilewright.tune.result import TuneReport
from tilewright.tune.tuner import Target, tune

BUDGETS = {"mmq": 130.0, "moe": 60.0, "ssd": 45.0, "conv1d": 20.0}
"""Seconds of the tuner."""

_LEAST_S = {"mmq": 1.8, "moe": 2.0, "ssd": 4.0, "conv1d": 5.0}
"""What a problem takes at least, most of it its oracle: those that a budget cannot reach are not
begun, and their tiles not compiled."""

_REPORT_S = 5.0


def begin_table(out: Path, base: Path) -> None:
    """Put the rows of `base` that are in force into `out`, unless there is such a table."""
    if out.exists() or not base.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(base, out)
    table = load_table(out)
    stale = stale_rows(table, specs_on(table.header.arch))
    if stale:
        print(f"{len(stale)} of {len(table.rows)} rows of {base} are left out: {stale[0][1]}")
        for row, _ in stale:
            table = table.without(row.problem)
        save_table(out, table)


def tune_op(
    asked: Sequence[Wanted],
    lists: Mapping[Problem, tuple[Tile, ...]],
    keeper: Gatekeeper | None,
    options: argparse.Namespace,
    budget_s: float,
) -> TuneReport:
    """Tune one op into the table."""
    ranks = max(one.rank for one in asked) + 1
    targets = [
        Target(one.problem, 1.0 + (ranks - one.rank) / 100, one.name, lists[one.problem])
        for one in asked
        if lists[one.problem]
    ]
    return tune(
        targets,
        out=options.out,
        budget_s=budget_s,
        strategy="exhaustive",
        on_event=told,
        gate=keeper,
        settings=settings(),
        provenance=provenance(["python", "benchmarks/gpu/tune_ops.py", *sys.argv[1:]]),
    )


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default=",".join(OPS[:3]), help=f"of {OPS}, in this order")
    parser.add_argument("--budget", action="append", default=[], metavar="OP=SECONDS",
                        help=f"of the tuner; else {BUDGETS}")  # fmt: skip
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path(f"{ARCH}.json"), help="the table")
    parser.add_argument("--base", type=Path, default=shipped_folder() / f"{ARCH}.json",
                        help="the table whose rows are kept; else the one that ships")  # fmt: skip
    parser.add_argument("--report", type=Path, help="folder for a report of each op, as JSON")
    parser.add_argument("--most", type=int, default=0, help="problems of each op; 0 for all")
    parser.add_argument("--rows", help="only problems of these numbers of rows, with commas")
    parser.add_argument("--tiles", type=int, default=1000, help="at most so many of a kind")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--warm-limit", type=float, default=100.0, help="seconds")
    options = parser.parse_args(words)
    options.ops = options.ops.split(",")
    options.rows = [int(m) for m in options.rows.split(",")] if options.rows else []
    options.budget = {**BUDGETS, **{op: float(s) for op, s in
                                    (text.split("=") for text in options.budget)}}  # fmt: skip
    return options


def run(options: argparse.Namespace, keeper: Gatekeeper | None = None) -> list[TuneReport]:
    """Warm up, tune op after op, and report; ends early with what it has."""
    began = time.perf_counter()

    def left_s() -> float:
        return float(options.limit - (time.perf_counter() - began))

    asked = {
        op: [one for one in wanted(op) if one.problem.M in (options.rows or (one.problem.M,))]
        for op in options.ops
    }
    for op, problems in asked.items():
        reached = max(1, int(options.budget[op] / _LEAST_S[op]))
        asked[op] = problems[: min(reached, options.most or reached)]
    lists: dict[Problem, tuple[Tile, ...]] = {}
    for op, problems in asked.items():
        space = spec_for(op, ARCH).space
        assert space is not None
        lists |= shortlists(problems, space(), options.tiles)
    begin_table(options.out, options.base)
    right = compiled(jobs_of(lists), options.processes, min(options.warm_limit, left_s()))
    lists = {
        problem: tuple(tile for tile in tiles if (kind_of_problem(problem), tile) in right)
        for problem, tiles in lists.items()
    }
    reports: list[TuneReport] = []
    for op, problems in asked.items():
        budget_s = min(options.budget[op], left_s() - _REPORT_S)
        if budget_s <= 0 or not any(lists[one.problem] for one in problems):
            print(f"{op}: no time, or no tile that is right; left out")
            continue
        try:
            report = tune_op(problems, lists, keeper, options, budget_s)
        except TilewrightError as error:  # such as a planted tile that passed; other ops go on
            print(f"{op}: {error}")
            continue
        reports.append(report)
        show(report)
        print(f"{op}: {report.seconds:.0f} s", flush=True)
        if options.report is not None:
            options.report.mkdir(parents=True, exist_ok=True)
            text = json.dumps(report.to_dict(), allow_nan=False)
            (options.report / f"{op}.json").write_text(text)
        if report.interrupted:
            break
    print(f"{time.perf_counter() - began:.0f} s in all")
    return reports


def main() -> int:
    options = parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with IsolatedGate(sources(arch=ARCH), threads=8) as keeper:
        run(options, keeper)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
