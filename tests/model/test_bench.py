from __future__ import annotations

import statistics
from typing import Any

import pytest

from fakes import BOS, ByteTokenizer, ScriptedModel
from tilewright.errors import UnsupportedError
from tilewright.model.bench import BenchResult, BenchTest, bench


@pytest.mark.parametrize(
    ("test", "name"),
    [
        (BenchTest(512, 0), "pp512"),
        (BenchTest(0, 128), "tg128"),
        (BenchTest(512, 128), "pp512+tg128"),
        (BenchTest(512, 0, 4096), "pp512 @ d4096"),
        (BenchTest(1, 2, 3), "pp1+tg2 @ d3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_are_llama_benchs(test: BenchTest, name: str) -> None:
    assert test.name == name


def test_rates_follow_from_a_replayed_clock() -> None:
    model = ScriptedModel()  # a step takes 10 ms, a prefilled token 1 ms
    tests = [BenchTest(100, 0), BenchTest(0, 20), BenchTest(100, 20, 50)]
    results = bench(model, ByteTokenizer(), tests, repetitions=3, clock=model.clock)
    assert [result.test for result in results] == tests
    for result, seconds in zip(results, [0.1, 0.2, 0.3], strict=True):
        assert result.samples_s == pytest.approx((seconds,) * 3)
        assert result.median_tok_s == pytest.approx(result.test.tokens / seconds)


def test_depth_is_fed_untimed_and_every_run_starts_empty() -> None:
    model = ScriptedModel()
    bench(
        model,
        ByteTokenizer(),
        [BenchTest(3, 2, 4)],
        repetitions=2,
        warmup=False,
        clock=model.clock,
    )
    kinds = [call[0] for call in model.calls]
    assert kinds == ["reset", "prefill", "prefill", "step", "step"] * 2
    depth, prompt = model.calls[1][1], model.calls[2][1]
    assert (len(depth), len(prompt)) == (4, 3)
    assert depth[0] == BOS


def test_no_begin_token_where_the_tokenizer_adds_none() -> None:
    model = ScriptedModel()
    bench(
        model, ByteTokenizer(adds_bos=False), [BenchTest(64, 0)], repetitions=1, clock=model.clock
    )
    assert all(call[1][0] != BOS for call in model.calls if call[0] == "prefill")


class _SlowStart(ScriptedModel):
    """Every pass is faster than the one before, down to 1 ms a token after `passes` of them."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.passes = passes

    def clock(self) -> float:
        resets = sum(call[0] == "reset" for call in self.calls)
        self.token_s = 0.01 * 2 ** max(self.passes - resets, 0)
        return super().clock()


@pytest.mark.parametrize("test", [BenchTest(50, 0), BenchTest(0, 50)], ids=["pp", "tg"])
def test_warm_up_goes_on_until_both_phases_settle(test: BenchTest) -> None:
    model = _SlowStart(passes=4)
    (result,) = bench(model, ByteTokenizer(), [test], repetitions=2, clock=model.clock)
    assert min(result.samples_s) == pytest.approx(max(result.samples_s))
    assert sum(call[0] == "reset" for call in model.calls) >= 5 + 2


def test_without_warm_up_the_slow_start_shows() -> None:
    model = _SlowStart(passes=4)
    (result,) = bench(
        model,
        ByteTokenizer(),
        [BenchTest(50, 0)],
        repetitions=2,
        warmup=False,
        clock=model.clock,
    )
    assert result.samples_s[0] > 1.9 * result.samples_s[1]


def test_rounds_are_interleaved_and_shuffled() -> None:
    def order(seed: int) -> list[str]:
        seen: list[str] = []
        model = ScriptedModel()
        bench(
            model,
            ByteTokenizer(),
            [BenchTest(1, 0), BenchTest(2, 0), BenchTest(3, 0)],
            repetitions=6,
            warmup=False,
            seed=seed,
            progress=lambda what, done, of: seen.append(what.split()[0]),
            clock=model.clock,
        )
        return seen[:-1]

    first = order(0)
    rounds = [first[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(r) == ["pp1", "pp2", "pp3"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert first == order(0)


def test_statistics_of_known_samples() -> None:
    result = BenchResult(BenchTest(10, 0), (1.0, 2.0, 0.5, 4.0))
    rates = [10.0, 5.0, 20.0, 2.5]
    assert result.samples_tok_s == pytest.approx(rates)
    assert result.mean_tok_s == pytest.approx(9.375)
    assert result.median_tok_s == pytest.approx(7.5)
    assert result.stddev_tok_s == pytest.approx(statistics.stdev(rates))
    assert (result.min_tok_s, result.max_tok_s) == (2.5, 20.0)
    assert BenchResult(BenchTest(10, 0), (1.0,)).stddev_tok_s == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tests": []}, "tests: none given"),
        ({"repetitions": 0}, "repetitions: got 0"),
        ({"tests": [BenchTest(60, 0, 5)]}, "65 tokens do not fit the model's context of 64"),
    ],
    ids=["no-test", "no-repetition", "too-long"],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    model = ScriptedModel(context=64)
    with pytest.raises(UnsupportedError, match=message):
        bench(model, ByteTokenizer(), **{"tests": [BenchTest(1, 0)], **arguments})


@pytest.mark.parametrize(
    ("counts", "message"),
    [((0, 0, 5), "both are 0"), ((-1, 2, 0), "n_prompt: got -1"), ((1, 0, -3), "n_depth: got -3")],
    ids=["nothing", "negative-prompt", "negative-depth"],
)
def test_bad_tests(counts: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        BenchTest(*counts)


def test_the_longest_test_is_warmed_up_first() -> None:
    """Its cache is as large as any gets, and the others are warmed up with that one."""
    model = ScriptedModel()
    said: list[str] = []
    tests = [BenchTest(4, 0), BenchTest(0, 3, 5), BenchTest(9, 0)]
    results = bench(
        model, None, tests, repetitions=1, clock=model.clock,
        progress=lambda what, done, total: said.append(what),
    )  # fmt: skip
    assert said[:3] == ["pp9 warm-up", "tg3 @ d5 warm-up", "pp4 warm-up"]
    assert [result.test for result in results] == tests
