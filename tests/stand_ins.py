"""Products in numpy float32, in several orders of summation: right kernels to test checks with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.ops.contract import Inputs
from tilewright.ops.mmq.reference import mmq_rows
from tilewright.ops.w4a16.reference import w4a16_rows

F32 = npt.NDArray[np.float32]
Product = Callable[[F32, F32], F32]


def plain_loop(x: F32, w: F32) -> F32:
    """One float32 accumulator an output, K in order: the least exact of the usual ways."""
    total = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        total += x[:, k, None] * w[None, :, k]
    return total


def sorted_loop(x: F32, w: F32) -> F32:
    """As `plain_loop`, columns with the largest sums first: partial sums are large throughout."""
    order = np.argsort(-np.abs(x.sum(axis=0)))
    return plain_loop(x[:, order], w[:, order])


def blocked(x: F32, w: F32) -> F32:
    """Blocks of 32 values of K, summed block after block."""
    total = np.zeros((len(x), len(w)), np.float32)
    for at in range(0, x.shape[1], 32):
        total += x[:, at : at + 32] @ w[:, at : at + 32].T
    return total


def library(x: F32, w: F32) -> F32:
    """The BLAS behind numpy."""
    return x @ w.T


PRODUCTS: dict[str, Product] = {
    "loop": plain_loop,
    "sorted": sorted_loop,
    "blocked": blocked,
    "blas": library,
}


def quantize_rows(x: F32, block: int = 32) -> F32:
    """x after the int8 path's rounding: d = max|x| / 127 per block, half away from zero."""
    m, k = x.shape
    blocks = -(-k // block)
    padded = np.zeros((m, blocks, block), np.float32)
    padded.reshape(m, blocks * block)[:, :k] = x
    step = np.abs(padded).max(axis=2, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    levels = np.trunc(padded * inverse + np.copysign(np.float32(0.5), padded))
    return np.ascontiguousarray((levels * step).reshape(m, blocks * block)[:, :k])


def stand_in(product: Product, *, apart: bool = False) -> Callable[..., torch.Tensor]:
    """An op over `Inputs` that multiplies with `product`.

    Args:
        apart: sum scale * code and the minimum (or scale * zero) separately.
    """

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        case = inputs.case
        x = inputs.x.reshape(case.M, case.K).float().numpy()
        if getattr(inputs.source, "perm", None) is not None:
            x = x[:, inputs.source.perm]
        if case.activations == "int8":
            x = quantize_rows(x)
        columns = []
        for rows in mmq_rows(inputs.source) if case.op == "mmq" else w4a16_rows(inputs.source):
            if apart and rows.offset is not None:
                y = product(x, rows.main.astype(np.float32))
                y += product(x, rows.offset.astype(np.float32))
            else:
                y = product(x, rows.value().astype(np.float32))
            columns.append(y)
        y = np.concatenate(columns, axis=1)
        if inputs.bias is not None:
            y = y + inputs.bias.float().numpy()
        return torch.from_numpy(y).to(case.dtype).reshape(*inputs.x.shape[:-1], case.N)

    return run
