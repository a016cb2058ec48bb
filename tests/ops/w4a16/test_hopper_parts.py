"""The instructions that dequantize a word on Hopper, interpreted for every code and zero point."""

from __future__ import annotations

import importlib.util
import itertools
import re

import pytest
import torch

from tilewright.formats.w4 import W4Codes
from tilewright.layout.hopper import pack_w4_hopper

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def signed(number: int) -> int:
    """A 32-bit pattern as torch's int32 holds it."""
    return number - (1 << 32) if number >= 1 << 31 else number


def pair(value: torch.Tensor) -> torch.Tensor:
    """A number of 16 bits in both halves of an int32."""
    return torch.stack([value, value], dim=-1).view(torch.int32)[..., 0]


def interpret(asm: str, operands: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the inline PTX on int32 tensors; its operands "$8" and on are given, "$0" to "$7" made.

    Arithmetic on pairs rounds once to nearest, as the chip's does: it is done in float64.
    """
    registers = dict(operands)

    def read(name: str) -> torch.Tensor:
        if name.startswith("0x"):
            return torch.tensor(signed(int(name, 16)), dtype=torch.int32)
        return registers[name]

    def floats(name: str, dtype: torch.dtype) -> torch.Tensor:
        return read(name).contiguous().unsqueeze(-1).view(dtype).double()

    for line in (part.strip() for part in asm.strip("{}\n ").split(";")):
        if not line or line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        if name == "mov.b32":
            low, high, source = re.findall(r"[$\w]+", rest)
            halves = read(source).contiguous().unsqueeze(-1).view(torch.int16)
            registers[low], registers[high] = halves[..., 0], halves[..., 1]
            continue
        to, *inputs = (part.strip() for part in rest.split(","))
        if name == "shr.u32":
            wide = read(inputs[0]).long() & 0xFFFFFFFF
            registers[to] = (wide >> int(inputs[1])).int()
        elif name == "lop3.b32":
            assert inputs.pop() == "0xEA"  # (a & b) | c
            a, b, c = (read(i) for i in inputs)
            registers[to] = (a & b) | c
        else:
            operation, dtype = re.fullmatch(r"(sub|mul|fma\.rn)\.(b?f16)x2", name).groups()
            values = [floats(i, DTYPES[dtype]) for i in inputs]
            made = {
                "sub": lambda v: v[0] - v[1],
                "mul": lambda v: v[0] * v[1],
                "fma.rn": lambda v: v[0] * v[1] + v[2],
            }[operation](values)
            registers[to] = made.to(DTYPES[dtype]).view(torch.int32)[..., 0]
    return {name: registers[name] for name in (f"${i}" for i in range(8))}


@pytest.mark.parametrize("name", DTYPES)
def test_every_code_and_zero_point_is_dequantized_with_one_rounding(name: str) -> None:
    from tilewright.ops.w4a16 import hopper_parts

    dtype = DTYPES[name]
    asm = (hopper_parts._FP16_ASM if name == "f16" else hopper_parts._BF16_ASM).value
    grid = torch.tensor(list(itertools.product(range(16), range(16), range(16))))
    q_first, q_second, z = grid.T  # codes of row r and r + 8, and the zero point of both
    # One block of 64 x 64 whose rows r and r + 8 hold q_first and q_second: word 0 has all eight.
    words = []
    for a, b in itertools.product(range(16), range(16)):
        codes = torch.full((64, 64), a, dtype=torch.uint8)
        codes[8:16] = b
        weight = W4Codes(codes.numpy(), torch.ones(64, 1).numpy(), None, 64, None, torch.float16)
        words.append(int(pack_w4_hopper(weight, act_dtype=dtype).words[0, 0, 0, 0]))
    word = torch.tensor(words, dtype=torch.int32)[q_first * 16 + q_second]
    first, second = torch.tensor([0.0123, 1.7]).to(dtype)
    odd = -(64.0 + z) if name == "f16" else 128.0 + z
    constant = torch.tensor(1 / 16 if name == "f16" else 128.0).to(dtype)
    made = interpret(
        asm,
        {
            "$8": word,
            "$9": pair(first.expand(len(z))),
            "$10": pair(((1024.0 if name == "f16" else 128.0) + z).to(dtype)),
            "$11": pair(second.expand(len(z))),
            "$12": pair(odd.to(dtype)),
            "$13": pair(constant.expand(len(z))),
        },
    )
    # Outputs are (k1) pairs of the registers p = r8 + 2 kh: rows r, r + 8, r, r + 8.
    for index, (codes, scale) in enumerate([(q_first, first), (q_second, second)] * 2):
        expected = ((codes - z).double() * scale.double()).to(dtype)
        for half in range(2):
            got = made[f"${2 * index + half}"].contiguous().view(dtype)
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_each_code_of_a_word_goes_to_its_own_place() -> None:
    """Eight different codes: the fields of a word in the order (k1, r8, kh) of the outputs."""
    from tilewright.ops.w4a16 import hopper_parts

    codes = torch.zeros(64, 64, dtype=torch.uint8)
    places = list(itertools.product(range(2), range(2), range(2)))  # kh, r8, k1
    for value, (kh, r8, k1) in enumerate(places, start=1):
        codes[8 * r8, 8 * kh + k1] = value
    weight = W4Codes(codes.numpy(), torch.ones(64, 1).numpy(), None, 64, None, torch.float16)
    word = pack_w4_hopper(weight, act_dtype=torch.float16).words[0, 0, 0, :1]
    half = torch.tensor([1.0, 1024.0, -64.0, 1 / 16], dtype=torch.float16)
    one, even, odd, sixteenth = (pair(v[None]) for v in half)
    made = interpret(
        hopper_parts._FP16_ASM.value,
        {"$8": word, "$9": one, "$10": even, "$11": one, "$12": odd, "$13": sixteenth},
    )
    got = [made[f"${i}"].contiguous().view(torch.float16).item() for i in range(8)]
    assert got == list(range(1, 9))
