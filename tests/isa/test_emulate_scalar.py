"""Scalar instructions of the emulator: results, the condition bit, lane masks."""

from __future__ import annotations

import pytest

from isa.snippets import execute
from tilewright.isa.emulate_text import EXEC, VCC

SCALAR = [
    ("s_add_u32 s0, s1, s2", (0xFFFFFFFF, 1), 0, 1),
    ("s_add_i32 s0, s1, s2", (0x7FFFFFFF, 1), 0x80000000, 1),
    ("s_add_i32 s0, s1, s2", (0xFFFFFFFF, 1), 0, 0),
    ("s_sub_u32 s0, s1, s2", (1, 2), 0xFFFFFFFF, 1),
    ("s_addk_i32 s1, 0xff00", (0x200, 0), 0x100, 0),
    ("s_movk_i32 s0, 0xff00", (0, 0), 0xFFFFFF00, 0),
    ("s_and_b32 s0, s1, s2", (6, 1), 0, 0),
    ("s_andn2_b32 s0, s1, s2", (7, 1), 6, 1),
    ("s_and_not1_b32 s0, s1, s2", (7, 1), 6, 1),
    ("s_lshl_b32 s0, s1, s2", (3, 33), 6, 1),
    ("s_ashr_i32 s0, s1, 4", (0x80000000, 0), 0xF8000000, 1),
    ("s_lshl2_add_u32 s0, s1, s2", (0x40000000, 3), 3, 1),
    ("s_mul_hi_u32 s0, s1, s2", (0x80000000, 6), 3, 0),
    ("s_mul_hi_i32 s0, s1, s2", (0xFFFFFFFF, 6), 0xFFFFFFFF, 0),
    ("s_abs_i32 s0, s1", (0xFFFFFFFB, 0), 5, 1),
    ("s_min_i32 s0, s1, s2", (0xFFFFFFFF, 1), 0xFFFFFFFF, 1),
    ("s_max_u32 s0, s1, s2", (7, 7), 7, 1),
    ("s_min_u32 s0, s1, s2", (7, 7), 7, 0),
    ("s_max_i32 s0, s1, 1", (0xFFFFFFFF, 0), 1, 0),
    ("s_bfe_u32 s0, s1, 0x50019", (0x06000000, 0), 3, 1),
    ("s_bfe_i32 s0, s1, 0x100000", (0x1FFFF, 0), 0xFFFFFFFF, 1),
    ("s_sext_i32_i16 s0, s1", (0x8000, 0), 0xFFFF8000, 0),
    ("s_ff1_i32_b32 s0, s1", (0x50, 0), 4, 0),
    ("s_bcnt1_i32_b32 s0, s1", (0xF0, 0), 4, 1),
    ("s_pack_ll_b32_b16 s0, s1, s2", (0xAAAA1111, 0xBBBB2222), 0x22221111, 0),
    ("s_pack_hh_b32_b16 s0, s1, s2", (0xAAAA1111, 0xBBBB2222), 0xBBBBAAAA, 0),
    ("s_cvt_f32_u32 s0, s1", (3, 0), 0x40400000, 0),
    ("s_mul_f32 s0, s1, 0x4f7ffffe", (0x3F800000, 0), 0x4F7FFFFE, 0),
    ("v_s_rcp_f32 s0, s1", (0x40800000, 0), 0x3E800000, 0),
    ("s_fmac_f32 s1, s2, 2.0", (0x3F800000, 0x40400000), 0x40E00000, 0),
    ("s_cvt_f16_f32 s0, s1", (0x3F802000, 0), 0x3C01, 0),
    ("s_cvt_hi_f32_f16 s0, s1", (0xC0000000, 0), 0xC0000000, 0),
    ("s_mul_f16 s0, s1, s2", (0xABCD4200, 0x4000), 0x4600, 0),
    ("s_rndne_f32 s0, s1", (0x40200000, 0), 0x40000000, 0),
    ("s_ceil_f32 s0, s1", (0xBF000000, 0), 0x80000000, 0),
    ("s_max_num_f32 s0, s1, s2", (0x7FC00000, 0x40000000), 0x40000000, 0),
    ("s_cvt_u32_f32 s0, s1", (0x40700000, 0), 3, 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sources", "right", "scc"), SCALAR, ids=lambda v: str(v)[:40])
def test_scalar_operations(text, sources, right, scc):
    wave = execute(text, s=dict(enumerate(sources, 1)))
    target = int(text.split()[1].strip("s,"))
    assert (hex(wave.s[target]), wave.scc) == (hex(right), scc)


def test_scalar_flow_of_masks():
    wave = execute("s_and_saveexec_b32 s4, vcc_lo", s={VCC: 0b110}, active=0b011)
    assert (wave.s[4], wave.s[EXEC], wave.scc) == (0b011, 0b010, 1)
    wave = execute("s_and_not1_saveexec_b32 s4, s4", s={4: 0b111}, active=0b011)
    assert (wave.s[4], wave.s[EXEC]) == (0b011, 0b100)
    wave = execute("s_cmp_lt_i32 s1, 1\ns_cselect_b32 s0, 7, 9", s={1: 0xFFFFFFFF})
    assert wave.s[0] == 7
    wave = execute("s_or_b64 exec, exec, s[4:5]", s={4: 0b100, 5: 0}, active=1, arch="gfx90a")
    assert wave.mask.nonzero()[0].tolist() == [0, 2]
