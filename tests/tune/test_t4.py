"""The T4 export against the published schema's demands, stated here by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright.tiles.table import forget
from tilewright.tune.outcome import KINDS, Outcome
from tilewright.tune.record import read_events
from tilewright.tune.rounds import Timing
from tilewright.tune.t4 import INVALIDITY, to_t4
from tilewright.tune.tuner import Settings, tune
from tune.toy_op import FLAT, SPACE, Machine, ScriptedGate, loop, problem

WORDS = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}
BEST = loop(64, 2)


@pytest.fixture(autouse=True)
def _tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    forget()
    yield
    forget()


def exported(tmp_path: Path, machine: Machine, **rejected: Any) -> dict[str, Any]:
    verdicts = {tile: Outcome(False, kind, "why", "case") for kind, tile in rejected.items()}
    tune(
        [problem()], specs={"toy": machine.spec()}, gate=ScriptedGate(machine, verdicts),
        clock=machine.clock, out=tmp_path / "t.json", strategy="exhaustive",
        settings=Settings(timing=Timing(cache="hot")),
    )  # fmt: skip
    document = to_t4(read_events(tmp_path / "t.tune.sqlite"))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    return document


def of(document: dict[str, Any], tile: Any) -> dict[str, Any]:
    fields = tile.as_dict().items()
    (found,) = [r for r in document["results"] if fields <= r["configuration"].items()]
    return dict(found)


def test_every_result_has_what_the_schema_asks_for(tmp_path: Path) -> None:
    machine = Machine(lambda tile: 60.0 if tile == BEST else 100.0)
    document = exported(tmp_path, machine, oracle=FLAT)
    assert document["schema_version"] == "1.0.0"
    assert len(document["results"]) == len(SPACE.candidates(problem()))
    for result in document["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= set(result)
        assert isinstance(result["timestamp"], str)
        assert result["objectives"] == ["time"]
        assert result["invalidity"] in WORDS
        assert isinstance(result["correctness"], float)
        times = result["times"]
        for name in ("compilation_time", "framework", "search_algorithm", "validation"):
            assert isinstance(times[name], float)
        assert all(isinstance(ms, float) for ms in times["runtimes"])
        for measurement in result["measurements"]:
            assert set(measurement) == {"name", "value", "unit"}
            assert isinstance(measurement["value"], float | str)


def test_a_wrong_tile_is_exported_as_incorrect_with_its_reason(tmp_path: Path) -> None:
    document = exported(tmp_path, Machine(), oracle=FLAT, **{"guard-bands": loop(32, 4)})
    for tile, check in ((FLAT, "oracle"), (loop(32, 4), "guard-bands")):
        wrong = of(document, tile)
        assert (wrong["invalidity"], wrong["correctness"]) == ("correctness", 0.0)
        assert wrong["times"]["runtimes"] == []
        said = {m["name"]: m["value"] for m in wrong["measurements"]}
        assert said == {"check": check, "reason": "why"}


def test_times_are_milliseconds_and_configurations_hold_the_problem(tmp_path: Path) -> None:
    machine = Machine(lambda tile: 60.0 if tile == BEST else 100.0)
    best = of(exported(tmp_path, machine), BEST)
    assert best["invalidity"] == "correct"
    said = {m["name"]: (m["value"], m["unit"]) for m in best["measurements"]}
    assert said["time"] == (pytest.approx(0.060, rel=0.01), "ms")
    assert len(best["times"]["runtimes"]) == 83  # 3 rounds and 80 blocks
    assert {"op", "M", "N", "K", "weight_type", "tile_k", "unroll"} <= set(best["configuration"])


def test_a_tile_rejected_after_timing_keeps_its_times_and_is_incorrect(tmp_path: Path) -> None:
    machine = Machine(lambda tile: 60.0 if tile == BEST else 100.0, wrong=lambda tile: tile == BEST)
    wrong = of(exported(tmp_path, machine), BEST)
    assert wrong["invalidity"] == "correctness"
    assert wrong["times"]["runtimes"]
    assert "time" not in {m["name"] for m in wrong["measurements"]}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_reason_of_ours_has_a_word_of_t4_that_is_not_correctness(kind: str) -> None:
    assert INVALIDITY[kind] in WORDS - {"correct", "correctness"}
