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


def lines_of(table: Table, width: int | None) -> list[str]:
    lines = to_terminal(table, width=width).splitlines()
    assert width is None or max(map(len, lines)) <= width
    return lines


TILES = Table(
    title="tiles",
    columns=(
        Column("problem", "problem"),
        Column("tile", "tile"),
        Column("us", "median us", right=True),
        Column("state", "state"),
        Column("note", "note"),
    ),
    rows=[
        {
            "problem": "mmq Q4_1 float16 M=512 N=576 K=1536",
            "tile": "hopper(block_m=128, block_n=128, group_m=4, num_stages=4, w_stages=4)",
            "us": 16.584,
            "state": "in force",
            "note": "-",
        }
    ],
)


def test_without_a_width_nothing_is_broken_however_long_it_is() -> None:
    long = Table("", (Column("a", "a"), Column("b", "b")), [{"a": "x" * 300, "b": "y z " * 90}])
    assert lines_of(long, None)[2].count("x") == 300
    assert len(lines_of(long, None)) == 3


def test_columns_that_nearly_fit_are_broken_between_words() -> None:
    lines = lines_of(TILES, 110)
    assert lines[1].split(" | ")[0].rstrip() == "problem"
    assert "16.584" in lines[3]
    assert len(lines) == 5
    words = " ".join(lines).split()
    assert all(word in words for word in ("num_stages=4,", "M=512", "force"))


def test_a_table_that_would_be_torn_to_shreds_is_written_row_by_row() -> None:
    assert lines_of(TILES, 60) == [
        "tiles",
        "mmq Q4_1 float16 M=512 N=576 K=1536",
        "  tile: hopper(block_m=128, block_n=128, group_m=4,",
        "    num_stages=4, w_stages=4) | median us: 16.584",
        "  state: in force",
    ]


def test_columns_of_figures_are_written_in_parts() -> None:
    columns = [
        Column("figure", "figure"),
        *(Column(f"k{i}", f"kernel {i}", True) for i in range(5)),
    ]
    row = {"figure": "VGPRs", **{f"k{i}": 100 + i for i in range(5)}}
    assert lines_of(Table("isa", columns, [row]), 32) == [
        "isa",
        "figure | kernel 0 | kernel 1",
        "-------+----------+---------",
        "VGPRs  |      100 |      101",
        "",
        "figure | kernel 2 | kernel 3",
        "-------+----------+---------",
        "VGPRs  |      102 |      103",
        "",
        "figure | kernel 4",
        "-------+---------",
        "VGPRs  |      104",
    ]


def test_no_rows_leave_the_notes_alone() -> None:
    assert to_terminal(Table("", (Column("a", "a"),), [], notes=("nothing changed",))) == (
        "nothing changed\n"
    )
