"""What the portable kernels of w4a16 are launched with where no table says it.

Up to 32 rows "skinny", with enough programs to keep a memory busy. Above, for sm_90 the best of
what was measured on one H200; for AMD's chips the ladders that are published with vLLM's kernels,
where they are legal for these; small tiles for every other chip. float16 and bfloat16 differ: as
published, float16 does without loads ahead, and bfloat16 loses 16 % without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.device import INTERPRETER
from tilewright.tiles.tile import Problem, Tile

__all__ = ["LEAST_DOT", "choices", "has_asm"]

LEAST_DOT = 16
"""Rows of a "skinny" tile from which on matrix units multiply."""

# Programs from which on more shares of K did not pay on an H200.
_ENOUGH_SUMS = 1024
_ENOUGH_DOTS = 384
_ENOUGH_TILES = 100  # that keep most of an H200's 132 multiprocessors busy
# (block_m, block_n, block_k, num_warps, num_stages) for words of the order "k32".
_AHEAD = ((256, 128, 64, 8, 4), (256, 64, 32, 4, 4))
_HOPPER = (
    (256, 64, 64, 4, 3), (128, 128, 128, 8, 3), (64, 128, 128, 8, 4),
    (128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (32, 64, 64, 4, 4),
    (256, 128, 32, 8, 4), (128, 128, 32, 8, 4), (64, 64, 32, 4, 4), (32, 64, 32, 4, 4),
)  # fmt: skip
_Step = tuple[int, int, int, int]  # block_m, block_n, block_k, num_warps


def has_asm(problem: Problem) -> bool:
    """Whether the chip multiplies pairs of numbers of the activations' dtype.

    The interpreter counts: it multiplies as if it did.
    """
    arch = problem.arch
    if problem.act_dtype == "bfloat16":
        return arch == INTERPRETER or (arch.startswith("sm_") and int(arch[3:]) >= 90)
    return problem.act_dtype == "float16"


def choices(problem: Problem) -> Iterator[Tile]:
    """Tiles for `problem`, the best first; one of them at least obeys the rules of the space."""
    whole = problem.group in (-1, problem.K)
    steps = [k for k in (128, 64, 32, 16) if whole or problem.group % k == 0]
    arch, half = problem.arch, problem.act_dtype != "float32"
    if problem.M <= 32:
        yield _skinny(problem, steps)
    if arch == "sm_90" and half:
        yield _hopper(problem, steps)
    gpu = arch.startswith(("sm_", "gfx"))
    dequant = "scalar" if not half else "asm" if gpu and has_asm(problem) else "packed"
    order = "wx" if arch.startswith("sm_") else "xw"
    stages = 1 if arch.startswith("gfx") and problem.act_dtype == "float16" else 2

    def tile(step: _Step, num_stages: int) -> Tile:
        block_m, block_n, most_k, num_warps = step
        return Tile.of(
            "triton", block_m=block_m, block_n=block_n,
            block_k=next(k for k in steps if k <= most_k), num_warps=num_warps,
            num_stages=num_stages, group_m=8, order=order, dequant=dequant,
        )  # fmt: skip

    if arch.startswith("gfx") and half:
        step = _published(problem)
        yield tile(step, stages)
        yield tile(step, 1)
    yield tile((64, 64, 32, 4), stages)


def _skinny(problem: Problem, steps: Sequence[int]) -> Tile:
    nvidia = problem.arch.startswith("sm_")
    dots = problem.M > (1 if nvidia else 2)
    block_m = next(m for m in (16, 32) if problem.M <= m) if dots else max(1, problem.M)
    wide = nvidia and problem.act_dtype != "float32"
    block_k = next(k for k in steps if k <= (128 if wide or not dots else 32))
    tiles, split = -(-problem.N // 64), 1
    enough = _ENOUGH_DOTS if dots else _ENOUGH_SUMS
    while split < 16 and split * tiles < enough and 4 * split * block_k <= problem.K:
        split *= 2
    return Tile.of(
        "skinny", block_m=block_m, block_n=64, block_k=block_k, split_k=split, num_warps=4,
        num_stages=(4 if wide and block_m == 16 else 3) if nvidia else 1 if dots else 2,
    )  # fmt: skip


def _hopper(problem: Problem, steps: Sequence[int]) -> Tile:
    """The largest tile that is not mostly padding, and of which there are enough."""

    def suits(block_m: int, block_n: int) -> bool:
        tiles = -(-problem.M // block_m) * -(-problem.N // block_n)
        few = block_m <= 64 and block_n == 64
        return block_m < max(2 * problem.M, 33) and (few or tiles >= _ENOUGH_TILES)

    ahead = [t for t in _AHEAD if t[2] in steps][:1]
    ahead = [t for t in ahead if problem.K % t[2] == 0]
    step = next(t for t in (*ahead, *_HOPPER) if t[2] in steps and suits(*t[:2]))
    block_m, block_n, block_k, num_warps, num_stages = step
    return Tile.of(
        "triton", block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps,
        num_stages=num_stages, group_m=4, order="ahead" if step in ahead else "wx", dequant="asm",
    )  # fmt: skip


def _published(problem: Problem) -> _Step:
    """The step of a published ladder for more than 32 rows, by the chip's family."""
    m, n, k = problem.M, problem.N, problem.K
    tall = k >= 2 * n
    if problem.arch.startswith("gfx115"):
        if problem.act_dtype == "float16" and m > 128:
            return _gfx115_float16(m, n, k)
        if m <= 64:
            return 64, 64, 32, 4
        if m <= 128:
            return (64, 16, 64, 1) if tall else (64, 64 if n > k else 32, 64, 4)
        if m <= 1024:
            return (64, 64, 64, 4) if tall else (128, 64, 64, 8) if n >= 4 * k else (64, 128, 32, 4)
        return (128, 512, 32, 16) if tall else (128, 64, 64, 8)
    if problem.arch.startswith("gfx12"):
        if m <= 64:
            return (64, 32, 128, 8) if tall else (64, 32, 64, 8) if n > k else (32, 64, 128, 4)
        if m <= 128:
            return (64, 16, 64, 1) if tall else (64, 128 if n >= 2 * k else 64, 64, 8)
        if tall:
            return 128, 64, 64, 8
        if m <= 512:
            return (128, 128, 64, 8) if n >= 4 * k else (64, 128, 64, 8)
        return (256, 64, 64, 8) if n >= 4 * k else (128, 128, 32, 8)
    return (64, 64, 32, 4) if m <= 64 else (128, 128, 32, 4)


def _gfx115_float16(m: int, n: int, k: int) -> _Step:
    if m <= 256:
        step = 128, 128, 32, 8
    else:
        step = (64 if m >= 2048 and n <= 2048 and k >= 4096 else 128), 256, 32, 8
    return (step[0], 32, *step[2:]) if n <= 1024 and m <= 512 else step
