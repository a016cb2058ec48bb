"""Random packed weights with the values that the gguf package, or plain arithmetic, gives them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tilewright.formats.w4 import W4Codes
from tilewright.layout.cpu import PackedBlocks, PackedW4, pack_blocks, pack_w4

F64 = npt.NDArray[np.float64]

GGUF_TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip

# Byte offsets of the fp16 fields of a block.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def blocks(name: str, n: int, k: int, seed: int = 0) -> tuple[PackedBlocks, F64]:
    """Random blocks of [n, k] and their values by the gguf package's dequantizer."""
    rng = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[name]
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (n, k // size, nbytes), dtype=np.uint8)
    for at in _HALVES[name]:
        field = (rng.standard_normal((n, k // size)) * 0.01).astype(np.float16)
        raw[:, :, at : at + 2] = field.view(np.uint8).reshape(n, k // size, 2)
    if name == "MXFP4":
        raw[:, :, 0] = rng.integers(118, 124, (n, k // size))
    rows = np.ascontiguousarray(raw.reshape(n, -1))
    values = gguf.quants.dequantize(rows, kind).astype(np.float64)
    return pack_blocks(rows, name), values


def four_bit(
    n: int, k: int, group: int, *, zeros: bool, perm: bool = False, seed: int = 0
) -> tuple[PackedW4, F64]:
    """Random 4-bit weights of [n, k] and their values; group -1 is one group a row."""
    rng = np.random.default_rng(seed)
    g = k if group == -1 else group
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = (rng.random((n, k // g)) * 0.02 + 0.001).astype(np.float32)
    zero = rng.integers(0, 16, (n, k // g), dtype=np.uint8) if zeros else None
    order = rng.permutation(k).astype(np.int64) if perm else None
    packed = pack_w4(W4Codes(codes, scales, zero, g, order, torch.float16))
    offset: Any = 8.0 if zero is None else np.repeat(zero, g, axis=1).astype(np.float64)
    values = np.repeat(scales.astype(np.float64), g, axis=1) * (codes - offset)
    if order is not None:
        natural = np.empty_like(values)
        natural[:, order] = values
        values = natural
    return packed, values


def error(got: torch.Tensor, right: F64) -> float:
    """Relative Frobenius error; NaN anywhere gives NaN."""
    difference = got.double().numpy() - right
    return float(np.linalg.norm(difference) / max(np.linalg.norm(right), 1e-30))
