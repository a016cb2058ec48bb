"""Matrix instructions of the emulator against products of matrices laid out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from isa.snippets import bits, execute, lanes_of
from tilewright.errors import GateError


def matrices(m, n, k, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(-8, 9, size).astype(np.float64) for size in ((m, k), (k, n), (m, n))]


def pack(values, kind):
    """[elements, lanes] as registers."""
    if kind == "f16":
        raw = values.astype(np.float16).view(np.uint16)
    else:
        raw = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return raw[0::2].astype(np.uint32) | raw[1::2].astype(np.uint32) << 16


def place_wmma(arch, a, b, c):
    """Registers as the manuals of RDNA3 and RDNA4 draw them, and where D lies."""
    lane = np.arange(32)
    if arch == "gfx1201":
        k = 8 * (lane // 16) + np.arange(8)[:, None]
        rows = 8 * (lane // 16) + np.arange(8)[:, None]
    else:
        k = np.broadcast_to(np.arange(16)[:, None], (16, 32))
        rows = 2 * np.arange(8)[:, None] + lane // 16
    return a[lane % 16, k], b[k, lane % 16], c[rows, lane % 16], (rows, lane % 16)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("arch", ["gfx1151", "gfx1100", "gfx1201"])
def test_wmma_multiplies_matrices_as_they_lie_in_lanes(arch, kind):
    a, b, c = matrices(16, 16, 16)
    at_a, at_b, at_c, (rows, columns) = place_wmma(arch, a, b, c)
    words_a, words_b = pack(at_a, kind), pack(at_b, kind)
    n = len(words_a)
    v = {8 + i: w for i, w in enumerate(words_a)} | {16 + i: w for i, w in enumerate(words_b)}
    v |= {i: bits(row, np.float32) for i, row in enumerate(at_c)}
    text = f"v_wmma_f32_16x16x16_{kind} v[0:7], v[8:{7 + n}], v[16:{15 + n}], v[0:7]"
    wave = execute(text, arch=arch, v=v)
    found = wave.v[:8].view(np.float32)
    assert (found == (a @ b + c)[rows, columns]).all()
    wave = execute(text.replace("v[0:7]", "v[32:39]", 1).replace("v[0:7]", "0"), arch=arch, v=v)
    assert (wave.v[32:40].view(np.float32) == (a @ b)[rows, columns]).all()


def test_wmma_on_gfx11_wants_its_operands_twice():
    v = dict.fromkeys(range(24), 0) | {8: np.arange(32)}
    with pytest.raises(GateError, match=r"lanes 16 .. 31 to repeat lanes 0 .. 15"):
        execute("v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]", v=v)


MFMA = [
    ("gfx90a", "v_mfma_f32_32x32x8f16", 32, 8, "f16"),
    ("gfx942", "v_mfma_f32_32x32x8_f16", 32, 8, "f16"),
    ("gfx90a", "v_mfma_f32_32x32x8bf16_1k", 32, 8, "bf16"),
    ("gfx942", "v_mfma_f32_32x32x8_bf16", 32, 8, "bf16"),
    ("gfx90a", "v_mfma_f32_16x16x16f16", 16, 16, "f16"),
    ("gfx942", "v_mfma_f32_16x16x16_bf16", 16, 16, "bf16"),
]


@pytest.mark.parametrize(("arch", "name", "size", "k", "kind"), MFMA, ids=[m[1] for m in MFMA])
def test_mfma_multiplies_matrices_as_they_lie_in_lanes(arch, name, size, k, kind):
    a, b, c = matrices(size, size, k)
    lane = np.arange(64)
    at_k = 4 * (lane // size) + np.arange(4)[:, None]
    v = dict(enumerate(pack(a[lane % size, at_k], kind)))
    v |= {2 + n: w for n, w in enumerate(pack(b[at_k, lane % size], kind))}
    if size == 32:  # four rows of each 8 in either half of the wave
        r = np.arange(16)[:, None]
        rows = 8 * (r // 4) + 4 * (lane // 32) + r % 4
    else:
        rows = 4 * (lane // 16) + np.arange(4)[:, None]
    count = len(rows)
    v |= {256 + n: bits(row, np.float32) for n, row in enumerate(c[rows, lane % size])}
    d = f"a[0:{count - 1}]"
    wave = execute(f"{name} {d}, v[0:1], v[2:3], {d}", arch=arch, v=v)
    found = wave.v[256 : 256 + count].view(np.float32)
    assert (found == (a @ b + c)[rows, lane % size]).all()
    assert lanes_of(arch) == 64


INTEGER_UNITS = [
    ("gfx1151", "v_wmma_i32_16x16x16_iu8", 16, 16, 4),
    ("gfx1201", "v_wmma_i32_16x16x16_iu8", 16, 16, 2),
    ("gfx90a", "v_mfma_i32_32x32x8i8", 32, 8, 1),
    ("gfx942", "v_mfma_i32_16x16x32_i8", 16, 32, 2),
]


@pytest.mark.parametrize(
    ("arch", "name", "size", "k", "registers"), INTEGER_UNITS, ids=[u[0] for u in INTEGER_UNITS]
)
def test_8_bit_integers_multiply_exactly(arch, name, size, k, registers):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-128, 128, (size, k)), rng.integers(-128, 128, (k, size))
    lane = np.arange(lanes_of(arch))
    j = np.arange(4 * registers)[:, None]
    at_k = j + 0 * lane if arch == "gfx1151" else 4 * registers * (lane // size) + j

    def words(values):
        raw = values.astype(np.int8).view(np.uint8).reshape(registers, 4, -1)
        return (raw.astype(np.uint32) << (8 * np.arange(4, dtype=np.uint32)[:, None])).sum(
            1, dtype=np.uint32
        )

    v = {100 + n: w for n, w in enumerate(words(a[lane % size, at_k]))}
    v |= {110 + n: w for n, w in enumerate(words(b[at_k, lane % size]))}
    count = size * size // lanes_of(arch)
    signs = " neg_lo:[1,1,0]" if "iu8" in name else ""

    def pair(at):
        return f"v{at}" if registers == 1 else f"v[{at}:{at + registers - 1}]"

    text = f"{name} v[0:{count - 1}], {pair(100)}, {pair(110)}, 7{signs}"
    found = execute(text, arch=arch, v=v).v[:count].view(np.int32)
    r = np.arange(count)[:, None]
    rows = {
        "gfx1151": 2 * r + lane // 16,
        "gfx1201": 8 * (lane // 16) + r,
        "gfx90a": 8 * (r // 4) + 4 * (lane // 32) + r % 4,
        "gfx942": 4 * (lane // 16) + r,
    }[arch]
    assert (found == (a @ b + 7)[rows, lane % size]).all()


def test_unsigned_8_bit_integers_are_the_default_of_wmma():
    text = "v_wmma_i32_16x16x16_iu8 v[0:7], v[8:9], v[10:11], 0"
    v = {8: 0xFFFFFFFF, 9: 0xFFFFFFFF, 10: 0x01010101, 11: 0x01010101}
    assert (execute(text, arch="gfx1201", v=v).v[:8] == 16 * 255).all()
    assert (
        execute(text + " neg_lo:[1,0,0]", arch="gfx1201", v=v).v[:8].view(np.int32) == -16
    ).all()
