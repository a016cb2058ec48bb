from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from tilewright.cli.main import cli
from tilewright.device import Device, cpu_device
from tilewright.ops.catalog import SPECS, load_spec, spec_for
from tilewright.ops.choose import choose_tile, running
from tilewright.tiles import local
from tilewright.tiles.table import (
    TableRow,
    TileTable,
    forget,
    load_table,
    save_table,
    shipped_folder,
)
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.isolate import IsolatedGate
from tilewright.tune.record import Record
from tilewright.tune.refresh import new_header

ARCH = cpu_device().arch
PROBLEM = Problem("mmq", ARCH, "float32", "Q4_1", "float", 1, 32, 64, 0)
DOT = Tile.of("dot", unroll=2, threads=0)


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One row in force, in the folder that lookup reads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    path = tmp_path / f"{ARCH}.json"
    save_table(path, TileTable(new_header([SPECS["mmq"]], ARCH), (row(DOT),)))
    forget()
    yield path
    forget()
    torch.set_num_threads(threads)


def row(tile: Tile, problem: Problem = PROBLEM) -> TableRow:
    return TableRow(problem, tile, 12.5, 0.5, 20, 1e-13, 4, {"oracle": 1})


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["tables", *arguments])


def change(path: Path, *rows: TableRow, **header: object) -> None:
    old = load_table(path)
    save_table(path, TileTable(replace(old.header, **header), rows or old.rows))  # type: ignore[arg-type]
    forget()


def test_show_says_what_is_in_force(table: Path) -> None:
    result = invoke("show", "-t", "1")
    assert result.exit_code == 0, result.output
    assert str(table) in result.stdout
    assert "dot(threads=0, unroll=2)" in result.stdout
    assert "in force" in result.stdout
    assert choose_tile(PROBLEM, SPECS["mmq"].space()).how == "exact"  # type: ignore[misc]


def test_show_of_another_arch_shows_the_tables_that_ship() -> None:
    result = invoke("show", "--arch", "sm_90", "-t", "1")
    assert result.exit_code == 0, result.output
    assert str(shipped_folder() / "sm_90.json") in result.stdout
    assert ARCH not in result.stdout

    none = invoke("show", "--arch", "sm_1", "-t", "1")
    assert none.exit_code == 1
    assert "there is no tile table for sm_1" in none.output
    assert "those of the package are for gfx11, " in none.output
    both = invoke("show", str(shipped_folder() / "sm_90.json"), "--arch", "sm_90")
    assert both.exit_code == 2
    assert "give tables or --arch, not both" in both.output


def test_show_judges_rows_of_an_op_of_ones_own(table: Path, tmp_path: Path) -> None:
    name = "examples/softmax.py:SPEC"
    own = load_spec(f"{Path(__file__).parents[2]}/{name}")
    problem = replace(own.cases[-1].problem(ARCH), M=64)
    path = tmp_path / f"{ARCH}.softmax.json"
    save_table(
        path, TileTable(new_header([own], ARCH), (row(own.space().default(problem), problem),))
    )
    states = [
        json.loads(invoke("show", str(path), "-t", "1", "-o", "json", *spec).stdout)["results"][0]
        for spec in ((), ("--spec", f"{Path(__file__).parents[2]}/{name}"))
    ]
    assert [state["state"] for state in states] == [
        "there is no op softmax; name your own with --spec", "in force",
    ]  # fmt: skip


def test_show_as_json_holds_the_rows(table: Path) -> None:
    whole = json.loads(invoke("show", "-t", "1", "-o", "json").stdout)
    (found,) = whole["results"]
    assert found["tile"] == DOT.as_dict()
    assert found["state"] == "in force"


@pytest.mark.parametrize(
    ("header", "state"),
    [
        ({"kernel_hash": "old"}, "stale: its kernels have changed"),
        ({"op_versions": {"mmq": 99}}, "stale: op mmq is version 1, the row is of 99"),
    ],
    ids=["kernels", "op"],
)
def test_validate_reports_rows_that_are_not_in_force(
    table: Path, header: dict[str, object], state: str
) -> None:
    change(table, **header)
    before = table.read_bytes()
    result = invoke("validate", "-t", "1")
    assert result.exit_code == 3
    assert state in result.stdout
    assert "0 of 1 rows in force" in result.stdout
    assert table.read_bytes() == before


@pytest.mark.parametrize(
    ("mine", "theirs", "state"),
    [
        ('"units": 1', '"units": 64', "for 64 units, here are 1"),
        (ARCH, "sm_1", "for sm_1, which this machine has not"),
    ],
    ids=["units", "arch"],
)
@pytest.mark.parametrize("fix", [(), ("--fix",)], ids=["", "fix"])
def test_validate_of_a_table_of_another_machine_is_one_error(
    table: Path, tmp_path: Path, mine: str, theirs: str, state: str, fix: tuple[str, ...]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(table.read_text().replace(mine, theirs))
    before = other.read_bytes()
    result = invoke("validate", str(other), str(table), "-t", "1", *fix)
    assert result.exit_code == 1, result.output
    assert result.stderr == (
        f"error: {other}: the table is {state}; validate it on its own machine\n"
    )
    assert result.stdout.splitlines() == [f"{table}: 1 of 1 rows in force"]
    assert other.read_bytes() == before


def test_validate_passes_a_table_in_force(table: Path) -> None:
    result = invoke("validate", "-t", "1")
    assert result.exit_code == 0, result.output
    assert "1 of 1 rows in force" in result.stdout


def test_fix_verifies_stale_rows_and_drops_illegal_ones(table: Path) -> None:
    illegal = row(Tile.of("dot", unroll=3, threads=0), replace(PROBLEM, N=64))
    change(table, row(DOT), illegal, kernel_hash="old")
    assert choose_tile(PROBLEM, SPECS["mmq"].space()).how == "default"  # type: ignore[misc]
    result = invoke("validate", "-t", "1", "--fix")
    assert result.exit_code == 3, result.output
    assert "dropped dot(threads=0, unroll=3): rule:" in result.stdout
    assert "1 of 2 rows passed the gate" in result.stdout
    forget()
    assert choose_tile(PROBLEM, SPECS["mmq"].space()).how == "exact"  # type: ignore[misc]
    fixed = load_table(table)
    assert len(fixed.rows) == 1
    assert "verified anew" in fixed.header.notes[0]
    assert invoke("validate", "-t", "1").exit_code == 0


OTHER = replace(PROBLEM, N=64)


@pytest.fixture
def shipped(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two stale rows in a table that comes with the package, and none of one's own."""
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.setattr("tilewright.tiles.table.shipped_folder", lambda: folder)
    path = table.rename(folder / table.name)
    change(path, row(DOT), row(DOT, OTHER), kernel_hash="old")
    return path


def test_rows_of_a_table_that_ships_are_verified_into_ones_own(shipped: Path, table: Path) -> None:
    before = shipped.read_bytes()
    assert invoke("validate", "-t", "1").exit_code == 3
    result = invoke("validate", "-t", "1", "--fix")
    assert result.exit_code == 0, result.output
    assert f"{table}: written, 2 rows in force" in result.stdout
    assert shipped.read_bytes() == before
    forget()
    assert choose_tile(PROBLEM, SPECS["mmq"].space()).file == table  # type: ignore[misc]
    again = invoke("validate", "-t", "1")
    assert again.exit_code == 0, again.output
    assert f"{table}: 2 of 2 rows in force" in again.stdout
    assert f"{shipped}: 0 of 0 rows in force, 2 more served by another table" in again.stdout


def test_ones_own_rows_stay_and_are_not_verified_again(shipped: Path, table: Path) -> None:
    own = row(Tile.of("dot", unroll=8, threads=0))
    save_table(table, TileTable(new_header([SPECS["mmq"]], ARCH), (own,)))
    forget()
    result = invoke("validate", str(shipped), "-t", "1", "--fix")
    assert result.exit_code == 0, result.output
    assert "1 of 1 rows passed the gate" in result.stdout
    rows = load_table(table).rows
    assert {r.problem.N: r.tile for r in rows} == {32: own.tile, 64: DOT}


def test_stale_rows_of_ones_own_table_are_not_taken_for_verified(
    shipped: Path, table: Path
) -> None:
    save_table(table, TileTable(new_header([SPECS["mmq"]], ARCH), (row(DOT),)))
    change(table, kernel_hash="older")
    before = table.read_bytes()
    result = invoke("validate", str(shipped), "-t", "1", "--fix")
    assert result.exit_code == 1
    assert f"{table} has 1 rows that are not in force" in result.stderr
    assert f"run `tilewright tables validate --fix {table}` first" in result.stderr
    assert table.read_bytes() == before
    # Without a name both are verified, one's own first.
    assert invoke("validate", "-t", "1", "--fix").exit_code == 0
    assert len(load_table(table).rows) == 2


def test_out_names_the_table_to_write(shipped: Path, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "mine.json"
    result = invoke("validate", str(shipped), "-t", "1", "--fix", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert len(load_table(out).rows) == 2
    assert not table.exists()
    alone = invoke("validate", str(shipped), "-t", "1", "--out", str(out))
    assert alone.exit_code == 2
    assert "--out says where --fix writes; give both" in alone.output
    several = invoke("validate", str(shipped), str(out), "--fix", "--out", str(table))
    assert several.exit_code == 2
    assert "--out takes one table, here are 2; name it" in several.output


def test_rows_that_an_earlier_table_serves_are_not_lost_from_one_written_in_place(
    table: Path,
) -> None:
    other = table.with_name(f"{ARCH}.other.json")
    save_table(other, load_table(table))
    change(other, row(DOT), row(DOT, OTHER), kernel_hash="old")
    before = invoke("validate", "-t", "1")
    assert "0 of 1 rows in force, 1 more served by another table" in before.stdout
    result = invoke("validate", "-t", "1", "--fix")
    assert result.exit_code == 0, result.output
    assert f"{other}: written, 2 rows in force" in result.stdout


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the second row is verified."""
    real, calls = IsolatedGate.check, []

    def check(self: IsolatedGate, *arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(IsolatedGate, "check", check)


@pytest.mark.usefixtures("stopped")
def test_ctrl_c_keeps_what_was_verified_and_the_rest_is_verified_next_time(
    shipped: Path, table: Path
) -> None:
    result = invoke("validate", "-t", "1", "--fix")
    assert result.exit_code == 130, result.output
    assert f"{table}: written, 1 rows in force" in result.stdout
    forget()
    rest = invoke("validate", "-t", "1", "--fix")
    assert rest.exit_code == 0, rest.output
    assert "1 of 1 rows passed the gate" in rest.stdout
    assert len(load_table(table).rows) == 2


@pytest.mark.usefixtures("stopped")
def test_ctrl_c_loses_no_row_of_a_table_that_is_written_in_place(table: Path) -> None:
    change(table, row(DOT), row(DOT, OTHER), kernel_hash="old")
    before = table.read_bytes()
    result = invoke("validate", "-t", "1", "--fix")
    assert result.exit_code == 130, result.output
    assert "left as it was, for rows that were not reached would be lost" in result.stdout
    assert table.read_bytes() == before


@pytest.mark.parametrize("how", [("--fix",), ("--all",), ("--fix", "--all")], ids=" ".join)
def test_rows_of_an_op_that_was_not_named_are_kept(
    table: Path, tmp_path: Path, how: tuple[str, ...]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(table.read_text().replace('"mmq', '"mine').replace("mmq=", "mine="))
    before = other.read_bytes()
    result = invoke("validate", str(other), str(table), "-t", "1", *how)
    assert result.exit_code == 1, result.output
    assert result.stderr == (
        f"error: {other}: the catalog has no op mine; name yours with --spec\n"
    )
    assert f"{table}: 1 of 1 rows" in result.stdout
    assert other.read_bytes() == before
    shown = invoke("show", str(other), "-t", "1").stdout
    assert "there is no op mine; name your own with --spec" in shown


GPU_ROWS = (
    Problem("w4a16", "sm_90", "float16", "uint4", "float", 512, 4096, 4096, 128),
    Problem("mmq", "sm_90", "float16", "Q4_K", "float", 512, 4096, 4096, 0),
    Problem("moe", "sm_90", "float16", "Q4_K", "float", 64, 1536, 2048, 0),
    Problem("ssd", "sm_90", "bfloat16", "p64", "float", 1024, 8192, 128, 16),
)


@pytest.fixture
def gpu_table(table: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Beside the CPU's, a table of several ops of a GPU that the machine seems to have."""
    device = Device("sm_90", "Some GPU", 132, 50 << 20)
    monkeypatch.setattr(local, "_gpus", lambda: {"sm_90": device})
    specs = {op: spec_for(op, "sm_90") for op in SPECS}
    rows = [row(specs[p.op].space().default(p), p) for p in GPU_ROWS]  # type: ignore[misc]
    path = table.with_name("sm_90.json")
    save_table(path, TileTable(new_header(specs.values(), "sm_90"), tuple(rows)))
    forget()
    return path


def test_rows_of_a_gpu_are_held_to_its_own_kernels_and_rules(gpu_table: Path) -> None:
    result = invoke("validate", str(gpu_table), "-t", "1")
    assert result.exit_code == 0, result.output
    assert "4 of 4 rows in force" in result.stdout
    bad = replace(load_table(gpu_table).rows[1], tile=Tile.of("dot", unroll=2, threads=0))
    hashes = load_table(gpu_table).header.kernel_hash
    change(gpu_table, *load_table(gpu_table).rows[:1], bad, *load_table(gpu_table).rows[2:])
    result = invoke("validate", str(gpu_table), "-t", "1")
    assert result.exit_code == 3
    assert "illegal: tile dot" in result.stdout
    assert "3 of 4 rows in force" in result.stdout
    other = running("ssd", "sm_90").kernel_hash
    change(gpu_table, kernel_hash=hashes.replace(other, "0" * 64))
    result = invoke("validate", str(gpu_table), "-t", "1")
    assert "ssd p64 g=16 bfloat16 M=1024 N=8192 K=128: stale: its kernels" in result.stdout
    assert "2 of 4 rows in force" in result.stdout


def test_tables_of_gpus_are_among_those_in_use(table: Path, gpu_table: Path) -> None:
    result = invoke("show", "-t", "1")
    assert result.exit_code == 0, result.output
    assert str(table) in result.stdout
    assert str(gpu_table) in result.stdout


def test_a_damaged_table_is_an_error(table: Path) -> None:
    table.write_text(table.read_text()[:-20])
    for verb in ("show", "validate"):
        result = invoke(verb, "-t", "1")
        assert result.exit_code == 1
        assert "no valid JSON" in result.stderr


def test_without_any_table_the_message_says_how_to_get_one(table: Path) -> None:
    table.unlink()
    result = invoke("show", "-t", "1")
    if result.exit_code == 0:
        pytest.skip("the package ships a table for this arch")
    assert result.exit_code == 1
    assert "`tilewright tune` makes one" in result.stderr


def test_diff_names_what_changed(table: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    old = load_table(table)
    changed = row(DOT.replace(unroll=8))
    save_table(
        other,
        TileTable(replace(old.header, units=2), (changed, row(DOT, replace(PROBLEM, N=64)))),
    )
    whole = json.loads(invoke("diff", str(table), str(other), "-o", "json").stdout)
    found = {(c["what"], c["problem"]) for c in whole["changes"]}
    assert found == {
        ("header", "units"),
        ("changed", "mmq Q4_1 float32 M=1 N=32 K=64"),
        ("added", "mmq Q4_1 float32 M=1 N=64 K=64"),
    }
    back = json.loads(invoke("diff", str(other), str(table), "-o", "json").stdout)
    assert {c["what"] for c in back["changes"]} == {"header", "changed", "removed"}


def test_a_table_does_not_differ_from_itself(table: Path) -> None:
    whole = json.loads(invoke("diff", str(table), str(table), "-o", "json").stdout)
    assert whole["changes"] == []
    assert whole["notes"] == ["1 rows have the same tile in both"]


def test_export_writes_t4_with_wrong_tiles_in_it(table: Path, tmp_path: Path) -> None:
    log, out = tmp_path / "log.sqlite", tmp_path / "t4.json"
    wrong = {"passed": False, "kind": "ragged-shapes", "reason": "a row is missing"}
    with Record(log) as record:
        record.begin({}, {})
        record.add("passed", PROBLEM, DOT, outcome={"passed": True})
        record.add("rejected", PROBLEM, DOT.replace(unroll=8), outcome=wrong)
    result = invoke("export", "--log", str(log), "--t4", str(out))
    assert result.exit_code == 0, result.output
    assert "2 configurations, 1 of them wrong" in result.stdout
    words = [r["invalidity"] for r in json.loads(out.read_text())["results"]]
    assert words == ["correct", "correctness"]


def test_export_of_a_run_or_log_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.sqlite"
    Record(log).close()
    out = str(tmp_path / "t4.json")
    assert (
        "has no run 7; it has none"
        in invoke("export", "--log", str(log), "--run", "7", "--t4", out).stderr
    )
    result = invoke("export", "--t4", out)
    assert result.exit_code == 1
    assert "there is no such tuning log" in result.stderr
