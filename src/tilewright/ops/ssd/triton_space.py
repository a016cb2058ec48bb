"""The tile space of the SSD's Triton kernels: the plan, the chunk, and the blocks of its kernels.

"five", "fused" (`triton_states`, `triton_output`)
    Chunks of `chunk` tokens, whose outputs are made `block` tokens x `block_p` channels at a time,
    for `heads` heads of one group by one program; states in pieces of block_p x `block_n`.

"persistent" (`triton_walk`)
    Chunks of `chunk` tokens x block_p channels; a sequence in `segments` runs of chunks.

"hopper" (`hopper_walk`)
    The same on sm_90, in chunks of 64 tokens x 64 channels, with TMA and warps of three kinds.

Loads `num_stages` - 1 steps ahead, `num_warps` warps a program. Rules and defaults follow what the
compiler showed on sm_90, gfx90a, gfx942 and gfx1151, and on sm_90 what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tilewright.errors import TileError
from tilewright.ops.cross import warp_size
from tilewright.ops.space import Rule, TileSpace
from tilewright.ops.ssd.triton_planted import PLANTED
from tilewright.ops.w4a16.triton_space import smem_limit_bytes
from tilewright.tiles.tile import Problem, Tile

__all__ = ["CHUNKS", "TRITON_SPACE", "smem_bytes", "with_chunk"]

CHUNKS = (16, 32, 64, 128, 192, 256, 512)
"""Tokens a chunk may have."""

_BLOCKS = (16, 32, 64, 128)
_SEGMENTS = (1, 2, 3, 4, 8, 16)
_WARPS_OF_STATES = 4
_WGMMA = 64  # rows that it multiplies at once
_STATE_AHEAD = 64  # numbers of an entering state a thread reads beside loads ahead: 128 spilled


def _power(n: int) -> int:
    """The smallest power of two from 16 on that holds n."""
    return max(16, 1 << (n - 1).bit_length())


def _head_dim(problem: Problem) -> int:
    return int(problem.weight_type.removeprefix("p"))


def _itemsize(problem: Problem) -> int:
    return 4 if problem.act_dtype == "float32" else 2


def _is_walk(tile: Tile) -> bool:
    return bool(tile.algorithm == "persistent")


def _is_hopper(tile: Tile) -> bool:
    return bool(tile.algorithm == "hopper")


def _is_blocked(tile: Tile) -> bool:
    return not (_is_walk(tile) or _is_hopper(tile))


def smem_bytes(tile: Tile, problem: Problem) -> int:
    """An upper bound of the shared memory that the largest kernel of a tile allots."""
    size, n, ahead = _itemsize(problem), _power(problem.K), max(1, tile.num_stages)
    if _is_hopper(tile):
        # x, B and C of each chunk ahead; two M and two y, vectors, barriers; a short y on its way
        q = tile.chunk
        return int(ahead * (2 * (q * q + 2 * q * n) + 8 * q) + 8 * q * q + 16 * q + 4096)
    p, q = tile.block_p, tile.chunk
    if _is_walk(tile):
        loads = ahead * (2 * q * n + q * p) * size + 24 * q * ahead
        return int(loads + (p * n + q * q + 2 * p * q) * size)
    q = tile.block
    states = ahead * q * (p + tile.block_n) * size + (p * q + p * tile.block_n) * 4
    whole = tile.algorithm == "fused" and tile.chunk == q
    each = p * n + q * p if whole else q * p + q * (n if tile.algorithm == "fused" else q)
    output = (
        (2 if whole else 1) * q * n + p * n + ahead * each + q * q + q * p
    ) * size + 16 * q * ahead
    return int(max(states, output))


def _whole_blocks(tile: Tile, problem: Problem) -> bool:
    return not _is_blocked(tile) or bool(tile.chunk % tile.block == 0)


def _walks_blocks(tile: Tile, problem: Problem) -> bool:
    return not _is_walk(tile) or tile.chunk in _BLOCKS


def _fits_head(tile: Tile, problem: Problem) -> bool:
    return _is_hopper(tile) or bool(tile.block_p <= _power(_head_dim(problem)))


def _fits_state(tile: Tile, problem: Problem) -> bool:
    return not _is_blocked(tile) or bool(tile.block_n <= _power(problem.K))


def _one_group(tile: Tile, problem: Problem) -> bool:
    return not _is_blocked(tile) or bool(problem.group % tile.heads == 0)


def _fits_shared_memory(tile: Tile, problem: Problem) -> bool:
    limit = smem_limit_bytes(problem.arch)
    return limit is None or smem_bytes(tile, problem) <= limit


def _has_hopper(tile: Tile, problem: Problem) -> bool:
    half = problem.act_dtype != "float32"
    return not _is_hopper(tile) or (problem.arch == "sm_90" and half and problem.K in (64, 128))


def _two_heads(tile: Tile, problem: Problem) -> bool:
    if tile.algorithm != "fused" or tile.heads > 1:
        return True
    has_wgmma = problem.arch == "sm_90" and problem.act_dtype != "float32"
    return not has_wgmma or bool(tile.block < _WGMMA)


def _fits_registers(tile: Tile, problem: Problem) -> bool:
    if _is_hopper(tile):
        return True
    lanes = warp_size(problem.arch)
    threads = tile.num_warps * lanes
    half = problem.act_dtype != "float32"
    most = 64 if problem.arch.startswith("gfx1") else 128
    if not half:
        most = 2 if problem.arch.startswith("gfx1") else 64
    n, p = _power(problem.K), tile.block_p
    if _is_walk(tile):
        return bool(p * n + p * tile.chunk + tile.chunk**2 <= most * threads)
    of_states = most // 2 if half else 16
    states = p * tile.block_n <= of_states * _WARPS_OF_STATES * lanes
    ahead = not half or tile.num_stages == 1 or p * n <= _STATE_AHEAD * threads
    return bool(states and ahead and tile.block * (tile.block + p) <= most * threads)


RULES = (
    Rule("whole blocks", "a chunk is whole blocks of tokens", _whole_blocks),
    Rule(
        "a chunk at once",
        "a program that walks takes a chunk at once, and tl.arange takes only powers of two",
        _walks_blocks,
    ),
    Rule("head dimension", "channels beyond the head's are computed for nothing", _fits_head),
    Rule("state dimension", "so are numbers beyond the state's", _fits_state),
    Rule(
        "heads of one group",
        "the heads of a program share B and C: their number divides the group's",
        _one_group,
    ),
    Rule(
        "Hopper",
        "TMA and wgmma of sm_90 take float16 and bfloat16, and a state of 64 or 128 numbers",
        _has_hopper,
    ),
    Rule(
        "one head",
        "of one head a program, ptxas 12.8 takes an argument of the kernel or a special register "
        "for the address of wgmma's operands: wrong rows, or reads outside of shared memory. "
        "wgmma multiplies no blocks of 32 tokens",
        _two_heads,
    ),
    Rule(
        "shared memory",
        "operands and the loads ahead must fit what one program may allot",
        _fits_shared_memory,
    ),
    Rule(
        "registers",
        "sums that are alive together must fit a thread's registers: 128 numbers, 64 on RDNA; in "
        "float32, where operands are multiplied from registers, 64 and 2. Beside loads ahead, a "
        "thread reads 64 numbers of the entering state",
        _fits_registers,
    ),
)


def _output(problem: Problem, algorithm: str, chunk: int, block: int, heads: int, num_warps: int,
            num_stages: int, block_p: int = 64, block_n: int = 128) -> Tile:  # fmt: skip
    group = problem.group
    while group % heads:
        heads //= 2
    return Tile.of(
        algorithm, chunk=chunk, block=block, heads=heads, num_warps=num_warps,
        num_stages=num_stages, block_p=min(block_p, _power(_head_dim(problem))),
        block_n=min(block_n, _power(problem.K)),
    )  # fmt: skip


def _choices(problem: Problem) -> Iterator[Tile]:
    """Tiles for `problem`, the best first; one of them at least obeys the rules."""
    amd = problem.arch.startswith("gfx")
    if problem.act_dtype != "float32":
        yield Tile.of("hopper", chunk=64, segments=1, num_stages=4)
        if amd:
            yield _output(problem, "five", 128, 64, 1, 4, 1, block_n=64)
        else:
            yield _output(problem, "fused", 64, 64, 8, 4, 3)
            yield _output(problem, "fused", 64, 64, 8, 4, 2)
            yield _output(problem, "fused", 64, 64, 8, 8, 2)
            yield _output(problem, "fused", 64, 64, 8, 8, 1)
            yield _output(problem, "fused", 64, 32, 1, 4, 2)
        yield _output(problem, "five", 128, 64, 1, 4, 1, block_p=64, block_n=64)
    for block, p in ((32, 32), (16, 16)):
        yield _output(problem, "five", 128, block, 1, 4, 1, block_p=p, block_n=max(32, p))
    yield _output(problem, "five", 128, 16, 1, 8, 1, block_p=16, block_n=16)


def _legal(tile: Tile, problem: Problem) -> bool:
    return all(rule.holds(tile, problem) for rule in RULES)


def _default(problem: Problem) -> Tile:
    return next(tile for tile in _choices(problem) if _legal(tile, problem))


def with_chunk(tile: Tile, problem: Problem, chunk: int) -> Tile:
    """The tile with another chunk, or the nearest of its kind that obeys the rules.

    Raises:
        TileError: no tile with that chunk does.
    """
    if not _is_blocked(tile):
        changed = tile.replace(chunk=chunk)
        if chunk in TRITON_SPACE.fields[tile.algorithm]["chunk"] and _legal(changed, problem):
            return changed
        tile = next(t for t in _choices(problem) if _is_blocked(t))
    for given in (tile, *(t for t in _choices(problem) if _is_blocked(t))):
        for block in (given.block, *reversed(_BLOCKS)):
            changed = given.replace(chunk=chunk, block=block)
            if block <= given.block and _legal(changed, problem):
                return changed
    raise TileError(f"ssd: no tile with chunk={chunk} obeys the rules for {problem}")


def _extents(tile: Tile) -> Mapping[str, tuple[int, ...]]:
    n = tile.block_n if _is_blocked(tile) else 32
    return {"M": (tile.chunk,), "N": (tile.as_dict().get("block_p", 64),), "K": (n,)}


_SHARED = {"chunk": CHUNKS, "block_p": _BLOCKS, "num_warps": (4, 8), "num_stages": (1, 2, 3)}
_OUTPUT = {**_SHARED, "block": _BLOCKS, "block_n": (16, 32, 64, 128, 256),
           "heads": (1, 2, 4, 8, 16)}  # fmt: skip


TRITON_SPACE = TileSpace(
    name="ssd/triton",
    fields={
        "five": _OUTPUT,
        "fused": _OUTPUT,
        "persistent": {**_SHARED, "segments": _SEGMENTS},
        "hopper": {"chunk": (64,), "segments": _SEGMENTS, "num_stages": (2, 3, 4)},
    },
    rules=RULES,
    default=_default,
    extents=_extents,
    planted=PLANTED,
)
"""The tiles of ssd for every GPU and the interpreter."""
