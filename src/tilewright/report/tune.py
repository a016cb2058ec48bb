"""A tuning run as people read it: one row a problem, and what the gate rejected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tilewright.report.table import Column, Table
from tilewright.tune.result import ProblemReport, TuneReport

__all__ = ["plan_table", "rejected_text", "tune_table"]


def tune_table(report: TuneReport) -> Table:
    """One row a problem, the largest share of the time first."""
    rows = [_row(problem) for problem in report.problems]
    return Table("", _COLUMNS, rows, notes=_notes(report), provenance=report.provenance)


def plan_table(report: TuneReport) -> Table:
    """What a run would tune, of a report that has no result yet."""
    shown = ("problem", "share", "in_use", "how", "space_size")
    columns = [column for column in _COLUMNS if column.key in shown]
    rows = [_row(problem) for problem in report.problems]
    notes = [f"nothing was run; the table would be {report.table}"]
    notes += [f"{p.to_dict()['text']}: {p.note}" for p in report.problems if p.note]
    return Table("", columns, rows, notes=notes, provenance=report.provenance)


def rejected_text(rejected: Mapping[str, int]) -> str:
    """Reasons and counts: "oracle 2, timeout 1"; a dash if there are none."""
    return ", ".join(f"{kind} {count}" for kind, count in rejected.items()) or "-"


def _row(problem: ProblemReport) -> dict[str, Any]:
    plain = problem.to_dict()
    judged = [c["judgement"] for c in problem.comparisons if problem.winner is not None
              and c["b"] == str(problem.winner)]  # fmt: skip
    low, high = (judged[-1]["low"], judged[-1]["high"]) if judged else (None, None)
    return {
        "problem": plain["text"],
        "name": problem.name,
        "share": problem.share,
        "in_use": "-" if problem.incumbent is None else str(problem.incumbent),
        "how": problem.how or "-",
        "winner": None if problem.winner is None else str(problem.winner),
        "status": problem.status,
        "verdict": problem.verdict or None,
        "ratio": problem.ratio,
        "low": low,
        "high": high,
        "cache": problem.cache,
        "space_size": problem.space_size,
        "tried": problem.tried,
        "rejected": dict(problem.rejected),
        "reason": problem.reason,
    }


def _winner(row: Mapping[str, Any]) -> str:
    if row["status"] in ("improved", "repaired"):
        return str(row["winner"])
    return {"kept": "the one in use", "failed": "none is right"}.get(row["status"], "-")


def _faster(row: Mapping[str, Any]) -> str:
    if row["status"] not in ("improved", "repaired") or row["low"] is None:
        return "-"
    return f"{row['ratio']:.3f}x [{row['low']:.3f}, {row['high']:.3f}]"


_COLUMNS = (
    Column("problem", "problem"),
    Column("name", hidden=True),
    Column("share", "share", right=True, show=lambda row: f"{row['share']:.0%}"),
    Column("in_use", "tile in use"),
    Column("how", "from"),
    Column("winner", "winner", show=_winner),
    Column("status", hidden=True),
    Column("verdict", "verdict", show=lambda row: row["verdict"] or row["status"]),
    Column("ratio", "faster", right=True, show=_faster),
    Column("low", hidden=True),
    Column("high", hidden=True),
    Column("cache", "cache"),
    Column("tried", "tried", right=True, show=lambda row: f"{row['tried']}/{row['space_size']}"),
    Column("space_size", "candidates", right=True, hidden=True),
    Column("rejected", "rejected", show=lambda row: rejected_text(row["rejected"])),
    Column("reason", hidden=True),
)


def _notes(report: TuneReport) -> list[str]:
    notes = []
    if report.planted:
        caught = [planted for planted in report.planted if not planted.outcome.passed]
        checks = Counter(planted.outcome.kind for planted in caught)
        notes.append(
            f"gate: {len(caught)} of {len(report.planted)} tiles that are wrong on purpose were "
            f"rejected: {rejected_text(dict(sorted(checks.items())))}"
        )
    if report.refreshed:
        notes.append(f"{report.refreshed} stale rows of the table were verified anew")
    for problem, tile, reason in report.dropped:
        notes.append(f"dropped {tile} of N={problem.N} K={problem.K} M={problem.M}: {reason}")
    for found in report.problems:
        if found.status in ("failed", "repaired") or (found.status == "kept" and found.verdict):
            notes.append(f"{found.to_dict()['text']}: {found.reason}")
    skipped = sum(found.status == "skipped" for found in report.problems)
    if skipped:
        reasons = {found.reason for found in report.problems if found.status == "skipped"}
        notes.append(f"{skipped} problems were not tuned: {'; '.join(sorted(reasons))}")
    if "resumed" in report.settings:
        notes.append(f"resumed {report.settings['resumed']}")
    if report.interrupted:
        notes.append("interrupted; `tilewright tune --resume` continues")
    written = sum(found.row is not None for found in report.problems)
    where = f"{written} rows written to {report.table}" if written else "the table is unchanged"
    notes.append(f"{where}; log: {report.log}; {report.seconds:.1f} s")
    return notes
