from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from fakes import VOCAB, ByteTokenizer
from tilewright.cli.main import cli


class UniformModel:
    """Every token is equally likely, so the perplexity is the size of the vocabulary."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.config = SimpleNamespace(max_position_embeddings=1024)
        self.calls = 0
        self.interrupt_at = interrupt_at

    def __call__(self, *, input_ids: torch.Tensor, logits_to_keep: int, **_: Any) -> Any:
        self.calls += 1
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        return SimpleNamespace(logits=torch.zeros(1, logits_to_keep, VOCAB))


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    (tmp_path / "m.gguf").write_bytes(b"")
    (tmp_path / "t.txt").write_text("x" * 100 + "\n")

    def run(model: Any, *arguments: str) -> Result:
        monkeypatch.setattr(
            "tilewright.cli.perplexity.load_model",
            lambda path, activations, device: (model, ByteTokenizer(adds_bos=False)),
        )
        base = ["perplexity", str(tmp_path / "m.gguf"), "--text", str(tmp_path / "t.txt")]
        return CliRunner().invoke(cli, [*base, "-c", "10", *arguments])

    return run


def test_value_error_and_what_was_scored(invoke: Any) -> None:
    result = invoke(UniformModel())
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "perplexity 258.0000 +/- 0.0000 (10 chunks of 10, 40 tokens scored, "
    )


def test_one_final_newline_is_dropped(invoke: Any) -> None:
    model = UniformModel()
    invoke(model)
    assert model.calls == 10  # 100 tokens, not 101


def test_json(invoke: Any) -> None:
    whole = json.loads(invoke(UniformModel(), "--chunks", "2", "--json").stdout)
    row = whole["perplexity"]
    assert row["value"] == pytest.approx(258)
    assert row["chunks"] == row["chunks_wanted"] == 2
    assert row["complete"] is True
    assert row["text"] == "t.txt"
    assert "date" in whole["provenance"]


def test_ctrl_c_prints_what_it_had(invoke: Any) -> None:
    result = invoke(UniformModel(interrupt_at=4))
    assert result.exit_code == 0
    assert "interrupted after 3 of 10 chunks" in result.stderr
    assert "(3 chunks of 10, 12 tokens scored" in result.stdout


def test_ctrl_c_before_the_first_value_aborts(invoke: Any) -> None:
    result = invoke(UniformModel(interrupt_at=1))
    assert result.exit_code == 130
    assert result.stdout == ""


def test_a_text_that_is_not_utf8_is_a_usage_error(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"abc\xff")
    result = invoke(UniformModel())
    assert result.exit_code == 2
    assert "not UTF-8 at byte 3" in result.stderr


def test_a_text_that_is_too_short_is_an_error(invoke: Any) -> None:
    result = invoke(UniformModel(), "-c", "64")
    assert result.exit_code == 1
    assert "100 tokens are too few" in result.stderr
