"""Atomic operations on memory: lanes take their turn in order, and waves theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tilewright.isa.emulate_address import addresses_of
from tilewright.isa.emulate_scalar import signed
from tilewright.isa.emulate_state import Wave
from tilewright.isa.emulate_text import Instruction

__all__ = ["compile_atomic"]

Run = Callable[[Wave], None]


def _add_floats(old: int, new: int) -> int:
    total = np.array([old, new], dtype=np.uint32).view(np.float32).sum(dtype=np.float32)
    return int(total.view(np.uint32))


_ATOMIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, new: old + new, "add_u32": lambda old, new: old + new,
    "sub": lambda old, new: old - new, "sub_u32": lambda old, new: old - new,
    "swap": lambda old, new: new, "swap_b32": lambda old, new: new,
    "or": lambda old, new: old | new, "or_b32": lambda old, new: old | new,
    "and": lambda old, new: old & new, "and_b32": lambda old, new: old & new,
    "xor": lambda old, new: old ^ new, "xor_b32": lambda old, new: old ^ new,
    "umax": max, "max_u32": max, "umin": min, "min_u32": min,
    "smax": lambda old, new: max(old, new, key=signed),
    "max_i32": lambda old, new: max(old, new, key=signed),
    "smin": lambda old, new: min(old, new, key=signed),
    "min_i32": lambda old, new: min(old, new, key=signed),
    "add_f32": _add_floats,
    "inc": lambda old, new: 0 if old >= new else old + 1,
    "inc_u32": lambda old, new: 0 if old >= new else old + 1,
}  # fmt: skip
_COMPARE_AND_SWAP = ("cmpswap", "cmpswap_b32")


def compile_atomic(ins: Instruction, lanes: int) -> Run | None:
    """The function of one 32-bit atomic; None if it is none that this module knows."""
    space, _, verb = ins.mnemonic.partition("_atomic_")
    if space not in ("global", "flat", "buffer") or verb not in (*_ATOMIC, *_COMPARE_AND_SWAP):
        return None
    returns = any(n in ins.modifiers for n in ("glc", "sc0")) or "RETURN" in ins.modifiers.get(
        "th", ""
    )
    has_target = returns and space != "buffer"
    addresses, data = addresses_of(ins, space, is_load=False, lanes=lanes)
    if has_target:
        target, vector, data, *rest = ins.operands
        short = replace(ins, operands=(vector, data, *rest))
        addresses, _ = addresses_of(short, space, is_load=False, lanes=lanes)
    else:
        target = data
    combine = _ATOMIC.get(verb)

    def run(w: Wave) -> None:
        places, mask = addresses(w)
        before = w.v[target.index].copy()
        for lane in np.flatnonzero(mask):
            place = places[lane : lane + 1]
            old = int(w.memory.read(place, 4).view(np.uint32)[0, 0])
            new = int(w.v[data.index, lane])
            if combine is not None:
                value = combine(old, new) & 0xFFFFFFFF
            else:
                value = new if old == int(w.v[data.index + 1, lane]) else old
            w.memory.write(place, np.array([[value]], dtype=np.uint32).view(np.uint8))
            before[lane] = old
        if returns:
            w.put(target.index, before)

    return run
