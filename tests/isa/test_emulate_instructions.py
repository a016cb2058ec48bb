"""Instructions of the emulator against values worked out by hand from the vendor's manuals."""

from __future__ import annotations

import numpy as np
import pytest

from isa.snippets import bits, execute
from tilewright.errors import UnsupportedError
from tilewright.isa.emulate_arith import fma
from tilewright.isa.emulate_text import EXEC, VCC, parse_instruction, parse_operand

ONE = {"f16": 0x3C00, "f32": 0x3F800000}

# (instruction, sources v1, v2, v3, the result in v0)
INTEGER = [
    ("v_add_nc_u32_e32 v0, v1, v2", (0xFFFFFFFF, 2), 1),
    ("v_sub_nc_u32_e32 v0, v1, v2", (1, 2), 0xFFFFFFFF),
    ("v_subrev_nc_u32_e32 v0, v1, v2", (1, 2), 1),
    ("v_mul_lo_u32 v0, v1, v2", (0x10001, 0x10001), 0x20001),
    ("v_mul_hi_u32 v0, v1, v2", (0x80000000, 6), 3),
    ("v_mul_hi_i32 v0, v1, v2", (0xFFFFFFFF, 6), 0xFFFFFFFF),
    ("v_lshrrev_b32_e32 v0, 4, v1", (0xF0,), 0xF),
    ("v_lshrrev_b32_e32 v0, v1, v2", (33, 8), 4),
    ("v_lshlrev_b32_e32 v0, 31, v1", (3,), 0x80000000),
    ("v_ashrrev_i32_e32 v0, 4, v1", (0x80000000,), 0xF8000000),
    ("v_and_or_b32 v0, v1, 15, v2", (0xABCD, 0x6400), 0x640D),
    ("v_and_or_b32 v0, 0xf000f, v1, v2", (0x12345678, 0x64006400), 0x64046408),
    ("v_or3_b32 v0, v1, v2, v3", (1, 2, 4), 7),
    ("v_lshl_or_b32 v0, v1, 4, v2", (0xF, 1), 0xF1),
    ("v_lshl_add_u32 v0, v1, 4, v2", (0xF, 0x20), 0x110),
    ("v_add_lshl_u32 v0, v1, v2, 1", (3, 4), 14),
    ("v_add3_u32 v0, v1, v2, 0x7fff", (1, 2), 0x8002),
    ("v_xad_u32 v0, v1, 4, v2", (6, 10), 12),
    ("v_bfe_u32 v0, v1, 16, 1", (0x10000,), 1),
    ("v_bfe_u32 v0, v1, v2, v3", (0xABCD1234, 8, 8), 0x12),
    ("v_bfe_u32 v0, v1, 4, 0", (0xFFFF,), 0),
    ("v_bfe_i32 v0, v1, 4, 4", (0x80,), 0xFFFFFFF8),
    ("v_bfe_i32 v0, v1, 0, 1", (1,), 0xFFFFFFFF),
    ("v_bfi_b32 v0, v1, v2, v3", (0xFF, 0x1234, 0xABCD), 0xAB34),
    ("v_bfrev_b32_e32 v0, 1", (), 0x80000000),
    ("v_alignbit_b32 v0, v1, v2, 16", (0x1234ABCD, 0x5678EF01), 0xABCD5678),
    ("v_alignbyte_b32 v0, v1, v2, 1", (0x11223344, 0x55667788), 0x44556677),
    # Selectors 0 .. 3 name bytes of the second source, 4 .. 7 of the first.
    ("v_perm_b32 v0, v1, v2, v3", (0x11223344, 0x55667788, 0x07060100), 0x11227788),
    ("v_perm_b32 v0, v1, v2, v3", (0x11223344, 0x55667788, 0x05040100), 0x33447788),
    ("v_perm_b32 v0, v1, v2, v3", (0x11223344, 0x55667788, 0x0C0D0C03), 0x00FF0055),
    ("v_perm_b32 v0, v1, v2, v3", (0x80223344, 0x5566F788, 0x0B0A0908), 0xFF0000FF),
    ("v_ffbh_u32_e32 v0, v1", (0x00010000,), 15),
    ("v_clz_i32_u32_e32 v0, v1", (0,), 0xFFFFFFFF),
    ("v_ctz_i32_b32_e32 v0, v1", (0x50,), 4),
    ("v_bcnt_u32_b32 v0, v1, 3", (0xF0F0,), 11),
    ("v_min_i32_e32 v0, v1, v2", (0xFFFFFFFF, 1), 0xFFFFFFFF),
    ("v_max_u32_e32 v0, v1, v2", (0xFFFFFFFF, 1), 0xFFFFFFFF),
    ("v_med3_i32 v0, v1, v2, v3", (0xFFFFFFFE, 5, 1), 1),
    ("v_mad_u32_u24 v0, v1, v2, v3", (0xFF000003, 4, 5), 17),
    ("v_mul_i32_i24_e32 v0, v1, v2", (0x00FFFFFF, 5), 0xFFFFFFFB),
    ("v_add_nc_u32_e64 v0, v1, v2 clamp", (0xFFFFFFFF, 2), 0xFFFFFFFF),
    ("v_sub_nc_u32_e64 v0, v1, v2 clamp", (1, 2), 0),
    ("v_mad_u32_u16 v0, v1, v2, v3", (0xABCDFFFF, 0xFFFF, 2), 0xFFFE0003),
    ("v_mad_i32_i16 v0, v1, v2, v3", (0xFFFF, 5, 2), 0xFFFFFFFD),
    ("v_cvt_u32_u16_e32 v0, v1", (0xABCD1234,), 0x1234),
    ("v_cvt_i32_i16_e32 v0, v1", (0x1234FFFF,), 0xFFFFFFFF),
    ("v_pack_b32_f16 v0, v1, v2", (0xAAAA1111, 0xBBBB2222), 0x22221111),
    ("v_pack_b32_f16 v0, v1, v2 op_sel:[1,0,0]", (0xAAAA1111, 0xBBBB2222), 0x2222AAAA),
    ("v_cvt_pk_u16_u32 v0, v1, v2", (0x12345, 7), 0x0007FFFF),
    ("v_cvt_pk_i16_i32 v0, v1, v2", (0xFFFF0000, 7), 0x00078000),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sources", "right"), INTEGER, ids=lambda v: str(v)[:60])
def test_integer_operations(text, sources, right):
    wave = execute(text, v=dict(enumerate(sources, 1)))
    assert [hex(x) for x in wave.v[0]] == [hex(right)] * 32


# (instruction, sources as numbers, the result as a number)
FLOAT = [
    ("v_fma_f32 v0, -v1, |v2|, v3", "f32", (2.0, -3.0, 1.0), -5.0),
    ("v_fmac_f32_e32 v0, v1, v2", "f32", (2.0, 3.0), np.nan),
    ("v_max_f32_e32 v0, v1, v2", "f32", (np.nan, 3.0), 3.0),
    ("v_maximum_f32 v0, v1, v2", "f32", (np.nan, 3.0), np.nan),
    ("v_max_f32_e32 v0, v1, v2", "f32", (-0.0, 0.0), 0.0),
    ("v_min_f32_e32 v0, v1, v2", "f32", (0.0, -0.0), -0.0),
    ("v_med3_f32 v0, v1, v2, v3", "f32", (7.0, -1.0, 2.0), 2.0),
    ("v_add_f32_e64 v0, v1, v2 clamp", "f32", (7.0, -1.0), 1.0),
    ("v_mul_f32_e64 v0, v1, v2 mul:2", "f32", (3.0, 5.0), 30.0),
    ("v_mul_f32_e64 v0, v1, v2 div:2", "f32", (3.0, 5.0), 7.5),
    ("v_mul_f32_e32 v0, 0.15915494, v1", "f32", (1.0,), np.float32(0.15915494)),
    ("v_add_f32_e32 v0, 0x3f800000, v1", "f32", (1.0,), 2.0),
    ("v_exp_f32_e32 v0, v1", "f32", (3.0,), 8.0),
    ("v_log_f32_e32 v0, v1", "f32", (8.0,), 3.0),
    ("v_rcp_f32_e32 v0, v1", "f32", (0.0,), np.inf),
    ("v_rsq_f32_e32 v0, v1", "f32", (4.0,), 0.5),
    ("v_rndne_f32_e32 v0, v1", "f32", (2.5,), 2.0),
    ("v_fract_f32_e32 v0, v1", "f32", (-1.25,), 0.75),
    ("v_frexp_mant_f32_e32 v0, v1", "f32", (-12.0,), -0.75),
    ("v_maximum3_f32 v0, v1, v2, v3", "f32", (1.0, np.nan, 2.0), np.nan),
    ("v_ldexp_f32 v0, v1, 3", "f32", (1.5,), 12.0),
    ("v_fmaak_f32 v0, v1, v2, 0x40000000", "f32", (3.0, 5.0), 17.0),
    ("v_fmamk_f32 v0, v1, 0x40000000, v2", "f32", (3.0, 5.0), 11.0),
    ("v_add_f16_e32 v0, v1, v2", "f16", (1.5, 2048.0), 2050.0),
    ("v_sub_f16_e32 v0, 0x6408, v1", "f16", (1024.0,), 8.0),
    ("v_fma_f16 v0, v1, v2, -1.0", "f16", (3.0, 5.0), 14.0),
    ("v_mul_f16_e32 v0, 0.5, v1", "f16", (6.0e-8,), 0.0),  # half of the least denormal: to even
    ("v_div_fixup_f32 v0, v1, v2, v3", "f32", (9.0, 0.0, -1.0), -np.inf),
    ("v_div_fixup_f32 v0, v1, v2, v3", "f32", (9.0, 0.0, 0.0), np.nan),
    ("v_div_fixup_f32 v0, v1, v2, v3", "f32", (-9.0, 2.0, 3.0), 9.0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "sources", "right"), FLOAT, ids=lambda v: str(v)[:60])
def test_float_operations(text, kind, sources, right):
    dtype = np.float16 if kind == "f16" else np.float32
    wave = execute(text, v={n: bits(x, dtype) for n, x in enumerate(sources, 1)})
    found = wave.v[0].astype(np.uint16).view(np.float16) if kind == "f16" else wave.v[0].view(dtype)
    if np.isnan(right):
        assert np.isnan(found).all()
    else:
        assert found[5] == right
        assert np.signbit(found[5]) == np.signbit(right)


# (instruction, bits of v1, bits of the result)
CONVERSIONS = [
    ("v_cvt_f16_f32_e32 v0, v1", bits(1 + 2**-11, np.float32), 0x3C00),  # a tie: to even
    ("v_cvt_f16_f32_e32 v0, v1", bits(1 + 3 * 2**-11, np.float32), 0x3C02),
    ("v_cvt_f16_f32_e32 v0, v1", bits(65520.0, np.float32), 0x7C00),
    ("v_cvt_f16_f32_e32 v0, v1", bits(3e-8, np.float32), 0x0001),
    ("v_cvt_pk_rtz_f16_f32_e32 v0, v1, v1", bits(1 + 3 * 2**-11, np.float32), 0x3C013C01),
    ("v_cvt_pk_rtz_f16_f32_e32 v0, v1, v1", bits(1e6, np.float32), 0x7BFF7BFF),
    ("v_cvt_f32_f16_e32 v0, v1", 0xFFFF0001, int(bits(2.0**-24, np.float32))),
    ("v_cvt_i32_f32_e32 v0, v1", bits(-1.9, np.float32), 0xFFFFFFFF),
    ("v_cvt_i32_f32_e32 v0, v1", bits(3e9, np.float32), 0x7FFFFFFF),
    ("v_cvt_u32_f32_e32 v0, v1", bits(-1.0, np.float32), 0),
    ("v_cvt_u32_f32_e32 v0, v1", bits(np.nan, np.float32), 0),
    ("v_cvt_u32_f32_e32 v0, v1", bits(5e9, np.float32), 0xFFFFFFFF),
    ("v_cvt_f32_i32_e32 v0, v1", 0xFFFFFFFE, int(bits(-2.0, np.float32))),
    ("v_cvt_f32_u32_e32 v0, v1", 0xFFFFFFFF, int(bits(2.0**32, np.float32))),
    ("v_cvt_f32_ubyte2_e32 v0, v1", 0x00AB0000, int(bits(171.0, np.float32))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "source", "right"), CONVERSIONS, ids=lambda v: str(v)[:40])
def test_conversions(text, source, right):
    found = execute(text, v={0: 0, 1: source}).v[0]
    assert [hex(x) for x in found] == [hex(right)] * 32


def test_fma_is_rounded_once():
    """Cases where float64 rounds to a tie of float32, and the tie is not where the sum lies."""
    a = np.array([1 + 2.0**-12, 1 + 2.0**-12], dtype=np.float32)
    b = np.array([1.0, 1.0], dtype=np.float32) + np.float32(2.0**-12)
    c = np.array([2.0**-60, -(2.0**-60)], dtype=np.float32)
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: exactly between two float32, and c says which way.
    assert fma(a, b, c).tolist() == [1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11]


def test_results_of_16_bits_keep_the_upper_half_from_rdna3_on_and_clear_it_on_gfx9():
    before = {0: 0xABCD0000, 1: ONE["f16"], 2: ONE["f16"]}
    assert execute("v_add_f16_e32 v0, v1, v2", v=before).v[0, 0] == 0xABCD4000
    assert execute("v_add_f16_e32 v0, v1, v2", v=before, arch="gfx90a").v[0, 0] == 0x00004000
    text = "v_fma_f16 v0, v1, v2, 0 op_sel:[0,0,0,1]"
    assert execute(text, v=before, arch="gfx942").v[0, 0] == 0x3C000000


def test_halves_may_be_named():
    wave = execute("v_add_f16_e32 v0.h, v1.l, v1.h", v={0: 0x1234, 1: 0x40003C00})
    assert wave.v[0, 0] == 0x42001234
    wave = execute("v_cndmask_b16 v0.l, 0x7fff, v1.h, vcc_lo", v={0: 0, 1: 0x40003C00}, s={VCC: 2})
    assert wave.v[0, :2].tolist() == [0x7FFF, 0x4000]


# (instruction, v1, v2, right), pairs of float16: (low, high)
PAIRS = [
    ("v_pk_add_f16 v0, v1, v2", (1, 2), (10, 20), (11, 22)),
    ("v_pk_add_f16 v0, v1, v2 neg_lo:[0,1] neg_hi:[0,1]", (1, 2), (10, 20), (-9, -18)),
    ("v_pk_add_f16 v0, v1, v2 neg_lo:[1,0]", (1, 2), (10, 20), (9, 22)),
    ("v_pk_add_f16 v0, v1, v2 op_sel_hi:[1,0]", (1, 2), (10, 20), (11, 12)),
    ("v_pk_mul_f16 v0, v1, v2 op_sel:[0,1]", (1, 2), (10, 20), (20, 40)),
    ("v_pk_mul_f16 v0, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]", (1, 2), (10, 20), (20, 20)),
    ("v_pk_fma_f16 v0, v1, v2, v1", (1, 2), (10, 20), (11, 42)),
    ("v_pk_max_f16 v0, v1, v2", (1, 30), (10, 20), (10, 30)),
    ("v_pk_mul_f16 v0, v1, 2.0 op_sel_hi:[1,0]", (1, 3), (0, 0), (2, 6)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "a", "b", "right"), PAIRS, ids=lambda v: str(v)[:60])
@pytest.mark.parametrize("arch", ["gfx1151", "gfx942"])
def test_packed_float16(text, a, b, right, arch):
    def word(pair):
        return int(np.array(pair, dtype=np.float16).view(np.uint32)[0])

    assert execute(text, v={1: word(a), 2: word(b)}, arch=arch).v[0, 3] == word(right)


def test_packed_integers_do_not_carry():
    wave = execute("v_pk_add_u16 v0, v1, v2", v={1: 0x0001FFFF, 2: 0x00010001})
    assert wave.v[0, 0] == 0x00020000
    wave = execute("v_pk_lshlrev_b16 v0, 4, v1 op_sel_hi:[0,1]", v={1: 0x0101F00F})
    assert wave.v[0, 0] == 0x101000F0


def test_packed_float32_picks_halves_of_pairs():
    before = {n: bits(float(n), np.float32) for n in range(2, 6)}
    text = "v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel_hi:[1,0]"
    wave = execute(text, v=before, arch="gfx90a")
    assert wave.v[:2, 9].view(np.float32).tolist() == [2 * 4, 3 * 4]
    text = "v_pk_add_f32 v[0:1], v[2:3], s[4:5] neg_lo:[0,1] neg_hi:[0,1]"
    scalars = {4: int(bits(0.5, np.float32)), 5: int(bits(0.25, np.float32))}
    wave = execute(text, v=before, s=scalars, arch="gfx90a")
    assert wave.v[:2, 9].view(np.float32).tolist() == [1.5, 2.75]
    wave = execute("v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]", v=before, arch="gfx90a")
    assert wave.v[:2, 9].view(np.float32).tolist() == [3, 4]


def test_mixed_precision_reads_halves_and_signs():
    before = {0: 0xABCD0000, 1: 0x40003C00, 2: bits(0.5, np.float32), 3: bits(3.0, np.float32)}
    text = "v_fma_mix_f32 v0, v1, v2, -v3 op_sel:[1,0,0] op_sel_hi:[1,0,0]"
    assert execute(text, v=before).v[0].view(np.float32)[0] == 2.0 * 0.5 - 3.0
    text = "v_fma_mixlo_f16 v0, v1, v2, v3 op_sel_hi:[1,0,0]"
    assert execute(text, v=before).v[0, 0] == 0xABCD4300
    text = "v_fma_mixhi_f16 v0, |v3|, -v2, 0"
    assert execute(text, v=before).v[0, 0] == 0xBE000000


def test_dot2_adds_two_products():
    before = {1: 0x40003C00, 2: 0x44004200, 3: bits(0.5, np.float32)}
    wave = execute("v_dot2_f32_f16 v0, v1, v2, v3", v=before)
    assert wave.v[0].view(np.float32)[0] == 1 * 3 + 2 * 4 + 0.5
    text = "v_dual_dot2acc_f32_f16 v3, v1, v2 :: v_dual_mov_b32 v4, v3"
    wave = execute(text, v=before)
    assert wave.v[3:5, 0].view(np.float32).tolist() == [11.5, 0.5]
    before = {0: bits(1.0, np.float32), 1: 0x40003F80, 2: 0x40003F80}
    wave = execute("v_dot2_f32_bf16 v0, v1, v2, v0", v=before)
    assert wave.v[0].view(np.float32)[0] == 1 * 1 + 2 * 2 + 1


def test_both_halves_of_a_dual_issue_read_before_either_writes():
    wave = execute("v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1", v={1: 7, 2: 9})
    assert (wave.v[1, 0], wave.v[2, 0]) == (9, 7)
    before = {1: bits(2.0, np.float32), 2: bits(3.0, np.float32), 4: 5}
    text = "v_dual_fmac_f32 v1, v2, v2 :: v_dual_lshlrev_b32 v4, 1, v4"
    wave = execute(text, v=before)
    assert (wave.v[1].view(np.float32)[0], wave.v[4, 0]) == (11.0, 10)
    text = "v_dual_cndmask_b32 v1, 1, v2 :: v_dual_add_nc_u32 v4, 1, v4"
    wave = execute(text, v={2: 8, 4: 5}, s={VCC: 0b10})
    assert wave.v[1, :3].tolist() == [1, 8, 1]
    assert wave.v[4, 0] == 6


def test_inactive_lanes_keep_their_registers_and_clear_mask_bits():
    wave = execute("v_mov_b32_e32 v0, 5", v={0: 1}, active=0b101)
    assert wave.v[0, :4].tolist() == [5, 1, 5, 1]
    lane = np.arange(32)
    wave = execute("v_cmp_gt_u32_e64 s4, 3, v1", v={1: lane}, s={4: 0}, active=0b1101)
    assert wave.s[4] == 0b101
    wave = execute("v_cmpx_gt_u32_e32 3, v1", v={1: lane}, active=0b1101)
    assert wave.s[EXEC] == 0b101


COMPARISONS = [
    ("v_cmp_o_f32_e32 vcc_lo, v1, v2", (np.nan, 1.0), False),
    ("v_cmp_u_f32_e32 vcc_lo, v1, v2", (np.nan, 1.0), True),
    ("v_cmp_neq_f32_e32 vcc_lo, v1, v2", (np.nan, np.nan), True),
    ("v_cmp_nlt_f32_e32 vcc_lo, v1, v2", (np.nan, 1.0), True),
    ("v_cmp_lg_f32_e32 vcc_lo, v1, v2", (np.nan, 1.0), False),
    ("v_cmp_lt_f32_e64 vcc_lo, |v1|, v2", (-3.0, 1.0), False),
    ("v_cmp_class_f32_e64 vcc_lo, v1, 0x204", (-np.inf, 0.0), True),
    ("v_cmp_class_f32_e64 vcc_lo, v1, 0x60", (-0.0, 0.0), True),
    ("v_cmp_class_f32_e64 vcc_lo, v1, 0x108", (-0.0, 0.0), False),
    ("v_cmp_class_f32_e64 vcc_lo, v1, 3", (np.nan, 0.0), True),
]


@pytest.mark.parametrize(("text", "sources", "right"), COMPARISONS, ids=lambda v: str(v)[:50])
def test_comparisons(text, sources, right):
    wave = execute(text, v={n: bits(x, np.float32) for n, x in enumerate(sources, 1)})
    assert wave.s[VCC] == (0xFFFFFFFF if right else 0)


def test_comparisons_of_64_bits():
    text = "v_cmp_gt_i64_e64 s[4:5], v[2:3], v[4:5]"
    low, high = {2: 0, 3: 1, 4: 0xFFFFFFFF, 5: 0}, {2: 0, 3: 0xFFFFFFFF, 4: 0, 5: 0}
    assert execute(text, v=low, arch="gfx90a").s[4:6] == [0xFFFFFFFF] * 2
    assert execute(text, v=high, arch="gfx90a").s[4:6] == [0, 0]


def test_carries_go_through_masks():
    text = """
        v_add_co_u32 v0, vcc_lo, v2, v4
        v_add_co_ci_u32_e64 v1, null, v3, v5, vcc_lo
    """
    wave = execute(text, v={2: 0xFFFFFFFF, 3: 1, 4: 1, 5: 2})
    assert (wave.v[0, 0], wave.v[1, 0], wave.s[VCC]) == (0, 4, 0xFFFFFFFF)
    text = """
        v_sub_co_u32_e32 v0, vcc, v2, v4
        v_subb_co_u32_e32 v1, vcc, v3, v5, vcc
    """
    wave = execute(text, v={2: 0, 3: 5, 4: 1, 5: 2}, arch="gfx90a")
    assert (wave.v[0, 0], wave.v[1, 0], wave.s[VCC]) == (0xFFFFFFFF, 2, 0)


def test_multiplications_of_64_bits():
    wave = execute(
        "v_mad_u64_u32 v[0:1], s0, v2, v3, v[4:5]", v={2: 0xFFFFFFFF, 3: 0xFFFFFFFF, 4: 1, 5: 0}
    )
    assert (wave.v[1, 0], wave.v[0, 0]) == (0xFFFFFFFE, 2)
    wave = execute("v_mad_i64_i32 v[0:1], null, v2, v3, 0", v={2: 0xFFFFFFFF, 3: 5})
    assert (wave.v[1, 0], wave.v[0, 0]) == (0xFFFFFFFF, 0xFFFFFFFB)
    wave = execute("v_lshlrev_b64 v[0:1], 33, v[2:3]", v={2: 3, 3: 0})
    assert (wave.v[1, 0], wave.v[0, 0]) == (6, 0)


QUOTIENTS = [
    (1.0, 3.0),
    (-7.5, 1e-38),
    (3e38, 1e-5),
    (1e-40, 3.0),
    (5e-39, 2e38),
    (0.0, 2.0),
    (1.0, 0.0),
    (np.inf, 2.0),
]


@pytest.mark.parametrize(("n", "d"), QUOTIENTS)
def test_the_sequence_of_a_division_is_rounded_right(n, d):
    """As compilers write n / d: scaled, approximated, refined, unscaled, fixed."""
    text = """
        v_div_scale_f32 v3, s0, v2, v2, v1
        v_rcp_f32_e32 v4, v3
        v_fma_f32 v5, -v3, v4, 1.0
        v_fmac_f32_e32 v4, v5, v4
        v_div_scale_f32 v5, vcc_lo, v1, v2, v1
        v_mul_f32_e32 v6, v5, v4
        v_fma_f32 v7, -v3, v6, v5
        v_fmac_f32_e32 v6, v7, v4
        v_fma_f32 v3, -v3, v6, v5
        v_div_fmas_f32 v3, v3, v4, v6
        v_div_fixup_f32 v0, v3, v2, v1
    """
    n, d = np.float32(n), np.float32(d)
    found = execute(text, v={1: bits(n, np.float32), 2: bits(d, np.float32)}).v[0].view(np.float32)
    with np.errstate(all="ignore"):
        assert found[0] == n / d


LANE = np.arange(64, dtype=np.uint32)
QUAD = [1, 0, 3, 2]
DPP = [
    ("quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", lambda i: i // 4 * 4 + QUAD[i % 4]),
    ("row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1", lambda i: i - 1 if i % 16 else 0),
    ("row_shr:4 row_mask:0xf bank_mask:0xf", lambda i: i - 4 if i % 16 >= 4 else 100),
    ("row_shl:3 row_mask:0xf bank_mask:0xf", lambda i: i + 3 if i % 16 < 13 else 100),
    ("row_ror:4 row_mask:0xf bank_mask:0xf", lambda i: i // 16 * 16 + (i - 4) % 16),
    ("row_mirror row_mask:0xf bank_mask:0xf", lambda i: i // 16 * 16 + 15 - i % 16),
    ("row_half_mirror row_mask:0xf bank_mask:0xf", lambda i: i // 8 * 8 + 7 - i % 8),
    ("row_bcast:15 row_mask:0xa bank_mask:0xf",
     lambda i: i // 16 * 16 - 1 if i // 16 in (1, 3) else 100),
    ("row_bcast:31 row_mask:0xc bank_mask:0xf", lambda i: 31 if i >= 32 else 100),
    ("row_newbcast:5 row_mask:0xf bank_mask:0x3",
     lambda i: i // 16 * 16 + 5 if i % 16 < 8 else 100),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "source"), DPP, ids=[pattern.split()[0] for pattern, _ in DPP])
def test_dpp_moves_lanes(pattern, source):
    wave = execute(f"v_mov_b32_dpp v0, v1 {pattern}", v={0: 100, 1: LANE}, arch="gfx90a")
    assert wave.v[0].tolist() == [source(i) for i in range(64)]


def test_dpp_feeds_arithmetic_and_respects_inactive_lanes():
    text = "v_add_f32_dpp v0, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    lane = bits(np.arange(64), np.float32)
    wave = execute(text, v={1: lane, 2: bits(0.5, np.float32)}, arch="gfx942")
    assert wave.v[0, 1:4].view(np.float32).tolist() == [0.5, 1.5, 2.5]
    assert wave.v[0, 16].view(np.float32) == 0.5
    text = text.replace("v0, v1, v2", "v1, v1, v1")  # only the first source moves
    wave = execute(text, v={1: lane}, arch="gfx942")
    assert wave.v[1, 14:18].view(np.float32).tolist() == [27, 29, 16, 33]
    text = "v_mov_b32_dpp v0, v1 quad_perm:[1,1,1,1] row_mask:0xf bank_mask:0xf"
    wave = execute(text, v={0: 100, 1: LANE}, arch="gfx90a", active=0b1101)
    assert wave.v[0, :4].tolist() == [100, 100, 100, 100]  # lane 1 is off and gives nothing


def test_permlane_crosses_rows():
    lane = np.arange(32)
    wave = execute("v_permlanex16_b32 v0, v1, -1, -1 op_sel:[1,0]", v={1: lane})
    assert wave.v[0].tolist() == [31] * 16 + [15] * 16
    scalars = {2: 0x76543210, 3: 0xFEDCBA98}
    wave = execute("v_permlanex16_b32 v0, v1, s2, s3", v={1: lane}, s=scalars)
    assert wave.v[0].tolist() == [*range(16, 32), *range(16)]
    wave = execute("v_permlane16_b32 v0, v1, s2, s3", v={1: lane}, s={2: 0, 3: 0})
    assert wave.v[0].tolist() == [0] * 16 + [16] * 16


def test_lanes_are_read_and_written_by_number():
    text = "v_readfirstlane_b32 s4, v1\nv_readlane_b32 s5, v1, 9\nv_writelane_b32 v1, s5, 2"
    wave = execute(text, v={1: 100 + np.arange(32)}, active=0b11000)
    assert (wave.s[4], wave.s[5], wave.v[1, 2]) == (103, 109, 109)


def test_sdwa_reads_parts_of_registers():
    where = "dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:"
    before = {1: 1000, 2: 0xFF345680}
    wave = execute(f"v_sub_u32_sdwa v0, v1, v2 {where}BYTE_0", v=before, arch="gfx90a")
    assert wave.v[0, 0] == 1000 - 0x80
    wave = execute(f"v_or_b32_sdwa v0, v1, v2 {where}WORD_1", v={1: 0, 2: before[2]}, arch="gfx90a")
    assert wave.v[0, 0] == 0xFF34
    wave = execute(f"v_add_u32_sdwa v0, v1, sext(v2) {where}BYTE_0", v=before, arch="gfx90a")
    assert wave.v[0, 0] == 1000 - 128
    text = (
        "v_and_b32_sdwa v0, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_0 "
        "src1_sel:DWORD"
    )
    wave = execute(text, v={0: 0x1111AAAA, 1: 0xFF, 2: 0xABC}, arch="gfx90a")
    assert wave.v[0, 0] == 0x00BCAAAA


def test_the_text_is_taken_apart():
    ins = parse_instruction("buffer_load_dwordx4 v[4:7], v1, s[8:11], 0 offen offset:16 glc")
    assert [op.text for op in ins.operands] == ["v[4:7]", "v1", "s[8:11]", "0"]
    assert ins.modifiers == {"offen": "1", "offset": "16", "glc": "1"}
    op = parse_operand("-|v3|")
    assert (op.kind, op.index, op.negate, op.absolute) == ("v", 3, True, True)
    assert parse_operand("a[0:15]").index == 256
    assert parse_operand("-1.0").value == -1.0
    assert parse_operand("-16").bits32 == 0xFFFFFFF0
    assert parse_operand("ttmp9").kind == "s"


REFUSED = [
    ("v_bogus_b32 v0, v1", "'v_bogus_b32' in 'v_bogus_b32 v0, v1': unknown instruction"),
    ("s_getpc_b64 s[0:1]", "unknown instruction"),
    ("v_add_f32_e32 v0, v1, src_bogus", "operand 'src_bogus' is not known"),
    ("v_swmmac_f32_16x16x32_f16 v[0:7], v[8:11], v[12:19], v20", "unknown instruction"),
    ("v_mfma_f32_32x32x4f16 a[0:31], v[0:1], v[2:3], 0", "several blocks"),
    ("buffer_load_dword v1, s[4:7], 0 offen lds", "straight to LDS"),
    ("v_add_nc_u16 v0, v1", "1 sources, expected 2"),
    ("s_setreg_imm32_b32 hwreg(HW_REG_MODE), 3", "unknown instruction"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[t.split()[0] for t, _ in REFUSED])
def test_what_it_does_not_know_it_refuses(text, message):
    arch = "gfx90a" if "mfma" in text else "gfx1151"
    with pytest.raises(UnsupportedError, match="assembly line 1") as caught:
        execute(text, arch=arch)
    assert message in str(caught.value)
