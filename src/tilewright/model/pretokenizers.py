"""How a byte-level BPE vocabulary splits text before merging, by `tokenizer.ggml.pre`.

A GGUF file names its pre-tokenizer instead of carrying it. A wrong split gives plausible but
wrong token ids, so a name that is not in `PRE_TOKENIZERS` is refused. The patterns are those of
the models' own tokenizer.json files, in the regular expressions of the `tokenizers` package.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]


@dataclass(frozen=True)
class PreTokenizer:
    """A named splitting rule.

    Attributes:
        patterns: regular expressions applied one after the other; each cuts its matches out of
            the pieces the one before left.
        nfc: text is brought to Unicode normal form C first.
        ignore_merges: a piece that is itself a token is taken whole, without merging.
        add_bos: a begin-of-text token is added when the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_TAIL = r"\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _TAIL
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}|{_TAIL}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?|"
    rf"\p{{N}}{{1,3}}|{_SLASHED}|{_TAIL}"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_RULES: tuple[tuple[PreTokenizer, tuple[str, ...]], ...] = (
    (PreTokenizer(_DEFAULT), ("default",)),
    (PreTokenizer((_GPT2,)), ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum")),
    (PreTokenizer((_GPT2,), nfc=True), ("mpt", "olmo")),
    (
        PreTokenizer((r"\p{N}", _GPT2)),
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"),
    ),
    (PreTokenizer((r"\p{N}", _GPT2), nfc=True), ("command-r",)),
    (
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"),
    ),
    (PreTokenizer((_LLAMA3,)), ("smaug-bpe", "dbrx", "chatglm-bpe", "glm4")),
    (
        PreTokenizer((_QWEN2,), nfc=True),
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"),
    ),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), ("tekken",)),
    (PreTokenizer((_GPT4O,)), ("gpt-4o", "llama4")),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
        ("deepseek-coder",),
    ),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for rule, names in _RULES for name in names}
