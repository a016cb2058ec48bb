"""What makes a tile unable to win while it is wrong.

`gate` runs a tile on products and lets it pass only if every check in `CHECKS` holds. Nothing is
timed that has not passed, and no flag turns it off. For each product, in a thread of its own (so
that workspaces which an op keeps per thread begin empty, guarded and full of NaN)::

    A   operands of `seed`          -> the oracle's result, within the error model
    A   again                       -> the same bits
    A'  another x, in x's memory    -> the oracle's result for it; then A, the same bits as before
    B   operands of `seed` + 1      -> the oracle's result for them

After each launch guard bands and operands are compared byte for byte with what they were. The
tuned products come first, ragged ones around the tile's own numbers after them.

`recheck` repeats the comparison after timing, on the very buffers that were timed. Around both::

    inputs = watch(spec.make_inputs(case, seed))
    ...                                             # launches, timed
    recheck(spec, inputs, outputs, tile=tile).raise_if_failed()

The right value always comes from the spec's float64 oracle, which starts from the codes; never from
another tile. A tile that raises is rejected with its reason; one that kills the process is the
affair of `tilewright.tune.isolate`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from tilewright.errors import GateError
from tilewright.ops.contract import Case, Inputs, OpSpec, Results, spec_arch
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile
from tilewright.tune.gate_memory import Guards, Snapshot
from tilewright.tune.gate_shapes import ragged_cases
from tilewright.tune.gate_trial import Rejected, Trial, another

__all__ = ["CHECKS", "GateResult", "gate", "planted", "recheck", "watch"]

CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "oracle": "every element, and the tensor as a whole, agree with the float64 oracle",
        "block-error": "so do each column and each 16 x 16 tile on average, where no single "
        "element stands out",
        "nan-fill": "outputs and workspaces hold NaN before the first launch, so that what was "
        "never written shows",
        "guard-bands": "nothing is written before or behind outputs and workspaces",
        "inputs": "no launch changes an operand",
        "edge-reads": "x lies between NaN, so that what is read past its edges shows",
        "repeat": "two launches agree bit for bit, unless the op declares otherwise",
        "stale-buffer": "another x in the same memory gives that x's result",
        "fresh-operands": "other operands of the same shape, weights included, give theirs",
        "ragged-shapes": "all of this holds around the tile's own numbers too",
        "after-timing": "and on the buffers that were timed, after the last launch",
    }
)
"""What is demanded, by the names that results and tables use.

A tile that raises, or returns no tensor, is rejected under the name "launch", whatever else holds.
"""


@dataclass(frozen=True)
class GateResult:
    """The verdict on one tile.

    Attributes:
        passed: every check holds on every product.
        check: the first check that does not: a key of CHECKS, or "launch"; None when passed.
        reason: what it saw; empty when passed.
        case: id of the product on which it failed.
        oracle_error: the largest NMSE (squared error over squared result) on the tuned products.
        worst: the largest test statistic as a multiple of its limit; above 1 is wrong, and inf
            where there is none.
        tile: the tile, as text.
        seed: draws the operands again.
        cases: products that ran.
    """

    passed: bool
    check: str | None
    reason: str
    case: str | None
    oracle_error: float
    worst: float
    tile: str = ""
    seed: int | None = None
    cases: int = 0

    def __str__(self) -> str:
        if self.passed:
            return f"{self.tile} passed on {self.cases} products"
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.tile} rejected by {self.check!r} on {self.case}{seed}: {self.reason}"

    def raise_if_failed(self) -> None:
        """Raise GateError, with check, case and reason, unless the tile passed."""
        if not self.passed:
            raise GateError(str(self))


def planted(spec: OpSpec) -> list[Planted]:
    """The wrong tiles of the op's space, which the gate must reject; none if it has no space."""
    return [] if spec.space is None else list(spec.space().planted)


def gate(
    spec: OpSpec,
    tile: Tile | None,
    cases: Iterable[Case],
    *,
    seed: int = 0,
    threads: int | None = None,
    _passed: set[tuple[Tile, str]] | None = None,
    _checks: Collection[str] = tuple(CHECKS),
) -> GateResult:
    """Hold one tile to every check, on `cases` and on ragged products around them.

    Args:
        spec: the op. For a planted tile, `spec.with_run(planted.run)`.
        tile: the tile; None for the one that the op chooses.
        cases: the products it is tuned for, one at least.
        seed: draws operands; `seed` + 1 draws the second ones.
        threads: as for the op.
        _passed: tiles and ids of products that this process has seen pass with the same spec and
            seed; ragged ones among them are not run again, and those that pass now are added.
        _checks: for the gate's own tests, which show what each check alone catches.

    Returns:
        The first failure, or that there was none. Whatever the op or its oracle raises is a
        failure; KeyboardInterrupt passes through.

    Raises:
        ValueError: `cases` is empty, or holds only products without a result (M = 0).
    """
    tuned = list(cases)
    if not any(case.M for case in tuned):
        raise ValueError(
            f"cases of {spec.name} hold {len(tuned)} products, none with a result: a tile that ran "
            "on nothing has passed nothing; give the products it is tuned for"
        )
    on = frozenset(_checks)
    trial = Trial(spec, tile, seed, threads, on)
    for case in tuned:
        trial.run(case)
        if trial.failure is not None:
            return _result(trial)
    oracle_error = trial.nmse
    if "ragged-shapes" in on:
        known = {case.id for case in tuned}
        if _passed is not None and tile is not None:
            known |= {case for of, case in _passed if of == tile}
        for case in tuned:
            for ragged in _ragged(spec, tile, case):
                if ragged.id in known:
                    continue
                known.add(ragged.id)
                trial.run(ragged)
                if trial.failure is not None:
                    return replace(_result(trial, ragged=True), oracle_error=oracle_error)
                if _passed is not None and tile is not None:
                    _passed.add((tile, ragged.id))
    return replace(_result(trial), oracle_error=oracle_error)


def _result(trial: Trial, *, ragged: bool = False) -> GateResult:
    check = reason = case = None
    if trial.failure is not None:
        check, reason, failed = trial.failure
        case = failed.id
        if ragged:
            reason = f"right on the tuned shapes, but {check}: {reason}"
            check = "ragged-shapes"
    return GateResult(
        passed=trial.failure is None,
        check=check,
        reason=reason or "",
        case=case,
        oracle_error=trial.nmse,
        worst=trial.worst,
        tile="the op's own tile" if trial.tile is None else str(trial.tile),
        seed=trial.seed,
        cases=trial.cases,
    )


def _ragged(spec: OpSpec, tile: Tile | None, case: Case) -> list[Case]:
    if tile is None:
        tile = _default_tile(spec, case)
    return [] if tile is None else ragged_cases(spec, tile, case)


def _default_tile(spec: OpSpec, case: Case) -> Tile | None:
    return None if spec.space is None else spec.space().default(case.problem(spec_arch(spec)))


def watch(inputs: Inputs) -> Inputs:
    """Remember every byte of the operands, for `recheck`; call it before the first timed launch.

    Returns:
        `inputs` itself.
    """
    object.__setattr__(inputs, "_watched", Snapshot(inputs))
    return inputs


def recheck(
    spec: OpSpec,
    inputs: Inputs,
    outputs: torch.Tensor | Results | Sequence[torch.Tensor | Results],
    *,
    tile: Tile | None = None,
    threads: int | None = None,
) -> GateResult:
    """Hold the results of timed launches to the oracle, and the operands to what they were.

    Args:
        spec: the op.
        inputs: the operands timed, watched (`watch`) before the first launch.
        outputs: the result of the last launch, or of several.
        tile: launch this tile once more, in this thread, with another x in the same memory: shows
            a path that opens only after many launches. Give it for every tile but the op's own
            choice.
        threads: as for the op.

    Returns:
        The verdict, under "inputs" or "after-timing". Operands hold what they held before timing.

    Raises:
        ValueError: `inputs` were not watched, or there are no outputs.
    """
    pristine: Snapshot | None = inputs.__dict__.get("_watched")
    results = [outputs] if isinstance(outputs, torch.Tensor | Results) else list(outputs)
    if pristine is None:
        raise ValueError(
            f"inputs of {inputs.case.id} were not watched, so that what they held before timing is "
            "unknown; call tune.gate.watch(inputs) before the first timed launch"
        )
    if not results:
        raise ValueError(f"outputs of {inputs.case.id} are empty; keep the last result timed")
    trial = Trial(spec, tile, 0, threads, frozenset(CHECKS))
    try:
        changed = pristine.changed()
        if changed is not None:
            raise Rejected("inputs", f"launches changed {changed}, which they may only read")
        right = trial.judged(inputs)
        for y in results:
            trial.compare(y, right, "after-timing", "after the last launch")
        if tile is not None:
            inputs.x.copy_(another(inputs.x))
            y = trial.launch(inputs, Guards())
            now = trial.judged(inputs)
            trial.compare(y, now, "after-timing", "with another x, after the last launch")
    except Rejected as rejected:
        trial.failure = (rejected.check, str(rejected), inputs.case)
    finally:
        pristine.restore()
    return replace(_result(trial), seed=None, cases=1)
