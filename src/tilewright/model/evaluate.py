"""Perplexity of a model on a text, counted as llama-perplexity counts it.

The text is tokenized once, split into chunks of `context` tokens, and each chunk is run on its
own. The first half of a chunk is context only; position i of the second half predicts token
i + 1, so a chunk scores context - context // 2 - 1 tokens. Where the tokenizer adds a
beginning-of-text token, that token replaces the first of every chunk.

    perplexity = exp(mean of -log p),  standard error = perplexity * std(-log p) / sqrt(n - 1)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.errors import GateError, UnsupportedError
from tilewright.model.placement import device_of

__all__ = ["Perplexity", "begin_token", "perplexity", "perplexity_chunks", "text_ids"]

_ROWS = 32  # rows of logits raised to float64 at a time; a vocabulary may have 262,144 columns


@dataclass(frozen=True)
class Perplexity:
    """A perplexity over the first `chunks` of `chunks_wanted` chunks.

    Attributes:
        value: exp of the mean negative log-likelihood.
        standard_error: of `value`, taking the scored tokens as independent.
        chunks, chunks_wanted: chunks scored so far, and asked for.
        context: tokens a chunk.
        tokens_scored: predictions that entered the mean.
        seconds: time spent in the model and in scoring.
    """

    value: float
    standard_error: float
    chunks: int
    chunks_wanted: int
    context: int
    tokens_scored: int
    seconds: float

    @property
    def complete(self) -> bool:
        return self.chunks == self.chunks_wanted

    def __str__(self) -> str:
        return f"{self.value:.4f} +/- {self.standard_error:.4f}"


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text in which no character sequence counts as a control token.

    "<unk>" or "</s>" in a corpus is text there, not the model's token.
    """
    return list(tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"])


def begin_token(tokenizer: Any) -> int | None:
    """The beginning-of-text id that the tokenizer puts before a text, or None."""
    begin = getattr(tokenizer, "bos_token_id", None)
    first = list(tokenizer("a")["input_ids"])[:1]
    return begin if begin is not None and first == [begin] else None


@torch.inference_mode()
def _chunk_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """-log p of the scored tokens of one chunk: ids [1, C] -> [C - C // 2 - 1] float64."""
    ids = ids.to(device_of(model))
    context = ids.shape[1]
    first = context // 2
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=context - first).logits[0, :-1]
    targets = ids[0, first + 1 :]
    losses = []
    for start in range(0, len(targets), _ROWS):
        rows = logits[start : start + _ROWS].double()  # [R, V]
        chosen = rows.gather(1, targets[start : start + _ROWS, None]).squeeze(1)
        losses.append(rows.logsumexp(dim=1) - chosen)
    return torch.cat(losses)


def perplexity_chunks(
    model: Any, tokenizer: Any, text: str, *, context: int = 512, chunks: int | None = None
) -> Iterator[Perplexity]:
    """Yield the running perplexity after every chunk; the last one is the result.

    Args:
        model: a causal language model whose forward takes `logits_to_keep`.
        tokenizer: its tokenizer.
        text: what to score.
        context: tokens a chunk, at least 4.
        chunks: most chunks to score; None scores all whole chunks of the text.

    Raises:
        UnsupportedError: `context` or `chunks` is out of range, or the text is shorter than two
            chunks.
        GateError: the model returned NaN or infinite logits.
    """
    if context < 4:
        raise UnsupportedError(f"context: got {context}; give 4 tokens or more")
    if chunks is not None and chunks < 1:
        raise UnsupportedError(f"chunks: got {chunks}; give 1 or more, or leave it out for all")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise UnsupportedError(
            f"context: got {context}, the model's own is {limit}; give that or less"
        )
    ids = text_ids(tokenizer, text)
    if len(ids) < 2 * context:
        raise UnsupportedError(
            f"text: {len(ids)} tokens are too few for chunks of {context}; "
            f"give a text of at least {2 * context} tokens or a smaller context"
        )
    wanted = len(ids) // context
    if chunks is not None:
        wanted = min(wanted, chunks)
    begin = begin_token(tokenizer)

    count, total, total_squares = 0, 0.0, 0.0
    start_s = time.perf_counter()
    for index in range(wanted):
        chunk = torch.tensor([ids[index * context : (index + 1) * context]], dtype=torch.int64)
        if begin is not None:
            chunk[0, 0] = begin
        losses = _chunk_losses(model, chunk)
        if not bool(torch.isfinite(losses).all()):
            raise GateError(
                f"model: chunk {index} has NaN or infinite logits; "
                "run `tilewright verify --model FILE` to find the product that is wrong"
            )
        count += len(losses)
        total += float(losses.sum())
        total_squares += float((losses * losses).sum())
        mean = total / count
        variance = max(total_squares / count - mean * mean, 0.0)
        value = math.exp(mean)
        yield Perplexity(
            value=value,
            standard_error=value * math.sqrt(variance / max(count - 1, 1)),
            chunks=index + 1,
            chunks_wanted=wanted,
            context=context,
            tokens_scored=count,
            seconds=time.perf_counter() - start_s,
        )


def perplexity(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    context: int = 512,
    chunks: int | None = None,
    progress: Callable[[Perplexity], None] | None = None,
) -> Perplexity:
    """The perplexity of a text. Arguments and errors as of `perplexity_chunks`.

    Args:
        progress: called with the running value after every chunk.
    """
    result = None
    for result in perplexity_chunks(model, tokenizer, text, context=context, chunks=chunks):
        if progress is not None:
            progress(result)
    assert result is not None  # a text of fewer than two chunks has raised
    return result
