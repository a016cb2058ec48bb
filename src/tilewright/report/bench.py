"""Benchmark results as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilewright.model.bench import BenchResult
from tilewright.model.kernel_time import KernelReport
from tilewright.report.render import render, to_json
from tilewright.report.table import Column, Table, binary_bytes

__all__ = ["bench_report", "bench_table", "kernel_table", "kernels_report"]


def _median(row: Mapping[str, Any]) -> str:
    return f"{row['median_ts']:.2f} [{row['min_ts']:.2f} - {row['max_ts']:.2f}]"


def _mean(row: Mapping[str, Any]) -> str:
    return f"{row['avg_ts']:.2f} \u00b1 {row['stddev_ts']:.2f}"


_COLUMNS = (
    Column("model", "model"),
    Column("model_size", "size", right=True, show=lambda row: binary_bytes(row["model_size"])),
    Column("activations", "activations"),
    Column("threads", "threads", right=True),
    Column("test", "test", right=True),
    Column("n_prompt", hidden=True),
    Column("n_gen", hidden=True),
    Column("n_depth", hidden=True),
    Column("median_ts", "median t/s [min - max]", right=True, show=_median),
    Column("min_ts", hidden=True),
    Column("max_ts", hidden=True),
    Column("avg_ts", "mean t/s", right=True, show=_mean),
    Column("stddev_ts", hidden=True),
    Column("samples_ts", hidden=True),
    Column("samples_ns", hidden=True),
)


def bench_table(
    results: Sequence[BenchResult],
    *,
    model: str,
    model_bytes: int,
    activations: str,
    threads: int,
    provenance: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Table:
    """One row a test: median and range, mean and sample deviation, all samples.

    Keys that llama-bench also writes (n_prompt, n_gen, n_depth, avg_ts, stddev_ts, samples_ts,
    samples_ns) have its names and units: tokens a second and nanoseconds.
    """
    rows = [
        {
            "model": model,
            "model_size": model_bytes,
            "activations": activations,
            "threads": threads,
            "test": result.test.name,
            "n_prompt": result.test.n_prompt,
            "n_gen": result.test.n_gen,
            "n_depth": result.test.n_depth,
            "median_ts": result.median_tok_s,
            "min_ts": result.min_tok_s,
            "max_ts": result.max_tok_s,
            "avg_ts": result.mean_tok_s,
            "stddev_ts": result.stddev_tok_s,
            "samples_ts": list(result.samples_tok_s),
            "samples_ns": [round(s * 1e9) for s in result.samples_s],
        }
        for result in results
    ]
    return Table("", _COLUMNS, rows, notes=notes, provenance=provenance)


_LEAST_SHARE = 0.01  # of all time, of a kernel that is listed by itself
_KERNEL_COLUMNS = (
    Column("op", "op"),
    Column("us", "ms", right=True, show=lambda row: f"{row['us'] / 1e3:.2f}"),
    Column("share", "share", right=True, show=lambda row: f"{row['share']:.1%}"),
    Column("launches", "launches", right=True),
    Column("longest", "longest kernel"),
)
_EACH_COLUMNS = (*_KERNEL_COLUMNS[:-1], Column("longest", "kernel"))


def kernel_table(report: KernelReport, notes: Sequence[str] = (), *, each: bool = False) -> Table:
    """One row an op, below them the total, and then the notes.

    Args:
        each: below an op of several kernels, a row for each that counts.
    """
    rows = []
    for op in report.rows:
        below = [
            _kernel_row("", us, us / report.total_us, launches, name)
            for name, us, launches in op.kernels
            if each and len(op.kernels) > 1 and us >= _LEAST_SHARE * report.total_us > 0
        ]
        longest = "" if below else op.kernels[0][0]
        rows += [_kernel_row(op.op, op.us, op.share, op.launches, longest), *below]
    return Table(
        f"GPU kernel time by op, {report.test}", _EACH_COLUMNS if each else _KERNEL_COLUMNS,
        rows, [*_kernel_totals(report), *notes],
    )  # fmt: skip


def _kernel_row(op: str, us: float, share: float, launches: int, name: str) -> dict[str, Any]:
    return {"op": op, "us": us, "share": share, "launches": launches, "longest": _short(name)}


def _kernel_totals(report: KernelReport) -> list[str]:
    """The sum, and what the same took without the profiler."""
    lines = [f"total kernel time at {report.test}: {report.total_us / 1e3:.2f} ms"]
    if report.pass_us is not None:
        whole, count = report.pass_us / 1e3, max(report.steps, 1)
        what = f"{whole / count:.3f} ms a token" if report.steps else f"{whole:.2f} ms"
        lines.append(
            f"without the profiler: {what}, kernels {report.total_us / report.pass_us:.0%} of it"
        )
    return lines


def _short(name: str) -> str:
    """A kernel's name without the arguments of its template."""
    plain = name.removeprefix("void ").split("<")[0].split("(")[0]
    return plain if len(plain) <= 60 else plain[:57] + "..."


def bench_report(
    table: Table,
    kernels: KernelReport | None,
    form: str,
    *,
    width: int | None = None,
    color: bool = False,
) -> str:
    """The results, and the kernel times if there are any: as a second table for people, under
    "kernel_time" in JSON. JSON lines and CSV hold the results alone: they are of one kind a line.
    """
    if kernels is None or form in ("jsonl", "csv"):
        return render(table, form, width=width, color=color)
    if form == "json":
        whole = {**json.loads(to_json(table)), "kernel_time": kernels.to_dict()}
        return json.dumps(whole, indent=2, allow_nan=False) + "\n"
    parts = [table, kernel_table(kernels)]
    return "\n".join(render(part, form, width=width, color=color) for part in parts)


def kernels_report(
    reports: Sequence[KernelReport],
    form: str,
    *,
    subject: str,
    provenance: Mapping[str, Any],
    notes: Sequence[str] = (),
    width: int | None = None,
    color: bool = False,
) -> str:
    """Kernel times alone: a table each, with the kernels of each op, the notes below the last; in
    JSON, under "kernel_time".
    """
    if form == "json":
        whole = {
            "provenance": provenance,
            "notes": list(notes),
            "subject": subject,
            "kernel_time": [report.to_dict() for report in reports],
        }
        return json.dumps(whole, indent=2, allow_nan=False) + "\n"
    tables = [kernel_table(report, each=True) for report in reports[:-1]]
    tables += [kernel_table(report, notes, each=True) for report in reports[-1:]]
    tables = [replace(table, title=f"{subject}: {table.title}") for table in tables]
    return "\n".join(render(table, form, width=width, color=color) for table in tables)
