"""What the charts are drawn from, and what the page says in words."""

from __future__ import annotations

from typing import Any

import pytest

from report import page_data as d
from tilewright.report.page.charts import interval_figure, ladder_figure, paired_figure
from tilewright.report.page.heat import heat_map
from tilewright.report.page.sections import sections_of, tidy
from tilewright.report.page.words import (
    agreement_words,
    comparison_words,
    interval_text,
    rejected_words,
    summary,
    tile_text,
    verdict_of,
    verification_words,
)


def test_the_paired_plot_holds_every_block_as_it_was_measured() -> None:
    found = d.comparison(0.02, us=2500.0)
    figure = paired_figure(found.to_dict())
    traces = {trace.get("name"): trace for trace in figure["data"]}
    for name, arm in (("A", "A"), ("A' (A again)", "control"), ("B", "B")):
        assert traces[name]["x"] == list(range(1, 21))
        assert traces[name]["y"] == [block.us[arm] / 1e3 for block in found.blocks]
    for name, arm in (("A / A' (control)", "control"), ("A / B", "B")):
        expected = [block.us["A"] / block.us[arm] for block in found.blocks]
        assert traces[name]["y"] == expected
    (band,) = [shape for shape in figure["layout"]["shapes"] if shape["type"] == "rect"]
    assert (band["y0"], band["y1"]) == found.interval
    headings = [a["text"] for a in figure["layout"]["annotations"]]
    assert headings[0] == "Time of a launch, ms, in each block"
    assert headings[2] == "CPU share of other processes, %"
    bars = next(trace for trace in figure["data"] if trace["type"] == "bar")
    assert bars["y"] == [100 * (block.state.others or 0) for block in found.blocks if block.state]


def test_the_paired_plot_has_no_machine_where_nobody_watched_it() -> None:
    figure = paired_figure(d.comparison(watched=False).to_dict())
    assert [trace["type"] for trace in figure["data"]] == ["scatter"] * 6
    assert "yaxis3" not in figure["layout"]


@pytest.mark.parametrize(("us", "unit"), [(40.0, "us"), (4e4, "ms"), (4e6, "s")])
def test_the_paired_plot_chooses_its_unit(us: float, unit: str) -> None:
    figure = paired_figure(d.comparison(us=us).to_dict())
    assert figure["layout"]["annotations"][0]["text"] == f"Time of a launch, {unit}, in each block"


def test_hover_texts_reach_plotly_escaped() -> None:
    found = d.comparison().to_dict()
    found["blocks"][0]["state"]["throttle"] = ["<img src=x>"]
    texts = paired_figure(found)["data"][1]["text"]
    assert "throttled: &lt;img src=x&gt;" in texts[0]
    figure = interval_figure(
        [{"label": "<b>", "verdict": "SAME", "ratio": 1.0, "low": 1.0, "high": 1.0, "text": "&"}],
        axis="ratio",
    )
    assert figure["data"][0]["text"] == ["&lt;b&gt;<br>&amp;"]


def test_intervals_are_grouped_by_verdict_with_a_symbol_each() -> None:
    rows = [
        {"label": v, "verdict": v, "ratio": r, "low": r - 0.01, "high": r + 0.02, "text": v}
        for v, r in (("FASTER", 1.1), ("SLOWER", 0.9), ("SAME", 1.0), ("FASTER", 1.2),
                     ("DISJOINT faster", 1.4), ("DISJOINT slower", 0.8), ("UNRESOLVED", 1.01),
                     ("VOID", 1.05), ("WRONG", 2.0))
    ]  # fmt: skip
    figure = interval_figure(rows, axis="ratio")
    symbols = {trace["name"]: trace["marker"]["symbol"] for trace in figure["data"]}
    assert len(set(symbols.values())) == len(symbols) == 8
    faster = figure["data"][0]
    assert (faster["x"], faster["y"]) == ([1.1, 1.2], [0, 3])
    assert faster["error_x"]["array"] == pytest.approx([0.02, 0.02])
    assert faster["error_x"]["arrayminus"] == pytest.approx([0.01, 0.01])
    low, high = figure["layout"]["xaxis"]["range"]
    assert low < 0.79
    assert high > 2.02
    assert [label for label, _ in figure["labels"]] == [row["label"] for row in rows]


def test_a_ladder_shows_each_test_against_the_base_and_crosses_what_is_wrong() -> None:
    result = d.ladder_result()
    figure = ladder_figure("blas", result.to_dict()["rungs"])
    traces = {trace["name"]: trace for trace in figure["data"]}
    assert list(traces) == ["pp512", "pp2048", "tg32 (control)"]
    for index, trace in enumerate(traces.values()):
        assert trace["x"][1:] == [rung.tests[index].base.ratio for rung in result.rungs]
        assert trace["x"][0] == 1.0
        assert [s == "x" for s in trace["marker"]["symbol"]] == [False, False, True, False, False]
        ratio, (low, high) = trace["x"][1], result.rungs[0].tests[index].base.interval
        assert ratio + trace["error_x"]["array"][1] == pytest.approx(high)
        assert ratio - trace["error_x"]["arrayminus"][1] == pytest.approx(low)
    said = dict(figure["labels"])
    assert said["blas"] == "the base"
    assert said[f"drop the tail {d.HOSTILE[0]}"].startswith("WRONG: product 3 is wrong")
    assert said["prefetch"].startswith("pp512 DISJOINT faster 1.2")


def test_the_heat_map_knows_every_candidate_and_why_it_was_rejected() -> None:
    report = d.tune_report()
    problem = report.problems[0]
    space = heat_map(problem.to_dict())
    assert space["label"] == "mlp.down_proj: mmq Q4_1 float32 M=512 N=576 K=1536"
    assert space["fields"]["panel"]["mr"] == [1, 2, 4, 6, 8, 12]
    assert space["first"] == "panel"
    assert len(space["tiles"]) == len(problem.candidates) == 50
    for tile, candidate in zip(space["tiles"], problem.candidates, strict=True):
        outcome = candidate.outcome
        kinds = {"": "timed", "oracle": "wrong", "guard-bands": "wrong", "timeout": "stopped",
                 "crash": "stopped"}  # fmt: skip
        assert tile["state"] == kinds[outcome.kind]
        assert tile["kind"] == outcome.kind
        if outcome.passed:
            in_use = candidate.tile == problem.incumbent
            assert (candidate.score is None) == in_use
            assert tile["relative"] == pytest.approx(1 / (candidate.score or 1.0))
            assert outcome.reason == ""
        else:
            assert tile["relative"] is None
            assert tile["lines"][-1] == outcome.reason
            assert outcome.case in tile["lines"][1]
    marks = {tile["mark"]: tile["fields"] for tile in space["tiles"] if tile["mark"]}
    assert marks["star"] == {"block_parts": 32, "mr": 8, "nv": 3, "threads": 0}
    assert marks["before"] == {"block_parts": 16, "mr": 8, "nv": 3, "threads": 0}


@pytest.mark.parametrize(
    ("candidate", "state"),
    [
        ({"status": "ok", "us": [1.0], "score": 1.0}, "timed"),
        ({"status": "ok", "us": []}, "untimed"),
        ({"status": "rejected", "kind": "oracle", "check": "oracle"}, "wrong"),
        ({"status": "rejected", "kind": "recheck", "us": [1.0]}, "wrong"),
        ({"status": "rejected", "kind": "crash"}, "stopped"),
        ({"status": "rejected"}, "stopped"),
    ],
    ids=["timed", "untimed", "check", "recheck", "crash", "unknown"],
)
def test_states_of_candidates(candidate: dict[str, Any], state: str) -> None:
    tile = {"algorithm": "dot", "unroll": 4}
    (made,) = heat_map({"candidates": [{"tile": tile, **candidate}]})["tiles"]
    assert made["state"] == state
    assert (made["relative"] is not None) == (state == "timed")


def test_the_tile_in_use_has_the_times_that_the_others_ran_beside() -> None:
    used, other = {"algorithm": "dot", "unroll": 4}, {"algorithm": "dot", "unroll": 8}
    problem = {
        "incumbent": used,
        "candidates": [
            {"tile": used, "status": "ok", "us": [], "incumbent_us": []},
            {"tile": other, "status": "ok", "us": [8.0, 9.0], "incumbent_us": [4.0, 6.0],
             "score": 0.5},
        ],
    }  # fmt: skip
    first, second = heat_map(problem)["tiles"]
    assert (first["state"], first["relative"], first["mark"]) == ("timed", 1.0, "before")
    assert first["lines"][1] == "median 5 us of 2 rounds"
    assert second["relative"] == 2.0


def test_field_values_of_mixed_types_are_ordered() -> None:
    values = [True, "wide", 8, 2, "narrow", 16]
    problem = {"candidates": [{"tile": {"algorithm": "t", "f": v}} for v in values]}
    assert heat_map(problem)["fields"]["t"]["f"] == [True, 2, 8, 16, "narrow", "wide"]


def judged(verdict: str, ratio: float = 1.02, **more: Any) -> dict[str, Any]:
    judgement = {"verdict": verdict, "ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
    return {"judgement": {**judgement, **more}, "blocks": [{}] * 20, "settings": {"delta": 0.01}}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (judged("FASTER"), "B is faster than A: 1.0200x [1.0100, 1.0300] in 20 blocks."),
        (judged("SLOWER", 0.98), "B is slower than A: 0.9800x [0.9700, 0.9900] in 20 blocks."),
        (judged("DISJOINT", 1.5), "B is faster than A: 1.5000x [1.4900, 1.5100]. Their times do "
         "not overlap in 20 blocks."),
        (judged("DISJOINT", 0.5), "B is slower than A: 0.5000x [0.4900, 0.5100]. Their times do "
         "not overlap in 20 blocks."),
        (judged("SAME", 1.001), "No difference of more than 1.0 %: 1.0010x [0.9910, 1.0110] in 20 "
         "blocks."),
        (judged("UNRESOLVED", reasons=["about 44 blocks would resolve it"]),
         "Not decided in 20 blocks: 1.0200x [1.0100, 1.0300]; about 44 blocks would resolve it."),
        (judged("VOID", reasons=["throttled", "the control differs"]),
         "Proves nothing: throttled; the control differs."),
        ({"verdict": "WRONG", "comparison": judged("FASTER")},
         "WRONG: its result is not right, so its time counts for nothing."),
        ({"verdict": "SAME", "comparison": None, "note": "both run dot()."},
         "Both arms are the same code, so nothing was timed. both run dot()."),
        ({"judgement": {}}, "No verdict: no figure."),
    ],
    ids=["faster", "slower", "disjoint", "disjoint-slower", "same", "unresolved", "void", "wrong",
         "not-timed", "nothing"],
)  # fmt: skip
def test_verdicts_in_words(row: dict[str, Any], words: str) -> None:
    assert comparison_words(row) == words


def test_disjoint_says_which_way() -> None:
    assert verdict_of(judged("DISJOINT", 0.9)) == "DISJOINT slower"
    assert verdict_of(judged("DISJOINT", 1.1)) == "DISJOINT faster"
    assert verdict_of(judged("FASTER", 1.1)) == "FASTER"


def test_the_summary_of_tuning_says_what_was_tuned_won_and_rejected() -> None:
    report = d.tune_report()
    lines = dict(summary(tidy({"tune": report.to_dict()})))
    assert lines["Tuned"] == (
        "2 products on cpu-avx512_vnni (2 cores or units): 54 tiles tried in 58 s by local search. "
        "The budget ended before 1 more product."
    )
    ratio = report.problems[0].ratio
    assert lines["Won"] == (
        f"A new tile on 1 product (1 DISJOINT faster, {ratio:.3f}x against the tile in use); the "
        "tile in use stays on 1 product (1 SAME)."
    )
    assert lines["Rejected"] == (
        "9 of 54 tiles: 4 by the check oracle, 2 by the check guard-bands, 2 because it did not "
        "finish in time, 1 because its process died. None of them can win. Of 3 tiles that are "
        "wrong on purpose, 3 are rejected."
    )


def test_a_gate_that_lets_a_planted_tile_through_is_shouted() -> None:
    report = d.tune_report().to_dict()
    report["planted"][0]["status"] = "ok"
    lines = dict(summary({"tune": report}))
    assert lines["Rejected"].endswith("2 are rejected: THE GATE LET A WRONG TILE THROUGH.")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("failed", "NO tile passed the gate on 1 product."),
        ("repaired", "A tile in use that was WRONG is replaced on 1 product."),
        ("kept", "The tile in use stays on 1 product (1 no rival)."),
        ("skipped", "Nothing was finished."),
    ],
)
def test_what_won_by_status(status: str, words: str) -> None:
    assert dict(summary({"tune": {"problems": [{"status": status}]}}))["Won"] == words


def test_the_summary_of_comparisons_counts_verdicts() -> None:
    lines = dict(summary(sections_of("compare", d.compare_result())))
    assert lines["Verdict"].endswith(
        "DISJOINT faster in 1, DISJOINT slower in 1, VOID in 1, SAME in 1 of 4 comparisons."
    )
    assert lines["Same answers"] == (
        "Greedy ids are identical on 3 of 4 prompts (32 new ids each), the mean KL divergence of "
        "the logits is 2.1e-09 nats, the top-1 choice agrees at 99.5 % of positions."
    )


def test_the_summary_of_one_comparison_is_its_verdict() -> None:
    found = d.comparison(0.05, seed=4)
    (line,) = summary({"comparisons": [found.to_dict()]})
    assert line == ("Verdict", comparison_words(found.to_dict()))


def test_titles_of_arms_lose_their_markdown() -> None:
    arms = {"a": {"title": "`sleep 1`"}, "b": {"title": "`sleep 2`"}}
    (line,) = summary({"arms": arms, "comparisons": [judged("SLOWER", 0.5)]})
    assert line[1].startswith("B (sleep 2) against A (sleep 1): B is slower than A: 0.5000x")


def test_the_summary_of_a_ladder_names_the_wrong_rungs() -> None:
    result = d.ladder_result()
    lines = dict(summary(sections_of("ladder", result.to_dict())))
    top = result.rungs[-1].tests[1].base
    assert "4 rungs; against the rung below: 4 DISJOINT faster, 2 SAME." in lines["Ladder"]
    assert f"on pp2048: DISJOINT faster {top.ratio:.4f}x" in lines["Ladder"]
    assert lines["Ladder"].endswith(f"WRONG, whatever their time: drop the tail {d.HOSTILE[0]}.")


def test_agreement_that_is_not_finite_or_at_fault_is_said() -> None:
    text = agreement_words({**d.AGREEMENT, "mean_kl": None, "faults": ["prompt 2: no tie"]})
    assert "the mean KL divergence is not finite" in text
    assert text.endswith("FAULT: prompt 2: no tie.")


@pytest.mark.parametrize(
    ("verification", "words"),
    [
        (d.VERIFICATION, "11 of 12 cases agree with the oracle, 1 FAILED. Of the corruptions made "
         "on purpose, 1 of 1 were noticed."),
        ({"passed": 5, "total": 5}, "5 of 5 cases agree with the oracle."),
        ({"groups": [{"passed": 1, "total": 1}], "complete": False},
         "1 of 1 case agree with the oracle. The run was interrupted: the rest did not run."),
    ],
    ids=["failed", "counts", "interrupted"],
)  # fmt: skip
def test_verification_in_words(verification: dict[str, Any], words: str) -> None:
    assert verification_words(verification) == words


def test_small_words() -> None:
    assert interval_text(None, None, None) == ""
    assert interval_text(1.5, None, None) == "1.5000x"
    assert rejected_words({}) == ""
    assert rejected_words({"crash": 1, "oracle": 3}) == (
        "3 by the check oracle, 1 because its process died"
    )
    assert tile_text(None) == ""
    assert tile_text({"algorithm": "dot", "unroll": 4}) == "dot(unroll=4)"
