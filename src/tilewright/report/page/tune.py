"""What a page shows of a tuning run: its products, its tile spaces, what the gate rejected."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from tilewright.report.compare import time_text
from tilewright.report.page.blocks import Block, chart, col, table, text
from tilewright.report.page.heat import candidates_of, heat_map, problem_label, relative_time
from tilewright.report.page.words import (
    count,
    percent,
    problem_verdict,
    rejected_words,
    tile_text,
)

__all__ = ["final_rows", "tune_blocks"]

Row = Mapping[str, Any]
_CAPTION = (
    "Color: time of the fastest tile in a field over that of the tile in use, in the same rounds; "
    "below 1 it took less. These times only rank the candidates: the verdict stands in the table. "
    "A field with a mark and no color: every tile in it was rejected, and none has a time. An "
    "empty field was not tried."
)


def tune_blocks(tune: Row) -> list[Block]:
    """Products with their verdicts, the heat map, every candidate, the planted tiles."""
    problems = tune.get("problems") or []
    blocks: list[Block] = []
    if problems:
        blocks.append(_products(problems))
    spaces = [heat_map(problem) for problem in problems if problem.get("candidates")]
    if spaces:
        said = " ".join(_said(problem) for problem in problems if problem.get("candidates"))
        blocks.append(
            chart(
                "Which tiles passed the gate, and how they rank",
                _CAPTION,
                f"{said} The tables below hold every tile with its reason.",
                {"spaces": spaces},
            )
        )
    blocks += [_candidates(problem) for problem in problems if problem.get("candidates")]
    blocks += _planted(tune) + _dropped(tune) + _machine(tune)
    return blocks


def final_rows(tune: Row) -> list[dict[str, Any]]:
    """The finals of tuning as rows of comparisons: the last one of each finalist."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for index, problem in enumerate(tune.get("problems") or ()):
        for comparison in problem.get("comparisons") or ():
            found[index, str(comparison.get("b"))] = {
                "label": f"{problem_label(problem)}: {comparison.get('b')}",
                "cache": problem.get("cache", ""),
                "note": f"A is the tile in use, {comparison.get('a')}.",
                "comparison": comparison,
            }
    return list(found.values())


def _products(problems: list[Row]) -> Block:
    rows = []
    for problem in problems:
        tried, size = problem.get("tried"), problem.get("space_size")
        rejected = problem.get("rejected") or {}
        ratio = problem.get("ratio")
        rows.append(
            [
                problem_label(problem),
                problem_verdict(problem) or "no verdict",
                f"{ratio:.4f}x" if ratio and problem.get("status") == "improved" else "",
                problem.get("status"),
                percent(problem.get("share")) if problem.get("share") else "",
                tile_text(problem.get("winner")),
                f"{tile_text(problem.get('incumbent'))} {problem.get('how') or ''}".strip(),
                f"{tried} of {size}" if size else tried,
                rejected_words(rejected) or "none",
                problem.get("reason") or "",
            ]
        )
    return table(
        "Products in the order of their share of the time. The verdict is on the best new tile "
        "against the tile in use, from fresh paired blocks; its interval stands below.",
        [
            col("product", "label"),
            col("verdict", "verdict"),
            col("ratio", "number"),
            col("outcome"),
            col("share", "number"),
            col("tile from now on", "code"),
            col("tile before", "code"),
            col("tried", "number"),
            col("rejected", "wide"),
            col("why", "wide"),
        ],
        rows,
    )


def _candidates(problem: Row) -> Block:
    rows = []
    for candidate in candidates_of(problem):
        us = candidate.get("us") or []
        relative = relative_time(candidate)
        error = candidate.get("oracle_error")
        rejected = candidate.get("status") == "rejected"
        rows.append(
            [
                str(candidate.get("text") or tile_text(candidate.get("tile"))),
                "REJECTED" if rejected else "passed",
                str(candidate.get("check") or candidate.get("kind") or ""),
                str(candidate.get("reason") or ""),
                str(candidate.get("case") or ""),
                time_text(median(us)) if us and not rejected else "",
                f"{relative:.3f}" if relative else "",
                "" if error is None else f"{error:.3g}",
            ]
        )
    return table(
        f"Every tile tried on {problem_label(problem)}",
        [
            col("tile", "code"),
            col("gate", "verdict"),
            col("by"),
            col("reason", "wide"),
            col("case"),
            col("median in the rounds", "number"),
            col("over the tile in use", "number"),
            col("oracle error", "number"),
        ],
        rows,
        fold=True,
    )


def _said(problem: Row) -> str:
    candidates = candidates_of(problem)
    rejected = problem.get("rejected") or {}
    number = sum(rejected.values())
    scored = [c for c in candidates if relative_time(c)]
    text = f"{problem_label(problem)}: {count(len(candidates), 'tile')} tried, {number} rejected"
    text += f" ({rejected_words(rejected)})" if rejected else ""
    if scored:
        best = min(scored, key=lambda c: relative_time(c) or 0.0)
        text += f"; the fastest in the rounds was {best.get('text') or tile_text(best.get('tile'))}"
    return text + "."


def _planted(tune: Row) -> list[Block]:
    planted = tune.get("planted") or []
    if not planted:
        return []
    return [
        table(
            "Tiles that are wrong on purpose: the gate must reject every one",
            [
                col("op"),
                col("tile", "code"),
                col("gate", "verdict"),
                col("by"),
                col("fault", "wide"),
                col("reason", "wide"),
            ],
            [
                [
                    p.get("op"),
                    str(p.get("text") or tile_text(p.get("tile"))),
                    "REJECTED" if p.get("status") == "rejected" else "LET THROUGH",
                    p.get("check") or p.get("kind"),
                    p.get("fault"),
                    p.get("reason"),
                ]
                for p in planted
            ],
        )
    ]


def _dropped(tune: Row) -> list[Block]:
    blocks: list[Block] = []
    refreshed, dropped = tune.get("refreshed") or 0, tune.get("dropped") or []
    if refreshed:
        blocks.append(text(f"{count(refreshed, 'stale row')} of the table passed the gate again."))
    if dropped:
        rows = [[d.get("problem"), d.get("tile"), d.get("reason")] for d in dropped]
        columns = [col("product", "label"), col("tile", "code"), col("reason", "wide")]
        blocks.append(table("Stale rows that failed and were dropped", columns, rows))
    return blocks


def _machine(tune: Row) -> list[Block]:
    machine = tune.get("machine") or {}
    states = {name: state for name, state in machine.items() if isinstance(state, Mapping)}
    if not states:
        return []
    names = list(dict.fromkeys(key for state in states.values() for key in state))
    rows = [[when, *(_plain(state.get(key)) for key in names)] for when, state in states.items()]
    columns = [col("when"), *(col(key.replace("_", " ")) for key in names)]
    return [table("The machine at the beginning and the end of tuning", columns, rows, fold=True)]


def _plain(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
