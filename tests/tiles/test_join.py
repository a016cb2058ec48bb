from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tiles.tile_tables import header, put, row, table, wide
from tilewright.cli.main import cli
from tilewright.errors import TileError
from tilewright.tiles.join import join_tables
from tilewright.tiles.table import load_table

ONE, TWO = row(M=1), row(M=64)


def test_rows_of_all_in_one() -> None:
    joined = join_tables({"a": table(ONE), "b": table(TWO, ONE), "c": table(row(M=16))})
    assert {r.problem.M for r in joined.rows} == {1, 16, 64}
    assert joined.header == header()


def test_header_of_all() -> None:
    joined = join_tables(
        {
            "a": table(ONE, kernel_hash="toy=1, w=2", op_versions={"toy": 1, "w": 2}),
            "b": table(
                TWO,
                kernel_hash="toy=1, v=3",
                op_versions={"toy": 1, "v": 4},
                date="2025-02-01T00:00:00+00:00",
                source="someone",
                notes=("loud machine",),
            ),
        }
    ).header
    assert joined.kernel_hash == "toy=1, v=3, w=2"
    assert joined.op_versions == {"toy": 1, "v": 4, "w": 2}
    assert joined.date == "2025-02-01T00:00:00+00:00"
    assert joined.source == "tilewright 0.1.0; someone"
    assert joined.notes == ("quiet machine", "loud machine")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"arch": "test91", "valid_for": ("test91",)},
            "b: arch is 'test91', that of a is 'test90'",
        ),
        ({"units": 8}, "b: units is 8, that of a is 4"),
        ({"device": "Other Chip"}, "b: device is 'Other Chip', that of a is 'Some Chip'"),
        ({"compiler": "cc 1.3"}, "b: compiler is 'cc 1.3', that of a is 'cc 1.2, lib 3.0'"),
        ({"kernel_hash": "def"}, "b: kernel_hash of toy is def, that of a is abc123"),
        ({"kernel_hash": "toy=abc123"}, "b: kernel_hash is of one op or of several"),
        ({"op_versions": {"toy": 2}}, "b: version of toy is 2, that of a is 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tables_that_are_not_alike(changed: dict[str, object], message: str) -> None:
    with pytest.raises(TileError, match="^" + message.replace("(", r"\(")):
        join_tables({"a": table(ONE), "b": table(**changed)})


def test_an_op_that_the_first_table_lacks_is_held_to_the_one_that_has_it() -> None:
    both = {"toy": 1, "w": 1}
    first = table(ONE, kernel_hash="toy=1")
    second = table(TWO, kernel_hash="toy=1, w=2", op_versions=both)
    third = table(row(M=16), kernel_hash="toy=1, w=3", op_versions=both)
    with pytest.raises(TileError, match="^c: kernel_hash of w is 3, that of b is 2"):
        join_tables({"a": first, "b": second, "c": third})


def test_two_tiles_for_a_problem() -> None:
    with pytest.raises(TileError, match=r"M=1 .*tile_k=64.* in a, .*tile_k=32.* in c; which one"):
        join_tables({"a": table(ONE), "b": table(TWO), "c": table(row(wide(32), M=1))})


def test_the_verb(tmp_path: Path) -> None:
    a, b = put(tmp_path, ONE, file="a.json"), put(tmp_path, TWO, file="b.json")
    out = tmp_path / "both.json"
    done = CliRunner().invoke(cli, ["tables", "join", str(a), str(b), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "both.json: 2 rows of 2 tables" in done.output.replace("\n", "")
    assert load_table(out).rows == join_tables({"a": load_table(a), "b": load_table(b)}).rows
