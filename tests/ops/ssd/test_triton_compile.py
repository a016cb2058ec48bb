"""ssd's kernels compiled for chips that are not here; a process of its own compiles them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from job_process import in_two_runs, some_slow
from tilewright.ops.contract import Case
from tilewright.ops.ssd.triton_space import TRITON_SPACE, smem_bytes
from tilewright.tiles.tile import Problem, Tile

# Looked for, not imported: this process is the interpreter's.
if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_ssd.py")
ARCHS = ("sm_90", "sm_80", "gfx90a", "gfx942", "gfx1151")
HOPPER = Tile.of("hopper", chunk=64, segments=1, num_stages=4)


def problem_of(job: dict[str, Any]) -> Problem:
    p = job.get("p", 64)
    dtype = job.get("dtype", "bfloat16")
    return Case("ssd", f"p{p}", dtype, 4096, 32 * p, job.get("n", 128), 16).problem(job["arch"])


def job(arch: str, tile: Tile | None = None, **more: Any) -> dict[str, Any]:
    """A scan of 32 heads in 2 groups; the default tile, or the one given."""
    made = {"arch": arch, **more}
    return {**made, "tile": tile or TRITON_SPACE.default(problem_of(made))}


JOBS: dict[str, dict[str, Any]] = {
    **{f"{arch} bf16": job(arch) for arch in ARCHS},
    **{
        f"{arch} fp16 P=80": job(arch, dtype="float16", p=80, gate=True)
        for arch in ("sm_90", "gfx90a", "gfx1151")
    },
    **{f"{arch} fp32": job(arch, dtype="float32", packed=True) for arch in ("gfx1151",)},
    **{f"{arch} N=256": job(arch, n=256, initial=True) for arch in ("sm_90", "gfx90a")},
    "hopper": job("sm_90", HOPPER),
    "hopper packed": job(
        "sm_90", HOPPER.replace(segments=2), dtype="float16", packed=True, gate=True, wide=True
    ),
    "hopper N=64": job("sm_90", HOPPER, n=64, initial=True),
    "hopper P=80": job("sm_90", HOPPER, p=80),
    "hopper float16 packed": job(
        "sm_90", HOPPER.replace(num_stages=3), dtype="float16", packed=True, initial=True
    ),
    **{
        f"sm_90 {algorithm} {chunk}/{block}": job(
            "sm_90",
            Tile.of(
                algorithm,
                chunk=chunk,
                block=block,
                block_p=64,
                block_n=64,
                heads=2,
                num_warps=block // 16,
                num_stages=2,
            ),
        )
        for algorithm, chunk, block in (("five", 256, 64), ("five", 128, 128), ("fused", 64, 64))
    },
    "sm_90 fused one head, transposed": job(
        "sm_90",
        Tile.of(
            "fused", chunk=64, block=32, block_p=16, block_n=32, heads=1, num_warps=4, num_stages=2
        ),
        p=16,
        n=32,
        gate=True,
        transposed=True,
    ),  # fmt: skip
    "sm_90 persistent": job(
        "sm_90", Tile.of("persistent", chunk=32, block_p=64, segments=2, num_warps=4, num_stages=3)
    ),
    "step sm_90": {"arch": "sm_90", "tile": "step"},
    "step gfx90a": {"arch": "gfx90a", "tile": "step"},
}
SLOW = {
    "gfx942 bf16", "gfx90a fp16 P=80", "gfx1151 fp16 P=80", "sm_90 N=256",
    "gfx90a N=256", "hopper N=64", "sm_90 five 128/128",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return in_two_runs(SCRIPT, JOBS, SLOW, tmp_path_factory.mktemp("triton"), timeout=900)


by_job = pytest.mark.parametrize("name", some_slow(JOBS, SLOW))


@by_job
def test_it_compiles_and_does_not_spill(compiled, name):
    assert compiled[name]["error"] == ""
    assert {k["kernel"]: k["spilled"] for k in compiled[name]["kernels"] if k["spilled"]} == {}


@by_job
def test_no_product_waits_for_the_one_before(compiled, name):
    assert [k["kernel"] for k in compiled[name]["kernels"] if k["serialized"]] == []


@by_job
def test_no_operand_is_overwritten_while_a_product_reads_it(compiled, name):
    assert {
        k["kernel"]: k["overwritten"] for k in compiled[name]["kernels"] if k["overwritten"]
    } == {}


@pytest.mark.parametrize(
    "name",
    some_slow(
        [
            n
            for n in JOBS
            if not any(word in n for word in ("step", "fp32", "persistent", "transposed"))
        ],
        SLOW,
    ),
)
def test_it_multiplies_on_matrix_units(compiled, name):
    unit = {"gfx1": "v_wmma_f32", "gfx9": "v_mfma_f32", "sm_8": "mma.sync", "sm_9": "wgmma"}
    wanted = unit[JOBS[name]["arch"][:4]]
    found = {k["kernel"]: k["matrix"] for k in compiled[name]["kernels"]}
    others = {"_prepare_kernel", "_pass_kernel"}
    assert [k for k, m in found.items() if k not in others and not m.startswith(wanted)] == []


@pytest.mark.parametrize("name", some_slow([n for n in JOBS if "step" not in n], SLOW))
def test_it_never_needs_more_shared_memory_than_the_space_reckons(compiled, name):
    made = JOBS[name]
    TRITON_SPACE.check(made["tile"], problem_of(made))
    most = smem_bytes(made["tile"], problem_of(made))
    assert max(k["shared_bytes"] for k in compiled[name]["kernels"]) <= most


def test_hopper_runs_its_own_kernel(compiled):
    names = [k["kernel"] for k in compiled["hopper packed"]["kernels"]]
    assert names == ["_prepare_kernel", "_states_kernel", "_pass_kernel", "_walk_hopper_kernel"]


@pytest.mark.parametrize(
    ("name", "is_so"),
    [("hopper", True), ("hopper float16 packed", True), ("hopper P=80", True),
     ("hopper packed", False)],
)  # fmt: skip
def test_y_goes_by_tma_where_nothing_is_left_to_be_done_to_it(compiled, name, is_so):
    assert compiled[name]["kernels"][-1]["stores_by_tma"] is is_so


def test_a_planted_fault_leaves_no_trace_in_the_right_kernel(compiled):
    assert not any(k["mentions_fault"] for k in compiled["sm_90 bf16"]["kernels"])
