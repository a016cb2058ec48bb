"""The benchmark of a hybrid's tokens, tried on the CPU with a small model."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not (BENCHMARKS / "gpu/hybrid_decode.py").exists(),
    reason="benchmarks/ is not part of this copy",
)
SMALL = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "mamba_num_heads": 8, "mamba_head_dim": 32,
    "ssm_state_size": 32, "n_groups": 2,
}  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "gpu"), str(BENCHMARKS), *sys.path])
    before = set(sys.modules)
    found = importlib.import_module("hybrid_decode")
    found.SIZES |= SMALL
    found.PATTERN = "M-M*-"
    yield found
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def run(script: Any, folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    code = script.main([
        "--device", "cpu", "--dtype", "float32", "--prompt", "9", "--steps", "2",
        "--layers", "5", "--out", str(folder), "--name", "x", *words,
    ])  # fmt: skip
    (written,) = folder.glob("*-x.json")
    return code, json.loads(written.read_text())


@pytest.mark.slow
def test_both_arms_are_checked_and_timed(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run(script, tmp_path, "--blocks", "6")
    assert code == 0
    assert result["error"] < 1e-5
    assert result["same_first"] == 1
    assert len(result["blocks"]) == 6
    assert set(result["blocks"][0]["us"]) == {script.BASE, script.OURS, script.CONTROL}
    assert "in 6 blocks" in capsys.readouterr().out


def test_a_wrong_step_is_not_timed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States that are not copied: the step begins where no prompt was."""
    monkeypatch.setattr("tilewright.model.captured._copy", lambda held, cache, tokens: None)
    code, result = run(script, tmp_path)
    assert code == 3
    assert "logits are off by" in result["fault"]
    assert result["blocks"] == []
