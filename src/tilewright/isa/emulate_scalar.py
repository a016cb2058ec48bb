"""Scalar instructions as functions of a wave: integer arithmetic, lane masks, branches.

Scalar registers are Python integers, so each function below is the instruction's formula, and its
second result, where there is one, the scalar condition bit (scc).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from tilewright.isa.emulate_scalar_float import SCALAR_FLOATS, Result, to_float
from tilewright.isa.emulate_state import Wave
from tilewright.isa.emulate_text import EXEC, NULL, VCC, Instruction, Operand

__all__ = ["NO_EFFECT", "compile_scalar", "scalar_reader", "signed"]

Run = Callable[[Wave], None]
ScalarReader = Callable[[Wave], int]

NO_EFFECT = frozenset(
    "s_nop s_waitcnt s_waitcnt_depctr s_waitcnt_vscnt s_waitcnt_vmcnt s_waitcnt_lgkmcnt"
    " s_waitcnt_expcnt s_wait_alu s_wait_loadcnt s_wait_storecnt s_wait_dscnt s_wait_kmcnt"
    " s_wait_samplecnt s_wait_bvhcnt s_wait_expcnt s_wait_loadcnt_dscnt s_wait_storecnt_dscnt"
    " s_wait_idle s_wait_event s_delay_alu s_clause s_setprio s_sleep s_sendmsg s_code_end"
    " s_inst_prefetch s_set_inst_prefetch_distance s_icache_inv s_dcache_inv s_dcache_wb"
    " s_barrier_signal s_prefetch_inst s_prefetch_inst_pc_rel s_prefetch_data s_setkill s_version"
    " buffer_gl0_inv buffer_gl1_inv buffer_wbl2 buffer_inv buffer_invl2 buffer_wbinvl1"
    " buffer_wbinvl1_vol buffer_wbinvl1_sc global_inv global_wb global_wbinv"
    " s_ttracedata s_ttracedata_imm".split()
)
"""What orders or hints and computes nothing: the emulator is in order, every access completes."""


def signed(value: int, bits: int = 32) -> int:
    """The lowest bits as a signed number."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def scalar_reader(ins: Instruction, op: Operand, bits: int = 32) -> ScalarReader:
    """A scalar source as an unsigned number of 32 or 64 bits."""
    at = op.index
    if op.kind == "s":
        if at == NULL:
            return lambda w: 0
        if bits == 64:
            return lambda w: w.s[at] | w.s[at + 1] << 32
        return lambda w: w.s[at]
    if op.text in ("scc", "src_scc"):
        return lambda w: w.scc
    if op.text in ("vccz", "src_vccz"):
        return lambda w: int(w.bits(VCC) == 0)
    if op.text in ("execz", "src_execz"):
        return lambda w: int(w.bits(EXEC) == 0)
    if op.kind in ("int", "float"):
        value = int(op.value) & ((1 << bits) - 1) if op.kind == "int" else op.bits32
        return lambda w: value
    raise ins.refuse(f"operand {op.text!r} is not known")


def compile_scalar(ins: Instruction, labels: dict[str, int]) -> Run | None:
    """The function of one scalar instruction; None if it is none that this module knows."""
    name = ins.mnemonic
    if name in NO_EFFECT:
        return lambda w: None
    if name == "s_denorm_mode" and ins.operands[0].value == 15:
        return lambda w: None  # denormals are kept, which is all that there is here
    if name == "s_branch" or name.startswith("s_cbranch_"):
        return _branch(ins, labels)
    if "_saveexec_b" in name:
        return _save_exec(ins)
    if name.startswith(("s_cmp_", "s_cmpk_", "s_bitcmp")):
        return _compare(ins)
    if name.startswith("s_cselect_b"):
        bits = int(name[-2:])
        a, b = (scalar_reader(ins, op, bits) for op in ins.operands[1:])
        put = _target(ins, bits)
        return lambda w: put(w, a(w) if w.scc else b(w))
    if name in ("s_cmov_b32", "s_cmov_b64", "s_cmovk_i32"):
        bits = 64 if name.endswith("64") else 32
        put, value = _target(ins, bits), scalar_reader(ins, ins.operands[1], bits)
        return lambda w: put(w, value(w)) if w.scc else None
    if name not in _TABLE:
        return None
    bits, sources_bits, function = _TABLE[name]
    put = _target(ins, bits)
    sources = ins.operands[1:]
    if name in _ON_ITSELF:
        sources = (ins.operands[0], *sources)
    if len(sources) != len(sources_bits):
        raise ins.refuse(f"{len(sources)} sources, expected {len(sources_bits)}")
    reads = [scalar_reader(ins, op, n) for op, n in zip(sources, sources_bits, strict=True)]
    takes_scc = name in _WITH_CARRY

    def run(w: Wave) -> None:
        values = [read(w) for read in reads]
        value, scc = function(*values, w.scc) if takes_scc else function(*values)
        put(w, value)
        if scc is not None:
            w.scc = int(scc)

    return run


def _target(ins: Instruction, bits: int) -> Callable[[Wave, int], None]:
    op = ins.operands[0]
    if op.kind != "s":
        raise ins.refuse(f"a scalar result in {op.text!r}")
    at = op.index
    if at == NULL:
        return lambda w, value: None
    if bits == 64:
        return lambda w, value: w.set64(at, value)
    return lambda w, value: w.set(at, value)


def _branch(ins: Instruction, labels: dict[str, int]) -> Run:
    target = labels.get(ins.operands[0].text)
    if target is None:
        raise ins.refuse("the label is not in this kernel")
    conditions: dict[str, Callable[[Wave], bool]] = {
        "s_branch": lambda w: True,
        "s_cbranch_scc0": lambda w: not w.scc,
        "s_cbranch_scc1": lambda w: bool(w.scc),
        "s_cbranch_vccz": lambda w: w.bits(VCC) == 0,
        "s_cbranch_vccnz": lambda w: w.bits(VCC) != 0,
        "s_cbranch_execz": lambda w: w.bits(EXEC) == 0,
        "s_cbranch_execnz": lambda w: w.bits(EXEC) != 0,
    }
    taken = conditions.get(ins.mnemonic)
    if taken is None:
        raise ins.refuse("no such branch")
    to: int = target

    def run(w: Wave) -> None:
        if taken(w):
            w.pc = to

    return run


def _save_exec(ins: Instruction) -> Run:
    """The old exec is kept; the new one is exec combined with the source."""
    verb, bits = ins.mnemonic[2:].split("_saveexec_b")
    width = int(bits)
    source, put = scalar_reader(ins, ins.operands[1], width), _target(ins, width)
    everything = (1 << width) - 1
    combine: dict[str, Callable[[int, int], int]] = {
        "and": lambda s, e: s & e,
        "or": lambda s, e: s | e,
        "xor": lambda s, e: s ^ e,
        "andn2": lambda s, e: s & ~e,
        "and_not1": lambda s, e: s & ~e,
        "andn1": lambda s, e: ~s & e,
        "and_not0": lambda s, e: ~s & e,
        "orn2": lambda s, e: s | ~e,
        "or_not1": lambda s, e: s | ~e,
        "orn1": lambda s, e: ~s | e,
        "or_not0": lambda s, e: ~s | e,
        "nand": lambda s, e: ~(s & e),
        "nor": lambda s, e: ~(s | e),
        "xnor": lambda s, e: ~(s ^ e),
    }
    if verb not in combine:
        raise ins.refuse("no such operation")
    function = combine[verb]

    def run(w: Wave) -> None:
        value, before = source(w), w.bits(EXEC)
        put(w, before)
        after = function(value, before) & everything
        w.set_bits(EXEC, after)
        w.scc = int(after != 0)

    return run


_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "ne": lambda a, b: a != b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "neq": lambda a, b: a != b, "nlt": lambda a, b: not a < b,
    "nle": lambda a, b: not a <= b, "ngt": lambda a, b: not a > b, "nge": lambda a, b: not a >= b,
    "o": lambda a, b: not (math.isnan(a) or math.isnan(b)),
    "u": lambda a, b: math.isnan(a) or math.isnan(b),
}  # fmt: skip


def _compare(ins: Instruction) -> Run:
    name = ins.mnemonic
    if name.startswith("s_bitcmp"):
        bits, wanted = int(name[-2:]), int(name[8])
        value, at = scalar_reader(ins, ins.operands[0], bits), scalar_reader(ins, ins.operands[1])

        def test(w: Wave) -> None:
            w.scc = int((value(w) >> (at(w) & (bits - 1)) & 1) == wanted)

        return test
    _, verb, how, kind = name.split("_")
    bits = int(kind[1:])
    if how not in _ORDER or kind not in ("i32", "u32", "u64", "f32"):
        raise ins.refuse("no such comparison")
    a, b = (scalar_reader(ins, op, bits) for op in ins.operands)
    if verb == "cmpk" and kind == "i32":
        constant = signed(int(ins.operands[1].value), 16)
        b = lambda w: constant  # noqa: E731
    order = _ORDER[how]
    views: dict[str, Callable[[int], Any]] = {"i": signed, "u": int, "f": to_float}
    see = views[kind[0]]

    def run(w: Wave) -> None:
        w.scc = int(order(see(a(w)), see(b(w))))

    return run


def _add(a: int, b: int) -> Result:
    return a + b, a + b >> 32


def _signed_sum(sign: int) -> Callable[[int, int], Result]:
    def add(a: int, b: int) -> Result:
        total = signed(a) + sign * signed(b)
        return total, not -(2**31) <= total < 2**31

    return add


def _extract(bits: int, is_signed: bool) -> Callable[[int, int], Result]:
    def extract(a: int, field: int) -> Result:
        offset, width = field & (bits - 1), field >> 16 & 0x7F
        value = a >> offset & ((1 << width) - 1)
        if is_signed and width:
            value = signed(signed(a, bits) >> offset, width)
        return value, value != 0

    return extract


def _shifted(bits: int, shift: Callable[[int, int], int]) -> Callable[[int, int], Result]:
    def run(a: int, n: int) -> Result:
        value = shift(a, n & (bits - 1)) & ((1 << bits) - 1)
        return value, value != 0

    return run


def _arithmetic_shift(bits: int) -> Callable[[int, int], int]:
    return lambda a, n: signed(a, bits) >> n


def _choose(first: Callable[[int, int], bool], see: Callable[[int], int]) -> Callable[..., Result]:
    """The first source where `first` of both holds, which scc says; else the second."""

    def choose(a: int, b: int) -> Result:
        taken = first(see(a), see(b))
        return (a if taken else b), taken

    return choose


def _first_one(a: int) -> Result:
    return ((a & -a).bit_length() - 1 if a else -1), None


def _leading(a: int) -> Result:
    return (32 - a.bit_length() if a else -1), None


def _tables() -> dict[str, tuple[int, tuple[int, ...], Callable[..., Result]]]:
    found: dict[str, tuple[int, tuple[int, ...], Callable[..., Result]]] = {}
    for bits in (32, 64):
        top = (1 << bits) - 1
        logic: dict[str, Callable[[int, int], int]] = {
            "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
            "andn2": lambda a, b: a & ~b, "and_not1": lambda a, b: a & ~b,
            "orn2": lambda a, b: a | ~b, "or_not1": lambda a, b: a | ~b,
            "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
            "xnor": lambda a, b: ~(a ^ b),
        }  # fmt: skip
        for name, f in logic.items():
            found[f"s_{name}_b{bits}"] = (
                bits, (bits, bits),
                lambda a, b, f=f, top=top: (f(a, b) & top, (f(a, b) & top) != 0),
            )  # fmt: skip
        shifts = {
            f"lshl_b{bits}": _shifted(bits, lambda a, n: a << n),
            f"lshr_b{bits}": _shifted(bits, lambda a, n: a >> n),
            f"ashr_i{bits}": _shifted(bits, _arithmetic_shift(bits)),
        }
        for name, shift in shifts.items():
            found[f"s_{name}"] = (bits, (bits, 32), shift)
        found |= {
            f"s_mov_b{bits}": (bits, (bits,), lambda a: (a, None)),
            f"s_not_b{bits}": (bits, (bits,), lambda a, top=top: (~a & top, (~a & top) != 0)),
            f"s_brev_b{bits}": (
                bits, (bits,), lambda a, bits=bits: (int(f"{a:0{bits}b}"[::-1], 2), None)
            ),
            f"s_bcnt1_i32_b{bits}": (32, (bits,), lambda a: (a.bit_count(), a != 0)),
            f"s_ff1_i32_b{bits}": (32, (bits,), _first_one),
            f"s_ctz_i32_b{bits}": (32, (bits,), _first_one),
            f"s_bfe_u{bits}": (bits, (bits, 32), _extract(bits, False)),
            f"s_bfe_i{bits}": (bits, (bits, 32), _extract(bits, True)),
            f"s_bfm_b{bits}": (
                bits, (32, 32),
                lambda n, at, bits=bits: (((1 << (n & bits - 1)) - 1) << (at & bits - 1), None),
            ),
        }  # fmt: skip
    two: dict[str, Callable[..., Result]] = {
        "add_u32": _add, "add_co_u32": _add,
        "sub_u32": lambda a, b: (a - b, a < b), "sub_co_u32": lambda a, b: (a - b, a < b),
        "add_i32": _signed_sum(1), "add_co_i32": _signed_sum(1),
        "sub_i32": _signed_sum(-1), "sub_co_i32": _signed_sum(-1),
        "min_u32": _choose(operator.lt, int), "max_u32": _choose(operator.ge, int),
        "min_i32": _choose(operator.lt, signed), "max_i32": _choose(operator.ge, signed),
        "mul_i32": lambda a, b: (a * b, None), "mul_hi_u32": lambda a, b: (a * b >> 32, None),
        "mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32, None),
        "absdiff_i32": lambda a, b: (
            abs(signed(a) - signed(b)), signed(a) != signed(b)
        ),
        "pack_ll_b32_b16": lambda a, b: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
        "pack_lh_b32_b16": lambda a, b: (a & 0xFFFF | b >> 16 << 16, None),
        "pack_hh_b32_b16": lambda a, b: (a >> 16 | b >> 16 << 16, None),
        "pack_hl_b32_b16": lambda a, b: (a >> 16 | (b & 0xFFFF) << 16, None),
    }  # fmt: skip
    for n in (1, 2, 3, 4):
        two[f"lshl{n}_add_u32"] = lambda a, b, n=n: ((a << n) + b, (a << n) + b >> 32 != 0)
    found |= {f"s_{name}": (32, (32, 32), f) for name, f in two.items()}
    one: dict[str, Callable[..., Result]] = {
        "abs_i32": lambda a: (abs(signed(a)), a != 0),
        "sext_i32_i8": lambda a: (signed(a, 8), None),
        "sext_i32_i16": lambda a: (signed(a, 16), None),
        "movk_i32": lambda a: (signed(a, 16), None),
        "flbit_i32_b32": _leading, "clz_i32_u32": _leading,
    }  # fmt: skip
    found |= {f"s_{name}": (32, (32,), f) for name, f in one.items()}

    def add_constant(a: int, b: int) -> Result:
        return _signed_sum(1)(a, signed(b, 16))

    found |= {
        "s_addk_i32": (32, (32, 32), add_constant),
        "s_addk_co_i32": (32, (32, 32), add_constant),
        "s_mulk_i32": (32, (32, 32), lambda a, b: (a * signed(b, 16), None)),
        "s_addc_u32": (32, (32, 32), lambda a, b, c: (a + b + c, a + b + c >> 32)),
        "s_add_co_ci_u32": (32, (32, 32), lambda a, b, c: (a + b + c, a + b + c >> 32)),
        "s_subb_u32": (32, (32, 32), lambda a, b, c: (a - b - c, a < b + c)),
        "s_sub_co_ci_u32": (32, (32, 32), lambda a, b, c: (a - b - c, a < b + c)),
        "s_mul_u64": (64, (64, 64), lambda a, b: (a * b, None)),
        "s_add_nc_u64": (64, (64, 64), lambda a, b: (a + b, None)),
        "s_sub_nc_u64": (64, (64, 64), lambda a, b: (a - b, None)),
        "s_bitset0_b32": (32, (32, 32), lambda a, n: (a & ~(1 << (n & 31)), None)),
        "s_bitset1_b32": (32, (32, 32), lambda a, n: (a | 1 << (n & 31), None)),
    }
    return found


_TABLE = _tables() | SCALAR_FLOATS
_ON_ITSELF = {
    "s_addk_i32",
    "s_addk_co_i32",
    "s_mulk_i32",
    "s_bitset0_b32",
    "s_bitset1_b32",
    "s_fmac_f32",
}
_WITH_CARRY = {"s_addc_u32", "s_add_co_ci_u32", "s_subb_u32", "s_sub_co_ci_u32"}
