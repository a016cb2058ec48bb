"""The benchmark of a real model on a GPU, tried on the CPU with a small one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from model.gguf_models import Tiny, reference, write

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not (BENCHMARKS / "gpu/real_model.py").exists(), reason="benchmarks/ is not part of this copy"
)
COUNT = 6
PROMPTS = ([5, 70, 81], [9, 40, 41, 42, 120])


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script of benchmarks/ by name."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "gpu"), str(BENCHMARKS), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@torch.inference_mode()
def slow_greedy(model: Any, ids: list[int]) -> dict[str, Any]:
    made: dict[str, Any] = {"ids": [], "gaps": []}
    for _ in range(COUNT):
        best = model(input_ids=torch.tensor([[*ids, *made["ids"]]])).logits[0, -1].topk(2)
        made["ids"].append(int(best.indices[0]))
        made["gaps"].append(float(best.values[0] - best.values[1]))
    return made


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(model file, text file, what `quality.py` would have kept of it)."""
    from tilewright.model.evaluate import perplexity
    from tilewright.model.load import load

    folder = tmp_path_factory.mktemp("real")
    tiny = Tiny("llama", {"": "Q8_0"})
    plain = reference(tiny, write(folder / "m.gguf", tiny))
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 8)
    _, tokenizer = load(folder / "m.gguf")
    score = perplexity(plain, tokenizer, text.read_text(), context=32, chunks=4)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        record = importlib.import_module("record")
        yield folder / "m.gguf", text, {
            "model": record.model_record(folder / "m.gguf"),
            "settings": {"text": text.name, "context": 32, "chunks": 4, "new_tokens": COUNT},
            "prompts": [{"prompt": "", "prompt_ids": ids} for ids in PROMPTS],
            "reference": [slow_greedy(plain, ids) for ids in PROMPTS],
            "perplexity": {"transformers": vars(score)},
        }  # fmt: skip
    finally:
        sys.path.remove(str(BENCHMARKS))


def run(scripts: Any, kept: Any, folder: Path, changed: dict[str, Any], *words: str) -> int:
    model, text, before = kept
    (folder / "reference.json").write_text(json.dumps({**before, **changed}))
    code = scripts("real_model").main(
        [
            str(model), "--reference", str(folder / "reference.json"), "--text", str(text),
            "--device", "cpu", "--dtypes", "float32", "--out", str(folder), *words,
        ]
    )  # fmt: skip
    assert isinstance(code, int)
    return code


def written(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*-h200-quality-m.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_right_model_says_what_the_reference_said(
    scripts: Any, kept: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(scripts, kept, tmp_path, {}) == 0
    result = written(tmp_path)
    assert result["faults"] == []
    assert [row["identical"] for row in result["greedy"]["float32"]] == [True, True]
    assert [row["same"] for row in result["fed"]["float32"]] == [COUNT, COUNT]
    right = kept[2]["perplexity"]["transformers"]["value"]
    assert result["perplexity"]["float32"]["value"] == pytest.approx(right, rel=1e-5)
    out = capsys.readouterr().out
    assert f"greedy ids identical 2 of 2; fed {2 * COUNT} of {2 * COUNT} the same" in out


def test_another_id_where_the_reference_was_sure_is_a_fault(
    scripts: Any, kept: Any, tmp_path: Path
) -> None:
    first, second = kept[2]["reference"]
    other = {"ids": [first["ids"][0] + 1, *first["ids"][1:]], "gaps": [2.5, *first["gaps"][1:]]}
    assert run(scripts, kept, tmp_path, {"reference": [other, second]}) == 3
    result = written(tmp_path)
    assert (
        "float32: prompt 0 parts from the reference at token 0, where its gap is 2.500"
        in (result["faults"])
    )
    assert result["fed"]["float32"][0]["parted"][0] == {"step": 0, "reference_gap": 2.5}
    unsure = {**other, "gaps": [0.001, *first["gaps"][1:]]}
    found = {**result, "greedy": {"float32": result["greedy"]["float32"][1:]}}
    found["fed"] = {"float32": [{"steps": 1, "same": 0, "parted": [
        {"step": 0, "reference_gap": unsure["gaps"][0]}]}]}  # fmt: skip
    assert scripts("real_model").faults(found) == []


def test_another_perplexity_is_a_fault(scripts: Any, kept: Any, tmp_path: Path) -> None:
    score = kept[2]["perplexity"]["transformers"]
    changed = {"perplexity": {"transformers": {**score, "value": score["value"] * 1.01}}}
    assert run(scripts, kept, tmp_path, changed) == 3
    (fault,) = written(tmp_path)["faults"]
    assert fault.startswith("float32: perplexity is -0.99")
    assert run(scripts, kept, tmp_path, changed, "--chunks", "2") == 0  # nothing to be held to


def test_a_dtype_that_fails_is_noted_and_the_others_go_on(
    scripts: Any, kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = scripts("real_model")
    right = script.of_dtype

    def broken(args: Any, dtype: str, *others: Any) -> None:
        right(args, dtype, *others)
        if dtype == "bfloat16":
            raise RuntimeError("out of shared memory")

    monkeypatch.setattr(script, "of_dtype", broken)
    assert run(scripts, kept, tmp_path, {}, "--dtypes", "bfloat16,float32") == 1
    result = written(tmp_path)
    assert result["failed"] == {"bfloat16": "RuntimeError: out of shared memory"}
    assert list(result["greedy"]) == ["float32"]
    assert result["faults"] == []


def test_another_file_is_refused(scripts: Any, kept: Any, tmp_path: Path) -> None:
    changed = {"model": {**kept[2]["model"], "sha256": "0" * 64}}
    with pytest.raises(SystemExit, match="m.gguf is not the file of reference.json"):
        run(scripts, kept, tmp_path, changed)


def test_a_worker_that_warmed_what_lies_between_products_still_multiplies(
    scripts: Any, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tilewright
    from tilewright.model import generate
    from tilewright.model.layers import QuantLinear

    load, multiply, seen = tilewright.load, QuantLinear.forward, []

    class Decoder:
        def __init__(self, model: Any) -> None: ...

        def reset(self) -> None: ...

        def prefill(self, ids: torch.Tensor) -> None:
            seen.append((ids.shape[1], QuantLinear.forward is multiply))

        def step(self, token: int) -> None: ...

    monkeypatch.setattr(tilewright, "load", lambda path, device, dtype: load(path, dtype=dtype))
    monkeypatch.setattr(generate, "decoder_for", Decoder)
    scripts("warm_models")._share_of_file(kept[0], "float32", 0, 1, (3, 5), (1,))
    assert seen == [(3, False), (5, False)]
    assert QuantLinear.forward is multiply
