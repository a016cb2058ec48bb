"""From published ladders to tiles of this package, op by op: what `make_published_tables` runs.

A plan says which problems get a row, and which tile: the published numbers, and this package's own
where a publication leaves a field open. What stands in for a row where it is compiled, and where it
is held to the gate, is named here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from published_ladders import SHAPES, TABLES, PublishedTable, Step
from published_llama_cpp import CHIPS, MIXTURE_TYPES, MIXTURES, PRODUCTS, SCANS, Chips

from tilewright.ops.contract import Case
from tilewright.tiles.tile import Problem, Tile

__all__ = ["PLANS", "Plan"]

DTYPES = ("float16", "bfloat16")
Wanted = Iterator[tuple[Problem, list[Tile]]]


@dataclass(frozen=True)
class Plan:
    """How the rows of one op are made.

    Attributes:
        op: its name.
        wanted: (table) -> its problems, each with tiles of which the first legal one is taken.
        small: (problem, whether its arch is the table's own) -> what is compiled in its place: of
            the same alignments. The table's own arch is compiled for every kind of row.
        gated: (problem, tile) -> the name under which it is gated, the product, and the tile as it
            is launched there: the interpreter knows no warps, stages or archs.
        kernels: launchers, "module:function"; what is found depends on them and all that they use.
        notes: (table) -> where its rows come from.
    """

    op: str
    wanted: Callable[[PublishedTable], Wanted]
    small: Callable[[Problem, bool], Problem]
    gated: Callable[[Problem, Tile], tuple[str, Case, Tile]]
    kernels: tuple[str, ...]
    notes: Callable[[PublishedTable], tuple[str, ...]]


def _chips(table: PublishedTable) -> Chips:
    return next(chips for chips in CHIPS if chips.file == table.file)


# w4a16

_GROUPS = (32, 64, 128)
_TYPES = ("uint4", "uint4b8")
_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Buckets of M that the ladders are for; below, a kernel for few rows is the better choice.
_STAGES, _BANDS = 2, 8


def _tiles_of(step: Step, problem: Problem) -> list[Tile]:
    """The published step as tiles of the portable kernel; they differ in the loads ahead, where the
    step names none."""
    from tilewright.ops.w4a16.triton_space import TRITON_SPACE

    tile = Tile.of(
        "triton", block_m=step.block_m, block_n=step.block_n,
        block_k=min(step.block_k, problem.group), num_warps=step.warps, num_stages=_STAGES,
        group_m=_BANDS, order="xw", dequant=TRITON_SPACE.default(replace(problem, M=64)).dequant,
    )  # fmt: skip
    stages = (_STAGES, 1) if step.stages is None else (step.stages,)
    return [tile.replace(num_stages=ahead) for ahead in stages]


def _wanted_w4a16(table: PublishedTable) -> Wanted:
    for n, k in SHAPES:
        for group in _GROUPS:
            if k % group:
                continue
            for dtype in DTYPES:
                for kind in _TYPES:
                    for m in _ROWS:
                        problem = Problem(
                            "w4a16", table.archs[0], dtype, kind, "float", m, n, k, group
                        )
                        yield problem, _tiles_of(table.ladder(dtype, m, n, k, group), problem)


def _small_w4a16(problem: Problem, own: bool) -> Problem:
    small = replace(problem, M=max(16, min(problem.M, 256)), N=1024, K=1024)
    # Of a sister what takes the most registers stands for both kinds.
    return small if own else replace(small, weight_type="uint4")


def _gated_w4a16(problem: Problem, tile: Tile) -> tuple[str, Case, Tile]:
    """Of the groups that a tile is published for the smallest comes first, and counts: the most
    scales a row, and zero points beside them."""
    names = ("block_m", "block_n", "block_k", "dequant", "order")
    numbers = "-".join(str(tile.as_dict()[name]) for name in names)
    dtype, group = problem.act_dtype, problem.group
    return f"gate {numbers}-{dtype}", Case("w4a16", "uint4", dtype, 17, 40, 2 * group, group), tile


# mmq: the integer path, which is what llama.cpp multiplies by

_MMQ_ROWS = (32, 64, 256, 1024, 4096)
# Those between lie near one of them, 9 to 16 rows near 32; up to 8 rows nothing is published.


def _wanted_mmq(table: PublishedTable) -> Wanted:
    from tilewright.ops.mmq.spec import SPEC

    chips = _chips(table)
    for kind in SPEC.weight_types:
        for n, k in PRODUCTS:
            for dtype in DTYPES:
                for m in _MMQ_ROWS:
                    problem = Problem("mmq", table.archs[0], dtype, kind, "int8", m, n, k, 0)
                    yield problem, _mmq_tiles(chips, problem)


def _mmq_tiles(chips: Chips, problem: Problem) -> list[Tile]:
    """The step in whole: J, I and waves are block_m, block_n and num_warps. Loads ahead are this
    package's default for the family: 2 steps on CDNA and 1 on RDNA; or 1 where 2 would spill."""
    step = chips.step(problem.M)
    tile = Tile.of(
        "int8", block_m=step.rows, block_n=step.block_n, num_warps=step.warps, group_m=_BANDS,
        num_stages=2, schedule="stream-k" if chips.stream_k else "data-parallel", split_k=1,
        units=0,
    )  # fmt: skip
    stages = (1,) if problem.arch.startswith("gfx1") else (2, 1)
    return [tile.replace(num_stages=ahead) for ahead in stages]


def _small_mmq(problem: Problem, own: bool) -> Problem:
    small = replace(problem, M=max(32, min(problem.M, 256)), N=1024, K=1024)
    return small if own else replace(small, act_dtype="float16")


def _gated_mmq(problem: Problem, tile: Tile) -> tuple[str, Case, Tile]:
    """A type and a tile once, in float16 or bfloat16: x is rounded to 8 bits before all else."""
    from tilewright.formats.blocks import BLOCK_TYPES

    kind = problem.weight_type
    k = 256 if BLOCK_TYPES[kind].block_size == 256 else 160
    dtype = DTYPES[tile.block_m == 32]
    # One unit, which the interpreter has, would share nothing out.
    launched = tile.replace(num_stages=1, units=7 if tile.schedule == "stream-k" else 0)
    name = f"gate {kind} {tile.block_m}x{tile.block_n} {tile.schedule}"
    return name, Case("mmq", kind, dtype, 33, 40, k, 0, "int8"), launched


# moe

_MOE_ROWS = (256, 512, 1024, 2048, 4096, 8192)
# Slots; 65 to 128 lie near 256, and up to 64, which are 8 tokens, nothing is published.


def _wanted_moe(table: PublishedTable) -> Wanted:
    chips = _chips(table)
    for kind in MIXTURE_TYPES:
        for n, k, experts in MIXTURES:
            for dtype in DTYPES:
                for m in _MOE_ROWS:
                    problem = Problem("moe", table.archs[0], dtype, kind, "float", m, n, k, 0)
                    step = chips.step(-(-m // experts))
                    yield problem, [
                        Tile.of(
                            "triton", block_m=step.rows, block_n=step.block_n, block_k=32,
                            num_warps=step.warps, num_stages=1, group_m=_BANDS,
                        )
                    ]  # fmt: skip


def _small_moe(problem: Problem, own: bool) -> Problem:
    small = replace(problem, M=max(256, min(problem.M, 1024)), N=512, K=1024)
    return small if own else replace(small, act_dtype="float16")


def _gated_moe(problem: Problem, tile: Tile) -> tuple[str, Case, Tile]:
    """A tile once, with one of both types."""
    narrow = tile.block_m == 32
    case = Case(
        "moe", MIXTURE_TYPES[narrow], DTYPES[narrow], 9, 33, 256, 0, experts=2, top_k=2
    )  # fmt: skip
    return f"gate {tile.block_m}x{tile.block_n}", case, tile


# ssd

_SCAN_ROWS = (256, 512, 1024, 2048, 4096, 8192)
# Tokens; from 129 on as published, fewer lie near.


def _wanted_ssd(table: PublishedTable) -> Wanted:
    from tilewright.ops.ssd.triton_space import TRITON_SPACE, with_chunk

    chunk = _chips(table).chunk
    if chunk is None:
        return
    for scan in SCANS:
        for dtype in DTYPES:
            for m in _SCAN_ROWS:
                problem = Problem(
                    "ssd", table.archs[0], dtype, f"p{scan.channels}", "float", m,
                    scan.heads * scan.channels, scan.state, scan.heads // scan.groups,
                )  # fmt: skip
                yield problem, [with_chunk(TRITON_SPACE.default(problem), problem, chunk)]


def _small_ssd(problem: Problem, own: bool) -> Problem:
    heads = 2 * problem.group
    return replace(problem, M=512, N=heads * int(problem.weight_type.removeprefix("p")))


def _gated_ssd(problem: Problem, tile: Tile) -> tuple[str, Case, Tile]:
    kind, dtype = problem.weight_type, problem.act_dtype
    n = int(kind.removeprefix("p")) * 2
    numbers = " ".join(f"{k}={v}" for k, v in tile.as_dict().items() if k[:4] != "num_")
    return f"gate {kind} {dtype} {numbers}", Case("ssd", kind, dtype, 150, n, 64, 2), tile


def _w4a16_notes(table: PublishedTable) -> tuple[str, ...]:
    return (f"tiles from {table.note}",)


def _mmq_notes(table: PublishedTable) -> tuple[str, ...]:
    return (
        f"rows of 8-bit activations; tiles from {_chips(table).note}",
        "this package's own: steps of 32 columns, where llama.cpp takes 256, loads ahead, and "
        "bands of 8 rows of tiles; nothing is published for activations as they are, nor for up "
        "to 8 rows",
        "32, 64, 256, 1024 and 4096 rows of x, and four shapes, stand for those that lie near: "
        "the tile depends on nothing else",
    )  # fmt: skip


def _moe_notes(table: PublishedTable) -> tuple[str, ...]:
    return (
        f"tiles for Qwen3-30B-A3B's 128 experts, J by the rows of an expert, from "
        f"{_chips(table).note}",
        "translated: llama.cpp's integer tiles there, this package's float ones here, of as many "
        "rows and warps; steps of 32 columns, loads ahead and bands of tiles are its own. Each "
        "tile was gated with one of both types",
        "shapes that lie near get these tiles too, whatever their number of experts",
    )  # fmt: skip


def _ssd_notes(table: PublishedTable) -> tuple[str, ...]:
    chips = _chips(table)
    if chips.chunk is None:
        return ()
    return (
        f"from {chips.chunk_note}",
        "this package's own: all of the tile but the chunk, which is its default there",
    )


_OPS = "tilewright.ops"
PLANS = (
    Plan("w4a16", _wanted_w4a16, _small_w4a16, _gated_w4a16,
         (f"{_OPS}.w4a16.triton_gemm:launch_w4a16",), _w4a16_notes),
    Plan("mmq", _wanted_mmq, _small_mmq, _gated_mmq,
         (f"{_OPS}.mmq.triton_int8:launch_int8", f"{_OPS}.mmq.triton_int8:workspace_int8"),
         _mmq_notes),
    Plan("moe", _wanted_moe, _small_moe, _gated_moe,
         (f"{_OPS}.moe.triton_gemm:launch_moe", f"{_OPS}.moe.triton_route:launch_route"),
         _moe_notes),
    Plan("ssd", _wanted_ssd, _small_ssd, _gated_ssd,
         (f"{_OPS}.ssd.triton_scan:launch_scan", f"{_OPS}.ssd.triton_scan:workspace_scan"),
         _ssd_notes),
)  # fmt: skip
"""By op, in the order in which they are made."""
assert {table.file for table in TABLES} == {chips.file for chips in CHIPS}
