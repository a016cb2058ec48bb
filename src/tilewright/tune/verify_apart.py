"""Verification, and the proof of the gate, by several processes side by side.

Rows and verdicts are those of `tilewright.tune.verify` and `tilewright.tune.gate_proof`, in their
order. What a single process cannot say is said here: which case ended its process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.ops.catalog import SPECS, load_spec
from tilewright.ops.contract import Case, OpSpec
from tilewright.tiles.tile import Tile
from tilewright.tune.apart import Died, apart
from tilewright.tune.gate import GateResult
from tilewright.tune.gate_proof import GateProof, ProofRow, run_trial, trial_row, trials
from tilewright.tune.verify import VerifyReport, VerifyRow, verify_op

__all__ = ["faulted", "prove_apart", "verify_apart"]

# As a GPU's driver begins its faults: every later launch of that process reports the same one.
_FAULTS = ("CUDA error", "HIP error", "Triton Error [CUDA]", "Triton Error [HIP]")


@functools.cache
def _spec(source: str) -> OpSpec:
    """The op in a process of these; the one that started it has audited a user's."""
    if source.partition("@")[0] in SPECS:
        return load_spec(source)
    from tilewright.ops.user_spec import load_user_spec

    return load_user_spec(source, audited=False)


def faulted(text: str) -> bool:
    """Whether an error's text is of a fault after which its process can launch nothing more."""
    return any(fault in text for fault in _FAULTS)


def verify_apart(
    cases: Mapping[str, Sequence[Case]],
    *,
    jobs: int,
    seed: int = 0,
    threads: int = 1,
    on_case: Callable[[VerifyRow, int, int], None] | None = None,
) -> VerifyReport:
    """Run cases of several ops in up to `jobs` processes.

    Args:
        cases: op -> its cases; the op as `tilewright.ops.catalog.load_spec` takes it.
        jobs: processes; each takes the next case when it is free.
        seed: draws the operands.
        threads: of each process, on the CPU.
        on_case: called after each row, in the order they come, with the row, how many have run,
            and how many there are.

    Returns:
        The report, rows in the order of `cases`. A case that ends its process is a failed row;
        KeyboardInterrupt gives the rows that are there, marked incomplete.
    """
    tasks = [(source, case, seed) for source, some in cases.items() for case in some]
    rows: dict[int, VerifyRow] = {}

    def report(complete: bool) -> VerifyReport:
        return VerifyReport(
            tuple(rows[i] for i in sorted(rows)), seed, complete, planned=len(tasks)
        )

    try:
        for index, row in apart(
            _verify_one, tasks, jobs=jobs, threads=threads,
            spent=lambda row: faulted(row.reason),
        ):  # fmt: skip
            if isinstance(row, Died):
                source, case, _ = tasks[index]
                row = _lost(load_spec(source), case, seed, row.reason)
            rows[index] = row
            if on_case is not None:
                on_case(row, len(rows), len(tasks))
    except KeyboardInterrupt:
        return report(False)
    return report(True)


def _verify_one(source: str, case: Case, seed: int) -> VerifyRow:
    (row,) = verify_op(_spec(source), seed=seed, cases=[case]).rows
    return row


def _lost(spec: OpSpec, case: Case, seed: int, reason: str) -> VerifyRow:
    return VerifyRow(
        op=spec.name, title=spec.title, weight_type=case.weight_type, activations=case.activations,
        case=case.id, tile=None, seed=seed, passed=False, nmse=None, worst_ratio=float("inf"),
        worst_index=None, worst_block=None, reason=f"crashed: {reason}", seconds=0.0,
    )  # fmt: skip


def prove_apart(
    source: str,
    *,
    jobs: int,
    seed: int = 0,
    threads: int = 1,
    wanted: Callable[[Case], bool] = lambda case: True,
    on_row: Callable[[ProofRow, int, int], None] | None = None,
) -> GateProof:
    """`tilewright.tune.gate_proof.prove` in up to `jobs` processes.

    Args:
        source: the op, as `tilewright.ops.catalog.load_spec` takes it.
        jobs, threads: as `verify_apart`.
        seed, wanted, on_row: as `prove`.

    Returns:
        The proof. A tile that ends its process is rejected by "launch", as one is that raises.
    """
    spec = load_spec(source)
    plans = list(trials(spec, wanted))
    tasks = [
        (source, None if wrong is None else wrong.tile, tile, case, seed)
        for wrong, tile, case in plans
    ]
    rows: dict[int, ProofRow] = {}

    def proof(complete: bool) -> GateProof:
        return GateProof(tuple(rows[i] for i in sorted(rows)), seed, complete)

    try:
        for index, result in apart(
            _prove_one, tasks, jobs=jobs, threads=threads, spent=_is_spent
        ):  # fmt: skip
            took = 0.0
            if isinstance(result, Died):
                verdict = GateResult(
                    False, "launch", result.reason, plans[index][2].id, 0.0, float("inf"),
                    str(plans[index][1]), seed,
                )  # fmt: skip
            else:
                verdict, took = result
            rows[index] = trial_row(spec, plans[index], verdict, took)
            if on_row is not None:
                on_row(rows[index], len(rows), len(tasks))
    except KeyboardInterrupt:
        return proof(False)
    return proof(True)


def _is_spent(result: Any) -> bool:
    """Whether a tile left its process in a state that is nobody's to trust: its faults stay, and
    so does what it wrote outside its output."""
    if isinstance(result, Died):
        return faulted(result.reason)
    verdict: GateResult = result[0]
    return faulted(verdict.reason) or verdict.check == "guard-bands"


def _prove_one(
    source: str, wrong: Tile | None, tile: Tile, case: Case, seed: int
) -> tuple[GateResult, float]:
    spec = _spec(source)
    found = next(
        trial
        for trial in trials(spec)
        if trial[1:] == (tile, case) and (None if trial[0] is None else trial[0].tile) == wrong
    )
    return run_trial(spec, found, seed)
