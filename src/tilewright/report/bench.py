"""Benchmark results as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.model.bench import BenchResult
from tilewright.report.table import Column, Table, binary_bytes

__all__ = ["bench_table"]


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
