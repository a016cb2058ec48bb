"""Matrix descriptors of Hopper that the assembler built from a wrong register.

wgmma finds an operand in shared memory by a descriptor of 64 bits, which lies in two uniform
registers. Its high half says how the operand's rows lie: the compiler knows it. ptxas 12.8 (in
Triton 3.6 and 3.7; 12.9 no longer) adds an offset to a descriptor now and then with a register that
holds something else at that place, an argument of the kernel or the base of shared memory::

    UIADD3 UR4, UP0, UR12, 0x20, URZ               UR12 is an argument
    UIADD3.X UR5, UR12, -0x3ffffff0, URZ, UP0      and it is no constant

The PTX is right, nothing warns, and the product reads other memory: wrong sums, always the same
ones, or an illegal access. Here every descriptor's high half is followed back to what it is made
of. Constants are right. What came through a thread's registers is not followed, and not reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.isa.count import WGMMA, parse
from tilewright.isa.sass import sass
from tilewright.ops.cross import Compiled

__all__ = ["WrongDescriptor", "wrong_descriptors", "wrong_descriptors_of"]

_LEAVES = re.compile(r"(EXIT|RET|BRA|BRX|JMP)\b")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_REGISTERS_LEFT = re.compile(r"R\d+, R\d+, gdesc")
_NUMBER = re.compile(r"[-~]?(0x[0-9a-f]+|\d+)")
_UNIFORM = re.compile(r"[-~|!]?UR(\d+)\b")
_PREDICATE = re.compile(r"!?U?P(\d|T)")
_WITHOUT_RESULT = re.compile(r"(UISETP|UPLOP3|UP2UR|UBLKCP|UTMA|UCG|UTC|USYNCS|UR2UP|UVOTE)")

# What a register holds, from what is known of it to what must not be in a descriptor's high half.
_CONSTANT, _UNKNOWN, _ADDRESS, _ARGUMENT = range(4)
_NAMES = {_ADDRESS: "the base of shared memory or a special register", _ARGUMENT: "an argument"}


@dataclass(frozen=True)
class WrongDescriptor:
    """A matrix instruction whose descriptor was built from a wrong register.

    Attributes:
        product: the instruction.
        register: the uniform register of the high half.
        holds: what it was made of.
    """

    product: str
    register: str
    holds: str

    def __str__(self) -> str:
        return (
            f"the descriptor of {self.product!r} is made of {self.holds} in {self.register}, which "
            "must be a constant: ptxas 12.8 has built it wrong"
        )


def wrong_descriptors_of(compiled: Compiled) -> tuple[WrongDescriptor, ...]:
    """What `wrong_descriptors` finds in a kernel for an NVIDIA chip; nothing for other makers'.

    Raises:
        UnsupportedError: the machine code cannot be disassembled.
    """
    cubin = compiled.asm.get("cubin")
    return wrong_descriptors(sass(cubin)) if isinstance(cubin, bytes) else ()


def wrong_descriptors(listing: str) -> tuple[WrongDescriptor, ...]:
    """Descriptors with a wrong high half in a SASS listing, each once, in their order."""
    return tuple(dict.fromkeys(_scan(listing)))


def _scan(listing: str) -> Iterator[WrongDescriptor]:
    held: dict[int, int] = {}
    goes_on = True  # from the item above
    for item in parse(listing, "nvidia"):
        if isinstance(item, str):  # a label
            if not goes_on:  # only jumps lead here, from where nobody looks
                held.clear()
            goes_on = True
            continue
        predicate, name, operands = item.predicate, item.mnemonic, item.operands
        if _LEAVES.match(name) and not predicate:
            goes_on = False
        if WGMMA.match(name):
            descriptor = _DESCRIPTOR.search(operands)
            if descriptor is None:
                continue
            first = int(descriptor[1])  # of the left operand, then of the right one
            from_registers = _REGISTERS_LEFT.match(operands) is not None
            for high in (first + 3,) if from_registers else (first + 1, first + 3):
                kind = held.get(high, _UNKNOWN)
                if kind in _NAMES:
                    yield WrongDescriptor(f"{name} {operands}", f"UR{high}", _NAMES[kind])
        elif predicate:  # it may have run
            before = dict(held)
            _note(name, operands, held)
            changed = [r for r in held if before.get(r, _UNKNOWN) != held[r]]
            held.update(dict.fromkeys(changed, _UNKNOWN))
        else:
            _note(name, operands, held)


def _note(name: str, operands: str, held: dict[int, int]) -> None:
    """Write down what an instruction leaves in uniform registers."""
    result, _, rest = operands.partition(",")
    to = _UNIFORM.fullmatch(result.strip())
    if to is None or _WITHOUT_RESULT.match(name):
        return
    first = int(to[1])
    sources = [s for word in rest.split(",") if not _PREDICATE.fullmatch(s := word.strip())]
    if name.startswith("ULDC"):
        low = high = _ARGUMENT
    elif name.startswith("S2UR"):
        low = high = _ADDRESS
    elif name.startswith("U"):
        low = max((_kind(s, held, 0) for s in sources), default=_UNKNOWN)
        # The high half of a sum of two registers each; of a product, all that goes in.
        half = 1 if name.startswith(("UIADD3.64", "UMOV.64")) else 0
        high = max((_kind(s, held, half) for s in sources), default=_UNKNOWN)
    else:
        low = high = _UNKNOWN
    held[first] = low
    if ".64" in name or ".WIDE" in name:
        held[first + 1] = high
    elif ".128" in name:
        held.update(dict.fromkeys(range(first + 1, first + 4), high))


def _kind(source: str, held: dict[int, int], half: int) -> int:
    if source == "URZ" or _NUMBER.fullmatch(source):
        return _CONSTANT
    register = _UNIFORM.match(source)
    return _UNKNOWN if register is None else held.get(int(register[1]) + half, _UNKNOWN)
