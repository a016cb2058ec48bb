"""Agreement of two arms: ids, divergence, faults; right values from torch's own functions."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tilewright.tune.agreement import (
    PROMPTS,
    TEXT,
    Agreement,
    agree,
    first_difference,
    logit_figures,
)

VOCABULARY = 50


class Arm:
    """Says fixed ids, and the logits of a seeded table by the last id."""

    def __init__(self, ids: list[list[int]], noise: float = 0.0, seed: int = 0) -> None:
        self.ids = ids
        table = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
        table += noise * np.random.default_rng(seed + 1).normal(size=table.shape)
        self.table = table.astype(np.float32)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        assert len(prompts) == len(self.ids)
        return [ids[:count] for ids in self.ids]

    def last(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return self.table[ids[-1]]

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return self.table[list(ids)]


PROMPT_IDS = [[1, 2], [3]]
TEXT_IDS = list(range(40))


def test_the_same_arm_agrees_with_itself() -> None:
    arm = Arm([[4, 5, 6], [7, 8, 9]])
    found = agree(arm, arm, PROMPT_IDS, TEXT_IDS, tokens=3)
    assert found == Agreement(2, 2, 3, (), 40, 0.0, 0.0, 1.0, True)
    assert found.holds


def test_divergence_is_that_of_torch() -> None:
    a, b = Arm([[1]] * 2), Arm([[1]] * 2, noise=0.3)
    mean, worst, top1 = logit_figures(a.logits(TEXT_IDS), b.logits(TEXT_IDS))
    log_a = torch.log_softmax(torch.from_numpy(a.logits(TEXT_IDS)).double(), 1)
    log_b = torch.log_softmax(torch.from_numpy(b.logits(TEXT_IDS)).double(), 1)
    each = torch.nn.functional.kl_div(log_b, log_a, reduction="none", log_target=True).sum(1)
    assert mean == pytest.approx(float(each.mean()), rel=1e-9)
    assert worst == pytest.approx(float(each.max()), rel=1e-9)
    assert top1 == float((log_a.argmax(1) == log_b.argmax(1)).double().mean())
    assert 0 < top1 < 1


def test_a_difference_that_is_no_tie_is_a_fault_of_arms_with_one_function() -> None:
    a, b = Arm([[4, 5, 6], [7, 8, 9]]), Arm([[4, 5, 6], [7, 11, 9]])
    a.table[7, 8], a.table[7, 11] = 5.0, 1.0
    b.table[:] = a.table
    found = agree(a, b, PROMPT_IDS, TEXT_IDS, tokens=3)
    (parted,) = found.divergences
    assert (parted.prompt, parted.position, parted.a, parted.b) == (1, 1, 8, 11)
    assert parted.gap == pytest.approx(4.0 / a.table[7].astype(np.float64).std(), rel=1e-6)
    assert found.identical == 1
    assert not found.holds
    assert "prompt 1: after 1 new ids A says 8, B says 11" in found.faults[0]
    assert agree(a, b, PROMPT_IDS, TEXT_IDS, tokens=3, same_function=False).holds


def test_a_tie_may_fall_either_way() -> None:
    a, b = Arm([[4], [7]]), Arm([[4], [12]])
    a.table[3, 7] = a.table[3, 12] = 4.0
    b.table[:] = a.table
    found = agree(a, b, PROMPT_IDS, TEXT_IDS, tokens=1)
    assert found.divergences[0].gap == 0.0
    assert found.holds


@pytest.mark.parametrize(
    ("noise", "same_function", "holds"),
    [(1e-4, True, True), (0.1, True, False), (0.1, False, True), (2.0, False, False)],
)
def test_divergence_is_held_to_the_limit_of_its_kind(
    noise: float, same_function: bool, holds: bool
) -> None:
    a, b = Arm([[1], [1]]), Arm([[1], [1]], noise=noise)
    found = agree(a, b, PROMPT_IDS, TEXT_IDS, tokens=1, same_function=same_function)
    assert found.holds is holds
    if not holds:
        assert "mean KL divergence is" in found.faults[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_never_agree(bad: float) -> None:
    a, b = Arm([[1], [1]]), Arm([[1], [1]])
    b.table[5, 5] = bad
    found = agree(a, b, PROMPT_IDS, TEXT_IDS, tokens=1, same_function=False)
    assert not found.holds
    assert found.mean_kl == float("inf")
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["mean_kl"] is None


def test_logits_of_two_vocabularies_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"logits of A are \[2, 3\], of B \[2, 4\]"):
        logit_figures(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32))


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [([], [], None), ([1], [1], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([2], [1], 0)],
)
def test_first_difference(a: list[int], b: list[int], at: int | None) -> None:
    assert first_difference(a, b) == at


def test_agreement_is_plain_json() -> None:
    a, b = Arm([[4], [7]]), Arm([[4], [9]])
    row = json.loads(json.dumps(agree(a, b, PROMPT_IDS, TEXT_IDS, tokens=1).to_dict()))
    assert row["divergences"][0]["prompt"] == 1
    assert row["identical"] == 1
    assert row["faults"]


def test_the_own_prompts_and_text_are_long_enough() -> None:
    assert len(PROMPTS) >= 4
    assert len(set(PROMPTS)) == len(PROMPTS)
    assert len(TEXT.split()) > 190
