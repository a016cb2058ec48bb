"""Speed of a model, in the tests llama-bench's users know.

A test feeds `n_depth` tokens untimed, then times the prefill of `n_prompt` tokens, `n_gen`
single-token steps, or one after the other. Token ids are random and nothing is sampled, so the
text does not matter. What differs from llama-bench, on purpose:

- Both phases are warmed up, with passes as long as the test, until they stop getting faster.
- Repetitions are interleaved: every round runs each test once, in a new random order, so that
  a machine that drifts slows all tests alike instead of the last ones.
- The median and the range stand beside the mean and the deviation; every sample is kept.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.errors import UnsupportedError
from tilewright.model.evaluate import begin_token
from tilewright.model.generate import Decoder, decoder_for

__all__ = ["BenchResult", "BenchTest", "bench"]

_WARMUP_MIN, _WARMUP_MAX = 2, 6  # passes
_WARMUP_STEPS = 32  # single-token steps of a warm-up pass, at most
_SETTLED = 0.95  # a pass that took more than this share of the pass before is no longer warming


@dataclass(frozen=True)
class BenchTest:
    """One test: prompt tokens, generated tokens, and the depth of context they start at."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    def __post_init__(self) -> None:
        for name in ("n_prompt", "n_gen", "n_depth"):
            if getattr(self, name) < 0:
                raise UnsupportedError(f"{name}: got {getattr(self, name)}; give 0 or more")
        if self.tokens == 0:
            raise UnsupportedError("n_prompt and n_gen: both are 0; give at least one of them")

    @property
    def tokens(self) -> int:
        """Tokens whose time is measured."""
        return self.n_prompt + self.n_gen

    @property
    def name(self) -> str:
        """As llama-bench names it: pp512, tg128, pp512+tg128 or, at depth, pp512 @ d4096."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


@dataclass(frozen=True)
class BenchResult:
    """All samples of one test, in the order they were taken; rates are in tokens a second."""

    test: BenchTest
    samples_s: tuple[float, ...]

    @property
    def samples_tok_s(self) -> tuple[float, ...]:
        return tuple(self.test.tokens / s for s in self.samples_s)

    @property
    def mean_tok_s(self) -> float:
        return statistics.fmean(self.samples_tok_s)

    @property
    def stddev_tok_s(self) -> float:
        """Sample standard deviation; 0 for a single sample."""
        return statistics.stdev(self.samples_tok_s) if len(self.samples_s) > 1 else 0.0

    @property
    def median_tok_s(self) -> float:
        return statistics.median(self.samples_tok_s)

    @property
    def min_tok_s(self) -> float:
        return min(self.samples_tok_s)

    @property
    def max_tok_s(self) -> float:
        return max(self.samples_tok_s)


class _Runner:
    """Runs one test on one decoder, with its own stream of token ids."""

    def __init__(
        self, decoder: Decoder, vocab: int, begin: int | None, seed: int, clock: Callable[[], float]
    ) -> None:
        self._decoder = decoder
        self._vocab = vocab
        self._begin = begin
        self._ids = torch.Generator().manual_seed(seed)
        self._clock = clock

    def _random(self, count: int) -> torch.Tensor:
        return torch.randint(0, self._vocab, (1, count), generator=self._ids)

    def run(self, test: BenchTest) -> float:
        """Seconds of the timed part of `test`."""
        self._decoder.reset()
        ids = self._random(test.n_depth + test.tokens)  # [1, T]
        if self._begin is not None:
            ids[0, 0] = self._begin
        depth, prompt, steps = ids.split([test.n_depth, test.n_prompt, test.n_gen], dim=1)
        step_ids = steps[0].tolist()
        if test.n_depth:
            self._decoder.prefill(depth)
        start = self._clock()
        if test.n_prompt:
            self._decoder.prefill(prompt)
        for token_id in step_ids:
            self._decoder.step(token_id)
        return self._clock() - start

    def warm_up(self, test: BenchTest) -> int:
        """Run shorter copies of `test` until they settle; returns how many it took."""
        short = BenchTest(test.n_prompt, min(test.n_gen, _WARMUP_STEPS), test.n_depth)
        previous = self.run(short)
        for passes in range(2, _WARMUP_MAX + 1):
            now = self.run(short)
            if passes >= _WARMUP_MIN and now > _SETTLED * previous:
                return passes
            previous = now
        return _WARMUP_MAX


def bench(
    model: Any,
    tokenizer: Any,
    tests: Sequence[BenchTest],
    *,
    repetitions: int = 5,
    warmup: bool = True,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    decoder: Decoder | None = None,
) -> list[BenchResult]:
    """Time every test `repetitions` times.

    Args:
        model: a causal language model, from `tilewright.load` or transformers.
        tokenizer: its tokenizer; says whether a text begins with a special token. None for a
            model without one: ids are random then from the first on.
        tests: what to time; results come in this order.
        repetitions: samples a test, at least 1.
        warmup: run each test untimed first, until it settles.
        seed: of the token ids and of the order of the tests.
        progress: called with (what runs now, runs done, runs in all); warm-ups count as one.
        clock: returns seconds; a replayed one makes the arithmetic testable.
        decoder: what steps the model; None for that of `decoder_for`.

    Raises:
        UnsupportedError: no test, no repetition, or a test longer than the model's context.
    """
    if not tests:
        raise UnsupportedError("tests: none given; give -p, -n or -pg a value above 0")
    if repetitions < 1:
        raise UnsupportedError(f"repetitions: got {repetitions}; give 1 or more")
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    for test in tests:
        if limit is not None and test.n_depth + test.tokens > limit:
            raise UnsupportedError(
                f"test {test.name}: {test.n_depth + test.tokens} tokens do not fit the model's "
                f"context of {limit}; make it shorter"
            )
    begin = None if tokenizer is None else begin_token(tokenizer)
    runner = _Runner(decoder or decoder_for(model), config.vocab_size, begin, seed, clock)
    order = random.Random(seed)
    samples: list[list[float]] = [[] for _ in tests]
    runs = repetitions * len(tests) + (len(tests) if warmup else 0)
    done = 0

    def report(what: str) -> None:
        if progress is not None:
            progress(what, done, runs)

    if warmup:
        # The longest first: a cache that grows afterwards has other strides, for which libraries
        # plan anew in the first sample that meets them.
        for test in sorted(tests, key=lambda test: -(test.n_depth + test.tokens)):
            report(f"{test.name} warm-up")
            runner.warm_up(test)
            done += 1
    for repetition in range(repetitions):
        for index in order.sample(range(len(tests)), len(tests)):
            report(f"{tests[index].name} {repetition + 1}/{repetitions}")
            samples[index].append(runner.run(tests[index]))
            done += 1
    report("done")
    return [BenchResult(test, tuple(s)) for test, s in zip(tests, samples, strict=True)]
