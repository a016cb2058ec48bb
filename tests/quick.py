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
    """One value in `n` of each group is quick; from group to group it is another one.

    Args:
        values: parameters of a test; a tuple is several.
        key: what the values of a group have in common; without it they are one group.
    """
    groups: dict[Any, int] = {}
    ranks: dict[Any, int] = {}
    found = []
    for value in values:
        group = key(value)
        shift = groups.setdefault(group, len(groups))
        rank = ranks[group] = ranks.get(group, -1) + 1
        found.append(_param(value, (rank + shift) % n == 0))
    return found


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
