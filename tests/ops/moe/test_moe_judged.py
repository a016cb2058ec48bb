"""Large mixtures are judged on some columns: the oracle computes those, and no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import triton_interpreter  # noqa: F401
from quick import one_in
from tilewright.device import INTERPRETER
from tilewright.ops import pieces
from tilewright.ops.catalog import spec_for
from tilewright.ops.check import check_output
from tilewright.ops.contract import Case
from tilewright.ops.moe import gpu_spec
from tilewright.ops.moe.reference import moe_reference

SPEC = spec_for("moe", INTERPRETER)
CASES = (
    Case("moe", "Q4_K", "float16", 3, 528, 256, experts=4, top_k=2),
    Case("moe", "uint4", "float16", 3, 528, 96, 32, experts=4, top_k=2),
    Case("moe", "uint4", "float16", 3, 528, 96, 32, flags=("act_order",), experts=4, top_k=2),
)

each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Columns that the oracle computes, whatever the size."""
    columns = np.array([0, 1, 15, 16, 300, 301, 526, 527])
    monkeypatch.setattr(gpu_spec, "_MOST_VALUES", 0)
    monkeypatch.setattr(gpu_spec, "judged_columns", lambda m, n, k: columns)
    return columns


@each
def test_the_oracle_is_the_whole_one_s_columns(case: Case, judged: np.ndarray) -> None:
    inputs = SPEC.make_inputs(case, 0)
    whole = moe_reference(inputs.x64(), inputs.source)
    ref = SPEC.reference(inputs)
    np.testing.assert_allclose(ref, whole[:, :, judged], rtol=1e-12, atol=1e-12)
    model = SPEC.error_model(inputs, ref)
    assert model.sigma.shape == ref.shape
    assert (model.sigma > 0).all()
    assert (list(model.columns), model.of) == (list(judged), case.N)


@pytest.mark.parametrize("case", one_in(3, CASES), ids=lambda case: case.id)
def test_a_right_result_passes_and_a_wrong_expert_does_not(case: Case, judged: np.ndarray) -> None:
    inputs = SPEC.make_inputs(case, 0)
    ref = SPEC.reference(inputs)
    model = SPEC.error_model(inputs, ref)
    y = SPEC.run(inputs)
    assert check_output(y, ref, model).passed
    ids = inputs.weight.ids.clone()
    ids[-1, -1] = (ids[-1, -1] + 1) % case.experts
    wrong = SPEC.run(replace(inputs, weight=replace(inputs.weight, ids=ids)))
    assert not check_output(wrong, ref, model).passed


def test_small_mixtures_are_judged_whole() -> None:
    inputs = SPEC.make_inputs(CASES[0], 0)
    ref = SPEC.reference(inputs)
    assert ref.shape == (3, 2, 528)
    assert SPEC.error_model(inputs, ref).columns is None


def test_products_of_large_mixtures_share_the_cores(
    judged: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of several experts run at once, each with as many of BLAS's threads as are its."""
    libraries = pieces._libraries()
    if not libraries.lib_controllers:
        pytest.skip("numpy has no BLAS that can be limited")
    monkeypatch.setattr(pieces, "THREADS", 2)
    monkeypatch.setattr(pieces.os, "cpu_count", lambda: 6)
    product, seen = gpu_spec.expert_product, set()

    def watched(x: np.ndarray, weight: object) -> np.ndarray:
        seen.update(one.num_threads for one in libraries.lib_controllers)
        return product(x, weight)

    monkeypatch.setattr(gpu_spec, "expert_product", watched)
    with libraries.limit(limits=6):
        SPEC.reference(SPEC.make_inputs(CASES[0], 0))
    assert seen == {3}
