"""Where a GPU's time goes in a prefill or in single tokens: kernels, by the op they belong to.

torch's profiler names every kernel and says how long it ran. Tilewright's kernels are told by the
functions that are defined in the folders of the ops; attention and dense products by the names that
torch's libraries give theirs. The sum is the time that the GPU worked: a pass takes longer where it
waits for its launches, which a pass without the profiler says beside it.
"""

from __future__ import annotations

import ast
import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright.errors import MeasureError, UnsupportedError
from tilewright.model.generate import Decoder
from tilewright.model.placement import device_of

__all__ = [
    "KernelReport",
    "KernelTime",
    "group_kernels",
    "kernel_owners",
    "prefill_kernel_time",
    "step_kernel_time",
]

_ATTENTION = re.compile(r"flash|fmha|sdpa|attend|attention|_mha_", re.IGNORECASE)
_DENSE = re.compile(r"gemm|gemv|cutlass|xmma|nvjet|cublas|Cijk_", re.IGNORECASE)
_MOST_KERNELS = 8  # of one op that are named
_WARM_STEPS = 3  # the first captures the step


@dataclass(frozen=True)
class KernelTime:
    """The kernels of one op.

    Attributes:
        op: "mmq", "w4a16", "moe", "ssd", "conv1d", "attention", "dense" or "other".
        us: their time, microseconds.
        share: of all kernels' time.
        launches: how many ran.
        kernels: (name, microseconds, launches) of those that took longest, the longest first.
    """

    op: str
    us: float
    share: float
    launches: int
    kernels: tuple[tuple[str, float, int], ...]


@dataclass(frozen=True)
class KernelReport:
    """One prefill, or some single tokens.

    Attributes:
        tokens: of the prompt; 0 where single tokens were timed.
        total_us: time of all kernels.
        rows: by op, the longest first.
        steps: single tokens that were timed; 0 for a prefill.
        depth: tokens in the context before.
        pass_us: what the same took without the profiler, from the call to the logits on the host;
            None where that was not timed.
    """

    tokens: int
    total_us: float
    rows: tuple[KernelTime, ...]
    steps: int = 0
    depth: int = 0
    pass_us: float | None = None

    @property
    def test(self) -> str:
        """As llama-bench names it: "pp512", "tg16", "tg16 @ d512"."""
        what = f"tg{self.steps}" if self.steps else f"pp{self.tokens}"
        return f"{what} @ d{self.depth}" if self.depth else what

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the test is named as llama-bench names it."""
        return {
            "test": self.test,
            "steps": self.steps,
            "total_us": self.total_us,
            "pass_us": self.pass_us,
            "rows": [
                {
                    "op": row.op, "us": row.us, "share": row.share, "launches": row.launches,
                    "kernels": [
                        {"name": name, "us": us, "launches": count}
                        for name, us, count in row.kernels
                    ],
                }
                for row in self.rows
            ],
        }  # fmt: skip


@functools.cache
def kernel_owners() -> Mapping[str, tuple[str, ...]]:
    """The ops whose folders define a Triton or Gluon kernel, by the kernel's name.

    Read from the sources, not imported: most kernels need a compiler that may be missing.
    """
    found: dict[str, set[str]] = {}
    ops = Path(__file__).parents[1] / "ops"
    for path in ops.glob("*/*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                if any("jit" in ast.unparse(mark) for mark in node.decorator_list):
                    found.setdefault(node.name, set()).add(path.parent.name)
    return {name: tuple(sorted(owners)) for name, owners in found.items()}


def group_kernels(
    launched: Iterable[tuple[str, float]], owners: Mapping[str, Sequence[str]]
) -> tuple[KernelTime, ...]:
    """Kernels by op.

    Args:
        launched: (name, microseconds) of every kernel, in the order in which they ran.
        owners: as `kernel_owners`. A name of several ops counts for that op whose kernel ran last:
            second passes follow their first.
    """
    times: dict[str, dict[str, list[float]]] = {}
    last = ""
    for name, us in launched:
        candidates = owners.get(name, ())
        if candidates:
            last = last if last in candidates else candidates[0]
        op = last if candidates else _library_op(name)
        if op == "decoder":  # what lies between the products is no op of the catalog
            op = _library_op(name)
        times.setdefault(op, {}).setdefault(name, []).append(us)
    total = sum(us for kernels in times.values() for some in kernels.values() for us in some)
    rows = []
    for op, kernels in times.items():
        each = sorted(
            ((name, sum(some), len(some)) for name, some in kernels.items()), key=lambda k: -k[1]
        )
        us = sum(k[1] for k in each)
        rows.append(
            KernelTime(
                op, us, us / total if total else 0.0, sum(k[2] for k in each),
                tuple(each[:_MOST_KERNELS]),
            )
        )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.us))


def _library_op(name: str) -> str:
    if _ATTENTION.search(name):
        return "attention"
    return "dense" if _DENSE.search(name) else "other"


@torch.inference_mode()
def prefill_kernel_time(
    model: Any, decoder: Decoder, tokens: int, *, depth: int = 0, seed: int = 0
) -> KernelReport:
    """Run one prompt under torch's profiler, after two without it, the second of them timed.

    Args:
        model: on a GPU.
        decoder: of that model; it is reset.
        tokens: of the prompt, at least 1.
        depth: tokens in the context before it.
        seed: of the token ids.

    Raises:
        UnsupportedError: the model is not on a GPU, or `tokens` is below 1.
        MeasureError: the profiler saw no kernel.
    """
    _on_gpu(model)
    if tokens < 1:
        raise UnsupportedError(f"tokens: got {tokens}; give 1 or more")
    ids = _ids(model, depth + tokens, seed)
    _feed(decoder, ids[:, :depth])
    decoder.prefill(ids[:, depth:])
    _feed(decoder, ids[:, :depth])
    pass_us = _timed(lambda: decoder.prefill(ids[:, depth:]))
    _feed(decoder, ids[:, :depth])
    rows = _profiled(lambda: decoder.prefill(ids[:, depth:]))
    decoder.reset()
    return KernelReport(tokens, sum(row.us for row in rows), rows, depth=depth, pass_us=pass_us)


@torch.inference_mode()
def step_kernel_time(
    model: Any, decoder: Decoder, steps: int, *, depth: int = 0, seed: int = 0
) -> KernelReport:
    """Run single tokens under torch's profiler, after the same without it, which are timed.

    Args:
        model, decoder, depth, seed: as `prefill_kernel_time`.
        steps: tokens to time, at least 1.

    Raises:
        UnsupportedError, MeasureError: as `prefill_kernel_time`.
    """
    _on_gpu(model)
    if steps < 1:
        raise UnsupportedError(f"steps: got {steps}; give 1 or more")
    ids = _ids(model, depth + steps, seed)
    tokens = [int(token) for token in ids[0, depth:]]

    def run(some: list[int]) -> None:
        for token in some:
            decoder.step(token)

    _feed(decoder, ids[:, :depth])
    run(tokens[:_WARM_STEPS])
    _feed(decoder, ids[:, :depth])
    pass_us = _timed(lambda: run(tokens))
    _feed(decoder, ids[:, :depth])
    rows = _profiled(lambda: run(tokens))
    decoder.reset()
    return KernelReport(0, sum(row.us for row in rows), rows, steps, depth, pass_us)


def _timed(run: Callable[[], object]) -> float:
    """Microseconds of `run`, which ends with logits on the host."""
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) / 1e3


def _feed(decoder: Decoder, ids: torch.Tensor) -> None:
    """Start anew, with ids [1, T] in the context."""
    decoder.reset()
    if ids.shape[1]:
        decoder.prefill(ids)


def _on_gpu(model: Any) -> None:
    if device_of(model).type != "cuda":
        raise UnsupportedError(
            f"the model is on {device_of(model)}; kernel time is read on a GPU - use "
            "`tilewright profile` on the CPU"
        )


def _ids(model: Any, count: int, seed: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (1, count), generator=torch.Generator().manual_seed(seed))


def _profiled(run: Callable[[], object]) -> tuple[KernelTime, ...]:
    """The kernels that `run` launches, by op."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    kernels = [
        (event.time_range.start, event.name, float(event.time_range.elapsed_us()))
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not _is_copy(event.name)
    ]
    if not kernels:
        raise MeasureError(
            "torch's profiler saw no kernel: another profiler may hold the device; end it, or "
            "leave the kernel times out"
        )
    kernels.sort()
    return group_kernels(((name, us) for _, name, us in kernels), kernel_owners())


def _is_copy(name: str) -> bool:
    """Copies and fills by the driver are no kernels."""
    return name.startswith(("Memcpy", "Memset"))
