"""Two tiles of an op on its own products: in this process, on common operands, gated and rechecked.

Where the tiles come from tables, each table is read as `lookup` reads it, one after the other.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright.errors import GateError, TileError
from tilewright.measure import Clock, CpuClock, EventClock, Work
from tilewright.ops.choose import running_of
from tilewright.ops.contract import Case, Inputs, OpSpec
from tilewright.tiles import table as tables
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.arms import CompareRow, Contest
from tilewright.tune.gate import gate, recheck, watch

__all__ = ["Tiles", "complete_tile", "given_tiles", "parse_tile", "table_tiles", "tile_contests"]

Tiles = Callable[[Problem], tuple[Tile, Tile, str]]
"""(A's tile, B's tile, a note for the row) of a problem."""

_FIELD = re.compile(r"\s*(\w+)\s*=\s*([\w.+-]+)\s*")
_TILE = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*")


def parse_tile(text: str) -> Tile:
    """The tile that `str(tile)` writes: "panel(block_parts=16, mr=8, nv=3, threads=0)".

    Values are whole numbers, True, False, or words. `threads` may be left out: it is then 0, the
    setting of torch.

    Raises:
        TileError: the text is no tile.
    """
    match = _TILE.fullmatch(text)
    fields: dict[str, Any] = {}
    parts = (match.group(2) or "").split(",") if match else [""]
    for part in (p for p in parts if p.strip()):
        pair = _FIELD.fullmatch(part)
        if pair is None or pair.group(1) in fields:
            match = None
            break
        fields[pair.group(1)] = _value(pair.group(2))
    if match is None:
        raise TileError(
            f"tile is {text!r}; write it as algorithm(field=value, ...), such as "
            "panel(mr=8, nv=3, block_parts=16)"
        )
    return Tile.of(match.group(1), **fields)


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else text


def complete_tile(tile: Tile, space: Any) -> Tile:
    """The tile with `threads=0` where its algorithm has that field and the text left it out."""
    names = space.fields.get(tile.algorithm, {})
    if "threads" in names and "threads" not in tile.as_dict():
        return Tile.from_mapping({**tile.as_dict(), "threads": 0})
    return tile


def given_tiles(spec: OpSpec, a: str, b: str) -> Tiles:
    """The same two tiles for every problem, from their texts.

    Raises:
        TileError: a text is no tile.
    """
    space = spec.space() if spec.space is not None else None
    tiles = [parse_tile(text) for text in (a, b)]
    if space is not None:
        tiles = [complete_tile(tile, space) for tile in tiles]
    return lambda problem: (tiles[0], tiles[1], "")


def table_tiles(spec: OpSpec, problems: Sequence[Problem], a: Path, b: Path) -> Tiles:
    """The tiles that two tables give.

    Raises:
        TileError: a file is no table, or a row in force breaks a rule of the space.
        TileError: the op has no tile space, so no table can decide anything.
    """
    if spec.space is None:
        raise TileError(f"op {spec.name} has no tile space, so no table decides about it")
    chosen = [_chosen(spec, problems, path) for path in (a, b)]

    def choose(problem: Problem) -> tuple[Tile, Tile, str]:
        (tile_a, note_a), (tile_b, note_b) = (found[problem] for found in chosen)
        arms = (("A", tile_a, note_a), ("B", tile_b, note_b))
        notes = [f"{name} {tile}" + (f" ({note})" if note else "") for name, tile, note in arms]
        return tile_a, tile_b, ", ".join(notes)

    return choose


def _chosen(
    spec: OpSpec, problems: Sequence[Problem], path: Path
) -> Mapping[Problem, tuple[Tile, str]]:
    assert spec.space is not None
    space, running = spec.space(), running_of(spec)
    found = {}
    for problem in problems:
        with _only_table(path, problem.arch) as folder:
            choice = tables.lookup(problem, space, running=running)
        note = "" if choice.how == "exact" else f"{choice.how}"
        if choice.file is not None and choice.file.parent != folder:
            note = f"from the shipped table {choice.file.name}"
        found[problem] = (choice.tile, "; ".join(n for n in (note, choice.note) if n))
    return found


@contextmanager
def _only_table(path: Path, arch: str) -> Iterator[Path]:
    """Let `lookup` find this table in place of the user's own ones."""
    tables.load_table(path)
    before = os.environ.get(tables.FOLDER_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="tilewright-tiles-") as name:
        folder = Path(name)
        shutil.copyfile(path, folder / f"{arch}.json")
        os.environ[tables.FOLDER_VARIABLE] = name
        tables.forget()
        try:
            yield folder
        finally:
            if before is None:
                del os.environ[tables.FOLDER_VARIABLE]
            else:
                os.environ[tables.FOLDER_VARIABLE] = before
            tables.forget()


class _Launcher:
    """Launches one tile on fixed operands and keeps the last result for the check after timing."""

    def __init__(self, spec: OpSpec, inputs: Inputs, tile: Tile, threads: int | None) -> None:
        self._run, self._inputs, self.tile, self._threads = spec.run, inputs, tile, threads
        self.y: Any = None

    def __call__(self) -> None:
        self.y = self._run(self._inputs, tile=self.tile, threads=self._threads)


def tile_contests(
    spec: OpSpec,
    cases: Sequence[Case],
    tiles: Callable[[Problem], tuple[Tile, Tile, str]],
    *,
    arch: str,
    caches: Sequence[str] = ("hot", "cold"),
    seed: int = 0,
    threads: int | None = None,
    on_gate: Callable[[str], Any] | None = None,
) -> Iterator[Contest | CompareRow]:
    """Contests of two tiles on an op's products, in this process, on common operands.

    Both tiles pass the gate before a contest is made. Where both arms have the same tile, there is
    nothing to time: the row says so.

    Args:
        spec: the op.
        cases: the products.
        tiles: (A's tile, B's tile, a note for the row) of a problem.
        arch: of this machine.
        caches: "hot", "cold" or both.
        seed: draws the operands.
        threads: for the op; None for its default.
        on_gate: called with a line before each check.

    Raises:
        GateError: a tile is wrong; it is not timed.
        TileError: a tile breaks a rule of the space.
    """
    for case in cases:
        problem = case.problem(arch)
        a, b, note = tiles(problem)
        space = spec.space() if spec.space is not None else None
        for tile in (a, b):
            if space is not None:
                space.check(tile, problem)
        if a == b:
            for cache in caches:
                same = f"both arms run {a}, so there is nothing to time"
                yield CompareRow(case.id, cache, None, note="; ".join(t for t in (same, note) if t))
            continue
        for name, tile in (("A", a), ("B", b)):
            if on_gate is not None:
                on_gate(f"{case.id}: checking {name}")
            _require(spec, tile, case, seed, threads, name)
        inputs = watch(spec.make_inputs(case, seed))
        arms = _Launcher(spec, inputs, a, threads), _Launcher(spec, inputs, b, threads)
        for cache in caches:
            yield Contest(
                case.id,
                cache,
                *arms,
                clock=_clock_of(inputs),
                post_check=functools.partial(_recheck, spec, inputs, arms, threads),
                work=Work(flops=spec.flops(problem), bytes=spec.bytes(problem)),
                note=note,
            )


def _clock_of(inputs: Inputs) -> Clock:
    return EventClock(inputs.x.device.index) if inputs.x.device.type == "cuda" else CpuClock()


def _require(
    spec: OpSpec, tile: Tile, case: Case, seed: int, threads: int | None, name: str
) -> None:
    result = gate(spec, tile, [case], seed=seed, threads=threads)
    if not result.passed:
        raise GateError(f"arm {name} is wrong, so nothing is timed: {result}")


def _recheck(spec: OpSpec, inputs: Inputs, arms: Sequence[_Launcher], threads: int | None) -> None:
    for arm in arms:
        recheck(spec, inputs, arm.y, tile=arm.tile, threads=threads).raise_if_failed()
