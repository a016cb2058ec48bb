"""Weights of a mixture's experts as GPU kernels read them: those of one matrix, E times.

Every tensor of a single weight's layout (`tilewright.layout.blocks.GpuBlocks`, or
`tilewright.layout.triton.WordsW4` of order "k8") has a dimension more, the expert, in front. The
others keep shape, order and strides, so that kernels add ``expert * stride`` to a pointer and go on
as they would with one matrix. Experts begin at multiples of 16 elements: what is aligned in one
matrix is aligned in all of them, for at most 15 elements an expert and tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from tilewright.errors import LayoutError
from tilewright.formats.w4 import W4Codes
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.layout.triton import WordsW4, pack_w4_words

__all__ = ["GpuExperts", "join_experts", "pack_gpu_experts", "pack_gpu_experts_w4"]

_ALIGNED = 16  # elements


@dataclass(frozen=True, eq=False)
class GpuExperts:
    """The packed matrices [N, K] of all experts of a layer, on one device.

    Attributes:
        planes: a weight whose tensors have the experts as their first dimension.
        E: how many experts there are.
    """

    planes: GpuBlocks | WordsW4
    E: int

    @property
    def N(self) -> int:
        """Rows of each matrix: output features."""
        return self.planes.N

    @property
    def K(self) -> int:
        """Columns of each matrix: input features."""
        return self.planes.K

    @property
    def type_name(self) -> str:
        """A GGUF type name, "uint4" (with zero points) or "uint4b8" (symmetric)."""
        return self.planes.type_name

    @property
    def group(self) -> int:
        """Values that share one scale: -1 for a whole row; 0 when the GGUF type fixes it."""
        if isinstance(self.planes, GpuBlocks):
            return 0
        size = self.planes.group_size
        return -1 if size == self.K else size

    @property
    def op(self) -> str:
        """The op that multiplies one expert: "mmq" or "w4a16"."""
        return "mmq" if isinstance(self.planes, GpuBlocks) else "w4a16"

    @property
    def device(self) -> torch.device:
        return next(iter(_tensors(self.planes).values())).device

    @property
    def is_stacked(self) -> bool:
        """Whether the words of GGUF experts lie below each other without a gap, in rows of whole
        16 bytes: TMA reads them as one matrix then."""
        if not isinstance(self.planes, GpuBlocks):
            return False
        words = (self.planes.low, self.planes.high)
        return all(
            t.stride(0) == t.shape[1] * t.stride(1) and t.stride(1) % 4 == 0 and t.stride(2) == 1
            for t in words
            if t is not None
        )

    @property
    def nbytes(self) -> int:
        return self.planes.nbytes

    def one(self, expert: int) -> GpuBlocks | WordsW4:
        """The matrix of one expert, a view."""
        return _with(self.planes, {k: t[expert] for k, t in _tensors(self.planes).items()})

    def to(self, device: torch.device | str) -> GpuExperts:
        """The same weights on another device."""
        return replace(self, planes=self.planes.to(device))


def _tensors(weight: GpuBlocks | WordsW4) -> dict[str, torch.Tensor]:
    """Those there are, by the name of their field."""
    found = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _with(weight: GpuBlocks | WordsW4, changes: Mapping[str, Any]) -> GpuBlocks | WordsW4:
    changed: GpuBlocks | WordsW4 = replace(weight, **changes)
    return changed


def _stack(each: Iterable[GpuBlocks | WordsW4], count: int) -> GpuExperts:
    """Copy the experts into tensors of all of them, one after the other."""
    made: dict[str, torch.Tensor] = {}
    first: GpuBlocks | WordsW4 | None = None
    for number, one in enumerate(each):
        tensors = _tensors(one)
        if first is None:
            first = one
            made = {name: _room(t, count) for name, t in tensors.items()}
        elif _kind(one) != _kind(first):
            raise LayoutError(
                f"expert {number} is {_kind(one)} (type, N, K, tensors), expert 0 is "
                f"{_kind(first)}; the experts of one tensor must agree"
            )
        for name, t in tensors.items():
            made[name][number] = t
    if first is None:
        raise LayoutError("experts are empty; pass the weights of one expert at least")
    return GpuExperts(_with(first, made), count)


def _room(one: torch.Tensor, count: int) -> torch.Tensor:
    """Uninitialized [count, *one.shape], each part with the strides of `one`."""
    apart = -(-one.numel() // _ALIGNED) * _ALIGNED
    flat = one.new_empty(count * apart)
    return flat.as_strided((count, *one.shape), (apart, *one.stride()))


def _kind(one: GpuBlocks | WordsW4) -> tuple[object, ...]:
    group = one.group_size if isinstance(one, WordsW4) else 0
    shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in _tensors(one).items())
    return (one.type_name, one.N, one.K, group, shapes)


def pack_gpu_experts(
    raw: np.ndarray | torch.Tensor,
    type_name: str,
    device: torch.device | str = "cpu",
    arch: str | None = None,
) -> GpuExperts:
    """Pack a GGUF tensor of stacked experts for the kernels of a GPU, on it.

    Args:
        raw: uint8 [E, N, row_bytes], rows contiguous; experts may lie apart.
        type_name: one of the packed GGUF types.
        device: where the work is done and the result lies.
        arch: whose kernels it is for, not the CPU's; None for that of `device`.

    Raises:
        LayoutError: `raw` is not such an array, its rows are no whole number of blocks, or the
            arch is the CPU's, whose experts stay as they lie.
    """
    if raw.ndim != 3:
        raise LayoutError(f"raw has shape {list(raw.shape)}; pass uint8 [E, N, row_bytes]")

    def pack(expert: np.ndarray | torch.Tensor) -> GpuBlocks:
        found = pack_blocks_for(expert, type_name, device, arch)
        if not isinstance(found, GpuBlocks):
            raise LayoutError(
                f"device is {device}, whose experts stay as they lie; use pack_expert_blocks, or "
                "name a GPU's arch"
            )
        return found

    return _stack((pack(expert) for expert in raw), len(raw))


def pack_gpu_experts_w4(codes: Sequence[W4Codes], device: torch.device | str = "cpu") -> GpuExperts:
    """Pack the 4-bit codes of every expert for the kernels of a GPU, on it.

    Raises:
        LayoutError: there are none, or they differ in shape, group, zero points or act-order.
    """
    return _stack((pack_w4_words(one, order="k8", device=device) for one in codes), len(codes))


def join_experts(first: GpuExperts, second: GpuExperts) -> GpuExperts | None:
    """Experts whose rows are those of `first` and then those of `second`, [E, N1 + N2, K]; a copy.

    None where there are no such weights: types, K, groups or column orders differ, or the zero
    points of eight rows share a word and the first has no whole words of them.
    """
    a, b = _tensors(first.planes), _tensors(second.planes)
    same = (
        (first.E, first.K, first.type_name, first.group, first.device)
        == (second.E, second.K, second.type_name, second.group, second.device)
        and a.keys() == b.keys()
        and all(a[name].dtype == b[name].dtype for name in a)
    )  # fmt: skip
    if not same or "perm" in a and not torch.equal(a["perm"], b["perm"]):
        return None
    if "zeros" in a and first.N % 8:
        return None
    made: dict[str, Any] = {n: t if n == "perm" else _joined(t, b[n]) for n, t in a.items()}
    return GpuExperts(_with(first.planes, made | {"N": first.N + second.N}), first.E)


def _joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[E, R1, C] and [E, R2, C] one below the other, columns or rows contiguous as in `a`."""
    rows, columns = a.shape[1] + b.shape[1], a.shape[2]
    strides = (1, rows) if a.stride(1) == 1 and a.shape[1] > 1 else (columns, 1)
    like = torch.empty_strided((rows, columns), strides, dtype=a.dtype, device=a.device)
    made = _room(like, len(a))
    made[:, : a.shape[1]] = a
    made[:, a.shape[1] :] = b
    return made
