"""Tune W4A16 on an NVIDIA Hopper GPU with the tuner, for the table that ships.

    python benchmarks/gpu/tune_w4a16.py --budget 300 --out sm_90.json

The problems are the fused products of Qwen3-8B and Llama-3-8B in groups of 128, two of them and
the products of SmolLM2-135M in groups of 32, and rows from 1 to 4096. A lookup takes a row for half
and twice as many rows of x, and for N and K within a factor of 4: those of Qwen3-4B, Qwen3-32B and
Llama-3-70B lie within. The tuner goes through a list of tiles (`SHORTLIST`), every one that the
rules allow for the problem: those that a sweep of the space has found at the top somewhere.
`tuning.py` says how; `tune_ops.py` tunes other ops.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from tuning import Job, compiled, jobs_of, settings, show, told

from tilewright.ops.w4a16.hopper_space import HOPPER_SPACE
from tilewright.report.provenance import provenance
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.tuner import Target, tune

ARCH = "sm_90"
SHAPES = {
    128: ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096)),
    32: ((24576, 4096), (4096, 12288), (960, 576), (576, 1536)),
}
"""N x K by group."""

ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)
OTHER_ROWS = (1, 16, 64, 256, 1024, 4096)
"""Of ROWS those that every dtype and group gets; `targets` says which gets all."""


def _decode(block_m: int, block_n: int, warps_k: int, unroll: int, split_k: int, x: str) -> Tile:
    return Tile.of(
        "hopper_decode", block_m=block_m, block_n=block_n, warps_n=1, warps_k=warps_k,
        unroll=unroll, split_k=split_k, x_load=x,
    )  # fmt: skip


def _prefill(
    block_n: int, block_m: int, stages: int, split_k: int, block_k: int = 64, ctas: int = 1,
    group_m: int = 4,
) -> Tile:  # fmt: skip
    return Tile.of(
        "hopper", block_n=block_n, block_m=block_m, num_stages=stages, split_k=split_k,
        block_k=block_k, ctas=ctas, group_m=group_m,
    )  # fmt: skip


SHORTLIST = (
    _decode(8, 64, 4, 2, 1, "pairs"),
    _decode(8, 32, 8, 2, 2, "vectors"),
    _decode(8, 32, 4, 2, 4, "vectors"),
    _decode(8, 32, 8, 2, 1, "vectors"),
    _decode(16, 64, 4, 2, 1, "pairs"),
    _decode(16, 32, 8, 1, 2, "vectors"),
    _decode(16, 32, 8, 1, 1, "vectors"),
    _decode(16, 32, 16, 1, 1, "vectors"),
    *(_prefill(n, m, 3, 0, 128, 2) for n in (64, 128) for m in (16, 32, 64)),
    *(_prefill(n, m, 6, 0) for n in (64, 128) for m in (32, 64)),
    _prefill(64, 128, 6, 0),
    _prefill(128, 128, 6, 0),
    _prefill(128, 128, 6, 1),
    _prefill(128, 128, 6, 2),
    _prefill(128, 128, 3, 0, 128),
    _prefill(128, 128, 3, 1, 128),
    _prefill(128, 128, 4, 0, 128),
    _prefill(128, 128, 4, 1, 128),
    _prefill(128, 256, 4, 0),
    _prefill(128, 256, 4, 1),
    _prefill(128, 256, 4, 2),
    _prefill(128, 256, 4, 1, group_m=8),
)


def jobs(kinds: list[tuple[str, int]]) -> list[Job]:
    """Every planted tile, and every tile for each dtype and group, on the first product of
    `targets` that it may run."""
    asked = [target.problem for target in targets(kinds, list(ROWS))]
    return jobs_of({problem: legal(problem) for problem in asked})


def legal(problem: Problem) -> tuple[Tile, ...]:
    """The tiles of the list that the rules allow for a problem."""
    return tuple(tile for tile in SHORTLIST if HOPPER_SPACE.is_legal(tile, problem))


def targets(kinds: list[tuple[str, int]], rows: list[int]) -> list[Target]:
    """The shapes of each dtype and group; the first gets twice the share and all rows, the others
    `OTHER_ROWS`, in turn, so that a budget that ends early leaves something of each."""
    first, *others = kinds
    found = [_target(first, shape, m, 2.0) for m in rows for shape in SHAPES[first[1]]]
    for m in [m for m in rows if m in OTHER_ROWS]:
        found += [_target(kind, shape, m, 1.0) for kind in others for shape in SHAPES[kind[1]]]
    return found


def _target(kind: tuple[str, int], shape: tuple[int, int], m: int, share: float) -> Target:
    problem = Problem("w4a16", ARCH, kind[0], "uint4", "float", m, *shape, kind[1])
    return Target(problem, share, tiles=legal(problem))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of the tuner")
    parser.add_argument("--out", type=Path, default=Path("sm_90.json"), help="the table")
    parser.add_argument("--report", type=Path, help="the whole report, as JSON")
    parser.add_argument("--dtype", default="float16", help="one or more, with commas")
    parser.add_argument("--group", default="128", help="one or more of 128, 32")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--only-warm", action="store_true", help="compile, and tune nothing")
    parser.add_argument("--no-warm", action="store_true", help="tune at once")
    parser.add_argument("--warm-limit", type=float, default=90.0, help="seconds")
    options = parser.parse_args()
    kinds = [(d, int(g)) for g in options.group.split(",") for d in options.dtype.split(",")]
    # Rows of tiles that stay in use are written at the end: it must be reached.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.perf_counter()
    if not options.no_warm:
        compiled(jobs(kinds), options.processes, options.warm_limit)
    if options.only_warm:
        return 0

    report = tune(
        targets(kinds, [int(m) for m in options.rows.split(",")]),
        out=options.out,
        budget_s=options.budget,
        strategy="exhaustive",
        on_event=told,
        settings=settings(),
        provenance=provenance(["python", "benchmarks/gpu/tune_w4a16.py", *sys.argv[1:]]),
    )
    if options.report is not None:
        options.report.write_text(json.dumps(report.to_dict(), allow_nan=False))
    show(report)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
