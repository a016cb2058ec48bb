"""The layout of the Hopper kernels against its formula, computed value by value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright.errors import LayoutError
from tilewright.formats.w4 import W4Codes
from tilewright.layout.hopper import HopperW4, pack_w4_hopper, unpack_w4_hopper

SHAPES = [(64, 64, 64), (128, 192, 64), (1, 32, 32), (70, 96, 32), (97, 256, 128), (65, 100, 100)]


def draw(n: int, k: int, group: int, *, symmetric: bool = False, seed: int = 0) -> W4Codes:
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.005, 0.025, (n, k // group)).astype(np.float16).astype(np.float32)
    return W4Codes(
        codes=rng.integers(0, 16, (n, k), dtype=np.uint8),
        scales=scales,
        zeros=None if symmetric else rng.integers(0, 16, (n, k // group), dtype=np.uint8),
        group_size=group,
        perm=None,
        scale_dtype=torch.float16,
    )


def code_at(packed: HopperW4, n: int, k: int) -> int:
    """The code of row n and column k, found by the formula of the docstring."""
    b, w, r8, lrow = n // 64, n // 16 % 4, n // 8 % 2, n % 8
    kb, j, kh, lk, k1 = k // 64, k // 16 % 4, k // 8 % 2, k // 2 % 4, k % 2
    word = int(packed.words[b, kb, w, lrow * 16 + lk * 4 + j])
    return word >> (4 * r8 + 8 * kh + 16 * k1) & 15


@pytest.mark.parametrize("symmetric", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize(("n", "k", "group"), SHAPES, ids=lambda v: str(v))
def test_every_code_lies_where_the_formula_says(
    n: int, k: int, group: int, symmetric: bool
) -> None:
    weight = draw(n, k, group, symmetric=symmetric)
    packed = pack_w4_hopper(weight, act_dtype=torch.float16)
    assert packed.words.shape == (-(-n // 64), -(-k // 64), 4, 128)
    assert packed.words.dtype == torch.int32
    assert packed.words.is_contiguous()
    found = np.array([[code_at(packed, i, c) for c in range(k)] for i in range(n)])
    np.testing.assert_array_equal(found, weight.codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("n", "k", "group"), SHAPES, ids=lambda v: str(v))
def test_scales_and_zeros_lie_where_the_formula_says(
    n: int, k: int, group: int, dtype: torch.dtype
) -> None:
    weight = draw(n, k, group)
    packed = pack_w4_hopper(weight, act_dtype=dtype)
    assert packed.zeros is not None
    assert packed.scales.dtype == packed.dtype == dtype
    assert packed.scales.shape == (-(-n // 64), k // group, 64)
    assert packed.zeros.shape == (-(-n // 64), k // group, 32)
    assert weight.zeros is not None
    for row in range(n):
        b, w, r8, lrow = row // 64, row // 16 % 4, row // 8 % 2, row % 8
        for g in range(k // group):
            scale = torch.tensor(weight.scales[row, g]).to(dtype)
            assert packed.scales[b, g, w * 16 + lrow * 2 + r8] == scale
            assert int(packed.zeros[b, g, w * 8 + lrow]) >> (4 * r8) & 15 == weight.zeros[row, g]


@pytest.mark.parametrize("symmetric", [False, True], ids=["asym", "sym"])
def test_padding_is_weight_zero(symmetric: bool) -> None:
    weight = draw(70, 96, 32, symmetric=symmetric)
    packed = pack_w4_hopper(weight, act_dtype=torch.float16)
    for row in range(128):
        for column in range(128):
            if row < 70 and column < 96:
                continue
            if symmetric or row >= 70:
                zero = 8
            else:
                assert weight.zeros is not None
                zero = int(weight.zeros[row, -1])
            assert code_at(packed, row, column) == zero
    index = [row // 16 % 4 * 16 + row % 8 * 2 + row // 8 % 2 for row in range(6, 64)]
    assert not packed.scales[1][:, index].any()


@pytest.mark.parametrize("symmetric", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize(("n", "k", "group"), SHAPES, ids=lambda v: str(v))
def test_unpack_gives_back_what_was_packed(n: int, k: int, group: int, symmetric: bool) -> None:
    weight = draw(n, k, group, symmetric=symmetric)
    codes, scales, zeros = unpack_w4_hopper(pack_w4_hopper(weight, act_dtype=torch.float16))
    np.testing.assert_array_equal(codes.numpy(), weight.codes)
    np.testing.assert_array_equal(scales.float().numpy(), weight.scales)
    expected = np.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros
    np.testing.assert_array_equal(zeros.numpy(), expected)


def test_one_flipped_code_changes_one_word() -> None:
    weight = draw(70, 128, 64)
    before = pack_w4_hopper(weight, act_dtype=torch.float16).words
    weight.codes[69, 77] ^= 1
    after = pack_w4_hopper(weight, act_dtype=torch.float16).words
    assert int((before != after).sum()) == 1


def test_properties_and_device_move() -> None:
    weight = draw(70, 128, 64)
    packed = pack_w4_hopper(weight, act_dtype=torch.bfloat16)
    assert packed.type_name == "uint4"
    assert packed.nbytes == 2 * 2 * 512 * 4 + 2 * 2 * 64 * 2 + 2 * 2 * 32
    packed.handles["descriptor"] = object()
    moved = packed.to("cpu")
    assert (moved.N, moved.K, moved.group_size, moved.dtype) == (70, 128, 64, torch.bfloat16)
    assert moved.handles == {}
    symmetric = pack_w4_hopper(draw(70, 128, 64, symmetric=True), act_dtype=torch.float16)
    assert symmetric.type_name == "uint4b8"
    assert symmetric.zeros is None


def test_permutation_is_kept_as_a_copy() -> None:
    weight = draw(8, 64, 64)
    perm = np.random.default_rng(1).permutation(64)
    ordered = W4Codes(weight.codes, weight.scales, weight.zeros, 64, perm, torch.float16)
    packed = pack_w4_hopper(ordered, act_dtype=torch.float16)
    assert packed.perm is not None
    kept = perm.copy()
    perm[:] = 0
    np.testing.assert_array_equal(packed.perm.numpy(), kept)


def scaled(value: float, group: int = 64) -> W4Codes:
    weight = draw(70, 192, group)
    weight.scales[69, 0] = value
    return weight


@pytest.mark.parametrize(
    ("weight", "dtype", "message"),
    [
        (scaled(0.01), torch.float32, "act_dtype is torch.float32"),
        (scaled(0.01, group=96), torch.float16, "group_size=96"),
        (scaled(7e4), torch.float16, "row 69, group 0"),
        (scaled(1e-8), torch.float16, "1 of 210 over- or underflow in torch.float16"),
        (scaled(3.1e-7), torch.float16, "over- or underflow"),
        (scaled(1e-40), torch.bfloat16, "over- or underflow in torch.bfloat16"),
    ],
    ids=["float32", "group", "overflow", "underflow", "subnormal", "bf16-underflow"],
)
def test_errors(weight: W4Codes, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        pack_w4_hopper(weight, act_dtype=dtype)


def test_scales_exact_in_the_subnormal_range_are_kept() -> None:
    packed = pack_w4_hopper(scaled(2.0**-23), act_dtype=torch.float16)
    assert unpack_w4_hopper(packed)[1][69, 0].item() == 2.0**-23
