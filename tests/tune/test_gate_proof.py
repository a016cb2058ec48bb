"""`tilewright verify --gate`: wrong tiles fall and right ones pass, or it says so and fails."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tilewright.cli.main import cli
from tilewright.ops.catalog import SPECS, spec_for
from tilewright.ops.contract import Case, Inputs, OpSpec
from tilewright.ops.mmq import spec as mmq_spec
from tilewright.ops.space import Planted, TileSpace
from tilewright.tune.gate_proof import GateProof, ProofRow, prove, trials


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["verify", "--gate", "-t", "1", *arguments])


def q4_1(case: Case) -> bool:
    return case.weight_type == "Q4_1"


def space_of(spec: OpSpec) -> TileSpace:
    assert spec.space is not None
    return spec.space()


def few(spec: OpSpec, *names: str) -> OpSpec:
    """The op with some of its planted tiles, on one weight type."""
    space = space_of(spec)
    chosen = tuple(p for p in space.planted if p.name in names)
    assert len(chosen) == len(names)
    cases = tuple(c for c in spec.cases if q4_1(c) and c.activations == "float")
    small = replace(space, planted=chosen)
    return replace(spec, cases=cases, space=lambda: small)


def harmless(spec: OpSpec) -> OpSpec:
    """The op with a planted tile that is right: the gate cannot reject it."""
    space = space_of(spec)
    wrong = space.planted[0]

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Any:
        return spec.run(inputs, tile=wrong.honest, threads=threads)

    planted: Planted = replace(wrong, run=run, cases=tuple(filter(q4_1, wrong.cases)))
    return replace(few(spec), space=lambda: replace(space, planted=(planted,)))


def test_planted_tiles_fall_and_right_ones_pass() -> None:
    seen: list[tuple[ProofRow, int, int]] = []
    spec = few(SPECS["mmq"], "partial-rows", "past-the-end")
    proof = prove(spec, wanted=q4_1, on_row=lambda *row: seen.append(row))
    assert proof.passed
    assert proof.complete
    assert not proof.failures
    wrong = {row.planted: row for row in proof.rows if row.planted}
    assert wrong["partial-rows"].result.check == "ragged-shapes"
    assert wrong["past-the-end"].result.check == "guard-bands"
    right = [row for row in proof.rows if row.planted is None]
    assert {row.case for row in wrong.values()} <= {row.case for row in right}
    defaults = {str(space_of(spec).default(c.problem(""))) for c in spec.cases if c.M in (1, 17)}
    assert defaults <= {row.tile for row in right}
    assert [(row, done, total) for row, done, total in seen] == [
        (row, i + 1, len(proof.rows)) for i, row in enumerate(proof.rows)
    ]


def test_lines_say_fault_check_and_reason() -> None:
    lines = prove(few(SPECS["mmq"], "past-the-end"), wanted=q4_1).lines()
    assert lines[0] == "MMQ past-the-end: 1/1 rejected, by guard-bands"
    assert "stored whole, behind the end of y (faster: no edge tile" in lines[1]
    assert "buffer were written" in lines[2]
    assert lines[3].startswith("MMQ right tiles: 3/3 passed")
    assert lines[-1].startswith("1/1 planted tiles rejected, 3/3 right tiles passed in ")
    assert lines[-1].endswith(", seed 0")


def test_a_planted_tile_that_gets_through_breaks_the_proof() -> None:
    proof = prove(harmless(SPECS["mmq"]), wanted=q4_1)
    assert not proof.passed
    (row,) = proof.failures
    assert row.planted == "partial-rows"
    assert any(line.startswith("FAILED MMQ a planted tile got through: ") for line in proof.lines())


def test_a_right_tile_that_falls_breaks_the_proof() -> None:
    spec = few(SPECS["mmq"], "partial-rows")

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Any:
        return spec.run(inputs, tile=tile, threads=threads) * 1.5

    proof = prove(spec.with_run(run), wanted=q4_1)
    assert not proof.passed
    assert {row.planted for row in proof.failures} == {None}
    assert any("FAILED MMQ a right tile fell: " in line for line in proof.lines())


def test_right_tiles_that_fall_for_one_reason_are_counted() -> None:
    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Any:
        raise RuntimeError("no GPU")

    proof = prove(SPECS["mmq"].with_run(run), wanted=q4_1)
    fell = [row for row in proof.failures if row.planted is None]
    lines = [line for line in proof.lines() if line.startswith("FAILED ")]
    assert len(fell) > 4
    assert len(lines) == 4
    assert lines[3].startswith(f"FAILED {len(fell) - 3} more right tiles fell, in --json: Runtime")


def test_one_kind_alone_proves_nothing() -> None:
    proof = prove(few(SPECS["mmq"]), wanted=q4_1)
    assert proof.rows
    assert not proof.failures
    assert not proof.passed
    assert "FAILED nothing is proven without both planted and right tiles" in proof.lines()


def test_ctrl_c_gives_what_ran() -> None:
    spec = few(SPECS["mmq"], "partial-rows", "past-the-end")

    def stop(row: ProofRow, done: int, total: int) -> None:
        raise KeyboardInterrupt

    proof = prove(spec, wanted=q4_1, on_row=stop)
    assert len(proof.rows) == 1
    assert not proof.complete
    assert not proof.passed
    assert proof.lines()[-1].endswith("interrupted, others did not run")


def test_proofs_of_several_ops_join() -> None:
    mmq = prove(few(SPECS["mmq"], "partial-rows"), wanted=q4_1)
    both = GateProof.join([mmq, GateProof((), 0, complete=False)])
    assert both.rows == mmq.rows
    assert not both.complete
    assert not both.passed


def test_verb_prints_and_exits_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmq_spec, "SPEC", few(mmq_spec.SPEC, "k-tail"))
    result = invoke("--op", "mmq", "--case", "Q4_1")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("MMQ k-tail: 1/1 rejected, by ragged-shapes")


def test_verb_exits_with_3_when_a_planted_tile_gets_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mmq_spec, "SPEC", harmless(mmq_spec.SPEC))
    result = invoke("--op", "mmq", "--json")
    assert result.exit_code == 3
    whole = json.loads(result.stdout)
    assert whole["passed"] is False
    (through,) = [row for row in whole["rows"] if not row["holds"]]
    assert through["planted"] == "partial-rows"
    assert through["result"]["passed"] is True
    assert "date" in whole["provenance"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--negative-controls"], 2, "--gate proves the gate itself"),
        (["--case", "Q9_9"], 2, "no case is left"),
        (["--op", "conv"], 1, "conv"),
    ],
    ids=["controls", "case", "op"],
)
def test_bad_calls(arguments: list[str], code: int, message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == code
    assert message in result.stderr


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1151", "interpreter"])
@pytest.mark.parametrize("op", ["w4a16", "mmq", "moe", "ssd", "conv1d"])
def test_every_right_tile_obeys_the_rules_of_its_chip(op: str, arch: str) -> None:
    """A planted tile may do what a rule forbids: what it pretends to be need not pass then."""
    spec = spec_for(op, arch)
    assert spec.space is not None
    found = trials(spec)
    right = [(tile, case) for wrong, tile, case in found if wrong is None]
    for tile, case in right:
        spec.space().check(tile, case.problem(arch))
    pretended = {(wrong.honest, case) for wrong, _, case in found if wrong is not None}
    legal = {(tile, c) for tile, c in pretended if spec.space().is_legal(tile, c.problem(arch))}
    assert legal <= set(right)
    assert right
    assert legal or arch.startswith("gfx")
