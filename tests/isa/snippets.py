"""A few lines of assembly on one wave of the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.isa.emulate import compile_instruction
from tilewright.isa.emulate_state import Memory, Wave
from tilewright.isa.emulate_text import EXEC, KernelText, parse_instruction

__all__ = ["bits", "execute", "lanes_of"]


def lanes_of(arch: str) -> int:
    return 64 if arch.startswith("gfx9") else 32


def bits(values: Any, dtype: Any) -> npt.NDArray[np.uint32]:
    """Numbers as the registers hold them; numbers of 16 bits in the lower half."""
    array = np.asarray(values, dtype=dtype)
    if array.dtype.itemsize == 2:
        return array.view(np.uint16).astype(np.uint32)
    return array.view(np.uint32)


def execute(
    text: str,
    *,
    arch: str = "gfx1151",
    v: Mapping[int, Any] | None = None,
    s: Mapping[int, int] | None = None,
    active: int | None = None,
    memory: Memory | None = None,
    lds_bytes: int = 256,
    scratch_bytes: int = 0,
) -> Wave:
    """Run straight-line code.

    Args:
        v: registers before: [lanes] numbers, or one for all lanes.
        s: scalar registers before.
        active: exec, a bit a lane; None for all.
    """
    lanes = lanes_of(arch)
    lines = [line.strip() for line in text.strip().splitlines()]
    code = tuple(parse_instruction(line, number) for number, line in enumerate(lines, 1))
    program = KernelText("snippet", arch, code, {}, (), {"wavefront_size32": int(lanes == 32)})
    wave = Wave(lanes, memory or Memory(), np.zeros(lds_bytes, dtype=np.uint8), scratch_bytes)
    for index, value in (v or {}).items():
        wave.v[index] = np.broadcast_to(np.asarray(value, dtype=np.uint32), lanes)
    for number, value in (s or {}).items():
        wave.s[number] = value
    if active is not None:
        wave.set_bits(EXEC, active)
    with np.errstate(all="ignore"):
        for ins in code:
            compile_instruction(ins, program)(wave)
    return wave
