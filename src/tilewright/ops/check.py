"""How far a right result may be from the exact one, and the check that holds results to it.

The oracle is the float64 product ``y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]`` of the given
activations and the exact weights. A right kernel differs from it for three reasons, and this
module states the size of each from the operands themselves. No tolerance is a constant.

1. Float32 arithmetic. Write ``w = a + b`` with the two parts that a kernel may sum apart (a is
   scale * code, b the minimum, or -scale * zero). Each of the K additions rounds a partial sum S
   by at most u |S|, u = 2^-24, with a root mean square of u |S| / sqrt(3). Whatever the order,
   a partial sum is a walk of K steps with drift, so its square stays within the walk's
   (Q^2) plus the drifts' (A^2 + B^2), where

       Q^2 = sum_k x^2 (a^2 + b^2)      A = sum_k x a      B = sum_k x b

   and rounding errors of random sign add up to

       variance_sum = u^2 / 3 * (K + 8) * (Q^2 + A^2 + B^2 + bias^2)

   The 8 stands for the roundings that do not grow with K: of the product, of the dequantized
   weight, of the bias. Blocked and pairwise sums stay far below this; a plain loop comes near it.

2. Weights rounded to a narrower type before the product (kernels that multiply in float16):
   ``variance_weight = e^2 / 3 * sum_k x^2 w^2`` with e the unit roundoff of that type, 0 if none.

3. Activations quantized to 8 bits, the "int8" path: per row, each block of 32 values is replaced
   by d * round(x / d), d = max|x| / 127. The rounding error r_k = x_k - d round(x_k / d) is spread
   evenly over +-d/2 (mean square d^2 / 12) or is x_k itself, when an outlier in the block makes d
   so large that x_k rounds to zero. Both are known here, so r_k is computed, not assumed:

       variance_quant = sum_k (r_k^2 + (2^-11 x_k)^2 / 3) * w_k^2

   The second term lets a kernel keep d in half precision. The sum takes the signs of the r_k w_k
   as random, which weights of either sign make true.

With ``sigma^2`` the sum of the three, the result is finally rounded to the output's type, which
moves it by at most half a unit in the last place: a hard bound, no statistics.

Four tests follow. `SAFETY` = 7 standard deviations sets all of them: 2.6e-12 for one Gaussian
value, 1e-4 false alarms over a run of 2,000 cases of 20,000 values.

* finite: no NaN, no Inf.
* element: ``|error| <= 7 sigma + half_ulp(|y| + 7 sigma)`` for every element.
* column and block: the mean of ``(error / total_sigma)^2`` over each column n (one weight row), and
  over each 16 x 16 tile of the output, stays below the 7-sigma quantile of chi-square over its
  degrees of freedom. Weight-only these are the values in it. On the int8 path they are its rows:
  all columns of a row share one rounding of x, and where codes lie far from their zero point they
  err together.
* tensor: ``NMSE = sum error^2 / sum y^2`` stays below its expectation ``sum total_sigma^2 / sum
  y^2`` times the same quantile, its degrees of freedom after Satterthwaite (a few loud values, or
  rows, count as few).

More than 128 degrees of freedom count as 128, where the limit is 2.2 times the expectation: the
model is good to a factor, not to a percent.

What this can see. Weight-only, the flipped top bit of one code, a scale or a zero point taken from
the next row raise the mean square of their column to hundreds (bfloat16 outputs) or 10^7 and more
(float32 outputs) times its limit. A change below half a unit in the last place of every output of
its column is invisible to anyone.
On the int8 path the rounding of x hides a change whose mean square over one column is below about
``limit - 1`` times its own, where limit is 67 for M = 1, 5.7 for M = 17 and 2.2 from M = 128 on. A
flipped top bit of a 4-bit code stands out (some 20 sigma in a typical row for K = 256); the lowest
bit of an 8-bit code, or a scale that is wrong by a percent, does not. The weight-only path of the
same packed bytes sees these, which is why every weight type is verified on both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "ACTIVATION_BLOCK",
    "SAFETY",
    "CheckResult",
    "ErrorModel",
    "WeightRows",
    "activation_variance",
    "check_output",
    "half_ulp",
    "product_sigma",
]

F64 = npt.NDArray[np.float64]

SAFETY = 7.0
"""Standard deviations that a right result may be off."""

ACTIVATION_BLOCK = 32
"""Values of x that share one scale on the int8 path."""

_BLOCK = 16
_MOST_FREEDOM = 128
_UNIT = 2.0**-24
# Bits of the significand, leading one included, and the exponent that frexp gives the smallest
# normal number.
_FORMATS = {
    torch.float32: (24, -125),
    torch.float16: (11, -13),
    torch.bfloat16: (8, -125),
    torch.float64: (53, -1021),
}


class WeightRows(NamedTuple):
    """Some rows of a weight in the two parts that a kernel may sum apart: w = main + offset.

    Attributes:
        main: float64 [n, K], scale * code.
        offset: float64 [n, K], the minimum, or -scale * zero point; None when there is none.
    """

    main: F64
    offset: F64 | None

    def value(self) -> F64:
        return self.main if self.offset is None else self.main + self.offset


@dataclass(frozen=True, eq=False)
class ErrorModel:
    """What a right result may differ from the oracle's by.

    Attributes:
        sigma: float64, shape of the oracle's result: standard deviation of the error before the
            result is rounded to `out_dtype`.
        out_dtype: dtype of the result.
        columns_independent: errors of one row's elements are independent; False on the int8 path.
        safety: standard deviations that are allowed.
        columns: int64 [n], ascending: the columns of the result that the oracle computed, and
            `sigma` with it, where all of them would take too long; None for all. The result as a
            whole is still held to its shape, and to be finite.
        of: columns of the whole result, where `columns` is given.
        rounding: float64, shape of `sigma`: half a unit in the last place to which a result was
            rounded before it was written as `out_dtype`; None where nothing else rounds it.
    """

    sigma: F64
    out_dtype: torch.dtype
    columns_independent: bool = True
    safety: float = SAFETY
    columns: npt.NDArray[np.int64] | None = None
    of: int = 0
    rounding: F64 | None = None


@dataclass(frozen=True)
class CheckResult:
    """The verdict on one result.

    Attributes:
        passed: every test holds.
        nmse: sum of squared errors over sum of squares of the oracle's result.
        nmse_limit: what the error model allows it to be.
        worst_ratio: the largest of the tests' statistics, each as a multiple of its limit:
            at most 1 when `passed`. Inf for NaN, Inf, and a wrong shape or dtype.
        worst_index: [m, n] of the element with the largest error, as a multiple of its limit.
        worst_block: [m, n] of the first element of the worst 16 x 16 tile.
        reason: why it failed; empty when it passed.
    """

    passed: bool
    nmse: float
    nmse_limit: float
    worst_ratio: float
    worst_index: tuple[int, int] | None
    worst_block: tuple[int, int] | None
    reason: str


def product_sigma(
    x: F64,
    weight: Iterable[WeightRows],
    *,
    bias: F64 | None = None,
    x_variance: F64 | None = None,
    weight_unit: float = 0.0,
) -> F64:
    """Standard deviation of a right result's error before its last rounding, for x @ w.T + bias.

    Args:
        x: [M, K], columns in the weight's order.
        weight: all rows of the weight, a few at a time.
        bias: [N].
        x_variance: [M, K], `activation_variance(x)` on the int8 path, else None.
        weight_unit: unit roundoff of the type to which the kernel rounds weights; 0 for none
            (float32 is part of the model already).

    Returns:
        float64 [M, N].
    """
    square = x * x
    at_weight = np.zeros_like(x) if x_variance is None else x_variance
    if weight_unit:
        at_weight = at_weight + weight_unit**2 / 3 * square
    parts = []
    for rows in weight:
        terms = rows.main**2
        total = (x @ rows.main.T) ** 2
        if rows.offset is not None:
            terms += rows.offset**2
            total += (x @ rows.offset.T) ** 2
        total += square @ terms.T
        total *= _UNIT**2 / 3 * (x.shape[1] + 8)
        if x_variance is not None or weight_unit:
            total += at_weight @ (rows.value() ** 2).T
        parts.append(total)
    variance = np.concatenate(parts, axis=1) if parts else np.zeros((len(x), 0))
    if bias is not None:
        variance += _UNIT**2 / 3 * (x.shape[1] + 8) * bias**2
    return np.sqrt(variance)


def activation_variance(x: F64, block: int = ACTIVATION_BLOCK) -> F64:
    """Mean square error of each activation on the int8 path, float64 [M, K]: see the module.

    Args:
        x: [M, K], columns in the order in which they are quantized.
        block: values that share one scale; the last block of a row may be shorter.
    """
    m, k = x.shape
    blocks = -(-k // block)
    padded = np.zeros((m, blocks, block))
    padded.reshape(m, blocks * block)[:, :k] = x
    step = np.abs(padded).max(axis=2, keepdims=True) / 127
    levels = np.divide(padded, step, out=np.zeros_like(padded), where=step > 0)
    residual = padded - np.rint(levels) * step
    variance = residual**2 + (2.0**-11 * padded) ** 2 / 3
    return np.ascontiguousarray(variance.reshape(m, blocks * block)[:, :k])


def check_output(y: torch.Tensor, ref: npt.ArrayLike, model: ErrorModel) -> CheckResult:
    """Hold a result to the oracle's.

    Args:
        y: the result, any device, [..., N].
        ref: float64, the oracle's result: of y's shape, or of the columns that `model` names.
        model: the error model of these operands.

    Returns:
        The verdict. A wrong shape or dtype, NaN and Inf fail; they do not raise.

    Raises:
        ValueError: the oracle's own result is not finite, or does not fit the output's dtype:
            the case is at fault, not the kernel.
    """
    want = np.asarray(ref, dtype=np.float64)
    _require_representable(want, model)
    shape = want.shape if model.columns is None else (*want.shape[:-1], model.of)
    if tuple(y.shape) != shape:
        return _rejected(f"shape is {list(y.shape)}, it must be {list(shape)}")
    if y.dtype != model.out_dtype:
        return _rejected(f"dtype is {y.dtype}, it must be {model.out_dtype}")
    if want.size == 0:
        return CheckResult(True, 0.0, 0.0, 0.0, None, None, "")
    flat = y.detach().reshape(-1, shape[-1] if shape else 1)
    wrong = ~torch.isfinite(flat)
    count = int(wrong.sum())
    if count:
        m, n = (int(i) for i in wrong.nonzero()[0])
        return _rejected(
            f"{count} of {flat.numel()} outputs are NaN or Inf, the first at [{m}, {n}]", (m, n)
        )
    if model.columns is not None:
        flat = flat[:, torch.from_numpy(model.columns).to(flat.device)]
    got = flat.to("cpu", torch.float64).numpy()
    want = want.reshape(got.shape)
    sigma = np.broadcast_to(model.sigma, np.shape(ref)).reshape(want.shape)
    if model.rounding is not None:
        model = replace(model, rounding=model.rounding.reshape(want.shape))
    return _judge(got, want, sigma, model)


def _judge(got: F64, want: F64, sigma: F64, model: ErrorModel) -> CheckResult:
    numbers = np.arange(want.shape[1]) if model.columns is None else model.columns
    error = got - want
    noise = model.safety * sigma
    half_ulp = _half_ulp(np.abs(want) + noise, model.out_dtype)
    if model.rounding is not None:
        half_ulp = half_ulp + model.rounding
    limit = noise + half_ulp
    ratios = np.abs(error) / limit
    at = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    m, n = int(at[0]), int(at[1])
    findings = [
        (
            float(ratios[m, n]),
            f"element [{m}, {numbers[n]}] is {got[m, n]:.8g}, the oracle says "
            f"{want[m, n]:.8g}: the error {abs(error[m, n]):.2e} is {ratios[m, n]:.3g} times its "
            f"limit {limit[m, n]:.2e}",
        )
    ]

    variance = sigma**2 + half_ulp**2 / 3
    z2 = error**2 / variance
    rows = len(want)
    by_column = z2.mean(axis=0)
    column = int(np.argmax(by_column))
    column_limit = float(_mean_square_limit(rows, model.safety))
    findings.append(
        (
            float(by_column[column]) / column_limit,
            f"column {numbers[column]}: the mean square error over its {rows} rows is "
            f"{by_column[column]:.3g} times the expected one, the limit is {column_limit:.3g}",
        )
    )

    by_block, block_limit = _blocks(z2, model)
    block_ratios = by_block / block_limit
    i, j = np.unravel_index(int(np.argmax(block_ratios)), block_ratios.shape)
    block = (int(i) * _BLOCK, int(numbers[j * _BLOCK]))
    findings.append(
        (
            float(block_ratios[i, j]),
            f"the 16 x 16 tile at {list(block)}: its mean square error is {by_block[i, j]:.3g} "
            f"times the expected one, the limit is {block_limit[i, j]:.3g}",
        )
    )

    power, energy = float((want**2).sum()), float((error**2).sum())
    expected = float(variance.sum())
    parts = variance if model.columns_independent else variance.sum(axis=1)
    freedom = expected**2 / float((parts**2).sum())
    allowed = expected * float(_mean_square_limit(freedom, model.safety))
    nmse = energy / power if power else (np.inf if energy else 0.0)
    nmse_limit = allowed / power if power else np.inf
    findings.append(
        (
            energy / allowed,
            f"NMSE is {nmse:.2e}, the limit is {nmse_limit:.2e}",
        )
    )

    wrong = [text for ratio, text in findings if not ratio <= 1]
    return CheckResult(
        passed=not wrong,
        nmse=float(nmse),
        nmse_limit=float(nmse_limit),
        worst_ratio=max(ratio for ratio, _ in findings),
        worst_index=(m, int(numbers[n])),
        worst_block=block,
        reason="; ".join(wrong),
    )


def _rejected(reason: str, index: tuple[int, int] | None = None) -> CheckResult:
    block = None if index is None else (index[0] // _BLOCK * _BLOCK, index[1] // _BLOCK * _BLOCK)
    return CheckResult(False, np.inf, 0.0, np.inf, index, block, reason)


def _require_representable(want: F64, model: ErrorModel) -> None:
    if model.out_dtype not in _FORMATS:
        raise ValueError(f"out_dtype is {model.out_dtype}; it must be one of {list(_FORMATS)}")
    if want.size:
        top = float(np.abs(want).max())
        most = torch.finfo(model.out_dtype).max
        if not top < most:
            raise ValueError(
                f"the oracle's result reaches {top:.4g}, {model.out_dtype} holds up to {most:.4g}; "
                "scale the case's operands down"
            )


def half_ulp(value: F64, dtype: torch.dtype) -> F64:
    """Half the distance between the numbers of `dtype` around each value."""
    return _half_ulp(np.abs(value), dtype)


def _half_ulp(value: F64, dtype: torch.dtype) -> F64:
    """Half the distance between the numbers of `dtype` around `value` (frexp: value = f * 2^e)."""
    bits, lowest = _FORMATS[dtype]
    exponent = np.maximum(np.frexp(value)[1], lowest)
    spacing = np.ldexp(0.5, exponent - bits)
    # Below the smallest normal number a kernel may flush to zero, in float32 and its like.
    floor = 0.0 if dtype is torch.float16 else np.ldexp(1.0, lowest - 1)
    return np.maximum(spacing, floor)


def _mean_square_limit(freedom: npt.ArrayLike, safety: float) -> F64:
    """Mean of that many squared standard normals that is exceeded as rarely as `safety` sigma.

    Wilson and Hilferty's cube-root transform of chi-square; on the safe side for few degrees.
    """
    a = 2.0 / (9.0 * np.minimum(np.asarray(freedom, dtype=np.float64), _MOST_FREEDOM))
    return np.asarray((1.0 - a + safety * np.sqrt(a)) ** 3)


def _blocks(z2: F64, model: ErrorModel) -> tuple[F64, F64]:
    """Mean of z2 in each 16 x 16 tile, and its limit."""
    rows, columns = z2.shape
    at_m, at_n = np.arange(0, rows, _BLOCK), np.arange(0, columns, _BLOCK)
    total = np.add.reduceat(np.add.reduceat(z2, at_m, axis=0), at_n, axis=1)
    tall = np.minimum(_BLOCK, rows - at_m)[:, None]
    wide = np.minimum(_BLOCK, columns - at_n)[None, :]
    count = tall * wide
    freedom = count if model.columns_independent else np.broadcast_to(tall, count.shape)
    return total / count, _mean_square_limit(freedom, model.safety)
