"""`tilewright tune --ray` from the command line, over workers in threads of this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tilewright.cli.main import cli
from tilewright.ops import catalog
from tilewright.tiles.table import forget, load_table
from tilewright.tune import fleet_ray
from tune.fake_fleet import FakeFleet, FakeWorker
from tune.toy_op import Machine, loop

BEST = loop(64, 2)


def worker(**options: Any) -> FakeWorker:
    return FakeWorker(Machine(lambda tile: 60.0 if tile == BEST else 100.0), **options)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path / "tiles"))
    (tmp_path / "tiles").mkdir()
    monkeypatch.setattr(catalog, "load_spec", lambda text: Machine().spec())
    forget()
    yield tmp_path
    forget()


def invoke(monkeypatch: pytest.MonkeyPatch, fleet: FakeFleet, *arguments: str) -> Result:
    monkeypatch.setattr(fleet_ray, "RayExecutor", lambda address: fleet)
    return CliRunner().invoke(
        cli,
        [
            "tune", "--spec", "toy.py:SPEC", "--shape", "8,128", "--m", "16", "--cache", "hot",
            "--blocks", "6", "--strategy", "exhaustive", "--budget", "300", "--ray", "here:1",
            *arguments,
        ],
    )  # fmt: skip


def test_the_table_and_the_workers_are_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FakeFleet({"a": worker(), "b": worker(about={"version": "0.0.1"})})
    result = invoke(monkeypatch, fleet, "--out", str(folder / "tuned.json"))
    assert result.exit_code == 0, result.output
    assert str(BEST) in result.stdout
    assert "a/cpu" in result.stdout
    assert "not used: worker b (b): it has tilewright 0.0.1" in result.stderr
    (row,) = load_table(folder / "tuned.json").rows
    assert row.source.startswith("tuned on a/")


def test_json_holds_tables_and_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(monkeypatch, FakeFleet({"a": worker()}), "--json", "--out", str(folder))
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [len(table["problems"]) for table in data["tables"]] == [1]
    assert [w["timed"] for w in data["workers"]] == [1]
    assert Path(data["tables"][0]["table"]).parent == folder


def test_a_page_for_each_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly", reason="pages need the extra report")
    fleet = FakeFleet({"a": worker(), "b": worker(about={"arch": "cpu-neon"})})
    out, page = folder / "out", folder / "page.html"
    result = invoke(monkeypatch, fleet, "--out", str(out), "--html", str(page))
    assert result.exit_code == 0, result.output
    assert len(list(folder.glob("page.*.html"))) == 2


def test_a_problem_that_was_given_up_is_exit_code_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(handle: str, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "open":
            fleet.kill(handle)

    fleet = FakeFleet({"a": worker()}, before)
    result = invoke(monkeypatch, fleet, "--out", str(folder / "tuned.json"))
    assert result.exit_code == 1
    assert "was lost: open: it was killed" in result.stdout
    assert "`tilewright tune --resume` tries again" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--dry-run",), "--dry-run looks at this machine; leave out --ray")],
)
def test_what_does_not_go_together_is_a_usage_error(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = invoke(monkeypatch, FakeFleet({"a": worker()}), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_folder_for_one_machine_is_a_usage_error(folder: Path) -> None:
    result = CliRunner().invoke(
        cli, ["tune", "--op", "mmq", "--shape", "32,64", "--out", str(folder)]
    )
    assert result.exit_code == 2
    assert "is a folder; name the table" in result.stderr
