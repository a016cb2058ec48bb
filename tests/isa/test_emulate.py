"""Whole kernels, compiled for AMD chips that are not here and executed, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isa.compiling import HAS_TRITON, NO_TRITON
from isa.emulating import ARCHS, emulated, tile_of, w4a16
from tilewright.errors import FormatError, GateError, UnsupportedError
from tilewright.isa.emulate import emulate
from tilewright.tiles.tile import Tile

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)

LIMITS = {"float16": 3e-4, "bfloat16": 2.5e-3, "float32": 1e-6}  # of the relative error
DTYPES = tuple(LIMITS)
UNITS = {"gfx11": "v_wmma_f32_16x16x16_f16", "gfx12": "v_wmma_f32_16x16x16_f16",
         "gfx9": "v_mfma_f32_"}  # fmt: skip

PORTABLE = tile_of(
    "triton", block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2, group_m=8,
    dequant="packed", order="xw",
)  # fmt: skip
SKINNY = tile_of("skinny", block_m=2, block_n=32, block_k=64, split_k=2, num_warps=2, num_stages=2)
GLUON = tile_of(
    "amd", block_m=16, block_n=64, block_k=32, num_warps=4, warps_m=1, num_stages=2,
    x_path="shared",
)  # fmt: skip

KERNELS = {
    f"{arch} {kernel} {DTYPES[(i + j) % 3]}": {
        "kernel": kernel, "arch": arch, "dtype": DTYPES[(i + j) % 3]
    }
    for i, arch in enumerate(ARCHS)
    for j, kernel in enumerate(("add", "softmax"))
} | {
    f"{arch} dot {dtype}": {"kernel": "dot", "arch": arch, "dtype": dtype}
    for arch, dtype in [*((arch, "float16") for arch in ARCHS), ("gfx1151", "bfloat16"),
                        ("gfx1201", "bfloat16"), ("gfx942", "bfloat16")]
}  # fmt: skip
GENERAL = {
    f"{arch} {kernel}": {"kernel": kernel, "arch": arch, "dtype": "float32"}
    for kernel, archs in {
        "reduce": ("gfx1100", "gfx1201", "gfx90a"),
        "functions": ("gfx1151", "gfx942"),
        "integers": ("gfx1201", "gfx90a"),
    }.items()
    for arch in archs
}
CARELESS = {
    f"{arch} careless": {"kernel": "careless add", "arch": arch, "dtype": "float16"}
    for arch in ("gfx1151", "gfx942")
}


# N is no whole tile, K no whole step or group, M one row past a tile.
QUANTIZED = {
    **{f"{a} portable float16": w4a16(a, PORTABLE, "float16", (17, 40, 200, -1)) for a in ARCHS},
    **{f"{a} portable bfloat16 symmetric": w4a16(
        a, PORTABLE, "bfloat16", (3, 33, 128, 32), "bias", weight_type="uint4b8")
       for a in ("gfx1201", "gfx90a")},
    **{f"{a} portable asm": w4a16(a, PORTABLE.replace(dequant="asm"), "float16",
                                  (5, 40, 128, 64), "strided") for a in ("gfx1100", "gfx942")},
    **{f"{a} skinny float16": w4a16(a, SKINNY, "float16", (2, 40, 256, 64), "bias")
       for a in ("gfx1151", "gfx942")},
    **{f"{a} gluon float16": w4a16(a, GLUON, "float16", (17, 40, 200, -1), "bias") for a in ARCHS},
    **{f"{a} gluon bfloat16": w4a16(a, GLUON, "bfloat16", (3, 33, 128, 32))
       for a in ("gfx1151", "gfx1201", "gfx90a")},
}  # fmt: skip


CORRUPTED = {
    f"{tile.algorithm} {corruption}": {
        **w4a16("gfx1201", tile, "float16", (5, 40, 128, 64)), "corrupt": corruption
    }
    for tile, corruption in (
        (PORTABLE, "flipped nibble"), (GLUON, "wrong scale"), (GLUON, "swapped zero point")
    )
}  # fmt: skip


def planted(name: str) -> dict[str, Any]:
    tile = Tile.from_mapping({**PORTABLE.as_dict(), "dequant": "scalar", "planted": name})
    return w4a16("gfx1151", tile, "float16", (15, 32, 80, -1))


WRONG = {name: planted(name) for name in ("k-tail", "past-the-end", "scale-row")}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every job's result, from one process: starting it costs more than a kernel."""
    jobs = KERNELS | GENERAL | CARELESS | QUANTIZED | CORRUPTED | WRONG
    return emulated(jobs, tmp_path_factory.mktemp("triton"))


@needs_triton
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_what_float64_does(executed, name):
    found = executed[name]
    assert found.get("raised") is None
    assert found["error"] <= LIMITS[KERNELS[name]["dtype"]]


@needs_triton
@pytest.mark.parametrize("name", GENERAL)
def test_what_other_kernels_do_is_known_too(executed, name):
    """Moves between lanes, divisions, functions, 64-bit integers, atomics, 8-bit products."""
    assert executed[name] == {"wrong": []}


@needs_triton
@pytest.mark.parametrize("name", QUANTIZED)
def test_w4a16_passes_the_check_of_its_spec(executed, name):
    assert executed[name] == {"ok": True, "reason": ""}


@needs_triton
@pytest.mark.parametrize("name", CORRUPTED)
def test_negative_controls_are_noticed(executed, name):
    assert executed[name]["ok"] is False


@needs_triton
@pytest.mark.parametrize("arch", ARCHS)
def test_it_says_what_was_executed(executed, arch):
    found = executed[f"{arch} dot float16"]
    unit = next(unit for prefix, unit in UNITS.items() if arch.startswith(prefix))
    matrix = sum(n for name, n in found["instructions"].items() if name.startswith(unit))
    assert found["waves"] == 16  # four workgroups of four
    if arch.startswith("gfx9"):  # each of the four waves multiplies all of a 32 x 32 tile, by 8s
        assert matrix == 4 * 64 * 64 * 96 // (32 * 32 * 8)
    else:
        assert matrix == 64 * 64 * 96 // (16 * 16 * 16)
    assert found["instructions"]["s_endpgm"] == found["waves"]


@needs_triton
@pytest.mark.parametrize("name", CARELESS)
def test_an_access_outside_the_tensors_is_an_error(executed, name):
    message = executed[name]["raised"]
    assert message.startswith(f"GateError: careless_add_kernel on {name.split()[0]}, workgroup (1")
    assert "assembly line" in message
    assert "bytes at address" in message
    assert "the nearest tensor spans 1400 bytes" in message


@needs_triton
def test_planted_faults_are_wrong_here_too(executed):
    assert executed["k-tail"]["ok"] is False
    assert executed["scale-row"]["ok"] is False
    assert "GateError" in executed["past-the-end"]["raised"]
    assert "write of" in executed["past-the-end"]["raised"]


TEXT = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx1151"
double:
	s_load_b64 s[2:3], s[0:1], 0x0
	s_load_b32 s4, s[0:1], 0x8
	v_lshlrev_b32_e32 v1, 2, v0
	s_waitcnt lgkmcnt(0)
	global_load_b32 v2, v1, s[2:3]
	s_waitcnt vmcnt(0)
	v_mul_lo_u32 v2, v2, s4
	{extra}
	global_store_b32 v1, v2, s[2:3]
	s_endpgm
	.amdhsa_kernel double
		.amdhsa_kernarg_size 16
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_wavefront_size32 1
	.end_amdhsa_kernel
amdhsa.kernels:
  - .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
    .group_segment_fixed_size: 0
"""


def text(extra: str = "") -> str:
    return TEXT.replace("{extra}", extra)


def test_text_by_hand_runs_in_place():
    x = torch.arange(32, dtype=torch.int32)
    run = emulate(text(), grid=(1,), args=[x, 3], num_warps=1)
    assert x.tolist() == [3 * n for n in range(32)]
    assert (run.kernel, run.arch, run.waves) == ("double", "gfx1151", 1)
    assert run.instructions["s_waitcnt"] == 2


EXCHANGE = """
	ds_store_b32 v1, v2
	{barrier}
	v_xor_b32_e32 v3, 0x80, v1
	ds_load_b32 v2, v3
"""


def exchanged(barrier: str, last_wave_first: bool) -> list[int]:
    """Two waves write to LDS and read what the other wrote."""
    x = torch.arange(64, dtype=torch.int32)
    emulate(
        text(EXCHANGE.replace("{barrier}", barrier)), grid=(1,), args=[x, 1], num_warps=2,
        shared_bytes=256, last_wave_first=last_wave_first,
    )  # fmt: skip
    return x.tolist()


@pytest.mark.parametrize("last_wave_first", [False, True])
def test_waves_meet_at_barriers(last_wave_first):
    assert exchanged("s_barrier", last_wave_first) == [*range(32, 64), *range(32)]


def test_a_missing_barrier_shows_by_the_order_of_the_waves():
    nothing = [-1] * 32  # what LDS holds before anybody wrote
    assert exchanged("s_nop 0", False) == [*nothing, *range(32)]
    assert exchanged("s_nop 0", True) == [*range(32, 64), *nothing]


def test_an_unknown_instruction_counts_only_if_it_is_reached():
    x = torch.arange(32, dtype=torch.int32)
    skipped = "s_branch .LEND\n\tv_bogus_b32 v2, v2\n.LEND:"
    emulate(text(skipped), grid=(1,), args=[x, 2], num_warps=1)
    assert x[31].item() == 62
    with pytest.raises(UnsupportedError, match="assembly line 11: 'v_bogus_b32'"):
        emulate(text("v_bogus_b32 v2, v2"), grid=(1,), args=[x, 2], num_warps=1)


X = torch.arange(32, dtype=torch.int32)
BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("s_endpgm", {}, FormatError, "names 0 kernels .* pass the text of one kernel"),
    (7, {}, UnsupportedError, "kernel is a int without amdgcn text"),
    (text(), {"num_warps": None}, UnsupportedError, "pass num_warps="),
    (text(), {"arch": "gfx942"}, UnsupportedError, "code is for 'gfx1151', asked for gfx942"),
    (text().replace("gfx1151", "gfx1250"), {}, UnsupportedError, "the emulator runs gfx1151"),
    (text(), {"args": [X]}, UnsupportedError, "args has 1 arguments and the kernel takes 2"),
    (text(), {"args": [X, 2, 3]}, UnsupportedError, "args has 3 arguments"),
    (text(), {"args": [2, X]}, UnsupportedError, r"args\[0\] is a int, expected a tensor"),
    (text(), {"args": [X.to("meta"), 2]}, UnsupportedError, r"args\[0\] is on meta"),
    (text(), {"args": [X[:31], 2]}, GateError,
     r"double on gfx1151, workgroup \(0, 0, 0\), wave 0, assembly line 8 \(global_load_b32 "),
    (text(".LOOP:\n\ts_branch .LOOP"), {"max_instructions": 100}, GateError,
     "ran 100 instructions and did not end"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "changed", "error", "message"), BAD,
                         ids=[message[:40] for *_, message in BAD])  # fmt: skip
def test_what_is_refused(kernel, changed, error, message):
    call = {"grid": (1,), "args": [X, 2], "num_warps": 1, **changed}
    with pytest.raises(error, match=message):
        emulate(kernel, **call)
