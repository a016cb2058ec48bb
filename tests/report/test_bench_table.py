from __future__ import annotations

import json

from tilewright.model.bench import BenchResult, BenchTest
from tilewright.report.bench import bench_table
from tilewright.report.render import render
from tilewright.report.table import Table


def table(provenance: dict[str, str] | None = None) -> Table:
    results = [
        BenchResult(BenchTest(512, 0), (1.0, 2.0, 4.0)),
        BenchResult(BenchTest(0, 100, 4096), (1.0,)),
    ]
    return bench_table(
        results,
        model="m.gguf",
        model_bytes=98_362_432,
        activations="float",
        threads=2,
        provenance=provenance or {},
    )


def test_people_see_median_and_range_beside_mean_and_deviation() -> None:
    text = render(table(), "md")
    assert "256.00 [128.00 - 512.00]" in text
    assert "298.67 \u00b1 195.52" in text
    assert "tg100 @ d4096" in text
    assert "93.8 MiB" in text


def test_json_has_llama_benchs_keys_and_units() -> None:
    whole = json.loads(render(table({"device": "cpu"}), "json"))
    row = whole["results"][0]
    assert (row["n_prompt"], row["n_gen"], row["n_depth"]) == (512, 0, 0)
    assert row["samples_ns"] == [1_000_000_000, 2_000_000_000, 4_000_000_000]
    assert row["samples_ts"] == [512.0, 256.0, 128.0]
    assert row["avg_ts"] == sum(row["samples_ts"]) / 3
    assert whole["provenance"] == {"device": "cpu"}
