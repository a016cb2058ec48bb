"""AWQ checkpoints of the "gemm" version, as AutoAWQ and auto-round write them.

::

    qweight  int32 [K, N/8]
    qzeros   int32 [K/G, N/8]
    scales   float [K/G, N]

Column j of eight lies at nibble 0, 4, 1, 5, 2, 6, 3, 7 of its word, for j = 0..7. Zero points are
stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.errors import FormatError
from tilewright.formats.gptq import same_for_every_layer
from tilewright.formats.tensor_store import TensorStore
from tilewright.formats.w4 import SYMMETRIC_ZERO, W4Codes
from tilewright.formats.w4_scheme import (
    SCALE_DTYPES,
    Fields,
    W4Scheme,
    group_count,
    read_scales,
    unpack_nibbles,
)

__all__ = ["AWQ"]

_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


def _unpack(words: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """int32 [R, N/8] -> uint8 [N, R]."""
    nibbles = unpack_nibbles(words).reshape(len(words), -1, 8)
    columns = nibbles[:, :, _NIBBLE_OF_COLUMN].reshape(len(words), -1)
    return np.ascontiguousarray(columns.T)


class AWQ:
    """Reader of AWQ linears."""

    main: str = "qweight"
    others: tuple[str, ...] = ("scales", "qzeros")

    def scheme(self, config: Mapping[str, Any], file: Path) -> W4Scheme:
        """The scheme of an AWQ config (transformers' or AutoAWQ's names), or auto-round's.

        Raises:
            FormatError: a field is missing, of a wrong type, or contradicts another.
            UnsupportedError: bits, group size or version not read here.
        """
        fields = Fields(config, file)
        fields.four_bits("bits", "w_bit")
        version = fields.text("version", "gemm")
        if version != "gemm":
            raise fields.unsupported("version", version, "'gemm'; convert the model with AutoAWQ")
        if fields.text("backend", "autoawq") == "llm-awq":
            raise fields.unsupported("backend", "llm-awq", "'autoawq' packing")
        if fields.text("data_type", "int") != "int":
            raise fields.unsupported("data_type", config["data_type"], "'int'")
        symmetric = fields.boolean("sym") if "sym" in config else not fields.boolean("zero_point")
        if "zero_point" in config and fields.boolean("zero_point") == symmetric:
            raise FormatError(
                f"the quantization config says sym={symmetric} and zero_point={symmetric}; "
                "one of them is wrong",
                file=file,
            )
        scheme = W4Scheme(
            "awq", version, fields.group_size("group_size", "q_group_size"), symmetric
        )
        same_for_every_layer(fields, scheme)
        return scheme

    def check(self, store: TensorStore, prefix: str, scheme: W4Scheme) -> None:
        qweight = f"{prefix}.qweight"
        if len(store[qweight].shape) != 2:
            raise store.fault(qweight, f"its shape is {list(store[qweight].shape)}, not [K, N/8]")
        k, words = store[qweight].shape
        n = 8 * words
        store.check(qweight, ("I32",), (k, words), "AWQ")
        groups = group_count(store, qweight, k, scheme)
        why = f"AWQ with N={n}, K={k}, group size {scheme.group_size}"
        store.check(f"{prefix}.scales", SCALE_DTYPES, (groups, n), why)
        if not scheme.symmetric or f"{prefix}.qzeros" in store:
            store.check(f"{prefix}.qzeros", ("I32",), (groups, words), why)

    def linear(self, store: TensorStore, prefix: str, scheme: W4Scheme) -> W4Codes:
        codes = _unpack(store.tensor(f"{prefix}.qweight").numpy())
        scales, scale_dtype = read_scales(store, f"{prefix}.scales")
        zeros = None
        name = f"{prefix}.qzeros"
        if name in store:
            zeros = _unpack(store.tensor(name).numpy())
        if scheme.symmetric and zeros is not None:
            if (zeros != SYMMETRIC_ZERO).any():
                raise store.fault(
                    name, "the config says symmetric and these zero points are not all 8"
                )
            zeros = None
        group_size = codes.shape[1] // len(scales)
        return W4Codes(codes, np.ascontiguousarray(scales.T), zeros, group_size, None, scale_dtype)
