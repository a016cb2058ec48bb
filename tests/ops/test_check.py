"""The check itself: right results pass whatever their order of summation, wrong ones do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stand_ins import PRODUCTS, quantize_rows
from tilewright.ops.check import (
    CheckResult,
    ErrorModel,
    WeightRows,
    activation_variance,
    check_output,
    product_sigma,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def operands(seed, m=33, n=48, k=1024, offset=0.0):
    """x and w in float64 that float32 holds exactly; `offset` is added to both."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((m, k)) + offset).astype(np.float32).astype(np.float64)
    w = (rng.standard_normal((n, k)) / np.sqrt(k) + offset).astype(np.float32).astype(np.float64)
    return x, w


def model_of(x, w, dtype=torch.float32, **more):
    return ErrorModel(product_sigma(x, [WeightRows(w, None)], **more), dtype)


def check_product(x, w, y, dtype=torch.float32) -> CheckResult:
    return check_output(torch.as_tensor(y).to(dtype), x @ w.T, model_of(x, w, dtype))


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["zero-mean", "all-positive"])
@pytest.mark.parametrize("order", PRODUCTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_sums_pass_in_any_order(order, dtype, offset):
    for seed in range(20):
        x, w = operands(seed, offset=offset)
        y = PRODUCTS[order](x.astype(np.float32), w.astype(np.float32))
        result = check_product(x, w, y, DTYPES[dtype])
        assert result.passed, result.reason
        if dtype == "fp32":
            assert result.worst_ratio < 0.7


@pytest.mark.parametrize("k", [1, 2, 32, 8192])
def test_float32_sums_pass_at_any_length(k):
    x, w = operands(k, m=8, n=16, k=k)
    result = check_product(x, w, PRODUCTS["loop"](x.astype(np.float32), w.astype(np.float32)))
    assert result.passed, result.reason


def test_model_is_not_loose():
    """A plain float32 loop uses a good part of what the model allows, a float16 one far more."""
    x, w = operands(0)
    loop = check_product(x, w, PRODUCTS["loop"](x.astype(np.float32), w.astype(np.float32)))
    assert loop.worst_ratio > 0.05
    coarse = torch.from_numpy(x).half().double() @ torch.from_numpy(w).half().double().T
    rounded = check_product(x, w, coarse)
    assert not rounded.passed
    assert rounded.worst_ratio > 20


def test_weights_rounded_to_float16_pass_when_the_model_says_so():
    x, w = operands(1)
    half = torch.from_numpy(w).half().double().numpy()
    y = torch.from_numpy(x @ half.T).float()
    strict = check_output(y, x @ w.T, model_of(x, w))
    told = check_output(y, x @ w.T, model_of(x, w, weight_unit=2.0**-11))
    assert not strict.passed
    assert told.passed, told.reason


@pytest.mark.parametrize("fault", ["zeroed", "neighbour", "nan", "inf"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_fails(fault, dtype):
    x, w = operands(2)
    y = torch.from_numpy(x @ w.T).to(DTYPES[dtype])
    m, n = 20, 7
    assert check_product(x, w, y, DTYPES[dtype]).passed
    y[m, n] = {"zeroed": 0.0, "neighbour": y[m, n + 1], "nan": np.nan, "inf": np.inf}[fault]
    result = check_product(x, w, y, DTYPES[dtype])
    assert not result.passed
    assert result.worst_index == (m, n)
    assert result.worst_block == (16, 0)
    assert f"[{m}, {n}]" in result.reason


def test_wrong_shape_and_dtype_fail():
    x, w = operands(3)
    y = torch.from_numpy(x @ w.T)
    assert "shape is [48, 33], it must be [33, 48]" in check_product(x, w, y.T).reason
    result = check_output(y.half(), x @ w.T, model_of(x, w))
    assert not result.passed
    assert result.reason == "dtype is torch.float16, it must be torch.float32"


def test_no_rows_pass_only_with_the_right_shape():
    x, w = operands(4, m=0)
    model = model_of(x, w)
    assert check_output(torch.empty(0, 48), x @ w.T, model).passed
    assert not check_output(torch.empty(0, 47), x @ w.T, model).passed


def test_three_dimensions_are_judged_as_rows():
    x, w = operands(5, m=6)
    ref = (x @ w.T).reshape(2, 3, 48)
    model = ErrorModel(model_of(x, w).sigma.reshape(2, 3, 48), torch.float32)
    y = torch.from_numpy(ref).float()
    assert check_output(y, ref, model).passed
    y[1, 2, 5] += 1
    assert check_output(y, ref, model).worst_index == (5, 5)


def noise(m, n, seed=0):
    return np.random.default_rng(seed).standard_normal((m, n))


# Each test of the check sees a fault that the other three do not. Errors are in units of sigma,
# the exact result is 0, and float64 outputs add no rounding of their own.
@pytest.mark.parametrize("test", ["none", "element", "column", "tile", "NMSE"])
def test_each_test_earns_its_place(test):
    shape = (1, 4096) if test == "NMSE" else (63, 64) if test == "column" else (512, 128)
    y = noise(*shape)
    if test == "element":
        y[300, 40] = 9.0
    if test == "column":
        y[:, 40] = 2.5
    if test == "tile":
        y[32:48, 16:32] = 2.0
    if test == "NMSE":
        y *= 1.55
    model = ErrorModel(np.ones(shape), torch.float64)
    result = check_output(torch.from_numpy(y), np.zeros(shape), model)
    found = [name for name in ("element", "column", "tile", "NMSE") if name in result.reason]
    assert found == ([] if test == "none" else [test])
    assert result.passed == (test == "none")


def test_rows_that_err_together_are_allowed_on_the_int8_path_only():
    """All columns of a row share one rounding of x: a tile's rows count, not its values."""
    y = np.repeat(noise(16, 1, seed=3), 16, axis=1) * 1.6
    ref = np.zeros_like(y)
    y64 = torch.from_numpy(y)
    apart = check_output(y64, ref, ErrorModel(np.ones_like(y), torch.float64))
    together = check_output(
        y64, ref, ErrorModel(np.ones_like(y), torch.float64, columns_independent=False)
    )
    assert not apart.passed
    assert together.passed, together.reason


def test_gaussian_noise_of_the_stated_size_passes():
    for seed in range(200):
        y = noise(64, 96, seed)
        model = ErrorModel(np.ones(y.shape), torch.float64)
        result = check_output(torch.from_numpy(y), np.zeros(y.shape), model)
        assert result.passed, result.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_of_the_output_is_a_hard_bound(dtype):
    """Half a unit in the last place passes with a sigma of 0, one unit does not."""
    ref = np.concatenate([noise(8, 32).ravel(), [1.0, 2.0, 0.0, 1e-7, 3e4]]).reshape(1, -1)
    model = ErrorModel(np.zeros(ref.shape), DTYPES[dtype])
    y = torch.from_numpy(ref).to(DTYPES[dtype])
    result = check_output(y, ref, model)
    assert result.passed, result.reason
    assert result.worst_ratio <= 1
    for at in range(0, 256, 16):
        off = y.clone()
        off[0, at] = torch.nextafter(y[0, at], y[0, at] + np.sign(float(y[0, at])))
        off[0, at] = torch.nextafter(off[0, at], off[0, at] + np.sign(float(y[0, at])))
        assert not check_output(off, ref, model).passed


def test_oracle_that_overflows_the_output_is_the_cases_fault():
    model = ErrorModel(np.zeros((1, 1)), torch.float16)
    with pytest.raises(ValueError, match="reaches 7e\\+04, torch.float16 holds up to 6.55e\\+04"):
        check_output(torch.zeros(1, 1).half(), np.full((1, 1), 7e4), model)
    with pytest.raises(ValueError, match="reaches nan"):
        check_output(torch.zeros(1, 1).half(), np.full((1, 1), np.nan), model)
    with pytest.raises(ValueError, match="out_dtype is torch.int8"):
        check_output(torch.zeros(1, 1), np.zeros((1, 1)), ErrorModel(np.zeros((1, 1)), torch.int8))


def test_activation_variance_is_the_textbook_figure_on_average():
    """d^2 / 12 with d = max|x| / 127 over blocks of 32, whose largest value is held exactly."""
    x = np.random.default_rng(0).standard_normal((256, 320))
    step = np.abs(x.reshape(256, 10, 32)).max(axis=2) / 127
    expected = float((step**2 / 12).mean()) * 31 / 32
    assert activation_variance(x).mean() == pytest.approx(expected, rel=0.03)


def test_activation_variance_of_what_an_outlier_rounds_to_zero_is_its_square():
    x = np.full((1, 40), 0.5)
    x[0, 3] = 1e4
    variance = activation_variance(x)
    rounded = (2.0**-11 * 0.5) ** 2 / 3
    assert variance[0, 0] == pytest.approx(0.25 + rounded)
    assert variance[0, 3] == pytest.approx((2.0**-11 * 1e4) ** 2 / 3)
    assert variance[0, 35] == pytest.approx(rounded, abs=1e-12)  # the next block has no outlier
    assert not activation_variance(np.zeros((2, 33))).any()
    assert activation_variance(np.zeros((0, 33))).shape == (0, 33)


def test_int8_model_predicts_the_error_of_a_quantized_product():
    """The mean square of error / sigma is 1, to the accuracy of the sample."""
    ratios = []
    for seed in range(20):
        x, w = operands(seed, m=17, k=512)
        sigma = product_sigma(x, [WeightRows(w, None)], x_variance=activation_variance(x))
        error = (quantize_rows(x.astype(np.float32)).astype(np.float64) - x) @ w.T
        ratios.append(((error / sigma) ** 2).mean())
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.05)


def test_int8_path_sees_a_top_bit_and_not_a_lowest_one():
    """The limit that the documentation states, with 4-bit codes, K = 256 and 17 rows."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (32, 256)).astype(np.float64)
    x = rng.standard_normal((17, 256)).astype(np.float32).astype(np.float64)
    column = int(np.argmax((x**2).sum(axis=0)))
    model = ErrorModel(
        product_sigma(x, [WeightRows(codes, None)], x_variance=activation_variance(x)),
        torch.float32,
        columns_independent=False,
    )
    rounded = quantize_rows(x.astype(np.float32)).astype(np.float64)
    for change, passes in ((0.0, True), (0.05, True), (8.0, False)):
        wrong = codes.copy()
        wrong[5, column] += change
        result = check_output(torch.from_numpy(rounded @ wrong.T).float(), x @ codes.T, model)
        assert result.passed == passes, (change, result.reason)


@pytest.mark.parametrize(("block", "passes"), [(32, True), (128, False)])
def test_int8_path_sees_coarser_blocks_of_activations(block, passes):
    """Where 128 values share a scale, an outlier rounds 127 neighbours to zero instead of 31."""
    x, w = operands(6, m=17, k=512)
    x[:, 40] = 1e4
    model = ErrorModel(
        product_sigma(x, [WeightRows(w, None)], x_variance=activation_variance(x)),
        torch.float32,
        columns_independent=False,
    )
    y = quantize_rows(x.astype(np.float32), block).astype(np.float64) @ w.T
    result = check_output(torch.from_numpy(y).float(), x @ w.T, model)
    assert result.passed == passes, result.reason


def test_some_columns_are_judged_and_all_must_be_finite():
    rng = np.random.default_rng(3)
    want = rng.standard_normal((5, 64))
    columns = np.array([0, 1, 40, 41, 63])
    model = ErrorModel(np.full((5, 5), 1e-6), torch.float32, columns=columns, of=64)
    y = torch.from_numpy(want).float()

    assert check_output(y, want[:, columns], model).passed
    y[2, 41] += 1.0
    found = check_output(y, want[:, columns], model)
    assert found.worst_index == (2, 41)
    assert "element [2, 41]" in found.reason
    y[2, 41] -= 1.0
    y[3, 7] = float("nan")  # a column that is not judged
    assert "[3, 7]" in check_output(y, want[:, columns], model).reason
    assert "shape" in check_output(y[:, :63], want[:, columns], model).reason
