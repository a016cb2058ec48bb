"""A safetensors folder as a source of tensors under transformers' names."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from tilewright.errors import FormatError, LayoutError
from tilewright.layout.cpu import PackedW4
from tilewright.layout.experts import GpuExperts
from tilewright.layout.hopper import HopperW4
from tilewright.layout.triton import WordsW4
from tilewright.model.info import LoadInfo
from tilewright.model.names import hub_name
from tilewright.model.pages import drop_file_pages
from tilewright.model.placement import Placement
from tilewright.ops.moe.experts import PackedExperts
from tilewright.ops.moe.op import Experts

if TYPE_CHECKING:
    from tilewright.formats.checkpoint import Checkpoint

__all__ = ["CheckpointSource"]

# An image-and-text gemma3 keeps its language model under one of these.
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_NOT_TEXT = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_EXPERT = re.compile(r"^(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>\w+\.weight)$")
_BOTH = ".block_sparse_moe.input_linear.weight"  # granite: gate and up of all experts, stacked
_RECOMPUTED = ("rotary_emb.inv_freq",)
_DROP_BYTES = 16 << 20


class CheckpointSource:
    """See `tilewright.model.fill.Source`.

    Args:
        checkpoint: the opened folder.
        where: the model's device, and the dtype of what is not packed.
        info: gets every tensor that is given out.
    """

    def __init__(self, checkpoint: Checkpoint, *, where: Placement, info: LoadInfo) -> None:
        self.path: object = checkpoint.path
        self._checkpoint = checkpoint
        self._where = where
        self._info = info
        self._files = sorted(checkpoint.path.glob("*.safetensors"))
        self._since_drop = 0
        kind = checkpoint.config.get("model_type")
        self._linears = {
            hub_name(_text_name(prefix + "."), kind): prefix for prefix in checkpoint.linears
        }
        self._dense: dict[str, str] = {}
        skipped = 0
        for name in checkpoint.dense:
            if name.startswith(_NOT_TEXT):
                skipped += 1
            elif not name.endswith(_RECOMPUTED):
                self._dense[hub_name(_text_name(name), kind)] = name
        self._stacked: dict[str, tuple[str, int]] = {}  # tensor of all experts, and which half
        for name in [name for name in self._dense if name.endswith(_BOTH)]:
            stored = self._dense.pop(name)
            for half, part in enumerate(("gate_proj", "up_proj")):
                path = name.removesuffix(_BOTH)
                self._stacked[f"{path}.block_sparse_moe.experts.{part}.weight"] = (stored, half)
        self._experts: dict[str, dict[int, str]] = {}
        for name in (*self._dense, *(f"{prefix}weight" for prefix in self._linears)):
            match = _EXPERT.match(name)
            if match is not None:
                merged = f"{match['experts']}.{match['part']}"
                self._experts.setdefault(merged, {})[int(match["number"])] = name
        if skipped:
            info.notes.append(f"{skipped} tensors of the image part are not loaded")

    def names(self) -> Collection[str]:
        each = {name for numbers in self._experts.values() for name in numbers.values()}
        single = self._dense.keys() | {f"{prefix}weight" for prefix in self._linears}
        return (single - each) | self._experts.keys() | self._stacked.keys()

    def optional(self, name: str) -> bool:
        return False

    def spare(self, name: str) -> bool:
        return False

    def matrix(self, name: str) -> PackedW4 | WordsW4 | HopperW4 | torch.Tensor:
        prefix = self._linears.get(name.removesuffix("weight"))
        if prefix is None:
            return self.vector(name)
        packed = self._where.pack(self._checkpoint.linear(prefix))
        self._info.count("packed", packed.type_name, packed.nbytes)
        self._copied(packed.nbytes)
        return packed

    def experts(self, name: str) -> Experts:
        if name in self._stacked:
            stored, half = self._stacked[name]
            return self._half(self._checkpoint.tensor(stored), half)
        if name not in self._experts:  # all of them in one tensor
            return self.vector(name)
        numbers = self._experts[name]
        missing = sorted(set(range(max(numbers) + 1)) - set(numbers))
        if missing:
            raise FormatError(
                f"it has experts up to {max(numbers)} and lacks {missing[:8]}; check that the "
                "model is complete",
                file=self.path,
                tensor=name,
            )
        if not self._where.on_cpu:
            prefixes = [
                self._linears.get(numbers[e].removesuffix("weight")) for e in sorted(numbers)
            ]
            if all(prefix is not None for prefix in prefixes):
                return self._on_gpu(name, [prefix for prefix in prefixes if prefix is not None])
        parts = [self.matrix(numbers[expert]) for expert in range(len(numbers))]
        packed = [part for part in parts if isinstance(part, PackedW4)]
        dense = [part for part in parts if isinstance(part, torch.Tensor)]
        if len(packed) == len(parts):
            return self._agreeing(name, packed)
        if len(dense) == len(parts) and len({part.shape for part in dense}) == 1:
            return torch.stack(dense)
        raise FormatError(
            f"of its {len(parts)} experts {len(packed)} are quantized, or their shapes differ; "
            "the experts of a layer must be alike",
            file=self.path,
            tensor=name,
        )

    def _half(self, both: torch.Tensor, half: int) -> torch.Tensor:
        """Gate (0) or up (1) of [E, 2 I, H]."""
        part = both.chunk(2, dim=1)[half].to(self._where.dtype, copy=True)
        self._info.count("dense", str(both.dtype).removeprefix("torch."), part.nbytes)
        self._copied(part.nbytes)
        return part

    def _on_gpu(self, name: str, prefixes: list[str]) -> PackedExperts | GpuExperts:
        codes = [self._checkpoint.linear(prefix) for prefix in prefixes]
        try:
            packed = self._where.pack_experts(codes)
        except LayoutError as error:
            raise FormatError(str(error), file=self.path, tensor=name) from error
        self._info.count("packed", packed.type_name, packed.nbytes)
        self._copied(packed.nbytes)
        return packed

    def _agreeing(self, name: str, packed: list[PackedW4]) -> PackedExperts:
        try:
            return PackedExperts(tuple(packed))
        except LayoutError as error:
            raise FormatError(str(error), file=self.path, tensor=name) from error

    def vector(self, name: str, *, exact: bool = False) -> torch.Tensor:
        prefix = self._linears.get(name.removesuffix("weight"))
        if prefix is not None:  # a quantized router, which transformers keeps as a plain parameter
            codes = self._checkpoint.linear(prefix)
            values = torch.from_numpy(codes.dequantize()).to(self._where.dtype)
            kind = "uint4b8" if codes.symmetric else "uint4"
            self._info.count("dequantized", kind, values.nbytes)
            return values
        stored = self._checkpoint.tensor(self._dense[name])
        result = stored.to(torch.float32 if exact else self._where.dtype, copy=True)
        self._info.count("dense", str(stored.dtype).removeprefix("torch."), result.nbytes)
        self._copied(stored.nbytes)
        return result

    def _copied(self, nbytes: int) -> None:
        """Everything given out is a copy; drop the file's pages now and then."""
        self._since_drop += nbytes
        if self._since_drop > _DROP_BYTES:
            drop_file_pages(self._files)
            self._since_drop = 0


def _text_name(name: str) -> str:
    for theirs, ours in _TEXT_PREFIXES:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
