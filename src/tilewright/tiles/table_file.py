"""Tile tables on disk: JSON with one row a line, checked field by field when read.

::

    {
      "tilewright_tiles": 1,
      "header": {
        "arch": "cpu-avx512_vnni", "valid_for": [...], "units": 2, ...
      },
      "rows": [
        {"op": "mmq", "weight_type": "Q4_1", ..., "tile": {...}, "median_us": 812.5, ...},
        ...
      ]
    }

The file states everything that decides whether a row may be used: the archs it holds for, the
units it was tuned on, and the kernels and compiler under which every row passed the gate. An
unknown field, a missing one, a number that is not finite and a key that occurs twice are errors:
a table is never understood by half.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from tilewright.errors import TileError
from tilewright.tiles.tile import Problem, Tile, m_bucket

__all__ = [
    "TableHeader",
    "TableRow",
    "TileTable",
    "load_table",
    "problem_text",
    "row_key",
    "save_table",
    "write_atomically",
]

_FORMAT = "tilewright_tiles"
_VERSION = 1
_KEY = ("op", "weight_type", "activations", "act_dtype", "N", "K", "group", "M")
_FIGURES = ("median_us", "spread_us", "samples", "oracle_error", "tried", "rejected", "source")
_DTYPES = ("float32", "float16", "bfloat16")
_PUBLISHED = "published"


@dataclass(frozen=True)
class TableHeader:
    """What a table holds for, and what its rows were verified and timed with.

    Attributes:
        arch: architecture of the device it was tuned on; never a marketing name.
        valid_for: every arch that may use it, `arch` among them.
        units: cores or compute units that the kernels had; 0 for any number, in a table of rows
            that were published and not measured.
        device: the maker's name of the device; for people.
        compiler: compilers and libraries, "numba 0.65.1, llvmlite 0.47.0, torch 2.13.0".
        kernel_hash: SHA-256 over the kernels' sources; "mmq=..., w4a16=..." where the ops' kernels
            are made of different files.
        op_versions: version of each op's meaning.
        date: when it was last written, ISO 8601.
        source: program or publication that made it.
        notes: lines for people.
    """

    arch: str
    valid_for: tuple[str, ...]
    units: int
    device: str
    compiler: str
    kernel_hash: str
    op_versions: dict[str, int]
    date: str
    source: str
    notes: tuple[str, ...] = ()

    def hash_of(self, op: str) -> str:
        """The hash of an op's kernels; empty if the header states those of others only."""
        if "=" not in self.kernel_hash:
            return self.kernel_hash
        pairs = (part.strip().partition("=") for part in self.kernel_hash.split(","))
        return next((value for name, _, value in pairs if name == op), "")


@dataclass(frozen=True)
class TableRow:
    """The tile of one bucketed problem and the evidence for it.

    Attributes:
        problem: M is a bucket of `m_bucket`.
        tile: legal in the op's space.
        median_us, spread_us: median and interquartile range of its samples, microseconds; 0 in
            a published row that was not measured.
        samples: how many; 0 in a published row that was not measured.
        oracle_error: `oracle_error` of the gate's result for this tile.
        tried: candidates that were verified, this one among them.
        rejected: candidates that failed, by reason.
        source: where it comes from: "tuned" by this package, "published" elsewhere.
    """

    problem: Problem
    tile: Tile
    median_us: float
    spread_us: float
    samples: int
    oracle_error: float
    tried: int
    rejected: dict[str, int] = field(default_factory=dict)
    source: str = "tuned"

    def as_dict(self) -> dict[str, Any]:
        """The row as its line in the file; the arch stands in the header."""
        key = {name: getattr(self.problem, name) for name in _KEY}
        figures = {name: getattr(self, name) for name in _FIGURES}
        figures["rejected"] = dict(sorted(self.rejected.items()))
        return {**key, "tile": self.tile.as_dict(), **figures}


@dataclass(frozen=True)
class TileTable:
    """A header and rows, no two of the same problem."""

    header: TableHeader
    rows: tuple[TableRow, ...] = ()

    def row(self, problem: Problem) -> TableRow | None:
        """The row of this problem: its M is bucketed, its arch may be any of `valid_for`."""
        if problem.arch not in self.header.valid_for:
            return None
        key = row_key(problem.bucketed())
        return next((row for row in self.rows if row_key(row.problem) == key), None)

    def with_row(self, row: TableRow) -> TileTable:
        """The table with this row added, or in the place of the problem's old one."""
        key = row_key(row.problem)
        rest = tuple(old for old in self.rows if row_key(old.problem) != key)
        return replace(self, rows=(*rest, row))

    def without(self, problem: Problem) -> TileTable:
        """The table without the row of this problem."""
        key = row_key(problem)
        return replace(self, rows=tuple(r for r in self.rows if row_key(r.problem) != key))


def row_key(problem: Problem) -> tuple[Any, ...]:
    """What tells rows of one table apart, and their order in the file."""
    return tuple(getattr(problem, name) for name in _KEY)


def problem_text(problem: Problem) -> str:
    """A problem as messages and reports name it: "mmq Q4_1 float32 M=512 N=576 K=1536"."""
    group = {0: "", -1: " g=K"}.get(problem.group, f" g={problem.group}")
    path = "" if problem.activations == "float" else f" {problem.activations}"
    return (
        f"{problem.op} {problem.weight_type}{group}{path} {problem.act_dtype} "
        f"M={problem.M} N={problem.N} K={problem.K}"
    )


def load_table(path: str | os.PathLike[str]) -> TileTable:
    """Read a table and check it field by field; rules of tile spaces are checked by `lookup`.

    Raises:
        TileError: the file cannot be read, is no table, or a field is missing, unknown, of the
            wrong type or not finite, M is no bucket, or a problem occurs twice. The message names
            file and row.
    """
    path = Path(path)
    fail = _failing(str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot be read as a tile table: {error}")
    try:
        whole = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except ValueError as error:
        fail(
            f"is no valid JSON ({error}); restore it, or delete it and run `tilewright tune` again"
        )
    if not isinstance(whole, dict) or whole.get(_FORMAT) != _VERSION:
        found = whole.get(_FORMAT) if isinstance(whole, dict) else None
        fail(f"has {_FORMAT} = {found!r}; this version reads tables of {_FORMAT} = {_VERSION}")
    _same_fields(whole, (_FORMAT, "header", "rows"), fail)
    header = _header(whole["header"], _failing(f"{path}, header"))
    if not isinstance(whole["rows"], list):
        fail(f"rows is a {type(whole['rows']).__name__}; it must be a list")
    rows: list[TableRow] = []
    seen: dict[tuple[Any, ...], int] = {}
    for number, entry in enumerate(whole["rows"], 1):
        row = _row(entry, header.arch, _failing(f"{path}, row {number}"))
        first = seen.setdefault(row_key(row.problem), number)
        if first != number:
            fail(
                f"rows {first} and {number} are both for {problem_text(row.problem)}; "
                "keep one of them"
            )
        if header.units == 0 and row.source != _PUBLISHED:
            fail(
                f"row {number} is {row.source!r} in a table of units = 0, which may only hold "
                f"{_PUBLISHED!r} rows; state the units that it was measured on"
            )
        rows.append(row)
    return TileTable(header, tuple(rows))


def save_table(path: str | os.PathLike[str], table: TileTable) -> None:
    """Write a table, rows in a stable order, one a line.

    The file is written aside, flushed to the disk and renamed over the old one, so that a reader
    or a crash at any point finds either the old table or the new one, whole.

    Raises:
        TileError: the table would not load again: the message of `load_table`.
        OSError: the folder cannot be written.
    """
    path = Path(path)
    rows = sorted(table.rows, key=lambda row: row_key(row.problem))
    for number, row in enumerate(rows, 1):
        if row.problem.arch != table.header.arch:
            raise TileError(
                f"{path}, row {number}: {problem_text(row.problem)} is of arch "
                f"{row.problem.arch}, the table is of {table.header.arch}; a table holds one arch"
            )
    head = asdict(table.header)
    lines = ["{", f'  "{_FORMAT}": {_VERSION},', '  "header": {']
    lines += [
        f"    {json.dumps(name)}: {json.dumps(value)}{',' if i < len(head) - 1 else ''}"
        for i, (name, value) in enumerate(head.items())
    ]
    lines += ["  },", '  "rows": [']
    lines += [
        f"    {json.dumps(row.as_dict())}{',' if i < len(rows) - 1 else ''}"
        for i, row in enumerate(rows)
    ]
    lines += ["  ]", "}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(lines) + "\n", check=load_table)


def write_atomically(path: Path, text: str, check: Callable[[Path], object] | None = None) -> None:
    """Put `text` into `path` so that no reader and no crash ever sees half of it.

    Args:
        path: the file; its folder exists.
        text: the new content.
        check: called with the file written aside before it takes the place of the old one; what
            it raises is raised, and the old file stays.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(aside, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            try:
                check(aside)
            except TileError as error:
                raise TileError(str(error).replace(str(aside), str(path))) from None
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Make the rename itself last; systems that cannot open a folder do without."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


Fail = Callable[[str], NoReturn]


def _failing(where: str) -> Fail:
    def fail(message: str) -> NoReturn:
        raise TileError(f"{where}: {message}")

    return fail


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} occurs twice in one object")
        found[name] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _same_fields(entry: Any, names: tuple[str, ...], fail: Fail) -> None:
    if not isinstance(entry, dict):
        fail(f"is a {type(entry).__name__}; it must be an object")
    unknown, missing = sorted(set(entry) - set(names)), [n for n in names if n not in entry]
    if unknown:
        fail(f"has unknown fields {unknown}; the fields are {list(names)}")
    if missing:
        fail(f"lacks the fields {missing}")


def _text(entry: Mapping[str, Any], name: str, fail: Fail) -> str:
    value = entry[name]
    if not isinstance(value, str) or not value:
        fail(f"{name} is {value!r}; it must be a text that is not empty")
    return value


def _count(entry: Mapping[str, Any], name: str, least: int, fail: Fail) -> int:
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        fail(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return value


def _number(entry: Mapping[str, Any], name: str, fail: Fail, *, positive: bool = False) -> float:
    value = entry[name]
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (positive and value == 0):
        fail(f"{name} is {value!r}; it must be a finite number {'> 0' if positive else '>= 0'}")
    return float(value)


def _texts(entry: Mapping[str, Any], name: str, fail: Fail) -> tuple[str, ...]:
    value = entry[name]
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        fail(f"{name} is {value!r}; it must be a list of texts")
    return tuple(value)


def _counts(entry: Mapping[str, Any], name: str, fail: Fail) -> dict[str, int]:
    value = entry[name]
    if not isinstance(value, dict):
        fail(f"{name} is {value!r}; it must map names to whole numbers")
    return {key: _count(value, key, 0, fail) for key in value}


def _header(entry: Any, fail: Fail) -> TableHeader:
    _same_fields(entry, tuple(f.name for f in fields(TableHeader)), fail)
    header = TableHeader(
        arch=_text(entry, "arch", fail),
        valid_for=_texts(entry, "valid_for", fail),
        units=_count(entry, "units", 0, fail),
        device=_text(entry, "device", fail),
        compiler=_text(entry, "compiler", fail),
        kernel_hash=_text(entry, "kernel_hash", fail),
        op_versions=_counts(entry, "op_versions", fail),
        date=_text(entry, "date", fail),
        source=_text(entry, "source", fail),
        notes=_texts(entry, "notes", fail),
    )
    if header.arch not in header.valid_for:
        fail(f"valid_for is {list(header.valid_for)}; it must name the table's own arch too")
    return header


def _row(entry: Any, arch: str, fail: Fail) -> TableRow:
    _same_fields(entry, (*_KEY, "tile", *_FIGURES), fail)
    problem = Problem(
        op=_text(entry, "op", fail),
        arch=arch,
        act_dtype=_text(entry, "act_dtype", fail),
        weight_type=_text(entry, "weight_type", fail),
        activations=_text(entry, "activations", fail),
        M=_count(entry, "M", 1, fail),
        N=_count(entry, "N", 1, fail),
        K=_count(entry, "K", 1, fail),
        group=_count(entry, "group", -1, fail),
    )
    if problem.act_dtype not in _DTYPES:
        fail(f"act_dtype is {problem.act_dtype!r}; it must be one of {list(_DTYPES)}")
    if problem.activations not in ("float", "int8"):
        fail(f"activations is {problem.activations!r}; it must be 'float' or 'int8'")
    if problem.M != m_bucket(problem.M):
        fail(
            f"M is {problem.M}, which no lookup asks for: batches are rounded up, this one to "
            f"{m_bucket(problem.M)}"
        )
    tile = entry["tile"]
    if not isinstance(tile, dict) or not all(_is_plain(value) for value in tile.values()):
        fail(f"tile is {tile!r}; it must map field names to numbers, texts or booleans")
    if not isinstance(tile.get("algorithm"), str):
        fail(f"tile {tile!r} names no algorithm")
    source = _text(entry, "source", fail)
    unmeasured = source == _PUBLISHED and entry["samples"] == 0 and entry["median_us"] == 0
    return TableRow(
        problem=problem,
        tile=Tile.from_mapping(tile),
        median_us=_number(entry, "median_us", fail, positive=not unmeasured),
        spread_us=_number(entry, "spread_us", fail),
        samples=_count(entry, "samples", 0 if unmeasured else 1, fail),
        oracle_error=_number(entry, "oracle_error", fail),
        tried=_count(entry, "tried", 0, fail),
        rejected=_counts(entry, "rejected", fail),
        source=source,
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int)
