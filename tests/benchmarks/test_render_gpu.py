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


def test_parts_of_several_files_stand_side_by_side(render: Any, tmp_path: Path) -> None:
    wide, tall = case("decode", TIMES), {**case("decode", TIMES), "N": 4096, "K": 12288}
    alone = case("prefill", {"cublas/float16": 99.0, "triton/float16": 124.0})
    files = {"a": (case("prefill", TIMES), wide), "b": (tall,), "c": (alone,)}
    for day, (name, cases) in enumerate(files.items(), 1):
        content = json.dumps(result(f"2030-01-0{day}", *cases))
        (tmp_path / f"{name}.json").write_text(content)
    text = render.render("<!-- results:gpu-w4a16 -->\n<!-- /results -->\n", tmp_path)
    assert text.count("| 24576 x 4096, 16 |") == 3
    assert text.count("| 4096 x 12288, 16 |") == 1
    assert "| 24576 x 4096, 16 | 100.0 | 125.0 | 0.80x |" in text


def against(kind: str, figures: dict[str, Any], *cases: dict[str, Any]) -> dict[str, Any]:
    return {**result("2030-01-01", *cases), "kind": kind, **figures}


def timed(us: dict[str, float], base: str, **fields: Any) -> dict[str, Any]:
    blocks = [{"us": {arm: t + i for arm, t in us.items()}} for i in (0, 1, 2)]
    return {
        "failed": {}, "arms": {arm: {"error": 2e-4} for arm in us},
        "cold": {"baseline": base, "blocks": blocks}, **fields,
    }  # fmt: skip


def test_kept_figures_of_a_peer_stand_beside_what_was_measured(render: Any, tmp_path: Path) -> None:
    us = {"cublas": 79.0, "tilewright": 99.0}
    known = timed(us, "cublas", id="Q4_K-M512", type_name="Q4_K", M=512, N=4096, K=14336)
    other = timed(us, "cublas", id="Q4_K-N512", type_name="Q4_K", M=512, N=512, K=14336)
    content = against("gpu-mmq", {"llama_cpp_us": {"Q4_K": {"512": 300.0}}}, known, other)
    (tmp_path / "mmq.json").write_text(json.dumps(content))
    text = render.render("<!-- results:gpu-mmq -->\n<!-- /results -->\n", tmp_path)
    header = "| case | cublas us | tilewright us | vs cublas | llama.cpp us* | vs llama.cpp* |"
    assert header in text
    assert "| Q4_K-M512 | 80.0 | 100.0 | 0.80x | 300 | 3.00x |" in text
    assert "| Q4_K-N512 | 80.0 | 100.0 | 0.80x |  |  |" in text
    assert "another run on such a GPU, not paired" in text


def test_a_model_shows_where_its_kernels_spend_a_prefill(render: Any, tmp_path: Path) -> None:
    row = {"test": "pp4096", "median_ts": 300.0, "samples_ts": [290.0, 300.0, 310.0],
           "llama_cpp_ts": 100.0, "ratio": 3.0}  # fmt: skip
    kernels = {
        "test": "pp4096", "total_us": 2000.0,
        "rows": [{"op": "mmq", "us": 1500.0, "share": 0.75, "launches": 7}],
    }  # fmt: skip
    content = {
        "kind": "gpu-gguf-model", "origin": {"date": "2030-01-01", "gpu": {"name": "NVIDIA H200"}},
        "model": {"name": "llama-3-8b"}, "dtype": "float16", "check": {"logits_error": 1e-3},
        "timed": {"results": [row], "kernel_time": kernels},
    }  # fmt: skip
    (tmp_path / "model.json").write_text(json.dumps(content))
    text = render.render("<!-- results:gpu-gguf-model -->\n<!-- /results -->\n", tmp_path)
    assert "| pp4096 | 300 (290-310) | 100 | 3.00x |" in text
    assert "| mmq | 1.50 | 75.0% | 7 |" in text
    assert "| total kernel time at pp4096 | 2.00 |  |  |" in text
    assert "logits within 1.0e-03 of" in text
    assert "* llama.cpp's figures are of another run" in text


def test_a_hybrids_token_by_a_graph(render: Any, tmp_path: Path) -> None:
    loop = "transformers' loop"
    kernels = {
        "steps": 4, "total_us": 8000.0,
        "rows": [{"op": "mmq", "us": 6000.0, "share": 0.75, "launches": 400}],
    }  # fmt: skip
    content = {
        "kind": "gpu-hybrid-decode", "dtype": "float16", "steps": 64, "prompt": 512,
        "origin": {"date": "2030-01-01", "gpu": {"name": "NVIDIA H200"}}, "error": 3e-4,
        "model": {"name": "a hybrid"}, "kernel_time": kernels,
        "judgement": {"ratio": 9.0, "low": 8.5, "high": 9.5, "verdict": "DISJOINT"},
        "blocks": [{"us": {loop: 900.0 * n, "graph": 100.0 * n}} for n in (1, 2, 3)],
    }  # fmt: skip
    (tmp_path / "hybrid.json").write_text(json.dumps(content))
    text = render.render("<!-- results:gpu-hybrid-decode -->\n<!-- /results -->\n", tmp_path)
    assert f"| {loop} | 1800 |  |" in text
    assert "| graph | 200 | 9.00x (8.50-9.50) DISJOINT |" in text
    assert "| mmq | 1500 | 75.0% | 100 |" in text
    assert "| all | 2000 |  |  |" in text
    assert "logits of both differ by 3.0e-04 at most" in text


def test_a_mixture_without_figures_of_llama_cpp(render: Any, tmp_path: Path) -> None:
    row = {"test": "pp4096", "median_ts": 300.0, "samples_ts": [290.0, 310.0]}
    content = {
        "kind": "gpu-gguf-model", "origin": {"date": "2030-01-01", "gpu": {"name": "NVIDIA H200"}},
        "model": {"name": "qwen3-30b-a3b", "experts": 128}, "dtype": "float16",
        "check": {"logits_error": 1e-2, "median_token_error": 9e-4},
        "timed": {"results": [row], "kernel_time": None},
    }  # fmt: skip
    (tmp_path / "model.json").write_text(json.dumps(content))
    text = render.render("<!-- results:gpu-gguf-model -->\n<!-- /results -->\n", tmp_path)
    assert "| qwen3-30b-a3b | tok/s |\n| --- | ---: |\n| pp4096 | 300 (290-310) |" in text
    assert "logits within 9.0e-04 (median token) of the dequantized weights'." in text
    assert "llama.cpp" not in text


def bar(name: str, least: float, mean: float, worst: float, **changed: Any) -> dict[str, Any]:
    return {
        "name": name, "least": least, "mean": mean, "worst": worst, "floor": None, "most": False,
        "cases": {"a": mean, "b": worst}, "holds": mean >= least, **changed,
    }  # fmt: skip


def test_every_claim_is_told_once_with_what_was_reached(render: Any, tmp_path: Path) -> None:
    error = {"most": True, "holds": True}
    first = {**result("2030-01-01"), "bars": [
        bar("speed", 1.0, 0.9, 0.8, floor=0.7), bar("error", 3e-4, 1e-4, 2.9e-4, **error),
        bar("nothing", 1.0, 0.0, 0.0, holds=None),
    ]}  # fmt: skip
    later = {**result("2030-01-02"), "bars": [
        bar("speed", 1.0, 1.25, 1.1, floor=0.7), bar("error", 3e-4, 1e-4, 2.1e-4, **error),
    ]}  # fmt: skip
    for name, content in {"b": first, "a": later}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    text = render.render("<!-- results:gpu-bars -->\n<!-- /results -->\n", tmp_path)
    assert "| W4A16 | speed | 2 | 1, each 0.7 | 1.25 | 1.1 | yes |" in text
    assert "| W4A16 | error | 2 | 0.0003 |  | 0.00029 | yes |" in text
    assert "nothing" not in text
    assert text.count("| W4A16 |") == 2


def test_a_claim_that_fails_says_so(render: Any, tmp_path: Path) -> None:
    content = {**result("2030-01-01"), "bars": [bar("speed", 1.0, 0.9, 0.8)]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    text = render.render("<!-- results:gpu-bars -->\n<!-- /results -->\n", tmp_path)
    assert "| W4A16 | speed | 2 | 1 | 0.9 | 0.8 | **no** |" in text


def scanned(name: str, **fields: Any) -> dict[str, Any]:
    us = {"tilewright": 99.0, "mamba_ssm 64": 399.0, "mamba_ssm 128": 299.0}
    case = timed(us, "tilewright", id=name, part="scan", layer="nemotron", tokens=4096, **fields)
    for block in case["cold"]["blocks"]:
        block["us"]["control"] = block["us"]["tilewright"]
    return case


def test_a_peer_of_the_same_blocks_stands_for_figures_of_another_run(
    render: Any, tmp_path: Path
) -> None:
    pairs = [{"a": "mamba_ssm 64", "ratio": 4.0, "verdict": "DISJOINT"},
             {"a": "mamba_ssm 128", "ratio": 3.0, "verdict": "DISJOINT"}]  # fmt: skip
    figures = {"mamba_ssm_us": {"nemotron": {"4096": 400.0}}}
    content = against("gpu-ssd", figures, scanned("one", dtype="bfloat16", pairs=pairs))
    over = "nemotron at 4096 over mamba_ssm"
    content["bars"] = [bar(over, 2.5, 3.0, 3.0, worst_case="one")]
    (tmp_path / "ssd.json").write_text(json.dumps(content))
    text = render.render("<!-- results:gpu-ssd -->\n<!-- /results -->\n", tmp_path)
    header = (
        "| case | tilewright us | mamba_ssm 64 us | mamba_ssm 128 us | vs the best of mamba_ssm |"
    )
    assert header in text
    assert "| one | 100.0 | 400.0 | 300.0 | 3.00x DISJOINT |" in text
    assert "another run" not in text
    bars = "<!-- results:gpu-bars -->\n<!-- /results -->\n"
    assert "mamba_ssm stand" not in render.render(bars, tmp_path)
    old = {**content, "bars": [bar(over, 2.5, 3.0, 3.0, worst_case="one (published)")]}
    (tmp_path / "ssd.json").write_text(json.dumps(old))
    assert "Against llama.cpp and mamba_ssm stand" in render.render(bars, tmp_path)


def test_a_ladder_of_products_shows_rungs_and_what_they_are_worth_in_the_end(
    render: Any, tmp_path: Path
) -> None:
    us = {"base": 199.0, "one": 99.0, "without one": 149.0}
    case = timed(us, "base", id="Q4_K-M512", part="ladder")
    case["arms"] = {arm: {"as": arm, "errors": [4e-3]} for arm in us}
    case["arms"] |= {"two": {"as": "one"}, "three": {"as": "three", "errors": [1.0]}}
    case["failed"] = {"three": "errors: 1 > 0.007"}
    case["pairs"] = [{"a": "base", "b": "one", "ratio": 2.0, "verdict": "DISJOINT"}]
    case["left"] = [{"a": "without one", "b": "one", "ratio": 1.5, "verdict": "FASTER"}]
    content = {**result("2030-01-01", case), "kind": "gpu-ladder", "title": "the second seed"}
    (tmp_path / "ladder.json").write_text(json.dumps(content))
    text = render.render("<!-- results:gpu-ladder -->\n<!-- /results -->\n", tmp_path)
    assert "| the second seed | rung | us | vs below | left out |" in text
    assert "| Q4_K-M512 | base | 200.0 |  |  |" in text
    assert "|  | one | 100.0 | 2.000x DISJOINT | 1.500x FASTER |" in text
    assert "two" not in text
    assert "|  | three | **wrong** |  |  |" in text
    assert "Wrong results: 1; largest relative error 4.0e-03" in text


def test_a_real_model_stands_against_float32(render: Any, tmp_path: Path) -> None:
    score = {"value": 20.0, "chunks": 20}
    part = {"identical": False, "ids": [], "first_difference": 7, "reference_gap": 0.0123}
    fed = [{"steps": 64, "same": 64, "parted": []}, {"steps": 64, "same": 63, "parted": []}]
    content = {
        "kind": "gpu-quality", "model": {"file": "m.gguf"},
        "origin": {"date": "2030-01-01", "gpu": {"name": "NVIDIA H200"}},
        "settings": {"chunks": 20, "context": 512, "text": "t.txt", "new_tokens": 64},
        "stepped": "a token is one CUDA graph",
        "perplexity": {"transformers": score, "float16": {"value": 20.01, "chunks": 20}},
        "greedy": {"float16": [{"identical": True, "ids": []}, part]}, "fed": {"float16": fed},
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(content))
    text = render.render("<!-- results:gpu-quality -->\n<!-- /results -->\n", tmp_path)
    row = "| float16 | 20.0100 | +0.050% | 1 of 2 | token 7 (gap 0.0123) | 127 of 128 |"
    assert row in text
    assert "`m.gguf`, packed, on NVIDIA H200, 2030-01-01" in text
    assert "A token is one CUDA graph." in text
