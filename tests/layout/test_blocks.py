"""GGUF blocks repacked for GPUs: every bit arrives, and none is added."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright.errors import LayoutError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout import blocks
from tilewright.layout.blocks import BLOCK_FORMS, GpuBlocks, pack_blocks_for, unpack_blocks
from tilewright.layout.cpu import PackedBlocks

by_type = pytest.mark.parametrize("name", BLOCK_TYPES)


def random_blocks(name: str, n: int = 37, count: int = 3, seed: int = 0) -> np.ndarray:
    """Random bytes, uint8 [n, row_bytes], with scales that are finite numbers."""
    block = BLOCK_TYPES[name]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, count, block.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        raw[:, :, 0] = rng.integers(0, 255, (n, count))
    else:
        for at in block.scale_fields:
            halves = rng.normal(0, 1, (n, count, 1)).astype("<f2")
            raw[:, :, at : at + 2] = halves.view(np.uint8)
    return raw.reshape(n, -1)


def packed(name: str, **how: int) -> tuple[np.ndarray, GpuBlocks]:
    raw = random_blocks(name, **how)
    made = pack_blocks_for(raw, name, arch="gfx1151")
    assert isinstance(made, GpuBlocks)
    return raw, made


def test_every_block_type_has_a_form():
    assert set(BLOCK_FORMS) == set(BLOCK_TYPES)


@by_type
def test_codes_scales_and_minimums_are_those_of_the_file(name):
    raw, made = packed(name)
    right = BLOCK_TYPES[name].codes(raw)

    codes, scale, minimum = unpack_blocks(made)

    assert (made.N, made.K) == right.codes.shape
    assert np.array_equal(codes.numpy(), right.codes)
    assert np.array_equal(scale.numpy(), right.scale)
    assert (minimum is None) == (right.minimum is None)
    if minimum is not None:
        assert np.array_equal(minimum.numpy(), right.minimum)


@by_type
def test_it_is_never_larger_than_the_file(name):
    raw, made = packed(name)
    assert made.nbytes <= 1.03 * raw.nbytes
    assert made.nbytes == sum(t.untyped_storage().nbytes() for t in made.tensors)


@by_type
def test_words_are_whole_and_rows_of_scales_lie_together(name):
    _, made = packed(name)
    assert made.low.is_contiguous()
    assert made.low.dtype == torch.int32
    assert made.high is None or made.high.is_contiguous()
    assert made.scales.stride(0) == 1
    assert made.sub_scales is None or made.sub_scales.stride(0) == 1


def test_a_large_weight_is_packed_in_pieces(monkeypatch):
    _, whole = packed("Q5_K")
    monkeypatch.setattr(blocks, "_VALUES_AT_A_TIME", 5 * 768)
    _, pieces = packed("Q5_K")
    for a, b in zip(whole.tensors, pieces.tensors, strict=True):
        assert torch.equal(a, b)


def test_rows_that_lie_apart_and_tensors_are_packed_alike():
    raw, made = packed("Q6_K")
    wide = torch.zeros(raw.shape[0], raw.shape[1] + 6, dtype=torch.uint8)
    wide[:, 3:-3] = torch.from_numpy(raw)
    again = pack_blocks_for(wide[:, 3:-3], "Q6_K", arch="sm_90")
    assert isinstance(again, GpuBlocks)
    for a, b in zip(made.tensors, again.tensors, strict=True):
        assert torch.equal(a, b)


def test_one_block_at_an_odd_address_is_packed():
    raw = np.zeros(19, np.uint8)[1:].reshape(1, 18)
    raw[0, :2] = np.array([1.5], "<f2").view(np.uint8)
    made = pack_blocks_for(raw, "Q4_0", arch="sm_90")
    assert isinstance(made, GpuBlocks)
    assert made.scales.tolist() == [[1.5]]


def test_it_moves_whole():
    _, made = packed("Q4_K")
    moved = made.to("meta")
    assert all(t.device.type == "meta" for t in moved.tensors)
    assert (moved.N, moved.K, moved.type_name) == (made.N, made.K, made.type_name)
    assert moved.scales.stride() == made.scales.stride()


def test_a_pair_of_neighbours_lies_in_two_halves_of_a_word():
    raw = np.zeros((1, 18), np.uint8)
    raw[0, 2:] = np.arange(16) | 0xF0
    made = pack_blocks_for(raw, "Q4_0", arch="sm_80")
    assert isinstance(made, GpuBlocks)
    word = int(made.low[0, 0])
    assert [word >> bit & 15 for bit in (0, 16, 4, 20, 8, 24, 12, 28)] == list(range(8))


def test_the_cpu_keeps_the_bytes_of_the_file():
    raw = random_blocks("Q4_K")
    made = pack_blocks_for(raw, "Q4_K")
    assert isinstance(made, PackedBlocks)
    assert made.data.data_ptr() == torch.from_numpy(raw).data_ptr()


@pytest.mark.parametrize(
    ("raw", "name", "message"),
    [
        (np.zeros((2, 18), np.uint8), "Q4_9", "type_name='Q4_9' is no packed block type"),
        (np.zeros((2, 17), np.uint8), "Q4_0", "raw has rows of 17 bytes; Q4_0 needs a multiple"),
        (np.zeros((2, 18), np.int8), "Q4_0", "raw has dtype int8"),
        (np.zeros(18, np.uint8), "Q4_0", "raw must be uint8 \\[N, row_bytes\\]"),
    ],
)
def test_what_it_refuses(raw, name, message):
    with pytest.raises(LayoutError, match=message):
        pack_blocks_for(raw, name, arch="gfx942")
