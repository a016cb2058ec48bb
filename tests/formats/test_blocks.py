"""Block types against the `gguf` package's own dequantizer, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize

from tilewright.errors import FormatError
from tilewright.formats.blocks import BLOCK_TYPES, BlockType

NAMES = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split()
)  # fmt: skip
LARGEST, LARGEST_NEGATIVE, DENORMAL, NEGATIVE_ZERO = 0x7BFF, 0xFBFF, 0x0001, 0x8000


def right_values(raw: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return dequantize(raw, gguf.GGMLQuantizationType[name])


def set_scales(raw: npt.NDArray[np.uint8], block: BlockType, fp16_bits: int) -> None:
    """Overwrite every top-level scale of `raw` (for MXFP4: an exponent of the same kind)."""
    blocks = raw.reshape(-1, block.block_bytes)
    if block.name == "MXFP4":
        exponent = {LARGEST: 254, LARGEST_NEGATIVE: 254, DENORMAL: 1, NEGATIVE_ZERO: 0}
        blocks[:, 0] = exponent[fp16_bits]
        return
    for at in block.scale_fields:
        blocks[:, at : at + 2] = np.frombuffer(np.uint16(fp16_bits).tobytes(), dtype=np.uint8)


def random_rows(block: BlockType, rows: int = 37, seed: int = 0) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    row_bytes = block.row_bytes(768)
    return rng.integers(0, 256, (rows, row_bytes), dtype=np.uint8)


def assert_same_bits(got: npt.NDArray[np.float32], want: npt.NDArray[np.float32]) -> None:
    assert got.dtype == want.dtype == np.float32
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes()


def test_all_types_are_registered_with_the_numbers_of_the_file_format() -> None:
    assert sorted(BLOCK_TYPES) == sorted(NAMES)
    for name, block in BLOCK_TYPES.items():
        ggml_type = gguf.GGMLQuantizationType[name]
        sizes = gguf.GGML_QUANT_SIZES[ggml_type]
        assert (block.type_id, block.block_size, block.block_bytes) == (ggml_type, *sizes)


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes_with_finite_scales(name: str) -> None:
    block = BLOCK_TYPES[name]
    raw = random_rows(block)
    blocks = raw.reshape(-1, block.block_bytes)
    rng = np.random.default_rng(1)
    scales = rng.integers(0, 1 << 16, (len(blocks), 2), dtype=np.uint16)
    scales[(scales & 0x7C00) == 0x7C00] ^= 0x4000
    if name != "MXFP4":
        for i, at in enumerate(block.scale_fields):
            blocks[:, at : at + 2] = scales[:, i : i + 1].view(np.uint8)
    assert_same_bits(block.dequantize(raw), right_values(raw, name))


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes_with_any_scale(name: str) -> None:
    """Inf comes out as Inf and NaN as NaN; the payload of a NaN is nobody's business."""
    block = BLOCK_TYPES[name]
    raw = random_rows(block, rows=256, seed=2)
    got, want = block.dequantize(raw), right_values(raw, name)
    if name != "MXFP4":
        assert np.isnan(want).any()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = ~np.isnan(want)
    assert got[finite].tobytes() == want[finite].tobytes()


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F], ids=lambda f: f"fill{f:02x}")
@pytest.mark.parametrize(
    "scale",
    [LARGEST, LARGEST_NEGATIVE, DENORMAL, NEGATIVE_ZERO],
    ids=["largest", "largest-negative", "denormal", "negative-zero"],
)
@pytest.mark.parametrize("name", NAMES)
def test_edge_blocks(name: str, scale: int, fill: int) -> None:
    block = BLOCK_TYPES[name]
    raw = np.full((3, block.row_bytes(512)), fill, dtype=np.uint8)
    set_scales(raw, block, scale)
    assert_same_bits(block.dequantize(raw), right_values(raw, name))


@pytest.mark.parametrize("name", NAMES)
def test_all_zero_blocks(name: str) -> None:
    block = BLOCK_TYPES[name]
    raw = np.zeros((2, block.row_bytes(256)), dtype=np.uint8)
    assert_same_bits(block.dequantize(raw), right_values(raw, name))


@pytest.mark.parametrize("name", NAMES)
def test_values_follow_from_the_codes(name: str) -> None:
    """The contract that kernels and oracles use: scale*code + minimum in float32."""
    block = BLOCK_TYPES[name]
    raw = random_rows(block, seed=3)
    set_scales(raw, block, 0x2C66 if name != "MXFP4" else DENORMAL)
    codes = block.codes(raw)
    assert codes.codes.dtype == np.int8
    assert codes.codes.shape == (37, 768)
    assert codes.scale.shape == (37, 768 // codes.sub)
    value = codes.codes.astype(np.float32) * codes.scale.repeat(codes.sub, axis=1)
    if codes.minimum is not None:
        assert codes.minimum.shape == codes.scale.shape
        value += codes.minimum.repeat(codes.sub, axis=1)
    assert_same_bits(value, right_values(raw, name))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_more_values_than_are_decoded_at_a_time(name: str) -> None:
    block = BLOCK_TYPES[name]
    raw = np.tile(random_rows(block, seed=4), (50, 1))
    set_scales(raw, block, 0x2C66)
    assert raw.shape[0] * 768 > 1 << 20
    assert_same_bits(block.dequantize(raw), right_values(raw, name))


def test_strided_rows_are_read_as_they_are() -> None:
    block = BLOCK_TYPES["Q4_K"]
    raw = random_rows(block, seed=5)
    set_scales(raw, block, 0x2C66)
    assert_same_bits(block.dequantize(raw[::2]), block.dequantize(raw)[::2])


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name: str) -> None:
    block = BLOCK_TYPES[name]
    empty = np.empty((0, block.block_bytes), dtype=np.uint8)
    assert block.dequantize(empty).shape == (0, block.block_size)
    assert block.codes(empty).codes.shape == (0, block.block_size)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (np.zeros((2, 19), np.uint8), r"raw is uint8 \[2, 19\]; Q4_0 takes .* multiple of 18"),
        (np.zeros((2, 18), np.int8), r"raw is int8 \[2, 18\]"),
        (np.zeros(18, np.uint8), r"raw is uint8 \[18\]"),
    ],
    ids=["ragged", "dtype", "flat"],
)
def test_bad_rows(raw: npt.NDArray[np.uint8], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        BLOCK_TYPES["Q4_0"].dequantize(raw)
    with pytest.raises(FormatError, match=message):
        BLOCK_TYPES["Q4_0"].codes(raw)


def test_row_bytes_refuses_a_row_that_does_not_divide() -> None:
    assert BLOCK_TYPES["Q4_K"].row_bytes(512) == 288
    with pytest.raises(FormatError, match="a row of 576 values .* Q4_K blocks of 256"):
        BLOCK_TYPES["Q4_K"].row_bytes(576)
