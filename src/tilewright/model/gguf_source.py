"""A GGUF file as a source of tensors under transformers' names.

What differs from transformers' tensors is undone here, once:

- llama files hold q_proj and k_proj with the rows of each head interleaved, for a rope that
  turns neighbours; transformers turns the two halves of a head. Rows go back to their order. A
  row of blocks is a run of bytes, so this gathers bytes and touches no value.
- gemma files hold norms with 1 added; transformers adds the 1 itself.
- hybrid files hold A where transformers holds log(-A); the taps of the convolution, its norm, A and
  D in other shapes; granite's gate and up as two matrices where transformers has one.
- a matrix may come with a number beside it, `.scale`, that its product is multiplied by, before a
  bias is added.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from dataclasses import replace
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
from tilewright.model.hybrid_config import HYBRIDS
from tilewright.model.info import LoadInfo
from tilewright.model.names import SKIPPED_GGUF_TENSORS, hf_name
from tilewright.model.pages import drop_range
from tilewright.model.placement import Placement, all_finite
from tilewright.ops.moe.op import Experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["GGUFSource", "rope_row_order"]

_DENSE = frozenset({"F32", "F16", "BF16", "F64"})
_INTERLEAVED = ("llama", "granitehybrid")
_JOINED = (".gate_proj.", ".up_proj."), ".input_linear."
_TABLES = ("embed_tokens.weight", "embeddings.weight")


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
        self._scales: dict[str, float] = {}
        self._halves: dict[str, tuple[GGUFTensor, GGUFTensor]] = {}
        strangers = []
        for name, tensor in file.tensors.items():
            if name in SKIPPED_GGUF_TENSORS:
                continue
            if self._architecture in HYBRIDS and name.endswith("scale"):
                if not self._scale(name, tensor):
                    strangers.append(name)
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
        if self._architecture == "granitehybrid":
            self._join()

    def _scale(self, name: str, tensor: GGUFTensor) -> bool:
        """Note a matrix's factor; False for a name that is none."""
        stem, _, leaf = name.rpartition(".")
        known = hf_name(f"{stem}.weight", self._architecture)
        if known is None or leaf not in ("scale", "input_scale") or tensor.shape not in ((), (1,)):
            return False
        if leaf == "scale":  # the other is of activations that are quantized, which ours are not
            self._scales[known] = float(tensor.dequantize().reshape(()))
        return True

    def _join(self) -> None:
        """Note the pairs that are one tensor of transformers."""
        (gate_part, up_part), both_part = _JOINED
        for name in [name for name in self._tensors if f".shared_mlp{gate_part}" in name]:
            up = self._tensors.pop(name.replace(gate_part, up_part), None)
            gate = self._tensors.pop(name)
            if up is None or up.shape[1:] != gate.shape[1:]:
                raise FormatError(
                    f"its shape is {list(gate.shape)}, and that of ffn_up "
                    f"{None if up is None else list(up.shape)}; both are needed, of equal width",
                    file=self.path,
                    tensor=gate.name,
                )
            self._halves[name.replace(gate_part, both_part)] = (gate, up)

    def names(self) -> Collection[str]:
        return self._tensors.keys() | self._halves.keys()

    def optional(self, name: str) -> bool:
        # One bias among q, k, v and o, or among the three of the MLP, makes the model class
        # create all of them.
        return self._architecture == "llama" and name.endswith(".bias")

    def spare(self, name: str) -> bool:
        # llama.cpp adds a bias to any product that has one; so do the modules that replace linears.
        return self._architecture in HYBRIDS and name.endswith(".bias")

    def _whole(self, name: str) -> GGUFTensor:
        """A tensor under transformers' name, as if it lay in the file."""
        halves = self._halves.get(name)
        if halves is None:
            return self._tensors[name]
        gate, up = halves
        check_scales(up)  # its offsets in the file are not those of the pair
        factors = [self._scales.pop(self._part(name, part), 1.0) for part in _JOINED[0]]
        shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
        alike = gate.type_name == up.type_name and factors == [1.0, 1.0]
        if alike:
            return replace(gate, raw=np.concatenate([gate.raw, up.raw]), shape=shape)
        # Of two types, or with factors: only their values can be put together.
        values = np.concatenate([t.dequantize() * f for t, f in zip(halves, factors, strict=True)])
        return replace(gate, raw=values.view(np.uint8), shape=shape, type_name="F32")

    @staticmethod
    def _part(name: str, part: str) -> str:
        return name.replace(_JOINED[1], part)

    def matrix(self, name: str) -> Matrix:
        tensor = self._whole(name)
        if len(tensor.shape) != 2:
            raise FormatError(
                f"its shape is {list(tensor.shape)}; a matrix is needed",
                file=self.path,
                tensor=tensor.name,
            )
        order = self._row_order(name, tensor)
        looked_up = name.endswith(_TABLES)
        factor = self._scales.get(name, 1.0)
        if factor != 1.0:
            return self._scaled(tensor, order, factor)
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

    def _scaled(
        self, tensor: GGUFTensor, order: npt.NDArray[np.intp] | None, factor: float
    ) -> torch.Tensor:
        """A matrix whose product has a factor: the values, times it."""
        check_scales(tensor)
        values = self._values(tensor) * np.float32(factor)
        result = torch.from_numpy(values if order is None else values[order])
        result = result.to(self._where.dtype)
        fate = "dense" if tensor.type_name in _DENSE else "dequantized"
        self._info.count(fate, tensor.type_name, result.nbytes)
        return result

    def _refuse_factor(self, name: str, tensor: GGUFTensor) -> None:
        """Raise FormatError if a factor stands beside a tensor that is no single matrix."""
        if self._scales.get(name, 1.0) != 1.0:
            raise FormatError(
                f"a factor of {self._scales[name]:g} stands beside it (`.scale`), which only the "
                "matrix of one product may have; the file is of a variant that is not supported",
                file=self.path,
                tensor=tensor.name,
            )

    def experts(self, name: str) -> Experts:
        tensor = self._tensors[name]
        self._refuse_factor(name, tensor)
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

    def vector(self, name: str, *, exact: bool = False) -> torch.Tensor:
        tensor = self._whole(name)
        self._refuse_factor(name, tensor)
        check_scales(tensor)
        values = self._values(tensor)
        order = self._row_order(name, tensor)
        if order is not None:
            values = values[order]
        if self._architecture == "gemma3":
            values -= 1.0
        if self._architecture in HYBRIDS:
            values = self._as_transformers(name, tensor, values)
        dtype = torch.float32 if exact else self._where.dtype
        result = torch.from_numpy(values).to(dtype)
        self._info.count("dense", tensor.type_name, result.nbytes)
        return result

    def _as_transformers(
        self, name: str, tensor: GGUFTensor, values: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """A mixer's own tensors in transformers' shapes, and A as the logarithm it keeps."""
        if name.endswith("conv1d.weight"):
            return values[:, None, :]
        if name.endswith(".A_log"):
            if not (values < 0).all():
                raise FormatError(
                    "a state would grow without bound: every value must be negative",
                    file=self.path,
                    tensor=tensor.name,
                )
            return np.log(-values).reshape(-1)
        flat = name.endswith(".D") or ".ssm_norm." in tensor.name
        return values.reshape(-1) if flat else values

    def _values(self, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
        values = tensor.dequantize()
        _release(tensor)
        return values

    def _row_order(self, name: str, tensor: GGUFTensor) -> npt.NDArray[np.intp] | None:
        if self._architecture not in _INTERLEAVED:
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
    """Which row of a llama or granite GGUF's q or k weight is row i of transformers': int [rows].

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
