"""The moe benchmark's own logic, with no GPU: bars."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(
    not (GPU / "moe.py").exists(), reason="benchmarks/ is not part of this copy"
)


@pytest.fixture
def moe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(GPU), str(GPU.parent), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module("moe")
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and GPU.parent in Path(file).parents:
            del sys.modules[name]


def record(part: str, tokens: int, ours: float | None, **more: Any) -> dict[str, Any]:
    """A case; `ours` microseconds, or None where our arm raised before it was timed."""
    us = {"cublas": 100.0} | ({} if ours is None else {"tilewright": ours})
    return {
        "id": f"{part}-Q4_K-T{tokens}", "part": part, "type_name": "Q4_K", "T": tokens,
        "arms": {"cublas": {"error": 1e-4},
                 "tilewright": {} if ours is None else {"error": 2e-4, "error_cold": 2e-4}},
        "failed": {} if ours is not None else {"tilewright": "OutOfResources: planted"},
        **dict.fromkeys(("cold", "rotating", "warm"), {"blocks": [{"us": us}] * 6}), **more,
    }  # fmt: skip


def held(moe: Any, records: list[dict[str, Any]]) -> dict[str, Any]:
    return {bar.name.partition(",")[0]: bar for bar in moe.bars_of(records)}


def test_bars_of_what_was_measured(moe: Any) -> None:
    bars = held(moe, [record("product", 128, 50.0), record("mlp", 1, 25.0)])
    assert bars["128 tokens rotating: 4 times llama.cpp"].worst == moe.LLAMA_CPP[128] / 50.0
    assert bars["over cuBLAS"].mean == pytest.approx(math.sqrt(2.0 * 4.0))
    assert bars["relative error"].holds
    assert bars["512 tokens rotating: 4 times llama.cpp"].holds is None


def test_few_tokens_are_held_against_both_states_of_the_l2(moe: Any) -> None:
    one = record("product", 1, 8.0)
    one["rotating"] = {"blocks": [{"us": {"cublas": 100.0, "tilewright": 9.0}}] * 6}
    bars = held(moe, [one])
    assert bars["1 tokens warm: never behind llama.cpp"].holds
    assert bars["1 tokens rotating: never behind llama.cpp"].holds is False
    assert bars["8 tokens warm: never behind llama.cpp"].holds is None


@pytest.mark.parametrize(
    ("part", "tokens", "launches"),
    [
        ("product", 1, {"cold": 1, "rotating": 24, "warm": 24}),
        ("product", 128, {"cold": 1, "rotating": 8}),
        ("mlp", 1, {"cold": 1}),
    ],
)
def test_states_of_the_l2(moe: Any, part: str, tokens: int, launches: dict[str, int]) -> None:
    case = moe.Case(part, "Q4_K", tokens)
    assert {cache: moe.launches_of(case, cache) for cache in moe.caches_of(case)} == launches


def test_an_arm_of_ours_that_could_not_run_misses_a_bar(moe: Any) -> None:
    bars = held(moe, [record("product", 128, 50.0), record("mlp", 128, None)])
    assert bars["relative error"].holds is False
    assert bars["relative error"].worst_case == "mlp-Q4_K-T128 tilewright"


def test_a_result_that_is_no_number_misses_a_bar(moe: Any) -> None:
    one = record("product", 8, 50.0)
    one["arms"]["tilewright"]["error_after_cold"] = None
    assert held(moe, [one])["relative error"].holds is False
