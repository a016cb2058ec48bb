"""Verification as lines people read, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.tune.verify import Control, VerifyReport, VerifyRow, first_of_each

__all__ = ["control_lines", "controls_hold", "failure_lines", "summary_line", "verify_json"]


def failure_lines(rows: Sequence[VerifyRow]) -> list[str]:
    """One line a failed case; of many that failed for one reason, the first ones and a count."""
    return [
        f"FAILED {more} more for the same reason, in --json: {row.reason}"
        if more
        else failure_line(row)
        for row, more in first_of_each(rows, [row.reason for row in rows])
    ]


def failure_line(row: VerifyRow) -> str:
    """One failed case: what, where, how far off, and what repeats it."""
    where = "" if row.worst_index is None else f", worst at {list(row.worst_index)}"
    far = "" if row.worst_ratio == float("inf") else f", {row.worst_ratio:.3g}x the limit"
    tile = "" if row.tile is None else f", tile {row.tile}"
    return f"FAILED {row.label} {row.case}{tile}{where}{far}, seed {row.seed}: {row.reason}"


def summary_line(report: VerifyReport) -> str:
    """Counts of the whole run."""
    passed = len(report.rows) - len(report.failures)
    seconds = sum(row.seconds for row in report.rows)
    line = f"{passed}/{len(report.rows)} passed in {seconds:.1f} s, seed {report.seed}"
    if not report.complete:
        line += f"; interrupted, {report.planned - len(report.rows)} cases did not run"
    return line


def controls_hold(controls: Sequence[Control]) -> bool:
    """Every visible corruption was caught, and there was one."""
    return all(c.passed for c in controls) and any(c.visible for c in controls)


def control_lines(controls: Sequence[Control]) -> list[str]:
    """One line a corruption with its counts, then one a corruption that went unnoticed."""
    lines = []
    for name in dict.fromkeys(c.name for c in controls):
        same = [c for c in controls if c.name == name]
        visible = [c for c in same if c.visible]
        caught = sum(c.caught for c in visible)
        line = f"control {name!r}: {caught}/{len(visible)} caught"
        if len(same) > len(visible):
            line += f", {len(same) - len(visible)} below what the path can show"
        lines.append(line)
    lines += [
        f"MISSED {c.label} {c.case}: {c.name}, {c.effect:.3g}x the limit, went unnoticed"
        for c in controls
        if not c.passed
    ]
    return lines


def verify_json(
    report: VerifyReport, controls: Sequence[Control], provenance: dict[str, Any]
) -> dict[str, Any]:
    """Provenance, verdict, counts, every row, every control."""
    return {
        "provenance": provenance,
        **report.as_dict(),
        "controls": [
            {
                "name": c.name,
                "label": c.label,
                "case": c.case,
                "visible": c.visible,
                "effect": c.effect if c.effect != float("inf") else None,
                "caught": c.caught,
                "reason": c.reason,
            }
            for c in controls
        ],
    }
