"""ssd, the scan of Mamba-2, on one NVIDIA GPU against mamba_ssm's Triton kernels.

    python benchmarks/gpu/ssd.py                            everything in 30 s; peers as published
    python benchmarks/gpu/ssd.py --peer FOLDER              with mamba_ssm's kernels as arms
    python benchmarks/gpu/ssd.py --part scan --tile a='fused(chunk=128, ...)'   an arm more
    python benchmarks/gpu/ssd.py --part chunks              a sweep of the chunk size

Parts: "scan" times layers of three models at 4096 and 16384 tokens; "length" one of them up to
131072 tokens; "chunks" the plan of five kernels at every chunk size; "step" one token of 64
sequences.

x, B, C and dt are views of one projection, as a model has them. Every arm is checked first against
the float64 recurrence, token after token on the GPU (`ssd_reference`): a plain call, then a CUDA
graph replayed over NaN, and the graph's outputs once more after timing. The L2 is flushed before
each launch. Arms run in common blocks, in random position-balanced order, the first arm twice: the
control. The peer's kernels, in the first of the dtypes, are tuned by their own autotuner over all
configurations that they come with, for each layer and chunk, before they are captured.

Exit codes: 0 every measured bar holds, 1 nothing was measured, 4 a bar was missed.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from bars import BANDWIDTH, Bar, bars_text, finite, median_us, ratio  # noqa: E402
from device import describe, versions  # noqa: E402
from ladders import judged_against  # noqa: E402
from record import RESULTS, origin, write  # noqa: E402

PARTS = ("scan", "length", "chunks", "step")
LAYERS = {
    "nemotron-h-8b": (128, 64, 128, 8),
    "nemotron-nano-9b": (128, 80, 128, 8),
    "mamba2-2.7b": (80, 64, 128, 1),
}
"""Heads, head dimension, state, groups."""

MAMBA_SSM = {
    "nemotron-h-8b": {4096: 427.0, 16384: 1140.0},
    "nemotron-nano-9b": {16384: 1524.0},
    "mamba2-2.7b": {16384: 695.0},
}
"""Microseconds of mamba_ssm's kernels in bfloat16 on an H200, the best of chunks of 64, 128, 256:
measured apart, for where they are no arm."""

_ERRORS = {"float16": 1e-3, "bfloat16": 6e-3}
_WRONG = 0.05  # a relative error above this is no rounding: the arm is not timed
_PEER = "mamba_ssm "
"""What names of the peer's arms begin with; the chunk follows."""

_PEER_CHUNKS = (64, 128, 256)
_SWEEP = (64, 128, 192, 256, 512)


class Case(NamedTuple):
    """A layer at a length; of "step", a batch of sequences at one token."""

    part: str
    layer: str
    tokens: int
    dtype: str

    @property
    def id(self) -> str:
        return f"{self.part}-{self.layer}-L{self.tokens}-{self.dtype}"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all of them")
    parser.add_argument("--peer", type=Path, help="folder of mamba_ssm's Triton kernels")
    parser.add_argument("--tile", action="append", default=[], metavar="NAME=TILE")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--blocks", type=int, default=6, help="paired blocks, at least 6")
    parser.add_argument("--readings", type=int, default=3, help="a sample is their median")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30, help="begin no case after this time")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1),
                        help="processes that compile before anything is timed")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--name", default="h200-ssd", help="of the result file, after the date")
    args = parser.parse_args(words)
    if args.blocks < 6:
        parser.error(f"--blocks is {args.blocks}; fewer than 6 cannot be significant")
    strange = sorted(set(args.layers.split(",")) - set(LAYERS))
    if strange:
        parser.error(f"--layers names {strange}; known are {', '.join(LAYERS)}")
    args.tiles = dict(text.partition("=")[::2] for text in args.tile)
    return args


def cases_of(args: argparse.Namespace) -> list[Case]:
    """What is measured, what most depends on first."""
    layers, dtypes = args.layers.split(","), args.dtypes.split(",")
    first, dtype = layers[0], dtypes[0]
    found = {part: [Case(part, first, 64, dtype)] for part in PARTS}
    found["scan"] = [Case("scan", layer, m, dtype) for m in (16384, 4096) for layer in layers]
    found["scan"] += [Case("scan", first, 16384, other) for other in dtypes[1:]]
    found["length"] = [Case("length", first, m, dtype) for m in (4096, 32768, 131072)]
    found["chunks"] = [Case("chunks", first, 16384, dtype)]
    order = ("scan", "step", "length", "chunks")
    return [case for part in order if part in (args.part or PARTS) for case in found[part]]


def draw(case: Case, seed: int) -> Any:
    """A scan's operands, as a trained layer has them: ScanArgs."""
    import torch

    from tilewright.ops.ssd.op import scan_args

    heads, p, n, groups = LAYERS[case.layer]
    dtype, length = getattr(torch, case.dtype), case.tokens
    draw = torch.Generator(device="cuda").manual_seed(seed)
    widths = (heads * p, heads * p, groups * n, groups * n, heads)
    wide = -(-sum(widths) // 64) * 64
    whole = torch.empty(1, length, wide, dtype=dtype, device="cuda")
    for i in range(0, length, 8192):
        part = whole[:, i : i + 8192]
        part.copy_(torch.randn(part.shape, generator=draw, device="cuda"))
    _, x, b, c, dt = whole[..., : sum(widths)].split(widths, 2)

    def uniform(low: float, high: float) -> Any:
        between = torch.empty(heads, device="cuda")
        return torch.exp(between.uniform_(math.log(low), math.log(high), generator=draw))

    steps = uniform(1e-3, 1e-1)
    return scan_args(
        x.unflatten(2, (heads, p)), dt, -uniform(1.0, 16.0), b.unflatten(2, (groups, n)),
        c.unflatten(2, (groups, n)), D=torch.randn(heads, generator=draw, device="cuda"),
        dt_bias=steps + torch.log(-torch.expm1(-steps)), dt_softplus=True,
    )  # fmt: skip


def floor_us(case: Case) -> float:
    """Time in which the operands and results can cross the memory bus."""
    heads, p, n, groups = LAYERS[case.layer]
    size = 2.0
    each = size * (2 * heads * p + 2 * groups * n + heads)
    states = 4.0 * heads * p * n
    if case.part == "step":
        return case.tokens * (each + 2 * states) / BANDWIDTH * 1e6
    return (case.tokens * each + states) / BANDWIDTH * 1e6


def calls_of(case: Case, args: Any, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """By arm: run it; results are in `args`."""
    from tilewright.ops.ssd.gpu import gpu_scan
    from tilewright.tune.tile_arms import parse_tile

    found: dict[str, Callable[[], Any]] = {"tilewright": lambda: gpu_scan(args)}
    if case.part == "chunks":
        for chunk in _SWEEP:
            block = 128 if chunk % 128 == 0 else 64
            tile = parse_tile(
                f"five(chunk={chunk}, block={block}, block_p=64, block_n=128, heads=1, "
                f"num_warps={block // 16}, num_stages=2)"
            )
            found[f"chunk {chunk}"] = partial(gpu_scan, args, None, tile)
    for name, text in options.tiles.items():
        tile = parse_tile(text)
        found[name] = partial(gpu_scan, args, None, tile)
    if has_peer(case, options):
        for chunk in _PEER_CHUNKS:
            found[f"{_PEER}{chunk}"] = partial(peer_of(options.peer), args, chunk)
    return found


def has_peer(case: Case, options: argparse.Namespace) -> bool:
    dtype = options.dtypes.split(",")[0]
    return options.peer is not None and case.part == "scan" and case.dtype == dtype


@functools.cache
def peer_of(folder: Path) -> Any:
    from ssd_peer import Peer

    return Peer(folder)


def errors_of(
    name: str, run: Callable[[], Any], written: dict[str, tuple[Any, Any]]
) -> dict[str, float]:
    """Relative errors of what `run` writes over NaN.

    Args:
        name: of the check.
        written: what is written and what is right, by the suffix that tells it apart.
    """
    import torch
    from operands import relative_error

    for made, _ in written.values():
        made.fill_(math.nan)
    run()
    torch.cuda.synchronize()
    return {
        f"{name}{suffix}": relative_error(made, right) for suffix, (made, right) in written.items()
    }


def step_calls(case: Case, seed: int) -> tuple[dict[str, Callable[[], Any]], Any, Any]:
    """The arm of a step, the state it advances, and y after one step from the state as drawn."""
    import torch

    from tilewright.ops.ssd.op import ssd_step

    scan = draw(case, seed)
    heads, p, n, groups = LAYERS[case.layer]
    state = torch.randn(case.tokens, heads, p, n, device="cuda")
    x, dt, b, c = scan.x[0], scan.dt[0], scan.B[0], scan.C[0]

    def run() -> Any:
        return ssd_step(
            state, x, dt, scan.A, b, c, D=scan.D, dt_bias=scan.dt_bias, dt_softplus=True
        )

    steps = torch.nn.functional.softplus(dt.double() + scan.dt_bias.double())
    group = torch.arange(heads, device="cuda") // (heads // groups)
    decays = torch.exp(steps * scan.A.double())
    right = torch.empty(case.tokens, heads, p, dtype=torch.float64, device="cuda")
    for i in range(case.tokens):
        moved = state[i].double() * decays[i, :, None, None]
        moved += (steps[i, :, None] * x[i].double())[:, :, None] * b[i, group].double()[:, None, :]
        right[i] = (moved * c[i, group].double()[:, None, :]).sum(2)
    return {"tilewright": run}, state, right + scan.D.double()[:, None] * x.double()


def measure(case: Case, options: argparse.Namespace, clock: Any, probe: Any) -> dict[str, Any]:
    """The record of one case."""
    import torch
    from operands import relative_error
    from ssd_reference import recurrence
    from timing import capture

    from tilewright.measure import SamplePlan, compare_many
    from tilewright.measure.cache import GpuFlusher

    record: dict[str, Any] = {"id": case.id, **case._asdict(), "floor_us": floor_us(case),
                              "arms": {}, "failed": {}}  # fmt: skip
    graphs: dict[str, Any] = {}
    replays: dict[str, Callable[[], Any]]
    if case.part == "step":
        calls, state, right = step_calls(case, options.seed)
        drawn = state.clone()
        found = record["arms"]["tilewright"] = {
            "error": relative_error(calls["tilewright"](), right)
        }
        graphs["tilewright"] = capture([calls["tilewright"]])

        def written_by(arm: str) -> dict[str, tuple[Any, Any]]:
            return {"": (graphs[arm].outputs[0], right)}

        def replay(arm: str) -> None:
            state.copy_(drawn)
            graphs[arm].graph.replay()

        found |= errors_of("error_graph", partial(replay, "tilewright"), written_by("tilewright"))
        _keep_right(record, graphs, "tilewright")
    else:
        args = draw(case, options.seed)
        right, final = recurrence(args)

        def replay(arm: str) -> None:
            graphs[arm].graph.replay()

        def written_by(arm: str) -> dict[str, tuple[Any, Any]]:
            found = {"": (args.y[0], right), "_states": (args.final_states[0], final)}
            if arm.startswith(_PEER):  # it allocates its states: those of its graph are kept
                del found["_states"]
                if arm in graphs:
                    found["_states"] = (graphs[arm].outputs[0][0], final)
            return found

        for arm, call in calls_of(case, args, options).items():
            found = record["arms"].setdefault(arm, {})
            try:
                found |= errors_of("error", call, written_by(arm))
                graphs[arm] = capture([call])
                found |= errors_of("error_graph", partial(replay, arm), written_by(arm))
            except Exception as error:
                torch.cuda.synchronize()  # raises where nothing can be measured any more
                record["failed"][arm] = f"{type(error).__name__}: {error}"[:200]
                graphs.pop(arm, None)
                continue
            _keep_right(record, graphs, arm)
    if not graphs:
        return record
    blocks: list[dict[str, Any]] = []
    first, *others = graphs
    replays = {arm: graph.graph.replay for arm, graph in graphs.items()}
    if not others:  # there is nothing to compare it with, but its spread is known
        replays[f"{first} again"] = replays[first]
    judged = compare_many(
        replays.pop(first), replays, baseline_name=first, blocks=options.blocks, cold=True,
        flush=GpuFlusher(), clock=clock, plan=SamplePlan(1, options.readings), seed=options.seed,
        warm_up_us=1e5, probe=probe, on_block=lambda block: blocks.append(block.to_dict()),
    )  # fmt: skip
    record["cold"] = {
        "baseline": first, "launches_a_graph": 1, "blocks": blocks,
        "judgements": {arm: one.to_dict()["judgement"] for arm, one in judged.items()},
    }  # fmt: skip
    for arm in tuple(graphs):
        record["arms"][arm] |= errors_of("error_after", partial(replay, arm), written_by(arm))
        _keep_right(record, graphs, arm, "after timing: void")
    peers = [arm for arm in graphs if arm.startswith(_PEER)]
    if peers and first == "tilewright":
        record["pairs"] = finite(judged_against(blocks, peers, first))
    return record


def _keep_right(
    record: dict[str, Any], graphs: dict[str, Any], arm: str, why: str = "not timed"
) -> None:
    """Take an arm out of what is timed where its results are no roundings of the right ones."""
    worst = max(record["arms"][arm].values())
    if not worst <= _WRONG:
        record["failed"][arm] = f"relative error {worst:.3g}: {why}"
        del graphs[arm]


def bars_of(records: list[dict[str, Any]]) -> list[Bar]:
    """Every bar, those without a measurement among them."""

    def over_peer(layer: str, tokens: int, least: float) -> Bar:
        found = {}
        for r in records:
            if (r["part"], r["layer"], r["tokens"]) != ("scan", layer, tokens):
                continue
            ratios = [
                v
                for chunk in _PEER_CHUNKS
                if (v := ratio(r, "cold", f"{_PEER}{chunk}", "tilewright")) is not None
            ]
            us = median_us(r, "cold", "tilewright")
            if ratios:
                found[r["id"]] = min(ratios)
            elif us is not None and r["dtype"] == "bfloat16" and tokens in MAMBA_SSM[layer]:
                found[f"{r['id']} (published)"] = MAMBA_SSM[layer][tokens] / us
        return _bar(f"{layer} at {tokens} over mamba_ssm", found, least)

    errors: dict[str, dict[str, float]] = {name: {} for name in _ERRORS}
    for r in records:
        if r["part"] != "step":
            for arm, row in r["arms"].items():
                if not arm.startswith(_PEER):
                    errors[r["dtype"]][f"{r['id']} {arm}"] = max(row.values(), default=math.inf)
    lengths = {r["tokens"]: r for r in records if r["part"] == "length"}
    linear, drift = {}, {}
    shortest = min(lengths, default=0)
    for tokens, r in lengths.items():
        us, base = (median_us(one, "cold", "tilewright") for one in (r, lengths[shortest]))
        if tokens != shortest and us is not None and base is not None:
            linear[r["id"]] = us / tokens * shortest / base
            drift[r["id"]] = r["arms"]["tilewright"]["error"] / lengths[shortest]["arms"][
                "tilewright"]["error"]  # fmt: skip
    rates = {r["id"]: r["floor_us"] / us for r in records if r["part"] == "step"
             and (us := median_us(r, "cold", "tilewright")) is not None}  # fmt: skip
    return [
        over_peer("nemotron-h-8b", 16384, 2.5),
        over_peer("nemotron-h-8b", 4096, 2.5),
        over_peer("nemotron-nano-9b", 16384, 2.0),
        over_peer("mamba2-2.7b", 16384, 2.0),
        *(_bar(f"relative error {d}", errors[d], most, most=True) for d, most in _ERRORS.items()),
        _bar("time a token at 32768 and 131072 over that at 4096", linear, 1.05, most=True),
        _bar("error at 32768 and 131072 over that at 4096", drift, 1.5, most=True),
        _bar("step of 64 sequences, share of the bytes floor", rates, 0.7),
    ]


def _bar(name: str, found: dict[str, float], least: float, most: bool = False) -> Bar:
    if not found:
        return Bar(name, least, None, None, "", least, {}, most)
    worst = (max if most else min)(found, key=lambda case: found[case])
    mean = math.exp(sum(math.log(max(v, 1e-30)) for v in found.values()) / len(found))
    return Bar(name, least, mean, found[worst], worst, least, found, most)


def show(record: dict[str, Any]) -> None:
    cells = []
    for arm, row in record["arms"].items():
        us = median_us(record, "cold", arm)
        cells.append(
            f"{arm} {'' if us is None else f'{us:.1f}'} ({row.get('error', math.nan):.1e})"
        )
    cells += [f"{arm} FAILED: {why[:120]}" for arm, why in record["failed"].items()]
    print(f"{record['id']} floor {record['floor_us']:.0f}: {' | '.join(cells)}", flush=True)


def compile_for(job: tuple[Case | None, argparse.Namespace, str, tuple[int, int]]) -> None:
    """Launch an arm once, or without a case the reference: the compiler's cache is on disk."""
    import torch

    case, options, arm, share = job
    try:
        if case is None:
            from ssd_reference import recurrence

            for layer in options.layers.split(","):
                for dtype in options.dtypes.split(","):
                    recurrence(draw(Case("scan", layer, 4096, dtype), 0))
        elif arm.startswith(_PEER):
            from ssd_peer import Peer

            Peer(options.peer, share)(draw(case, 0), int(arm.removeprefix(_PEER)))
        elif case.part == "step":
            step_calls(case, 0)[0][arm]()
        else:
            calls_of(case, draw(case, 0), argparse.Namespace(**{**vars(options), "peer": None}))[
                arm
            ]()
        torch.cuda.synchronize()
    except Exception as error:  # it will be told where it counts
        print(f"note: {case} {arm}: {type(error).__name__}: {error}"[:300], flush=True)


def compile_all(cases: list[Case], options: argparse.Namespace) -> None:
    jobs: dict[Any, tuple[Case | None, argparse.Namespace, str, tuple[int, int]]] = {}
    jobs["reference"] = (None, options, "", (0, 1))
    for case in cases:
        arms = ["tilewright", *options.tiles]
        if case.part == "chunks":
            arms += [f"chunk {chunk}" for chunk in _SWEEP]
        for arm in arms:  # the same kernels at every length
            jobs.setdefault((case.layer, case.dtype, case.part == "step", arm),
                            (case, options, arm, (0, 1)))  # fmt: skip
        if has_peer(case, options):
            n, short = options.jobs, case._replace(tokens=4096)
            for arm, i in ((f"{_PEER}{chunk}", i) for chunk in _PEER_CHUNKS for i in range(n)):
                jobs.setdefault((case.layer, case.dtype, arm, i), (short, options, arm, (i, n)))
    context = multiprocessing.get_context("spawn")
    with context.Pool(max(1, min(options.jobs, len(jobs)))) as pool:
        pool.map(compile_for, list(jobs.values()), chunksize=1)


def _kept(
    records: list[dict[str, Any]], options: argparse.Namespace, started: float
) -> tuple[Path, list[Bar]]:
    """Write the result file of what was measured so far."""
    whole = origin(os.cpu_count() or 1)
    whole["gpu"] = describe()
    whole["versions"] = {**whole["versions"], **versions()}
    bars = bars_of(records)
    result = {
        "kind": "gpu-ssd", "title": "", "origin": whole,
        "settings": {"blocks": options.blocks, "readings": options.readings,
                     "seed": options.seed, "tiles": options.tiles},
        "peer": None if options.peer is None else {
            "name": "mamba_ssm's Triton kernels, as sglang ships them",
            "tuned": "by their own autotuner over all their configurations, 10 ms each",
            "chosen": peer_of(options.peer).chosen(),
        },
        "mamba_ssm_us": {name: {str(m): us for m, us in row.items()}
                         for name, row in MAMBA_SSM.items()},
        "bars": [finite(bar.to_dict()) for bar in bars], "cases": finite(records),
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    return write(result, options.name, options.out), bars


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    cases = cases_of(options)
    import torch

    from tilewright.measure import EventClock, StateProbe

    started = time.monotonic()
    compile_all(cases, options)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    clock = EventClock()
    probe = StateProbe(gpu=clock.device_id)
    records: list[dict[str, Any]] = []
    bars: list[Bar] = []
    path = options.out
    for at, case in enumerate(cases):
        if time.monotonic() - started > options.seconds:
            print(f"note: {len(cases) - at} cases were not reached")
            break
        torch.cuda.empty_cache()
        record = measure(case, options, clock, probe)
        show(record)
        records.append(record)
        path, bars = _kept(records, options, started)  # anew after each: a later case may not end
    if not records:
        print("error: no case was measured", file=sys.stderr)
        return 1
    print(f"{path.name}: {len(records)} cases in {time.monotonic() - started:.0f} s")
    print(bars_text(bars))
    return 4 if any(bar.holds is False for bar in bars) else 0


if __name__ == "__main__":
    sys.exit(main())
