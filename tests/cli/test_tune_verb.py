"""`tilewright tune` from the command line, on a user's op whose times are scripted by sleeping."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tilewright.cli.main import cli
from tilewright.device import cpu_device
from tilewright.tiles.table import forget, load_table
from tilewright.tune import tuner
from tilewright.tune.result import ProblemReport, TuneReport

ARCH = cpu_device().arch
MMQ = ("--op", "mmq", "--type", "Q4_1", "--shape", "32,64", "--m", "4")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["tune", "-t", "1", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of MODEL, --op and --spec; got none"),
        (("--op", "mmq", "--spec", "x.py:SPEC"), "got --op, --spec"),
        (("--op", "mmq"), "--op needs --shape N,K"),
        (("--op", "mmq", "--shape", "32"), "give N,K of the weight"),
        (("--op", "mmq", "--type", "Q9", "--shape", "32,64"), "--type is 'Q9'"),
        (("--op", "mmq", "--type", "Q4_1", "--shape", "32,100"), "K must be a multiple of 32"),
        (("--op", "mmq", "--type", "Q4_K", "--shape", "32,64"), "K must be a multiple of 256"),
        ((*MMQ[:-1], "0"), "give rows of x"),
        ((*MMQ, "--budget", "0"), "--budget"),
        ((*MMQ, "--strategy", "bayes"), "bayes"),
        ((*MMQ, "--blocks", "3"), "--blocks"),
    ],
    ids=str,
)
def test_a_wrong_request_is_a_usage_error(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "conv", "--shape", "32,64"), "op is 'conv'; the catalog has"),
        (("--spec", "nowhere.py:SPEC"), "there is no file"),
        (
            ("--op", "moe", "--shape", "32,256"),
            "--op is moe, which chooses no tiles on --device cpu",
        ),
    ],
    ids=["op", "spec", "no-tiles"],
)
def test_what_does_not_exist_is_an_error_of_ours(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_dry_run_shows_the_plan_and_writes_nothing(folder: Path) -> None:
    result = invoke(*MMQ, "--m", "1,16", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "mmq Q4_1 float32 M=1 N=32 K=64" in result.stdout
    assert "mmq Q4_1 float32 M=16 N=32 K=64" in result.stdout
    assert "default" in result.stdout
    assert f"nothing was run; the table would be {folder / ARCH}.json" in result.stdout
    assert list(folder.iterdir()) == []


def test_products_are_tuned_from_end_to_end(folder: Path) -> None:
    """The worker process, the gate, the planted tiles and the clock are the real ones."""
    result = invoke(*MMQ, "--budget", "25", "--blocks", "6", "--cache", "hot", "--json")
    assert result.exit_code in (0, 5, 6), result.output
    report = json.loads(result.stdout)
    assert report["planted"]
    assert all(planted["status"] == "rejected" for planted in report["planted"])
    (found,) = report["problems"]
    assert found["text"] == "mmq Q4_1 float32 M=4 N=32 K=64"
    assert found["tried"] >= 2
    assert found["rejected"] == {}
    assert found["status"] in ("improved", "kept")
    assert report["provenance"]["command"].startswith("tilewright")
    table = folder / f"{ARCH}.json"
    assert table.exists() == (found["status"] == "improved")
    if table.exists():
        (row,) = load_table(table).rows
        assert row.tile.as_dict() == found["winner"]
    resumed = invoke(*MMQ, "--budget", "25", "--blocks", "6", "--cache", "hot", "--json",
                     "--resume")  # fmt: skip
    again = json.loads(resumed.stdout)["problems"][0]
    assert again["candidates"] == found["candidates"]
    assert resumed.exit_code == result.exit_code


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`tune` answers with one problem of a status and a verdict; what it was asked is kept."""
    asked: list[dict[str, Any]] = []

    def answer(targets: Any, **options: Any) -> TuneReport:
        asked.append({"targets": targets, **options})
        planned = tuner.plan(targets, out=options["out"], log=options["log"])
        for problem in planned.problems:
            problem.status, problem.verdict = answer.status, answer.verdict  # type: ignore[attr-defined]
        return planned

    answer.status, answer.verdict = "kept", ""  # type: ignore[attr-defined]
    monkeypatch.setattr(tuner, "tune", answer)
    asked.append({"answer": answer})
    return asked


@pytest.mark.parametrize(
    ("status", "verdict", "code"),
    [
        ("improved", "FASTER", 0),
        ("kept", "", 0),
        ("skipped", "", 5),
        ("kept", "SAME", 0),
        ("kept", "UNRESOLVED", 5),
        ("kept", "VOID", 6),
        ("failed", "", 3),
        ("repaired", "", 3),
    ],
)
def test_exit_codes_say_what_was_found(
    scripted: list[dict[str, Any]], status: str, verdict: str, code: int
) -> None:
    answer = scripted[0]["answer"]
    answer.status, answer.verdict = status, verdict
    result = invoke(*MMQ)
    assert result.exit_code == code, result.output
    assert (verdict or status) in result.stdout


def test_options_reach_the_tuner(scripted: list[dict[str, Any]], folder: Path) -> None:
    out, log = folder / "mine.json", folder / "mine.sqlite"
    invoke(*MMQ, "--budget", "7", "--strategy", "random", "--seed", "3", "--resume",
           "--out", str(out), "--log", str(log), "--activations", "int8")  # fmt: skip
    asked = scripted[-1]
    assert (asked["budget_s"], asked["strategy"], asked["seed"]) == (7.0, "random", 3)
    assert (asked["resume"], asked["out"], asked["log"]) == (True, out, log)
    (target,) = asked["targets"]
    assert (target.problem.activations, target.problem.M, target.problem.arch) == ("int8", 4, ARCH)


def test_each_number_of_rows_gets_an_equal_share(scripted: list[dict[str, Any]]) -> None:
    """Prefill does thousands of times the work of decode and would leave it nothing."""
    invoke("--op", "mmq", "--type", "Q4_1", "--shape", "32,64", "--shape", "96,64", "--m", "1,512")
    shares: dict[int, float] = {}
    for target in scripted[-1]["targets"]:
        shares[target.problem.M] = shares.get(target.problem.M, 0.0) + target.share
    assert shares == {1: pytest.approx(1.0), 512: pytest.approx(1.0)}


def test_the_worst_of_several_problems_decides_the_exit_code() -> None:
    def report(*found: tuple[str, str]) -> TuneReport:
        problems = [ProblemReport(None, status=s, verdict=v) for s, v in found]  # type: ignore[arg-type]
        return TuneReport(None, {}, problems)  # type: ignore[arg-type]

    assert report(("improved", "FASTER"), ("kept", "UNRESOLVED")).exit_code == 0
    assert report(("kept", "VOID"), ("kept", "UNRESOLVED")).exit_code == 5
    assert report(("improved", "FASTER"), ("failed", "")).exit_code == 3
