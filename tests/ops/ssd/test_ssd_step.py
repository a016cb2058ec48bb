"""ssd_step: token by token it is the scan; slots, padding, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright.errors import UnsupportedError
from tilewright.ops.ssd.op import ssd_step
from tilewright.ops.ssd.reference import ssd_reference


def drawn(b: int = 3, length: int = 20, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    make = torch.Generator().manual_seed(b)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make)

    return {
        "x": normal(b, length, 6, 8).to(dtype), "dt": normal(b, length, 6).to(dtype) - 2,
        "A": -torch.rand(6, generator=make), "B": normal(b, length, 3, 16).to(dtype),
        "C": normal(b, length, 3, 16).to(dtype), "D": normal(6), "dt_bias": normal(6),
        "z": normal(b, length, 6, 8).to(dtype),
    }  # fmt: skip


_OVER_TIME = ("x", "dt", "B", "C", "z")


def token(given: dict[str, Any], t: int) -> dict[str, Any]:
    return {k: v[:, t] if k in _OVER_TIME else v for k, v in given.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True], ids=["D-of-head", "D-of-channel"])
def test_steps_are_the_recurrence(dtype: torch.dtype, wide: bool) -> None:
    given = drawn(dtype=dtype)
    if wide:
        given["D"] = torch.randn(6, 8)
    state = torch.randn(3, 6, 8, 16)
    right, leaving = ssd_reference(
        **given, dt_softplus=True, dt_limit=(0.01, 0.3), initial_states=state.clone()
    )
    kept = state
    steps = [
        ssd_step(state, **token(given, t), dt_softplus=True, dt_limit=(0.01, 0.3))
        for t in range(20)
    ]
    unit = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    y = torch.stack(steps, dim=1)
    assert y.dtype == dtype
    assert kept is state
    torch.testing.assert_close(y.double(), right, atol=10 * unit, rtol=unit)
    torch.testing.assert_close(state.double(), leaving, atol=1e-5, rtol=1e-5)


def test_slots_are_used_where_indices_say_and_others_stay() -> None:
    given = token(drawn(b=4), 0)
    slots = torch.tensor([5, -1, 0, 3])
    state = torch.randn(7, 6, 8, 16)
    before = state.clone()
    y = ssd_step(state, **given, dt_softplus=True, state_indices=slots)
    rows = [0, 2, 3]
    alone = before[slots[rows]].clone()
    one = {k: v[rows] if k in _OVER_TIME else v for k, v in given.items()}
    want = ssd_step(alone, **one, dt_softplus=True)
    torch.testing.assert_close(y[rows], want)
    torch.testing.assert_close(state[slots[rows]], alone)
    assert torch.equal(y[1], torch.zeros(6, 8))
    untouched = [1, 2, 4, 6]
    assert torch.equal(state[untouched], before[untouched])


def test_padding_does_not_write_back_the_slot_it_stands_on() -> None:
    """Row 0 moves slot 0; row 1 is padding and must not put back what slot 0 held before."""
    given = token(drawn(b=2), 0)
    state = torch.randn(1, 6, 8, 16)
    alone = state.clone()
    ssd_step(state, **given, state_indices=torch.tensor([0, -1]))
    one = {k: v[:1] if k in _OVER_TIME else v for k, v in given.items()}
    ssd_step(alone, **one)
    assert torch.equal(state, alone)


def test_padding_is_zero_whatever_it_holds() -> None:
    given = token(drawn(b=2), 0)
    given["x"][1], given["z"][1], given["dt"][1] = float("nan"), float("inf"), float("nan")
    y = ssd_step(torch.randn(1, 6, 8, 16), **given, state_indices=torch.tensor([0, -1]))
    assert torch.equal(y[1], torch.zeros(6, 8))
    assert torch.isfinite(y[0]).all()


def test_states_may_be_slots_of_a_larger_buffer() -> None:
    given = token(drawn(), 0)
    buffer = torch.full((3, 9, 8, 16), float("nan"))
    state = buffer[:, 1:7]
    state.copy_(torch.randn(3, 6, 8, 16))
    want = state.clone()
    y = ssd_step(state, **given)
    assert torch.equal(y, ssd_step(want, **given))
    assert torch.equal(state, want)
    assert torch.isnan(buffer[:, 0]).all()
    assert torch.isnan(buffer[:, 7:]).all()


def test_no_row() -> None:
    assert ssd_step(torch.zeros(0, 6, 8, 16), **token(drawn(b=0), 0)).shape == (0, 6, 8)


def test_compiled_it_changes_the_state_in_place() -> None:
    given = token(drawn(), 0)
    state = torch.randn(3, 6, 8, 16)
    want = state.clone()

    def step(state: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return ssd_step(state, **more, dt_softplus=True)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(state, **given), step(want, **given))
    assert torch.equal(state, want)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"x": torch.zeros(3, 1, 6, 8)}, ValueError, r"x has shape \[3, 1, 6, 8\]; it must be"),
        ({"state": torch.zeros(3, 6, 8, 16).half()}, UnsupportedError, "state has dtype"),
        ({"state": torch.zeros(2, 6, 8, 16)}, ValueError, r"state has shape \[2, 6, 8, 16\]"),
        ({"state": torch.zeros(3, 6, 16, 8).mT}, ValueError, "must be contiguous"),
        ({"state_indices": torch.zeros(3)}, TypeError, "state_indices has dtype torch.float32"),
        ({"state_indices": torch.zeros(2).int()}, ValueError, r"it must be \[b=3\] on cpu"),
        ({"state_indices": torch.tensor([0, 1, 3])}, ValueError, "reach from 0 to 3; slots are"),
        ({"state_indices": torch.tensor([0, 1, -2])}, ValueError, "reach from -2 to 1"),
        ({"state_indices": torch.tensor([0, 1, 1])}, ValueError, "name a slot twice"),
        ({"dt": torch.zeros(3, 5)}, ValueError, r"dt has shape \[3, 5\]; it must be \[b, H\]"),
        ({"C": torch.zeros(3, 3, 24)}, ValueError, r"C has shape \[3, 3, 24\]"),
    ],
)
def test_bad_calls(call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ssd_step(**{"state": torch.zeros(3, 6, 8, 16), **token(drawn(), 0), **call})
