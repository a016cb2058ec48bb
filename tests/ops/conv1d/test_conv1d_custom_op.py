"""The convolution under torch.compile: one operation, the same numbers, shapes known beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright.ops.conv1d.custom_op import conv_compiled, conv_step_compiled
from tilewright.ops.conv1d.op import causal_conv1d, causal_conv1d_step
from tilewright.tiles.tile import Tile

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "silu": {"activation": "silu", "bias": torch.randn(6)},
    "states": {"initial_states": torch.randn(1, 6, 3)},
    "packed": {"cu_seqlens": torch.tensor([0, 4, 4, 19], dtype=torch.int32)},
    "tile": {"tile": Tile.of("shifted", block=16)},
}


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("more", CALLS.values(), ids=CALLS)
def test_a_compiled_model_sees_one_operation(more: dict[str, Any]) -> None:
    x, weight = torch.randn(1, 19, 12)[..., ::2], torch.randn(6, 4)
    y, states = compiled(lambda x, weight: causal_conv1d(x, weight, **more))(x, weight)
    want, kept = causal_conv1d(x, weight, **more)
    assert torch.equal(y, want)
    assert torch.equal(states, kept)


def test_a_compiled_step_changes_the_state_in_place() -> None:
    state, x, weight, bias = (torch.randn(*s) for s in ((3, 6, 3), (3, 6), (6, 4), (6,)))
    want = state.clone()
    y = compiled(lambda *given: causal_conv1d_step(*given, "silu"))(state, x, weight, bias)
    assert torch.equal(y, causal_conv1d_step(want, x, weight, bias, "silu"))
    assert torch.equal(state, want)


def test_shapes_are_known_without_running() -> None:
    x = torch.empty(1, 19, 6, dtype=torch.float16, device="meta")
    weight = torch.empty(6, 4, device="meta")
    places = torch.empty(4, dtype=torch.int32, device="meta")
    y, states = conv_compiled(x, weight, None, "silu", None, places, None)
    assert (y.shape, y.dtype) == ((1, 19, 6), torch.float16)
    assert (states.shape, states.dtype) == ((3, 6, 3), torch.float16)
    token = conv_step_compiled(x.new_empty(5, 6, 3), x.new_empty(5, 6), weight, None, None)
    assert (token.shape, token.dtype) == ((5, 6), torch.float16)


def test_the_registered_operations_keep_their_promises() -> None:
    x, weight, state = torch.randn(2, 9, 6), torch.randn(6, 4), torch.randn(2, 6, 3)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.tilewright.causal_conv1d.default,
        (x, weight, None, "silu", state, None, ""), test_utils=checks,
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.tilewright.causal_conv1d_step.default,
        (state, x[:, 0], weight, None, "silu"), test_utils=checks,
    )  # fmt: skip


def test_a_bad_call_is_told_of_when_it_runs() -> None:
    convolve = compiled(lambda x, weight: causal_conv1d(x, weight, activation="relu"))
    with pytest.raises(ValueError, match="activation='relu'; use 'silu' or None"):
        convolve(torch.randn(1, 5, 6), torch.randn(6, 4))
