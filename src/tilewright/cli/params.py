"""Parameter types that several verbs share: products given by hand, seeds, reports to write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

__all__ = ["BatchesParam", "ReportPath", "SeedParam", "ShapeParam"]


class ShapeParam(click.ParamType):
    """N,K of a weight."""

    name = "n,k"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if len(parts) != 2 or not all(p.strip().isdigit() and int(p) > 0 for p in parts):
            self.fail(f"got {value!r}; give N,K of the weight, such as 1536,576", param, ctx)
        return int(parts[0]), int(parts[1])


class BatchesParam(click.ParamType):
    """One number of rows or several with commas between."""

    name = "m[,m..]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(p.strip().isdigit() and int(p) > 0 for p in parts):
            self.fail(f"got {value!r}; give rows of x, such as 1,16,512", param, ctx)
        return tuple(int(p) for p in parts)


class ReportPath(click.Path):
    """A file that is written at the end of a run, whose folder must be there at its beginning."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not os.access(path.parent, os.W_OK | os.X_OK):
            self.fail(
                f"{str(path)!r} cannot be written; give a file in a folder that exists and may be "
                "written", param, ctx,
            )  # fmt: skip
        return path


class SeedParam(click.ParamType):
    """A seed that numpy and torch both take."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value)
        if not text.isdecimal() or int(text) >= 1 << 63:
            self.fail(f"got {value!r}; give a whole number from 0 to 2^63 - 1", param, ctx)
        return int(text)
