"""W4Codes: what it computes and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tilewright.errors import FormatError
from tilewright.formats.w4 import W4Codes


def parts(n: int = 3, k: int = 64, g: int = 32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "codes": rng.integers(0, 16, (n, k), dtype=np.uint8),
        "scales": rng.standard_normal((n, k // g)).astype(np.float32),
        "zeros": rng.integers(0, 16, (n, k // g), dtype=np.uint8),
        "group_size": g,
        "perm": None,
        "scale_dtype": torch.float16,
    }


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("g", [32, 64], ids=["g32", "whole-row"])
def test_dequantize_is_the_formula(symmetric: bool, g: int) -> None:
    given = parts(g=g)
    if symmetric:
        given["zeros"] = None
    w4 = W4Codes(**given)
    assert (w4.N, w4.K, w4.symmetric) == (3, 64, symmetric)
    weight = w4.dequantize()
    for n in range(3):
        for k in range(64):
            zero = 8 if symmetric else int(given["zeros"][n, k // g])
            right = given["scales"][n, k // g] * np.float32(int(given["codes"][n, k]) - zero)
            assert weight[n, k] == right


def test_perm_is_undone() -> None:
    given = parts()
    plain = W4Codes(**given).dequantize()
    perm = np.random.default_rng(1).permutation(64)
    permuted = W4Codes(**{**given, "perm": perm}).dequantize()
    x = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    np.testing.assert_array_equal(permuted[:, perm], plain)
    np.testing.assert_allclose(permuted @ x, plain @ x[perm], rtol=1e-4, atol=1e-4)


U8, F32 = np.uint8, np.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": np.zeros((3, 64), np.int8)}, r"codes is int8 \[3, 64\]; .* uint8 \[N, K\]"),
        ({"codes": np.zeros(64, U8)}, r"codes is uint8 \[64\]"),
        ({"codes": torch.zeros(3, 64)}, "codes is a Tensor; it must be a numpy array"),
        ({"codes": np.full((3, 64), 16, U8)}, "codes reach 16"),
        ({"group_size": 0}, "group_size is 0; it must be a positive divisor of K = 64"),
        ({"group_size": -1}, "group_size is -1"),
        ({"group_size": 48}, "group_size is 48"),
        ({"group_size": True}, "group_size is True"),
        ({"scales": np.ones((2, 3), F32)}, r"scales is float32 \[2, 3\]; .* float32 \[3, 2\]"),
        ({"scales": np.ones((3, 2), np.float16)}, "scales is float16"),
        ({"scales": np.full((3, 2), np.nan, F32)}, "scales hold NaN or Inf"),
        ({"scales": np.full((3, 2), -np.inf, F32)}, "scales hold NaN or Inf"),
        ({"zeros": np.zeros((3, 1), U8)}, r"zeros is uint8 \[3, 1\]"),
        ({"zeros": np.full((3, 2), 16, U8)}, "zeros reach 16"),
        ({"perm": np.arange(64, dtype=np.int32)}, r"perm is int32 \[64\]"),
        ({"perm": np.zeros(64, np.int64)}, "perm is no permutation of 0..63"),
        ({"perm": np.arange(1, 65)}, "perm is no permutation"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        W4Codes(**{**parts(), **change})
