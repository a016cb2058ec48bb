"""A ladder as people read it: terminal tables, Markdown for a pull request, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tilewright.measure import Comparison
from tilewright.report.compare import machine_line, markdown, origin_line, ratio_text, speed_text
from tilewright.report.render import to_terminal
from tilewright.report.table import Column, Table
from tilewright.tune.ladder_result import LadderResult, RungResult

__all__ = ["ladder_report", "ladder_tables"]


def _short(comparison: Comparison) -> str:
    return f"{comparison.ratio:.3f}x {comparison.verdict}"


def _correct(rung: RungResult) -> str:
    if not rung.right:
        return "WRONG"
    agreement = rung.agreement
    if agreement is None:
        return rung.verified or "right"
    return (
        f"right; ids {agreement['identical']}/{agreement['prompts']}, top-1 {agreement['top1']:.1%}"
    )


def _build_table(result: LadderResult) -> Table:
    """build | a column a test | against the rung below | against the base | correct."""
    first = result.rungs[0]
    tests = [t.test for t in first.tests]
    control = {t.test for t in first.tests if t.control}
    columns = [
        Column("build", "build"),
        *(Column(t, f"{t} (control)" if t in control else t, right=True) for t in tests),
        Column("below", "vs below", right=True),
        Column("base", "vs base", right=True),
        Column("correct", "correct"),
    ]
    rows: list[dict[str, Any]] = [
        {
            "build": result.base.name,
            **{t.test: speed_text(t.base_us, t.tokens) for t in first.tests},
            "below": "",
            "base": "1",
            "correct": f"base; {result.verified}",
        }
    ]
    for rung in result.rungs:
        found = {t.test: t for t in rung.tests}
        row = {t: speed_text(found[t].us, found[t].tokens) if t in found else "" for t in tests}
        main = rung.tests[0] if rung.tests else None
        mark = "" if rung.right else "apparent "
        rows.append(
            {
                "build": f"+ {rung.name}",
                **row,
                "below": "" if main is None else mark + _short(main.below),
                "base": "" if main is None else mark + _short(main.base),
                "correct": _correct(rung),
            }
        )
    return Table(f"{result.title}: {result.subject}", columns, rows)


def _detail_table(result: LadderResult) -> Table:
    columns = [
        Column("rung", "rung"),
        Column("test", "test"),
        Column("below", "vs below", right=True),
        Column("below_verdict", ""),
        Column("base", "vs base", right=True),
        Column("base_verdict", ""),
        Column("control", "base vs base", right=True),
        Column("blocks", "blocks", right=True),
    ]
    rows = [
        {
            "rung": rung.name,
            "test": f"{t.test} (control)" if t.control else t.test,
            "below": ratio_text(t.below),
            "below_verdict": str(t.below.verdict),
            "base": ratio_text(t.base),
            "base_verdict": str(t.base.verdict),
            "control": f"{t.base.judgement.control:.4f}x",
            "blocks": len(t.base.blocks),
        }
        for rung in result.rungs
        for t in rung.tests
    ]
    return Table("Every comparison", columns, rows)


def _left_out_table(result: LadderResult) -> Table:
    columns = [
        Column("name", "left out"),
        Column("test", "test"),
        Column("worth", "whole stack vs without it", right=True),
        Column("verdict", "verdict"),
    ]
    rows = []
    for left in result.left_out:
        for test, comparison in left.comparisons.items():
            rows.append(
                {
                    "name": left.name,
                    "test": test,
                    "worth": ratio_text(comparison),
                    "verdict": str(comparison.verdict),
                }
            )
        if left.reason:
            rows.append({"name": left.name, "test": "", "worth": "", "verdict": left.reason})
    return Table("Leave one out", columns, rows)


def _notes(result: LadderResult, provenance: Mapping[str, Any]) -> list[str]:
    notes = []
    for rung in result.rungs:
        if not rung.right:
            notes.append(
                f"{rung.name} is WRONG and was not carried forward; its gain is what it would "
                f"have been believed for: {'; '.join(rung.faults)}"
            )
        notes += [
            f"{rung.name}: the control {t.test} moved and must not have: {_short(t.below)}"
            for t in rung.moved
        ]
        for t in rung.tests:
            notes += [f"{rung.name}, {t.test}: {text}" for text in t.below.judgement.reasons]
        notes += rung.details.get("fallbacks", ())
    notes += result.notes
    if result.interrupted:
        notes.append("Interrupted: what was finished by then is shown.")
    blocks = [b for rung in result.rungs for t in rung.tests for b in t.base.blocks]
    notes.append(machine_line(blocks))
    notes.append(
        "Each rung has all change sets above it but the WRONG ones. Speeds are medians of a rung's "
        "own blocks (the base's: of the first rung's); ratios are paired within blocks, and above "
        "1 is faster. Verdicts are adjusted over all rungs (Holm)."
    )
    notes.append(origin_line(provenance))
    return [note for note in notes if note]


def ladder_tables(result: LadderResult, provenance: Mapping[str, Any]) -> list[Table]:
    """The table of builds, that of all comparisons, and that of leave-one-out; notes with the
    last."""
    tables = []
    if result.rungs:
        tables = [_build_table(result), _detail_table(result)]
    if result.left_out:
        tables.append(_left_out_table(result))
    if not tables:
        tables = [Table(f"{result.title}: nothing was timed", [], [])]
    last = tables[-1]
    tables[-1] = Table(last.title, last.columns, last.rows, _notes(result, provenance))
    return tables


def ladder_report(
    result: LadderResult,
    form: str,
    *,
    provenance: Mapping[str, Any],
    width: int | None = None,
    color: bool = False,
) -> str:
    """The result as "terminal", "md" or "json"; JSON holds every block."""
    if form == "json":
        whole = {"provenance": dict(provenance), "ladder": result.to_dict()}
        return json.dumps(whole, indent=1, allow_nan=False) + "\n"
    tables = ladder_tables(result, provenance)
    if form == "terminal":
        return "\n".join(to_terminal(table, width=width, color=color) for table in tables)
    return "\n".join(markdown(table) for table in tables)
