"""The layout that 4-bit weights take for a device: chosen once, when they are packed."""

from __future__ import annotations

import torch

from tilewright.device import arch_of
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
    device: torch.device | str = "cpu",
    *,
    act_dtype: torch.dtype = torch.float16,
    arch: str | None = None,
    family: str | None = None,
) -> PackedW4 | WordsW4 | HopperW4:
    """Pack 4-bit codes for the kernels of a device, on that device.

    Args:
        weight: checked codes, from `tilewright.read_checkpoint`.
        device: where the result lies: "cpu", "cuda".
        act_dtype: dtype of the activations to come; float16 or bfloat16 on Hopper, any of the
            three elsewhere.
        arch: whose kernels it is for, "sm_90", "gfx1151"; None for that of `device`. A weight for
            another arch than the device's can be looked at, and compiled for.
        family: one of `FAMILIES`; None for that of the arch.

    Raises:
        UnsupportedError: an unknown family.
        LayoutError: as the family's own function.
    """
    place = torch.device(device)
    arch = arch_of(place) if arch is None else arch
    family = family_of(arch, act_dtype) if family is None else family
    if family not in FAMILIES:
        raise UnsupportedError(f"family is {family!r}; use one of {', '.join(FAMILIES)}")
    if family == "cpu":
        return pack_w4(weight)
    if family == "hopper":
        return pack_w4_hopper(weight, act_dtype=act_dtype, device=place)
    order = "k32" if arch.startswith("sm_") else "k8"
    return pack_w4_words(weight, order=order, device=place)
