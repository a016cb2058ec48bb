"""Mixtures of experts as they are packed for a GPU, run by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# Before anything imports a kernel.
import triton_interpreter  # noqa: F401
from model.gguf_models import logits, relative_error
from model.moe_models import TinyMoe, write_folder, write_gguf
from tilewright.device import INTERPRETER
from tilewright.layout.experts import GpuExperts
from tilewright.model import load as loading
from tilewright.model.check import model_cases
from tilewright.model.layers import model_problems
from tilewright.model.moe import QuantExperts
from tilewright.model.placement import Placement


@pytest.fixture(autouse=True)
def _on_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement(torch.device("cpu"), INTERPRETER, torch.float32)
    monkeypatch.setattr(loading, "place", lambda device, dtype: placement)


def experts_of(model: torch.nn.Module) -> QuantExperts:
    (found,) = (m for m in model.modules() if isinstance(m, QuantExperts))
    return found


TYPES = {"down_exps": "Q5_1", "_exps": "Q8_0", "": "Q8_0"}


def test_experts_of_a_gguf_file_stay_packed_and_share_a_launch(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "m.gguf", TinyMoe(experts=4, layers=1, types=TYPES, inner=32))

    model, _ = loading.load(tmp_path / "m.gguf", device="cuda")

    experts = experts_of(model)
    both, down = experts.gate_up_proj, experts.down_proj
    assert isinstance(both, GpuExperts)
    assert isinstance(down, GpuExperts)
    assert (both.E, both.N, both.type_name, down.type_name) == (4, 64, "Q8_0", "Q5_1")
    assert experts.nbytes == both.nbytes + down.nbytes
    assert set(model.tilewright_info.packed) == {"Q5_1", "Q8_0"}
    assert ".gate_up_proj" in {name for name, *_ in experts.products()}
    assert {p.type for p in model_problems(model)} >= {"Q8_0", "Q5_1"}
    cases = model_cases(model, paths=["float"], batches=(3,))
    mixture = [case for some in cases.values() for case in some if case.op == "moe"]
    assert {(case.weight_type, case.N) for case in mixture} == {
        ("Q8_0", 64),
        ("Q5_1", both.K),
    }
    assert relative_error(logits(model, length=2), logits(plain, length=2)) < 1e-5


@pytest.mark.slow
def test_gate_and_up_of_two_types_stay_apart(tmp_path: Path) -> None:
    types = {"gate_exps": "Q4_1", "_exps": "Q8_0", "": "Q8_0"}
    plain = write_gguf(tmp_path / "m.gguf", TinyMoe(experts=3, layers=1, types=types))
    model, _ = loading.load(tmp_path / "m.gguf", device="cuda")
    experts = experts_of(model)
    assert experts.parts == ("gate_proj", "up_proj", "down_proj")
    assert experts.weight_types == ("Q4_1", "Q8_0")
    assert relative_error(logits(model, length=3), logits(plain, length=3)) < 1e-5


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        pytest.param("gptq-act-order", ("uint4b8",), marks=pytest.mark.slow),
        pytest.param("awq-asym", ("uint4",), marks=pytest.mark.slow),
        ("none", ("float32",)),
    ],
)
def test_folders(kind: str, types: tuple[str, ...], tmp_path: Path) -> None:
    plain = write_folder(tmp_path, kind, TinyMoe(experts=3, layers=1))
    model, _ = loading.load(tmp_path, device="cuda")
    experts = experts_of(model)
    assert experts.weight_types == types
    assert ("gate_up_proj" in experts.parts) == (kind != "none")
    assert relative_error(logits(model, length=3), logits(plain, length=3)) < 1e-5
