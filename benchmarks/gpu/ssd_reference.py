"""The recurrence of Mamba-2 on a GPU, token after token: in float64 what ssd's results are held to,
and in float32 the scan without a chunked form, which the second field study began with.

One program holds some rows of a head's state and walks over the tokens. In float64, 16384 tokens of
128 heads take about a tenth of a second.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["recurrence", "sequential"]

_ROWS = 8
_ROWS_OF_A_WARP = 4


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


@triton.jit
def _sequential_kernel(
    x_ptr, dt_ptr, a_ptr, bias_ptr, d_ptr, b_ptr, c_ptr, y_ptr, state_ptr,
    L, H, P, N, GROUP,
    stride_xl, stride_xh, stride_dl, stride_bl, stride_bg, stride_cl, stride_cg,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head's state, float32; each token is loaded while the one before it is
    worked on."""
    h = tl.program_id(0)
    p = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    state = tl.zeros((ROWS, BLOCK_N), tl.float32)
    a = tl.load(a_ptr + h) * 1.4426950408889634
    bias = tl.load(bias_ptr + h).to(tl.float32)
    d = tl.load(d_ptr + h).to(tl.float32)
    x_ptr += h * stride_xh
    b_ptr += h // GROUP * stride_bg
    c_ptr += h // GROUP * stride_cg
    dt_ptr += h
    y_ptr += h * P
    x = tl.load(x_ptr + p, mask=p < P, other=0.0)
    b = tl.load(b_ptr + n, mask=n < N, other=0.0)
    c = tl.load(c_ptr + n, mask=n < N, other=0.0)
    raw = tl.load(dt_ptr)
    for t in range(L):
        x_ptr += stride_xl
        b_ptr += stride_bl
        c_ptr += stride_cl
        dt_ptr += stride_dl
        more = t + 1 < L
        next_x = tl.load(x_ptr + p, mask=(p < P) & more, other=0.0)
        next_b = tl.load(b_ptr + n, mask=(n < N) & more, other=0.0)
        next_c = tl.load(c_ptr + n, mask=(n < N) & more, other=0.0)
        next_raw = tl.load(dt_ptr, mask=more, other=0.0)
        v = raw.to(tl.float32) + bias
        step = tl.where(v > 20.0, v, tl.log(1.0 + tl.exp(v)))
        wide = x.to(tl.float32)
        added = (step * wide)[:, None] * b.to(tl.float32)[None, :]
        state = state * tl.exp2(a * step) + added
        y = tl.sum(state * c.to(tl.float32)[None, :], 1) + d * wide
        tl.store(y_ptr + p, y.to(y_ptr.dtype.element_ty), mask=p < P)
        y_ptr += H * P
        x, b, c, raw = next_x, next_b, next_c, next_raw
    to = state_ptr + (h * P + p[:, None]) * N + n[None, :]
    tl.store(to, state, mask=(p < P)[:, None] & (n < N)[None, :])


def sequential(args: Any) -> torch.Tensor:
    """y [L, H, P] of x's dtype, of a `tilewright.ops.ssd.args.ScanArgs` with one sequence,
    softplus, a bias, a D of each head, and no initial state; its leaving state is written."""
    x, b, c, dt = args.x[0], args.B[0], args.C[0], args.dt[0]
    length, heads, p = x.shape
    groups, n = b.shape[1:]
    y = torch.empty(length, heads, p, dtype=x.dtype, device=x.device)
    _sequential_kernel[(heads, triton.cdiv(p, _ROWS_OF_A_WARP))](
        x, dt, args.A, args.dt_bias, args.D, b, c, y, args.final_states,
        length, heads, p, n, heads // groups,
        x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        ROWS=_ROWS_OF_A_WARP, BLOCK_N=triton.next_power_of_2(n), num_warps=1,
    )  # fmt: skip
    return y
