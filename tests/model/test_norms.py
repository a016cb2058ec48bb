"""A hybrid's norms as one kernel, in Triton's interpreter, against transformers' modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_interpreter

with triton_interpreter.interpreting():
    import tilewright.ops.decoder.triton_kernels  # noqa: F401

pytest.importorskip("transformers")

from model.ssm_models import all_logits, random_ids, script
from tilewright.device import INTERPRETER
from tilewright.model import load as loading
from tilewright.model.norms import RowNorm, fuse_norms
from tilewright.model.placement import Placement

FAMILIES = ("mamba2", "nemotron_h", "bamba", "granitemoehybrid", "falcon_h1")
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def norm_of(family: str) -> Any:
    model = script("make_hybrid").plain_model(family)
    return next(
        m for m in model.modules()
        if type(m).__name__.endswith("RMSNorm") and hasattr(m, "variance_epsilon")
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_normed_as_transformers_does(family: str, dtype: torch.dtype) -> None:
    norm = norm_of(family).to(dtype)
    ours = RowNorm(norm)
    wide = torch.randn(2, 3, 2 * len(norm.weight), generator=torch.Generator().manual_seed(0))
    for x in (wide[..., : len(norm.weight)].to(dtype), 100 * wide[:1, :1, ::2].to(dtype)):
        right, found = norm(x), ours(x)
        assert found.shape == x.shape
        assert found.dtype == dtype
        far = (found.double() - right.double()).norm() / right.double().norm()
        assert far < ROUNDING[dtype]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_in_float32_stays_so_under_a_weight_in_half_precision(family: str) -> None:
    """As Mamba2's last norm gets it, whose residuals are in float32."""
    norm = norm_of(family).to(torch.float16)
    x = torch.randn(3, len(norm.weight), generator=torch.Generator().manual_seed(0))
    right, found = norm(x), RowNorm(norm)(x)
    assert found.dtype == right.dtype == torch.float32
    assert float((found - right).norm() / right.norm()) < ROUNDING[torch.float32]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_plain_norm_of_a_model_is_replaced(family: str) -> None:
    model = script("make_hybrid").plain_model(family)
    fused = copy.deepcopy(model)
    names = [n for n, m in model.named_modules() if type(m).__name__.endswith("RMSNorm")]
    assert fuse_norms(fused) == len(names) > 2
    assert fused.state_dict().keys() == model.state_dict().keys()
    ids = random_ids(5)
    right, found = all_logits(model, ids), all_logits(fused, ids)
    assert float((found - right).norm() / right.norm()) < 1e-5


def test_norms_are_fused_at_load_on_a_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = script("make_hybrid")
    hybrid.write_folder(tmp_path, hybrid.plain_model("bamba"))

    def fused(device: str) -> int:
        model, _ = loading.load(tmp_path, device=device)
        return sum(isinstance(m, RowNorm) for m in model.modules())

    assert fused("cpu") == 0
    monkeypatch.setattr(
        loading, "place",
        lambda device, dtype: Placement(torch.device("cpu"), INTERPRETER, torch.float32),
    )  # fmt: skip
    assert fused("cuda") > 2


def test_without_triton_a_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.model.norms.has_triton", lambda: False)
    model = script("make_hybrid").plain_model("bamba")
    assert fuse_norms(model) == 0
    assert not any(isinstance(m, RowNorm) for m in model.modules())
