"""Two arms of one model: verified, held against each other's words, and then timed.

Arms run in worker processes (see `tilewright.tune.workers`), so that a revision, an environment or
a table is what its users would run. The order is that of every comparison here:
verify each arm's products, compare what the arms say, time them in paired blocks, and look again
at the logits of the arms that were timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.measure import Block
from tilewright.model.worker_parts import parse_test
from tilewright.tune.agreement import PROMPTS, TEXT, agree
from tilewright.tune.arms import ArmInfo, CompareResult, Settings, run_contests
from tilewright.tune.worker_contests import LogitsCheck, verify_workers, worker_contests
from tilewright.tune.workers import Place, Pool, Worker

__all__ = ["CHECK_IDS", "TEXT_IDS", "ModelArm", "Speech", "compare_models", "test_tokens"]

TEXT_IDS = 256
"""Tokens of the text whose logits are compared."""

CHECK_IDS = 64
"""Tokens that are fed to see whether an arm still computes what it did before it was timed."""

ONE_PROCESS = "All arms ran in one process, every sample on buffers allocated anew."
OWN_PROCESSES = (
    "Every sample was taken in a process started for it; the control is one more process of A."
)

Status = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class ModelArm:
    """What one arm is.

    Attributes:
        title: what reports call it.
        opening: what its process opens: see `tilewright.model.worker.ModelArm`.
        place: the process it needs; arms of equal places share one.
    """

    title: str
    opening: Mapping[str, Any]
    place: Place = Place()


@dataclass(frozen=True)
class Speech:
    """What the arms are asked to say; None for this package's own prompts and text.

    Attributes:
        prompts: texts whose greedy continuations are compared.
        text: its first `TEXT_IDS` tokens give the logits that are compared.
        new_tokens: ids a prompt.
    """

    prompts: Sequence[str] | None = None
    text: str | None = None
    new_tokens: int = 32

    def ids(self, worker: Worker) -> tuple[list[list[int]], list[int]]:
        """Ids of the prompts and of the text by the arm's tokenizer; seeded random ids for a
        model without one."""
        if not worker.about["tokenizer"]:
            draw = np.random.default_rng(0)
            vocabulary = int(worker.about["vocabulary"])
            prompts = [draw.integers(0, vocabulary, 16).tolist() for _ in PROMPTS]
            return prompts, draw.integers(0, vocabulary, TEXT_IDS).tolist()
        text = TEXT if self.text is None else self.text
        ids = worker.tokens([text[: 32 * TEXT_IDS]])[0][:TEXT_IDS]
        return worker.tokens(PROMPTS if self.prompts is None else self.prompts), ids


def test_tokens(tests: Sequence[str]) -> dict[str, int]:
    """The tokens that each test times.

    Raises:
        ValueError: a text is no test.
    """
    return {test: sum(parse_test(test)[:2]) for test in tests}


def compare_models(
    kind: str,
    subject: str,
    arms: Sequence[ModelArm],
    tests: Sequence[str],
    settings: Settings,
    *,
    speech: Speech | None = None,
    same_function: bool = True,
    status: Status = nullcontext,
    on_block: Callable[[str, int, Block], Any] | None = None,
) -> CompareResult:
    """Compare two arms of one model.

    Args:
        kind, subject: as `CompareResult` has them.
        arms: A and B.
        tests: what is timed: "pp512", "tg32", "pp512 @ d1024".
        settings: blocks, seed, significance.
        speech: what the arms are asked to say.
        same_function: the arms should differ by rounding only; see `tilewright.tune.agreement`.
        status: makes a context that shows a line while its block runs.
        on_block: see `run_contests`.

    Returns:
        The result; not timed, and with `faults`, where B does not agree with A.

    Raises:
        GateError: a product of an arm is wrong.
        MeasureError: an arm's process fails.
        ValueError: a text is no test.
    """
    speech = speech or Speech()
    tokens = test_tokens(tests)
    notes: list[str] = []
    with ExitStack() as stack:
        pool = Pool([arm.place for arm in arms])
        named = [("A", arms[0]), ("B", arms[1]), *([] if pool.shared else [("A'", arms[0])])]
        workers = []
        for name, arm in named:
            with status(f"starting {name}: {arm.title}"):
                workers.append(stack.enter_context(pool.open(name, arm.opening, arm.place)))
        a, b = workers[:2]
        control = None if pool.shared else workers[2]
        with status("verifying the products of A and B"):
            said = verify_workers([a, b], settings.seed)
        infos = [
            ArmInfo(w.name, arm.title, said[w.name], _told(w))
            for w, arm in zip((a, b), arms, strict=False)
        ]
        prompts, text = speech.ids(a)
        if not a.about["tokenizer"]:
            notes.append("The model has no tokenizer: prompts and text are random ids.")
        with status("comparing what A and B say"):
            agreement = agree(
                a, b, prompts, text, tokens=speech.new_tokens, same_function=same_function
            )
        if kind == "table":
            notes += fallbacks([a, b])
        if not agreement.holds:
            notes.append("B does not compute what A computes, so nothing was timed.")
            return CompareResult(
                kind,
                subject,
                infos[0],
                infos[1],
                (),
                agreement.to_dict(),
                tuple(notes),
                agreement.faults,
            )
        rows, interrupted = run_contests(
            worker_contests(
                a, b, control, tokens, post_check=LogitsCheck(workers, text[:CHECK_IDS])
            ),
            settings,
            on_block=on_block,
        )
    notes.append(ONE_PROCESS if pool.shared else OWN_PROCESSES)
    return CompareResult(
        kind,
        subject,
        infos[0],
        infos[1],
        rows,
        agreement.to_dict(),
        tuple(notes),
        interrupted=interrupted,
    )


def _told(worker: Worker) -> dict[str, Any]:
    return {k: v for k, v in worker.about.items() if k != "source"}


def fallbacks(workers: Sequence[Worker]) -> list[str]:
    """One line for each product that a table did not decide."""
    lines = []
    for worker in workers:
        for c in worker.about["choices"]:
            if c["how"] not in ("exact", "pinned"):
                why = f": {c['note']}" if c["note"] else ""
                lines.append(
                    f"{worker.name}: {c['weight_type']} {c['N']} x {c['K']} at M={c['M']} runs "
                    f"{c['tile']}, {c['how']}{why}"
                )
    return lines
