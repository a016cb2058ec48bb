"""What the scripts that tune tiles on a GPU share: warming up, the tuner's settings, reports.

Compiling takes longer than verifying and timing. So several processes gate every tile on a small
product first, which fills Triton's cache and shows which tiles are wrong on this GPU. Nothing of it
is timed. Then the tuner gates every tile on the problem itself, times it with cold caches in rounds
with the tile in use, and writes a row when one is faster for certain.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tilewright.ops.catalog import spec_for
from tilewright.ops.contract import Case, OpSpec
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.apart import Died, apart
from tilewright.tune.gate import gate
from tilewright.tune.host import Progress, Settings
from tilewright.tune.outcome import problem_case
from tilewright.tune.result import TuneReport
from tilewright.tune.rounds import Timing
from tilewright.tune.verify_apart import faulted

__all__ = [
    "Job",
    "Kind",
    "compiled",
    "jobs_of",
    "kind_of_problem",
    "one_thread_each",
    "settings",
    "show",
    "small_case",
    "told",
    "warm",
]

Kind = tuple[str, str, str, int]
"""Op, weight type, dtype and group: what kernels are compiled for."""

_EXPERTS = 16  # of small products
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def kind_of_problem(problem: Problem) -> Kind:
    return (problem.op, problem.weight_type, problem.act_dtype, problem.group)


def settings() -> Settings:
    """Short slices, with cold caches: weights come from memory in a model that is larger than they
    are."""
    return Settings(
        batch=8,
        finalists=2,
        least_slice_s=2.0,
        timing=Timing(rounds=2, blocks=10, cache="cold"),
        keep_rows=True,
    )


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
    """Compile what the gate of a tile runs; whether it is as it should be, and the verdict."""
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
    """Fill Triton's cache: the tiles, by kind, that passed on small products in time.

    A tile after which the GPU's driver reports faults, or that ends its process, takes no other
    tile with it. Prints a right tile that did not pass, and a planted one that did.
    """
    began = time.perf_counter()
    right: set[tuple[Kind, Tile]] = set()
    done = 0
    tasks = [(job,) for job in jobs]
    with one_thread_each():
        for at, found in apart(
            warm, tasks, jobs=processes, limit_s=max(0.1, limit_s),
            spent=lambda found: faulted(found.reason if isinstance(found, Died) else found[2]),
        ):  # fmt: skip
            job, done = jobs[at], done + 1
            good, text = False, f"{job.tile or f'planted tile {job.planted}'}: {found}"
            if not isinstance(found, Died):
                _, good, text = found
            if good and job.tile is not None:
                right.add((kind_of_problem(job.problem), job.tile))
            if not good:
                print(f"NOT AS IT SHOULD BE: {text[:400]}", flush=True)
    if done < len(jobs):
        print("compiling took too long; the tuner goes on with what there is")
    seconds = time.perf_counter() - began
    print(f"{done} of {len(jobs)} compiled, {len(right)} right, in {seconds:.0f} s", flush=True)
    return right


def told(now: Progress) -> None:
    """Print rows as they are written, and problems as they end."""
    if now.kind in ("row", "done"):
        print(f"{now.seconds_left:.0f} s left, {now.index}/{now.problems}: {now.text}", flush=True)


def show(report: TuneReport) -> None:
    """Print what became of each problem, one a line."""
    for found in report.problems:
        p = found.problem
        print(
            p.op, p.weight_type, p.act_dtype, f"{p.M}x{p.N}x{p.K}", found.status,
            f"x{found.ratio:.3f}" if found.status == "improved" else "", found.winner,
            f"tried {found.tried}/{found.space_size}", dict(found.rejected) or "", found.reason,
            f"{found.seconds:.1f} s",
        )  # fmt: skip
