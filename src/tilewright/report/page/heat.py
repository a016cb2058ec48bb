"""The heat map of a tile space: what the page's script needs to draw it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from tilewright.report.compare import time_text
from tilewright.report.page.words import tile_text

__all__ = ["candidate_state", "candidates_of", "heat_map", "problem_label", "relative_time"]


def heat_map(problem: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's script needs to draw the tile space of one tuned problem.

    Args:
        problem: an entry of `TuneReport.to_dict()["problems"]`.

    Returns:
        `fields`: per algorithm its fields with their values in order; `tiles`: per candidate the
        algorithm, the fields, its state "timed", "untimed", "wrong" (a check of the gate) or
        "stopped" (any other rejection), its time relative to the tile that was in use, and what to
        say about it; "star" marks the winner, "before" the tile that was in use.
    """
    fields: dict[str, dict[str, list[Any]]] = {}
    tiles = []
    winner, incumbent = problem.get("winner"), problem.get("incumbent")
    for candidate in candidates_of(problem):
        own = dict(candidate.get("tile") or {})
        algorithm = str(own.pop("algorithm", "tile"))
        for name, value in own.items():
            values = fields.setdefault(algorithm, {}).setdefault(name, [])
            if value not in values:
                values.append(value)
        tiles.append(
            {
                "algorithm": algorithm,
                "fields": own,
                "state": candidate_state(candidate),
                "relative": relative_time(candidate),
                "kind": str(candidate.get("check") or candidate.get("kind") or ""),
                "lines": candidate_lines(candidate),
                "mark": "star" if _same(candidate, winner) else
                        "before" if _same(candidate, incumbent) else "",
            }
        )  # fmt: skip
    for of_algorithm in fields.values():
        for values in of_algorithm.values():
            values.sort(key=lambda v: (isinstance(v, str), v if not isinstance(v, str) else 0, v))
    first = winner or incumbent or {}
    return {
        "label": problem_label(problem),
        "fields": fields,
        "tiles": tiles,
        "first": str(first.get("algorithm", "")),
    }


def candidates_of(problem: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The candidates of a tuned problem, the tile in use with the samples that the others ran
    beside: it is what they are measured against, so its score is 1."""
    found = [dict(candidate) for candidate in problem.get("candidates") or ()]
    beside = dict.fromkeys(us for c in found for us in c.get("incumbent_us") or ())
    for candidate in found:
        in_use = _same(candidate, problem.get("incumbent"))
        if in_use and beside and candidate.get("status") != "rejected":
            candidate |= {"us": list(beside), "score": 1.0}
    return found


def problem_label(problem: Mapping[str, Any]) -> str:
    """A tuned problem as the page names it."""
    name, text = problem.get("name"), str(problem.get("text") or problem.get("label") or "problem")
    return f"{name}: {text}" if name else text


def candidate_state(candidate: Mapping[str, Any]) -> str:
    """ "timed", "untimed", "wrong" (a check of the gate failed) or "stopped" (it did not run)."""
    if candidate.get("status") == "rejected":
        wrong = candidate.get("check") or candidate.get("kind") == "recheck"
        return "wrong" if wrong else "stopped"
    return "timed" if candidate.get("us") or candidate.get("score") else "untimed"


def relative_time(candidate: Mapping[str, Any]) -> float | None:
    """Median time over that of the tile in use, in the same rounds; None where it has none."""
    score = candidate.get("score")
    return 1 / score if score and candidate.get("status") != "rejected" else None


def candidate_lines(candidate: Mapping[str, Any]) -> list[str]:
    """What is known of a candidate, a line each."""
    lines = [str(candidate.get("text") or tile_text(candidate.get("tile")))]
    state = candidate_state(candidate)
    if state in ("wrong", "stopped"):
        by = "by the gate's check" if candidate.get("check") else "because of"
        where = f" on {candidate['case']}" if candidate.get("case") else ""
        lines.append(f"rejected {by} {candidate.get('check') or candidate.get('kind')}{where}")
        lines.append(str(candidate.get("reason") or "no reason recorded"))
        return lines
    us = candidate.get("us") or []
    if us:
        lines.append(f"median {time_text(median(us))} of {len(us)} rounds")
    relative = relative_time(candidate)
    if relative:
        lines.append(f"{relative:.3f} of the time of the tile in use")
    lines.append("passed the gate" if us else "passed the gate, not timed")
    return lines


def _same(candidate: Mapping[str, Any], tile: Any) -> bool:
    return tile is not None and candidate.get("tile") == tile
