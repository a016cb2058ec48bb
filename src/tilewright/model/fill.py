"""Put a checkpoint's tensors into a model that was created without any.

A `Source` gives tensors one at a time under transformers' names; `fill` replaces every linear
and embedding and sets every other parameter, and refuses a checkpoint that lacks a tensor or has
one too many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from tilewright.errors import FormatError
from tilewright.layout.blocks import GpuBlocks
from tilewright.layout.cpu import PackedBlocks, PackedW4
from tilewright.layout.experts import GpuExperts
from tilewright.layout.hopper import HopperW4
from tilewright.layout.triton import WordsW4
from tilewright.model.layers import QuantEmbedding, QuantLinear
from tilewright.model.moe import EXPERT_PARTS, QuantExperts, expert_part_names, is_experts
from tilewright.model.ssm import QuantHead, inject_ssm, is_mixer
from tilewright.ops.moe.experts import PackedExperts
from tilewright.ops.moe.op import Experts

__all__ = ["Matrix", "Source", "fill"]

Matrix = PackedBlocks | GpuBlocks | PackedW4 | WordsW4 | HopperW4 | torch.Tensor
_LISTED = 8


class Source(Protocol):
    """A checkpoint seen through transformers' tensor names."""

    path: object

    def names(self) -> Collection[str]:
        """Every tensor, a quantized linear counting as its "<prefix>.weight"."""

    def matrix(self, name: str) -> Matrix:
        """A weight [N, K], packed if it can be multiplied so, else a tensor of the model's
        dtype."""

    def experts(self, name: str) -> Experts:
        """The matrices [E, N, K] of all experts, packed or a tensor of the model's dtype."""

    def vector(self, name: str, *, exact: bool = False) -> torch.Tensor:
        """A norm or bias in the model's dtype, or in float32 where it must not be rounded."""

    def optional(self, name: str) -> bool:
        """True for a tensor the model class has and this checkpoint may lack (a bias of zero)."""

    def spare(self, name: str) -> bool:
        """True for a linear's bias that the model class has no place for and our modules have."""


def fill(model: nn.Module, source: Source, *, dtype: torch.dtype, activations: str) -> None:
    """Give every module of `model` its weight from `source`.

    Args:
        model: a causal language model on the meta device, with transformers' module names.
        source: the checkpoint.
        dtype: dtype of embeddings, norms and matrices that are not packed.
        activations: passed to every `QuantLinear`.

    Raises:
        FormatError: tensors are missing, unexpected, or of the wrong shape.
    """
    tied = bool(model.config.tie_word_embeddings)  # type: ignore[union-attr]
    _check_names(model, source, tied)
    names = source.names()
    embedding: Matrix | None = None
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding):
            embedding = source.matrix(f"{path}.weight")
            _check_shape(embedding, (module.num_embeddings, module.embedding_dim), path, source)
            model.set_submodule(path, _embedding(module, embedding, dtype))
        elif isinstance(module, nn.Linear):
            if path == "lm_head" and tied:
                continue
            weight = source.matrix(f"{path}.weight")
            _check_shape(weight, (module.out_features, module.in_features), path, source)
            if path == "lm_head" and _asks_dtype(model) and not isinstance(weight, torch.Tensor):
                head = QuantHead(weight, None, activations=activations, dtype=dtype)
                model.set_submodule(path, head)
                continue
            bias = None
            if f"{path}.bias" in names:
                bias = source.vector(f"{path}.bias")
                _check_shape(bias, (module.out_features,), path, source)
            model.set_submodule(path, _linear(weight, bias, activations))
        elif is_experts(module):
            model.set_submodule(path, _experts(model, path, module, source, activations))
        else:
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                name = f"{path}.{leaf}"
                # A state's decay is an exponential of these: rounding them costs the most.
                value = source.vector(name, exact=is_mixer(module))
                _check_shape(value, tuple(parameter.shape), name, source)
                setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    if tied:
        assert embedding is not None
        if isinstance(embedding, torch.Tensor):
            embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        if _asks_dtype(model) and not isinstance(embedding, torch.Tensor):
            head = QuantHead(embedding, None, activations=activations, dtype=dtype)
            model.set_submodule("lm_head", head)
        else:
            model.set_submodule("lm_head", _linear(embedding, None, activations))
    inject_ssm(model)


def _asks_dtype(model: nn.Module) -> bool:
    """Whether the model's code reads `lm_head.weight.dtype`."""
    return type(model).__name__ == "Mamba2ForCausalLM"


def _linear(weight: Matrix, bias: torch.Tensor | None, activations: str) -> nn.Module:
    if not isinstance(weight, torch.Tensor):
        return QuantLinear(weight, bias, activations=activations)
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    shared = isinstance(weight, nn.Parameter)
    linear.weight = weight if shared else nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _experts(
    model: nn.Module, path: str, module: Any, source: Source, activations: str
) -> QuantExperts:
    parts = [source.experts(f"{path}.{part}.weight") for part in EXPERT_PARTS]
    wide = (module.num_experts, module.intermediate_dim, module.hidden_dim)
    tall = (module.num_experts, module.hidden_dim, module.intermediate_dim)
    for name, part, shape in zip(EXPERT_PARTS, parts, (wide, wide, tall), strict=True):
        _check_shape(part, shape, f"{path}.{name}.weight", source)
    config: Any = model.config
    return QuantExperts(
        *parts, top_k=config.num_experts_per_tok, activation=config.hidden_act,
        activations=activations,
    )  # fmt: skip


def _embedding(module: nn.Embedding, weight: Matrix, dtype: torch.dtype) -> nn.Module:
    scale = getattr(module, "scalar_embed_scale", None)
    if isinstance(weight, PackedBlocks):
        return QuantEmbedding(weight, dtype=dtype, scale=scale, padding_idx=module.padding_idx)
    if not isinstance(weight, torch.Tensor):
        raise FormatError("an embedding of 4-bit codes; embeddings are dense in this format")
    module.weight = nn.Parameter(weight, requires_grad=False)
    if scale is not None:
        module.embed_scale = torch.tensor(scale)
    return module


def _check_names(model: nn.Module, source: Source, tied: bool) -> None:
    names = set(source.names())
    stacked = expert_part_names(model)
    wanted = {
        part
        for name, _ in model.named_parameters(remove_duplicate=False)
        for part in stacked.get(name, (name,))
    }
    ignored = {"lm_head.weight"} if tied else set()
    missing = sorted(n for n in wanted - names - ignored if not source.optional(n))
    linears = {f"{p}.bias" for p, m in model.named_modules() if isinstance(m, nn.Linear)}
    unexpected = sorted(
        n for n in names - wanted - ignored if not (n in linears and source.spare(n))
    )
    problems = []
    if missing:
        problems.append(f"it lacks {_some(missing)}")
    if unexpected:
        problems.append(f"it has {_some(unexpected)}, which the model has no place for")
    if problems:
        raise FormatError(
            f"the tensors do not fit a {type(model).__name__}: {'; '.join(problems)}. Check that "
            "the file is complete and its architecture is what its description says",
            file=source.path,
        )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{rest}"


def _check_shape(value: Any, expected: Iterable[int], name: str, source: Source) -> None:
    if isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
    elif isinstance(value, PackedExperts | GpuExperts):
        shape = (value.E, value.N, value.K)
    else:
        shape = (value.N, value.K)
    if shape != tuple(expected):
        raise FormatError(
            f"its shape is {list(shape)}; the configuration makes it {list(expected)}",
            file=source.path,
            tensor=name,
        )
