from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tilewright.cli.main import cli
from tilewright.ops.contract import Inputs
from tilewright.ops.mmq import spec as mmq_spec

MANY = ("--op", "mmq", "--case", "Q4_1-M1-")
ONE = ("--op", "mmq", "--case", "Q4_1-M5-", "--activations", "float")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["verify", "-t", "1", *arguments])


def break_one(monkeypatch: pytest.MonkeyPatch, at: tuple[int, int] = (3, 7)) -> None:
    """Make mmq wrong by one element, in float32 cases of some width."""
    real = mmq_spec.SPEC

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Any:
        y = real.run(inputs, tile=tile, threads=threads).clone()
        if inputs.case.act_dtype == "float32" and inputs.case.N > 8:
            y.reshape(-1, y.shape[-1])[at] += 1000.0
        return y

    monkeypatch.setattr(mmq_spec, "SPEC", real.with_run(run))


def test_right_results_give_counts_and_exit_code_0() -> None:
    result = invoke(*ONE)
    assert result.exit_code == 0, result.output
    expected = sum(
        case.id.startswith("Q4_1-M5-") and case.activations == "float"
        for case in mmq_spec.SPEC.cases
    )
    assert expected > 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"MMQ Q4_1 {expected}/{expected} passed"
    assert lines[1].startswith(f"{expected}/{expected} passed in ")
    assert lines[1].endswith("seed 0")


def test_every_failure_names_case_place_and_seed_and_exits_with_3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_one(monkeypatch)
    result = invoke(*ONE, "--seed", "11")
    assert result.exit_code == 3
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    assert failed
    for line in failed:
        assert line.startswith("FAILED MMQ Q4_1 Q4_1-M5-")
        assert "worst at [3, 7]" in line
        assert "seed 11" in line
    total = result.stdout.splitlines()[0].split()[2]
    assert total == f"{int(total.split('/')[1]) - len(failed)}/{total.split('/')[1]}"


def test_json_holds_rows_counts_and_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    break_one(monkeypatch)
    result = invoke(*ONE, "--json")
    assert result.exit_code == 3
    whole = json.loads(result.stdout)
    assert whole["passed"] is False
    assert whole["complete"] is True
    (group,) = whole["groups"]
    rows = whole["rows"]
    assert group["total"] == len(rows)
    assert group["passed"] == sum(row["passed"] for row in rows)
    wrong = next(row for row in rows if not row["passed"])
    assert wrong["worst_index"] == [3, 7]
    assert wrong["seed"] == 0
    assert "date" in whole["provenance"]


def test_a_crash_is_a_failed_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> Any:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(mmq_spec, "SPEC", mmq_spec.SPEC.with_run(run))
    result = invoke(*ONE)
    assert result.exit_code == 3
    assert "crashed: RuntimeError: out of registers" in result.stdout
    assert result.stdout.startswith("MMQ Q4_1 0/")


def test_many_failures_for_one_reason_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> Any:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(mmq_spec, "SPEC", mmq_spec.SPEC.with_run(run))
    wrong = json.loads(invoke(*MANY, "--json").stdout)["rows"]
    failures = [line for line in invoke(*MANY).stdout.splitlines() if line.startswith("FAILED ")]
    crashed = [row for row in wrong if "no GPU" in row["reason"]]
    assert len(crashed) > 4
    assert len(failures) == 4
    assert [line.split(" ")[3] for line in failures[:3]] == [
        row["case"] + "," for row in crashed[:3]
    ]
    more = f"FAILED {len(crashed) - 3} more for the same reason, in --json: "
    assert failures[3] == f"{more}crashed: RuntimeError: no GPU"


def test_ctrl_c_reports_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mmq_spec.SPEC
    ran: list[str] = []

    def run(inputs: Inputs, **options: Any) -> Any:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(inputs.case.id)
        return real.run(inputs, **options)

    monkeypatch.setattr(mmq_spec, "SPEC", real.with_run(run))
    result = invoke(*ONE)
    assert result.exit_code == 130
    assert "2/2 passed" in result.stdout
    assert "interrupted" in result.stdout
    assert "did not run" in result.stdout


def test_negative_controls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mmq_spec.SPEC
    few = [c for c in real.cases if c.weight_type == "Q4_1"]
    monkeypatch.setattr(mmq_spec, "SPEC", replace(real, cases=tuple(few)))
    result = invoke(*ONE, "--negative-controls")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("control ")]
    assert any("'zeroed outputs'" in line for line in lines)
    assert any("nibble" in line or "code" in line for line in lines)
    assert all("0/0" not in line for line in lines)


def test_a_check_that_misses_a_corruption_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mmq_spec.SPEC
    few = tuple(c for c in real.cases if c.weight_type == "Q4_1")

    def blind(inputs: Inputs, ref: Any) -> Any:
        model = real.error_model(inputs, ref)
        model.sigma[...] = 1e6
        return model

    monkeypatch.setattr(mmq_spec, "SPEC", replace(real, cases=few, error_model=blind))
    result = invoke(*ONE, "--negative-controls")
    assert result.exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--op", "conv"], 1, "the catalog has w4a16, mmq, moe"),
        (["--case", "Q9_9"], 2, "no case is left"),
        (["--model", "nosuch.gguf"], 2, "'nosuch.gguf' does not exist"),
        (["--gate", "--op", "moe"], 2, "moe: no tiles are chosen there"),
        (["--gate", "--op", "mmq", "--case", "Q9_9"], 2, "no case is left"),
    ],
    ids=["op", "case", "model", "gate-without-tiles", "gate-case"],
)
def test_bad_calls(arguments: list[str], code: int, message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
