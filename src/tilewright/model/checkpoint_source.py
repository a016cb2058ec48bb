"""A safetensors folder as a source of tensors under transformers' names."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from tilewright.layout.cpu import PackedW4
from tilewright.layout.hopper import HopperW4
from tilewright.layout.triton import WordsW4
from tilewright.model.info import LoadInfo
from tilewright.model.pages import drop_file_pages
from tilewright.model.placement import Placement

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
        self._linears = {_text_name(prefix + "."): prefix for prefix in checkpoint.linears}
        self._dense: dict[str, str] = {}
        skipped = 0
        for name in checkpoint.dense:
            if name.startswith(_NOT_TEXT):
                skipped += 1
            elif not name.endswith(_RECOMPUTED):
                self._dense[_text_name(name)] = name
        if skipped:
            info.notes.append(f"{skipped} tensors of the image part are not loaded")

    def names(self) -> Collection[str]:
        return self._dense.keys() | {f"{prefix}weight" for prefix in self._linears}

    def optional(self, name: str) -> bool:
        return False

    def matrix(self, name: str) -> PackedW4 | WordsW4 | HopperW4 | torch.Tensor:
        prefix = self._linears.get(name.removesuffix("weight"))
        if prefix is None:
            return self.vector(name)
        packed = self._where.pack(self._checkpoint.linear(prefix))
        self._info.count("packed", packed.type_name, packed.nbytes)
        self._copied(packed.nbytes)
        return packed

    def vector(self, name: str) -> torch.Tensor:
        stored = self._checkpoint.tensor(self._dense[name])
        result = stored.to(self._where.dtype, copy=True)
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
