"""What Hopper kernels of GGUF weights share of memory: rings of buffers, prefetches, TMA."""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["fetch", "next_buffer", "of_16_bits", "words_descriptor"]


@gluon.jit
def next_buffer(stage, phase, STAGES: gl.constexpr):
    """A ring's next buffer, and the parity of its turn."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), phase ^ wraps.to(gl.int32)


@gluon.jit
def fetch(ptrs):
    """Bring the lines that pointers point to into the L2, where a later store still finds them."""
    gl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [ptrs.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@functools.lru_cache
def of_16_bits() -> Any:
    """The layout in shared memory of rows of 64 numbers of 16 bits: swizzled by 128 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@functools.lru_cache
def _of_words(columns: int) -> Any:
    """Of rows of so many words, as TMA swizzles them."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=4 * columns if columns > 4 else 0, element_bitwidth=32, rank=2
    )


def words_descriptor(words: torch.Tensor, block_n: int, bits: int) -> Any:
    """A TMA descriptor of a plane of `bits`: 128 columns of `block_n` rows at a time.

    Args:
        words: [N, W], or of experts [E, N, W], which lie below each other without a gap: then rows
            are those of all of them.
        block_n: rows of a box.
        bits: of a code in this plane.
    """
    box, w = 4 * bits, words.shape[-1]
    return TensorDescriptor(
        words, [words.numel() // w, w], [words.stride(-2), 1], [block_n, box], _of_words(box)
    )
