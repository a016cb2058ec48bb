"""The benchmark of the synthetic 8B model, tried on the CPU with a small model and CPU tiles."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(
    not (GPU / "model_8b.py").exists(), reason="benchmarks/ is not part of this copy"
)

LADDER = """
spec = "w4a16"
[[products]]
type = "uint4"
shape = [256, 128]
m = [16]
[base]
name = "dot products"
[[base.tiles]]
tile = "dot(SETTINGS)"
[[rung]]
name = "panels"
[[rung.tiles]]
m = "2-"
tile = "panel(mr=8, nv=3, block_parts=16, threads=0)"
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(GPU), str(GPU.parent), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module("model_8b")
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and GPU.parent in Path(file).parents:
            del sys.modules[name]


@pytest.fixture
def small(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    shape = {
        **script.LLAMA_3_8B, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 320,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    monkeypatch.setattr(script, "LLAMA_3_8B", shape)
    return script


def ladder(folder: Path, tile: str) -> str:
    path = folder / "ladder.toml"
    path.write_text(LADDER.replace("dot(SETTINGS)", tile))
    return str(path)


def run(script: Any, folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    short = ["--device", "cpu", "--layers", "1", "--input-len", "32", "--blocks", "6"]
    code = script.main([*words, *short, "--out", str(folder / "out")])
    (path,) = (folder / "out").glob("*.json")
    return code, json.loads(path.read_text())


def test_every_arm_is_checked_and_timed_in_common_blocks(small: Any, tmp_path: Path) -> None:
    file = ladder(tmp_path, "blas(panel_rows=256, threads=0)")
    code, result = run(small, tmp_path, file, "--control", file)
    names = [
        "dot products", "panels", "control: dot products", "control: panels", "tilewright", "dense",
    ]  # fmt: skip
    assert code == 0
    assert [arm["name"] for arm in result["arms"]] == names
    assert all(arm["check"]["right"] and arm["check_after"]["right"] for arm in result["arms"])
    assert all(set(block["us"]) == {*names, "control"} for block in result["blocks"])
    assert len(result["blocks"]) == 6
    pairs = {(row["a"], row["b"]) for row in result["judgements"]}
    assert ("control: dot products", "control: panels") in pairs
    assert ("panels", "control: dot products") not in pairs
    assert {b for a, b in pairs if a == "dot products"} == set(names[1:])
    assert result["origin"]["versions"]["torch"]


def test_a_ladder_must_name_a_tile_for_every_product(small: Any, tmp_path: Path) -> None:
    path = tmp_path / "ladder.toml"
    path.write_text(LADDER.replace("[[base.tiles]]", "[[base.tiles]]\nm = 1").replace(
        "dot(SETTINGS)", "dot(threads=0)"))  # fmt: skip
    with pytest.raises(SystemExit, match=r"dot products has no tile for N=\d+ K=\d+ M=32"):
        run(small, tmp_path, str(path))
