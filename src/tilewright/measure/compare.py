"""Paired comparison of callables, with a verdict that can be wrong only as often as stated.

Blocks of {A, B, A'} run in random position-balanced order, where A' is A once more: the control.
Drift, slow wander and an order effect then fall on both arms alike. No sample is ever dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from tilewright.errors import GateError, MeasureError
from tilewright.measure.cache import CpuFlusher, GpuFlusher, last_level_cache_bytes
from tilewright.measure.clock import Clock, CpuClock, EventClock, Launch
from tilewright.measure.roofline import Ceiling, Work, check_roofline
from tilewright.measure.sample import Block, SamplePlan, plan_samples, run_blocks, warm_up
from tilewright.measure.state import StateProbe
from tilewright.measure.stats import holm, sign_test
from tilewright.measure.verdict import MIN_BLOCKS, Judgement, Verdict, judge

__all__ = ["Comparison", "adjust_family", "compare", "compare_many"]

_CONTROL = "control"
PostCheck = Callable[[], Any]


@dataclass(frozen=True)
class Comparison:
    """B against A: the judgement, and everything needed to judge again.

    Attributes:
        a, b: names of the arms.
        judgement: verdict and figures.
        blocks: finished blocks; `us` holds the samples of a, of b and of "control" (a again).
        settings: how the blocks were taken: clock, plan, cache, seeds, alpha, delta.
        interrupted: Ctrl-C ended the run before its last block.
    """

    a: str
    b: str
    judgement: Judgement
    blocks: tuple[Block, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def ratio(self) -> float:
        """exp(median log(tA / tB)); above 1, B is faster."""
        return self.judgement.ratio

    @property
    def interval(self) -> tuple[float, float]:
        """Bootstrap interval of `ratio`."""
        return self.judgement.low, self.judgement.high

    @property
    def exit_code(self) -> int:
        """0 no regression, 4 SLOWER, 5 UNRESOLVED, 6 VOID."""
        return self.judgement.exit_code

    def samples_us(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Samples of one arm by block, microseconds a launch: float64 [n]."""
        return np.array([block.us[name] for block in self.blocks])

    def to_dict(self) -> dict[str, Any]:
        judgement = asdict(self.judgement)
        judgement["verdict"] = self.verdict.value
        judgement["reasons"] = list(self.judgement.reasons)
        return {
            "a": self.a,
            "b": self.b,
            "judgement": judgement,
            "interrupted": self.interrupted,
            "settings": self.settings,
            "blocks": [block.to_dict() for block in self.blocks],
        }

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Comparison:
        """The comparison that `to_dict` wrote."""
        figures = dict(row["judgement"])
        figures["verdict"] = Verdict(figures["verdict"])
        figures["reasons"] = tuple(figures["reasons"])
        blocks = tuple(Block.from_dict(block) for block in row["blocks"])
        return cls(
            row["a"],
            row["b"],
            Judgement(**figures),
            blocks,
            dict(row["settings"]),
            bool(row["interrupted"]),
        )

    def __str__(self) -> str:
        low, high = self.interval
        text = (
            f"{self.b} against {self.a}: {self.verdict} {self.ratio:.4f}x [{low:.4f}, {high:.4f}]"
            f", {len(self.blocks)} blocks, sign test p = {self.judgement.p_adjusted:.2g}"
        )
        return "; ".join([text, *self.judgement.reasons])


def compare(
    a: Launch, b: Launch, *, a_name: str = "A", b_name: str = "B", **options: Any
) -> Comparison:
    """Compare B with A; `compare_many` states the options and the errors.

    Returns:
        The comparison; its `ratio` is above 1 where B is faster.
    """
    return compare_many(a, {b_name: b}, baseline_name=a_name, **options)[b_name]


def compare_many(
    baseline: Launch,
    candidates: Mapping[str, Launch],
    *,
    baseline_name: str = "A",
    blocks: int = 20,
    cold: bool = False,
    clock: Clock | None = None,
    seed: int = 0,
    delta: float = 0.005,
    alpha: float = 0.05,
    resamples: int = 4000,
    plan: SamplePlan | None = None,
    sample_us: float = 20_000.0,
    warm_up_us: float = 2e6,
    cache_bytes: int | None = None,
    flush: Callable[[], Any] | None = None,
    probe: StateProbe | None = None,
    control: Launch | None = None,
    post_check: PostCheck | None = None,
    on_block: Callable[[Block], Any] | None = None,
    work: Work | None = None,
    ceiling: Ceiling | None = None,
) -> dict[str, Comparison]:
    """Compare several candidates with one baseline in common blocks; Holm over the family.

    Method: Kalibera and Jones, "Rigorous benchmarking in reasonable time" (2013), for blocks and
    bootstrap; the verdicts' rules are stated in `tilewright.measure.verdict`.

    Args:
        baseline: arm A; it runs twice a block, the second time as the control.
        candidates: the other arms by name.
        baseline_name: A's name.
        blocks: at least 6.
        cold: flush twice the last-level cache before each launch; flushing is not timed.
        clock: None is the CPU's.
        seed: draws the orders and the bootstrap.
        delta: relative difference below which arms count as the same.
        alpha: significance.
        resamples: bootstrap draws.
        plan: launches and readings of a sample; None finds them.
        sample_us: time that a sample should fill, microseconds, where `plan` is None.
        warm_up_us: most time spent on warming up, microseconds.
        cache_bytes: size of the last-level cache; None asks the system.
        flush: empties the caches; None picks by the clock.
        probe: watches the machine's state; None watches the CPU, except on a replayed clock.
        control: A once more by other means, such as a second process of the same code, so that
            the control also shows what such a process differs by; None runs `baseline` itself.
        post_check: runs after the last block on the buffers that were timed. False, a reason as a
            string, or GateError makes every verdict VOID.
        on_block: called after each finished block.
        work, ceiling: what one launch does and what the machine can do; a faster result raises.

    Returns:
        Comparisons by candidate. Ctrl-C keeps the finished blocks and sets `interrupted`.

    Raises:
        MeasureError: bad arguments, a launch too short to be timed, a result above the ceiling.
        KeyboardInterrupt: before the first block was finished.
    """
    _check_arguments(baseline_name, candidates, blocks, alpha, delta)
    clock = CpuClock() if clock is None else clock
    if cold and flush is None:
        flush = _flusher_of(clock, cache_bytes)
    if not cold:
        flush = None
    if probe is None and clock.name != "replay":
        probe = StateProbe(gpu=clock.device_id if isinstance(clock, EventClock) else None)

    arms = {baseline_name: baseline, **candidates}
    if control is not None:
        arms[_CONTROL] = control
    warm_up(arms, clock, budget_us=warm_up_us)
    arms.setdefault(_CONTROL, baseline)
    if plan is None:
        plan = plan_samples(arms, clock, flush=flush, sample_us=sample_us)
    rng = np.random.default_rng(seed)
    finished, interrupted = run_blocks(
        arms, blocks, clock, plan, rng=rng, flush=flush, probe=probe, on_block=on_block
    )
    if not finished:
        raise KeyboardInterrupt
    if work is not None and ceiling is not None:
        from_memory = cold or _exceeds_cache(work, cache_bytes)
        for name in arms:
            fastest = min(block.us[name] for block in finished)
            check_roofline(name, fastest, work, ceiling, from_memory=from_memory)

    settings = {
        "clock": clock.name,
        "resolution_us": clock.resolution_us,
        "launches": plan.launches,
        "readings": plan.readings,
        "cache": "cold" if cold else "hot",
        "flush_bytes": getattr(flush, "flush_bytes", None),
        "blocks_asked": blocks,
        "seed": seed,
        "alpha": alpha,
        "delta": delta,
        "resamples": resamples,
    }
    void = [*_throttling(finished), *_post_check(post_check)]
    us = {name: np.array([block.us[name] for block in finished]) for name in arms}
    names = list(candidates)
    family = holm([float(sign_test(np.log(us[baseline_name] / us[n]))) for n in names])
    result = {}
    for index, name in enumerate(names):
        judgement = judge(
            us[baseline_name],
            us[name],
            us[_CONTROL],
            alpha=alpha,
            delta=delta,
            resamples=resamples,
            seed=seed,
            p_adjusted=family[index],
            void=void,
        )
        keep = (baseline_name, name, _CONTROL)
        own = tuple(
            Block(block.order, {k: block.us[k] for k in keep}, block.state) for block in finished
        )
        result[name] = Comparison(baseline_name, name, judgement, own, settings, interrupted)
    return result


def adjust_family(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Judge comparisons of separate runs as one family: Holm's adjustment over their sign tests.

    Args:
        comparisons: each from `compare` or `compare_many`.

    Returns:
        The same in the order given, verdicts by the adjusted p. A VOID stays VOID.
    """
    family = holm([comparison.judgement.p for comparison in comparisons])
    judged = []
    for comparison, p in zip(comparisons, family, strict=True):
        judgement, settings = comparison.judgement, comparison.settings
        if judgement.verdict is Verdict.VOID:
            judgement = replace(judgement, p_adjusted=p)
        else:
            a, b, control = (
                comparison.samples_us(name) for name in (comparison.a, comparison.b, _CONTROL)
            )
            options = {k: settings[k] for k in ("alpha", "delta", "resamples", "seed")}
            judgement = judge(a, b, control, p_adjusted=p, **options)
        judged.append(replace(comparison, judgement=judgement))
    return judged


def _check_arguments(
    baseline_name: str, candidates: Mapping[str, Launch], blocks: int, alpha: float, delta: float
) -> None:
    if not candidates:
        raise MeasureError("candidates is empty; name at least one arm to compare")
    taken = {baseline_name, _CONTROL}
    for name in candidates:
        if name in taken:
            raise MeasureError(f"an arm is named {name!r}, a name already in use; rename it")
    if baseline_name == _CONTROL:
        raise MeasureError(f"the baseline is named {_CONTROL!r}, which names its second run")
    if blocks < MIN_BLOCKS:
        raise MeasureError(
            f"blocks is {blocks}; at least {MIN_BLOCKS} are needed, since with fewer even "
            "unanimous blocks are weaker than 5 % significance"
        )
    if not 0 < alpha < 1:
        raise MeasureError(f"alpha is {alpha}; give a significance between 0 and 1, such as 0.05")
    if not 0 < delta < 1:
        raise MeasureError(f"delta is {delta}; give a relative difference, such as 0.005")


def _flusher_of(clock: Clock, cache_bytes: int | None) -> Callable[[], Any]:
    if isinstance(clock, EventClock):
        return GpuFlusher(clock.device, cache_bytes)
    return CpuFlusher(cache_bytes)


def _exceeds_cache(work: Work, cache_bytes: int | None) -> bool:
    """Whether a launch moves more than twice what the last-level cache could keep for it."""
    try:
        cache = last_level_cache_bytes() if cache_bytes is None else cache_bytes
    except MeasureError:
        return False
    return work.bytes > 2 * cache


def _throttling(blocks: list[Block]) -> list[str]:
    seen = {reason for block in blocks if block.state for reason in block.state.throttle}
    return [f"throttled: {', '.join(sorted(seen))}"] if seen else []


def _post_check(check: PostCheck | None) -> list[str]:
    if check is None:
        return []
    try:
        answer = check()
    except GateError as error:
        answer = str(error)
    if isinstance(answer, str):
        return [f"the check after timing failed: {answer}"]
    return ["the check after timing failed"] if answer is False else []
