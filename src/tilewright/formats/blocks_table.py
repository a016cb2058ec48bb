"""Block types whose nibbles are looked up in a table: IQ4_NL, IQ4_XS, MXFP4.

The tables hold int8, so a kernel may look up and multiply integers as for the other types.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilewright.formats.block_type import F32, I8, U8, BlockType, half, register
from tilewright.formats.blocks_32 import nibbles_32

__all__ = ["IQ4_TABLE", "MXFP4_TABLE"]

IQ4_TABLE: I8 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)
"""Levels of the non-linear 4-bit types."""

MXFP4_TABLE: I8 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""E2M1 numbers (OCP Microscaling Formats 1.0), doubled to be integers."""


@register
class IQ4_NL(BlockType):
    """::

    byte   0    2              18
           | d  | 16 nibble bytes |       value = d * table[q]
    """

    name = "IQ4_NL"
    sub = 32
    scale_fields = (0,)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        return IQ4_TABLE[nibbles_32(blocks[:, 2:])], half(blocks, 0), None


@register
class IQ4_XS(BlockType):
    """::

    byte   0    2              4            8           136
           | d  | scales_h u16 | 4 scales_l | 128 bytes |

    value = d*(sc - 32) * table[q], per 32 values.

    Scale bytes, eight 6-bit numbers A..H::

         2  DD CC BB AA      4  BBBB AAAA
         3  HH GG FF EE      5  DDDD CCCC
            high two bits    6  FFFF EEEE
                             7  HHHH GGGG
                                low four bits

    Values: eight runs of 16 bytes, each a sub-block as in IQ4_NL.
    """

    name = "IQ4_XS"
    sub = 32
    scale_fields = (0,)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        b = len(blocks)
        shift2 = np.array([0, 2, 4, 6], dtype=np.uint8)
        shift4 = np.array([0, 4], dtype=np.uint8)
        high = ((blocks[:, 2:4, None] >> shift2) & 3).reshape(b, 8)
        low = ((blocks[:, 4:8, None] >> shift4) & 15).reshape(b, 8)
        six = (low | (high << 4)).view(np.int8) - np.int8(32)
        scale = half(blocks, 0) * six.astype(np.float32)
        q = nibbles_32(blocks[:, 8:].reshape(b * 8, 16))
        return IQ4_TABLE[q].reshape(b, 256), scale, None


@register
class MXFP4(BlockType):
    """::

    byte   0   1              17
           | e | 16 nibble bytes |        value = 2^(e - 128) * table[q]

    e is an E8M0 exponent with bias 127; the table is doubled, hence 128. 255 is NaN.
    """

    name = "MXFP4"
    sub = 32
    scale_fields = (0,)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        e = blocks[:, 0:1].astype(np.uint32)
        # e = 0 and 1 are the denormals 2^-128 and 2^-127.
        bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - np.uint32(1)) << np.uint32(23))
        scale: F32 = bits.astype(np.uint32).view(np.float32)
        return MXFP4_TABLE[nibbles_32(blocks[:, 1:])], scale, None

    def faulty(self, blocks: U8) -> npt.NDArray[np.intp]:
        bad = np.flatnonzero(blocks[:, 0] == 255)
        return np.stack([bad, np.zeros_like(bad)], axis=1)
