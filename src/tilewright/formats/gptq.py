"""GPTQ checkpoints, versions 1 and 2, as GPTQModel, AutoGPTQ and auto-round write them.

::

    qweight  int32 [K/8, N]    nibble i of row r is k = 8r + i
    qzeros   int32 [K/G, N/8]  nibble i of column c is n = 8c + i
    scales   float [K/G, N]
    g_idx    int32 [K]         the group of column k; k // G unless act-order

Version 1 stores zero points less one (a symmetric checkpoint is full of 7s), version 2 as they
are. A symmetric checkpoint's zero point is 8 whatever it stores. An asymmetric version 1 zero of
15 is refused: it may be a 0 less one that borrowed from its neighbour or one that did not, and
the tools disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.errors import FormatError, UnsupportedError
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

__all__ = ["GPTQ", "same_for_every_layer"]

_VERSIONS = {"gptq": "v1", "gptq_v2": "v2", "auto_round:auto_gptq": "v1"}


class GPTQ:
    """Reader of GPTQ linears."""

    main: str = "qweight"
    others: tuple[str, ...] = ("scales", "qzeros", "g_idx")

    def scheme(self, config: Mapping[str, Any], file: Path) -> W4Scheme:
        """The scheme of a GPTQ config, or of an auto-round one packed as GPTQ.

        Raises:
            FormatError: a field is missing or of a wrong type.
            UnsupportedError: bits, group size, packing or per-layer settings not read here.
        """
        fields = Fields(config, file)
        fields.four_bits("bits")
        if fields.text("data_type", "int") != "int":
            raise fields.unsupported("data_type", config["data_type"], "'int'")
        if fields.text("pack_dtype", "int32") != "int32":
            raise fields.unsupported("pack_dtype", config["pack_dtype"], "'int32'")
        if fields.flag("is_marlin_format"):
            raise fields.unsupported("is_marlin_format", True, "the plain GPTQ packing")
        key = next(
            (k for k in ("packing_format", "checkpoint_format", "format") if k in config), None
        )
        said = fields.text(key, "gptq") if key else "gptq"
        if said not in _VERSIONS:
            raise fields.unsupported(str(key), said, f"{sorted(_VERSIONS)}")
        scheme = W4Scheme(
            format="gptq",
            version=_VERSIONS[said],
            group_size=fields.group_size("group_size"),
            symmetric=fields.boolean("sym"),
            act_order=fields.flag("desc_act"),
        )
        same_for_every_layer(fields, scheme)
        return scheme

    def check(self, store: TensorStore, prefix: str, scheme: W4Scheme) -> None:
        qweight = f"{prefix}.qweight"
        if len(store[qweight].shape) != 2:
            raise store.fault(qweight, f"its shape is {list(store[qweight].shape)}, not [K/8, N]")
        words, n = store[qweight].shape
        k = 8 * words
        store.check(qweight, ("I32",), (words, n), "GPTQ")
        groups = group_count(store, qweight, k, scheme)
        why = f"GPTQ with N={n}, K={k}, group size {scheme.group_size}"
        store.check(f"{prefix}.scales", SCALE_DTYPES, (groups, n), why)
        if not scheme.symmetric:
            store.check(f"{prefix}.qzeros", ("I32",), (groups, -(-n // 8)), why)
        g_idx = f"{prefix}.g_idx"
        if g_idx in store:
            store.check(g_idx, ("I32", "I64"), (k,), why)
        elif scheme.act_order and scheme.group_size != -1:
            raise FormatError(
                "this tensor is missing; the config says desc_act, so only it can tell "
                "which scale belongs to which column",
                file=store[qweight].file,
                tensor=g_idx,
            )

    def linear(self, store: TensorStore, prefix: str, scheme: W4Scheme) -> W4Codes:
        codes = unpack_nibbles(store.tensor(f"{prefix}.qweight").numpy().T)
        n, k = codes.shape
        scales, scale_dtype = read_scales(store, f"{prefix}.scales")
        groups = len(scales)
        perm = None
        if f"{prefix}.g_idx" in store:
            perm = group_order(store, f"{prefix}.g_idx", groups)
        if perm is not None:
            codes = codes[:, perm]
        zeros = None
        if not scheme.symmetric:
            zeros = self._zeros(store, f"{prefix}.qzeros", n, scheme)
        return W4Codes(codes, np.ascontiguousarray(scales.T), zeros, k // groups, perm, scale_dtype)

    def _zeros(
        self, store: TensorStore, name: str, n: int, scheme: W4Scheme
    ) -> npt.NDArray[np.uint8]:
        stored = unpack_nibbles(store.tensor(name).numpy())[:, :n]
        if scheme.version == "v1":
            if int(stored.max()) == 15:
                raise UnsupportedError(
                    f"{store[name].file}, tensor {name!r}: an asymmetric GPTQ v1 zero point is "
                    "stored as 15, which tools read as 0 or as 16; export the model as gptq_v2"
                )
            stored = stored + np.uint8(1)
        return np.ascontiguousarray(stored.T)


def same_for_every_layer(fields: Fields, scheme: W4Scheme) -> None:
    """Raise UnsupportedError if some layers are quantized otherwise than `scheme` says.

    Layers that are left unquantized are welcome. GPTQModel writes exceptions to `dynamic`
    ("-:" leaves a layer alone), auto-round to `extra_config` (16 bits or more do).
    """
    exceptions = {
        name: change
        for name, change in fields.mapping("dynamic").items()
        if not name.startswith("-:")
    }
    exceptions |= fields.mapping("extra_config")
    expected = {"bits": 4, "group_size": scheme.group_size, "sym": scheme.symmetric}
    for name, change in exceptions.items():
        if not isinstance(change, dict):
            raise fields.wrong(name, change, "an object")
        bits = change.get("bits", 4)
        if isinstance(bits, int) and bits >= 16:
            continue
        other = {k: change[k] for k, v in expected.items() if k in change and change[k] != v}
        if other:
            raise fields.unsupported(name, other, f"one scheme for all layers: {expected}")
