"""Vectors of fixed width inside Numba functions.

Numba leaves vectorization to LLVM's loop passes, which neither keep a 4-bit unpack in registers nor
use the 8-bit dot instructions. These intrinsics put LLVM's own vector types into Numba code:
``f32x16``, ``i32x16``, ``i8x16`` ... are first-class values, and ``vadd(a, b)`` is one instruction
of LLVM IR. The IR is generic, so every CPU that LLVM knows runs it and gives the same numbers; a
16-lane value is one AVX-512 register, two AVX2 registers or four NEON registers. Only `dot4` and
`lookup16` have lowerings for particular instruction sets, each with a generic one beside it.

Addresses are int64 byte addresses. Loads and stores assume no alignment.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import types
from numba.core.extending import intrinsic, models, register_model

__all__ = [
    "CPU_FEATURES",
    "absolute",
    "add",
    "band",
    "bits16",
    "bor",
    "bxor",
    "call_int",
    "call_kernel",
    "call_void",
    "const_i8x16",
    "div",
    "dot4",
    "exp",
    "f32_from_bits",
    "flip_sign",
    "fma",
    "fmax",
    "has_avx512",
    "has_vnni",
    "load_f16",
    "load_f32",
    "load_f32x16",
    "load_i32x16",
    "load_i64",
    "load_i8",
    "load_i8x16",
    "load_u16",
    "load_u32",
    "load_u8",
    "lookup16",
    "max_f32",
    "mul",
    "round_i8",
    "shl_u8",
    "shr_u8",
    "splat_f32",
    "splat_i32",
    "splat_i8",
    "store_f32",
    "store_f32x16",
    "store_i32",
    "store_i32x16",
    "store_i8x16",
    "store_u8",
    "sub",
    "sum_f32",
    "sum_i8",
    "to_f32",
    "transpose16",
    "transpose4",
    "zeros_f32",
]


def _cpu_features() -> frozenset[str]:
    """The features Numba compiles for: the host's, or what NUMBA_CPU_FEATURES says."""
    from numba.core.registry import cpu_target

    flags = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(flag[1:] for flag in flags.split(",") if flag.startswith("+"))


CPU_FEATURES = _cpu_features()
_X86 = platform.machine().lower() in ("x86_64", "amd64")


def has_avx512() -> bool:
    """Whether 512-bit registers with byte operations are there."""
    return _X86 and {"avx512f", "avx512bw", "avx512vl"} <= CPU_FEATURES


def has_vnni() -> bool:
    """Whether the 512-bit 8-bit dot product (vpdpbusd) is there."""
    return has_avx512() and "avx512vnni" in CPU_FEATURES


class VecType(types.Type):
    """A vector of `lanes` numbers of an LLVM scalar type, such as f32x16."""

    def __init__(self, elem: str, lanes: int) -> None:
        self.elem = elem
        self.lanes = lanes
        super().__init__(name=f"{elem}x{lanes}")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(_SCALARS[self.elem], self.lanes)


_I8, _I16, _I32, _I64, _F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
)
_SCALARS: dict[str, Any] = {"i8": _I8, "i16": _I16, "i32": _I32, "f32": _F32}

f32x16 = VecType("f32", 16)
i32x16 = VecType("i32", 16)
i8x16 = VecType("i8", 16)
i8x64 = VecType("i8", 64)


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VecType) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


def _pointer(builder: Any, address: Any, elem: Any) -> Any:
    return builder.inttoptr(address, elem.as_pointer())


def _load(builder: Any, address: Any, elem: Any, align: int = 1) -> Any:
    value = builder.load(_pointer(builder, address, elem), typ=elem)
    value.align = align
    return value


def _store(builder: Any, address: Any, value: Any) -> Any:
    instruction = builder.store(value, _pointer(builder, address, value.type))
    instruction.align = 1
    return instruction


def _const(vec: ir.VectorType, value: float) -> ir.Constant:
    if isinstance(vec.element, ir.FloatType):
        value = float(np.float32(value))  # LLVM refuses constants that float32 cannot hold
    return ir.Constant(vec, [value] * vec.count)


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    vec = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vec, ir.Undefined), scalar, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vec, ir.Undefined), mask)


def _shuffle(builder: Any, a: Any, b: Any, indices: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(indices)), indices))


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def _vector_load(result: VecType) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _load(builder, args[0], result.llvm)

        return result(types.int64), codegen

    return load


load_f32x16 = _vector_load(f32x16)
load_i32x16 = _vector_load(i32x16)
load_i8x16 = _vector_load(i8x16)


def _scalar_load(elem: Any, result: Any, extend: str | None) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = _load(builder, args[0], elem)
            return getattr(builder, extend)(value, _I64) if extend else value

        return result(types.int64), codegen

    return load


load_u8 = _scalar_load(_I8, types.int64, "zext")
load_i8 = _scalar_load(_I8, types.int64, "sext")
load_u16 = _scalar_load(_I16, types.int64, "zext")
load_u32 = _scalar_load(_I32, types.int64, "zext")
load_i64 = _scalar_load(_I64, types.int64, None)
load_f32 = _scalar_load(_F32, types.float32, None)


@intrinsic
def load_f16(typingctx: Any, address: Any) -> Any:
    """One IEEE half at `address` as float32, exact, denormals included."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if "f16c" in CPU_FEATURES or not _X86:
            return builder.fpext(_load(builder, args[0], ir.HalfType()), _F32)
        # Without F16C: place exponent and mantissa, then multiply by 2^112 to rebias.
        half = builder.zext(_load(builder, args[0], _I16), _I32)
        magnitude = builder.shl(builder.and_(half, _I32(0x7FFF)), _I32(13))
        value = builder.fmul(builder.bitcast(magnitude, _F32), ir.Constant(_F32, 2.0**112))
        sign = builder.shl(builder.and_(half, _I32(0x8000)), _I32(16))
        return builder.bitcast(builder.or_(builder.bitcast(value, _I32), sign), _F32)

    return types.float32(types.int64), codegen


@intrinsic
def f32_from_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 whose bit pattern is the low half of `bits`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], _I32), _F32)

    return types.float32(types.int64), codegen


def _vector_store(vec: VecType) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _store(builder, args[0], args[1])
            return context.get_dummy_value()

        return types.void(types.int64, vec), codegen

    return store


store_f32x16 = _vector_store(f32x16)
store_i32x16 = _vector_store(i32x16)
store_i8x16 = _vector_store(i8x16)


@intrinsic
def store_f32(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(builder, args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def store_i32(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(builder, args[0], builder.trunc(args[1], _I32))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store_u8(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(builder, args[0], builder.trunc(args[1], _I8))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _make_splat(result: VecType, source: Any, narrow: bool) -> Any:
    @intrinsic
    def splat(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            scalar = builder.trunc(args[0], result.llvm.element) if narrow else args[0]
            return _splat(builder, scalar, result.lanes)

        return result(source), codegen

    return splat


splat_f32 = _make_splat(f32x16, types.float32, False)
splat_i32 = _make_splat(i32x16, types.int64, True)
splat_i8 = _make_splat(i8x16, types.int64, True)


@intrinsic
def zeros_f32(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _const(f32x16.llvm, 0.0)

    return f32x16(), codegen


def _binary(int_op: str, float_op: str = "") -> Any:
    @intrinsic
    def op(typingctx: Any, a: Any, b: Any) -> Any:
        if a != b or not isinstance(a, VecType) or (a.elem == "f32" and not float_op):
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return getattr(builder, float_op if a.elem == "f32" else int_op)(*args)

        return a(a, b), codegen

    return op


add = _binary("add", "fadd")
sub = _binary("sub", "fsub")
mul = _binary("mul", "fmul")
band = _binary("and_")
bor = _binary("or_")
bxor = _binary("xor")


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c on f32x16, rounded once where the CPU has the instruction."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _fma(builder, *args)

    return f32x16(f32x16, f32x16, f32x16), codegen


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    if _X86 and "fma" not in CPU_FEATURES:  # LLVM would call libm lane by lane
        return builder.fadd(builder.fmul(a, b), c)
    return _call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


@intrinsic
def shr_u8(typingctx: Any, a: Any, bits: Any) -> Any:
    """Logical shift right of each byte of an i8x16 by the same number of bits."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.lshr(args[0], _splat(builder, builder.trunc(args[1], _I8), 16))

    return i8x16(i8x16, types.int64), codegen


@intrinsic
def shl_u8(typingctx: Any, a: Any, bits: Any) -> Any:
    """Shift left of each byte of an i8x16 by the same number of bits."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.shl(args[0], _splat(builder, builder.trunc(args[1], _I8), 16))

    return i8x16(i8x16, types.int64), codegen


def const_i8x16(values: Sequence[int]) -> Any:
    """An intrinsic without arguments that returns these 16 signed bytes."""

    @intrinsic
    def constant(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(i8x16.llvm, list(values))

        return i8x16(), codegen

    return constant


@intrinsic
def to_f32(typingctx: Any, a: Any) -> Any:
    """i8x16 (signed) or i32x16 to f32x16; exact."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = args[0]
        if a.elem == "i8":
            value = builder.sext(value, i32x16.llvm)
        return builder.sitofp(value, f32x16.llvm)

    return f32x16(a), codegen


@intrinsic
def bits16(typingctx: Any, mask: Any, value: Any) -> Any:
    """An i8x16 whose lane j is `value` where bit j of `mask` is set, else 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.trunc(args[0], _I16), ir.VectorType(ir.IntType(1), 16))
        full = _splat(builder, builder.trunc(args[1], _I8), 16)
        return builder.select(lanes, full, _const(i8x16.llvm, 0))

    return i8x16(types.int64, types.int64), codegen


@intrinsic
def lookup16(typingctx: Any, table: Any, index: Any) -> Any:
    """Lane j is table[index[j]]; every index must lie in 0..15."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _X86 and "ssse3" in CPU_FEATURES:
            return _call(builder, "llvm.x86.ssse3.pshuf.b.128", i8x16.llvm, *args)
        result = _const(i8x16.llvm, 0)
        for lane in range(16):
            position = builder.extract_element(args[1], _I32(lane))
            value = builder.extract_element(args[0], builder.zext(position, _I32))
            result = builder.insert_element(result, value, _I32(lane))
        return result

    return i8x16(i8x16, i8x16), codegen


@intrinsic
def sum_f32(typingctx: Any, a: Any) -> Any:
    """Sum of the lanes of an f32x16, pairwise from the halves down: one fixed order."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, lanes = args[0], 16
        while lanes > 1:
            lanes //= 2
            low = _shuffle(builder, value, value, list(range(lanes)))
            high = _shuffle(builder, value, value, list(range(lanes, 2 * lanes)))
            value = builder.fadd(low, high)
        return builder.extract_element(value, _I32(0))

    return types.float32(f32x16), codegen


@intrinsic
def sum_i8(typingctx: Any, a: Any) -> Any:
    """Sum of the 16 signed bytes of an i8x16 as int64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, lanes = builder.sext(args[0], i32x16.llvm), 16
        while lanes > 1:
            lanes //= 2
            low = _shuffle(builder, value, value, list(range(lanes)))
            high = _shuffle(builder, value, value, list(range(lanes, 2 * lanes)))
            value = builder.add(low, high)
        return builder.sext(builder.extract_element(value, _I32(0)), _I64)

    return types.int64(i8x16), codegen


def dot4(builder: Any, acc: Any, unsigned: Any, signed: Any, small: bool) -> Any:
    """IR of acc[i] += sum of unsigned[4i + j] * signed[4i + j] over j in 0..3, 16 lanes of int32.

    Args:
        builder: the llvmlite builder.
        acc: <16 x i32>.
        unsigned: <64 x i8>, read as 0..255.
        signed: <64 x i8>, read as -128..127.
        small: the caller promises abs(signed) <= 64, so that a pair of products fits int16
            (255 * 64 * 2 < 32768) and AVX2's saturating vpmaddubsw is exact.
    """
    i32v = ir.VectorType(_I32, 16)
    if has_vnni():
        name = "llvm.x86.avx512.vpdpbusd.512"
        if binding.llvm_version_info < (21,):
            cast = (builder.bitcast(unsigned, i32v), builder.bitcast(signed, i32v))
            return _call(builder, name, i32v, acc, *cast)
        return _call(builder, name, i32v, acc, unsigned, signed)
    if _X86 and "avx2" in CPU_FEATURES:
        halves = []
        for start in (0, 32):
            index = list(range(start, start + 32))
            u = _shuffle(builder, unsigned, unsigned, index)
            w = _shuffle(builder, signed, signed, index)
            halves.append(_avx2_small(builder, u, w) if small else _avx2_wide(builder, u, w))
        return builder.add(acc, _shuffle(builder, halves[0], halves[1], list(range(16))))
    u, w = builder.bitcast(unsigned, i32v), builder.bitcast(signed, i32v)
    for j in range(4):
        byte = builder.and_(builder.lshr(u, _const(i32v, 8 * j)), _const(i32v, 255))
        code = builder.ashr(builder.shl(w, _const(i32v, 24 - 8 * j)), _const(i32v, 24))
        acc = builder.add(acc, builder.mul(byte, code))
    return acc


def _avx2_small(builder: Any, unsigned: Any, signed: Any) -> Any:
    """<8 x i32> sums of four products of 32 bytes, where pairs of products fit int16."""
    shorts = ir.VectorType(_I16, 16)
    pairs = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, unsigned, signed)
    ones = _const(shorts, 1)
    return _call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(_I32, 8), pairs, ones)


def _avx2_wide(builder: Any, unsigned: Any, signed: Any) -> Any:
    """The same for any bytes: even and odd ones apart, as int16."""
    shorts, quads = ir.VectorType(_I16, 16), ir.VectorType(_I32, 8)
    u, w = builder.bitcast(unsigned, shorts), builder.bitcast(signed, shorts)
    eight = _const(shorts, 8)
    even = (builder.and_(u, _const(shorts, 255)), builder.ashr(builder.shl(w, eight), eight))
    odd = (builder.lshr(u, eight), builder.ashr(w, eight))
    name = "llvm.x86.avx2.pmadd.wd"
    return builder.add(_call(builder, name, quads, *even), _call(builder, name, quads, *odd))


@intrinsic
def transpose4(typingctx: Any, src: Any, stride: Any, dst: Any, dst_stride: Any) -> Any:
    """Transpose 16 rows of 16 bytes, taken four bytes at a time.

    Row r lies at src + r * stride. Afterwards the 4-byte word k of row r lies at
    dst + k * dst_stride + 4 * r: 16 rows in the lanes, as `dot4` wants them.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        base, step, target, target_step = args
        rows = []
        word = ir.VectorType(_I32, 4)
        for r in range(16):
            address = builder.add(base, builder.mul(step, _I64(r)))
            rows.append(_load(builder, address, word))
        rows = _interleave_all(builder, rows)  # [row 0, 4, 8, 12 | ...] per word, in four pieces
        for k in range(4):
            pieces = rows[4 * k : 4 * k + 4]
            low = _shuffle(builder, pieces[0], pieces[1], list(range(8)))
            high = _shuffle(builder, pieces[2], pieces[3], list(range(8)))
            column = _shuffle(builder, low, high, list(range(16)))
            _store(builder, builder.add(target, builder.mul(target_step, _I64(k))), column)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


def _interleave_all(builder: Any, rows: list[Any]) -> list[Any]:
    """log2(lanes) rounds of a perfect shuffle: afterwards the rows' lanes are transposed."""
    lanes = rows[0].type.count
    half = len(rows) // 2
    low = [x for i in range(lanes // 2) for x in (i, lanes + i)]
    high = [x for i in range(lanes // 2, lanes) for x in (i, lanes + i)]
    for _ in range(len(rows).bit_length() - 1):
        rows = [
            _shuffle(builder, rows[i], rows[i + half], index)
            for i in range(half)
            for index in (low, high)
        ]
    return rows


@intrinsic
def transpose16(typingctx: Any, src: Any, stride: Any, scale: Any, minimum: Any, dst: Any,
                dst_stride: Any) -> Any:  # fmt: skip
    """Dequantize and transpose 16 rows of 16 signed bytes.

    Row r lies at src + r * stride. Afterwards the float32 scale[r] * byte[r, k] + minimum[r] lies
    at dst + k * dst_stride + 4 * r.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        base, step, scale, minimum, target, target_step = args
        rows = [
            _load(builder, builder.add(base, builder.mul(step, _I64(r))), i8x16.llvm)
            for r in range(16)
        ]
        for k, column in enumerate(_interleave_all(builder, rows)):
            value = builder.sitofp(builder.sext(column, i32x16.llvm), f32x16.llvm)
            value = _fma(builder, value, scale, minimum)
            _store(builder, builder.add(target, builder.mul(target_step, _I64(k))), value)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, f32x16, f32x16, i64, i64), codegen


@intrinsic
def absolute(typingctx: Any, a: Any) -> Any:
    """Magnitude of each lane of an f32x16."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, "llvm.fabs.v16f32", f32x16.llvm, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def fmax(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger of each pair of lanes; b where a is NaN."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def max_f32(typingctx: Any, a: Any) -> Any:
    """The largest lane of an f32x16."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, lanes = args[0], 16
        while lanes > 1:
            lanes //= 2
            low = _shuffle(builder, value, value, list(range(lanes)))
            high = _shuffle(builder, value, value, list(range(lanes, 2 * lanes)))
            value = builder.select(builder.fcmp_ordered(">", low, high), low, high)
        return builder.extract_element(value, _I32(0))

    return types.float32(f32x16), codegen


@intrinsic
def round_i8(typingctx: Any, a: Any) -> Any:
    """Round each lane half away from zero and clamp to -127..127; NaN gives 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = args[0]
        vec = f32x16.llvm
        value = builder.select(builder.fcmp_ordered("ord", value, value), value, _const(vec, 0.0))
        for sign, limit in (("<", 127.0), (">", -127.0)):
            bound = _const(vec, limit)
            value = builder.select(builder.fcmp_ordered(sign, value, bound), value, bound)
        # The largest float below one half, so that 0.49999997 does not round up.
        half = _const(vec, 0.4999999701976776)
        half = _call(builder, "llvm.copysign.v16f32", vec, half, value)
        whole = builder.fptosi(builder.fadd(value, half), i32x16.llvm)
        return builder.trunc(whole, i8x16.llvm)

    return i8x16(f32x16), codegen


@intrinsic
def exp(typingctx: Any, a: Any) -> Any:
    """e^a for each lane; 0 below -87.3, and the error stays within 2 units of the last place.

    a = n ln2 + r with |r| <= ln2 / 2 (ln2 in two pieces, after Cody and Waite); e^r by its Taylor
    polynomial of degree 7, whose remainder at ln2 / 2 is below 1e-8; 2^n from the exponent bits.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vec = f32x16.llvm
        low, high = _const(vec, -87.33654022216797), _const(vec, 88.0)
        x = builder.select(builder.fcmp_ordered("<", args[0], high), args[0], high)
        tiny = builder.fcmp_unordered("<", x, low)
        clamped = builder.select(tiny, low, x)
        n = _call(
            builder, "llvm.rint.v16f32", vec, builder.fmul(clamped, _const(vec, 1.4426950216293335))
        )
        r = _fma(builder, n, _const(vec, -0.693145751953125), clamped)
        r = _fma(builder, n, _const(vec, -1.4286068202862268e-06), r)
        total = _const(vec, 1.0 / 5040)
        for factorial in (720, 120, 24, 6, 2, 1, 1):
            total = _fma(builder, total, r, _const(vec, 1.0 / factorial))
        whole = builder.add(builder.fptosi(n, i32x16.llvm), _const(i32x16.llvm, 127))
        power = builder.bitcast(builder.shl(whole, _const(i32x16.llvm, 23)), vec)
        result = builder.fmul(total, power)
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        result = builder.select(tiny, _const(vec, 0.0), result)
        return builder.select(nan, args[0], result)

    return f32x16(f32x16), codegen


@intrinsic
def div(typingctx: Any, a: Any, b: Any) -> Any:
    """a / b, lane by lane, correctly rounded."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def flip_sign(typingctx: Any, a: Any) -> Any:
    """Add 128 to each byte: signed q becomes unsigned q + 128."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.xor(args[0], _const(i8x16.llvm, -128))

    return i8x16(i8x16), codegen


@intrinsic
def call_kernel(typingctx: Any, address: Any, args: Any, thread: Any, threads: Any) -> Any:
    """Call the compiled kernel ``void f(int64 args, int64 thread, int64 threads)`` at `address`."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I64])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def call_int(typingctx: Any, address: Any) -> Any:
    """Call ``int f(void)`` at `address`."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind = ir.FunctionType(_I32, [])
        result = builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return builder.sext(result, _I64)

    return types.int64(types.int64), codegen


@intrinsic
def call_void(typingctx: Any, address: Any) -> Any:
    """Call ``void f(void)`` at `address`."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
