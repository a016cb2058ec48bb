"""Do two arms of a model still say the same? Greedy ids on fixed prompts, logits on a fixed text.

Ids are compared as far as they go: after the first difference two texts have different prefixes,
so only the place of that difference is evidence, with the distance of A's own two logits there.
Logits are compared position by position on one text that neither arm wrote:

    KL(A || B) = sum over tokens of pA * (log pA - log pB)

Arms that compute the same function (the same activations) may differ by the order of their sums
only. Arms that do not (8-bit against float activations) are held to a wider limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "PROMPTS",
    "TEXT",
    "Agreement",
    "Divergence",
    "Speaker",
    "agree",
    "first_difference",
    "logit_figures",
]

F32 = npt.NDArray[np.float32]

PROMPTS = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Question: A train travels 120 km in 1.5 hours. What is its average speed?\nAnswer:",
    "def fibonacci(n):",
)
"""Prompts whose greedy continuations are compared."""

TEXT = (
    "A tide mill stands where a river meets the sea. Twice a day the rising water fills a basin "
    "behind a dam, and a gate closes by itself when the tide turns. The miller then waits, for an "
    "hour or for three, until the sea has fallen far enough for the wheel to run free; then he "
    "opens the sluice, and the stones turn until the basin is empty. His working day follows the "
    "moon, not the sun, and moves by fifty minutes every day. In 1790 there were about 180 such "
    "mills on the coasts of Britain. Some ground corn, others sawed timber or crushed bones for "
    "fertilizer. The calculation behind them is simple: a basin of 5,000 square metres that drops "
    "by two metres releases 10,000 cubic metres of water, and each cubic metre that falls through "
    "one metre gives up 9.81 kilojoules. What the sum leaves out is friction, leakage, mud and "
    "eels. Most were abandoned when steam engines became cheap, since an engine works whenever it "
    "is asked to. A few have been restored, and visitors can buy a bag of flour there that was "
    "ground, as the label says, by the gravity of the moon."
)
"""Text whose logits are compared."""

KL_LIMIT = {True: 1e-4, False: 0.1}
"""Largest mean KL divergence in nats: of arms with one function, and of arms with two."""

TIE = 1e-2
"""Arms with one function may choose differently where A's own two logits differ by less than this
share of the standard deviation of its logits."""

_ROWS = 32  # rows of logits raised to float64 at a time


class Speaker(Protocol):
    """What is asked of an arm."""

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """`count` ids after each prompt, always the largest logit."""
        ...

    def last(self, ids: Sequence[int]) -> F32:
        """Logits [V] after the last of `ids`."""
        ...

    def logits(self, ids: Sequence[int]) -> F32:
        """Logits [T, V] after each of `ids`."""
        ...


@dataclass(frozen=True)
class Divergence:
    """Where two greedy texts of one prompt part.

    Attributes:
        prompt: index of the prompt.
        position: number of new ids that are the same.
        a, b: the ids chosen there.
        gap: A's logit of its own id less its logit of B's, in standard deviations of A's logits.
    """

    prompt: int
    position: int
    a: int
    b: int
    gap: float


@dataclass(frozen=True)
class Agreement:
    """How far B agrees with A.

    Attributes:
        prompts, identical: prompts, and those whose `tokens` new ids are all the same.
        tokens: new ids a prompt.
        divergences: the first difference of each other prompt.
        positions: positions of the text whose logits were compared.
        mean_kl, worst_kl: KL(A || B) in nats.
        top1: share of positions at which both have the same largest logit.
        same_function: the arms should differ by rounding only.
        faults: what breaks a limit; empty where B agrees.
    """

    prompts: int
    identical: int
    tokens: int
    divergences: tuple[Divergence, ...]
    positions: int
    mean_kl: float
    worst_kl: float
    top1: float
    same_function: bool
    faults: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self)
        row["divergences"] = [asdict(d) for d in self.divergences]
        row["faults"] = list(self.faults)
        for name in ("mean_kl", "worst_kl"):
            row[name] = row[name] if np.isfinite(row[name]) else None
        return row

    def __str__(self) -> str:
        return (
            f"greedy ids identical on {self.identical}/{self.prompts} prompts of {self.tokens}, "
            f"mean KL {self.mean_kl:.2g} nats, top-1 {self.top1:.2%} of {self.positions} positions"
        )


def agree(
    a: Speaker,
    b: Speaker,
    prompts: Sequence[Sequence[int]],
    text: Sequence[int],
    *,
    tokens: int = 32,
    same_function: bool = True,
) -> Agreement:
    """Compare what two arms say.

    Args:
        a, b: the arms; A is the reference.
        prompts: ids of each prompt.
        text: ids of the text whose logits are compared.
        tokens: new ids a prompt.
        same_function: hold B to the limits of arms that differ by rounding only.
    """
    faults: list[str] = []
    divergences: list[Divergence] = []
    for index, (mine, other) in enumerate(
        zip(a.greedy(prompts, tokens), b.greedy(prompts, tokens), strict=True)
    ):
        at = first_difference(mine, other)
        if at is None:
            continue
        logits = a.last([*prompts[index], *mine[:at]]).astype(np.float64)
        gap = float((logits[mine[at]] - logits[other[at]]) / max(float(logits.std()), 1e-30))
        divergences.append(Divergence(index, at, mine[at], other[at], gap))
        if same_function and not gap <= TIE:
            faults.append(
                f"prompt {index}: after {at} new ids A says {mine[at]}, B says {other[at]}, and "
                f"they are {gap:.3g} standard deviations apart in A: no tie"
            )
    mean_kl, worst_kl, top1 = logit_figures(a.logits(text), b.logits(text))
    limit = KL_LIMIT[same_function]
    if not mean_kl <= limit:
        faults.append(f"mean KL divergence is {mean_kl:.3g} nats, the limit is {limit:g}")
    return Agreement(
        prompts=len(prompts),
        identical=len(prompts) - len(divergences),
        tokens=tokens,
        divergences=tuple(divergences),
        positions=len(text),
        mean_kl=mean_kl,
        worst_kl=worst_kl,
        top1=top1,
        same_function=same_function,
        faults=tuple(faults),
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first place where two sequences differ, a missing end included; else None."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b)) if len(a) != len(b) else None


def logit_figures(a: F32, b: F32) -> tuple[float, float, float]:
    """Mean and largest KL(A || B) in nats, and the share of equal largest logits.

    Args:
        a, b: logits [T, V]. NaN or Inf in either makes the divergence infinite.

    Raises:
        ValueError: the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"logits of A are {list(a.shape)}, of B {list(b.shape)}; not one model's")
    divergences, same = [], 0
    for start in range(0, len(a), _ROWS):
        rows_a = a[start : start + _ROWS].astype(np.float64)
        rows_b = b[start : start + _ROWS].astype(np.float64)
        if not (np.isfinite(rows_a).all() and np.isfinite(rows_b).all()):
            return float("inf"), float("inf"), 0.0
        log_a, log_b = _log_softmax(rows_a), _log_softmax(rows_b)
        divergences.append((np.exp(log_a) * (log_a - log_b)).sum(axis=1))
        same += int((rows_a.argmax(axis=1) == rows_b.argmax(axis=1)).sum())
    kl = np.maximum(np.concatenate(divergences), 0.0)  # rounding makes a zero slightly negative
    return float(kl.mean()), float(kl.max()), same / len(a)


def _log_softmax(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = rows - rows.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
