"""The gated RMSNorm behind a selective state space, in torch on any device.

    v = x silu(z);  y = v / sqrt(mean(v^2) + eps) * weight          the gate before the norm, or
    y = x / sqrt(mean(x^2) + eps) * weight * silu(z)                behind it

Means are taken over each of `groups` equal parts of the last dimension.
"""

from __future__ import annotations

import torch

__all__ = ["gated_rms_norm"]


def gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    groups: int = 1,
    norm_before_gate: bool = False,
) -> torch.Tensor:
    """RMSNorm with a gate.

    Args:
        x: [..., D] floating point.
        z: [..., D] floating point, the gate before silu; None for a plain norm.
        weight: [D] floating point.
        eps: added to the mean square.
        groups: parts of D that are normalized by themselves; must divide D.
        norm_before_gate: whether the gate multiplies the norm's result, or its argument.

    Returns:
        [..., D] of x's dtype; all arithmetic is float32, rounded once.

    Raises:
        ValueError: a shape does not fit, or groups does not divide D.

    Method: the `RMSNormGated` of Mamba-2 and the transformers models that follow it.
    """
    wide = x.shape[-1]
    if weight.shape != (wide,):
        raise ValueError(
            f"gated_rms_norm: weight has shape {list(weight.shape)}; it must be [D={wide}], as the "
            "last dimension of x"
        )
    if z is not None and z.shape != x.shape:
        raise ValueError(
            f"gated_rms_norm: z has shape {list(z.shape)}; it must be x's, {list(x.shape)}"
        )
    if groups < 1 or wide % groups:
        raise ValueError(f"gated_rms_norm: groups={groups}; it must divide D={wide}")
    value = x.to(torch.float32)
    gate = None if z is None else torch.nn.functional.silu(z.to(torch.float32))
    if gate is not None and not norm_before_gate:
        value = value * gate
    parts = value.unflatten(-1, (groups, -1))
    parts = parts * torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + eps)
    value = parts.flatten(-2) * weight.to(torch.float32)
    if gate is not None and norm_before_gate:
        value = value * gate
    return value.to(x.dtype)
