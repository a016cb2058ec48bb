"""The tuner: verify candidates, time those that passed, keep what is faster for certain.

For each problem, the one with the largest share of the time first::

    incumbent   what lookup gives now; it has to pass the gate like any other
    search      batches of candidates from the space's rules: each is compiled and verified in a
                process of its own, those that pass are timed here in rounds with the incumbent
    finals      the best few against the incumbent on fresh paired data
    table       changed only if a finalist is FASTER (or DISJOINT and faster) and the outputs that
                were timed are right

The best of many noisy figures is a lucky one, so nothing of the search's own timing decides:
it only picks who is measured again. Everything is logged as it happens; a run that ended early
continues from its log.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilewright.device import cpu_device
from tilewright.errors import GateError, UnsupportedError
from tilewright.measure import Clock, CpuClock, EventClock, StateProbe
from tilewright.ops.catalog import SPECS, specs_on
from tilewright.ops.contract import OpSpec
from tilewright.tiles.local import INTERPRETER
from tilewright.tiles.table import (
    TableHeader,
    TableRow,
    TileTable,
    forget,
    is_near,
    problem_text,
    save_table,
    user_table_path,
)
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.host import Progress, Settings, Target, leaves_threads
from tilewright.tune.isolate import IsolatedGate, sources
from tilewright.tune.outcome import Gatekeeper, Outcome
from tilewright.tune.problem_run import ProblemRun, look_up, row_from
from tilewright.tune.record import Memory, Record
from tilewright.tune.refresh import existing_table, new_header, refresh, stale_rows
from tilewright.tune.result import PlantedReport, ProblemReport, TuneReport
from tilewright.tune.rounds import state_probe
from tilewright.tune.search import STRATEGIES

__all__ = [
    "Progress",
    "Run",
    "Settings",
    "Target",
    "leaves_threads",
    "log_path",
    "ordered_targets",
    "plan",
    "tune",
]


def log_path(table: Path) -> Path:
    """Where the log of a table is, unless it is put elsewhere."""
    return table.with_suffix(".tune.sqlite")


def tune(
    problems: Sequence[Problem | Target],
    *,
    specs: Mapping[str, OpSpec] | None = None,
    out: Path | None = None,
    log: Path | None = None,
    budget_s: float = 60.0,
    strategy: str = "local",
    seed: int = 0,
    resume: bool = False,
    on_event: Callable[[Progress], Any] | None = None,
    settings: Settings | None = None,
    gate: Gatekeeper | None = None,
    clock: Clock | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> TuneReport:
    """Find faster tiles for `problems` and write those that are certain into a table.

    Args:
        problems: what to tune.
        specs: ops by name: one of your own; None for those of the catalog.
        out: the table; None for where `lookup` finds it. Its other rows are kept; rows that are
            stale are verified anew first.
        log: the log; None for `log_path(out)`.
        budget_s: time in seconds, all problems together; verifying stale rows and planted tiles
            comes before it.
        strategy: "local", "random" or "exhaustive".
        seed: draws operands, candidates and orders.
        resume: continue the newest run of the log that was made with the same kernels, seed and
            strategy: what it finished is not done again.
        on_event: called with the state of the run; the object is reused.
        settings: the rest.
        gate: verifies candidates; None starts a worker process for ops of the catalog.
        clock: None is the one of the problems' device.
        provenance: kept in the report and the log.

    Returns:
        The report. Ctrl-C ends the search; the best candidates found by then still get their
        finals, and a second Ctrl-C ends those too. Rows written before are kept.

    Raises:
        TileError: the table at `out` is damaged, or of another arch or unit count.
        UnsupportedError: an unknown strategy or op, or no problem.
        GateError: a planted wrong tile passed the gate: nothing it says can be relied on.
        TilewrightError: the log belongs to another program or another running tuner.
    """
    if strategy not in STRATEGIES:
        raise UnsupportedError(f"strategy is {strategy!r}; use one of {', '.join(STRATEGIES)}")
    arch = _arch(problems)
    specs = specs_on(arch) if specs is None else specs
    targets = ordered_targets(problems, specs)
    ops = [target.problem.op for target in targets]
    header = _header(targets, specs)
    out = _table_path(targets, out)
    log = log_path(out) if log is None else log
    existing_table(out, header)  # an error of the table comes before a log beside it
    with Record(log) as record:
        worker = _worker(ops, arch, seed) if gate is None else None
        run = Run(
            specs=specs,
            budget_s=budget_s,
            strategy=strategy,
            seed=seed,
            units=header.units,
            settings=settings or Settings(),
            clock=_clock(header.arch) if clock is None else clock,
            on_event=on_event,
            gate=gate if worker is None else worker,  # type: ignore[arg-type]
            record=record,
            table=TileTable(header),
            table_path=out,
            report=TuneReport(
                header, {}, table=str(out), log=str(log), provenance=provenance or {}
            ),
        )
        try:
            return run.go(targets, resume)
        finally:
            if worker is not None:
                worker.close()


def plan(
    problems: Sequence[Problem | Target],
    *,
    specs: Mapping[str, OpSpec] | None = None,
    out: Path | None = None,
    log: Path | None = None,
    settings: Settings | None = None,
) -> TuneReport:
    """What `tune` would begin with: its problems in order, the tile in use and the candidates of
    each. Nothing is run or written.

    Raises:
        TileError, UnsupportedError: as `tune`.
    """
    specs = specs_on(_arch(problems)) if specs is None else specs
    settings = settings or Settings()
    targets = ordered_targets(problems, specs)
    header = _header(targets, specs)
    out = _table_path(targets, out)
    log = log_path(out) if log is None else log
    existing_table(out, header)
    report = TuneReport(header, {}, table=str(out), log=str(log))
    forget()
    for target in targets:
        spec = specs[target.problem.op]
        found = ProblemReport(target.problem, target.name, target.share)
        if spec.space is not None:
            look_up(found, spec, header.units)
            found.space_size = len(target.candidates(spec.space(), settings.allow))
        report.problems.append(found)
    return report


def ordered_targets(
    problems: Sequence[Problem | Target], specs: Mapping[str, OpSpec]
) -> list[Target]:
    """Bucketed, equal ones joined, the largest share first, shares summing to 1."""
    joined: dict[Problem, Target] = {}
    for given in problems:
        target = given if isinstance(given, Target) else Target(given)
        key = target.problem.bucketed()
        if key.op not in specs:
            raise UnsupportedError(f"op is {key.op!r}; there are {', '.join(specs)}")
        known = joined.get(key)
        share = target.share + (known.share if known else 0.0)
        name, tiles = target.name, target.tiles
        if known is not None:
            # Where one of them asks for the whole space, so does the joined one.
            name, tiles = known.name, known.tiles and tiles and (*known.tiles, *tiles)
        joined[key] = Target(key, share, name, tiles)
    total = sum(target.share for target in joined.values())
    if not joined or not total > 0:
        raise UnsupportedError("there is no problem to tune; name at least one with a share > 0")
    order = sorted(joined.values(), key=lambda target: -target.share)
    return [replace(target, share=target.share / total) for target in order]


def _arch(problems: Sequence[Problem | Target]) -> str:
    plain = [given.problem if isinstance(given, Target) else given for given in problems]
    arches = sorted({problem.arch for problem in plain})
    if len(arches) > 1:
        raise UnsupportedError(f"the problems are for {', '.join(arches)}; tune one arch at a time")
    return arches[0] if arches else cpu_device().arch


def _header(targets: Sequence[Target], specs: Mapping[str, OpSpec]) -> TableHeader:
    ops = dict.fromkeys(target.problem.op for target in targets)
    arch = targets[0].problem.arch
    # The rows of the catalog's other ops stay in the table, so the header states their kernels too.
    others = specs_on(arch) if all(op in SPECS for op in ops) else {}
    own = {op: specs[op] for op in ops}
    return new_header({**others, **own}.values(), arch)


def _table_path(targets: Sequence[Target], out: Path | None) -> Path:
    """`out`, or where `lookup` looks: an op that is not in the catalog has a table of its own."""
    if out is not None:
        return out
    problem = targets[0].problem
    return user_table_path(problem.arch, None if problem.op in SPECS else problem.op)


def _clock(arch: str) -> Clock:
    return CpuClock() if arch in (cpu_device().arch, INTERPRETER) else EventClock()


def _worker(ops: Sequence[str], arch: str, seed: int) -> IsolatedGate:
    own = [op for op in ops if op not in SPECS]
    if own:
        raise UnsupportedError(
            f"op {own[0]} is not in the catalog: pass gate=IsolatedGate(sources({{{own[0]!r}: "
            "'file.py:NAME'})) so that the worker process can load it"
        )
    import torch

    return IsolatedGate(sources(arch=arch), seed=seed, threads=torch.get_num_threads())


@dataclass
class Run:
    """The state of one call of `tune`; the `Host` of its problems."""

    specs: Mapping[str, OpSpec]
    budget_s: float
    strategy: str
    seed: int
    units: int
    settings: Settings
    clock: Clock
    on_event: Callable[[Progress], Any] | None
    gate: Gatekeeper
    record: Record
    table: TileTable
    table_path: Path
    report: TuneReport
    progress: Progress = field(default_factory=Progress)
    stopping: bool = False

    def __post_init__(self) -> None:
        self._started_us = self._budget_from_us = self.clock.now_us()
        # However small the budget, there is room for the first problem.
        least_s = min(self.settings.least_slice_s, self.budget_s / 2)
        self.settings = replace(self.settings, least_slice_s=least_s)
        forget()  # the incumbents are those of the files as they are now

    @property
    def left_s(self) -> float:
        return self.budget_s - (self.clock.now_us() - self._budget_from_us) / 1e6

    def tell(self, kind: str, text: str = "") -> None:
        self.progress.kind = kind
        self.progress.seconds_left = max(0.0, self.left_s)
        if text:
            self.progress.text = text
        if self.on_event is not None:
            self.on_event(self.progress)

    def put(self, row: TableRow) -> None:
        self.table = self.table.with_row(row)
        self._save()
        self.tell("row", f"wrote {problem_text(row.problem)}")

    def go(self, targets: list[Target], resume: bool) -> TuneReport:
        """Every problem, and the report."""
        report = self.report
        report.settings = {**self._settings(), "resume": resume}
        probe = self._probe()
        self.progress.problems = len(targets)
        memories = self._begin(resume)
        try:
            self._bring_up_to_date(memories)
            if self.settings.planted:
                self._planted([target.problem for target in targets])
        except KeyboardInterrupt:
            self.stopping = True
        if probe is not None:
            report.machine["before"] = probe.sample().to_dict()
        self._budget_from_us = self.clock.now_us()
        report.problems += self._problems(targets, memories)
        self._hold(report.problems)
        if probe is not None:
            report.machine["after"] = probe.sample().to_dict()
        report.interrupted = self.stopping
        report.header = self.table.header
        report.seconds = (self.clock.now_us() - self._started_us) / 1e6
        self.record.add("interrupted" if self.stopping else "finished")
        self.tell("finished", "done")
        return report

    def _probe(self) -> StateProbe | None:
        """Watches the machine that tiles are timed on."""
        return state_probe(self.clock)

    def _hold(self, problems: Sequence[ProblemReport]) -> None:
        """Give tiles that stay in use a row, where one near would hide them or all are wanted."""
        for problem in problems:
            held = problem.held
            if held is None or problem.row is not None:
                continue
            known = self.table.row(held.problem)
            if known is not None:
                problem.row = held if known == held else None
            elif self.settings.keep_rows or any(
                is_near(held.problem, row) for row in self.table.rows
            ):
                problem.row = held
                self.put(held)

    def _problems(
        self, targets: Sequence[Target], memories: Mapping[Problem, Memory]
    ) -> list[ProblemReport]:
        """Tune each of them."""
        found, shares = [], 1.0
        for index, target in enumerate(targets, 1):
            self.progress.index, self.progress.problem = index, target.problem
            self.progress.best = self.progress.best_tile = None
            memory = memories.get(target.problem, Memory())
            began_us, left_s = self.clock.now_us(), self.left_s
            fair_s = left_s * target.share / max(shares, target.share)
            slice_s = min(left_s, max(self.settings.least_slice_s, fair_s))
            shares -= target.share
            problem = ProblemRun(self, target, memory, slice_s).go()
            problem.seconds = (self.clock.now_us() - began_us) / 1e6
            found.append(problem)
        return found

    def _settings(self) -> dict[str, Any]:
        settings, timing = self.settings, self.settings.timing
        return {
            "budget_s": self.budget_s,
            "strategy": self.strategy,
            "seed": self.seed,
            "units": self.units,
            "batch": settings.batch,
            "finalists": settings.finalists,
            "rounds": timing.rounds,
            "blocks": timing.blocks,
            "sample_us": timing.sample_us,
            "cut": timing.cut,
            "cache": timing.cache,
            "delta": timing.delta,
        }

    def _begin(self, resume: bool) -> dict[Problem, Memory]:
        """Begin a run in the log, or continue one: what it knows of each problem."""
        fingerprint = self._fingerprint()
        found = self.record.resume(fingerprint) if resume else None
        if found is not None:
            self.report.settings["resumed"] = f"run {found.run} of {found.at}"
            return self.record.recall()
        if resume:
            self.report.settings["resumed"] = (
                "nothing: the log has no run of these ops with these kernels, seed and strategy"
            )
        settings = {**self.report.settings, "provenance": dict(self.report.provenance)}
        self.record.begin(fingerprint, settings)
        return {}

    def _fingerprint(self) -> dict[str, Any]:
        """What a run must agree in to be continued."""
        header = self.table.header
        same = ("strategy", "seed", "batch", "rounds", "cut", "cache")
        return {
            "arch": header.arch,
            "units": header.units,
            "compiler": header.compiler,
            "kernel_hash": header.kernel_hash,
            "op_versions": header.op_versions,
            **{name: value for name, value in self._settings().items() if name in same},
        }

    def _bring_up_to_date(self, memories: Mapping[Problem, Memory]) -> None:
        """The table as it should be by now: stale rows verified anew, the log's rows in it."""
        known = {**specs_on(self.table.header.arch), **self.specs}
        header = self.table.header
        table = existing_table(self.table_path, header)
        stale = stale_rows(table, known)
        if stale:
            self.tell("refresh", f"verifying {len(stale)} stale rows of {self.table_path.name}")
        done = refresh(table, header, known, self._verified_row)
        self.table = done.table
        self.report.refreshed, self.report.dropped = done.verified, list(done.dropped)
        rows = [row for memory in memories.values() if (row := _row_of(memory)) is not None]
        lost = [row for row in rows if self.table.row(row.problem) != row]
        for row in lost:
            self.table = self.table.with_row(row)
        if stale or lost:
            self._save()

    def _verified_row(self, problem: Problem, tile: Tile) -> Outcome:
        self.gate.prepare(problem)
        outcome = self.gate.check(problem, tile)
        self.record.add("refreshed", None, tile, row=problem_text(problem),
                        outcome=outcome.as_dict())  # fmt: skip
        return outcome

    def _planted(self, problems: Sequence[Problem]) -> None:
        """Raises GateError where the gate lets a tile pass that is wrong on purpose."""
        for op, problem in {problem.op: problem for problem in reversed(problems)}.items():
            self.tell("planted", f"verifying that the gate rejects the planted tiles of {op}")
            for tile, fault, outcome in self.gate.planted(problem):
                self.report.planted.append(PlantedReport(op, tile, fault, outcome))
                self.record.add("planted", None, tile, op=op, fault=fault,
                                outcome=outcome.as_dict())  # fmt: skip
                if outcome.passed:
                    raise GateError(
                        f"{op}: the gate passed {tile}, which is wrong on purpose ({fault}); "
                        "nothing is timed until the gate rejects it"
                    )

    def _save(self) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.table = replace(self.table, header=replace(self.table.header, date=now))
        save_table(self.table_path, self.table)
        forget()


def _row_of(memory: Memory) -> TableRow | None:
    return None if memory.done is None else row_from(memory.done["row"])
