"""read_gguf on good files: values against the gguf package, views, splits, scales."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize

from formats.byte_files import STRING, array, gguf_file, info, key, string, u32_key, write
from tilewright.errors import FormatError, UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.formats.gguf import GGUFTensor, check_scales, read_gguf

F16_ONE = b"\x00\x3c"
PACKAGE_ONLY = (
    "TQ1_0 TQ2_0 NVFP4 IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S".split()
)  # fmt: skip


def write_model(path: Path, tensors: dict[str, tuple[Q, np.ndarray[Any, Any]]]) -> Path:
    """A GGUF file by the gguf package's writer. Quantized tensors are given as bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_string("tokenizer.chat_template", "{{ 'grüße' }}")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "", "ä", "日本"])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, 2.25, 1e-8])
    writer.add_array("tokenizer.ggml.token_type", [3, 1, 1, 1])
    writer.add_array("llama.pattern", [True, False, True])
    for name, (dtype, values) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(name: str, rows: int = 5, k: int = 512, seed: int = 0) -> tuple[Q, Any]:
    """Rows of random bytes of a type; exponents kept small enough that no scale is Inf."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[Q[name]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 60, (rows, k // block_size * block_bytes), dtype=np.uint8)
    return Q[name], raw


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    f32 = rng.standard_normal((4, 3)).astype(np.float32)
    return write_model(
        tmp_path / "model.gguf",
        {
            "norm": (Q.F32, f32[0]),
            "w32": (Q.F32, f32),
            "w16": (Q.F16, f32.astype(np.float16)),
            "b16": (Q.BF16, (f32.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)),
            "experts": (Q.Q4_K, quantized("Q4_K", rows=6)[1].reshape(2, 3, -1)),
            **{name: quantized(name) for name in BLOCK_TYPES},
            **{name: quantized(name) for name in PACKAGE_ONLY},
        },
    )


def test_metadata_is_what_the_package_reads(model: Path) -> None:
    file = read_gguf(model)
    fields = gguf.GGUFReader(model).fields
    names = [name for name in fields if not name.startswith("GGUF.")]
    assert list(file.metadata) == names
    assert len(file.metadata) == len(names)
    for name in names:
        assert file.metadata[name] == fields[name].contents()
        assert type(file.metadata[name]) is type(fields[name].contents())
    assert file.architecture == "llama"
    assert file.metadata["llama.pattern"] == [True, False, True]
    assert "no.such.key" not in file.metadata
    with pytest.raises(KeyError):
        file.metadata["no.such.key"]


def test_tensors_are_what_the_package_reads(model: Path) -> None:
    file = read_gguf(model)
    right = {t.name: t for t in gguf.GGUFReader(model).tensors}
    assert list(file.tensors) == list(right)
    for name, tensor in file.tensors.items():
        expected = right[name]
        assert tensor.type_name == expected.tensor_type.name
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert tensor.offset == expected.data_offset
        assert tensor.nbytes == expected.n_bytes
        assert tensor.raw.tobytes() == expected.data.tobytes()
        assert tensor.packed == (tensor.type_name in BLOCK_TYPES)


def test_every_type_dequantizes_as_in_the_package(model: Path) -> None:
    file = read_gguf(model)
    for tensor in gguf.GGUFReader(model).tensors:
        got = file.tensors[tensor.name].dequantize()
        with np.errstate(all="ignore"):
            want = dequantize(tensor.data, tensor.tensor_type).reshape(got.shape)
        assert got.dtype == np.float32
        assert got.flags.writeable
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), tensor.name)


def test_tensors_are_read_only_views_of_the_file(model: Path) -> None:
    for tensor in read_gguf(model).tensors.values():
        assert isinstance(tensor.raw, np.memmap)
        assert not tensor.raw.flags.writeable
        assert not tensor.raw.flags.owndata


def test_raw_shapes(model: Path) -> None:
    tensors = read_gguf(model).tensors
    assert tensors["norm"].raw.shape == (12,)
    assert tensors["Q4_K"].raw.shape == (5, 288)
    assert tensors["experts"].raw.shape == (2, 3, 288)
    assert tensors["experts"].dequantize().shape == (2, 3, 512)


def test_scalar_and_vector(tmp_path: Path) -> None:
    data = np.array([2.5], "<f4").tobytes().ljust(32, b"\0") + np.arange(3, dtype="<f4").tobytes()
    content = gguf_file(infos=[info("scalar", [], 0, 0), info("vector", [3], 0, 32)], data=data)
    tensors = read_gguf(write(tmp_path / "m.gguf", content)).tensors
    assert tensors["scalar"].shape == ()
    assert tensors["scalar"].dequantize() == np.float32(2.5)
    assert tensors["vector"].dequantize().tolist() == [0.0, 1.0, 2.0]


def test_quantized_vector(tmp_path: Path) -> None:
    block = F16_ONE + bytes([0x98] * 16)
    content = gguf_file(infos=[info("v", [64], Q.Q4_0)], data=block * 2)
    tensor = read_gguf(write(tmp_path / "m.gguf", content)).tensors["v"]
    assert tensor.raw.shape == (36,)
    assert tensor.dequantize().tolist() == ([0.0] * 16 + [1.0] * 16) * 2
    check_scales(tensor)


@pytest.mark.parametrize("version", [2, 3])
def test_no_tensors(tmp_path: Path, version: int) -> None:
    content = gguf_file([key("general.architecture", STRING, string("llama"))], version=version)
    file = read_gguf(write(tmp_path / "m.gguf", content.rstrip(b"\0")))
    assert file.tensors == {}
    assert file.architecture == "llama"


def test_no_architecture(tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path / "m.gguf", gguf_file()))
    with pytest.raises(FormatError, match="general.architecture is None"):
        _ = file.architecture


def test_own_alignment(tmp_path: Path) -> None:
    content = gguf_file(
        [u32_key("general.alignment", 128)],
        [info("a", [1], 0, 0), info("b", [1], 0, 128)],
        np.array([1.0] + [0.0] * 31 + [2.0], "<f4").tobytes(),
        alignment=128,
    )
    tensors = read_gguf(write(tmp_path / "m.gguf", content)).tensors
    assert [float(t.dequantize()[0]) for t in tensors.values()] == [1.0, 2.0]


def test_nested_arrays(tmp_path: Path) -> None:
    inner = array(0, 2, b"\x01\x02") + array(8, 1, string("x"))
    content = gguf_file([key("nested", 9, array(9, 2, inner))])
    assert read_gguf(write(tmp_path / "m.gguf", content)).metadata["nested"] == [[1, 2], ["x"]]


@pytest.mark.parametrize("name", ["I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "Q1_0"])
def test_types_without_values_are_read_and_not_dequantized(tmp_path: Path, name: str) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[Q[name]]
    content = gguf_file(infos=[info("t", [block_size], Q[name])], data=bytes(block_bytes))
    tensor = read_gguf(write(tmp_path / "m.gguf", content)).tensors["t"]
    check_scales(tensor)
    with pytest.raises(UnsupportedError, match=f"'t': {name} has no dequantizer"):
        tensor.dequantize()


def test_a_large_vocabulary_is_read_fast(tmp_path: Path) -> None:
    count = 262_144
    tokens = b"".join(string(f"token{i}") for i in range(count))
    content = gguf_file([key("tokens", 9, array(STRING, count, tokens))])
    path = write(tmp_path / "m.gguf", content)
    start = time.process_time()  # which programs beside it do not lengthen
    file = read_gguf(path)
    tokens_read = file.metadata["tokens"]
    seconds = time.process_time() - start
    assert (len(tokens_read), tokens_read[-1]) == (count, f"token{count - 1}")
    assert seconds < 2.0


class TestSplit:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        return [self.write_part(tmp_path, no, 3, 3) for no in range(3)]

    @staticmethod
    def write_part(folder: Path, no: int, count: int, total: int, name: str = "") -> Path:
        keys = [u32_key("split.no", no), u32_key("split.count", count)]
        keys += [u32_key("split.tensors.count", total), u32_key("part", no)]
        content = gguf_file(keys, [info(name or f"t{no}", [1], 0)], np.array([no], "<f4").tobytes())
        return write(folder / f"m-{no + 1:05d}-of-{count:05d}.gguf", content)

    def test_any_part_opens_all(self, parts: list[Path]) -> None:
        for given in parts:
            file = read_gguf(given)
            assert file.path == given
            assert list(file.parts) == parts
            assert file.metadata["part"] == 0
            assert {n: float(t.dequantize()[0]) for n, t in file.tensors.items()} == {
                "t0": 0.0,
                "t1": 1.0,
                "t2": 2.0,
            }
            assert [t.file for t in file.tensors.values()] == parts

    def test_a_part_is_missing(self, parts: list[Path]) -> None:
        parts[1].unlink()
        with pytest.raises(FormatError, match="00002-of-00003.gguf: there is no such file"):
            read_gguf(parts[0])

    def test_a_part_was_renamed(self, parts: list[Path]) -> None:
        moved = parts[0].rename(parts[0].with_name("model.gguf"))
        with pytest.raises(FormatError, match="one of 3 parts; their names must end in"):
            read_gguf(moved)

    def test_a_part_says_another_number(self, parts: list[Path]) -> None:
        parts[2].write_bytes(parts[1].read_bytes())
        with pytest.raises(FormatError, match=r"split.no and split.count are \(1, 3\)"):
            read_gguf(parts[0])

    def test_two_parts_hold_one_tensor(self, parts: list[Path]) -> None:
        self.write_part(parts[0].parent, 2, 3, 3, name="t0")
        with pytest.raises(FormatError, match="tensor 't0': an earlier part has this tensor"):
            read_gguf(parts[0])

    def test_a_tensor_is_missing(self, tmp_path: Path) -> None:
        paths = [self.write_part(tmp_path, no, 2, 5) for no in range(2)]
        with pytest.raises(FormatError, match="split.tensors.count is 5 and the 2 parts hold 2"):
            read_gguf(paths[0])


class TestCheckScales:
    NAMES = [*BLOCK_TYPES]

    def tensor(self, name: str, spoil: tuple[int, int, bytes] | None = None) -> GGUFTensor:
        """3 rows of 512 values; spoil = (block, byte in block, bytes)."""
        raw = quantized(name, rows=3)[1]
        block_bytes = gguf.GGML_QUANT_SIZES[Q[name]][1]
        if spoil:
            block, at, value = spoil
            blocks = raw.reshape(-1, block_bytes)
            blocks[block, at : at + len(value)] = np.frombuffer(value, np.uint8)
        return GGUFTensor("w", name, (3, 512), raw, 1000, Path("m.gguf"))

    @pytest.mark.parametrize("name", NAMES)
    def test_good_scales_pass(self, name: str) -> None:
        check_scales(self.tensor(name))

    @pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF], ids=hex)
    @pytest.mark.parametrize("name", [n for n in NAMES if n != "MXFP4"])
    def test_inf_and_nan_are_found_where_they_are(self, name: str, bits: int) -> None:
        block = BLOCK_TYPES[name]
        for at in block.scale_fields:
            spoiled = self.tensor(name, (5, at, bits.to_bytes(2, "little")))
            # The fields are the ones that make values non-finite, in the package's eyes too.
            with np.errstate(all="ignore"):
                values = dequantize(spoiled.raw, Q[name])
            assert not np.isfinite(values.reshape(-1, block.block_size)[5]).any()
            with pytest.raises(FormatError, match="m.gguf, tensor 'w', offset .* NaN or Inf") as e:
                check_scales(spoiled)
            assert e.value.offset == 1000 + 5 * block.block_bytes + at

    def test_e8m0_nan(self) -> None:
        with pytest.raises(FormatError, match="MXFP4") as e:
            check_scales(self.tensor("MXFP4", (7, 0, b"\xff")))
        assert e.value.offset == 1000 + 7 * 17

    @pytest.mark.parametrize("name", ["IQ2_XXS", "IQ3_S", "TQ2_0"])
    def test_types_that_do_not_run_packed(self, name: str) -> None:
        check_scales(self.tensor(name))
        at = 64 if name == "TQ2_0" else 0
        spoiled = self.tensor(name, (4, at, b"\x00\x7c"))
        with pytest.raises(FormatError, match="a scale of this row is NaN or Inf") as e:
            check_scales(spoiled)
        assert e.value.offset == 1000 + 2 * spoiled.raw.shape[-1]

    def test_float_tensors_have_no_scales(self, model: Path) -> None:
        for name in ("norm", "w16", "b16"):
            check_scales(read_gguf(model).tensors[name])
