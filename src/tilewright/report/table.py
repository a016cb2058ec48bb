"""A report: titled rows that every renderer understands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Column", "Table", "binary_bytes"]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: name of the value in a row, in JSON and in CSV.
        header: what people read.
        right: align to the right (numbers).
        show: turns a row into the text people read in this column; None writes the value.
        hidden: only JSON and CSV have this column.
    """

    key: str
    header: str = ""
    right: bool = False
    show: Callable[[Mapping[str, Any]], str] | None = None
    hidden: bool = False

    def text(self, row: Mapping[str, Any]) -> str:
        return str(row[self.key]) if self.show is None else self.show(row)


@dataclass(frozen=True)
class Table:
    """Rows of plain values with what is needed to read them.

    Attributes:
        title: one line, or "" for none.
        columns: in order; every row has a value for each key.
        rows: mappings from key to a value JSON knows.
        notes: lines below the table.
        provenance: where the figures come from; written to JSON.
        key: name of the rows in JSON.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    key: str = "results"

    def shown(self) -> list[Column]:
        """The columns people see."""
        return [column for column in self.columns if not column.hidden]

    def texts(self) -> list[list[str]]:
        """The cells people see, row by row."""
        return [[column.text(row) for column in self.shown()] for row in self.rows]


def binary_bytes(count: int) -> str:
    """A size as people read it: 98,362,432 -> "93.8 MiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
