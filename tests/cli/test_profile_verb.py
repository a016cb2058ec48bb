"""`tilewright profile`: the tables, the JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fakes import ScriptedModel
from model.gguf_models import Tiny, write
from tilewright.cli.main import cli
from tilewright.measure import Ceiling
from tilewright.ops.contract import Inputs
from tilewright.ops.mmq import spec as mmq_spec


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write(path, Tiny("llama", {"embd": "Q8_0", "ffn_down": "Q6_K", "": "Q4_1"}))
    return path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["profile", "-t", "1", *arguments])


SMALL = ("-p", "16", "-n", "3", "-r", "2")


def test_hot_types_are_named_with_their_numbers(tiny: Path) -> None:
    result = invoke(str(tiny), *SMALL)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "tiny.gguf: prefill of 16\n" in text
    assert "tiny.gguf: one token at depth 16\n" in text
    assert "Q4_1 (3)" in text
    assert "Hot types: " in text
    assert "(type 14)" in text
    assert "Timing adds " in text
    assert "No ceiling was measured (--ceiling), so none is stated." in text
    assert "Verified: " in text
    assert "of peak" not in text


def test_json_holds_every_row(tiny: Path) -> None:
    result = invoke(str(tiny), *SMALL, "-d", "8", "--activations", "int8", "-o", "json")
    whole = json.loads(result.stdout)
    found = whole["profile"]
    assert found["subject"] == "tiny.gguf"
    assert found["activations"] == "int8"
    assert [(p["name"], p["depth"]) for p in found["phases"]] == [("prefill", 8), ("decode", 24)]
    for phase in found["phases"]:
        assert sum(row["share"] for row in phase["rows"]) == pytest.approx(1.0)
        assert phase["overhead_us"] >= 0
    assert whole["provenance"]["threads"] == 1
    assert whole["notes"][0].startswith("Verified: ")


def test_markdown_states_the_ceiling_it_measured(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tilewright.model.peak.measure_ceiling", lambda threads: Ceiling(4000.0, 900.0)
    )
    text = invoke(str(tiny), *SMALL, "--ceiling", "-o", "md").stdout
    assert text.startswith("### tiny.gguf: prefill of 16\n")
    assert "of peak FLOP/s" in text
    assert "- Ceiling measured here on 1 threads: 4000 GFLOP/s in float32, 900.0 GB/s" in text


def test_a_rate_above_the_ceiling_is_an_error(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tilewright.model.peak.measure_ceiling", lambda threads: Ceiling(1e-3, 900.0)
    )
    result = invoke(str(tiny), *SMALL, "--ceiling")
    assert result.exit_code == 1
    assert "it skipped work, or the clock or the ceiling is wrong" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("skip", [False, True], ids=["verified", "not verified"])
def test_a_wrong_product_is_not_timed(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    real = mmq_spec.SPEC

    def run(inputs: Inputs, **options: Any) -> Any:
        return real.run(inputs, **options) * 1.01

    monkeypatch.setattr(mmq_spec, "SPEC", real.with_run(run))
    result = invoke(str(tiny), *SMALL, *(["--no-verify"] if skip else []))
    assert result.exit_code == (0 if skip else 3)
    if skip:
        assert "Not verified (--no-verify)." in result.stdout
    else:
        assert "so nothing is timed\nFAILED MMQ" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", "0", "-n", "0"], 2, "nothing to time: give -p or -n a value above 0"),
        (["-p", "-1"], 2, "-1 is not in the range"),
        (["-p", "4096"], 1, "do not fit the model's context of 2048"),
    ],
)
def test_bad_calls(tiny: Path, arguments: list[str], code: int, message: str) -> None:
    result = invoke(str(tiny), "--no-verify", *arguments)
    assert result.exit_code == code
    assert message in result.stderr


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    """A model as if it were on a GPU, and a profiler that sees one kernel."""
    from tilewright.model import kernel_time

    model = ScriptedModel()
    rows = kernel_time.group_kernels([("_mmq_kernel", 5.0)], {"_mmq_kernel": ("mmq",)})
    monkeypatch.setattr(kernel_time, "_on_gpu", lambda _: None)
    monkeypatch.setattr(kernel_time, "_profiled", lambda run: rows)
    monkeypatch.setattr("tilewright.cli.profile.load_model", lambda path, **_: (model, None))
    return model


def test_a_gpu_says_how_a_token_was_launched(
    tiny: Path, gpu: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tilewright.model.generate.how_stepped", lambda model, decoder: "a token is one CUDA graph"
    )
    shown = ("--device", "cuda", "-p", "64", "-o", "md", "--no-verify")
    assert "\nA token is one CUDA graph.\n" in invoke(str(tiny), *shown, "-n", "8").stdout
    assert "CUDA graph" not in invoke(str(tiny), *shown, "-n", "0").stdout  # no token was


def test_a_gpu_shows_its_kernels_by_op(tiny: Path, gpu: ScriptedModel) -> None:
    result = invoke(str(tiny), "--device", "cuda", "-p", "64", "-n", "8", "-o", "md", "--no-verify")
    assert result.exit_code == 0, result.output
    assert "tiny.gguf: GPU kernel time by op, pp64" in result.stdout
    assert "tiny.gguf: GPU kernel time by op, tg8 @ d64" in result.stdout
    assert result.stdout.count("Not verified (--no-verify).") == 1
    only = invoke(str(tiny), "--device", "cuda", "-p", "0", "-n", "8", "-o", "json", "--no-verify")
    whole = json.loads(only.stdout)
    assert [report["test"] for report in whole["kernel_time"]] == ["tg8"]
    assert whole["kernel_time"][0]["rows"][0]["op"] == "mmq"
    assert whole["subject"] == "tiny.gguf"


def test_a_gpu_has_no_ceiling_of_the_cpus(tiny: Path) -> None:
    result = invoke(str(tiny), "--device", "cuda", "--ceiling")
    assert result.exit_code == 2
    assert "--ceiling measures the CPU; leave it out with --device cuda" in result.stderr
