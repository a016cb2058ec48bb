"""The layout that 4-bit weights take for a device: chosen once, when they are packed."""

from __future__ import annotations

import torch

from tilewright.device import kind_of
from tilewright.errors import UnsupportedError
from tilewright.formats.w4 import W4Codes
from tilewright.layout.cpu import PackedW4, pack_w4
from tilewright.layout.hopper import HopperW4, pack_w4_hopper
from tilewright.layout.triton import WordsW4, pack_w4_words

__all__ = ["FAMILIES", "family_of", "pack_w4_for"]

FAMILIES = ("cpu", "words", "hopper")
"""Layout families: bytes for the CPU's kernels; ordered words that any GPU reads; words in the
order of Hopper's matrix fragments."""


def family_of(arch: str, act_dtype: torch.dtype = torch.float16) -> str:
    """The family whose kernels serve an arch best.

    Args:
        arch: as in tile tables.
        act_dtype: of the activations: the fragments of Hopper are of 16-bit numbers.
    """
    if arch.startswith("cpu"):
        return "cpu"
    if arch == "sm_90" and act_dtype in (torch.float16, torch.bfloat16):
        return "hopper"
    return "words"


def pack_w4_for(
    weight: W4Codes,
    arch: str,
    *,
    act_dtype: torch.dtype = torch.float16,
    family: str | None = None,
    device: torch.device | str | None = None,
) -> PackedW4 | WordsW4 | HopperW4:
    """Pack 4-bit codes for the kernels of an arch.

    Args:
        weight: checked codes.
        arch: "cpu-...", "sm_90", "gfx1151" and the like; "interpreter" packs as for a GPU.
        act_dtype: dtype of the activations.
        family: one of `FAMILIES`; None for that of the arch.
        device: where packing takes place and the result lies; None for the arch's own.

    Raises:
        UnsupportedError: an unknown family.
        LayoutError: as the family's own function.
    """
    family = family_of(arch, act_dtype) if family is None else family
    if family not in FAMILIES:
        raise UnsupportedError(f"family is {family!r}; use one of {', '.join(FAMILIES)}")
    if family == "cpu":
        return pack_w4(weight)
    if device is None:
        device = "cuda" if kind_of(arch) == "cuda" else "cpu"
    place = torch.device(device)
    if family == "hopper":
        return pack_w4_hopper(weight, act_dtype=act_dtype, device=place)
    return pack_w4_words(weight, device=place)
