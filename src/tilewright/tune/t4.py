"""Tuning results in T4, the exchange format of auto-tuners (schema 1.0.0).

T4 came out of the auto-tuning community's workshop of 2022; Kernel Tuner writes it, and the tools
that compare tuners read it. One result a candidate: its configuration, its times in milliseconds,
and whether it is valid. T4 can say ``"invalidity": "correctness"``, a configuration whose result is
wrong: the gate finds these, and they are exported with the reason beside the measurements.

T4 knows no problem sizes in a result, so a configuration holds the problem's fields beside the
tile's: M, N, K, weight_type and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.outcome import Outcome
from tilewright.tune.record import Event

__all__ = ["INVALIDITY", "T4_VERSION", "to_t4"]

T4_VERSION = "1.0.0"

INVALIDITY = {
    "rule": "constraints",
    "compile": "compile",
    "timeout": "timeout",
    "error": "runtime",
    "crash": "runtime",
    "memory": "runtime",
    "lost": "runtime",
    "time": "runtime",
}
"""T4's word for our reasons of rejection; what is not here is a check of the gate: correctness."""


def to_t4(events: Iterable[Event]) -> dict[str, Any]:
    """The results of a log's events as a T4 document.

    A candidate that was rejected after it had been timed keeps its times, and is invalid.

    Args:
        events: of one run or of several, in their order (`tilewright.tune.record.read_events`).
    """
    found: dict[tuple[Problem, Tile], dict[str, Any]] = {}
    names: dict[tuple[Problem, str], tuple[Problem, Tile]] = {}
    for event in events:
        if event.problem is None:
            continue
        if event.kind in ("passed", "rejected") and event.tile is not None:
            key = (event.problem, event.tile)
            names[event.problem, str(event.tile)] = key
            old = found.get(key, {}).get("us", [])
            found[key] = {"at": event.at, "outcome": event.data["outcome"], "us": old}
        elif event.kind == "sampled":
            for name, us in event.data["block"]["us"].items():
                at = names.get((event.problem, name))
                if at is not None:
                    found[at]["us"].append(us)
        elif event.kind == "compared":
            for comparison in event.data["comparisons"]:
                at = names.get((event.problem, comparison["b"]))
                if at is not None:
                    blocks = comparison["blocks"]
                    found[at]["us"] += [block["us"][comparison["b"]] for block in blocks]
    results = [_result(problem, tile, **facts) for (problem, tile), facts in found.items()]
    return {"schema_version": T4_VERSION, "results": results}


def _result(
    problem: Problem, tile: Tile, *, at: str, outcome: dict[str, Any], us: list[float]
) -> dict[str, Any]:
    said = Outcome.from_dict(outcome)
    invalidity = "correct"
    if not said.passed:
        invalidity = INVALIDITY.get(said.kind, "correctness")
    runtimes = [value / 1e3 for value in us]
    measurements: list[dict[str, Any]] = []
    if runtimes and said.passed:
        measurements.append({"name": "time", "value": median(runtimes), "unit": "ms"})
    if said.oracle_error is not None:
        measurements.append({"name": "oracle_error", "value": said.oracle_error, "unit": ""})
    if not said.passed:
        measurements.append({"name": "check", "value": said.kind, "unit": ""})
        measurements.append({"name": "reason", "value": said.reason, "unit": ""})
    compiling_ms = (said.compile_s or 0.0) * 1e3
    return {
        "timestamp": at,
        "configuration": {**problem.__dict__, **tile.as_dict()},
        "objectives": ["time"],
        "times": {
            "compilation_time": compiling_ms,
            "framework": 0.0,
            "search_algorithm": 0.0,
            "validation": max(0.0, said.seconds * 1e3 - compiling_ms),
            "runtimes": runtimes,
        },
        "invalidity": invalidity,
        "correctness": 0.0 if invalidity == "correctness" else 1.0,
        "measurements": measurements,
    }
