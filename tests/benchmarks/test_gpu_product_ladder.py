"""Ladders of products on a GPU: their arms, what is left out, and what wrong results do; no GPU."""

from __future__ import annotations

import importlib
import importlib.util
import math
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

from triton_interpreter import interpreting  # before any other import of triton

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GPU, LADDERS = BENCHMARKS / "gpu", BENCHMARKS / "ladders"
pytestmark = pytest.mark.skipif(
    not (GPU / "product_ladder.py").exists(), reason="benchmarks/ is not part of this copy"
)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script of the benchmarks."""
    monkeypatch.setattr(sys, "path", [str(GPU), str(BENCHMARKS), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and BENCHMARKS in Path(file).parents:
            del sys.modules[name]


def planned(modules: Any, *words: str) -> Any:
    script = modules("product_ladder")
    return script.plan_of(script.arguments([str(LADDERS / words[0]), *words[1:]]))


def test_the_seed_begins_with_a_scan_and_leaves_out_each_rung(modules: Any) -> None:
    plan = planned(modules, "mmq-seed.toml", "--scan", "512")
    rungs = ["stream-k", "SSD", "stream-k off for K-quants", "stream-k off for all",
             "half the rows and warps"]  # fmt: skip
    assert list(plan) == [*rungs, *(f"without {rung}" for rung in rungs[1:-1])]
    scans = [next(t for i, t in tiles.items() if i.op == "ssd") for tiles in plan.values()]
    assert [scan == "recurrence" for scan in scans] == [True, *[False] * 4, True, False, False]

    def schedules(arm: str) -> str:
        return " ".join(
            f"{i.type}:{t.split('schedule=')[1].split(',')[0]}/{t.split('block_n=')[1][:3]}"
            for i, t in plan[arm].items() if i.op == "mmq"
        ).replace(",", "")  # fmt: skip

    assert schedules("without stream-k off for K-quants") == (
        "Q4_K:stream-k/64 Q5_K:stream-k/64 Q8_0:data-parallel/64 Q4_0:data-parallel/64"
    )
    assert schedules("without stream-k off for all") == (
        "Q4_K:data-parallel/64 Q5_K:data-parallel/64 Q8_0:stream-k/64 Q4_0:stream-k/64"
    )


def test_every_arm_of_the_ladders_is_legal(modules: Any) -> None:
    from tilewright.ops.mmq.triton_space import TRITON_SPACE as MMQ
    from tilewright.ops.ssd.triton_space import TRITON_SPACE as SSD
    from tilewright.tiles.tile import Problem
    from tilewright.tune.tile_arms import parse_tile

    arms = [*planned(modules, "mmq-seed.toml", "--scan", "512").values(),
            *planned(modules, "ssd-chunks.toml", "--rows", "4096,16384").values()]  # fmt: skip
    seen = {(item, text) for tiles in arms for item, text in tiles.items() if "(" in text}
    assert len(seen) == 4 * 4 + 1 + 2 * 6
    for item, text in seen:
        problem = Problem(item.op, "sm_90", item.dtype, item.type, item.activations, item.M,
                          item.N, item.K, item.group)  # fmt: skip
        (MMQ if item.op == "mmq" else SSD).check(parse_tile(text), problem)


def test_a_chunk_that_a_later_one_replaces_cannot_be_left_out(modules: Any) -> None:
    plan = planned(modules, "ssd-chunks.toml")
    assert [arm for arm in plan if arm.startswith("without")] == ["without chunk 256"]


@pytest.fixture
def ladder(modules: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """measure() of a case whose tile texts are microseconds; "wrong" gives a wrong result, "late"
    one that is wrong from the third launch on."""
    script, timing = modules("product_ladder"), modules("timing")

    class Subject:
        right = torch.ones(3, dtype=torch.float64)
        launches = 0

        def call(self, text: str) -> torch.Tensor:
            self.launches += text == "late"
            bad = text == "wrong" or (text == "late" and self.launches > 2)
            return torch.full((3,), 2.0 if bad else 1.0)

    def capture(calls: Any) -> Any:
        outputs = [torch.zeros(3) for _ in calls]

        def replay() -> None:
            for y, call in zip(outputs, calls, strict=True):
                y.copy_(call())

        graph = SimpleNamespace(replay=replay, us=sum(_us(call.args[0]) for call in calls))
        return SimpleNamespace(graph=graph, outputs=outputs)

    def compare_many(baseline: Any, others: Any, *, baseline_name: str, blocks: int,
                     on_block: Any, **_: Any) -> dict[str, Any]:  # fmt: skip
        arms = {baseline_name: baseline, "control": baseline, **others}
        for _ in range(blocks):
            us = {name: replay.__closure__[0].cell_contents for name, replay in arms.items()}
            for replay in arms.values():
                replay()
            times = {name: sum(_us(c.args[0]) for c in calls) for name, calls in us.items()}
            on_block(SimpleNamespace(to_dict=lambda times=times: {"us": times}))
        return {}

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr("tilewright.measure.compare_many", compare_many)
    monkeypatch.setattr("tilewright.measure.cache.GpuFlusher", lambda: None)
    item = script.Item("mmq", "Q4_0", "float16", "int8", 1, 1, 1, 0)

    def measured(**arms: str) -> Any:
        plan = {name.replace("_", " "): {item: text} for name, text in arms.items()}
        args = SimpleNamespace(blocks=8, readings=1, seed=0)
        return script.measure({item: Subject()}, plan, args, None, None)

    return measured


def _us(text: str) -> float:
    return {"wrong": 1.0, "late": 1.0}.get(text) or float(text)


def test_rungs_stand_to_the_base_to_what_is_below_and_to_the_finished_stack(ladder: Any) -> None:
    record = ladder(base="100", one="50", two="50", three="25", without_one="75", without_two="25")
    assert {(p["a"], p["b"]): p["ratio"] for p in record["pairs"]} == {
        ("base", "one"): pytest.approx(2.0),
        ("base", "three"): pytest.approx(4.0),
        ("one", "three"): pytest.approx(2.0),
    }
    assert {p["verdict"] for p in record["pairs"]} == {"DISJOINT"}
    assert [(p["a"], p["b"], p["ratio"]) for p in record["left"]] == [
        ("without one", "three", pytest.approx(3.0))
    ]
    assert record["arms"]["two"]["as"] == "one"
    assert record["arms"]["without two"]["as"] == "three"
    assert not record["failed"]


def test_a_wrong_rung_is_not_compared(ladder: Any) -> None:
    record = ladder(base="100", one="wrong", two="50")
    assert list(record["failed"]) == ["one"]
    assert "errors: Q4_0-1x1-M1 1 > 0.007" in record["failed"]["one"]
    assert {(p["a"], p["b"]) for p in record["pairs"]} == {("base", "two")}


def test_what_goes_wrong_while_it_is_timed_is_not_compared(ladder: Any) -> None:
    record = ladder(base="100", one="50", two="late")
    assert list(record["failed"]) == ["two"]
    assert "errors_after" in record["failed"]["two"]
    assert {(p["a"], p["b"]) for p in record["pairs"]} == {("base", "one")}
    assert record["left"] == []


def test_the_sequential_scan_is_the_recurrence(modules: Any) -> None:
    from tilewright.ops.ssd.op import scan_args

    with interpreting():
        script = modules("ssd_reference")
    args = scan_args(
        torch.randn(1, 13, 4, 8), torch.randn(1, 13, 4) - 3, -torch.rand(4) * 4,
        torch.randn(1, 13, 2, 24), torch.randn(1, 13, 2, 24), D=torch.randn(4),
        dt_bias=torch.randn(4), dt_softplus=True,
    )  # fmt: skip
    args.final_states.fill_(math.nan)
    right, states = script.recurrence(args)
    torch.testing.assert_close(script.sequential(args).double(), right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(args.final_states[0].double(), states, rtol=1e-5, atol=1e-6)


def test_processes_share_an_autotuners_configurations(modules: Any) -> None:
    peer = modules("ssd_peer")
    shares = [
        peer._Share(lambda configs, _: configs[:5], i, 3)(list(range(9)), {}) for i in (0, 1, 2)
    ]
    assert shares == [[0, 3], [1, 4], [2]]
    assert peer._Share(lambda configs, _: configs[:1], 2, 3)([7, 8], {}) == [7]
