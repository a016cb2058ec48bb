"""The Triton kernel compiled for chips that are not here; a process of its own, which compiles."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from job_process import in_two_runs, some_slow
from tilewright.ops.w4a16.triton_planted import AHEAD_PLANTED
from tilewright.ops.w4a16.triton_space import TRITON_SPACE, smem_bytes
from tilewright.tiles.tile import Problem, Tile

# Looked for, not imported: this process is the interpreter's.
if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_triton.py")
BASE = Tile.of(
    "triton",
    block_m=64,
    block_n=64,
    block_k=32,
    num_warps=4,
    num_stages=2,
    group_m=8,
    dequant="packed",
    order="xw",
)
TILES = {
    "default": BASE,
    "scalar": BASE.replace(dequant="scalar"),
    "decode": BASE.replace(block_m=16, block_k=64),
    "one stage": BASE.replace(num_stages=1),
    "asm": BASE.replace(block_k=64, dequant="asm"),
    "large": BASE.replace(block_m=128, block_n=128, num_warps=8, num_stages=2),
    "wide": BASE.replace(block_m=128, block_n=256, num_warps=8, num_stages=1, dequant="asm"),
    "narrow": BASE.replace(block_n=16, block_k=64, num_warps=1, num_stages=1),
}
LEFT = BASE.replace(order="wx", dequant="asm")
HOPPER = LEFT.replace(block_m=256, block_n=128, block_k=128, num_warps=8, num_stages=3)
AHEAD = HOPPER.replace(block_k=64, num_stages=4, order="ahead")
SUMS = Tile.of(
    "skinny", block_m=1, block_n=64, block_k=128, split_k=4, num_warps=4, num_stages=2
)  # fmt: skip
DOTS = SUMS.replace(block_m=16, block_k=64)
ARCHS = ("gfx1151", "gfx1201", "gfx90a", "gfx942", "sm_80", "sm_90")
JOBS: dict[str, dict[str, Any]] = {
    **{f"gfx1151 {name}": {"arch": "gfx1151", "tile": t} for name, t in TILES.items()},
    **{f"{arch} default": {"arch": arch, "tile": BASE} for arch in ARCHS},
    **{f"{arch} asm": {"arch": arch, "tile": TILES["asm"]} for arch in ("gfx1201", "gfx90a")},
    "sm_90 large": {"arch": "sm_90", "tile": TILES["large"]},
    "sm_90 decode": {"arch": "sm_90", "tile": TILES["decode"]},
    "sm_80 wide": {"arch": "sm_80", "tile": TILES["wide"]},
    "gfx1151 bfloat16": {"arch": "gfx1151", "tile": BASE, "dtype": "bfloat16"},
    "sm_90 bfloat16": {"arch": "sm_90", "tile": BASE, "dtype": "bfloat16"},
    "sm_80 float32": {"arch": "sm_80", "tile": TILES["scalar"], "dtype": "float32"},
    "gfx942 bytes": {"arch": "gfx942", "tile": BASE, "zeros": "bytes"},
    "gfx942 symmetric": {"arch": "gfx942", "tile": BASE, "zeros": "none"},
    "gfx1151 wide offsets": {"arch": "gfx1151", "tile": BASE, "wide": True},
    "gfx1151 one group": {"arch": "gfx1151", "tile": BASE, "group": 0},
    "sm_90 left": {"arch": "sm_90", "tile": HOPPER, "words": "k32"},
    "sm_90 left bfloat16": {
        "arch": "sm_90", "tile": HOPPER, "words": "k32", "dtype": "bfloat16", "group": 0,
    },
    "sm_90 left k8": {"arch": "sm_90", "tile": HOPPER},
    "sm_90 left symmetric": {"arch": "sm_90", "tile": HOPPER, "words": "k32", "zeros": "none"},
    "sm_90 left small": {
        "arch": "sm_90", "words": "k32",
        "tile": HOPPER.replace(block_n=64, block_k=64, num_warps=4),
    },
    "sm_90 left not awaited": {"arch": "sm_90", "tile": HOPPER, "words": "k32", "unawaited": True},
    "sm_90 ahead": {"arch": "sm_90", "tile": AHEAD, "words": "k32"},
    "sm_90 ahead bfloat16": {
        "arch": "sm_90", "tile": AHEAD, "words": "k32", "dtype": "bfloat16", "group": 0,
    },
    "sm_90 ahead bytes": {
        "arch": "sm_90", "words": "k32", "zeros": "bytes",
        "tile": AHEAD.replace(block_n=64, num_warps=4),
    },
    "sm_90 ahead symmetric": {
        "arch": "sm_90", "words": "k32", "zeros": "none", "dtype": "bfloat16",
        "tile": AHEAD.replace(block_m=128, block_k=128, num_stages=2),
    },
    "sm_90 ahead groups of 32": {
        "arch": "sm_90", "words": "k32", "group": 32,
        "tile": AHEAD.replace(block_n=64, block_k=32, num_warps=4),
    },
    "sm_90 ahead small": {
        "arch": "sm_90", "words": "k32", "dtype": "bfloat16",
        "tile": AHEAD.replace(block_m=64, block_n=64, num_warps=4),
    },
    "sm_90 ahead one stage": {
        "arch": "sm_90", "tile": AHEAD.replace(num_stages=1), "words": "k32",
    },
    "sm_80 left": {"arch": "sm_80", "tile": LEFT, "words": "k32"},
    "sm_90 few": {"arch": "sm_90", "tile": SUMS, "words": "k32", "m": 1},
    "gfx1151 few": {"arch": "gfx1151", "tile": SUMS, "m": 1},
    "sm_90 shares": {"arch": "sm_90", "tile": DOTS, "words": "k32", "m": 16},
    "gfx1151 shares": {"arch": "gfx1151", "tile": DOTS.replace(num_stages=1), "m": 16},
}  # fmt: skip


def default_job(arch: str, dtype: str, m: int, n: int) -> dict[str, Any]:
    """The tile for an N of `n`; it is compiled for fewer columns."""
    problem = Problem("w4a16_triton", arch, dtype, "uint4", "float", m, n, 4096, 128)
    return {"arch": arch, "tile": TRITON_SPACE.default(problem), "dtype": dtype, "m": m}


DEFAULTS = {
    f"{arch} {dtype} N={n} M={m}": default_job(arch, dtype, m, n)
    for arch, dtype in (
        ("gfx1151", "float16"), ("gfx1151", "bfloat16"), ("gfx1100", "float16"),
        ("gfx1201", "bfloat16"), ("gfx90a", "float16"), ("gfx942", "bfloat16"),
    )
    for m, n in ((1, 4096), (16, 4096), (512, 1024), (512, 24576))
}  # fmt: skip
JOBS |= DEFAULTS
FAULTS = {
    f"sm_90 planted {wrong.name}": {"arch": "sm_90", "tile": wrong.tile, "words": "k32"}
    for wrong in AHEAD_PLANTED
}
EDGES = {  # of the rule "two steps in registers": tiles on either side of it
    f"sm_90 {m}x{n}x{k} of {warps} warps, {stages} stages": {
        "arch": "sm_90", "words": "k32",
        "tile": AHEAD.replace(
            block_m=m, block_n=n, block_k=k, num_warps=warps, num_stages=stages
        ),
    }
    for m, n, k, warps, stages in (
        (256, 128, 128, 8, 1), (256, 64, 64, 4, 1), (128, 256, 128, 16, 3),
        (256, 128, 64, 8, 1), (256, 64, 64, 4, 2), (128, 256, 64, 16, 1), (128, 64, 128, 4, 1),
    )
}  # fmt: skip
SLOW = {name for name, job in DEFAULTS.items() if job["arch"] in ("gfx1100", "gfx1201", "gfx90a")}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return in_two_runs(
        SCRIPT, JOBS | EDGES | FAULTS, SLOW, tmp_path_factory.mktemp("triton"), timeout=240
    )


@pytest.mark.parametrize("name", some_slow(JOBS, SLOW))
def test_it_compiles(compiled, name):
    found = compiled[name]
    assert found["error"] == ""
    assert found["binary_bytes"] > 1000


BY_DOTS = [
    name
    for name, job in JOBS.items()
    if "float32" not in name and job["tile"].block_m >= 16 and not name.endswith("M=512")
]


@pytest.mark.parametrize("name", some_slow(BY_DOTS, SLOW))
def test_it_multiplies_on_matrix_units(compiled, name):
    arch, tile = JOBS[name]["arch"], JOBS[name]["tile"]
    unit = {"gfx1": "v_wmma_f32", "gfx9": "v_mfma_f32", "sm_8": "mma.sync", "sm_9": "wgmma"}
    # Hopper's unit takes four warps and 64 rows of the left operand.
    rows = tile.block_n if tile.as_dict().get("order", "wx") == "wx" else tile.block_m
    small = arch == "sm_90" and (rows < 64 or tile.num_warps < 4)
    assert compiled[name]["matrix"].startswith("mma.sync" if small else unit[arch[:4]])


# Words of the order "k8" are not what w4a16 packs for sm_90.
RECKONED = [
    n for n, job in JOBS.items() if job["tile"].algorithm == "triton" and n != "sm_90 left k8"
]


@pytest.mark.parametrize("name", some_slow(RECKONED, SLOW))
def test_it_never_needs_more_shared_memory_than_the_space_reckons(compiled, name):
    job = JOBS[name]
    problem = Problem(
        "w4a16_triton", job["arch"], job.get("dtype", "float16"), "uint4", "float", 512, 512,
        1024, job.get("group", 128) or -1,
    )  # fmt: skip
    TRITON_SPACE.check(job["tile"], problem)
    assert compiled[name]["shared_bytes"] <= smem_bytes(job["tile"], problem)


@pytest.mark.parametrize(
    "name", some_slow([n for n in JOBS if n not in ("sm_80 float32", "sm_90 left k8")], SLOW)
)
def test_it_does_not_spill(compiled, name):
    assert compiled[name]["spilled"] == 0


@pytest.mark.parametrize("name", EDGES)
def test_of_tiles_ahead_those_that_spill_are_refused(compiled, name):
    at = Problem("w4a16_triton", "sm_90", "float16", "uint4", "float", 512, 512, 1024, 128)
    rule = TRITON_SPACE.broken_rule(EDGES[name]["tile"], at)
    assert compiled[name]["error"] == ""
    assert (compiled[name]["spilled"] > 0) == (rule is not None)
    assert rule is None or rule.name == "two steps in registers"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_tile_compiles_and_is_served(compiled, name):
    assert compiled[name]["error"] == ""
    assert compiled[name]["kernels"] == ["_w4a16_ahead_kernel"]
    assert compiled[name]["spilled"] == compiled[name]["overwritten"] == 0


AHEADS = [name for name in JOBS if name.startswith("sm_90 ahead")]


@pytest.mark.parametrize(
    "name", ["sm_90 left", "sm_90 left bfloat16", "sm_90 left symmetric", *AHEADS]
)
def test_wgmma_is_not_serialized(compiled, name):
    assert compiled[name]["serialized"] == []


@pytest.mark.parametrize("name", [n for n, job in JOBS.items() if job["arch"] == "sm_90"])
def test_no_register_is_overwritten_while_wgmma_reads_it(compiled, name):
    """Triton leaves products pending from step to step; on an H200 sums were wrong for it."""
    assert (compiled[name]["overwritten"] == 0) == (not name.endswith("not awaited"))


@pytest.mark.parametrize("name", ["sm_90 left", "sm_90 left symmetric"])
def test_weights_of_words_of_32_columns_do_not_pass_through_shared_memory(compiled, name):
    """What is allotted is what is loaded: x three times, words, scales, zero points twice."""
    zeros = 0 if "symmetric" in name else 4
    loads = 3 * 256 * 128 * 2 + 2 * 128 * (128 // 2 + 4 + zeros)
    assert compiled[name]["shared_bytes"] == loads
    assert compiled["sm_90 left k8"]["shared_bytes"] > compiled["sm_90 left"]["shared_bytes"]


@pytest.mark.parametrize("name", AHEADS)
def test_weights_made_ahead_leave_no_register(compiled, name):
    """What is allotted is x, and in the end the outputs, which are exchanged before they are
    stored; words, scales and zero points never lie in shared memory."""
    tile = JOBS[name]["tile"]
    loads = tile.num_stages * tile.block_m * tile.block_k * 2
    assert compiled[name]["kernels"] == ["_w4a16_ahead_kernel"]
    assert compiled[name]["shared_bytes"] <= max(loads, tile.block_m * tile.block_n * 2)


@pytest.mark.parametrize(
    "name", ["gfx1151 asm", "gfx1201 asm", "gfx90a asm", "sm_90 left", "sm_90 left bfloat16"]
)
def test_pairs_are_made_in_packed_instructions(compiled, name):
    """64 x 64 weights a step over 128 threads are 16 pairs each; 128 x 128 over 256 are 32."""
    at_least = {"gfx9": 8, "gfx1": 16, "sm_9": 32}[name[:4]]
    assert compiled[name]["packed"] >= at_least
    assert compiled[name]["and_or"] >= at_least


@pytest.mark.parametrize("name", ["gfx1151 default", "sm_90 default", "gfx1151 scalar"])
def test_without_asm_there_is_none(compiled, name):
    assert compiled[name]["asm"] == 0


@pytest.mark.parametrize("name", [name for name in JOBS if name.endswith((" few", " shares"))])
def test_shares_are_summed_by_a_second_kernel(compiled, name):
    first = "_w4a16_skinny_kernel" if name.endswith("few") else "_w4a16_kernel"
    assert compiled[name]["kernels"] == [first, "_sum_kernel"]


def test_64_bit_offsets_cost_something_and_are_there(compiled):
    assert compiled["gfx1151 wide offsets"]["wide_multiplies"] > 0
    assert compiled["gfx1151 default"]["wide_multiplies"] == 0


def test_a_planted_fault_leaves_no_trace_in_the_right_kernel(compiled):
    """FAULT is a constexpr: without one the kernel holds no code of any."""
    assert compiled["gfx1151 default"]["mentions_fault"] is False
