"""AMD assembly text as the compiler writes it -> instructions and the facts a launch needs.

The text in ``kernel.asm["amdgcn"]`` is what the code object was assembled from, so its instructions
are the kernel's instructions. A line is ``mnemonic operand, operand, ... modifier modifier``; the
dual-issue form of RDNA3 puts two of them on a line, divided by ``::``.
"""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass, field

from tilewright.errors import FormatError, UnsupportedError

__all__ = [
    "EXEC",
    "M0",
    "NULL",
    "TTMP",
    "VCC",
    "Instruction",
    "KernelText",
    "Operand",
    "parse_text",
]

VCC, TTMP, M0, NULL, EXEC = 106, 108, 124, 125, 126
"""Places of the named scalar registers behind s0 .. s105; each pair's low half comes first."""

_NAMED = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1), "null": (NULL, 1),
}  # fmt: skip
_FLAGS = frozenset(
    "offen idxen glc slc dlc scc sc0 sc1 nt clamp lds gds tfe gather row_mirror row_half_mirror"
    "".split()
)
_MODIFIER = re.compile(r"(?:^|\s)([a-z_0-9]+):(\[[^\]]*\]|[a-z]+\([^)]*\)|[^\s,]+)")
_REGISTER = re.compile(r"(v|s|a|ttmp)(?:(\d+)|\[(\d+)(?::(\d+))?\])(\.[lh])?$")
_WRAPPED = re.compile(r"(neg|abs|sext|lit)\((.*)\)$")


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        kind: "v" (vector register; accumulation registers lie behind them, from 256), "s" (scalar
            register), "int" or "float" (a constant), "label", "off".
        index: first register.
        count: registers that the text names.
        value: the constant, or the label.
        negate, absolute, sign_extend: source modifiers.
        high: the high half of the register is meant ("v1.h"); None where the text names no half.
        text: as written.
    """

    kind: str
    text: str
    index: int = 0
    count: int = 1
    value: int | float | str = 0
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False
    high: bool | None = None

    @property
    def bits32(self) -> int:
        """A constant as a 32-bit operation reads it."""
        if self.kind == "float":
            return int(struct.unpack("<I", struct.pack("<f", self.value))[0])
        return int(self.value) & 0xFFFFFFFF


@dataclass(frozen=True)
class Instruction:
    """One instruction; `second` is the other half of a dual-issue pair."""

    mnemonic: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    line: int
    text: str
    second: Instruction | None = None

    def pair(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A modifier that lists a bit a source ("op_sel:[0,1]"), as long as `default` or longer."""
        text = self.modifiers.get(name)
        if text is None:
            return default
        bits = tuple(int(bit) for bit in text.strip("[]").split(","))
        return bits + default[len(bits) :]

    def refuse(self, why: str) -> UnsupportedError:
        """The error for what the emulator does not know."""
        return UnsupportedError(
            f"assembly line {self.line}: {self.mnemonic!r} in {self.text!r}: {why}; "
            "the emulator runs nothing it does not know: add it to tilewright.isa.emulate_*"
        )


@dataclass(frozen=True)
class Argument:
    """One kernel argument: where it lies in the argument block, and how large it is."""

    offset: int
    size: int
    is_pointer: bool
    hidden: bool


@dataclass(frozen=True)
class KernelText:
    """A parsed kernel.

    Attributes:
        name: of the kernel.
        arch: "gfx1151", ...
        instructions: in order.
        labels: label -> index of the instruction behind it.
        arguments: from the metadata.
        directives: the `.amdhsa_*` values.
    """

    name: str
    arch: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    arguments: tuple[Argument, ...]
    directives: dict[str, int] = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        """Lanes of a wave: 64 on gfx9, 32 where the descriptor says so."""
        return 32 if self.directives.get("wavefront_size32", 0) else 64


def parse_text(text: str) -> KernelText:
    """Parse one kernel's assembly.

    Raises:
        FormatError: the text holds no kernel, or not exactly one.
    """
    names = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE)
    arch = re.search(r'\.amdgcn_target\s+"[^"]*?(gfx[0-9a-f]+)', text)
    if len(names) != 1 or arch is None:
        raise FormatError(
            f"the assembly names {len(names)} kernels (.amdhsa_kernel) and "
            f"{'a' if arch else 'no'} target (.amdgcn_target); "
            'pass the text of one kernel: compiled.asm["amdgcn"]'
        )
    pairs = re.findall(r"^\s*\.amdhsa_(\w+)\s+(-?\d+)\s*$", text, re.MULTILINE)
    instructions, labels = _body(text, names[0])
    return KernelText(
        names[0],
        arch.group(1),
        instructions,
        labels,
        _arguments(text),
        {name: int(value) for name, value in pairs},
    )


def _body(text: str, name: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split(";", 1)[0].strip()
        if not inside:
            inside = line == f"{name}:"
            continue
        if line.startswith((".Lfunc_end", ".section", ".size")):
            break
        while match := re.match(r"([.\w$]+):\s*", line):
            labels[match.group(1)] = len(instructions)
            line = line[match.end() :]
        if line and not line.startswith("."):
            instructions.append(parse_instruction(line, number))
    return tuple(instructions), labels


def parse_instruction(line: str, number: int = 0) -> Instruction:
    """One line without comment as an instruction."""
    first, *rest = [part.strip() for part in line.split("::")]
    second = parse_instruction(rest[0], number) if rest else None
    mnemonic, _, tail = first.partition(" ")
    if mnemonic.startswith(("s_delay_alu", "s_wait", "s_sendmsg", "s_clause")):
        return Instruction(mnemonic, (), {"text": tail}, number, line)
    modifiers = dict(_MODIFIER.findall(tail))
    tail = _MODIFIER.sub("", tail)
    texts = _split(tail)
    if texts:
        *words, last = texts[:-1], texts[-1].split()
        while last and last[-1] in _FLAGS and len(last) > (1 if len(texts) == 1 else 0):
            modifiers[last.pop()] = "1"
        texts = [*words[0], " ".join(last)] if last else words[0]
    return Instruction(
        mnemonic, tuple(parse_operand(t) for t in texts), modifiers, number, line, second
    )


def _split(text: str) -> list[str]:
    """Comma-separated parts, outside brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


@functools.lru_cache(maxsize=4096)
def parse_operand(text: str) -> Operand:
    """One operand with its source modifiers."""
    inner, negate, absolute, extend = text, False, False, False
    while True:
        if match := _WRAPPED.match(inner):
            negate |= match.group(1) == "neg"
            absolute |= match.group(1) == "abs"
            extend |= match.group(1) == "sext"
            inner = match.group(2)
        elif len(inner) > 2 and inner[0] == inner[-1] == "|":
            inner, absolute = inner[1:-1], True
        elif len(inner) > 1 and inner[0] == "-" and inner[1] in "|vsatne":
            inner, negate = inner[1:], True
        else:
            break
    if inner in _NAMED:
        index, count = _NAMED[inner]
        return Operand("s", text, index, count, 0, negate, absolute, extend)
    if match := _REGISTER.match(inner):
        letter, one, low, high, half = match.groups()
        index = int(one if one is not None else low)
        count = 1 if one is not None else int(high if high is not None else low) - int(low) + 1
        index += {"a": 256, "ttmp": TTMP}.get(letter, 0)
        kind = "v" if letter in "va" else "s"
        at = None if half is None else half == ".h"
        return Operand(kind, text, index, count, 0, negate, absolute, extend, at)
    kind = "label"
    value: int | float | str = inner
    if inner == "off":
        kind = "off"
    elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", inner):
        kind, value = "int", int(inner, 0)
    elif re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?", inner):
        kind, value = "float", float(inner)
    return Operand(kind, text, value=value, negate=negate, absolute=absolute, sign_extend=extend)


def _arguments(text: str) -> tuple[Argument, ...]:
    """The arguments of the metadata, which is YAML of one fixed shape."""
    block = re.search(r"^[ -]*\.args:\n(.*?)^    \.\w+:", text, re.MULTILINE | re.DOTALL)
    if block is None:
        return ()
    found = []
    for item in re.split(r"^\s*- ", block.group(1), flags=re.MULTILINE)[1:]:
        facts = dict(re.findall(r"\.(\w+):\s*(\S+)", item))
        kind = facts.get("value_kind", "by_value")
        found.append(
            Argument(
                int(facts["offset"]),
                int(facts["size"]),
                kind in ("global_buffer", "dynamic_shared_pointer"),
                kind.startswith("hidden_"),
            )
        )
    return tuple(found)
