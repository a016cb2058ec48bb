"""The causal convolution: numpy's own convolution, states, packing, steps, errors, its spec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tilewright.device import cpu_device
from tilewright.errors import TileError, UnsupportedError
from tilewright.ops.catalog import SPECS
from tilewright.ops.contract import DTYPES
from tilewright.ops.conv1d.op import causal_conv1d, causal_conv1d_step
from tilewright.ops.conv1d.space import CPU_SPACE
from tilewright.tiles.tile import Tile
from tilewright.tune.gate import CHECKS, gate
from tilewright.tune.verify import control_cases, negative_controls, verify_op

SPEC = SPECS["conv1d"]


def by_numpy(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """[b, L, D] of [b, L, D] and [D, W], each channel by `np.convolve`."""
    values, taps = x.double().numpy(), weight.double().numpy()
    y = np.empty_like(values)
    for row in range(values.shape[0]):
        for d in range(values.shape[2]):
            y[row, :, d] = np.convolve(values[row, :, d], taps[d, ::-1])[: values.shape[1]]
    return y


@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("block", [8, 64])
@pytest.mark.parametrize("length", [1, 3, 8, 65])
def test_each_channel_is_numpys_convolution(width: int, block: int, length: int) -> None:
    x, weight = torch.randn(2, length, 5), torch.randn(5, width)
    y, states = causal_conv1d(x, weight, tile=Tile.of("shifted", block=block))
    np.testing.assert_allclose(y.numpy(), by_numpy(x, weight), atol=1e-5)
    padded = torch.cat([torch.zeros(2, width - 1, 5), x], dim=1)
    assert torch.equal(states, padded[:, length:].transpose(1, 2))


def test_bias_and_silu() -> None:
    x, weight, bias = torch.randn(1, 9, 6), torch.randn(6, 4), torch.randn(6)
    y, _ = causal_conv1d(x, weight, bias, activation="silu")
    value = by_numpy(x, weight) + bias.double().numpy()
    np.testing.assert_allclose(y.numpy(), value / (1 + np.exp(-value)), atol=1e-5)


@pytest.mark.parametrize("cut", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_in_two_parts_it_is_the_same(cut: int, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(2, 21, 6).to(dtype), torch.randn(6, 4), torch.randn(6)
    y, states = causal_conv1d(x, weight, bias, activation="silu")
    first, between = causal_conv1d(x[:, :cut], weight, bias, activation="silu")
    second, leaving = causal_conv1d(
        x[:, cut:], weight, bias, activation="silu", initial_states=between
    )
    unit = torch.finfo(dtype).eps  # silu takes another way for the last few of a vector
    torch.testing.assert_close(torch.cat([first, second], dim=1), y, atol=unit, rtol=2 * unit)
    assert torch.equal(leaving, states)


@pytest.mark.parametrize("width", [2, 4])
def test_steps_are_the_convolution(width: int) -> None:
    x, weight, bias = torch.randn(3, 12, 6).half(), torch.randn(6, width), torch.randn(6)
    y, states = causal_conv1d(x, weight, bias, activation="silu")
    state = torch.zeros(3, 6, width - 1, dtype=torch.float16)
    steps = [causal_conv1d_step(state, x[:, t], weight, bias, "silu") for t in range(12)]
    torch.testing.assert_close(torch.stack(steps, dim=1), y, atol=2e-3, rtol=2e-3)
    assert torch.equal(state, states)


def test_packed_sequences_are_those_alone() -> None:
    lengths = [5, 0, 1, 2, 30]
    x, weight = torch.randn(1, sum(lengths), 7), torch.randn(7, 4)
    initial = torch.randn(5, 7, 3)
    at = torch.tensor(np.cumsum([0, *lengths]))
    y, states = causal_conv1d(x, weight, initial_states=initial, cu_seqlens=at)
    for i, (first, last) in enumerate(zip(at[:-1].tolist(), at[1:].tolist(), strict=True)):
        alone, state = causal_conv1d(x[:, first:last], weight, initial_states=initial[i : i + 1])
        assert torch.equal(y[:, first:last], alone)
        assert torch.equal(states[i], state[0])
    assert torch.equal(states[1], initial[1])


def test_without_a_token_states_leave_as_they_entered() -> None:
    initial = torch.randn(2, 6, 3)
    y, states = causal_conv1d(torch.zeros(2, 0, 6), torch.ones(6, 4), initial_states=initial)
    assert y.shape == (2, 0, 6)
    assert torch.equal(states, initial)
    _, states = causal_conv1d(torch.zeros(2, 0, 6), torch.ones(6, 4))
    assert torch.equal(states, torch.zeros(2, 6, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"x": 1}, ValueError, r"x is int; it must be a tensor \[b, L, D\]"),
        ({"x": torch.zeros(9, 6)}, ValueError, r"x is \[9, 6\]; it must be a tensor"),
        ({"x": torch.zeros(1, 9, 6).int()}, UnsupportedError, "x has dtype torch.int32"),
        ({"weight": torch.zeros(6, 1, 4)}, ValueError, r"squeeze a weight \[D, 1, W\]"),
        ({"weight": torch.zeros(5, 4)}, ValueError, r"weight has shape \[5, 4\]; it must be"),
        ({"weight": torch.zeros(6, 9)}, UnsupportedError, "W=9 taps; there must be 2 to 8"),
        ({"weight": torch.zeros(6, 1)}, UnsupportedError, "W=1 taps"),
        ({"bias": torch.zeros(5)}, ValueError, r"bias has shape \[5\]; it must be \[D\] = \[6\]"),
        ({"bias": [1]}, TypeError, "bias is list; it must be a floating-point tensor"),
        ({"activation": "relu"}, ValueError, "activation='relu'; use 'silu' or None"),
        ({"initial_states": torch.zeros(1, 6, 4)}, ValueError, "initial_states has shape"),
        ({"cu_seqlens": torch.tensor([0, 8])}, ValueError, "it must ascend from 0"),
        (
            {"x": torch.zeros(2, 9, 6), "cu_seqlens": torch.tensor([0, 9, 18])},
            ValueError,
            r"x has b=2 rows and cu_seqlens is given.* pass x as \[1, 18, 6\]",
        ),
        ({"weight": torch.zeros(6, 4, device="meta")}, ValueError, "x is on cpu, weight on meta"),
        ({"tile": Tile.of("shifted", block=7)}, TileError, "block=7 is none of"),
    ],
)
def test_bad_calls(call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        causal_conv1d(**{"x": torch.zeros(1, 9, 6), "weight": torch.zeros(6, 4), **call})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"x": torch.zeros(2, 1, 6)}, r"x is \[2, 1, 6\]; it must be a tensor \[b, D\]"),
        ({"state": torch.zeros(2, 6, 4)}, r"state has shape \[2, 6, 4\]; it must be \[b, D, W - 1"),
    ],
)
def test_bad_steps(call: dict[str, Any], message: str) -> None:
    given = {"state": torch.zeros(2, 6, 3), "x": torch.zeros(2, 6), "weight": torch.zeros(6, 4)}
    with pytest.raises(ValueError, match=message):
        causal_conv1d_step(**{**given, **call})


def test_a_step_keeps_no_graph() -> None:
    """A state that took part in one would hold every token before it."""
    state = torch.zeros(2, 6, 3, requires_grad=True)
    x, weight = torch.ones(2, 6, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    y = causal_conv1d_step(state, x, weight, torch.ones(6, requires_grad=True))
    assert not y.requires_grad
    assert torch.equal(y, torch.full((2, 6), 2.0))
    assert torch.equal(state[..., -1], torch.ones(2, 6))


def test_every_case_passes_at_several_blocks() -> None:
    assert verify_op(SPEC, seed=1).passed
    report = verify_op(SPEC, tiles=[Tile.of("shifted", block=b) for b in (8, 64, 4096)])
    assert report.passed, report.failures[0].reason


def test_cases_cover_widths_and_flags() -> None:
    assert {c.weight_type for c in SPEC.cases} == {"w2", "w3", "w4", "w5", "w8"}
    for weight_type in SPEC.weight_types:
        cases = [c for c in SPEC.cases if c.weight_type == weight_type]
        assert {c.act_dtype for c in cases} == set(DTYPES)
        assert {0, 1, 17, 130} <= {c.M for c in cases}
        assert {flag for c in cases for flag in c.flags} == {
            "bias", "silu", "initial", "packed", "strided", "transposed",
        }  # fmt: skip


def test_every_control_is_caught() -> None:
    cases = control_cases(SPEC)
    assert {c.weight_type for c in cases} == set(SPEC.weight_types)
    controls = negative_controls(SPEC, cases=cases)
    assert {c.name for c in controls} == {*SPEC.corruptions, "zeroed outputs"}
    assert all(c.visible and c.caught for c in controls)


@pytest.mark.parametrize("planted", CPU_SPACE.planted, ids=lambda p: p.name)
def test_the_gate_rejects_a_planted_tile_by_the_check_it_names(planted) -> None:  # type: ignore[no-untyped-def]
    spec, (case,) = SPEC.with_run(planted.run), planted.cases
    found = gate(spec, planted.tile, [case])
    assert not found.passed
    assert found.check == planted.caught_by
    without = [c for c in CHECKS if c != planted.caught_by]
    assert gate(spec, planted.tile, [case], _checks=without).passed
    CPU_SPACE.check(planted.honest, case.problem(cpu_device().arch))
    assert gate(SPEC, planted.honest, [case]).passed
