"""Where a model lies and what it computes in, which decides how its weights are packed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tilewright.device import arch_of, kind_of
from tilewright.errors import UnsupportedError
from tilewright.formats.block_type import BlockType
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.formats.w4 import SYMMETRIC_ZERO, W4Codes
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for, unpack_blocks
from tilewright.layout.cpu import PackedBlocks, PackedW4
from tilewright.layout.experts import GpuExperts, pack_gpu_experts, pack_gpu_experts_w4
from tilewright.layout.hopper import HopperW4
from tilewright.layout.pack import pack_w4_for
from tilewright.layout.triton import WordsW4
from tilewright.ops.moe.experts import PackedExperts, pack_expert_blocks, pack_expert_w4

__all__ = ["Placement", "all_finite", "device_of", "place", "suited"]

log = logging.getLogger("tilewright")

_AS_CODES = ("Q4_0",)  # GGUF types that are 4-bit codes with a scale for every 32, and no more

_VALUES_AT_A_TIME = 1 << 24  # dequantized at a time: bounds the temporaries

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_BEYOND_FLOAT16 = ("gemma3", "gemma3_text")
"""Model types whose hidden states outgrow float16, which ends at 65504: those of Gemma-3-270M reach
104,000 on ordinary text. They were trained in bfloat16."""


@dataclass(frozen=True)
class Placement:
    """A model's device and dtype.

    Attributes:
        device: where its tensors lie.
        arch: of that device, as in tile tables.
        dtype: of activations, norms, and matrices that are not packed.
    """

    device: torch.device
    arch: str
    dtype: torch.dtype

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU's kernels serve it; the interpreter's operands lie on the CPU too."""
        return kind_of(self.arch) == "cpu"

    def pack(self, codes: W4Codes) -> PackedW4 | WordsW4 | HopperW4:
        """4-bit codes in the layout of the device's kernels, on the device.

        Raises:
            LayoutError: as `tilewright.layout.pack.pack_w4_for`.
        """
        return pack_w4_for(codes, self.device, act_dtype=self.dtype, arch=self.arch)

    def pack_blocks(
        self, raw: np.ndarray, block: BlockType
    ) -> PackedBlocks | GpuBlocks | PackedW4 | WordsW4 | HopperW4:
        """GGUF blocks in the layout of the device's kernels, on the device: for GPUs Q4_0 as the
        4-bit codes that it is, since w4a16 has kernels of their own for some; others as blocks.

        Raises:
            LayoutError: as `tilewright.layout.blocks.pack_blocks_for`.
        """
        if self.on_cpu or block.name not in _AS_CODES:
            return pack_blocks_for(raw, block.name, self.device, self.arch)
        found = block.codes(raw)
        codes = (found.codes + SYMMETRIC_ZERO).astype(np.uint8)
        return self.pack(W4Codes(codes, found.scale, None, found.sub, None, torch.float16))

    def pack_expert_blocks(self, raw: np.ndarray, block: BlockType) -> PackedExperts | GpuExperts:
        """GGUF blocks of stacked experts, uint8 [E, N, row_bytes], as `pack_blocks` packs one
        matrix; Q4_0 stays blocks everywhere.

        Raises:
            LayoutError: as `tilewright.layout.experts.pack_gpu_experts`.
        """
        if self.on_cpu:
            return pack_expert_blocks(raw, block.name)
        return pack_gpu_experts(raw, block.name, self.device, self.arch)

    def pack_experts(self, codes: Sequence[W4Codes]) -> PackedExperts | GpuExperts:
        """The 4-bit codes of every expert, in the layout of the device's kernels, on the device.

        Raises:
            LayoutError: the experts differ, or as `pack`.
        """
        if self.on_cpu:
            return pack_expert_w4(codes)
        return pack_gpu_experts_w4(codes, self.device)

    def dequantize(self, raw: np.ndarray, type_name: str) -> tuple[torch.Tensor, bool]:
        """GGUF blocks as a matrix of the placement's dtype, computed on a GPU.

        Args:
            raw: uint8 [N, row_bytes].
            type_name: one of the packed GGUF types.

        Returns:
            [N, K], each value rounded once, and whether all scales are finite.
        """
        block = BLOCK_TYPES[type_name]
        rows, columns = len(raw), raw.shape[1] // block.block_bytes * block.block_size
        values = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        finite = True
        step = max(1, _VALUES_AT_A_TIME // columns)
        for at in range(0, rows, step):
            packed = pack_blocks_for(raw[at : at + step], type_name, self.device, self.arch)
            assert isinstance(packed, GpuBlocks)
            finite = finite and all_finite(packed)
            codes, scale, minimum = unpack_blocks(packed)
            # As the format says: the product first, then the sum, in float32.
            piece = codes.unflatten(1, (scale.shape[1], -1)).float() * scale[:, :, None]
            if minimum is not None:
                piece += minimum[:, :, None]
            values[at : at + step] = piece.flatten(1)
        return values, finite


def all_finite(packed: Any) -> bool:
    """Whether no scale of packed GGUF blocks is known to be NaN or Inf; looks on the device that
    they lie on. False for what only the file's own bytes tell."""
    if not isinstance(packed, GpuBlocks) or packed.scales.dtype != torch.float16:
        return False
    held = [packed.scales] if packed.minimums is None else [packed.scales, packed.minimums]
    return bool(torch.stack([t.isfinite().all() for t in held]).all())


def place(device: str | torch.device, dtype: torch.dtype | None) -> Placement:
    """Check a device and a dtype.

    Args:
        device: "cpu", "cuda" or "cuda:1"; "cuda" is what torch calls an AMD GPU too. A GPU must be
            torch's current one: Triton launches kernels there, wherever their operands lie.
        dtype: float32, float16 or bfloat16; None for float32 on the CPU, float16 on a GPU, until
            `suited` knows the model.

    Raises:
        UnsupportedError: another device or dtype, torch sees no such GPU, or it is not the current
            one.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UnsupportedError(f"device is {str(device)!r}; allowed are cpu, cuda") from error
    if found.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device is {str(device)!r}; allowed are cpu, cuda")
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or (found.index or 0) >= count:
            raise UnsupportedError(
                f"device is {str(device)!r}, and torch sees {count} GPUs: install a build of torch "
                "for your GPU, name one that is there, or stay on 'cpu'"
            )
        current = torch.cuda.current_device()
        if found.index not in (None, current):
            raise UnsupportedError(
                f"device is {str(device)!r}, and torch's current one is 'cuda:{current}', where "
                f"kernels are launched; call torch.cuda.set_device({found.index}) first"
            )
        found = torch.device("cuda", current)
    if dtype is None:
        dtype = torch.float32 if found.type == "cpu" else torch.float16
    if dtype not in _DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        raise UnsupportedError(f"dtype is {dtype}; allowed are {allowed}")
    return Placement(found, arch_of(found), dtype)


def suited(where: Placement, model_type: str, dtype: torch.dtype | None) -> Placement:
    """A placement whose dtype holds what a family computes: bfloat16 for Gemma 3 on a GPU.

    Args:
        where: from `place`.
        model_type: transformers' name of the family.
        dtype: what was asked for. A float16 that overflows stays, with a warning.
    """
    if model_type not in _BEYOND_FLOAT16 or where.dtype != torch.float16:
        return where
    if dtype is None:
        return replace(where, dtype=torch.bfloat16)
    log.warning(
        f"{model_type} in float16: its hidden states may pass 65504 and become infinite; leave "
        "dtype out, or take bfloat16 or float32"
    )
    return where


def device_of(model: Any) -> torch.device:
    """Where a model takes its ids; the CPU for one that does not say."""
    found = getattr(model, "device", None)
    return found if isinstance(found, torch.device) else torch.device("cpu")
