"""What a page shows of paired comparisons: verdicts, intervals, every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tilewright.report.compare import speed_text
from tilewright.report.page.blocks import Block, chart, col, facts, table
from tilewright.report.page.charts import interval_figure, paired_figure
from tilewright.report.page.tables import block_table, machine_table
from tilewright.report.page.words import (
    comparison_of,
    comparison_words,
    interval_text,
    unquoted,
    verdict_of,
)

__all__ = ["FASTER", "comparison_blocks", "interval_row", "machine_blocks"]

Row = Mapping[str, Any]
FASTER = "time A / time B: above 1, B takes less time"


def comparison_blocks(rows: Sequence[Row], arms: Row) -> list[Block]:
    """Arms, verdicts, the intervals of all, and the blocks of each.

    Args:
        rows: entries of the section `comparisons`.
        arms: the section `arms`.
    """
    if not rows:
        return []
    labels = [label_of(row, i) for i, row in enumerate(rows)]
    timed = [(label, row) for label, row in zip(labels, rows, strict=True) if comparison_of(row)]
    blocks: list[Block] = [_arms(arms)] if arms else []
    blocks.append(_verdicts(labels, rows))
    if len(timed) > 1:
        intervals = [interval_row(label, row) for label, row in timed]
        said = "; ".join(f"{i['label']}: {i['text']}" for i in intervals)
        blocks.append(
            chart(
                "Every comparison: the ratio of the times with its interval",
                "An interval that crosses the line at 1 decides nothing by itself. Verdicts of one "
                "run are adjusted over all of its comparisons (Holm).",
                f"Ratios with intervals. {said}.",
                {"figures": [interval_figure(intervals, axis=FASTER)]},
            )
        )
    if timed:
        said = " ".join(f"{label}: {comparison_words(row)}" for label, row in timed)
        blocks.append(
            chart(
                "A, B and A again in every block",
                "A and A' are the same code: where they differ, it is the machine. The band is the "
                "interval of the ratio, the dashed line its median; between the dotted lines the "
                "arms count as the same.",
                f"Times of A, A' and B by block. {said}",
                {
                    "figures": [paired_figure(comparison_of(row)) for _, row in timed],
                    "said": [comparison_words(row) for _, row in timed],
                },
                options=[f"{label}: {verdict_of(row)}" for label, row in timed],
            )
        )
    return blocks + [block_table(label, comparison_of(row)) for label, row in timed]


def interval_row(label: str, row: Row) -> dict[str, Any]:
    """A comparison as a row of `interval_figure`."""
    judgement = comparison_of(row).get("judgement") or {}
    figures = {name: judgement.get(name) for name in ("ratio", "low", "high")}
    verdict = verdict_of(row)
    said = f"{verdict} {interval_text(**figures)}"
    return {"label": label, "verdict": verdict, "text": said, **figures}


def machine_blocks(rows: Sequence[Row], more: Mapping[str, Sequence[Row]]) -> list[Block]:
    """The machine's state in every block of every comparison, and of other series of blocks."""
    watched = {
        label_of(row, i): comparison_of(row).get("blocks") or () for i, row in enumerate(rows)
    }
    watched |= more
    tables = (machine_table(label, blocks) for label, blocks in watched.items())
    return [block for block in tables if block is not None]


def label_of(row: Row, index: int) -> str:
    """What a comparison is called: its label, or its arms; and its cache."""
    comparison = comparison_of(row)
    label = str(row.get("label") or "")
    if not label and comparison:
        label = f"{comparison.get('b')} against {comparison.get('a')}"
    cache = _cache(row)
    return f"{label or f'comparison {index + 1}'}{f' ({cache})' if cache else ''}"


def _cache(row: Row) -> str:
    return str(row.get("cache") or (comparison_of(row).get("settings") or {}).get("cache") or "")


def _verdicts(labels: Sequence[str], rows: Sequence[Row]) -> Block:
    cells = []
    for label, row in zip(labels, rows, strict=True):
        comparison = comparison_of(row)
        judgement = comparison.get("judgement") or {}
        control = [judgement.get(n) for n in ("control", "control_low", "control_high")]
        p = judgement.get("p_adjusted", judgement.get("p"))
        cells.append(
            [
                label,
                verdict_of(row),
                interval_text(*(judgement.get(name) for name in ("ratio", "low", "high"))),
                comparison_words(row),
                _speed(comparison, "a", row),
                _speed(comparison, "b", row),
                interval_text(*control),
                "" if p is None else f"{p:.2g}",
                len(comparison.get("blocks") or ()) or "",
                row.get("note") or "",
            ]
        )
    return table(
        "Verdicts on B against A. The ratio is time A over time B, with its bootstrap interval.",
        [
            col("comparison", "label"),
            col("verdict", "verdict"),
            col("ratio", "number"),
            col("in words", "wide"),
            col("A", "number"),
            col("B", "number"),
            col("A against A", "number"),
            col("p (Holm)", "number"),
            col("blocks", "number"),
            col("note", "wide"),
        ],
        cells,
    )


def _speed(comparison: Row, arm: str, row: Row) -> str:
    name = str(comparison.get(arm))
    us = [b["us"][name] for b in comparison.get("blocks") or () if name in (b.get("us") or {})]
    return speed_text(median(us), row.get("tokens") or 0) if us else ""


def _arms(arms: Row) -> Block:
    rows = []
    for name, arm in arms.items():
        said = (arm.get("title"), arm.get("verified")) if isinstance(arm, Mapping) else (arm,)
        rows.append((str(name).upper(), unquoted("; ".join(str(v) for v in said if v))))
    return facts(rows)
