"""The Gluon kernel for AMD, compiled for its chips and executed instruction by instruction."""

from __future__ import annotations

from typing import Any

import pytest

from isa.compiling import HAS_TRITON, NO_TRITON
from ops.w4a16.amd_jobs import ARCHS, TILES, run_amd
from tilewright.ops.w4a16.amd_planted import AMD_PLANTED

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)

# Name of a tile, case: every group size, both ends of K and N, x in all forms, both dtypes.
CASES = (
    ("square", "uint4-g64-M17-N33-K192-fp16"),
    ("square", "uint4-g64-M17-N33-K192-bf16-edge"),
    ("ahead", "uint4-g32-M17-N40-K160-fp16-outliers"),
    ("ahead", "uint4-g64-M5-N33-K192-bf16-act_order-bias-outliers-strided"),
    ("direct", "uint4-gK-M5-N24-K200-bf16"),
    ("direct", "uint4b8-gK-M16-N31-K132-fp16"),
    ("two by two", "uint4-g128-M17-N97-K384-fp16-bias"),
    ("small", "uint4b8-g128-M17-N64-K256-bf16-transposed"),
    ("small", "uint4-g64-M130-N33-K192-fp16"),  # nine rows of tiles: more than one band
)
# gfx1100 has gfx1151's matrix units: its own code is executed once a dtype.
QUICK = [
    (arch, tile, case)
    for arch in ARCHS
    for tile, case in (CASES if arch != "gfx1100" else CASES[:2])
]
FROBENIUS = {"fp16": 3e-4, "bf16": 2.5e-3}


@pytest.fixture(scope="module")
def executed() -> dict[str, dict[str, Any]]:
    return run_amd(
        {
            f"{arch} {tile} {case}": {
                "kind": "executed", "arch": arch, "tile": TILES[tile], "case": case
            }
            for arch, tile, case in QUICK
        }
    )  # fmt: skip


@pytest.mark.parametrize(("arch", "tile", "case"), QUICK)
def test_its_machine_code_computes_what_the_oracle_does(executed, arch, tile, case):
    found = executed[f"{arch} {tile} {case}"]
    assert found["error"] == ""
    assert found["passed"], found["reason"]
    dtype = next(name for name in FROBENIUS if name in case)
    if "edge" not in case:  # there float16 outputs are subnormal
        assert found["frobenius"] < FROBENIUS[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_case_of_the_spec_on_one_tile_or_another(arch):
    from tilewright.ops.w4a16.gpu_spec import gpu_spec
    from tilewright.ops.w4a16.triton_space import TRITON_SPACE
    from tilewright.tiles.tile import Tile

    jobs = {}
    for case in gpu_spec(arch, "cpu").cases:
        legal = [
            fields
            for fields in TILES.values()
            if TRITON_SPACE.broken_rule(Tile.from_mapping(fields), case.problem(arch)) is None
        ]
        if case.M and legal:
            tile = legal[len(jobs) % len(legal)]
            jobs[case.id] = {"kind": "executed", "arch": arch, "tile": tile, "case": case.id}
    assert len(jobs) > 80
    assert {tuple(job["tile"].values()) for job in jobs.values()} == {
        tuple(fields.values()) for fields in TILES.values()
    }
    for part in range(4):
        found = run_amd({case: jobs[case] for case in list(jobs)[part::4]})
        assert {case: f for case, f in found.items() if f["error"] or not f["passed"]} == {}


VARIED: dict[str, dict[str, Any]] = {
    "zero points as bytes": {"case": "uint4-g32-M17-N40-K160-fp16", "pack_zeros": False},
    "float32 scales, float16 x": {"case": "uint4-g64-M33-N33-K192-fp16", "scales": "float32"},
    "float16 scales, bfloat16 x": {"case": "uint4-g64-M17-N33-K192-bf16", "scales": "float16"},
    "words in rows with gaps": {"case": "uint4-g64-M17-N33-K192-fp16", "padded": True},
    "y stored column by column": {"case": "uint4-g64-M17-N33-K192-fp16", "transposed": True},
}


@pytest.fixture(scope="module")
def varied() -> dict[str, dict[str, Any]]:
    return run_amd(
        {
            f"{arch} {name}": {"kind": "varied", "arch": arch, "tile": TILES["ahead"], **job}
            for arch in ("gfx1151", "gfx90a")
            for name, job in VARIED.items()
        }
    )


@pytest.mark.parametrize("arch", ["gfx1151", "gfx90a"])
@pytest.mark.parametrize("name", VARIED)
def test_it_takes_what_the_layout_and_its_strides_allow(varied, arch, name):
    found = varied[f"{arch} {name}"]
    assert found["error"] == ""
    assert found["frobenius"] < FROBENIUS["bf16" if "bf16" in VARIED[name]["case"] else "fp16"]


TINY = {"all ones": (1, 1, 1), "less than a word": (2, 3, 5), "one row of y": (1, 33, 64)}


@pytest.fixture(scope="module")
def tiny() -> dict[str, dict[str, Any]]:
    """Triton compiles arguments that are 1 as constants, and differently."""
    return run_amd(
        {
            f"{tile} {name}": {
                "kind": "executed", "arch": "gfx942", "tile": TILES[tile],
                "case": ["w4a16", "uint4", "float16", *sizes, -1],
            }
            for tile in ("ahead", "direct", "small")
            for name, sizes in TINY.items()
        }
    )  # fmt: skip


@pytest.mark.parametrize("tile", ["ahead", "direct", "small"])
@pytest.mark.parametrize("name", TINY)
def test_sizes_of_one_and_less_than_a_word(tiny, tile, name):
    assert tiny[f"{tile} {name}"]["error"] == ""
    assert tiny[f"{tile} {name}"]["passed"], tiny[f"{tile} {name}"]["reason"]


def _case(planted: Any, **other: int) -> list[Any]:
    (case,) = planted.cases
    sizes = {"m": case.M, "n": case.N, "k": case.K, "group": case.group, **other}
    return [case.op, case.weight_type, case.act_dtype, *sizes.values()]


# What makes each fault visible: its own case, or one that its tile does not divide.
WRONG = {
    "partial-rows": {"m": 17},
    "k-tail": {"k": 200},
    "group-straddled": {},
    "scale-row": {},
    "no-start": {},
    "past-the-end": {},
}


@pytest.fixture(scope="module")
def planted() -> dict[str, dict[str, Any]]:
    jobs = {}
    for wrong in AMD_PLANTED:
        case = _case(wrong, **WRONG[wrong.name])
        for name, tile in ((f"wrong {wrong.name}", wrong.tile), (wrong.name, wrong.honest)):
            jobs[name] = {
                "kind": "executed", "arch": "gfx1151", "tile": tile.as_dict(), "case": case
            }  # fmt: skip
    for name in ("partial-rows", "k-tail"):
        wrong = next(p for p in AMD_PLANTED if p.name == name)
        jobs[f"hidden {name}"] = {
            "kind": "executed", "arch": "gfx1151", "tile": wrong.tile.as_dict(),
            "case": _case(wrong),
        }  # fmt: skip
    return run_amd(jobs)


@pytest.mark.parametrize("name", [p.name for p in AMD_PLANTED])
def test_a_planted_tile_is_wrong_and_the_honest_one_is_right(planted, name):
    assert planted[name]["passed"], planted[name]
    assert planted[f"wrong {name}"]["error"] == ""
    assert not planted[f"wrong {name}"]["passed"]


def test_a_row_past_the_end_is_written_outside_of_y(planted):
    reason = planted["wrong past-the-end"]["reason"]
    assert "buffer_store" in reason
    assert f"the nearest tensor spans {17 * 64 * 2} bytes" in reason


@pytest.mark.parametrize("name", ["partial-rows", "k-tail"])
def test_a_fault_of_edges_hides_where_the_tile_divides_the_product(planted, name):
    assert planted[f"hidden {name}"]["passed"]
