"""The benchmark scripts' own logic: tables, pairs, external programs, waiting processes."""

from __future__ import annotations

import importlib
import json
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewright.errors import MeasureError
from tilewright.measure import Block

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not (BENCHMARKS / "render.py").exists(), reason="benchmarks/ is not part of this copy"
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of benchmarks/ by name, as `python benchmarks/x.py` finds its siblings."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).parent == BENCHMARKS:
            del sys.modules[name]


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\nimport sys, json\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def blocks(factor: dict[str, float], count: int = 20) -> list[Block]:
    """Times around 1 s divided by each engine's factor, with 0.1 % noise."""
    rng = np.random.default_rng(0)
    return [
        Block(
            tuple(factor),
            {name: 1e6 / f * float(np.exp(rng.normal(0, 0.001))) for name, f in factor.items()},
        )
        for _ in range(count)
    ]


def versus_result(date: str = "2030-01-02T03:04:05+00:00", others: float = 0.0) -> dict[str, Any]:
    names = ("llama.cpp", "float", "control")
    us = [dict(zip(names, row, strict=True)) for row in ((2e6, 1e6, 2e6), (4e6, 2e6, 4e6))]
    row = {"a": "llama.cpp", "b": "float", "verdict": "DISJOINT", "ratio": 2.0}
    return {
        "kind": "versus-llama-cpp",
        "origin": {"device": "Test CPU", "threads": 2, "date": date},
        "model": {"file": "m.gguf"},
        "arms": {"llama.cpp": {}, "float": {}},
        "tests": {
            "pp512": {
                "tokens": 512,
                "others_share": others,
                "judgements": [{**row, "low": 1.9, "high": 2.1}],
                "blocks": [{"us": u} for u in us],
            }
        },
    }


def test_versus_table_states_rates_ratios_and_origin(script: Any) -> None:
    table = script("render").versus_table(versus_result())
    assert table.splitlines()[2:4] == [
        "| llama.cpp | 192 (128-256) |  |  |",
        "| Tilewright, weight-only | 384 (256-512) | 2.00x (1.90-2.10) DISJOINT |  |",
    ]
    assert "`m.gguf` on Test CPU, 2 threads, 2030-01-02; median (range) of 2 blocks" in table
    assert "busy" not in table


def test_versus_table_says_when_the_machine_was_busy(script: Any) -> None:
    table = script("render").versus_table(versus_result(others=0.31))
    assert "The machine was busy: other programs used 31% of its CPU time." in table


def test_quality_table_states_differences_and_gaps(script: Any) -> None:
    score = {"value": 20.0, "standard_error": 0.5}
    part = {"identical": False, "first_difference": 14, "reference_gap": 0.03, "own_gap": 0.01}
    result = {
        "kind": "quality",
        "origin": {"device": "Test CPU", "date": "2030-01-02"},
        "model": {"file": "m.gguf"},
        "settings": {"chunks": 20, "context": 512, "text": "t.txt", "new_tokens": 64},
        "prompts": [{}, {}],
        "greedy": {"float": [{"identical": True}] * 2, "int8": [{"identical": True}, part]},
        "perplexity": {
            "transformers": score,
            "float": {**score, "value": 20.02},
            "int8": {**score, "value": 19.9},
        },
    }
    lines = script("render").quality_table(result).splitlines()
    assert lines[2] == "| transformers, float32 | 20.0000 +/- 0.5000 |  |  |  |"
    assert lines[3].endswith("| 20.0200 +/- 0.5000 | +0.10% | 2 of 2 | none |")
    assert lines[4].endswith("| 19.9000 +/- 0.5000 | -0.50% | 1 of 2 | token 14 (gap 0.0300) |")


def test_render_fills_markers_from_the_newest_file(script: Any, tmp_path: Path) -> None:
    render = script("render")
    old, new = versus_result("2030-01-01"), versus_result("2030-01-03")
    for name, result in (("b-old", old), ("a-new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    text = "# T\n<!-- results:versus-llama-cpp -->\nstale 7 tok/s\n<!-- /results -->\nend\n"
    fresh = render.render(text, tmp_path)
    assert "2030-01-03" in fresh
    assert "2030-01-01" not in fresh
    assert "stale" not in fresh
    assert fresh.startswith("# T\n<!-- results:versus-llama-cpp -->\n| engine |")
    assert fresh.endswith("<!-- /results -->\nend\n")
    assert render.render(fresh, tmp_path) == fresh


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- results:quality -->\n<!-- /results -->", "no result of that kind lies in"),
        ("<!-- results:speed -->\n<!-- /results -->", "names no kind of result; known are"),
        ("<!-- results:quality -->\n", "a results marker is malformed"),
    ],
    ids=["no file", "unknown kind", "not closed"],
)
def test_render_errors(script: Any, tmp_path: Path, text: str, message: str) -> None:
    render = script("render")
    with pytest.raises(render.RenderError, match=message):
        render.render(text, tmp_path)


@pytest.mark.parametrize("page", ["README.md", "docs/gpu.md"])
def test_pages_say_what_the_result_files_say(script: Any, page: str) -> None:
    file = BENCHMARKS.parent / page
    if not file.exists() or "<!-- results:" not in file.read_text():
        pytest.skip(f"{page} has no results marker")
    text = file.read_text()
    assert script("render").render(text, BENCHMARKS / "results") == text


def test_every_engine_is_judged_against_both_baselines(script: Any) -> None:
    versus = script("versus_llama_cpp")
    taken = blocks({"llama.cpp": 1, "control": 1, "float": 2, "int8": 1, "transformers": 1.5})
    rows = versus.judgements(taken, ["float", "int8", "transformers"], [], seed=0)
    found = {(row["a"], row["b"]): row for row in rows}
    assert set(found) == {
        ("llama.cpp", "float"),
        ("llama.cpp", "int8"),
        ("llama.cpp", "transformers"),
        ("transformers", "float"),
        ("transformers", "int8"),
    }
    for (a, b), ratio in (
        (("llama.cpp", "float"), 2.0),
        (("transformers", "float"), 2 / 1.5),
        (("transformers", "int8"), 1 / 1.5),
    ):
        assert found[a, b]["ratio"] == pytest.approx(ratio, rel=0.005)
        assert found[a, b]["verdict"] == "DISJOINT"
        assert found[a, b]["p_adjusted"] > found[a, b]["p"]
    assert found["llama.cpp", "int8"]["verdict"] == "SAME"


def test_a_restless_control_voids_both_baselines(script: Any) -> None:
    versus = script("versus_llama_cpp")
    taken = blocks({"llama.cpp": 1, "control": 1.05, "float": 2, "transformers": 1.5})
    rows = versus.judgements(taken, ["float", "transformers"], [], seed=0)
    assert {row["verdict"] for row in rows} == {"VOID"}


def test_wrong_logits_are_named(script: Any) -> None:
    versus = script("versus_llama_cpp")
    right = np.random.default_rng(0).normal(size=100).astype(np.float32)

    def engine(scale: float) -> Any:
        return SimpleNamespace(logits=lambda ids: right * np.float32(scale))

    workers = {"float": engine(1.0), "int8": engine(1.05), "transformers": engine(1.0)}
    assert versus._logits_fault(workers) is None
    workers["float"] = engine(1.05)
    assert versus._logits_fault(workers).startswith("logits of float are off by 0.0025")
    workers["float"] = engine(float("nan"))
    assert "off by nan" in versus._logits_fault(workers)


def test_greedy_texts_part_where_they_first_differ(script: Any) -> None:
    quality = script("quality")
    right = quality.Greedy([5, 6, 7], [1.0, 0.02, 3.0])
    assert quality.compare_ids(right, right) == {"identical": True, "ids": [5, 6, 7]}
    assert quality.compare_ids(quality.Greedy([5, 9, 7], [1.0, 0.01, 2.0]), right) == {
        "identical": False,
        "ids": [5, 9, 7],
        "first_difference": 1,
        "reference_gap": 0.02,
        "own_gap": 0.01,
    }


@pytest.mark.parametrize(
    ("identical", "values", "expected"),
    [
        (True, {"float": 20.03, "int8": 20.3, "llama.cpp": 20.25}, []),
        (True, {"float": 20.05, "int8": 20.3}, ["float: perplexity is +0.25% off transformers"]),
        (True, {"float": 20, "int8": 20, "llama.cpp": 20.2}, ["int8: perplexity is -0.99% off"]),
        (True, {"float": float("nan"), "int8": 20}, ["float: perplexity is +nan% off"]),
        (False, {"float": 20, "int8": 20}, ["float: prompt 0 parts from the reference at token 3"]),
    ],
    ids=["none", "float", "int8", "nan", "greedy"],
)
def test_quality_faults(
    script: Any, identical: bool, values: dict[str, float], expected: list[str]
) -> None:
    greedy = {"float": [{"identical": identical, "first_difference": 3}]}
    scores = {k: {"value": v} for k, v in {"transformers": 20.0, **values}.items()}
    found = script("quality").faults(greedy, scores)
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


def test_llama_bench_is_asked_for_one_repetition(script: Any, tmp_path: Path) -> None:
    body = "print(json.dumps([{'samples_ns': [5], 'argv': sys.argv[1:]}]))"
    binary = program(tmp_path / "llama-bench", body)
    row = script("llama_cpp").bench(binary, Path("m.gguf"), "tg64", 2)
    assert row["samples_ns"] == [5]
    expected = "-m m.gguf -t 2 -p 0 -n 64 -r 1 -o json"
    assert " ".join(row["argv"]) == expected


def test_llama_perplexity_is_read_from_its_final_estimate(script: Any, tmp_path: Path) -> None:
    body = "print('[1]20.1,[2]23.2,\\nFinal estimate: PPL = 23.1394 +/- 0.91203')"
    binary = program(tmp_path / "llama-perplexity", body)
    options = {"context": 512, "chunks": 20, "threads": 2}
    found = script("llama_cpp").perplexity(binary, Path("m"), Path("t"), **options)
    assert found == (23.1394, 0.91203)


def test_failing_programs_are_named_with_their_message(script: Any, tmp_path: Path) -> None:
    llama_cpp = script("llama_cpp")
    binary = program(tmp_path / "broken", "sys.exit('no such model')")
    with pytest.raises(MeasureError, match=r"broken gave no JSON \(code 1\): no such model"):
        llama_cpp.bench(binary, Path("m"), "pp8", 1)
    with pytest.raises(MeasureError, match="broken stated no final estimate"):
        llama_cpp.perplexity(binary, Path("m"), Path("t"), context=8, chunks=1, threads=1)


def test_model_names_become_file_names(script: Any, tmp_path: Path) -> None:
    record = script("record")
    assert record.slug(Path("a/SmolLM2-135M-Instruct.Q4_1.gguf")) == "smollm2-135m-instruct-q4_1"
    result = {"origin": {"date": "2030-01-02T03:04:05"}}
    assert record.write(result, "quality-m", tmp_path).name == "2030-01-02-quality-m.json"
    model = tmp_path / "m.gguf"
    model.write_bytes(b"abc")
    # SHA-256 of "abc", FIPS 180-2 appendix B.1.
    assert record.model_record(model)["sha256"].startswith("ba7816bf8f01cfea414140de5dae2223")


def test_origin_names_no_folder(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/x.py", "/other/place/model.gguf", "-t", "2"])
    origin = script("record").origin(2)
    assert origin["command"] == "x.py model.gguf -t 2"
    assert os.sep not in origin["command"]


class FakeWorker:
    def __init__(self, engine: str, cpu_seconds: list[float]) -> None:
        self.engine = engine
        self._times = iter(cpu_seconds)

    def cpu_seconds(self) -> float:
        return next(self._times)


def test_a_worker_that_spins_while_it_waits_is_refused(script: Any) -> None:
    arms = script("arms")
    quiet = FakeWorker("float", [1.0, 1.0])
    assert arms.check_idle([quiet], seconds=0.01) == {"float": 0.0}
    spinning = FakeWorker("int8", [1.0, 1.008])
    with pytest.raises(MeasureError, match="arm 'int8' uses 80% of a CPU while it waits"):
        arms.check_idle([FakeWorker("float", [1.0, 1.0]), spinning], seconds=0.01)


def test_a_worker_that_dies_is_named(script: Any, tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="the process of arm 'float' ended with code 1"):
        script("arms").WorkerArm("float", tmp_path / "absent.gguf", 1)
