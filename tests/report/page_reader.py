"""Reads a report page the way a browser's parser does, without running anything."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_RAW = ("script", "style")
_EMPTY = ("meta", "link", "img", "br", "hr", "input", "base", "source", "embed")


@dataclass
class Page:
    """Elements in order, text outside of scripts and styles, scripts, tables."""

    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    text: str = ""
    scripts: list[tuple[dict[str, str], str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    unclosed: list[str] = field(default_factory=list)

    @property
    def data(self) -> dict[str, Any]:
        """The charts' data; {} if the page has none."""
        for attributes, body in self.scripts:
            if attributes.get("type") == "application/json":
                return dict(json.loads(body))
        return {}

    @property
    def running(self) -> list[str]:
        """Scripts that run."""
        return [body for attributes, body in self.scripts if "type" not in attributes]

    def named(self, name: str) -> list[dict[str, str]]:
        """Attributes of every element of that name."""
        return [attributes for tag, attributes in self.elements if tag == name]

    def table(self, caption: str) -> Table:
        """The one table whose caption begins so."""
        (found,) = [t for t in self.tables if t.caption.startswith(caption)]
        return found


@dataclass
class Table:
    """Caption, names of the columns, rows of cells."""

    caption: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    def column(self, name: str) -> list[str]:
        """The cells of a column."""
        return [row[self.columns.index(name)] for row in self.rows]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()
        self._open: list[str] = []
        self._cell: list[str] | None = None
        self._head = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.page.elements.append((tag, attributes))
        if tag not in _EMPTY:
            self._open.append(tag)
        if tag == "script":
            self.page.scripts.append((attributes, ""))
        elif tag == "table":
            self.page.tables.append(Table())
        elif tag == "thead":
            self._head = True
        elif tag == "tr" and not self._head:
            self.page.tables[-1].rows.append([])
        elif tag in ("th", "td", "caption"):
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.page.unclosed.append(tag)
        if tag == "thead":
            self._head = False
        elif tag in ("th", "td", "caption") and self._cell is not None:
            text = " ".join("".join(self._cell).split())
            table = self.page.tables[-1]
            if tag == "caption":
                table.caption = text
            elif self._head:
                table.columns.append(text)
            else:
                table.rows[-1].append(text)
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            attributes, body = self.page.scripts[-1]
            self.page.scripts[-1] = (attributes, body + data)
        elif not self._open or self._open[-1] not in _RAW:
            self.page.text += data
            if self._cell is not None:
                self._cell.append(data)


def read_page(source: str | Path) -> Page:
    """The page in a file, or in a text."""
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    reader = _Reader()
    reader.feed(text)
    reader.close()
    reader.page.unclosed += reader._open
    return reader.page
