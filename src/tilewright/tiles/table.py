"""Which tile a problem gets: the tables of this machine, then those shipped, then the default.

`lookup` answers in three steps, and its answer says which it was: a row of exactly this problem;
the nearest row that holds for this arch; the default of the op's tile space. Where the nearest row
keeps the default of its own problem, a problem near it gets its own default; and a tile that was
measured against another default than a problem has does not serve that problem. A row counts only
if its table names this arch and was tuned on this many units, and only while the kernels, the
compiler and the op are those under which it passed the gate; `tilewright tables validate --fix`
verifies it anew when they have changed. A table of published rows that nobody measured here holds
for any number of units. Nothing is clamped or guessed: a row in force that breaks a rule of the
space is an error.

Tables are looked for in the folder `$TILEWRIGHT_TILES`, or else `tiles` in the user's config
folder, and then among those shipped with the package. `<arch>.json` comes first in a folder; other
files are used if their header names the arch.

`pin` sets all of this aside for the problems it names, for as long as its block runs.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tilewright.errors import TileError
from tilewright.tiles.local import local_units
from tilewright.tiles.table_file import (
    TableHeader,
    TableRow,
    TileTable,
    load_table,
    problem_text,
    row_key,
    save_table,
)
from tilewright.tiles.tile import Problem, Tile

__all__ = [
    "FOLDER_VARIABLE",
    "Choice",
    "Running",
    "Space",
    "TableHeader",
    "TableRow",
    "TileTable",
    "forget",
    "is_near",
    "load_table",
    "lookup",
    "pin",
    "problem_text",
    "row_key",
    "save_table",
    "shipped_folder",
    "stale_reason",
    "table_files",
    "user_folder",
    "user_table_path",
]

FOLDER_VARIABLE = "TILEWRIGHT_TILES"
"""Environment variable that names the folder of the user's tables."""

_LOG = logging.getLogger("tilewright.tiles")
_MOST_STEPS = 2.0  # N and K of a near row differ by a factor of at most 4
_CURE = "run `tilewright tables validate --fix` or `tilewright tune`"


class Space(Protocol):
    """What lookup needs of a tile space; `tilewright.ops.space.TileSpace` is one."""

    @property
    def name(self) -> str: ...

    @property
    def default(self) -> Callable[[Problem], Tile]: ...

    def check(self, tile: Tile, problem: Problem) -> None:
        """Raise TileError if `tile` may not run `problem`."""
        ...


@dataclass(frozen=True)
class Running:
    """The code that would run a tile now, to be compared with what a table was made with.

    Attributes:
        compiler: as in `TableHeader`: names and versions with commas between.
        kernel_hash: SHA-256 over the kernels' sources.
        op_version: version of the op's meaning.
        uses: per algorithm, the names in `compiler` that its results depend on; an algorithm that
            is not named depends on all of them.
    """

    compiler: str
    kernel_hash: str
    op_version: int
    uses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The tile of a problem, and why this one.

    Attributes:
        tile: legal for the problem.
        how: "exact", "near", "default" or "pinned".
        row: the table row it comes from; None for the default and for a pinned tile.
        note: one line on rows that could not be used, and on what a near row is from; what a pin
            says of itself; else empty.
        file: the table of `row`.
    """

    tile: Tile
    how: str
    row: TableRow | None = None
    note: str = ""
    file: Path | None = None


@dataclass(frozen=True)
class _Candidate:
    file: Path
    number: int
    row: TableRow


@dataclass(frozen=True, eq=False)
class _Pins:
    """One `pin`: its choices by bucketed problem, and (problem, space) that have been checked."""

    choices: Mapping[Problem, Choice]
    checked: set[tuple[Problem, str]] = field(default_factory=set)


_CHOICES: dict[tuple[Problem, str, int | None], Choice] = {}
_PINS: list[_Pins] = []
_TOLD: set[str] = set()


def lookup(
    problem: Problem,
    space: Space,
    *,
    units: int | None = None,
    running: Running | Callable[[], Running] | None = None,
) -> Choice:
    """The tile that `problem` gets.

    The answer is remembered by bucketed problem, space and units until `forget` is called. A pinned
    tile (see `pin`) comes before everything else.

    Args:
        problem: M is bucketed here by `m_bucket`, as the tuner does.
        space: the op's tile space.
        units: cores or compute units that the kernels get; None for those of this machine's own.
        running: the code that would run the tile, or a function that says so. Without it no row
            can be shown to be verified, so the default is chosen and the note says why.

    Raises:
        TileError: a table is damaged; a row in force, or the space's default, breaks a rule. The
            message names file and row. Or a pinned tile breaks one.
    """
    at = problem.bucketed()
    for pins in reversed(_PINS):
        if at in pins.choices:
            if (at, space.name) not in pins.checked:
                space.check(pins.choices[at].tile, at)
                pins.checked.add((at, space.name))
            return pins.choices[at]
    if units is None:
        units = local_units(problem.arch)
    key = (at, space.name, units)
    choice = _CHOICES.get(key)
    if choice is None:
        choice = _CHOICES[key] = _look(key[0], space, units, running)
    return choice


@contextmanager
def pin(tiles: Mapping[Problem, Tile], note: str = "") -> Iterator[None]:
    """While the block runs, `lookup` answers these tiles for these problems, whatever tables say.

    The problems' M is bucketed here, so that a pin holds for its whole bucket. Pins nest: the one
    entered last decides. They hold for the whole process, all of its threads, and `forget` leaves
    them. What has already asked for its tile (a captured decode program, say) keeps it.

    Args:
        tiles: by problem, a tile of the space that its lookup will name.
        note: the `note` of the choices, such as who set them.

    Raises:
        ValueError: two of the problems fall into one bucket and name different tiles.
    """
    choices: dict[Problem, Choice] = {}
    for problem, tile in tiles.items():
        at = problem.bucketed()
        if choices.setdefault(at, Choice(tile, "pinned", None, note)).tile != tile:
            raise ValueError(
                f"two tiles are pinned to {problem_text(at)}: {choices[at].tile} and {tile}; "
                "batches are rounded up to a bucket, name each bucket once"
            )
    pins = _Pins(choices)
    _PINS.append(pins)
    try:
        yield
    finally:
        _PINS[:] = [other for other in _PINS if other is not pins]


def forget() -> None:
    """Drop every remembered choice and table: the next lookup reads the files again."""
    _CHOICES.clear()
    _TOLD.clear()
    _load.cache_clear()
    _may_hold.cache_clear()


def user_folder() -> Path:
    """The folder of the user's own tables; it need not exist."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    from platformdirs import user_config_dir

    return Path(user_config_dir("tilewright")) / "tiles"


def user_table_path(arch: str, op: str | None = None) -> Path:
    """Where `tune` writes a table and `lookup` finds it.

    Args:
        arch: architecture of the device.
        op: name of an op whose kernels are not this package's: it has a table of its own.
    """
    return user_folder() / (f"{arch}.json" if op is None else f"{arch}.{op}.json")


def shipped_folder() -> Path:
    """The folder of the tables that come with the package."""
    return Path(__file__).parent / "data"


def table_files(arch: str) -> list[Path]:
    """The table files that lookup considers, in order, `<arch>.json` first in each folder.

    Files that are neither named after the arch nor name it in their header are left out.
    """
    found: list[Path] = []
    for folder in (user_folder(), shipped_folder()):
        own = folder / f"{arch}.json"
        if folder.is_dir():
            files = sorted(
                file
                for file in folder.glob("*.json")
                if not file.name.startswith(".") and _may_hold(file, arch)
            )
            found += sorted(files, key=lambda file: file != own)
    return found


def stale_reason(header: TableHeader, row: TableRow, running: Running) -> str:
    """What has changed since `row` was verified, in a phrase; "" if nothing it depends on has."""
    op = row.problem.op
    version = header.op_versions.get(op)
    if version != running.op_version:
        return f"op {op} is version {running.op_version}, the row is of {version}"
    if header.hash_of(op) != running.kernel_hash:
        return "its kernels have changed"
    then, now = _versions(header.compiler), _versions(running.compiler)
    for name in running.uses.get(row.tile.algorithm, tuple(dict.fromkeys([*then, *now]))):
        if then.get(name) != now.get(name):
            return f"{name} was {then.get(name, 'absent')}, now it is {now.get(name, 'absent')}"
    return ""


def _versions(compiler: str) -> dict[str, str]:
    """{"numba": "0.65.1"} of "numba 0.65.1, ..."."""
    parts = (part.strip().rpartition(" ") for part in compiler.split(","))
    return {name or version: version for name, _, version in parts}


@functools.cache
def _load(path: Path) -> TileTable:
    return load_table(path)


@functools.cache
def _may_hold(path: Path, arch: str) -> bool:
    """Whether a table may be of this arch, by its name or its head: rows are read only then."""
    if path.stem == arch:
        return True
    try:
        head, rows, _ = path.read_text(encoding="utf-8").partition('"rows"')
    except (OSError, UnicodeDecodeError):
        return True  # reading it as a table says what is wrong
    return not rows or json.dumps(arch) in head


def _look(
    problem: Problem,
    space: Space,
    units: int | None,
    running: Running | Callable[[], Running] | None,
) -> Choice:
    notes: list[str] = []
    candidates = list(_usable(problem, units, running, notes))
    note = _one_line(notes)
    key = row_key(problem)
    for found in candidates:
        if row_key(found.row.problem) == key:
            _check_row(found, space)
            return Choice(found.row.tile, "exact", found.row, note, found.file)
    near = [(d, i) for i, c in enumerate(candidates)
            if (d := _distance(problem, c.row.problem)) is not None]  # fmt: skip
    for _, index in sorted(near):
        found = candidates[index]
        _check_row(found, space)
        of = f"the row of {problem_text(found.row.problem)} in {found.file.name}"
        usual = space.default(found.row.problem)
        if found.row.tile == usual:
            # Nothing was better there than the default, which knows this problem's own sizes.
            return _default(problem, space, _one_line([f"as in {of}", *notes]))
        if found.row.source == "tuned" and space.default(problem) != usual:
            continue  # better than another default than this problem's: that says nothing here
        try:
            space.check(found.row.tile, problem)
        except TileError:
            continue  # legal where it was tuned, not here: then it is not near
        return Choice(found.row.tile, "near", found.row, _one_line([of, *notes]), found.file)
    return _default(problem, space, note)


def _default(problem: Problem, space: Space, note: str) -> Choice:
    tile = space.default(problem)
    try:
        space.check(tile, problem)
    except TileError as error:
        raise TileError(
            f"{space.name}: its default for {problem_text(problem)} is not legal: {error}"
        ) from error
    return Choice(tile, "default", None, note)


def _usable(
    problem: Problem,
    units: int | None,
    running: Running | Callable[[], Running] | None,
    notes: list[str],
) -> Iterator[_Candidate]:
    """Rows of this op and kind of problem that are in force, tables in their order.

    Adds to `notes` why others are not.
    """
    if FOLDER_VARIABLE in os.environ and not user_folder().is_dir():
        _add(notes, f"{FOLDER_VARIABLE} names {user_folder()}, which is no folder")
    now: Running | None = None
    for file in table_files(problem.arch):
        table = _load(file)
        header = table.header
        rows = [(n, row) for n, row in enumerate(table.rows, 1) if _kind(row.problem) ==
                _kind(problem)]  # fmt: skip
        if problem.arch not in header.valid_for:
            if file.stem == problem.arch:
                _add(notes, f"{file} is named after {problem.arch} but made for {header.arch}")
            continue
        if not rows:
            continue
        if header.units not in (0, units):
            here = "this machine has no such device" if units is None else f"here are {units}"
            _add(notes, f"{file} was tuned on {header.units} units, {here}")
            continue
        if running is None:
            _add(notes, f"{file}: whether its rows were verified is unknown without running=")
            continue
        if now is None:
            now = running() if callable(running) else running
        for number, row in rows:
            stale = stale_reason(header, row, now)
            if not stale:
                yield _Candidate(file, number, row)
            elif _distance(problem, row.problem) is not None:
                _add(notes, f"{file} is stale: {stale}; {_CURE}")


def _kind(problem: Problem) -> tuple[Any, ...]:
    """What a near row must share with the problem."""
    return (problem.op, problem.act_dtype, problem.weight_type, problem.activations, problem.group)


def _distance(problem: Problem, other: Problem) -> float | None:
    """How far `other` is, in doublings of M (twice), N and K; None if it is not near.

    One row of x is its own case: kernels for it share nothing with those for more. More rows may
    differ by one bucket, N and K by a factor of 4.
    """
    if _kind(problem) != _kind(other) or (problem.M == 1) != (other.M == 1):
        return None
    m, n, k = (
        abs(math.log2(a / b))
        for a, b in ((problem.M, other.M), (problem.N, other.N), (problem.K, other.K))
    )
    if m > 1 or max(n, k) > _MOST_STEPS:
        return None
    return 2 * m + n + k


def is_near(problem: Problem, row: TableRow) -> bool:
    """Whether `lookup` may take this row for a problem that has none of its own."""
    return row_key(row.problem) != row_key(problem) and _distance(problem, row.problem) is not None


def _check_row(found: _Candidate, space: Space) -> None:
    """A row in force must be legal for the problem it was tuned for."""
    try:
        space.check(found.row.tile, found.row.problem)
    except TileError as error:
        raise TileError(
            f"{found.file}, row {found.number} ({problem_text(found.row.problem)}): {error}; "
            "delete the row, or run `tilewright tables validate --fix`"
        ) from error


def _add(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def _one_line(notes: list[str]) -> str:
    """The notes in one line; those about unusable tables are logged once."""
    for note in notes:
        if note.endswith(_CURE) and note not in _TOLD:
            _TOLD.add(note)
            _LOG.warning("%s", note)
    return "; ".join(notes)
