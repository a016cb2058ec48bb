"""Device functions that the SSD kernels share.

Chunks are kept in slots, so that a kernel finds its tokens with no plan from the host: sequence s
of a batch has the slots ``s * NC + c``, NC = ceil(L / CHUNK); of a packed batch it has those from
``cu_seqlens[s] // CHUNK + s`` on, which no two sequences share and of which some stay unused.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.w4a16.triton_parts import bfloat16_bits, operand, to_float32

__all__ = [
    "as_operand",
    "decay",
    "extent",
    "first_slot",
    "locate",
    "operand",
    "store_narrow",
    "to_float32",
    "unit_of",
]

SMALLEST: tl.constexpr = tl.constexpr(2.0**-60)


@triton.jit
def as_operand(v, INTERPRET: tl.constexpr):
    """A loaded tile as tl.dot takes it: the interpreter multiplies bfloat16 in float32."""
    if INTERPRET and v.dtype == tl.bfloat16:
        return to_float32(v, INTERPRET)
    else:
        return v


@triton.jit
def store_narrow(ptrs, v, mask, INTERPRET: tl.constexpr):
    """Store float32 values rounded once to the dtype of `ptrs`."""
    dtype: tl.constexpr = ptrs.dtype.element_ty
    if INTERPRET and dtype == tl.bfloat16:
        v = bfloat16_bits(v).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(ptrs, v.to(dtype), mask=mask)


@triton.jit
def decay(difference):
    """2 to the power of a difference of cumulative sums, which only rounding makes positive."""
    return tl.exp2(tl.minimum(difference, 0.0))


@triton.jit
def unit_of(weights, dtype: tl.constexpr):
    """The size of the largest of a block's weights; 1 where `dtype` needs none. float16 holds few
    small numbers: what is multiplied there is counted in this unit."""
    if dtype == tl.float16:
        return tl.maximum(tl.max(weights, 0), SMALLEST)
    else:
        return 1.0


@triton.jit
def extent(seq, cu_ptr, L, PACKED: tl.constexpr):
    """Of a sequence: its batch, its first token there, and the one behind its last."""
    if PACKED:
        return seq * 0, tl.load(cu_ptr + seq), tl.load(cu_ptr + seq + 1)
    else:
        return seq, seq * 0, seq * 0 + L


@triton.jit
def first_slot(seq, begin, NC, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """The slot of a sequence's first chunk."""
    if PACKED:
        return begin // CHUNK + seq
    else:
        return seq * NC


@triton.jit
def locate(slot, cu_ptr, L, S, NC, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Of a slot: its batch, its chunk's first token, and the one behind its sequence's last; the
    first is not before the last where the slot is unused."""
    if PACKED:
        BLOCK_S: tl.constexpr = 128
        behind = 0
        for first in range(0, S, BLOCK_S):
            offs_s = first + tl.arange(0, BLOCK_S)
            begins = tl.load(cu_ptr + offs_s, mask=offs_s < S, other=0)
            is_before = (offs_s < S) & (begins // CHUNK + offs_s <= slot)
            behind += tl.sum(is_before.to(tl.int32), 0)
        seq = behind - 1
    else:
        seq = slot // NC
    batch, begin, end = extent(seq, cu_ptr, L, PACKED)
    chunk = slot - first_slot(seq, begin, NC, CHUNK, PACKED)
    return batch, begin + chunk * CHUNK, end
