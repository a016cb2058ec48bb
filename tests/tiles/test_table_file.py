from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiles import tile_tables as t
from tilewright.errors import TileError
from tilewright.tiles.table import load_table, problem_text, save_table
from tilewright.tiles.tile import Tile


def test_a_saved_table_loads_as_it_was(tmp_path: Path) -> None:
    rows = (t.row(), t.row(M=512, N=1024), t.row(Tile.of("lib", level=1), act_dtype="bfloat16"))
    path = t.put(tmp_path, *rows)
    loaded = load_table(path)
    assert loaded.header == t.header()
    assert sorted(map(repr, loaded.rows)) == sorted(map(repr, rows))


def test_one_row_a_line_in_an_order_that_does_not_depend_on_insertion(tmp_path: Path) -> None:
    rows = [t.row(M=m, N=n) for m in (1, 16, 512) for n in (64, 256)]
    first = t.put(tmp_path, *rows, file="a.json").read_text()
    second = t.put(tmp_path, *reversed(rows), file="b.json").read_text()
    assert first == second
    lines = [line for line in first.splitlines() if '"op"' in line]
    assert len(lines) == len(rows)
    assert all(json.loads(line.strip().rstrip(","))["tile"] for line in lines)


def test_a_new_row_replaces_the_old_one_of_its_problem() -> None:
    table = t.table(t.row(), t.row(M=1))
    changed = table.with_row(t.row(t.wide(128)))
    assert len(changed.rows) == 2
    found = changed.row(t.problem(M=13))
    assert found is not None
    assert found.tile == t.wide(128)
    assert changed.without(t.problem()).row(t.problem()) is None


def spoiled(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = t.put(tmp_path, t.row(M=1), t.row(M=16), t.row(M=512))
    whole = json.loads(path.read_text())
    change(whole)
    path.write_text(json.dumps(whole))
    return path


ROW_FAULTS = {
    "unknown field": (lambda r: r.update(speed=3), "unknown fields ['speed']"),
    "missing field": (lambda r: r.pop("samples"), "lacks the fields ['samples']"),
    "no number": (lambda r: r.update(N="256"), "N is '256'"),
    "boolean for a number": (lambda r: r.update(K=True), "K is True"),
    "M between buckets": (lambda r: r.update(M=17), "M is 17"),
    "infinite time": (lambda r: r.update(median_us=1e999), "Infinity is no number"),
    "NaN time": (lambda r: r.update(median_us=float("nan")), "NaN is no number"),
    "negative time": (lambda r: r.update(median_us=-1.0), "median_us is -1.0"),
    "no samples": (lambda r: r.update(samples=0), "samples is 0"),
    "dtype": (lambda r: r.update(act_dtype="fp16"), "act_dtype is 'fp16'"),
    "activations": (lambda r: r.update(activations="int4"), "activations is 'int4'"),
    "tile is a list": (lambda r: r.update(tile=["wide"]), "tile is ['wide']"),
    "no algorithm": (lambda r: r["tile"].pop("algorithm"), "names no algorithm"),
    "nested tile": (lambda r: r["tile"].update(tile_k=[64]), "must map field names"),
    "rejected": (lambda r: r.update(rejected={"oracle": -1}), "oracle is -1"),
    "no object": (lambda r: None, "is a NoneType"),
}


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_a_damaged_row_is_refused_and_named(tmp_path: Path, fault: str) -> None:
    act, message = ROW_FAULTS[fault]

    def change(whole: dict[str, Any]) -> None:
        if fault == "no object":
            whole["rows"][1] = None
        else:
            act(whole["rows"][1])

    path = spoiled(tmp_path, change)
    with pytest.raises(TileError) as raised:
        load_table(path)
    text = str(raised.value)
    assert message in text
    assert str(path) in text
    if "no number of" not in message:
        assert "row 2" in text or "is no number" in text


def test_a_published_row_needs_no_measurement_and_no_unit_count(tmp_path: Path) -> None:
    unmeasured = {"median_us": 0.0, "spread_us": 0.0, "samples": 0, "source": "published"}
    row = replace(t.row(), **unmeasured)
    path = t.put(tmp_path, row, units=0)
    assert load_table(path).rows == (row,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 0, "source": "published"}, "samples is 0"),
        ({"median_us": 0.0, "source": "published"}, "median_us is 0.0"),
        ({"samples": 0, "median_us": 0.0}, "median_us is 0.0"),
    ],
    ids=["time without samples", "samples without time", "tuned"],
)
def test_a_row_is_measured_or_published(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(TileError, match=message):
        t.put(tmp_path, replace(t.row(), **changed))


WHOLE_FAULTS = {
    "unknown key": (lambda w: w.update(extra=1), "unknown fields ['extra']"),
    "another version": (lambda w: w.update(tilewright_tiles=2), "tilewright_tiles = 2"),
    "no version": (lambda w: w.pop("tilewright_tiles"), "tilewright_tiles = None"),
    "rows no list": (lambda w: w.update(rows={}), "rows is a dict"),
    "header field": (lambda w: w["header"].update(gpu="RTX"), "header: has unknown fields ['gpu']"),
    "header lacks": (lambda w: w["header"].pop("units"), "header: lacks the fields ['units']"),
    "own arch not valid": (lambda w: w["header"].update(valid_for=["x"]), "its own arch"),
    "no arch": (lambda w: w["header"].update(arch=""), "arch is ''"),
    "units below 0": (lambda w: w["header"].update(units=-1), "units is -1"),
    "measured on any units": (
        lambda w: w["header"].update(units=0),
        "row 1 is 'tuned' in a table of units = 0",
    ),
    "version no number": (lambda w: w["header"].update(op_versions={"toy": "1"}), "toy is '1'"),
    "problem twice": (lambda w: w["rows"].append(w["rows"][0]), "rows 1 and 4 are both for"),
}


@pytest.mark.parametrize("fault", WHOLE_FAULTS)
def test_a_damaged_table_is_refused(tmp_path: Path, fault: str) -> None:
    change, message = WHOLE_FAULTS[fault]
    path = spoiled(tmp_path, change)
    with pytest.raises(TileError) as raised:
        load_table(path)
    assert message.replace("its own arch", "the table's own arch") in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("keep", [0, 1, 40, 300, -1, -3])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = t.put(tmp_path)
    text = path.read_text()
    path.write_text(text.rstrip()[:keep])
    with pytest.raises(TileError, match="no valid JSON"):
        load_table(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[]", "tilewright_tiles = None"),
        (b'{"rows": [], "rows": []}', "'rows' occurs twice"),
    ],
    ids=["not text", "a list", "key twice"],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(TileError, match=message):
        load_table(path)


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(TileError, match=r"nothing\.json"):
        load_table(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (t.row(arch="other"), "is of arch other"),
        (t.row(Tile.of("wide", tile_k=64, stages=float("inf"))), "no valid JSON"),
        (t.row(weight_type=""), "weight_type is ''"),
    ],
    ids=["another arch", "infinite field", "empty type"],
)
def test_a_table_that_would_not_load_is_not_written(tmp_path: Path, row: Any, message: str) -> None:
    path = t.put(tmp_path)
    before = path.read_bytes()
    with pytest.raises(TileError, match=message) as raised:
        save_table(path, t.table(row))
    assert ".tmp" not in str(raised.value)
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == [path.name]


def test_problem_text_says_what_differs() -> None:
    assert problem_text(t.problem()) == "toy Q4_0 float32 M=16 N=256 K=512"
    other = t.problem(op="w4a16", weight_type="uint4", group=128, activations="int8")
    assert problem_text(other) == "w4a16 uint4 g=128 int8 float32 M=16 N=256 K=512"
    assert "g=K" in problem_text(t.problem(group=-1))


_WRITER = """
import sys
from pathlib import Path
from tiles import tile_tables as t
folder = Path(sys.argv[1])
rows = [t.row(N=32 * n, M=1) for n in range(1, 400)]
step = 0
while True:
    step += 1
    t.put(folder, *rows[: 100 + step % 300])
    if step == 1:
        print("ready", flush=True)
"""


def test_a_table_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / f"{t.ARCH}.json"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    for step in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=env
        )
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.02 + 0.013 * step)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()  # type: ignore[union-attr]
        assert len(load_table(path).rows) >= 100
