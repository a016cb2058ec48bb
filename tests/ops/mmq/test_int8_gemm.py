"""mmq with 8-bit activations in the interpreter, held to the float64 oracle of the file's bytes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import triton_interpreter  # noqa: F401
from quick import latin, one_in
from tilewright.device import INTERPRETER
from tilewright.errors import TileError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.ops.catalog import spec_for
from tilewright.ops.check import check_output
from tilewright.ops.contract import Case
from tilewright.ops.mmq import int8_space, triton_int8
from tilewright.ops.mmq.gpu import allocate_and_launch
from tilewright.ops.mmq.op import mmq_gemm
from tilewright.ops.mmq.quantize_rows import launch_quantize_rows
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Tile

SPEC = spec_for("mmq", INTERPRETER)
TYPES = tuple(BLOCK_TYPES)
SMALL = Tile.of(
    "int8", block_m=16, block_n=32, num_warps=2, num_stages=2, group_m=8,
    schedule="data-parallel", split_k=1, units=0,
)  # fmt: skip
NAN = float("nan")


def k_of(name: str, blocks: int) -> int:
    return blocks * BLOCK_TYPES[name].block_size


def stream(units: int) -> Tile:
    return SMALL.replace(schedule="stream-k", units=units)


def split(shares: int) -> Tile:
    return SMALL.replace(schedule="split-k", split_k=shares)


def held(case: Case, tile: Tile, seed: int = 0) -> torch.Tensor:
    """Run a case past the rules and hold it to the oracle."""
    inputs = SPEC.make_inputs(case, seed)
    y = allocate_and_launch(inputs.x, inputs.weight, inputs.bias, tile)
    ref = SPEC.reference(inputs)
    result = check_output(y, ref, SPEC.error_model(inputs, ref))
    assert result.passed, result
    return y


# x to 8 bits


def columns_of(low: int, sub: int) -> list[int]:
    """Which column of a block of 32 is stored where: the order in which the bytes of words that
    `tilewright.layout.blocks` draws come out, masked field by field."""
    fields, each = 8 // low, 32 // low  # of four codes; columns of a word
    order = []
    for r in range(32 // each):
        for f in range(fields):
            bits = [low * f + 8 * b for b in range(4)]
            codes = [2 * (bit % 16 // low) + bit // 16 for bit in bits]
            order.append([each * r + j for j in codes])
    if sub == 32 and low == 4:
        order = order[0::2] + order[1::2]
    return [j for four in order for j in four]


def quantized(
    x: torch.Tensor, low: int = 8, sub: int = 32, padded: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [M, K] with columns in order, scales [M, K / 32], sums [M, K / sub]; 0 past M."""
    m, k = x.shape
    codes = torch.full((k // 32, padded, 32), 77, dtype=torch.int8)
    scales = torch.full((k // 32, padded), NAN)
    sums = torch.full((k // sub, padded), NAN)
    launch_quantize_rows(x, codes, scales, sums, padded=padded, low=low, sub=sub)
    assert not codes[:, m:].any()
    assert torch.equal(scales[:, m:], torch.zeros(k // 32, padded - m))
    assert torch.equal(sums[:, m:], torch.zeros(k // sub, padded - m))
    natural = torch.empty(m, k // 32, 32, dtype=torch.int8)
    natural[:, :, columns_of(low, sub)] = codes[:, :m].transpose(0, 1)
    return natural.reshape(m, k), scales[:, :m].T, sums[:, :m].T


@pytest.mark.parametrize("sub", [16, 32])
@pytest.mark.parametrize("low", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_x_is_rounded_as_ggml_rounds_it(dtype, low, sub):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((5, 96))).to(dtype)[:, :]
    codes, scales, sums = quantized(x, low, sub)
    blocks = x.double().numpy().reshape(5, 3, 32)
    d = np.abs(blocks).max(axis=2) / 127
    level = blocks / d[:, :, None]
    q = np.sign(level) * np.floor(np.abs(level) + 0.5)
    assert np.array_equal(codes.numpy(), q.reshape(5, 96))
    np.testing.assert_allclose(scales.numpy(), d, rtol=3e-7)
    assert np.array_equal(sums.numpy(), q.reshape(5, -1, sub).sum(axis=2))


def test_halves_are_rounded_away_from_zero():
    x = torch.zeros(1, 32)
    x[0, :7] = torch.tensor([127.0, 0.5, -0.5, 1.5, -2.5, 0.49, -126.5])
    codes, scales, _ = quantized(x)
    assert scales[0, 0] == 1
    assert codes[0, :7].tolist() == [127, 1, -1, 2, -3, 0, -127]


@pytest.mark.parametrize("top", [1e-45, 1e-38, 1e-30, 6.5e4, 3e38])
def test_x_of_any_size_uses_all_of_8_bits(top):
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 2] = top, -top, top / 2
    codes, scales, sums = quantized(x)
    assert codes[0, :2].tolist() == [127, -127]
    assert abs(int(codes[0, 2]) - (64 if top > 1e-44 else 0)) <= 1
    assert scales[0, 0] == pytest.approx(float(np.float32(top)) / 127, rel=1e-6, abs=1e-45)
    assert torch.isfinite(sums).all()
    assert not codes[0, 32:].any()
    assert scales[0, 1] == 0


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
def test_a_block_with_what_is_no_number_has_no_scale(bad):
    x = torch.ones(2, 64)
    x[1, 40] = bad
    codes, scales, sums = quantized(x)
    assert torch.isnan(scales).tolist() == [[False, False], [False, True]]
    assert codes[0].tolist() == [127] * 64
    assert torch.isfinite(sums).all()


# the product


@pytest.mark.parametrize("name", TYPES)
def test_weights_are_the_files_numbers(name):
    """x of 127 in one place reads the weight out: d is 1 there, and nothing is rounded away."""
    k = k_of(name, 96 // BLOCK_TYPES[name].block_size or 1)
    case = Case("mmq", name, "float32", 1, 24, k)
    source = SPEC.make_inputs(case, 2).source
    weight = pack_blocks_for(source.raw, name, arch=INTERPRETER)
    y = allocate_and_launch(127 * torch.eye(k), weight, None, SMALL.replace(block_m=32))
    right = 127 * BLOCK_TYPES[name].dequantize(source.raw).astype(np.float64)
    # One rounding of scale * dot and one of the sum with the minimum, which may nearly cancel it.
    codes = BLOCK_TYPES[name].codes(source.raw)
    parts = np.abs(right) if codes.minimum is None else np.abs(right) + 2 * 127 * np.repeat(
        np.abs(codes.minimum), codes.sub, axis=1
    )  # fmt: skip
    assert (np.abs(y.T.double().numpy() - right) <= 2**-22 * parts).all()


@pytest.mark.parametrize("name", one_in(2, TYPES))
def test_every_type_under_every_schedule(name):
    i = TYPES.index(name)
    dtype = ("float16", "bfloat16", "float32")[i % 3]
    case = Case("mmq", name, dtype, 17, 33, max(96, k_of(name, 1)), 0, "int8", ("bias",))
    for tile in (SMALL, split((2, 4, 8)[i % 3]), stream((1, 7, 30)[i % 3])):
        held(case, tile, seed=i)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q6_K"])
def test_halves_of_a_block_multiplied_apart(name, monkeypatch):
    """As on AMD's matrix units, which take 16 columns; elsewhere both halves are masked in turn."""
    case = Case("mmq", name, "float16", 17, 40, 256, 0, "int8", ("bias",))
    masked = held(case, SMALL)
    monkeypatch.setattr(triton_int8, "_halves", lambda sub, arch: "apart")
    assert torch.equal(held(case, SMALL), masked)


@pytest.mark.parametrize("units", [1, 7, 104])
@pytest.mark.parametrize(("m", "n", "k"), [(17, 40, 96), (16, 32, 1024)])
def test_units_of_stream_k(units, m, n, k):
    """More steps than units, as many, and fewer; launches agree bit for bit."""
    case = Case("mmq", "Q5_1", "float32", m, n, k, 0, "int8", ("bias",))
    first = held(case, stream(units))
    assert torch.equal(held(case, stream(units)), first)


@pytest.mark.parametrize("shares", [2, 4, 8])
def test_shares_of_k_even_and_uneven_and_empty(shares):
    case = Case("mmq", "Q4_0", "float16", 5, 40, 160, 0, "int8")
    first = held(case, split(shares))
    assert torch.equal(held(case, split(shares)), first)


def test_stream_k_runs_a_program_for_each_unit_of_the_device():
    """`units` 0 is as many as there are: 1 in the interpreter."""
    case = Case("mmq", "Q4_0", "float16", 33, 40, 96, 0, "int8")
    assert torch.equal(held(case, stream(0)), held(case, stream(1)))
    assert triton_int8.workspace_int8(stream(0), 33, 40, 96, 7) == triton_int8.workspace_int8(
        stream(7), 33, 40, 96, 1
    )


@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("n", [128, 256, 97])
def test_rows_that_fill_128_and_rows_that_do_not(n, block_n):
    case = Case("mmq", "Q4_1", "float16", 3, n, 64, 0, "int8", ("bias", "strided"))
    held(case, SMALL.replace(block_n=block_n, num_warps=block_n // 16))


def test_offsets_past_2_gb_are_computed_in_64_bits(monkeypatch):
    monkeypatch.setattr(triton_int8, "spans_wide", lambda tensor: True)
    for name in ("Q5_K", "MXFP4"):
        held(Case("mmq", name, "float16", 17, 40, k_of(name, 2), 0, "int8"), stream(7))


@pytest.mark.parametrize("name", one_in(2, ("Q4_0", "Q4_K", "Q6_K", "Q2_K")))
def test_the_error_is_that_of_rounding_x(name):
    """Gaussian x: the largest of 32 values squared is 5.5 on average, so that d^2 / 12 is 2.9e-5 of
    the square of a value, and of y."""
    case = Case("mmq", name, "float32", 64, 64, k_of(name, 16 if name == "Q4_0" else 2), 0, "int8")
    inputs = SPEC.make_inputs(case, 0)
    y = allocate_and_launch(inputs.x, inputs.weight, None, SMALL.replace(block_m=64))
    ref = SPEC.reference(inputs)
    nmse = ((y.double().numpy() - ref) ** 2).sum() / (ref**2).sum()
    assert 2.3e-5 < nmse < 3.5e-5
    inputs = SPEC.make_inputs(case, 0)
    uniform = (torch.rand(64, case.K, generator=torch.Generator().manual_seed(0)) * 2 - 1).float()
    y = allocate_and_launch(uniform, inputs.weight, None, SMALL.replace(block_m=64))
    right = (
        uniform.double()
        @ torch.from_numpy(BLOCK_TYPES[name].dequantize(inputs.source.raw)).double().T
    )
    assert ((y.double() - right) ** 2).sum() / (right**2).sum() < 2e-5


@pytest.mark.parametrize("tile", [SMALL, split(2), stream(7)], ids=["whole", "split", "stream"])
@pytest.mark.parametrize(("bad", "name"), latin(2, (NAN, float("inf")), ("Q4_K", "Q6_K", "Q8_0")))
def test_what_is_no_number_reaches_its_rows_and_no_other(bad, name, tile):
    case = Case("mmq", name, "float32", 18, 40, 256, 0, "int8")
    inputs = SPEC.make_inputs(case, 0)
    right = allocate_and_launch(inputs.x, inputs.weight, None, tile)
    x = inputs.x.clone()
    x[3, 200] = x[17, 5] = bad
    y = allocate_and_launch(x, inputs.weight, None, tile)
    assert torch.isnan(y[[3, 17]]).all()
    others = [m for m in range(18) if m not in (3, 17)]
    assert torch.equal(y[others], right[others])


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K", "Q5_1"])
def test_sums_of_large_activations_are_not_lost(name):
    """32 values of 65504 sum to more than float16 holds; a float16 sum would make NaN of them."""
    k = k_of(name, 256 // BLOCK_TYPES[name].block_size)
    source = SPEC.make_inputs(Case("mmq", name, "float32", 1, 24, k), 0).source
    weight = pack_blocks_for(source.raw, name, arch=INTERPRETER)
    x = torch.full((2, k), 65504.0)
    x[1] = 1e30
    y = allocate_and_launch(x, weight, None, SMALL)
    w = torch.from_numpy(BLOCK_TYPES[name].dequantize(source.raw)).double()
    right = x.double() @ w.T
    scale = x.double()[:, :1] * w.abs().sum(dim=1)
    assert ((y.double() - right).abs() <= 1e-5 * scale).all()


# what may run what


@pytest.mark.parametrize("arch", ["interpreter", "sm_80", "gfx1151", "gfx90a", "gfx942"])
def test_the_default_is_for_those_who_ask_for_8_bits_and_have_rows(arch):
    for name in TYPES:
        for m, n, k in ((17, 40, 256), (130, 4096, 4096), (512, 1000, 14336)):
            problem = Case("mmq", name, "float16", m, n, k, 0, "int8").problem(arch)
            tile = TRITON_SPACE.default(problem)
            assert tile.algorithm == "int8"
            TRITON_SPACE.check(tile, problem)
            assert int8_space.default(Case("mmq", name, "float16", m, n, k).problem(arch)) is None
        few = Case("mmq", name, "float16", 1, 40, 256, 0, "int8").problem(arch)
        assert TRITON_SPACE.default(few).algorithm != "int8"


def test_floats_serve_who_asks_for_8_bits_where_they_are_faster():
    """As measured on sm_90; a table may still name an int8 tile there."""
    problem = Case("mmq", "Q4_K", "float16", 512, 4096, 4096, 0, "int8").problem("sm_90")
    assert TRITON_SPACE.default(problem).algorithm != "int8"
    TRITON_SPACE.check(SMALL, problem)


def test_a_tile_of_floats_may_serve_who_asks_for_8_bits():
    weight = pack_blocks_for(np.zeros((40, 144), np.uint8), "Q4_K", arch=INTERPRETER)
    tile = TRITON_SPACE.default(Case("mmq", "Q4_K", "float32", 20, 40, 256).problem(INTERPRETER))
    assert not mmq_gemm(torch.ones(20, 256), weight, activations="int8", tile=tile).any()


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("interpreter", {"block_n": 64}, "rows and warps agree"),
    ("interpreter", {"num_warps": 4}, "rows and warps agree"),
    ("gfx90a", {"block_n": 256, "num_warps": 16}, "rows divide 128"),
    ("gfx942", {"split_k": 2}, "fields of the schedule"),
    ("gfx942", {"schedule": "split-k"}, "fields of the schedule"),
    ("gfx942", {"units": 104}, "fields of the schedule"),
    ("sm_80", {"schedule": "stream-k", "units": 7}, "busy units"),
    ("gfx1151", {"block_m": 128, "num_stages": 1}, "int8 registers"),
    ("gfx1151", {}, "int8 loads ahead"),
    ("sm_61", {"block_m": 128, "block_n": 128, "num_warps": 8}, "int8 shared memory"),
]


@pytest.mark.parametrize(("arch", "change", "rule"), BAD, ids=[f"{a}-{r}" for a, _, r in BAD])
def test_a_rule_and_what_breaks_it(arch, change, rule):
    problem = Case("mmq", "Q5_0", "float16", 64, 512, 1024, 0, "int8").problem(arch)
    right = SMALL.replace(num_stages=1 if arch == "gfx1151" else 2)
    TRITON_SPACE.check(right, problem)
    with pytest.raises(TileError, match=f"breaks rule '{rule}'"):
        TRITON_SPACE.check(right.replace(**{"num_stages": 2, **change}), problem)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q6_K"])
def test_two_scales_in_a_block_need_more_registers(name):
    problem = Case("mmq", name, "float16", 64, 512, 1024, 0, "int8").problem("gfx90a")
    with pytest.raises(TileError, match="breaks rule 'int8 registers'"):
        TRITON_SPACE.check(SMALL.replace(block_m=128), problem)


def test_rows_past_128_would_be_written():
    """The rule of 128 is no matter of taste: the kernel it guards writes past the end."""
    problem = Case("mmq", "Q4_0", "float16", 1, 128, 64, 0, "int8").problem(INTERPRETER)
    tile = SMALL.replace(block_n=256, num_warps=16)
    with pytest.raises(TileError, match=re.escape("or the last tile writes past the end")):
        TRITON_SPACE.check(tile, problem)


def test_8_bits_only_when_asked():
    problem = Case("mmq", "Q4_0", "float16", 64, 64, 64).problem(INTERPRETER)
    with pytest.raises(TileError, match="breaks rule '8 bits only when asked'"):
        TRITON_SPACE.check(SMALL, problem)
    weight = pack_blocks_for(np.zeros((40, 18), np.uint8), "Q4_0", arch=INTERPRETER)
    assert isinstance(weight, GpuBlocks)
    with pytest.raises(TileError, match="never for a product that asks for activations as they"):
        mmq_gemm(torch.zeros(2, 32), weight, tile=SMALL)
