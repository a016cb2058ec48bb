"""One token of each sequence in torch, on any device: three passes over the state.

state [slots, H, P, N] float32:  state = exp(A dt) state + (dt x) B^T;  y = state C
"""

from __future__ import annotations

import torch

from tilewright.ops.ssd.args import StepArgs

__all__ = ["discretized", "finished", "launch_step_torch"]


def discretized(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """dt as the recurrence uses it, float32 [..., H], from the raw one."""
    steps = dt.to(torch.float32)
    if dt_bias is not None:
        steps = steps + dt_bias.to(torch.float32)
    if dt_softplus:
        steps = torch.nn.functional.softplus(steps)  # the identity above 20
    return steps.clamp(*dt_limit)


def finished(
    y: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None
) -> torch.Tensor:
    """(y + D x) silu(z) in float32; y [..., H, P] float32 may be changed."""
    if D is not None:
        wide = D.to(torch.float32)
        y = torch.addcmul(y, wide if wide.dim() == 2 else wide[:, None], x.to(torch.float32))
    if z is not None:
        y = y * torch.nn.functional.silu(z.to(torch.float32))
    return y


def launch_step_torch(args: StepArgs) -> None:
    """Update `args.state` and write `args.y`; see `tilewright.ops.ssd.args`."""
    slots, state = args.state_indices, args.state
    if slots is None:
        args.y.copy_(_advanced(args, state))
        return
    used = slots >= 0
    at = slots.clamp(min=0).to(torch.int64)
    gathered = state.index_select(0, at)
    y = _advanced(args, gathered)
    # A row of padding writes back nothing: only rows with a slot of their own are scattered.
    state.index_copy_(0, at[used], gathered[used])
    args.y.copy_(y.masked_fill_(~used[:, None, None], 0.0))  # whatever padding holds


def _advanced(args: StepArgs, state: torch.Tensor) -> torch.Tensor:
    """Advance `state` [b, H, P, N] in place; y [b, H, P] float32."""
    groups = args.groups
    steps = discretized(args.dt, args.dt_bias, args.dt_softplus, args.dt_limit)
    x = args.x.to(torch.float32)
    grouped = state.unflatten(1, (groups, -1))  # [b, G, H/G, P, N]
    B, C = (m.to(torch.float32)[:, :, None, None, :] for m in (args.B, args.C))
    grouped.mul_(torch.exp(steps * args.A).unflatten(1, (groups, -1))[..., None, None])
    grouped.addcmul_((x * steps[..., None]).unflatten(1, (groups, -1))[..., None], B)
    y = torch.matmul(grouped, C.transpose(-1, -2))[..., 0].flatten(1, 2)
    return finished(y, x, args.D, args.z)
