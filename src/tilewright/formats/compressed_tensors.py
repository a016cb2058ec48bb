"""compressed-tensors checkpoints in the pack-quantized format, as llm-compressor writes them.

::

    weight_packed      int32 [N, K/8]    nibble i of column c is k = 8c + i
    weight_scale       float [N, K/G]
    weight_zero_point  int32 [N/8, K/G]  nibble i of row r is n = 8r + i; asymmetric only
    weight_shape       int64 [2]         N, K
    weight_g_idx       int32 [K]         the group of column k; act-order "group" only

Signed codes and zero points are stored with 8 added, so 8 is the symmetric zero point.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.errors import FormatError
from tilewright.formats.tensor_store import TensorStore
from tilewright.formats.w4 import W4Codes
from tilewright.formats.w4_scheme import (
    SCALE_DTYPES,
    Fields,
    W4Scheme,
    group_count,
    group_order,
    read_scales,
    unpack_nibbles,
)

__all__ = ["CompressedTensors"]

_FORMAT = "pack-quantized"


class CompressedTensors:
    """Reader of compressed-tensors linears."""

    main: str = "weight_packed"
    others: tuple[str, ...] = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def scheme(self, config: Mapping[str, Any], file: Path) -> W4Scheme:
        """The one scheme that all config groups state.

        Raises:
            FormatError: a field is missing or of a wrong type.
            UnsupportedError: a format, strategy or transform that is not read here, or groups
                that differ.
        """
        fields = Fields(config, file)
        for name in ("transform_config", "kv_cache_scheme"):
            if fields.mapping(name):
                raise fields.unsupported(name, config[name], "checkpoints without one")
        sparsity = Fields(fields.mapping("sparsity_config"), file).text("format", "dense")
        if sparsity != "dense":
            raise fields.unsupported("sparsity_config", sparsity, "dense weights")
        groups = fields.mapping("config_groups")
        if not groups:
            raise FormatError("the quantization config has no 'config_groups'", file=file)
        default = fields.text("format", "")
        schemes = {}
        for name, group in groups.items():
            if not isinstance(group, dict):
                raise fields.wrong(name, group, "an object")
            schemes[name] = _group_scheme(Fields(group, file), default)
        if len(set(schemes.values())) > 1:
            raise fields.unsupported(
                "config_groups", sorted(schemes), "one scheme for all layers, and these differ"
            )
        return next(iter(schemes.values()))

    def check(self, store: TensorStore, prefix: str, scheme: W4Scheme) -> None:
        packed = f"{prefix}.weight_packed"
        if len(store[packed].shape) != 2:
            raise store.fault(packed, f"its shape is {list(store[packed].shape)}, not [N, K/8]")
        n, words = store[packed].shape
        store.check(packed, ("I32",), (n, words), _FORMAT)
        shape_name = f"{prefix}.weight_shape"
        store.check(shape_name, ("I64", "I32"), (2,), _FORMAT)
        rows, k = (int(v) for v in store.tensor(shape_name).tolist())
        if rows != n or k < 0 or -(-k // 8) != words:
            raise store.fault(
                shape_name,
                f"it says [{rows}, {k}] and weight_packed is {[n, words]}, not [N, K/8] of that",
            )
        groups = group_count(store, packed, k, scheme)
        why = f"{_FORMAT} with N={n}, K={k}, group size {scheme.group_size}"
        store.check(f"{prefix}.weight_scale", SCALE_DTYPES, (n, groups), why)
        if not scheme.symmetric:
            store.check(f"{prefix}.weight_zero_point", ("I32",), (-(-n // 8), groups), why)
        g_idx = f"{prefix}.weight_g_idx"
        if g_idx in store:
            store.check(g_idx, ("I32", "I64"), (k,), why)
        elif scheme.act_order:
            raise FormatError(
                "this tensor is missing; the config's actorder needs it",
                file=store[packed].file,
                tensor=g_idx,
            )

    def linear(self, store: TensorStore, prefix: str, scheme: W4Scheme) -> W4Codes:
        n, k = (int(v) for v in store.tensor(f"{prefix}.weight_shape").tolist())
        codes = unpack_nibbles(store.tensor(f"{prefix}.weight_packed").numpy())
        codes = np.ascontiguousarray(codes[:, :k])
        scales, scale_dtype = read_scales(store, f"{prefix}.weight_scale")
        groups = scales.shape[1]
        perm = None
        if f"{prefix}.weight_g_idx" in store:
            perm = group_order(store, f"{prefix}.weight_g_idx", groups)
        if perm is not None:
            codes = codes[:, perm]
        zeros = None
        if not scheme.symmetric:
            words = store.tensor(f"{prefix}.weight_zero_point").numpy()
            zeros = np.ascontiguousarray(unpack_nibbles(words.T).T[:n])
        return W4Codes(codes, np.ascontiguousarray(scales), zeros, k // groups, perm, scale_dtype)


def _group_scheme(group: Fields, default: str) -> W4Scheme:
    """The scheme of one config group."""
    said = group.text("format", default)
    if said != _FORMAT:
        raise group.unsupported("format", said, f"{_FORMAT!r}")
    for name in ("input_activations", "output_activations"):
        if group.config.get(name) is not None:
            raise group.unsupported(name, "set", "weight-only quantization")
    weights = Fields(group.mapping("weights"), group.file)
    weights.four_bits("num_bits")
    if weights.text("type", "int") != "int":
        raise weights.unsupported("type", weights.config["type"], "'int'")
    if weights.flag("dynamic"):
        raise weights.unsupported("dynamic", True, "static weights")
    strategy = weights.text("strategy", "group")
    if strategy not in ("group", "channel"):
        raise weights.unsupported("strategy", strategy, "'group' and 'channel'")
    order = weights.config.get("actorder")
    if order not in (None, False, True, "static", "weight", "group", "dynamic"):
        raise weights.unsupported("actorder", order, "'static', 'weight', 'group' and 'dynamic'")
    return W4Scheme(
        format="compressed-tensors",
        version=_FORMAT,
        group_size=-1 if strategy == "channel" else weights.group_size("group_size"),
        symmetric=weights.boolean("symmetric"),
        act_order=order in (True, "group", "dynamic"),
    )
