"""Text from a causal language model: prefill, then one token at a time.

`decoder_for` is the one place that chooses how a model is stepped: the fused step where there is
one for it, otherwise transformers' forward with a key-value cache. `generate` and `bench` run on
what it returns.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tilewright.errors import GateError, UnsupportedError
from tilewright.model.placement import device_of

__all__ = [
    "Decoder",
    "Generation",
    "TokenStream",
    "TransformersDecoder",
    "chat_ids",
    "decoder_for",
    "generate",
    "how_stepped",
    "sample",
    "stop_ids_of",
]

# A longer prompt is prefilled in pieces, so that memory does not grow with its square.
PREFILL_CHUNK = 2048

# Tokens that end a turn in the chat formats of the supported families. Checkpoints often
# declare only the end of the text and leave the end of the turn to the runner.
_END_OF_TURN = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|endoftext|>", "<|end|>")

_REPLACEMENT = "\ufffd"  # what decoding yields for bytes that are not (yet) UTF-8


class Decoder(Protocol):
    """What steps a model. `prefill` appends at the current position, so it may be repeated."""

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed ids [1, T] int64; returns the logits [V] float32 after the last of them."""
        ...

    def step(self, token_id: int) -> torch.Tensor:
        """Feed one token; returns the logits [V] float32 after it."""
        ...

    def reset(self) -> None:
        """Forget everything fed so far."""
        ...


class TransformersDecoder:
    """Any transformers causal model, stepped through its own forward and a DynamicCache.

    Logits are handed over on the CPU, so that whoever has them knows that the step is done.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._fed = 0
        # transformers renamed the argument within 5.x and warns about the old names
        names = inspect.signature(model.forward).parameters
        known = ("cache", "past_key_values", "cache_params")
        self._cache_argument = next((name for name in known if name in names), known[0])
        self._places = "position_ids" in names

    def reset(self) -> None:
        self._cache = None
        self._fed = 0

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        if self._cache is None:
            from transformers import DynamicCache

            self._cache = DynamicCache(config=self._model.config)
        ids = ids.to(device_of(self._model))
        for piece in ids.split(PREFILL_CHUNK, dim=1):
            options = {self._cache_argument: self._cache}
            if self._places:  # Bamba's code forgets what the cache holds
                end = self._fed + piece.shape[1]
                options["position_ids"] = torch.arange(self._fed, end, device=ids.device)[None]
            output = self._model(input_ids=piece, use_cache=True, logits_to_keep=1, **options)
            self._fed += piece.shape[1]
        return output.logits[0, -1].float().cpu()

    def step(self, token_id: int) -> torch.Tensor:
        return self.prefill(torch.tensor([[token_id]], dtype=torch.int64))


def decoder_for(model: Any) -> Decoder:
    """The decoder that runs `model`: captured programs where its family has them.

    A model may bring its own by an attribute `tilewright_decoder`: a function without arguments
    that returns a fresh `Decoder`. Otherwise `tilewright.model.decode.FusedDecoder` on the CPU,
    and `tilewright.model.graphs.GraphDecoder` or, for hybrids,
    `tilewright.model.captured.CapturedDecoder` on a GPU, serve the models that they support, and
    `TransformersDecoder` every other.
    """
    own = getattr(model, "tilewright_decoder", None)
    if own is not None:
        decoder: Decoder = own()
        return decoder
    if device_of(model).type == "cuda":
        from tilewright.model.graphs import GraphDecoder, why_not_graphed

        if why_not_graphed(model) is None:
            return GraphDecoder(model)
        from tilewright.model.captured import CapturedDecoder, why_not_captured

        return TransformersDecoder(model) if why_not_captured(model) else CapturedDecoder(model)
    from tilewright.model.decode import FusedDecoder
    from tilewright.model.fuse import why_not_fused

    return TransformersDecoder(model) if why_not_fused(model) else FusedDecoder(model)


def how_stepped(model: Any, decoder: Decoder) -> str | None:
    """How a token of a model on a GPU is launched, and why not by a graph, in one line; None on
    the CPU. Ask after a step: until then nothing has been captured."""
    if device_of(model).type != "cuda":
        return None
    from tilewright.model.captured import CapturedDecoder, has_scans, why_not_captured
    from tilewright.model.graphs import GraphDecoder, why_not_graphed

    if not isinstance(decoder, GraphDecoder | CapturedDecoder):
        why_not = why_not_captured if has_scans(model) else why_not_graphed
        own = "the model brings its own decoder"
        if type(decoder) is TransformersDecoder:
            own = "transformers' own loop was asked for"
        reason = why_not(model) or own
    elif decoder.captured:
        return "a token is one CUDA graph"
    else:
        reason = decoder.why_eager or "no token was fed"
    return f"a token is launched operation by operation: {reason}"


@dataclass(frozen=True)
class Generation:
    """What `generate` made, and how long it took.

    Attributes:
        ids: the generated token ids; a stop token that ended them is not among them.
        text: their text, special tokens left out.
        prompt_tokens: number of ids fed before the first new one.
        prefill_s: seconds to feed the prompt.
        decode_s: seconds of all single-token steps.
        decode_steps: number of those steps; the first new token costs none.
        ttft_s: seconds from the call to the first new token, tokenization included.
        stop_reason: "stop" (a stop id), "length" (max_tokens), "context" (the model's context
            is full) or "callback" (`on_token` returned False).
    """

    ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    prefill_s: float
    decode_s: float
    decode_steps: int
    ttft_s: float
    stop_reason: str

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens a second; 0 if nothing was timed."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Single-token steps a second; 0 if there was none."""
        return self.decode_steps / self.decode_s if self.decode_s > 0 else 0.0


class TokenStream:
    """Turns ids that arrive one at a time into text that can be printed as it comes.

    A token may hold a part of a UTF-8 sequence, and some tokenizers drop a leading space when
    they decode a token alone. So a piece is what a longer decoding adds to a shorter one that
    starts at the same id, and it is held back while it ends in an unfinished sequence.

    Args:
        tokenizer: has `decode(ids, skip_special_tokens=, clean_up_tokenization_spaces=)`.
        context: the last ids before the stream; they give the first piece its leading space.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._start = 0
        self._read = len(self._ids)

    def _decode(self, end: int) -> str:
        text = self._tokenizer.decode(
            self._ids[self._start : end],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that is now certain, which may be empty."""
        self._ids.append(token_id)
        before, after = self._decode(self._read), self._decode(len(self._ids))
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """The text still held back; broken bytes come out as U+FFFD."""
        before, after = self._decode(self._read), self._decode(len(self._ids))
        self._start = self._read = len(self._ids)
        return after[len(before) :]


def sample(
    logits: torch.Tensor,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> int:
    """Choose the next token from logits [V].

    Temperature is applied first, then top-k, then top-p (nucleus) on what is left.

    Args:
        temperature: 0 takes the largest logit (the first of equals).
        top_k: keep the k largest; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        generator: source of randomness, on the CPU.

    Raises:
        UnsupportedError: a setting lies outside its range.
        GateError: the logits hold a NaN.
    """
    _check_sampling(temperature, top_k, top_p)
    logits = logits.to("cpu", torch.float32)
    if bool(torch.isnan(logits).any()):
        raise GateError(
            "logits: the model returned NaN, so no token can be chosen; "
            "run `tilewright verify --model FILE` to find the product that is wrong"
        )
    if temperature == 0:
        return int(logits.argmax())
    values, order = torch.sort(logits / temperature, descending=True, stable=True)
    if top_k:
        values, order = values[:top_k], order[:top_k]
    probabilities = torch.softmax(values, dim=0)
    if top_p < 1:
        before = probabilities.cumsum(0) - probabilities  # mass of all better tokens
        probabilities = probabilities * (before < top_p)
    return int(order[int(torch.multinomial(probabilities, 1, generator=generator))])


def _check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    if not temperature >= 0:
        raise UnsupportedError(f"temperature: got {temperature}; give 0 (greedy) or more")
    if top_k < 0:
        raise UnsupportedError(f"top_k: got {top_k}; give 0 (no limit) or a count of tokens")
    if not 0 < top_p <= 1:
        raise UnsupportedError(f"top_p: got {top_p}; give a value above 0 and up to 1 (no limit)")


def stop_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end a reply: those the model and the tokenizer declare, and ends of turn."""
    declared: list[Any] = [
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(getattr(model, "config", None), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    ids: set[int] = set()
    for entry in declared:
        if isinstance(entry, Iterable):
            ids.update(int(i) for i in entry)
        elif entry is not None:
            ids.add(int(entry))
    vocabulary = tokenizer.get_vocab()
    ids.update(vocabulary[token] for token in _END_OF_TURN if token in vocabulary)
    return frozenset(ids)


def chat_ids(tokenizer: Any, prompt: str, *, system: str | None = None) -> list[int]:
    """The ids of one user message in the model's chat template, ready for the reply.

    Raises:
        UnsupportedError: the tokenizer carries no chat template, or its template refuses.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UnsupportedError(
            "tokenizer: this model carries no chat template; "
            "pass the prompt as plain text (`--no-chat-template`)"
        )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | torch.Tensor,
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    stop_ids: Iterable[int] | None = None,
    on_token: Callable[[str], bool | None] | None = None,
    decoder: Decoder | None = None,
) -> Generation:
    """Continue a prompt.

    Args:
        model: a causal language model, from `tilewright.load` or transformers.
        tokenizer: its tokenizer.
        prompt: text, tokenized with the model's special tokens, or ids as they are to be fed
            (see `chat_ids`).
        max_tokens: most tokens to make.
        temperature, top_p, top_k: see `sample`; the default is greedy.
        seed: of the sampling; None draws a new one. Greedy decoding needs none.
        stop_ids: ids that end the text; None takes `stop_ids_of`, an empty set none.
        on_token: called with each piece of text as it becomes certain (it may be empty);
            returning False stops.
        decoder: what steps the model, from `decoder_for`; it is reset. None makes one: on a GPU
            that captures a graph, which one decoder for several prompts does once.

    Raises:
        UnsupportedError: the prompt is empty or longer than the model's context, or a sampling
            setting lies outside its range.
        GateError: the model returned NaN.
    """
    begin = time.perf_counter()
    _check_sampling(temperature, top_k, top_p)
    if max_tokens < 1:
        raise UnsupportedError(f"max_tokens: got {max_tokens}; give 1 or more")
    ids = _prompt_ids(tokenizer, prompt)
    limit = getattr(model.config, "max_position_embeddings", None)
    if not ids:
        raise UnsupportedError("prompt: it has no tokens; give at least one word or id")
    if limit is not None and len(ids) > limit:
        raise UnsupportedError(
            f"prompt: {len(ids)} tokens do not fit the model's context of {limit}; shorten it"
        )
    stops = stop_ids_of(model, tokenizer) if stop_ids is None else frozenset(stop_ids)
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    stream = TokenStream(tokenizer, ids[-5:])
    if decoder is None:
        decoder = decoder_for(model)
    else:
        decoder.reset()
    made: list[int] = []
    pieces: list[str] = []
    ttft_s = decode_s = 0.0
    decode_steps = 0
    stop_reason = "length"

    start = time.perf_counter()
    logits = decoder.prefill(torch.tensor([ids], dtype=torch.int64))
    prefill_s = time.perf_counter() - start
    while True:
        token = sample(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
        )
        if not ttft_s:
            ttft_s = time.perf_counter() - begin
        if token in stops:
            stop_reason = "stop"
            break
        made.append(token)
        pieces.append(stream.push(token))
        if on_token is not None and on_token(pieces[-1]) is False:
            stop_reason = "callback"
            break
        if len(made) == max_tokens:
            break
        if limit is not None and len(ids) + len(made) >= limit:
            stop_reason = "context"
            break
        start = time.perf_counter()
        logits = decoder.step(token)
        decode_s += time.perf_counter() - start
        decode_steps += 1
    rest = stream.finish()
    if rest:
        pieces.append(rest)
        if on_token is not None:
            on_token(rest)
    return Generation(
        ids=tuple(made),
        text="".join(pieces),
        prompt_tokens=len(ids),
        prefill_s=prefill_s,
        decode_s=decode_s,
        decode_steps=decode_steps,
        ttft_s=ttft_s,
        stop_reason=stop_reason,
    )


def _prompt_ids(tokenizer: Any, prompt: str | Sequence[int] | torch.Tensor) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if isinstance(prompt, torch.Tensor):
        return [int(i) for i in prompt.reshape(-1).tolist()]
    return [int(i) for i in prompt]
