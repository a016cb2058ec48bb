"""Wrong safetensors checkpoints: every one ends in an error that says what and where."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.w4_files import (
    Tensors,
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
from tilewright.formats.checkpoint import read_checkpoint

N, K, G = 16, 64, 32


def tensors_of(pack: Callable[..., Tensors], symmetric: bool = False) -> Tensors:
    return pack(*random_weight(N, K, G, symmetric))


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.pop(name)  # type: ignore[return-value]


def with_(name: str, values: Any) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = values

    return change


def cast(name: str, dtype: Any) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].astype(dtype)

    return change


def spoil(name: str, at: int, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[at] = value

    return change


GPTQ = (gptq, gptq_config(G, False))
AWQ = (awq, awq_config(G))
CT = (compressed_tensors, compressed_config(G, False))
I32, F16 = np.int32, np.float16

# id: (pack and config, change, message, the tensor that is named)
BAD_TENSORS: dict[str, tuple[Any, Callable[[Tensors], None], str, str]] = {
    "gptq-no-qweight": (GPTQ, without("qweight"), "no tensor ends in .qweight", ""),
    "gptq-no-scales": (GPTQ, without("scales"), "this tensor is missing; GPTQ with", "scales"),
    "gptq-no-qzeros": (GPTQ, without("qzeros"), "this tensor is missing", "qzeros"),
    "gptq-no-g_idx": (
        (gptq, gptq_config(G, False, desc_act=True)),
        with_("unused", np.zeros(1, F16)),
        "missing; the config says desc_act",
        "g_idx",
    ),
    "gptq-qweight-dtype": (
        GPTQ, cast("qweight", np.int64), r"I64 \[8, 16\]; GPTQ needs I32", "qweight"
    ),
    "gptq-qweight-rank": (GPTQ, with_("qweight", np.zeros(8, I32)), r"not \[K/8, N\]", "qweight"),
    "gptq-qweight-empty": (
        GPTQ, with_("qweight", np.zeros((0, 16), I32)), r"\[0, 16\] is empty", "qweight"
    ),
    "gptq-scales-shape": (
        GPTQ,
        with_("scales", np.ones((4, 16), F16)),
        r"it is F16 \[4, 16\]; GPTQ with N=16, K=64, group size 32 needs .* \[2, 16\]",
        "scales",
    ),
    "gptq-scales-transposed": (GPTQ, with_("scales", np.ones((16, 2), F16)), "needs", "scales"),
    "gptq-scales-dtype": (GPTQ, cast("scales", I32), "it is I32", "scales"),
    "gptq-qzeros-shape": (GPTQ, with_("qzeros", np.zeros((2, 16), I32)), "I32", "qzeros"),
    "gptq-g_idx-shape": (GPTQ, with_("g_idx", np.zeros(63, I32)), r"I32 \[63\]", "g_idx"),
    "gptq-g_idx-dtype": (GPTQ, with_("g_idx", np.zeros(64, np.float32)), r"it is F32", "g_idx"),
    "gptq-two-weights": (GPTQ, with_("weight", np.zeros((16, 64), F16)), "one weight", "weight"),
    "awq-no-scales": (AWQ, without("scales"), "this tensor is missing; AWQ with", "scales"),
    "awq-no-qzeros": (AWQ, without("qzeros"), "this tensor is missing", "qzeros"),
    "awq-qweight-rank": (AWQ, with_("qweight", np.zeros(8, I32)), r"not \[K, N/8\]", "qweight"),
    "awq-scales-shape": (AWQ, with_("scales", np.ones((2, 8), F16)), r"F16 \[2, 8\]", "scales"),
    "awq-qzeros-shape": (AWQ, with_("qzeros", np.zeros((2, 16), I32)), "needs I32", "qzeros"),
    "ct-no-packed": (CT, without("weight_packed"), "no tensor ends in .weight_packed", ""),
    "ct-no-scale": (CT, without("weight_scale"), "this tensor is missing", "weight_scale"),
    "ct-no-zeros": (
        CT, without("weight_zero_point"), "this tensor is missing", "weight_zero_point"
    ),
    "ct-no-shape": (CT, without("weight_shape"), "this tensor is missing", "weight_shape"),
    "ct-no-g_idx": (
        (compressed_tensors, compressed_config(G, False, actorder="group")),
        with_("unused", np.zeros(1, F16)),
        "missing; the config's actorder needs it",
        "weight_g_idx",
    ),
    "ct-packed-rank": (
        CT, with_("weight_packed", np.zeros(8, I32)), r"not \[N, K/8\]", "weight_packed"
    ),
    "ct-packed-dtype": (CT, cast("weight_packed", np.uint8), "it is U8", "weight_packed"),
    "ct-shape-lies": (
        CT, with_("weight_shape", np.array([16, 72])), r"it says \[16, 72\]", "weight_shape"
    ),
    "ct-shape-negative": (
        CT, with_("weight_shape", np.array([16, -64])), r"it says \[16, -64\]", "weight_shape"
    ),
    "ct-shape-length": (
        CT, with_("weight_shape", np.array([16, 64, 1])), r"I64 \[3\]", "weight_shape"
    ),
    "ct-scale-shape": (
        CT, with_("weight_scale", np.ones((16, 1), F16)), r"F16 \[16, 1\]", "weight_scale"
    ),
    "ct-zeros-dtype": (
        CT, with_("weight_zero_point", np.zeros((16, 2), np.uint8)), "U8", "weight_zero_point"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("format_", "change", "message", "named"), BAD_TENSORS.values(), ids=BAD_TENSORS
)
def test_bad_tensors_are_refused_when_the_folder_is_opened(
    tmp_path: Path, format_: Any, change: Callable[[Tensors], None], message: str, named: str
) -> None:
    pack, config = format_
    tensors = tensors_of(pack)
    change(tensors)
    folder = write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(FormatError, match=message) as caught:
        read_checkpoint(folder)
    assert caught.value.file is not None
    if named:
        assert caught.value.tensor == f"m.q_proj.{named}"
        assert caught.value.file == folder / "model.safetensors"


def test_a_part_without_its_linear(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, GPTQ[1], tensors_of(gptq), dense={"m.k_proj.scales": np.ones(2, F16)}
    )
    with pytest.raises(FormatError, match="m.k_proj.qweight is missing, to which this tensor"):
        read_checkpoint(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    ("format_", "name"),
    [(GPTQ, "scales"), (AWQ, "scales"), (CT, "weight_scale")],
    ids=["gptq", "awq", "compressed-tensors"],
)
def test_scales_that_are_not_finite(tmp_path: Path, format_: Any, name: str, value: float) -> None:
    pack, config = format_
    tensors = tensors_of(pack)
    spoil(name, 5, value)(tensors)
    folder = write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(FormatError, match="1 of 32 scales are NaN or Inf, the first is") as caught:
        read_checkpoint(folder).linear("m.q_proj")
    error = caught.value
    assert error.tensor == f"m.q_proj.{name}"
    raw = (folder / "model.safetensors").read_bytes()
    assert error.offset is not None
    (found,) = struct.unpack("<e", raw[error.offset : error.offset + 2])
    assert found == value or (np.isnan(value) and np.isnan(found))


def test_symmetric_awq_whose_zeros_are_not_eight(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, awq_config(G, symmetric=True), tensors_of(awq))
    with pytest.raises(FormatError, match="says symmetric and these zero points are not all 8"):
        read_checkpoint(folder).linear("m.q_proj")


def test_a_v1_zero_that_tools_read_differently(tmp_path: Path) -> None:
    codes, scales, zeros = random_weight(N, K, G, symmetric=False)
    assert zeros is not None
    zeros[3, 1] = 0
    folder = write_checkpoint(tmp_path / "v2", gptq_config(G, False, checkpoint_format="gptq_v2"),
                              gptq(codes, scales, zeros, version=2))  # fmt: skip
    np.testing.assert_array_equal(read_checkpoint(folder).linear("m.q_proj").zeros, zeros)
    tensors = gptq(codes, scales, np.where(zeros == 0, 16, zeros))
    folder = write_checkpoint(tmp_path / "v1", GPTQ[1], tensors)
    with pytest.raises(UnsupportedError, match="'m.q_proj.qzeros': .* export the model as gptq_v2"):
        read_checkpoint(folder).linear("m.q_proj")


def test_group_size_comes_from_the_config(tmp_path: Path) -> None:
    """64 columns and 2 rows of scales could be G=32; a config that says 64 is not believed."""
    folder = write_checkpoint(tmp_path, gptq_config(64, False), tensors_of(gptq))
    with pytest.raises(FormatError, match=r"group size 64 needs F16 or BF16 or F32 \[1, 16\]"):
        read_checkpoint(folder)


def test_rows_that_do_not_divide_into_groups(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, gptq_config(128, False), tensors_of(gptq))
    with pytest.raises(
        UnsupportedError, match="rows of 64 values do not divide into groups of 128"
    ):
        read_checkpoint(folder)


def drop(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != name}


BAD_CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "bits-8": (gptq_config(bits=8), UnsupportedError, "'bits' .* is 8; .* 4 bits only"),
    "bits-text": (gptq_config(bits="4"), FormatError, "'bits' .* is '4'; it must be an integer"),
    "bits-missing": (drop(gptq_config(), "bits"), FormatError, "has no 'bits'"),
    "group-16": (gptq_config(16), UnsupportedError, "'group_size' .* is 16"),
    "group-0": (gptq_config(0), UnsupportedError, "'group_size' .* is 0"),
    "group-float": (gptq_config(32.0), FormatError, "'group_size' .* is 32.0"),  # type: ignore[arg-type]
    "sym-missing": (drop(gptq_config(), "sym"), FormatError, "has no 'sym'; true or false"),
    "sym-text": (gptq_config(sym="yes"), FormatError, "'sym' .* is 'yes'"),
    "marlin": (
        gptq_config(checkpoint_format="marlin"),
        UnsupportedError,
        "'checkpoint_format' .* is 'marlin'",
    ),
    "is-marlin": (gptq_config(is_marlin_format=True), UnsupportedError, "'is_marlin_format'"),
    "format-number": (gptq_config(format=3), FormatError, "'format' .* is 3"),
    "pack-dtype": (gptq_config(pack_dtype="int64"), UnsupportedError, "'pack_dtype'"),
    "gptq-float": (gptq_config(data_type="mx_fp"), UnsupportedError, "'data_type'"),
    "dynamic": (
        gptq_config(dynamic={"+:.*down_proj": {"bits": 8}}),
        UnsupportedError,
        r"'\+:.\*down_proj' .* is {'bits': 8}",
    ),
    "dynamic-list": (gptq_config(dynamic=[1]), FormatError, "'dynamic' .* must be an object"),
    "dynamic-entry": (gptq_config(dynamic={"a": 8}), FormatError, "'a' .* must be an object"),
    "extra-config": (
        gptq_config(extra_config={"m.q_proj": {"bits": 4, "group_size": 128}}),
        UnsupportedError,
        "'m.q_proj' .* is {'group_size': 128}",
    ),
    "awq-gemv": (awq_config(version="gemv"), UnsupportedError, "'version' .* is 'gemv'"),
    "awq-llm-awq": (awq_config(backend="llm-awq"), UnsupportedError, "'backend'"),
    "awq-bits": (awq_config(bits=3), UnsupportedError, "'bits' .* is 3"),
    "awq-contradiction": (awq_config(sym=True), FormatError, "sym=True and zero_point=True"),
    "awq-no-symmetry": (drop(awq_config(), "zero_point"), FormatError, "has no 'zero_point'"),
    "ct-no-groups": (drop(compressed_config(), "config_groups"), FormatError, "'config_groups'"),
    "ct-format": (
        compressed_config(top={"format": "int-quantized"}), UnsupportedError, "'int-quantized'"
    ),
    "ct-bits": (compressed_config(num_bits=8), UnsupportedError, "'num_bits' .* is 8"),
    "ct-float": (compressed_config(type="float"), UnsupportedError, "'type' .* is 'float'"),
    "ct-strategy": (compressed_config(strategy="tensor"), UnsupportedError, "is 'tensor'"),
    "ct-dynamic": (compressed_config(dynamic=True), UnsupportedError, "'dynamic'"),
    "ct-actorder": (compressed_config(actorder="x"), UnsupportedError, "'actorder' .* is 'x'"),
    "ct-group-null": (compressed_config(group_size=None), FormatError, "'group_size' .* is None"),
    "ct-symmetric": (compressed_config(32, 1), FormatError, "'symmetric' .* is 1"),  # type: ignore[arg-type]
    "ct-transform": (
        compressed_config(top={"transform_config": {"r": {}}}), UnsupportedError, "transform_config"
    ),
    "ct-kv-cache": (
        compressed_config(top={"kv_cache_scheme": {"num_bits": 8}}), UnsupportedError, "kv_cache"
    ),
    "ct-sparse": (
        compressed_config(top={"sparsity_config": {"format": "sparse-24"}}),
        UnsupportedError,
        "'sparse-24'",
    ),
    "ct-activations": (
        compressed_config(top={"config_groups": {"g": {"input_activations": {"num_bits": 8}}}}),
        UnsupportedError,
        "'input_activations' .* weight-only",
    ),
    "ct-two-schemes": (
        compressed_config(
            top={
                "config_groups": {
                    "a": compressed_config(32)["config_groups"]["group_0"],
                    "b": compressed_config(64)["config_groups"]["group_0"],
                }
            }
        ),
        UnsupportedError,
        r"'config_groups' .* is \['a', 'b'\]; .* one scheme",
    ),
    "ct-group-list": (compressed_config(top={"config_groups": {"g": []}}), FormatError, "'g'"),
    "method-unknown": ({"quant_method": "bitsandbytes"}, UnsupportedError, "'bitsandbytes'"),
    "method-missing": ({"bits": 4}, UnsupportedError, "quant_method is None"),
    "auto-round-packing": (
        gptq_config(quant_method="auto-round", packing_format="auto_round:gptqmodel"),
        UnsupportedError,
        "'auto-round' with packing 'auto_round:gptqmodel'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "error", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_config(
    tmp_path: Path, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = write_checkpoint(tmp_path, config, {})
    with pytest.raises(error, match=message) as caught:
        read_checkpoint(folder)
    assert str(folder / "config.json") in str(caught.value)


class TestFolders:
    def test_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="no such folder; check the path"):
            read_checkpoint(tmp_path / "none")

    def test_a_file(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, None, {})
        with pytest.raises(FormatError, match="this is a file; its folder is needed"):
            read_checkpoint(folder / "config.json")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="config.json: there is no such file"):
            read_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"{", "not valid JSON"),
            (b"\xff", "not valid JSON"),
            (b"[" * 100_000, "not valid JSON"),
            (b"[]", "it holds a list; a JSON object is needed"),
        ],
        ids=["cut", "bytes", "deep", "list"],
    )
    def test_bad_json(self, tmp_path: Path, content: bytes, message: str) -> None:
        folder = write_checkpoint(tmp_path, None, {})
        (folder / "config.json").write_bytes(content)
        with pytest.raises(FormatError, match=f"config.json: .*{message}"):
            read_checkpoint(folder)

    def test_config_too_long(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, None, {})
        with (folder / "config.json").open("wb") as stream:
            stream.truncate(65 << 20)
        with pytest.raises(FormatError, match="at most 67108864 are read"):
            read_checkpoint(folder)

    def test_quantization_config_is_a_list(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, [1], {})  # type: ignore[arg-type]
        with pytest.raises(FormatError, match="the quantization config is a list"):
            read_checkpoint(folder)

    def test_no_weights(self, tmp_path: Path) -> None:
        (write_checkpoint(tmp_path, None, {}) / "model.safetensors").unlink()
        with pytest.raises(FormatError, match="no safetensors file here"):
            read_checkpoint(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_only_pickles(self, tmp_path: Path, name: str) -> None:
        folder = write_checkpoint(tmp_path, None, {})
        (folder / "model.safetensors").rename(folder / name)
        with pytest.raises(FormatError, match=rf"only pickles here \({name}\), which can run code"):
            read_checkpoint(folder)

    def test_several_files_and_no_index(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, None, {})
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").unlink()
        for name in ("a.safetensors", "b.safetensors"):
            (folder / name).write_bytes(content)
        with pytest.raises(
            FormatError, match="2 safetensors files .* and no model.safetensors.index"
        ):
            read_checkpoint(folder)

    def test_no_such_linear_or_tensor(self, tmp_path: Path) -> None:
        checkpoint = read_checkpoint(write_checkpoint(tmp_path, GPTQ[1], tensors_of(gptq)))
        with pytest.raises(FormatError, match="no quantized linear 'm.k_proj'; it has 1"):
            checkpoint.linear("m.k_proj")
        with pytest.raises(FormatError, match="tensor 'x': no such tensor among 3"):
            checkpoint.tensor("x")
