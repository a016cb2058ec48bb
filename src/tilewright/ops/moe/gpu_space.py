"""The tile space of moe on GPUs: sorted products on matrix units, and few slots without sorting.

    "triton"  `triton_gemm`: block_m slots of one expert at a time, block_n rows of its weight.
    "hopper"  `hopper_gemm`: the same on sm_90 in Gluon, GGUF types; rows of x are gathered first.
    "slots"   `triton_slots`: one slot at a time, block_n rows, num_warps along K; GGUF types.
    "gemv"    `triton_gemv`: one slot at a time, block_n rows; every type, and float32.

Defaults on sm_90 follow what one H200 measured of Q4_K, 128 experts of 768 x 2048: what "slots"
takes grows with the slots, what "hopper" takes with the experts that have any, and at one slot and
a half an expert they are as fast. Elsewhere nothing was timed.

A problem's M counts the slots of all experts. Which height a tile should have depends on how many
an expert has of them, so `default_tile` takes the number of experts; a table's row was tuned with
the experts of its model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tilewright.layout.blocks import BLOCK_FORMS
from tilewright.ops.cross import warp_size
from tilewright.ops.moe.gpu_planted import PLANTED
from tilewright.ops.space import Rule, TileSpace
from tilewright.ops.w4a16.triton_space import smem_limit_bytes
from tilewright.tiles.tile import Problem, Tile

__all__ = ["MOE_SPACE", "default_tile", "smem_bytes"]

_GEMV_SLOTS = 65535
_FEW = 16  # slots that are few for any number of experts
_USUAL_EXPERTS = 128  # as `moe.spec` gives a problem of a table
_APART = 16  # words: where `tilewright.layout.experts` begins an expert
_HOPPER_BYTES = 227 * 1024  # of shared memory that one program may allot


def _itemsize(problem: Problem) -> int:
    return 4 if problem.act_dtype == "float32" else 2


def _bits(weight_type: str) -> tuple[int, int, int]:
    """Bits of the low plane, of both planes as they are loaded, and columns of a scale."""
    form = BLOCK_FORMS.get(weight_type)
    if form is None:
        return (32, 32, 32) if weight_type == "dense" else (4, 4, 32)
    low = form.low.bits
    return low, low * (2 if form.high is not None else 1), form.sub


def smem_bytes(tile: Tile, problem: Problem) -> int:
    """An upper bound of the shared memory that a tile makes the compiler allot. "triton": the
    weights of a step once, x and the words and scales of the steps ahead; or the outputs on their
    way. "hopper": the ring of x, words and numbers, and barriers."""
    low, bits, sub = _bits(problem.weight_type)
    size = _itemsize(problem)
    if tile.algorithm == "hopper":
        words = tile.block_n * 16 * (low + BLOCK_FORMS[problem.weight_type].high_bits)
        numbers = tile.block_n * (128 // sub) * 8
        return int(tile.num_stages * (tile.block_m * 256 + words + numbers) + 1024)
    w = tile.block_n * tile.block_k * size
    x = tile.block_m * tile.block_k * size
    words = tile.block_n * tile.block_k * bits // 8
    scales = 8 * tile.block_n * max(1, tile.block_k // sub)
    loop = w + tile.num_stages * x + (tile.num_stages - 1) * (words + scales)
    return int(max(loop, 4 * tile.block_m * tile.block_n))


def _rows_of_two(weight_type: str) -> int:
    """Rows of x up to which two programs of 128 rows of the weight have registers for their sums,
    next to all that a weight is made of."""
    form = BLOCK_FORMS.get(weight_type)
    if form is None or (form.minimum_at is not None and form.sub < 32):
        return 0
    many = form.high_bits == 2 or (form.high_bits == 1 and form.minimum_at is not None)
    return 32 if many else 64


def _sorted(tile: Tile) -> bool:
    return bool(tile.algorithm == "triton")


def _fits_shared_memory(tile: Tile, problem: Problem) -> bool:
    if tile.algorithm == "hopper":
        return tile.programs * smem_bytes(tile, problem) <= _HOPPER_BYTES
    limit = smem_limit_bytes(problem.arch)
    return not _sorted(tile) or limit is None or smem_bytes(tile, problem) <= limit


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    if tile.algorithm == "slots":
        form = BLOCK_FORMS.get(problem.weight_type)
        small = form is None or (form.low.bits == 4 and form.high is None)
        return bool(tile.block_n <= 32 or small)
    if tile.algorithm == "hopper":
        if tile.programs == 1:
            return True  # 168 registers for each thread that multiplies, or more
        # 104 of them, or 128.
        return bool(tile.block_n == 64 or tile.block_m <= _rows_of_two(problem.weight_type))
    threads = tile.num_warps * warp_size(problem.arch)
    weights = tile.block_n * tile.block_k // threads
    if tile.algorithm == "gemv":
        return bool(4 <= weights <= 64)
    sums = tile.block_m * tile.block_n // threads
    x = tile.block_m * tile.block_k // threads
    rdna = problem.arch.startswith("gfx1")
    if problem.act_dtype == "float32":
        return bool(sums <= (16 if rdna else 32) and weights <= 16 and x <= 16)
    return bool(sums <= 64 and weights <= 64 and x <= (32 if rdna else 64))


def _loads_ahead(tile: Tile, problem: Problem) -> bool:
    return bool(not problem.arch.startswith("gfx1") or tile.num_stages == 1)


def _on_hopper(tile: Tile, problem: Problem) -> bool:
    if tile.algorithm != "hopper":
        return True
    form = BLOCK_FORMS.get(problem.weight_type)
    return bool(
        form is not None and problem.arch == "sm_90" and problem.act_dtype != "float32"
        and (form.high_bits != 1 or problem.K % 128 == 0)
    )  # fmt: skip


def _without_gaps(tile: Tile, problem: Problem) -> bool:
    form = BLOCK_FORMS.get(problem.weight_type)
    if tile.algorithm != "hopper" or form is None:
        return True
    return all(
        problem.N * (problem.K * bits // 32) % _APART == 0
        for bits in (form.low.bits, form.high_bits)
    )


def _whole_groups(tile: Tile, problem: Problem) -> bool:
    group = problem.group
    if tile.algorithm in ("hopper", "slots"):
        return True
    return group in (0, -1, problem.K) or not (group % tile.block_k and tile.block_k % group)


def _few_slots(tile: Tile, problem: Problem) -> bool:
    return bool(tile.algorithm not in ("gemv", "slots") or problem.M <= _GEMV_SLOTS)


def _eight_columns(tile: Tile, problem: Problem) -> bool:
    return bool(
        tile.algorithm != "slots"
        or (
            problem.weight_type in BLOCK_FORMS and problem.act_dtype != "float32"
            and not problem.arch.startswith("gfx")
        )
    )  # fmt: skip


RULES = (
    Rule(
        "on Hopper",
        "hopper is made of sm_90's instructions for float16 and bfloat16, and reads GGUF words by "
        "TMA, whose rows of a plane of one bit are 16 bytes from K = 128 on",
        _on_hopper,
    ),
    Rule(
        "experts without gaps",
        "hopper reads the words of all experts as one matrix: those of one expert are a multiple "
        "of 64 bytes, at which the next begins",
        _without_gaps,
    ),
    Rule(
        "eight columns",
        "slots gives each sub-block of GGUF types a column of matrix units, which multiply 16-bit "
        "numbers by eight columns on NVIDIA's chips",
        _eight_columns,
    ),
    Rule(
        "whole groups",
        "a step lies within one group of 4-bit codes, or takes whole groups: one of block_k and "
        "the group size divides the other, unless a row is one group",
        _whole_groups,
    ),
    Rule(
        "few slots",
        "gemv and slots have a program for every slot in a dimension of the grid that ends at "
        "65535, and read an expert's weight once for each of its slots",
        _few_slots,
    ),
    Rule(
        "shared memory",
        "the tiles of x and w and the loads ahead must fit what one program may allot",
        _fits_shared_memory,
    ),
    Rule(
        "registers",
        "what a thread holds of sums, of weights in the making and of x must fit its registers. In "
        "triton 64 numbers of each where weights have 16 bits, on RDNA 32 of x; 32, 16 and 16 in "
        "float32, on RDNA 16 sums. In gemv 4 to 64 weights; in slots 64 rows of types of one plane "
        "of 4 bits, 32 of others; in hopper two programs have 64 rows of the weight each, or 128 "
        "and at most 64 rows of x, fewer for types that take more to make",
        _fits_registers,
    ),
    Rule(
        "loads ahead",
        "on RDNA loads ahead stay in registers, and types with many scales spill: num_stages is 1",
        _loads_ahead,
    ),
)


def _tile(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Tile:
    return Tile.of(
        "triton", block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps,
        num_stages=num_stages, group_m=8,
    )  # fmt: skip


def _gemv(block_n: int, block_k: int, num_warps: int, num_stages: int) -> Tile:
    return Tile.of(
        "gemv", block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages
    )


def _slots(block_n: int, num_warps: int) -> Tile:
    return Tile.of("slots", block_n=block_n, num_warps=num_warps)


def _hopper(block_m: int) -> Iterator[Tile]:
    """Two programs on a multiprocessor where sums leave them registers enough."""
    tile = Tile.of("hopper", block_n=128, block_m=block_m, num_stages=4, programs=1)
    yield tile.replace(programs=2)
    yield tile.replace(programs=2, num_stages=3)
    yield tile.replace(programs=2, num_stages=2)
    yield tile
    yield tile.replace(num_stages=3)
    yield tile.replace(num_stages=2)


def _has_small_products(arch: str) -> bool:
    """Whether matrix units take 16 columns of K and 8 of the result at once: from Ampere on."""
    return arch.startswith("sm_") and int(arch[3:]) >= 80


def _choices(problem: Problem, experts: int, stacked: bool) -> Iterator[Tile]:
    """Tiles for `problem`, the best first; one of them at least obeys the rules."""
    half, amd = problem.act_dtype != "float32", problem.arch.startswith("gfx")
    hopper = stacked and problem.arch == "sm_90"
    few = 2 * problem.M < 3 * experts if hopper else problem.M <= 2 * experts
    if (few or problem.M <= _FEW) and _has_small_products(problem.arch):
        yield _slots(16 if problem.M <= _FEW else 32, 4)
    if problem.M <= _FEW:
        if problem.K >= 512:
            yield _gemv(4, 512, 2, 1)
        for block_k in (256, 128, 64, 32):
            yield _gemv(8, block_k, 4, 1)
    rows = -(-problem.M // min(experts, problem.M))  # of an expert, if all have as many
    heights = [m for m in (16, 32, 64) if m >= rows * 1.5] or [128]
    if hopper:  # two programs of 64 rows are faster than one of 128
        yield from _hopper(64 if rows <= 64 < heights[0] else heights[0])
    if amd or not half:
        yield _tile(min(heights[0], 64), 64, 32, 4, 1)
        yield _tile(min(heights[0], 32), 32, 32, 4, 1)
    else:
        for block_m in heights:
            yield _tile(block_m, 64, 64, 4, 3)
        yield _tile(heights[0], 64, 32, 4, 2)
    yield _tile(16, 32, 32, 4, 1)


def default_tile(problem: Problem, experts: int, stacked: bool = True) -> Tile:
    """The tile of a problem that no table has.

    Args:
        problem: the product of all slots.
        experts: how many there are.
        stacked: whether TMA can read the words of all experts as one matrix: "hopper" needs it.
    """
    return next(
        tile
        for tile in _choices(problem, experts, stacked)
        if all(rule.holds(tile, problem) for rule in RULES)
    )


def _default(problem: Problem) -> Tile:
    return default_tile(problem, _USUAL_EXPERTS)


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    if tile.algorithm == "hopper":
        return {"M": (tile.block_m,), "N": (tile.block_n,), "K": (256,)}
    if tile.algorithm == "slots":
        return {"M": (1,), "N": (tile.block_n,), "K": (128 * tile.num_warps, 256 * tile.num_warps)}
    rows = {"M": (tile.block_m,)} if _sorted(tile) else {"M": (1,)}
    return {**rows, "N": (tile.block_n,), "K": (tile.block_k,)}


MOE_SPACE = TileSpace(
    name="moe/triton",
    fields={
        "triton": {
            "block_m": (16, 32, 64, 128),
            "block_n": (32, 64, 128),
            "block_k": (32, 64, 128, 256),
            "num_warps": (2, 4, 8),
            "num_stages": (1, 2, 3, 4, 5),
            "group_m": (1, 4, 8),
        },
        "hopper": {
            "block_n": (64, 128),
            "block_m": (16, 32, 64, 128),
            "num_stages": (2, 3, 4, 6, 8),
            "programs": (1, 2),
        },
        "slots": {"block_n": (16, 32, 64), "num_warps": (1, 2, 4, 8)},
        "gemv": {
            "block_n": (1, 2, 4, 8, 16, 32),
            "block_k": (32, 64, 128, 256, 512, 1024, 2048),
            "num_warps": (1, 2, 4, 8),
            "num_stages": (1, 2, 3, 4),
        },
    },
    rules=RULES,
    default=_default,
    extents=_extents,
    planted=PLANTED,
)
"""The tiles of all algorithms, for every GPU and the interpreter; `gpu_spec` adds on Hopper the
planted tiles that run there alone."""
