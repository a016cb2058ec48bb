"""Tune W4A16 on an NVIDIA Hopper GPU with the tuner, for the table that ships.

    python benchmarks/gpu/tune_w4a16.py --budget 300 --out sm_90.json

The problems are the fused products of Qwen3-8B and Llama-3-8B in groups of 128, two of them and
the products of SmolLM2-135M in groups of 32, and rows from 1 to 4096. A lookup takes a row for half
and twice as many rows of x, and for N and K within a factor of 4: those of Qwen3-4B, Qwen3-32B and
Llama-3-70B lie within. The tuner
goes through a list of tiles (`SHORTLIST`), every one that the rules allow for the problem: those
that a sweep of the space has found at the top somewhere. It gates each in a process of its own,
times it with cold caches in rounds with the tile in use, and changes a row only where one is
faster for certain.

Before that, several processes gate the tiles on a small product, which fills Triton's cache: the
tuner's time is then not spent on compiling. Nothing of it is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from tilewright.ops.catalog import spec_for
from tilewright.ops.contract import Case
from tilewright.ops.space import Planted
from tilewright.ops.w4a16.hopper_space import HOPPER_SPACE
from tilewright.report.provenance import provenance
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.gate import gate
from tilewright.tune.host import Settings
from tilewright.tune.rounds import Timing
from tilewright.tune.tuner import Progress, Target, tune

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


def warm(job: tuple[Tile | Planted, str, int]) -> str:
    """Compile what the gate of a tile runs: gate it on a small product, or on a planted tile's."""
    tile, dtype, group = job
    spec = spec_for("w4a16", ARCH)
    if isinstance(tile, Planted):
        return f"planted: {gate(spec.with_run(tile.run), tile.tile, tile.cases[:1])}"
    case = Case("w4a16", "uint4", dtype, tile.block_m, 1024, 2048, group)
    return str(gate(spec, tile, [case]))


def compiled(kinds: list[tuple[str, int]], processes: int, limit_s: float) -> None:
    """Fill Triton's cache, and print what the gate rejected."""
    jobs: list[tuple[Tile | Planted, str, int]] = [
        *((planted, *kinds[0]) for planted in HOPPER_SPACE.planted),
        *((tile, dtype, group) for dtype, group in kinds for tile in SHORTLIST),
    ]
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # of the processes to come: compilers are what keeps the cores busy
    began = time.perf_counter()
    passed = 0
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.imap_unordered(warm, jobs)
        try:
            for _ in jobs:
                line = found.next(max(0.1, limit_s - (time.perf_counter() - began)))
                passed += " passed on " in line
                if " passed on " not in line or line.startswith("planted"):
                    print(line[:300])
        except multiprocessing.TimeoutError:
            print("compiling took too long; the tuner goes on with what there is")
    seconds = time.perf_counter() - began
    print(f"{passed} of {len(jobs)} passed on small products in {seconds:.0f} s", flush=True)


def targets(kinds: list[tuple[str, int]], rows: list[int]) -> list[Target]:
    """The shapes of each dtype and group; the first gets twice the share and all rows, the others
    `OTHER_ROWS`, in turn, so that a budget that ends early leaves something of each."""
    first, *others = kinds
    found = [_target(first, shape, m, 2.0) for m in rows for shape in SHAPES[first[1]]]
    for m in [m for m in rows if m in OTHER_ROWS]:
        found += [_target(kind, shape, m, 1.0) for kind in others for shape in SHAPES[kind[1]]]
    return found


def _target(kind: tuple[str, int], shape: tuple[int, int], m: int, share: float) -> Target:
    return Target(Problem("w4a16", ARCH, kind[0], "uint4", "float", m, *shape, kind[1]), share)


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
    began = time.perf_counter()
    if not options.no_warm:
        compiled(kinds, options.processes, options.warm_limit)
    if options.only_warm:
        return 0

    def told(now: Progress) -> None:
        if now.kind in ("row", "done"):
            print(f"{now.seconds_left:.0f} s left, {now.index}/{now.problems}: {now.text}")

    allowed = set(SHORTLIST)
    report = tune(
        targets(kinds, [int(m) for m in options.rows.split(",")]),
        out=options.out,
        budget_s=options.budget,
        strategy="exhaustive",
        on_event=told,
        settings=Settings(
            batch=8,
            finalists=2,
            least_slice_s=2.0,
            timing=Timing(rounds=2, blocks=10, cache="cold"),
            allow=allowed.__contains__,
        ),
        provenance=provenance(["python", "benchmarks/gpu/tune_w4a16.py", *sys.argv[1:]]),
    )
    if options.report is not None:
        whole: dict[str, Any] = report.to_dict()
        options.report.write_text(json.dumps(whole, allow_nan=False))
    for found in report.problems:
        of = found.problem
        print(of.act_dtype, of.group, of.M, of.N, of.K, found.status, found.reason,
              f"{found.seconds:.1f} s")  # fmt: skip
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
