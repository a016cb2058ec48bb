"""mmq, products with GGUF weights, on one NVIDIA GPU against cuBLAS and llama.cpp's figures.

    python benchmarks/gpu/mmq.py                            everything
    python benchmarks/gpu/mmq.py --types Q4_K --rows 512    some of it
    python benchmarks/gpu/mmq.py --tile big='hopper(block_m=256, ...)'    a tile as an arm more

cuBLAS multiplies the same weights, dequantized to float16 beforehand. llama.cpp was measured apart,
by its own tool (LLAMA_CPP): its figures are bars, not arms.

Every arm is checked first against float64 products of the exact weights, computed from the codes of
the file's blocks: a plain call, then a CUDA graph replayed over NaN, and the graph's outputs once
more after timing. What the L2 holds, which decides for few rows, has a name in the file::

    cold      the L2 is flushed before each launch, one launch a graph
    rotating  24 launches a graph, in turn over copies of the weight that no L2 holds together
    warm      24 launches a graph, all of the same weight

Decoding a model is like the first two. The last is how llama.cpp's tool launches: what the L2 keeps
of a weight is not read again, and its figures of few rows are held against ours both ways. Arms run
in common blocks, in random position-balanced order, cuBLAS twice: the control. Rows of a weight
repeat after 256: what is multiplied is the same amount, and drawing them takes no time.

Exit codes: 0 every measured bar holds, 1 nothing was measured, 4 a bar was missed.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from bars import Bar, bar_of, bars_text, finite, median_us, ratio, show_times  # noqa: E402
from device import describe, versions  # noqa: E402
from record import RESULTS, origin, write  # noqa: E402

LLAMA_CPP = {
    "Q4_0": {1: 14.4, 8: 32.7, 512: 304.0},
    "Q4_1": {1: 11.5, 8: 31.1, 512: 344.0},
    "Q5_0": {1: 18.0, 8: 37.7, 512: 320.0},
    "Q8_0": {1: 23.1, 8: 45.6, 512: 312.0},
    "Q4_K": {1: 15.9, 8: 46.5, 512: 346.0},
    "Q6_K": {1: 23.9, 8: 57.0, 512: 422.0},
}
"""Microseconds at 4096 x 14336 by type and rows of x: test-backend-ops perf of llama.cpp (ggml
0.26.0, built for sm_90) on an H200: launches of the same weight, of which the L2 keeps a part."""

LLAMA_SHAPE = (4096, 14336)
SHAPES = (LLAMA_SHAPE, (28672, 4096), (6144, 4096), (4096, 4096))
"""N x K: the one llama.cpp was measured at, and gate_up, qkv and o of Llama-3-8B."""

TYPES = ("Q4_K", "Q6_K", "Q4_0", "Q8_0", "Q4_1", "Q5_0")
"""The most wanted first."""

ROWS = (512, 2048, 4096, 1, 8)
CACHES = ("cold", "rotating", "warm")
_EVERYWHERE = ("Q4_K", "Q6_K")  # what a Q4_K_M file holds; other types at the first shape only
_ROWS_ELSEWHERE = (512, 2048)
_BOTH_FROM = 2048  # rows from which "hopper" and "dense" are both measured
_PERIOD = 256  # rows after which a weight repeats
_ERROR = 3e-4
_LATE = "not compiled and launched in time"  # no result: neither right nor wrong
_WRONG = 0.05  # a relative error above this is no rounding: the arm is not timed
_ROTATION, _L2_FACTOR = 24, 4
_FEW = 8  # rows up to which what the L2 holds decides


class Case(NamedTuple):
    """y[M, N] = x[M, K] @ W[N, K].T with W of a type."""

    type_name: str
    N: int
    K: int
    M: int

    @property
    def id(self) -> str:
        return f"{self.type_name}-{self.N}x{self.K}-M{self.M}"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=",".join(TYPES), help="GGUF types")
    parser.add_argument("--shapes", help="N x K instead of its own: 4096x14336,4096x4096")
    parser.add_argument("--rows", help="M instead of its own: 512,4096")
    parser.add_argument("--cache", default=",".join(CACHES),
                        help="what the L2 holds, of few rows; cold for more")  # fmt: skip
    parser.add_argument("--tile", action="append", default=[], metavar="NAME=TILE")
    parser.add_argument("--blocks", type=int, default=6, help="paired blocks, at least 6")
    parser.add_argument("--readings", type=int, default=3, help="a sample is their median")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=50, help="stop after this time")
    parser.add_argument("--compiling", type=float, default=30, metavar="SECONDS",
                        help="tiles that are not compiled by then are left out")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1),
                        help="processes that compile before anything is timed")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--name", default="h200-mmq", help="of the result file, after the date")
    args = parser.parse_args(words)
    if args.blocks < 6:
        parser.error(f"--blocks is {args.blocks}; fewer than 6 cannot be significant")
    args.caches = args.cache.split(",")
    unknown = [cache for cache in args.caches if cache not in CACHES]
    if unknown:
        parser.error(f"--cache names {unknown[0]!r}; choose of {','.join(CACHES)}")
    args.tiles = {}
    for text in args.tile:
        name, _, tile = text.partition("=")
        if not tile or name in ("cublas", "tilewright"):
            parser.error(f"--tile is {text!r}; write NAME=algorithm(field=value, ...), with a "
                         "name of its own")  # fmt: skip
        args.tiles[name] = tile
    return args


def cases_of(args: argparse.Namespace) -> list[Case]:
    """What is measured, those of one weight together."""
    shapes: tuple[tuple[int, int], ...] = SHAPES
    if args.shapes:
        pairs = (text.split("x") for text in args.shapes.split(","))
        shapes = tuple((int(n), int(k)) for n, k in pairs)
    rows = tuple(int(m) for m in args.rows.split(",")) if args.rows else None
    return [
        Case(name, n, k, m)
        for n, k in shapes
        for name in args.types.split(",")
        if args.shapes or (n, k) == LLAMA_SHAPE or name in _EVERYWHERE
        for m in rows or (ROWS if (n, k) == LLAMA_SHAPE else _ROWS_ELSEWHERE)
    ]


def caches_of(case: Case, asked: list[str]) -> list[str]:
    """What the L2 holds where a case is measured: of many rows nothing, whatever is asked for."""
    return asked if case.M <= _FEW else ["cold"]


class Weight:
    """A weight of one type: packed for this GPU, and dequantized for cuBLAS."""

    def __init__(self, type_name: str, n: int, k: int, seed: int) -> None:
        import numpy as np
        import torch

        from tilewright.formats.blocks import BLOCK_TYPES
        from tilewright.layout.blocks import pack_blocks_for
        from tilewright.ops.contract import Case as OpCase
        from tilewright.ops.mmq.spec import SPEC

        rows = min(n, _PERIOD)
        if n % rows:
            raise SystemExit(f"error: N={n} is no multiple of {rows}")
        drawn = SPEC.make_inputs(OpCase("mmq", type_name, "float16", 1, rows, k), seed).source
        codes = BLOCK_TYPES[type_name].codes(drawn.raw)
        exact = torch.from_numpy(codes.codes).cuda().double().view(rows, -1, codes.sub)
        exact *= torch.from_numpy(codes.scale).cuda().double()[:, :, None]
        if codes.minimum is not None:
            exact += torch.from_numpy(codes.minimum).cuda().double()[:, :, None]
        self.exact = exact.view(rows, k)
        self.repeats = n // rows
        self.dense = self.exact.half().repeat(self.repeats, 1)
        raw = np.tile(drawn.raw, (self.repeats, 1))
        self.packed: Any = pack_blocks_for(raw, type_name, "cuda")

    def product(self, x: Any) -> Any:
        """float64 [M, N]."""
        return (x.double() @ self.exact.T).repeat(1, self.repeats)

    def calls(self, arm: str, tile: Any, x: Any, cache: str) -> list[Callable[[], Any]]:
        """One call, or those of a graph: of this weight, or in turn of copies no L2 holds."""
        import torch

        from tilewright.ops.mmq.op import mmq_gemm

        weight = self.dense if arm == "cublas" else self.packed
        nbytes = weight.numel() * 2 if arm == "cublas" else weight.nbytes
        weights: list[Any] = [weight]
        launches = 1 if cache == "cold" else _ROTATION
        if cache == "rotating":
            l2 = torch.cuda.get_device_properties(x.device).L2_cache_size
            count = min(launches, max(2, math.ceil(_L2_FACTOR * l2 / nbytes)))
            weights += [_copy(weight) for _ in range(count - 1)]
        each: list[Callable[[], Any]]
        if arm == "cublas":
            each = [partial(torch.nn.functional.linear, x, w) for w in weights]
        else:
            each = [partial(mmq_gemm, x, w, tile=tile) for w in weights]
        return [each[i % len(each)] for i in range(launches)]


def _copy(weight: Any) -> Any:
    """Another tensor, or another packed weight with the same strides."""
    import torch

    if isinstance(weight, torch.Tensor):
        return weight.clone()
    names = ("low", "high", "scales", "minimums", "sub_scales")
    held = {name: getattr(weight, name) for name in names}
    return replace(weight, **{n: None if t is None else t.clone() for n, t in held.items()})


def tiles_of(case: Case, arch: str, given: dict[str, str]) -> dict[str, Any]:
    """The tiles of our arms by name: what lookup chooses, the other way of many rows, and those
    given by the user."""
    from tilewright.ops.choose import choose_tile
    from tilewright.ops.mmq import dense_space, hopper_space
    from tilewright.ops.mmq.triton_space import TRITON_SPACE
    from tilewright.tiles.tile import Problem
    from tilewright.tune.tile_arms import parse_tile

    problem = Problem("mmq", arch, "float16", case.type_name, "float", case.M, case.N, case.K, 0)
    tiles: dict[str, Any] = {"tilewright": choose_tile(problem, TRITON_SPACE).tile}
    if case.M >= _BOTH_FROM:
        others = {"hopper": hopper_space.default(problem), "dense": dense_space.default(problem)}
        tiles |= {
            name: tile
            for name, tile in others.items()
            if tile is not None and name != tiles["tilewright"].algorithm
        }
    return tiles | {name: parse_tile(text) for name, text in given.items()}


def launch_once(job: tuple[str, int, int, int, str]) -> tuple[tuple[str, str], str]:
    """Launch a tile (type, N, K, M, its text) on zeros, which compiles it: the compiler's cache is
    on disk. Its type and text, and what went wrong or nothing."""
    import numpy as np
    import torch

    from tilewright.formats.blocks import BLOCK_TYPES
    from tilewright.layout.blocks import pack_blocks_for
    from tilewright.ops.mmq.op import mmq_gemm
    from tilewright.tune.tile_arms import parse_tile

    type_name, n, k, m, text = job
    try:
        raw = np.zeros((n, BLOCK_TYPES[type_name].row_bytes(k)), dtype=np.uint8)
        packed: Any = pack_blocks_for(raw, type_name, "cuda")
        x = torch.ones(m, k, dtype=torch.float16, device="cuda")
        y = mmq_gemm(x, packed, tile=parse_tile(text))
        torch.cuda.synchronize()
        why = "" if bool((y == 0).all()) else "zeros times ones are not zeros"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:200]
    return (type_name, text), why


def launch_all(
    cases: list[Case], arch: str, args: argparse.Namespace
) -> dict[tuple[str, str], str]:
    """What went wrong with a tile, by type and text. One that does not end in time is among them: a
    kernel that hangs does so in a process of its own."""
    jobs: dict[tuple[str, str], tuple[str, int, int, int, str]] = {}
    for case in cases:
        for tile in tiles_of(case, arch, args.tiles).values():
            key = (case.type_name, str(tile))
            if key not in jobs or case.N * case.K * case.M < math.prod(jobs[key][1:4]):
                jobs[key] = (*case, str(tile))
    found = dict.fromkeys(jobs, _LATE)
    end = time.monotonic() + args.compiling
    with multiprocessing.get_context("spawn").Pool(max(1, min(args.jobs, len(jobs)))) as pool:
        done = pool.imap_unordered(launch_once, jobs.values())
        try:
            for _ in jobs:
                key, why = done.next(timeout=max(0.1, end - time.monotonic()))
                found[key] = why
        except multiprocessing.TimeoutError:
            pool.terminate()
    return {key: why for key, why in found.items() if why}


def _keep(blocks: list[dict[str, Any]], block: Any) -> None:
    blocks.append(block.to_dict())


def measure(
    case: Case,
    weight: Weight,
    tiles: dict[str, Any],
    broken: dict[tuple[str, str], str],
    args: argparse.Namespace,
    clock: Any,
    probe: Any,
) -> dict[str, Any]:
    """The record of one case."""
    import torch
    from operands import activations, relative_error
    from timing import capture

    from tilewright.measure import SamplePlan, compare_many
    from tilewright.measure.cache import GpuFlusher

    x = activations(case.M, case.K, torch.float16)
    right = weight.product(x)
    record: dict[str, Any] = {"id": case.id, **case._asdict(), "arms": {}, "failed": {}}
    for arm, tile in tiles.items():
        record["arms"][arm] = {"tile": str(tile)}
        if (case.type_name, str(tile)) in broken:
            record["failed"][arm] = broken[case.type_name, str(tile)]
    for cache in caches_of(case, args.caches):
        graphs = {}
        for arm, tile in {"cublas": None, **tiles}.items():
            if arm in record["failed"]:
                continue
            found = record["arms"].setdefault(arm, {})
            try:
                calls = weight.calls(arm, tile, x, cache)
                found["error"] = relative_error(calls[0](), right)
                graphs[arm] = capture(calls)
                found[f"error_{cache}"], found["repeatable"] = graphs[arm].errors(right)
            except Exception as error:
                torch.cuda.synchronize()  # raises where nothing can be measured any more
                record["failed"][arm] = f"{type(error).__name__}: {error}"[:200]
                graphs.pop(arm, None)
                continue
            worst = max(found["error"], found[f"error_{cache}"])
            if not worst <= _WRONG:
                record["failed"][arm] = f"relative error {worst:.3g}: not timed"
                del graphs[arm]
        if "cublas" not in graphs or len(graphs) < 2:
            continue
        blocks: list[dict[str, Any]] = []
        others = {arm: g.graph.replay for arm, g in graphs.items() if arm != "cublas"}
        judged = compare_many(
            graphs["cublas"].graph.replay, others, baseline_name="cublas", blocks=args.blocks,
            cold=cache == "cold", flush=GpuFlusher() if cache == "cold" else None, clock=clock,
            plan=SamplePlan(1, args.readings), seed=args.seed, resamples=1000,
            warm_up_us=5e4, probe=probe,
            on_block=partial(_keep, blocks),
        )  # fmt: skip
        launches = 1 if cache == "cold" else _ROTATION
        for block in blocks:
            block["us"] = {arm: us / launches for arm, us in block["us"].items()}
        for arm, graph in graphs.items():
            after = max(relative_error(y, right) for y in graph.outputs)
            record["arms"][arm][f"error_after_{cache}"] = after
            if not after <= _WRONG:
                record["failed"][arm] = f"relative error {after:.3g} after timing: void"
        record[cache] = {
            "baseline": "cublas", "launches_a_graph": launches, "blocks": blocks,
            "judgements": {arm: one.to_dict()["judgement"] for arm, one in judged.items()},
        }  # fmt: skip
    return record


def bars_of(records: list[dict[str, Any]]) -> list[Bar]:
    """Every bar, those without a measurement among them."""

    def rows(m: int) -> list[dict[str, Any]]:
        return [r for r in records if r["M"] == m]

    def at_llama_shape(m: int) -> Iterator[tuple[dict[str, Any], float]]:
        for record in rows(m):
            us = LLAMA_CPP.get(record["type_name"], {}).get(m)
            if us is not None and (record["N"], record["K"]) == LLAMA_SHAPE:
                yield record, us

    def over_llama(m: int, cache: str, least: dict[str, float]) -> dict[str, float]:
        """How far ahead of llama.cpp, in units of what is asked for."""
        found = {}
        for record, us in at_llama_shape(m):
            ours = median_us(record, cache, "tilewright")
            if ours is not None:
                found[record["id"]] = us / ours / least[record["type_name"]]
        return found

    def at_shape(chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [r for r in chosen if (r["N"], r["K"]) == LLAMA_SHAPE]

    def over_cublas(chosen: list[dict[str, Any]]) -> dict[str, float]:
        found = {r["id"]: ratio(r, "cold", "cublas", "tilewright") for r in chosen}
        return {case: value for case, value in found.items() if value is not None}

    prefill = {name: 2.5 if name == "Q6_K" else 3.0 for name in LLAMA_CPP}
    errors = {
        f"{r['id']} {arm}": max(
            math.inf if row[key] is None else row[key] for key in row if key.startswith("error")
        )
        for r in records
        for arm, row in r["arms"].items()
        if arm != "cublas" and any(key.startswith("error") for key in row)
    }
    errors |= {
        r["id"]: math.inf
        for r in records
        if "tilewright" in r["failed"] and r["failed"]["tilewright"] != _LATE
    }
    return [
        bar_of("512 rows: 3 times llama.cpp, Q6_K 2.5 times", over_llama(512, "cold", prefill), 1.0,
             1.0),
        bar_of("512 rows of 4096 x 14336 over cuBLAS fp16", over_cublas(at_shape(rows(512))), 0.7,
             0.7),
        bar_of("2048 and 4096 rows over cuBLAS fp16", over_cublas(rows(2048) + rows(4096)), 0.8),
        *(
            bar_of(f"M={m} {cache}: 1.1 times llama.cpp",
                 over_llama(m, cache, dict.fromkeys(LLAMA_CPP, 1.1)), 1.0, 1.0)
            for m in (1, 8)
            for cache in ("cold", "warm")
        ),
        bar_of("relative error float16", errors, _ERROR, most=True),
    ]  # fmt: skip


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    cases = cases_of(args)
    import torch

    from tilewright.device import arch_of
    from tilewright.measure import EventClock, StateProbe

    started = time.monotonic()
    arch = arch_of(torch.device("cuda", 0))
    broken = launch_all(cases, arch, args)
    for (type_name, tile), why in broken.items():
        print(f"note: {type_name} {tile}: {why}")
    print(f"compiled and launched in {time.monotonic() - started:.0f} s", flush=True)
    clock = EventClock()
    probe = StateProbe(gpu=clock.device_id)
    whole = origin(os.cpu_count() or 1)
    whole["gpu"] = describe()
    whole["versions"] = {**whole["versions"], **versions()}
    records: list[dict[str, Any]] = []
    weight, key, path = None, None, None
    for at, case in enumerate(cases):
        if time.monotonic() - started > args.seconds:
            print(f"note: {len(cases) - at} cases were not reached")
            break
        if case[:3] != key:
            weight, key = None, case[:3]
            torch.cuda.empty_cache()
            weight = Weight(*case[:3], args.seed)
        assert weight is not None
        tiles = tiles_of(case, arch, args.tiles)
        record = measure(case, weight, tiles, broken, args, clock, probe)
        show_times(record)
        records.append(finite(record))
        seconds = round(time.monotonic() - started, 1)
        path = write(result_of(whole, args, records, seconds), args.name, args.out)
    if path is None:
        print("error: no case was measured", file=sys.stderr)
        return 1
    print(f"{path.name}: {len(records)} cases in {time.monotonic() - started:.0f} s")
    bars = bars_of(records)
    print(bars_text(bars))
    return 4 if any(bar.holds is False for bar in bars) else 0


def result_of(
    whole: dict[str, Any], args: argparse.Namespace, records: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """The result file's content, of as many cases as there are."""
    return {
        "kind": "gpu-mmq",
        "title": "",
        "origin": whole,
        "settings": {
            "blocks": args.blocks,
            "readings": args.readings,
            "caches": args.caches,
            "seed": args.seed,
            "tiles": args.tiles,
            "rows_repeat_after": _PERIOD,
        },
        "llama_cpp_us": {
            name: {str(m): us for m, us in row.items()} for name, row in LLAMA_CPP.items()
        },
        "bars": [finite(bar.to_dict()) for bar in bars_of(records)],
        "cases": records,
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
