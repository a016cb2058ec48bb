"""`tilewright compare`: each kind of arms, every exit code, every form of the result."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import tilewright
from model.gguf_models import Tiny, write
from one_row_table import write_table
from tilewright.cli.main import cli
from tilewright.measure import Block, Ceiling, Comparison, MachineState, judge
from tilewright.ops.contract import Inputs
from tilewright.ops.mmq import spec as mmq_spec
from tilewright.tiles.tile import Tile
from user_specs import write_spec

A, B = "panel(mr=2, nv=1, block_parts=8)", "panel(mr=1, nv=1, block_parts=8)"
PRODUCT = ("--op", "mmq", "--type", "Q4_1", "--shape", "48,64", "--m", "5", "--blocks", "6")
TILES = ("--tile", A, "--tile", B, *PRODUCT)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["compare", "-t", "1", *arguments])


def found(ratio: float, noise: float = 0.001, **options: Any) -> Comparison:
    """A comparison whose B is `ratio` times faster, in 20 blocks of seeded noise."""
    draw = np.random.default_rng(1)
    a, b, control = (100.0 * (1 + noise * draw.standard_normal((3, 20)))).tolist()
    b = [us / ratio for us in b]
    judgement = judge(*(np.array(us) for us in (a, b, control)), void=options.pop("void", ()))
    state = MachineState(load_1m=0.5, frequency_mhz=2600.0, others=0.03)
    blocks = tuple(
        Block(("A", "B", "control"), dict(zip(("A", "B", "control"), us, strict=True)), state)
        for us in zip(a, b, control, strict=True)
    )
    settings = {"alpha": 0.05, "delta": 0.005, "resamples": 4000, "seed": 0, "cache": "hot"}
    return Comparison("A", "B", judgement, blocks, settings, **options)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the timing, and nothing else, by a given comparison; post-checks still run."""

    def give(comparison: Comparison) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def compare(a: Any, b: Any, **options: Any) -> Comparison:
            asked.append(options)
            a(), b()
            if options["post_check"] is not None:
                assert options["post_check"]() is None
            cache = "cold" if options["cold"] else "hot"
            return replace(comparison, settings={**comparison.settings, "cache": cache})

        monkeypatch.setattr("tilewright.tune.arms.compare", compare)
        return asked

    return give


@pytest.mark.parametrize(
    ("comparison", "code", "verdict"),
    [
        (found(1.2), 0, "DISJOINT"),
        (found(1.02, 0.02), 0, "FASTER"),
        (found(1.0), 0, "SAME"),
        (found(0.98, 0.02), 4, "SLOWER"),
        (found(0.8), 4, "DISJOINT"),
        (found(1.0, 0.2), 5, "UNRESOLVED"),
        (found(1.2, void=["throttled: cpu-thermal"]), 6, "VOID"),
    ],
    ids=["disjoint", "faster", "same", "slower", "disjoint slower", "unresolved", "void"],
)
def test_exit_codes(measured: Any, comparison: Comparison, code: int, verdict: str) -> None:
    measured(comparison)
    result = invoke(*TILES, "--cache", "hot")
    assert result.exit_code == code, result.output
    assert verdict in result.stdout


def test_a_wrong_tile_gives_3_and_is_not_timed(
    measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mmq_spec.SPEC

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        y = real.run(inputs, tile=tile, threads=threads)
        return y * 1.01 if tile.mr == 1 else y

    monkeypatch.setattr(mmq_spec, "SPEC", real.with_run(run))
    asked = measured(found(1.2))
    result = invoke(*TILES)
    assert result.exit_code == 3
    assert "arm B is wrong, so nothing is timed" in result.stderr
    assert result.stdout == ""
    assert asked == []


def test_ctrl_c_reports_what_there_is(measured: Any) -> None:
    measured(found(1.2, interrupted=True))
    result = invoke(*TILES)
    assert result.exit_code == 130
    assert "Interrupted" in result.stdout
    assert result.stdout.count("DISJOINT") == 1


def test_caches_are_two_results_and_options_reach_the_measurement(measured: Any) -> None:
    asked = measured(found(1.2))
    arguments = ("--alpha", "0.01", "--delta", "0.02", "--seed", "7", "-o", "json")
    whole = json.loads(invoke(*TILES, *arguments).stdout)
    rows = whole["compare"]["rows"]
    assert [row["cache"] for row in rows] == ["hot", "cold"]
    assert [options["cold"] for options in asked] == [False, True]
    for options in asked:
        assert (options["blocks"], options["alpha"], options["delta"]) == (6, 0.01, 0.02)
        assert options["seed"] == 7
    assert whole["compare"]["arms"]["b"] == {
        "name": "B", "title": B, "verified": "passed the gate", "details": {}
    }  # fmt: skip
    assert Comparison.from_dict(rows[0]["comparison"]).ratio == pytest.approx(1.2, rel=0.002)
    assert {"command", "versions", "device", "date"} <= whole["provenance"].keys()


def test_markdown_is_ready_for_a_pull_request(measured: Any, tmp_path: Path) -> None:
    measured(found(1.2))
    page = tmp_path / "report.html"
    text = invoke(*TILES, "--cache", "cold", "-o", "md", "--html", str(page)).stdout
    lines = text.splitlines()
    assert lines[0] == "### mmq: B against A"
    head, rule, row = (line.split("|")[1:-1] for line in lines[2:5])
    assert [cell.strip() for cell in head[:3]] == ["what", "cache", "A"]
    assert set("".join(rule)) <= {"-", ":"}
    assert [cell.strip() for cell in row[:2]] == ["Q4_1-M5-N48-K64-fp32", "cold"]
    assert f"- A: {A}; passed the gate" in lines
    assert any("other processes used 3% of the CPUs" in line for line in lines)
    assert all(line.startswith("- ") for line in lines[6:])
    assert "Q4_1-M5-N48-K64-fp32" in page.read_text()


def test_real_tiles_are_timed(tmp_path: Path) -> None:
    result = invoke(*TILES, "--cache", "hot", "-o", "json")
    assert result.exit_code in (0, 4, 5, 6), result.output
    (row,) = json.loads(result.stdout)["compare"]["rows"]
    assert len(row["comparison"]["blocks"]) == 6
    assert row["comparison"]["judgement"]["ratio"] > 0


@pytest.mark.parametrize("gflops", [1e-6, 1e9], ids=["beaten", "not beaten"])
def test_a_time_that_beats_the_ceiling_is_an_error(
    monkeypatch: pytest.MonkeyPatch, gflops: float
) -> None:
    """A product so fast has skipped work, whatever the gate says: there is no verdict."""
    ceiling = Ceiling(gflops=gflops, gbps=1e9)
    monkeypatch.setattr("tilewright.model.peak.measure_ceiling", lambda: ceiling)
    result = invoke(*TILES, "--cache", "hot", "--ceiling")
    if gflops < 1:
        assert result.exit_code == 1
        assert "it skipped work, or the clock or the ceiling is wrong" in result.stderr
        assert result.stdout == ""
    else:
        assert result.exit_code in (0, 4, 5, 6), result.output


def test_an_op_of_your_own(measured: Any, tmp_path: Path) -> None:
    measured(found(1.2))
    spec = f"{write_spec(tmp_path)}:SPEC"
    arguments = ("--spec", spec, "--shape", "64,64", "--m", "17", "--cache", "hot")
    result = invoke("--tile", "rows(block=16)", "--tile", "rows(block=64)", *arguments)
    assert result.exit_code == 0, result.output
    assert "rowsoftmax: B against A" in result.stdout


def test_an_op_of_another_device_is_held_to_the_rules_of_that_device(
    measured: Any, tmp_path: Path
) -> None:
    """The rules ask for its arch; by those of this CPU neither tile would be legal."""
    measured(found(1.2))
    path = write_spec(tmp_path, '"cpu-of-a-test"', '"chip9"')
    text = path.read_text().replace("t.block <= 4 * p.K", 'p.arch == "chip9"')
    path.write_text(
        text.replace("space=lambda: SPACE,", 'space=lambda: SPACE, arch=lambda: "chip9",')
    )
    arguments = ("--spec", f"{path}:SPEC", "--shape", "64,64", "--m", "17", "--cache", "hot")
    result = invoke("--tile", "rows(block=16)", "--tile", "rows(block=64)", *arguments)
    assert result.exit_code == 0, result.output


def test_two_tables_on_products(measured: Any, tmp_path: Path) -> None:
    measured(found(1.2))
    a = write_table(tmp_path / "a.json", Tile.of("panel", mr=2, nv=1, block_parts=8, threads=0))
    b = write_table(tmp_path / "b.json", Tile.of("panel", mr=1, nv=1, block_parts=8, threads=0))
    result = invoke("--table", str(a), "--table", str(b), *PRODUCT, "--cache", "hot")
    assert result.exit_code == 0, result.output
    assert "A: a.json; passed the gate" in result.stdout
    assert "A panel(block_parts=8, mr=2, nv=1, threads=0), B panel(block_parts=8, mr=1" in (
        result.stdout
    )
    same = invoke("--table", str(a), "--table", str(a), *PRODUCT, "--cache", "hot")
    assert same.exit_code == 0
    assert "both arms run panel(block_parts=8, mr=2, nv=1, threads=0)" in same.stdout


@pytest.mark.parametrize(("ratio", "code"), [(1.2, 0), (0.8, 4)], ids=["faster", "slower"])
def test_commands(measured: Any, ratio: float, code: int) -> None:
    measured(found(ratio))
    result = invoke("--cmd", "true", "--cmd", "echo", "--blocks", "8")
    assert result.exit_code == code, result.output
    assert "different output; nothing about them was verified" in result.stdout
    assert "B: `echo`" in result.stdout


def test_real_commands_are_timed() -> None:
    result = invoke("--cmd", "echo 1", "--cmd", "echo 1", "--blocks", "6", "-o", "json")
    assert result.exit_code in (0, 4, 5, 6), result.output
    whole = json.loads(result.stdout)["compare"]
    (row,) = whole["rows"]
    assert len(row["comparison"]["blocks"]) == 6
    assert all(us > 0 for block in row["comparison"]["blocks"] for us in block["us"].values())
    assert whole["notes"] == [
        "Both commands print the same in every run; nothing else about them was verified."
    ]


@pytest.mark.parametrize(
    ("a", "b", "arguments", "code", "message"),
    [
        ("echo 1", "echo 2", ["--same-output"], 3, "print different output, so nothing is timed"),
        ("true", "false", [], 1, "command B failed with code 1: false"),
        ("true", "sleep 9", ["--time-limit", "0.2"], 1, "ran past its limit of 0.2 s"),
        ("true", "''", [], 1, "command B"),
        ("true", "true", ["--blocks", "5"], 1, "at least 6 are needed"),
    ],
)
def test_commands_that_cannot_be_compared(
    a: str, b: str, arguments: list[str], code: int, message: str
) -> None:
    result = invoke("--cmd", a, "--cmd", b, *arguments)
    assert result.exit_code == code
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --tile, --table, --rev, --cmd, --activations twice"),
        (["--tile", A, *PRODUCT], "--tile is given 1 times; give it twice: A, then B"),
        (["--rev", "a", "--rev", "b", "--cmd", "x"], "give one of --tile"),
        (["--activations", "int8"], "give one of --tile"),
        (["--activations", "int8", "--activations", "float"], "needs a MODEL"),
        (["--tile", A, "--tile", B], "--tile needs products: --op or --type, --shape N,K and --m"),
        (["--rev", "a", "--rev", "b"], "or a MODEL"),
        ([*TILES, "--activations", "int8", "--activations", "int8"], "give it once"),
        ([*TILES, "--python", "x"], "--python belongs to --rev"),
        (["--cmd", "x", "--cmd", "y", "--ceiling"], "--ceiling belongs to products"),
        ([*TILES, "--activations", "int8", "--ceiling"], "--ceiling is that of float32"),
        (["--shape", "1536", *TILES], "give N,K of the weight, such as 1536,576"),
        ([*TILES, "--m", "0"], "give rows of x, such as 1,16,512"),
        (["nosuch.gguf", "--rev", "a", "--rev", "b"], "'nosuch.gguf' does not exist"),
        ([".", *TILES], "--tile takes no MODEL"),
        ([".", "--rev", "a", "--rev", "b", "--test", "pp"], "give pp<n>, tg<n> or pp<n>+tg<n>"),
    ],
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--type", "Q9_9"], "--type is 'Q9_9'"),
        (["--op", "conv"], "the catalog has w4a16, mmq, moe"),
        (["--op", "mmq@tpu"], "op mmq has no kernels for 'tpu'"),
        (["--op", "w4a16"], "w4a16 has uint4"),
    ],
)
def test_products_that_there_are_not(arguments: list[str], message: str) -> None:
    result = invoke("--tile", A, "--tile", B, "--type", "Q4_1", "--shape", "48,64", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write(path, Tiny("llama", {"embd": "Q8_0", "": "Q4_1"}))
    return path


MODEL = ("--test", "pp8", "--test", "tg2", "--blocks", "6", "--new-tokens", "4", "-o", "json")


def test_one_model_with_itself(tiny: Path) -> None:
    """Everything is real: a worker, its check, its words, its times."""
    result = invoke(str(tiny), "--activations", "float", "--activations", "float", *MODEL)
    assert result.exit_code in (0, 4, 5, 6), result.output
    whole = json.loads(result.stdout)["compare"]
    assert [(row["label"], row["tokens"]) for row in whole["rows"]] == [("pp8", 8), ("tg2", 2)]
    agreement = whole["agreement"]
    assert (agreement["identical"], agreement["prompts"]) == (4, 4)
    assert agreement["mean_kl"] == 0.0
    assert agreement["top1"] == 1.0
    assert agreement["same_function"] is True
    assert whole["arms"]["a"]["verified"].endswith("products right")
    assert whole["notes"] == [
        "All arms ran in one process, every sample on buffers allocated anew."
    ]
    assert not any("failed" in r for row in whole["rows"] for r in _reasons(row))


def _reasons(row: dict[str, Any]) -> list[str]:
    reasons: list[str] = row["comparison"]["judgement"]["reasons"]
    return reasons


def test_two_activation_paths_of_a_model(measured: Any, tiny: Path) -> None:
    measured(found(1.2))
    result = invoke(str(tiny), "--activations", "float", "--activations", "int8", *MODEL)
    assert result.exit_code in (0, 3), result.output
    whole = json.loads(result.stdout)["compare"]
    assert whole["agreement"]["same_function"] is False
    assert whole["agreement"]["mean_kl"] > 0
    assert whole["arms"]["b"]["details"]["activations"] == "int8"


def test_arms_that_say_different_things_give_3_and_are_not_timed(
    measured: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = measured(found(1.2))
    monkeypatch.setattr("tilewright.tune.agreement.KL_LIMIT", {True: -1.0, False: -1.0})
    result = invoke(str(tiny), "--activations", "float", "--activations", "float", *MODEL)
    assert result.exit_code == 3
    whole = json.loads(result.stdout)["compare"]
    assert whole["rows"] == []
    assert whole["faults"] == ["mean KL divergence is 0 nats, the limit is -1"]
    assert asked == []
    text = invoke(str(tiny), "--activations", "float", "--activations", "float", *MODEL[:-2])
    assert "FAULT: mean KL divergence" in text.stdout


def test_two_tables_on_a_model(measured: Any, tiny: Path, tmp_path: Path) -> None:
    measured(found(1.2))
    path = write_table(tmp_path / "empty.json", None)
    result = invoke(str(tiny), "--table", str(path), "--table", str(path), *MODEL)
    assert result.exit_code == 0, result.output
    whole = json.loads(result.stdout)["compare"]
    assert any("at M=8 runs" in note for note in whole["notes"])  # no fallback is hidden


def test_prompts_and_text_of_your_own(measured: Any, tiny: Path, tmp_path: Path) -> None:
    measured(found(1.2))
    prompts, text = tmp_path / "prompts.txt", tmp_path / "text.txt"
    prompts.write_text("hello\n\nworld\n")
    text.write_text("hello world")
    arms = ("--activations", "float", "--activations", "float")
    files = ("--prompts", str(prompts), "--text", str(text))
    whole = json.loads(invoke(str(tiny), *arms, *files, *MODEL).stdout)["compare"]
    assert whole["agreement"]["prompts"] == 2
    assert whole["agreement"]["positions"] < 12
    text.write_text(" \n")
    result = invoke(str(tiny), *arms, *files, *MODEL)
    assert result.exit_code == 2
    assert "is empty" in result.stderr


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This package in a repository of its own, as it stands, with one commit."""
    top = tmp_path_factory.mktemp("repo")
    source = Path(tilewright.__file__).parent
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, top / "src" / "tilewright", ignore=skip)
    (top / "pyproject.toml").write_text('[project]\nname = "tilewright"\n')
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@t.example", "commit", "-q", "-m", "one"],
    ):
        subprocess.run(["git", "-C", str(top), *words], check=True)
    return top


def test_two_revisions_on_a_product(measured: Any, repository: Path) -> None:
    measured(found(1.2))
    arms = ("--rev", "HEAD", "--rev", ".", "--repo", str(repository))
    result = invoke(*arms, *PRODUCT, "--cache", "hot", "-o", "json")
    assert result.exit_code == 0, result.output
    whole = json.loads(result.stdout)["compare"]
    assert whole["arms"]["a"]["title"].startswith("HEAD (")
    assert whole["arms"]["b"]["title"] == ". (working tree)"
    assert whole["arms"]["a"]["verified"] == "1/1 products right"
    assert [row["label"] for row in whole["rows"]] == ["Q4_1-M5-N48-K64-fp32"]


def test_a_revision_that_is_wrong_gives_3(measured: Any, repository: Path, tmp_path: Path) -> None:
    asked = measured(found(1.2))
    broken = tmp_path / "broken"
    shutil.copytree(repository, broken)
    op = broken / "src" / "tilewright" / "ops" / "mmq" / "op.py"
    op.write_text(op.read_text().replace("    return gemm(", "    return 1.01 * gemm("))
    arms = ("--rev", "HEAD", "--rev", ".", "--repo", str(broken))
    result = invoke(*arms, *PRODUCT, "--cache", "hot")
    assert result.exit_code == 3, result.output
    assert "arm B: 1 of 1 products are not right, so nothing is timed" in result.stderr
    assert asked == []


def test_an_unknown_revision(repository: Path) -> None:
    result = invoke("--rev", "HEAD", "--rev", "v9", "--repo", str(repository), *PRODUCT)
    assert result.exit_code == 1
    assert "revision is 'v9'; git finds no such commit" in result.stderr
