"""The mmq benchmark's own logic, with no GPU: plan, arms, bars."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(
    not (GPU / "mmq.py").exists(), reason="benchmarks/ is not part of this copy"
)


@pytest.fixture
def mmq(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(GPU), str(GPU.parent), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module("mmq")
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and GPU.parent in Path(file).parents:
            del sys.modules[name]


def record(
    name: str, m: int, ours: float, cublas: float, error: float | None = 2e-4, **more: Any
) -> dict[str, Any]:
    return {
        "id": f"{name}-M{m}", "type_name": name, "N": 4096, "K": 14336, "M": m,
        "arms": {"cublas": {"error": 1e-4}, "tilewright": {"tile": "", "error": error}},
        "failed": {}, "cold": {"blocks": [{"us": {"cublas": cublas, "tilewright": ours}}] * 6},
        **more,
    }  # fmt: skip


def bar(mmq: Any, records: list[dict[str, Any]], name: str) -> Any:
    found = [b for b in mmq.bars_of(records) if name in b.name]
    assert len(found) == 1
    return found[0]


def test_every_type_is_measured_at_the_shape_of_llama_cpp_and_two_elsewhere(mmq: Any) -> None:
    cases = mmq.cases_of(mmq.arguments([]))
    here = {c.type_name for c in cases if (c.N, c.K) == mmq.LLAMA_SHAPE}
    there = {c.type_name for c in cases if (c.N, c.K) != mmq.LLAMA_SHAPE}
    assert here == set(mmq.LLAMA_CPP)
    assert there == {"Q4_K", "Q6_K"}
    # Cases of a weight are neighbours: it is drawn once.
    keys = [c[:3] for c in cases]
    assert len(set(keys)) == 1 + sum(a != b for a, b in zip(keys, keys[1:], strict=False))


def test_what_is_measured_can_be_chosen(mmq: Any) -> None:
    args = mmq.arguments(["--types", "Q5_K", "--shapes", "64x256", "--rows", "3"])
    assert [c.id for c in mmq.cases_of(args)] == ["Q5_K-64x256-M3"]


@pytest.mark.parametrize(
    "words",
    [["--tile", "hopper"], ["--tile", "cublas=hopper()"], ["--blocks", "5"], ["--cache", "hot"]],
)
def test_a_wrong_argument_is_a_usage_error(mmq: Any, words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        mmq.arguments(words)


def test_many_rows_are_measured_both_ways(mmq: Any) -> None:
    case = mmq.Case("Q4_K", 4096, 14336, 4096)
    tiles = mmq.tiles_of(case, "sm_90", {"mine": "triton(block_m=64)"})
    assert {tile.algorithm for tile in tiles.values()} == {"hopper", "dense", "triton"}
    assert list(tiles)[0] == "tilewright"
    few = mmq.tiles_of(case._replace(M=512), "sm_90", {})
    assert [(name, tile.algorithm) for name, tile in few.items()] == [("tilewright", "hopper")]


def test_llama_cpp_is_to_be_beaten_three_times_and_q6_k_two_and_a_half(mmq: Any) -> None:
    records = [record("Q4_0", 512, 304 / 3, 80), record("Q6_K", 512, 422 / 2.5, 80)]
    found = bar(mmq, records, "512 rows: 3 times")
    assert found.mean == pytest.approx(1)
    assert found.holds in (True, False)  # on the very bar
    assert bar(mmq, [record("Q4_0", 512, 100, 80)], "512 rows: 3 times").holds
    assert not bar(mmq, [record("Q4_0", 512, 103, 80)], "512 rows: 3 times").holds


def test_cublas_bars_are_ratios(mmq: Any) -> None:
    assert bar(mmq, [record("Q4_K", 512, 100, 71)], "4096 x 14336 over cuBLAS").holds
    assert not bar(mmq, [record("Q4_K", 512, 100, 69)], "4096 x 14336 over cuBLAS").holds
    many = [record("Q4_K", 2048, 100, 70), record("Q4_K", 4096, 100, 99)]
    assert bar(mmq, many, "2048 and 4096").holds  # in geometric mean


@pytest.mark.parametrize("error", [3.1e-4, None], ids=["too large", "not finite"])
def test_an_error_above_the_bar_misses_it(mmq: Any, error: float | None) -> None:
    assert bar(mmq, [record("Q4_K", 8, 10, 9)], "relative error").holds
    assert not bar(mmq, [record("Q4_K", 8, 10, 9, error)], "relative error").holds


def test_an_arm_of_ours_that_failed_misses_the_error_bar(mmq: Any) -> None:
    broken = record("Q4_K", 8, 10, 9, failed={"tilewright": "relative error 0.3: not timed"})
    assert not bar(mmq, [record("Q4_0", 8, 10, 9), broken], "relative error").holds


def test_an_arm_that_was_not_reached_in_time_is_neither_right_nor_wrong(mmq: Any) -> None:
    late = record("Q4_K", 8, 10, 9, failed={"tilewright": "not compiled and launched in time"})
    late["arms"].pop("tilewright")
    late.pop("cold")
    assert bar(mmq, [record("Q4_0", 8, 10, 9), late], "relative error").holds
    assert bar(mmq, [late], "relative error").holds is None
    assert bar(mmq, [late], "M=8 cold").holds is None


def test_llama_cpp_s_figures_are_held_against_each_state_of_the_l2_apart(mmq: Any) -> None:
    warm = {"blocks": [{"us": {"cublas": 30.0, "tilewright": 14.0}}] * 6}
    found = [record("Q4_K", 1, 15.0, 40.0, warm=warm)]
    assert not bar(mmq, found, "M=1 cold: 1.1 times llama.cpp").holds  # 15.9 / 15.0
    assert bar(mmq, found, "M=1 warm: 1.1 times llama.cpp").holds  # 15.9 / 14.0
    assert bar(mmq, [record("Q4_K", 1, 15.0, 40.0)], "M=1 warm").holds is None


@pytest.mark.parametrize(
    ("words", "m", "caches"),
    [
        ([], 1, ["cold", "rotating", "warm"]),
        (["--cache", "warm,cold"], 8, ["warm", "cold"]),
        (["--cache", "warm"], 512, ["cold"]),
    ],
)
def test_what_the_l2_holds_can_be_chosen_for_few_rows(
    mmq: Any, words: list[str], m: int, caches: list[str]
) -> None:
    case = mmq.Case("Q4_K", 4096, 14336, m)
    assert mmq.caches_of(case, mmq.arguments(words).caches) == caches


class _Packed:
    """A weight of 40 MB that is only counted."""

    nbytes = 40_000_000


@pytest.mark.parametrize(("cache", "launches", "weights"), [
    ("cold", 1, 1), ("warm", 24, 1), ("rotating", 24, 6),
])  # fmt: skip
def test_a_graph_holds_as_many_weights_as_its_name_says(
    mmq: Any, monkeypatch: pytest.MonkeyPatch, cache: str, launches: int, weights: int
) -> None:
    import torch

    properties = type("Properties", (), {"L2_cache_size": 60_000_000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(mmq, "_copy", lambda weight: _Packed())
    weight = object.__new__(mmq.Weight)
    weight.packed = _Packed()
    calls = weight.calls("tilewright", None, torch.zeros(1), cache)
    assert len(calls) == launches
    assert len({id(call.args[1]) for call in calls}) == weights
