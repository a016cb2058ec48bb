"""Ladder files as arms of the GPU benchmarks: every rung on what is below it, side by side.

A ladder of float16 change sets may come with a control: a ladder of bfloat16 whose rungs must not
move. Its base and its last rung run in the same blocks.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.measure import judge
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.ladder_file import Ladder, read_ladder, stack

__all__ = ["CONTROL", "judged_against", "judged_pairs", "read_ladder", "stacks_of", "tile_of"]

CONTROL = "control: "
"""What names of the control's arms begin with."""


def stacks_of(ladder: Path, control: Path | None) -> list[tuple[str, str, Sequence[Any]]]:
    """(arm, dtype, tile rules), the base first; rungs add up.

    Raises:
        FormatError: a file is no ladder.
    """
    arms = [(name, "float16", rules) for name, rules in _stacks(read_ladder(ladder))]
    if control is not None:
        stacks = _stacks(read_ladder(control))
        arms += [(f"{CONTROL}{name}", "bfloat16", rules) for name, rules in (stacks[0], stacks[-1])]
    return arms


def _stacks(ladder: Ladder) -> list[tuple[str, Sequence[Any]]]:
    found = [ladder.base]
    found += [stack(ladder.base, ladder.rungs[: i + 1]) for i in range(len(ladder.rungs))]
    return [(change.name, change.tiles) for change in found]


def tile_of(rules: Sequence[Any], problem: Problem) -> Tile | None:
    """The tile of the last rule that names the problem; None if none does."""
    found: Tile | None = None
    for rule in rules:
        low, high = rule.m
        if (
            fnmatch.fnmatchcase(problem.op, rule.op or "*")
            and fnmatch.fnmatchcase(problem.weight_type, rule.type or "*")
            and low <= problem.M <= (math.inf if high is None else high)
            and rule.n in (None, problem.N)
            and rule.k in (None, problem.K)
        ):
            found = rule.tile
    return found


def judged_pairs(
    blocks: Sequence[Mapping[str, Any]], names: Sequence[str], baseline: str
) -> list[dict[str, Any]]:
    """Each arm against the one before it, and against the baseline, from common blocks.

    Args:
        blocks: each with `us` by arm, the baseline's second run as "control" among them.
        names: arms in their order; one of another kind than the arm before it (the control's
            first) is held against the baseline alone.
        baseline: the arm that ran twice.
    """
    us = {name: np.array([block["us"][name] for block in blocks]) for name in (*names, "control")}
    drift = us["control"] / us[baseline]
    rows = []
    for before, name in zip([baseline, *names], names, strict=False):
        pairs = [baseline]
        if before.startswith(CONTROL) == name.startswith(CONTROL):
            pairs.append(before)
        for a in dict.fromkeys(pairs):
            if a != name:
                judgement = judge(us[a], us[name], us[a] * drift, void=_void(blocks))
                rows.append(
                    {"a": a, "b": name, **vars(judgement), "verdict": judgement.verdict.value}
                )
    return rows


def _void(blocks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why blocks prove nothing: as `tilewright.measure.compare_many` has it, clocks held down."""
    states = [block["state"] for block in blocks if block.get("state")]
    seen = {reason for state in states for reason in state.get("throttle", ())}
    return [f"throttled: {', '.join(sorted(seen))}"] if seen else []


def judged_against(
    blocks: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    one: str,
    baseline: str | None = None,
) -> list[dict[str, Any]]:
    """One arm against each of others, from common blocks: a ratio above 1 is that one faster.

    Args:
        blocks: as of `judged_pairs`.
        names: the others.
        one: the arm.
        baseline: the arm that ran twice; None for `one`.
    """
    wanted = {*names, one, baseline or one, "control"}
    us = {name: np.array([block["us"][name] for block in blocks]) for name in wanted}
    drift = us["control"] / us[baseline or one]
    rows = []
    for name in names:
        judgement = judge(us[name], us[one], us[name] * drift, void=_void(blocks))
        rows.append({"a": name, "b": one, **vars(judgement), "verdict": judgement.verdict.value})
    return rows
