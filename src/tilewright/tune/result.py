"""What a tuning run found, as plain data: every candidate, every round, every verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tilewright.tiles.table import TableHeader, TableRow, problem_text
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.outcome import Outcome, plain_number

__all__ = ["CandidateReport", "PlantedReport", "ProblemReport", "TuneReport"]

STATUSES = ("improved", "kept", "repaired", "failed", "skipped")


@dataclass
class CandidateReport:
    """One tile of one problem.

    Attributes:
        tile: the tile.
        outcome: what the gate, or a later check, said.
        us: its samples in the search's rounds, microseconds.
        incumbent_us: the incumbent's samples of the same rounds.
    """

    tile: Tile
    outcome: Outcome
    us: list[float] = field(default_factory=list)
    incumbent_us: list[float] = field(default_factory=list)

    @property
    def status(self) -> str:
        """ "ok" or "rejected"."""
        return "ok" if self.outcome.passed else "rejected"

    @property
    def score(self) -> float | None:
        """Median over rounds of the incumbent's time over its own; None if it was not timed, or
        is rejected."""
        if not self.us or not self.outcome.passed:
            return None
        ratios = [math.log(a / b) for a, b in zip(self.incumbent_us, self.us, strict=True)]
        return math.exp(median(ratios))

    def to_dict(self) -> dict[str, Any]:
        return {
            "tile": self.tile.as_dict(),
            "text": str(self.tile),
            "status": self.status,
            "kind": self.outcome.kind,
            "check": self.outcome.check,
            "reason": self.outcome.reason,
            "case": self.outcome.case,
            "oracle_error": plain_number(self.outcome.oracle_error),
            "seconds": self.outcome.seconds,
            "compile_s": self.outcome.compile_s,
            "us": self.us,
            "incumbent_us": self.incumbent_us,
            "score": self.score,
        }


@dataclass(frozen=True)
class PlantedReport:
    """A tile that is wrong on purpose, and what the gate said before anything was timed."""

    op: str
    tile: Tile
    fault: str
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "tile": self.tile.as_dict(),
            "text": str(self.tile),
            "fault": self.fault,
            "status": "ok" if self.outcome.passed else "rejected",
            "kind": self.outcome.kind,
            "check": self.outcome.check,
            "reason": self.outcome.reason,
        }


@dataclass
class ProblemReport:
    """One problem of a run.

    Attributes:
        problem: M bucketed.
        name: where the product occurs, or "".
        share: of the time that all problems of the run are estimated to take.
        status: "improved": a verified tile was faster and is in the table. "kept": the tile in
            use stays. "repaired": the tile in use was wrong or illegal and has been replaced.
            "failed": no tile passed the gate. "skipped": the budget ended before it.
        incumbent: the tile that `lookup` gave at its beginning; None where that failed.
        how: "exact", "near" or "default": where the incumbent came from.
        note: `lookup`'s note, or its error.
        space_size: candidates in the space.
        candidates: in the order they were tried, the incumbent among them.
        rounds: Block dicts of the search, with the texts of tiles as names of arms.
        comparisons: Comparison dicts of the finals, the last of each finalist last.
        cache: "hot" or "cold".
        winner: the tile that holds from now on.
        verdict: of the best finalist against the incumbent; "" if there was no finalist.
        ratio: how many times faster than the incumbent the winner is; 1 if it is the incumbent.
        row: the row that was written.
        held: of a problem that was kept: a row for the tile in use, which is written only where
            another row of the table would come near and take its place.
        reason: why it was kept, failed or skipped, in words.
        seconds: spent on it in this run.
    """

    problem: Problem
    name: str = ""
    share: float = 0.0
    status: str = "skipped"
    incumbent: Tile | None = None
    how: str = ""
    note: str = ""
    space_size: int = 0
    candidates: list[CandidateReport] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    cache: str = "hot"
    winner: Tile | None = None
    verdict: str = ""
    ratio: float = 1.0
    row: TableRow | None = None
    held: TableRow | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def tried(self) -> int:
        return len(self.candidates)

    @property
    def rejected(self) -> dict[str, int]:
        """Candidates that failed, by reason."""
        kinds = Counter(c.outcome.kind for c in self.candidates if not c.outcome.passed)
        return dict(sorted(kinds.items()))

    @property
    def best(self) -> CandidateReport | None:
        """The candidate with the highest score, the incumbent not counted."""
        scored = [c for c in self.candidates if c.score is not None and c.tile != self.incumbent]
        return max(scored, key=lambda c: c.score or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "problem": dict(self.problem.__dict__),
            "text": problem_text(self.problem),
            "name": self.name,
            "share": self.share,
            "status": self.status,
            "incumbent": None if self.incumbent is None else self.incumbent.as_dict(),
            "how": self.how,
            "note": self.note,
            "space_size": self.space_size,
            "tried": self.tried,
            "rejected": self.rejected,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "rounds": self.rounds,
            "comparisons": self.comparisons,
            "cache": self.cache,
            "winner": None if self.winner is None else self.winner.as_dict(),
            "verdict": self.verdict,
            "ratio": self.ratio,
            "row": None if self.row is None else self.row.as_dict(),
            "reason": self.reason,
            "seconds": self.seconds,
        }


@dataclass
class TuneReport:
    """A whole run.

    Attributes:
        header: of the table it writes.
        settings: budget, strategy, seed, blocks and so on.
        problems: in the order of their share.
        planted: what the gate said about tiles that are wrong on purpose.
        refreshed: rows of the table that were stale and passed the gate again.
        dropped: rows that did not: (problem, tile, reason).
        table, log: files that were written.
        machine: state of the machine at the beginning and at the end.
        interrupted: Ctrl-C ended it.
        seconds: the whole run.
        provenance: command, versions, device; as the caller gave it.
    """

    header: TableHeader
    settings: dict[str, Any]
    problems: list[ProblemReport] = field(default_factory=list)
    planted: list[PlantedReport] = field(default_factory=list)
    refreshed: int = 0
    dropped: list[tuple[Problem, Tile, str]] = field(default_factory=list)
    table: str = ""
    log: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    seconds: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """3 if the tile in use or every tile of some problem was wrong; 6 if every comparison was
        void, 5 if none was resolved or no problem was begun; else 0. Ctrl-C gives 130 where nothing
        was wrong."""
        if any(p.status in ("failed", "repaired") for p in self.problems):
            return 3
        if self.interrupted:
            return 130
        if all(p.status == "skipped" for p in self.problems):
            return 5
        verdicts = {p.verdict for p in self.problems if p.verdict}
        if verdicts and verdicts <= {"VOID", "UNRESOLVED"}:
            return 6 if verdicts == {"VOID"} else 5
        return 0

    def to_dict(self) -> dict[str, Any]:
        """Values of JSON, complete: what the report page shows."""
        header = asdict(self.header)
        return {
            "header": {k: list(v) if isinstance(v, tuple) else v for k, v in header.items()},
            "provenance": dict(self.provenance),
            "settings": self.settings,
            "machine": self.machine,
            "table": self.table,
            "log": self.log,
            "interrupted": self.interrupted,
            "exit_code": self.exit_code,
            "seconds": self.seconds,
            "planted": [planted.to_dict() for planted in self.planted],
            "refreshed": self.refreshed,
            "dropped": [
                {"problem": problem_text(problem), "tile": str(tile), "reason": reason}
                for problem, tile, reason in self.dropped
            ],
            "problems": [problem.to_dict() for problem in self.problems],
        }
