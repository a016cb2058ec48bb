"""mmq's 8-bit kernels compiled for chips that are not here; a process of its own compiles them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from job_process import in_two_runs, run_script, some_slow
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.ops.contract import Case
from tilewright.ops.mmq.int8_space import smem_bytes
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Tile

# Looked for, not imported: this process is the interpreter's.
if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_int8.py")
ARCHS = ("sm_90", "gfx1151", "gfx90a", "gfx942")
UNITS = {"sm_90": r"IGMMA", "gfx11": "v_wmma_i32", "gfx90": "v_mfma_i32", "gfx94": "v_mfma_i32"}


def tile(arch: str, block_m: int = 64, block_n: int = 64, **more: Any) -> Tile:
    fields = {"schedule": "data-parallel", "split_k": 1, "units": 0, **more}
    stages = {"sm_90": 3, "gfx1151": 1}.get(arch, 2)
    return Tile.of(
        "int8", block_m=block_m, block_n=block_n, num_warps=block_n // 16, num_stages=stages,
        group_m=8, **fields,
    )  # fmt: skip


def job(arch: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"arch": arch, "type": name, "m": 512, "tile": tile(arch, **fields)}


JOBS: dict[str, dict[str, Any]] = {
    **{
        f"{arch} {name}": job(arch, name)
        for i, arch in enumerate(ARCHS)
        for j, name in enumerate(BLOCK_TYPES)
        if j % 4 == i
    },
    "sm_90 Q6_K": job("sm_90", "Q6_K"),
    **{
        f"{arch} {name} {schedule}": job(arch, name, schedule=schedule, split_k=split)
        for arch, name, schedule, split in (
            ("sm_90", "Q4_K", "stream-k", 1), ("gfx90a", "Q6_K", "stream-k", 1),
            ("gfx942", "Q4_0", "split-k", 4),
        )
    },
}  # fmt: skip
QUICK = {  # beside sm_90 and gfx1151
    "gfx90a Q6_K stream-k", "gfx942 Q4_0 split-k", "gfx90a Q5_0", "gfx942 Q5_1",
}  # fmt: skip
LATE = {name for name, one in JOBS.items() if one["arch"][:4] == "gfx9"} - QUICK
SLOW: dict[str, dict[str, Any]] = {
    **{f"{arch} {name}": job(arch, name) for arch in ARCHS for name in BLOCK_TYPES},
    **{
        f"sm_90 {name} {block_m}x{block_n}": job("sm_90", name, block_m=block_m, block_n=block_n)
        for name in BLOCK_TYPES
        for block_m, block_n in ((32, 32), (64, 128))
    },
    **{
        f"{arch} {name} 128x128": job(arch, name, block_m=128, block_n=128)
        for name in BLOCK_TYPES
        for arch in ("gfx90a", "sm_90")
        if BLOCK_TYPES[name].sub == 32
    },
}


def compiled(jobs: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    return run_script(SCRIPT, jobs, folder, timeout=900)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return in_two_runs(SCRIPT, JOBS, LATE, tmp_path_factory.mktemp("triton"))


def held(job: dict[str, Any], found: dict[str, Any]) -> None:
    """It compiles for integer matrix units, does not spill, waits for no product but its own, never
    writes an operand of one under way, and allots what the space reckons."""
    assert found["error"] == ""
    assert found["spilled"] == 0
    assert found["serialized"] == []
    assert found["overwritten"] == []
    assert found["mentions_fault"] is False
    unit = UNITS[job["arch"][:5]] if job["tile"].block_n >= 64 else "IMMA"
    assert found["matrix"]
    assert all(name.startswith(unit) for name in found["matrix"]), found["matrix"]
    case = Case("mmq", job["type"], "float16", job["m"], 512, 1024, 0, "int8")
    assert found["shared_bytes"] <= smem_bytes(job["tile"], case.problem(job["arch"]))
    TRITON_SPACE.check(job["tile"], case.problem(job["arch"]))


@pytest.mark.parametrize("name", some_slow(JOBS, LATE))
def test_integer_products_on_matrix_units(results, name):
    held(JOBS[name], results[name])


@pytest.mark.slow
def test_every_type_and_size(tmp_path):
    found = compiled(SLOW, tmp_path)
    for name, job in SLOW.items():
        held(job, found[name])


@pytest.mark.parametrize("name", some_slow(JOBS, LATE))
def test_what_is_launched(results, name):
    first = ["_quantize_rows_kernel", "_mmq_int8_kernel"]
    whole = JOBS[name]["tile"].schedule == "data-parallel"
    assert results[name]["kernels"] == (first if whole else [*first, "fix_up_kernel"])


def test_a_block_of_two_scales_is_multiplied_in_halves(results):
    """Twice by 32 columns of which half are zeros on NVIDIA, by 16 on AMD: no more instructions."""
    assert results["sm_90 Q5_K"]["matrix"] == {"IGMMA.64x64x32.S8.S8": 1}
    assert results["sm_90 Q6_K"]["matrix"] == {"IGMMA.64x64x32.S8.S8": 2}
    assert results["gfx90a Q6_K stream-k"]["matrix"] == {"v_mfma_i32_32x32x8i8": 4}
