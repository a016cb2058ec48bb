"""A comparison as people read it: terminal table, Markdown for a pull request, JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright.measure import Block, Comparison
from tilewright.report.render import to_markdown, to_terminal
from tilewright.report.table import Column, Table
from tilewright.tune.arms import CompareResult, CompareRow

__all__ = [
    "compare_report",
    "compare_table",
    "machine_line",
    "origin_line",
    "ratio_text",
    "speed_text",
    "time_text",
]

LEGEND = (
    "Ratio: median over blocks of time A / time B with its bootstrap interval; above 1, B is "
    "faster. Verdicts are adjusted over all rows (Holm)."
)


def time_text(us: float) -> str:
    """Microseconds as people read them: 812.5 -> "812.5 us", 188064.8 -> "188.1 ms"."""
    for limit, unit, factor in ((1e3, "us", 1.0), (1e6, "ms", 1e3)):
        if us < limit:
            return f"{us / factor:.4g} {unit}"
    return f"{us / 1e6:.4g} s"


def speed_text(us: float, tokens: int) -> str:
    """A launch's time, or its tokens a second where it has tokens."""
    return f"{tokens / us * 1e6:.1f} t/s" if tokens else time_text(us)


def ratio_text(comparison: Comparison) -> str:
    """The ratio with its interval."""
    low, high = comparison.interval
    return f"{comparison.ratio:.4f}x [{low:.4f}, {high:.4f}]"


def machine_line(blocks: Sequence[Block]) -> str:
    """What the machine did beside the measurement, over all blocks; "" when it was not watched."""
    states = [block.state for block in blocks if block.state is not None]
    if not states:
        return ""
    parts = []
    others = [s.others for s in states if s.others is not None]
    steal = [s.steal for s in states if s.steal is not None]
    if others:
        parts.append(
            f"other processes used {statistics.median(others):.0%} of the CPUs "
            f"(most in a block: {max(others):.0%})"
        )
    if steal and max(steal) >= 0.005:
        parts.append(f"the hypervisor took up to {max(steal):.1%}")
    parts += _range([s.load_1m for s in states], "load", "")
    parts += _range([s.frequency_mhz for s in states], "clock", " MHz")
    gpus = [s.gpu for s in states if s.gpu is not None]
    parts += _range([g.sm_mhz for g in gpus], "GPU clock", " MHz")
    parts += _range([g.temperature_c for g in gpus], "GPU temperature", " C")
    parts += _range([g.power_w for g in gpus], "GPU power", " W")
    throttle = sorted({reason for s in states for reason in s.throttle})
    parts.append(f"throttled: {', '.join(throttle)}" if throttle else "no throttling seen")
    return f"Machine: {', '.join(parts)}."


def _range(values: Iterable[float | None], name: str, unit: str) -> list[str]:
    known = [v for v in values if v is not None]
    if not known:
        return []
    low, high = f"{min(known):.4g}", f"{max(known):.4g}"
    return [f"{name} {low}{unit}" if low == high else f"{name} {low} - {high}{unit}"]


def origin_line(provenance: Mapping[str, Any]) -> str:
    """Command, device, versions and date in one line."""
    versions = provenance.get("versions", {})
    packages = ", ".join(f"{k} {versions[k]}" for k in ("torch", "numba") if k in versions)
    threads = provenance.get("threads")
    return (
        f"`{provenance['command']}` on {provenance['device']} ({provenance['arch']}, "
        f"{provenance['units']} cores{f', {threads} threads' if threads else ''}), "
        f"tilewright {provenance['tilewright']}, {packages}, {provenance['date']}."
    )


def _figure(name: str) -> Any:
    def show(row: Mapping[str, Any]) -> str:
        us = row[f"{name}_us"]
        return "" if us is None else speed_text(us, row["tokens"])

    return show


def _ratio(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return ""
    return f"{row['ratio']:.4f}x [{row['low']:.4f}, {row['high']:.4f}]"


def _control(row: Mapping[str, Any]) -> str:
    return "" if row["control"] is None else f"{row['control']:.4f}x"


def _p(row: Mapping[str, Any]) -> str:
    return "" if row["p"] is None else f"{row['p']:.2g}"


_COLUMNS = (
    Column("label", "what"),
    Column("cache", "cache"),
    Column("a_us", "A", right=True, show=_figure("a")),
    Column("b_us", "B", right=True, show=_figure("b")),
    Column("ratio", "B against A", right=True, show=_ratio),
    Column("verdict", "verdict"),
    Column("p", "p", right=True, show=_p),
    Column("control", "A against A", right=True, show=_control),
    Column("blocks", "blocks", right=True),
)


def _row(row: CompareRow) -> dict[str, Any]:
    found: dict[str, Any] = {
        "label": row.label, "cache": row.cache, "tokens": row.tokens, "verdict": row.verdict,
        "a_us": None, "b_us": None, "ratio": None, "low": None, "high": None, "p": None,
        "control": None, "blocks": 0,
    }  # fmt: skip
    comparison = row.comparison
    if comparison is not None:
        judgement = comparison.judgement
        found |= {
            "a_us": float(statistics.median(comparison.samples_us(comparison.a))),
            "b_us": float(statistics.median(comparison.samples_us(comparison.b))),
            "ratio": judgement.ratio,
            "low": judgement.low,
            "high": judgement.high,
            "p": judgement.p_adjusted,
            "control": judgement.control,
            "blocks": len(comparison.blocks),
        }
    return found


def compare_table(result: CompareResult, provenance: Mapping[str, Any]) -> Table:
    """One row a contest; the notes say what the arms are and what was checked."""
    notes = []
    for arm in (result.a, result.b):
        verified = f"; {arm.verified}" if arm.verified else ""
        notes.append(f"{arm.name}: {arm.title}{verified}")
    if result.agreement is not None:
        notes.append(_agreement(result.agreement))
    notes += [f"FAULT: {fault}" for fault in result.faults]
    for row in result.rows:
        reasons = () if row.comparison is None else row.comparison.judgement.reasons
        notes += [f"{row.label} ({row.cache}): {text}" for text in (*reasons, row.note) if text]
    notes += result.notes
    if result.interrupted:
        notes.append("Interrupted: the blocks finished by then are what is shown.")
    blocks = [b for row in result.rows if row.comparison for b in row.comparison.blocks]
    notes += [line for line in (machine_line(blocks), LEGEND, origin_line(provenance)) if line]
    return Table(
        f"{result.subject}: B against A",
        _COLUMNS,
        [_row(row) for row in result.rows],
        notes=notes,
        provenance=provenance,
        key="rows",
    )


def _agreement(agreement: Mapping[str, Any]) -> str:
    kl = agreement["mean_kl"]
    text = (
        f"Agreement of B with A: greedy ids identical on {agreement['identical']} of "
        f"{agreement['prompts']} prompts ({agreement['tokens']} new ids each), mean KL divergence "
        f"{'not finite' if kl is None else f'{kl:.2g} nats'}, top-1 {agreement['top1']:.1%} of "
        f"{agreement['positions']} positions"
    )
    parts = [
        f"prompt {d['prompt']} parts after {d['position']} ids, {d['gap']:.2g} deviations apart"
        for d in agreement["divergences"]
    ]
    return "; ".join([text, *parts])


def compare_report(
    result: CompareResult,
    form: str,
    *,
    provenance: Mapping[str, Any],
    width: int | None = None,
    color: bool = False,
) -> str:
    """The result as "terminal", "md" or "json"; JSON holds every block."""
    if form == "json":
        whole = {"provenance": dict(provenance), "compare": result.to_dict()}
        return json.dumps(whole, indent=1, allow_nan=False) + "\n"
    table = compare_table(result, provenance)
    if form == "terminal":
        return to_terminal(table, width=width, color=color)
    return markdown(table)


def markdown(table: Table) -> str:
    """A Markdown section: a heading, the table, and its notes as a list that stays a list."""
    heading = f"### {table.title}\n\n" if table.title else ""
    body = to_markdown(Table("", table.columns, table.rows))
    notes = "".join(f"- {note}\n" for note in table.notes)
    return f"{heading}{body}\n{notes}" if notes else f"{heading}{body}"
