"""One token of each sequence in Triton: the state is read and written once.

::

    S[p, n] = 2^(A dt log2 e) S[p, n] + dt x[p] B[n]         float32, in place
    y[p]    = (sum_n S[p, n] C[n] + D x[p]) silu(z[p])

A program has BLOCK_P rows of one head's state of one sequence. A row whose slot is -1 touches no
state, and its y is zero.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.errors import UnsupportedError
from tilewright.ops.ssd.args import StepArgs
from tilewright.ops.ssd.triton_output import silu
from tilewright.ops.ssd.triton_parts import store_narrow, to_float32
from tilewright.ops.ssd.triton_prepare import INTERPRETED, LOG2E, step_of
from tilewright.tiles.tile import Tile

__all__ = ["STEP_ALGORITHM", "launch_step", "step_tile"]

STEP_ALGORITHM = "step"
_NUMBERS = 4096  # of a state, a program


@triton.jit
def _step_kernel(
    state_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, slots_ptr, y_ptr,
    H, P, N, GROUP, low, high, stride_ss, stride_sh,
    stride_xb, stride_xh, stride_xp, stride_db, stride_dh, stride_bb, stride_bg, stride_bn,
    stride_cb, stride_cg, stride_cn, stride_zb, stride_zh, stride_zp, stride_kh, stride_kp,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_SLOTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """BLOCK_P rows of the state of one head of one sequence; stride_k are those of D."""
    h = tl.program_id(0) % H
    row = (tl.program_id(0) // H).to(tl.int64)
    offs_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    mask_p = offs_p < P
    mask_n = offs_n < N
    to = y_ptr + (row * H + h) * P + offs_p
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if slot < 0:
            store_narrow(to, tl.zeros((BLOCK_P,), tl.float32), mask_p, INTERPRET)
            return
    group = h // GROUP
    offs_s = offs_p[:, None] * N + offs_n[None, :]
    mask_s = mask_p[:, None] & mask_n[None, :]
    state_ptrs = state_ptr + slot * stride_ss + h.to(tl.int64) * stride_sh + offs_s
    state = tl.load(state_ptrs, mask=mask_s, other=0.0)  # [BLOCK_P, BLOCK_N]
    dt = to_float32(tl.load(dt_ptr + row * stride_db + h * stride_dh), INTERPRET)
    if HAS_BIAS:
        dt += to_float32(tl.load(bias_ptr + h), INTERPRET)
    dt = step_of(dt, low, high, SOFTPLUS)
    decayed = tl.exp2(tl.load(a_ptr + h) * LOG2E * dt)
    x_ptrs = x_ptr + row * stride_xb + h * stride_xh + offs_p * stride_xp
    x = to_float32(tl.load(x_ptrs, mask=mask_p, other=0.0), INTERPRET)
    b_ptrs = b_ptr + row * stride_bb + group * stride_bg + offs_n * stride_bn
    b = to_float32(tl.load(b_ptrs, mask=mask_n, other=0.0), INTERPRET)
    c_ptrs = c_ptr + row * stride_cb + group * stride_cg + offs_n * stride_cn
    c = to_float32(tl.load(c_ptrs, mask=mask_n, other=0.0), INTERPRET)
    state = state * decayed + (x * dt)[:, None] * b[None, :]
    tl.store(state_ptrs, state, mask=mask_s)
    y = tl.sum(state * c[None, :], 1)
    if HAS_D:
        d = tl.load(d_ptr + h * stride_kh + offs_p * stride_kp, mask=mask_p, other=0.0)
        y += to_float32(d, INTERPRET) * x
    if HAS_Z:
        z_ptrs = z_ptr + row * stride_zb + h * stride_zh + offs_p * stride_zp
        y *= silu(to_float32(tl.load(z_ptrs, mask=mask_p, other=0.0), INTERPRET))
    store_narrow(to, y, mask_p, INTERPRET)


def step_tile(head_dim: int, d_state: int) -> Tile:
    """The tile of a step: about 4096 numbers of a state a program."""
    wide = max(16, triton.next_power_of_2(d_state))
    rows = min(triton.next_power_of_2(head_dim), max(1, _NUMBERS // wide))
    return Tile.of(STEP_ALGORITHM, block_p=rows, num_warps=4 if rows * wide >= 2048 else 1)


def launch_step(args: StepArgs, tile: Tile) -> None:
    """Update `args.state` and write `args.y`. Neither chooses, allocates nor checks a rule.

    Args:
        args: on one device, at least one row; see there.
        tile: as `step_tile` makes it: "step", with block_p and num_warps.

    Raises:
        UnsupportedError: operands are on the CPU and kernels were not imported for the interpreter.
    """
    if args.x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            "ssd: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before "
            "the first import of the kernels, or move the operands to a GPU"
        )
    x, z, d, slots = args.x, args.z, args.D, args.state_indices
    grid = (args.batch * args.heads, triton.cdiv(args.head_dim, tile.block_p))
    _step_kernel[grid](
        args.state, x, args.dt, args.A, args.B, args.C, args.A if d is None else d,
        x if z is None else z, args.A if args.dt_bias is None else args.dt_bias,
        args.A if slots is None else slots, args.y,
        args.heads, args.head_dim, args.d_state, args.heads // args.groups,
        float(args.dt_limit[0]), float(args.dt_limit[1]), *args.state.stride()[:2],
        *x.stride(), *args.dt.stride(), *args.B.stride(), *args.C.stride(),
        *(x if z is None else z).stride(),
        0 if d is None else d.stride(0), 0 if d is None or d.dim() == 1 else d.stride(1),
        BLOCK_P=tile.block_p, BLOCK_N=max(16, triton.next_power_of_2(args.d_state)),
        SOFTPLUS=args.dt_softplus, HAS_BIAS=args.dt_bias is not None, HAS_D=d is not None,
        HAS_Z=z is not None, HAS_SLOTS=slots is not None, INTERPRET=INTERPRETED,
        num_warps=tile.num_warps,
    )  # fmt: skip
