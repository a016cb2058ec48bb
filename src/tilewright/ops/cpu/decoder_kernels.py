"""What a transformer layer does besides its matrix products, for one token or for M rows of them.

All vectors are float32. Each kernel reads an int64 argument array with slots of its own (`SLOTS`),
and the first row's position from a shared state array, so a captured `Program` serves every step.

``norm``         y = x / sqrt(mean(x^2) + eps) * w        (add: y += instead)
``rope``         rotary embedding of q and k, with a norm of each head before it where the model
                 has one; k and v go into the cache
``attend``       one row: softmax(q . K / s) V over the cache, or only its last `window` positions
``attend_rows``  the same for M rows, each seeing the positions up to its own; both products run
                 through `tile_f32`, straight from the cache
``gate``         act(g) * u, act = SiLU or the tanh form of GELU

Cache of one layer: K is [kv heads, head_dim, capacity], so that 16 positions lie in one vector and
scores need no horizontal sums; V is [kv heads, capacity, head_dim]. Capacity is a multiple of 32.
Threads share heads, rows or vectors; every sum runs in one fixed order whatever their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tilewright.ops.cpu.args import share
from tilewright.ops.cpu.microkernel import tile_f32
from tilewright.ops.cpu.runtime import Kernel, compile_kernel
from tilewright.ops.cpu.simd import has_avx512
from tilewright.ops.cpu.simd_arithmetic import (
    add,
    div,
    exp,
    fma,
    fmax,
    mul,
    splat_f32,
    sub,
    zeros_f32,
)
from tilewright.ops.cpu.simd_convert import f32_from_bits
from tilewright.ops.cpu.simd_memory import load_f32, load_f32x16, load_i64, store_f32, store_f32x16
from tilewright.ops.cpu.simd_shuffle import max_f32, sum_f32

__all__ = ["ATTEND_ROWS", "SLOTS", "decoder_arguments", "decoder_kernel", "float_bits"]

SLOTS: dict[str, tuple[str, ...]] = {
    # eps is the bit pattern of a float32; width in floats; add != 0 adds to y
    "norm": ("x", "w", "y", "width", "eps", "add", "m"),
    "embed": ("ids", "w", "y", "width", "m"),
    "scale": ("x", "width", "factor", "m"),
    "gather": ("x", "ids", "y", "width", "m"),
    # q, k, v: this token's vectors; q_norm, k_norm: 0 or weights [head_dim]
    "rope": ("state", "q", "k", "v", "q_norm", "k_norm", "eps", "cos", "sin", "q_heads", "kv_heads",
             "head_dim", "k_cache", "v_cache", "capacity", "m"),
    # window 0: all positions; softcap 0.0: none; scores: [threads, capacity] scratch
    "attend": ("state", "q", "y", "q_heads", "kv_heads", "head_dim", "k_cache", "v_cache",
               "capacity", "window", "scale", "softcap", "scores"),
    # as attend; scores: [threads, ATTEND_ROWS, capacity]; q and y have whole blocks of rows
    "attend_rows": ("state", "q", "y", "q_heads", "kv_heads", "head_dim", "k_cache", "v_cache",
                    "capacity", "window", "scale", "softcap", "scores", "m"),
    # gelu != 0: tanh GELU, else SiLU
    "gate": ("gate", "up", "y", "width", "gelu", "m"),
    "dense": ("x", "w", "y", "n", "k", "bias", "accumulate", "m"),
}  # fmt: skip


ATTEND_ROWS, _NV = (8, 2) if has_avx512() else (4, 1)
"""Rows of q that `attend_rows` takes together, and the width of its register tile."""


@njit
def _slot(args, i):  # type: ignore[no-untyped-def]
    return load_i64(args + 8 * i)


@njit
def _inverse_rms(x, width, eps):  # type: ignore[no-untyped-def]
    total = zeros_f32()
    for i in range(width // 16):
        v = load_f32x16(x + 64 * i)
        total = fma(v, v, total)
    mean = sum_f32(total) / np.float32(width)
    return np.float32(1.0) / np.sqrt(mean + eps)


@njit
def _norm_range(x, w, y, factor, into, first, last):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        value = mul(mul(load_f32x16(x + 64 * i), factor), load_f32x16(w + 64 * i))
        if into != 0:
            value = add(load_f32x16(y + 64 * i), value)
        store_f32x16(y + 64 * i, value)


def _norm(args, thread, threads):  # type: ignore[no-untyped-def]
    x, w, y = _slot(args, 0), _slot(args, 1), _slot(args, 2)
    width, eps, into = _slot(args, 3), f32_from_bits(_slot(args, 4)), _slot(args, 5)
    m = _slot(args, 6)
    if m == 1:  # every thread sums the whole row, then writes its share
        factor = splat_f32(_inverse_rms(x, width, eps))
        first, last = share(width // 16, thread, threads)
        _norm_range(x, w, y, factor, into, first, last)
        return
    first, last = share(m, thread, threads)
    for i in range(first, last):
        row = x + 4 * width * i
        factor = splat_f32(_inverse_rms(row, width, eps))
        _norm_range(row, w, y + 4 * width * i, factor, into, 0, width // 16)


def _scale(args, thread, threads):  # type: ignore[no-untyped-def]
    x, width = _slot(args, 0), _slot(args, 1)
    factor = splat_f32(f32_from_bits(_slot(args, 2)))
    first, last = share(_slot(args, 3) * (width // 16), thread, threads)
    for i in range(first, last):
        store_f32x16(x + 64 * i, mul(load_f32x16(x + 64 * i), factor))


def _embed(args, thread, threads):  # type: ignore[no-untyped-def]
    """y[i] = row ids[i] of the float32 table w."""
    ids, w, y, width = _slot(args, 0), _slot(args, 1), _slot(args, 2), _slot(args, 3)
    vectors = width // 16
    first, last = share(_slot(args, 4) * vectors, thread, threads)
    for item in range(first, last):
        row = w + 4 * width * load_i64(ids + 8 * (item // vectors))
        store_f32x16(y + 64 * item, load_f32x16(row + 64 * (item % vectors)))


def _gather(args, thread, threads):  # type: ignore[no-untyped-def]
    """y[i, j] = x[i, ids[j]]: activations in the order of an act-order weight's columns."""
    x, ids, y, width = _slot(args, 0), _slot(args, 1), _slot(args, 2), _slot(args, 3)
    first, last = share(_slot(args, 4) * width, thread, threads)
    for item in range(first, last):
        row = x + 4 * width * (item // width)
        store_f32(y + 4 * item, load_f32(row + 4 * load_i64(ids + 8 * (item % width))))


@njit
def _rotate(x, norm, eps, cos, sin, head_dim):  # type: ignore[no-untyped-def]
    """In place: normalize one head (norm != 0), then rotate its halves."""
    if norm != 0:
        factor = splat_f32(_inverse_rms(x, head_dim, eps))
        for i in range(head_dim // 16):
            value = mul(mul(load_f32x16(x + 64 * i), factor), load_f32x16(norm + 64 * i))
            store_f32x16(x + 64 * i, value)
    half = head_dim // 2
    for i in range(half // 16):
        a = load_f32x16(x + 64 * i)
        b = load_f32x16(x + 4 * half + 64 * i)
        c0, s0 = load_f32x16(cos + 64 * i), load_f32x16(sin + 64 * i)
        c1, s1 = load_f32x16(cos + 4 * half + 64 * i), load_f32x16(sin + 4 * half + 64 * i)
        store_f32x16(x + 64 * i, sub(mul(a, c0), mul(b, s0)))
        store_f32x16(x + 4 * half + 64 * i, add(mul(b, c1), mul(a, s1)))


def _rope(args, thread, threads):  # type: ignore[no-untyped-def]
    first_position = load_i64(_slot(args, 0))
    q, k, v = _slot(args, 1), _slot(args, 2), _slot(args, 3)
    q_norm, k_norm, eps = _slot(args, 4), _slot(args, 5), f32_from_bits(_slot(args, 6))
    q_heads, kv_heads, head_dim = _slot(args, 9), _slot(args, 10), _slot(args, 11)
    k_cache, v_cache, capacity = _slot(args, 12), _slot(args, 13), _slot(args, 14)
    heads = q_heads + kv_heads
    first, last = share(_slot(args, 15) * heads, thread, threads)
    for item in range(first, last):
        row, head = item // heads, item % heads
        position = first_position + row
        cos = _slot(args, 7) + 4 * head_dim * position
        sin = _slot(args, 8) + 4 * head_dim * position
        if head < q_heads:
            query = q + 4 * head_dim * (q_heads * row + head)
            _rotate(query, q_norm, eps, cos, sin, head_dim)
        else:
            h = head - q_heads
            key = k + 4 * head_dim * (kv_heads * row + h)
            value = v + 4 * head_dim * (kv_heads * row + h)
            _rotate(key, k_norm, eps, cos, sin, head_dim)
            to = k_cache + 4 * (head_dim * capacity * h + position)
            for i in range(head_dim):
                store_f32(to + 4 * capacity * i, load_f32(key + 4 * i))
            to = v_cache + 4 * head_dim * (capacity * h + position)
            for i in range(head_dim // 16):
                store_f32x16(to + 64 * i, load_f32x16(value + 64 * i))


@njit
def _tanh(x):  # type: ignore[no-untyped-def]
    one = splat_f32(np.float32(1.0))
    two = splat_f32(np.float32(2.0))
    return sub(one, div(two, add(exp(mul(two, x)), one)))


@njit
def _softmax_row(scores, blocks, begin, start, stop, scale, softcap):  # type: ignore[no-untyped-def]
    """In place over 16 * blocks scores of positions from `begin`; those outside start..stop-1
    become 0. Returns 1 / the sum, which the caller multiplies in after the second product."""
    lowest = np.float32(-np.inf)
    top = splat_f32(lowest)
    for b in range(blocks):
        s = mul(load_f32x16(scores + 64 * b), splat_f32(scale))
        if softcap != np.float32(0.0):
            s = mul(_tanh(div(s, splat_f32(softcap))), splat_f32(softcap))
        store_f32x16(scores + 64 * b, s)
        at = begin + 16 * b
        if at < start or at + 16 > stop:
            for lane in range(16):
                if at + lane < start or at + lane >= stop:
                    store_f32(scores + 64 * b + 4 * lane, lowest)
        top = fmax(load_f32x16(scores + 64 * b), top)
    peak = splat_f32(max_f32(top))
    total = zeros_f32()
    for b in range(blocks):
        e = exp(sub(load_f32x16(scores + 64 * b), peak))
        store_f32x16(scores + 64 * b, e)
        total = add(total, e)
    return np.float32(1.0) / sum_f32(total)


def _attend(args, thread, threads):  # type: ignore[no-untyped-def]
    count = load_i64(_slot(args, 0)) + 1
    q, y = _slot(args, 1), _slot(args, 2)
    q_heads, kv_heads, head_dim = _slot(args, 3), _slot(args, 4), _slot(args, 5)
    k_cache, v_cache, capacity = _slot(args, 6), _slot(args, 7), _slot(args, 8)
    window = _slot(args, 9)
    scale, softcap = f32_from_bits(_slot(args, 10)), f32_from_bits(_slot(args, 11))
    scores = _slot(args, 12) + 4 * capacity * thread
    start = 0
    if window != 0:
        start = max(0, count - window)
    begin = start // 16 * 16
    blocks = (count - begin + 15) // 16
    first, last = share(q_heads, thread, threads)
    for head in range(first, last):
        h = head * kv_heads // q_heads
        query = q + 4 * head_dim * head
        keys = k_cache + 4 * (head_dim * capacity * h + begin)
        for b in range(blocks):
            s0, s1 = zeros_f32(), zeros_f32()
            for i in range(0, head_dim, 2):
                at = keys + 64 * b + 4 * capacity * i
                s0 = fma(splat_f32(load_f32(query + 4 * i)), load_f32x16(at), s0)
                s1 = fma(splat_f32(load_f32(query + 4 * i + 4)), load_f32x16(at + 4 * capacity), s1)
            store_f32x16(scores + 64 * b, add(s0, s1))
        inverse = _softmax_row(scores, blocks, begin, start, count, scale, softcap)
        out = y + 4 * head_dim * head
        values = v_cache + 4 * head_dim * (capacity * h)
        for i in range(0, head_dim, 16):
            o0, o1 = zeros_f32(), zeros_f32()
            t = start
            while t + 1 < count:
                p0 = load_f32(scores + 4 * (t - begin))
                p1 = load_f32(scores + 4 * (t - begin) + 4)
                at = values + 4 * (head_dim * t + i)
                o0 = fma(splat_f32(p0), load_f32x16(at), o0)
                o1 = fma(splat_f32(p1), load_f32x16(at + 4 * head_dim), o1)
                t += 2
            if t < count:
                p0 = load_f32(scores + 4 * (t - begin))
                o0 = fma(splat_f32(p0), load_f32x16(values + 4 * (head_dim * t + i)), o0)
            store_f32x16(out + 4 * i, mul(add(o0, o1), splat_f32(inverse)))


def _attend_rows(args, thread, threads):  # type: ignore[no-untyped-def]
    first_position = load_i64(_slot(args, 0))
    q, y = _slot(args, 1), _slot(args, 2)
    q_heads, kv_heads, head_dim = _slot(args, 3), _slot(args, 4), _slot(args, 5)
    k_cache, v_cache, capacity = _slot(args, 6), _slot(args, 7), _slot(args, 8)
    window = _slot(args, 9)
    scale, softcap = f32_from_bits(_slot(args, 10)), f32_from_bits(_slot(args, 11))
    scores = _slot(args, 12) + 4 * ATTEND_ROWS * capacity * thread
    m = _slot(args, 13)
    stride = 4 * head_dim * q_heads
    # Later rows see more positions: dealing blocks out in turn gives threads equal work.
    for item in range(thread, q_heads * ((m + ATTEND_ROWS - 1) // ATTEND_ROWS), threads):
        head, i0 = item % q_heads, item // q_heads * ATTEND_ROWS
        h = head * kv_heads // q_heads
        stop = first_position + min(i0 + ATTEND_ROWS, m)
        begin = 0
        if window != 0:
            begin = max(0, first_position + i0 + 1 - window) // 32 * 32
        length = (stop - begin + 31) // 32 * 32
        query = q + stride * i0 + 4 * head_dim * head
        keys = k_cache + 4 * (head_dim * capacity * h + begin)
        for t in range(0, length, 16 * _NV):
            tile_f32(ATTEND_ROWS, _NV, query, stride, keys + 4 * t, 4 * capacity, head_dim,
                     scores + 4 * t, 4 * capacity, 0)  # fmt: skip
        out = y + stride * i0 + 4 * head_dim * head
        values = v_cache + 4 * head_dim * (capacity * h + begin)
        for r in range(ATTEND_ROWS):
            last = first_position + min(i0 + r, m - 1) + 1
            start = 0
            if window != 0:
                start = max(0, last - window)
            inverse = _softmax_row(
                scores + 4 * capacity * r, length // 16, begin, start, last, scale, softcap
            )
            for b in range(length // 16):
                at = scores + 4 * capacity * r + 64 * b
                store_f32x16(at, mul(load_f32x16(at), splat_f32(inverse)))
        for i in range(0, head_dim, 16 * _NV):
            tile_f32(ATTEND_ROWS, _NV, scores, 4 * capacity, values + 4 * i, 4 * head_dim, length,
                     out + 4 * i, stride, 0)  # fmt: skip


def _gate(args, thread, threads):  # type: ignore[no-untyped-def]
    g, u, y, gelu = _slot(args, 0), _slot(args, 1), _slot(args, 2), _slot(args, 4)
    one = splat_f32(np.float32(1.0))
    half = splat_f32(np.float32(0.5))
    root = splat_f32(np.float32(0.7978845608028654))  # sqrt(2 / pi)
    cubic = splat_f32(np.float32(0.044715))
    first, last = share(_slot(args, 5) * (_slot(args, 3) // 16), thread, threads)
    for i in range(first, last):
        x = load_f32x16(g + 64 * i)
        if gelu != 0:
            inner = mul(root, fma(cubic, mul(mul(x, x), x), x))
            a = mul(mul(half, x), add(one, _tanh(inner)))
        else:
            a = div(x, add(one, exp(sub(zeros_f32(), x))))
        store_f32x16(y + 64 * i, mul(a, load_f32x16(u + 64 * i)))


def _dense(args, thread, threads):  # type: ignore[no-untyped-def]
    """y = x @ W.T + bias with float32 W [n, k]: layers that a checkpoint leaves unquantized."""
    x, w, y = _slot(args, 0), _slot(args, 1), _slot(args, 2)
    columns, k = _slot(args, 3), _slot(args, 4)
    bias, accumulate = _slot(args, 5), _slot(args, 6)
    first, last = share(columns, thread, threads)
    for n in range(first, last):
        row = w + 4 * k * n
        for i in range(_slot(args, 7)):
            xi = x + 4 * k * i
            at = y + 4 * (columns * i + n)
            acc = zeros_f32()
            for j in range(k // 16):
                acc = fma(load_f32x16(row + 64 * j), load_f32x16(xi + 64 * j), acc)
            total = sum_f32(acc)
            for j in range(k // 16 * 16, k):
                total += load_f32(row + 4 * j) * load_f32(xi + 4 * j)
            if bias != 0:
                total += load_f32(bias + 4 * n)
            if accumulate != 0:
                total += load_f32(at)
            store_f32(at, total)


_TEMPLATES: dict[str, Any] = {
    "norm": _norm,
    "embed": _embed,
    "scale": _scale,
    "gather": _gather,
    "rope": _rope,
    "attend": _attend,
    "attend_rows": _attend_rows,
    "gate": _gate,
    "dense": _dense,
}
_KERNELS: dict[str, Kernel] = {}


def decoder_kernel(name: str) -> Kernel:
    """A kernel of this file, compiled on first use."""
    if name not in _KERNELS:
        _KERNELS[name] = compile_kernel(_TEMPLATES[name], f"decoder-{name}")
    return _KERNELS[name]


def decoder_arguments(name: str, **slots: int) -> np.ndarray:
    """The argument array of kernel `name`; slots left out are 0."""
    order = SLOTS[name]
    args = np.zeros(len(order), dtype=np.int64)
    for slot, value in slots.items():
        args[order.index(slot)] = value
    return args


def float_bits(value: float) -> int:
    """The bit pattern of a float32, as the argument arrays carry it."""
    return int(np.float32(value).view(np.int32))
