"""Where a model's time goes: by role, op and weight type, for a prompt and for single tokens.

A captured model is a list of launches. Each is put into a program of its own, and a pass runs
these programs in order on the model's own buffers, so every launch meets the caches as the one
before it left them. A launch's time is its median over repetitions less the time of an empty
program, which is what timing adds. Any other model is timed by hooks around its modules: a module's
time is its own less that of the modules inside it, less what the hooks of those cost.

Passes without instruments are run between those with them; how far the sum of the parts is from
such a pass says what the breakdown is worth. What an instrumented pass computes must be, bit for
bit, what the other one computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from tilewright.errors import GateError, MeasureError, UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.measure import Ceiling, Work, check_roofline, last_level_cache_bytes
from tilewright.model.generate import Decoder
from tilewright.model.profile_parts import Instruments, Part, instruments_for

__all__ = ["PhaseProfile", "ProfileReport", "ProfileRow", "profile"]

Passes = list[list[tuple[Part, float]]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ProfileRow:
    """What one kind of work took in one pass.

    Attributes:
        role: "q/k/v", "o", "gate/up", "down", "head", "attention", "norm", "rope", "quantize",
            "embed", "activation" or "other".
        op: "mmq", "w4a16", "dense", or "" for what is no product.
        weight_type: of a product; `type_id` is GGUF's number for it, None for others.
        kernel: name of the kernel, or of the module's class.
        calls: launches a pass.
        us: their time a pass, microseconds.
        share: of all rows' time.
        gflops, gbps: rates of products and attention; None where no count is known.
        of_gflops, of_gbps: shares of the measured ceiling. Bytes that a cache still holds may come
            faster than memory gives them. None without a ceiling, and for 8-bit products, whose
            arithmetic is another one than the ceiling's.
    """

    role: str
    op: str
    weight_type: str
    type_id: int | None
    kernel: str
    calls: int
    us: float
    share: float
    gflops: float | None
    gbps: float | None
    of_gflops: float | None
    of_gbps: float | None


@dataclass(frozen=True)
class PhaseProfile:
    """One phase.

    Attributes:
        name: "prefill" or "decode".
        tokens: prompt tokens of a pass, or 1.
        depth: tokens in the context before the first pass.
        rows: the longest first.
        sum_us: sum of the rows, which are medians.
        timed_us: median over instrumented passes of the sum of their parts: above `sum_us` by
            what disturbed a part now and then, which medians leave out.
        whole_us: median pass without instruments: above `timed_us` by what is in no part.
        launches: launches or hooked calls a pass.
        overhead_us: what timing adds to each of them; it has been taken off.
        passes: instrumented passes.
    """

    name: str
    tokens: int
    depth: int
    rows: tuple[ProfileRow, ...]
    sum_us: float
    timed_us: float
    whole_us: float
    launches: int
    overhead_us: float
    passes: int

    def by(self, key: str) -> dict[str, float]:
        """Shares of time by "role", "weight_type" or "kernel", the largest first."""
        found: dict[str, float] = {}
        for row in self.rows:
            found[getattr(row, key)] = found.get(getattr(row, key), 0.0) + row.share
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class ProfileReport:
    """What `profile` found.

    Attributes:
        decoder: class of what stepped the model.
        activations: its path.
        method: "launches" or "modules".
        phases: prefill and decode.
        ceiling: measured on this machine, or None.
    """

    decoder: str
    activations: str
    threads: int
    method: str
    phases: tuple[PhaseProfile, ...]
    ceiling: Ceiling | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def profile(
    model: Any,
    *,
    prompt: int = 512,
    steps: int = 16,
    depth: int = 0,
    repetitions: int = 5,
    seed: int = 0,
    ceiling: Ceiling | None = None,
    progress: Progress | None = None,
) -> ProfileReport:
    """Break down the time of a prompt and of single-token steps.

    Args:
        model: from `tilewright.load`, or any transformers causal model on the CPU.
        prompt: tokens of the prefill phase; 0 leaves it out.
        steps: single-token steps of the decode phase, which begins at `depth` + `prompt`; 0
            leaves it out.
        depth: tokens fed untimed before the prompt.
        repetitions: passes of the prefill phase, as many with instruments as without.
        seed: of the token ids.
        ceiling: what the machine can do, from `tilewright.model.peak.measure_ceiling`.
        progress: called with (what runs now, passes done, passes in all).

    Raises:
        UnsupportedError: nothing to do, or more tokens than the model's context.
        GateError: an instrumented pass computes something else than one without instruments.
        MeasureError: a rate above the ceiling.
    """
    if min(prompt, steps, depth) < 0 or prompt + steps == 0 or repetitions < 1:
        raise UnsupportedError(
            f"prompt {prompt}, steps {steps}, depth {depth}, repetitions {repetitions}: give a "
            "prompt or steps above 0, and at least 1 repetition"
        )
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and depth + prompt + steps > limit:
        raise UnsupportedError(
            f"{depth + prompt + steps} tokens do not fit the model's context of {limit}; make the "
            "prompt or the depth shorter"
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (1, depth + prompt + steps), generator=generator)
    before, text, single = ids.split([depth, prompt, steps], dim=1)
    total, done = (repetitions if prompt else 0) + steps, 0
    run = _Run(instruments_for(model))

    def tell(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(what, done, total)
        done += 1

    phases = []
    if prompt:
        run.prefill(before, text)
        run.clear()
        for _ in range(repetitions):
            tell(f"prefill of {prompt}")
            run.prefill(before, text)
        phases.append(run.phase("prefill", prompt, depth, ceiling))
    if steps:
        run.feed(torch.cat([before, text], dim=1))
        run.clear()
        for token in single[0].tolist():
            tell("decode")
            run.step(token)
        # The first step allocates what all others use.
        run.drop_first()
        phases.append(run.phase("decode", 1, depth + prompt, ceiling))
    tell("done")
    found = {m.activations for m in model.modules() if hasattr(m, "activations")}
    return ProfileReport(
        decoder=type(run.instruments.plain).__name__,
        activations=", ".join(sorted(found)) or "float",
        threads=torch.get_num_threads(),
        method=run.instruments.method,
        phases=tuple(phases),
        ceiling=ceiling,
    )


class _Run:
    """Passes with and without instruments, in turn."""

    def __init__(self, instruments: Instruments) -> None:
        self.instruments = instruments
        self._passes: Passes = []
        self._whole_us: list[float] = []

    def clear(self) -> None:
        self._passes, self._whole_us = [], []

    def drop_first(self) -> None:
        if len(self._passes) > 1:
            del self._passes[0], self._whole_us[0]

    def feed(self, ids: torch.Tensor) -> None:
        """Put both decoders behind `ids`."""
        for decoder in (self.instruments.plain, self.instruments.timed):
            decoder.reset()
            if ids.shape[1]:
                decoder.prefill(ids)

    def prefill(self, before: torch.Tensor, text: torch.Tensor) -> None:
        self.feed(before)
        self._pass(lambda decoder: decoder.prefill(text))

    def step(self, token: int) -> None:
        self._pass(lambda decoder: decoder.step(token))

    def _pass(self, run: Callable[[Decoder], torch.Tensor]) -> None:
        start = time.perf_counter_ns()
        right = run(self.instruments.plain)
        self._whole_us.append((time.perf_counter_ns() - start) / 1e3)
        self.instruments.seen.clear()
        logits = run(self.instruments.timed)
        self._passes.append(list(self.instruments.seen))
        if not torch.equal(right, logits):
            far = float((right - logits).abs().max())
            raise GateError(
                f"the instrumented pass gives other logits, off by {far:.3g}: its breakdown would "
                "be of another computation"
            )

    def phase(self, name: str, tokens: int, depth: int, ceiling: Ceiling | None) -> PhaseProfile:
        """Median over passes of each part, parts of one kind together."""
        counts = {len(one) for one in self._passes}
        if len(counts) != 1:
            raise MeasureError(f"passes of {name} had {sorted(counts)} parts; they must be equal")
        kinds: dict[tuple[str, str, str, str], list[tuple[Part, float]]] = {}
        for parts in zip(*self._passes, strict=True):
            part = parts[len(parts) // 2][0]
            key = (part.role, part.op, part.weight_type, part.kernel)
            kinds.setdefault(key, []).append((part, median(us for _, us in parts)))
        whole_us = median(self._whole_us)
        sum_us = sum(us for kind in kinds.values() for _, us in kind)
        rows = [_row(kind, sum_us, ceiling) for kind in kinds.values()]
        if ceiling is not None and tokens == 1:
            moved = sum(part.bytes for kind in kinds.values() for part, _ in kind if part.op)
            _check_memory(name, whole_us, moved, ceiling)
        return PhaseProfile(
            name=name,
            tokens=tokens,
            depth=depth,
            rows=tuple(sorted(rows, key=lambda row: -row.us)),
            sum_us=sum_us,
            timed_us=median(sum(us for _, us in one) for one in self._passes),
            whole_us=whole_us,
            launches=counts.pop(),
            overhead_us=self.instruments.overhead_us,
            passes=len(self._passes),
        )


def _row(kind: Sequence[tuple[Part, float]], sum_us: float, ceiling: Ceiling | None) -> ProfileRow:
    part = kind[0][0]
    us = sum(time for _, time in kind)
    flops, moved = sum(p.flops for p, _ in kind), sum(p.bytes for p, _ in kind)
    gflops = flops / us / 1e3 if flops and us else None
    gbps = moved / us / 1e3 if moved and us else None
    integer = part.kernel.startswith("int8")
    peak = None if ceiling is None or integer else ceiling.gflops
    if peak and us:
        check_roofline(
            f"{part.role} ({part.kernel})", us, Work(flops=flops), Ceiling(gflops=peak),
            from_memory=False,
        )  # fmt: skip
    width = None if ceiling is None else ceiling.gbps
    block = BLOCK_TYPES.get(part.weight_type)
    return ProfileRow(
        role=part.role,
        op=part.op,
        weight_type=part.weight_type,
        type_id=None if block is None else int(block.type_id),
        kernel=part.kernel,
        calls=len(kind),
        us=us,
        share=us / sum_us if sum_us else 0.0,
        gflops=gflops,
        gbps=gbps,
        of_gflops=gflops / peak if gflops and peak else None,
        of_gbps=gbps / width if gbps and width else None,
    )


def _check_memory(name: str, us: float, moved: float, ceiling: Ceiling) -> None:
    """A single-token pass must fetch from memory what its products exceed the cache by."""
    try:
        kept = last_level_cache_bytes()
    except MeasureError:
        return
    check_roofline(
        f"a pass of {name}", us, Work(bytes=max(moved - kept, 0.0)), Ceiling(gbps=ceiling.gbps),
        from_memory=True,
    )  # fmt: skip
