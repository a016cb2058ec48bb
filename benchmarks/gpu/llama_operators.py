"""Products of ours and of llama.cpp over the same blocks, rows and ids, paired.

Both arms do what `test-backend-ops perf` does: a graph of many launches is computed and waited for,
and the host's clock says how long that took. In state "warm" all launches of a graph multiply the
same weight, as that program has them; in "rotating" they go in turn over copies which no L2 holds
together, as the layers of a model do. llama.cpp's arm is `ggml_peer.py`, a process of its own. It
takes and gives float32 and rounds rows to 8 bits by itself; ours takes and gives float16, and the
graph is a CUDA graph. Both are held to float64 products of the exact weights.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewright.measure import Comparison, ReportedClock, SamplePlan, StateProbe, compare_many

__all__ = [
    "BASE",
    "OURS",
    "Case",
    "Operands",
    "cases_of",
    "failed",
    "launch_once",
    "launches_of",
    "pair",
]

BASE, OURS = "llama.cpp", "tilewright"
SHAPE = (4096, 14336)
EXPERTS, USED, EXPERT_SHAPE = 128, 8, (768, 2048)
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
ROWS, TOKENS = (1, 8, 512), (1, 8, 32, 128, 512)

WRONG = {BASE: 0.05, OURS: 0.02}
"""A relative error above this is no rounding: nothing is timed. llama.cpp's rows have 8 bits."""

_FEW = 8  # rows up to which weights outweigh all else, and their place matters
_PERIOD, _EXPERT_PERIOD = 256, 4  # rows, and experts, after which a weight repeats
_ROTATION, _L2_FACTOR = 24, 4
_FLOPS, _LEAST, _MOST = 100e9, 16, 128  # of a graph: test-backend-ops' share, within limits
_COMPUTATIONS = 3  # of a graph in a sample


class Case(NamedTuple):
    """y[M, N] = x[M, K] @ W[N, K].T; with experts, each row meets `used` of them."""

    type_name: str
    N: int
    K: int
    M: int
    experts: int
    used: int
    state: str

    @property
    def op(self) -> str:
        """As ggml calls it."""
        return "MUL_MAT_ID" if self.experts else "MUL_MAT"

    @property
    def id(self) -> str:
        many = f"{self.experts}x" if self.experts else ""
        state = "" if self.state == "warm" else f", {self.state}"
        return f"{self.type_name}-{many}{self.N}x{self.K}-M{self.M}{state}"

    @property
    def flops(self) -> float:
        return 2.0 * self.M * self.N * self.K * max(1, self.used)


def cases_of(
    types: Sequence[str] = TYPES,
    rows: Sequence[int] = ROWS,
    expert_types: Sequence[str] = ("Q4_K",),
    tokens: Sequence[int] = TOKENS,
    *,
    shape: tuple[int, int] = SHAPE,
    experts: tuple[int, int, int, int] = (EXPERTS, USED, *EXPERT_SHAPE),
) -> list[Case]:
    """What is measured, cases of one weight together.

    Args:
        types, rows: of x @ W.T.
        expert_types, tokens: of products with experts.
        shape: N and K of W.
        experts: how many, how many of them a token meets, and N and K of each.
    """
    count, used, n, k = experts

    def states(m: int) -> Iterator[str]:
        yield "warm"
        if m <= _FEW:
            yield "rotating"

    found = [Case(t, *shape, m, 0, 0, s) for t in types for m in rows for s in states(m)]
    found += [
        Case(t, n, k, m, count, used, s) for t in expert_types for m in tokens for s in states(m)
    ]
    return found


def launches_of(case: Case) -> int:
    """Launches of a graph: what test-backend-ops takes, but never so few that waiting counts."""
    if case.state == "rotating":
        return _ROTATION
    return int(min(_MOST, max(_LEAST, _FLOPS // case.flops + 1)))


class Operands:
    """The weight of some cases: its blocks, its exact values, and copies packed for ours.

    Args:
        case: one of them.
        device: "cuda", or "cpu" for trying this.
        seed: of what is drawn.
    """

    def __init__(self, case: Case, device: str, seed: int) -> None:
        from moe import draw

        self.device, self._type = device, case.type_name
        period = _EXPERT_PERIOD if case.experts else _PERIOD
        whole = case.experts or case.N
        drawn = min(whole, period)
        if whole % drawn:
            raise SystemExit(f"error: {case.id}: {whole} is no multiple of {drawn}")
        rows, count = (case.N, drawn) if case.experts else (drawn, 1)
        sources, exact = draw(case.type_name, rows, case.K, seed, count)
        self.repeats = whole // drawn
        self.raw = np.stack([one.raw for one in sources]) if case.experts else sources[0].raw
        self.exact = exact.to(device)  # float64 [1 or experts, rows, K]
        self._packed: list[Any] = []

    def copies(self, count: int) -> list[Any]:
        """`count` of the packed weight, in places of their own."""
        while len(self._packed) < count:
            self._packed.append(self._pack())
        return self._packed[:count]

    def _pack(self) -> Any:
        from tilewright.layout.blocks import pack_blocks_for
        from tilewright.layout.experts import pack_gpu_experts
        from tilewright.ops.moe.experts import pack_expert_blocks

        whole = np.tile(self.raw, (self.repeats, *[1] * (self.raw.ndim - 1)))
        if self.raw.ndim == 2:
            return pack_blocks_for(whole, self._type, self.device)
        if self.device == "cpu":
            return pack_expert_blocks(whole, self._type)
        return pack_gpu_experts(whole, self._type, self.device)

    @property
    def nbytes(self) -> int:
        return int(self.raw.nbytes) * self.repeats

    def right(self, x: Any, ids: Any | None) -> Any:
        """The product in float64: [M, N], or [M, used, N] with ids [M, used]."""
        x = x.double()
        if ids is None:
            return (x @ self.exact[0].T).repeat(1, self.repeats)
        y = x.new_empty(*ids.shape, self.exact.shape[1])
        for number, weight in enumerate(self.exact):
            rows, choices = (ids % len(self.exact) == number).nonzero(as_tuple=True)
            y[rows, choices] = x[rows] @ weight.T
        return y


def _ids(case: Case, sets: int, seed: int) -> Any | None:
    """Experts that each row meets, int64 [sets, M, used], all of a row different."""
    import torch

    if not case.experts:
        return None
    generator = torch.Generator().manual_seed(seed + 1000)
    draws = torch.rand(sets, case.M, case.experts, generator=generator)
    chosen = draws.argsort(dim=2)[:, :, : case.used]
    if case.M == 1:  # one row's experts are others at every launch
        chosen = (torch.arange(sets * case.used) % case.experts).view(sets, 1, case.used)
    return chosen.contiguous()


class _Loop:
    """Stands in for a CUDA graph where there is none: the calls, one after the other."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._calls = calls
        self.outputs = [call() for call in calls]

    def replay(self) -> None:
        for y, call in zip(self.outputs, self._calls, strict=True):
            y.copy_(call())


def _captured(calls: Sequence[Callable[[], Any]], device: str) -> tuple[Callable[[], None], Any]:
    """What replays the calls and waits for them, and their outputs."""
    if device == "cpu":
        loop = _Loop(calls)
        return loop.replay, loop.outputs
    import torch
    from timing import capture

    captured = capture(calls)

    def replay() -> None:
        captured.graph.replay()
        torch.cuda.synchronize()

    return replay, captured.outputs


def _worst(outputs: Sequence[Any], rights: Sequence[Any]) -> float:
    """The largest relative error; outputs go in turn over the right results."""
    from operands import relative_error

    return max(
        relative_error(y, rights[i % len(rights)].to(y.device)) for i, y in enumerate(outputs)
    )


def failed(case: Case, error: Exception) -> dict[str, Any]:
    """The record of a case that could not be measured."""
    lines = str(error).strip().splitlines() or [""]
    return {**_record(case), "failed": {"": f"{type(error).__name__}: {lines[0][:200]}"}}


def _record(case: Case) -> dict[str, Any]:
    return {
        "id": case.id, "op": case.op, **case._asdict(), "arms": {BASE: {}, OURS: {}},
        "failed": {}, "judgement": None, "blocks": [],
    }  # fmt: skip


def launch_once(job: tuple[Case, str, int]) -> str:
    """Launch ours of (case, device, seed) once, which compiles it; why that failed, or nothing."""
    import torch

    case, device, seed = job
    try:
        operands = Operands(case, device, seed)
        x = torch.ones(case.M, case.K, dtype=torch.float16, device=device)
        ids = _ids(case, 1, seed)
        _call(operands.copies(1)[0], x, None if ids is None else ids[0].to(device))()
        torch.cuda.synchronize()
    except Exception as error:  # the case will fail again where it is recorded
        return f"{case.id}: {type(error).__name__}: {error}"[:200]
    return ""


def _call(weight: Any, x: Any, ids: Any | None) -> Callable[[], Any]:
    from tilewright.ops.mmq.op import mmq_gemm
    from tilewright.ops.moe.op import moe_gemm

    if ids is None:
        return lambda: mmq_gemm(x, weight)
    return lambda: moe_gemm(x, weight, ids)


def pair(
    case: Case,
    operands: Operands,
    peer: Any,
    *,
    blocks: int = 12,
    seed: int = 0,
    launches: int | None = None,
    l2_bytes: int,
    probe: StateProbe | None = None,
    folder: Path | None = None,
) -> tuple[dict[str, Any], Comparison | None]:
    """Check both arms of a case, then time them in common blocks, llama.cpp twice: the control.

    Args:
        case, operands: what is multiplied.
        peer: the process of `ggml_peer.py`, a `child.Child`.
        blocks: paired blocks, at least 6.
        launches: of a graph; None for `launches_of`.
        l2_bytes: copies of the weight hold at least four times as much.
        folder: where operands pass to the peer; None for a temporary one.

    Returns:
        (JSON values: errors of both arms by stage, what failed, launches, and the blocks with
        microseconds a launch; the comparison, None where an arm's result is wrong).
    """
    import torch

    launches = launches_of(case) if launches is None else launches
    rotating = case.state == "rotating"
    copies = 1
    if rotating:
        copies = min(launches, max(2, math.ceil(_L2_FACTOR * l2_bytes / operands.nbytes)))
    generator = torch.Generator().manual_seed(seed * 8209 + case.M)
    x = torch.randn(case.M, case.K, generator=generator).half()
    chosen = _ids(case, launches if rotating else 1, seed)
    record = {
        **_record(case), "launches": launches, "copies": copies, "weight_bytes": operands.nbytes,
    }  # fmt: skip

    own = x.to(operands.device) if operands.device != "cpu" else x.float()
    sets = [None] if chosen is None else list(chosen.to(operands.device))
    rights = [operands.right(own, ids) for ids in sets]
    replay, outputs = _ours(operands.copies(copies), own, sets, launches, operands.device)

    def ours() -> float:
        replay()  # untimed, as in the peer's process: the device may have served the other one
        began = time.perf_counter_ns()
        for _ in range(_COMPUTATIONS):
            replay()
        return (time.perf_counter_ns() - began) / 1e3 / _COMPUTATIONS / launches

    def theirs() -> float:
        return float(peer.ask("run", _COMPUTATIONS)["us"])

    def errors(stage: str) -> str | None:
        """Notes both arms' errors of what was computed last; the first that is wrong."""
        path = Path(place) / "y.npy"
        peer.ask("result", str(path))
        record["arms"][BASE][stage] = _worst(list(torch.from_numpy(np.load(path))), rights)
        record["arms"][OURS][stage] = _worst(outputs, rights)
        for arm, row in record["arms"].items():
            if not row[stage] <= WRONG[arm]:
                record["failed"][arm] = f"relative error {row[stage]:.3g} ({stage})"
                return f"{arm}: {record['failed'][arm]}"
        return None

    with tempfile.TemporaryDirectory(dir=folder) as place:
        paths = {name: str(Path(place) / f"{name}.npy") for name in ("raw", "x", "ids")}
        np.save(paths["raw"], operands.raw)
        np.save(paths["x"], x.float().numpy())
        if chosen is None:
            paths["ids"] = ""
        else:
            np.save(paths["ids"], chosen.to(torch.int32).numpy())
        peer.ask("open", {
            "type_name": case.type_name, "N": case.N, "K": case.K, "repeats": operands.repeats,
            "copies": copies, "launches": launches, **paths,
        })  # fmt: skip
        for y in outputs:
            y.fill_(math.nan)
        ours()
        theirs()
        if errors("error") is not None:
            return record, None
        (found,) = compare_many(
            theirs, {OURS: ours}, baseline_name=BASE, blocks=blocks, clock=ReportedClock(0.05),
            plan=SamplePlan(1, 1), seed=seed, warm_up_us=1e5, probe=probe,
            post_check=lambda: errors("error_after") or True,
        ).values()  # fmt: skip
    record["blocks"] = [block.to_dict() for block in found.blocks]
    record["judgement"] = found.to_dict()["judgement"]
    return record, found


def _ours(
    packed: Sequence[Any], x: Any, sets: Sequence[Any], launches: int, device: str
) -> tuple[Callable[[], None], Any]:
    """What computes all launches and waits, and the outputs that it writes."""
    each = [
        _call(packed[i % len(packed)], x, sets[i % len(sets)])
        for i in range(math.lcm(len(packed), len(sets)))
    ]
    return _captured([each[i % len(each)] for i in range(launches)], device)
