"""The log of tuning: what was tried and measured, in SQLite, written as it happens.

One table of runs and one of events, to both of which rows are only ever added (triggers refuse
anything else). Each event is one transaction in write-ahead mode: a process killed at any point
leaves every finished event and no half of one, and others can read while a run writes.

Events of one problem::

    problem    the tile in use when it was begun
    started    a candidate goes to the gate
    passed     it passed: Outcome
    rejected   it failed, in the gate or later: Outcome
    timing     these tiles are about to run in the tuner's own process
    sampled    one round: microseconds of the incumbent and of each tile
    timed      the tuner survived the timing of these tiles
    left       Ctrl-C ended the work on these tiles
    compared   finalists against the incumbent: Comparisons
    row        the verdict on the problem, with the table row that it gives
    done       a verdict that gives no row

`recall` gives them back as the state of each problem, from which a run continues. A tile that was
begun three times and never came back is taken for the reason why the tuner died; it is not tried
again.
"""

from __future__ import annotations

import datetime
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.errors import TilewrightError
from tilewright.tiles.tile import Problem, Tile

__all__ = [
    "Event",
    "Memory",
    "Record",
    "RunInfo",
    "problem_key",
    "read_events",
    "read_runs",
    "tile_key",
]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    run INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    settings TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS events (
    event INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL REFERENCES runs (run),
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    problem TEXT,
    tile TEXT,
    data TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_of_run ON events (run, event);
"""
_ONLY_ADD = """
CREATE TRIGGER IF NOT EXISTS {table}_{verb} BEFORE {verb} ON {table}
BEGIN SELECT RAISE(ABORT, 'the log is only ever added to'); END;
"""
_APPLICATION = 0x74696C65  # "tile"; marks the file as a log of ours
_LOST_AFTER = 3


def problem_key(problem: Problem) -> str:
    """A problem as the log stores it: JSON with sorted keys."""
    return json.dumps(problem.__dict__, sort_keys=True)


def tile_key(tile: Tile) -> str:
    """A tile as the log stores it: JSON with sorted keys."""
    return json.dumps(tile.as_dict(), sort_keys=True)


@dataclass(frozen=True)
class Event:
    """One line of the log.

    Attributes:
        number: grows by one with each event.
        run: the run it belongs to.
        at: UTC time, ISO 8601.
        kind: see the module.
        problem, tile: what it is about, or None.
        data: the rest.
    """

    number: int
    run: int
    at: str
    kind: str
    problem: Problem | None
    tile: Tile | None
    data: dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """A run: when it began, what identifies the code it ran, and how it was asked."""

    run: int
    at: str
    fingerprint: dict[str, Any]
    settings: dict[str, Any]


@dataclass
class Memory:
    """What the log knows of one problem.

    Attributes:
        incumbent: the tile that the samples are relative to.
        outcomes: data of "passed" or "rejected", the last of each tile.
        lost: tiles that were begun, in the gate or the timing, three times without an answer.
        rounds: data of "sampled", in order.
        compared: data of "compared", in order.
        done: data of "row" or "done", or None.
    """

    incumbent: Tile | None = None
    outcomes: dict[Tile, dict[str, Any]] = field(default_factory=dict)
    lost: set[Tile] = field(default_factory=set)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)
    done: dict[str, Any] | None = None
    _pending: dict[Tile, int] = field(default_factory=dict, repr=False)

    def take(self, event: Event) -> None:
        """Add one event of this problem."""
        kind, tile, data = event.kind, event.tile, event.data
        if kind == "problem":
            if self.incumbent != tile:
                self.rounds.clear()
                self.compared.clear()
            self.incumbent = tile
        elif kind == "started" and tile is not None:
            self._wait_for(tile)
        elif kind in ("passed", "rejected") and tile is not None:
            self.outcomes[tile] = data
            self._answered(tile)
        elif kind == "timing":
            for other in data["tiles"]:
                self._wait_for(Tile.from_mapping(other))
        elif kind == "timed":
            for other in data["tiles"]:
                self._answered(Tile.from_mapping(other))
        elif kind == "left":
            for other in data["tiles"]:
                self._left(Tile.from_mapping(other))
        elif kind == "sampled":
            self.rounds.append(data)
        elif kind == "compared":
            self.compared.append(data)
        elif kind in ("row", "done"):
            self.done = data

    def _wait_for(self, tile: Tile) -> None:
        self._pending[tile] = self._pending.get(tile, 0) + 1
        if self._pending[tile] >= _LOST_AFTER:
            self.lost.add(tile)

    def _left(self, tile: Tile) -> None:
        """It was not the tile that ended the work on it this time."""
        self._pending[tile] = max(0, self._pending.get(tile, 0) - 1)
        if self._pending[tile] < _LOST_AFTER:
            self.lost.discard(tile)

    def _answered(self, tile: Tile) -> None:
        self._pending.pop(tile, None)
        self.lost.discard(tile)


class Record:
    """An open log and the run that is being written to it.

    Args:
        path: the file; it is made, with its folder, when there is none.

    Raises:
        TilewrightError: the file is no log of ours, or another process is tuning with it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        try:
            self._base = _connect(self.path)
            with self._base:
                self._base.executescript(_SCHEMA)
                for table in ("runs", "events"):
                    for verb in ("update", "delete"):
                        self._base.executescript(_ONLY_ADD.format(table=table, verb=verb))
        except BaseException:
            self._unlock()
            raise
        self.run: int | None = None

    def begin(self, fingerprint: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
        """Begin a new run; returns its number."""
        with self._base:
            cursor = self._base.execute(
                "INSERT INTO runs (at, fingerprint, settings) VALUES (?, ?, ?)",
                (_now(), _json(fingerprint), _json(settings)),
            )
        self.run = int(cursor.lastrowid or 0)
        return self.run

    def resume(self, fingerprint: Mapping[str, Any]) -> RunInfo | None:
        """Continue the newest run of this fingerprint; None if there is none."""
        found = self._base.execute(
            "SELECT run, at, fingerprint, settings FROM runs WHERE fingerprint = ? "
            "ORDER BY run DESC LIMIT 1",
            (_json(fingerprint),),
        ).fetchone()
        if found is None:
            return None
        self.run = int(found[0])
        self.add("resumed")
        return RunInfo(self.run, found[1], json.loads(found[2]), json.loads(found[3]))

    def add(
        self,
        kind: str,
        problem: Problem | None = None,
        tile: Tile | None = None,
        **data: Any,
    ) -> None:
        """Write one event, durably against the death of this process."""
        if self.run is None:
            raise RuntimeError("no run has begun")
        with self._base:
            self._base.execute(
                "INSERT INTO events (run, at, kind, problem, tile, data) VALUES (?, ?, ?, ?, ?, ?)",
                (
                    self.run,
                    _now(),
                    kind,
                    None if problem is None else problem_key(problem),
                    None if tile is None else tile_key(tile),
                    _json(data),
                ),
            )

    def recall(self) -> dict[Problem, Memory]:
        """The state of each problem of the present run."""
        found: dict[Problem, Memory] = {}
        for event in _events(self._base, self.run):
            if event.problem is not None:
                found.setdefault(event.problem, Memory()).take(event)
        return found

    def close(self) -> None:
        self._base.close()
        self._unlock()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def read_runs(path: str | os.PathLike[str]) -> list[RunInfo]:
    """The runs of a log, oldest first; may be called while another process writes.

    Raises:
        TilewrightError: there is no such log.
    """
    with _reading(Path(path)) as base:
        rows = base.execute("SELECT run, at, fingerprint, settings FROM runs ORDER BY run")
        return [RunInfo(r[0], r[1], json.loads(r[2]), json.loads(r[3])) for r in rows]


def read_events(path: str | os.PathLike[str], run: int | None = None) -> list[Event]:
    """Events of a log, oldest first; may be called while another process writes.

    Args:
        path: the log.
        run: only those of this run.

    Raises:
        TilewrightError: there is no such log.
    """
    with _reading(Path(path)) as base:
        return list(_events(base, run))


def _events(base: sqlite3.Connection, run: int | None) -> Iterator[Event]:
    rows = base.execute(
        "SELECT event, run, at, kind, problem, tile, data FROM events "
        "WHERE ?1 IS NULL OR run = ?1 ORDER BY event",
        (run,),
    )
    for number, of, at, kind, problem, tile, data in rows:
        yield Event(
            number,
            of,
            at,
            kind,
            None if problem is None else Problem(**json.loads(problem)),
            None if tile is None else Tile.from_mapping(json.loads(tile)),
            json.loads(data),
        )


def _connect(path: Path) -> sqlite3.Connection:
    base = sqlite3.connect(path, timeout=30.0)
    try:
        found = base.execute("PRAGMA application_id").fetchone()[0]
        tables = base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if found != _APPLICATION and tables:
            raise sqlite3.DatabaseError("it is another program's database")
        base.execute("PRAGMA journal_mode = WAL")
        # Safe against the death of a process; only the machine's own can cost the last events.
        base.execute("PRAGMA synchronous = NORMAL")
        base.execute(f"PRAGMA application_id = {_APPLICATION}")
    except sqlite3.Error as error:
        base.close()
        raise TilewrightError(
            f"{path} is no tuning log: {error}; name another file with --log"
        ) from error
    return base


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise TilewrightError(f"{path}: there is no such tuning log; `tilewright tune` writes one")
    try:
        base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30.0)
        try:
            if base.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
                raise sqlite3.DatabaseError("it is another program's database")
            yield base
        finally:
            base.close()
    except sqlite3.Error as error:
        raise TilewrightError(f"{path} is no tuning log: {error}") from error


def _lock(path: Path) -> int | None:
    """Hold the log for this process; the system lets go of it when the process dies."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return None
    handle = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise TilewrightError(
            f"{path}: another process is tuning with this log; wait for it, or name another "
            "with --log and another table with --out"
        ) from None
    return handle


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
