"""From paired samples to a verdict.

The difference of two arms is the median over blocks of log(tA / tB). It is *found* when its
bootstrap interval excludes zero, the sign test is significant, and it exceeds the half-width of
the control's interval (the same arm twice). A found difference that may reach `delta` is FASTER
or SLOWER; an interval that lies inside +-delta is SAME, found or not; the rest is UNRESOLVED.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.measure.stats import (
    blocks_to_resolve,
    median_interval,
    ranges_disjoint,
    sign_test,
)

__all__ = ["MIN_BLOCKS", "Judgement", "Verdict", "control_differs", "judge"]

Floats = NDArray[np.float64]

# Below six blocks the sign test cannot reach 5 % even when all of them agree.
MIN_BLOCKS = 6
# Significance at which the control counts as different: it must rarely void a sound run.
_CONTROL_ALPHA = 0.01


class Verdict(StrEnum):
    """What a comparison found about B against A."""

    DISJOINT = "DISJOINT"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    UNRESOLVED = "UNRESOLVED"
    VOID = "VOID"


@dataclass(frozen=True)
class Judgement:
    """A verdict and the figures it rests on.

    Attributes:
        verdict: the verdict.
        ratio: exp(median log(tA / tB)); above 1, B is faster.
        low, high: bootstrap interval of `ratio`.
        p: exact sign test of tA = tB.
        p_adjusted: `p` after Holm, where several comparisons form a family; else `p`.
        control, control_low, control_high: the same for A against itself.
        blocks_needed: blocks at which an UNRESOLVED comparison would likely be resolved.
        reasons: why VOID or UNRESOLVED, in words.
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    p: float
    p_adjusted: float
    control: float
    control_low: float
    control_high: float
    blocks_needed: int | None = None
    reasons: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 holds (no regression), 4 SLOWER, 5 UNRESOLVED, 6 VOID."""
        if self.verdict is Verdict.SLOWER:
            return 4
        if self.verdict is Verdict.DISJOINT:
            return 0 if self.ratio >= 1 else 4
        return {Verdict.UNRESOLVED: 5, Verdict.VOID: 6}.get(self.verdict, 0)


def control_differs(log_control: Floats, *, delta: float, seed: int = 0) -> Any:
    """Whether A differs from itself by more than chance and more than `delta` would excuse.

    Args:
        log_control: float64 [..., n], log(tA / tA').
        delta: relative difference below which two arms count as the same.
        seed: seed of the bootstrap.

    Returns:
        bool [...].
    """
    _, low, high = median_interval(log_control, alpha=_CONTROL_ALPHA, seed=seed)
    n = log_control.shape[-1]
    significant = sign_test(log_control) <= max(_CONTROL_ALPHA, 2.0 ** (1 - n))
    limit = math.log1p(delta)
    return (n >= MIN_BLOCKS) & significant & (low * high > 0) & ~((low > -limit) & (high < limit))


def judge(
    a_us: Floats,
    b_us: Floats,
    control_us: Floats,
    *,
    alpha: float = 0.05,
    delta: float = 0.005,
    resamples: int = 4000,
    seed: int = 0,
    p_adjusted: float | None = None,
    void: Sequence[str] = (),
) -> Judgement:
    """Judge B against A from the samples of the same blocks.

    Args:
        a_us, b_us, control_us: float64 [n], samples of A, of B and of A once more.
        alpha: significance.
        delta: relative difference below which the arms count as the same.
        resamples, seed: bootstrap draws.
        p_adjusted: Holm-adjusted p of the sign test; None is a family of one.
        void: reasons found elsewhere why the run proves nothing.
    """
    log_ratio, log_control = np.log(a_us / b_us), np.log(a_us / control_us)
    n = log_ratio.shape[-1]
    options: dict[str, Any] = {"alpha": alpha, "resamples": resamples, "seed": seed}
    effect, low, high = (float(v) for v in median_interval(log_ratio, **options))
    control, control_low, control_high = (float(v) for v in median_interval(log_control, **options))
    p = float(sign_test(log_ratio))
    p_adjusted = p if p_adjusted is None else p_adjusted

    reasons = list(void)
    if control_differs(log_control, delta=delta, seed=seed):
        reasons.append(
            f"the control differs: A against itself gives {math.exp(control):.4f} "
            f"[{math.exp(control_low):.4f}, {math.exp(control_high):.4f}]"
        )
    needed = None
    if reasons:
        verdict = Verdict.VOID
    else:
        limit = math.log1p(delta)
        found = (
            n >= MIN_BLOCKS
            and low * high > 0
            and p_adjusted <= alpha
            and abs(effect) > (control_high - control_low) / 2
        )
        if n >= MIN_BLOCKS and -limit < low and high < limit:
            verdict = Verdict.SAME
        elif found and ranges_disjoint(np.concatenate([a_us, control_us]), b_us):
            verdict = Verdict.DISJOINT
        elif found:
            verdict = Verdict.FASTER if effect > 0 else Verdict.SLOWER
        else:
            verdict = Verdict.UNRESOLVED
            needed = max(
                MIN_BLOCKS, blocks_to_resolve(log_ratio, low, high, alpha=alpha, delta=delta)
            )
            reasons.append(f"about {needed} blocks would resolve it")
    return Judgement(
        verdict=verdict,
        ratio=math.exp(effect),
        low=math.exp(low),
        high=math.exp(high),
        p=p,
        p_adjusted=p_adjusted,
        control=math.exp(control),
        control_low=math.exp(control_low),
        control_high=math.exp(control_high),
        blocks_needed=needed,
        reasons=tuple(reasons),
    )
