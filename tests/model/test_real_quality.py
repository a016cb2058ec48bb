"""Both real models say what their dequantized weights say in plain transformers.

The text is wikitext-2's test split, which is not shipped: `TILEWRIGHT_TEXT` names the file, or it
lies in `shared/data/text` beside the checkout; without it the perplexity tests skip.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tilewright.model.decode import FusedDecoder
from tilewright.model.evaluate import perplexity
from tilewright.model.generate import TransformersDecoder
from tilewright.model.layers import QuantLinear
from tilewright.model.load import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TESTS = Path(__file__).parents[1]
PROMPTS = [
    run["prompt"]
    for run in json.loads((TESTS / "data" / "smollm2_greedy_llama_cpp.json").read_text())["prompts"]
]
# llama-perplexity's values on the first 20 chunks of 512 tokens, with its 8-bit activations
LLAMA_CPP = {"smollm2": 23.139, "gemma": 16.616}


@pytest.fixture(scope="module", params=["smollm2", "gemma"])
def pair(request: pytest.FixtureRequest) -> tuple[str, Any, Any, Any]:
    """Name, our model, its tokenizer, and the same weights dequantized in plain transformers."""
    from transformers import AutoModelForCausalLM

    file: Path = request.getfixturevalue(f"{request.param}_file")
    plain = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    return request.param, *load(file), plain


@pytest.fixture(scope="module")
def text() -> str:
    named = os.environ.get("TILEWRIGHT_TEXT")
    path = Path(named) if named else TESTS.parents[1] / "shared/data/text/wikitext2-test.txt"
    if not path.is_file():
        pytest.skip("set TILEWRIGHT_TEXT to wikitext-2's test split, as raw text")
    return path.read_text(encoding="utf-8")


def _set_activations(model: Any, activations: str) -> None:
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.activations = activations


def _greedy(decoder: Any, ids: torch.Tensor, count: int) -> list[int]:
    decoder.reset()
    out = [int(decoder.prefill(ids).argmax())]
    while len(out) < count:
        out.append(int(decoder.step(out[-1]).argmax()))
    return out


def test_greedy_ids_are_those_of_float32(pair: tuple[str, Any, Any, Any]) -> None:
    _, model, tokenizer, plain = pair
    _set_activations(model, "float")
    ours, right = FusedDecoder(model), TransformersDecoder(plain)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert _greedy(ours, ids, 64) == _greedy(right, ids, 64), prompt


def test_perplexity_is_that_of_float32_and_near_llama_cpp(
    pair: tuple[str, Any, Any, Any], text: str
) -> None:
    name, model, tokenizer, plain = pair
    _set_activations(model, "float")
    ours = perplexity(model, tokenizer, text, chunks=20).value
    right = perplexity(plain, tokenizer, text, chunks=20).value
    assert abs(ours / right - 1) < 0.002
    _set_activations(model, "int8")
    eight_bit = perplexity(model, tokenizer, text, chunks=20).value
    assert abs(eight_bit / LLAMA_CPP[name] - 1) < 0.005
