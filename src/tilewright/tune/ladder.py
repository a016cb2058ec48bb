"""Climb a ladder: every rung verified, timed against the rung below and against the base.

A rung's arm carries all change sets up to its own. Blocks hold {base, rung below, rung, base
again}, so both comparisons rest on the same blocks, and the base's second run is the control of
both. A rung that fails verification is timed all the same and shown as WRONG with its apparent
gain, which is what it would have been believed for; the next rung stands on what was below it.
Leave-one-out then takes each change set out of the finished stack: what is it worth when all
others are there?

This file decides; a `Bench` opens arms and knows what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from tilewright.errors import GateError, TilewrightError
from tilewright.measure import (
    Block,
    Clock,
    Comparison,
    SamplePlan,
    StateProbe,
    Verdict,
    compare_many,
    judge,
)
from tilewright.measure.clock import Launch
from tilewright.tune.agreement import Agreement
from tilewright.tune.arms import Settings
from tilewright.tune.ladder_file import ChangeSet, Ladder, stack
from tilewright.tune.ladder_result import (
    LadderResult,
    LeftOut,
    RungResult,
    RungTest,
    judged_left,
    judged_rungs,
)

__all__ = ["Bench", "run_ladder"]

Status = Callable[[str], AbstractContextManager[Any]]


class Bench(Protocol):
    """Opens the arms of a ladder; an arm is whatever it understands."""

    clock: Clock
    plan: SamplePlan | None
    own_control: bool
    """The control is another arm of the base, not the base's own arm."""

    def open(self, name: str, change: ChangeSet) -> AbstractContextManager[Any]:
        """An arm with this change set, closed when the block ends."""
        ...

    def verify(self, arm: Any) -> str:
        """What the check of its products said; GateError if one is wrong."""
        ...

    def agree(self, base: Any, arm: Any, *, same_function: bool) -> Agreement | None:
        """How far it says what the base says; None for arms that say nothing."""
        ...

    def tests(self) -> Mapping[str, int]:
        """The tests and their tokens (0 for products), those of the control among them."""
        ...

    def launch(self, arm: Any, test: str) -> Launch:
        """One sample of a test."""
        ...

    def probe(self, arms: Sequence[Any]) -> StateProbe | None:
        """What watches the machine while these arms run."""
        ...

    def post_check(self, arms: Sequence[Any]) -> Callable[[], Any]:
        """The check after timing; made before it."""
        ...

    def details(self, arm: Any) -> dict[str, Any]:
        """What the arm runs, for the record."""
        ...


def run_ladder(
    ladder: Ladder,
    bench: Bench,
    settings: Settings,
    *,
    subject: str = "",
    leave_one_out: bool = True,
    status: Status = nullcontext,
    on_block: Callable[[str, int, Block], Any] | None = None,
) -> LadderResult:
    """Run a ladder.

    Args:
        ladder: base and change sets.
        bench: opens the arms.
        settings: blocks and significance of every comparison.
        subject: what reports call what it is run on.
        leave_one_out: also take each change set out of the finished stack.
        status: makes a context that shows a line while its block runs.
        on_block: called after each block with what runs, its number of blocks, and the block.

    Returns:
        The result. Ctrl-C keeps what was finished.

    Raises:
        GateError: a product of the base is wrong.
        TilewrightError: an arm cannot be opened.
        KeyboardInterrupt: before the first rung was timed.
    """
    climb = _Climb(ladder, bench, settings, status, on_block)
    with ExitStack() as arms:
        try:
            climb.run(arms, leave_one_out)
            interrupted = climb.interrupted
        except KeyboardInterrupt:
            if not climb.rungs:
                raise
            interrupted = True
    return LadderResult(
        ladder.title,
        subject,
        ladder.base,
        tuple(judged_rungs(climb.rungs)),
        tuple(judged_left(climb.left)),
        climb.verified,
        interrupted=interrupted,
    )


class _Climb:
    """The run itself: what has been found so far."""

    def __init__(
        self,
        ladder: Ladder,
        bench: Bench,
        settings: Settings,
        status: Status,
        on_block: Callable[[str, int, Block], Any] | None,
    ) -> None:
        self._ladder, self._bench, self._settings = ladder, bench, settings
        self._status, self._on_block = status, on_block
        self.rungs: list[RungResult] = []
        self.left: list[LeftOut] = []
        self.verified = ""
        self.interrupted = False

    def run(self, arms: ExitStack, leave_one_out: bool) -> None:
        base, ladder = self._ladder.base, self._ladder
        self._base = self._open(arms, base.name, base)
        with self._status(f"verifying {base.name}"):
            self.verified = self._bench.verify(self._base)
        self._control = self._base
        if self._bench.own_control:
            self._control = self._open(arms, f"{base.name} again", base)
        below, below_name, carried = self._base, base.name, list[ChangeSet]()
        below_arms = arms.enter_context(ExitStack())
        for rung in ladder.rungs:
            own = arms.enter_context(ExitStack())
            arm = self._open(own, rung.name, stack(base, [*carried, rung]))
            result = self._check(rung, arm, below_name, stack(base, [*carried, rung]))
            tests, interrupted = self._time(arm, below, rung.name, below_name)
            self.rungs.append(replace(result, tests=tuple(tests)))
            if interrupted:
                self.interrupted = True
                return
            if result.right:
                below_arms.close()
                below, below_name, below_arms = arm, rung.name, own
                carried.append(rung)
            else:
                own.close()
        if leave_one_out and len(carried) > 1:
            self._leave_out(carried, below, below_name)

    def _open(self, arms: ExitStack, name: str, change: ChangeSet) -> Any:
        with self._status(f"starting {name}"):
            return arms.enter_context(self._bench.open(name, change))

    def _check(self, rung: ChangeSet, arm: Any, below: str, whole: ChangeSet) -> RungResult:
        faults: list[str] = []
        verified, agreement = "", None
        same = (whole.activations or "float") == (self._ladder.base.activations or "float")
        with self._status(f"verifying {rung.name}"):
            try:
                verified = self._bench.verify(arm)
            except GateError as error:
                faults.append(str(error))
            found = self._bench.agree(self._base, arm, same_function=same)
        if found is not None:
            agreement = found.to_dict()
            faults += found.faults
        details = self._bench.details(arm)
        return RungResult(rung, below, verified, tuple(faults), agreement, details=details)

    def _time(
        self, arm: Any, below: Any, name: str, below_name: str
    ) -> tuple[list[RungTest], bool]:
        """All tests of a rung; True if Ctrl-C ended them."""
        tests: list[RungTest] = []
        for test, tokens in self._bench.tests().items():
            taken = self._blocks(test, below, arm, f"{name}: {test}")
            if taken is None:
                return tests, True
            void, blocks, settings, interrupted = taken
            names = {"base": self._ladder.base.name, "below": below_name, "rung": name}
            tests.append(
                RungTest(
                    test,
                    tokens,
                    test in self._ladder.control,
                    below=_pair(blocks, "below", "rung", names, settings, void, interrupted),
                    base=_pair(blocks, "base", "rung", names, settings, void, interrupted),
                )
            )
            if interrupted:
                return tests, True
        return tests, False

    def _blocks(
        self, test: str, lower: Any, upper: Any, label: str
    ) -> tuple[list[str], list[Block], dict[str, Any], bool] | None:
        """Blocks of {base, below, rung, control}; None if Ctrl-C came before the first.

        Returns:
            (why they are void beside the control, blocks, settings, whether Ctrl-C ended them).
        """
        blocks: list[Block] = []

        def take(block: Block) -> None:
            blocks.append(block)
            if self._on_block is not None:
                self._on_block(label, len(blocks), block)

        options, bench = self._settings, self._bench
        arms = [self._base, upper, *([self._control] if bench.own_control else [])]
        candidates = {"rung": bench.launch(upper, test)}
        if lower is not self._base:
            candidates["below"] = bench.launch(lower, test)
            arms.append(lower)
        try:
            found = compare_many(
                bench.launch(self._base, test),
                candidates,
                baseline_name="base",
                control=bench.launch(self._control, test) if bench.own_control else None,
                blocks=options.blocks,
                clock=bench.clock,
                plan=bench.plan,
                seed=options.seed,
                alpha=options.alpha,
                delta=options.delta,
                sample_us=options.sample_us,
                warm_up_us=options.warm_up_us,
                probe=bench.probe(arms),
                post_check=bench.post_check(arms),
                on_block=take,
            )["rung"]
        except KeyboardInterrupt:
            return None
        void = [
            reason
            for reason in (found.judgement.reasons if found.verdict is Verdict.VOID else ())
            if not reason.startswith("the control differs")
        ]
        return void, blocks, {**found.settings, "cache": "as run"}, found.interrupted

    def _leave_out(self, carried: list[ChangeSet], full: Any, full_name: str) -> None:
        tests = [t for t in self._bench.tests() if t not in self._ladder.control]
        for change in carried[:-1]:
            rest = [c for c in carried if c is not change]
            whole = stack(self._ladder.base, rest, f"without {change.name}")
            comparisons: dict[str, Comparison] = {}
            with ExitStack() as arms:
                try:
                    arm = self._open(arms, whole.name, whole)
                    with self._status(f"verifying {whole.name}"):
                        self._bench.verify(arm)
                except TilewrightError as error:
                    self.left.append(LeftOut(change.name, {}, str(error)))
                    continue
                for test in tests:
                    taken = self._blocks(test, arm, full, f"{whole.name}: {test}")
                    if taken is None:
                        self.interrupted = True
                        break
                    void, blocks, settings, interrupted = taken
                    names = {"below": whole.name, "rung": full_name}
                    comparisons[test] = _pair(
                        blocks, "below", "rung", names, settings, void, interrupted
                    )
                    if interrupted:
                        self.interrupted = True
                        break
            if comparisons:
                self.left.append(LeftOut(change.name, comparisons))
            if self.interrupted:
                return
        last = next(r for r in reversed(self.rungs) if r.right)
        self.left.append(LeftOut(last.name, {t.test: t.below for t in last.tests if not t.control}))


def _pair(
    blocks: Sequence[Block],
    a: str,
    b: str,
    names: Mapping[str, str],
    settings: Mapping[str, Any],
    void: Sequence[str],
    interrupted: bool,
) -> Comparison:
    """One comparison out of common blocks; its control moves as the base's second run did."""
    taken = []
    for block in blocks:
        lower = block.us.get(a, block.us["base"])
        control = lower * block.us["control"] / block.us["base"]
        us = {names[a]: lower, names[b]: block.us[b], "control": control}
        taken.append(Block(tuple(names.get(n, n) for n in block.order), us, block.state))
    samples = {n: np.array([block.us[n] for block in taken]) for n in taken[0].us}
    options = {k: settings[k] for k in ("alpha", "delta", "resamples", "seed")}
    judgement = judge(
        samples[names[a]], samples[names[b]], samples["control"], void=void, **options
    )
    return Comparison(names[a], names[b], judgement, tuple(taken), dict(settings), interrupted)
