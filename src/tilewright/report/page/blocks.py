"""The pieces that a page's template can show: a text, facts, a table, a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Block", "chart", "col", "facts", "table", "text"]

Block = dict[str, Any]


def text(*lines: str) -> Block:
    """Paragraphs."""
    return {"type": "text", "lines": list(lines)}


def facts(rows: Sequence[tuple[str, Any]]) -> Block:
    """Names with their values."""
    return {"type": "facts", "rows": [(name, _cell(value)) for name, value in rows]}


def col(name: str, kind: str = "text") -> dict[str, str]:
    """A table's column: "text", "code", "number" (aligned right), "verdict", "label" (a name that
    may be long) or "wide" (a text that may be long)."""
    return {"name": name, "kind": kind}


def table(
    caption: str,
    columns: Sequence[Mapping[str, str]],
    rows: Sequence[Sequence[Any]],
    *,
    fold: bool = False,
) -> Block:
    """A table; columns that are empty in every row are left out.

    Args:
        caption: what it shows.
        columns: made by `col`.
        rows: a cell a column; None is shown as empty.
        fold: show only the caption until it is opened.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    kept = [i for i in range(len(columns)) if not cells or any(row[i] for row in cells)]
    return {
        "type": "table",
        "caption": caption,
        "fold": fold,
        "columns": [dict(columns[i]) for i in kept],
        "rows": [[row[i] for i in kept] for row in cells],
    }


def chart(
    title: str,
    caption: str,
    alt: str,
    draws: Mapping[str, Any],
    *,
    options: Sequence[str] = (),
) -> Block:
    """A chart.

    Args:
        title: what it shows.
        caption: how to read it.
        alt: what it says, for those who do not see it.
        draws: "figures": one, or one an option; or "spaces": heat maps of tile spaces.
        options: names of the figures to choose from.
    """
    return {
        "type": "chart",
        "title": title,
        "caption": caption,
        "alt": alt,
        "draws": dict(draws),
        "options": list(options),
    }


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_cell(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return str(value)
