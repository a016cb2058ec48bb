"""The spec of w4a16 on GPUs, as far as it holds without one; the interpreter stands in for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import triton_interpreter  # noqa: F401
from tilewright.device import INTERPRETER
from tilewright.errors import UnsupportedError
from tilewright.layout.triton import WordsW4
from tilewright.ops import catalog
from tilewright.ops.catalog import SPECS, load_spec, spec_for, specs_on
from tilewright.ops.check import check_output
from tilewright.ops.choose import running
from tilewright.ops.contract import Case, spec_arch
from tilewright.ops.w4a16.gpu_spec import judged_columns

SPEC = spec_for("w4a16", INTERPRETER)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (0, 24576, 4096),
        (1, 24576, 4096),
        (16, 24576, 4096),
        (512, 4096, 12288),
        (8192, 51200, 5120),
    ],
)
def test_large_results_are_judged_at_both_ends_and_between(m: int, n: int, k: int) -> None:
    columns = judged_columns(m, n, k)
    assert columns is not None
    assert len(columns) < n
    assert np.array_equal(columns[:64], np.arange(64))
    assert np.array_equal(columns[-64:], np.arange(n - 64, n))
    assert (np.diff(columns) > 0).all()
    assert ((64 < columns) & (columns < n - 64)).sum() >= 64
    assert np.array_equal(columns, judged_columns(m, n, k))  # in every process


def test_small_results_are_judged_whole() -> None:
    assert judged_columns(64, 4096, 4096) is None
    assert judged_columns(1, 31, 132) is None


def test_no_row_is_judged_too() -> None:
    inputs = SPEC.make_inputs(Case("w4a16", "uint4", "float16", 0, 33, 128, 64), 0)
    ref = SPEC.reference(inputs)
    assert ref.shape == SPEC.error_model(inputs, ref).sigma.shape == (0, 33)


def test_a_result_that_is_judged_in_part_is_right_and_a_wrong_one_is_seen() -> None:
    case = Case("w4a16", "uint4", "float16", 2, 4096, 8192, 128, flags=("bias",))
    columns = judged_columns(case.M, case.N, case.K)
    assert columns is not None
    inputs = SPEC.make_inputs(case, 0)
    ref = SPEC.reference(inputs)
    model = SPEC.error_model(inputs, ref)
    assert ref.shape == (2, len(columns))
    weight = torch.from_numpy(inputs.source.dequantize()).double()
    exact = inputs.x.double() @ weight.T + inputs.bias.double()
    assert np.allclose(ref, exact[:, columns].numpy(), rtol=1e-9, atol=1e-9)
    y = exact.half()
    assert check_output(y, ref, model).passed
    y[1, columns[70]] += 0.5
    assert not check_output(y, ref, model).passed


def test_the_interpreter_runs_the_same_op_on_words() -> None:
    assert spec_arch(SPEC) == INTERPRETER
    case = replace(SPEC.cases[0], M=3)
    inputs = SPEC.make_inputs(case, 1)
    assert isinstance(inputs.weight, WordsW4)
    ref = SPEC.reference(inputs)
    assert check_output(SPEC.run(inputs), ref, SPEC.error_model(inputs, ref)).passed


def test_ops_by_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(specs_on("sm_90")) == {"w4a16", "mmq", "moe", "ssd", "conv1d"}
    assert set(specs_on("cpu-avx2")) == set(SPECS)
    assert load_spec("w4a16@interpreter").space().name == "w4a16/triton"  # type: ignore[misc]
    assert spec_for("w4a16", "sm_90").space().name == "w4a16/hopper"  # type: ignore[misc]
    with pytest.raises(UnsupportedError, match="no kernels for 'tpu'"):
        load_spec("w4a16@tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="torch sees no GPU"):
            load_spec("w4a16@cuda")
    monkeypatch.setattr(catalog, "SPECS", {"mmq": replace(SPECS["mmq"], devices={})})
    with pytest.raises(UnsupportedError, match="op mmq has no kernels for sm_90; it runs on cpu"):
        spec_for("mmq", "sm_90")


def test_each_family_has_sources_of_its_own() -> None:
    hopper, words = running("w4a16", "sm_90"), running("w4a16", "gfx1151")
    assert hopper.kernel_hash != words.kernel_hash
    assert running("w4a16", "gfx942").kernel_hash == words.kernel_hash
    assert set(hopper.uses) == {"hopper", "hopper_decode"}
    assert hopper.uses["hopper"] == ("triton",)
