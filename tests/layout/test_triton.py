"""Words of eight codes, against the definition of their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright.errors import LayoutError
from tilewright.formats.w4 import W4Codes
from tilewright.layout.triton import CODE_BITS, WordsW4, pack_w4_words, unpack_w4_words


def codes_of(n: int, k: int, group: int, *, zeros: bool = True, seed: int = 0) -> W4Codes:
    rng = np.random.default_rng(seed)
    groups = k // group
    return W4Codes(
        rng.integers(0, 16, (n, k), dtype=np.uint8),
        rng.standard_normal((n, groups)).astype(np.float16).astype(np.float32),
        rng.integers(0, 16, (n, groups), dtype=np.uint8) if zeros else None,
        group,
        rng.permutation(k).astype(np.int64),
        torch.float16,
    )


def _code(row: list[int], k: int, bit: list[int], order: str) -> int:
    if order == "k8":
        return row[k // 8] >> bit[k % 8] & 15
    within = k % 32
    p, c, h = within // 8, within % 8 // 2, within % 2
    return row[k // 32 * 4 + c] >> bit[2 * p + h] & 15


def unpacked(weight: WordsW4) -> tuple[list[list[int]], list[list[int]] | None]:
    """Codes and zero points by the definition, one integer at a time."""
    words = [[w % 2**32 for w in row] for row in weight.words.tolist()]
    bit = [0, 16, 4, 20, 8, 24, 12, 28]
    codes = [[_code(row, k, bit, weight.order) for k in range(weight.K)] for row in words]
    if weight.zeros is None:
        return codes, None
    rows = weight.zeros.tolist()
    if weight.zeros.dtype == torch.uint8:
        return codes, rows
    return codes, [[w % 2**32 >> 4 * (n % 8) & 15 for w in rows[n // 8]] for n in range(weight.N)]


@pytest.mark.parametrize("order", ["k8", "k32"])
@pytest.mark.parametrize("pack_zeros", [False, True], ids=["bytes", "packed"])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(1, 8, 8), (8, 32, 8), (9, 64, 32), (16, 128, 64), (5, 12, 12), (3, 7, 7)]
)
def test_every_code_is_where_the_layout_says(n, k, group, pack_zeros, order):
    source = codes_of(n, k, group)
    weight = pack_w4_words(source, pack_zeros=pack_zeros, order=order)
    codes, zeros = unpacked(weight)
    assert source.zeros is not None
    assert codes == source.codes.tolist()
    assert zeros == source.zeros.tolist()
    assert weight.words.shape == (n, -(-k // 8) if order == "k8" else -(-k // 32) * 4)
    assert weight.order == order
    assert weight.words.dtype == torch.int32
    assert weight.scales.dtype == torch.float16
    assert weight.scales.float().tolist() == source.scales.tolist()
    assert weight.perm is not None
    assert weight.perm.tolist() == source.perm.tolist()
    assert (weight.N, weight.K, weight.group_size, weight.type_name) == (n, k, group, "uint4")


def test_the_order_of_the_bits():
    assert CODE_BITS == (0, 16, 4, 20, 8, 24, 12, 28)
    codes = np.arange(1, 9, dtype=np.uint8)[None]
    weight = W4Codes(codes, np.ones((1, 1), np.float32), None, 8, None, torch.bfloat16)
    packed = pack_w4_words(weight)
    assert packed.words.tolist() == [[0x86427531 - 2**32]]
    assert packed.scales.dtype == torch.bfloat16


@pytest.mark.parametrize("zeros", [True, False])
def test_codes_past_k_are_weights_of_zero(zeros):
    source = codes_of(3, 12, 12, zeros=zeros)
    weight = pack_w4_words(source)
    words = weight.words[:, 1].numpy().view(np.uint32)
    filled = np.stack([words >> b & 15 for b in CODE_BITS[4:]])
    expected = 8 if source.zeros is None else source.zeros[:, 0]
    assert (filled == expected).all()


def test_symmetric_weights_have_no_zero_points():
    weight = pack_w4_words(codes_of(4, 32, 32, zeros=False))
    assert weight.zeros is None
    assert weight.type_name == "uint4b8"
    assert weight.nbytes == 4 * 32 // 2 + 4 * 2


def test_bytes_and_device():
    weight = pack_w4_words(codes_of(9, 64, 32))
    assert weight.nbytes == 9 * 32 + 9 * 2 * 2 + 2 * 2 * 4
    moved = weight.to("meta")
    assert {t.device.type for t in (moved.words, moved.scales, moved.zeros, moved.perm)} == {"meta"}
    assert moved.words.shape == weight.words.shape


def test_the_source_is_not_shared():
    source = codes_of(8, 32, 32)
    weight = pack_w4_words(source, pack_zeros=False)
    assert source.zeros is not None
    before = weight.zeros.clone()
    source.zeros[:] = 0
    source.codes[:] = 0
    assert torch.equal(weight.zeros, before)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("order", ["k8", "k32"])
@pytest.mark.parametrize(("n", "k", "group"), [(9, 64, 32), (3, 12, 12), (24, 160, 32)])
def test_unpacking_gives_what_was_packed(n, k, group, order, zeros):
    source = codes_of(n, k, group, zeros=zeros)
    codes, scales, z = unpack_w4_words(pack_w4_words(source, order=order))
    assert codes.tolist() == source.codes.tolist()
    assert scales.float().tolist() == source.scales.tolist()
    expected = np.full((n, k // group), 8) if source.zeros is None else source.zeros
    assert z.tolist() == expected.tolist()


def test_scales_and_zero_points_of_k32_lie_group_after_group():
    weight = pack_w4_words(codes_of(16, 64, 32), order="k32")
    assert weight.zeros is not None
    assert (weight.scales.shape, weight.scales.stride()) == ((16, 2), (1, 16))
    assert (weight.zeros.shape, weight.zeros.stride()) == ((2, 2), (1, 2))
    assert weight.to("meta").scales.stride() == (1, 16)


def test_packing_where_it_is_asked_to():
    weight = pack_w4_words(codes_of(8, 64, 32), device="meta")
    assert {t.device.type for t in (weight.words, weight.scales, weight.zeros)} == {"meta"}


def test_an_unknown_order_is_refused():
    with pytest.raises(LayoutError, match=r"order is 'k16'; words are ordered as one of .*k8.*k32"):
        pack_w4_words(codes_of(8, 64, 32), order="k16")
