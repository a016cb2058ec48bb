"""A profile as people read it: terminal tables, Markdown, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.model.profile import PhaseProfile, ProfileReport
from tilewright.report.compare import markdown, origin_line, time_text
from tilewright.report.render import to_terminal
from tilewright.report.table import Column, Table

__all__ = ["profile_report", "profile_tables"]

_HOT = 0.05


def _percent(key: str) -> Any:
    return lambda row: "" if row[key] is None else f"{row[key]:.1%}"


def _rate(key: str) -> Any:
    return lambda row: "" if row[key] is None else f"{row[key]:.1f}"


def _type(row: Mapping[str, Any]) -> str:
    kind = row["weight_type"]
    return kind if row["type_id"] is None else f"{kind} ({row['type_id']})"


_COLUMNS = (
    Column("role", "role"),
    Column("op", "op"),
    Column("weight_type", "type", show=_type),
    Column("kernel", "kernel"),
    Column("calls", "calls", right=True),
    Column("us", "time", right=True, show=lambda row: time_text(row["us"])),
    Column("share", "share", right=True, show=_percent("share")),
    Column("gflops", "GFLOP/s", right=True, show=_rate("gflops")),
    Column("gbps", "GB/s", right=True, show=_rate("gbps")),
)
_CEILING = (
    Column("of_gflops", "of peak FLOP/s", right=True, show=_percent("of_gflops")),
    Column("of_gbps", "of peak GB/s", right=True, show=_percent("of_gbps")),
)


def _phase_notes(phase: PhaseProfile) -> list[str]:
    types = {kind: share for kind, share in phase.by("weight_type").items() if kind}
    hot = [
        f"{kind} (type {BLOCK_TYPES[kind].type_id}) {share:.0%}"
        if kind in BLOCK_TYPES
        else f"{kind} {share:.0%}"
        for kind, share in types.items()
        if share >= _HOT
    ]
    kernels = [f"{k} {s:.0%}" for k, s in phase.by("kernel").items() if s >= _HOT]
    roles = [f"{k} {s:.0%}" for k, s in phase.by("role").items() if s >= _HOT]
    apart = phase.whole_us / phase.timed_us - 1 if phase.timed_us else 0.0
    return [
        f"Hot types: {', '.join(hot) or 'none'}. Hot kernels: {', '.join(kernels)}. "
        f"Roles: {', '.join(roles)}.",
        f"Medians of {phase.passes} passes add up to {time_text(phase.sum_us)}. A timed pass as a "
        f"whole takes {time_text(phase.timed_us)}: what is above the medians is disturbance, not "
        f"work. One without instruments takes {time_text(phase.whole_us)} ({apart:+.1%}). Timing "
        f"adds {time_text(phase.overhead_us)} to each of {phase.launches} parts, which has been "
        "taken off.",
    ]


def profile_tables(
    report: ProfileReport, subject: str, provenance: Mapping[str, Any], notes: list[str]
) -> list[Table]:
    """A table a phase; what holds for all of them is noted under the last."""
    whole = list(notes)
    columns = _COLUMNS if report.ceiling is None else (*_COLUMNS, *_CEILING)
    if report.ceiling is None:
        whole.append("No ceiling was measured (--ceiling), so none is stated.")
    else:
        whole.append(
            f"Ceiling measured here on {report.threads} threads: {report.ceiling.gflops:.0f} "
            f"GFLOP/s in float32, {report.ceiling.gbps:.1f} GB/s read from memory. A cache may "
            "give bytes faster than memory; 8-bit products have no arithmetic ceiling here."
        )
    parts = "launches of captured programs" if report.method == "launches" else "modules by hooks"
    whole += [
        f"{report.decoder}, activations {report.activations}; timed as {parts}. Instrumented "
        "passes gave the same logits, bit for bit.",
        origin_line(provenance),
    ]
    tables = []
    for index, phase in enumerate(report.phases):
        what = f"prefill of {phase.tokens}" if phase.name == "prefill" else "one token"
        at = f" at depth {phase.depth}" if phase.depth else ""
        lines = _phase_notes(phase)
        if index == len(report.phases) - 1:
            lines += whole
        rows = [dict(vars(row)) for row in phase.rows]
        tables.append(Table(f"{subject}: {what}{at}", columns, rows, lines))
    return tables


def profile_report(
    report: ProfileReport,
    form: str,
    *,
    subject: str,
    provenance: Mapping[str, Any],
    notes: list[str],
    width: int | None = None,
    color: bool = False,
) -> str:
    """The report as "terminal", "md" or "json"."""
    if form == "json":
        whole = {
            "provenance": dict(provenance),
            "profile": {"subject": subject, **report.to_dict()},
            "notes": notes,
        }
        return json.dumps(whole, indent=1, allow_nan=False) + "\n"
    tables = profile_tables(report, subject, provenance, notes)
    if form == "terminal":
        return "\n".join(to_terminal(table, width=width, color=color) for table in tables)
    return "\n".join(markdown(table) for table in tables)
