"""Figures of a kernel whose text is written by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tilewright.isa.figures import Figures, figures
from tilewright.ops.cross import Compiled
from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Tile

SPACE = TileSpace(
    "t/gpu",
    {"t": {"m": (32, 64), "n": (64,), "k": (32, 64)}},
    (),
    lambda problem: TILE,
    lambda tile: {"M": (tile.m,), "N": (tile.n,), "K": (tile.k, 8 * tile.k)},
)
TILE = Tile.of("t", m=64, n=64, k=32)
WMMA = "\tv_wmma_f32_16x16x16_f16 v[16:23], v[0:7], v[8:15], v[16:23]\n"  # 4096 products a wave


def compiled(wmma: int, valu: int, *, warps: int = 4, arch: str = "gfx1151") -> Compiled:
    """A loop of so many instructions, of `warps` warps and four more that only load."""
    text = (
        "\tv_mov_b32 v0, 0\n.LBB0_1:\n"
        + wmma * WMMA
        + valu * "\tv_pk_add_f16 v0, v1, v2\n"
        + "\ts_cbranch_scc1 .LBB0_1\n\ts_endpgm\n"
        + "    .vgpr_count:     90\n; Occupancy: 16\n"
    )
    module = f'module attributes {{"ttg.num-warps" = {warps} : i32}} {{'
    metadata = {"shared": 4096, "num_warps": warps + 4, "triton_version": "3.7.1"}
    return Compiled("_kernel", arch, {"amdgcn": text, "ttgir": module}, metadata, "", (1,))


def of(wmma: int, valu: int, tile: Tile = TILE, arch: str = "gfx1151") -> Figures:
    return figures(compiled(wmma, valu, arch=arch), tile, SPACE)


def test_what_an_iteration_issues_and_takes() -> None:
    found = of(8, 40)
    assert (found.kernel, found.arch, found.compiler) == ("_kernel", "gfx1151", "triton 3.7.1")
    assert found.loop == ".LBB0_1"
    assert found.matrix == "v_wmma_f32_16x16x16_f16"
    assert (found.counts["total"], found.counts["valu"], found.counts["matrix"]) == (49, 40, 8)
    assert found.resources.vgprs == 90
    assert found.as_dict()["resources"]["lds_bytes"] == 4096


def test_pairs_are_those_of_the_steps_that_the_matrix_instructions_multiply() -> None:
    # 8 of 4096 products in each of 4 warps are 64 x 64 x 32: one step. Its 1024 pairs of weights
    # are 8 for each of 128 lanes, so 40 instructions are 5 a pair.
    assert (of(8, 40).k_step, of(8, 40).valu_per_pair, of(8, 40).issued_per_pair) == (32, 5.0, 6.12)
    # Unrolled by four, the same work.
    assert (of(32, 160).k_step, of(32, 160).valu_per_pair) == (128, 5.0)


def test_rows_that_are_not_there_are_no_steps() -> None:
    # A WMMA multiplies 16 rows of x, where the tile has one: 16 x 64 x 32 a step in 2 of each warp.
    one = TileSpace(
        SPACE.name,
        SPACE.fields,
        (),
        SPACE.default,
        lambda tile: {"M": (1,), "N": (64,), "K": (32,)},
    )
    found = figures(compiled(2, 40), TILE, one)
    assert (found.k_step, found.valu_per_pair) == (32, 5.0)


def test_sums_beside_the_product_are_no_steps() -> None:
    assert (of(12, 40).k_step, of(12, 40).valu_per_pair) == (32, 5.0)


def test_without_matrix_instructions_the_tile_tells() -> None:
    assert (of(0, 40).k_step, of(0, 40).valu_per_pair) == (32, 5.0)


def test_a_wave_of_64_lanes_does_twice_the_work() -> None:
    assert of(8, 40, arch="gfx90a").valu_per_pair == 10.0


@pytest.mark.parametrize("space", [None, dataclasses.replace(SPACE, extents=None)])
def test_without_extents_nothing_is_reckoned_per_weight(space: TileSpace | None) -> None:
    found = figures(compiled(8, 40), TILE, space)
    assert (found.k_step, found.valu_per_pair, found.issued_per_pair) == (None, None, None)
    assert found.counts["valu"] == 40


def test_a_kernel_without_a_loop_is_counted_whole() -> None:
    straight = dataclasses.replace(
        compiled(0, 0), asm={"amdgcn": "\tv_mov_b32 v0, 0\n\ts_endpgm\n"}
    )
    found = figures(straight, TILE, SPACE)
    assert (found.loop, found.counts["total"], found.k_step) == ("", 2, None)


OVERWRITTEN = """
        /*0010*/                   HGMMA.64x64x16.F32 R24, R80, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   HADD2 R80, R1, R2 ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0040*/                   EXIT ;
"""
MISBUILT = """
        /*0010*/                   ULDC UR12, c[0x0][0x210] ;
        /*0020*/                   UIADD3 UR6, UP0, UR12, 0x20, URZ ;
        /*0030*/                   UIADD3.X UR7, UR12, -0x3ffffff0, URZ, UP0 ;
        /*0040*/                   HGMMA.64x64x16.F32 R24, R80, gdesc[UR4], R24, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        (OVERWRITTEN, "'HADD2 R80, R1, R2' writes the left operand of 'HGMMA"),
        (MISBUILT, "is made of an argument in UR7, which must be a constant"),
    ],
    ids=["overwritten", "misbuilt"],
)
def test_code_whose_results_would_be_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, listing: str, message: str
) -> None:
    monkeypatch.setattr("tilewright.isa.figures.listing_text", lambda compiled: listing)
    metadata = {"shared": 4096, "num_warps": 4, "triton_version": "3.7.1"}
    hopper = Compiled("_kernel", "sm_90", {"ptx": "", "ttgir": ""}, metadata, "", (1,))
    (fault,) = figures(hopper, TILE, SPACE).faults
    assert message in fault
    assert of(8, 40).faults == ()
