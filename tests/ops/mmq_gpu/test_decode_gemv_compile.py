"""mmq's kernel for one row of x compiled for sm_90 with no GPU, by a process of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from job_process import in_two_runs, some_slow
from tilewright.layout.blocks import BLOCK_FORMS
from tilewright.ops.mmq.decode_space import TYPES
from tilewright.tiles.tile import Tile

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_decode_gemv.py")
K = 14336


def job(name: str, of: tuple[int, int], dtype: str = "float16", k: int = K) -> dict[str, Any]:
    tile = Tile.of("decode", block_n=of[0], num_warps=of[1])
    return {"type": name, "tile": tile, "dtype": dtype, "k": k}


JOBS = {
    **{f"{name} 32 rows": job(name, (32, 8)) for name in TYPES},
    "Q4_K 16 rows": job("Q4_K", (16, 16)),
    "Q6_K 16 rows": job("Q6_K", (16, 8)),
    "Q5_0 bfloat16": job("Q5_0", (32, 8), "bfloat16"),
    "Q6_K, K shared unevenly": job("Q6_K", (32, 4), k=2560),
    "Q4_1, by default": job("Q4_1", (16, 8)),
    "Q5_0, by default": job("Q5_0", (16, 8)),
}
DEFAULTS = {"Q4_1, by default", "Q5_0, by default"}
# Quick: types with minima, of 32 values and of 256, and types without; sub-blocks of 16 columns, an
# uneven share, and the defaults.
SLOW = set(JOBS) - {
    *DEFAULTS, "Q4_K 16 rows", "Q6_K 16 rows", "Q5_0 bfloat16", "Q6_K, K shared unevenly",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return in_two_runs(SCRIPT, JOBS, SLOW, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", some_slow(JOBS, SLOW))
def test_it_compiles_and_does_not_spill(compiled, name):
    found = compiled[name]
    assert found["error"] == ""
    # Four words, where registers are held to 128 so that two programs of 8 warps run at once.
    (spilled,) = found["spilled"]
    assert spilled <= (16 if name == "Q6_K 16 rows" else 0)
    assert found["overwritten"] == []


@pytest.mark.parametrize("name", some_slow(JOBS, SLOW))
def test_words_and_x_come_16_bytes_at_a_time(compiled, name):
    tile, form = JOBS[name]["tile"], BLOCK_FORMS[JOBS[name]["type"]]
    words = tile.block_n // 8 * form.low.bits // 2  # loads of a lane and a step
    # x of a lane's own sub-block, and once more for its sums. Of 16 columns it is of both halves of
    # a unit, and sums are of 8 bytes.
    x = 8 if form.sub == 16 else 1 + (4 if form.low.bits == 4 else 2)
    assert compiled[name]["wide_loads"] == 2 * (words + x)  # of the first step and of the next ones


@pytest.mark.parametrize("name", some_slow(JOBS, SLOW))
def test_nothing_is_read_before_other_kernels_have_ended(compiled, name):
    assert compiled[name]["dependent"]
    assert compiled[name]["loads_before_waiting"] == 0


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_two_programs_of_8_warps_have_registers_beside_each_other(compiled, name):
    assert compiled[name]["registers"] <= 128


@pytest.mark.parametrize("name", some_slow(JOBS, SLOW))
def test_scales_cost_no_product(compiled, name):
    """256 columns are 16 products of 16 rows each, and two with ones for the sums of x."""
    tile = JOBS[name]["tile"]
    assert compiled[name]["products"] == tile.block_n + 2


@pytest.mark.parametrize("name", some_slow(JOBS, SLOW))
def test_warps_meet_only_at_the_end(compiled, name):
    tile, found = JOBS[name]["tile"], compiled[name]
    assert found["barriers"] <= 3
    assert found["shared_bytes"] <= 4 * tile.num_warps * tile.block_n
