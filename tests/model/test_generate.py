from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from fakes import BOS, EOS, ByteTokenizer, ScriptedModel
from tilewright.errors import GateError, UnsupportedError
from tilewright.model.generate import (
    TokenStream,
    TransformersDecoder,
    chat_ids,
    decoder_for,
    generate,
    sample,
    stop_ids_of,
)


@pytest.fixture(scope="module")
def llama() -> Any:
    """A tiny llama with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_greedy_is_what_transformers_generates(llama: Any) -> None:
    prompt = [BOS, 5, 9, 200, 31]
    expected = llama.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )[0, len(prompt) :]
    made = generate(llama, ByteTokenizer(), prompt, max_tokens=20, stop_ids=())
    assert list(made.ids) == expected.tolist()
    assert made.stop_reason == "length"
    assert made.prompt_tokens == 5
    assert made.decode_steps == 19
    assert made.prefill_s > 0
    assert made.ttft_s >= made.prefill_s
    assert made.decode_tok_s == pytest.approx(19 / made.decode_s)


def test_prefill_in_pieces_equals_one_forward(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.model.generate.PREFILL_CHUNK", 4)
    ids = torch.randint(0, 256, (1, 11), generator=torch.Generator().manual_seed(1))
    decoder = decoder_for(llama)
    assert isinstance(decoder, TransformersDecoder)
    whole = llama(input_ids=ids).logits[0].detach()
    torch.testing.assert_close(decoder.prefill(ids[:, :10]), whole[9])
    torch.testing.assert_close(decoder.step(int(ids[0, 10])), whole[10])
    decoder.reset()
    torch.testing.assert_close(decoder.prefill(ids), whole[10])


def test_the_models_own_decoder_is_used() -> None:
    model = ScriptedModel(b"hello")
    made = generate(model, ByteTokenizer(), "ab")
    assert made.text == "hello"
    assert made.stop_reason == "stop"
    assert model.calls[0] == ("prefill", [BOS, *b"ab"])
    assert [call[1] for call in model.calls[1:]] == list(b"hello")


@pytest.mark.parametrize(
    ("prompt", "fed"),
    [
        ("hé", [BOS, *"hé".encode()]),
        ([1, 2, 3], [1, 2, 3]),
        (torch.tensor([[4, 5]]), [4, 5]),
    ],
    ids=["text", "ids", "tensor"],
)
def test_prompt_forms(prompt: Any, fed: list[int]) -> None:
    model = ScriptedModel(b"x")
    generate(model, ByteTokenizer(), prompt, max_tokens=1)
    assert model.calls == [("prefill", fed)]


def test_one_decoder_serves_several_prompts() -> None:
    model = ScriptedModel(b"ab")
    decoder = model.tilewright_decoder()
    model.tilewright_decoder = None  # type: ignore[assignment,method-assign]
    for _ in range(2):
        assert generate(model, ByteTokenizer(), [1, 2], max_tokens=2, decoder=decoder).text == "ab"
    assert [call[0] for call in model.calls] == ["reset", "prefill", "step"] * 2


def test_stops_when_the_context_is_full() -> None:
    made = generate(ScriptedModel(b"x" * 50, context=8), ByteTokenizer(), [1] * 5)
    assert made.stop_reason == "context"
    assert made.text == "xxx"


def test_stops_when_the_callback_says_so() -> None:
    seen: list[str] = []

    def on_token(piece: str) -> bool:
        seen.append(piece)
        return len(seen) < 2

    made = generate(ScriptedModel(b"hello"), ByteTokenizer(), "a", on_token=on_token)
    assert made.stop_reason == "callback"
    assert made.text == "".join(seen) == "he"


def test_stream_holds_back_unfinished_utf8() -> None:
    text = "aé\U0001f642z"
    stream = TokenStream(ByteTokenizer())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert pieces == ["a", "", "é", "", "", "", "\U0001f642", "z"]
    assert stream.finish() == ""


def test_stream_gives_broken_bytes_at_the_end() -> None:
    stream = TokenStream(ByteTokenizer())
    assert stream.push(0xF0) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_stream_keeps_the_leading_space_a_decoder_drops() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"\u2581The": 0, "\u2581sky": 1, "\u2581is": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="\u2581The"))
    inner.decoder = tokenizers.decoders.Metaspace()

    class Wrapped:
        def decode(self, ids: list[int], **_: Any) -> str:
            return str(inner.decode(ids))

    assert Wrapped().decode([1]) == "sky"
    stream = TokenStream(Wrapped(), context=[0])
    assert [stream.push(1), stream.push(2)] == [" sky", " is"]


def test_sampling_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    drawn = Counter(sample(logits, temperature=2.0, generator=generator) for _ in range(4000))
    weights = [2.718281828 ** (x / 2) for x in logits.tolist()]
    for token, weight in enumerate(weights):
        assert drawn[token] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"top_k": 2}, {3, 0}),
        ({"top_p": 0.5}, {3}),  # the best token alone holds 0.64
        ({"top_p": 0.8}, {3, 0}),
        ({"top_k": 1}, {3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_truncated_sampling_draws_only_allowed_tokens(
    settings: dict[str, Any], allowed: set[int]
) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    drawn = {sample(logits, temperature=1.0, generator=generator, **settings) for _ in range(500)}
    assert drawn == allowed


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert sample(torch.tensor([0.0, 3.0, 3.0])) == 1


def test_a_seed_repeats_a_text(llama: Any) -> None:
    def text(seed: int) -> tuple[int, ...]:
        made = generate(
            llama, ByteTokenizer(), [1], max_tokens=24, temperature=1.0, seed=seed, stop_ids=()
        )
        return made.ids

    assert text(3) == text(3)
    assert text(3) != text(4)


def test_stop_ids_come_from_model_tokenizer_and_chat_format() -> None:
    model = ScriptedModel()
    model.config.eos_token_id = [7, 8]
    assert stop_ids_of(model, ByteTokenizer()) == {7, 8, EOS}


def test_chat_ids_use_the_template() -> None:
    tokenizer = ByteTokenizer(chat_template="{{ messages }}")
    assert bytes(chat_ids(tokenizer, "hi")) == b"[user]hi[reply]"
    assert bytes(chat_ids(tokenizer, "hi", system="be kind")).startswith(b"[system]be kind[user]")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt: it has no tokens"),
        ({"prompt": [1] * 65}, "65 tokens do not fit the model's context of 64"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"top_k": -1}, "top_k: got -1"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    model = ScriptedModel(b"x", context=64)
    with pytest.raises(UnsupportedError, match=message.replace("'", ".")):
        generate(model, ByteTokenizer(), **{"prompt": [1], **arguments})
    assert model.calls == []


def test_nan_logits_are_never_sampled() -> None:
    with pytest.raises(GateError, match="NaN"):
        sample(torch.tensor([0.0, float("nan")]))


def test_no_chat_template_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match="--no-chat-template"):
        chat_ids(ByteTokenizer(), "hi")
