"""What `tune_ops.py` tunes: the products of models that users run, and which tiles are tried.

Problems are what the layers of a model multiply as `tilewright.model.join` joins them. Numbers of
rows are chosen for `lookup`, which takes a row for half and twice as many rows of x, and for N and
K within a factor of 4.

Tiles are not listed by hand. For each problem there are the space's default; the defaults of
problems of its kind with other rows and shapes; and tiles that differ from the default in one field
by one step. A kind (op, weight type, dtype, group) compiles a limited number of them, taken from
its problems in turn, so that each brings its best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from tuning import Kind, kind_of_problem

from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["ARCH", "OPS", "Wanted", "shortlists", "wanted"]

ARCH = "sm_90"
_OTHER_CHIPS = ("sm_80", "gfx942")
OPS = ("mmq", "moe", "ssd", "conv1d")


@dataclass(frozen=True)
class Wanted:
    """A problem to tune.

    Attributes:
        problem: M is a bucket.
        name: the model that it is of.
        rank: its turn: the lower, the sooner.
        tiles: how many different ones its kind may compile, all problems of the kind together.
    """

    problem: Problem
    name: str
    rank: int
    tiles: int


# Rows of x. Where a tile serves no more rows than it was tuned with, the default serves those
# between.
_MANY = (1, 8, 64, 128, 512, 2048, 4096)
_SOME = (1, 16, 64, 512, 2048)
_FEW = (1, 64, 512, 2048)
_ENDS = (1, 512)

# Model, weight type, dtype, rank, tiles of its kind, rows of x, and N x K.
_Row = tuple[str, str, str, int, int, Sequence[int], Sequence[tuple[int, int]]]

_LLAMA = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
"""gate and up, down, q, k and v, o of Llama-3-8B; those of half of its layers hold v and down in
Q6_K, and q and k are 5120 rows then, for which the row of 6144 serves."""

_MMQ: tuple[_Row, ...] = (
    ("Llama-3-8B Q4_K_M", "Q4_K", "float16", 0, 28, _MANY, _LLAMA),
    ("Llama-3-8B Q4_K_M", "Q6_K", "float16", 1, 10, _SOME, ((4096, 14336),)),
    ("Llama-3-8B Q4_K_M", "Q4_K", "bfloat16", 2, 12, _FEW, _LLAMA),
    ("SmolLM2-135M Q4_1", "Q4_1", "float16", 3, 5, _ENDS, ((3072, 576), (576, 1536), (960, 576))),
    ("Gemma-3-270m Q4_K_M", "Q5_0", "float16", 3, 5, _ENDS, ((4096, 640), (1536, 640))),
    ("Gemma-3-270m Q4_K_M", "Q4_K", "float16", 3, 28, _ENDS, ((640, 2048),)),
    ("Gemma-3-270m Q4_K_M", "Q6_K", "float16", 3, 10, _ENDS, ((640, 2048),)),
)

_EXPERTS = ((1536, 2048), (2048, 768))
"""gate and up, and down, of each of 128 experts of Qwen3-30B-A3B."""

_SLOTS = (8, 64, 256, 1024, 4096)
"""8 experts for each of 1, 8, 32, 128 and 512 tokens."""

_MOE: tuple[_Row, ...] = (
    ("Qwen3-30B-A3B Q4_K_M", "Q4_K", "float16", 0, 14, _SLOTS, _EXPERTS),
    ("Qwen3-30B-A3B 4-bit", "uint4", "float16", 1, 7, _SLOTS, _EXPERTS),
    ("Qwen3-30B-A3B Q4_K_M", "Q4_K", "bfloat16", 2, 5, (8, 64, 1024), _EXPERTS),
    ("Qwen3-30B-A3B Q4_K_M", "Q6_K", "float16", 3, 4, (8, 64, 1024), _EXPERTS[1:]),
)

_TOKENS = (512, 4096)
_SCANS = (
    ("Nemotron-H-8B", 128, 64, 8),
    ("Nemotron-Nano-9B-v2", 128, 80, 8),
    ("Mamba2-2.7B", 80, 64, 1),
)
"""Model, heads, head dimension, groups; states have 128 numbers."""

_MIXED = 5120 + 2 * 128
"""Channels of the convolution of Mamba2-2.7B: x, B and C."""

_AS_STORED = ("bfloat16", "float16")
"""The dtypes of Mamba-2 models, the one that they are stored in first."""


def _products(op: str, rows: Iterable[_Row], group: int = 0) -> Iterator[Wanted]:
    for name, weight_type, dtype, rank, tiles, batches, shapes in rows:
        # All rows of a weight together: it is drawn once for them.
        for n, k in shapes:
            for m in batches:
                size = group if weight_type.startswith("uint4") else 0
                problem = Problem(op, ARCH, dtype, weight_type, "float", m, n, k, size)
                yield Wanted(problem, name, rank, tiles)


def _scans() -> Iterator[Wanted]:
    for rank, dtype in enumerate(_AS_STORED):
        for name, heads, p, groups in _SCANS:
            for m in _TOKENS:
                problem = Problem(
                    "ssd", ARCH, dtype, f"p{p}", "float", m, heads * p, 128, heads // groups
                )
                yield Wanted(problem, name, rank, 3 if rank else 5)


def _convolutions() -> Iterator[Wanted]:
    # Few tokens: every output is held to the oracle, some millions of them for seconds a tile.
    for rank, dtype in enumerate(_AS_STORED):
        problem = Problem("conv1d", ARCH, dtype, "w4", "float", _TOKENS[0], _MIXED, 4, 0)
        yield Wanted(problem, "Mamba2-2.7B", rank, 4)


def wanted(op: str) -> list[Wanted]:
    """The problems of an op, those that most users meet first."""
    found = {
        "mmq": lambda: _products("mmq", _MMQ),
        "moe": lambda: _products("moe", _MOE, 128),
        "ssd": _scans,
        "conv1d": _convolutions,
    }[op]()
    return sorted(found, key=lambda one: one.rank)


def shortlists(
    asked: Sequence[Wanted], space: TileSpace, most: int = 1000
) -> dict[Problem, tuple[Tile, ...]]:
    """The tiles to try for each problem, the default first, then the likeliest.

    Args:
        asked: problems of one op.
        space: its space.
        most: tiles that a kind may compile, if that is less than its problems say.
    """
    found: dict[Problem, tuple[Tile, ...]] = {}
    limits: dict[Kind, int] = {}
    for one in asked:
        kind = kind_of_problem(one.problem)
        limits[kind] = min(most, max(one.tiles, limits.get(kind, 0)))
    for kind, limit in limits.items():
        own = [one.problem for one in asked if kind_of_problem(one.problem) == kind]
        ranked = [_ranked(problem, own, space, turn) for turn, problem in enumerate(own)]
        chosen: dict[Tile, None] = {}
        for tile in _in_turn(*ranked):
            if len(chosen) < limit:
                chosen.setdefault(tile)
        for problem, tiles in zip(own, ranked, strict=True):
            first = [tile for tile in tiles if tile in chosen]
            others = [tile for tile in chosen if space.is_legal(tile, problem)]
            found[problem] = tuple(dict.fromkeys([*first, *others]))
    return found


def _ranked(problem: Problem, kind: Sequence[Problem], space: TileSpace, turn: int) -> list[Tile]:
    """The default; one tile of each other algorithm; defaults of problems like it, the nearest
    first, and neighbours of the default in turn; neighbours of the other algorithms' tiles.

    Where one algorithm is the default of all problems here, those of other chips tell of others,
    which come last. Neighbours begin with another field at each turn.
    """
    near = sorted(kind, key=lambda other: _apart(problem, other))
    own = _legal(map(space.default, (problem, *near)), problem, space)
    firsts: dict[str, Tile] = {}
    for tile in own:
        firsts.setdefault(str(tile.algorithm), tile)
    first, *rest = (_turned(_one_field_off(tile, problem, space), turn) for tile in firsts.values())
    ranked = [*firsts.values(), *_in_turn(own, first), *_in_turn(*rest)]
    if len(firsts) == 1:
        others = (space.default(replace(problem, arch=arch)) for arch in _OTHER_CHIPS)
        abroad = _legal(others, problem, space)
        ranked += [*abroad, *_in_turn(*(_one_field_off(t, problem, space) for t in abroad))]
    return list(dict.fromkeys(ranked))


def _legal(tiles: Iterable[Tile], problem: Problem, space: TileSpace) -> list[Tile]:
    """Each once, in their order."""
    return [tile for tile in dict.fromkeys(tiles) if space.is_legal(tile, problem)]


def _in_turn(*lists: Iterable[Tile]) -> Iterator[Tile]:
    """The first of each, the second of each, and so on."""
    return (tile for row in zip_longest(*lists) for tile in row if tile is not None)


def _turned(tiles: Iterable[Tile], turn: int) -> list[Tile]:
    found = list(tiles)
    at = turn % len(found) if found else 0
    return [*found[at:], *found[:at]]


def _apart(a: Problem, b: Problem) -> float:
    pairs = ((a.M, b.M), (a.N, b.N), (a.K, b.K))
    return sum(abs(math.log2(one / other)) for one, other in pairs)


def _one_field_off(tile: Tile, problem: Problem, space: TileSpace) -> Iterator[Tile]:
    """Legal tiles that differ in one field, by the least step up and down that gives one."""
    for name, values in space.fields[tile.algorithm].items():
        at = values.index(getattr(tile, name))
        for path in (values[at + 1 :], values[:at][::-1]):
            moved = (tile.replace(**{name: value}) for value in path)
            legal = next((other for other in moved if space.is_legal(other, problem)), None)
            if legal is not None:
                yield legal
