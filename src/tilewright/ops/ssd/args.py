"""Operands of the SSD kernels: what a launcher gets, checked and allocated by the op before it.

Shapes: b sequences of one length L (or, packed, b = 1 and L tokens in all of S sequences), H heads
of dimension P, G groups that share B and C (head h uses group ``h // (H / G)``), N the state's
dimension.

::

    x, z, y                [b, L, H, P]  dtype of x; any strides, columns may lie apart
    dt                     [b, L, H]     raw: before bias, softplus and limits
    A                      [H]           float32, negative, contiguous
    B, C                   [b, L, G, N]  any strides: views of one projection
    D                      [H] or [H, P] floating point, or None
    dt_bias                [H]           floating point, or None
    states (in and out)    [S, H, P, N]  float32, contiguous; S = b when not packed
    cu_seqlens             [S + 1]       int32, contiguous, ascending from 0 to L; or None
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ScanArgs", "StepArgs"]


@dataclass(frozen=True, eq=False)
class ScanArgs:
    """A scan over whole sequences: see the module for shapes, `ops.ssd.op.ssd_scan` for meaning.

    A launcher writes all of `y` and all of `final_states` (a sequence of length 0 leaves its
    initial state, or zeros) and nothing else. A token of a packed batch belongs to the sequence s
    with ``cu_seqlens[s] <= t < cu_seqlens[s + 1]``.

    Attributes:
        x, dt, A, B, C: the operands.
        D: skip, y += D x; float or None.
        z: gate, y *= silu(z), after the skip; or None.
        dt_bias: added to dt before softplus; or None.
        dt_softplus: dt = softplus(dt + bias), the identity above 20.
        dt_limit: dt is clamped to this range, last of all.
        initial_states: entering states; None for zeros.
        cu_seqlens: where packed sequences begin; None when not packed.
        y: [b, L, H, P] contiguous, of x's dtype.
        final_states: leaving states, never None.
    """

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    dt_softplus: bool
    dt_limit: tuple[float, float]
    initial_states: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    y: torch.Tensor
    final_states: torch.Tensor

    @property
    def batch(self) -> int:
        """b: 1 when packed."""
        return int(self.x.shape[0])

    @property
    def length(self) -> int:
        """L: of each sequence, or of all of them together when packed."""
        return int(self.x.shape[1])

    @property
    def heads(self) -> int:
        return int(self.x.shape[2])

    @property
    def head_dim(self) -> int:
        return int(self.x.shape[3])

    @property
    def groups(self) -> int:
        return int(self.B.shape[2])

    @property
    def d_state(self) -> int:
        return int(self.B.shape[3])

    @property
    def sequences(self) -> int:
        """S: sequences, and states."""
        return int(self.final_states.shape[0])


@dataclass(frozen=True, eq=False)
class StepArgs:
    """One token of each sequence: `ops.ssd.op.ssd_step`. A launcher updates `state` and writes
    `y`.

    Attributes:
        state: [slots, H, P, N] float32, read and written; any strides between slots and heads,
            the last two contiguous.
        x, z, y: [b, H, P]; dt: [b, H]; B, C: [b, G, N]; any strides but y's, contiguous.
        A, D, dt_bias, dt_softplus, dt_limit: as in `ScanArgs`.
        state_indices: int32 or int64 [b], the slot of each sequence, all different; -1 for a row
            without one (padding: nothing of the state is touched, y is zero); None for slot i of
            row i, where slots = b.
    """

    state: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    dt_softplus: bool
    dt_limit: tuple[float, float]
    state_indices: torch.Tensor | None
    y: torch.Tensor

    @property
    def batch(self) -> int:
        return int(self.x.shape[0])

    @property
    def heads(self) -> int:
        return int(self.x.shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.x.shape[2])

    @property
    def groups(self) -> int:
        return int(self.B.shape[1])

    @property
    def d_state(self) -> int:
        return int(self.B.shape[2])
