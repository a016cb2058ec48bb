"""Captured prefill and decode against transformers' forward on the same loaded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from model.checkpoint_models import FORMATS, plain_model, write_checkpoint
from model.gguf_models import Tiny, write
from tilewright.errors import UnsupportedError
from tilewright.model import decode
from tilewright.model.decode import FusedDecoder
from tilewright.model.fuse import why_not_fused
from tilewright.model.generate import TransformersDecoder, decoder_for
from tilewright.model.load import load

TINY = {
    "llama": Tiny("llama", {"": "Q4_1"}),
    "llama-mixed": Tiny("llama", {"attn_q": "Q5_0", "attn_v": "Q6_K", "ffn_down": "Q2_K",
                                  "ffn_up": "F16", "": "Q8_0"}, tied=False),
    "qwen2": Tiny("qwen2", {"": "Q4_K"}, biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": Tiny("qwen3", {"": "Q4_0"}, head_dim=32),
    "gemma3": Tiny("gemma3", {"": "Q5_1"}, layers=3,
                   metadata={"attention.sliding_window": 16},
                   config={"sliding_window": 16, "layer_types":
                           ["sliding_attention", "sliding_attention", "full_attention"]}),
}  # fmt: skip


def loaded(path: Path, name: str, activations: str = "float") -> Any:
    file = path / f"{name}.gguf"
    write(file, TINY[name])
    return load(file, activations=activations)[0]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(params=list(TINY))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return loaded(tmp_path, request.param)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 250, (1, count), generator=torch.Generator().manual_seed(seed))


def test_prefill_and_steps_follow_transformers(model: Any) -> None:
    fused, plain = FusedDecoder(model), TransformersDecoder(model)
    prompt = tokens(37)
    assert relative(fused.prefill(prompt), plain.prefill(prompt)) < 1e-5
    for token in tokens(30, 1)[0].tolist():
        assert relative(fused.step(token), plain.step(token)) < 1e-5
    assert fused.position == 67
    more = tokens(9, 2)
    assert relative(fused.prefill(more), plain.prefill(more)) < 1e-5


def test_all_logits_follow_transformers(model: Any) -> None:
    ids = tokens(50)
    with torch.inference_mode():
        right = model(ids, use_cache=False).logits[0]
    got = FusedDecoder(model).logits(ids)
    for row in range(50):
        assert relative(got[row], right[row]) < 1e-5


@pytest.mark.parametrize("pieces", [(40,), (1, 39), (13, 13, 14), (39, 1)], ids=str)
def test_prompts_in_pieces_agree(
    tmp_path: Path, pieces: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path, "gemma3")
    whole = FusedDecoder(model).prefill(tokens(40))
    monkeypatch.setattr(decode, "PREFILL_ROWS", 24)
    decoder = FusedDecoder(model)
    start = 0
    for piece in pieces:
        last = decoder.prefill(tokens(40)[:, start : start + piece])
        start += piece
    assert relative(last, whole) < 1e-5


def test_the_cache_grows_without_losing_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path, "llama")
    monkeypatch.setattr(decode, "_FIRST_CAPACITY", 32)
    fused, plain = FusedDecoder(model), TransformersDecoder(model)
    fused.prefill(tokens(30))
    plain.prefill(tokens(30))
    for token in tokens(40, 1)[0].tolist():
        assert relative(fused.step(token), plain.step(token)) < 1e-5


def test_reset_forgets(tmp_path: Path) -> None:
    model = loaded(tmp_path, "qwen3")
    decoder = FusedDecoder(model)
    first = decoder.prefill(tokens(20))
    decoder.prefill(tokens(200, 5))
    decoder.reset()
    assert decoder.position == 0
    assert torch.equal(decoder.prefill(tokens(20)), first)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_the_number_of_threads(tmp_path: Path, threads: int) -> None:
    model = loaded(tmp_path, "llama-mixed")
    one, other = FusedDecoder(model, threads=1), FusedDecoder(model, threads=threads)
    # the output matrix of a longer prompt goes through the op, on torch's own thread setting
    assert torch.equal(one.prefill(tokens(21)), other.prefill(tokens(21)))
    for token in (5, 9, 200):
        assert torch.equal(one.step(token), other.step(token))


@pytest.mark.parametrize("name", ["llama", "llama-mixed", "gemma3"])
def test_eight_bit_activations_follow_transformers_with_the_same_linears(
    tmp_path: Path, name: str
) -> None:
    model = loaded(tmp_path, name, "int8")
    fused, plain = FusedDecoder(model), TransformersDecoder(model)
    # A code that rounds the other way in one path shows in the logits; both stay close.
    assert relative(fused.prefill(tokens(33)), plain.prefill(tokens(33))) < 2e-2
    assert relative(fused.step(7), plain.step(7)) < 2e-2


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "none"])
def test_w4a16_checkpoints_follow_transformers(tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path, plain_model("llama"), kind)
    model, _ = load(tmp_path)
    assert why_not_fused(model) is None
    fused, plain = FusedDecoder(model), TransformersDecoder(model)
    prompt = tokens(21) % 96
    assert relative(fused.prefill(prompt), plain.prefill(prompt)) < 1e-5
    assert relative(fused.step(11), plain.step(11)) < 1e-5


def test_decoder_for_takes_captured_programs_where_there_are_some(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama")
    assert isinstance(decoder_for(model), FusedDecoder)
    half = model.to(torch.bfloat16)
    assert "bfloat16" in str(why_not_fused(half))
    assert isinstance(decoder_for(half), TransformersDecoder)
    with pytest.raises(UnsupportedError, match="no fused decode step: .*bfloat16"):
        FusedDecoder(half)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), "pass [1, T]"),
        (torch.zeros(1, 0, dtype=torch.int64), "pass [1, T]"),
        (torch.tensor([[3, 320]]), "the vocabulary is 0..319"),
        (torch.tensor([[-1, 3]]), "ids reach from -1"),
    ],
)
def test_bad_ids_are_refused(tmp_path: Path, ids: torch.Tensor, message: str) -> None:
    decoder = FusedDecoder(loaded(tmp_path, "llama"))
    with pytest.raises(ValueError) as caught:
        decoder.prefill(ids)
    assert message in str(caught.value)
    assert decoder.position == 0
