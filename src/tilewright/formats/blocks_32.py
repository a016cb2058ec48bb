"""Block types of 32 values with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

Nibble types keep value j (0..15) in the low half of byte j and value j+16 in its high half.
"""

from __future__ import annotations

import numpy as np

from tilewright.formats.block_type import F32, I8, U8, BlockType, half, register

__all__ = ["nibbles_32"]


def nibbles_32(qs: U8) -> U8:
    """[B, 16] bytes -> [B, 32] nibbles: the low halves, then the high halves."""
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def _fifth_bits(qh: U8) -> U8:
    """[B, 4] bytes, bit j of the little-endian word -> [B, 32] of 0 or 16."""
    return np.unpackbits(qh, axis=1, bitorder="little") << np.uint8(4)


@register
class Q4_0(BlockType):
    """::

    byte   0    2              18
           | d  | 16 nibble bytes |       value = d * (q - 8)
    """

    name = "Q4_0"
    sub = 32
    scale_fields = (0,)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        q = nibbles_32(blocks[:, 2:]).view(np.int8) - np.int8(8)
        return q, half(blocks, 0), None


@register
class Q4_1(BlockType):
    """::

    byte   0    2    4              20
           | d  | m  | 16 nibble bytes |  value = d * q + m
    """

    name = "Q4_1"
    sub = 32
    scale_fields = (0, 2)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        return nibbles_32(blocks[:, 4:]).view(np.int8), half(blocks, 0), half(blocks, 2)


@register
class Q5_0(BlockType):
    """::

    byte   0    2        6              22
           | d  | qh u32 | 16 nibble bytes |  value = d * (q - 16)

    Bit j of qh is the fifth bit of value j.
    """

    name = "Q5_0"
    sub = 32
    scale_fields = (0,)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        q = nibbles_32(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
        return q.view(np.int8) - np.int8(16), half(blocks, 0), None


@register
class Q5_1(BlockType):
    """::

    byte   0    2    4        8              24
           | d  | m  | qh u32 | 16 nibble bytes |  value = d * q + m
    """

    name = "Q5_1"
    sub = 32
    scale_fields = (0, 2)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        q = nibbles_32(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
        return q.view(np.int8), half(blocks, 0), half(blocks, 2)


@register
class Q8_0(BlockType):
    """::

    byte   0    2               34
           | d  | 32 signed bytes |       value = d * q
    """

    name = "Q8_0"
    sub = 32
    scale_fields = (0,)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        return blocks[:, 2:].view(np.int8), half(blocks, 0), None
