"""What a page shows of a ladder: its rungs, what each is worth, what is WRONG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.report.compare import speed_text
from tilewright.report.page.blocks import Block, chart, col, table, text
from tilewright.report.page.charts import interval_figure, ladder_figure
from tilewright.report.page.compare import interval_row
from tilewright.report.page.tables import agreement_cells
from tilewright.report.page.words import comparison_words, interval_text, verdict_of

__all__ = ["ladder_blocks", "rung_rows"]

Row = Mapping[str, Any]


def ladder_blocks(ladder: Row) -> list[Block]:
    """The rungs as a table and a chart; each change set left out of the finished stack."""
    rungs = ladder.get("rungs") or []
    if not rungs:
        return []
    base = str((ladder.get("base") or {}).get("name") or "base")
    blocks: list[Block] = []
    if ladder.get("verified"):
        blocks.append(text(f"Base: {base}. {ladder['verified']}"))
    blocks.append(_rungs(base, rungs))
    if any(rung.get("tests") for rung in rungs):
        said = "; ".join(_said(rung) for rung in rungs)
        blocks.append(
            chart(
                f"Every rung against the base, {base}",
                "Change sets add up from top to bottom. A WRONG rung is marked by a cross at the "
                "gain it would have been believed for; it is no gain, and the next rung does not "
                "stand on it. Tests of the control must stay at 1.",
                f"Ratios to the base. {said}.",
                {"figures": [ladder_figure(base, rungs)]},
            )
        )
    return blocks + _left_out(ladder.get("left_out") or [])


def rung_rows(ladder: Row) -> list[dict[str, Any]]:
    """Every rung against the rung below it, as entries of the section `comparisons`."""
    rows = []
    for rung in ladder.get("rungs") or ():
        for test in rung.get("tests") or ():
            if test.get("below"):
                wrong = rung.get("status") == "WRONG"
                rows.append(
                    {
                        "label": f"{rung.get('name')}, {test.get('test')}",
                        "cache": "",
                        "verdict": "WRONG" if wrong else "",
                        "tokens": test.get("tokens") or 0,
                        "note": f"A is the rung below, {rung.get('below')}."
                        + (" Control: it must not move." if test.get("control") else ""),
                        "comparison": test["below"],
                    }
                )
    return rows


def _rungs(base: str, rungs: Sequence[Row]) -> Block:
    rows = []
    for rung in rungs:
        wrong = rung.get("status") == "WRONG"
        tests: Sequence[Row] = rung.get("tests") or [{}]
        for index, test in enumerate(tests):
            below, of_base = test.get("below") or {}, test.get("base") or {}
            rows.append(
                [
                    rung.get("name"),
                    f"{test.get('test', '')}{' (control)' if test.get('control') else ''}",
                    "WRONG" if wrong else verdict_of({"comparison": below}) or "not timed",
                    _ratio(below),
                    "WRONG" if wrong else verdict_of({"comparison": of_base}),
                    _ratio(of_base),
                    _speed(test, "us") + (" if it were right" if wrong and test else ""),
                    _speed(test, "base_us"),
                    _right(rung) if index == 0 else "",
                    agreement_cells(rung.get("agreement") or {}) if index == 0 else "",
                ]
            )
    return table(
        f"Rungs from the base, {base}, upwards. A ratio above 1 is a gain.",
        [
            col("rung", "label"),
            col("test"),
            col("verdict against below", "verdict"),
            col("ratio to below", "number"),
            col("verdict against base", "verdict"),
            col("ratio to base", "number"),
            col("rung", "number"),
            col("base", "number"),
            col("right?", "wide"),
            col("agreement with the base", "wide"),
        ],
        rows,
    )


def _left_out(left_out: Sequence[Row]) -> list[Block]:
    if not left_out:
        return []
    rows, intervals = [], []
    for left in left_out:
        for test, comparison in (left.get("comparisons") or {"": {}}).items():
            row = {"comparison": comparison}
            words = comparison_words(row) if comparison else str(left.get("reason") or "")
            rows.append([left.get("name"), test, verdict_of(row), _ratio(comparison), words])
            if comparison:
                intervals.append(interval_row(f"{left.get('name')}, {test}", row))
    columns = [col("change set", "label"), col("test"), col("verdict", "verdict")]
    columns += [col("worth", "number"), col("in words", "wide")]
    caption = "Leave-one-out: the whole stack (B) against the stack without one change set (A)."
    blocks = [table(caption, columns, rows)]
    if intervals:
        said = "; ".join(f"{i['label']}: {i['text']}" for i in intervals)
        blocks.append(
            chart(
                "What each change set is worth when all the others are there",
                "The ratio of the time without it to the time with it.",
                f"Ratios. {said}.",
                {"figures": [interval_figure(intervals, axis="above 1, the change set is a gain")]},
            )
        )
    return blocks


def _said(rung: Row) -> str:
    if rung.get("status") == "WRONG":
        return f"{rung.get('name')}: WRONG"
    tests = [
        f"{t.get('test')} {verdict_of({'comparison': t.get('base')})} {_ratio(t.get('base') or {})}"
        for t in rung.get("tests") or ()
    ]
    return f"{rung.get('name')}: {', '.join(tests) or 'not timed'}"


def _right(rung: Row) -> str:
    if rung.get("status") == "WRONG":
        return "WRONG: " + "; ".join(str(fault) for fault in rung.get("faults") or ("no reason",))
    said = str(rung.get("verified") or rung.get("status") or "")
    moved = rung.get("moved") or []
    return said + (f". THE CONTROL MOVED: {', '.join(map(str, moved))}" if moved else "")


def _ratio(comparison: Row) -> str:
    judgement = comparison.get("judgement") or {}
    return interval_text(*(judgement.get(name) for name in ("ratio", "low", "high")))


def _speed(test: Row, name: str) -> str:
    us = test.get(name)
    return "" if us is None else speed_text(us, test.get("tokens") or 0)
