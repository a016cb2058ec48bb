"""Proof that the gate works on this machine: wrong tiles fall, right ones pass.

`prove` runs every planted tile of an op's space on its products; the right tile that each pretends
to be on the same products, where the rules allow it; and the space's default tiles on one product
of each weight type and path with one row of x and one with several. A planted tile that gets
through, or a right one that does not, breaks the proof.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tilewright.ops.contract import Case, OpSpec, spec_arch
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile
from tilewright.tune.gate import GateResult, gate, planted, recheck, watch
from tilewright.tune.verify import control_cases, first_of_each

__all__ = [
    "GateProof",
    "ProofRow",
    "Trial",
    "prove",
    "run_trial",
    "trial_of",
    "trial_row",
    "trials",
]

_LAUNCHES = 24  # that stand for timing, before the check after it

Trial = tuple[Planted | None, Tile, Case]
"""A tile on a product, and what is wrong with it; None for a right one."""


@dataclass(frozen=True)
class ProofRow:
    """One tile on one product.

    Attributes:
        op, title: the op's name, and the one that reports print.
        tile: the tile, as text.
        planted: the name of its fault; None for a right tile.
        fault, why_faster: what a planted tile does wrong, and why it would be chosen; else empty.
        case: id of the product.
        result: the gate's verdict.
        seconds: that it took.
    """

    op: str
    title: str
    tile: str
    planted: str | None
    fault: str
    why_faster: str
    case: str
    result: GateResult
    seconds: float

    @property
    def holds(self) -> bool:
        """A planted tile was rejected, or a right one passed."""
        return self.result.passed == (self.planted is None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite become None."""
        row = asdict(self)
        verdict = row["result"]
        for name in ("oracle_error", "worst"):
            if not np.isfinite(verdict[name]):
                verdict[name] = None
        return {**row, "holds": self.holds}


@dataclass(frozen=True)
class GateProof:
    """Rows in the order they ran; `complete` is False after Ctrl-C."""

    rows: tuple[ProofRow, ...]
    seed: int
    complete: bool = True

    @property
    def passed(self) -> bool:
        """Every row holds, and there were wrong tiles and right ones."""
        kinds = {row.planted is None for row in self.rows}
        return self.complete and kinds == {True, False} and not self.failures

    @property
    def failures(self) -> tuple[ProofRow, ...]:
        return tuple(row for row in self.rows if not row.holds)

    @classmethod
    def join(cls, proofs: Iterable[GateProof]) -> GateProof:
        """One proof of those of several ops, made with one seed."""
        several = list(proofs)
        (seed,) = {proof.seed for proof in several}
        rows = tuple(row for proof in several for row in proof.rows)
        return cls(rows, seed, all(proof.complete for proof in several))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "passed": self.passed,
            "complete": self.complete,
            "seed": self.seed,
            "rows": [row.as_dict() for row in self.rows],
        }

    def lines(self) -> list[str]:
        """What a terminal shows: every fault with its check and an example, then the failures."""
        lines = []
        for title in dict.fromkeys(row.title for row in self.rows):
            rows = [row for row in self.rows if row.title == title]
            for name in dict.fromkeys(row.planted for row in rows if row.planted is not None):
                lines += _fault_lines(title, name, [r for r in rows if r.planted == name])
            right = [row for row in rows if row.planted is None]
            if right:
                good = sum(row.holds for row in right)
                lines.append(f"{title} right tiles: {good}/{len(right)} passed")
        reasons = [row.result.reason if row.planted is None else None for row in self.failures]
        for row, more in first_of_each(self.failures, reasons):
            if more:
                lines.append(f"FAILED {more} more right tiles fell, in --json: {row.result.reason}")
            elif row.planted is None:
                lines.append(f"FAILED {row.title} a right tile fell: {row.result}")
            else:
                lines.append(
                    f"FAILED {row.title} a planted tile got through: {row.tile} on {row.case}, "
                    f"seed {self.seed}: {row.fault}"
                )
        if self.complete and {row.planted is None for row in self.rows} != {True, False}:
            lines.append("FAILED nothing is proven without both planted and right tiles")
        return [*lines, self._summary()]

    def _summary(self) -> str:
        wrong = [row.holds for row in self.rows if row.planted is not None]
        right = [row.holds for row in self.rows if row.planted is None]
        seconds = sum(row.seconds for row in self.rows)
        line = (
            f"{sum(wrong)}/{len(wrong)} planted tiles rejected, {sum(right)}/{len(right)} right "
            f"tiles passed in {seconds:.1f} s, seed {self.seed}"
        )
        return line if self.complete else f"{line}; interrupted, others did not run"


def _fault_lines(title: str, name: str, rows: list[ProofRow]) -> list[str]:
    caught = [row for row in rows if row.holds]
    checks = ", ".join(dict.fromkeys(str(row.result.check) for row in caught))
    by = f", by {checks}" if checks else ""
    lines = [
        f"{title} {name}: {len(caught)}/{len(rows)} rejected{by}",
        f"    {rows[0].fault.rstrip('.')} (faster: {rows[0].why_faster.rstrip('.')})",
    ]
    if caught:
        first = caught[0].result
        lines.append(f"    {first.case}: {first.reason.partition('; ')[0]}")
    return lines


def prove(
    spec: OpSpec,
    *,
    seed: int = 0,
    wanted: Callable[[Case], bool] = lambda case: True,
    on_row: Callable[[ProofRow, int, int], None] | None = None,
) -> GateProof:
    """Run the op's planted and right tiles through the gate.

    Args:
        spec: the op; one without planted tiles gives a proof that does not pass.
        seed: draws the operands.
        wanted: which products.
        on_row: called after each row with it, rows so far, and rows in all.
    """
    plans = trials(spec, wanted)
    rows: list[ProofRow] = []
    try:
        for plan in plans:
            rows.append(trial_row(spec, plan, *run_trial(spec, plan, seed)))
            if on_row is not None:
                on_row(rows[-1], len(rows), len(plans))
    except KeyboardInterrupt:
        return GateProof(tuple(rows), seed, complete=False)
    return GateProof(tuple(rows), seed)


def trials(spec: OpSpec, wanted: Callable[[Case], bool] = lambda case: True) -> list[Trial]:
    """What `prove` runs, in its order: the planted tiles, then the right ones."""
    plans: list[Trial] = [
        (wrong, wrong.tile, case) for wrong in planted(spec) for case in wrong.cases if wanted(case)
    ]
    honest = ((wrong.honest, case) for wrong, _, case in plans if wrong is not None)
    right = {pair: None for pair in honest if _allowed(spec, *pair)}
    right |= {pair: None for pair in _defaults(spec) if wanted(pair[1])}
    return plans + [(None, tile, case) for tile, case in right]


def _allowed(spec: OpSpec, tile: Tile, case: Case) -> bool:
    """Some planted tiles do what a rule forbids; the tile that they pretend to be is none then."""
    return spec.space is not None and spec.space().is_legal(tile, case.problem(spec_arch(spec)))


def _defaults(spec: OpSpec) -> Iterator[tuple[Tile, Case]]:
    if spec.space is None:
        return
    arch = spec_arch(spec)
    for several in control_cases(spec):
        for case in (spec.fit(replace(several, M=1)), several):
            yield spec.space().default(case.problem(arch)), case


def run_trial(spec: OpSpec, trial: Trial, seed: int) -> tuple[GateResult, float]:
    """The gate's verdict on a trial, and the seconds it took."""
    wrong, tile, case = trial
    start = time.perf_counter()
    run = spec if wrong is None else spec.with_run(wrong.run)
    result = trial_of(run, tile, case, seed=seed)
    return result, time.perf_counter() - start


def trial_row(spec: OpSpec, trial: Trial, result: GateResult, seconds: float) -> ProofRow:
    """What a proof says of a trial."""
    wrong, tile, case = trial
    return ProofRow(
        op=spec.name,
        title=spec.title,
        tile=str(tile),
        planted=None if wrong is None else wrong.name,
        fault="" if wrong is None else wrong.fault,
        why_faster="" if wrong is None else wrong.why_faster,
        case=case.id,
        result=result,
        seconds=seconds,
    )


def trial_of(spec: OpSpec, tile: Tile, case: Case, *, seed: int = 0) -> GateResult:
    """All that a candidate goes through: the gate, launches in the place of timing, the recheck.

    Args:
        spec: the op; `spec.with_run(planted.run)` for a planted tile.
    """
    result = gate(spec, tile, [case], seed=seed)
    if not result.passed:
        return result
    inputs = watch(spec.make_inputs(case, seed))
    for _ in range(_LAUNCHES):
        y = spec.run(inputs, tile=tile)
    after = recheck(spec, inputs, y, tile=tile)
    if not after.passed:
        return replace(after, seed=seed)
    worst = max(result.worst, after.worst)
    return replace(result, worst=worst, oracle_error=max(result.oracle_error, after.oracle_error))
