"""A tokenizer built from a GGUF file's own metadata.

Two families cover llama, qwen2, qwen3 and gemma3 files:

- `tokenizer.ggml.model = "gpt2"`: byte-level BPE with a merge list, its text split as
  `tokenizer.ggml.pre` says (see `pretokenizers`).
- `tokenizer.ggml.model = "llama"`: SentencePiece BPE. The file carries scores and no merges:
  the pair whose union has the highest score is merged first, so every way to cut a token into
  two tokens is a merge, ranked by the score of the token. Characters outside the vocabulary
  become byte tokens.

Both become a `tokenizers.Tokenizer` inside transformers' `PreTrainedTokenizerFast`, with the
file's special tokens and chat template. Building from metadata takes tenths of a second where a
conversion through a slow tokenizer takes many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.errors import FormatError, UnsupportedError
from tilewright.model.pretokenizers import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

__all__ = ["build_tokenizer", "special_ids", "stop_ids"]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"  # SentencePiece writes a space as this character
_ROLES = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id", "separator_token_id"),  # the format's own spelling comes first
    "pad": ("padding_token_id",),
    "mask": ("mask_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
}
# Tokens that end a turn in chat formats; files often name only one of them as eos.
_END_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
    }
)


def build_tokenizer(
    metadata: Mapping[str, Any], *, file: object = None
) -> PreTrainedTokenizerFast | None:
    """The tokenizer a GGUF file describes.

    Args:
        metadata: the file's key-value pairs, with keys `tokenizer.ggml.*`.
        file: path of the file, for messages.

    Returns:
        a `PreTrainedTokenizerFast`, or None if the file carries no vocabulary.

    Raises:
        UnsupportedError: a tokenizer model or pre-tokenizer that is not known.
        FormatError: lists that are missing or do not match each other, or bad token ids.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "no_vocab", "none"):
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE). Load the model's original tokenizer with transformers "
            "instead"
        )
    tokens = _tokens(metadata, file)
    types = _list(metadata, "token_type", len(tokens), file) or [1] * len(tokens)
    if kind == "gpt2":
        rule = _pre_tokenizer(metadata)
        backend = _byte_level_bpe(metadata, tokens, rule, file)
        add_bos = rule.add_bos
    else:
        backend = _sentencepiece_bpe(metadata, tokens, types, file)
        add_bos = True
    _add_special_tokens(backend, tokens, types)
    return _wrap(metadata, backend, tokens, add_bos, file)


def special_ids(metadata: Mapping[str, Any], *, file: object = None) -> dict[str, int]:
    """Ids of the special tokens that the file names: keys among bos, eos, unk, sep, pad, mask,
    eot and eom.

    Raises:
        FormatError: an id outside the vocabulary.
    """
    count = len(metadata.get("tokenizer.ggml.tokens") or ())
    found = {}
    for role, keys in _ROLES.items():
        for key in keys:
            value = metadata.get(f"tokenizer.ggml.{key}")
            if value is None:
                continue
            if count and not 0 <= int(value) < count:
                raise FormatError(
                    f"tokenizer.ggml.{key} is {value}, outside the vocabulary of {count} tokens",
                    file=file,
                )
            found[role] = int(value)
            break
    return found


def stop_ids(metadata: Mapping[str, Any], *, file: object = None) -> list[int]:
    """Ids that end generation: eos, end of turn, end of message, and every control token whose
    text is an end-of-turn marker of a known chat format. Eos comes first.
    """
    ids = special_ids(metadata, file=file)
    stops = [ids[role] for role in ("eos", "eot", "eom") if role in ids]
    types = metadata.get("tokenizer.ggml.token_type")
    if types is not None:
        for index, token in enumerate(metadata.get("tokenizer.ggml.tokens") or ()):
            if token in _END_OF_TURN and types[index] in (_CONTROL, _USER_DEFINED):
                stops.append(index)
    return list(dict.fromkeys(stops))


def _tokens(metadata: Mapping[str, Any], file: object) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens) == 0:
        raise FormatError(
            "tokenizer.ggml.tokens is missing, though tokenizer.ggml.model is "
            f"{metadata['tokenizer.ggml.model']!r}",
            file=file,
        )
    named = [token if token else f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(named)) != len(named):
        seen: set[str] = set()
        twice = next(t for t in named if t in seen or seen.add(t))  # type: ignore[func-returns-value]
        raise FormatError(f"tokenizer.ggml.tokens holds {twice!r} twice", file=file)
    return named


def _list(metadata: Mapping[str, Any], key: str, count: int, file: object) -> Sequence[Any] | None:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return None
    if len(values) != count:
        raise FormatError(
            f"tokenizer.ggml.{key} has {len(values)} entries for {count} tokens", file=file
        )
    return list(values)


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedError(
            f"tokenizer.ggml.pre is {name!r}: how it splits text is not known here, and a guess "
            f"would give wrong token ids. Supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        ) from None


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: list[str], rule: PreTokenizer, file: object
) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    raw = metadata.get("tokenizer.ggml.merges")
    if raw is None:
        raise FormatError(
            "tokenizer.ggml.merges is missing; a 'gpt2' tokenizer needs it", file=file
        )
    merges = []
    for merge in raw:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise FormatError(
                f"tokenizer.ggml.merges holds {merge!r}, which is not two tokens", file=file
            )
        merges.append((merge[:cut], merge[cut + 1 :]))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(
            vocab=vocabulary,
            merges=merges,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=rule.ignore_merges,
        )
    except Exception as error:  # the package raises a bare Exception
        raise FormatError(
            f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}", file=file
        ) from error
    backend = Tokenizer(model)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], file: object
) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _list(metadata, "scores", len(tokens), file)
    if scores is None:
        raise FormatError(
            "tokenizer.ggml.scores is missing; a 'llama' tokenizer needs it", file=file
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = special_ids(metadata, file=file).get("unk", 0)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(tokens, types, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    escape = normalizers.Replace(" ", _SPACE)
    unescape = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape])
        unescape.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = escape
    backend.decoder = decoders.Sequence(unescape)
    return backend


def _merges_from_scores(
    tokens: list[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every cut of a normal token into two tokens, best score first.

    Control, user-defined and byte tokens take no part: they are matched before merging or stand
    for bytes. Cuts of one token rank by the ids of their halves, as in the merge lists that are
    published for these vocabularies.
    """
    mergeable = {token: i for i, token in enumerate(tokens) if types[i] not in (2, 3, 4, 6)}
    ranked = sorted(
        (i for token, i in mergeable.items() if len(token) > 1), key=lambda i: -scores[i]
    )
    merges = []
    for index in ranked:
        token = tokens[index]
        cuts = []
        for at in range(1, len(token)):
            left = mergeable.get(token[:at])
            if left is not None:
                right = mergeable.get(token[at:])
                if right is not None:
                    cuts.append((left, right))
        if len(cuts) > 1:
            cuts.sort()
        for left, right in cuts:
            merges.append((tokens[left], tokens[right]))
    return merges


def _add_special_tokens(backend: Tokenizer, tokens: list[str], types: Sequence[int]) -> None:
    from tokenizers import AddedToken

    special = [
        AddedToken(tokens[i], special=True, normalized=False)
        for i, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL)
    ]
    plain = [
        AddedToken(tokens[i], special=False, normalized=False)
        for i, kind in enumerate(types)
        if kind == _USER_DEFINED
    ]
    if special:
        backend.add_special_tokens(special)
    if plain:
        backend.add_tokens(plain)


def _wrap(
    metadata: Mapping[str, Any],
    backend: Tokenizer,
    tokens: list[str],
    add_bos: bool,
    file: object,
) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    ids = special_ids(metadata, file=file)
    names = {
        f"{role}_token": tokens[ids[role]]
        for role in ("bos", "eos", "unk", "sep", "pad", "mask")
        if role in ids
    }
    options: dict[str, Any] = {}
    architecture = metadata.get("general.architecture")
    context = metadata.get(f"{architecture}.context_length")
    if context is not None:
        options["model_max_length"] = int(context)
    template = _chat_template(metadata)
    if template is not None:
        options["chat_template"] = template
    # Handing the backend over before __init__ spares the serialized copy that the
    # `tokenizer_object` argument makes, which is slow and large for 262,144 tokens.
    tokenizer = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    tokenizer._tokenizer = backend
    tokenizer.__init__(
        add_bos_token=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos_token=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **names,
        **options,
    )
    return tokenizer


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    default = metadata.get("tokenizer.chat_template")
    named = {
        key.removeprefix("tokenizer.chat_template."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template.")
    }
    if not named:
        return default
    return {"default": default, **named} if default is not None else named
