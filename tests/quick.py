"""Which parameters of a test run by default: some of those that take the same path, not all.

The rest is marked slow, and run by `make test-all`. A kind of input that no quick parameter has
belongs among the quick ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["latin", "one_in"]


def one_in(n: int, values: Iterable[Any], key: Callable[[Any], Any] = lambda _: 0) -> list[Any]:
    """One value in `n` of each group is quick, at least one; from group to group another one.

    Args:
        values: parameters of a test; a tuple is several.
        key: what the values of a group have in common; without it they are one group.
    """
    values = list(values)
    groups: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        groups.setdefault(key(value), []).append(place)
    quick = {
        place
        for shift, places in enumerate(groups.values())
        for rank, place in enumerate(places)
        if (rank + shift) % min(n, len(places)) == 0
    }
    return [_param(value, place in quick) for place, value in enumerate(values)]


def latin(n: int, *axes: Sequence[Any]) -> list[Any]:
    """The product of the axes, one in `n` quick: where positions add up to a multiple of `n`.

    A tuple on an axis is several parameters.
    """
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        picked = (axis[i] for axis, i in zip(axes, places, strict=True))
        values = [v for value in picked for v in (value if isinstance(value, tuple) else (value,))]
        found.append(_param(tuple(values), sum(places) % n == 0))
    return found


def _param(value: Any, quick: bool) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)
