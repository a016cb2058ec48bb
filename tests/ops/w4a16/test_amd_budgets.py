"""What the Gluon kernel for AMD issues and takes of its chips, as Triton 3.7 compiles it."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from isa.compiling import HAS_TRITON, NO_TRITON
from ops.w4a16.amd_hazards import hazards, scalars_read
from ops.w4a16.amd_jobs import ARCHS, TILES, run_amd
from tilewright.ops.w4a16.amd_space import AMD_FIELDS, lds_bytes, registers
from tilewright.ops.w4a16.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Problem, Tile

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)

SQUARE = TILES["square"]  # 64 x 64 x 64, four warps along N, asymmetric, group 128
# Most VGPRs, and most VALU instructions a wave in one iteration (seen with 3.7.1). 64 packed
# operations on gfx11, whose lanes hold every weight twice, 32 on gfx12, 16 for a wave of 64 lanes.
BUDGETS: dict[tuple[str, str], tuple[int, int]] = {
    ("gfx1151", "float16"): (96, 115),  # 90, 110
    ("gfx1100", "float16"): (96, 115),  # 90, 110
    ("gfx1201", "float16"): (96, 62),  # 96, 58
    ("gfx90a", "float16"): (72, 36),  # 66, 32
    ("gfx942", "float16"): (72, 36),  # 64, 32
    ("gfx1151", "bfloat16"): (126, 184),  # 120, 176
    ("gfx1100", "bfloat16"): (126, 184),  # 120, 176
    ("gfx1201", "bfloat16"): (112, 113),  # 104, 107
    ("gfx90a", "bfloat16"): (84, 54),  # 80, 49
    ("gfx942", "bfloat16"): (84, 56),  # 80, 51
}
PACKED = {"gfx1151": 64, "gfx1100": 64, "gfx1201": 32, "gfx90a": 16, "gfx942": 16}
MATRIX = {"gfx1": "v_wmma_f32_16x16x16", "gfx9": "v_mfma_f32_16x16x16"}


def _problem(arch: str, dtype: str) -> Problem:
    return Problem("w4a16", arch, dtype, "uint4", "float", 256, 4096, 4096, 256)


def _square(dtype: str) -> dict[str, Any]:
    return {**SQUARE, "scale": "weights" if dtype == "float16" else "steps"}


def _tightest(arch: str, dtype: str) -> list[Tile]:
    """The legal tiles that come closest to the chip's registers, one a way of loading x."""
    problem = _problem(arch, dtype)
    found = {}
    for tile in TRITON_SPACE.every():
        if tile.algorithm == "amd" and TRITON_SPACE.broken_rule(tile, problem) is None:
            key = (tile.x_path, tile.num_stages)
            need = registers(tile, problem)
            if key not in found or need > found[key][0]:
                found[key] = (need, tile)
    return [tile for _, tile in found.values()]


TIGHT = {
    f"{arch} {dtype} {tile.x_path} {tile.num_stages}": (arch, dtype, tile)
    for arch, dtype in (("gfx1151", "float16"), ("gfx1201", "bfloat16"), ("gfx90a", "float16"))
    for tile in _tightest(arch, dtype)
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    jobs = {
        f"{arch} {dtype}": {
            "kind": "compiled",
            "arch": arch,
            "tile": _square(dtype),
            "dtype": dtype,
        }
        for arch, dtype in BUDGETS
    }
    for arch in ARCHS:
        jobs[f"{arch} direct"] = {"kind": "compiled", "arch": arch, "tile": TILES["direct"]}
        jobs[f"{arch} ahead"] = {
            "kind": "compiled", "arch": arch, "tile": {**SQUARE, "num_stages": 2}
        }  # fmt: skip
    for name, (arch, dtype, tile) in TIGHT.items():
        jobs[name] = {
            "kind": "compiled", "arch": arch, "tile": tile.as_dict(), "dtype": dtype, "group": 256
        }  # fmt: skip
    return run_amd(jobs)


def _own_triton() -> bool:
    return importlib.metadata.version("triton").startswith("3.7.")


@pytest.mark.skipif(HAS_TRITON and not _own_triton(), reason="budgets are those of triton 3.7")
@pytest.mark.parametrize(("arch", "dtype"), BUDGETS)
def test_registers_and_instructions_stay_within_the_budget(compiled, arch, dtype):
    found = compiled[f"{arch} {dtype}"]
    vgprs, valu = BUDGETS[arch, dtype]
    assert found["error"] == ""
    assert found["resources"]["vgprs"] <= vgprs
    assert found["counts"]["valu"] <= valu


@pytest.mark.parametrize(("arch", "dtype"), BUDGETS)
def test_weights_are_unpacked_in_registers_and_never_stored(compiled, arch, dtype):
    found = compiled[f"{arch} {dtype}"]
    counts, lanes = found["counts"], 64 if arch.startswith("gfx9") else 32
    assert counts["matrix"] == 16
    assert any(name.startswith(MATRIX[arch[:4]]) for name in found["mnemonics"])
    assert "v_and_or_b32" in found["mnemonics"]
    assert counts["lds_write"] == 64 * 64 * 2 // (4 * lanes * 16)  # x, 16 bytes a lane
    assert found["resources"]["lds_bytes"] <= lds_bytes(Tile.from_mapping(SQUARE))
    assert found["resources"]["spills"] == 0
    assert found["resources"]["scratch_bytes"] == 0
    assert found["mentions_fault"] is False
    if dtype == "float16":
        assert counts["packed"] == PACKED[arch]
        assert {"v_pk_add_f16", "v_pk_fma_f16", "v_pk_mul_f16"} <= set(found["mnemonics"])
    else:
        assert {"v_fma_mix_f32", "v_perm_b32"} <= set(found["mnemonics"])
        assert "v_pk_mul_f16" not in found["mnemonics"]


@pytest.mark.parametrize("arch", ARCHS)
def test_words_and_x_are_loaded_as_wide_as_their_step_is(compiled, arch):
    loads = compiled[f"{arch} float16"]["loads"]
    wide = loads.get("buffer_load_b128", 0) + loads.get("buffer_load_dwordx4", 0)
    double = loads.get("buffer_load_b64", 0) + loads.get("buffer_load_dwordx2", 0)
    # x: 64 x 64 x 2 bytes; words: 8, 4 or 2 a lane of gfx11, gfx12 and gfx9. A scale, a zero.
    assert (wide, double, sum(loads.values())) == {
        "gfx11": (6, 0, 8), "gfx12": (5, 0, 7), "gfx90": (2, 1, 5), "gfx94": (2, 1, 5)
    }[arch[:5]]  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
def test_y_is_stored_16_bytes_at_a_time_where_its_rows_allow(compiled, arch):
    lanes = 64 if arch.startswith("gfx9") else 32
    (store,) = compiled[f"{arch} float16"]["stores"].items()
    assert store[0] in ("buffer_store_b128", "buffer_store_dwordx4")
    assert store[1] == 64 * 64 * 2 // (4 * lanes * 16)


@pytest.mark.parametrize("arch", ARCHS)
def test_direct_needs_neither_shared_memory_nor_barriers_in_its_loop(compiled, arch):
    counts = compiled[f"{arch} direct"]["counts"]
    assert (counts["barrier"], counts["lds_read"], counts["lds_write"]) == (0, 0, 0)
    assert counts["matrix"] == 4


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_loaded_ahead_is_under_way_while_a_step_multiplies(compiled, arch):
    found = compiled[f"{arch} ahead"]
    assert found["resources"]["spills"] == 0
    assert found["loads_then_multiplies"]


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "ahead", "direct"])
def test_hazards_that_the_compiler_does_not_see_are_not_there(compiled, arch, name):
    """CDNA needs two cycles between a vector instruction and a matrix instruction that reads what
    it wrote, and more before what a matrix instruction still adds is overwritten. The compiler
    sees to that, but not behind inline assembly."""
    assert hazards(compiled[f"{arch} {name}"]["text"]) == []


TOO_CLOSE = {
    "read after write": """
        ;;#ASMSTART
        v_pk_mul_f16 v20, v20, v37
        v_pk_mul_f16 v21, v21, v37
        ;;#ASMEND
        s_nop 0
        v_mfma_f32_16x16x16f16 v[6:9], v[22:23], v[20:21], v[6:9]
    """,
    "addend overwritten": """
        v_mfma_f32_16x16x16f16 v[26:29], v[28:29], v[34:35], v[30:33]
        s_nop 3
        ;;#ASMSTART
        v_lshrrev_b32 v30, 8, v5
        ;;#ASMEND
    """,
}


@pytest.mark.parametrize("name", TOO_CLOSE)
def test_the_search_for_hazards_finds_what_is_too_close(name):
    text = TOO_CLOSE[name]
    assert len(hazards(text)) == 1
    for waits in ("s_nop 0", "s_nop 3"):
        text = text.replace(waits, "s_nop 6")
    assert hazards(text) == []
    assert hazards(TOO_CLOSE[name].replace("#ASM", "")) == []  # the compiler's own affair


@pytest.mark.parametrize("name", ["float16", "bfloat16", "ahead", "direct"])
def test_inline_assembly_reads_no_scalar_register_on_rdna4(compiled, name):
    text = compiled[f"gfx1201 {name}"]["text"]
    assert ";;#ASMSTART" in text
    assert scalars_read(text) == []
    assert scalars_read(text.replace(", v", ", s"))


@pytest.mark.parametrize("name", TIGHT)
def test_the_tightest_legal_tiles_do_not_spill(compiled, name):
    tile, found = TIGHT[name][2], compiled[name]
    assert found["error"] == ""
    assert found["resources"]["spills"] == 0
    assert found["resources"]["lds_bytes"] <= lds_bytes(tile)


def test_every_field_has_a_tile_that_a_rule_refuses_and_one_that_none_does():
    problem = _problem("gfx1151", "float16")
    legal = TRITON_SPACE.candidates(problem)
    for name, values in AMD_FIELDS["amd"].items():
        seen = {t.as_dict()[name] for t in legal if t.algorithm == "amd"}
        assert seen == set(values)
