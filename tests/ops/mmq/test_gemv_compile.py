"""mmq's kernel for few rows compiled for chips that are not here, by a process of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from job_process import in_two_runs, some_slow
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.tiles.tile import Tile

# Looked for, not imported: this process is the interpreter's.
if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_gemv.py")
DOTS = Tile.of("gemv", block_m=8, block_n=16, num_warps=4, units=1, ahead=1, split_k=1)


def job(arch: str, name: str, dtype: str = "float16", **change: Any) -> dict[str, Any]:
    tile = DOTS.replace(**change)
    return {"arch": arch, "type": name, "m": tile.block_m, "dtype": dtype, "tile": tile}


JOBS: dict[str, dict[str, Any]] = {
    **{f"sm_90 {name}": job("sm_90", name) for name in BLOCK_TYPES},
    **{f"sm_90 {name} alone": job("sm_90", name, units=2, ahead=0) for name in ("Q5_K", "Q8_0")},
    "sm_90 Q4_K bfloat16": job("sm_90", "Q4_K", "bfloat16"),
    "sm_90 Q6_K bfloat16": job("sm_90", "Q6_K", "bfloat16", ahead=0),
    "sm_90 Q4_0 16 rows": job("sm_90", "Q4_0", block_m=16, num_warps=8, split_k=2),
    "sm_90 Q4_K float32": job("sm_90", "Q4_K", "float32", block_m=1, block_n=8, units=1),
    "gfx1151 Q4_K": job("gfx1151", "Q4_K", block_m=16, units=1, ahead=0),
    "gfx942 Q6_K": job("gfx942", "Q6_K", block_m=16),
}
QUICK = ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q3_K", "IQ4_XS")
SLOW = {f"sm_90 {name}" for name in BLOCK_TYPES if name not in QUICK} | {"sm_90 Q8_0 alone"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return in_two_runs(SCRIPT, JOBS, SLOW, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", some_slow(JOBS, SLOW))
def test_it_compiles_and_does_not_spill(compiled, name):
    found = compiled[name]
    assert found["error"] == ""
    assert found["spilled"] == 0
    assert (found["matrix"] > 0) == ("float32" not in name)
    assert found["mentions_fault"] is False


@pytest.mark.parametrize("name", some_slow([n for n in JOBS if n[:5] == "sm_90"], SLOW))
def test_nothing_changes_lanes_within_the_loop(compiled, name):
    """Shared memory is for the warps' sums alone, and words come 16 bytes at a time."""
    tile, found = JOBS[name]["tile"], compiled[name]
    if "float32" not in name:
        assert found["shared_bytes"] <= 4 * tile.num_warps * tile.block_n * tile.block_m
        assert found["barriers"] <= 4  # of the one exchange between warps
    assert found["wide_loads"] >= tile.units * tile.block_n // 8


def test_shares_are_summed_by_a_second_kernel(compiled):
    assert compiled["sm_90 Q4_0 16 rows"]["kernels"] == ["_gemv_kernel", "_sum_kernel"]
    assert compiled["sm_90 Q4_0"]["kernels"] == ["_gemv_kernel"]
