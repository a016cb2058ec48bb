"""Weights and activations of the GPU benchmarks, and the float64 results they must give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tilewright.formats.w4 import SYMMETRIC_ZERO, W4Codes

__all__ = ["DTYPES", "Weight", "activations", "draw_weight", "relative_error"]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_ROWS_AT_A_TIME = 8192


@dataclass(frozen=True, eq=False)
class Weight:
    """One matrix of 4-bit codes, as checkpoint arrays on the CPU and as tensors on the GPU.

    Attributes:
        host: the codes as the packers take them.
        codes: uint8 [N, K], 0..15.
        scales: float32 [N, groups]; each is exact in bfloat16 and in float16, so that every
            dtype multiplies by the same weights.
        zeros: uint8 [N, groups] or None for the constant 8.
    """

    host: W4Codes
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @property
    def N(self) -> int:
        return self.host.N

    @property
    def K(self) -> int:
        return self.host.K

    @property
    def group(self) -> int:
        return self.host.group_size

    @property
    def bytes(self) -> int:
        """What a launch must read at least: codes, 16-bit scales, packed zero points."""
        groups = self.scales.numel()
        return self.N * self.K // 2 + 2 * groups + (0 if self.zeros is None else groups // 2)

    def exact(self, at: int, end: int) -> torch.Tensor:
        """Rows at:end of the dequantized weight: float64 [end - at, K], no rounding in it."""
        q = self.codes[at:end].view(end - at, -1, self.group).double()
        z = SYMMETRIC_ZERO if self.zeros is None else self.zeros[at:end, :, None].double()
        return ((q - z) * self.scales[at:end, :, None].double()).view(end - at, self.K)

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized weight [N, K] in `dtype`, rounded once: what a dense product reads."""
        out = torch.empty(self.N, self.K, dtype=dtype, device=self.codes.device)
        for at in range(0, self.N, _ROWS_AT_A_TIME):
            end = min(self.N, at + _ROWS_AT_A_TIME)
            out[at:end] = self.exact(at, end).to(dtype)
        return out

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x @ W.T + bias in float64 [M, N], from the codes."""
        wide = x.double()
        y = torch.empty(x.shape[0], self.N, dtype=torch.float64, device=x.device)
        for at in range(0, self.N, _ROWS_AT_A_TIME):
            end = min(self.N, at + _ROWS_AT_A_TIME)
            y[:, at:end] = wide @ self.exact(at, end).T
        return y if bias is None else y + bias.double()


def draw_weight(
    n: int,
    k: int,
    group: int,
    *,
    symmetric: bool = False,
    seed: int = 0,
    largest: float = 0.025,
    device: str = "cuda",
) -> Weight:
    """Uniform codes and zero points, scales in a fifth of `largest` to it, all from `seed`.

    Args:
        n, k: rows and columns.
        group: columns a scale; -1 for one scale a row.
        symmetric: the zero point is 8 and not stored.
    """
    group = k if group == -1 else group
    rng = np.random.default_rng((seed, n, k, group))
    groups = k // group
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    drawn = torch.from_numpy(rng.uniform(largest / 5, largest, (n, groups)).astype(np.float32))
    scales = drawn.to(torch.bfloat16).float()
    zeros = None if symmetric else rng.integers(0, 16, (n, groups), dtype=np.uint8)
    host = W4Codes(codes, scales.numpy(), zeros, group, None, torch.bfloat16)
    return Weight(
        host,
        torch.from_numpy(codes).to(device),
        scales.to(device),
        None if zeros is None else torch.from_numpy(zeros).to(device),
    )


def activations(m: int, k: int, dtype: torch.dtype, *, seed: int = 0, device: str = "cuda"
                ) -> torch.Tensor:  # fmt: skip
    """x [m, k], normal."""
    generator = torch.Generator(device).manual_seed(seed * 8209 + m)
    return torch.randn(m, k, generator=generator, device=device, dtype=torch.float32).to(dtype)


def relative_error(y: torch.Tensor, right: torch.Tensor) -> float:
    """Frobenius norm of y - right over that of right; inf where y holds NaN or infinities."""
    if y.numel() == 0:
        return 0.0
    error = float(torch.linalg.vector_norm(y.double() - right) / torch.linalg.vector_norm(right))
    return error if np.isfinite(error) else float("inf")
