"""The kernels that are compared: ours, and the peers a user could install instead.

A contender packs one weight for itself and answers with a function of x. Peers get the very codes,
scales and zero points that ours get, in the form their own loaders take, so that every one of them
can be held to the same float64 result.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from operands import Weight

from tilewright.device import arch_of
from tilewright.tiles.tile import Tile

__all__ = ["CONTENDERS", "Unserved", "build", "copies_of", "weight_copy", "words_weight"]

Linear = Callable[[torch.Tensor], torch.Tensor]


class Unserved(Exception):
    """A contender does not serve this case; the message says why."""


class CuBlas:
    """The dense product of the dequantized weight, through torch."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self.weight = weight.rounded(dtype)
        self.bytes = self.weight.numel() * self.weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


class TinyGemm:
    """torch's own int4 kernel; bfloat16 only, zero points folded into bfloat16 offsets."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        if dtype != torch.bfloat16:
            raise Unserved("_weight_int4pack_mm takes bfloat16 only")
        if weight.group not in (32, 64, 128, 256) or weight.N % 8 or weight.K % 128:
            raise Unserved(f"N={weight.N}, K={weight.K}, group {weight.group}")
        pairs = weight.codes[:, ::2] << 4 | weight.codes[:, 1::2]
        self.weight = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)
        zeros = 8.0 if weight.zeros is None else weight.zeros.float()
        offsets = (8 - zeros) * weight.scales
        both = torch.stack([weight.scales.T, offsets.T], dim=-1)
        self.scales = both.to(torch.bfloat16).contiguous()  # [groups, N, 2]
        self.group = weight.group
        self.bytes = weight.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, self.weight, self.group, self.scales)


class Humming:
    """PyPI humming-kernels, its heuristics' own tile; loaded as a compressed-tensors checkpoint."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        from humming.layer import HummingLayer

        config = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "type": "int",
            "num_bits": 4, "strategy": "group", "symmetric": weight.zeros is None,
            "group_size": weight.group,
        }  # fmt: skip
        layer = HummingLayer(
            shape_n=weight.N, shape_k=weight.K, torch_dtype=dtype, weight_config=config
        ).cuda()
        tensors = {
            "weight_packed": _words(weight.codes.view(weight.N, -1, 8)),
            "weight_scale": weight.scales.to(dtype),
            "weight_shape": torch.tensor([weight.N, weight.K]),
        }
        if weight.zeros is not None:
            rows = weight.zeros.view(weight.N // 8, 8, -1).transpose(1, 2)
            tensors["weight_zero_point"] = _words(rows)
        layer.load_from_tensors(tensors)
        layer.transform()
        self.layer = layer
        self.bytes = weight.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class GemLite:
    """PyPI gemlite with the tuned table it ships for the H100, and its own tuning elsewhere.

    W ~ code * scale + offset is its default; here it subtracts the zero point first, which is
    exact.
    """

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        import gemlite
        from gemlite.core import DType, GemLiteLinear

        table = os.environ.get("GEMLITE_TABLE") or str(
            Path(gemlite.__file__).parent / "configs" / "h100.json"
        )
        GemLiteLinear.load_config(table)
        kind = DType.FP16 if dtype == torch.float16 else DType.BF16
        self.layer = GemLiteLinear(
            4, group_size=weight.group, in_features=weight.K, out_features=weight.N,
            input_dtype=kind, output_dtype=kind,
        )  # fmt: skip
        zeros = 8 if weight.zeros is None else weight.zeros.to(dtype)
        self.layer.pack(weight.codes, weight.scales.to(dtype), zeros, None, fma_mode=False)
        self.bytes = weight.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Tilewright:
    """Ours as a user gets it: packed for this GPU, the tile that lookup chooses."""

    def __init__(self, weight: Weight, dtype: torch.dtype, tile: Tile | None = None) -> None:
        from tilewright.ops.w4a16.op import w4a16_gemm

        self.op: Any = w4a16_gemm
        self.weight = _packed(weight, dtype, tile)
        self.tile = tile
        self.bytes = weight.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x, self.weight, tile=self.tile)

    def with_bias(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.op(x, self.weight, bias, tile=self.tile)

    def chosen(self, x: torch.Tensor) -> str:
        """The tile that x gets, and how it was chosen."""
        return f"{self.tile} (named)" if self.tile is not None else _chosen(self.weight, x, "w4a16")


class PortableTriton:
    """Our portable Triton kernels alone, on words, with their space's default tile."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        from tilewright.ops.w4a16.triton_op import w4a16_triton

        self.op: Any = w4a16_triton
        self.weight = words_weight(weight, dtype)
        self.bytes = weight.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x, self.weight)

    def with_bias(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.op(x, self.weight, bias)

    def chosen(self, x: torch.Tensor) -> str:
        """The tile that x gets, and how it was chosen."""
        return _chosen(self.weight, x, "w4a16_triton")


CONTENDERS: dict[str, Callable[..., Any]] = {
    "cublas": CuBlas,
    "tinygemm": TinyGemm,
    "humming": Humming,
    "gemlite": GemLite,
    "tilewright": Tilewright,
    "triton": PortableTriton,
}


def build(name: str, weight: Weight, dtype: torch.dtype, tile: Tile | None = None) -> Any:
    """The contender `name` with `weight` packed for it; ours with `tile`, where one is given.

    Raises:
        Unserved: the contender does not serve this weight or dtype.
    """
    if tile is not None:
        return Tilewright(weight, dtype, tile)
    return CONTENDERS[name](weight, dtype)


def copies_of(contender: Any, count: int) -> list[Any]:
    """`count` contenders with weights of their own, the first of them `contender` itself."""
    return [contender, *(_another(contender) for _ in range(count - 1))]


def _another(contender: Any) -> Any:
    """The same contender in memory of its own."""
    if not isinstance(contender, Tilewright | PortableTriton):
        return copy.deepcopy(contender)
    other = copy.copy(contender)
    other.weight = weight_copy(contender.weight)
    return other


def weight_copy(packed: Any) -> Any:
    """A packed weight in memory of its own, without what launchers keep about the old memory."""
    own = {
        # Strides are part of the layout, so clone() must keep them.
        field.name: value.clone(memory_format=torch.preserve_format)
        for field in fields(packed)
        if isinstance(value := getattr(packed, field.name), torch.Tensor)
    }
    return replace(packed, **own)  # fields that are no arguments are made anew


def _chosen(weight: Any, x: torch.Tensor, op: str) -> str:
    from tilewright.ops.choose import choose_tile
    from tilewright.ops.w4a16.gpu import space_of
    from tilewright.tiles.tile import Problem

    group = -1 if weight.group_size == weight.K else weight.group_size
    problem = Problem(
        op, arch_of(x.device), str(x.dtype).removeprefix("torch."), weight.type_name, "float",
        x.shape[0], weight.N, weight.K, group,
    )  # fmt: skip
    space = space_of(type(weight))
    if op != "w4a16":  # which has no tables
        return f"{space.default(problem)} (default)"
    choice = choose_tile(problem, space)
    return f"{choice.tile} ({choice.how})"


def _words(codes: torch.Tensor) -> torch.Tensor:
    """[..., 8] codes as int32 [...], code i at bits 4 i."""
    shifts = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int64)
    words = (codes.long() << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _packed(weight: Weight, dtype: torch.dtype, tile: Tile | None) -> Any:
    """As a user's weight is packed for this GPU; in the family of the tile's algorithm."""
    from tilewright.layout.pack import pack_w4_for

    if tile is not None:
        from tilewright.ops.w4a16.triton_space import TRITON_SPACE

        if tile.algorithm in TRITON_SPACE.fields:
            return words_weight(weight, dtype)
    return pack_w4_for(weight.host, weight.codes.device, act_dtype=dtype)


def words_weight(weight: Weight, dtype: torch.dtype) -> Any:
    """Words in the order that the portable kernels like best on this maker's chips."""
    from tilewright.layout.triton import pack_w4_words

    order = "k8" if torch.version.hip is not None else "k32"
    packed = pack_w4_words(weight.host, order=order, device="cuda")
    return replace(packed, scales=packed.scales.to(dtype))
