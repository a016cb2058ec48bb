from __future__ import annotations

import csv
import io
import json

import pytest

from tilewright.report.render import render, to_csv, to_json, to_jsonl, to_markdown, to_terminal
from tilewright.report.table import Column, Table, binary_bytes

TABLE = Table(
    title="speeds",
    columns=(
        Column("test", "test"),
        Column("rate", "t/s", right=True, show=lambda row: f"{row['rate']:.1f}"),
        Column("samples", hidden=True),
    ),
    rows=[
        {"test": "pp|512", "rate": 300.25, "samples": [1.5, 2.5]},
        {"test": "tg8", "rate": 7.0, "samples": []},
    ],
    notes=("on a quiet machine",),
    provenance={"command": "bench"},
)


def test_markdown_is_padded_and_escaped() -> None:
    assert to_markdown(TABLE) == (
        "speeds\n"
        "\n"
        "| test    |   t/s |\n"
        "|---------|------:|\n"
        "| pp\\|512 | 300.2 |\n"
        "| tg8     |   7.0 |\n"
        "\n"
        "on a quiet machine\n"
    )


def test_terminal_aligns_without_markup_or_escapes() -> None:
    text = to_terminal(TABLE)
    assert text.splitlines() == [
        "speeds",
        "test   |   t/s",
        "-------+------",
        "pp|512 | 300.2",
        "tg8    |   7.0",
        "on a quiet machine",
    ]
    assert "\x1b[" in to_terminal(TABLE, color=True, width=80)


def test_text_in_brackets_is_not_taken_for_markup() -> None:
    table = Table("[bold]", (Column("a", "[red]"),), [{"a": "[1 - 2]"}], notes=("[x]",))
    assert "[bold]" in (text := to_terminal(table))
    assert "[red]" in text
    assert "[1 - 2]" in text
    assert "[x]" in text


def test_json_keeps_every_value_and_the_provenance() -> None:
    whole = json.loads(to_json(TABLE))
    assert whole["provenance"] == {"command": "bench"}
    assert whole["results"] == [dict(row) for row in TABLE.rows]
    assert whole["notes"] == ["on a quiet machine"]


def test_jsonl_lines_stand_alone() -> None:
    lines = [json.loads(line) for line in to_jsonl(TABLE).splitlines()]
    assert lines[0] == {**TABLE.rows[0], "provenance": {"command": "bench"}}
    assert len(lines) == 2


def test_csv_reads_back() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(TABLE))))
    assert rows[0] == {"test": "pp|512", "rate": "300.25", "samples": "1.5;2.5"}
    assert rows[1]["samples"] == ""


def test_json_refuses_nan() -> None:
    table = Table("", (Column("a"),), [{"a": float("nan")}])
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(table)


@pytest.mark.parametrize("form", ["terminal", "md", "json", "jsonl", "csv"])
def test_every_form_renders_an_empty_table(form: str) -> None:
    assert isinstance(render(Table("", (Column("a", "a"),), []), form), str)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (98_362_432, "93.8 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_binary_bytes(count: int, text: str) -> None:
    assert binary_bytes(count) == text
