"""The modules that stand in for `nn.Linear` and `nn.Embedding`: their weights stay packed.

They keep the names of the modules they replace, so code that walks a transformers model finds
`self_attn.q_proj` or `mlp.gate_proj` where it expects them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright.errors import UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks
from tilewright.layout.cpu import PackedBlocks, PackedW4
from tilewright.layout.hopper import HopperW4
from tilewright.layout.triton import WordsW4

__all__ = ["ModelProblem", "PackedModule", "QuantEmbedding", "QuantLinear", "model_problems"]

_ACTIVATIONS = ("float", "int8")
W4 = PackedW4 | WordsW4 | HopperW4


class PackedModule(nn.Module):
    """A module whose weight is no parameter, so it cannot be saved as one."""

    def products(self) -> Iterator[tuple[str, str, int, int, int, int]]:
        """Its packed matrix products: what follows the module's name, weight type, N, K, group,
        and how often a token passes."""
        return iter(())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise UnsupportedError(
            f"{prefix or type(self).__name__} holds a packed weight, which a state dict has no "
            "form for; copy the file it was loaded from instead"
        )


class QuantLinear(PackedModule):
    """y = x @ W.T + bias with W packed: GGUF blocks (op `mmq`) or 4-bit codes (op `w4a16`).

    Args:
        packed: the weight [N, K].
        bias: [N], or None.
        activations: "float" multiplies activations as they are; "int8" first rounds them to
            8 bits per block of 32, which is faster and less exact.

    Forward takes x [..., K] in float32, float16 or bfloat16 and gives [..., N] in x's dtype.

    Attributes:
        joined: its product is part of another module's (`tilewright.model.join`), and counts there.

    Raises:
        UnsupportedError: another value of `activations`.
    """

    def __init__(
        self,
        packed: PackedBlocks | GpuBlocks | W4,
        bias: torch.Tensor | None = None,
        *,
        activations: str = "float",
    ) -> None:
        super().__init__()
        if activations not in _ACTIVATIONS:
            raise UnsupportedError(
                f"activations is {activations!r}; allowed are {', '.join(_ACTIVATIONS)}"
            )
        self.packed = packed
        self.activations = activations
        self.joined = False
        self.in_features = packed.K
        self.out_features = packed.N
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._op = _op_for(packed)

    @property
    def weight_type(self) -> str:
        """A GGUF type name, "uint4" (with zero points) or "uint4b8" (symmetric)."""
        return self.packed.type_name

    @property
    def group(self) -> int:
        """Values that share one scale: -1 for a whole row; 0 when the GGUF type fixes it."""
        return _group(self.packed)

    def products(self) -> Iterator[tuple[str, str, int, int, int, int]]:
        if not self.joined:
            yield ("", self.weight_type, self.out_features, self.in_features, self.group, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._op(x, self.packed, self.bias, activations=self.activations)

    def extra_repr(self) -> str:
        kind = self.weight_type
        if isinstance(self.packed, W4):
            kind += f" g{self.group}"
        return (
            f"{self.in_features} -> {self.out_features}, {kind}, "
            f"bias={self.bias is not None}, activations={self.activations!r}"
        )


class QuantEmbedding(PackedModule):
    """Token embedding whose rows are dequantized when they are looked up.

    Args:
        packed: GGUF blocks [vocabulary, width]; may be the same object as the output matrix's.
        dtype: dtype of the result.
        scale: factor of every value, applied in `dtype` (gemma's sqrt(width)); None for 1.
        padding_idx: kept for code that reads it from `nn.Embedding`; rows are not changed by it.

    Forward takes int64 or int32 ids of any shape and gives [*shape, width]. An id outside the
    vocabulary raises IndexError, as `nn.Embedding` does.
    """

    def __init__(
        self,
        packed: PackedBlocks,
        *,
        dtype: torch.dtype = torch.float32,
        scale: float | None = None,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.packed = packed
        self.dtype = dtype
        self.scale = scale
        self.num_embeddings = packed.N
        self.embedding_dim = packed.K
        self.padding_idx = padding_idx
        self._block = BLOCK_TYPES[packed.type_name]
        # A tensor, so that the product rounds in `dtype` as transformers' scaled embedding does.
        self._factor = None if scale is None else torch.tensor(scale).to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.index_select(self.packed.data, 0, ids.reshape(-1))
        values = torch.from_numpy(self._block.dequantize(rows.numpy())).to(self.dtype)
        if self._factor is not None:
            values = values * self._factor
        return values.view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        scaled = "" if self.scale is None else f", scale={self.scale:g}"
        return f"{self.num_embeddings} x {self.embedding_dim}, {self.packed.type_name}{scaled}"


class ModelProblem(NamedTuple):
    """The matrix products of one shape and type in a model.

    Attributes:
        name: where they occur, layers as `*`: "model.layers.*.self_attn.q_proj"; the first
            place when products of several names share shape and type.
        type: weight type, as `QuantLinear.weight_type`.
        N, K: output and input features.
        group: values that share one scale, -1 for a whole row, 0 when the type fixes it.
        count: how often a token passes one.
    """

    name: str
    type: str
    N: int
    K: int
    group: int
    count: int  # type: ignore[assignment]

    @property
    def op(self) -> str:
        """The op that computes it: "w4a16" or "mmq"."""
        return "w4a16" if self.type.startswith("uint4") else "mmq"


def model_problems(model: nn.Module) -> list[ModelProblem]:
    """The distinct packed products of a loaded model, in the order in which they occur.

    Products are told apart by type, N, K and group; a model of 30 layers has a handful. An expert
    counts as the product that its op runs for it, as often as a token is given to experts.
    """
    found: dict[tuple[str, int, int, int], ModelProblem] = {}
    for name, module in model.named_modules():
        if not isinstance(module, PackedModule):
            continue
        for part, weight_type, n, k, group, count in module.products():
            key = (weight_type, n, k, group)
            known = found.get(key)
            if known is None:
                found[key] = ModelProblem(re.sub(r"\.\d+\.", ".*.", name + part), *key, count)
            else:
                found[key] = known._replace(count=known.count + count)
    return list(found.values())


def _op_for(packed: PackedBlocks | GpuBlocks | W4) -> Callable[..., torch.Tensor]:
    if isinstance(packed, W4):
        from tilewright.ops.w4a16.op import w4a16_gemm

        return w4a16_gemm
    from tilewright.ops.mmq.op import mmq_gemm

    return mmq_gemm


def _group(packed: PackedBlocks | GpuBlocks | W4) -> int:
    if not isinstance(packed, W4):
        return 0
    return -1 if packed.group_size == packed.K else packed.group_size
