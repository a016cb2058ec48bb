"""What verbs write as JSON, arranged as the sections of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tilewright.errors import UnsupportedError

__all__ = ["SECTIONS", "join_sections", "sections_of", "tidy"]

SECTIONS = (
    "title",
    "subject",
    "summary",
    "provenance",
    "tune",
    "arms",
    "comparisons",
    "agreement",
    "ladder",
    "table",
    "machine",
    "verification",
    "notes",
    "faults",
)
"""Every section that `tilewright.report.page.render_page` knows."""


def sections_of(
    kind: str, result: Mapping[str, Any], *, provenance: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The sections of one verb's result.

    Args:
        kind: "tune", "compare", "ladder", "table" or "verify".
        result: the result's `to_dict()`, or that under the name of the kind beside "provenance".
        provenance: where the result comes from, if `result` does not say.

    Raises:
        UnsupportedError: an unknown kind.
    """
    if kind not in _KINDS:
        raise UnsupportedError(f"kind is {kind!r}; a page is made of {', '.join(_KINDS)}")
    result = tidy(result)
    origin = provenance or result.get("provenance") or {}
    inner = result.get(kind)
    found = _KINDS[kind](inner if isinstance(inner, Mapping) else result)
    found["provenance"] = dict(origin)
    return {name: value for name, value in found.items() if value}


def join_sections(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of several results as those of one page.

    Lists are joined in order, and so are the machine's states by label. Of anything else the first
    one that is there counts, except that a page of several kinds is titled "Report".
    """
    joined: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            known = joined.get(name)
            if not known:
                joined[name] = value
            elif isinstance(known, list):
                joined[name] = [*known, *value]
            elif name == "machine":
                joined[name] = {**known, **value}
    titles = {part["title"] for part in parts if part.get("title")}
    if len(titles) > 1:
        joined["title"] = "Report"
    return joined


def tidy(value: Any) -> Any:
    """The value without entries that say nothing: None, and numbers that are not finite."""
    if isinstance(value, Mapping):
        tidied = ((str(key), tidy(inner)) for key, inner in value.items())
        return {key: inner for key, inner in tidied if inner is not None}
    if isinstance(value, list | tuple):
        return [inner for inner in map(tidy, value) if inner is not None]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tune(report: Mapping[str, Any]) -> dict[str, Any]:
    problems = report.get("problems") or []
    settings = report.get("settings") or {}
    rows = [problem["row"] for problem in problems if problem.get("row")]
    return {
        "title": "Tuning report",
        "subject": str(settings.get("model") or settings.get("subject") or ""),
        "tune": dict(report),
        "table": {"header": report.get("header") or {}, "rows": rows} if rows else None,
    }


def _compare(result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "title": "Comparison",
        "subject": str(result.get("subject") or ""),
        "arms": result.get("arms"),
        "comparisons": list(result.get("rows") or ([result] if "judgement" in result else [])),
        "agreement": result.get("agreement"),
        "notes": [*_lines(result, "notes"), *_interrupted(result)],
        "faults": _lines(result, "faults"),
    }


def _ladder(result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "title": "Ladder of changes",
        "subject": str(result.get("subject") or ""),
        "ladder": dict(result),
        "notes": [*_lines(result, "notes"), *_interrupted(result)],
        "faults": _lines(result, "faults"),
    }


def _table(table: Mapping[str, Any]) -> dict[str, Any]:
    header = table.get("header") or {}
    return {"title": "Tile table", "subject": str(header.get("arch") or ""), "table": dict(table)}


def _verify(report: Mapping[str, Any]) -> dict[str, Any]:
    return {"title": "Verification", "verification": dict(report)}


def _lines(result: Mapping[str, Any], name: str) -> list[str]:
    return [str(line) for line in result.get(name) or ()]


def _interrupted(result: Mapping[str, Any]) -> list[str]:
    if not result.get("interrupted"):
        return []
    return ["The run was interrupted; what was finished by then is shown."]


_KINDS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "tune": _tune,
    "compare": _compare,
    "ladder": _ladder,
    "table": _table,
    "verify": _verify,
}
