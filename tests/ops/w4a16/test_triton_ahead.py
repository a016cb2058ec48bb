"""Weights made a step ahead, in the interpreter: the numbers of `triton_gemm`, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewright.layout.triton import pack_w4_words
from tilewright.ops.check import check_output
from tilewright.ops.contract import Case
from tilewright.tiles.tile import Tile

pytest.importorskip(
    "triton_interpreter", reason="triton is not installed: pip install 'tilewright[triton]'"
)

from tilewright.ops.w4a16 import triton_ahead, triton_gemm
from tilewright.ops.w4a16.triton_op import OP
from tilewright.ops.w4a16.triton_spec import SPEC

AHEAD = Tile.of(
    "triton", block_m=16, block_n=32, block_k=64, num_warps=4, num_stages=3, group_m=4,
    dequant="asm", order="ahead",
)  # fmt: skip


def case_of(
    m=17, n=40, k=256, group=64, dtype="float16", weight_type="uint4", flags: tuple[str, ...] = ()
) -> Case:
    return Case(OP, weight_type, dtype, m, n, k, group, "float", flags)


def inputs_of(case: Case, packed: bool = True):
    inputs = SPEC.make_inputs(case, 0)
    weight = pack_w4_words(inputs.source, pack_zeros=packed, order="k32")
    return replace(inputs, weight=weight)


@pytest.fixture
def served(monkeypatch):
    """Counts the launches of the kernel itself."""
    calls = []
    launch = triton_gemm.launch_ahead
    monkeypatch.setattr(
        triton_gemm, "launch_ahead", lambda *a, **kw: (calls.append(1), launch(*a, **kw))
    )
    return calls


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("block_k", "group", "weight_type"),
    [(32, 32, "uint4"), (64, 64, "uint4b8"), (64, 128, "uint4"), (128, 128, "uint4"),
     (64, -1, "uint4"), (128, -1, "uint4b8")],
)  # fmt: skip
def test_it_is_right_and_the_same_bits_as_without(served, block_k, group, dtype, weight_type):
    case = case_of(group=group, dtype=dtype, weight_type=weight_type, flags=("bias", "strided"))
    inputs = inputs_of(case)
    ref = SPEC.reference(inputs)
    some = AHEAD.replace(block_k=block_k)
    y = SPEC.run(inputs, tile=some)
    result = check_output(y, ref, SPEC.error_model(inputs, ref))
    assert result.passed, result.reason
    assert served
    assert torch.equal(y, SPEC.run(inputs, tile=some.replace(order="wx")))


@pytest.mark.parametrize(("n", "k"), [(1, 64), (9, 128), (16, 192), (33, 64), (66, 128)])
def test_few_steps_and_ragged_edges(served, n, k):
    """A K of one step has no next one, one of two no step after the next."""
    inputs = inputs_of(case_of(5, n, k, 64))
    ref = SPEC.reference(inputs)
    result = check_output(SPEC.run(inputs, tile=AHEAD), ref, SPEC.error_model(inputs, ref))
    assert result.passed, result.reason
    assert served


def test_zero_points_in_bytes(served):
    inputs = inputs_of(case_of(), packed=False)
    assert inputs.weight.zeros.dtype == torch.uint8
    packed = SPEC.run(inputs_of(case_of()), tile=AHEAD)
    assert torch.equal(SPEC.run(inputs, tile=AHEAD), packed)
    assert len(served) == 2


@pytest.mark.parametrize("flag", ["transposed", "act_order", "outliers", "edge"])
def test_x_as_it_comes(served, flag):
    inputs = inputs_of(case_of(flags=(flag,)))
    ref = SPEC.reference(inputs)
    result = check_output(SPEC.run(inputs, tile=AHEAD), ref, SPEC.error_model(inputs, ref))
    assert result.passed, result.reason
    assert served


@pytest.mark.parametrize("why", ["words", "scales", "uneven", "wide"])
def test_what_it_does_not_serve_is_multiplied_without(served, monkeypatch, why):
    case = case_of(k=200, group=-1) if why == "uneven" else case_of()
    inputs = inputs_of(case)
    if why == "words":
        inputs = replace(inputs, weight=pack_w4_words(inputs.source))
    elif why == "scales":
        weight = inputs.weight
        inputs = replace(inputs, weight=replace(weight, scales=weight.scales.float()))
    elif why == "wide":
        monkeypatch.setattr(triton_gemm, "spans_wide", lambda tensor: True)
    ref = SPEC.reference(inputs)
    result = check_output(SPEC.run(inputs, tile=AHEAD), ref, SPEC.error_model(inputs, ref))
    assert result.passed, result.reason
    assert not served


def test_it_serves_no_chip_without_packed_maths():
    inputs = inputs_of(case_of(dtype="bfloat16"))
    for arch, expected in (("sm_90", True), ("sm_80", False), ("gfx942", False)):
        arguments = triton_gemm.weight_arguments(inputs.weight, torch.bfloat16, "asm", arch)
        found = triton_ahead.serves(
            AHEAD, inputs.x, inputs.weight, arguments, wide=False, interpreted=False
        )
        assert found is expected
