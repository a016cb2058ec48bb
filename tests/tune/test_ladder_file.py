"""Ladder files: what they say, how change sets add up, and every way of being wrong."""

from __future__ import annotations

import importlib
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import FormatError, UnsupportedError
from tilewright.tiles.tile import Tile
from tilewright.tune.ladder_file import (
    ChangeSet,
    Ladder,
    Product,
    TileRule,
    read_ladder,
    stack,
)

TOML = """
title = "A ladder"
model = "m.gguf"
tests = ["pp512", "pp2048"]
control = "tg32"
blocks = 12

[base]
name = "base"
decoder = "transformers"
threads = 2
env = { SETTING = 1 }
[[base.tiles]]
op = "mmq"
type = "Q4_*"
m = "2-"
tile = "blas(panel_rows=256)"

[[rung]]
name = "panel"
table = "tiles.json"
[[rung.tiles]]
m = 512
n = 1536
k = 576
tile = { algorithm = "panel", mr = 8, nv = 3, block_parts = 16 }

[[rung]]
name = "int8"
activations = "int8"
rev = "v2"
env = { SETTING = "2", OTHER = "x" }
moves = ["tg32"]
[[rung.tiles]]
m = "16-64"
tile = "int8(mr=4, nv=3, block_parts=32)"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiles.json").write_text("{}")
    return tmp_path


def write(folder: Path, text: str, name: str = "ladder.toml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


BLAS = TileRule(Tile.of("blas", panel_rows=256), "mmq", "Q4_*", (2, None))
PANEL = TileRule(
    Tile.of("panel", mr=8, nv=3, block_parts=16), None, None, (512, 512), 1536, 576
)  # fmt: skip
INT8 = TileRule(Tile.of("int8", mr=4, nv=3, block_parts=32), m=(16, 64))


def expected(folder: Path) -> Ladder:
    return Ladder(
        title="A ladder",
        base=ChangeSet(
            "base", decoder="transformers", threads=2, env={"SETTING": "1"}, tiles=(BLAS,)
        ),
        rungs=(
            ChangeSet("panel", table=(folder / "tiles.json").resolve(), tiles=(PANEL,)),
            ChangeSet(
                "int8", activations="int8", rev="v2", env={"SETTING": "2", "OTHER": "x"},
                tiles=(INT8,), moves=("tg32",),
            ),
        ),
        model="m.gguf",
        tests=("pp512", "pp2048"),
        control=("tg32",),
        blocks=12,
    )  # fmt: skip


def test_a_toml_file_is_read_whole(folder: Path) -> None:
    assert read_ladder(write(folder, TOML)) == expected(folder)


def test_a_yaml_file_says_the_same(folder: Path) -> None:
    yaml = pytest.importorskip("yaml")
    import tomllib

    text = yaml.safe_dump(tomllib.loads(TOML))
    assert read_ladder(write(folder, text, "ladder.yaml")) == expected(folder)


def test_yaml_without_its_package_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without(name: str, *args: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr("tilewright.tune.ladder_file.import_module", without)
    with pytest.raises(UnsupportedError, match="needs PyYAML: pip install pyyaml, or write it as"):
        read_ladder(write(folder, "base: 1", "ladder.yml"))


def test_change_sets_add_up(folder: Path) -> None:
    ladder = read_ladder(write(folder, TOML))
    whole = stack(ladder.base, ladder.rungs)
    assert whole == ChangeSet(
        "int8",
        activations="int8",
        decoder="transformers",
        threads=2,
        table=(folder / "tiles.json").resolve(),
        rev="v2",
        env={"SETTING": "2", "OTHER": "x"},
        tiles=(BLAS, PANEL, INT8),
        moves=("tg32",),
    )
    assert stack(ladder.base, []) == ladder.base
    assert stack(ladder.base, [], "again").name == "again"


def test_products_in_place_of_a_model(folder: Path) -> None:
    path = write(
        folder,
        """
        spec = "mmq"
        [[products]]
        type = "Q4_1"
        shape = [1536, 576]
        m = [1, 512]
        [[products]]
        type = "Q8_0"
        shape = [64, 64]
        m = 16
        group = 32
        dtype = "bfloat16"
        [base]
        name = "a"
        [[rung]]
        name = "b"
        """,
    )
    ladder = read_ladder(path)
    assert ladder.title == "ladder"
    assert ladder.products == (
        Product("Q4_1", (1536, 576), (1, 512)),
        Product("Q8_0", (64, 64), (16,), 32, "bfloat16"),
    )
    assert ladder.tests == ()


def test_a_change_set_is_plain_json(folder: Path) -> None:
    ladder = read_ladder(write(folder, TOML))
    row = json.loads(json.dumps(stack(ladder.base, ladder.rungs).to_dict()))
    assert row["table"] == "tiles.json"
    assert row["tiles"][0]["m"] == [2, None]
    assert row["tiles"][0]["tile"] == {"algorithm": "blas", "panel_rows": 256}


SHORT = 'tests = ["pp8"]\n[base]\nname = "a"\n[[rung]]\nname = "b"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is no TOML"),
        ('tests = ["pp8"]', r"must have a \[base\] and at least one \[\[rung\]\]"),
        (SHORT + "speed = 1", r"rung 1 has unknown keys \['speed'\]; known are name, activations"),
        ("x = 1\n" + SHORT, r"the file has unknown keys \['x'\]"),
        (SHORT.replace('"b"', '"a"'), r"uses the names \['a'\] twice"),
        (SHORT.replace('"b"', '"control"'), r"uses the names \['control'\] twice"),
        (SHORT.replace('name = "b"', "threads = 1"), "rung 1 must have a name"),
        (SHORT.replace('tests = ["pp8"]', ""), "must have either tests, of a model, or"),
        (SHORT.replace('["pp8"]', "8"), "has tests = 8; it must be a text or a list of texts"),
        (SHORT + 'activations = "int4"', "must be one of float, int8"),
        (SHORT + "threads = 0", "has threads = 0; it must be a whole number of at least 1"),
        (SHORT + "threads = true", "has threads = True"),
        (SHORT + 'table = "none.json"', "there is no such file beside ladder.toml"),
        (SHORT + "env = 1", "has env = 1; it must map names to texts"),
        (SHORT + 'moves = ["tg4"]', r"says 'b' moves \['tg4'\], which control does not name"),
        ('control = "pp8"\n' + SHORT, "names a test in tests and in control"),
        (SHORT + "[[rung.tiles]]\nm = 1", "rung 1, tiles 1, has tile = None; write it as"),
        (SHORT + '[[rung.tiles]]\ntile = "8("', "rung 1, tiles 1, has a bad tile"),
        (SHORT + "[[rung.tiles]]\ntile = { mr = 1 }", "has a bad tile: .*'algorithm'"),
        (SHORT + '[[rung.tiles]]\ntile = "dot(unroll=1)"\nm = "8-2"', "has m = '8-2'"),
        (SHORT + '[[rung.tiles]]\ntile = "dot(unroll=1)"\nm = "x"', "has m = 'x'; give one"),
        (SHORT + '[[rung.tiles]]\ntile = "dot(unroll=1)"\nm = true', "has m = True"),
        ('model = "m"\n' + SHORT.replace('tests = ["pp8"]', "") + "[[products]]\n"
         'type = "Q4_1"\nshape = [1, 32]\nm = 1', "know no model and no control"),
        (SHORT.replace('tests = ["pp8"]', "") + '[[products]]\ntype = "Q4_1"\nshape = [1]\nm = 1',
         r"product 1 has shape = \[1\]; it must be 2 whole numbers"),
        (SHORT.replace('tests = ["pp8"]', "") + "[[products]]\nshape = [1, 1]\nm = 1",
         "product 1 must have a type"),
        (SHORT.replace('tests = ["pp8"]', "") + '[[products]]\ntype = "Q4_1"\nshape = [1, 32]',
         "product 1 has m = None"),
    ],
)  # fmt: skip
def test_wrong_files(folder: Path, text: str, message: str) -> None:
    path = write(folder, text)
    with pytest.raises(FormatError, match=message) as raised:
        read_ladder(path)
    assert str(path) in str(raised.value)


def test_a_file_that_cannot_be_read(folder: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        read_ladder(folder / "none.toml")


def test_the_example_ladder_is_read() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "ladders" / "cpu-smollm2.toml"
    ladder = read_ladder(path)
    assert [rung.name for rung in ladder.rungs] == ["panel kernel", "8-bit activations"]
    assert ladder.control == ("tg16",)
