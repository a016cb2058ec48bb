"""Loaded safetensors folders against plain transformers models of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from model.checkpoint_models import FORMATS, HIDDEN, logits, plain_model, write_checkpoint
from model.gguf_models import relative_error
from tilewright.errors import FormatError, UnsupportedError
from tilewright.model.layers import QuantLinear, model_problems
from tilewright.model.load import load

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text")


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_the_dequantized_model(architecture: str, kind: str, tmp_path: Path) -> None:
    plain = plain_model(architecture)
    write_checkpoint(tmp_path, plain, kind)
    model, tokenizer = load(tmp_path)
    assert tokenizer is None
    right = logits(plain)
    assert right.abs().max() > 0.5
    assert relative_error(logits(model), right) < 1e-4
    layer = model.model.layers[0]
    expected: type = nn.Linear if kind == "none" else QuantLinear
    assert type(layer.self_attn.q_proj) is expected
    assert type(layer.mlp.down_proj) is expected


@pytest.mark.parametrize("kind", ["none", "gptq-sym"])
def test_untied_head_stays_dense(kind: str, tmp_path: Path) -> None:
    plain = plain_model("llama", tied=False)
    write_checkpoint(tmp_path, plain, kind)
    model, _ = load(tmp_path)
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert relative_error(logits(model), logits(plain)) < 1e-4


def test_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, plain_model("llama"), "awq-asym")
    model, _ = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("prefix", ["language_model.", "gemma-new"], ids=["old-names", "new-names"])
def test_text_part_of_an_image_model(prefix: str, tmp_path: Path) -> None:
    plain = plain_model("gemma3_text")
    write_checkpoint(tmp_path, plain, "none", prefix="language_model.")
    if prefix == "gemma-new":
        _rename(tmp_path, "language_model.model.", "model.language_model.")
    text = json.loads((tmp_path / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = load(tmp_path)
    assert relative_error(logits(model), logits(plain)) < 1e-4
    assert type(model).__name__ == "Gemma3ForCausalLM"


def _rename(folder: Path, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({name.replace(old, new): t for name, t in load_file(path).items()}, path)


def test_image_tensors_are_skipped_with_a_note(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    plain = plain_model("gemma3_text")
    write_checkpoint(tmp_path, plain, "none", prefix="language_model.")
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "vision_tower.embed.weight": torch.zeros(3)}, path)
    model, _ = load(tmp_path)
    assert "1 tensors of the image part are not loaded" in model.tilewright_info.notes


def test_info_problems_and_generation_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, plain_model("llama"), "compressed-asym")
    model, _ = load(tmp_path)
    info = model.tilewright_info
    assert (info.format, info.architecture) == ("compressed-tensors", "llama")
    assert info.file_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert info.packed["uint4"].tensors == 14
    assert info.dense["float16"].tensors == 6
    assert info.notes == ["the folder has no tokenizer"]
    problems = model_problems(model)
    assert tuple(problems[0]) == ("model.layers.*.self_attn.q_proj", "uint4", 128, 128, 32, 4)
    assert sum(p.count for p in problems) == 14
    assert {p.op for p in problems} == {"w4a16"}
    assert model.generation_config.eos_token_id == [2]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    model, _ = load(tmp_path)
    assert model.generation_config.eos_token_id == [2, 5]


def test_the_folders_own_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    write_checkpoint(tmp_path, plain_model("llama"), "none")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    _, tokenizer = load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("b a z", add_special_tokens=False) == [2, 1, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = plain_model("llama")
    write_checkpoint(tmp_path, plain, "gptq-sym")
    model, _ = load(tmp_path, dtype=dtype)
    assert model.dtype == dtype
    limit = 0.01 if dtype is torch.float16 else 0.08
    assert relative_error(logits(model), logits(plain)) < limit


def test_unknown_model_type_lists_what_loads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, plain_model("llama"), "none")
    _edit_config(tmp_path, model_type="phi3")
    with pytest.raises(
        UnsupportedError, match="'phi3'; supported are llama, qwen2, qwen3, qwen3_moe, gemma3"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2\.input_layernorm\.weight.*and 1 more"),
        ({"num_hidden_layers": 1}, r"has model\.layers\.1\..*no place for"),
        ({"intermediate_size": 128}, r"gate_proj.*\[256, 128\].*\[128, 128\]"),
        ({"tie_word_embeddings": False}, r"lacks lm_head\.weight"),
        ({"num_attention_heads": 3}, "config.json makes no llama model"),
    ],
    ids=["layer-missing", "layer-too-many", "wrong-shape", "head-missing", "bad-config"],
)
def test_tensors_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, plain_model("llama"), "gptq-sym")
    _edit_config(tmp_path, **changes)
    with pytest.raises(FormatError, match=message):
        load(tmp_path)


def test_loading_lets_go_of_the_file(tmp_path: Path) -> None:
    """No tensor of the model is a view of the mapped file, which can be deleted and changed."""
    plain = plain_model("llama")
    write_checkpoint(tmp_path, plain, "compressed-sym")
    right = logits(plain)
    model, _ = load(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * (path.stat().st_size // 4))
    assert relative_error(logits(model), right) < 1e-4
    assert model.model.embed_tokens.weight.shape[1] == HIDDEN
