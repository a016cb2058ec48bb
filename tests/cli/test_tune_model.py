"""`tilewright tune MODEL` on a tiny model: the worker, gate, clock and table are the real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from model.gguf_models import Tiny, reference, write
from tilewright import load
from tilewright.cli.main import cli
from tilewright.device import cpu_device
from tilewright.model.fuse import CAPTURED
from tilewright.model.generate import decoder_for
from tilewright.ops.catalog import find_spec
from tilewright.ops.choose import choose_tile
from tilewright.tiles.table import Choice, forget, load_table, lookup, pin
from tilewright.tiles.tile import Problem, Tile

ARCH = cpu_device().arch
TINY = Tiny("llama", {"embd": "Q8_0", "": "Q4_1"}, layers=1)
# q and o [256, 256], k and v [128, 256], gate and up [512, 256], down [256, 512], and the embedding
# as output matrix [320, 256]
WHOLE = ("--blocks", "6", "--cache", "hot", "--strategy", "random", "--json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path / "tiles"))
    (tmp_path / "tiles").mkdir()
    forget()
    yield tmp_path
    forget()


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["tune", "-t", "1", *arguments])


def shapes(report: dict[str, Any], m: int) -> set[tuple[str, int, int]]:
    return {
        (p["problem"]["weight_type"], p["problem"]["N"], p["problem"]["K"])
        for p in report["problems"]
        if p["problem"]["M"] == m
    }


def test_a_models_own_products_are_tuned_and_the_model_stays_right(folder: Path) -> None:
    path = folder / "tiny.gguf"
    values = write(path, TINY)
    result = tune(str(path), "--m", "1,16", "--budget", "10", *WHOLE)
    assert result.exit_code in (0, 5, 6), result.output
    report = json.loads(result.stdout)
    assert report["settings"]["subject"] == "tiny.gguf"

    # what a decode step and a prompt multiply: the output matrix sees the last token only
    decode, prompt = shapes(report, 1), shapes(report, 16)
    assert prompt == {("Q4_1", n, k) for n, k in ((128, 256), (256, 256), (512, 256), (256, 512))}
    assert decode == prompt | {("Q8_0", 320, 256)}
    assert sum(p["share"] for p in report["problems"]) == pytest.approx(1.0)
    shares = [p["share"] for p in report["problems"]]
    assert shares == sorted(shares, reverse=True)

    # every candidate that was timed had passed, and is one that the model's programs can hold
    assert report["planted"]
    assert all(planted["status"] == "rejected" for planted in report["planted"])
    for problem in report["problems"]:
        assert problem["status"] in ("improved", "kept", "skipped"), problem
        for candidate in problem["candidates"]:
            assert candidate["tile"]["algorithm"] in CAPTURED

    # the table holds what was improved, lookup finds it, and the model computes what it should
    improved = {
        json.dumps(p["problem"], sort_keys=True): p["winner"]
        for p in report["problems"]
        if p["status"] == "improved"
    }
    table = folder / "tiles" / f"{ARCH}.json"
    rows_of_table = load_table(table).rows if improved else ()
    assert {
        json.dumps(r.problem.__dict__, sort_keys=True): r.tile.as_dict() for r in rows_of_table
    } == improved
    forget()
    for row in rows_of_table:
        chosen = choose_tile(row.problem, find_spec(row.problem.op).space())  # type: ignore[misc]
        assert (chosen.how, chosen.tile) == ("exact", row.tile)
    same_logits(path, values)


def same_logits(path: Path, values: Any) -> None:
    ids = torch.arange(1, 17).reshape(1, -1)
    model, _ = load(path)
    decoder = decoder_for(model)
    got = [decoder.prefill(ids), decoder.step(17)]
    with torch.inference_mode():
        plain = reference(TINY, values)(torch.arange(1, 18).reshape(1, -1)).logits[0]
    for mine, right in zip(got, plain[-2:], strict=True):
        torch.testing.assert_close(mine.reshape(-1), right, rtol=1e-3, atol=1e-3)


def test_the_rows_of_a_model_are_what_it_looks_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a tuned row would be keyed by a problem that no launch has."""
    path = folder / "tiny.gguf"
    values = write(path, TINY)
    planned = json.loads(tune(str(path), "--dry-run", "--json").stdout)
    problems = {Problem(**p["problem"]) for p in planned["problems"]}
    assert {p.M for p in problems} == {1, 512}
    asked: set[Problem] = set()

    def noted(problem: Problem, *args: Any, **options: Any) -> Choice:
        asked.add(problem.bucketed())
        return lookup(problem, *args, **options)

    monkeypatch.setattr("tilewright.ops.choose.lookup", noted)
    panel = Tile.of("panel", mr=2, nv=1, block_parts=8, threads=0)
    with pin({problem: panel for problem in problems if problem.M > 1}):
        same_logits(path, values)
    assert problems <= asked
