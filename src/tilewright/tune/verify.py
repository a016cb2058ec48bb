"""Run an op on its cases and hold every result to the oracle.

`verify_op` runs a spec's own cases, or those that `problems_to_cases` makes from a model's shapes
and types. One wrong case never hides the next: a crash, a wrong shape, a changed operand are
failed rows with their reason. Counts are read from rows, never from printed text.

`negative_controls` is the check of the check: it corrupts the packed weight in one place, or the
result in a few, and says whether the verdict turned red. A corruption is expected to be caught
where an exact kernel fed with it would leave the error model; where it would not (an 8-bit
activation path that hides it, for instance), the control says so and proves nothing either way.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from tilewright.errors import UnsupportedError
from tilewright.ops.check import CheckResult, ErrorModel, check_output
from tilewright.ops.contract import Case, Inputs, OpSpec, joined, rng_for
from tilewright.tiles.tile import Problem, Tile

__all__ = [
    "MODEL_BATCHES",
    "Control",
    "VerifyGroup",
    "VerifyReport",
    "VerifyRow",
    "control_cases",
    "first_of_each",
    "negative_controls",
    "problems_to_cases",
    "verify_op",
]

MODEL_BATCHES = (1, 5, 16, 17, 63)
"""Rows of x at which a model's own shapes are verified."""

_LARGE_WEIGHT = 1 << 26  # values of W beyond which only batches up to _LARGE_BATCH are run
_LARGE_BATCH = 17
_ZEROED = 0.0005
_ALIKE = 3  # failures for one reason that are written out
_GROUPED = ("w4a16", "ssd")  # ops of which a problem's group is part of the case

T = TypeVar("T")


@dataclass(frozen=True)
class VerifyRow:
    """One case, or one case with one tile, and what came of it.

    Attributes:
        op, title: the op's name, and the one that reports print.
        weight_type, activations: of the case.
        case: the case's id; with `seed` it names the operands.
        tile: the tile that ran, or None where the op chose.
        passed: the result was right.
        nmse: sum of squared errors over sum of squares of the exact result; None after a crash.
        worst_ratio: the largest test statistic as a multiple of its limit; inf when there is none.
        worst_index: [m, n] of the worst element.
        worst_block: [m, n] of the first element of the worst 16 x 16 tile.
        reason: why it failed; empty when it passed.
        seconds: of operands, oracle, op and check together.
    """

    op: str
    title: str
    weight_type: str
    activations: str
    case: str
    tile: str | None
    seed: int
    passed: bool
    nmse: float | None
    worst_ratio: float
    worst_index: tuple[int, int] | None
    worst_block: tuple[int, int] | None
    reason: str
    seconds: float

    @property
    def label(self) -> str:
        """The group it counts in: "MMQ Q4_1", "MMQ Q4_1 int8"."""
        path = "" if self.activations == "float" else f" {self.activations}"
        return f"{self.title} {self.weight_type}{path}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a ratio that is not finite becomes None."""
        row = asdict(self)
        for name in ("nmse", "worst_ratio"):
            if row[name] is not None and not np.isfinite(row[name]):
                row[name] = None
        return row


@dataclass(frozen=True)
class VerifyGroup:
    """How many rows of one op, weight type and activation path passed."""

    label: str
    passed: int
    total: int

    def __str__(self) -> str:
        return f"{self.label} {self.passed}/{self.total} passed"


@dataclass(frozen=True)
class VerifyReport:
    """Rows in the order they ran.

    Attributes:
        complete: every case ran; False after Ctrl-C.
        planned: rows that were to run.
    """

    rows: tuple[VerifyRow, ...]
    seed: int
    complete: bool = True
    planned: int = 0

    @property
    def passed(self) -> bool:
        """Every planned row ran and passed, and there was at least one."""
        return self.complete and bool(self.rows) and not self.failures

    @property
    def failures(self) -> tuple[VerifyRow, ...]:
        return tuple(row for row in self.rows if not row.passed)

    def groups(self) -> tuple[VerifyGroup, ...]:
        """Counts by op, weight type and activation path, in the order they first ran."""
        counts: dict[str, list[int]] = {}
        for row in self.rows:
            count = counts.setdefault(row.label, [0, 0])
            count[0] += row.passed
            count[1] += 1
        return tuple(VerifyGroup(label, *count) for label, count in counts.items())

    @classmethod
    def join(cls, reports: Iterable[VerifyReport]) -> VerifyReport:
        """One report of several: of several ops, say. Their seeds must agree."""
        several = list(reports)
        seeds = {report.seed for report in several}
        if len(seeds) != 1:
            raise ValueError(f"reports hold seeds {sorted(seeds)}; join those of one seed")
        return cls(
            rows=tuple(row for report in several for row in report.rows),
            seed=seeds.pop(),
            complete=all(report.complete for report in several),
            planned=sum(report.planned for report in several),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "passed": self.passed,
            "complete": self.complete,
            "planned": self.planned,
            "seed": self.seed,
            "groups": [asdict(group) for group in self.groups()],
            "rows": [row.as_dict() for row in self.rows],
        }


@dataclass(frozen=True)
class Control:
    """One negative control on one case.

    Attributes:
        name: the corruption.
        case: id of the case.
        label: "MMQ Q4_1", as in a VerifyRow.
        visible: an exact kernel fed with the corrupted operand leaves the error model.
        effect: how far, as a multiple of the limit.
        caught: the op's result on the corrupted operand was rejected.
        reason: what the check said, or the exception; empty when it passed.
    """

    name: str
    case: str
    label: str
    visible: bool
    effect: float
    caught: bool
    reason: str

    @property
    def passed(self) -> bool:
        """Caught, or not visible on this path."""
        return self.caught or not self.visible


def verify_op(
    spec: OpSpec,
    *,
    seed: int = 0,
    cases: Iterable[Case] | None = None,
    tiles: Sequence[Tile] | Callable[[Case], Sequence[Tile]] | None = None,
    threads: int | None = None,
    on_case: Callable[[VerifyRow, int, int], None] | None = None,
) -> VerifyReport:
    """Run an op on cases and check every result against the oracle.

    Args:
        spec: the op.
        seed: draws the operands; a failed row is reproduced by its case id and seed.
        cases: which; None for all of the spec's own.
        tiles: run every case with each of them; a function gives the tiles of each case (not
            every tile is legal for every case); None lets the op choose, as its users do.
        threads: for the op; None for its default.
        on_case: called after each row with the row, how many have run, and how many there are.

    Returns:
        The report. An op, an oracle or a spec that raises gives a failed row; KeyboardInterrupt
        gives the report of what ran, marked incomplete.
    """
    chosen = tuple(spec.cases if cases is None else cases)
    runs = [(case, _tiles_of(case, tiles)) for case in chosen]
    planned = sum(len(some) for _, some in runs)
    rows: list[VerifyRow] = []
    try:
        for row in _rows(spec, runs, seed, threads):
            rows.append(row)
            if on_case is not None:
                on_case(row, len(rows), planned)
    except KeyboardInterrupt:
        return VerifyReport(tuple(rows), seed, complete=False, planned=planned)
    return VerifyReport(tuple(rows), seed, planned=planned)


def _tiles_of(
    case: Case, tiles: Sequence[Tile] | Callable[[Case], Sequence[Tile]] | None
) -> tuple[Tile | None, ...]:
    if tiles is None:
        return (None,)
    return tuple(tiles(case) if callable(tiles) else tiles)


def _rows(
    spec: OpSpec,
    runs: Iterable[tuple[Case, Sequence[Tile | None]]],
    seed: int,
    threads: int | None,
) -> Iterator[VerifyRow]:
    for case, tiles in runs:
        start = time.perf_counter()
        prepared: _Prepared | None = None
        broken = ""
        try:
            prepared = _prepare(spec, case, seed)
        except Exception as error:
            broken = f"its operands or its oracle failed: {_text(error)}"
        for tile in tiles:
            if prepared is None:
                result = CheckResult(False, np.inf, 0.0, np.inf, None, None, broken)
            else:
                result = _run_and_check(spec, prepared, tile, threads)
            now = time.perf_counter()
            yield _row(spec, case, seed, tile, result, now - start)
            start = now


@dataclass(frozen=True, eq=False)
class _Prepared:
    inputs: Inputs
    ref: np.ndarray
    model: ErrorModel


def _prepare(spec: OpSpec, case: Case, seed: int) -> _Prepared:
    inputs = spec.make_inputs(case, seed)
    ref = spec.reference(inputs)
    return _Prepared(inputs, ref, spec.error_model(inputs, ref))


def _run_and_check(
    spec: OpSpec, prepared: _Prepared, tile: Tile | None, threads: int | None
) -> CheckResult:
    inputs = prepared.inputs
    before = inputs.x.clone()
    try:
        y = joined(spec.run(inputs, tile=tile, threads=threads))
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"the op returned a {type(y).__name__}; it must return a tensor")
        result = check_output(y, prepared.ref, prepared.model)
    except Exception as error:
        return CheckResult(False, np.inf, 0.0, np.inf, None, None, f"crashed: {_text(error)}")
    if not torch.equal(before, inputs.x):
        return CheckResult(
            False, result.nmse, result.nmse_limit, np.inf, result.worst_index, result.worst_block,
            "the op changed its input x",
        )  # fmt: skip
    return result


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _row(
    spec: OpSpec, case: Case, seed: int, tile: Tile | None, result: CheckResult, seconds: float
) -> VerifyRow:
    return VerifyRow(
        op=spec.name,
        title=spec.title,
        weight_type=case.weight_type,
        activations=case.activations,
        case=case.id,
        tile=None if tile is None else str(tile),
        seed=seed,
        passed=result.passed,
        nmse=result.nmse if np.isfinite(result.nmse) else None,
        worst_ratio=result.worst_ratio,
        worst_index=result.worst_index,
        worst_block=result.worst_block,
        reason=result.reason,
        seconds=seconds,
    )


def problems_to_cases(
    problems: Iterable[Problem], batches: Sequence[int] = MODEL_BATCHES
) -> dict[str, tuple[Case, ...]]:
    """Cases from a model's own products, by op: its N, K, types and groups; M from `batches`.

    Equal shapes are verified once. Weights are drawn at random: what is verified is the shape and
    the type. A weight of more than 2^26 values (a large vocabulary) runs at batches up to 17, which
    bounds time and memory.

    Raises:
        ValueError: a problem names a dtype or an activation path that a case does not know.
        UnsupportedError: there is no problem.
    """
    found: dict[str, dict[str, Case]] = {}
    for problem in problems:
        large = problem.N * problem.K > _LARGE_WEIGHT
        for m in (m for m in batches if m <= _LARGE_BATCH or not large):
            case = Case(
                problem.op, problem.weight_type, problem.act_dtype, m, problem.N, problem.K,
                problem.group if problem.op in _GROUPED else 0, problem.activations,
            )  # fmt: skip
            found.setdefault(problem.op, {})[case.id] = case
    if not found:
        raise UnsupportedError("the model has no product that runs packed; nothing to verify")
    return {
        op: tuple(sorted(cases.values(), key=lambda c: (str(c.weight_key), c.activations, c.M)))
        for op, cases in found.items()
    }


def control_cases(spec: OpSpec, per_group: int = 1) -> tuple[Case, ...]:
    """Cases on which to run negative controls: for each weight type and activation path, the
    first `per_group` with 17 rows, at least 16 columns and no flags."""
    counts: dict[tuple[str, str], int] = {}
    chosen = []
    for case in spec.cases:
        key = (case.weight_type, case.activations)
        if case.M == 17 and case.N >= 16 and not case.flags and counts.get(key, 0) < per_group:
            counts[key] = counts.get(key, 0) + 1
            chosen.append(case)
    return tuple(chosen)


def negative_controls(
    spec: OpSpec,
    *,
    seed: int = 0,
    cases: Iterable[Case] | None = None,
    threads: int | None = None,
    on_control: Callable[[Control], None] | None = None,
) -> tuple[Control, ...]:
    """Corrupt, run, and see whether the check notices.

    On each case: every corruption of the spec that applies to it, and "zeroed outputs" (0.05 % of
    the result, at least one element, set to zero).

    Args:
        cases: which; None for `control_cases(spec)`.
        on_control: called after each control.

    Returns:
        The controls; the check holds if all of them are `passed` and some are `visible`.
    """
    chosen = control_cases(spec) if cases is None else cases
    controls = []
    for case in chosen:
        if case.M == 0:
            continue
        for control in _controls(spec, case, seed, threads):
            controls.append(control)
            if on_control is not None:
                on_control(control)
    return tuple(controls)


def _controls(spec: OpSpec, case: Case, seed: int, threads: int | None) -> Iterator[Control]:
    prepared = _prepare(spec, case, seed)
    for name, corrupt in spec.corruptions.items():
        corrupted = corrupt(prepared.inputs)
        if corrupted is None:
            continue
        exact = torch.from_numpy(spec.reference(corrupted)).to(prepared.model.out_dtype)
        result = _run_and_check(
            spec, _Prepared(corrupted, prepared.ref, prepared.model), None, threads
        )
        yield _control(spec, name, case, _effect(exact, prepared), result)

    exact = _zero_some(torch.from_numpy(prepared.ref).to(prepared.model.out_dtype), case, seed)
    effect = _effect(exact, prepared)
    zeroing = spec.with_run(
        lambda inputs, tile=None, threads=None: _zero_some(
            joined(spec.run(inputs, tile=tile, threads=threads)), case, seed
        )
    )
    yield _control(
        spec, "zeroed outputs", case, effect, _run_and_check(zeroing, prepared, None, threads)
    )


def _zero_some(y: torch.Tensor, case: Case, seed: int) -> torch.Tensor:
    zeroed = y.clone()
    flat = zeroed.view(-1)
    count = max(1, round(_ZEROED * flat.numel()))
    at = rng_for(seed, case.id, "zeroed").choice(flat.numel(), size=count, replace=False)
    flat[torch.from_numpy(at)] = 0
    return zeroed


def _effect(exact: torch.Tensor, prepared: _Prepared) -> float:
    """By how much a kernel without any error of its own would be over the limit."""
    if not torch.isfinite(exact).all():
        return float("inf")
    return check_output(exact, prepared.ref, prepared.model).worst_ratio


def _control(spec: OpSpec, name: str, case: Case, effect: float, result: CheckResult) -> Control:
    path = "" if case.activations == "float" else f" {case.activations}"
    return Control(
        name=name,
        case=case.id,
        label=f"{spec.title} {case.weight_type}{path}",
        visible=effect > 2,
        effect=effect,
        caught=not result.passed,
        reason=result.reason,
    )


def first_of_each(rows: Sequence[T], reasons: Sequence[str | None]) -> Iterator[tuple[T, int]]:
    """What is written out of rows that failed: the first three for one reason, each with 0, and
    where there are more the last one, with how many that are. Rows without a reason are all."""
    counts, seen = Counter(reasons), Counter[str | None]()
    for row, reason in zip(rows, reasons, strict=True):
        seen[reason] += 1
        if reason is None or seen[reason] <= _ALIKE:
            yield row, 0
        elif seen[reason] == counts[reason]:
            yield row, counts[reason] - _ALIKE
