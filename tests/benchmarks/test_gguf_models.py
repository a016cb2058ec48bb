"""Synthetic GGUF files, and the benchmark of models made of them, tried on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import tilewright

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not (BENCHMARKS / "synthetic_gguf.py").exists(), reason="benchmarks/ is not part of this copy"
)
SMALL = {
    "layers": 2, "hidden": 256, "feed_forward": 512, "heads": 4, "kv_heads": 2, "head_dim": 64,
    "vocabulary": 320,
}  # fmt: skip
FEW_EXPERTS = {"experts": 8, "used": 2}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script of benchmarks/ by name."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "gpu"), str(BENCHMARKS), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def small(scripts: Any, name: str) -> Any:
    made = scripts("synthetic_gguf")
    extra = FEW_EXPERTS if made.SHAPES[name].experts else {}
    return replace(made.SHAPES[name], **SMALL, **extra)


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b"])
def test_a_synthetic_file_runs_as_its_dequantized_weights_do(
    name: str, scripts: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    size = scripts("synthetic_gguf").write_model(path, small(scripts, name))
    assert size == path.stat().st_size

    model, tokenizer = tilewright.load(path)
    plain = scripts("gguf_reference").plain_model(path, dtype=torch.float64)

    assert tokenizer is None
    assert set(model.tilewright_info.packed) == {"Q4_K", "Q6_K"}
    ids = torch.randint(0, 320, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, right = model(input_ids=ids).logits, plain(input_ids=ids).logits
    assert found.isfinite().all()
    assert 0.3 < float(right.std()) < 3
    # One token's experts, chosen by nearly equal numbers, may differ between float32 and float64.
    apart = (found - right).norm(dim=2) / right.norm(dim=2)
    assert float(apart.median()) < 1e-5


@pytest.mark.parametrize(("name", "gib"), [("llama-3-8b", 4.58), ("qwen3-30b-a3b", 17.28)])
def test_the_whole_model_has_the_size_of_its_q4_k_m_file(
    name: str, gib: float, scripts: Any
) -> None:
    made = scripts("synthetic_gguf")
    shape = made.SHAPES[name]
    total = 0
    better: dict[str, int] = {"Q4_K": 0, "Q6_K": 0}
    for tensor, kind, size in made.tensors_of(shape):
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        total += int(np.prod(size)) // block * nbytes
        if "attn_v" in tensor:
            better[kind] += 1
    assert total / 2**30 == pytest.approx(gib, abs=0.005)
    assert better == {"Q4_K": shape.layers // 2, "Q6_K": shape.layers // 2}


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_drawn_blocks_have_the_deviation_asked_for(kind: str, scripts: Any) -> None:
    draw = scripts("synthetic_gguf").draw_blocks
    generator = torch.Generator().manual_seed(3)
    blocks = draw(kind, 64, 4096, generator, 1 / 64)
    values = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.isfinite(values).all()
    assert values.std() * 64 == pytest.approx(1, abs=0.1)
    assert abs(values.mean()) * 64 < 0.02
    assert len(np.unique(values)) > 1000
    again = draw(kind, 64, 4096, torch.Generator().manual_seed(3), 1 / 64)
    other = draw(kind, 64, 4096, torch.Generator().manual_seed(4), 1 / 64)
    assert torch.equal(blocks, again)
    assert not torch.equal(blocks, other)


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [("Q4_K", 128, "128 columns are no multiple of the 256"), ("Q8_0", 256, "'Q8_0'; Q4_K and")],
)
def test_blocks_that_cannot_be_drawn(kind: str, columns: int, message: str, scripts: Any) -> None:
    with pytest.raises(ValueError, match=message):
        scripts("synthetic_gguf").draw_blocks(kind, 4, columns, torch.Generator(), 1.0)


def test_layers_and_vocabulary_can_be_fewer(scripts: Any, tmp_path: Path, capsys: Any) -> None:
    made = scripts("synthetic_gguf")
    made.SHAPES["llama-3-8b"] = small(scripts, "llama-3-8b")
    path = tmp_path / "one.gguf"
    assert made.main(["llama-3-8b", str(path), "--layers", "1", "--vocabulary", "512"]) == 0
    assert "1 " not in capsys.readouterr().err
    reader = gguf.GGUFReader(path)
    names = {tensor.name for tensor in reader.tensors}
    assert "blk.0.attn_q.weight" in names
    assert not any(name.startswith("blk.1.") for name in names)
    assert reader.tensors[0].shape.tolist() == [256, 512]


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b"])
def test_the_products_that_are_compiled_beforehand_are_the_models(
    name: str, scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is loaded onto a GPU; nothing is multiplied."""
    from tilewright.device import INTERPRETER
    from tilewright.model import load as loading
    from tilewright.model.layers import QuantLinear
    from tilewright.model.moe import QuantExperts
    from tilewright.model.placement import Placement

    shape, path = small(scripts, name), tmp_path / "model.gguf"
    scripts("synthetic_gguf").write_model(path, shape)
    where = Placement(torch.device("cpu"), INTERPRETER, torch.float16)
    monkeypatch.setattr(loading, "place", lambda device, dtype: where)
    model, _ = loading.load(path, device="cuda")
    linears = [m for m in model.modules() if isinstance(m, QuantLinear)]
    warm = scripts("warm_models")
    for joined, expected in ((False, warm.products(shape)), (True, warm.parts(shape))):
        found = {(m.packed.type_name, m.packed.N, m.packed.K) for m in linears
                 if m.joined == joined}  # fmt: skip
        assert found == set(expected)
    mixtures = {tuple((p[1], p[2], p[3]) for p in m.products()) for m in model.modules()
                if isinstance(m, QuantExperts)}  # fmt: skip
    wide, inner = shape.hidden, shape.feed_forward
    assert mixtures == {
        ((first, 2 * inner, wide), (last, wide, inner)) for first, last in warm.mixtures(shape)
    }


@pytest.fixture
def benchmark_run(scripts: Any, tmp_path: Path) -> Any:
    script = scripts("gguf_models")
    shapes = {name: small(scripts, name) for name in script.SHAPES}
    script.SHAPES.update(shapes)
    script.ANCHORS["llama-3-8b"] |= {"pp64": 1e-3, "tg4": 1e9}
    script.BARS["llama-3-8b"] |= {"pp64": 2.0, "tg4": 1.0}

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code = script.main([
            "--device", "cpu", "--dtype", "float32", "--folder", str(tmp_path),
            "--out", str(tmp_path), "--name", "x", "--prompts", "64", "--tokens", "4",
            "--repetitions", "2", "--check-tokens", "12", *words,
        ])  # fmt: skip
        (written,) = tmp_path.glob("*-x.json")
        return code, json.loads(written.read_text())

    return run


def test_the_benchmark_checks_and_times(benchmark_run: Any, tmp_path: Path, capsys: Any) -> None:
    code, result = benchmark_run()
    assert code == 0
    assert result["check"]["right"]
    assert result["check"]["logits_error"] < 1e-5
    assert result["check"]["same_as"]["transformers"]["ids_equal"] == 1
    rows = {row["test"]: row for row in result["timed"]["results"]}
    assert [rows["pp64"]["holds"], rows["tg4"]["holds"]] == [True, False]
    assert rows["pp64"]["ratio"] == pytest.approx(rows["pp64"]["median_ts"] / 1e-3)
    assert len(rows["tg4"]["samples_ts"]) == 2
    assert not list(tmp_path.glob("*.gguf"))
    said = capsys.readouterr().out
    assert "to reach 2.0x: holds" in said
    assert "to reach 1.0x: FAILS" in said


@pytest.mark.parametrize(
    ("each", "mixture", "near"),
    [
        ([1e-3] * 99 + [0.1], False, False),
        ([1e-3] * 99 + [0.1], True, True),  # one token went to other experts
        ([1e-3] * 90 + [0.5] * 10, True, False),
        ([0.02] * 100, True, False),
        ([9e-3] * 100, False, True),
    ],
    ids=["dense", "one token", "a tenth", "all a little", "dense, all a little"],
)
def test_a_mixture_may_be_off_where_it_chose_other_experts(
    each: list[float], mixture: bool, near: bool, scripts: Any
) -> None:
    errors = torch.tensor(each)
    whole = float(errors.square().mean().sqrt())
    assert scripts("gguf_models").within(errors, whole, 0.01, mixture=mixture) is near


@pytest.mark.slow
def test_a_mixture_is_checked_and_timed(benchmark_run: Any) -> None:
    code, result = benchmark_run("--model", "qwen3-30b-a3b")
    assert code == 0
    assert result["check"]["right"]
    assert result["check"]["median_token_error"] < 1e-5
    assert [row["test"] for row in result["timed"]["results"]] == ["pp64", "tg4"]


def test_a_wrong_model_is_not_timed(benchmark_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.model.layers import QuantLinear

    right = QuantLinear.forward
    monkeypatch.setattr("tilewright.model.fuse.why_not_fused", lambda model: "a fault is planted")

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = right(self, x)
        y[..., 0] = 0
        return y

    monkeypatch.setattr(QuantLinear, "forward", wrong)
    code, result = benchmark_run("--check-layers", "1")
    assert code == 3
    assert not result["check"]["right"]
    assert result["timed"] is None
