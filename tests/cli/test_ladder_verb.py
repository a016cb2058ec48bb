"""`tilewright ladder`: real arms of a tiny model and of an op of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from model.gguf_models import Tiny, write
from tilewright.cli.main import cli
from tilewright.measure import Comparison
from user_specs import write_spec


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["ladder", "-t", "1", "--new-tokens", "4", *arguments])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write(path, Tiny("llama", {"embd": "Q8_0", "": "Q4_1"}))
    return path


MODEL = """
tests = ["pp16"]
control = ["tg2"]
blocks = 6
[base]
name = "blas"
decoder = "transformers"
[[base.tiles]]
m = "2-"
tile = "blas(panel_rows=64)"
[[rung]]
name = "panel"
[[rung.tiles]]
m = "2-"
tile = "panel(mr=2, nv=1, block_parts=8)"
[[rung]]
name = "smaller panel"
[[rung.tiles]]
m = "2-"
type = "Q4_1"
tile = "panel(mr=1, nv=1, block_parts=8)"
"""


def ladder(folder: Path, text: str) -> Path:
    path = folder / "ladder.toml"
    path.write_text(text)
    return path


def test_a_model_climbs(tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "ladder.html"
    path = ladder(tmp_path, MODEL)
    result = invoke(str(path), str(tiny), "-o", "json", "--html", str(page))
    assert result.exit_code in (0, 4, 5, 6), result.output
    whole = json.loads(result.stdout)
    found = whole["ladder"]
    assert found["exit_code"] == result.exit_code
    assert found["subject"] == "tiny.gguf"
    assert found["verified"].endswith("products right")
    assert [rung["name"] for rung in found["rungs"]] == ["panel", "smaller panel"]
    assert [rung["below"] for rung in found["rungs"]] == ["blas", "panel"]
    for rung in found["rungs"]:
        assert rung["status"] == "right"
        assert rung["agreement"]["identical"] == 4
        assert [(t["test"], t["tokens"], t["control"]) for t in rung["tests"]] == [
            ("pp16", 16, False), ("tg2", 2, True)
        ]  # fmt: skip
        assert len(rung["tests"][0]["below"]["blocks"]) == 6
        assert rung["details"]["decoder"] == "TransformersDecoder"
    tiles = {c["tile"] for c in found["rungs"][1]["details"]["choices"] if c["M"] == 16}
    assert tiles == {
        "panel(block_parts=8, mr=1, nv=1, threads=0)",  # Q4_1
        "panel(block_parts=8, mr=2, nv=1, threads=0)",  # Q8_0, from the rung below
    }
    assert [left["name"] for left in found["left_out"]] == ["panel", "smaller panel"]
    assert "provenance" in whole
    assert "smaller panel" in page.read_text()


def spoiled(folder: Path) -> Path:
    """An op whose tile block=64 is wrong; its other tile is right."""
    return write_spec(
        folder,
        "    return kernel(inputs.x.reshape(rows_of(inputs), -1))",
        "    y = kernel(inputs.x.reshape(rows_of(inputs), -1))\n"
        "    return y * 1.01 if tile is not None and tile.block == 64 else y",
    )


OWN = """
spec = "spec.py:SPEC"
blocks = 6
[[products]]
type = "rows"
shape = [64, 64]
m = [5, 17]
[base]
name = "plain"
[[rung]]
name = "blocks of 64"
[[rung.tiles]]
tile = "rows(block=64)"
[[rung]]
name = "blocks of 16"
[[rung.tiles]]
tile = "rows(block=16)"
"""


def test_a_wrong_rung_of_an_own_op_is_shown_and_gives_3(tmp_path: Path) -> None:
    spoiled(tmp_path)
    path = ladder(tmp_path, OWN)
    result = invoke(str(path), "-o", "md")
    assert result.exit_code == 3, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "### ladder: rowsoftmax"
    rows = {
        cells[0]: cells for line in lines if line.startswith("| ")
        for cells in [[cell.strip() for cell in line.split("|")[1:-1]]]
    }  # fmt: skip
    assert rows["build"][-3:] == ["vs below", "vs base", "correct"]
    assert rows["+ blocks of 64"][-1] == "WRONG"
    assert rows["+ blocks of 64"][-3].startswith("apparent ")
    assert rows["+ blocks of 16"][-1] == "2/2 products right"
    assert any(
        line.startswith("- blocks of 64 is WRONG and was not carried forward") for line in lines
    )
    whole = json.loads(invoke(str(path), "-o", "json", "--no-leave-one-out").stdout)["ladder"]
    bad, good = whole["rungs"]
    assert "arm blocks of 64: 2 of 2 products are not right" in bad["faults"][0]
    assert good["below"] == "plain"
    assert [t["test"] for t in good["tests"]] == [
        "rows-M5-N64-K64-fp32", "rows-M17-N64-K64-fp32"
    ]  # fmt: skip
    row = good["tests"][0]["below"]
    assert Comparison.from_dict(row).b == "blocks of 16"
    assert row["blocks"][0]["state"] is not None


def test_an_op_of_the_command_line_takes_the_place_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's own spec is wrong, the one that is named is right: a kernel and its next draft."""
    spoiled(tmp_path)
    here = tmp_path / "here"
    here.mkdir()
    write_spec(here, name="draft.py")
    monkeypatch.chdir(here)
    path = ladder(tmp_path, OWN)
    result = invoke(str(path), "--spec", "draft.py:SPEC", "-o", "json", "--no-leave-one-out")
    assert result.exit_code in (0, 4, 5, 6), result.output
    rungs = json.loads(result.stdout)["ladder"]["rungs"]
    assert [rung["status"] for rung in rungs] == ["right", "right"]
    assert [rung["details"]["tiles"] for rung in rungs] == [
        ["rows(block=64)"] * 2, ["rows(block=16)"] * 2
    ]  # fmt: skip
    without = "\n".join(line for line in OWN.splitlines() if not line.startswith("spec"))
    (tmp_path / "ladder.toml").write_text(without)
    again = invoke(str(path), "--spec", f"{tmp_path / 'spec.py'}:SPEC", "--no-leave-one-out")
    assert again.exit_code == 3, again.output


def found(exit_code: int, interrupted: bool = False) -> Any:
    """A finished ladder that says no more than its exit code."""
    from tilewright.tune.ladder_file import ChangeSet
    from tilewright.tune.ladder_result import LadderResult, RungResult

    rung = RungResult(ChangeSet("b"), "a", "1/1 products right", ("off",) * (exit_code == 3), None)
    return LadderResult("x", "m", ChangeSet("a"), (rung,), interrupted=interrupted)


@pytest.mark.parametrize(("code", "interrupted", "expected"), [(0, False, 0), (3, False, 3),
                                                              (0, True, 130)])  # fmt: skip
def test_exit_codes_are_those_of_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, interrupted: bool, expected: int
) -> None:
    asked: list[dict[str, Any]] = []

    def run(ladder: Any, bench: Any, settings: Any, **options: Any) -> Any:
        asked.append({"settings": settings, **options})
        return found(code, interrupted)

    monkeypatch.setattr("tilewright.tune.ladder.run_ladder", run)
    write_spec(tmp_path)
    path = ladder(tmp_path, OWN)
    result = invoke(str(path), "--blocks", "9", "--seed", "4", "--no-leave-one-out")
    assert result.exit_code == expected, result.output
    assert asked[0]["settings"].blocks == 9
    assert asked[0]["settings"].seed == 4
    assert asked[0]["leave_one_out"] is False
    invoke(str(path))
    assert asked[1]["settings"].blocks == 6
    assert asked[1]["leave_one_out"] is True


@pytest.mark.parametrize(
    ("text", "arguments", "code", "message"),
    [
        ("[base]", [], 1, "must have a [base] and at least one [[rung]]"),
        (MODEL, [], 2, "names no model; give it as MODEL"),
        ('model = "nosuch.gguf"\n' + MODEL, [], 2, "'nosuch.gguf' does not exist"),
        (MODEL.replace("pp16", "pq16"), ["."], 1, "the ladder's test is 'pq16'"),
        (OWN, ["."], 2, "is about products, and takes no MODEL"),
        (MODEL, ["--spec", "spec.py:SPEC"], 2, "--spec is about products, and ladder.toml has"),
        (OWN, ["--spec", "nowhere.py:SPEC"], 1, "there is no file nowhere.py"),
        (OWN.replace('type = "rows"', 'type = "Q4_1"'), [], 1, "rowsoftmax has rows"),
        (OWN.replace("block=64", "block=8"), [], 1, "arm blocks of 64: tile rows(block=8)"),
        (OWN.replace('name = "plain"', 'name = "plain"\nrev = "v9"'), [], 1, "no git repository"),
    ],
)
def test_ladders_that_cannot_be_climbed(
    tmp_path: Path, text: str, arguments: list[str], code: int, message: str
) -> None:
    write_spec(tmp_path)
    result = invoke(str(ladder(tmp_path, text)), "--repo", str(tmp_path), *arguments)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.stderr.split())
