"""w4a16's oracle, error model, operands and corruptions, and the op held to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stand_ins import PRODUCTS, stand_in
from tilewright.ops.catalog import SPECS
from tilewright.ops.contract import Case
from tilewright.ops.w4a16.reference import w4a16_rows
from tilewright.tune.verify import negative_controls, verify_op

SPEC = SPECS["w4a16"]
TYPES = ("uint4", "uint4b8")
SHAPES = [(40, 384, 32), (40, 384, 128), (40, 200, -1), (40, 200, 200)]


def case_of(weight_type, shape=SHAPES[0], m=17, dtype="float32", path="float", flags=()):
    return Case("w4a16", weight_type, dtype, m, *shape, path, flags)


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("flags", [(), ("act_order",), ("edge",)], ids=str)
def test_oracle_is_the_formula_element_by_element(weight_type, shape, flags):
    """Element by element in Python floats, straight from the sentence that defines the type."""
    inputs = SPEC.make_inputs(case_of(weight_type, shape, m=2, flags=("bias", *flags)), 0)
    codes, x, bias = inputs.source, inputs.x.double(), inputs.bias.double()
    ref = SPEC.reference(inputs)
    n_rows, k = codes.codes.shape
    group = k if shape[2] == -1 else shape[2]
    for m in range(2):
        for n in range(n_rows):
            total, size = float(bias[n]), abs(float(bias[n]))
            for i in range(k):
                zero = 8 if weight_type == "uint4b8" else int(codes.zeros[n, i // group])
                weight = float(codes.scales[n, i // group]) * (int(codes.codes[n, i]) - zero)
                column = i if codes.perm is None else int(codes.perm[i])
                total += float(x[m, column]) * weight
                size += abs(float(x[m, column]) * weight)
            assert abs(ref[m, n] - total) <= 1e-12 * size


@pytest.mark.parametrize("weight_type", TYPES)
def test_oracle_is_the_product_with_the_dequantized_weight(weight_type):
    inputs = SPEC.make_inputs(case_of(weight_type, flags=("act_order", "ndim3")), 4)
    expected = inputs.x.double() @ torch.from_numpy(inputs.source.dequantize()).double().T
    assert SPEC.reference(inputs).shape == (1, 17, 40)
    np.testing.assert_allclose(SPEC.reference(inputs), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_are_numbers_of_their_dtype(weight_type, dtype):
    source = SPEC.make_inputs(case_of(weight_type, dtype=dtype), 0).source
    stored = torch.from_numpy(source.scales)
    assert source.scale_dtype is getattr(torch, dtype)
    assert torch.equal(stored.to(source.scale_dtype).float(), stored)
    assert (source.zeros is None) == (weight_type == "uint4b8")


@pytest.mark.parametrize("weight_type", TYPES)
def test_weights_look_like_a_trained_layers(weight_type):
    inputs = SPEC.make_inputs(case_of(weight_type, (256, 1024, 32)), 1)
    weight = np.concatenate([rows.value() for rows in w4a16_rows(inputs.source)])
    assert np.sqrt((weight**2).mean()) * 32 == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("weight_type", TYPES)
def test_edge_weights_hold_every_extreme(weight_type):
    source = SPEC.make_inputs(case_of(weight_type, flags=("edge",)), 0).source
    scales = source.scales
    assert not scales[1].any()
    assert scales[2, 0] == 0
    assert (scales[3] < 0).all()
    assert scales[4::8].max() > 6e4
    assert (scales[5] == 2.0**-24).all()
    assert (source.codes[6] == 0).all()
    assert (source.codes[7] == 15).all()
    if source.zeros is not None:
        assert (source.zeros[6] == 15).all()
        assert (source.zeros[7] == 0).all()


def differing(before, after):
    return np.argwhere(before != after)


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("flags", [(), ("act_order",)], ids=["ordered", "act_order"])
def test_flipped_nibble_changes_one_code_under_the_loudest_column(weight_type, flags):
    inputs = SPEC.make_inputs(case_of(weight_type, flags=flags), 0)
    corrupted = SPEC.corruptions["flipped nibble"](inputs)
    places = differing(inputs.source.codes, corrupted.source.codes)
    assert len(places) == 1
    n, k = places[0]
    assert inputs.source.codes[n, k] ^ corrupted.source.codes[n, k] == 8
    column = k if inputs.source.perm is None else inputs.source.perm[k]
    assert column == np.argmax((inputs.x64() ** 2).sum(axis=0))
    assert len(differing(inputs.weight.codes.numpy(), corrupted.weight.codes.numpy())) == 1


@pytest.mark.parametrize("weight_type", TYPES)
def test_wrong_scale_is_the_next_rows(weight_type):
    inputs = SPEC.make_inputs(case_of(weight_type), 0)
    corrupted = SPEC.corruptions["wrong scale"](inputs)
    ((n, g),) = differing(inputs.source.scales, corrupted.source.scales)
    assert corrupted.source.scales[n, g] == inputs.source.scales[(n + 1) % 40, g]
    single = SPEC.make_inputs(case_of(weight_type, (1, 384, 32)), 0)
    doubled = SPEC.corruptions["wrong scale"](single)
    ((n, g),) = differing(single.source.scales, doubled.source.scales)
    assert doubled.source.scales[n, g] == 2 * single.source.scales[n, g]


def test_swapped_zero_point_exchanges_two():
    inputs = SPEC.make_inputs(case_of("uint4"), 0)
    corrupted = SPEC.corruptions["swapped zero point"](inputs)
    (n, g), (below, same) = differing(inputs.source.zeros, corrupted.source.zeros)
    assert (below, same) == (n + 1, g)
    assert corrupted.source.zeros[n, g] == inputs.source.zeros[n + 1, g]
    assert corrupted.source.zeros[n + 1, g] == inputs.source.zeros[n, g]
    assert SPEC.corruptions["swapped zero point"](SPEC.make_inputs(case_of("uint4b8"), 0)) is None
    one_row = SPEC.make_inputs(case_of("uint4", (1, 384, 32)), 0)
    assert SPEC.corruptions["swapped zero point"](one_row) is None


@pytest.mark.parametrize(
    ("order", "apart"), [("loop", True), ("sorted", False), ("blocked", True), ("blas", False)]
)
def test_right_kernels_never_fail(order, apart):
    """No false alarm over all cases of moderate size, both paths."""
    spec = SPEC.with_run(stand_in(PRODUCTS[order], apart=apart))
    cases = [c for c in SPEC.cases if 0 < c.M * c.K <= 6000]
    assert len(cases) > 150
    report = verify_op(spec, seed=list(PRODUCTS).index(order), cases=cases)
    assert report.passed, report.failures[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_type": "uint8"}, "weight_type is 'uint8'; w4a16 has"),
        ({"weight_type": "uint4", "shape": (8, 96, 64)}, "group is 64; it must divide K = 96"),
        ({"weight_type": "uint4", "shape": (8, 96, 0)}, "group is 0; it must divide K = 96"),
    ],
)
def test_bad_case_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SPEC.make_inputs(case_of(**fields), 0)


def test_flops_and_bytes():
    problem = case_of("uint4", (64, 256, 128), m=5, dtype="float16").problem("cpu")
    assert SPEC.flops(problem) == 2 * 5 * 64 * 256
    assert SPEC.bytes(problem) == 64 * (128 + 2 * 2.5) + 2 * 5 * (256 + 64)
    whole_row = case_of("uint4b8", (64, 256, -1), m=5, dtype="float32").problem("cpu")
    assert SPEC.bytes(whole_row) == 64 * (128 + 2) + 4 * 5 * (256 + 64)


@pytest.mark.parametrize("weight_type", TYPES)
def test_op_passes_every_case(weight_type):
    report = verify_op(SPEC, cases=[c for c in SPEC.cases if c.weight_type == weight_type])
    assert report.passed, report.failures[:3]
    assert len(report.rows) == 185


@pytest.mark.parametrize("weight_type", TYPES)
def test_op_passes_with_another_tile_of_each_algorithm(weight_type):
    space = SPEC.space()

    def tiles(case):
        legal = space.candidates(case.problem("cpu"))
        return [
            next(t for t in legal if t.algorithm == name and t.threads == 1)
            for name in ("dot", "blas")
        ]

    cases = [
        case_of(weight_type, shape, m, flags=("strided", "bias", "act_order"))
        for shape in SHAPES
        for m in (1, 6)
    ]
    report = verify_op(SPEC, cases=cases, tiles=tiles)
    assert report.passed, report.failures[:3]
    assert len(report.rows) == 2 * len(cases)


@pytest.mark.parametrize("weight_type", TYPES)
def test_corrupted_operands_of_the_op_turn_the_verdict_red(weight_type):
    cases = [
        c for c in SPEC.cases
        if c.weight_type == weight_type and c.M in (5, 6, 17, 63) and c.N > 1
        and c.flags in ((), ("act_order",), ("outliers",))
    ]  # fmt: skip
    controls = negative_controls(SPEC, cases=cases)
    assert all(control.passed for control in controls)
    weight_only = [c for c in controls if "int8" not in c.case]
    assert len(weight_only) > 100
    assert all(control.visible and control.caught for control in weight_only)
    names = {"flipped nibble", "wrong scale", "zeroed outputs"}
    if weight_type == "uint4":
        names.add("swapped zero point")
    assert {control.name for control in weight_only} == names
    eight_bit = [c for c in controls if "int8" in c.case]
    assert sum(c.caught for c in eight_bit) >= 0.9 * len(eight_bit)
