"""What both kinds of a worker's arms need; `worker.py` loads this file from beside itself.

It is of this revision, whatever revision of the package the process measures, and imports the
package only inside functions.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "TileState",
    "about",
    "arch_of",
    "arch_of_cpu",
    "chosen_tiles",
    "flusher_of",
    "matching_rule",
    "padding",
    "parse_test",
    "require_products",
    "rule_tile",
    "timer_of",
    "verified",
]

_TEST = re.compile(r"(?:pp(\d+))?\+?(?:tg(\d+))?(?: ?@ ?d(\d+))?")


def parse_test(test: str) -> tuple[int, int, int]:
    """Prompt tokens, generated tokens and depth of "pp512", "tg32", "pp512+tg32 @ d1024".

    Raises:
        ValueError: it is none of these.
    """
    match = _TEST.fullmatch(test.strip())
    counts = tuple(int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    if counts[0] + counts[1] == 0:
        raise ValueError(f"test is {test!r}; give pp<n>, tg<n> or pp<n>+tg<n>, with @ d<n> after")
    return counts[0], counts[1], counts[2]


def matching_rule(rules: Sequence[Mapping[str, Any]], problem: Any, m: int) -> int | None:
    """Index of the last rule that names this product at this bucket of M; None if none does.

    A rule is {"op", "type", "m": [low, high or null], "n", "k", "tile"}; what it leaves out
    matches everything, and op and type may hold * and ?.
    """
    found = [index for index, rule in enumerate(rules) if _matches(rule, problem, m)]
    return found[-1] if found else None


def _matches(rule: Mapping[str, Any], problem: Any, m: int) -> bool:
    low, high = rule.get("m") or (1, None)
    return (
        fnmatch.fnmatchcase(problem.op, rule.get("op") or "*")
        and fnmatch.fnmatchcase(problem.weight_type, rule.get("type") or "*")
        and low <= m <= (high or m)
        and rule.get("n") in (None, problem.N)
        and rule.get("k") in (None, problem.K)
    )


def require_products(
    rules: Sequence[Mapping[str, Any]], products: Sequence[tuple[Any, int]]
) -> None:
    for index, rule in enumerate(rules):
        if not any(_matches(rule, problem, m) for problem, m in products):
            raise ValueError(
                f"tiles[{index}] {json.dumps(rule)} names no product of this arm; correct its op, "
                "type, m, n or k"
            )


def rule_tile(rule: Mapping[str, Any], space: Any) -> Any:
    """A rule's tile; `threads`, where its algorithm has that field and the rule does not, is 0."""
    from tilewright.tiles.tile import Tile

    fields = dict(rule["tile"])
    if space is not None and "threads" in space.fields.get(fields.get("algorithm"), ()):
        fields.setdefault("threads", 0)
    return Tile.from_mapping(fields)


class TileState:
    """What `lookup` answers while an arm is at work: its table, and its rules' tiles before that.

    Arms of one process take turns, so each enters its own state first; see `enter`.

    Args:
        table: path of a table that is read in place of the user's own; None leaves those.
        rules: see `matching_rule`.
        problems: the arm's products, at any M; rules decide about them at every bucket of M.

    Attributes:
        algorithms: those that the rules name.

    Raises:
        ValueError: this revision has no tile tables, or tables that cannot pin a tile; a rule names
            no product.
        TileError: the file is no table; a rule's tile may not run a product it matches.
    """

    _active: TileState | None = None
    _undo = contextlib.ExitStack()

    def __init__(
        self, table: str | None, rules: Sequence[Mapping[str, Any]], problems: Sequence[Any]
    ) -> None:
        self.algorithms: set[str] = set()
        self._pins: dict[Any, Any] = {}
        self._folder: str | None = None
        self._tables: Any = None
        try:
            from tilewright.tiles import table as tables
        except ImportError as error:
            if table or rules:
                raise ValueError(
                    "this revision has no tile tables; leave table and tiles out"
                ) from error
            return
        self._tables = tables
        if table:
            tables.load_table(table)
            self._folder = tempfile.mkdtemp(prefix="tilewright-tiles-")
            arch = problems[0].arch if problems else arch_of_cpu()
            shutil.copyfile(table, Path(self._folder) / f"{arch}.json")
        try:
            if rules:
                self._pin(rules, problems)
        except BaseException:
            self.close()
            raise

    def _pin(self, rules: Sequence[Mapping[str, Any]], problems: Sequence[Any]) -> None:
        from tilewright.tiles.tile import Problem, m_bucket

        if not hasattr(self._tables, "pin"):
            raise ValueError(
                "this revision's tables cannot pin tiles; leave tiles out, or give it a table"
            )
        buckets = sorted({m_bucket(2**i) for i in range(20)})
        require_products(rules, [(problem, m) for problem in problems for m in buckets])
        for problem in problems:
            space = space_of(problem)
            for m in buckets:
                index = matching_rule(rules, problem, m)
                if index is None:
                    continue
                at = Problem(**{**problem.__dict__, "M": m})
                tile = rule_tile(rules[index], space)
                space.check(tile, at)
                self.algorithms.add(tile.algorithm)
                self._pins[at] = tile

    def enter(self) -> None:
        """Make every lookup of this process answer as this arm's users would be answered."""
        if TileState._active is self:
            return
        TileState._leave()
        if self._tables is not None:
            variable = self._tables.FOLDER_VARIABLE
            with contextlib.ExitStack() as stack:
                stack.callback(_set_variable, variable, os.environ.get(variable))
                if self._folder is not None:
                    os.environ[variable] = self._folder
                self._tables.forget()
                if self._pins:
                    stack.enter_context(self._tables.pin(self._pins, "set by the change set"))
                TileState._undo = stack.pop_all()
        TileState._active = self

    @staticmethod
    def _leave() -> None:
        """Undo what `enter` has done."""
        TileState._active = None
        TileState._undo.close()

    def close(self) -> None:
        """Remove what this arm has set and written."""
        if TileState._active is self:
            TileState._leave()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def chosen_tiles(problems: Sequence[Any], batches: Sequence[int]) -> list[dict[str, Any]]:
    """What `lookup` gives each product at each M; empty in a revision without tables."""
    try:
        from tilewright.ops.choose import choose_tile
    except ImportError:
        return []
    from tilewright.tiles.tile import Problem

    chosen = []
    for problem in problems:
        for m in batches:
            at = Problem(**{**problem.__dict__, "M": m})
            choice = choose_tile(at, space_of(problem))
            row = {name: getattr(at, name) for name in ("op", "weight_type", "M", "N", "K")}
            chosen.append({**row, "tile": str(choice.tile), "how": choice.how, "note": choice.note})
    return chosen


def verified(rows: Sequence[Any]) -> dict[str, Any]:
    failures = [
        f"{row.label} {row.case}" + (f", tile {row.tile}" if row.tile else "") + f": {row.reason}"
        for row in rows
        if not row.passed
    ]
    return {"rows": len(rows), "failures": failures}


def arch_of_cpu() -> str:
    from tilewright.device import cpu_device

    return cpu_device().arch


def arch_of_model(model: Any) -> str:
    """The arch of the device that a model lies on."""
    if model.device.type == "cpu":
        return arch_of_cpu()
    from tilewright import device

    return device.arch_of(model.device)


def space_of(problem: Any) -> Any:
    """The tile space of a problem's op on the problem's arch."""
    from tilewright.ops import catalog

    if hasattr(catalog, "spec_for"):
        return catalog.spec_for(problem.op, problem.arch).space()  # type: ignore[misc]
    return catalog.find_spec(problem.op).space()  # type: ignore[misc]


def arch_of(spec: Any) -> str:
    """The arch of the device that an op's operands lie on; this CPU's in an older revision."""
    try:
        from tilewright.ops.contract import spec_arch
    except ImportError:
        return arch_of_cpu()
    return spec_arch(spec)


def timer_of(device: Any) -> Callable[[Callable[[], Any], int], float]:
    """What times back-to-back launches on a torch device: (launch, launches) -> microseconds.

    On a GPU a call returns before its work is done, so the GPU's own events are read there.
    """
    if device.type == "cpu":
        return _time_on_cpu
    from tilewright.measure import EventClock

    return EventClock(device.index).time_us


def _time_on_cpu(launch: Callable[[], Any], launches: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(launches):
        launch()
    return (time.perf_counter_ns() - start) / 1e3


def flusher_of(device: Any) -> Callable[[], Any]:
    """What empties the caches of a torch device."""
    from tilewright.measure import CpuFlusher, GpuFlusher

    return CpuFlusher() if device.type == "cpu" else GpuFlusher(device)


def padding() -> Any:
    """Memory of a random size: what is allocated while it is held lies elsewhere than before."""
    import torch

    return torch.empty(random.randrange(1 << 20), dtype=torch.uint8)


def about() -> dict[str, Any]:
    import torch

    from tilewright import __version__

    return {
        "source": str(Path(str(sys.modules["tilewright"].__file__)).parent),
        "version": __version__,
        "threads": torch.get_num_threads(),
    }
