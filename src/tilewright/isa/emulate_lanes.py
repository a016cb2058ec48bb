"""How values move between the lanes of a wave: DPP patterns, permlane, readlane, writelane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.isa.emulate_arith import OPERATIONS
from tilewright.isa.emulate_operands import Array, reader, writer
from tilewright.isa.emulate_state import Wave
from tilewright.isa.emulate_text import Instruction

__all__ = ["LANE_MOVES", "dpp_lanes"]

Run = Callable[[Wave], None]


def dpp_lanes(ins: Instruction, lanes: int) -> tuple[Array, Array]:
    """[lanes] source lanes, and whether each exists."""
    lane = np.arange(lanes)
    row, at = lane // 16 * 16, lane % 16
    everywhere = np.ones(lanes, dtype=bool)
    for name, text in ins.modifiers.items():
        if name in ("quad_perm", "dpp8"):
            picks = np.array([int(n) for n in text.strip("[]").split(",")])
            return lane // picks.size * picks.size + picks[lane % picks.size], everywhere
        if name == "row_mirror":
            return row + 15 - at, everywhere
        if name == "row_half_mirror":
            return lane // 8 * 8 + 7 - lane % 8, everywhere
        if name not in _DPP:
            continue
        source, valid = _DPP[name](lane, row, at, int(text, 0))
        return np.clip(source, 0, lanes - 1), valid & (source >= 0) & (source < lanes)
    raise ins.refuse("no known lane pattern")


_DPP: dict[str, Callable[[Array, Array, Array, int], tuple[Array, Array]]] = {
    "row_shl": lambda lane, row, at, n: (lane + n, at + n < 16),
    "row_shr": lambda lane, row, at, n: (lane - n, at - n >= 0),
    "row_ror": lambda lane, row, at, n: (row + (at - n) % 16, at >= 0),
    "row_bcast": lambda lane, row, at, n: (
        (row - 1, lane >= 16) if n == 15 else (np.full_like(lane, 31), lane >= 32)
    ),
    "row_newbcast": lambda lane, row, at, n: (row + n, at >= 0),
    "row_share": lambda lane, row, at, n: (row + n, at >= 0),
    "row_xmask": lambda lane, row, at, n: (row + (at ^ n), at >= 0),
    "wave_shl": lambda lane, row, at, n: (lane + n, at >= 0),
    "wave_shr": lambda lane, row, at, n: (lane - n, at >= 0),
    "wave_rol": lambda lane, row, at, n: ((lane + n) % lane.size, at >= 0),
    "wave_ror": lambda lane, row, at, n: ((lane - n) % lane.size, at >= 0),
}


def _read_lane(ins: Instruction, lanes: int) -> Run:
    target, source = ins.operands[0].index, ins.operands[1].index
    which = ins.operands[2] if len(ins.operands) > 2 else None

    def run(w: Wave) -> None:
        if which is None:
            lane = int(np.argmax(w.mask))  # lane 0 where none is active
        else:
            lane = (w.s[which.index] if which.kind == "s" else int(which.value)) % lanes
        w.set(target, int(w.v[source, lane]))

    return run


def _write_lane(ins: Instruction, lanes: int) -> Run:
    target, value, which = ins.operands

    def run(w: Wave) -> None:
        lane = (w.s[which.index] if which.kind == "s" else int(which.value)) % lanes
        w.v[target.index, lane] = w.s[value.index] if value.kind == "s" else value.bits32

    return run


def _permlane(ins: Instruction, lanes: int) -> Run:
    """A lane's value from its row of 16 (permlane16), or from the row beside it (permlanex16)."""
    target, source, *selects = ins.operands
    low, high = (reader(ins, op, "u32", lanes) for op in selects)
    inactive_too, zero = ins.pair("op_sel", (0, 0))[:2]
    lane = np.arange(lanes)
    row = lane // 16 * 16
    if "permlanex16" in ins.mnemonic:
        row = row ^ 16
    write = writer(ins, target, "u32")

    def run(w: Wave) -> None:
        both = int(low(w)[0]) | int(high(w)[0]) << 32
        picked = row + np.array([both >> 4 * (at % 16) & 15 for at in range(lanes)])
        good = np.ones(lanes, dtype=bool) if inactive_too else w.mask[picked]
        value = np.where(good, w.v[source.index][picked], np.uint32(0))
        with w.narrowed(good | bool(zero)):
            write(w, value)

    return run


def _other_half(ins: Instruction, lanes: int) -> Run:
    """v_permlane64_b32: the halves of a wave of 64 change places; a wave of 32 keeps its lanes."""
    write, source = writer(ins, ins.operands[0], "u32"), ins.operands[1].index
    swapped = np.arange(lanes) ^ (32 if lanes == 64 else 0)
    return lambda w: write(w, w.v[source][swapped])


def _scalar_function(ins: Instruction, lanes: int) -> Run:
    """v_s_rcp_f32 and its like: the vector unit's function of one scalar."""
    kind, function = OPERATIONS[ins.mnemonic.replace("v_s_", "v_", 1)][1:]
    read, target = reader(ins, ins.operands[1], kind[0], lanes), ins.operands[0].index
    word = np.uint16 if kind[0] == "f16" else np.uint32
    return lambda w: w.set(target, int(function(read(w)).view(word)[0]))


def _copy(ins: Instruction, lanes: int) -> Run:
    read, write = reader(ins, ins.operands[1], "u32", lanes), writer(ins, ins.operands[0], "u32")
    return lambda w: write(w, read(w).copy())


def _swap(ins: Instruction, lanes: int) -> Run:
    a, b = (op.index for op in ins.operands)

    def run(w: Wave) -> None:
        first = w.v[a].copy()
        w.put(a, w.v[b].copy())
        w.put(b, first)

    return run


LANE_MOVES: dict[str, Any] = {
    "v_readfirstlane_b32": _read_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_permlane16_b32": _permlane,
    "v_permlanex16_b32": _permlane,
    "v_permlane64_b32": _other_half,
    "v_accvgpr_read_b32": _copy,
    "v_accvgpr_write_b32": _copy,
    "v_accvgpr_mov_b32": _copy,
    "v_swap_b32": _swap,
    **{
        f"v_s_{name}_{kind}": _scalar_function
        for name in ("exp", "log", "rcp", "rsq", "sqrt")
        for kind in ("f16", "f32")
    },
}
"""Mnemonic -> (instruction, lanes) -> its function."""
