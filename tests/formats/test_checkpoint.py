"""Checkpoints that other tools wrote, and every format's packing written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from formats.byte_files import safetensors_file
from formats.w4_files import (
    awq,
    awq_config,
    compressed_config,
    compressed_tensors,
    gptq,
    gptq_config,
    random_weight,
    write_checkpoint,
)
from tilewright.errors import FormatError, UnsupportedError
from tilewright.formats.checkpoint import W4Scheme, read_checkpoint
from tilewright.formats.gguf import check_scales, read_gguf

DATA = Path(__file__).parents[1] / "data"
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")

# folder: scheme, largest and 99.9 % of abs(dequantized - original) / scale (None: not stated),
# relative Frobenius error of q, k, down: figures published beside the files.
THIRD_PARTY: dict[str, tuple[W4Scheme, float | None, float | None, tuple[float, ...]]] = {
    "compressed-tensors-sym-g64": (
        W4Scheme("compressed-tensors", "pack-quantized", 64, True),
        0.503,
        0.502,
        (0.1250, 0.1211, 0.1083),
    ),
    "compressed-tensors-asym-g32": (
        W4Scheme("compressed-tensors", "pack-quantized", 32, False),
        0.505,
        0.501,
        (0.0900, 0.0906, 0.0824),
    ),
    "compressed-tensors-gptq-static-actorder-g64": (
        W4Scheme("compressed-tensors", "pack-quantized", 64, True),
        None,
        None,
        (0.2067, 0.1986, 0.1806),
    ),
    "auto-round-gptq-sym-g64": (
        W4Scheme("gptq", "v1", 64, True),
        1.000,
        None,
        (0.1146, 0.1113, 0.0991),
    ),
    "auto-round-gptq-sym-g32": (
        W4Scheme("gptq", "v1", 32, True),
        1.000,
        None,
        (0.0993, 0.0972, 0.0872),
    ),
    "auto-round-awq-asym-g32": (
        W4Scheme("awq", "gemm", 32, False),
        0.502,
        0.500,
        (0.0900, 0.0906, 0.0824),
    ),
    "gptqmodel-gptq-sym-g64": (
        W4Scheme("gptq", "v1", 64, True),
        None,
        None,
        (0.1605, 0.1542, 0.1521),
    ),
}


def to_three_digits(value: float) -> float:
    return round(float(value), 3)


@pytest.mark.parametrize("folder", THIRD_PARTY)
def test_third_party_checkpoint(folder: str) -> None:
    scheme, largest, most, frobenius = THIRD_PARTY[folder]
    original = read_checkpoint(DATA / "checkpoints/original-fp16")
    checkpoint = read_checkpoint(DATA / "checkpoints" / folder)
    assert checkpoint.quantization == scheme
    assert sorted(checkpoint.linears) == sorted(f"model.layers.0.{p}" for p in PROJECTIONS)
    assert checkpoint.dense == []
    errors, quantiles = [], []
    for projection, right in zip(PROJECTIONS, frobenius, strict=True):
        w4 = checkpoint.linear(f"model.layers.0.{projection}")
        weight = original.tensor(f"model.layers.0.{projection}.weight").float().numpy()
        assert (w4.N, w4.K) == weight.shape
        assert (w4.group_size, w4.symmetric) == (scheme.group_size, scheme.symmetric)
        assert (w4.scale_dtype, w4.perm) == (torch.float16, None)
        difference = w4.dequantize() - weight
        relative = np.linalg.norm(difference) / np.linalg.norm(weight)
        assert round(float(relative), 4) == right
        steps = np.abs(difference) / np.abs(w4.scales.repeat(w4.group_size, axis=1))
        errors.append(to_three_digits(steps.max()))
        quantiles.append(to_three_digits(np.quantile(steps, 0.999)))
    if largest is not None:
        assert max(errors) == largest
    if most is not None:
        assert max(quantiles) == most


def test_a_gguf_file_of_llama_cpp() -> None:
    file = read_gguf(DATA / "gguf/qwen3moe-moe-q4km.gguf")
    assert file.architecture == "qwen3moe"
    types = {t.type_name for t in file.tensors.values()}
    assert types == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    experts = file.tensors["blk.0.ffn_up_exps.weight"]
    assert len(experts.shape) == 3
    assert experts.dequantize().shape == experts.shape
    for tensor in file.tensors.values():
        check_scales(tensor)
        assert np.isfinite(tensor.dequantize()).all()


def test_unquantized() -> None:
    checkpoint = read_checkpoint(DATA / "checkpoints/original-fp16")
    assert checkpoint.quantization is None
    assert checkpoint.linears == []
    assert len(checkpoint.dense) == 3
    assert checkpoint.config["model_type"] == "llama"
    tensor = checkpoint.tensor("model.layers.0.self_attn.k_proj.weight")
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float16, (192, 576))
    with pytest.raises(FormatError, match="no quantized linear 'x'; it has 0"):
        checkpoint.linear("x")


FORMATS: dict[str, tuple[Any, Any]] = {
    "gptq-v1": (gptq, gptq_config),
    "gptq-v2": (
        lambda *parts: gptq(*parts, version=2),
        lambda *a: gptq_config(*a, checkpoint_format="gptq_v2"),
    ),
    "awq": (awq, awq_config),
    "compressed-tensors": (compressed_tensors, compressed_config),
}


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("g", [32, 64, 128, 256, -1], ids=lambda g: f"g{g}")
@pytest.mark.parametrize("name", FORMATS)
def test_packing(tmp_path: Path, name: str, g: int, symmetric: bool) -> None:
    pack, config = FORMATS[name]
    n, k = 24, 512
    group_size = k if g == -1 else g
    codes, scales, zeros = random_weight(n, k, group_size, symmetric)
    if name == "compressed-tensors" and g == -1:
        quantization = compressed_config(None, symmetric)
    else:
        quantization = config(g, symmetric)
    folder = write_checkpoint(tmp_path, quantization, pack(codes, scales, zeros))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.group_size == g
    assert checkpoint.quantization.symmetric is symmetric
    assert checkpoint.quantization.weight_type == ("uint4b8" if symmetric else "uint4")
    w4 = checkpoint.linear("m.q_proj")
    np.testing.assert_array_equal(w4.codes, codes)
    np.testing.assert_array_equal(w4.scales, scales.astype(np.float32))
    assert w4.group_size == group_size
    if zeros is None:
        assert w4.zeros is None
    else:
        np.testing.assert_array_equal(w4.zeros, zeros)
    assert w4.codes.flags.c_contiguous
    assert w4.scales.flags.c_contiguous


@pytest.mark.parametrize("name", ["gptq-v1", "gptq-v2", "compressed-tensors"])
def test_rows_that_are_no_multiple_of_eight(tmp_path: Path, name: str) -> None:
    pack, config = FORMATS[name]
    codes, scales, zeros = random_weight(21, 64, 32, symmetric=False)
    folder = write_checkpoint(tmp_path, config(32, False), pack(codes, scales, zeros))
    w4 = read_checkpoint(folder).linear("m.q_proj")
    np.testing.assert_array_equal(w4.codes, codes)
    np.testing.assert_array_equal(w4.zeros, zeros)


def test_columns_that_are_no_multiple_of_eight(tmp_path: Path) -> None:
    codes, scales, _zeros = random_weight(16, 77, 77, symmetric=True)
    folder = write_checkpoint(
        tmp_path, compressed_config(None), compressed_tensors(codes, scales, None)
    )
    w4 = read_checkpoint(folder).linear("m.q_proj")
    np.testing.assert_array_equal(w4.codes, codes)
    assert w4.group_size == 77


def test_symmetric_zero_is_eight_whatever_gptq_stores(tmp_path: Path) -> None:
    codes, scales, _zeros = random_weight(16, 64, 32, symmetric=True)
    tensors = gptq(codes, scales, np.full((16, 2), 3, np.uint8))
    w4 = read_checkpoint(write_checkpoint(tmp_path, gptq_config(), tensors)).linear("m.q_proj")
    assert w4.zeros is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_scales_of_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    codes, scales, _zeros = random_weight(8, 64, 32, symmetric=True)
    folder = write_checkpoint(tmp_path, gptq_config(), gptq(codes, scales, None))
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["m.q_proj.scales"] = tensors["m.q_proj.scales"].to(dtype)
    safetensors.torch.save_file(tensors, path)
    w4 = read_checkpoint(folder).linear("m.q_proj")
    assert w4.scale_dtype == dtype
    right = torch.from_numpy(scales).to(dtype).float().numpy()
    np.testing.assert_array_equal(w4.scales, right)


class TestActOrder:
    """Columns quantized out of order: g_idx becomes a permutation that undoes itself."""

    def write(self, tmp_path: Path, name: str, g_idx: Any, **more: Any) -> tuple[Path, Any]:
        """A checkpoint, and its weight [N, K] computed one column at a time."""
        codes, scales, zeros = random_weight(16, 256, 64, symmetric=False, seed=3)
        assert zeros is not None
        if name == "gptq":
            tensors = {**gptq(codes, scales, zeros), "g_idx": g_idx}
            quantization = gptq_config(64, False, desc_act=True, **more)
        else:
            tensors = {**compressed_tensors(codes, scales, zeros), "weight_g_idx": g_idx}
            quantization = compressed_config(64, False, actorder="group", **more)
        weight = np.stack(
            [
                scales[:, g].astype(np.float32)
                * (codes[:, k].astype(np.float32) - zeros[:, g].astype(np.float32))
                for k, g in enumerate(np.clip(g_idx, 0, 3))
            ],
            axis=1,
        )
        return write_checkpoint(tmp_path, quantization, tensors), weight

    @pytest.mark.parametrize("name", ["gptq", "compressed-tensors"])
    def test_permutation(self, tmp_path: Path, name: str) -> None:
        g_idx = np.random.default_rng(4).permutation(np.arange(256) // 64).astype(np.int32)
        folder, weight = self.write(tmp_path, name, g_idx)
        checkpoint = read_checkpoint(folder)
        assert checkpoint.quantization is not None
        assert checkpoint.quantization.act_order
        assert checkpoint.dense == []
        w4 = checkpoint.linear("m.q_proj")
        assert w4.perm is not None
        assert w4.zeros is not None
        np.testing.assert_array_equal(w4.dequantize(), weight)
        x = np.random.default_rng(5).standard_normal((2, 256)).astype(np.float32)
        stored_order = (w4.codes.reshape(16, 4, 64) - w4.zeros[:, :, None].astype(np.float32)) * (
            w4.scales[:, :, None]
        )
        product = x[:, w4.perm] @ stored_order.reshape(16, 256).T
        np.testing.assert_allclose(product, x @ weight.T, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", ["gptq", "compressed-tensors"])
    def test_trivial(self, tmp_path: Path, name: str) -> None:
        folder, weight = self.write(tmp_path, name, (np.arange(256) // 64).astype(np.int32))
        w4 = read_checkpoint(folder).linear("m.q_proj")
        assert w4.perm is None
        np.testing.assert_array_equal(w4.dequantize(), weight)

    def test_groups_of_unequal_size(self, tmp_path: Path) -> None:
        g_idx = (np.arange(256) // 64).astype(np.int32)
        g_idx[0] = 3
        folder, _weight = self.write(tmp_path, "gptq", g_idx)
        with pytest.raises(UnsupportedError, match="'m.q_proj.g_idx': its groups have 63 to 65"):
            read_checkpoint(folder).linear("m.q_proj")

    @pytest.mark.parametrize("wrong", [4, -1])
    def test_group_out_of_range(self, tmp_path: Path, wrong: int) -> None:
        g_idx = (np.arange(256) // 64).astype(np.int32)
        g_idx[7] = wrong
        folder, _weight = self.write(tmp_path, "gptq", g_idx)
        with pytest.raises(FormatError, match=f"group {wrong} is not in 0..3") as caught:
            read_checkpoint(folder).linear("m.q_proj")
        raw = (folder / "model.safetensors").read_bytes()
        assert caught.value.tensor == "m.q_proj.g_idx"
        assert caught.value.offset is not None
        found = raw[caught.value.offset : caught.value.offset + 4]
        assert int.from_bytes(found, "little", signed=True) == wrong


def test_dense_tensors_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    """Biases, fused names, norms and an untouched lm_head stay as they are stored."""
    codes, scales, _zeros = random_weight(24, 64, 32, symmetric=True)
    dense: dict[str, Any] = {
        "m.qkv_proj.bias": np.arange(24, dtype=np.float16),
        "m.norm.weight": np.ones(64, np.float32),
        "lm_head.weight": np.ones((5, 64), np.float16),
    }
    folder = write_checkpoint(
        tmp_path, gptq_config(), gptq(codes, scales, None), prefix="m.qkv_proj.", dense=dense
    )
    checkpoint = read_checkpoint(folder)
    assert checkpoint.linears == ["m.qkv_proj"]
    assert sorted(checkpoint.dense) == sorted(dense)
    for name, values in dense.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).numpy(), values)


@pytest.mark.parametrize(
    ("sidecar", "config"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        ),
        ("quantization_config.json", gptq_config()),
        ("quantization_config.json", awq_config()),
    ],
    ids=["autogptq", "autoawq", "auto-round-gptq", "auto-round-awq"],
)
def test_config_in_a_file_of_its_own(tmp_path: Path, sidecar: str, config: dict[str, Any]) -> None:
    codes, scales, zeros = random_weight(8, 64, 32, symmetric="sym" in config)
    pack = gptq if "sym" in config else awq
    folder = write_checkpoint(tmp_path, None, pack(codes, scales, zeros))
    (folder / sidecar).write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    np.testing.assert_array_equal(read_checkpoint(folder).linear("m.q_proj").codes, codes)


@pytest.mark.parametrize(
    ("packing", "pack"), [("auto_round:auto_gptq", gptq), ("auto_round:auto_awq", awq)]
)
def test_auto_round_packings(tmp_path: Path, packing: str, pack: Any) -> None:
    codes, scales, zeros = random_weight(8, 64, 32, symmetric=False)
    config = {
        **gptq_config(32, False),
        "quant_method": "auto-round",
        "packing_format": packing,
        "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, "m.x": {"bits": 4}},
    }
    w4 = read_checkpoint(write_checkpoint(tmp_path, config, pack(codes, scales, zeros))).linear(
        "m.q_proj"
    )
    np.testing.assert_array_equal(w4.codes, codes)
    np.testing.assert_array_equal(w4.zeros, zeros)


def test_gptqmodel_leaves_layers_out(tmp_path: Path) -> None:
    codes, scales, _zeros = random_weight(8, 64, 32, symmetric=True)
    config = gptq_config(dynamic={r"-:.*lm_head": {}})
    folder = write_checkpoint(tmp_path, config, gptq(codes, scales, None))
    assert read_checkpoint(folder).linears == ["m.q_proj"]


class TestShards:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A linear whose tensors are spread over two files."""
        codes, scales, _zeros = random_weight(8, 64, 32, symmetric=True)
        tensors = {f"m.q_proj.{n}": v for n, v in gptq(codes, scales, None).items()}
        write_checkpoint(tmp_path, gptq_config(), {})
        (tmp_path / "model.safetensors").unlink()
        weight_map = {}
        for number, (name, values) in enumerate(tensors.items()):
            file = f"model-{number + 1:05d}-of-00003.safetensors"
            weight_map[name] = file
            (tmp_path / file).write_bytes(safetensors_file({name: values}))
        self.write_index(tmp_path, weight_map)
        self.codes, self.weight_map = codes, weight_map
        return tmp_path

    @staticmethod
    def write_index(folder: Path, weight_map: Any) -> None:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    def test_reads_all(self, folder: Path) -> None:
        checkpoint = read_checkpoint(folder)
        np.testing.assert_array_equal(checkpoint.linear("m.q_proj").codes, self.codes)

    def test_missing_shard(self, folder: Path) -> None:
        (folder / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(FormatError, match="00002-of-00003.safetensors: there is no such file"):
            read_checkpoint(folder)

    def test_index_lists_a_tensor_that_is_not_there(self, folder: Path) -> None:
        listed = {**self.weight_map, "ghost": "model-00001-of-00003.safetensors"}
        self.write_index(folder, listed)
        with pytest.raises(FormatError, match="tensor 'ghost': model-00001.* does not hold it"):
            read_checkpoint(folder)

    def test_two_shards_hold_one_tensor(self, folder: Path) -> None:
        first = folder / "model-00001-of-00003.safetensors"
        (folder / "model-00002-of-00003.safetensors").write_bytes(first.read_bytes())
        with pytest.raises(FormatError, match="tensor 'm.q_proj.qweight': .* holds this tensor"):
            read_checkpoint(folder)

    @pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "", 3, "a/b"])
    def test_index_that_leads_out_of_the_folder(self, folder: Path, file: Any) -> None:
        self.write_index(folder, {"w": file})
        with pytest.raises(FormatError, match="is no plain file name in this folder"):
            read_checkpoint(folder)

    @pytest.mark.parametrize("weight_map", [None, {}, []], ids=["null", "empty", "list"])
    def test_index_without_a_map(self, folder: Path, weight_map: Any) -> None:
        self.write_index(folder, weight_map)
        with pytest.raises(FormatError, match=r"index.json: its weight_map is"):
            read_checkpoint(folder)
