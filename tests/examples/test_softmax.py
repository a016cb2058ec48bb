"""The example that the documentation walks through: short, right on both backends, gated."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from tilewright.errors import TileError
from tilewright.ops.catalog import load_spec
from tilewright.ops.contract import Case
from tilewright.tune.gate import CHECKS, gate
from tilewright.tune.verify import negative_controls, verify_op

INTERPRETER: Any
try:  # while tests are collected: later, something else may have imported triton to compile
    INTERPRETER = import_module("triton_interpreter")
except ModuleNotFoundError:
    INTERPRETER = None
NO_TRITON = "triton is not installed: pip install 'tilewright[triton]'"
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "softmax.py"


@pytest.fixture(params=["numba", "triton"])
def spec(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example on one backend; the interpreted one from a copy, since a file is run once."""
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path / "tiles"))
    if request.param == "numba":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        return load_spec(f"{EXAMPLE}:SPEC")
    if INTERPRETER is None:
        pytest.skip(NO_TRITON)
    copy = tmp_path / "softmax_interpreted.py"
    copy.write_text(EXAMPLE.read_text())
    with INTERPRETER.interpreting():
        return load_spec(f"{copy}:SPEC")


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 100


def test_its_cases_pass(spec):
    report = verify_op(spec)
    assert [str(group) for group in report.groups()] == ["Softmax rows 16/16 passed"]
    controls = negative_controls(spec)
    assert [(c.visible, c.caught) for c in controls] == [(True, True)]


def test_its_oracle_is_scipys(spec):
    for case in spec.cases:
        inputs = spec.make_inputs(case, 3)
        np.testing.assert_allclose(
            spec.reference(inputs), scipy.special.softmax(inputs.x64(), axis=1), rtol=1e-13
        )


def test_every_tile_of_its_space_passes(spec):
    space = spec.space()
    case = Case("softmax", "rows", "float32", 5, 200, 200)
    tiles = space.candidates(case.problem("a-test"))
    assert {tile.block for tile in tiles} == {16, 64, 256}
    assert verify_op(spec, cases=[case], tiles=tiles).passed


def test_its_planted_tile_is_right_on_whole_blocks_and_falls(spec):
    (wrong,) = spec.space().planted
    broken = spec.with_run(wrong.run)
    assert verify_op(broken, cases=wrong.cases, tiles=[wrong.tile]).passed
    result = gate(broken, wrong.tile, wrong.cases)
    assert result.check == wrong.caught_by == "ragged-shapes"
    without = set(CHECKS) - {"ragged-shapes"}
    assert gate(broken, wrong.tile, wrong.cases, _checks=without).passed


def test_it_takes_a_view_of_rows(spec):
    inputs = spec.make_inputs(Case("softmax", "rows", "float32", 4, 40, 40, flags=("strided",)), 0)
    assert inputs.x.stride(0) == 64
    expected = torch.softmax(inputs.x.double(), dim=1)
    torch.testing.assert_close(spec.run(inputs).double(), expected, rtol=1e-6, atol=0)


def test_the_rule_of_its_space(spec):
    inputs = spec.make_inputs(spec.cases[0], 0)
    tile = next(tile for tile in spec.space().every() if tile.block == 1024)
    with pytest.raises(TileError, match="breaks rule 'row': more than half of a block"):
        spec.run(inputs, tile=tile)


def run_cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "tilewright", *arguments], cwd=ROOT, env={**kept, **environment},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.parametrize("interpret", ["0", "1"], ids=["numba", "triton"])
def test_verify_by_spec(interpret, tmp_path):
    if interpret == "1" and INTERPRETER is None:
        pytest.skip(NO_TRITON)
    done = run_cli(
        "verify", "--spec", "examples/softmax.py:SPEC",
        TRITON_INTERPRET=interpret, TILEWRIGHT_TILES=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Softmax rows 16/16 passed\n")


def test_the_gate_by_spec(tmp_path):
    done = run_cli(
        "verify", "--gate", "--spec", "examples/softmax.py:SPEC", TILEWRIGHT_TILES=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert "Softmax k-tail: 1/1 rejected, by ragged-shapes" in done.stdout
    assert "1/1 planted tiles rejected, 3/3 right tiles passed" in done.stdout
