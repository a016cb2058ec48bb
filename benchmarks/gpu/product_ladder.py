"""A ladder file of mmq or of ssd on one NVIDIA GPU: every rung in common blocks, and each left out.

    python benchmarks/gpu/product_ladder.py benchmarks/ladders/mmq-seed.toml --scan 512
    python benchmarks/gpu/product_ladder.py benchmarks/ladders/ssd-chunks.toml --rows 4096,16384

A case is a product of the ladder; with several products, "together" launches them one behind the
other. Its arms are the base, each rung on what is below it, and the finished stack without one of
the rungs: what a rung does is the fields of the tile that it changed, so these are taken back and
all others are left. Arms with the same tiles are timed once.

`--scan TOKENS` adds the step that this package's second field study began with: "together" also
launches a Mamba-2 scan, in the base one token after the other (`ssd_reference`, in float32), and
from a first rung "SSD" on by this package's op.

Every arm is checked against float64 first: a plain call, then a CUDA graph replayed over NaN, and
the graph's outputs once more after timing. The L2 is flushed before each launch. Arms run in common
blocks, in random position-balanced order, the base twice: the control.

Exit codes: 0 every rung is right, 1 nothing was measured, 3 a rung is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from bars import finite, median_us  # noqa: E402
from device import describe, versions  # noqa: E402
from ladders import judged_against, judged_pairs, read_ladder, stacks_of, tile_of  # noqa: E402
from record import RESULTS, origin, write  # noqa: E402

LIMITS = {"mmq": 7e-3, "ssd": 6e-3}
"""The largest relative error of a right rung: x rounded to 8 bits per 32 values, where 5.4e-3 is
expected of normally distributed ones; a scan in bfloat16."""

SCAN_LAYER = "nemotron-h-8b"
SCAN_RUNG, SEQUENTIAL = "SSD", "recurrence"
WITHOUT, TOGETHER = "without ", "together"
_COMPILED_ROWS = 4096


class Item(NamedTuple):
    """A product of a ladder, of `op`."""

    op: str
    type: str
    dtype: str
    activations: str
    N: int
    K: int
    M: int
    group: int

    @property
    def id(self) -> str:
        return f"{self.type}-{self.N}x{self.K}-M{self.M}"


Plan = dict[str, dict[Item, str]]
"""By arm: the tile's text of each item."""


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ladder", type=Path)
    parser.add_argument("--rows", help="M instead of the ladder's own: 512,4096")
    parser.add_argument("--scan", type=int, metavar="TOKENS", help="begin with a rung SSD")
    parser.add_argument("--blocks", type=int, default=12, help="paired blocks, at least 6")
    parser.add_argument("--readings", type=int, default=3, help="a sample is their median")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="begin no case after this time")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1),
                        help="processes that compile before anything is timed")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--name", help="of the result file, after the date")
    args = parser.parse_args(words)
    if args.blocks < 6:
        parser.error(f"--blocks is {args.blocks}; fewer than 6 cannot be significant")
    if args.name is None:
        args.name = f"h200-ladder-{args.ladder.stem}"
    return args


def plan_of(args: argparse.Namespace) -> Plan:
    """Every arm's tiles: the base's first, the rungs', then those without one of them.

    Raises:
        SystemExit: an arm has no tile for a product.
    """
    from tilewright.tiles.tile import Problem

    ladder = read_ladder(args.ladder)
    op = ladder.spec or "mmq"
    rows = tuple(int(m) for m in args.rows.split(",")) if args.rows else None
    activations = ladder.base.activations or "float"
    items = [
        Item(op, p.type, p.dtype, activations, *p.shape, m, p.group or 0)
        for p in ladder.products
        for m in rows or p.m
    ]
    rungs: Plan = {}
    for name, _, rules in stacks_of(args.ladder, None):
        rungs[name] = {}
        for item in items:
            problem = Problem(
                op, "sm_90", item.dtype, item.type, activations, item.M, item.N, item.K, item.group
            )
            tile = tile_of(rules, problem.bucketed())
            if tile is None:
                raise SystemExit(f"error: {name} has no tile for {item.id}")
            rungs[name][item] = str(tile)
    if args.scan:
        rungs = with_scan(rungs, args.scan)
    return {**rungs, **left_out(rungs)}


def with_scan(rungs: Plan, tokens: int) -> Plan:
    """The rungs with a scan among the items, and a first one that takes it to this package's op."""
    from ssd import LAYERS

    from tilewright.ops.ssd.triton_space import TRITON_SPACE
    from tilewright.tiles.tile import Problem

    heads, p, n, groups = LAYERS[SCAN_LAYER]
    scan = Item("ssd", f"p{p}", "bfloat16", "float", heads * p, n, tokens, heads // groups)
    problem = Problem(
        "ssd", "sm_90", scan.dtype, scan.type, "float", tokens, scan.N, scan.K, scan.group
    )
    ours = str(TRITON_SPACE.default(problem))
    base, *others = rungs
    found = {base: {**rungs[base], scan: SEQUENTIAL}, SCAN_RUNG: {**rungs[base], scan: ours}}
    return {**found, **{name: {**rungs[name], scan: ours} for name in others}}


def left_out(rungs: Plan) -> Plan:
    """The finished stack without what one of the rungs changed, where that makes a difference; none
    for the last rung, without which it is the one before."""
    names = list(rungs)
    found: Plan = {}
    for left in names[1:-1]:
        stack = {}
        for item in rungs[names[0]]:
            now = _fields(rungs[names[0]][item])
            for below, name in zip(names, names[1:], strict=False):
                before, after = (_fields(rungs[n][item]) for n in (below, name))
                if name == left or before == after:
                    continue
                if isinstance(before, dict) and isinstance(after, dict) and isinstance(now, dict):
                    now = {**now, **{k: v for k, v in after.items() if before.get(k) != v}}
                else:
                    now = after
            stack[item] = _text(now)
        if stack != rungs[names[-1]]:
            found[f"{WITHOUT}{left}"] = stack
    return found


def _fields(text: str) -> dict[str, Any] | str:
    """A tile's fields; the text where it is no tile."""
    from tilewright.tune.tile_arms import parse_tile

    return text if text == SEQUENTIAL else dict(parse_tile(text).as_dict())


def _text(fields: dict[str, Any] | str) -> str:
    from tilewright.tiles.tile import Tile

    return fields if isinstance(fields, str) else str(Tile.from_mapping(fields))


class Subject:
    """The operands of an item on the GPU: its calls by tile, and what is right."""

    def __init__(self, item: Item, seed: int) -> None:
        self.item = item
        if item.op == "mmq":
            self._product(seed)
        else:
            self._scan(seed)

    def _product(self, seed: int) -> None:
        import torch
        from mmq import Weight
        from operands import activations

        weight = Weight(self.item.type, self.item.N, self.item.K, seed)
        self._weight = weight.packed
        self._x = activations(self.item.M, self.item.K, getattr(torch, self.item.dtype), seed=seed)
        self.right = weight.product(self._x)

    def _scan(self, seed: int) -> None:
        from ssd import Case, draw
        from ssd_reference import recurrence

        self._args = draw(Case("scan", layer_of(self.item), self.item.M, self.item.dtype), seed)
        self.right = recurrence(self._args)[0]

    def call(self, text: str) -> Any:
        """The outputs, written anew by each launch."""
        from tilewright.tune.tile_arms import parse_tile

        tile = parse_tile(text) if text != SEQUENTIAL else None
        if self.item.op == "mmq":
            from tilewright.ops.mmq.op import mmq_gemm

            return mmq_gemm(self._x, self._weight, activations=self.item.activations, tile=tile)
        if text == SEQUENTIAL:
            from ssd_reference import sequential

            return sequential(self._args)
        from tilewright.ops.ssd.op import ssd_scan

        a = self._args
        return ssd_scan(
            a.x, a.dt, a.A, a.B, a.C, D=a.D, dt_bias=a.dt_bias, dt_softplus=True, tile=tile
        )[0][0]


def layer_of(item: Item) -> str:
    """The layer of a scan.

    Raises:
        SystemExit: there is none like it.
    """
    from ssd import LAYERS

    p = int(item.type.removeprefix("p"))
    heads = item.N // p
    wanted = (heads, p, item.K, heads // item.group)
    for name, layer in LAYERS.items():
        if layer == wanted:
            return name
    raise SystemExit(f"error: no layer has heads, dimension, state and groups {wanted}")


def compile_for(job: tuple[Item, str]) -> None:
    """Launch a tile once; the compiler's cache is on disk."""
    import torch

    item, text = job
    try:
        Subject(item._replace(M=min(item.M, _COMPILED_ROWS)), 0).call(text)
        torch.cuda.synchronize()
    except Exception as error:  # it will be told where it counts
        print(f"note: {item.id} {text}: {type(error).__name__}: {error}"[:300], flush=True)


def measure(
    subjects: Mapping[Item, Subject], plan: Plan, args: argparse.Namespace, clock: Any, probe: Any
) -> dict[str, Any]:
    """The record of one case: of an item, or of several launched one behind the other."""
    import torch
    from operands import relative_error
    from timing import capture

    from tilewright.measure import SamplePlan, compare_many
    from tilewright.measure.cache import GpuFlusher

    first = next(iter(subjects))
    record: dict[str, Any] = {
        "part": "ladder", "id": first.id if len(subjects) == 1 else TOGETHER,
        "items": [item._asdict() for item in subjects], "arms": {}, "failed": {},
    }  # fmt: skip
    graphs: dict[str, Any] = {}
    seen: dict[tuple[str, ...], str] = {}
    rights = [subject.right for subject in subjects.values()]
    for arm, tiles in plan.items():
        texts = tuple(tiles[item] for item in subjects)
        found = record["arms"][arm] = {"tiles": list(texts), "as": seen.setdefault(texts, arm)}
        if found["as"] != arm:
            continue
        calls = [partial(subjects[i].call, t) for i, t in zip(subjects, texts, strict=True)]
        try:
            found["errors"] = [relative_error(c(), r) for c, r in zip(calls, rights, strict=True)]
            graphs[arm] = capture(calls)
            found["graph_errors"] = _graph_errors(graphs[arm], rights)
        except Exception as error:
            torch.cuda.synchronize()  # raises where nothing can be measured any more
            record["failed"][arm] = f"{type(error).__name__}: {error}"[:200]
            graphs.pop(arm, None)
            continue
        _judge_errors(record, graphs, arm, subjects)
    if len(graphs) < 2 or next(iter(plan)) not in graphs:
        return record
    blocks: list[dict[str, Any]] = []
    base, *others = graphs
    compare_many(
        graphs[base].graph.replay, {arm: graphs[arm].graph.replay for arm in others},
        baseline_name=base, blocks=args.blocks, cold=True, flush=GpuFlusher(), clock=clock,
        plan=SamplePlan(1, args.readings), seed=args.seed, warm_up_us=1e5, probe=probe,
        on_block=lambda block: blocks.append(block.to_dict()),
    )  # fmt: skip
    record["cold"] = {"baseline": base, "launches_a_graph": 1, "blocks": blocks}
    for arm in tuple(graphs):
        found = record["arms"][arm]
        found["errors_after"] = [
            relative_error(y, r) for y, r in zip(graphs[arm].outputs, rights, strict=True)
        ]
        _judge_errors(record, graphs, arm, subjects)
    return {**record, **compared(record)}


def _graph_errors(graph: Any, rights: list[Any]) -> list[float]:
    """Of a replay over NaN."""
    import math

    import torch
    from operands import relative_error

    for y in graph.outputs:
        y.fill_(math.nan)
    graph.graph.replay()
    torch.cuda.synchronize()
    return [relative_error(y, right) for y, right in zip(graph.outputs, rights, strict=True)]


def _judge_errors(
    record: dict[str, Any], graphs: dict[str, Any], arm: str, subjects: Mapping[Item, Subject]
) -> None:
    """A wrong arm is none that is compared."""
    row = record["arms"][arm]
    for kind in ("errors", "graph_errors", "errors_after"):
        for item, error in zip(subjects, row.get(kind, ()), strict=False):
            if not error <= LIMITS[item.op]:
                record["failed"][arm] = f"{kind}: {item.id} {error:.3g} > {LIMITS[item.op]:g}"
                graphs.pop(arm, None)
                return


def compared(record: dict[str, Any]) -> dict[str, Any]:
    """`pairs`: each rung against the base and the one below it; `left`: the finished stack against
    itself without a rung."""
    blocks, base = record["cold"]["blocks"], record["cold"]["baseline"]
    timed = [a for a in record["arms"] if a in blocks[0]["us"] and a not in record["failed"]]
    rungs = [arm for arm in timed if not arm.startswith(WITHOUT)]
    if not rungs or rungs[0] != base:
        return {"pairs": [], "left": []}
    finished = [row["as"] for arm, row in record["arms"].items() if not arm.startswith(WITHOUT)][-1]
    left: list[dict[str, Any]] = []
    for arm, row in record["arms"].items():
        other = row["as"]
        if arm.startswith(WITHOUT) and {other, finished} <= set(timed) and other != finished:
            (pair,) = judged_against(blocks, [other], finished, base)
            left.append({**pair, "a": arm})
    return {"pairs": finite(judged_pairs(blocks, rungs, base)), "left": finite(left)}


def show(record: dict[str, Any]) -> None:
    print(f"{record['id']}:")
    for arm, row in record["arms"].items():
        us = median_us(record, "cold", arm)
        stands = "; ".join(
            f"{r['ratio']:.3f}x [{r['low']:.3f}, {r['high']:.3f}] {r['verdict']} of {r['a']}"
            for r in record.get("pairs", ()) if r["b"] == arm
        )  # fmt: skip
        stands += "; ".join(
            f"the finished stack is {r['ratio']:.3f}x [{r['low']:.3f}, {r['high']:.3f}] "
            f"{r['verdict']}" for r in record.get("left", ()) if r["a"] == arm
        )  # fmt: skip
        if row["as"] != arm:
            print(f"  {arm:36} as {row['as']}")
            continue
        time_ = "" if us is None else f"{us:9.1f} us"
        print(f"  {arm:36} {time_} {max(row.get('errors', [0.0])):.1e} {stands}")
    for arm, why in record["failed"].items():
        print(f"  {arm} WRONG: {why}")
    sys.stdout.flush()


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    plan = plan_of(args)
    import torch

    from tilewright.measure import EventClock, StateProbe

    started = time.monotonic()
    items = list(next(iter(plan.values())))
    jobs = dict.fromkeys((item, tiles[item]) for tiles in plan.values() for item in items)
    with multiprocessing.get_context("spawn").Pool(max(1, min(args.jobs, len(jobs)))) as pool:
        pool.map(compile_for, list(jobs), chunksize=1)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    clock = EventClock()
    probe = StateProbe(gpu=clock.device_id)
    cases = [[item] for item in items if item.op == items[0].op]
    if len({item.type for item in items}) > 1:
        cases.append(items)
    records: list[dict[str, Any]] = []
    subjects: dict[Item, Subject] = {}
    ladder = read_ladder(args.ladder)
    for at, case in enumerate(cases):
        if time.monotonic() - started > args.seconds:
            print(f"note: {len(cases) - at} cases were not reached")
            break
        torch.cuda.empty_cache()
        for item in case:
            if item not in subjects:
                subjects[item] = Subject(item, args.seed)
        records.append(measure({i: subjects[i] for i in case}, plan, args, clock, probe))
        show(records[-1])
        whole = origin(os.cpu_count() or 1)
        whole["gpu"] = describe()
        whole["versions"] = {**whole["versions"], **versions()}
        result = {
            "kind": "gpu-ladder", "title": ladder.title, "op": items[0].op, "origin": whole,
            "settings": {"blocks": args.blocks, "readings": args.readings, "seed": args.seed},
            "limits": LIMITS, "cases": finite(records),
            "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip
        print(write(result, args.name, args.out).name, flush=True)
    if not any("cold" in record for record in records):
        print("error: no case was measured", file=sys.stderr)
        return 1
    return 3 if any(record["failed"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
