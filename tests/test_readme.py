"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import click
import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import tilewright
from tilewright.cli.main import cli
from tilewright.model.demo import fetch_demo_model

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_verbs_of_the_table_are_the_verbs() -> None:
    rows = re.findall(r"^\| `([a-z-]+)", README, re.MULTILINE)
    assert sorted(rows) == sorted(cli.list_commands(click.Context(cli)))


def test_the_library_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q4_0
    rows = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    writer.add_tensor("blk.0.attn_q.weight", gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(PYTHON[1], names)  # our own README
    assert list(names["y"].shape) == [4, 6]  # type: ignore[attr-defined]


def test_the_gpu_example_runs_on_any_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from model.checkpoint_models import plain_model, write_checkpoint

    model = plain_model("llama")
    write_checkpoint(tmp_path / "folder", model, "compressed-asym")
    monkeypatch.chdir(tmp_path)
    linear = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, linear.in_features)
    names: dict[str, object] = {"x": x, "tilewright": tilewright, "torch": torch}
    assert '"cuda"' in PYTHON[2]
    exec(PYTHON[2].replace('"cuda"', '"cpu"'), names)  # our own README
    assert torch.allclose(names["y"], linear(x), rtol=1e-3, atol=1e-4)  # type: ignore[arg-type]


def test_the_files_it_links_to_are_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).parents[1] / link).exists(), link


@pytest.mark.slow
def test_the_first_example_prints_what_the_readme_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fetch_demo_model()
    exec(PYTHON[0], {})  # our own README
    shown = re.search(r"```python\n.*?```\n\n```\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert capsys.readouterr().out == shown[1]


@pytest.mark.slow
def test_the_answer_is_what_the_readme_says() -> None:
    fetch_demo_model()
    result = CliRunner().invoke(cli, ["run", "smollm2", "What is the capital of France?"])
    assert result.exit_code == 0
    assert f'smollm2 "What is the capital of France?"\n{result.stdout}```' in README


def test_make_targets_that_documents_name_exist() -> None:
    root = Path(__file__).parents[1]
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    text = README + (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    named |= set(re.findall(r"`make ([a-z-]+)`", text))
    assert {"demo", "test", "check"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
