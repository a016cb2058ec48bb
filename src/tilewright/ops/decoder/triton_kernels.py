"""What lies between the products of a transformer layer, on GPUs, in portable Triton.

::

    add_norm     x = x + delta;  y = w * x / rms(x)                      a row a program
    rope         q, k turned by their positions; k and v into the cache  a token, some heads
    attend       one token's attention over the cache                    a kv head, a share
    gate         act(gate) * up

Each rounds where transformers' modules round: sums, norms and products that they keep in the
model's dtype are rounded to it, what they compute in float32 is float32 here. So the two differ by
the order of sums alone.

A cache holds keys and values as [kv heads, capacity, head_dim]. The position of the first token is
read on the device (`position`, int64 [1]): a captured step serves every position.

`attend` splits the positions that a token sees into SPLITS shares, a program each, and a second
kernel adds them in their order: two launches agree bit for bit, at any position.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["ACTIVATIONS", "add_norm", "attend", "gate", "rope"]

ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}
"""What may stand between gate and up, by transformers' names."""

_HEADS = 8  # heads a program turns
_STEP_BYTES = 1 << 14  # of keys that a step of `attend` reads: three of them fit any chip
_LEAST_ROWS = 16  # that a matrix product takes


@triton.jit
def _normed(x, w, width, eps, ONE_PLUS: tl.constexpr, dtype: tl.constexpr):
    """One row x float32 (zeros past `width`), as the family's RMSNorm."""
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    if ONE_PLUS:
        return (scaled * (1.0 + w)).to(dtype)
    return (scaled.to(dtype).to(tl.float32) * w).to(dtype)


@triton.jit
def _add_norm_kernel(
    x_ptr, delta_ptr, post_ptr, w_ptr, y_ptr, width, stride_x, stride_d, stride_y, eps,
    HAS_DELTA: tl.constexpr, POST: tl.constexpr, ONE_PLUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * stride_d + offs, mask=mask, other=0.0).to(tl.float32)
        if POST:
            post = tl.load(post_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            delta = _normed(delta, post, width, eps, ONE_PLUS, dtype).to(tl.float32)
        summed = (x + delta).to(dtype)
        tl.store(x_ptr + row * stride_x + offs, summed, mask=mask)
        x = summed.to(tl.float32)
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = _normed(x, w, width, eps, ONE_PLUS, dtype)
    tl.store(y_ptr + row * stride_y + offs, y, mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    position_ptr, eps, stride_q, stride_k, stride_v, stride_ch, stride_cl,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    QK_NORM: tl.constexpr, ONE_PLUS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Blocks of HEADS heads of one token: those of q first, then of k, then of v."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_blocks: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    position = tl.load(position_ptr) + token
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    offs = tl.arange(0, HALF)
    inside = offs < DIM // 2
    heads = tl.arange(0, HEADS)

    if block >= q_blocks + kv_blocks:
        heads = heads + (block - q_blocks - kv_blocks) * HEADS
        mask = (heads < KV_HEADS)[:, None] & inside[None, :]
        from_ptrs = v_ptr + token * stride_v + heads[:, None] * DIM + offs[None, :]
        to_ptrs = values_ptr + heads[:, None].to(tl.int64) * stride_ch + position * stride_cl
        to_ptrs += offs[None, :]
        tl.store(to_ptrs, tl.load(from_ptrs, mask=mask), mask=mask)
        tl.store(to_ptrs + DIM // 2, tl.load(from_ptrs + DIM // 2, mask=mask), mask=mask)
    else:
        if block < q_blocks:
            heads = heads + block * HEADS
            mask = (heads < Q_HEADS)[:, None] & inside[None, :]
            from_ptrs = q_ptr + token * stride_q + heads[:, None] * DIM + offs[None, :]
            to_ptrs = from_ptrs
            norm_ptr = q_norm_ptr
        else:
            heads = heads + (block - q_blocks) * HEADS
            mask = (heads < KV_HEADS)[:, None] & inside[None, :]
            from_ptrs = k_ptr + token * stride_k + heads[:, None] * DIM + offs[None, :]
            to_ptrs = keys_ptr + heads[:, None].to(tl.int64) * stride_ch + position * stride_cl
            to_ptrs += offs[None, :]
            norm_ptr = k_norm_ptr
        low = tl.load(from_ptrs, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(from_ptrs + DIM // 2, mask=mask, other=0.0).to(tl.float32)
        if QK_NORM:
            squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
            factor = tl.rsqrt(squares / DIM + eps)[:, None]
            w_low = tl.load(norm_ptr + offs, mask=inside, other=0.0).to(tl.float32)[None, :]
            w_high = tl.load(norm_ptr + DIM // 2 + offs, mask=inside, other=0.0).to(tl.float32)
            w_high = w_high[None, :]
            if ONE_PLUS:
                low = (low * factor * (1.0 + w_low)).to(dtype).to(tl.float32)
                high = (high * factor * (1.0 + w_high)).to(dtype).to(tl.float32)
            else:
                low = ((low * factor).to(dtype).to(tl.float32) * w_low).to(dtype).to(tl.float32)
                high = ((high * factor).to(dtype).to(tl.float32) * w_high).to(dtype)
                high = high.to(tl.float32)
        table = position * (DIM // 2) + offs
        cos = tl.load(cos_ptr + table, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)[None, :]
        # Each product is rounded to the dtype before they are added, as in transformers.
        first = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
        second = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
        tl.store(to_ptrs, first.to(dtype), mask=mask)
        tl.store(to_ptrs + DIM // 2, second.to(dtype), mask=mask)


@triton.jit
def _attend_kernel(
    q_ptr, keys_ptr, values_ptr, sums_ptr, tops_ptr, totals_ptr, position_ptr, scale,
    stride_ch, stride_cl,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """The heads of one kv head over one share of the positions: a softmax in running form."""
    kv_head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    seen = tl.load(position_ptr) + 1
    begin = seen * 0
    if WINDOW > 0:
        begin = tl.maximum(seen - WINDOW, 0)
    steps = tl.cdiv(seen - begin, SPLITS * BLOCK_L)
    first = begin + split * steps * BLOCK_L
    last = tl.minimum(first + steps * BLOCK_L, seen)

    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, WIDTH)
    offs_l = tl.arange(0, BLOCK_L)
    inside = cols < DIM
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    head = kv_head * GROUP + rows
    q = tl.load(
        q_ptr + head[:, None] * DIM + cols[None, :],
        mask=(rows < GROUP)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in range(first, last, BLOCK_L):
        where = at + offs_l
        there = where < last
        place = kv_head * stride_ch + where[:, None] * stride_cl + cols[None, :]
        mask = there[:, None] & inside[None, :]
        k = tl.load(keys_ptr + place, mask=mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(there[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp(top - higher)
        p = tl.exp(s - higher[:, None])
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values_ptr + place, mask=mask, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(dtype), v, input_precision="ieee")
        top = higher
    out = head * SPLITS + split
    real = rows < GROUP
    tl.store(tops_ptr + out, top, mask=real)
    tl.store(totals_ptr + out, total, mask=real)
    sums = sums_ptr + out[:, None] * DIM + cols[None, :]
    tl.store(sums, acc, mask=real[:, None] & inside[None, :])


@triton.jit
def _attend_sum_kernel(
    sums_ptr, tops_ptr, totals_ptr, y_ptr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The shares of one head, put together."""
    head = tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    cols = tl.arange(0, WIDTH)
    inside = cols < DIM
    top = tl.load(tops_ptr + head * SPLITS + splits)
    # A share without positions has the top -inf, and counts nothing.
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(totals_ptr + head * SPLITS + splits) * weight, 0)
    sums = tl.load(
        sums_ptr + (head * SPLITS + splits)[:, None] * DIM + cols[None, :],
        mask=inside[None, :], other=0.0,
    )  # fmt: skip
    y = tl.sum(sums * weight[:, None], 0) / total
    tl.store(y_ptr + head * DIM + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(
    gate_ptr, up_ptr, y_ptr, width, stride_g, stride_u, stride_y,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < width
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    x = tl.load(gate_ptr + row * stride_g + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_u + offs, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        small = tl.exp(-tl.abs(x))  # at most 1: nothing overflows
        x = x * tl.where(x < 0, small, 1.0) / (1.0 + small)
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        small = tl.exp(-2.0 * tl.abs(inner))
        x = x * tl.where(inner < 0, small, 1.0) / (1.0 + small)  # 0.5 * (1 + tanh)
    y = (x.to(dtype).to(tl.float32) * up).to(dtype)
    tl.store(y_ptr + row * stride_y + offs, y, mask=mask)


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    post: torch.Tensor | None = None,
    one_plus: bool = False,
) -> torch.Tensor:
    """RMSNorm of x + delta; x becomes that sum.

    Args:
        x: [T, H], rows contiguous; written if there is a `delta`.
        delta: [T, H] of x's dtype, rows contiguous, or None.
        weight: [H] of the norm.
        post: [H], the weight of a norm that `delta` passes first (gemma); or None.
        one_plus: the norms multiply by 1 + weight (gemma).

    Returns:
        [T, H] of x's dtype.
    """
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        x, x if delta is None else delta, weight if post is None else post, weight, y, width,
        x.stride(0), x.stride(0) if delta is None else delta.stride(0), y.stride(0), eps,
        HAS_DELTA=delta is not None, POST=post is not None, ONE_PLUS=one_plus, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return y


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    one_plus: bool = False,
) -> None:
    """Turn q in place, and put k, turned, and v into the cache.

    Args:
        q: [T, q heads * D], rows contiguous.
        k, v: [T, kv heads * D], rows contiguous.
        keys, values: the cache [kv heads, capacity, D], of equal strides; positions
            `position` .. `position` + T - 1 are written, and must be below the capacity.
        cos, sin: [capacity, D / 2] contiguous, of q's dtype.
        position: int64 [1], of the first token.
        q_norm, k_norm: [D], weights of RMSNorms over each head before it is turned; or None.
    """
    kv_heads, _, dim = keys.shape
    q_heads = q.shape[1] // dim
    blocks = triton.cdiv(q_heads, _HEADS) + 2 * triton.cdiv(kv_heads, _HEADS)
    _rope_kernel[(q.shape[0], blocks)](
        q, k, v, keys, values, cos, sin, q if q_norm is None else q_norm,
        q if k_norm is None else k_norm, position, eps, q.stride(0), k.stride(0), v.stride(0),
        keys.stride(0), keys.stride(1),
        Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2),
        QK_NORM=q_norm is not None, ONE_PLUS=one_plus, HEADS=_HEADS, num_warps=4,
    )  # fmt: skip


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    splits: int = 32,
) -> torch.Tensor:
    """Attention of one token over the positions up to its own.

    Args:
        q: [1, q heads * D], the row contiguous.
        keys, values: the cache [kv heads, capacity, D], of equal strides.
        position: int64 [1], of the token.
        window: it sees so many positions, its own among them; 0 for all.
        splits: shares of the positions, a power of two.

    Returns:
        [1, q heads * D] of q's dtype; softmax and sums are float32.
    """
    kv_heads, _, dim = keys.shape
    heads = q.shape[1] // dim
    group = heads // kv_heads
    width = max(triton.next_power_of_2(dim), _LEAST_ROWS)
    block = min(64, max(_LEAST_ROWS, _STEP_BYTES // (width * q.element_size())))
    sums = torch.empty(heads, splits, dim, dtype=torch.float32, device=q.device)
    tops = torch.empty(heads, splits, dtype=torch.float32, device=q.device)
    totals = torch.empty(heads, splits, dtype=torch.float32, device=q.device)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _attend_kernel[(kv_heads, splits)](
        q, keys, values, sums, tops, totals, position, scale, keys.stride(0), keys.stride(1),
        GROUP=group, ROWS=max(triton.next_power_of_2(group), _LEAST_ROWS), DIM=dim, WIDTH=width,
        WINDOW=window, SPLITS=splits, BLOCK_L=block, num_warps=4,
    )  # fmt: skip
    _attend_sum_kernel[(heads,)](
        sums, tops, totals, y, DIM=dim, WIDTH=width, SPLITS=splits, num_warps=4
    )
    return y


def gate(gates: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gates) * up, each [T, I] with contiguous rows; `activation` a key of ACTIVATIONS."""
    rows, width = gates.shape
    y = torch.empty(rows, width, dtype=gates.dtype, device=gates.device)
    block = min(triton.next_power_of_2(width), 2048)
    _gate_kernel[(rows, triton.cdiv(width, block))](
        gates, up, y, width, gates.stride(0), up.stride(0), y.stride(0),
        ACTIVATION=ACTIVATIONS[activation], BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y
