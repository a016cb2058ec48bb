"""One problem of a tuning run: its incumbent, the search, the finals, the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from tilewright.errors import GateError, TileError
from tilewright.measure import Comparison
from tilewright.ops.choose import running_of
from tilewright.ops.contract import OpSpec
from tilewright.ops.space import TileSpace
from tilewright.tiles.table import TableRow, lookup, problem_text
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.host import Host, Stopwatch, Target
from tilewright.tune.outcome import Outcome
from tilewright.tune.record import Memory
from tilewright.tune.result import CandidateReport, ProblemReport
from tilewright.tune.rounds import Bench, LaunchFailed
from tilewright.tune.search import make_strategy

__all__ = ["ProblemRun", "look_up", "row_from"]


class ProblemRun:
    """Tunes one problem.

    Args:
        host: the run.
        target: the problem.
        memory: what the log knows of it.
        slice_s: its part of the budget.
    """

    def __init__(self, host: Host, target: Target, memory: Memory, slice_s: float) -> None:
        self._host = host
        self._memory = memory
        self._settings = host.settings
        self._target = target
        self._problem = target.problem
        self._spec = host.specs[target.problem.op]
        self._ends_us = host.clock.now_us() + slice_s * 1e6
        self._slice_s = slice_s
        self._report = ProblemReport(target.problem, target.name, target.share)
        self._by_tile: dict[Tile, CandidateReport] = {}
        self._space: TileSpace
        self._candidates: list[Tile] = []
        self._others: list[Tile] = []
        self._baseline: Tile | None = None
        self._bench: Stopwatch | None = None
        self._repairing = False

    def go(self) -> ProblemReport:
        """Tune it; the report says what became of it. Raises nothing over a tile."""
        if self._memory.done is not None:
            return self._recalled()
        if self._spec.space is None:
            return self._skipped(f"{self._problem.op} has no tile space")
        if self._host.stopping:
            return self._skipped("interrupted before it was begun")
        if self._slice_s < self._settings.least_slice_s:
            return self._skipped("the budget ended before it")
        self._space = self._spec.space()
        try:
            try:
                self._begin()
                self._search()
            except KeyboardInterrupt:
                self._host.stopping = True
                self._report.reason = "interrupted"
            return self._finish()
        except KeyboardInterrupt:
            self._host.stopping = True
            return self._kept("interrupted before the end of its finals")
        except GateError as error:
            return self._failed(str(error))

    def _skipped(self, reason: str) -> ProblemReport:
        self._report.reason = reason
        return self._report

    def _recalled(self) -> ProblemReport:
        """The report of a problem that an earlier part of the run has finished."""
        done, report = self._memory.done or {}, self._report
        for tile, row in self._memory.outcomes.items():
            self._candidate(tile, Outcome.from_dict(row["outcome"]))
        self._recall_rounds()
        report.comparisons = [c for event in self._memory.compared for c in event["comparisons"]]
        for name in ("status", "verdict", "ratio", "reason", "how", "note", "space_size", "cache"):
            setattr(report, name, done[name])
        report.incumbent, report.winner = _tile_of(done["incumbent"]), _tile_of(done["winner"])
        report.row = row_from(done["row"])
        report.held = row_from(done.get("held"))
        return report

    def _recall_rounds(self) -> None:
        """Take over the samples that the log has, with the tiles that they are of."""
        for event in self._memory.rounds:
            for tile in map(Tile.from_mapping, event["tiles"]):
                if tile not in self._by_tile and tile in self._memory.outcomes:
                    self._candidate(tile, Outcome.from_dict(self._memory.outcomes[tile]["outcome"]))
            self._take_block(event["block"], event["incumbent"])

    # The incumbent

    def _begin(self) -> None:
        host, report, problem = self._host, self._report, self._problem
        self._candidates = self._target.candidates(self._space, self._settings.allow)
        report.space_size = len(self._candidates)
        host.tell("problem", problem_text(problem))
        look_up(report, self._spec, host.units)
        host.gate.prepare(problem)
        self._baseline = self._first_right([report.incumbent, self._legal_default()])
        self._repairing = self._baseline is None or self._baseline != report.incumbent
        # Those that the log knows are among them: the search proposes them again, is told what the
        # log says, and so comes to where it was.
        self._others = [tile for tile in self._candidates if tile not in self._by_tile]
        self._bench = self._open_bench()
        report.cache = "cold" if self._bench.cold else "hot"
        if self._baseline is not None:
            self._note_baseline(self._baseline)

    def _open_bench(self) -> Stopwatch:
        """What times the tiles; a fleet times them elsewhere."""
        host, timing = self._host, self._settings.timing
        return Bench(
            self._spec, self._problem, timing, seed=host.seed, clock=host.clock,
            ends_us=self._ends_us,
        )  # fmt: skip

    def _legal_default(self) -> Tile | None:
        tile = self._space.default(self._problem)
        return tile if self._space.broken_rule(tile, self._problem) is None else None

    def _first_right(self, tiles: list[Tile | None]) -> Tile | None:
        """The first of these that passes the gate."""
        return next((t for t in tiles if t is not None and self._verify(t).passed), None)

    def _note_baseline(self, baseline: Tile) -> None:
        """Log what samples are relative to; samples of another baseline are of no use now."""
        if self._memory.incumbent not in (None, baseline):
            self._memory.rounds.clear()
            self._memory.compared.clear()
        self._host.record.add("problem", self._problem, baseline, how=self._report.how)
        self._recall_rounds()

    # The search

    def _search(self) -> None:
        others = self._others
        strategy = make_strategy(
            self._host.strategy, others, space=self._space, incumbent=self._baseline,
            batch=self._settings.batch, seed=self._host.seed,
        )  # fmt: skip
        while not self._out_of_time():
            batch = strategy.ask()
            if not batch:
                every = all(tile in self._by_tile for tile in others)
                self._report.reason = (
                    "every candidate was tried" if every else "the search found nothing better"
                )
                return
            good = []
            self._expect(batch)
            for tile in batch:
                if self._out_of_time():
                    break
                if self._verify(tile).passed:
                    good.append(tile)
            self._time(good)
            strategy.tell(
                {t: self._by_tile[t].score if t in self._by_tile else None for t in batch}
            )
        self._report.reason = "the budget ended its search"

    def _expect(self, tiles: list[Tile]) -> None:
        """These are verified next; a fleet begins on all of them at once."""

    def _out_of_time(self) -> bool:
        """Whether the finals must begin now to end in time."""
        reserve_us = 0.0
        if self._bench is not None and (count := len(self._faster())):
            reserve_us = self._bench.finals_us(min(count, self._settings.finalists))
        return self._host.clock.now_us() + reserve_us >= self._ends_us

    def _candidate(self, tile: Tile, outcome: Outcome) -> None:
        """Add a candidate to the report, or change what is said of it."""
        found, progress = self._by_tile.get(tile), self._host.progress
        if found is None:
            self._by_tile[tile] = found = CandidateReport(tile, outcome)
            self._report.candidates.append(found)
            progress.tried += 1
            progress.rejected += not outcome.passed
        else:
            progress.rejected += found.outcome.passed and not outcome.passed
            found.outcome = outcome

    def _verify(self, tile: Tile) -> Outcome:
        """What the gate says about a tile; the log's answer if it has one."""
        if tile in self._by_tile:
            return self._by_tile[tile].outcome
        record, problem = self._host.record, self._problem
        if tile in self._memory.outcomes:
            outcome = Outcome.from_dict(self._memory.outcomes[tile]["outcome"])
        elif tile in self._memory.lost:
            outcome = Outcome(False, "lost", "the tuner died three times while it was at work")
            record.add("rejected", problem, tile, outcome=outcome.as_dict())
        else:
            record.add("started", problem, tile)
            with self._leaving([tile]):
                outcome = self._host.gate.check(problem, tile)
            kind = "passed" if outcome.passed else "rejected"
            record.add(kind, problem, tile, outcome=outcome.as_dict())
        self._candidate(tile, outcome)
        self._host.tell("passed" if outcome.passed else "rejected", str(tile))
        return outcome

    @contextmanager
    def _leaving(self, tiles: Sequence[Tile]) -> Iterator[None]:
        """Note that it was Ctrl-C that ended the work on these tiles, and not one of them."""
        try:
            yield
        except KeyboardInterrupt:
            self._host.record.add("left", self._problem, tiles=[tile.as_dict() for tile in tiles])
            raise

    def _reject(self, tile: Tile, kind: str, reason: str) -> None:
        """A tile that had passed the gate turned out wrong."""
        outcome = replace(self._by_tile[tile].outcome, passed=False, kind=kind, reason=reason)
        self._host.record.add("rejected", self._problem, tile, outcome=outcome.as_dict())
        self._candidate(tile, outcome)
        self._host.tell("rejected", str(tile))

    def _launch_failed(self, failed: LaunchFailed) -> None:
        self._reject(failed.tile, "error", str(failed))
        if failed.tile == self._baseline:
            raise GateError(f"the tile in use, {failed.tile}, failed while it was timed: {failed}")

    def _time(self, tiles: list[Tile]) -> None:
        """Take the rounds that these verified tiles still lack."""
        if self._baseline is None and tiles:
            self._baseline = tiles.pop(0)  # the first that is right stands in for the wrong one
            self._note_baseline(self._baseline)
        missing = {tile: n for tile in tiles if (n := self._missing_rounds(tile))}
        for rounds in sorted(set(missing.values()), reverse=True):
            group = [tile for tile, lacks in missing.items() if lacks == rounds]
            while group:
                try:
                    self._sample(group, rounds)
                    break
                except LaunchFailed as failed:
                    self._launch_failed(failed)
                    group.remove(failed.tile)

    def _missing_rounds(self, tile: Tile) -> int:
        candidate, timing = self._by_tile[tile], self._settings.timing
        score = candidate.score
        if score is not None and score < 1 / timing.cut:
            return 0
        return max(0, timing.rounds - len(candidate.us))

    def _sample(self, tiles: list[Tile], rounds: int) -> None:
        assert self._bench is not None
        assert self._baseline is not None
        record, problem = self._host.record, self._problem
        names = [tile.as_dict() for tile in tiles]
        record.add("timing", problem, tiles=names)
        with self._leaving(tiles):
            blocks, interrupted = self._bench.run(self._baseline, tiles, rounds)
        incumbent = str(self._baseline)
        for row in self._sound(tiles, [block.to_dict() for block in blocks]):
            record.add("sampled", problem, block=row, incumbent=incumbent, tiles=names)
            self._take_block(row, incumbent)
        record.add("timed", problem, tiles=names)
        best = max(self._scored(), key=_score, default=None)
        if best is not None:
            self._host.progress.best, self._host.progress.best_tile = best.score, best.tile
        self._host.tell("sampled")
        if interrupted:
            raise KeyboardInterrupt

    def _sound(self, tiles: list[Tile], blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The blocks without times that are none, whose tiles are rejected."""
        for block in blocks:
            for name in [n for n, us in block["us"].items() if not 0 < us < math.inf]:
                us = block["us"].pop(name)
                if name == str(self._baseline):
                    raise GateError(f"the tile in use, {name}, took {us} us: no time to go by")
                tile = next(tile for tile in tiles if str(tile) == name)
                self._reject(tile, "time", f"a sample was {us} us")
        return blocks

    def _take_block(self, block: dict[str, Any], incumbent: str) -> None:
        self._report.rounds.append(block)
        for candidate in self._by_tile.values():
            name = str(candidate.tile)
            if name in block["us"] and name != incumbent:
                candidate.us.append(block["us"][name])
                candidate.incumbent_us.append(block["us"][incumbent])

    def _scored(self) -> list[CandidateReport]:
        return [c for c in self._by_tile.values() if c.score is not None]

    def _faster(self) -> list[Tile]:
        """Verified tiles that looked faster than the baseline, the best first."""
        found = [c for c in self._scored() if _score(c) > 1.0]
        return [c.tile for c in sorted(found, key=_score, reverse=True)]

    # The finals

    def _finish(self) -> ProblemReport:
        report = self._report
        if self._bench is None:
            return self._kept("interrupted while the tile in use was verified")
        if self._baseline is None:
            if self._host.stopping:
                return self._kept("interrupted before a candidate was verified")
            kinds = ", ".join(f"{kind} {count}" for kind, count in report.rejected.items())
            return self._failed(f"no tile passed the gate; of {report.tried} tried: {kinds}")
        winner, comparison = self._finals(self._faster()[: self._settings.finalists])
        if winner is None and self._repairing:
            winner = self._baseline
        if winner is None or not self._by_tile[winner].outcome.passed:
            if self._repairing:
                return self._failed("the tile in use is wrong, and no other is known to be right")
            why = "no finalist was faster for certain" if report.verdict else "none looked faster"
            return self._kept(f"{why}; {report.reason}")
        report.winner = winner
        report.status = "repaired" if self._repairing else "improved"
        if self._repairing:
            report.reason = self._what_was_wrong()
        return self._done(self._row(winner, comparison))

    def _what_was_wrong(self) -> str:
        report = self._report
        if report.incumbent is None:
            return report.note
        outcome = self._by_tile[report.incumbent].outcome
        return f"the tile in use, {report.incumbent}, is wrong: {outcome.kind}: {outcome.reason}"

    def _finals(self, finalists: list[Tile]) -> tuple[Tile | None, Comparison | None]:
        """The finalist that is faster for certain, with its comparison; None if none is."""
        assert self._bench is not None
        assert self._baseline is not None
        found = self._known_finals(finalists)
        while finalists and not found:
            names = [tile.as_dict() for tile in finalists]
            self._host.tell("finals", f"finals of {len(finalists)} against the tile in use")
            self._host.record.add("timing", self._problem, tiles=names)
            try:
                with self._leaving(finalists):
                    found = self._bench.finals(self._baseline, finalists)
            except LaunchFailed as failed:
                self._launch_failed(failed)
                finalists.remove(failed.tile)
                continue
            rows = [comparison.to_dict() for comparison in found.values()]
            self._host.record.add("compared", self._problem, comparisons=rows, tiles=names)
            self._host.record.add("timed", self._problem, tiles=names)
            self._report.comparisons += rows
            if any(comparison.interrupted for comparison in found.values()):
                self._host.stopping = True
            faults = self._bench.faults
            for tile, (check, why) in faults.items():
                self._reject(tile, check, why)
            finalists = [tile for tile in finalists if tile not in faults]
            if self._baseline in faults:
                self._repairing = True
                self._baseline = finalists[0] if finalists else self._baseline
                return None, None
            if faults:
                found = {}  # void, all of them: what is left is measured anew
        return self._judged(found)

    def _known_finals(self, finalists: list[Tile]) -> dict[Tile, Comparison]:
        """The finals of these very tiles, where the log has them."""
        for event in reversed(self._memory.compared):
            if [Tile.from_mapping(tile) for tile in event["tiles"]] == finalists:
                self._report.comparisons += event["comparisons"]
                rows = [Comparison.from_dict(row) for row in event["comparisons"]]
                if not any(row.interrupted for row in rows):
                    return dict(zip(finalists, rows, strict=True))
        return {}

    def _judged(self, found: Mapping[Tile, Comparison]) -> tuple[Tile | None, Comparison | None]:
        if not found:
            return None, None
        sure = {
            tile: c
            for tile, c in found.items()
            if c.verdict in ("FASTER", "DISJOINT") and c.ratio > 1
        }
        best = max(sure or found, key=lambda tile: found[tile].interval[0])
        self._report.verdict = str(found[best].verdict)
        if best not in sure:
            return None, None
        self._report.ratio = found[best].ratio
        return best, found[best]

    def _row(self, tile: Tile, comparison: Comparison | None) -> TableRow:
        assert self._bench is not None
        candidate = self._by_tile[tile]
        us = candidate.us
        if comparison is not None:
            us = [float(value) for value in comparison.samples_us(str(tile))]
        elif not us:
            blocks, _ = self._bench.run(tile, [], self._settings.timing.rounds)
            us = [block.us[str(tile)] for block in blocks]
        return self._row_of(candidate, us)

    def _row_of(self, candidate: CandidateReport, us: Sequence[float]) -> TableRow:
        low, high = np.quantile(us, (0.25, 0.75))
        return TableRow(
            problem=self._problem,
            tile=candidate.tile,
            median_us=_figures(median(us)),
            spread_us=_figures(float(high - low)),
            samples=len(us),
            oracle_error=_figures(candidate.outcome.oracle_error or 0.0),
            tried=self._report.tried,
            rejected=self._report.rejected,
        )

    # The end

    def _kept(self, reason: str) -> ProblemReport:
        report = self._report
        report.status, report.reason, report.winner = "kept", reason, report.incumbent
        report.held = self._held()
        return self._done()

    def _held(self) -> TableRow | None:
        """A row for the tile in use, if it was verified and timed."""
        tile = self._report.incumbent
        candidate = None if tile is None else self._by_tile.get(tile)
        if tile is None or candidate is None or not candidate.outcome.passed:
            return None
        us = [block["us"][str(tile)] for block in self._report.rounds if str(tile) in block["us"]]
        if us:
            return self._row_of(candidate, us)
        if self._bench is None or self._host.stopping:
            return None
        try:
            return self._row(tile, None)
        except LaunchFailed:
            return None

    def _failed(self, reason: str) -> ProblemReport:
        self._report.status, self._report.reason = "failed", reason
        return self._done()

    def _done(self, row: TableRow | None = None) -> ProblemReport:
        """Log the verdict, the row in the same event; then the table gets the row."""
        host, report = self._host, self._report
        report.row = row
        if row is not None or not host.stopping:
            names = ("status", "verdict", "ratio", "reason", "how", "note", "space_size", "cache")
            host.record.add(
                "done" if row is None else "row",
                self._problem,
                report.winner,
                **{name: getattr(report, name) for name in names},
                incumbent=None if report.incumbent is None else report.incumbent.as_dict(),
                winner=None if report.winner is None else report.winner.as_dict(),
                row=_logged(row),
                held=_logged(report.held),
            )
        if row is not None:
            host.put(row)
        host.tell("done")
        return report


def _logged(row: TableRow | None) -> dict[str, Any] | None:
    return None if row is None else {**row.as_dict(), "arch": row.problem.arch}


def look_up(report: ProblemReport, spec: OpSpec, units: int) -> None:
    """Note the tile in use of a problem whose op has a space, or why `lookup` fails."""
    assert spec.space is not None
    try:
        choice = lookup(report.problem, spec.space(), units=units, running=lambda: running_of(spec))
        report.incumbent, report.how, report.note = choice.tile, choice.how, choice.note
    except TileError as error:
        report.note = str(error)


def row_from(data: Mapping[str, Any] | None) -> TableRow | None:
    """The row that an event holds; None if it holds none."""
    if data is None:
        return None
    row = dict(data)
    key = {name: row.pop(name) for name in Problem.__dataclass_fields__}
    return TableRow(Problem(**key), Tile.from_mapping(row.pop("tile")), **row)


def _score(candidate: CandidateReport) -> float:
    return candidate.score or 0.0


def _tile_of(row: Mapping[str, Any] | None) -> Tile | None:
    return None if row is None else Tile.from_mapping(row)


def _figures(value: float) -> float:
    """Five significant figures."""
    return float(f"{value:.5g}")
