from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from tilewright.cli.main import cli
from tilewright.errors import FormatError
from tilewright.report.info import describe, info_json, info_tables
from tilewright.report.render import to_markdown


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    """Two Q4_0 matrices of one shape, one Q8_0, one type without kernels, a norm."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_block_count(2)
    writer.add_context_length(128)
    kinds = gguf.GGMLQuantizationType
    rows = np.zeros((6, 64), dtype=np.float32)
    for name, kind in [("a", kinds.Q4_0), ("b", kinds.Q4_0), ("c", kinds.Q8_0)]:
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(rows, kind), raw_dtype=kind)
    block, size = gguf.GGML_QUANT_SIZES[kinds.IQ2_XXS]
    raw = np.zeros((4, 512 // block * size), dtype=np.uint8)
    writer.add_tensor("d.weight", raw, raw_dtype=kinds.IQ2_XXS)
    writer.add_tensor("norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def test_types_are_counted_with_bytes_and_fate(file: Path) -> None:
    types = {row.type: row for row in describe(file).types}
    assert (types["Q4_0"].tensors, types["Q4_0"].elements) == (2, 2 * 6 * 64)
    assert types["Q4_0"].bytes == 2 * 6 * 2 * 18  # two blocks of 18 bytes a row
    assert types["Q8_0"].bytes == 6 * 2 * 34
    assert types["IQ2_XXS"].elements == 4 * 512
    assert types["F32"].bytes == 256
    fates = {kind: row.runs for kind, row in types.items()}
    assert fates == {
        "Q4_0": "packed",
        "Q8_0": "packed",
        "IQ2_XXS": "dequantized",
        "F32": "dense",
    }


def test_shapes_are_matrices_only_and_counted_once(file: Path) -> None:
    shapes = [(s.N, s.K, s.type, s.tensors) for s in describe(file).shapes]
    assert sorted(shapes) == [
        (4, 512, "IQ2_XXS", 1),
        (6, 64, "Q4_0", 2),
        (6, 64, "Q8_0", 1),
    ]


def test_head_says_what_it_is_and_notes_what_is_lost(file: Path) -> None:
    info = describe(file)
    assert (info.architecture, info.name, info.supported) == ("llama", "Tiny", True)
    assert info.hyperparameters == {"layers": 2, "context": 128}
    text = "".join(to_markdown(table) for table in info_tables(info))
    assert text.startswith("tiny.gguf: gguf, llama, 'Tiny'\n")
    assert "dequantized while loading, as no kernel multiplies it packed: IQ2_XXS" in text
    assert "does not load" not in text


def test_an_architecture_that_does_not_load_is_named(tmp_path: Path) -> None:
    info = describe(write_gguf(tmp_path / "x.gguf", architecture="falcon"))
    assert not info.supported
    text = "".join(to_markdown(table) for table in info_tables(info))
    assert "architecture 'falcon' does not load in this version" in text


def test_json_is_the_same_facts(file: Path) -> None:
    info = describe(file)
    whole = json.loads(json.dumps(info_json(info)))
    assert whole["bytes"] == sum(row["bytes"] for row in whole["types"])
    assert whole["elements"] == 3 * 6 * 64 + 4 * 512 + 64
    assert whole["shapes"][0]["runs"] in ("packed", "dequantized")


def write_folder(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_folder_of_gptq_linears(tmp_path: Path) -> None:
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
    }
    tensors: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}
    for name in ("q_proj", "k_proj"):
        prefix = f"model.layers.0.self_attn.{name}"
        tensors[f"{prefix}.qweight"] = torch.zeros(8, 16, dtype=torch.int32)
        tensors[f"{prefix}.qzeros"] = torch.full((2, 2), 0x77777777, dtype=torch.int32)
        tensors[f"{prefix}.scales"] = torch.ones(2, 16, dtype=torch.float16)
    folder = write_folder(
        tmp_path / "m",
        {"model_type": "llama", "hidden_size": 64, "quantization_config": quantization},
        tensors,
    )
    info = describe(folder)
    assert (info.format, info.architecture, info.supported) == ("gptq", "llama", True)
    assert info.hyperparameters == {"embedding": 64}
    assert [(s.N, s.K, s.type, s.tensors) for s in info.shapes] == [(16, 64, "uint4b8", 2)]
    types = {row.type: (row.tensors, row.bytes, row.runs) for row in info.types}
    assert types["uint4b8"] == (2, 2 * (8 * 16 * 4 + 2 * 2 * 4 + 2 * 16 * 2), "packed")
    assert types["BF16"] == (1, 128, "dense")


def test_a_folder_that_is_not_quantized(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {"model_type": "qwen3"}, {"a.weight": torch.zeros(4, 8)})
    info = describe(folder)
    assert info.format == "safetensors"
    assert [(row.type, row.runs) for row in info.types] == [("F32", "dense")]


def test_a_folder_with_one_gguf_file(file: Path) -> None:
    assert describe(file.parent).file == "tiny.gguf"


def test_the_verb_prints_tables_or_json(file: Path) -> None:
    result = CliRunner().invoke(cli, ["info", str(file)])
    assert result.exit_code == 0
    assert "matrices [N, K]" in result.stdout
    whole = json.loads(CliRunner().invoke(cli, ["info", str(file), "--json"]).stdout)
    assert whole["architecture"] == "llama"


def test_a_damaged_file_is_our_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(write_gguf(tmp_path / "whole.gguf").read_bytes()[:200])
    with pytest.raises(FormatError, match=r"cut\.gguf"):
        describe(path)
    result = CliRunner().invoke(cli, ["info", str(path)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
