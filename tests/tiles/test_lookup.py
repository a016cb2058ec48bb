from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiles import tile_tables as t
from tilewright.errors import TileError
from tilewright.ops.space import TileSpace
from tilewright.tiles import table as tables
from tilewright.tiles.local import local_device
from tilewright.tiles.table import Choice, Running, forget, lookup
from tilewright.tiles.tile import Problem, Tile

DEFAULT = t.wide(32, 1)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """Empty folders in place of the user's and the package's."""
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    user.mkdir()
    shipped.mkdir()
    monkeypatch.setenv("TILEWRIGHT_TILES", str(user))
    monkeypatch.setattr(tables, "shipped_folder", lambda: shipped)
    forget()
    yield {"user": user, "shipped": shipped}
    forget()


def look(problem: Problem | None = None, space: Any = t.SPACE, **changed: Any) -> Choice:
    forget()
    options = {"units": t.UNITS, "running": t.RUNNING, **changed}
    return lookup(problem or t.problem(), space, **options)


def test_without_a_table_the_default_is_chosen_and_said_so() -> None:
    assert look() == Choice(DEFAULT, "default")


def test_an_exact_row_is_found_under_every_batch_of_its_bucket(folders: dict[str, Path]) -> None:
    path = t.put(folders["user"], t.row(t.wide(128), M=512))
    for m in (257, 300, 511, 512):
        choice = look(t.problem(M=m))
        assert (choice.how, choice.tile, choice.file) == ("exact", t.wide(128), path)
        assert choice.row is not None
        assert choice.note == ""
    assert look(t.problem(M=256)).how == "near"
    assert look(t.problem(M=513)).how == "near"


@pytest.mark.parametrize(
    "changed",
    [
        {"op": "other"},
        {"act_dtype": "float16"},
        {"weight_type": "Q4_1"},
        {"activations": "int8"},
        {"group": 32},
        {"M": 1},
        {"M": 64},
        {"N": 4096},
        {"K": 64},
    ],
    ids=str,
)
def test_a_row_that_differs_in_kind_or_too_far_is_not_used(
    folders: dict[str, Path], changed: dict[str, Any]
) -> None:
    t.put(folders["user"], t.row())
    assert look(t.problem(**changed)) == Choice(DEFAULT, "default")


def test_the_nearest_row_is_used_and_named(folders: dict[str, Path]) -> None:
    t.put(folders["user"], t.row(t.wide(64), N=1024), t.row(t.wide(128), N=512))
    choice = look()
    assert (choice.how, choice.tile) == ("near", t.wide(128))
    assert choice.note == f"the row of toy Q4_0 float32 M=16 N=512 K=512 in {t.ARCH}.json"


def test_a_near_row_that_is_illegal_here_is_passed_over(folders: dict[str, Path]) -> None:
    t.put(folders["user"], t.row(t.wide(256), K=512), t.row(t.wide(64), K=1536))
    choice = look(t.problem(K=384))  # 256 does not divide 384: it would drop the tail
    assert (choice.how, choice.tile) == ("near", t.wide(64))


def test_near_a_row_that_keeps_its_default_a_problem_gets_its_own(folders: dict[str, Path]) -> None:
    """The default of a quarter as many columns is another tile; the row says: defaults are best."""
    space = replace(t.SPACE, default=lambda p: t.wide(32, 1) if p.N >= 1024 else t.wide(64))
    t.put(folders["user"], t.row(t.wide(32, 1), N=1024))
    exact, near = look(t.problem(N=1024), space), look(t.problem(N=512), space)
    assert (exact.how, exact.tile) == ("exact", t.wide(32, 1))
    assert (near.how, near.tile, near.row) == ("default", t.wide(64), None)
    assert near.note.startswith("as in the row of toy")


def test_a_tile_better_than_another_default_does_not_serve_a_problem(
    folders: dict[str, Path],
) -> None:
    space = replace(t.SPACE, default=lambda p: t.wide(32, 1) if p.N >= 1024 else t.wide(64))
    t.put(folders["user"], t.row(t.wide(128), N=1024))
    same, other = look(t.problem(N=2048), space), look(t.problem(N=512), space)
    assert (same.how, same.tile) == ("near", t.wide(128))
    assert (other.how, other.tile) == ("default", t.wide(64))
    # What is published was measured against no default.
    t.put(folders["user"], replace(t.row(t.wide(128), N=1024), source="published"))
    assert look(t.problem(N=512), space).tile == t.wide(128)


def test_an_exact_row_beats_a_near_one_of_the_users_table(folders: dict[str, Path]) -> None:
    t.put(folders["user"], t.row(t.wide(64), N=512))
    t.put(folders["shipped"], t.row(t.wide(128)))
    assert look().tile == t.wide(128)


def test_the_users_row_overrides_the_shipped_one(folders: dict[str, Path]) -> None:
    t.put(folders["shipped"], t.row(t.wide(128)), t.row(t.wide(256), M=1))
    assert look().tile == t.wide(128)
    t.put(folders["user"], t.row(t.wide(64)))
    assert look().tile == t.wide(64)
    assert look(t.problem(M=1)).tile == t.wide(256)


def test_tune_writes_where_lookup_reads(folders: dict[str, Path]) -> None:
    path = tables.user_table_path(t.ARCH)
    assert path.parent == folders["user"]
    t.put(path.parent, t.row(t.wide(128)), file=path.name)
    assert look().how == "exact"


def test_without_the_variable_the_users_config_folder_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import platformdirs

    monkeypatch.delenv("TILEWRIGHT_TILES")
    assert tables.user_folder() == Path(platformdirs.user_config_dir("tilewright")) / "tiles"


def test_a_variable_that_names_no_folder_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_TILES", "no-such-folder")
    choice = look()
    assert choice.how == "default"
    assert choice.note == "TILEWRIGHT_TILES names no-such-folder, which is no folder"


def test_a_table_of_another_arch_is_never_used(folders: dict[str, Path]) -> None:
    t.put(folders["user"], t.row(arch="test9"), file="test9.json", arch="test9",
          valid_for=("test9",))  # fmt: skip
    assert look() == Choice(DEFAULT, "default")


def test_a_table_named_after_this_arch_but_made_for_another_is_not_used(
    folders: dict[str, Path],
) -> None:
    path = t.put(folders["user"], t.row(arch="a40"), arch="a40", valid_for=("a40",))
    choice = look()
    assert choice.how == "default"
    assert choice.note == f"{path} is named after {t.ARCH} but made for a40"


def test_a_marketing_name_is_no_key(folders: dict[str, Path]) -> None:
    """'RTX A400' once matched a40.json because one name contains the other."""
    t.put(folders["user"], t.row(arch="a40"), file="a40.json", arch="a40", valid_for=("a40",),
          device="RTX A400")  # fmt: skip
    for arch in ("RTX A400", "rtx-a400", "a400", "a4"):
        assert look(t.problem(arch=arch)).how == "default"
    assert look(t.problem(arch="a40")).how == "exact"


def test_a_family_table_is_used_by_the_archs_it_names(folders: dict[str, Path]) -> None:
    t.put(folders["user"], t.row(arch="gfx11"), file="gfx11.json", arch="gfx11",
          valid_for=("gfx11", "gfx1100", "gfx1101"))  # fmt: skip
    assert look(t.problem(arch="gfx1100")).how == "exact"
    assert look(t.problem(arch="gfx1100", N=512)).how == "near"
    assert look(t.problem(arch="gfx1150")).how == "default"


def test_a_table_of_another_unit_count_is_not_used_and_said(folders: dict[str, Path]) -> None:
    path = t.put(folders["user"])
    choice = look(units=8)
    assert choice.how == "default"
    assert choice.note == f"{path} was tuned on 4 units, here are 8"
    assert "this machine has no such device" in look(units=None).note


@pytest.mark.parametrize("units", [1, 8, None])
def test_a_published_table_is_used_on_any_unit_count(
    folders: dict[str, Path], units: int | None
) -> None:
    row = replace(t.row(), median_us=0.0, spread_us=0.0, samples=0, source="published")
    t.put(folders["shipped"], row, units=0)
    assert look(units=units).how == "exact"


@pytest.mark.parametrize(
    ("running", "why"),
    [
        (replace(t.RUNNING, kernel_hash="def"), "its kernels have changed"),
        (replace(t.RUNNING, compiler="cc 1.3, lib 3.0"), "cc was 1.2, now it is 1.3"),
        (replace(t.RUNNING, compiler="lib 3.0"), "cc was 1.2, now it is absent"),
        (replace(t.RUNNING, op_version=2), "op toy is version 2, the row is of 1"),
    ],
    ids=["kernels", "compiler", "compiler gone", "op"],
)
def test_a_stale_row_is_not_used_and_one_line_says_so(
    folders: dict[str, Path], running: Running, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = t.put(folders["user"])
    with caplog.at_level(logging.WARNING, "tilewright.tiles"):
        choice = look(running=running)
        lookup(t.problem(N=255), t.SPACE, units=t.UNITS, running=running)
    assert choice.tile == DEFAULT
    assert choice.how == "default"
    line = f"{path} is stale: {why}; run `tilewright tables validate --fix` or `tilewright tune`"
    assert choice.note == line
    assert caplog.messages == [line]


def test_a_change_that_the_row_does_not_depend_on_leaves_it_in_force(
    folders: dict[str, Path],
) -> None:
    t.put(folders["user"], t.row(), t.row(Tile.of("lib", level=0), M=512))
    now = replace(t.RUNNING, compiler="cc 1.2, lib 4.0, new 1.0")
    assert look(running=now).how == "exact"  # wide uses cc only
    assert look(t.problem(M=512), running=now).how == "default"  # lib is not named: uses all


def test_a_fresh_shipped_row_is_used_where_the_users_is_stale(folders: dict[str, Path]) -> None:
    t.put(folders["user"], t.row(t.wide(64)), kernel_hash="old")
    t.put(folders["shipped"], t.row(t.wide(128)))
    choice = look()
    assert (choice.tile, choice.how) == (t.wide(128), "exact")
    assert "is stale" in choice.note


def test_a_caller_that_cannot_say_what_runs_gets_the_default(folders: dict[str, Path]) -> None:
    t.put(folders["user"])
    choice = look(running=None)
    assert choice.how == "default"
    assert "without running=" in choice.note


def test_what_runs_is_asked_only_when_a_row_depends_on_it(folders: dict[str, Path]) -> None:
    asked = []

    def running() -> Running:
        asked.append(1)
        return t.RUNNING

    look(running=running)
    assert asked == []
    t.put(folders["user"], t.row(t.wide(128)))
    assert look(running=running).tile == t.wide(128)
    assert asked == [1]


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (t.wide(48), "tile_k=48 is none of"),
        (Tile.of("wide", tile_k=64), "has the fields"),
        (Tile.of("turbo", level=1), "'turbo' is not in toy/test"),
        (Tile.of("wide", tile_k=64, stages=2, clamp=1), "has the fields"),
    ],
    ids=["value", "field missing", "algorithm", "field too many"],
)
@pytest.mark.parametrize("how", ["exact", "near"])
def test_a_row_in_force_that_the_space_refuses_raises_with_file_and_row(
    folders: dict[str, Path], tile: Tile, message: str, how: str
) -> None:
    path = t.put(folders["user"], t.row(M=1), t.row(tile, N=256 if how == "exact" else 512))
    with pytest.raises(TileError) as raised:
        look()
    text = str(raised.value)
    assert message in text
    assert f"{path}, row 2" in text
    assert "tables validate --fix" in text


def test_tile_k_that_does_not_divide_k_raises_and_is_not_clamped(folders: dict[str, Path]) -> None:
    """tile_k=256 on K=384 dropped the tail of K, was fastest, and won."""
    t.put(folders["user"], t.row(t.wide(256), K=384))
    with pytest.raises(TileError, match="tile_k divides K"):
        look(t.problem(K=384))


def test_a_default_that_breaks_a_rule_raises() -> None:
    space = TileSpace("toy/test", t.SPACE.fields, t.SPACE.rules, lambda p: t.wide(256, 1))
    assert look(space=space).tile == t.wide(256, 1)
    with pytest.raises(TileError, match="its default for toy .* is not legal.*tile_k divides K"):
        look(t.problem(K=384), space=space)


def test_a_damaged_table_raises_instead_of_being_skipped(folders: dict[str, Path]) -> None:
    path = t.put(folders["user"])
    path.write_text(path.read_text()[:-20])
    with pytest.raises(TileError, match="no valid JSON"):
        look()


def test_units_left_out_are_those_of_this_machine(folders: dict[str, Path]) -> None:
    import torch

    from tilewright.device import cpu_device

    arch, threads = cpu_device().arch, torch.get_num_threads()
    for units, how in ((threads, "exact"), (threads + 1, "default")):
        t.put(folders["user"], t.row(arch=arch), file=f"{arch}.json", arch=arch,
              valid_for=(arch,), units=units)  # fmt: skip
        assert look(t.problem(arch=arch), units=None).how == how
    device = local_device(arch)
    assert device is not None
    assert (device.units, device.name) == (threads, cpu_device().name)
    assert local_device("gfx9999") is None


def test_rows_of_a_table_of_other_archs_are_not_read(folders: dict[str, Path]) -> None:
    path = t.put(folders["shipped"], file="other.json")
    path.write_text(path.read_text().replace(f'"{t.ARCH}"', '"other"').replace("120.5", "-1"))
    assert look().how == "default"
    with pytest.raises(TileError, match="median_us is -1"):
        look(t.problem(arch="other"))


def test_leftovers_of_a_killed_writer_are_not_read(folders: dict[str, Path]) -> None:
    (folders["user"] / f".{t.ARCH}.json.0a1b2c3d.tmp").write_text("{")
    (folders["user"] / f".{t.ARCH}.json").write_text("{")
    assert look().how == "default"


def test_choices_are_remembered_until_forget(folders: dict[str, Path]) -> None:
    assert look().how == "default"
    t.put(folders["user"], t.row(t.wide(128)))
    again = lookup(t.problem(M=15), t.SPACE, units=t.UNITS, running=t.RUNNING)
    assert again.how == "default"
    forget()
    assert lookup(t.problem(M=15), t.SPACE, units=t.UNITS, running=t.RUNNING).how == "exact"


def test_another_unit_count_is_another_choice(folders: dict[str, Path]) -> None:
    t.put(folders["user"], t.row(t.wide(128)))
    assert look().how == "exact"
    assert lookup(t.problem(), t.SPACE, units=1, running=t.RUNNING).how == "default"


def test_one_table_states_the_kernels_of_several_ops(folders: dict[str, Path]) -> None:
    t.put(folders["user"], kernel_hash="other=fff, toy=abc123")
    assert look().how == "exact"
    forget()
    t.put(folders["user"], kernel_hash="other=abc123, toy=old")
    assert "its kernels have changed" in look().note
    forget()
    t.put(folders["user"], kernel_hash="other=abc123")  # says nothing of this op
    assert look().how == "default"
