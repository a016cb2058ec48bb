"""What came of verifying one tile, and the gatekeeper that finds out in this process.

`Gatekeeper` is what the tuner asks; `tilewright.tune.isolate` answers from a process of its own,
which asks the `DirectGate` below. A gatekeeper never raises over a tile: whatever is wrong with
one is an `Outcome` with a reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from tilewright.errors import GateError, TileError
from tilewright.ops.contract import Case, Inputs, OpSpec
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.gate import CHECKS, GateResult, gate, planted
from tilewright.tune.gate_memory import Snapshot
from tilewright.tune.gate_proof import trial_of

__all__ = [
    "KINDS",
    "DirectGate",
    "Gatekeeper",
    "Outcome",
    "PlantedOutcome",
    "plain_number",
    "problem_case",
]

KINDS = {
    "rule": "the tile breaks a rule of its space",
    "compile": "its kernel does not compile",
    "error": "running it raised an exception",
    "crash": "its process died",
    "timeout": "it did not finish in time",
    "memory": "it needed more memory than it may",
    "lost": "the tuner died with it again and again",
    "time": "its time was no finite number above 0",
}
"""Reasons of rejection beside the names of the gate's checks, and what they mean."""

_WITHOUT_RAGGED = tuple(check for check in CHECKS if check != "ragged-shapes")
_RAISED = "launch"  # the gate's name for a tile that raises
_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory")


@dataclass(frozen=True)
class Outcome:
    """The answer on one tile.

    Attributes:
        passed: it passed every check.
        kind: "" when it passed; else a key of `KINDS`, or the name of the check that failed.
        reason: in words; empty when it passed.
        case: id of the case that failed, where one did.
        oracle_error, worst: figures of the gate's result; None where there are none.
        seconds: what the verification took.
        compile_s: what the first run of the tile took, most of it compiling.
    """

    passed: bool
    kind: str = ""
    reason: str = ""
    case: str = ""
    oracle_error: float | None = None
    worst: float | None = None
    seconds: float = 0.0
    compile_s: float | None = None

    @property
    def check(self) -> str | None:
        """Name of the gate's check that failed; None for the reasons of `KINDS`."""
        return self.kind if self.kind and self.kind not in KINDS else None

    def as_dict(self) -> dict[str, Any]:
        """Values of JSON."""
        figures = {name: plain_number(getattr(self, name)) for name in ("oracle_error", "worst")}
        return {**self.__dict__, **figures}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Outcome:
        return cls(**row)


class PlantedOutcome(NamedTuple):
    """A tile that is wrong on purpose, the sentence that says how, and what came of it."""

    tile: Tile
    fault: str
    outcome: Outcome


class Gatekeeper(Protocol):
    """What the tuner asks before it times a tile."""

    def prepare(self, problem: Problem) -> None:
        """Draw operands and compute the oracle's results, so that `check` costs a tile's time.

        Raises:
            GateError: the op's operands or its oracle fail on this problem.
        """
        ...

    def check(self, problem: Problem, tile: Tile) -> Outcome:
        """Verify a tile on a problem."""
        ...

    def planted(self, problem: Problem) -> list[PlantedOutcome]:
        """Verify the planted wrong tiles of the problem's op, on its weight type if they can be."""
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
        self._specs = specs
        self._seed = seed
        self._passed: dict[str, set[tuple[Tile, str]]] = {}
        self._drawn: tuple[Case, Inputs] | None = None

    def prepare(self, problem: Problem) -> None:
        spec = self._specs[problem.op]
        case = problem_case(problem, spec)
        try:
            self._inputs(spec, case)
        except Exception as error:
            raise GateError(f"no operands of {case.id}: {_text(error)}") from error
        # The gate keeps the oracle's results; around a tile it draws others, as they come.
        gate(spec, None, [case], seed=self._seed, _checks=_WITHOUT_RAGGED)

    def check(self, problem: Problem, tile: Tile) -> Outcome:
        start = time.perf_counter()
        spec = self._specs[problem.op]
        case = problem_case(problem, spec)
        try:
            if spec.space is not None:
                spec.space().check(tile, problem)
        except TileError as error:
            return Outcome(False, "rule", str(error))
        first = self._first_run(spec, case, tile)
        if isinstance(first, Outcome):
            return replace(first, seconds=time.perf_counter() - start)
        passed = self._passed.setdefault(problem.op, set())
        outcome = _outcome(gate(spec, tile, [case], seed=self._seed, _passed=passed))
        return replace(outcome, seconds=time.perf_counter() - start, compile_s=first)

    def planted(self, problem: Problem) -> list[PlantedOutcome]:
        spec = self._specs[problem.op]
        found = []
        for wrong in planted(spec):
            same = [case for case in wrong.cases if case.weight_type == problem.weight_type]
            case = (same or list(wrong.cases))[0]
            result = trial_of(spec.with_run(wrong.run), wrong.tile, case, seed=self._seed)
            found.append(PlantedOutcome(wrong.tile, wrong.fault, _outcome(result)))
        return found

    def close(self) -> None:
        pass

    def _first_run(self, spec: OpSpec, case: Case, tile: Tile) -> float | Outcome:
        """Seconds of the first run, which compiles, or why there was none."""
        inputs = self._inputs(spec, case)
        before = Snapshot(inputs)
        start = time.perf_counter()
        try:
            spec.run(inputs, tile=tile)
        except Exception as error:
            self._drawn = None  # whoever raised may have left anything behind
            return Outcome(False, _kind_of(error), _text(error), case.id)
        seconds = time.perf_counter() - start
        before.restore()
        return seconds

    def _inputs(self, spec: OpSpec, case: Case) -> Inputs:
        """Operands of a case, drawn once for all tiles of the problem that is being tuned: for a
        large weight that takes longer than verifying a tile."""
        if self._drawn is None or self._drawn[0] != case:
            self._drawn = (case, spec.make_inputs(case, self._seed))
        return self._drawn[1]


def problem_case(problem: Problem, spec: OpSpec) -> Case:
    """The case that is this problem; where one has more to say than a problem does, such as how
    many experts there are, the spec's `fit` adds it."""
    return spec.fit(
        Case(
            problem.op, problem.weight_type, problem.act_dtype, problem.M, problem.N, problem.K,
            problem.group, problem.activations,
        )
    )  # fmt: skip


def _outcome(result: GateResult) -> Outcome:
    kind = result.check or ""
    return Outcome(
        passed=result.passed,
        kind="error" if kind == _RAISED else kind,
        reason=result.reason,
        case=result.case or "",
        oracle_error=plain_number(result.oracle_error),
        worst=plain_number(result.worst),
    )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _kind_of(error: Exception) -> str:
    text = str(error).lower()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        phrase in text for phrase in _NO_MEMORY
    ):
        return "memory"
    home = type(error).__module__.split(".")[0]
    return "compile" if home in ("numba", "llvmlite", "triton") else "error"
