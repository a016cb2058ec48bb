"""A GGUF file as a source of tensors under transformers' names.

What differs from transformers' tensors is undone here, once:

- llama files hold q_proj and k_proj with the rows of each head interleaved, for a rope that
  turns neighbours; transformers turns the two halves of a head. Rows go back to their order. A
  row of blocks is a run of bytes, so this gathers bytes and touches no value.
- gemma files hold norms with 1 added; transformers adds the 1 itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tilewright.errors import FormatError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.formats.gguf import GGUFFile, GGUFTensor, check_scales
from tilewright.layout.cpu import pack_blocks
from tilewright.layout.experts import GpuExperts
from tilewright.model.fill import Matrix
from tilewright.model.info import LoadInfo
from tilewright.model.names import SKIPPED_GGUF_TENSORS, hf_name
from tilewright.model.pages import drop_range
from tilewright.model.placement import Placement, all_finite
from tilewright.ops.moe.op import Experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["GGUFSource", "rope_row_order"]

_DENSE = frozenset({"F32", "F16", "BF16", "F64"})


class GGUFSource:
    """See `tilewright.model.fill.Source`.

    Args:
        file: the opened GGUF file.
        config: the configuration made from it.
        where: the model's device, and the dtype of what is not packed.
        info: gets every tensor that is given out.

    Raises:
        FormatError: a tensor whose name these architectures do not have.
    """

    def __init__(
        self, file: GGUFFile, config: PreTrainedConfig, *, where: Placement, info: LoadInfo
    ) -> None:
        self.path: object = file.path
        self._architecture = file.architecture
        self._config = config
        self._where = where
        self._info = info
        self._tensors: dict[str, GGUFTensor] = {}
        strangers = []
        for name, tensor in file.tensors.items():
            if name in SKIPPED_GGUF_TENSORS:
                continue
            known = hf_name(name, self._architecture)
            if known is None:
                strangers.append(name)
            else:
                self._tensors[known] = tensor
        if strangers:
            raise FormatError(
                f"a {self._architecture} model has no tensors {', '.join(strangers[:8])}"
                f"{' and others' if len(strangers) > 8 else ''}; the file is of another "
                "architecture or a variant of it",
                file=file.path,
            )

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def optional(self, name: str) -> bool:
        # One bias among q, k, v and o, or among the three of the MLP, makes the model class
        # create all of them.
        return self._architecture == "llama" and name.endswith(".bias")

    def matrix(self, name: str) -> Matrix:
        tensor = self._tensors[name]
        if len(tensor.shape) != 2:
            raise FormatError(
                f"its shape is {list(tensor.shape)}; a matrix is needed",
                file=self.path,
                tensor=tensor.name,
            )
        order = self._row_order(name, tensor)
        looked_up = name.endswith("embed_tokens.weight")
        if tensor.packed and not self._where.on_cpu:
            return self._table_for_gpu(tensor) if looked_up else self._for_gpu(tensor, order)
        check_scales(tensor)
        if tensor.packed:
            raw: npt.NDArray[np.uint8] = tensor.raw
            if order is not None:
                raw = np.asarray(raw)[order]
                _release(tensor)
            self._info.count("packed", tensor.type_name, tensor.nbytes)
            return pack_blocks(raw, tensor.type_name)
        values = self._values(tensor)
        if order is not None:
            values = values[order]
        result = torch.from_numpy(values).to(self._where.dtype)
        fate = "dense" if tensor.type_name in _DENSE else "dequantized"
        self._info.count(fate, tensor.type_name, result.nbytes)
        return result

    def experts(self, name: str) -> Experts:
        tensor = self._tensors[name]
        if len(tensor.shape) != 3:
            raise FormatError(
                f"its shape is {list(tensor.shape)}; the matrices of all experts are needed",
                file=self.path,
                tensor=tensor.name,
            )
        if tensor.packed:
            block = BLOCK_TYPES[tensor.type_name]
            packed = self._where.pack_expert_blocks(np.asarray(tensor.raw), block)
            if not isinstance(packed, GpuExperts) or not all_finite(packed.planes):
                check_scales(tensor)
            if not self._where.on_cpu:
                _release(tensor)
            self._info.count("packed", tensor.type_name, packed.nbytes)
            return packed
        check_scales(tensor)
        result = torch.from_numpy(self._values(tensor)).to(self._where.dtype)
        fate = "dense" if tensor.type_name in _DENSE else "dequantized"
        self._info.count(fate, tensor.type_name, result.nbytes)
        return result

    def _for_gpu(self, tensor: GGUFTensor, order: npt.NDArray[np.intp] | None) -> Matrix:
        raw = np.asarray(tensor.raw)
        block = BLOCK_TYPES[tensor.type_name]
        packed = self._where.pack_blocks(raw if order is None else raw[order], block)
        if not all_finite(packed):
            check_scales(tensor)
        _release(tensor)
        self._info.count("packed", tensor.type_name, packed.nbytes)
        return packed

    def _table_for_gpu(self, tensor: GGUFTensor) -> torch.Tensor:
        """The token embedding, whose rows are looked up: a matrix."""
        values, finite = self._where.dequantize(np.asarray(tensor.raw), tensor.type_name)
        if not finite:
            check_scales(tensor)
        _release(tensor)
        self._info.count("dense", tensor.type_name, values.nbytes)
        return values

    def vector(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        check_scales(tensor)
        values = self._values(tensor)
        order = self._row_order(name, tensor)
        if order is not None:
            values = values[order]
        if self._architecture == "gemma3":
            values -= 1.0
        result = torch.from_numpy(values).to(self._where.dtype)
        self._info.count("dense", tensor.type_name, result.nbytes)
        return result

    def _values(self, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
        values = tensor.dequantize()
        _release(tensor)
        return values

    def _row_order(self, name: str, tensor: GGUFTensor) -> npt.NDArray[np.intp] | None:
        if self._architecture != "llama":
            return None
        if ".q_proj." in name:
            heads = self._config.num_attention_heads
        elif ".k_proj." in name:
            heads = self._config.num_key_value_heads
        else:
            return None
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise FormatError(
                f"it has {rows} rows for {heads} heads; each head needs an even number",
                file=self.path,
                tensor=tensor.name,
            )
        return rope_row_order(rows, heads)


def rope_row_order(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Which row of a llama GGUF's q or k weight is row i of transformers': int [rows].

    The file's head holds rows (0, d/2, 1, d/2 + 1, ...); transformers' holds them in order.
    """
    half = rows // heads // 2
    order: npt.NDArray[np.intp] = (
        np.arange(rows).reshape(heads, half, 2).swapaxes(1, 2).reshape(rows)
    )
    return order


def _release(tensor: GGUFTensor) -> None:
    """Let go of the file's pages of a tensor that was copied."""
    mapped = getattr(tensor.raw, "_mmap", None)  # of the np.memmap that `raw` is a view of
    if isinstance(mapped, mmap.mmap):
        drop_range(mapped, tensor.offset, tensor.nbytes)
