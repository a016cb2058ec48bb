"""The module that stands in for a hybrid's RMSNorm on a GPU: one kernel instead of seven.

transformers writes a norm as seven elementwise operations, each of which reads and writes all rows.
`RowNorm` takes over its weight and runs a kernel of `tilewright.ops.decoder`, as the decoder of
other families does. It rounds where transformers' modules do: the normed row, then its product with
the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilewright.device import has_triton, launching_on

__all__ = ["RowNorm", "fuse_norms"]

_NORMS = frozenset(
    {
        "BambaRMSNorm",
        "FalconH1RMSNorm",
        "GraniteMoeHybridRMSNorm",
        "Mamba2RMSNorm",
        "NemotronHRMSNorm",
    }
)


class RowNorm(nn.Module):
    """y = weight * x / rms(x) over the last dimension, for inference.

    Args:
        norm: transformers' module; its weight is taken over, not copied.

    Forward takes x [..., H] on a GPU, of the weight's dtype or in float32 (as residuals may be),
    and gives [..., H] of x's dtype.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = float(norm.variance_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        from tilewright.ops.decoder.triton_kernels import add_norm

        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        with launching_on(rows.device):
            y = add_norm(rows, None, self.weight, self.variance_epsilon)
        return y.view(hidden_states.shape)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def fuse_norms(model: nn.Module) -> int:
    """Replace the norms of a hybrid model that runs on a GPU; returns how many there were.

    The model keeps its parameters and their names. Without Triton it stays as it is.
    """
    if not has_triton():
        return 0
    found = [path for path, m in model.named_modules() if type(m).__name__ in _NORMS]
    for path in found:
        model.set_submodule(path, RowNorm(model.get_submodule(path)))
    return len(found)
