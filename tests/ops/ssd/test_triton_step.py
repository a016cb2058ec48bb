"""The token step's Triton kernel in the interpreter, held to float64."""

from __future__ import annotations

import math

import pytest
import torch

import triton_interpreter  # noqa: F401
from tilewright.ops.ssd.args import StepArgs
from tilewright.ops.ssd.gpu import gpu_step
from tilewright.ops.ssd.triton_step import step_tile


def step_args(
    p: int, n: int, dtype: torch.dtype, *, wide: bool, gate: bool, slots: list[int] | None
) -> StepArgs:
    """Three sequences, four heads in two groups; x, B and C are views of one projection."""
    heads, groups = 4, 2
    draw = torch.Generator().manual_seed(p + n)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    parts = (heads * p, groups * n, groups * n, heads)
    whole = torch.full((3, sum(parts) + 5), float("nan")).to(dtype)
    whole[:, : sum(parts)] = normal(3, sum(parts)).to(dtype)
    x, b, c, dt, _ = whole.split([*parts, 5], 1)
    return StepArgs(
        state=normal(5 if slots else 3, heads, p, n),
        x=x.unflatten(1, (heads, p)), dt=dt, A=-torch.logspace(-1, 2, heads),
        B=b.unflatten(1, (groups, n)), C=c.unflatten(1, (groups, n)),
        D=normal(heads, p) if wide else normal(heads),
        z=normal(3, heads, p).to(dtype) if gate else None,
        dt_bias=normal(heads) - 3, dt_softplus=True, dt_limit=(0.0, math.inf),
        state_indices=None if slots is None else torch.tensor(slots),
        y=torch.full((3, heads, p), float("nan"), dtype=dtype),
    )  # fmt: skip


def expected(args: StepArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """y and states in float64, one sequence and head after the other."""
    state, y = args.state.double().clone(), torch.zeros(args.y.shape, dtype=torch.float64)
    assert args.dt_bias is not None
    assert args.D is not None
    for i in range(args.batch):
        slot = i if args.state_indices is None else int(args.state_indices[i])
        if slot < 0:
            continue
        for h in range(args.heads):
            g = h // (args.heads // args.groups)
            dt = math.log1p(math.exp(float(args.dt[i, h]) + float(args.dt_bias[h])))
            x = args.x[i, h].double()
            added = torch.outer(dt * x, args.B[i, g].double())
            state[slot, h] = state[slot, h] * math.exp(dt * float(args.A[h])) + added
            y[i, h] = state[slot, h] @ args.C[i, g].double() + args.D[h].double() * x
            if args.z is not None:
                y[i, h] *= torch.nn.functional.silu(args.z[i, h].double())
    return y, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("p", "n", "wide", "gate", "slots"),
    [
        (24, 40, False, False, None),
        (64, 16, True, True, [4, 0, 2]),
        (8, 96, False, True, [1, -1, 3]),
    ],
)
def test_a_step_is_the_recurrence(dtype, p, n, wide, gate, slots):
    args = step_args(p, n, dtype, wide=wide, gate=gate, slots=slots)
    y, state = expected(args)
    gpu_step(args)
    rounding = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(args.y.double(), y, rtol=rounding, atol=rounding * 0.1)
    torch.testing.assert_close(args.state.double(), state, rtol=1e-5, atol=2e-6)


def test_a_row_of_padding_touches_no_state():
    args = step_args(16, 16, torch.float32, wide=False, gate=False, slots=[-1, -1, -1])
    before = args.state.clone()
    gpu_step(args)
    assert torch.equal(args.state, before)
    assert torch.equal(args.y, torch.zeros_like(args.y))


def test_programs_hold_about_as_many_numbers_whatever_the_state():
    for p, n in ((64, 128), (80, 128), (8, 16), (64, 256), (128, 96)):
        tile = step_tile(p, n)
        assert tile.block_p * n <= 4096
        assert tile.block_p & (tile.block_p - 1) == 0
