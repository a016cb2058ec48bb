"""`tilewright verify`: hold every op's results against the oracle."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewright.cli.common import (
    ModelPath,
    device_option,
    epilog,
    load_model,
    progress_bar,
    set_threads,
    status,
    threads_option,
)
from tilewright.cli.params import SeedParam

if TYPE_CHECKING:
    from tilewright.ops.contract import Case
    from tilewright.tune.gate_proof import GateProof
    from tilewright.tune.verify import Control, VerifyReport, VerifyRow


@click.command(
    epilog=epilog(
        "tilewright verify",
        "tilewright verify --model smollm2",
        "tilewright verify --op mmq --case Q4_K-M17 --seed 7",
        "tilewright verify --negative-controls --json > verify.json",
        "tilewright verify --gate --op mmq",
        "tilewright verify --op w4a16 --device cuda --jobs 16",
        "tilewright verify --gate --spec my_kernel.py:SPEC",
    )
)
@click.option(
    "--op",
    "ops",
    multiple=True,
    help="Only this op; may be repeated.  [default: all]",
)
@click.option(
    "--spec",
    "specs",
    multiple=True,
    metavar="SPEC",
    help="Your own op: file.py:NAME, package.module:NAME, or an entry point of tilewright.ops.",
)
@click.option(
    "--model",
    type=ModelPath(hub=True),
    metavar="MODEL",
    help="Verify the shapes and types of this model's own products.",
)
@click.option("--case", "case_filter", help="Only cases whose id contains this text.")
@click.option(
    "--activations",
    type=click.Choice(["float", "int8", "all"]),
    default="all",
    show_default=True,
    help="Only cases of this activation path.",
)
@click.option(
    "--seed", type=SeedParam(), default=0, show_default=True, help="Seed of the operands."
)
@click.option(
    "--negative-controls",
    is_flag=True,
    help="Corrupt weights and results on purpose too, and demand that the check notices.",
)
@click.option(
    "--gate",
    is_flag=True,
    help="Instead, prove that the tuner's gate rejects every planted wrong tile and says why, and "
    "lets right tiles pass.",
)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that run cases side by side; on a GPU nearly all of the time is compiling. "
    "Negative controls run in one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@device_option
@threads_option
def verify(
    ops: Sequence[str],
    specs: Sequence[str],
    model: Path | str | None,
    case_filter: str | None,
    activations: str,
    seed: int,
    negative_controls: bool,
    gate: bool,
    jobs: int,
    as_json: bool,
    device: str,
    threads: int | None,
) -> None:
    """Run every op on its cases and hold each result against a float64 oracle.

    Prints passed and total counts for each op and weight type, and every failure with its case,
    the worst element and the seed that repeats it. Exit code 3 if anything failed.
    """
    used = set_threads(threads)
    ops = (*(_on(ops, device) if ops or not specs else ()), *specs)
    from tilewright.report.provenance import provenance

    if gate:
        if model is not None or negative_controls:
            raise click.UsageError(
                "--gate proves the gate itself, on products of its own; leave out --model and "
                "--negative-controls"
            )
        proof = _gate_proof(ops, case_filter, activations, seed, jobs, used)
        if as_json:
            record = provenance(["tilewright", *sys.argv[1:]], threads=used)
            whole = {"provenance": record, **proof.as_dict()}
            click.echo(json.dumps(whole, indent=2, allow_nan=False))
        else:
            click.echo("\n".join(proof.lines()))
        _leave(proof.passed, proof.complete, bool(proof.failures))
        return
    from tilewright.report.verify import (
        control_lines,
        controls_hold,
        failure_lines,
        summary_line,
        verify_json,
    )

    cases = _chosen(_cases(ops, model, device), case_filter, activations)
    report = _verify(cases, seed, jobs, used)
    controls = _controls(cases, seed) if negative_controls and report.complete else []
    good = report.passed and (not negative_controls or controls_hold(controls))
    if as_json:
        record = provenance(["tilewright", *sys.argv[1:]], threads=used)
        click.echo(json.dumps(verify_json(report, controls, record), indent=2, allow_nan=False))
    else:
        for group in report.groups():
            click.echo(str(group))
        for line in failure_lines(report.failures):
            click.echo(line)
        for line in control_lines(controls):
            click.echo(line)
        click.echo(summary_line(report))
    _leave(good, report.complete, bool(report.failures))


def _leave(good: bool, complete: bool, failed: bool) -> None:
    """Exit with what the run deserves; return if it holds."""
    if not complete and not failed:
        sys.exit(130)
    if not good:
        sys.exit(3)


def _on(ops: Sequence[str], device: str) -> tuple[str, ...]:
    """The ops that were named, or all, as `load_spec` takes them for that device."""
    from tilewright.ops.catalog import SPECS

    if device == "cpu":
        return tuple(ops or SPECS)
    names = ops or [op for op, spec in SPECS.items() if device in spec.devices]
    return tuple(name if "@" in name else f"{name}@{device}" for name in names)


def _cases(
    ops: Sequence[str], model: Path | str | None, device: str
) -> dict[str, tuple[Case, ...]]:
    """Cases by op: those of the specs, or those of a model's own products."""
    from tilewright.ops.catalog import load_spec

    specs = {name: load_spec(name) for name in dict.fromkeys(ops)}
    if model is None:
        return {name: spec.cases for name, spec in specs.items()}
    from tilewright.model.check import model_cases

    loaded, _ = load_model(model, activations="float", needs_tokenizer=False, device=device)
    found = model_cases(loaded)
    return {name: found[name] for name in specs if name in found}


def _chosen(
    cases: Mapping[str, Sequence[Case]], text: str | None, activations: str
) -> dict[str, list[Case]]:
    chosen = {
        op: [
            case
            for case in of_op
            if (text is None or text in case.id) and activations in ("all", case.activations)
        ]
        for op, of_op in cases.items()
    }
    chosen = {op: some for op, some in chosen.items() if some}
    if not chosen:
        raise click.UsageError(
            "no case is left; loosen --op, --case or --activations (case ids look like "
            "Q4_1-M17-N97-K576-fp16)"
        )
    return chosen


def _gate_proof(
    ops: Sequence[str], text: str | None, activations: str, seed: int, jobs: int, threads: int
) -> GateProof:
    from tilewright.ops.catalog import load_spec
    from tilewright.tune.gate_proof import GateProof, ProofRow, prove
    from tilewright.tune.verify_apart import prove_apart

    def wanted(case: Case) -> bool:
        named = text is None or text in case.id
        return named and activations in ("all", case.activations)

    with progress_bar("gate") as move:

        def show(row: ProofRow, done: int, total: int) -> None:
            move(done, total, f"{row.title} {row.case}")

        proofs = []
        for op in dict.fromkeys(ops):
            if jobs == 1:
                proofs.append(prove(load_spec(op), seed=seed, wanted=wanted, on_row=show))
            else:
                proofs.append(
                    prove_apart(
                        op, jobs=jobs, seed=seed, threads=max(1, threads // jobs), wanted=wanted,
                        on_row=show,
                    )
                )  # fmt: skip
            if not proofs[-1].complete:
                break
    proof = GateProof.join(proofs)
    if proof.complete and not proof.rows:
        if all(load_spec(op).space is None for op in ops):
            raise click.UsageError(
                f"{' and '.join(dict.fromkeys(ops))}: no tiles are chosen there, so there is "
                "nothing to prove; leave the op out, or name a --device where it has tiles"
            )
        raise click.UsageError("no case is left; loosen --op, --case or --activations")
    return proof


def _verify(
    cases: Mapping[str, Sequence[Case]], seed: int, jobs: int, threads: int
) -> VerifyReport:
    from tilewright.model.check import verify_cases
    from tilewright.tune.verify_apart import verify_apart

    with progress_bar("verify") as move:

        def show(row: VerifyRow, done: int, total: int) -> None:
            move(done, total, row.label)

        if jobs == 1:
            return verify_cases(cases, seed=seed, on_case=show)
        return verify_apart(
            cases, jobs=jobs, seed=seed, threads=max(1, threads // jobs), on_case=show
        )


def _controls(cases: Mapping[str, Sequence[Case]], seed: int) -> list[Control]:
    from tilewright.ops.catalog import load_spec
    from tilewright.tune.verify import negative_controls

    controls: list[Control] = []
    with status("negative controls: corrupting weights and results"):
        for op in cases:
            controls += negative_controls(load_spec(op), seed=seed)
    return controls
