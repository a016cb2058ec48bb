"""moe, products with the experts of a mixture, on one NVIDIA GPU against llama.cpp's figures.

    python benchmarks/gpu/moe.py                                    Q4_K, in less than half a minute
    python benchmarks/gpu/moe.py --types Q6_K,uint4 --tokens 1,128  other types
    python benchmarks/gpu/moe.py --tile wide='slots(block_n=64, num_warps=4)'    one more arm

128 experts of 768 x 2048, 8 for each token: Qwen3-30B-A3B's. Arm "cublas" multiplies the same
weights, dequantized to float16 beforehand, with one cuBLAS product an expert that has rows, all of
them in one CUDA graph that was captured for these ids; ours is captured for any. llama.cpp was
measured apart, by its own tool (LLAMA_CPP): its figures are bars, not arms. Cases "mlp" are whole
layers: gate and up, SwiGLU, down, and the weighted sum.

Every arm is checked first against float64 products of the exact weights: a plain call, then a CUDA
graph replayed over NaN, and the graph's outputs once more after timing. What the L2 holds has a
name in the file::

    cold      the L2 is flushed before each launch; a graph of one
    rotating  a graph of 24 launches (of 8 from 32 tokens on), each with other ids, in turn over
              copies of the weights which no L2 holds together: what a launch takes among others
    warm      a graph of as many launches, all with the same ids and weights

llama.cpp's tool times launches in a row, all with the same ids and weights: its figures are held
against "rotating", where no weight is ever in the L2, and those of few tokens against "warm" too.
Times are of replayed CUDA graphs, with all the kernels that a product takes. Weights of the experts
repeat after 4: what is read and multiplied is the same amount, and drawing them takes no time.

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
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from bars import Bar, bar_of, bars_text, finite, median_us, ratio, show_times  # noqa: E402
from device import describe, versions  # noqa: E402
from record import RESULTS, origin, write  # noqa: E402

LLAMA_CPP = {1: 8.3, 8: 23.4, 32: 134.0, 128: 301.0, 512: 345.0}
"""Microseconds by tokens of MUL_MAT_ID, Q4_K, 128 experts of 768 x 2048, 8 used: test-backend-ops
perf of llama.cpp (ggml 0.26.0, built for sm_90) on an H200: launches in a row with the same ids and
weights, of which the L2 keeps those of few tokens."""

EXPERTS, USED, INNER, HIDDEN = 128, 8, 768, 2048
TOKENS = (1, 8, 32, 128, 512)
_LAYERS = (1, 128)
_GEMV = "gemv(block_n=4, block_k=512, num_warps=2, num_stages=1)"
_SORTED = "hopper(block_n=128, block_m={m}, num_stages=4, programs={programs})"
"""Arms more, of the forms that the default leaves for others: few slots without matrix units, few
slots sorted, and one program on a multiprocessor."""
_PERIOD = 4  # experts after which weights repeat
_PARTS = ("product", "mlp")
_ERRORS = {"product": 3e-4, "mlp": 1e-3}
_WRONG = 0.05  # a relative error above this is no rounding: the arm is not timed
_COPIES, _FEW = 3, 8


class Case(NamedTuple):
    """One product, or one layer, for T tokens."""

    part: str
    type_name: str
    T: int

    @property
    def id(self) -> str:
        return f"{self.part}-{self.type_name}-T{self.T}"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=_PARTS, action="append", help="default: all")
    parser.add_argument("--types", default="Q4_K", help="GGUF types, uint4, uint4b8")
    parser.add_argument("--tokens", help="T instead of its own: 128,512")
    parser.add_argument("--tile", action="append", default=[], metavar="NAME=TILE")
    parser.add_argument("--blocks", type=int, default=6, help="paired blocks, at least 6")
    parser.add_argument("--readings", type=int, default=3, help="a sample is their median")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1),
                        help="processes that compile before anything is timed")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--name", default="h200-moe", help="of the result file, after the date")
    args = parser.parse_args(words)
    if args.blocks < 6:
        parser.error(f"--blocks is {args.blocks}; fewer than 6 cannot be significant")
    args.tiles = {}
    for text in args.tile:
        name, _, tile = text.partition("=")
        if not tile or name in ("cublas", "tilewright"):
            parser.error(f"--tile is {text!r}; write NAME=algorithm(field=value, ...), with a "
                         "name of its own")  # fmt: skip
        args.tiles[name] = tile
    return args


def tiles_of(case: Case, args: argparse.Namespace) -> dict[str, str]:
    """Tiles that are arms of a case beside the default."""
    more = {}
    if case.part == "product" and not case.type_name.startswith("uint4"):
        height, programs = (64 if case.T > 128 else 16), (2 if case.T < 128 else 1)
        more["sorted" if programs == 2 else "one-program"] = _SORTED.format(
            m=height, programs=programs
        )
        if case.T <= _FEW:
            more["gemv"] = _GEMV
    return {**more, **args.tiles}


def cases_of(args: argparse.Namespace) -> list[Case]:
    """What is measured, those of one type together."""
    tokens = tuple(int(t) for t in args.tokens.split(",")) if args.tokens else None
    return [
        Case(part, name, t)
        for name in args.types.split(",")
        for part in args.part or _PARTS
        for t in tokens or {"product": TOKENS, "mlp": _LAYERS}[part]
    ]


def draw(type_name: str, n: int, k: int, seed: int, count: int = _PERIOD) -> tuple[list[Any], Any]:
    """Some experts as a checkpoint holds them, and their exact weights, float64 [count, n, k]."""
    import torch

    from tilewright.ops.contract import Case as OpCase
    from tilewright.ops.mmq.reference import mmq_rows
    from tilewright.ops.mmq.spec import SPEC as MMQ
    from tilewright.ops.w4a16.reference import w4a16_rows
    from tilewright.ops.w4a16.spec import draw_inputs

    four_bit = type_name.startswith("uint4")
    sources: list[Any] = []
    exact = []
    for number in range(count):
        if four_bit:
            case = OpCase("w4a16", type_name, "float16", 1, n, k, 128)
            sources.append(draw_inputs(case, seed + number).source)
        else:
            case = OpCase("mmq", type_name, "float16", 1, n, k)
            sources.append(MMQ.make_inputs(case, seed + number).source)
        rows = w4a16_rows(sources[-1]) if four_bit else mmq_rows(sources[-1])
        exact.append(torch.cat([torch.from_numpy(some.value()) for some in rows]))
    return sources, torch.stack(exact)


def pack(type_name: str, sources: list[Any], experts: int) -> Any:
    """The experts in turn, packed for this GPU."""
    import numpy as np

    from tilewright.layout.experts import pack_gpu_experts, pack_gpu_experts_w4

    each = [sources[e % len(sources)] for e in range(experts)]
    if type_name.startswith("uint4"):
        return pack_gpu_experts_w4(each, "cuda")
    return pack_gpu_experts(np.stack([one.raw for one in each]), type_name, "cuda")


def caches_of(case: Case) -> tuple[str, ...]:
    """What the L2 holds where a case is measured."""
    if case.part != "product":
        return ("cold",)
    return ("cold", "rotating", "warm") if case.T <= _FEW else ("cold", "rotating")


def launches_of(case: Case, cache: str) -> int:
    """Launches of a graph."""
    if cache == "cold":
        return 1
    return 24 if case.T <= _FEW else 8


def routing(tokens: int, launch: int, seed: int) -> Any:
    """Which experts the tokens of a launch choose, int64 [T, USED] on the CPU; one token's are
    others at every launch."""
    import torch

    generator = torch.Generator().manual_seed(1000 * seed + launch)
    if tokens == 1:
        return ((torch.arange(USED) + USED * launch) % EXPERTS)[None]
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:USED] for _ in range(tokens)])


class Layer:
    """The experts of a type: exact, packed for this GPU, and dequantized for cuBLAS."""

    def __init__(self, type_name: str, seed: int) -> None:
        import torch

        self.type_name = type_name
        shapes = {"up": (INNER, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
        self.exact: dict[str, Any] = {}
        self.packed: dict[str, list[Any]] = {}
        for i, (name, shape) in enumerate(shapes.items()):
            sources, exact = draw(type_name, *shape, seed=seed + 100 * i)
            self.exact[name] = exact.cuda()
            copies = _COPIES if name == "up" else 1
            self.packed[name] = [pack(type_name, sources, EXPERTS) for _ in range(copies)]
        self.dense = {name: exact.half() for name, exact in self.exact.items()}
        self.seed = seed
        self.torch: Any = torch

    def product(self, name: str, rows: Any, experts: Any) -> Any:
        """float64: each row times the expert that it names."""
        y = rows.new_empty(len(rows), self.exact[name].shape[1], dtype=self.torch.float64)
        for number in range(_PERIOD):
            mine = experts % _PERIOD == number
            y[mine] = rows[mine].double() @ self.exact[name][number].T
        return y

    def right(self, case: Case, x: Any, weights: Any, ids: Any) -> Any:
        """The result of a case, in float64."""
        experts = ids.reshape(-1)
        rows = x.repeat_interleave(USED, 0)
        if case.part != "mlp":
            return self.product("up", rows, experts).view(case.T, USED, INNER)
        gate, up = self.product("gate_up", rows, experts).split(INNER, 1)
        y = self.product("down", self.torch.nn.functional.silu(gate) * up, experts)
        return (y.view(case.T, USED, HIDDEN) * weights.double()[:, :, None]).sum(1)

    def ours(self, case: Case, x: Any, weights: Any, ids: Any, tile: Any, copy: int) -> Any:
        from tilewright.ops.moe.gpu import gpu_moe_mlp
        from tilewright.ops.moe.op import moe_gemm

        if case.part != "mlp":
            return moe_gemm(x, self.packed["up"][copy], ids, tile=tile)
        return gpu_moe_mlp(
            x, weights, ids, (self.packed["gate_up"][0],), self.packed["down"][0],
            activation="silu", tiles=(tile, tile),
        )  # fmt: skip

    def cublas(self, case: Case, x: Any, weights: Any, ids: Any) -> Callable[[], Any]:
        """One product an expert, for ids that the host knows; the weights of an expert repeat in
        the cache as they do not in ours."""
        torch = self.torch
        order = torch.argsort(ids.reshape(-1), stable=True)
        counts = torch.bincount(ids.reshape(-1), minlength=EXPERTS).tolist()

        def grouped(name: str, rows: Any) -> Any:
            y = rows.new_empty(len(rows), self.dense[name].shape[1])
            first = 0
            for expert, count in enumerate(counts):
                if count:
                    weight = self.dense[name][expert % _PERIOD]
                    torch.mm(rows[first : first + count], weight.T, out=y[first : first + count])
                    first += count
            return y

        def run() -> Any:
            rows = x[order // USED]
            if case.part != "mlp":
                y = torch.empty(len(rows), INNER, dtype=x.dtype, device=x.device)
                y[order] = grouped("up", rows)
                return y.view(case.T, USED, INNER)
            gate, up = grouped("gate_up", rows).split(INNER, 1)
            h = torch.nn.functional.silu(gate) * up
            y = torch.empty(len(rows), HIDDEN, dtype=x.dtype, device=x.device)
            y[order] = grouped("down", h)
            return (y.view(case.T, USED, HIDDEN).float() * weights[:, :, None]).sum(1).to(x.dtype)

        return run


def chosen(case: Case, layer: Layer, tile: Any, x: Any) -> str:
    """The tiles that an arm of ours runs with."""
    from tilewright.ops.moe.gpu import tile_for

    names = ("up",) if case.part == "product" else ("gate_up", "down")
    found = []
    for name in names:
        experts = layer.packed[name][0]
        like = x.new_empty(1, experts.K)
        found.append(str(tile_for(like, experts, case.T * USED, tile)))
    return " + ".join(found)


def compile_for(job: tuple[str, str, int, list[str]]) -> None:
    """Launch what a case launches, with 16 experts: the compiler's cache is on disk."""
    import torch

    from tilewright.ops.moe.gpu import gpu_moe_gemm, gpu_moe_mlp
    from tilewright.tune.tile_arms import parse_tile

    part, type_name, tokens, tiles = job

    def few(n: int, k: int) -> Any:
        return pack(type_name, draw(type_name, n, k, 0, count=1)[0], 16)

    def default(experts: Any) -> Any:
        """The tile of the real layer, which has more experts."""
        from tilewright.device import arch_of
        from tilewright.ops.choose import choose_tile
        from tilewright.ops.moe.gpu_space import MOE_SPACE, default_tile
        from tilewright.tiles.tile import Problem

        problem = Problem("moe", arch_of(x.device), "float16", experts.type_name, "float",
                          tokens * USED, experts.N, experts.K, experts.group)  # fmt: skip
        found = choose_tile(problem, MOE_SPACE)
        return default_tile(problem, EXPERTS) if found.how == "default" else found.tile

    x = torch.zeros(tokens, HIDDEN, dtype=torch.float16, device="cuda")
    ids = torch.zeros(tokens, USED, dtype=torch.int64, device="cuda")
    for text in ["", *tiles]:
        try:
            tile = parse_tile(text) if text else None
            if part != "mlp":
                up = few(INNER, HIDDEN)
                gpu_moe_gemm(x, up, ids, tile=tile or default(up))
            else:
                both, down = few(2 * INNER, HIDDEN), few(HIDDEN, INNER)
                weights = torch.ones(tokens, USED, device="cuda")
                gpu_moe_mlp(x, weights, ids, (both,), down, activation="silu",
                            tiles=(tile or default(both), tile or default(down)))  # fmt: skip
            torch.cuda.synchronize()
        except Exception as error:  # it will be told where it counts
            print(f"note: {part} {type_name} T={tokens} {text}: {error}"[:200], flush=True)


def compile_all(cases: list[Case], args: argparse.Namespace) -> None:
    work = [(c.part, c.type_name, c.T, list(tiles_of(c, args).values())) for c in cases]
    with multiprocessing.get_context("spawn").Pool(max(1, min(args.jobs, len(work)))) as pool:
        pool.map(compile_for, work, chunksize=1)


def measure(case: Case, layer: Layer, args: argparse.Namespace, clock: Any, probe: Any) -> Any:
    """The record of one case."""
    import torch
    from operands import activations, relative_error
    from timing import capture

    from tilewright.measure import SamplePlan, compare_many
    from tilewright.measure.cache import GpuFlusher
    from tilewright.tune.tile_arms import parse_tile

    x = activations(case.T, HIDDEN, torch.float16)
    weights = torch.rand(case.T, USED, device="cuda") + 0.1
    every = [routing(case.T, i, args.seed).cuda() for i in range(launches_of(case, "rotating"))]
    arms = {"cublas": None, "tilewright": None}
    arms |= {name: parse_tile(text) for name, text in tiles_of(case, args).items()}
    record: dict[str, Any] = {"id": case.id, **case._asdict(), "arms": {}, "failed": {}}
    for cache in caches_of(case):
        launches = launches_of(case, cache)
        routes = every[:launches] if cache != "warm" else every[:1] * launches
        rights = [layer.right(case, x, weights, ids) for ids in routes]
        graphs = {}
        for arm, tile in arms.items():
            if arm in record["failed"]:
                continue
            found = record["arms"].setdefault(arm, {})
            calls: list[Callable[[], Any]] = []
            for i, ids in enumerate(routes):
                if arm == "cublas":
                    calls.append(layer.cublas(case, x, weights, ids))
                else:
                    calls.append(
                        lambda ids=ids, copy=0 if cache == "warm" else i % _COPIES, tile=tile: (
                            layer.ours(case, x, weights, ids, tile, copy)
                        )
                    )
            try:
                found["error"] = relative_error(calls[0](), rights[0])
                graphs[arm] = capture(calls)
                found[f"error_{cache}"], found["repeatable"] = _errors(graphs[arm], rights)
                if arm != "cublas":
                    found["tile"] = chosen(case, layer, tile, x)
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
            plan=SamplePlan(1, args.readings), seed=args.seed, warm_up_us=2e4, probe=probe,
            on_block=lambda block, kept=blocks: kept.append(block.to_dict()),
        )  # fmt: skip
        for block in blocks:
            block["us"] = {arm: us / launches for arm, us in block["us"].items()}
        for arm, graph in graphs.items():
            after = max(relative_error(y, r) for y, r in zip(graph.outputs, rights, strict=True))
            record["arms"][arm][f"error_after_{cache}"] = after
            if not after <= _WRONG:
                record["failed"][arm] = f"relative error {after:.3g} after timing: void"
        record[cache] = {
            "baseline": "cublas", "launches_a_graph": launches, "blocks": blocks,
            "judgements": {arm: one.to_dict()["judgement"] for arm, one in judged.items()},
        }  # fmt: skip
    return record


def _errors(captured: Any, rights: list[Any]) -> tuple[float, bool]:
    """(worst relative error of two replays over NaN, whether both gave the same bits)."""
    import torch
    from operands import relative_error

    seen: list[list[Any]] = []
    worst = 0.0
    for _ in range(2):
        for y in captured.outputs:
            y.fill_(math.nan)
        captured.graph.replay()
        torch.cuda.synchronize()
        pairs = zip(captured.outputs, rights, strict=True)
        worst = max([worst, *(relative_error(y, right) for y, right in pairs)])
        seen.append([y.clone() for y in captured.outputs])
    return worst, all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def bars_of(records: list[dict[str, Any]]) -> list[Bar]:
    """Every bar, those without a measurement among them."""

    def over_llama(tokens: int, cache: str) -> Iterator[tuple[str, float]]:
        for record in records:
            if (record["part"], record["type_name"], record["T"]) == ("product", "Q4_K", tokens):
                ours = median_us(record, cache, "tilewright")
                if ours is not None:
                    yield record["id"], LLAMA_CPP[tokens] / ours

    faster = {r["id"]: ratio(r, "cold", "cublas", "tilewright") for r in records}
    errors = {
        f"{r['id']} {arm}": max(
            math.inf if row[key] is None else row[key] for key in row if key.startswith("error")
        )
        / _ERRORS[r["part"]]
        for r in records
        for arm, row in r["arms"].items()
        if arm != "cublas" and any(key.startswith("error") for key in row)
    }
    # What could not even be run missed the bar too; tiles of --tile may be refused.
    errors |= {f"{r['id']} tilewright": math.inf for r in records if "tilewright" in r["failed"]}
    return [
        *(bar_of(f"{t} tokens rotating: 4 times llama.cpp", dict(over_llama(t, "rotating")), 4.0,
                 4.0) for t in (128, 512)),
        *(bar_of(f"{t} tokens {cache}: never behind llama.cpp", dict(over_llama(t, cache)), 1.0,
                 1.0) for t in (1, 8) for cache in ("rotating", "warm")),
        bar_of("over cuBLAS, a launch an expert",
             {case: value for case, value in faster.items() if value is not None}, 1.0),
        bar_of("relative error, in units of 3e-4 (layers: 1e-3)", errors, 1.0, most=True),
    ]  # fmt: skip


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    cases = cases_of(args)
    import torch

    from tilewright.measure import EventClock, StateProbe

    started = time.monotonic()
    compile_all(cases, args)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    clock = EventClock()
    probe = StateProbe(gpu=clock.device_id)
    records: list[dict[str, Any]] = []
    layer: Layer | None = None
    for at, case in enumerate(cases):
        if time.monotonic() - started > args.seconds:
            print(f"note: {len(cases) - at} cases were not reached")
            break
        if layer is None or layer.type_name != case.type_name:
            layer = None
            torch.cuda.empty_cache()
            layer = Layer(case.type_name, args.seed)
        record = measure(case, layer, args, clock, probe)
        show_times(record)
        records.append(finite(record))
        keep(records, args, time.monotonic() - started)
    if not records:
        print("error: no case was measured", file=sys.stderr)
        return 1
    print(bars_text(bars_of(records)))
    return 4 if any(bar.holds is False for bar in bars_of(records)) else 0


def keep(records: list[dict[str, Any]], args: argparse.Namespace, seconds: float) -> Path:
    """Write what there is so far: nothing is lost if a later case breaks the process."""
    whole = origin(os.cpu_count() or 1)
    whole["gpu"] = describe()
    whole["versions"] = {**whole["versions"], **versions()}
    result = {
        "kind": "gpu-moe", "title": "", "origin": whole,
        "settings": {"blocks": args.blocks, "readings": args.readings, "seed": args.seed,
                     "tiles": args.tiles, "experts": EXPERTS, "used": USED,
                     "inner": INNER, "hidden": HIDDEN, "experts_repeat_after": _PERIOD},
        "llama_cpp_us": {str(t): us for t, us in LLAMA_CPP.items()},
        "bars": [finite(bar.to_dict()) for bar in bars_of(records)], "cases": records,
        "seconds": round(seconds, 1),
    }  # fmt: skip
    return write(result, args.name, args.out)


if __name__ == "__main__":
    sys.exit(main())
