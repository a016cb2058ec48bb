"""Cases, the operands they draw, and the catalog."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tilewright.errors import UnsupportedError
from tilewright.ops.catalog import SPECS, find_spec
from tilewright.ops.contract import (
    DTYPES,
    FLAGS,
    Case,
    OpSpec,
    draw_activations,
    draw_bias,
    rng_for,
)


def case(m=17, **fields):
    return Case(**{"op": "mmq", "weight_type": "Q4_1", "act_dtype": "float16", "M": m, "N": 97,
                   "K": 576, **fields})  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "Q4_1-M17-N97-K576-fp16"),
        ({"flags": ("strided", "bias")}, "Q4_1-M17-N97-K576-fp16-bias-strided"),
        ({"activations": "int8", "act_dtype": "bfloat16"}, "Q4_1-M17-N97-K576-bf16-int8"),
        ({"weight_type": "uint4", "group": 64}, "uint4-g64-M17-N97-K576-fp16"),
        ({"weight_type": "uint4", "group": -1}, "uint4-gK-M17-N97-K576-fp16"),
        ({"experts": 8, "top_k": 2}, "Q4_1-E8-top2-M17-N97-K576-fp16"),
        (
            {"experts": 8, "top_k": 2, "routing": "hot", "flags": ("strided",)},
            "Q4_1-E8-top2-M17-N97-K576-fp16-hot-strided",
        ),
        (
            {"op": "ssd", "weight_type": "p64", "group": 4, "sequences": 3, "flags": ("packed",)},
            "p64-g4-S3-M17-N97-K576-fp16-packed",
        ),
    ],
)
def test_case_id_names_everything(fields, expected):
    assert case(**fields).id == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"act_dtype": "fp16"}, "act_dtype is 'fp16'; it must be one of"),
        ({"activations": "int4"}, "activations is 'int4'; it must be 'float' or 'int8'"),
        ({"flags": ("outlier",)}, r"flags hold \['outlier'\]; a case knows"),
        ({"m": -1}, "M, N, K are -1, 97, 576"),
        ({"N": 0}, "N and K >= 1"),
        ({"experts": 8}, "experts, top_k are 8, 0; both positive, or both 0"),
        ({"sequences": -1}, "sequences is -1; it must be at least 0"),
        ({"experts": -1, "top_k": -1}, "experts, top_k are -1, -1"),
        ({"routing": "odd"}, "routing is 'odd'; it must be one of"),
    ],
)
def test_bad_case_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        case(**fields)


def test_problem_of_a_case():
    problem = case(weight_type="uint4", group=576, op="w4a16").problem("sm_90")
    assert problem.group == -1  # one group a row has one name in the tables
    assert (problem.arch, problem.M, problem.N, problem.K) == ("sm_90", 17, 97, 576)
    assert (problem.act_dtype, problem.activations) == ("float16", "float")
    assert case(experts=8, top_k=2).problem("sm_90").M == 34  # rows of all experts
    assert case(op="ssd", weight_type="p64", group=576).problem("sm_90").group == 576  # heads


def test_weight_of_a_mixture_depends_on_its_experts():
    assert case(experts=8, top_k=2).weight_key == case(experts=8, top_k=3, m=5).weight_key
    assert case(experts=8, top_k=2).weight_key != case(experts=7, top_k=2).weight_key
    assert len(case().weight_key) == 7  # what seeds of other ops are drawn from


def test_rng_depends_on_every_part_and_on_nothing_else():
    draws = {rng_for(*key).integers(1 << 60) for key in [(0, "a"), (1, "a"), (0, "b"), (0, "a", 1)]}
    assert len(draws) == 4
    assert rng_for(7, "a").integers(1 << 60) == rng_for(7, "a").integers(1 << 60)


def test_operands_are_the_same_in_another_process():
    code = (
        "import hashlib; from tilewright.ops.catalog import SPECS\n"
        "for s in SPECS.values():\n"
        "  i = s.make_inputs(s.cases[5], 3)\n"
        "  print(hashlib.sha256(i.x.contiguous().view(-1).float().numpy().tobytes()\n"
        "        + s.reference(i).tobytes()).hexdigest())"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert printed[0] == printed[1]
    assert len(set(printed[0].split())) == len(SPECS)


@pytest.mark.parametrize("flag", ["", "strided", "transposed", "ndim3"])
@pytest.mark.parametrize("m", [0, 1, 6, 17])
def test_activations_lie_in_a_buffer_of_nan(flag, m):
    drawn = case(m=m, flags=(flag,) if flag else ())
    x = draw_activations(drawn, 0)
    assert x.dtype == torch.float16
    assert x.numel() == m * 576
    assert x.shape[-1] == 576
    assert torch.isfinite(x).all()
    buffer = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    assert int(torch.isfinite(buffer).sum()) == x.numel()
    assert torch.isnan(buffer[:64]).all()
    assert torch.isnan(buffer[-64:]).all()


def test_views_are_what_their_flags_say():
    assert draw_activations(case(), 0).is_contiguous()
    assert draw_activations(case(flags=("strided",)), 0).stride() == (600, 1)
    assert draw_activations(case(flags=("transposed",)), 0).stride() == (1, 20)
    assert draw_activations(case(m=6, flags=("ndim3",)), 0).shape == (2, 3, 576)
    assert draw_activations(case(flags=("ndim3", "strided")), 0).shape == (1, 17, 576)
    assert draw_bias(case(), 0) is None
    bias = draw_bias(case(flags=("bias",)), 0)
    assert bias is not None
    assert bias.shape == (97,)
    assert bias.dtype == torch.float16


@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers(dtype):
    x = draw_activations(case(act_dtype=dtype, flags=("outliers",)), 0).float()
    assert 6e4 < float(x.abs().max()) < 6.3e4
    loud = (x.abs() > 100).sum(dim=1)
    assert int(loud.min()) >= 1
    assert int(loud.max()) <= 4
    assert float(x.abs().median()) < 1


def test_seed_changes_the_operands():
    assert not torch.equal(draw_activations(case(), 0), draw_activations(case(), 1))


def test_catalog():
    assert list(SPECS) == ["w4a16", "mmq", "moe", "ssd", "conv1d"]
    assert len(SPECS) == 5
    for name, spec in SPECS.items():
        assert spec.name == name
        assert find_spec(name) is spec
    with pytest.raises(UnsupportedError, match="op is 'fft'; the catalog has w4a16, mmq, moe, ssd"):
        find_spec("fft")


def test_reading_the_catalog_loads_no_kernels():
    code = (
        "import sys; from tilewright.ops.catalog import SPECS; [s.cases for s in SPECS.values()]\n"
        "print(sorted({m.split('.')[0] for m in sys.modules}"
        " & {'numba', 'triton', 'transformers', 'onnxruntime'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["w4a16", "mmq"])
def test_every_weight_type_is_covered(name):
    """Every batch, dtype, flag and path, within 100 to 150 weight-only cases a type."""
    spec = SPECS[name]
    for weight_type in spec.weight_types:
        cases = [c for c in spec.cases if c.weight_type == weight_type]
        weight_only = [c for c in cases if c.activations == "float"]
        assert 100 <= len(weight_only) <= 150
        for some in (weight_only, [c for c in cases if c.activations == "int8"]):
            assert {c.M for c in some} == {0, 1, 2, 5, 6, 16, 17, 63, 512}
            assert {c.act_dtype for c in some} == set(DTYPES)
            flags = {flag for c in some for flag in c.flags}
            assert flags == set(FLAGS) - ({"act_order"} if name == "mmq" else set())
            assert any(c.N % 128 == 0 for c in some)
            assert any(c.N % 16 for c in some)
            assert any(c.K > 4096 for c in some)


def test_w4a16_covers_every_group():
    for weight_type in ("uint4", "uint4b8"):
        cases = [c for c in SPECS["w4a16"].cases if c.weight_type == weight_type]
        assert {c.group for c in cases} == {32, 64, 128, 256, -1}
        assert {c.K for c in cases if c.group == -1} == {96, 200}
        assert any(c.K % 256 for c in cases if c.group == 128)


def test_equal_ids_are_refused():
    spec = SPECS["mmq"]
    with pytest.raises(ValueError, match="mmq: two of its cases have the same id"):
        replace(spec, cases=(spec.cases[0], spec.cases[0]))


def test_case_by_id():
    spec: OpSpec = SPECS["mmq"]
    assert spec.case("Q4_1-M17-N97-K256-fp32").M == 17
    with pytest.raises(KeyError, match="op 'mmq' has no case 'Q4_1'"):
        spec.case("Q4_1")
