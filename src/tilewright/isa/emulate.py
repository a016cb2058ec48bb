"""AMD machine code executed with no AMD hardware: is the kernel that was compiled for it right?

::

    compiled = triton.compile(source, target=GPUTarget("hip", "gfx1151", 32), options=...)
    run = emulate(compiled, grid=(4, 1, 1), args=[x, y, n])

Every instruction of every wave is executed in order, its lanes at once in numpy, on tensors of the
CPU that are read and written in place. An instruction that the emulator does not know is an error,
never a silent skip.

What it shows: the result of the instructions, lane layouts and bounds included; accesses outside
the tensors; reads of registers or LDS that nothing wrote (they hold NaN); LDS exchanged between
waves without a barrier, since a wave runs to its next barrier before the next one starts.

What it cannot show: it is functional and in order. Missing waits (s_waitcnt), hazards that need
s_nop, and races within a workgroup's or a grid's real interleaving stay hidden, and it says nothing
about speed. Low bits of matrix products and of approximate instructions may differ from a chip's.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from tilewright.errors import GateError, UnsupportedError
from tilewright.isa.emulate_matrix import compile_matrix
from tilewright.isa.emulate_memory import compile_memory
from tilewright.isa.emulate_packed import compile_packed
from tilewright.isa.emulate_scalar import compile_scalar
from tilewright.isa.emulate_state import PRIVATE, Memory, Wave
from tilewright.isa.emulate_text import TTMP, Instruction, KernelText, parse_text
from tilewright.isa.emulate_vector import compile_vector

__all__ = ["ARCHS", "EmulatedRun", "compile_instruction", "emulate"]

ARCHS = ("gfx1151", "gfx1150", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201",
         "gfx90a", "gfx942")  # fmt: skip
"""Architectures whose code is executed."""

Argument = torch.Tensor | int | float
Step = Callable[[Wave], Any]

_END, _BARRIER = "end", "barrier"


@dataclass(frozen=True)
class EmulatedRun:
    """What was executed.

    Attributes:
        kernel, arch: as the code object names them.
        instructions: how often each mnemonic ran, all waves together.
        workgroups, waves: how many ran.
    """

    kernel: str
    arch: str
    instructions: dict[str, int]
    workgroups: int
    waves: int


def emulate(
    kernel: Any,
    *,
    grid: Sequence[int],
    args: Sequence[Argument],
    num_warps: int | None = None,
    arch: str | None = None,
    shared_bytes: int | None = None,
    workgroups: Iterable[tuple[int, int, int]] | None = None,
    last_wave_first: bool = False,
    max_instructions: int = 20_000_000,
) -> EmulatedRun:
    """Run a kernel that was compiled for an AMD GPU, on the CPU.

    Args:
        kernel: what `triton.compile` returned, or `ops.cross.Compiled`, or its amdgcn text.
        grid: workgroups in x, y, z; trailing ones may be left out.
        args: the kernel's arguments without its constexprs, in order; tensors on the CPU.
        num_warps: waves of a workgroup; known where `kernel` is no text.
        arch: such as "gfx1151", only to check the code against; the text names its own.
        shared_bytes: LDS of a workgroup; known where `kernel` is no text, else 64 KiB.
        workgroups: run only these (x, y, z) of the grid, in this order.
        last_wave_first: the waves of a workgroup take their turns in descending order. A result
            that depends on it lacks a barrier.
        max_instructions: of one wave; more is a loop that does not end.

    Raises:
        UnsupportedError: an instruction or operand that the emulator does not know, with the line;
            an architecture that it does not serve; arguments that the kernel does not take.
        GateError: an access outside the tensors, with address and instruction; a wave that does
            not end.
    """
    text, facts = _text_and_facts(kernel)
    program = parse_text(text)
    if program.arch not in ARCHS or (arch is not None and arch != program.arch):
        raise UnsupportedError(
            f"the code is for {program.arch!r}, asked for {arch or 'any'}; "
            f"the emulator runs {', '.join(ARCHS)}: compile for one of them"
        )
    warps = num_warps if num_warps is not None else facts.get("num_warps")
    if warps is None:
        raise UnsupportedError("num_warps is not in assembly text: pass num_warps=")
    lds_bytes = shared_bytes if shared_bytes is not None else facts.get("shared", 65536)
    sizes = (*(int(n) for n in grid), 1, 1)[:3]
    code = [_step(ins, program) for ins in program.instructions]
    memory = Memory()
    kernarg = memory.add_bytes(_argument_block(program, args, memory))
    counts = [0] * (len(code) + 1)
    groups = list(workgroups) if workgroups is not None else [
        (x, y, z) for z, y, x in product(*(range(n) for n in reversed(sizes)))
    ]  # fmt: skip
    with np.errstate(all="ignore"):
        for group in groups:
            waves = _start(program, memory, kernarg, group, int(warps), int(lds_bytes))
            order = waves[::-1] if last_wave_first else waves
            _run_group(program, code, order, counts, group, max_instructions)
    tally: Counter[str] = Counter()
    for ins, count in zip(program.instructions, counts, strict=False):
        for part in (ins, ins.second):
            if part is not None and count:
                tally[part.mnemonic] += count
    return EmulatedRun(
        program.name, program.arch, dict(tally), len(groups), len(groups) * int(warps)
    )


def _text_and_facts(kernel: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(kernel, str):
        return kernel, {}
    text = getattr(kernel, "asm", {}).get("amdgcn")
    if not isinstance(text, str):
        raise UnsupportedError(
            f"kernel is a {type(kernel).__name__} without amdgcn text; pass what triton.compile "
            "returned for a HIP target, or its asm['amdgcn']"
        )
    metadata: Any = getattr(kernel, "metadata", {})
    return text, dict(metadata._asdict() if hasattr(metadata, "_asdict") else metadata)


def compile_instruction(ins: Instruction, program: KernelText) -> Step:
    """The function that runs one instruction on a wave.

    Raises:
        UnsupportedError: an operand or a modifier that the emulator does not know.
    """
    name, lanes = ins.mnemonic, program.lanes
    if name == "s_endpgm":
        return lambda w: _END
    if name in ("s_barrier", "s_barrier_wait"):
        return lambda w: _BARRIER
    found: Step | None = None
    if name.startswith("v_"):
        if ins.second is None:
            found = compile_matrix(ins, lanes) or compile_packed(ins, lanes)
        found = found or compile_vector(ins, lanes, legacy=program.arch.startswith("gfx9"))
    else:
        found = compile_scalar(ins, program.labels) or compile_memory(ins, lanes)
    if found is None:
        raise ins.refuse("unknown instruction")
    return found


def _step(ins: Instruction, program: KernelText) -> Step:
    """`compile_instruction`, its refusal put off until the instruction is reached.

    What a launch does not execute, such as a trap, cannot make its result wrong.
    """
    try:
        return compile_instruction(ins, program)
    except UnsupportedError as error:
        refusal = error

    def refuse(w: Wave) -> None:
        raise refusal

    return refuse


def _argument_block(program: KernelText, args: Sequence[Argument], memory: Memory) -> bytes:
    """The arguments as the kernel reads them. Pointers that nobody passes are 0."""
    visible = [a for a in program.arguments if not a.hidden]
    if len(args) > len(visible) or any(not a.is_pointer for a in visible[len(args) :]):
        raise UnsupportedError(
            f"args has {len(args)} arguments and the kernel takes {len(visible)}, the compiler's "
            "own scratch pointers included; pass all but the constexprs, in order"
        )
    block = bytearray(max(program.directives.get("kernarg_size", 0), 8))
    for number, (place, value) in enumerate(zip(visible, args, strict=False)):
        if isinstance(value, torch.Tensor) != place.is_pointer:
            kind = "a tensor" if place.is_pointer else "a number"
            raise UnsupportedError(f"args[{number}] is a {type(value).__name__}, expected {kind}")
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise UnsupportedError(f"args[{number}] is on {value.device}; move it to the CPU")
            raw = struct.pack("<Q", memory.add(value))
        elif isinstance(value, float):
            raw = struct.pack("<f" if place.size == 4 else "<d", value)
        else:
            raw = (int(value) & ((1 << 8 * place.size) - 1)).to_bytes(place.size, "little")
        block[place.offset : place.offset + place.size] = raw
    return bytes(block)


_USER_SGPRS = (
    ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2),
    ("kernarg_segment_ptr", 2), ("dispatch_id", 2), ("flat_scratch_init", 2),
)  # fmt: skip


def _start(
    program: KernelText, memory: Memory, kernarg: int, group: tuple[int, int, int], warps: int,
    lds_bytes: int,
) -> list[Wave]:  # fmt: skip
    """The waves of a workgroup with the registers that the hardware sets."""
    lds = np.full(max(lds_bytes, program.directives.get("group_segment_fixed_size", 0)), 0xFF,
                  dtype=np.uint8)  # fmt: skip
    scratch = program.directives.get("private_segment_fixed_size", 0)
    waves = []
    for number in range(warps):
        wave = Wave(program.lanes, memory, lds, scratch, number)
        at = 0
        for name, count in _USER_SGPRS:
            if program.directives.get(f"user_sgpr_{name}", 0):
                if name == "kernarg_segment_ptr":
                    wave.set64(at, kernarg)
                elif name == "private_segment_buffer":
                    wave.set64(at, PRIVATE)
                    wave.set64(at + 2, 0xFFFFFFFF)
                at += count
        at = program.directives.get("user_sgpr_count", at)
        if program.arch.startswith("gfx12"):
            wave.s[TTMP + 9] = group[0]
            wave.s[TTMP + 7] = group[1] | group[2] << 16
            wave.s[TTMP + 8] = number << 25
        else:
            for axis, index in zip("xyz", group, strict=True):
                if program.directives.get(f"system_sgpr_workgroup_id_{axis}", 0):
                    wave.s[at] = index
                    at += 1
            if program.directives.get("system_sgpr_private_segment_wavefront_offset", 0):
                wave.s[at] = 0
        wave.v[0] = np.arange(program.lanes, dtype=np.uint32) + np.uint32(number * program.lanes)
        waves.append(wave)
    return waves


def _run_group(
    program: KernelText, code: list[Step], waves: list[Wave], counts: list[int],
    group: tuple[int, int, int], limit: int,
) -> None:  # fmt: skip
    """Each wave to its next barrier, in turn, until all have ended."""
    while alive := [w for w in waves if not w.done]:
        for wave in alive:
            try:
                wave.done = _run_to_barrier(code, wave, counts, limit) == _END
            except GateError as error:
                ins = program.instructions[wave.pc - 1]
                raise GateError(
                    f"{program.name} on {program.arch}, workgroup {group}, wave "
                    f"{wave.number}, assembly line {ins.line} ({ins.text}): {error}"
                ) from error


def _run_to_barrier(code: list[Step], wave: Wave, counts: list[int], limit: int) -> str:
    while wave.steps < limit:
        pc = wave.pc
        wave.pc = pc + 1
        wave.steps += 1
        counts[pc] += 1
        if (stop := code[pc](wave)) is not None:
            return str(stop)
    raise GateError(
        f"the wave ran {limit} instructions and did not end: a loop without an end, or "
        "max_instructions is too small"
    )
