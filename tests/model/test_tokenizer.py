"""Tokenizers built from GGUF metadata.

Right values: splits written out by hand for every pre-tokenizer family, SentencePiece's algorithm
written plainly below, and llama.cpp's ids of the real models in test_load_real.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from model.gguf_models import CONTROLS, MERGES, TEMPLATE, byte_alphabet, byte_tokens
from tilewright.errors import FormatError, UnsupportedError
from tilewright.model.pretokenizers import PRE_TOKENIZERS
from tilewright.model.tokenizer import build_tokenizer, special_ids, stop_ids


def bpe_metadata(pre: str | None = "smollm", **changes: Any) -> dict[str, Any]:
    tokens, types = byte_tokens()
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 2048,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: specials, bytes, user-defined runs, letters, pieces."""
    tokens = ["<unk>", "<s>", "</s>", "<turn>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [2, 3, 3, 3] + [6] * 256
    tokens += ["\n\n", "  ", "<b>"]
    types += [4, 4, 4]
    # Best first. "ab" and "bc" compete for the b; "aa" overlaps itself.
    pieces = ["▁a", "bc", "ab", "▁ab", "aa", "abc", "▁abc", "cab", "aaa", "▁▁", "aaaa", "éa"]
    letters = list("▁abcdé")
    tokens += pieces + letters
    types += [1] * (len(pieces) + len(letters))
    scores = [0.0] * 263 + [-float(i) for i in range(len(pieces) + len(letters))]
    metadata: dict[str, Any] = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_ids(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece BPE by its definition: merge the best-scored adjacent pair, leftmost first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    pieces = {t: i for i, t in enumerate(tokens) if types[i] == 1}
    symbols = list(text.replace(" ", "▁"))
    while True:
        best = None
        for at in range(len(symbols) - 1):
            index = pieces.get(symbols[at] + symbols[at + 1])
            if index is not None and (best is None or scores[index] > scores[best[0]]):
                best = (index, at)
        if best is None:
            break
        symbols[best[1] : best[1] + 2] = [tokens[best[0]]]
    ids = []
    for symbol in symbols:
        if symbol in pieces:
            ids.append(pieces[symbol])
        else:
            ids += [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return ids


SPLITS = {
    "default": (
        "it's 12345 ok?!  x",
        ["it", "'", "s", " ", "123", "45", " ok", "?!", " ", " x"],
    ),
    "gpt-2": (
        "it's 12345 ok?!  x\n\ny IT'S",
        ["it", "'s", " 12345", " ok", "?!", " ", " x", "\n", "\n", "y", " IT", "'", "S"],
    ),
    "smollm": ("a1234  b", ["a", "1", "2", "3", "4", " ", " b"]),
    "command-r": ("a12 e\u0301", ["a", "1", "2", " \u00e9"]),
    "llama-bpe": (
        "IT'S 12345 ok?!\n\n  x.y",
        ["IT", "'S", " ", "123", "45", " ok", "?!\n\n", " ", " x", ".y"],
    ),
    "smaug-bpe": ("a 1234", ["a", " ", "123", "4"]),
    "qwen2": (
        "It's 123\n e\u0301 x_y",
        ["It", "'s", " ", "1", "2", "3", "\n", " \u00e9", " x", "_y"],
    ),
    "olmo": ("e\u0301 99", ["\u00e9", " 99"]),
    "tekken": (
        "HelloWorld 12 a/b\n",
        ["Hello", "World", " ", "1", "2", " a", "/b", "\n"],
    ),
    "gpt-4o": ("HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
    "deepseek-coder": ("foo(x)\n12", ["foo", "(", "x", ")", "\n", "1", "2"]),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_splits(pre: str) -> None:
    text, pieces = SPLITS[pre]
    tokenizer = build_tokenizer(bpe_metadata(pre, merges=[]))
    assert tokenizer is not None
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    alphabet = byte_alphabet()
    got = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert got == ["".join(alphabet[byte] for byte in piece.encode()) for piece in pieces]


def test_every_pre_tokenizer_builds_and_round_trips() -> None:
    assert len(PRE_TOKENIZERS) > 20
    text = "Zażółć 日本語 12345 'll\t\r\n\n  def f(x):\n\treturn x  # 😀🏽 "
    for pre in PRE_TOKENIZERS:
        tokenizer = build_tokenizer(bpe_metadata(pre))
        assert tokenizer is not None
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text, pre


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello world", ["hello", "Ġwor", "ld"]),
        ("hell 12", ["hell", "Ġ", "1", "2"]),
        ("a  b", ["a", "Ġ", "Ġ", "b"]),
        ("a   b", ["a", "ĠĠ", "Ġ", "b"]),
        ("é", ["Ã", "©"]),
        ("<|im_start|>hello<|im_end|>", ["<|im_start|>", "hello", "<|im_end|>"]),
        ("<|im_start", ["<", "|", "i", "m", "_", "s", "t", "a", "r", "t"]),
        ("", []),
    ],
    ids=["merges", "digits", "two-spaces", "run", "bytes", "specials", "no-special", "empty"],
)
def test_byte_level_bpe(text: str, tokens: list[str]) -> None:
    tokenizer = build_tokenizer(bpe_metadata())
    assert tokenizer is not None
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_specials_and_template() -> None:
    tokenizer = build_tokenizer(bpe_metadata())
    assert tokenizer is not None
    assert (tokenizer.bos_token, tokenizer.eos_token) == CONTROLS[1:]
    assert (tokenizer.unk_token, tokenizer.pad_token) == (CONTROLS[0], CONTROLS[2])
    assert tokenizer.model_max_length == 2048
    assert set(CONTROLS) <= set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"
    chat = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("pre", "changes", "before", "after"),
    [
        ("smollm", {"add_bos_token": None}, [], []),
        ("smollm", {"add_bos_token": True}, [1], []),
        ("smollm", {"add_eos_token": True}, [], [2]),
        ("llama-bpe", {"add_bos_token": None}, [1], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
    ],
    ids=["default", "bos", "eos", "llama3-default", "llama3-off"],
)
def test_begin_and_end(
    pre: str, changes: dict[str, Any], before: list[int], after: list[int]
) -> None:
    tokenizer = build_tokenizer(bpe_metadata(pre, **changes))
    assert tokenizer is not None
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == before + plain + after


def test_named_templates() -> None:
    metadata = bpe_metadata() | {"tokenizer.chat_template.tool_use": "{{ 'tools' }}"}
    tokenizer = build_tokenizer(metadata)
    assert tokenizer is not None
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, chat_template="tool_use") == "tools"
    assert tokenizer.apply_chat_template(chat, tokenize=False).startswith("<|im_start|>user")


SPM_TEXTS = [
    "abc",
    "cabc",
    " abc",
    "a abc  d",
    "aaaaaaa",
    "aaa aaaa",
    "éab",
    "x日😀a",
    "bcabca",
    "dab ",
]


@pytest.mark.parametrize("text", SPM_TEXTS)
def test_sentencepiece(text: str) -> None:
    metadata = spm_metadata()
    # Runs of two spaces are a user-defined token: they are cut out before merging.
    right: list[int] = []
    for number, part in enumerate(text.split("  ")):
        right += ([261] if number else []) + sentencepiece_ids(part, metadata)
    tokenizer = build_tokenizer(metadata)
    assert tokenizer is not None
    assert tokenizer.encode(text, add_special_tokens=False) == right
    assert tokenizer.decode(right) == text


def test_sentencepiece_random_texts() -> None:
    import random

    metadata = spm_metadata()
    tokenizer = build_tokenizer(metadata)
    assert tokenizer is not None
    source = random.Random(7)
    for _ in range(300):
        text = "".join(source.choice("aaabbccdé x") for _ in range(source.randint(1, 24)))
        text = text.replace("  ", " ")
        if "  " not in text:
            right = sentencepiece_ids(text, metadata)
            assert tokenizer.encode(text, add_special_tokens=False) == right, text


def test_sentencepiece_specials() -> None:
    metadata = spm_metadata()
    tokenizer = build_tokenizer(metadata)
    assert tokenizer is not None
    tokens = metadata["tokenizer.ggml.tokens"]
    text = "a\n\nb<turn><b>"
    ids = tokenizer.encode(text)
    assert [tokens[i] for i in ids] == ["<s>", "a", "\n\n", "b", "<turn>", "<b>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a\n\nb<b>"


def test_sentencepiece_space_prefix() -> None:
    metadata = spm_metadata(add_space_prefix=None, add_bos_token=False)
    tokenizer = build_tokenizer(metadata)
    assert tokenizer is not None
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in tokenizer.encode("abc")] == ["▁abc"]
    assert [tokens[i] for i in tokenizer.encode("cab")] == ["▁", "cab"]
    assert tokenizer.decode(tokenizer.encode("abc d")) == "abc d"


def test_no_vocabulary() -> None:
    assert build_tokenizer({}) is None
    assert build_tokenizer({"tokenizer.ggml.model": "no_vocab"}) is None


def test_stop_ids() -> None:
    assert stop_ids(bpe_metadata()) == [2, 0]
    assert stop_ids(bpe_metadata(eot_token_id=5, eom_token_id=6)) == [2, 5, 6, 0]
    assert stop_ids(spm_metadata()) == [2]
    assert special_ids(spm_metadata(seperator_token_id=3)) == {
        "bos": 1,
        "eos": 2,
        "unk": 0,
        "sep": 3,
    }


BAD = {
    "model": (bpe_metadata(model="t5"), UnsupportedError, "'t5'; supported are 'gpt2'.*'llama'"),
    "pre": (
        bpe_metadata("newest"),
        UnsupportedError,
        "'newest'.*wrong token ids.*llama-bpe.*qwen2",
    ),
    "tokens": (bpe_metadata(tokens=None), FormatError, "tokenizer.ggml.tokens is missing"),
    "merges": (bpe_metadata(merges=None), FormatError, "tokenizer.ggml.merges is missing"),
    "merge-shape": (bpe_metadata(merges=["ab"]), FormatError, "'ab', which is not two tokens"),
    "merge-token": (bpe_metadata(merges=["q zz"]), FormatError, "does not fit tokenizer.ggml.tok"),
    "types": (bpe_metadata(token_type=[1, 2]), FormatError, "token_type has 2 entries for 320"),
    "scores": (spm_metadata(scores=None), FormatError, "tokenizer.ggml.scores is missing"),
    "twice": (
        spm_metadata(tokens=["a", "b", "a"], token_type=None, scores=None),
        FormatError,
        "holds 'a' twice",
    ),
    "bos": (
        bpe_metadata(bos_token_id=320),
        FormatError,
        "bos_token_id is 320, outside.*320 tokens",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata(case: str) -> None:
    metadata, error, message = BAD[case]
    with pytest.raises(error, match=message):
        build_tokenizer(metadata, file="model.gguf")
