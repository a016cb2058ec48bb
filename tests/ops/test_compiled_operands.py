"""Operands that require a gradient, as a module's parameters do: compiled as eager, without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.ops.contract import Case
from tilewright.ops.conv1d.op import causal_conv1d, causal_conv1d_step
from tilewright.ops.mmq.op import mmq_gemm
from tilewright.ops.mmq.spec import SPEC as MMQ
from tilewright.ops.ssd.op import ssd_scan, ssd_step
from tilewright.ops.w4a16.op import w4a16_gemm
from tilewright.ops.w4a16.spec import SPEC as W4A16

Call = Callable[..., torch.Tensor]


def product(spec: Any, op: Any, case: Case) -> tuple[Call, list[torch.Tensor]]:
    inputs = spec.make_inputs(case, 0)
    return lambda x, bias: op(x, inputs.weight, bias), [inputs.x, torch.randn(case.N)]


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(*shape) for shape in shapes]


CALLS: dict[str, Callable[[], tuple[Call, list[torch.Tensor]]]] = {
    "mmq": lambda: product(MMQ, mmq_gemm, Case("mmq", "Q4_0", "float32", 3, 32, 64)),
    "w4a16": lambda: product(
        W4A16, w4a16_gemm, Case("w4a16", "uint4", "float32", 3, 32, 64, 32)
    ),
    "conv": lambda: (
        lambda x, w, b, entering: causal_conv1d(x, w, b, initial_states=entering)[0],
        drawn((2, 9, 6), (6, 4), (6,), (2, 6, 3)),
    ),
    "conv step": lambda: (
        lambda x, w, b: causal_conv1d_step(torch.ones(2, 6, 3), x, w, b),
        drawn((2, 6), (6, 4), (6,)),
    ),
    "scan": lambda: (
        lambda x, dt, A, B, C, D, z, bias, entering: ssd_scan(
            x, dt, -A.abs(), B, C, D=D, z=z, dt_bias=bias, dt_softplus=True,
            initial_states=entering,
        )[0],
        drawn((1, 9, 2, 8), (1, 9, 2), (2,), (1, 9, 1, 16), (1, 9, 1, 16), (2,), (1, 9, 2, 8),
              (2,), (1, 2, 8, 16)),
    ),
    "step": lambda: (
        lambda x, dt, A, B, C, D, z, bias: ssd_step(
            torch.ones(3, 2, 8, 16), x, dt, -A.abs(), B, C, D=D, z=z, dt_bias=bias,
            dt_softplus=True,
        ),
        drawn((3, 2, 8), (3, 2), (2,), (3, 1, 16), (3, 1, 16), (2,), (3, 2, 8), (2,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("made", CALLS.values(), ids=CALLS)
def test_operands_that_require_a_gradient_are_compiled(
    made: Callable[[], tuple[Call, list[torch.Tensor]]],
) -> None:
    call, given = made()
    given = [torch.nn.Parameter(t.clone()) for t in given]
    y = torch.compile(call, fullgraph=True, backend="aot_eager")(*given)
    want = call(*given)
    assert torch.equal(y, want)
    assert not y.requires_grad
    assert not want.requires_grad


STEPS: dict[str, tuple[Call, list[torch.Tensor]]] = {
    "conv": (causal_conv1d_step, drawn((2, 6, 3), (2, 6), (6, 4))),
    "scan": (
        ssd_step, drawn((3, 2, 8, 16), (3, 2, 8), (3, 2), (2,), (3, 1, 16), (3, 1, 16)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("step", "given"), STEPS.values(), ids=STEPS)
def test_a_step_is_given_the_state_itself(step: Call, given: list[torch.Tensor]) -> None:
    """Inductor hands on uninitialized memory in place of an alias that is changed."""
    states: list[str] = []

    def seen(graph: torch.fx.GraphModule, _: Any) -> Any:
        states.extend(
            node.args[0].op for node in graph.graph.nodes if "tilewright" in str(node.target)
        )
        return graph.forward

    torch.compile(step, fullgraph=True, backend=seen)(*given)
    assert states == ["placeholder"]
