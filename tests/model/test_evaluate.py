from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakes import BOS, VOCAB, ByteTokenizer
from tilewright.errors import GateError, UnsupportedError
from tilewright.model.evaluate import begin_token, perplexity, perplexity_chunks, text_ids


class BigramModel:
    """Logits after a token are a row of a fixed random table, so every loss is known."""

    def __init__(self, context: int = 1024) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
        self.config = SimpleNamespace(max_position_embeddings=context)
        self.fed: list[list[int]] = []

    def __call__(self, *, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        assert not use_cache
        self.fed.append(input_ids[0].tolist())
        return SimpleNamespace(logits=self.table[input_ids][:, -logits_to_keep:])


def expected(model: BigramModel, chunks: list[list[int]]) -> tuple[float, float, int]:
    """Perplexity and standard error from plain Python floats."""
    losses = []
    for chunk in chunks:
        for i in range(len(chunk) // 2, len(chunk) - 1):
            row = [float(x) for x in model.table[chunk[i]]]
            losses.append(math.log(sum(math.exp(x) for x in row)) - row[chunk[i + 1]])
    n = len(losses)
    mean = sum(losses) / n
    variance = sum(x * x for x in losses) / n - mean**2
    return math.exp(mean), math.exp(mean) * math.sqrt(variance / (n - 1)), n


TEXT = "".join(chr(97 + (i * i) % 26) for i in range(100))


@pytest.mark.parametrize("adds_bos", [True, False], ids=["bos", "no-bos"])
@pytest.mark.parametrize("context", [16, 17], ids=["even", "odd"])
def test_value_and_error_against_plain_python(adds_bos: bool, context: int) -> None:
    model, tokenizer = BigramModel(), ByteTokenizer(adds_bos=adds_bos)
    ids = ([BOS] if adds_bos else []) + list(TEXT.encode())
    chunks = [ids[i : i + context] for i in range(0, len(ids) - context + 1, context)]
    if adds_bos:
        chunks = [[BOS, *chunk[1:]] for chunk in chunks]
    result = perplexity(model, tokenizer, TEXT, context=context)
    value, error, scored = expected(model, chunks)
    assert model.fed == chunks
    assert result.value == pytest.approx(value, rel=1e-6)
    assert result.standard_error == pytest.approx(error, rel=1e-5)
    assert result.tokens_scored == scored == len(chunks) * (context - context // 2 - 1)
    assert result.complete


def test_running_values_stop_at_the_chunks_asked_for() -> None:
    seen = list(perplexity_chunks(BigramModel(), ByteTokenizer(), TEXT, context=16, chunks=3))
    assert [r.chunks for r in seen] == [1, 2, 3]
    assert [r.complete for r in seen] == [False, False, True]
    assert seen[-1].chunks_wanted == 3


def test_more_chunks_than_the_text_has_is_all_of_it() -> None:
    calls: list[int] = []
    result = perplexity(
        BigramModel(),
        ByteTokenizer(),
        TEXT,
        context=16,
        chunks=999,
        progress=lambda r: calls.append(r.chunks),
    )
    assert result.chunks == result.chunks_wanted == 6
    assert calls == [1, 2, 3, 4, 5, 6]


def test_begin_token_is_what_the_tokenizer_really_adds() -> None:
    assert begin_token(ByteTokenizer()) == BOS
    assert begin_token(ByteTokenizer(adds_bos=False)) is None


def test_control_tokens_in_a_text_are_text() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = {c: i for i, c in enumerate("<unk>ab")}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    inner.add_special_tokens([tokenizers.AddedToken("<unk>", special=True)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert len(tokenizer("a<unk>b")["input_ids"]) == 3
    assert text_ids(tokenizer, "a<unk>b") == [letters[c] for c in "a<unk>b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 2}, "context: got 2"),
        ({"context": 2048}, "context: got 2048, the model's own is 1024"),
        ({"chunks": 0}, "chunks: got 0"),
        ({"context": 64}, "101 tokens are too few"),
    ],
    ids=["tiny", "huge", "no-chunk", "short-text"],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        perplexity(BigramModel(), ByteTokenizer(), TEXT, **arguments)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_broken_model_has_no_perplexity(bad: float) -> None:
    model = BigramModel()
    model.table[:, 5] = bad
    with pytest.raises(GateError, match="chunk 0 has NaN or infinite logits"):
        perplexity(model, ByteTokenizer(), TEXT, context=16)
