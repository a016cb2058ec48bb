"""Matrix instructions of a wave: WMMA of RDNA3 and RDNA4, MFMA of CDNA.

Floats are multiplied in float64 and rounded once to float32. The hardware adds the products in
float32 in an order of its own, so low bits may differ from a chip's. 8-bit integers are exact.

Where an element lies, for A [M, K], B [K, N] and D [M, N]:

::

    MFMA, and WMMA on gfx12    A, B   lane l, element j:   row or column l % M, k = e (l / M) + j
                                      with e elements a lane
    WMMA on gfx11              A, B   lane l, element j:   row or column l % 16, k = j
                                      (lanes 16 .. 31 must repeat lanes 0 .. 15)
    MFMA                       D      lane l, register r:  n = l % N,
                                      m = 4 (64 / N) (r / 4) + 4 (l / N) + r % 4
    WMMA on gfx11              D      lane l, register r:  n = l % 16, m = 2 r + l / 16
    WMMA on gfx12              D      lane l, register r:  n = l % 16, m = 8 (l / 16) + r
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.errors import GateError
from tilewright.isa.emulate_arith import halves_of
from tilewright.isa.emulate_operands import Array, raw_reader
from tilewright.isa.emulate_state import Wave
from tilewright.isa.emulate_text import Instruction, Operand

__all__ = ["compile_matrix"]

Run = Callable[[Wave], None]

_MFMA = re.compile(r"v_mfma_[fi]32_(\d+)x(\d+)x(\d+)_?(f16|bf16_1k|bf16|f32|xf32|i8)$")
_WMMA = re.compile(r"v_wmma_[fi]32_16x16x16_(f16|bf16|iu8)(_w32)?$")
_PER_REGISTER = {"f32": 1, "xf32": 1, "f16": 2, "bf16": 2, "i8": 4, "iu8": 4}


@dataclass(frozen=True)
class _Form:
    """One instruction's matrices.

    Attributes:
        size, k: of A [size, k], B [k, size] and D [size, size].
        kind: of the elements.
        at_k: [elements a lane, lanes] where each element of A and B lies in K.
        at_m: [registers, lanes] the rows of D.
        repeats: the upper half of the wave repeats the lower in A and B.
    """

    size: int
    k: int
    kind: str
    at_k: Array
    at_m: Array
    repeats: bool


def compile_matrix(ins: Instruction, lanes: int) -> Run | None:
    """The function of one matrix instruction; None if it is none."""
    if not ins.mnemonic.startswith(("v_wmma_", "v_mfma_")):
        return None
    form = _mfma(ins, lanes) or _wmma(ins, lanes)
    if form is None:
        return None
    target, a, b, c = ins.operands
    whole = form.kind in ("i8", "iu8")
    minus = ins.pair("neg_lo", (0, 0, 0))
    if any(n in ins.modifiers for n in ("neg_hi", "op_sel", "neg", "abid", "clamp")) or (
        any(minus) and form.kind != "iu8"
    ):
        raise ins.refuse("modifiers of a matrix operand")
    kinds = (
        ["i8" if sign else "u8" for sign in minus[:2]] if form.kind == "iu8" else [form.kind] * 2
    )
    read_a, read_b = (_elements(ins, op, kind) for op, kind in zip((a, b), kinds, strict=True))
    read_c = _addend(ins, c, lanes, np.int32 if whole else np.float32)
    at_k, at_m, lane = form.at_k, form.at_m, np.arange(lanes)
    row = np.broadcast_to(lane % form.size, at_k.shape)
    column = np.broadcast_to(lane % form.size, at_m.shape)
    first = target.index

    def run(w: Wave) -> None:
        if form.repeats:
            _check_repeats(w, (a, b))
        left, right = (np.empty((form.size, form.k)) for _ in range(2))
        left[row, at_k], right[row, at_k] = read_a(w), read_b(w)
        total = (left @ right.T)[at_m, column] + read_c(w)
        if whole:
            words = (total.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
        else:
            words = total.astype(np.float32).view(np.uint32)
        w.v[first : first + len(words)] = words

    return run


def _mfma(ins: Instruction, lanes: int) -> _Form | None:
    match = _MFMA.match(ins.mnemonic)
    if match is None:
        return None
    m, n, k = (int(x) for x in match.group(1, 2, 3))
    kind = match.group(4).removesuffix("_1k")
    target, a = ins.operands[0], ins.operands[1]
    each = a.count * _PER_REGISTER[kind]
    if each * lanes != m * k or m != n or target.count * lanes != m * n:
        raise ins.refuse("this form multiplies several blocks at once")
    if int(ins.modifiers.get("cbsz", "0")) or int(ins.modifiers.get("blgp", "0")):
        raise ins.refuse("broadcast modifiers")
    lane, r = np.arange(lanes), np.arange(target.count)[:, None]
    at_k = each * (lane // m) + np.arange(each)[:, None]
    at_m = 4 * (lanes // n) * (r // 4) + 4 * (lane // n) + r % 4
    return _Form(m, k, kind, at_k, at_m, False)


def _wmma(ins: Instruction, lanes: int) -> _Form | None:
    match = _WMMA.match(ins.mnemonic)
    if match is None:
        return None
    if lanes != 32:
        raise ins.refuse("waves of 64 lanes")
    kind = match.group(1)
    each = ins.operands[1].count * _PER_REGISTER[kind]
    lane, j, r = np.arange(32), np.arange(each)[:, None], np.arange(8)[:, None]
    if each == 16:  # gfx11
        return _Form(16, 16, kind, j + 0 * lane, 2 * r + lane // 16, True)
    if each != 8:
        raise ins.refuse(f"{each} elements a lane")
    return _Form(16, 16, kind, each * (lane // 16) + j, 8 * (lane // 16) + r, False)


def _elements(ins: Instruction, op: Operand, kind: str) -> Callable[[Wave], Array]:
    """A matrix operand's registers as float64 [elements a lane, lanes]."""
    if op.kind != "v":
        raise ins.refuse(f"a matrix in {op.text!r}")
    first, last = op.index, op.index + op.count

    def read(w: Wave) -> Array:
        words = w.v[first:last]
        if kind == "f32":
            return words.view(np.float32).astype(np.float64)
        if kind == "xf32":  # the mantissa is rounded to 10 bits
            up = words + np.uint32(0xFFF) + (words >> np.uint32(13) & np.uint32(1))
            return (up & ~np.uint32(0x1FFF)).view(np.float32).astype(np.float64)
        count, lanes = words.shape
        if kind in ("i8", "u8"):
            raw = np.ascontiguousarray(words).view(np.int8 if kind == "i8" else np.uint8)
            return raw.reshape(count, lanes, 4).swapaxes(1, 2).reshape(-1, lanes).astype(np.float64)
        low, high = halves_of(words.reshape(-1), kind)
        return np.stack([low, high]).reshape(2, count, lanes).swapaxes(0, 1).reshape(-1, lanes)

    return read


def _addend(
    ins: Instruction, op: Operand, lanes: int, dtype: type[np.int32] | type[np.float32]
) -> Callable[[Wave], Array]:
    """C, or a constant for all of it, as float64."""
    if op.kind == "v":
        first, last = op.index, op.index + op.count
        return lambda w: w.v[first:last].view(dtype).astype(np.float64)
    start = raw_reader(ins, op, 32, lanes)
    return lambda w: start(w).view(dtype).astype(np.float64)


def _check_repeats(w: Wave, operands: tuple[Operand, ...]) -> None:
    if not w.full:
        raise GateError("v_wmma with lanes switched off: its result is undefined")
    for op in operands:
        words = w.v[op.index : op.index + op.count]
        if (words[:, :16] != words[:, 16:]).any():
            raise GateError(
                f"v_wmma on gfx11 needs lanes 16 .. 31 to repeat lanes 0 .. 15 in {op.text}"
            )
