"""The float64 recurrence of Mamba-2 on a GPU, token after token: what ssd's results are held to.

It is no chunked form: one program holds 8 rows of a head's state, float64, and walks over the
tokens. 16384 tokens of 128 heads take about a tenth of a second.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["recurrence"]

_ROWS = 8


@triton.jit
def _recurrence_kernel(
    x_ptr, steps_ptr, decays_ptr, b_ptr, c_ptr, y_ptr, state_ptr,
    L, H, P, N, GROUP, stride_xl, stride_xh, stride_bl, stride_bg, stride_cl, stride_cg,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    p = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    state = tl.zeros((ROWS, BLOCK_N), tl.float64)
    x_ptr += h * stride_xh
    b_ptr += h // GROUP * stride_bg
    c_ptr += h // GROUP * stride_cg
    steps_ptr += h
    decays_ptr += h
    y_ptr += h * P
    for _ in range(L):
        x = tl.load(x_ptr + p, mask=p < P, other=0.0).to(tl.float64)
        b = tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float64)
        c = tl.load(c_ptr + n, mask=n < N, other=0.0).to(tl.float64)
        added = (tl.load(steps_ptr) * x)[:, None] * b[None, :]
        state = state * tl.load(decays_ptr) + added
        tl.store(y_ptr + p, tl.sum(state * c[None, :], 1), mask=p < P)
        x_ptr += stride_xl
        b_ptr += stride_bl
        c_ptr += stride_cl
        steps_ptr += H
        decays_ptr += H
        y_ptr += H * P
    to = state_ptr + (h * P + p[:, None]) * N + n[None, :]
    tl.store(to, state, mask=(p < P)[:, None] & (n < N)[None, :])


def recurrence(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """y [L, H, P] and the leaving state [H, P, N] of a `tilewright.ops.ssd.args.ScanArgs` with one
    sequence, softplus and no initial state, in float64."""
    x, b, c = args.x[0], args.B[0], args.C[0]
    length, heads, p = x.shape
    groups, n = b.shape[1:]
    raw = args.dt[0].double()
    if args.dt_bias is not None:
        raw = raw + args.dt_bias.double()
    steps = torch.nn.functional.softplus(raw).clamp(*args.dt_limit).contiguous()
    decays = torch.exp(steps * args.A.double()).contiguous()
    y = torch.empty(length, heads, p, dtype=torch.float64, device=x.device)
    state = torch.empty(heads, p, n, dtype=torch.float64, device=x.device)
    _recurrence_kernel[(heads, triton.cdiv(p, _ROWS))](
        x, steps, decays, b, c, y, state, length, heads, p, n, heads // groups,
        x.stride(0), x.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        ROWS=_ROWS, BLOCK_N=triton.next_power_of_2(n), num_warps=4,
    )  # fmt: skip
    if args.D is not None:
        y += args.D.double()[:, None] * x.double()
    return y, state
