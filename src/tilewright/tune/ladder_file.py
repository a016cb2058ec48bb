"""Ladder files: a base and the change sets that are put on top of it, one rung after the other.

::

    title   = "SmolLM2 on the CPU"
    model   = "smollm2"                # or: spec, and [[products]]
    tests   = ["pp512", "pp2048"]      # the first is the one that rungs are judged by
    control = ["tg32"]                 # must not move, unless a rung says that it may
    blocks  = 12

    [base]
    name = "blas"
    decoder = "transformers"
    [[base.tiles]]
    op = "mmq"
    m = "2-"
    tile = "blas(panel_rows=256)"

    [[rung]]
    name = "panel kernel"
    [[rung.tiles]]
    m = "2-"
    tile = "panel(mr=8, nv=3, block_parts=16)"

    [[rung]]
    name = "8-bit activations"
    activations = "int8"

A change set may set `activations`, `decoder`, `threads`, `table`, `rev` and `env`, and add
`tiles`; of several rules that match a product, the last one holds. Rungs add up: `stack` merges
them. TOML needs nothing; YAML files of the same shape are read where PyYAML is installed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tilewright.errors import FormatError, TileError, UnsupportedError
from tilewright.tiles.tile import Tile
from tilewright.tune.tile_arms import parse_tile

__all__ = ["ChangeSet", "Ladder", "Product", "TileRule", "parse_ladder", "read_ladder", "stack"]

_TOP = ("title", "model", "spec", "products", "tests", "control", "blocks", "base", "rung")
_CHANGE = (
    "name", "activations", "decoder", "threads", "table", "rev", "env", "tiles", "moves",
)  # fmt: skip
_RULE = ("op", "type", "m", "n", "k", "tile")
_PRODUCT = ("type", "shape", "m", "group", "dtype")


@dataclass(frozen=True)
class TileRule:
    """The tile of the products that match: op and type may hold * and ?; None matches all.

    Attributes:
        m: (least, most) bucket of M; most None is no limit.
    """

    tile: Tile
    op: str | None = None
    type: str | None = None
    m: tuple[int, int | None] = (1, None)
    n: int | None = None
    k: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op, "type": self.type, "m": list(self.m), "n": self.n, "k": self.k,
            "tile": self.tile.as_dict(),
        }  # fmt: skip


@dataclass(frozen=True)
class ChangeSet:
    """What one rung changes; None leaves what is below.

    Attributes:
        moves: control tests that this rung may move.
    """

    name: str
    activations: str | None = None
    decoder: str | None = None
    threads: int | None = None
    table: Path | None = None
    rev: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    tiles: tuple[TileRule, ...] = ()
    moves: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "activations": self.activations,
            "decoder": self.decoder,
            "threads": self.threads,
            "table": None if self.table is None else self.table.name,
            "rev": self.rev,
            "env": dict(self.env),
            "tiles": [rule.to_dict() for rule in self.tiles],
            "moves": list(self.moves),
        }


@dataclass(frozen=True)
class Product:
    """Products of one weight type and shape at several M."""

    type: str
    shape: tuple[int, int]
    m: tuple[int, ...]
    group: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True)
class Ladder:
    """A ladder file.

    Attributes:
        title: its heading.
        model: what it is run on, unless the caller names another; None for products.
        spec: op of the products: a name in the catalog, or file.py:NAME.
        products: what is timed instead of a model's tests.
        tests: a model's tests; empty for products.
        control: tests that must not move.
        blocks: None leaves it to the caller.
        base, rungs: the change sets.
    """

    title: str
    base: ChangeSet
    rungs: tuple[ChangeSet, ...]
    model: str | None = None
    spec: str | None = None
    products: tuple[Product, ...] = ()
    tests: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    blocks: int | None = None


def stack(base: ChangeSet, rungs: Sequence[ChangeSet], name: str | None = None) -> ChangeSet:
    """The base with all of these rungs on it."""
    whole = base
    for rung in rungs:
        set_here = {
            key: getattr(rung, key)
            for key in ("activations", "decoder", "threads", "table", "rev")
            if getattr(rung, key) is not None
        }
        whole = replace(
            whole,
            name=rung.name,
            env={**whole.env, **rung.env},
            tiles=(*whole.tiles, *rung.tiles),
            moves=(*whole.moves, *rung.moves),
            **set_here,
        )
    return whole if name is None else replace(whole, name=name)


def read_ladder(path: Path) -> Ladder:
    """Read a ladder file.

    Raises:
        FormatError: it cannot be read, or is not as the module describes; the message says where.
        UnsupportedError: a YAML file, and PyYAML is not installed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"cannot be read: {error}", file=path) from error
    if path.suffix in (".yaml", ".yml"):
        whole = _yaml(text, path)
    else:
        try:
            whole = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise FormatError(f"is no TOML: {error}", file=path) from error
    return parse_ladder(whole, path)


def _yaml(text: str, path: Path) -> Any:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise UnsupportedError(
            f"{path.name} is YAML, which needs PyYAML: pip install pyyaml, or write it as TOML"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FormatError(f"is no YAML: {error}", file=path) from error


class _Reader:
    """One mapping of the file; what it takes out is checked, what is left over is an error."""

    def __init__(self, value: Any, where: str, known: Sequence[str], path: Path) -> None:
        self._where, self._path = where, path
        if not isinstance(value, Mapping):
            self.fail(f"is {value!r}; it must be a table of {', '.join(known)}")
        unknown = [str(key) for key in value if key not in known]
        if unknown:
            self.fail(f"has unknown keys {unknown}; known are {', '.join(known)}")
        self._value = value

    def fail(self, message: str) -> NoReturn:
        raise FormatError(f"{self._where} {message}", file=self._path)

    def take(self, key: str, kind: type, what: str) -> Any:
        """The value at `key`, or None where it is left out."""
        value = self._value.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fail(f"has {key} = {value!r}; it must be {what}")
        return value

    def text(self, key: str) -> str | None:
        value: str | None = self.take(key, str, "a text")
        return value

    def count(self, key: str) -> int | None:
        value: int | None = self.take(key, int, "a whole number of at least 1")
        if value is not None and value < 1:
            self.fail(f"has {key} = {value}; it must be a whole number of at least 1")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._value.get(key, ())
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            self.fail(f"has {key} = {value!r}; it must be a text or a list of texts")
        return tuple(value)

    def counts(self, key: str, size: int | None = None) -> tuple[int, ...]:
        value = self._value.get(key)
        value = [value] if isinstance(value, int) else value
        good = isinstance(value, list) and all(
            isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value
        )
        if not good or not value or (size is not None and len(value) != size):
            self.fail(
                f"has {key} = {value!r}; it must be {size or 'some'} whole numbers of at least 1"
            )
        return tuple(value)

    def choice(self, key: str, allowed: Sequence[str]) -> str | None:
        value = self.text(key)
        if value is not None and value not in allowed:
            self.fail(f"has {key} = {value!r}; it must be one of {', '.join(allowed)}")
        return value

    def items(self, key: str) -> list[Any]:
        value: list[Any] | None = self.take(key, list, "a list of tables")
        return value or []

    def raw(self, key: str) -> Any:
        return self._value.get(key)


def parse_ladder(whole: Any, path: Path) -> Ladder:
    """A ladder from the mapping that its file holds.

    Args:
        whole: what TOML or YAML gave.
        path: the file; tables are found relative to it, and messages name it.

    Raises:
        FormatError: as `read_ladder`.
    """
    top = _Reader(whole, "the file", _TOP, path)
    if top.raw("base") is None or not top.items("rung"):
        top.fail("must have a [base] and at least one [[rung]]")
    base = _change(top.raw("base"), "base", path)
    rungs = tuple(
        _change(rung, f"rung {index}", path) for index, rung in enumerate(top.items("rung"), 1)
    )
    names = [base.name, *(rung.name for rung in rungs)]
    repeated = sorted({n for n in names if names.count(n) > 1} | ({"control"} & set(names)))
    if repeated:
        top.fail(f"uses the names {repeated} twice, or for what has another meaning; rename them")
    products = tuple(
        _product(product, f"product {index}", path)
        for index, product in enumerate(top.items("products"), 1)
    )
    ladder = Ladder(
        title=top.text("title") or path.stem,
        base=base,
        rungs=rungs,
        model=top.text("model"),
        spec=top.text("spec"),
        products=products,
        tests=top.texts("tests"),
        control=top.texts("control"),
        blocks=top.count("blocks"),
    )
    if bool(ladder.tests) == bool(products):
        top.fail("must have either tests, of a model, or [[products]], of an op")
    if products and (ladder.model or ladder.control):
        top.fail("has [[products]], which know no model and no control")
    if set(ladder.tests) & set(ladder.control):
        top.fail("names a test in tests and in control; it must be one of them")
    for change in (base, *rungs):
        strange = sorted(set(change.moves) - set(ladder.control))
        if strange:
            top.fail(f"says {change.name!r} moves {strange}, which control does not name")
    return ladder


def _change(value: Any, where: str, path: Path) -> ChangeSet:
    row = _Reader(value, where, _CHANGE, path)
    name = row.text("name")
    if not name:
        row.fail("must have a name")
    env = row.raw("env") or {}
    if not isinstance(env, Mapping) or not all(isinstance(v, str | int) for v in env.values()):
        row.fail(f"has env = {env!r}; it must map names to texts")
    table = row.text("table")
    if table is not None and not (path.parent / table).is_file():
        row.fail(f"has table = {table!r}; there is no such file beside {path.name}")
    return ChangeSet(
        name=name,
        activations=row.choice("activations", ("float", "int8")),
        decoder=row.choice("decoder", ("auto", "captured", "transformers")),
        threads=row.count("threads"),
        table=None if table is None else (path.parent / table).resolve(),
        rev=row.text("rev"),
        env={str(k): str(v) for k, v in env.items()},
        tiles=tuple(
            _rule(rule, f"{where}, tiles {index},", path)
            for index, rule in enumerate(row.items("tiles"), 1)
        ),
        moves=row.texts("moves"),
    )


def _rule(value: Any, where: str, path: Path) -> TileRule:
    row = _Reader(value, where, _RULE, path)
    given = row.raw("tile")
    try:
        if isinstance(given, str):
            tile = parse_tile(given)
        elif isinstance(given, Mapping):
            tile = Tile.from_mapping(given)
        else:
            row.fail(f"has tile = {given!r}; write it as 'panel(mr=8, nv=3, block_parts=16)'")
    except TileError as error:
        row.fail(f"has a bad tile: {error}")
    return TileRule(
        tile, row.text("op"), row.text("type"), _range(row), row.count("n"), row.count("k")
    )


def _range(row: _Reader) -> tuple[int, int | None]:
    value = row.raw("m")
    if value is None:
        return 1, None
    low, dash, high = str(value).partition("-")
    good = low.isdigit() and int(low) > 0 and (not high or (high.isdigit() and int(high) > 0))
    if isinstance(value, bool) or not good or (dash and high and int(high) < int(low)):
        row.fail(f"has m = {value!r}; give one bucket or a range of them: 512, '2-', '2-64'")
    return int(low), (int(high) if high else None) if dash else int(low)


def _product(value: Any, where: str, path: Path) -> Product:
    row = _Reader(value, where, _PRODUCT, path)
    kind = row.text("type")
    if not kind:
        row.fail("must have a type")
    n, k = row.counts("shape", 2)
    return Product(
        type=kind,
        shape=(n, k),
        m=row.counts("m"),
        group=row.take("group", int, "a whole number"),
        dtype=row.choice("dtype", ("float32", "float16", "bfloat16")) or "float32",
    )
