"""mmq's oracle, error model, operands and corruptions, and the op held to them."""

from __future__ import annotations

from dataclasses import replace

import gguf.quants
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from job_process import some_slow
from stand_ins import PRODUCTS, stand_in
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.ops.catalog import SPECS
from tilewright.ops.contract import Case
from tilewright.ops.mmq.reference import mmq_reference, mmq_rows
from tilewright.tune.verify import negative_controls, verify_op

SPEC = SPECS["mmq"]
TYPES = SPEC.weight_types
QUICK = ("Q4_1", "Q5_0", "Q4_K", "Q8_0", "Q6_K", "IQ4_XS", "MXFP4")  # all their cases


def case_of(weight_type, m=17, n=40, k=512, dtype="float32", path="float", flags=()):
    return Case("mmq", weight_type, dtype, m, n, k, 0, path, flags)


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("flags", [(), ("edge",)], ids=["plain", "edge"])
def test_oracle_is_the_product_with_ggufs_own_dequantizer(weight_type, flags):
    inputs = SPEC.make_inputs(case_of(weight_type, flags=("bias", *flags)), 0)
    kind = GGMLQuantizationType[weight_type]
    weight = gguf.quants.dequantize(inputs.source.raw, kind).astype(np.float64)
    expected = inputs.x64() @ weight.T + inputs.bias64()
    scale = np.abs(inputs.x64()) @ np.abs(weight).T + 1
    assert np.abs(SPEC.reference(inputs) - expected).max() <= 2**-22 * scale.max()
    np.testing.assert_allclose(SPEC.reference(inputs) / scale, expected / scale, atol=2**-22)


@pytest.mark.parametrize("weight_type", TYPES)
def test_weights_look_like_a_trained_layers(weight_type):
    inputs = SPEC.make_inputs(case_of(weight_type, n=256, k=1024), 1)
    weight = np.concatenate([rows.value() for rows in mmq_rows(inputs.source)])
    assert np.sqrt((weight**2).mean()) * 32 == pytest.approx(1.0, abs=0.25)
    assert abs(weight.mean()) < 0.15 * weight.std()
    first_field = BLOCK_TYPES[weight_type].scale_fields[0]
    blocks = inputs.source.raw.reshape(256, -1, BLOCK_TYPES[weight_type].block_bytes)
    assert len(np.unique(blocks[:, :, first_field])) >= 3


@pytest.mark.parametrize("weight_type", TYPES)
def test_edge_weights_hold_every_extreme(weight_type):
    inputs = SPEC.make_inputs(case_of(weight_type, flags=("edge",)), 0)
    weight = np.concatenate([rows.value() for rows in mmq_rows(inputs.source)])
    size = np.abs(weight).max(axis=1)
    assert np.isfinite(weight).all()
    assert size[1] == 0
    assert not weight[2, : BLOCK_TYPES[weight_type].block_size].any()
    assert size[2] > 0
    assert size[4] > 1e3 * size[0]
    assert size[5] < 0.5 * size[0]


def test_rows_are_split_without_a_seam():
    """A weight larger than the oracle holds at a time gives the same as its parts."""
    inputs = SPEC.make_inputs(case_of("Q4_1", m=2, n=300, k=32768), 0)
    counts = [len(rows.main) for rows in mmq_rows(inputs.source)]
    assert counts == [16] * 18 + [12]
    whole = mmq_reference(inputs.x64(), inputs.source)
    tail = replace(inputs.source, raw=inputs.source.raw[250:])
    np.testing.assert_allclose(whole[:, 250:], mmq_reference(inputs.x64(), tail), rtol=1e-12)


def test_gguf_bytes_lie_in_a_buffer_of_ff():
    raw = SPEC.make_inputs(case_of("Q4_K"), 0).source.raw
    base = raw
    while base.base is not None:
        base = base.base
    assert base.size == raw.size + 128
    assert (base[:64] == 0xFF).all()
    assert (base[-64:] == 0xFF).all()


def test_packed_bytes_are_the_sources():
    inputs = SPEC.make_inputs(case_of("Q6_K"), 0)
    assert torch.equal(inputs.weight.data, torch.from_numpy(inputs.source.raw))


def changed_places(before, after):
    """Element indices where the two sources' weights differ."""
    pairs = zip(mmq_rows(before), mmq_rows(after), strict=True)
    return np.argwhere(np.concatenate([a.value() != b.value() for a, b in pairs]))


@pytest.mark.parametrize("weight_type", TYPES)
def test_flipped_code_bit_changes_one_weight(weight_type):
    inputs = SPEC.make_inputs(case_of(weight_type), 0)
    original = inputs.source.raw.copy()
    corrupted = SPEC.corruptions["flipped code bit"](inputs)
    assert np.array_equal(inputs.source.raw, original)
    bits = np.unpackbits(corrupted.source.raw ^ original)
    assert bits.sum() == 1
    places = changed_places(inputs.source, corrupted.source)
    assert len(places) == 1
    assert places[0, 1] == np.argmax((inputs.x64() ** 2).sum(axis=0))
    assert torch.equal(corrupted.weight.data, torch.from_numpy(corrupted.source.raw))


@pytest.mark.parametrize("weight_type", TYPES)
def test_wrong_scale_changes_one_block(weight_type):
    inputs = SPEC.make_inputs(case_of(weight_type), 0)
    places = changed_places(inputs.source, SPEC.corruptions["wrong scale"](inputs).source)
    size = BLOCK_TYPES[weight_type].block_size
    assert len(np.unique(places[:, 0])) == 1
    assert len(np.unique(places[:, 1] // size)) == 1
    assert len(places) > size // 2


@pytest.mark.parametrize("weight_type", TYPES)
def test_swapped_minimum_changes_one_block_of_types_that_have_one(weight_type):
    inputs = SPEC.make_inputs(case_of(weight_type), 0)
    corrupted = SPEC.corruptions["swapped minimum"](inputs)
    if weight_type not in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"):
        assert corrupted is None
        return
    places = changed_places(inputs.source, corrupted.source)
    assert len(np.unique(places[:, 0])) == 1
    assert len(np.unique(places[:, 1] // BLOCK_TYPES[weight_type].block_size)) == 1


@pytest.mark.parametrize(
    ("order", "apart"), [("loop", True), ("sorted", False), ("blocked", True), ("blas", False)]
)
def test_right_kernels_never_fail(order, apart):
    """No false alarm over weight types with and without a minimum, both paths."""
    spec = SPEC.with_run(stand_in(PRODUCTS[order], apart=apart))
    cases = [
        c for c in SPEC.cases
        if c.weight_type in ("Q4_1", "Q6_K", "IQ4_NL") and 0 < c.M * c.K <= 6000
    ]  # fmt: skip
    assert len(cases) > 150
    report = verify_op(spec, seed=list(PRODUCTS).index(order), cases=cases)
    assert report.passed, report.failures[0]


def test_unknown_weight_type_is_refused():
    with pytest.raises(ValueError, match="weight_type is 'Q9_0'; mmq has"):
        SPEC.make_inputs(case_of("Q9_0"), 0)


def test_flops_and_bytes():
    problem = case_of("Q4_0", m=5, n=64, k=256, dtype="float16").problem("cpu")
    assert SPEC.flops(problem) == 2 * 5 * 64 * 256
    assert SPEC.bytes(problem) == 64 * 8 * 18 + 2 * 5 * (256 + 64)


@pytest.mark.parametrize("weight_type", some_slow(TYPES, {*TYPES} - {*QUICK}))
def test_op_passes_every_case(weight_type):
    report = verify_op(SPEC, cases=[c for c in SPEC.cases if c.weight_type == weight_type])
    assert report.passed, report.failures[:3]
    assert len(report.rows) == 192


@pytest.mark.parametrize("weight_type", TYPES)
def test_op_passes_with_another_tile_of_each_algorithm(weight_type):
    space = SPEC.space()

    def tiles(case):
        legal = space.candidates(case.problem("cpu"))
        return [
            next(t for t in legal if t.algorithm == name and t.threads == 1)
            for name in ("dot", "blas")
        ]

    cases = [case_of(weight_type, m, 97, 512, flags=("strided", "bias")) for m in (1, 6)]
    report = verify_op(SPEC, cases=cases, tiles=tiles)
    assert report.passed, report.failures[:3]
    assert len(report.rows) == 4


@pytest.mark.parametrize("weight_type", some_slow(TYPES, {*TYPES} - {*QUICK[::2]}))
def test_corrupted_operands_of_the_op_turn_the_verdict_red(weight_type):
    cases = [
        c for c in SPEC.cases
        if c.weight_type == weight_type and not c.flags and c.M in (5, 63) and c.N in (33, 128)
    ]  # fmt: skip
    controls = negative_controls(SPEC, cases=cases)
    assert all(control.passed for control in controls)
    weight_only = [c for c in controls if "int8" not in c.case]
    assert all(control.visible and control.caught for control in weight_only)
    names = {control.name for control in weight_only}
    assert {"flipped code bit", "wrong scale", "zeroed outputs"} <= names
    assert ("swapped minimum" in names) == (
        BLOCK_TYPES[weight_type]
        .codes(np.zeros((1, BLOCK_TYPES[weight_type].block_bytes), np.uint8))
        .minimum
        is not None
    )
    eight_bit = [c for c in controls if "int8" in c.case]
    assert sum(c.caught for c in eight_bit) >= 0.9 * len(eight_bit)
