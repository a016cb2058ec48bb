"""Vector instructions as functions of a wave: encodings, lane movement, masks and carries.

The arithmetic itself is in `emulate_arith`. Here an instruction's encoding decides how sources are
read and the result written: VOP3's op_sel, clamp and output scale; SDWA's parts of registers;
DPP's lanes; RDNA3's dual issue, where both halves read before either writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.isa.emulate_arith import COMPARISONS, OPERATIONS, fma
from tilewright.isa.emulate_lanes import LANE_MOVES, dpp_lanes
from tilewright.isa.emulate_operands import (
    TYPES,
    Array,
    Reader,
    Writer,
    mask_reader,
    mask_writer,
    reader,
    writer,
)
from tilewright.isa.emulate_state import SPARE_ROW, Wave
from tilewright.isa.emulate_text import EXEC, VCC, Instruction, Operand

__all__ = ["Run", "base_name", "compile_vector"]

Run = Callable[[Wave], None]

_SUFFIX = re.compile(r"(_e32|_e64|_dpp8|_dpp|_sdwa)+$")
_VCC = Operand("s", "vcc", VCC, 2)
_EXEC = Operand("s", "exec", EXEC, 2)
_ACCUMULATING = {
    "v_fmac_": "v_fma_",
    "v_mac_": "v_fma_",
    "v_dot2acc_": "v_dot2_",
    "v_dot2c_": "v_dot2_",
}


def base_name(mnemonic: str) -> str:
    """A mnemonic without the suffix of its encoding."""
    name = _SUFFIX.sub("", mnemonic)
    return name.replace("v_dual_", "v_", 1)


def compile_vector(ins: Instruction, lanes: int, legacy: bool) -> Run | None:
    """The function of one vector instruction; None if it is none that this module knows.

    Args:
        lanes: of a wave.
        legacy: gfx9, where most results of 16 bits clear the upper half of their register.
    """
    if ins.second is not None:
        first, second = (_arithmetic(part, lanes, legacy) for part in (ins, ins.second))
        if first is None or second is None:
            return None
        (compute_x, write_x), (compute_y, write_y) = first, second

        def dual(w: Wave) -> None:
            x, y = compute_x(w), compute_y(w)
            write_x(w, x)
            write_y(w, y)

        return dual
    if ins.mnemonic.endswith(("_dpp", "_dpp8")):
        return _dpp(ins, lanes, legacy)
    return _plain(ins, lanes, legacy)


def _plain(ins: Instruction, lanes: int, legacy: bool) -> Run | None:
    name = base_name(ins.mnemonic)
    if name in _SPECIAL:
        return _SPECIAL[name](ins, lanes)
    if name.startswith("v_cmp"):
        return _compare(ins, name, lanes)
    found = _arithmetic(ins, lanes, legacy)
    if found is None:
        return None
    compute, write = found
    return lambda w: write(w, compute(w))


def _arithmetic(ins: Instruction, lanes: int, legacy: bool) -> tuple[Reader, Writer] | None:
    """(compute, write) of an operation with one result."""
    name = base_name(ins.mnemonic)
    if name in ("v_cndmask_b32", "v_cndmask_b16"):
        kind = "u32" if name.endswith("32") else "u16"
        return _select(ins, kind, lanes), _result(ins, kind, legacy)
    sources = ins.operands[1:]
    for accumulating, plain in _ACCUMULATING.items():
        if name.startswith(accumulating):
            name, sources = name.replace(accumulating, plain, 1), (*sources, ins.operands[0])
    if name not in OPERATIONS:
        return None
    kind, kinds, function = OPERATIONS[name]
    if len(sources) != len(kinds):
        raise ins.refuse(f"{len(sources)} sources, expected {len(kinds)}")
    sel = ins.pair("op_sel", (0,) * (len(kinds) + 1))
    parts = [ins.modifiers.get(f"src{n}_sel", "") for n in range(len(kinds))]
    reads = [
        reader(ins, op, source, lanes, high=bool(sel[n]), selected=parts[n])
        for n, (op, source) in enumerate(zip(sources, kinds, strict=True))
    ]
    compute = _call(function, reads)
    write = _result(ins, kind, legacy, high=bool(sel[len(kinds)]), three=len(kinds) == 3)
    return _scaled(ins, kind, name, compute, reads), write


def _call(function: Callable[..., Array], reads: list[Reader]) -> Reader:
    if len(reads) == 1:
        (a,) = reads
        return lambda w: function(a(w))
    if len(reads) == 2:
        a, b = reads
        return lambda w: function(a(w), b(w))
    a, b, c = reads
    return lambda w: function(a(w), b(w), c(w))


def _scaled(ins: Instruction, kind: str, name: str, compute: Reader, reads: list[Reader]) -> Reader:
    """Output scale and clamp."""
    factor = {"mul:2": 2, "mul:4": 4, "div:2": 0.5}
    scale = next((f for n, f in factor.items() if ins.modifiers.get(n[:3]) == n[4:]), None)
    dtype = TYPES[kind][1]
    if scale is not None:
        inner, by = compute, dtype(scale)
        compute = lambda w: inner(w) * by  # noqa: E731
    if "clamp" not in ins.modifiers:
        return compute
    bare = compute
    if kind[0] == "f":
        return lambda w: np.clip(np.nan_to_num(bare(w), nan=0.0), dtype(0), dtype(1))
    if name in ("v_sub_u32", "v_sub_nc_u32", "v_sub_u16", "v_sub_nc_u16"):
        a, b = reads
        return lambda w: np.where(a(w) < b(w), dtype(0), bare(w))
    if name in ("v_add_u32", "v_add_nc_u32", "v_add_u16", "v_add_nc_u16"):
        a, _ = reads
        return lambda w: np.where(bare(w) < a(w), dtype(np.iinfo(dtype).max), bare(w))
    raise ins.refuse("clamp of this integer operation")


def _result(
    ins: Instruction, kind: str, legacy: bool, high: bool = False, three: bool = False
) -> Writer:
    selected = ins.modifiers.get("dst_sel", "DWORD")
    if selected != "DWORD":
        return _write_part(ins, kind, selected)
    return writer(ins, ins.operands[0], kind, high=high, keep=high or three or not legacy)


def _write_part(ins: Instruction, kind: str, selected: str) -> Writer:
    """SDWA: the low bits of the result go to one part of the register."""
    name, _, number = selected.partition("_")
    bits = {"BYTE": 8, "WORD": 16}[name]
    shift = np.uint32(bits * int(number))
    mask = np.uint32((1 << bits) - 1)
    unused = ins.modifiers.get("dst_unused", "UNUSED_PAD")
    if unused == "UNUSED_SEXT" or kind.endswith("64"):
        raise ins.refuse(f"dst_unused:{unused}")
    keep = np.uint32(0) if unused == "UNUSED_PAD" else ~(mask << shift)
    at = ins.operands[0].index
    word = TYPES[kind][1]

    def write(w: Wave, value: Array) -> None:
        raw = value.view(np.uint16 if np.dtype(word).itemsize == 2 else np.uint32)
        w.put(at, (raw.astype(np.uint32) & mask) << shift | w.v[at] & keep)

    return write


def _select(ins: Instruction, kind: str, lanes: int) -> Reader:
    """v_cndmask: the second source where the mask is set."""
    parts = [ins.modifiers.get(f"src{n}_sel", "") for n in range(2)]
    a, b = (
        reader(ins, op, kind, lanes, selected=parts[n]) for n, op in enumerate(ins.operands[1:3])
    )
    mask = mask_reader(ins, ins.operands[3] if len(ins.operands) > 3 else _VCC, lanes)
    return lambda w: np.where(mask(w), b(w), a(w))


def _compare(ins: Instruction, name: str, lanes: int) -> Run:
    _, verb, how, kind = (name.split("_", 3) + ["", ""])[:4]
    operands = list(ins.operands)
    to_exec = verb == "cmpx"
    targets = [_EXEC] if to_exec else []
    if len(operands) == 3:
        targets.append(operands.pop(0))
    writes = [mask_writer(ins, t) for t in targets]
    if how == "class":
        decide = _class(ins, operands, kind, lanes)
    elif how in COMPARISONS and kind in TYPES:
        sel = ins.pair("op_sel", (0, 0))
        a, b = (
            reader(
                ins, op, kind, lanes, high=bool(sel[n]),
                selected=ins.modifiers.get(f"src{n}_sel", ""),
            )
            for n, op in enumerate(operands)
        )  # fmt: skip
        function = COMPARISONS[how]
        decide = lambda w: function(a(w), b(w))  # noqa: E731
    else:
        raise ins.refuse("no such comparison")

    def run(w: Wave) -> None:
        value = decide(w) & w.mask
        for write in writes:
            write(w, value)

    return run


def _class(ins: Instruction, operands: list[Operand], kind: str, lanes: int) -> Reader:
    """Whether a float is of one of the ten classes that a bit mask lists."""
    value, wanted = reader(ins, operands[0], kind, lanes), reader(ins, operands[1], "u32", lanes)

    def decide(w: Wave) -> Array:
        a, bits = value(w), wanted(w)
        negative, size = np.signbit(a), np.abs(a)
        rank = np.where(size == 0, 0, np.where(size < np.finfo(a.dtype).tiny, 1, 2))
        rank = np.where(np.isinf(a), 3, rank)
        at = np.where(negative, 5 - rank, 6 + rank)
        at = np.where(np.isnan(a), 1, at).astype(np.uint32)
        signalling = np.isnan(a) & (bits & np.uint32(1) != 0)
        return (bits >> at & np.uint32(1)).astype(bool) | signalling

    return decide


def _dpp(ins: Instruction, lanes: int, legacy: bool) -> Run | None:
    """Source 0 comes from another lane; lanes that have none, or are masked, keep their result."""
    source, valid = dpp_lanes(ins, lanes)
    lane = np.arange(lanes)
    rows = int(ins.modifiers.get("row_mask", "0xf"), 0) >> (lane // 16) & 1
    banks = int(ins.modifiers.get("bank_mask", "0xf"), 0) >> (lane % 16 // 4) & 1
    allowed = (rows & banks).astype(bool)
    zero = ins.modifiers.get("bound_ctrl") in ("1", "0")
    inactive_too = ins.modifiers.get("fi") == "1"
    place = 1 if not ins.mnemonic.startswith("v_cmp") else len(ins.operands) - 2
    moved = ins.operands[place]
    if moved.kind != "v":
        raise ins.refuse(f"lanes of {moved.text!r}")
    spare = replace(moved, index=SPARE_ROW)
    operands = (*ins.operands[:place], spare, *ins.operands[place + 1 :])
    inner = _plain(replace(ins, operands=operands), lanes, legacy)
    if inner is None:
        return None
    at = moved.index

    def run(w: Wave) -> None:
        mask = w.mask
        good = valid if inactive_too else valid & mask[source]
        w.v[SPARE_ROW] = np.where(good, w.v[at][source], np.uint32(0))
        with w.narrowed(allowed if zero else allowed & good):
            inner(w)

    return run


def _carry(ins: Instruction, lanes: int) -> Run:
    """Additions and subtractions with a carry out, and perhaps one in."""
    name = base_name(ins.mnemonic)
    target, carry, *sources = ins.operands
    if "subrev" in name or "subbrev" in name:
        sources[0], sources[1] = sources[1], sources[0]
    a, b = (reader(ins, op, "u32", lanes) for op in sources[:2])
    carry_in = mask_reader(ins, sources[2], lanes) if len(sources) > 2 else None
    write, write_carry = writer(ins, target, "u32"), mask_writer(ins, carry)
    subtract = "sub" in name

    def run(w: Wave) -> None:
        x, y = a(w).astype(np.int64), b(w).astype(np.int64)
        extra = 0 if carry_in is None else carry_in(w).astype(np.int64)
        total = x - y - extra if subtract else x + y + extra
        write_carry(w, (total < 0) | (total >> 32 > 0))
        write(w, (total & 0xFFFFFFFF).astype(np.uint32))

    return run


def _wide_multiply(ins: Instruction, lanes: int) -> Run:
    """64-bit a * b + c of 32-bit a and b."""
    kind = "i" if "_i64_" in ins.mnemonic else "u"
    target, *rest = ins.operands
    carry = rest.pop(0) if len(rest) == 4 else None
    a, b = (reader(ins, op, f"{kind}32", lanes) for op in rest[:2])
    c = reader(ins, rest[2], f"{kind}64", lanes)
    write = writer(ins, target, f"{kind}64")
    write_carry = None if carry is None else mask_writer(ins, carry)
    wide = np.int64 if kind == "i" else np.uint64

    def run(w: Wave) -> None:
        product = a(w).astype(wide) * b(w).astype(wide)
        total = product + c(w)
        if write_carry is not None:
            write_carry(w, total < product)
        write(w, total)

    return run


def _division_scale(ins: Instruction, lanes: int) -> Run:
    """v_div_scale_f32: one operand of a division, scaled so that no step over- or underflows."""
    target, flag, *sources = ins.operands
    s0, s1, s2 = (reader(ins, op, "f32", lanes) for op in sources)
    write, write_flag = writer(ins, target, "f32"), mask_writer(ins, flag)

    def run(w: Wave) -> None:
        a, d, n = s0(w), s1(w), s2(w)
        tiny = np.finfo(np.float32).tiny
        exponent = [x.view(np.uint32).astype(np.int64) >> 23 & 255 for x in (d, n)]
        inverse_small = np.abs(1.0 / d.astype(np.float64)) < np.finfo(np.float64).tiny
        quotient_small = (np.abs(n / d) < tiny) & (n != 0)
        up, down = (np.ldexp(a, e) for e in (64, -64))
        far = exponent[1] - exponent[0] >= 96
        out = np.where(exponent[1] <= 23, up, a)
        out = np.where(quotient_small, np.where(a == n, up, a), out)
        out = np.where(inverse_small, down, out)
        out = np.where((np.abs(d) < tiny), up, out)
        out = np.where(far, np.where(a == d, up, a), out)
        zero = (n == 0) | (d == 0)
        out = np.where(zero, np.float32(np.nan), out).astype(np.float32)
        write_flag(w, ~zero & (far | quotient_small & ~(np.abs(d) < tiny) & ~inverse_small))
        write(w, out)

    return run


def _division_fma(ins: Instruction, lanes: int) -> Run:
    """v_div_fmas_f32: a fused multiply-add that undoes the scaling where vcc says so."""
    target, *sources = ins.operands
    a, b, c = (reader(ins, op, "f32", lanes) for op in sources)
    scaled, write = mask_reader(ins, _VCC, lanes), writer(ins, target, "f32")

    def run(w: Wave) -> None:
        z = c(w)
        value = fma(a(w), b(w), z)
        large = (z.view(np.uint32) >> np.uint32(23) & np.uint32(0xFF)) > 127
        undone = np.ldexp(value, np.where(large, 64, -64))
        write(w, np.where(scaled(w), undone, value).astype(np.float32))

    return run


_SPECIAL: dict[str, Any] = {
    **{
        f"v_{name}": _carry
        for name in (
            "add_co_u32 sub_co_u32 subrev_co_u32 addc_co_u32 subb_co_u32 subbrev_co_u32"
            " add_co_ci_u32 sub_co_ci_u32 subrev_co_ci_u32"
        ).split()
    },
    **{
        f"v_{name}": _wide_multiply
        for name in (
            "mad_u64_u32 mad_i64_i32 mad_co_u64_u32 mad_co_i64_i32 mad_nc_u64_u32 mad_nc_i64_i32"
        ).split()
    },
    "v_div_scale_f32": _division_scale,
    "v_div_fmas_f32": _division_fma,
    **LANE_MOVES,
    "v_nop": lambda ins, lanes: lambda w: None,
}
