"""What came of verifying one tile, and the gatekeeper that finds out in this process.

`Gatekeeper` is what the tuner asks; `tilewright.tune.isolate` answers from a process of its own,
which asks the `DirectGate` below. A gatekeeper never raises over a tile: whatever is wrong with
one is an `Outcome` with a reason.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from tilewright.errors import TileError
from tilewright.ops.contract import Case, Inputs, OpSpec
from tilewright.tiles.tile import Problem, Tile

__all__ = ["KINDS", "DirectGate", "Gatekeeper", "Outcome", "gate_cases", "plain_number"]

KINDS = {
    "rule": "the tile breaks a rule of its space",
    "compile": "its kernel does not compile",
    "error": "running it raised an exception",
    "crash": "its process died",
    "timeout": "it did not finish in time",
    "memory": "it needed more memory than it may",
    "lost": "the tuner died with it again and again",
    "recheck": "its output was wrong after it had been timed",
    "time": "its time was no finite number above 0",
}
"""Reasons of rejection beside the names of the gate's checks, and what they mean."""

_MOST_CASES = 14
_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory")


@dataclass(frozen=True)
class Outcome:
    """The answer on one tile.

    Attributes:
        passed: it passed every check.
        kind: "" when it passed; else a key of `KINDS`, or the name of the check that failed.
        reason: in words; empty when it passed.
        case: id of the case that failed, where one did.
        oracle_error: the gate's figure; None where no case was finished.
        seconds: what the verification took.
        compile_s: what the first run of the tile took, most of it compiling.
    """

    passed: bool
    kind: str = ""
    reason: str = ""
    case: str = ""
    oracle_error: float | None = None
    seconds: float = 0.0
    compile_s: float | None = None

    @property
    def check(self) -> str | None:
        """Name of the gate's check that failed; None for the reasons of `KINDS`."""
        return self.kind if self.kind and self.kind not in KINDS else None

    def as_dict(self) -> dict[str, Any]:
        """Values of JSON."""
        row = dict(self.__dict__)
        row["oracle_error"] = plain_number(self.oracle_error)
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Outcome:
        return cls(**row)


class Gatekeeper(Protocol):
    """What the tuner asks before it times a tile."""

    def prepare(self, problem: Problem) -> None:
        """Draw the operands and compute the oracle's results, so that `check` costs a tile's time.

        Raises:
            TilewrightError: the op's own oracle fails on this problem.
        """
        ...

    def check(self, problem: Problem, tile: Tile) -> Outcome:
        """Verify a tile on a problem."""
        ...

    def planted(self, op: str) -> list[tuple[Tile, str, Outcome]]:
        """Verify the tiles that an op's space holds as wrong on purpose: tile, fault, outcome."""
        ...

    def close(self) -> None: ...


def plain_number(value: float | None) -> float | None:
    """`value`, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


class DirectGate:
    """Verifies in this process: what a wrong tile does to it, it does to us.

    Args:
        specs: ops by name.
        seed: draws the operands.
    """

    def __init__(self, specs: Mapping[str, OpSpec], *, seed: int = 0) -> None:
        self._given = specs
        self._specs: dict[str, OpSpec] = {}
        self._seed = seed

    def prepare(self, problem: Problem) -> None:
        self._specs.pop(problem.op, None)  # lets go of the problem before it
        spec = self._spec(problem.op)
        for case in gate_cases(spec, problem):
            inputs = spec.make_inputs(case, self._seed)
            spec.error_model(inputs, spec.reference(inputs))

    def check(self, problem: Problem, tile: Tile) -> Outcome:
        start = time.perf_counter()
        spec = self._spec(problem.op)
        try:
            if spec.space is not None:
                spec.space().check(tile, problem)
        except TileError as error:
            return Outcome(False, "rule", str(error))
        cases = gate_cases(spec, problem, tile)
        first = self._first_run(spec, min(cases, key=lambda c: c.M * c.N * c.K), tile)
        if not isinstance(first, float):
            return replace(first, seconds=time.perf_counter() - start)
        outcome = self._gate(spec, tile, cases)
        return replace(outcome, seconds=time.perf_counter() - start, compile_s=first)

    def planted(self, op: str) -> list[tuple[Tile, str, Outcome]]:
        return []

    def close(self) -> None:
        pass

    def _spec(self, op: str) -> OpSpec:
        if op not in self._specs:
            self._specs[op] = _remembering(self._given[op])
        return self._specs[op]

    def _first_run(self, spec: OpSpec, case: Case, tile: Tile) -> float | Outcome:
        """Seconds of the first run, or why there was none."""
        inputs = spec.make_inputs(case, self._seed)
        start = time.perf_counter()
        try:
            spec.run(inputs, tile=tile)
        except Exception as error:
            return Outcome(False, _kind_of(error), f"{type(error).__name__}: {error}", case.id)
        return time.perf_counter() - start

    def _gate(self, spec: OpSpec, tile: Tile, cases: tuple[Case, ...]) -> Outcome:
        from tilewright.tune.verify import verify_op

        report = verify_op(spec, seed=self._seed, cases=cases, tiles=[tile])
        worst = max((row.worst_ratio for row in report.rows), default=math.inf)
        for row in report.failures:
            return Outcome(False, "oracle", row.reason, row.case, plain_number(worst))
        return Outcome(True, oracle_error=plain_number(worst))


def gate_cases(spec: OpSpec, problem: Problem, tile: Tile | None = None) -> tuple[Case, ...]:
    """The cases on which a tile of `problem` is verified.

    The problem itself; the smallest batch of its bucket at the same shape; and some of the spec's
    own cases of the same type and path with no larger batch: every batch, ragged shape, dtype and
    special property that they have at least once, up to 14.

    Args:
        tile: leave out the spec's cases for which this tile is not legal.
    """
    own = Case(
        problem.op, problem.weight_type, problem.act_dtype, problem.M, problem.N, problem.K,
        problem.group, problem.activations,
    )  # fmt: skip
    chosen = {own.id: own}
    if problem.M > 2:
        ragged = replace(own, M=problem.M // 2 + 1)
        chosen[ragged.id] = ragged
    space = spec.space() if spec.space is not None else None

    def fits(case: Case) -> bool:
        same = (case.weight_type, case.activations) == (problem.weight_type, problem.activations)
        if not same or not 0 < case.M <= problem.M:
            return False
        if space is None or tile is None:
            return True
        return space.broken_rule(tile, case.problem(problem.arch)) is None

    pool = [case for case in spec.cases if fits(case)]
    group = [case for case in pool if case.problem(problem.arch).group == problem.group]
    for case in _diverse(group or pool, problem.act_dtype):
        chosen.setdefault(case.id, case)
    return tuple(chosen.values())


def _diverse(cases: Iterable[Case], act_dtype: str) -> list[Case]:
    """Few cases that have between them what all of them have; small ones first."""
    order = sorted(cases, key=lambda c: (c.act_dtype != act_dtype, c.M * c.N * c.K, c.id))
    seen: set[tuple[str, object]] = set()
    found: list[Case] = []
    for case in order:
        traits: set[tuple[str, object]] = {
            ("M", case.M), ("tail", case.N % 16 != 0), ("K", case.K % 256 != 0),
            ("dtype", case.act_dtype), *(("flag", flag) for flag in case.flags),
        }  # fmt: skip
        if traits - seen and len(found) < _MOST_CASES:
            seen |= traits
            found.append(case)
    return found


def _remembering(spec: OpSpec) -> OpSpec:
    """The spec with the oracle's results of its own inputs kept, which a tile cannot change.

    Only operands that `make_inputs` itself made are recognized; whatever else is passed to the
    oracle is computed.
    """
    keys: weakref.WeakKeyDictionary[Inputs, tuple[str, int]] = weakref.WeakKeyDictionary()
    references: dict[tuple[str, int], Any] = {}
    models: dict[tuple[str, int], Any] = {}

    def make_inputs(case: Case, seed: int) -> Inputs:
        inputs = spec.make_inputs(case, seed)
        keys[inputs] = (case.id, seed)
        return inputs

    def reference(inputs: Inputs) -> Any:
        key = keys.get(inputs)
        if key is None:
            return spec.reference(inputs)
        if key not in references:
            references[key] = spec.reference(inputs)
        return references[key].copy()

    def error_model(inputs: Inputs, ref: Any) -> Any:
        key = keys.get(inputs)
        if key is None:
            return spec.error_model(inputs, ref)
        if key not in models:
            models[key] = spec.error_model(inputs, ref)
        return models[key]

    return replace(spec, make_inputs=make_inputs, reference=reference, error_model=error_model)


def _kind_of(error: Exception) -> str:
    text = str(error).lower()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        phrase in text for phrase in _NO_MEMORY
    ):
        return "memory"
    home = type(error).__module__.split(".")[0]
    return "compile" if home in ("numba", "llvmlite", "triton") else "error"
