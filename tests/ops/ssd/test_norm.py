"""gated_rms_norm: its formula in float64, groups, order, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tilewright.ops.ssd.norm import gated_rms_norm


def by_hand(x: Any, z: Any, weight: Any, eps: float, groups: int, before: bool) -> Any:
    gate = 1.0 if z is None else z / (1 + np.exp(-z))
    value = x if before else x * gate
    out = np.empty_like(value)
    size = value.shape[-1] // groups
    for g in range(groups):
        part = value[..., g * size : (g + 1) * size]
        mean = np.mean(part**2, axis=-1, keepdims=True)
        out[..., g * size : (g + 1) * size] = part / np.sqrt(mean + eps)
    out = out * weight
    return out * gate if before else out


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("before", [False, True], ids=["gate-first", "norm-first"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formula(groups: int, before: bool, gated: bool, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(0)
    x = (5 * torch.randn(3, 7, 48, generator=make)).to(dtype)
    z = torch.randn(3, 7, 48, generator=make).to(dtype) if gated else None
    weight = torch.randn(48, generator=make)
    y = gated_rms_norm(x, z, weight, 1e-5, groups=groups, norm_before_gate=before)
    want = by_hand(
        x.double().numpy(), None if z is None else z.double().numpy(), weight.double().numpy(),
        1e-5, groups, before,
    )  # fmt: skip
    unit = 2**-22 if dtype == torch.float32 else 2**-8
    assert y.dtype == dtype
    np.testing.assert_allclose(y.double().numpy(), want, rtol=unit, atol=unit / 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"weight": torch.ones(4)}, r"weight has shape \[4\]; it must be \[D=8\]"),
        ({"z": torch.ones(3, 4)}, r"z has shape \[3, 4\]; it must be x's, \[3, 8\]"),
        ({"groups": 3}, "groups=3; it must divide D=8"),
        ({"groups": 0}, "groups=0; it must divide D=8"),
    ],
)
def test_bad_calls(call: dict[str, Any], message: str) -> None:
    given = {"x": torch.ones(3, 8), "z": None, "weight": torch.ones(8), "eps": 1e-5, **call}
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**given)
