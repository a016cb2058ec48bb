"""Assembly texts, counted by hand."""

from __future__ import annotations

import pytest

from tilewright.errors import UnsupportedError
from tilewright.isa.count import (
    FORMS,
    KINDS,
    Instruction,
    count,
    inner_loop,
    loops,
    matrix_macs,
    parse,
    vendor_of,
)

AMD = """\
\t.text
\t.globl\t_kernel
_kernel:                                ; @_kernel
; %bb.0:
\ts_load_b128 s[0:3], s[0:1], 0x0
\tv_mov_b32_e32 v0, 0
.LBB0_1:                                ; =>This Loop Header: Depth=1
\ts_mov_b32 s4, 0
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
\ts_clause 0x1
\tbuffer_load_b128 v[0:3], v8, s[0:3], 0 offen
\tglobal_load_u16 v9, v[10:11], off
\ts_waitcnt vmcnt(0)
\t;;#ASMSTART
v_and_or_b32 v4, v0, s5, v6
\tv_pk_add_f16 v4, v4, v7 neg_lo:[0,1] neg_hi:[0,1]
\t;;#ASMEND
\tv_lshrrev_b32_e32 v5, 4, v0
\tv_dual_mov_b32 v1, v2 :: v_dual_add_f32 v3, v4, v5
\tv_perm_b32 v6, v5, v4, s6
\tv_cvt_f32_f16_e32 v7, v6
\tds_store_b128 v8, v[0:3]
\ts_barrier
\tds_load_b128 v[0:3], v8
\tds_bpermute_b32 v1, v2, v3
\tv_wmma_f32_16x16x16_f16 v[16:23], v[0:7], v[8:15], v[16:23]
\tglobal_store_b32 v[0:1], v2, off
\tbuffer_gl0_inv
\ts_add_i32 s4, s4, 1
\ts_cmp_lt_i32 s4, s7
\ts_cbranch_scc1 .LBB0_2
; %bb.3:
\ts_cbranch_scc1 .LBB0_1
\ts_branch .LBB0_4
.LBB0_4:
\ts_endpgm
\t.amdgpu_metadata
    .vgpr_count:     24
\t.end_amdgpu_metadata
"""

SASS = """\
\t.section\t.text._kernel,"ax",@progbits
_kernel:
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P6 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   DEPBAR.LE SB0, 0x0 ;
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/              @!P4 LDG.E.U16 R65, desc[UR28][R16.64] ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R11], desc[UR28][R16.64] ;
        /*0060*/                   LDS.128 R12, [R11+UR6+0x6000] ;
        /*0070*/                   SHF.R.U32.HI R18, RZ, 0x4, R12 ;
        /*0080*/                   LOP3.LUT R19, R12, 0xf000f, R20, 0xea, !PT ;
        /*0090*/                   HADD2 R19, R19, -R21 ;
        /*00a0*/                   HADD2.F32 R22, -RZ, R19.H0_H0 ;
        /*00b0*/                   HMUL2.BF16_V2 R19, R19, R23 ;
        /*00c0*/                   PRMT R65, RZ, 0x7610, R65 ;
        /*00d0*/                   STS.128 [R11], R12 ;
        /*00e0*/                   UIADD3 UR21, UR21, 0x1, URZ ;
        /*00f0*/                   IMAD.WIDE R4, R2, 0x2, R4 ;
        /*0100*/                   WARPGROUP.ARRIVE ;
        /*0110*/                   HGMMA.64x128x16.F32 R24, R88, gdesc[UR8], R24, gsb0 ;
        /*0120*/                   SHFL.BFLY PT, R3, R2, 0x1, 0x1f ;
        /*0130*/                   STG.E.128 desc[UR28][R16.64], R4 ;
        /*0140*/               @P6 BRA `(.L_x_1) ;
.L_x_0:
        /*0150*/                   EXIT ;
.L_x_2:
        /*0160*/                   BRA `(.L_x_2);
"""


def test_the_inner_loop_is_inside_and_not_around() -> None:
    (loop,) = loops(parse(AMD, "amd"))
    assert loop.label == ".LBB0_2"
    assert loop.body[0].mnemonic == "s_clause"
    assert loop.body[-1] == Instruction("s_cbranch_scc1", ".LBB0_2", ".LBB0_2")


def test_amd_counts_by_hand() -> None:
    loop = inner_loop(parse(AMD, "amd"), "amd")
    assert loop is not None
    assert count(loop.body, "amd") == {
        "total": 20, "matrix": 1, "valu": 6, "scalar": 2, "lds_read": 1, "lds_write": 1,
        "shuffle": 1, "global_load": 2, "global_store": 1, "barrier": 1, "wait": 1, "control": 3,
        "packed": 1, "and_or": 1, "shift": 1, "permute": 1, "convert": 1,
    }  # fmt: skip


def test_nvidia_counts_by_hand_and_skips_the_idle_loop_at_the_end() -> None:
    listing = parse(SASS, "nvidia")
    assert [loop.label for loop in loops(listing)] == [".L_x_1", ".L_x_2"]
    loop = inner_loop(listing, "nvidia")
    assert loop is not None
    assert loop.label == ".L_x_1"
    assert count(loop.body, "nvidia") == {
        "total": 19, "matrix": 1, "valu": 7, "scalar": 1, "lds_read": 1, "lds_write": 1,
        "shuffle": 1, "global_load": 2, "global_store": 1, "barrier": 1, "wait": 2, "control": 1,
        "packed": 2, "and_or": 1, "shift": 1, "permute": 1, "convert": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "vendor"), [(AMD, "amd"), (SASS, "nvidia")], ids=["amd", "nvidia"]
)
def test_every_instruction_is_of_one_kind_and_forms_are_of_valu(text: str, vendor: str) -> None:
    body = [item for item in parse(text, vendor) if isinstance(item, Instruction)]
    counts = count(body, vendor)
    assert sum(counts[kind] for kind in KINDS) == counts["total"] == len(body)
    assert 0 < sum(counts[form] for form in FORMS) <= counts["valu"]


def test_without_matrix_instructions_the_loop_with_most_valu_counts() -> None:
    text = (
        ".LBB0_1:\n\tv_add_f32 v0, v1, v2\n\ts_cbranch_scc1 .LBB0_1\n"
        ".LBB0_2:\n\tv_add_f32 v0, v1, v2\n\tv_mul_f32 v0, v1, v2\n\ts_cbranch_scc0 .LBB0_2\n"
        ".LBB0_3:\n\ts_nop 0\n\ts_branch .LBB0_3\n"
    )
    loop = inner_loop(parse(text, "amd"), "amd")
    assert loop is not None
    assert loop.label == ".LBB0_2"


@pytest.mark.parametrize(
    "text",
    ["", "\tv_add_f32 v0, v1, v2\n\ts_endpgm\n", ".LBB0_1:\n\ts_nop 0\n\ts_branch .LBB0_1\n",
     "\ts_branch .LBB0_1\n\tv_add_f32 v0, v1, v2\n.LBB0_1:\n\ts_endpgm\n"],
    ids=["nothing", "straight", "idle", "forward"],
)  # fmt: skip
def test_a_kernel_without_a_loop_that_computes_has_none(text: str) -> None:
    assert inner_loop(parse(text, "amd"), "amd") is None


@pytest.mark.parametrize(
    ("mnemonic", "macs"),
    [
        ("v_wmma_f32_16x16x16_f16", 16 * 16 * 16),
        ("v_mfma_f32_32x32x8f16", 32 * 32 * 8),
        ("v_mfma_f32_16x16x16_bf16", 16 * 16 * 16),
        ("v_swmmac_f32_16x16x32_f16", 16 * 16 * 32),
        ("HGMMA.64x128x16.F32", 64 * 128 * 16 // 4),
        ("HGMMA.64x8x16.F32.BF16", 64 * 8 * 16 // 4),
        ("HMMA.16816.F32", 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 16 * 8 * 8),
        ("v_pk_fma_f16", 0),
        ("FFMA", 0),
    ],
)
def test_products_of_a_matrix_instruction(mnemonic: str, macs: int) -> None:
    assert matrix_macs([Instruction(mnemonic, "")]) == macs


def test_an_arch_of_neither_vendor_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"arch is 'cpu-avx2'; assembly is read of gfx"):
        vendor_of("cpu-avx2")
