"""The README's tables of GPU results."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not (BENCHMARKS / "render.py").exists(), reason="benchmarks/ is not part of this copy"
)


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("render")
    sys.modules.pop("render", None)


def case(part: str, us: dict[str, float], **changed: Any) -> dict[str, Any]:
    cache = {"prefill": "cold", "small": "cold", "decode": "rotating"}.get(part, "none")
    blocks = [{"us": {arm: t + i for arm, t in us.items()}} for i in (0, 1, 2)]
    return {
        "part": part, "N": 24576, "K": 4096, "M": 16, "failed": {},
        "arms": {arm: {"error": 2e-4} for arm in us}, cache: {"blocks": blocks}, **changed,
    }  # fmt: skip


def result(date: str, *cases: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "gpu-w4a16",
        "origin": {"date": date, "gpu": {"name": "NVIDIA H200"}},
        "cases": list(cases),
    }


TIMES = {"cublas/float16": 99.0, "tilewright/float16": 49.0, "humming/float16": 74.0}


def test_each_part_comes_from_the_newest_file_that_has_it(render: Any, tmp_path: Path) -> None:
    old = result("2030-01-01", case("small", TIMES), case("decode", TIMES))
    new = result("2030-01-02", case("small", {**TIMES, "humming/float16": 199.0}))
    for name, content in (("a", old), ("b", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    text = "<!-- results:gpu-w4a16 -->\n<!-- /results -->\n"
    filled = render.render(text, tmp_path)
    decode, small = filled.split("\n\n<!--")[0].split("\n\n|")
    assert "2030-01-01" in decode
    assert "launches in turn over copies" in decode
    assert "2030-01-02" in small
    assert "the L2 flushed before each launch" in small
    assert "| 24576 x 4096, 16 | 100.0 | 200.0 | 50.0 | 2.00x | 4.00x |" in small


def test_an_arm_that_failed_is_shown_so_and_has_no_ratio(render: Any) -> None:
    first = case("prefill", TIMES, failed={"humming/float16": "it broke"})
    table = render.gpu_table(result("2030-01-01", first, case("prefill", TIMES)), "prefill")
    lines = table.splitlines()
    assert lines[2].endswith("| 100.0 | failed | 50.0 | 2.00x |  |")
    assert lines[3].endswith("| 100.0 | 75.0 | 50.0 | 2.00x | 1.50x |")


def test_errors_are_the_worst_of_all_products(render: Any) -> None:
    worse = case("error", TIMES)
    worse["arms"]["tilewright/float16"]["error"] = 2.9e-4
    broken = case("error", {"triton/float16": 1.0})
    broken["arms"]["triton/float16"]["error"] = None
    table = render.gpu_table(result("2030-01-01", case("error", TIMES), worse, broken), "error")
    assert "| Tilewright fp16 | 2.9e-04 |" in table
    assert "| portable Triton | inf |" in table
    assert "the worst of 3 products" in table


def test_the_model_table_says_what_each_change_set_is_worth(render: Any) -> None:
    model = {
        "kind": "gpu-w4a16-model",
        "origin": {"date": "2030-01-01", "gpu": {"name": "NVIDIA H200"}},
        "model": {"file": "synthetic Llama-3-8B"},
        "input_len": 2048,
        "arms": [{"name": "scalar/float16"}, {"name": "packed/float16"}, {"name": "x/float16"}],
        "blocks": [{"us": {"scalar/float16": 2e5, "packed/float16": 1e5}}],
        "judgements": [
            {"a": "scalar/float16", "b": "packed/float16", "ratio": 2.0, "low": 1.9, "high": 2.1,
             "verdict": "DISJOINT"}
        ],
    }  # fmt: skip
    table = render.gpu_model_table(model, "synthetic Llama-3-8B")
    assert "| packed/float16 | 100.00 | 2.000x (1.900-2.100) DISJOINT of scalar/float16 |" in table
    assert "| x/float16 | wrong |  |" in table
    assert "2048 tokens in" in table


def test_a_ladder_is_a_table_of_its_own(render: Any, tmp_path: Path) -> None:
    us = {"old/float16": 199.0, "packed/float16": 99.0, "wide/float16": 49.0}
    pairs = [
        {"a": "old/float16", "b": "packed/float16", "ratio": 2.0, "verdict": "DISJOINT"},
        {"a": "old/float16", "b": "wide/float16", "ratio": 4.0, "verdict": "DISJOINT"},
        {"a": "packed/float16", "b": "wide/float16", "ratio": 2.0, "verdict": "FASTER"},
    ]
    ladder = case("ladder", {}, pairs=pairs, arms={arm: {"error": 1e-4} for arm in us})
    blocks = [{"us": {arm: t + i for arm, t in us.items()}} for i in (0, 1, 2)]
    ladder["cold"] = {"baseline": "old/float16", "blocks": blocks}
    content = {**result("2030-01-01", ladder), "title": "the seed"}
    (tmp_path / "ladder.json").write_text(json.dumps(content))
    text = render.render("<!-- results:gpu-w4a16 -->\n<!-- /results -->\n", tmp_path)
    assert "| the seed | 24576 x 4096, M = 16: us | vs the base | vs the one before |" in text
    assert "| old, float16 | 200.0 |  |  |" in text
    assert "| packed, float16 | 100.0 | 2.000x DISJOINT |  |" in text
    assert "| wide, float16 | 50.0 | 4.000x DISJOINT | 2.000x FASTER |" in text


def test_a_ladder_without_kept_comparisons_shows_ratios_alone(render: Any) -> None:
    us = {"old/float16": 200.0, "packed/float16": 100.0, "control: old/bfloat16": 200.0}
    ladder = case("ladder", {}, arms={arm: {"error": 1e-4} for arm in us})
    ladder["cold"] = {"baseline": "old/float16", "blocks": [{"us": us}]}
    content = result("2030-01-01", ladder)
    content["origin"]["command"] = "w4a16.py --ladder seed.toml --control b.toml"
    (subject,) = render._parts(content)
    assert subject == "ladder seed"
    table = render.gpu_table(content, subject)
    assert "| packed, float16 | 100.0 | 2.000x |  |" in table
    assert "| control: old, bfloat16 | 200.0 | 1.000x |  |" in table
