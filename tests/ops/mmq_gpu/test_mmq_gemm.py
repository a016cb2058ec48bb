"""mmq's Triton kernel in the interpreter, held to the float64 oracle of the file's bytes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import triton_interpreter  # noqa: F401
from quick import latin
from tilewright.device import INTERPRETER
from tilewright.errors import TileError, UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.ops.catalog import SPECS, load_spec, spec_for
from tilewright.ops.check import check_output
from tilewright.ops.choose import running
from tilewright.ops.contract import Case, Inputs, spec_arch
from tilewright.ops.mmq import triton_gemm
from tilewright.ops.mmq.gpu import allocate_and_launch
from tilewright.ops.mmq.op import mmq_gemm
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Tile

SPEC = spec_for("mmq", INTERPRETER)
TYPES = tuple(BLOCK_TYPES)
SMALL = Tile.of(
    "triton", block_m=16, block_n=32, block_k=64, num_warps=2, num_stages=2, group_m=8, split_k=1
)
CASES = [
    case
    if i % 7 == 0 and case.K <= 4096
    else pytest.param(case, marks=pytest.mark.slow, id=case.id)
    for i, case in enumerate(SPEC.cases)
]


def held(case: Case, tile: Tile | None = None) -> Inputs:
    """Run a case and hold it to the oracle."""
    inputs = SPEC.make_inputs(case, 0)
    y = SPEC.run(inputs, tile=tile)
    assert y.dtype == case.dtype
    ref = SPEC.reference(inputs)
    assert tuple(y.shape) == ref.shape
    result = check_output(y, ref, SPEC.error_model(inputs, ref))
    assert result.passed, result
    return inputs


def k_of(name: str, blocks: int) -> int:
    return blocks * BLOCK_TYPES[name].block_size


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases_of_the_spec(case):
    held(case)


@pytest.mark.parametrize(("name", "block_k"), latin(2, TYPES, (32, 64, 128, 256)))
def test_steps_longer_and_shorter_than_a_block(name, block_k):
    """K is 3 blocks, of 32 or 256 columns: steps end within it, with it, and past it."""
    dtype = ("float16", "bfloat16", "float32")[(TYPES.index(name) + block_k // 32) % 3]
    case = Case("mmq", name, dtype, 17, 40, k_of(name, 3), flags=("bias",))
    inputs = SPEC.make_inputs(case, 1)
    y = allocate_and_launch(inputs.x, inputs.weight, inputs.bias, SMALL.replace(block_k=block_k))
    ref = SPEC.reference(inputs)
    assert check_output(y, ref, SPEC.error_model(inputs, ref)).passed


@pytest.mark.parametrize("split_k", [2, 4, 8])
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q6_K"])
def test_shares_of_k_even_and_uneven_and_empty(name, split_k):
    case = Case("mmq", name, "float16", 5, 40, k_of(name, 5 if name != "Q6_K" else 1))
    tile = SMALL.replace(split_k=split_k)
    inputs = held(case, tile)
    again = [SPEC.run(inputs, tile=tile) for _ in range(2)]
    assert torch.equal(*again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", TYPES)
def test_weights_are_the_files_numbers_rounded_once(name, dtype):
    """x of unit vectors reads the weight out, a value of every type and of every place."""
    k = k_of(name, 32 * 4 // BLOCK_TYPES[name].block_size or 1)
    case = Case("mmq", name, "float32", 1, 24, k)
    source = SPEC.make_inputs(case, 2).source
    weight = pack_blocks_for(source.raw, name, arch=INTERPRETER)
    assert isinstance(weight, GpuBlocks)
    y = mmq_gemm(torch.eye(k, dtype=dtype), weight)
    right = torch.from_numpy(BLOCK_TYPES[name].dequantize(source.raw)).to(dtype)
    assert torch.equal(y.T, right)


@pytest.mark.parametrize("name", ["IQ4_NL", "MXFP4", "Q8_0"])
def test_every_code_has_its_value(name):
    """Random bytes may lack a code; here each is there."""
    raw = np.zeros((16, BLOCK_TYPES[name].block_bytes), np.uint8)
    codes = np.arange(16 * 32).reshape(16, 32) if name == "Q8_0" else np.arange(16) * 17
    body = BLOCK_TYPES[name].block_bytes - (32 if name == "Q8_0" else 16)
    raw[:, body:] = codes % 256
    raw[:, :body] = 128 if name == "MXFP4" else np.array([1.0], "<f2").view(np.uint8)
    weight = pack_blocks_for(raw, name, arch=INTERPRETER)
    y = mmq_gemm(torch.eye(32), weight)
    assert torch.equal(y.T, torch.from_numpy(BLOCK_TYPES[name].dequantize(raw)))
    assert len(y.unique()) == {"Q8_0": 256, "IQ4_NL": 16, "MXFP4": 15}[name]


def test_mxfp4_exponents_from_the_smallest_to_the_largest():
    raw = np.zeros((255, 17), np.uint8)
    raw[:, 0] = np.arange(255)
    raw[:, 1:] = 0x12  # 1 and 0.5
    y = mmq_gemm(torch.eye(32), pack_blocks_for(raw, "MXFP4", arch=INTERPRETER))
    assert torch.equal(y.T, torch.from_numpy(BLOCK_TYPES["MXFP4"].dequantize(raw)))


def test_offsets_past_2_gb_are_computed_in_64_bits(monkeypatch):
    monkeypatch.setattr(triton_gemm, "spans_wide", lambda tensor: True)
    for name in ("Q5_K", "MXFP4"):
        held(Case("mmq", name, "float16", 17, 40, k_of(name, 3), flags=("bias", "strided")))


@pytest.mark.parametrize("corruption", SPEC.corruptions)
@pytest.mark.parametrize("name", ["Q4_1", "Q3_K", "Q5_K", "IQ4_XS", "MXFP4"])
def test_a_corrupted_weight_is_noticed(name, corruption):
    case = Case("mmq", name, "float16", 17, 33, k_of(name, 1))
    inputs = SPEC.make_inputs(case, 0)
    corrupted = SPEC.corruptions[corruption](inputs)
    if corrupted is None:
        assert corruption == "swapped minimum"
        assert inputs.weight.minimums is None
        return
    ref = SPEC.reference(inputs)
    y = SPEC.run(corrupted)
    assert not check_output(y, ref, SPEC.error_model(inputs, ref)).passed


def test_the_spec_is_the_gpus():
    assert spec_arch(SPEC) == INTERPRETER
    assert {case.weight_type for case in SPEC.cases} == set(TYPES)
    assert spec_for("mmq", "gfx942").space() is TRITON_SPACE
    assert load_spec("mmq@interpreter").space() is TRITON_SPACE
    assert running("mmq", "gfx942").kernel_hash == running("mmq", "sm_90").kernel_hash
    alone = dict.fromkeys(TRITON_SPACE.fields, ("triton",))
    # Its products are the vendor's library's, which comes with torch.
    assert running("mmq", "gfx942").uses == {**alone, "dense": ("triton", "torch")}
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="torch sees no GPU"):
            SPECS["mmq"].on("cuda")


def test_a_large_result_is_judged_on_some_columns():
    case = Case("mmq", "Q4_K", "float16", 1, 24576, 4096, flags=("bias",))
    inputs = replace(SPECS["mmq"].make_inputs(case, 0), weight=None)
    ref = SPEC.reference(inputs)
    model = SPEC.error_model(inputs, ref)
    assert 64 < ref.shape[1] < case.N
    assert model.columns is not None
    assert len(model.columns) == ref.shape[1]


WEIGHT = pack_blocks_for(np.zeros((40, 144), np.uint8), "Q4_K", arch=INTERPRETER)
X = torch.zeros(2, 256)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "mmq: x is list; pass a torch.Tensor"),
        ({"x": X.double()}, UnsupportedError, "mmq: x has dtype torch.float64; it must be"),
        ({"x": X[:, :255]}, ValueError, "its last dimension must be K=256"),
        ({"x": X.to("meta")}, ValueError, "mmq: x is on meta, the weight on cpu"),
        ({"bias": torch.zeros(39)}, ValueError, "bias has shape [39] and dtype torch.float32"),
        ({"bias": torch.zeros(40, dtype=torch.int32)}, ValueError, "floating point [N=40]"),
        ({"bias": torch.zeros(40, device="meta")}, ValueError, "the bias on meta"),
        ({"activations": "int4"}, ValueError, "use one of ('float', 'int8')"),
        ({"tile": SMALL.replace(block_k=48)}, TileError, "block_k=48 is none of"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], error: type[Exception], message: str):
    arguments: dict[str, Any] = {"x": X, "weight": WEIGHT, **change}
    with pytest.raises(error, match=re.escape(message)):
        mmq_gemm(**arguments)


def test_no_rows_are_no_launch():
    y = mmq_gemm(torch.zeros(3, 0, 256, dtype=torch.bfloat16), WEIGHT)
    assert y.shape == (3, 0, 40)
    assert y.dtype == torch.bfloat16


ARCHS = ("interpreter", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "gfx1151", "gfx90a", "gfx942")


@pytest.mark.parametrize("arch", ARCHS)
def test_every_problem_has_a_default_that_obeys_the_rules(arch):
    shapes = [(1, 256), (40, 512), (4096, 4096), (512, 10752)]
    batches = (1, 16, 17, 33, 128, 129, 300, 8192)
    for name, dtype, m, (n, k) in itertools.product(
        TYPES, ("float16", "bfloat16", "float32"), batches, shapes
    ):
        problem = Case("mmq", name, dtype, m, n, k).problem(arch)
        TRITON_SPACE.check(TRITON_SPACE.default(problem), problem)


@pytest.mark.parametrize(
    ("arch", "m", "change", "rule"),
    [
        ("gfx1151", 16, {"num_stages": 2}, "loads ahead"),
        ("gfx942", 129, {"split_k": 2}, "few rows"),
        ("sm_90", 16, {"block_n": 64, "num_warps": 4}, "one product after another"),
        ("sm_80", 64, {"block_n": 128, "block_k": 128}, "registers"),
        ("sm_75", 512,
         {"block_m": 128, "block_n": 64, "num_warps": 4, "num_stages": 4}, "shared memory"),
    ],
)  # fmt: skip
def test_a_rule_and_what_breaks_it(arch, m, change, rule):
    problem = Case("mmq", "Q4_K", "float16", m, 512, 1024).problem(arch)
    right = SMALL.replace(num_stages=1)
    TRITON_SPACE.check(right, problem)
    with pytest.raises(TileError, match=f"breaks rule '{rule}'"):
        TRITON_SPACE.check(right.replace(**change), problem)


def test_the_rule_of_whole_sub_blocks():
    problem = Case("mmq", "Q4_K", "float16", 16, 512, 1024).problem("gfx942")
    found = TRITON_SPACE.broken_rule(SMALL.replace(block_k=16), problem)
    assert found is not None
    assert found.name == "whole sub-blocks"
