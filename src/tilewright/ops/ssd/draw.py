"""How operands of a scan are drawn, and how they lie in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tilewright.ops.contract import Case

__all__ = ["guarded", "laid_out", "rates"]

F32 = npt.NDArray[np.float32]

_GUARD = 64


def guarded(values: F32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values between NaN."""
    buffer = torch.full((_GUARD + values.size + _GUARD,), float("nan"), dtype=dtype)
    view = buffer[_GUARD : _GUARD + values.size].view(values.shape)
    return view.copy_(torch.from_numpy(values))


def rates(
    case: Case, heads: int, shape: tuple[int, int], rng: np.random.Generator
) -> tuple[F32, F32 | None, F32]:
    """A [H], the bias of dt [H] or None, and raw dt [b, L, H]."""
    low, high = {"strong": (2.0, 4.0), "weak": (-6.0, -3.0), "threshold": (-4.0, -2.0)}.get(
        next((f for f in case.flags if f in ("strong", "weak", "threshold")), ""), (-1.0, 3.0)
    )
    A = -np.logspace(low, high, heads) if heads > 1 else -np.full(1, 10 ** ((low + high) / 2))
    noise = rng.standard_normal((*shape, heads))
    if "plain" in case.flags:
        return A.astype(np.float32), None, (0.02 * np.exp(0.5 * noise)).astype(np.float32)
    if "threshold" in case.flags:
        bias = np.full(heads, 10.0)
        raw = 10.0 + 0.01 * noise
        raw[:, ::3] = 10.0  # exactly 20 with the bias
    else:
        bias = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), heads))))
        raw = 0.5 * noise
    return A.astype(np.float32), bias.astype(np.float32), raw.astype(np.float32)


def laid_out(parts: dict[str, F32], case: Case) -> dict[str, torch.Tensor]:
    """Each [b, L, ...] in memory as the case's flags ask: alone, or as views of one projection,
    whose columns ("strided") or tokens ("transposed") are its fastest dimension. NaN around all.
    """
    if not {"strided", "transposed"} & set(case.flags):
        return {name: guarded(v, case.dtype) for name, v in parts.items()}
    rows, length = parts["x"].shape[:2]
    widths = {name: int(np.prod(v.shape[2:])) for name, v in parts.items()}
    wide = sum(widths.values()) + 8 * len(widths) + 8
    tall = length + 3
    buffer = torch.full((_GUARD + rows * wide * tall + _GUARD,), float("nan"), dtype=case.dtype)
    body = buffer[_GUARD : len(buffer) - _GUARD].view(rows, -1)
    if "transposed" in case.flags:
        whole = body.view(rows, wide, tall).transpose(1, 2)[:, :length]
    else:
        whole = body.view(rows, tall, wide)[:, :length]
    views, at = {}, 8
    for name, v in parts.items():
        view = whole[:, :, at : at + widths[name]].unflatten(2, v.shape[2:])
        views[name] = view.copy_(torch.from_numpy(v))
        at += widths[name] + 8
    return views
