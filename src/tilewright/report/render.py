"""A `Table` as text: for a terminal, Markdown, JSON, JSON lines, CSV."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from tilewright.report.table import Table
from tilewright.report.terminal import to_terminal

__all__ = ["FORMATS", "render", "to_csv", "to_json", "to_jsonl", "to_markdown", "to_terminal"]


def to_markdown(table: Table) -> str:
    """A Markdown table as GitHub renders it, padded so that the source reads too."""
    shown = table.shown()
    rows = [[cell.replace("|", "\\|") for cell in row] for row in table.texts()]
    heads = [column.header for column in shown]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(shown))]

    def line(cells: list[str]) -> str:
        padded = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(cells, widths, shown, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "|".join(
        "-" * (width + 1) + ":" if column.right else "-" * (width + 2)
        for width, column in zip(widths, shown, strict=True)
    )
    lines = [table.title, ""] if table.title else []
    lines += [line(heads), f"|{rule}|", *(line(row) for row in rows)]
    if table.notes:
        lines += ["", *table.notes]
    return "\n".join(lines) + "\n"


def _plain_rows(table: Table) -> list[dict[str, Any]]:
    return [{column.key: row[column.key] for column in table.columns} for row in table.rows]


def to_json(table: Table) -> str:
    """One object: provenance, then the rows under the table's key, then its notes."""
    whole = {
        "provenance": dict(table.provenance),
        table.key: _plain_rows(table),
        "notes": list(table.notes),
    }
    return json.dumps(whole, indent=2, allow_nan=False) + "\n"


def to_jsonl(table: Table) -> str:
    """One object a line, each with the provenance, so that lines of many runs can be joined."""
    return "".join(
        json.dumps({**row, "provenance": dict(table.provenance)}, allow_nan=False) + "\n"
        for row in _plain_rows(table)
    )


def to_csv(table: Table) -> str:
    """A header and one line a row; a list becomes values joined by ";"."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    for row in _plain_rows(table):
        writer.writerow(
            ";".join(map(str, v)) if isinstance(v, list | tuple) else v for v in row.values()
        )
    return out.getvalue()


FORMATS = {"md": to_markdown, "json": to_json, "jsonl": to_jsonl, "csv": to_csv}


def render(table: Table, form: str, *, width: int | None = None, color: bool = False) -> str:
    """The table in one of `FORMATS`, or for a terminal when `form` is "terminal".

    Width and color are the terminal's; see `to_terminal`.
    """
    if form == "terminal":
        return to_terminal(table, width=width, color=color)
    return FORMATS[form](table)
