"""Products around a tile's own numbers: where it ends, and where one piece more or less begins.

A tile that covers whole pieces of M, N and K only is right on the shape it was tuned for and wrong
on the next. Its space says how large a piece is (`TileSpace.extents`); where it does not, every
number of the tile may be one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.ops.contract import Case, OpSpec, spec_arch
from tilewright.tiles.tile import Tile

__all__ = ["ragged_cases"]

_USUAL = {"M": 4, "N": 16, "K": 256}  # pieces of a tile that names none
_MOST_K = 8192
_LONG = 256
_MOST = 4096  # a larger number of a tile is no piece that a small product could straddle
_MOST_EXPERTS = 16  # whose number is no number of a tile
_MOST_ROWS = 64  # of a piece that is guessed: fewer rows than a piece are ragged too
_FEW = 4  # of products around a piece that the rules allow
_FLAGS = (("bias", "strided"), ("outliers",), ("transposed",), ("packed", "initial"))


def ragged_cases(spec: OpSpec, tile: Tile, case: Case, *, arch: str | None = None) -> list[Case]:
    """Small products around the pieces of `tile`, of the types and flags of `case`.

    Each of M, N and K is once ragged alone, and all are at once: below one piece, above one, above
    two. A row of a table serves every M of its bucket, so M - 1 is among them. K takes the steps
    that the spec's own cases of this weight type and group take, and N is K where it is in all of
    them. Flags that the spec's cases know (bias, strided and transposed x, outliers) ride along.

    A tile that the rules allow for few of them, because it asks for the rows of `case` or a K as
    long (one row only, K in many shares), gets products with these besides.

    Args:
        arch: whose rules shapes are held to; None for that of the operands. Left out are shapes
            for which the tile breaks a rule of the space that it obeys for `case`.
    """
    found = _around(spec, tile, case, arch)
    if len(found) < _FEW:
        found += _around(spec, tile, case, arch, own=True)
    return list({c.id: c for c in found}.values())


def _around(
    spec: OpSpec, tile: Tile, case: Case, arch: str | None, *, own: bool = False
) -> list[Case]:
    """Legal ragged products; `own` ones have the rows of `case`, and K may be as long as its."""
    pieces = _pieces(spec, tile)
    step = _k_step(spec, case)
    square = all(c.N == c.K for c in (*spec.cases, case))
    flags = _flags(spec, case)
    kept = set(case.flags) - {"edge"}  # which needs more rows than the smallest weights have
    found: dict[str, Case] = {}
    for piece in range(max(len(sizes) for sizes in pieces.values())):
        m, n, k = (sizes[min(piece, len(sizes) - 1)] for sizes in pieces.values())
        whole = _whole(k, step)
        below = max(whole - step, step)
        shapes = [
            (2 * m, 2 * n, whole + step),
            (2 * m, 2 * n + 1, whole),
            (2 * m + 1, 2 * n, whole),
            (max(m - 1, 1), max(n - 1, 1), below),
            (m + 1, n + 1, whole + step),
            (1, 1, step),
            (max(case.M - 1, 1), n + 1, below),
        ]
        for i, (rows, columns, depth) in enumerate(shapes):
            more = set(flags[i % len(flags)]) if i >= 4 and flags else set()
            if case.act_dtype == "float16" and depth < _LONG:
                more.discard("outliers")  # few large weights on them could overflow the output
            experts = min(case.experts, _MOST_EXPERTS)
            for longer in _longer(depth, whole, case.K) if own else (depth,):
                ragged = replace(
                    case, M=case.M if own else rows, N=longer if square else columns, K=longer,
                    flags=tuple({*kept, *more}), experts=experts, top_k=min(case.top_k, experts),
                )  # fmt: skip
                ragged = spec.fit(ragged)
                if _legal(spec, tile, case, ragged, arch):
                    found[ragged.id] = ragged
                    break
    found.pop(case.id, None)
    return list(found.values())


def _longer(depth: int, whole: int, most: int) -> list[int]:
    """`depth`, however long, and the same with whole pieces more up to `most`, the least first."""
    found, pieces = [depth], 1
    while depth + pieces * whole <= most:
        found.append(depth + pieces * whole)
        pieces = 2 * pieces + 1
    return found


def _pieces(spec: OpSpec, tile: Tile) -> dict[str, tuple[int, ...]]:
    """Sizes of the tile's pieces in M, N and K."""
    space = None if spec.space is None else spec.space()
    named: Mapping[str, Sequence[int]] = {}
    if space is not None and space.extents is not None:
        named = space.extents(tile)
        every: tuple[int, ...] = ()
    else:
        numbers = {v for _, v in tile if isinstance(v, int) and 1 < v <= _MOST}
        every = tuple(sorted(numbers))
    most = {"M": _MOST if named else _MOST_ROWS, "N": _MOST, "K": _MOST}
    return {
        d: tuple(e for e in named.get(d, every) if e <= most[d]) or (_USUAL[d],)
        for d in ("M", "N", "K")
    }


def _k_step(spec: OpSpec, case: Case) -> int:
    """What the K of the spec's cases of this type and group are multiples of, and this case's."""
    depths = [c.K for c in spec.cases if (c.weight_type, c.group) == (case.weight_type, case.group)]
    return math.gcd(case.K, *depths)


def _whole(piece: int, step: int) -> int:
    """The smallest K that whole pieces fill, or one close to a piece where that is too large."""
    both = math.lcm(piece, step)
    return both if both <= _MOST_K else -(-piece // step) * step


def _flags(spec: OpSpec, case: Case) -> list[tuple[str, ...]]:
    known = {flag for c in spec.cases for flag in c.flags if c.activations == case.activations}
    kept = [tuple(flag for flag in some if flag in known) for some in _FLAGS]
    return [some for some in kept if some]


def _legal(spec: OpSpec, tile: Tile, case: Case, ragged: Case, arch: str | None) -> bool:
    if spec.space is None:
        return True
    name = spec_arch(spec) if arch is None else arch
    tuned, other = case.problem(name), ragged.problem(name)
    return all(
        rule.holds(tile, other) or not rule.holds(tile, tuned) for rule in spec.space().rules
    )
