"""A `Table` for a terminal: columns where they fit; where they do not, parts of it or lists."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from tilewright.report.table import Column, Table

__all__ = ["to_terminal"]

_GAP = 3  # what stands between two columns
_WORD = 14  # characters of a word that are not torn apart
_LINES = 3  # that a cell may be broken into


def to_terminal(table: Table, *, width: int | None = None, color: bool = False) -> str:
    """Columns aligned for a terminal, without a border; the notes below.

    Columns that do not fit are made narrower as long as cells stay within three lines. Beyond that,
    columns of figures are written in parts below one another, and other tables row by row.

    Args:
        width: columns of the terminal; None lets the table be as wide as it is.
        color: use bold and dim escapes.
    """
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    shown, cells = table.shown(), table.texts()
    natural = _natural(shown, cells)
    console = Console(
        file=out,
        width=width or _total(natural) + 1,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    if table.title:
        console.print(Text(table.title, style="bold" if color else ""), soft_wrap=True)
    if cells or not table.notes:
        if width is None or _total(natural) <= width:
            console.print(_grid(shown, cells, natural, color))
        elif len(shown) > 2 and all(column.right for column in shown[1:]):
            for index, part in enumerate(_parts(natural, width)):
                if index:
                    console.print()
                columns, widths = [shown[i] for i in part], [natural[i] for i in part]
                lines = [[row[i] for i in part] for row in cells]
                console.print(_grid(columns, lines, widths, color))
        elif (narrow := _narrowed(shown, cells, natural, width)) is not None:
            console.print(_grid(shown, cells, narrow, color))
        else:
            for row in cells:
                console.print(Text(row[0], style="bold" if color else ""))
                for line in _listed(shown[1:], row[1:], width):
                    console.print(Text(line), soft_wrap=True)
    for note in table.notes:
        console.print(Text(note, style="dim" if color else ""), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _natural(shown: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column's widest line."""
    from rich.cells import cell_len

    texts = [[column.header, *(row[i] for row in cells)] for i, column in enumerate(shown)]
    return [
        max((cell_len(line) for text in column for line in text.split("\n")), default=0)
        for column in texts
    ]


def _narrowed(
    shown: Sequence[Column], cells: Sequence[Sequence[str]], natural: Sequence[int], width: int
) -> list[int] | None:
    """Widths that fit, the widest columns made narrower; None if cells would be torn to shreds."""
    from rich.cells import cell_len

    least = []
    for i, column in enumerate(shown):
        words = [w for text in (column.header, *(row[i] for row in cells)) for w in text.split()]
        word = max((cell_len(word) for word in words), default=1)
        least.append(min(natural[i], max(min(word, _WORD), -(-natural[i] // _LINES))))
    widths = list(natural)
    while _total(widths) > width:
        slack = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not slack:
            return None
        widths[max(slack, key=lambda i: widths[i])] -= 1
    return widths


def _parts(natural: Sequence[int], width: int) -> Iterator[list[int]]:
    """Columns by number, as many as fit beside the first, which each part has."""
    part = [0]
    for i in range(1, len(natural)):
        if len(part) > 1 and _total([natural[j] for j in (*part, i)]) > width:
            yield part
            part = [0]
        part.append(i)
    yield part


def _listed(columns: Sequence[Column], cells: Sequence[str], width: int) -> Iterator[str]:
    """Lines "header: cell | header: cell" of the cells that hold something."""
    from textwrap import wrap

    line = ""
    for column, cell in zip(columns, cells, strict=True):
        if cell in ("", "-"):
            continue
        item = f"{column.header}: {cell}"
        if line and len(line) + _GAP + len(item) <= width:
            line += f" | {item}"
            continue
        if line:
            yield line
        *whole, line = wrap(
            item, width=max(width, 20), initial_indent="  ", subsequent_indent="    ",
            break_on_hyphens=False,
        )  # fmt: skip
        yield from whole
    if line:
        yield line


def _grid(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], widths: Sequence[int], color: bool
) -> object:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(
        box=box.SIMPLE_HEAD if color else box.ASCII2,
        header_style="bold" if color else "",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
    )
    for column, width in zip(columns, widths, strict=True):
        grid.add_column(
            Text(column.header), justify="right" if column.right else "left", overflow="fold",
            width=width,
        )  # fmt: skip
    for row in cells:
        grid.add_row(*(Text(cell) for cell in row))
    return grid
