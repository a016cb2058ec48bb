"""What the ssd benchmark checks around its timing, with no GPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

import triton_interpreter  # noqa: F401  before any other import of triton

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(
    not (GPU / "ssd.py").exists(), reason="benchmarks/ is not part of this copy"
)
RIGHT = torch.arange(1.0, 13.0, dtype=torch.float64).view(3, 2, 2)
OPTIONS = SimpleNamespace(seed=0, blocks=6, readings=3)


@pytest.fixture
def ssd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, its graphs plain calls, its timing one call an arm."""
    monkeypatch.setattr(sys, "path", [str(GPU), str(GPU.parent), *sys.path])
    before = set(sys.modules)
    module = importlib.import_module("ssd")

    def capture(calls: Any) -> Any:
        outputs = [torch.zeros(3, 2, 2)]

        def replay() -> None:
            made = calls[0]()
            if made is not None:
                outputs[0].copy_(made)

        return SimpleNamespace(graph=SimpleNamespace(replay=replay), outputs=outputs)

    def compare_many(baseline: Any, others: Any, **_: Any) -> dict[str, Any]:
        baseline()
        return {}

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(importlib.import_module("timing"), "capture", capture)
    monkeypatch.setattr("tilewright.measure.compare_many", compare_many)
    monkeypatch.setattr("tilewright.measure.cache.GpuFlusher", lambda: None)
    yield module
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and GPU.parent in Path(file).parents:
            del sys.modules[name]


def scanned(ssd: Any, monkeypatch: pytest.MonkeyPatch, wrong_from: int) -> dict[str, Any]:
    """The record of a scan whose states are wrong from a call on."""
    args = SimpleNamespace(y=torch.zeros(1, 3, 2, 2), final_states=torch.zeros(1, 2, 2))
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        args.y[0] = RIGHT
        args.final_states[0] = RIGHT[0] * (1 if calls < wrong_from else 2)

    monkeypatch.setattr(ssd, "draw", lambda case, seed: args)
    monkeypatch.setattr(ssd, "calls_of", lambda *_: {"tilewright": call})
    reference = importlib.import_module("ssd_reference")
    monkeypatch.setattr(reference, "recurrence", lambda _: (RIGHT, RIGHT[0]))
    case = ssd.Case("scan", "nemotron-h-8b", 16384, "bfloat16")
    made: dict[str, Any] = ssd.measure(case, OPTIONS, None, None)
    return made


def test_a_scan_is_checked_before_and_after_it_is_timed(ssd, monkeypatch):  # type: ignore[no-untyped-def]
    record = scanned(ssd, monkeypatch, wrong_from=99)
    checks = {f"error{when}{what}" for when in ("", "_graph", "_after") for what in ("", "_states")}
    assert record["arms"]["tilewright"] == dict.fromkeys(checks, 0.0)
    assert "cold" in record


def test_what_goes_wrong_while_it_is_timed_misses_a_bar(ssd, monkeypatch):  # type: ignore[no-untyped-def]
    record = scanned(ssd, monkeypatch, wrong_from=4)  # a plain call, a graph, the timing
    assert record["arms"]["tilewright"]["error_after_states"] == pytest.approx(1.0)
    bar = next(b for b in ssd.bars_of([record]) if b.name == "relative error bfloat16")
    assert bar.holds is False


@pytest.mark.parametrize("wrong_from", [1, 2, 99], ids=["plain call", "graph", "right"])
def test_a_wrong_step_is_not_timed(ssd, monkeypatch, wrong_from):  # type: ignore[no-untyped-def]
    """The state counts calls: a replay has to begin with the one that was drawn."""
    state, calls = torch.zeros(1), 0

    def step() -> Any:
        nonlocal calls
        calls += 1
        state.add_(1)
        return RIGHT.float() * float(state) * (1 if calls < wrong_from else 3)

    monkeypatch.setattr(ssd, "step_calls", lambda *_: ({"tilewright": step}, state, RIGHT))
    record = ssd.measure(ssd.Case("step", "nemotron-h-8b", 64, "bfloat16"), OPTIONS, None, None)
    if wrong_from == 99:
        checks = ("error", "error_graph", "error_after")
        assert record["arms"]["tilewright"] == dict.fromkeys(checks, 0.0)
    else:
        assert record["failed"] == {"tilewright": "relative error 2: not timed"}
        assert "cold" not in record
