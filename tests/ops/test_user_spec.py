"""Specs from files, modules and entry points: found, run once, or refused with the reason."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tilewright.errors import GateError, TileError, UnsupportedError
from tilewright.ops.catalog import SPECS, load_spec
from tilewright.ops.contract import Case
from tilewright.ops.user_spec import load_user_spec, offered_specs, tuned_tile
from tilewright.tiles.tile import Tile
from tilewright.tune.verify import verify_op
from user_specs import HONEST, write_spec


def test_a_file_is_loaded_and_verifies(tmp_path):
    spec = load_spec(f"{write_spec(tmp_path)}:SPEC")
    assert spec.name == "rowsoftmax"
    report = verify_op(spec)
    assert report.passed
    assert [str(group) for group in report.groups()] == ["Row softmax rows 3/3 passed"]


def test_an_op_of_the_catalog_is_loaded_by_its_name():
    assert load_spec("mmq") is SPECS["mmq"]


def test_a_file_runs_once_until_it_changes(tmp_path):
    path = write_spec(tmp_path)
    first = load_spec(f"{path}:SPEC")
    assert load_spec(f"{path}:SPEC") is first
    assert load_spec(f"{tmp_path}/../{tmp_path.name}/{path.name}:SPEC") is first
    path.write_text(HONEST.replace("version=1", "version=2"))
    assert load_spec(f"{path}:SPEC").version == 2


def test_a_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_a_spec.py").write_text("TITLE = 'From next door'")
    text = HONEST.replace('"Row softmax"', "TITLE").replace(
        "import torch", "import torch\nfrom neighbour_of_a_spec import TITLE"
    )
    path = tmp_path / "spec.py"
    path.write_text(text)
    assert load_spec(f"{path}:SPEC").title == "From next door"


def test_a_file_named_like_a_library_hides_nothing(tmp_path):
    load_spec(f"{write_spec(tmp_path, name='torch.py')}:SPEC")
    assert sys.modules["torch"] is torch


def test_a_module_is_loaded_by_its_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_spec(tmp_path, name="kernels_of_a_test.py")
    assert load_spec("kernels_of_a_test:SPEC").name == "rowsoftmax"


def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Install a package that offers a spec, as pip would lay it out."""
    info = tmp_path / "my_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tilewright.ops]\nrow-softmax = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_an_entry_point_is_loaded_by_its_name(tmp_path, monkeypatch):
    write_spec(tmp_path, name="my_kernels_of_a_test.py")
    offer(tmp_path, monkeypatch, "my_kernels_of_a_test:SPEC")
    assert offered_specs() == {"row-softmax": "my_kernels_of_a_test:SPEC"}
    assert "my_kernels_of_a_test" not in sys.modules
    assert load_spec("row-softmax").name == "rowsoftmax"
    with pytest.raises(UnsupportedError, match="installed packages offer row-softmax"):
        load_spec("row_softmax")


def test_a_broken_entry_point_says_so(tmp_path, monkeypatch):
    offer(tmp_path, monkeypatch, "no_such_module_of_a_test:SPEC")
    message = r"row-softmax \(no_such_module_of_a_test:SPEC\): reading it raised ModuleNotFound"
    with pytest.raises(UnsupportedError, match=message):
        load_spec("row-softmax")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{at}/none.py:SPEC", "there is no file", id="no file"),
        pytest.param("{at}/spec.py", "name the OpSpec in that file", id="no name"),
        pytest.param("{at}/spec.py:SPCE", "no 'SPCE' in it; its OpSpecs are SPEC", id="wrong name"),
        pytest.param("{at}/spec.py:kernel", "it is a function; name a", id="no spec"),
        pytest.param("{at}/broken.py:SPEC", "reading it raised ZeroDivisionError", id="raises"),
        pytest.param("{at}/twice.py:SPEC", "two of its cases have the same id", id="same ids"),
        pytest.param("{at}/spec.txt:SPEC", "its name must end in .py", id="no python"),
        pytest.param("no.such.module:SPEC", "raised ModuleNotFoundError", id="no module"),
        pytest.param(
            "softmx",
            "op is 'softmx'; the catalog has w4a16, mmq, moe, ssd, conv1d, installed",
            id="no entry point",
        ),
        pytest.param("", "op is ''; the catalog has", id="empty"),
    ],
)
def test_what_cannot_be_loaded(tmp_path, text, message):
    write_spec(tmp_path, name="spec.py")
    write_spec(tmp_path, name="spec.txt")
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "twice.py").write_text(HONEST.replace("cases=CASES", "cases=(*CASES, CASES[0])"))
    with pytest.raises(UnsupportedError, match=message) as caught:
        load_spec(text.format(at=tmp_path))
    assert caught.value.exit_code == 1


def test_the_audit_can_be_left_to_a_parent_process(tmp_path):
    text = HONEST.replace("cases=CASES", "cases=()")
    path = tmp_path / "empty.py"
    path.write_text(text)
    assert load_user_spec(f"{path}:SPEC", audited=False).cases == ()
    with pytest.raises(GateError, match="its list of cases is empty") as caught:
        load_user_spec(f"{path}:SPEC")
    assert caught.value.exit_code == 3


def test_a_users_op_gets_the_default_of_its_space(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    spec = load_spec(f"{write_spec(tmp_path)}:SPEC")
    problem = Case("rowsoftmax", "rows", "float32", 4, 64, 64).problem("cpu-of-a-test")
    assert tuned_tile(spec, problem) == Tile.of("rows", block=16)
    with pytest.raises(TileError, match="block=32 is none of"):
        spec.run(spec.make_inputs(spec.cases[0], 0), tile=Tile.of("rows", block=32))


def test_an_op_without_a_space_has_no_tile(tmp_path):
    spec = load_spec(f"{write_spec(tmp_path, 'space=lambda: SPACE', 'space=None')}:SPEC")
    with pytest.raises(UnsupportedError, match="op 'rowsoftmax' has no tile space"):
        tuned_tile(spec, spec.cases[0].problem("cpu-of-a-test"))


def test_the_template_of_these_tests_is_plain():
    assert textwrap.dedent(HONEST) == HONEST
