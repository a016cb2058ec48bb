"""What chips ask of the code around inline assembly, looked up in the text of a kernel.

LLVM sees to both rules itself, except where an instruction stands in inline assembly. CDNA: wait
states around matrix instructions (`hazards`). RDNA4: a scalar register that a vector instruction
has read may not be overwritten without a wait (`scalars_read`).
"""

from __future__ import annotations

import re

__all__ = ["hazards", "scalars_read"]

_READ_AFTER_WRITE = 2  # wait states of CDNA between a vector and a matrix instruction
_WRITE_AFTER_READ = 7  # and between a 16x16 matrix instruction and one that overwrites its addend


def _span(operand: str) -> set[int]:
    found = re.fullmatch(r"v(?:\[(\d+):(\d+)\]|(\d+))", operand)
    if found is None:
        return set()
    first, last, single = found.groups()
    return {int(single)} if single else set(range(int(first), int(last) + 1))


def hazards(text: str) -> list[str]:
    """Inline assembly too close to matrix instructions, where the compiler waits for neither."""
    listing: list[tuple[bool, str, list[str]]] = []  # inside of inline assembly, mnemonic, operands
    inside = False
    for line in text.splitlines():
        inside = "#ASMSTART" in line or (inside and "#ASMEND" not in line)
        found = re.match(r"\s*([vs]_\w+|(?:ds|buffer)_\w+)\s*([^;]*)", line)
        if found and not line.lstrip().startswith((";", ".")):
            operands = [part.split()[0] for part in found[2].split(", ") if part.strip()]
            listing.append((inside, found[1], operands))
    problems = []
    for at, (_, name, operands) in enumerate(listing):
        if not name.startswith("v_mfma"):
            continue
        out, left, right, addend = operands[:4]
        read, kept = _span(left) | _span(right), _span(addend) - _span(out)
        for nearby, limit, registers in (
            (listing[:at][::-1], _READ_AFTER_WRITE, read),
            (listing[at + 1 :], _WRITE_AFTER_READ, kept),
        ):
            waited = 0
            for in_asm, other, written in nearby:
                if waited >= limit:
                    break
                if in_asm and other.startswith("v_") and _span(written[0]) & registers:
                    problems.append(f"{name} {out} and {other} {written[0]}, {waited} apart")
                waited += 1 + (int(written[0]) if other == "s_nop" else 0)
    return problems


def scalars_read(text: str) -> list[str]:
    """Lines of inline assembly with a scalar register among their operands."""
    blocks = re.findall(r";;#ASMSTART(.*?);;#ASMEND", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.search(r"[ ,-]s(\d+|\[)", line)]
