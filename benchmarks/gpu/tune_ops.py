"""Tune mmq, moe, ssd and conv1d on an NVIDIA Hopper GPU, into the table that ships.

    python benchmarks/gpu/tune_ops.py --out sm_90.json --report reports --limit 340

What is tuned, and which tiles are tried, `tune_problems.py` says. First, several processes gate
each tile on a small product, which fills Triton's cache and leaves out tiles that do not pass;
nothing of it is timed. Then one op after another is tuned by `tilewright.tune`, which gates every
tile on the problem itself, times it with cold caches in rounds with the tile in use, and writes a
row when one is faster for certain.

Rows that the table has of other ops stay, if they are of the kernels as they are. The table is
whole after every row; SIGTERM, Ctrl-C and `--limit` end the run with what it has, and its reports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tune_problems import ARCH, OPS, Kind, Wanted, kind_of_problem, shortlists, wanted

from tilewright.ops.catalog import spec_for, specs_on
from tilewright.ops.contract import Case, OpSpec
from tilewright.report.provenance import provenance
from tilewright.tiles.table import load_table, save_table, shipped_folder
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.gate import gate
from tilewright.tune.host import Settings
from tilewright.tune.isolate import IsolatedGate, sources
from tilewright.tune.outcome import Gatekeeper, problem_case
from tilewright.tune.refresh import stale_rows
from tilewright.tune.result import TuneReport
from tilewright.tune.rounds import Timing
from tilewright.tune.tuner import Progress, Target, tune

BUDGETS = {"mmq": 125.0, "moe": 60.0, "ssd": 60.0, "conv1d": 8.0}
"""Seconds of the tuner."""

TILES = {"mmq": (26, 8), "moe": (16, 7), "ssd": (12, 6), "conv1d": (6, 4)}
"""Different tiles that the first kind of an op may compile, and each of its others."""

_REPORT_S = 5.0
_EXPERTS = 16  # of small products
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """A tile to gate on a small product like `problem`, or planted tile `planted` of the op."""

    problem: Problem
    tile: Tile | None = None
    planted: int = 0


def small_case(spec: OpSpec, problem: Problem, tile: Tile) -> Case:
    """A product that the tile may run and that its kernels are compiled for as for `problem`,
    with fewer rows and columns where the rules let it."""
    assert spec.space is not None
    case = problem_case(problem, spec)
    narrow = problem.N if problem.op == "ssd" else min(problem.N, 512)
    for n in dict.fromkeys((narrow, problem.N)):
        for m in dict.fromkeys((min(case.M, 256), case.M)):
            experts = min(case.experts, _EXPERTS)
            found = spec.fit(replace(case, M=m, N=n, experts=experts))
            if spec.space().is_legal(tile, found.problem(problem.arch)):
                return found
    return case


def warm(job: Job) -> tuple[Job, bool, str]:
    """Compile what the gate of a tile runs; whether it passed, and the verdict."""
    spec = spec_for(job.problem.op, job.problem.arch)
    if job.tile is None:
        assert spec.space is not None
        wrong = spec.space().planted[job.planted]
        result = gate(spec.with_run(wrong.run), wrong.tile, wrong.cases[:1])
        return job, not result.passed, f"planted: {result}"
    result = gate(spec, job.tile, [small_case(spec, job.problem, job.tile)])
    return job, result.passed, str(result)


def jobs_of(lists: Mapping[Problem, Sequence[Tile]]) -> list[Job]:
    """Every planted tile, and every tile of each kind once, the first of the lists first."""
    jobs: dict[tuple[Kind, Tile], Job] = {}
    longest = max(map(len, lists.values()), default=0)
    for rank in range(longest):
        for problem, tiles in lists.items():
            if rank < len(tiles):
                key = (kind_of_problem(problem), tiles[rank])
                jobs.setdefault(key, Job(problem, tiles[rank]))
    planted = []
    for op, problem in {problem.op: problem for problem in lists}.items():
        space = spec_for(op, problem.arch).space
        assert space is not None
        planted += [Job(problem, planted=number) for number in range(len(space().planted))]
    return [*planted, *jobs.values()]


@contextmanager
def one_thread_each() -> Iterator[None]:
    """For processes that are started inside: compilers are what keeps the cores busy."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compiled(jobs: Sequence[Job], processes: int, limit_s: float) -> set[tuple[Kind, Tile]]:
    """Fill Triton's cache: the tiles, by kind, that passed on small products in time."""
    began = time.perf_counter()
    right: set[tuple[Kind, Tile]] = set()
    done = 0
    with one_thread_each(), multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.imap_unordered(warm, jobs)
        try:
            for _ in jobs:
                job, good, text = found.next(max(0.1, limit_s - (time.perf_counter() - began)))
                done += 1
                if good and job.tile is not None:
                    right.add((kind_of_problem(job.problem), job.tile))
                if not good:
                    print(f"NOT AS IT SHOULD BE: {text[:400]}", flush=True)
        except multiprocessing.TimeoutError:
            print("compiling took too long; the tuner goes on with what there is")
    seconds = time.perf_counter() - began
    print(f"{done} of {len(jobs)} compiled, {len(right)} right, in {seconds:.0f} s", flush=True)
    return right


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

    def told(now: Progress) -> None:
        if now.kind in ("row", "done"):
            print(
                f"{now.seconds_left:.0f} s left, {now.index}/{now.problems}: {now.text}", flush=True
            )

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
        settings=Settings(
            batch=8,
            finalists=2,
            least_slice_s=2.0,
            timing=Timing(rounds=2, blocks=10, cache="cold"),
        ),
        provenance=provenance(["python", "benchmarks/gpu/tune_ops.py", *sys.argv[1:]]),
    )


def show(report: TuneReport) -> None:
    for found in report.problems:
        p = found.problem
        print(
            p.op, p.weight_type, p.act_dtype, p.M, p.N, p.K, found.status,
            f"x{found.ratio:.3f}" if found.ratio else "", found.winner,
            f"tried {found.tried}/{found.space_size}", dict(found.rejected) or "", found.reason,
            f"{found.seconds:.1f} s",
        )  # fmt: skip


def limits_of(asked: Sequence[Wanted], first: int, others: int) -> dict[Kind, int]:
    """How many tiles each kind may compile: more for the op's first."""
    kinds = dict.fromkeys(kind_of_problem(one.problem) for one in asked)
    return {kind: others if number else first for number, kind in enumerate(kinds)}


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default=",".join(OPS), help="in this order")
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
    asked = {op: problems[: options.most or None] for op, problems in asked.items()}
    lists: dict[Problem, tuple[Tile, ...]] = {}
    for op, problems in asked.items():
        space = spec_for(op, ARCH).space
        assert space is not None
        limits = limits_of(problems, *(min(n, options.tiles) for n in TILES[op]))
        lists |= shortlists([one.problem for one in problems], space(), limits)
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
        report = tune_op(problems, lists, keeper, options, budget_s)
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
