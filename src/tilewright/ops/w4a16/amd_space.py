"""Tiles of the Gluon W4A16 kernel for AMD: its fields, and the rules that chips set."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.errors import UnsupportedError

__all__ = ["AMD_ARCHS", "PADDING", "AmdFamily", "amd_family"]

PADDING = 8
"""Elements of 2 bytes between two rows of x in shared memory."""


@dataclass(frozen=True)
class AmdFamily:
    """Chips whose matrix units are alike.

    Attributes:
        instruction: "wmma1" (gfx11), "wmma2" (gfx12) or "mfma" (gfx9).
        version: of the layout that Triton describes them by.
        warp_size: lanes of a warp.
        k_lanes: lanes that share a column of an operand and hold different k.
        registers: vector registers that a thread may have.
    """

    instruction: str
    version: int
    warp_size: int
    k_lanes: int
    registers: int

    def k_width(self, block_k: int) -> int:
        """Consecutive k of a thread in an operand, as Triton's layouts understand it.

        On gfx12 Triton accepts 16 and multiplies wrong numbers (seen by executing its code).
        """
        if self.instruction == "mfma":
            return min(32, block_k // self.k_lanes)
        return 16 if self.instruction == "wmma1" else 8


_GFX11 = AmdFamily("wmma1", 1, 32, 1, 256)
_GFX12 = AmdFamily("wmma2", 2, 32, 2, 256)
_FAMILIES = {
    "gfx1100": _GFX11,
    "gfx1101": _GFX11,
    "gfx1102": _GFX11,
    "gfx1103": _GFX11,
    "gfx1150": _GFX11,
    "gfx1151": _GFX11,
    "gfx1200": _GFX12,
    "gfx1201": _GFX12,
    "gfx90a": AmdFamily("mfma", 2, 64, 4, 512),
    "gfx942": AmdFamily("mfma", 3, 64, 4, 512),
}

AMD_ARCHS = tuple(_FAMILIES)
"""The archs that the kernel serves."""


def amd_family(arch: str) -> AmdFamily:
    """The family of `arch`.

    Raises:
        UnsupportedError: the kernel does not serve it.
    """
    if arch not in _FAMILIES:
        raise UnsupportedError(
            f"w4a16 amd: the kernel serves {', '.join(AMD_ARCHS)}, not {arch!r}; "
            "use a tile of the algorithm 'triton'"
        )
    return _FAMILIES[arch]
