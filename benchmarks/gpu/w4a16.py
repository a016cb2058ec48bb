"""W4A16 on one NVIDIA GPU against cuBLAS, torch's int4 kernel, gemlite and Humming.

    python benchmarks/gpu/w4a16.py                        everything
    python benchmarks/gpu/w4a16.py --part decode          one part: prefill, small, decode, error
    python benchmarks/gpu/w4a16.py --tile big='hopper(block_m=256, ...)'    a tile as an arm more
    python benchmarks/gpu/w4a16.py --ladder FILE --control FILE   change sets, instead of the parts
    python benchmarks/gpu/w4a16.py --bars results/2026-...-w4a16-sm_90.json the bars of old files

Every arm is checked first against float64 products of the exact weights, computed from the codes:
a plain call, then a CUDA graph replayed over NaN, and the graph's outputs once more after timing.
A graph holds one launch. "cold" flushes the L2 before each; "rotating" times a graph of 24
launches that go in turn over copies of the weight which no L2 holds together. Arms run in common
blocks, in random position-balanced order, the first arm twice: the control.

Timing runs in a child process, what is only checked in several at once. An arm that breaks or
hangs its process is recorded with the reason, and a new one goes on without it.

Exit codes: 0 every measured bar holds, 1 nothing was measured, 4 a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from bars import bars_of, bars_text, median_us  # noqa: E402
from device import describe, versions  # noqa: E402
from ladders import judged_pairs, read_ladder, stacks_of, tile_of  # noqa: E402
from plan import PARTS, SHAPES, Case, cases_of, weight_key  # noqa: E402
from record import RESULTS, origin, write  # noqa: E402
from supervise import MARK, Supervisor, run_all  # noqa: E402

_CONTENDERS = ("cublas", "tilewright", "triton", "humming", "gemlite", "tinygemm")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all of them")
    parser.add_argument("--arms", default=",".join(_CONTENDERS), help="the baseline first")
    parser.add_argument("--tile", action="append", default=[], metavar="NAME=TILE")
    parser.add_argument("--ladder", type=Path, help="its change sets as arms, instead of parts")
    parser.add_argument("--control", type=Path, help="a ladder of bfloat16 that must not move")
    parser.add_argument("--shapes", help="N x K instead of the part's own: 24576x4096,4096x4096")
    parser.add_argument("--rows", help="M instead of the part's own: 1024,4096")
    parser.add_argument("--blocks", type=int, default=12, help="paired blocks, at least 6")
    parser.add_argument("--readings", type=int, default=5, help="a sample is their median")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--stall", type=float, default=120, help="seconds without news: a hang")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1),
                        help="processes of the cases that are checked and not timed")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--name", default="w4a16", help="of the result file, after the date")
    parser.add_argument("--bars", type=Path, nargs="+", metavar="FILE", help="measure nothing")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.blocks < 6:
        parser.error(f"--blocks is {args.blocks}; fewer than 6 cannot be significant")
    args.tiles = {}
    for text in args.tile:
        name, _, tile = text.partition("=")
        if not tile or "/" in name or name in _CONTENDERS:
            parser.error(f"--tile is {text!r}; write NAME=algorithm(field=value, ...), with a "
                         "name of its own")  # fmt: skip
        args.tiles[name] = tile
    strange = sorted(set(args.arms.split(",")) - set(_CONTENDERS))
    if strange:
        parser.error(f"--arms names {strange}; known are {', '.join(_CONTENDERS)}")
    return args


def plan_of(args: argparse.Namespace) -> list[Case]:
    contenders = [*args.arms.split(","), *args.tiles]
    shapes: tuple[tuple[int, int], ...] = SHAPES
    if args.shapes:
        pairs = (text.split("x") for text in args.shapes.split(","))
        shapes = tuple((int(n), int(k)) for n, k in pairs)
    rows = tuple(int(m) for m in args.rows.split(",")) if args.rows else None
    if args.ladder:
        return ladder_cases(args.ladder, args.control, rows)
    return [
        replace(case, tiles=tuple(args.tiles.items()))
        for part in args.part or PARTS
        for case in cases_of(part, contenders=contenders, shapes=shapes, rows=rows)
    ]


def ladder_cases(
    ladder: Path, control: Path | None, rows: tuple[int, ...] | None = None
) -> list[Case]:
    """A case for each product of the ladder; its arms are the rungs, and the control's ends.

    Raises:
        SystemExit: an arm has no tile for a product.
    """
    from tilewright.tiles.tile import Problem

    cases = []
    stacks = stacks_of(ladder, control)
    for product in read_ladder(ladder).products:
        n, k = product.shape
        group = 128 if product.group is None else product.group
        for m in rows or product.m:
            tiles = {}
            for name, dtype, rules in stacks:
                problem = Problem("w4a16", "", dtype, product.type, "float", m, n, k, group)
                tile = tile_of(rules, problem.bucketed())
                if tile is None:
                    raise SystemExit(f"error: {name} has no tile for N={n} K={k} M={m}")
                tiles[name] = str(tile)
            cases.append(
                Case("ladder", n, k, m, tuple((name, dtype) for name, dtype, _ in stacks),
                     group=group, symmetric=product.type == "uint4b8", tiles=tuple(tiles.items()))
            )  # fmt: skip
    return cases


def show_record(record: dict[str, Any]) -> None:
    """A line for each case as it is finished; a ladder's record also gets its comparisons."""
    if record["part"] == "ladder":
        record["pairs"] = ladder_pairs(record)
        print(f"{record['id']}:\n{ladder_text(record)}", flush=True)
        return
    cells = []
    for arm, row in record["arms"].items():
        times = [
            f"{cache} {us:.1f}"
            for cache in ("cold", "rotating")
            if cache in record and (us := median_us(record, cache, arm)) is not None
        ]
        error = row["error"]
        cells.append(f"{arm} {' '.join(times)} ({'inf' if error is None else f'{error:.1e}'})")
    failed = dict(record["failed"])
    for cache in ("cold", "rotating"):
        failed |= {f"{arm} {cache}": why for arm, why in record.get(cache, {}).get(
            "failed", {}).items()}  # fmt: skip
    cells += [f"{arm} FAILED: {why[:80]}" for arm, why in failed.items()]
    print(f"{record['id']}: {' | '.join(cells)}", flush=True)


def ladder_pairs(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Each rung against the base and the rung below; arms whose result was wrong are left out."""
    blocks = record["cold"]["blocks"]
    names = [a for a in record["arms"] if blocks and a in blocks[0]["us"] and a not in
             record["failed"]]  # fmt: skip
    if not names or names[0] != record["cold"]["baseline"]:
        return []
    return [_finite(row) for row in judged_pairs(blocks, names, names[0])]


def ladder_text(record: dict[str, Any]) -> str:
    """A line an arm of a ladder: its time, and how it stands to the arms that it is held to."""
    lines = []
    for arm in record["arms"]:
        us = median_us(record, "cold", arm)
        stands = "; ".join(
            f"{row['ratio']:.3f}x [{row['low']:.3f}, {row['high']:.3f}] {row['verdict']} of "
            f"{row['a']}" for row in record["pairs"] if row["b"] == arm
        )  # fmt: skip
        lines.append(f"  {arm:48} {'wrong' if us is None else f'{us:9.1f} us'}  {stands}")
    lines += [f"  {arm}: {why}" for arm, why in record["failed"].items()]
    return "\n".join(lines)


def child(args: argparse.Namespace, cases: list[Case]) -> int:
    """Run the cases that the orders name; events go to standard output, a line each."""
    import torch
    from operands import draw_weight
    from timing import Arms, Journal, Settings, run_case

    from tilewright.measure import EventClock, StateProbe

    def write_event(event: dict[str, Any]) -> None:
        print(MARK + json.dumps(_finite(event)), flush=True)

    orders = json.loads(args.child.read_text())
    wanted = [case for case in cases if case.id in set(orders["cases"])]
    if "prepare" in orders:
        return prepare_arm(wanted, orders["prepare"])
    settings = Settings(args.blocks, args.readings, args.seed)
    journal = Journal(write_event)
    clock = EventClock()
    probe = StateProbe(gpu=clock.device_id)
    write_event({"event": "device", "device": describe()})
    arms: Arms | None = None
    key = None
    for case in wanted:
        if weight_key(case) != key:
            arms, key = None, weight_key(case)
            torch.cuda.empty_cache()
            journal.begin(case.id, "", "draw the weight")
            weight = draw_weight(case.N, case.K, case.group, symmetric=case.symmetric)
            arms = Arms(weight)
        assert arms is not None
        try:
            record = run_case(
                case, arms, settings, journal, orders["skip"].get(case.id, {}), clock, probe
            )
        except Exception:
            traceback.print_exc()
            return 70
        write_event({"event": "done", "record": record})
    return 0


def prepare_arm(cases: list[Case], arm: str) -> int:
    """Launch an arm once at each M of its cases, which are of one weight."""
    import torch
    from operands import DTYPES, activations, draw_weight
    from timing import Arms

    first = cases[0]
    arms = Arms(draw_weight(first.N, first.K, first.group, symmetric=first.symmetric))
    name, _, dtype = arm.rpartition("/")
    for case in cases:
        try:
            arms.of(case, name, dtype)[0](activations(case.M, case.K, DTYPES[dtype]))
        except Exception:  # it will be told where it counts
            traceback.print_exc()
    torch.cuda.synchronize()
    return 0


def _finite(value: Any) -> Any:
    """JSON has no infinities: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def result_of(supervisor: Supervisor, args: argparse.Namespace) -> dict[str, Any]:
    whole = origin(os.cpu_count() or 1)
    whole["gpu"] = supervisor.device
    whole["versions"] = {**whole["versions"], **versions()}
    title = read_ladder(args.ladder).title if args.ladder else ""
    return {
        "kind": "gpu-w4a16",
        "title": title,
        "origin": whole,
        "settings": {"blocks": args.blocks, "readings": args.readings, "seed": args.seed,
                     "tiles": args.tiles},
        "notes": supervisor.notes,
        "bars": [_finite(bar.to_dict()) for bar in bars_of(supervisor.records)],
        "cases": supervisor.records,
    }  # fmt: skip


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    if args.bars:
        records = [r for file in args.bars for r in json.loads(file.read_text())["cases"]]
        return _verdict(records)
    cases = plan_of(args)
    if args.child:
        return child(args, cases)
    given = sys.argv[1:] if words is None else words
    started = time.monotonic()
    supervisor = run_all(
        args, cases, [sys.executable, str(Path(__file__).resolve()), *given], show_record
    )
    for note in supervisor.notes:
        print(f"note: {note}")
    if not supervisor.records:
        print("error: no case was measured", file=sys.stderr)
        return 1
    result = result_of(supervisor, args)
    result["seconds"] = round(time.monotonic() - started, 1)
    print(f"{write(result, args.name, args.out).name}: {len(supervisor.records)} cases in "
          f"{result['seconds']} s")  # fmt: skip
    return _verdict(supervisor.records)


def _verdict(records: list[dict[str, Any]]) -> int:
    bars = bars_of(records)
    if all(record["part"] == "ladder" for record in records):
        bars = [bar for bar in bars if bar.holds is not None]
    print(bars_text(bars))
    return 4 if any(bar.holds is False for bar in bars) else 0


if __name__ == "__main__":
    sys.exit(main())
