from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fakes import ByteTokenizer, ScriptedModel
from tilewright.cli.main import cli
from tilewright.model.layers import ModelProblem
from tilewright.ops.contract import Inputs
from tilewright.ops.mmq import spec as mmq_spec


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    scripted = ScriptedModel()

    def load(
        path: Path, *, activations: str, needs_tokenizer: bool, device: str
    ) -> tuple[Any, Any]:
        return scripted, ByteTokenizer()

    monkeypatch.setattr("tilewright.cli.bench.load_model", load)
    return scripted


@pytest.fixture
def bench(model: ScriptedModel, tmp_path: Path) -> Any:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(2048))

    def invoke(*arguments: str) -> Result:
        result = CliRunner().invoke(cli, ["bench", str(path), "--no-verify", *arguments])
        assert result.exit_code == 0, result.output
        return result

    return invoke


def names(result: Result) -> list[str]:
    return [row["test"] for row in json.loads(result.stdout)["results"]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["pp512", "tg128"]),
        (["-p", "8,16", "-n", "4"], ["pp8", "pp16", "tg4"]),
        (["-p", "8", "-p", "16", "-n", "0"], ["pp8", "pp16"]),
        (["-p", "0", "-n", "0", "-pg", "8,4", "-pg", "2,1"], ["pp8+tg4", "pp2+tg1"]),
        (["-p", "8", "-n", "4", "-d", "0,32"], ["pp8", "tg4", "pp8 @ d32", "tg4 @ d32"]),
        (["-p8", "-n4", "-r1"], ["pp8", "tg4"]),
    ],
    ids=lambda value: "_".join(value) if value and value[0].startswith("-") else "",
)
def test_tests_are_chosen_as_in_llama_bench(
    bench: Any, arguments: list[str], expected: list[str]
) -> None:
    assert names(bench("-r", "1", "-o", "json", *arguments)) == expected


def test_json_holds_every_sample_and_where_it_comes_from(bench: Any) -> None:
    whole = json.loads(bench("-p", "8", "-n", "0", "-r", "3", "-o", "json", "-t", "1").stdout)
    (row,) = whole["results"]
    assert len(row["samples_ts"]) == len(row["samples_ns"]) == 3
    assert row["model"] == "m.gguf"
    assert row["model_size"] == 2048
    assert row["threads"] == 1
    assert row["activations"] == "float"
    assert {"command", "versions", "device", "date", "load_average"} <= whole["provenance"].keys()


def test_jsonl_has_a_line_a_test(bench: Any) -> None:
    lines = bench("-p", "8", "-n", "4", "-r", "1", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line)["test"] for line in lines] == ["pp8", "tg4"]


def test_csv_reads_back(bench: Any) -> None:
    (row,) = csv.DictReader(io.StringIO(bench("-p", "8", "-n", "0", "-r", "2", "-o", "csv").stdout))
    assert row["test"] == "pp8"
    assert len(row["samples_ts"].split(";")) == 2


@pytest.mark.parametrize("form", ["md", "terminal"])
def test_tables_name_the_tests(bench: Any, form: str) -> None:
    text = bench("-p", "8", "-n", "0", "-d", "16", "-r", "2", "-o", form).stdout
    assert "pp8 @ d16" in text
    assert "median t/s [min - max]" in text


def test_warm_up_can_be_left_out(bench: Any, model: ScriptedModel) -> None:
    bench("-p", "8", "-n", "0", "-r", "2", "--no-warmup")
    assert [call[0] for call in model.calls] == ["reset", "prefill"] * 2


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the scripted model one packed product."""
    problem = ModelProblem("lm_head", "Q4_1", 33, 64, 0, 1)
    monkeypatch.setattr("tilewright.model.check.model_problems", lambda model: [problem])


@pytest.mark.usefixtures("model", "product")
def test_speeds_come_with_their_verdict(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    arguments = ["bench", str(tmp_path / "m.gguf"), "-p", "8", "-n", "4", "-r", "1", "-o", "json"]
    whole = json.loads(CliRunner().invoke(cli, arguments).stdout)
    assert whole["provenance"]["verdict"] == "verified: 2/2 products of this model, M = 1, 8"
    assert whole["notes"] == [whole["provenance"]["verdict"]]
    whole = json.loads(CliRunner().invoke(cli, [*arguments, "--no-verify"]).stdout)
    assert whole["notes"] == ["not verified (--no-verify)"]


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(
    ("work", "vocabulary", "verdict"),
    [
        (33 * 64 * 128, 256, "verified: 2/2 products of this model, M = 1, 128"),
        (33 * 64 * 127, 256, "verified: 2/2 products of this model, M = 1, 128, large ones (1) at "
                             "fewer rows"),
        (33 * 64 * 127, 33, "verified: 1/1 products of this model, M = 1, 128"),
    ],
    ids=["fits", "half", "output matrix"],
)  # fmt: skip
def test_a_large_product_is_checked_at_fewer_rows_and_that_is_said(
    work: int, vocabulary: int, verdict: str, model: ScriptedModel, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("tilewright.cli.checked._MOST_WORK", {"cpu": work})
    monkeypatch.setattr(model.config, "vocab_size", vocabulary)
    (tmp_path / "m.gguf").write_bytes(b"")
    arguments = ["bench", str(tmp_path / "m.gguf"), "-p", "128", "-n", "0", "-r", "1", "-o", "json"]
    whole = json.loads(CliRunner().invoke(cli, arguments).stdout)
    assert whole["provenance"]["verdict"] == verdict


@pytest.mark.usefixtures("product")
def test_a_wrong_product_is_never_timed(
    model: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mmq_spec.SPEC

    def run(inputs: Inputs, **options: Any) -> Any:
        return real.run(inputs, **options) * 1.01

    monkeypatch.setattr(mmq_spec, "SPEC", real.with_run(run))
    (tmp_path / "m.gguf").write_bytes(b"")
    result = CliRunner().invoke(cli, ["bench", str(tmp_path / "m.gguf"), "-p", "8"])
    assert result.exit_code == 3
    assert "nothing is timed\nFAILED MMQ Q4_1 Q4_1-M1-N33-K64-fp32" in result.stderr
    assert result.stdout == ""
    assert model.calls == []


def test_a_test_beyond_the_context_is_an_error(bench: Any, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli, ["bench", str(tmp_path / "m.gguf"), "-p", "99999", "--no-verify"]
    )
    assert result.exit_code == 1
    assert "do not fit the model's context of 4096" in result.stderr


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A profiler that sees one kernel; the prompts that it was asked for."""
    from tilewright.model.kernel_time import KernelReport, group_kernels

    asked: list[int] = []

    def measured(model: Any, decoder: Any, tokens: int, *, seed: int) -> KernelReport:
        asked.append(tokens)
        return KernelReport(tokens, 5.0, group_kernels([("_mmq_kernel", 5.0)], {}))

    monkeypatch.setattr("tilewright.model.kernel_time.prefill_kernel_time", measured)
    return asked


@pytest.mark.parametrize(
    ("context", "expected"),
    [(4096, ["pp4096"]), (32768, ["pp4096", "pp16384"]), (300, ["pp300"])],
)
def test_a_gpu_gets_longer_prompts_by_default(
    bench: Any, model: ScriptedModel, kernels: list[int], context: int, expected: list[str]
) -> None:
    model.config.max_position_embeddings = context
    result = bench("--device", "cuda", "-n", "0", "-r", "1", "-o", "json")
    assert names(result) == expected
    assert kernels == [int(expected[0][2:])]
    assert json.loads(result.stdout)["kernel_time"]["test"] == expected[0]


def test_kernel_times_can_be_left_out(bench: Any, model: ScriptedModel, kernels: list[int]) -> None:
    arguments = ["--device", "cuda", "-p", "8,16", "-n", "0", "-r", "1"]
    assert "total kernel time at pp8: 0.01 ms" in bench(*arguments, "-o", "md").stdout
    without = bench(*arguments, "-o", "json", "--no-kernel-time").stdout
    assert "kernel_time" not in json.loads(without)
    assert kernels == [8]


def test_the_cpu_has_no_kernel_times(bench: Any, kernels: list[int]) -> None:
    whole = json.loads(bench("-p", "8", "-r", "1", "-o", "json").stdout)
    assert "kernel_time" not in whole
    assert kernels == []


def test_a_model_without_tokenizer_is_timed(
    model: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewright.cli.bench.load_model", lambda path, **_: (model, None))
    (tmp_path / "m.gguf").write_bytes(b"")
    arguments = ["bench", str(tmp_path / "m.gguf"), "--no-verify", "-p", "8", "-n", "2", "-r", "1"]
    result = CliRunner().invoke(cli, [*arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    assert names(result) == ["pp8", "tg2"]
