"""Block types of 256 values with scales of their own scales: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

A block is 16 sub-blocks of 16 values or 8 of 32. Its float16 `d` (and `dmin`) multiply small
integers, one a sub-block; the drawings below show where the bits of those integers lie. In a
drawing the most significant bit is on the left, a letter is a sub-block, upper case a scale
and lower case a minimum.
"""

from __future__ import annotations

import numpy as np

from tilewright.formats.block_type import F32, I8, U8, BlockType, half, register

__all__: list[str] = []


def _planes(packed: U8, width: int, bits: int) -> U8:
    """Unpack bit planes: [B, R*width] bytes -> [B, R*(8/bits)*width].

    Every run of `width` bytes gives 8/bits runs of `width` values, lowest bits first.
    """
    shift = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), packed.shape[1] // width, 1, width)
    return ((runs >> shift) & np.uint8((1 << bits) - 1)).reshape(
        len(packed), packed.shape[1] * (8 // bits)
    )


def _scales_and_minimums(packed: U8) -> tuple[U8, U8]:
    """The 12 bytes of Q4_K and Q5_K [B, 12] -> eight 6-bit scales and minimums [B, 8] each."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minimums


@register
class Q2_K(BlockType):
    """::

    byte   0           16          80   82     84
           | 16 scales | 64 bytes  | d  | dmin |

    value = d*sc * q - dmin*m, per 16 values.

    Scale bytes, one a sub-block::

         0  aaaa AAAA          m in the high half, sc in the low half
        ..
        15  pppp PPPP

    Values: two halves of 32 bytes; each byte holds values l, l+32, l+64, l+96 of its half in
    bits 0-1, 2-3, 4-5, 6-7.
    """

    name = "Q2_K"
    sub = 16
    scale_fields = (80, 82)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        packed = blocks[:, 0:16]
        scale = half(blocks, 80) * (packed & 15).astype(np.float32)
        minimum = -(half(blocks, 82) * (packed >> 4).astype(np.float32))
        return _planes(blocks[:, 16:80], 32, 2).view(np.int8), scale, minimum


@register
class Q3_K(BlockType):
    """::

    byte   0            32         96          108  110
           | 32 hmask   | 64 bytes | 12 scales | d  |

    value = d*(sc - 32) * (q - (h ? 0 : 4)), per 16 values.

    Scale bytes, sixteen 6-bit numbers A..P::

         0  IIII AAAA        4  MMMM EEEE        8  MM II EE AA
         1  JJJJ BBBB        5  NNNN FFFF        9  NN JJ FF BB
         2  KKKK CCCC        6  OOOO GGGG       10  OO KK GG CC
         3  LLLL DDDD        7  PPPP HHHH       11  PP LL HH DD
            low four bits       low four bits       high two bits

    Values: low two bits as in Q2_K; bit 4*half + plane of hmask byte l is the third bit.
    """

    name = "Q3_K"
    sub = 16
    scale_fields = (108,)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        low = blocks[:, 96:104]
        low = np.concatenate([low & 15, low >> 4], axis=1)
        high = _planes(blocks[:, 104:108], 4, 2)
        six = (low | (high << 4)).view(np.int8) - np.int8(32)
        scale = half(blocks, 108) * six.astype(np.float32)
        third = _planes(blocks[:, 0:32], 32, 1)
        q = _planes(blocks[:, 32:96], 32, 2) | (third << 2)
        return q.view(np.int8) - np.int8(4), scale, None


@register
class Q4_K(BlockType):
    """::

    byte   0    2      4           16          144
           | d  | dmin | 12 scales | 128 bytes |

    value = d*sc * q - dmin*m, per 32 values.

    Scale bytes, eight 6-bit scales A..H and minimums a..h::

         0  EE AAAAAA        4  ee aaaaaa        8  eeee EEEE
         1  FF BBBBBB        5  ff bbbbbb        9  ffff FFFF
         2  GG CCCCCC        6  gg cccccc       10  gggg GGGG
         3  HH DDDDDD        7  hh dddddd       11  hhhh HHHH

    Bytes 0-3 give E..H their high two bits, bytes 4-7 e..h theirs; bytes 8-11 the low four.

    Values: four runs of 32 bytes; low halves are sub-block 2c, high halves 2c+1.
    """

    name = "Q4_K"
    sub = 32
    scale_fields = (0, 2)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        sc, m = _scales_and_minimums(blocks[:, 4:16])
        scale = half(blocks, 0) * sc.astype(np.float32)
        minimum = -(half(blocks, 2) * m.astype(np.float32))
        return _planes(blocks[:, 16:], 32, 4).view(np.int8), scale, minimum


@register
class Q5_K(BlockType):
    """::

    byte   0    2      4           16      48          176
           | d  | dmin | 12 scales | 32 qh | 128 bytes |

    value = d*sc * q - dmin*m, per 32 values.

    Scale bytes as in Q4_K::

         0  EE AAAAAA        4  ee aaaaaa        8  eeee EEEE
         1  FF BBBBBB        5  ff bbbbbb        9  ffff FFFF
         2  GG CCCCCC        6  gg cccccc       10  gggg GGGG
         3  HH DDDDDD        7  hh dddddd       11  hhhh HHHH

    Values: low four bits as in Q4_K; bit s of qh byte l is the fifth bit of value l of
    sub-block s.
    """

    name = "Q5_K"
    sub = 32
    scale_fields = (0, 2)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        sc, m = _scales_and_minimums(blocks[:, 4:16])
        scale = half(blocks, 0) * sc.astype(np.float32)
        minimum = -(half(blocks, 2) * m.astype(np.float32))
        q = _planes(blocks[:, 48:], 32, 4) | (_planes(blocks[:, 16:48], 32, 1) << 4)
        return q.view(np.int8), scale, minimum


@register
class Q6_K(BlockType):
    """::

    byte   0          128      192         208  210
           | 128 ql   | 64 qh  | 16 scales | d  |

    value = d*sc * (q - 32), per 16 values.

    Scale bytes, one signed byte a sub-block::

         0  AAAAAAAA
        ..
        15  PPPPPPPP

    Values: two halves of 64 ql and 32 qh bytes. Of a half, value l (0..127) has its low four
    bits in the low (l < 64) or high half of ql byte l % 64, and its high two bits in qh byte
    l % 32 at bit 2*(l // 32).
    """

    name = "Q6_K"
    sub = 16
    scale_fields = (208,)

    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        sc = blocks[:, 192:208].view(np.int8).astype(np.float32)
        q = _planes(blocks[:, 0:128], 64, 4) | (_planes(blocks[:, 128:192], 32, 2) << 4)
        return q.view(np.int8) - np.int8(32), half(blocks, 208) * sc, None
