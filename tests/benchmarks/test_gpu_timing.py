"""Checking and timing one product, tried on the CPU: graphs and flushing are stand-ins."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.layout.cpu import pack_w4
from tilewright.measure import CpuClock, StateProbe
from tilewright.ops.w4a16.op import w4a16_gemm

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(
    not (GPU / "timing.py").exists(), reason="benchmarks/ is not part of this copy"
)


class Graph:
    """Replays calls as a CUDA graph does: into the outputs of the capture."""

    def __init__(self, calls: Sequence[Callable[[], torch.Tensor]]) -> None:
        self._calls = calls
        self.outputs = [call() for call in calls]

    def replay(self) -> None:
        for call, y in zip(self._calls, self.outputs, strict=True):
            y.copy_(call())


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """timing.py on the CPU, its contender "tilewright" ours on the CPU."""
    monkeypatch.setattr(sys, "path", [str(GPU), str(GPU.parent), *sys.path])
    before = set(sys.modules)
    timing, contenders = (importlib.import_module(n) for n in ("timing", "contenders"))

    class Ours(contenders.Tilewright):
        def __init__(self, weight: Any, dtype: torch.dtype, tile: Any = None) -> None:
            self.op, self.tile, self.bytes = w4a16_gemm, tile, weight.bytes
            self.weight = pack_w4(weight.host)

        def chosen(self, x: torch.Tensor) -> str:
            return "dot"

    class Fails:
        def __init__(self, weight: Any, dtype: torch.dtype) -> None:
            raise contenders.Unserved("only on Sundays")

    class Wrong(contenders.CuBlas):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().__call__(x)

    class WrongLater(contenders.CuBlas):
        """Right until it has run a few times."""

        runs = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            WrongLater.runs += 1
            return super().__call__(x) * (1 if WrongLater.runs < 12 else math.nan)

    more = {"tilewright": Ours, "humming": Fails, "gemlite": Wrong, "triton": WrongLater}
    monkeypatch.setattr(contenders, "CONTENDERS", {**contenders.CONTENDERS, **more})
    monkeypatch.setattr(contenders, "Tilewright", Ours)
    monkeypatch.setattr(timing, "capture", lambda calls: captured(timing, calls))
    monkeypatch.setattr(timing, "GpuFlusher", lambda: lambda: None)
    monkeypatch.setattr(timing, "activations", lambda *a, **k: drawn(*a, **k))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *a: type("P", (), {"L2_cache_size": 1 << 16})
    )
    drawn = importlib.import_module("operands").activations
    original = drawn
    drawn = lambda m, k, dtype, seed=0: original(m, k, dtype, seed=seed, device="cpu")  # noqa: E731
    yield timing
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and GPU.parent in Path(file).parents:
            del sys.modules[name]


def captured(timing: Any, calls: Sequence[Callable[[], torch.Tensor]]) -> Any:
    graph = Graph(calls)
    return timing._Captured(graph, graph.outputs, ())


def run(timing: Any, case: Any, skip: dict[str, str] | None = None) -> tuple[dict[str, Any], list]:
    operands = sys.modules["operands"]
    weight = operands.draw_weight(case.N, case.K, case.group, device="cpu")
    events: list[dict[str, Any]] = []
    record = timing.run_case(
        case, timing.Arms(weight), timing.Settings(blocks=6, readings=1),
        timing.Journal(events.append), skip or {}, CpuClock(), StateProbe(),
    )  # fmt: skip
    return record, events


def case_of(*arms: tuple[str, str], **changed: Any) -> Any:
    plan = sys.modules["plan"]
    case = plan.Case("decode", 64, 128, 4, arms, ("rotating", "cold"), group=32)
    return replace(case, **changed)


BLAS, OURS = ("cublas", "float16"), ("tilewright", "float16")


def test_both_caches_are_timed_and_errors_kept(script: Any) -> None:
    record, events = run(script, case_of(BLAS, OURS, ("tilewright", "bfloat16")))
    arms = ["cublas/float16", "tilewright/float16", "tilewright/bfloat16"]
    assert list(record["arms"]) == arms
    assert record["failed"] == {}
    for cache in ("rotating", "cold"):
        assert len(record[cache]["blocks"]) == 6
        assert all(set(b["us"]) == {*arms, "control"} for b in record[cache]["blocks"])
        assert set(record[cache]["judgements"]) == set(arms[1:])
        assert record["arms"]["tilewright/float16"][f"error_after_{cache}"] < 1e-3
    assert record["arms"]["tilewright/float16"]["tile"] == "dot"
    assert record["arms"]["tilewright/float16"]["repeatable"] is True
    assert (record["id"], record["M"]) == ("decode-64x128-g32-asym-M4", 4)
    assert [e["stage"] for e in events if e["arm"] == "cublas/float16"] == [
        "check", "capture rotating", "capture cold",
    ]  # fmt: skip
    assert record["rotating"]["launches_a_graph"] == 24


def test_copies_that_rotate_have_memory_of_their_own(script: Any) -> None:
    operands = sys.modules["operands"]
    arms = script.Arms(operands.draw_weight(64, 128, 32, device="cpu"))
    case = case_of(BLAS, OURS)
    for name in ("tilewright", "cublas"):
        first, second, third = arms.of(case, name, "float16", 3)
        weights = [getattr(c.weight, "codes", c.weight) for c in (first, second, third)]
        assert len({w.data_ptr() for w in weights}) == 3
        assert all(torch.equal(weights[0], w) for w in weights)
        assert arms.of(case, name, "float16")[0] is first


def test_a_peer_that_raises_or_is_wrong_is_recorded_and_not_timed(script: Any) -> None:
    peers = (("humming", "float16"), ("gemlite", "float16"), ("tinygemm", "float16"))
    record, _ = run(script, case_of(BLAS, *peers, OURS))
    assert record["failed"]["humming/float16"] == "Unserved: only on Sundays"
    assert record["failed"]["gemlite/float16"] == "relative error 1: not timed"
    assert "takes bfloat16 only" in record["failed"]["tinygemm/float16"]
    assert set(record["cold"]["blocks"][0]["us"]) == {
        "cublas/float16", "tilewright/float16", "control"
    }  # fmt: skip


def test_an_arm_that_is_wrong_after_timing_is_void(script: Any) -> None:
    record, _ = run(script, case_of(BLAS, ("triton", "float16"), OURS, caches=("cold",)))
    assert record["failed"]["triton/float16"].endswith("after timing: void")
    assert sys.modules["timing"] is script
    bars = importlib.import_module("bars")
    assert bars.samples(record, "cold", "triton/float16") == []
    assert bars.samples(record, "cold", "tilewright/float16") != []


def test_what_broke_a_process_before_is_not_tried_again(script: Any) -> None:
    record, events = run(script, case_of(BLAS, OURS), {"tilewright/float16": "it hung"})
    assert record["failed"] == {"tilewright/float16": "it hung"}
    assert record["cold"]["blocks"] == []
    assert {e["arm"] for e in events} == {"cublas/float16"}


def test_no_rows_and_a_bias_are_checked_without_timing(script: Any) -> None:
    record, _ = run(script, case_of(OURS, part="error", caches=(), M=0))
    assert record["arms"]["tilewright/float16"]["shape"] == [0, 64]
    record, _ = run(script, case_of(OURS, part="error", caches=(), bias=True))
    assert record["arms"]["tilewright/float16"]["error"] < 1e-3
    assert "cold" not in record
