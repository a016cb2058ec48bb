"""Which files an op's kernels are made of: editing any of them makes its rows stale."""

from __future__ import annotations

import functools
import importlib.util
import operator
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import UnsupportedError
from tilewright.ops.catalog import SPECS
from tilewright.ops.choose import running_of
from tilewright.ops.contract import OpSpec
from tilewright.ops.cpu.runtime import kernel_hash
from tilewright.ops.kernel_files import kernel_files
from tilewright.ops.user_spec import load_user_spec
from tilewright.tiles.table import TableHeader, TableRow, TileTable, forget, lookup, save_table
from tilewright.tiles.tile import Tile
from user_specs import write_spec

KERNEL = "def kernel(x):\n    e = torch.exp(x - x.max(dim=1, keepdim=True).values)\n"
KERNEL += "    return e / e.sum(dim=1, keepdim=True)\n"


def load(folder: Path, old: str = "", new: str = "", name: str = "spec.py") -> OpSpec:
    return load_user_spec(f"{write_spec(folder, old, new, name=name)}:SPEC", audited=False)


@pytest.fixture
def split(tmp_path: Path) -> OpSpec:
    """A spec whose kernel lies beside it, in parts; other files lie there too."""
    (tmp_path / "softmax_kernel_of_a_test.py").write_text(
        "import torch\n" + KERNEL.replace("    e =", "    import exponent_of_a_test\n    e =")
    )
    (tmp_path / "exponent_of_a_test.py").write_text("from parts_of_a_test import step\n")
    parts = tmp_path / "parts_of_a_test"
    (parts / "deep").mkdir(parents=True)
    (parts / "__init__.py").write_text("step = 1\n")
    (parts / "deep" / "__init__.py").touch()
    (parts / "deep" / "more.py").touch()
    (tmp_path / "other.py").write_text("import spec\n")
    return load(tmp_path, KERNEL, "from softmax_kernel_of_a_test import kernel\n")


def names(spec: OpSpec, folder: Path) -> list[str]:
    return [str(path.relative_to(folder.resolve())) for path in kernel_files(spec)]


def test_a_single_file_and_what_it_imports_from_beside_it(split: OpSpec, tmp_path: Path) -> None:
    assert sorted(names(split, tmp_path)) == [
        "exponent_of_a_test.py",
        "parts_of_a_test/__init__.py",
        "parts_of_a_test/deep/__init__.py",
        "parts_of_a_test/deep/more.py",
        "softmax_kernel_of_a_test.py",
        "spec.py",
    ]


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("spec.py", True),
        ("softmax_kernel_of_a_test.py", True),
        ("exponent_of_a_test.py", True),
        ("parts_of_a_test/deep/more.py", True),
        ("other.py", False),
    ],
)
def test_editing_a_file_of_the_kernels_makes_their_rows_stale(
    split: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, stale: bool
) -> None:
    problem = split.cases[2].problem("cpu-of-a-test").bucketed()
    now = running_of(split)
    header = TableHeader(
        problem.arch, (problem.arch,), 2, "test", now.compiler, now.kernel_hash,
        {split.name: now.op_version}, "2026-01-01T00:00:00+00:00", "test",
    )  # fmt: skip
    row = TableRow(problem, Tile.of("rows", block=64), 10.0, 0.1, 9, 1e-15, 3)
    tables = tmp_path / "tables"
    save_table(tables / "tuned.json", TileTable(header, (row,)))
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tables))

    def how() -> str:
        assert split.space is not None
        forget()
        return lookup(problem, split.space(), units=2, running=lambda: running_of(split)).how

    assert how() == "exact"
    with open(tmp_path / file, "a") as text:
        text.write("# changed\n")
    assert how() == ("default" if stale else "exact")


def test_a_package_counts_whole_and_what_lies_around_it_does_not(tmp_path: Path) -> None:
    package = tmp_path / "kernels_of_a_test"
    package.mkdir()
    for name in ("__init__.py", "fast.py"):
        (package / name).touch()
    (package / "notes").mkdir()
    (package / "notes" / "plot.py").touch()  # no package: a folder that happens to lie there
    (tmp_path / "beside.py").touch()
    spec = load(package)
    assert names(spec, package) == ["__init__.py", "fast.py", "spec.py"]


def test_a_named_source_counts_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "far"
    (far / "far_package_of_a_test").mkdir(parents=True)
    for name in ("far_module_of_a_test.py", "far_package_of_a_test/__init__.py"):
        (far / name).touch()
    monkeypatch.syspath_prepend(str(far))
    sources = 'SOURCES = ("far_module_of_a_test", "far_package_of_a_test")\n'
    spec = load(tmp_path, "import torch\n", "import torch\n" + sources)
    before = running_of(spec).kernel_hash
    assert sorted(names(spec, tmp_path)) == [
        "far/far_module_of_a_test.py",
        "far/far_package_of_a_test/__init__.py",
        "spec.py",
    ]
    (far / "far_package_of_a_test" / "__init__.py").write_text("# changed\n")
    assert running_of(spec).kernel_hash != before


def test_where_the_files_lie_does_not_matter(tmp_path: Path) -> None:
    hashes = []
    for spec_folder, far in (("a", "b"), ("b", "a")):  # before and behind the other's path
        top = tmp_path / f"{spec_folder}{far}"
        (top / spec_folder).mkdir(parents=True)
        (top / far).mkdir()
        name = f"far_module_of_{spec_folder}"
        (top / far / "kernel.py").write_text("x = 1\n")
        spec = load(top / spec_folder, "import torch\n", f'import torch\nSOURCES = ("{name}",)\n')
        (top / spec_folder / "spec.py").write_text("same\n")
        found = importlib.util.spec_from_file_location(name, top / far / "kernel.py")
        assert found is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        hashes.append(running_of(spec).kernel_hash)
        del sys.modules[name]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("name", ["no_such_module_of_a_test", "no_such.module", "math", ""])
def test_a_source_that_is_no_module_is_an_error(tmp_path: Path, name: str) -> None:
    spec = load(tmp_path, "import torch\n", f'import torch\nSOURCES = ("{name}",)\n')
    with pytest.raises(UnsupportedError, match=f"its sources name '{name}', which is no module"):
        running_of(spec)


def test_partials_and_callable_objects_are_followed_to_their_file(split: OpSpec) -> None:
    files = kernel_files(split)
    assert kernel_files(split.with_run(functools.partial(split.run, threads=1))) == files

    class Runner:
        def __call__(self, *_: Any, **__: Any) -> Any: ...

    assert Path(__file__).resolve() in kernel_files(split.with_run(Runner()))


def test_code_without_a_source_file_is_an_error(split: OpSpec) -> None:
    typed: dict[str, Any] = {}
    exec("def run(inputs, tile=None, threads=None): ...", typed)
    for run in (typed["run"], operator.add):
        with pytest.raises(UnsupportedError, match="is not in a file"):
            running_of(replace(split, run=run))


def test_products_on_the_cpu_share_one_hash() -> None:
    products = ("w4a16", "mmq", "moe")
    assert {running_of(SPECS[name]).kernel_hash for name in products} == {kernel_hash()}


def test_ops_of_other_kernels_have_hashes_of_their_own() -> None:
    found = {running_of(SPECS[name]).kernel_hash for name in ("ssd", "conv1d")}
    assert len(found | {kernel_hash()}) == 3
