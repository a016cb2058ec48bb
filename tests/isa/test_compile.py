"""Tiles and kernels compiled for chips that are not here, and what is refused."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isa.compiling import HAS_TRITON, NO_TRITON, Job, run_jobs, run_python
from job_process import some_slow, two_runs
from tilewright.errors import FormatError, TileError, UnsupportedError
from tilewright.isa.compile import OPS, compile_tile, default_tile
from tilewright.isa.launches import EXPERTS, _experts
from tilewright.layout.experts import pack_gpu_experts
from tilewright.ops.catalog import SPECS
from tilewright.ops.cross import check_arch, cross_compile, warp_size
from tilewright.tiles.tile import Problem, Tile

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)

SQUARE = "triton(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=2, order=xw)"
ARCHS = ("gfx1151", "gfx1100", "gfx1201", "gfx90a", "gfx942", "sm_80", "sm_90")
JOBS = {
    **{arch: Job(arch, SQUARE) for arch in ARCHS},
    "gfx1151 bfloat16": Job("gfx1151", SQUARE, "bfloat16"),
    "sm_90 bfloat16": Job("sm_90", SQUARE, "bfloat16"),
    "symmetric": Job("gfx1151", SQUARE, weight_type="uint4b8"),
    "one group": Job("gfx1151", SQUARE, group=-1),
    "ragged": Job("gfx1151", SQUARE, m=33, n=97, k=200, group=-1),
    "default": Job("gfx1151"),
    "sm_90 float32": Job("sm_90", dtype="float32"),
    "large": Job("sm_90", "triton(block_m=256, block_n=512, block_k=64, num_warps=4)"),
}
UNITS = {
    "gfx11": "v_wmma_f32_16x16x16_", "gfx12": "v_wmma_f32_16x16x16_", "gfx9": "v_mfma_f32_",
    "sm_80": "HMMA.16816.F32", "sm_90": "HGMMA.64x64x16.F32",
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Mapping[str, dict[str, Any]]:
    return run_jobs(JOBS)


def test_numbers_of_32_bits_are_none_of_the_hopper_kernels(
    found: Mapping[str, dict[str, Any]],
) -> None:
    assert found["sm_90 float32"]["tile"].startswith("triton(")


@pytest.mark.parametrize("name", [n for n in JOBS if n not in ("large", "sm_90 float32")])
def test_it_compiles_and_a_loop_that_multiplies_is_found(
    found: Mapping[str, dict[str, Any]], name: str
) -> None:
    entry = found[name]
    assert entry["error"] == ""
    (kernel,) = entry["kernels"]
    unit = next(unit for arch, unit in UNITS.items() if kernel["arch"].startswith(arch))
    assert kernel["matrix"].startswith(unit)
    assert kernel["loop"]
    assert kernel["counts"]["matrix"] > 0
    assert kernel["resources"]["vgprs"] > 0
    assert kernel["resources"]["lds_bytes"] > 0
    assert kernel["compiler"].startswith("triton 3.")


@pytest.mark.parametrize("name", [n for n, job in JOBS.items() if job.tile == SQUARE])
def test_an_iteration_covers_what_the_matrix_instructions_multiply(
    found: Mapping[str, dict[str, Any]], name: str
) -> None:
    (kernel,) = found[name]["kernels"]
    assert kernel["k_step"] == 64  # from their shapes, and it is the tile's block_k
    lanes = 4 * warp_size(kernel["arch"])
    assert kernel["valu_per_pair"] == pytest.approx(
        kernel["counts"]["valu"] * lanes / (64 * 64 / 2), abs=0.01
    )


def test_zero_points_cost_instructions_so_the_weight_type_is_compiled_in(
    found: Mapping[str, dict[str, Any]],
) -> None:
    with_zeros, without = (found[name]["kernels"][0]["counts"] for name in ("gfx1151", "symmetric"))
    assert without["valu"] < with_zeros["valu"]


def test_a_tile_against_a_rule_is_an_entry_with_its_reason(
    found: Mapping[str, dict[str, Any]],
) -> None:
    assert found["large"]["kernels"] == []
    assert "breaks rule" in found["large"]["error"]


PROBLEM = Problem("w4a16", "gfx1151", "float16", "uint4", "float", 16, 128, 256, 128)
TILE = Tile.of("triton", block_m=16)
CONV = Tile.of("triton", block_l=16, block_d=256, num_warps=8)
AMD = Tile.of(
    "amd", block_m=64, block_n=64, block_k=64, num_warps=4, warps_m=1, num_stages=2,
    x_path="shared", scale="weights",
)  # fmt: skip


@pytest.mark.parametrize(
    ("op", "problem", "tile", "error", "message"),
    [
        ("w4a16", {"arch": "gfx"}, TILE, UnsupportedError, "arch is 'gfx'; .* such as gfx1151"),
        ("w4a16", {"arch": "cpu-avx2"}, TILE, UnsupportedError, "arch is 'cpu-avx2'; .* gfx name"),
        ("norm", {}, TILE, UnsupportedError, "op is 'norm'; of the catalog w4a16, .* have kernels"),
        ("mmq", {"group": 0}, TILE, TileError, "mmq/triton triton has the fields"),
        ("w4a16", {}, Tile.of("panel"), TileError, "algorithm is 'panel'; the kernels for GPUs"),
        ("w4a16", {}, TILE, TileError, "w4a16/triton triton has the fields"),
        ("w4a16", {}, Tile.of("hopper"), TileError, "written for the matrix units of sm_90, not"),
        ("w4a16", {"arch": "sm_80"}, AMD, TileError, "breaks rule 'amd: chips'"),
        ("moe", {}, TILE, TileError, "moe/triton triton has the fields"),
        ("moe", {}, AMD, TileError, "algorithm 'amd' is not in moe/triton; use one of triton"),
        ("ssd", {}, TILE, TileError, "algorithm 'triton' is not in ssd/triton; use one of five"),
        ("conv1d", {}, CONV.replace(block_l=128), TileError, "breaks rule 'registers'"),
        ("conv1d", {"weight_type": "w4", "K": 3}, CONV, UnsupportedError, "K is 3; .* pass K = 4"),
    ],
    ids=[
        "arch",
        "cpu",
        "op",
        "blocks",
        "algorithm",
        "fields",
        "hopper",
        "amd",
        "moe fields",
        "moe algorithm",
        "ssd algorithm",
        "conv1d rule",
        "taps",
    ],
)
def test_what_cannot_be_compiled_is_refused(
    op: str, problem: dict[str, Any], tile: Tile, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        compile_tile(op, replace(PROBLEM, **problem), tile)


def test_blocks_are_compiled_like_codes() -> None:
    done = run_python(
        """
from tilewright.isa.survey import survey
from tilewright.tiles.tile import Problem

problem = Problem("mmq", "", "float16", "Q4_K", "float", 64, 512, 1024, 0)
(entry,) = survey("mmq", problem, ["gfx1151"])
found = entry.as_dict()
print(found["error"], [kernel["matrix"] for kernel in found["kernels"]])
"""
    )
    assert done.stdout.startswith(" ['v_wmma_f32_16x16x16_f16'"), done.stdout + done.stderr


MIXTURE = Job("", op="moe", weight_type="Q4_K", group=0, m=512, n=768, k=2048)
SCAN = Job("", op="ssd", weight_type="p64", dtype="bfloat16", group=16, n=8192, k=128)
CONVOLUTION = Job("", op="conv1d", weight_type="w4", group=0, n=10240, k=4)
FEW = "gemv(block_n=8, block_k=256, num_warps=4, num_stages=1)"
WALK = "persistent(chunk=32, block_p=64, segments=2, num_warps=4, num_stages=3)"
LAUNCHED = {
    "moe gfx90a": (replace(MIXTURE, arch="gfx90a"), "route moe"),
    "moe gfx1151": (replace(MIXTURE, arch="gfx1151"), "route moe"),
    "moe sm_90": (replace(MIXTURE, arch="sm_90"), "scatter moe_hopper"),
    "moe sm_90 many": (replace(MIXTURE, arch="sm_90", m=4096), "route gather moe_hopper"),
    "moe sm_90 few": (replace(MIXTURE, arch="sm_90", m=64), "moe_slots"),
    "moe few": (replace(MIXTURE, arch="gfx942", m=8, tile=FEW), "moe_gemv"),
    "moe odd": (replace(MIXTURE, arch="gfx942", m=33), "route moe"),
    "moe uint4": (
        replace(MIXTURE, arch="gfx1201", weight_type="uint4", group=128), "route moe"
    ),
    "ssd gfx90a": (replace(SCAN, arch="gfx90a"), "prepare products states pass output"),
    "ssd gfx1151": (replace(SCAN, arch="gfx1151"), "prepare products states pass output"),
    "ssd sm_90": (replace(SCAN, arch="sm_90"), "prepare walk_hopper"),
    "ssd walk": (replace(SCAN, arch="sm_90", tile=WALK), "prepare states pass walk"),
    "conv1d gfx90a": (replace(CONVOLUTION, arch="gfx90a"), "conv state"),
    "conv1d sm_90": (replace(CONVOLUTION, arch="sm_90"), "conv state"),
}  # fmt: skip
LATE = {"moe gfx90a", "moe sm_90 many", "moe odd", "moe uint4", "ssd gfx90a", "ssd walk"}  # slow


@pytest.fixture(scope="module")
def launched() -> Mapping[str, dict[str, Any]]:
    return two_runs(run_jobs, {name: job for name, (job, _) in LAUNCHED.items()}, LATE)


@pytest.mark.parametrize("name", some_slow(LAUNCHED, LATE))
def test_every_kernel_of_a_launch_is_compiled_and_fits(
    launched: Mapping[str, dict[str, Any]], name: str
) -> None:
    entry, names = launched[name], LAUNCHED[name][1]
    assert entry["error"] == ""
    found = [kernel["kernel"].strip("_").removesuffix("_kernel") for kernel in entry["kernels"]]
    assert found == names.split()
    for kernel in entry["kernels"]:
        assert kernel["counts"]["total"] > 0
        assert kernel["resources"]["spills"] == kernel["resources"]["scratch_bytes"] == 0
        assert kernel["resources"]["programs"] >= 1


@pytest.mark.parametrize("name", some_slow(LAUNCHED, LATE))
def test_only_kernels_that_multiply_weights_are_reckoned_by_them(
    launched: Mapping[str, dict[str, Any]], name: str
) -> None:
    reckoned = [
        kernel["kernel"] for kernel in launched[name]["kernels"]
        if kernel["valu_per_pair"] is not None
    ]  # fmt: skip
    whole = {kernel["kernel"]: kernel for kernel in launched[name]["kernels"]}
    if name.startswith("moe"):
        (one,) = reckoned
        assert one.startswith("_moe")
        assert whole[one]["k_step"] >= 32
        assert bool(whole[one]["counts"]["matrix"]) == (name != "moe few")
    else:
        assert reckoned == []


def test_a_mixture_of_many_experts_is_packed_once() -> None:
    """Of all experts one is packed, and the others lie behind it: nothing of their size is made."""
    packed = _experts(replace(PROBLEM, weight_type="Q4_K", group=0, N=768, K=2048))
    assert packed.E == EXPERTS
    tensors = [t for t in vars(packed.planes).values() if isinstance(t, torch.Tensor)]
    assert {(len(t), t.device.type) for t in tensors} == {(EXPERTS, "meta")}
    whole = pack_gpu_experts(torch.zeros(2, 768, 1152, dtype=torch.uint8), "Q4_K", arch="gfx90a")
    for name, t in vars(whole.planes).items():
        if isinstance(t, torch.Tensor):
            assert getattr(packed.planes, name).stride() == t.stride()
            assert getattr(packed.planes, name).shape[1:] == t.shape[1:]


def test_what_is_no_scan_is_refused() -> None:
    problem = replace(
        PROBLEM, op="ssd", weight_type="p64", N=640, K=128, group=4, M=128, arch="gfx90a"
    )
    with pytest.raises(UnsupportedError, match="N is 640, K is 128, group is 4; of ssd with heads"):
        compile_tile("ssd", problem, default_tile("ssd", problem))


def test_all_ops_of_the_catalog_can_be_compiled() -> None:
    assert set(OPS) == set(SPECS)


def test_part_of_a_block_is_refused() -> None:
    problem = replace(PROBLEM, op="mmq", weight_type="Q4_K", K=200, group=0)
    with pytest.raises(UnsupportedError, match="weight type is 'Q4_K', K is 200; .* whole blocks"):
        compile_tile("mmq", problem, default_tile("mmq", problem))


def test_a_group_that_does_not_divide_k_is_refused() -> None:
    problem = replace(PROBLEM, K=200, group=64)
    with pytest.raises(FormatError, match="group_size is 64; it must be a positive divisor of K"):
        compile_tile("w4a16", problem, default_tile("w4a16", problem))


@pytest.mark.parametrize(
    "arch",
    ["gfx906", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1151", "gfx1201", "sm_75", "sm_120"],
)
def test_names_of_archs(arch: str) -> None:
    check_arch(arch)


@pytest.mark.parametrize(
    "arch",
    ["", "gfx", "gfx11", "gfx1151:xnack-", "sm90", "sm_9", "cuda", "GFX1151", "sm_91", "gfx9999"],
)
def test_what_is_no_name_of_an_arch(arch: str) -> None:
    with pytest.raises(UnsupportedError, match="such as gfx1151"):
        check_arch(arch)


SCALE = """
import triton, triton.language as tl, torch
from tilewright.ops.cross import cross_compile, target_arch, target_units

@triton.jit
def scale(x_ptr, y_ptr, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, x * 3.0 if TWICE else x, mask=offs < n)

def launch(n=1000, block=128, **options):
    x = torch.empty(n, device="meta")
    scale[(8,)](x, x, n, BLOCK=block, TWICE=True, **options)
"""


def scaled(code: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """What `code` prints after SCALE; in a file, since Triton reads a kernel's source."""
    path = folder / "scale.py"
    path.write_text(SCALE + textwrap.dedent(code), encoding="utf-8")
    done = run_python(f"import runpy; runpy.run_path({str(path)!r})", environment=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_launch_is_recorded_with_what_it_passes(tmp_path: Path) -> None:
    said = scaled(
        """
        one, two = cross_compile(lambda: (launch(num_warps=2), launch(n=1024, block=256)), "gfx90a")
        print(one.name, one.arch, one.grid, one.metadata["num_warps"], two.metadata["num_warps"])
        print("tt.divisibility = 16" in one.text("ttir").split("%n")[1].split("\\n")[0],
              "tt.divisibility = 16" in two.text("ttir").split("%n")[1].split("\\n")[0])
        print("v_mul_f32" in one.text("amdgcn"), one.log == "")
        (nvidia,) = cross_compile(launch, "sm_90")
        print("Used" in nvidia.log, nvidia.asm["cubin"][:4])
        """,
        tmp_path,
    )
    assert said.splitlines() == [
        "scale gfx90a (8,) 2 4",
        "False True",
        "True True",
        "True b'\\x7fELF'",
    ]


def test_a_launcher_asks_for_the_chip_and_torch_answers_for_it(tmp_path: Path) -> None:
    said = scaled(
        """
        def asking():
            meta = torch.device("meta")
            launch()
            print(target_arch(meta), target_units(meta),
                  torch.cuda.get_device_properties(meta).multi_processor_count)

        before = torch.cuda.get_device_properties
        cross_compile(asking, "sm_90")
        print(target_arch(torch.device("cpu")), target_units(torch.device("cpu")),
              torch.cuda.get_device_properties is before)
        """,
        tmp_path,
    )
    assert said.splitlines() == ["sm_90 132 132", "interpreter 1 True"]


TRY = """
from tilewright.errors import TilewrightError
from triton.runtime import driver

def attempt(name, launch):
    try:
        cross_compile(launch, "gfx1151")
    except TilewrightError as error:
        print(f"{name}: {error}; driver {driver._active}")
"""
LAUNCHES = """
attempt("nothing", lambda: None)
attempt("refused", lambda: launch(block=100))
tuned = triton.autotune([triton.Config({"BLOCK": b}) for b in (64, 128)], ["n"])(scale)
x = torch.empty(9, device="meta")
attempt("autotuned", lambda: tuned[(8,)](x, x, 9, TWICE=True))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> str:
    return scaled(TRY + LAUNCHES, tmp_path_factory.mktemp("kernel"))


@pytest.mark.parametrize(
    "message",
    [
        "nothing: nothing was launched: only Triton and Gluon kernels are compiled",
        "refused: scale does not compile for gfx1151: CompilationError: arange's range must be a "
        "power of 2",
        "autotuned: the launch asks the GPU's driver for 'get_benchmarker', and there is no GPU: "
        "an autotuned kernel cannot be compiled this way; launch it with one configuration",
    ],
)
def test_a_launch_that_cannot_be_compiled_says_why(refusals: str, message: str) -> None:
    """And Triton's own driver is back in its place: none, before the first launch."""
    assert f"{message}; driver None" in refusals.splitlines()


def test_a_process_that_interprets_compiles_nothing(tmp_path: Path) -> None:
    said = scaled(TRY + "attempt('interpreted', launch)", tmp_path, {"TRITON_INTERPRET": "1"})
    assert "interpreted: TRITON_INTERPRET is set" in said


def test_without_triton_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    tile = default_tile("w4a16", PROBLEM)
    for call in (
        lambda: cross_compile(lambda: None, "gfx1151"),
        lambda: compile_tile("w4a16", PROBLEM, tile),
    ):
        with pytest.raises(UnsupportedError, match=r"pip install 'tilewright\[triton\]'"):
            call()
