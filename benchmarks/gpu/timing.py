"""One case on the GPU: capture every arm, check it, time all arms in common blocks, check again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from contenders import build, copies_of
from operands import DTYPES, Weight, activations, relative_error
from plan import Case, arm_name

from tilewright.measure import Block, EventClock, SamplePlan, StateProbe, compare_many
from tilewright.measure.cache import GpuFlusher
from tilewright.tune.tile_arms import parse_tile

__all__ = ["Arms", "Journal", "Settings", "run_case"]

WRONG = 0.05
"""A relative error above this is no rounding: the arm is not timed."""

_ROTATION = 24  # launches of a graph that rotates over copies of the weight
_L2_FACTOR = 4  # copies hold at least this many times the L2


class Journal:
    """Says what is about to run, so that what broke the process is known afterwards."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self.write = write

    def begin(self, case: str, arm: str, stage: str) -> None:
        self.write({"event": "begin", "case": case, "arm": arm, "stage": stage})


@dataclass(frozen=True)
class Settings:
    blocks: int = 12
    readings: int = 5
    seed: int = 0


class Arms:
    """The contenders of one weight, packed when they are first asked for."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self._built: dict[tuple[str, str, str], list[Any]] = {}

    def of(self, case: Case, name: str, dtype: str, copies: int = 1) -> list[Any]:
        """`copies` of the contender, its tile the one that the case names for it, if any."""
        text = dict(case.tiles).get(name, "")
        key = (name, dtype, text)
        if key not in self._built:
            tile = parse_tile(text) if text else None
            self._built[key] = [build(name, self.weight, DTYPES[dtype], tile)]
        have = self._built[key]
        if len(have) < copies:
            self._built[key] = have = copies_of(have[0], copies)
        return have[:copies]


@dataclass
class _Captured:
    """A graph and the outputs it writes.

    It holds the calls too: a graph does not keep alive what it reads, and what is freed before the
    next capture is unmapped there.
    """

    graph: torch.cuda.CUDAGraph
    outputs: list[torch.Tensor]
    calls: tuple[Callable[[], torch.Tensor], ...]

    def errors(self, right: torch.Tensor) -> tuple[float, bool]:
        """(worst relative error of two replays over NaN, whether both gave the same bits)."""
        seen: list[list[torch.Tensor]] = []
        worst = 0.0
        for _ in range(2):
            for y in self.outputs:
                y.fill_(math.nan)
            self.graph.replay()
            torch.cuda.synchronize()
            worst = max([worst, *(relative_error(y, right) for y in self.outputs)])
            seen.append([y.clone() for y in self.outputs])
        same = all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
        return worst, same


def capture(calls: Sequence[Callable[[], torch.Tensor]]) -> _Captured:
    """A CUDA graph of the calls, one after the other; warmed up on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in dict.fromkeys(calls):
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    return _Captured(graph, outputs, tuple(calls))


def run_case(
    case: Case,
    arms: Arms,
    settings: Settings,
    journal: Journal,
    skip: dict[str, str],
    clock: EventClock,
    probe: StateProbe,
) -> dict[str, Any]:
    """The record of one case.

    Args:
        case: what to run.
        arms: the contenders of its weight.
        settings: blocks and readings.
        journal: told before each step.
        skip: reasons by arm, for arms that already broke a process.
        clock, probe: of the GPU.

    Returns:
        JSON values: `arms` with errors, `failed` with reasons, and for each cache the blocks with
        every sample in microseconds a launch.
    """
    record: dict[str, Any] = {**asdict(case), "id": case.id, "arms": {}, "failed": {}}
    record["arms"] = {}
    del record["caches"]
    products: dict[str, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = {}
    ready: list[tuple[str, str]] = []
    for name, dtype in case.arms:
        arm = arm_name(name, dtype)
        if arm in skip:
            record["failed"][arm] = skip[arm]
            continue
        if dtype not in products:
            x = activations(case.M, case.K, DTYPES[dtype])
            bias = activations(1, case.N, DTYPES[dtype], seed=1)[0] if case.bias else None
            products[dtype] = (x, bias, arms.weight.product(x, bias))
        x, bias, right = products[dtype]
        journal.begin(case.id, arm, "check")
        try:
            contender = arms.of(case, name, dtype)[0]
            found = _check(contender, x, bias, right)
        except Exception as error:  # a peer may raise anything; it must not end the others
            record["failed"][arm] = _reason(error)
            continue
        if case.M and hasattr(contender, "chosen"):
            found["tile"] = contender.chosen(x)
        record["arms"][arm] = found
        if found["error"] <= WRONG:
            ready.append((name, dtype))
        else:
            record["failed"][arm] = f"relative error {found['error']:.3g}: not timed"
    for cache in case.caches:
        record[cache] = _measure(
            case, cache, arms, ready, products, settings, journal, clock, probe, record
        )
    return record


def _reason(error: Exception) -> str:
    torch.cuda.synchronize()  # raises where the context is broken: the caller starts anew
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _check(
    contender: Any, x: torch.Tensor, bias: torch.Tensor | None, right: torch.Tensor
) -> dict[str, Any]:
    """Errors of a plain call and of a graph replayed over NaN."""
    call = (lambda: contender(x)) if bias is None else (lambda: contender.with_bias(x, bias))
    y = call()
    eager = relative_error(y, right)
    if x.shape[0] == 0:
        return {"error": eager, "eager_error": eager, "repeatable": True, "shape": list(y.shape)}
    worst, same = capture([call]).errors(right)
    return {"error": max(eager, worst), "eager_error": eager, "repeatable": same}


def _measure(
    case: Case,
    cache: str,
    arms: Arms,
    ready: Sequence[tuple[str, str]],
    products: dict[str, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]],
    settings: Settings,
    journal: Journal,
    clock: EventClock,
    probe: StateProbe,
    record: dict[str, Any],
) -> dict[str, Any]:
    """Blocks of all arms with one state of the cache."""
    graphs: dict[str, _Captured] = {}
    failed: dict[str, str] = {}
    rights: dict[str, torch.Tensor] = {}
    launches = 1 if cache == "cold" else _ROTATION
    for name, dtype in ready:
        arm = arm_name(name, dtype)
        x, _, right = products[dtype]
        journal.begin(case.id, arm, f"capture {cache}")
        try:
            calls = _calls(arms, case, name, dtype, x, launches)
            graphs[arm] = capture(calls)
            error, _ = graphs[arm].errors(right)
        except Exception as error_:
            failed[arm] = _reason(error_)
            graphs.pop(arm, None)
            continue
        if error > WRONG:
            failed[arm] = f"relative error {error:.3g} in the {cache} graph: not timed"
            del graphs[arm]
            continue
        rights[arm] = right
    if len(graphs) < 2:
        return {"blocks": [], "failed": failed, "note": "fewer than two arms left to compare"}
    baseline, *others = graphs
    blocks: list[Block] = []
    journal.begin(case.id, "", f"time {cache}")
    found = compare_many(
        graphs[baseline].graph.replay,
        {arm: graphs[arm].graph.replay for arm in others},
        baseline_name=baseline,
        blocks=settings.blocks,
        cold=cache == "cold",
        flush=GpuFlusher() if cache == "cold" else None,
        clock=clock,
        plan=SamplePlan(1, settings.readings),
        seed=settings.seed,
        warm_up_us=5e5,
        probe=probe,
        on_block=blocks.append,
    )
    for arm, captured in graphs.items():
        after = max(relative_error(y, rights[arm]) for y in captured.outputs)
        record["arms"][arm][f"error_after_{cache}"] = after
        if after > WRONG:
            record["failed"][arm] = f"relative error {after:.3g} after timing: void"
    taken = []
    for block in blocks:
        row = block.to_dict()
        row["us"] = {arm: us / launches for arm, us in row["us"].items()}
        taken.append(row)
    return {
        "baseline": baseline,
        "failed": failed,
        "launches_a_graph": launches,
        "settings": next(iter(found.values())).settings,
        "judgements": {arm: comparison.to_dict()["judgement"] for arm, comparison in found.items()},
        "blocks": taken,
    }


def _calls(
    arms: Arms, case: Case, name: str, dtype: str, x: torch.Tensor, launches: int
) -> list[Callable[[], torch.Tensor]]:
    """One call, or `launches` of them in turn over copies that no L2 holds."""
    if launches == 1:
        contender = arms.of(case, name, dtype)[0]
        return [lambda: contender(x)]
    cache = torch.cuda.get_device_properties(x.device).L2_cache_size
    count = max(2, math.ceil(_L2_FACTOR * cache / arms.of(case, name, dtype)[0].bytes))
    each = [lambda c=c: c(x) for c in arms.of(case, name, dtype, min(count, launches))]
    return [each[i % len(each)] for i in range(launches)]
