"""Exceptions of Tilewright.

::

    TilewrightError            exit code 1: an error of ours, with its message
    ├── FormatError            a checkpoint file is damaged or not what it says
    ├── LayoutError            codes cannot be packed for the chosen kernels
    ├── UnsupportedError       a valid request that no kernel or model here serves
    ├── TileError              a tile breaks a rule of its space
    ├── GateError              exit code 3: a result failed verification
    └── MeasureError           a measurement cannot be made or trusted

A message names the argument or file, what came, what is allowed and what to do next.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "FormatError",
    "GateError",
    "LayoutError",
    "MeasureError",
    "TileError",
    "TilewrightError",
    "UnsupportedError",
]


class TilewrightError(Exception):
    """Base of every error that Tilewright raises on purpose."""

    exit_code: ClassVar[int] = 1


class FormatError(TilewrightError):
    """A checkpoint file is damaged, truncated, or not what it claims to be.

    Args:
        message: what is wrong and what to do.
        file: path of the file.
        tensor: name of the tensor, when the fault lies in one.
        offset: byte offset in the file, when it is known.
    """

    def __init__(
        self,
        message: str,
        *,
        file: object = None,
        tensor: str | None = None,
        offset: int | None = None,
    ) -> None:
        where = []
        if file is not None:
            where.append(str(file))
        if tensor is not None:
            where.append(f"tensor {tensor!r}")
        if offset is not None:
            where.append(f"offset {offset}")
        super().__init__(f"{', '.join(where)}: {message}" if where else message)
        self.file = file
        self.tensor = tensor
        self.offset = offset


class LayoutError(TilewrightError):
    """Codes, scales or zero points cannot be packed for the chosen kernels."""


class UnsupportedError(TilewrightError):
    """A valid request that no kernel, format or model of this version serves."""


class TileError(TilewrightError):
    """A tile breaks a rule of its space, or names a field the space does not have."""


class GateError(TilewrightError):
    """A result failed its numerical verification."""

    exit_code: ClassVar[int] = 3


class MeasureError(TilewrightError):
    """A measurement cannot be made, or cannot be trusted."""
