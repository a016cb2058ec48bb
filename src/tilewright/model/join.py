"""Products of one operand joined into one: q, k and v of a layer, gate and up.

On a GPU a launch costs microseconds, at one token as long as a small product takes. Matrices of one
GGUF type and width that multiply the same activations are put one below the other, and become one
`QuantLinear` beside those that they are made of ("qkv_proj" beside "q_proj"). The parts keep
working: their weights are rows of the joined one, and no memory is held twice. They leave what the
model counts as its products (`QuantLinear.products`) to the joined one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilewright.layout.blocks import GpuBlocks
from tilewright.model.layers import QuantLinear

__all__ = ["join_products", "products_of"]

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_NAMES = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("q_proj", "k_proj"): "qk_proj",
    ("k_proj", "v_proj"): "kv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
}


def join_products(model: nn.Module) -> int:
    """Join what can be joined of a model on a GPU; returns how many products were made.

    Only GGUF blocks as GPUs hold them are joined, with biases if all parts have one or none has.
    """
    made = 0
    for parent in list(model.modules()):
        for names in _TOGETHER:
            for run in _runs(parent, names):
                parent.add_module(_NAMES[run], _joined([getattr(parent, n) for n in run]))
                made += 1
    return made


def products_of(parent: nn.Module, names: Sequence[str]) -> list[tuple[Any, tuple[int, ...]]]:
    """The modules that compute the products `names` of a layer's part, in their order: each with
    the widths of the outputs that stand side by side in its own."""
    found: list[tuple[Any, tuple[int, ...]]] = []
    left = tuple(names)
    while left:
        for count in range(len(left), 0, -1):
            name = _NAMES.get(left[:count], left[0] if count == 1 else "")
            module: Any = getattr(parent, name, None) if name else None
            if module is not None:
                parts = [getattr(parent, part) for part in left[:count]]
                found.append((module, tuple(int(part.out_features) for part in parts)))
                left = left[count:]
                break
        else:
            raise AttributeError(f"{type(parent).__name__} has no {left[0]}")
    return found


def _runs(parent: nn.Module, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Runs of two or more neighbours among `names` that can be joined."""
    runs: list[list[str]] = []
    before: object = None
    for name in names:
        kind = _kind(getattr(parent, name, None))
        if kind is not None and kind == before:
            runs[-1].append(name)
        else:
            runs.append([name])
        before = kind
    return [tuple(run) for run in runs if len(run) > 1]


def _kind(module: Any) -> tuple[Any, ...] | None:
    """What must agree; None for a module that is never joined."""
    if not isinstance(module, QuantLinear) or not isinstance(module.packed, GpuBlocks):
        return None
    if module.joined:
        return None
    bias = None if module.bias is None else module.bias.dtype
    return (module.packed.type_name, module.packed.K, module.activations, bias)


def _joined(parts: Sequence[QuantLinear]) -> QuantLinear:
    held = [part.packed for part in parts]
    blocks = [packed for packed in held if isinstance(packed, GpuBlocks)]
    assert len(blocks) == len(parts)
    whole = _below(blocks)
    biases = [part.bias for part in parts if part.bias is not None]
    made = QuantLinear(
        whole, torch.cat(tuple(biases)) if biases else None, activations=parts[0].activations
    )
    first = 0
    for part, packed in zip(parts, blocks, strict=True):
        part.packed = _rows(whole, first, first + packed.N)
        part.joined = True
        first += packed.N
    return made


def _below(blocks: Sequence[GpuBlocks]) -> GpuBlocks:
    """The matrices one below the other, in the layout that each of them has."""

    def words(name: str) -> torch.Tensor | None:
        each = [getattr(one, name) for one in blocks]
        return None if each[0] is None else torch.cat(each)

    def by_column(name: str) -> torch.Tensor | None:
        # Stored column by column: neighbouring rows lie together.
        each = [getattr(one, name) for one in blocks]
        return None if each[0] is None else torch.cat([one.T for one in each], dim=1).T

    low, scales = words("low"), by_column("scales")
    assert low is not None
    assert scales is not None
    return replace(
        blocks[0],
        low=low,
        high=words("high"),
        scales=scales,
        minimums=by_column("minimums"),
        sub_scales=by_column("sub_scales"),
        N=sum(one.N for one in blocks),
    )


def _rows(whole: GpuBlocks, first: int, last: int) -> GpuBlocks:
    """Views of some rows."""

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[first:last]

    return replace(
        whole,
        low=whole.low[first:last],
        high=cut(whole.high),
        scales=whole.scales[first:last],
        minimums=cut(whole.minimums),
        sub_scales=cut(whole.sub_scales),
        N=last - first,
    )
