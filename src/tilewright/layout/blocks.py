"""GGUF blocks as GPU kernels read them: codes in words, scales apart, no byte more than the file.

A file's block mixes scales and codes at odd offsets. Here every kind of bit has a tensor of its
own, aligned, and rows keep their order:

``low``, ``high``
    The codes of a row in int32 words, a type's 5 or 6 bits split as 4 + 1 and 4 + 2, Q3_K's as
    2 + 1. A word of `low` holds 32 / low_bits consecutive columns, code j = 2p + h of them at bit
    ``low_bits * p + 16 * h``: pairs of neighbours lie in the two halves of a word, so that
    ``word >> low_bits * p & mask`` unpacks two at a time. For 4 bits, as in
    `tilewright.layout.triton`::

        bits   31..28 27..24 23..20 19..16 | 15..12 11..8  7..4   3..0
        code        7      5      3      1 |      6      4    2      0

    A word of `high` serves low_bits / high_bits words of `low`; the codes of the c-th of them are
    at bit ``high_bits * (16 / low_bits * c + p) + 16 * h``.

``scales``, ``minimums``
    float16 [N, K / block], the file's own d and dmin (or m); MXFP4's exponents as uint8.

``sub_scales``
    uint8 [N, K / 256 * S], the integers that d and dmin are multiplied with, S bytes a block:

        "bytes"    Q6_K: 16 signed bytes.
        "nibbles"  Q2_K: 16 bytes, scale in the low half, minimum in the high half.
        "six"      numbers of 6 bits, C of them: C / 2 bytes with the low four bits of the numbers
                   2i and 2i + 1, then C / 4 bytes with the high two bits of 4i .. 4i + 3.
                   Q3_K: 16 scales. IQ4_XS: 8. Q4_K, Q5_K: number 2s is the scale of sub-block s,
                   2s + 1 its minimum.

All but the words are stored block after block, all rows of a block together: their shapes are as
above, their strides (1, N). Neighbouring rows, which a warp reads together, lie together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from tilewright.device import arch_of, kind_of
from tilewright.formats.blocks import BLOCK_TYPES, IQ4_TABLE, MXFP4_TABLE
from tilewright.layout.cpu import PackedBlocks, pack_blocks

__all__ = ["BLOCK_FORMS", "BlockForm", "GpuBlocks", "pack_blocks_for", "unpack_blocks"]

_VALUES_AT_A_TIME = 1 << 24  # packed at a time: bounds the temporaries of packing


@dataclass(frozen=True)
class Plane:
    """Where a block of the file holds `bits` bits of each code.

    Attributes:
        at, size: its bytes.
        width: every run of so many bytes holds 8 / bits runs of so many codes, lowest bits first.
        bits: of a code.
    """

    at: int
    size: int
    width: int
    bits: int


@dataclass(frozen=True)
class BlockForm:
    """One block type, in the file and here.

    Attributes:
        low, high: the lower and the upper bits of the codes; no upper ones for most types.
        scale_at: byte of d, or of MXFP4's exponent.
        minimum_at: byte of m or dmin; None for types without minimums.
        sub: consecutive columns that share a scale.
        offset: what is taken from a code.
        codes: "offset", "signed" (bytes), "iq4" or "fp4" (a table's).
        scaling: "half" and "exponent" for one scale a block; "bytes", "nibbles" and "six" for
            `sub_scales` of that form.
        sub_bytes: bytes of them a block.
        sub_offset: what is taken from a scale of `sub_scales`.
    """

    low: Plane
    high: Plane | None = None
    scale_at: int = 0
    minimum_at: int | None = None
    sub: int = 32
    offset: int = 0
    codes: str = "offset"
    scaling: str = "half"
    sub_bytes: int = 0
    sub_offset: int = 0

    @property
    def high_bits(self) -> int:
        return 0 if self.high is None else self.high.bits


def _nibbles(at: int) -> Plane:
    return Plane(at, 16, 16, 4)


BLOCK_FORMS: dict[str, BlockForm] = {
    "Q4_0": BlockForm(_nibbles(2), offset=8),
    "Q4_1": BlockForm(_nibbles(4), minimum_at=2),
    "Q5_0": BlockForm(_nibbles(6), Plane(2, 4, 1, 1), offset=16),
    "Q5_1": BlockForm(_nibbles(8), Plane(4, 4, 1, 1), minimum_at=2),
    "Q8_0": BlockForm(Plane(2, 32, 32, 8), codes="signed"),
    "Q2_K": BlockForm(
        Plane(16, 64, 32, 2), scale_at=80, minimum_at=82, sub=16, scaling="nibbles", sub_bytes=16
    ),
    "Q3_K": BlockForm(
        Plane(32, 64, 32, 2), Plane(0, 32, 32, 1), scale_at=108, sub=16, offset=4, scaling="six",
        sub_bytes=12, sub_offset=32,
    ),
    "Q4_K": BlockForm(Plane(16, 128, 32, 4), minimum_at=2, scaling="six", sub_bytes=12),
    "Q5_K": BlockForm(
        Plane(48, 128, 32, 4), Plane(16, 32, 32, 1), minimum_at=2, scaling="six", sub_bytes=12
    ),
    "Q6_K": BlockForm(
        Plane(0, 128, 64, 4), Plane(128, 64, 32, 2), scale_at=208, sub=16, offset=32,
        scaling="bytes", sub_bytes=16,
    ),
    "IQ4_NL": BlockForm(_nibbles(2), codes="iq4"),
    "IQ4_XS": BlockForm(
        Plane(8, 128, 16, 4), codes="iq4", scaling="six", sub_bytes=6, sub_offset=32
    ),
    "MXFP4": BlockForm(_nibbles(1), codes="fp4", scaling="exponent"),
}  # fmt: skip
"""The block types that GPU kernels read, by name."""


@dataclass(frozen=True, eq=False)
class GpuBlocks:
    """GGUF blocks of one weight matrix, in the layout of the module docstring.

    Attributes:
        type_name: GGUF type, such as "Q4_K".
        low: int32 [N, K * low_bits / 32], contiguous.
        high: int32 [N, K * high_bits / 32], contiguous; None for a type without.
        scales: float16 [N, K / block]; uint8 for MXFP4.
        minimums: float16 [N, K / block], or None.
        sub_scales: uint8 [N, K / 256 * S], or None.
        N, K: rows and columns of the weight.
    """

    type_name: str
    low: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    minimums: torch.Tensor | None
    sub_scales: torch.Tensor | None
    N: int
    K: int

    @property
    def form(self) -> BlockForm:
        """How the type's bits are split."""
        return BLOCK_FORMS[self.type_name]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those there are."""
        found = (self.low, self.high, self.scales, self.minimums, self.sub_scales)
        return tuple(t for t in found if t is not None)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def to(self, device: torch.device | str) -> GpuBlocks:
        """The same weight on another device."""
        return replace(
            self,
            low=self.low.to(device),
            high=None if self.high is None else self.high.to(device),
            scales=self.scales.to(device),
            minimums=None if self.minimums is None else self.minimums.to(device),
            sub_scales=None if self.sub_scales is None else self.sub_scales.to(device),
        )


def pack_blocks_for(
    raw: np.ndarray | torch.Tensor,
    type_name: str,
    device: torch.device | str = "cpu",
    arch: str | None = None,
) -> PackedBlocks | GpuBlocks:
    """GGUF blocks in the layout of a device's kernels, on that device.

    Args:
        raw: uint8 [N, row_bytes], each row contiguous, on any device.
        type_name: one of the packed GGUF types.
        device: where the work is done and the result lies.
        arch: whose kernels it is for; None for that of `device`. The CPU's blocks stay as they
            are, where they are.

    Raises:
        LayoutError: as `tilewright.layout.cpu.pack_blocks`.
    """
    place = torch.device(device)
    arch = arch_of(place) if arch is None else arch
    blocks = pack_blocks(raw, type_name)
    if kind_of(arch) == "cpu":
        return blocks
    form, kind = BLOCK_FORMS[type_name], BLOCK_TYPES[type_name]
    n, k, size = blocks.N, blocks.K, kind.block_size

    def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(columns, n, dtype=dtype, device=place).T

    def words(bits: int) -> torch.Tensor:
        return torch.empty(n, k * bits // 32, dtype=torch.int32, device=place)

    one = torch.uint8 if form.scaling == "exponent" else torch.float16
    made = GpuBlocks(
        type_name=type_name,
        low=words(form.low.bits),
        high=words(form.high_bits) if form.high is not None else None,
        scales=empty(k // size, one),
        minimums=None if form.minimum_at is None else empty(k // size, torch.float16),
        sub_scales=empty(k // size * form.sub_bytes, torch.uint8) if form.sub_bytes else None,
        N=n,
        K=k,
    )
    step = max(1, _VALUES_AT_A_TIME // k)
    for at in range(0, n, step):
        rows = blocks.data[at : at + step].to(place)
        _pack_rows(rows.unflatten(1, (-1, kind.block_bytes)), made, slice(at, at + step))
    return made


def _pack_rows(blocks: torch.Tensor, made: GpuBlocks, rows: slice) -> None:
    """uint8 [n, blocks, block_bytes] to those rows of `made`."""
    form = made.form
    made.low[rows] = _words(_codes(blocks, form.low), form.low.bits, form.low.bits)
    if form.high is not None and made.high is not None:
        made.high[rows] = _words(_codes(blocks, form.high), form.high.bits, form.low.bits)
    if form.scaling == "exponent":
        made.scales[rows] = blocks[:, :, form.scale_at]
    else:
        made.scales[rows] = _half(blocks, form.scale_at)
    if form.minimum_at is not None and made.minimums is not None:
        made.minimums[rows] = _half(blocks, form.minimum_at)
    if made.sub_scales is not None:
        made.sub_scales[rows] = _sub_scales(blocks, made.type_name).flatten(1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    field = blocks[:, :, at : at + 2].clone(memory_format=torch.contiguous_format)  # and aligned
    return field.view(torch.float16).squeeze(-1)


def _planes(data: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """uint8 [..., R * width] -> [..., R * (8 / bits) * width] numbers, as `Plane` says."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    runs = data.unflatten(-1, (-1, 1, width))
    return ((runs >> shifts[:, None]) & ((1 << bits) - 1)).flatten(-3)


def _codes(blocks: torch.Tensor, plane: Plane) -> torch.Tensor:
    """The bits of a plane, uint8 [n, K]."""
    data = blocks[:, :, plane.at : plane.at + plane.size]
    return _planes(data, plane.width, plane.bits).flatten(1)


def _code_bits(bits: int, low_bits: int) -> list[int]:
    """The lowest bit of each code of a word of a plane of `bits`, next to one of `low_bits`."""
    columns, pairs = 32 // low_bits, 16 // low_bits
    return [
        bits * (pairs * (i // columns) + i % columns // 2) + 16 * (i % 2) for i in range(32 // bits)
    ]


def _words(codes: torch.Tensor, bits: int, low_bits: int) -> torch.Tensor:
    """uint8 [n, K] of `bits` bits as int32 [n, K * bits / 32]."""
    by_word = codes.unflatten(1, (-1, 32 // bits))
    words = by_word.new_zeros(by_word.shape[:2], dtype=torch.int32)
    for i, shift in enumerate(_code_bits(bits, low_bits)):
        words |= by_word[:, :, i].to(torch.int32) << shift
    return words


def _sub_scales(blocks: torch.Tensor, type_name: str) -> torch.Tensor:
    """The integers of `scaling`, uint8 [n, blocks, S]."""
    if type_name == "Q2_K":
        return blocks[:, :, 0:16]
    if type_name == "Q6_K":
        return blocks[:, :, 192:208]
    if type_name == "Q3_K":
        low, high = _planes(blocks[:, :, 96:104], 8, 4), _planes(blocks[:, :, 104:108], 4, 2)
    elif type_name == "IQ4_XS":
        low, high = _planes(blocks[:, :, 4:8], 1, 4), _planes(blocks[:, :, 2:4], 1, 2)
    else:  # Q4_K and Q5_K: scales and minimums, of four sub-blocks and of the other four
        first, second, third = (blocks[:, :, i : i + 4] for i in (4, 8, 12))
        low = torch.stack(
            [torch.cat([first & 15, third & 15], -1), torch.cat([second & 15, third >> 4], -1)], -1
        ).flatten(-2)
        high = torch.stack(
            [
                torch.cat([(first >> 4) & 3, first >> 6], -1),
                torch.cat([(second >> 4) & 3, second >> 6], -1),
            ],
            -1,
        ).flatten(-2)
    pairs, quads = low.unflatten(-1, (-1, 2)), high.unflatten(-1, (-1, 4))
    return torch.cat(
        [
            pairs[..., 0] | pairs[..., 1] << 4,
            quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6,
        ],
        -1,
    )


def unpack_blocks(
    weight: GpuBlocks,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes int8 [N, K], scale and minimum float32 [N, K / sub], as
    `tilewright.formats.block_type.BlockCodes` holds them; for checks only."""
    form, kind = weight.form, BLOCK_TYPES[weight.type_name]
    codes = _unpacked(weight.low, form.low.bits, form.low.bits)
    if weight.high is not None:
        codes += _unpacked(weight.high, form.high_bits, form.low.bits) << form.low.bits
    if form.codes in ("iq4", "fp4"):
        table = torch.from_numpy(IQ4_TABLE if form.codes == "iq4" else MXFP4_TABLE)
        codes = table.to(codes.device)[codes.long()].int()
    codes = codes.to(torch.int8) if form.codes == "signed" else (codes - form.offset).to(torch.int8)
    if form.scaling == "exponent":
        scale = torch.exp2(weight.scales.double() - 128).float()
        return codes, scale, None
    scale = weight.scales.float()
    minimum = None if weight.minimums is None else weight.minimums.float()
    if weight.sub_scales is None:
        return codes, scale, minimum
    packed = weight.sub_scales.unflatten(1, (-1, form.sub_bytes))
    if form.scaling == "bytes":
        numbers, others = packed.contiguous().view(torch.int8), None
    elif form.scaling == "nibbles":
        numbers, others = packed & 15, packed >> 4
    else:
        count = form.sub_bytes * 4 // 3
        six = _planes(packed[..., : count // 2], 1, 4)
        six = six | _planes(packed[..., count // 2 :], 1, 2) << 4
        numbers, others = six, None
        if minimum is not None:
            numbers, others = six[..., 0::2], six[..., 1::2]
    scale = (scale[..., None] * (numbers.float() - form.sub_offset)).flatten(1)
    if minimum is not None and others is not None:
        minimum = -(minimum[..., None] * others.float()).flatten(1)
    assert scale.shape[1] == weight.K // kind.sub
    return codes, scale, minimum


def _unpacked(words: torch.Tensor, bits: int, low_bits: int) -> torch.Tensor:
    shifts = torch.tensor(_code_bits(bits, low_bits), dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)
