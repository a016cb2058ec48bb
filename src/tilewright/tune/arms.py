"""Contests, and the run of several as one family of comparisons.

A `Contest` is one question, such as "does tile B beat tile A on this product with a cold cache?".
`run_contests` asks them one after the other, each in paired blocks, and adjusts the verdicts over
all of them. Contests are made when their turn comes, so that only one product's operands are in
memory, and a wrong arm ends the run before it is timed.

Who makes them: `tile_arms.py` (tiles and tables in this process), `workers.py` (processes:
revisions, models, settings), `commands.py` (any command).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tilewright.measure import (
    Block,
    Ceiling,
    Clock,
    Comparison,
    SamplePlan,
    StateProbe,
    Work,
    adjust_family,
    compare,
)
from tilewright.measure.clock import Launch

__all__ = [
    "ArmInfo",
    "CompareResult",
    "CompareRow",
    "Contest",
    "Settings",
    "exit_code_of",
    "run_contests",
]


@dataclass(frozen=True)
class Settings:
    """How contests are run; the meaning of each is that of `measure.compare_many`."""

    blocks: int = 20
    seed: int = 0
    alpha: float = 0.05
    delta: float = 0.005
    sample_us: float = 20_000.0
    warm_up_us: float = 2e6


@dataclass(frozen=True)
class Contest:
    """One paired comparison, ready to run.

    Attributes:
        label: what is compared: a product or a test.
        cache: "hot", "cold", or "as run" for what brings its own state.
        a, b: launches of the arms.
        control: A once more by other means; None runs `a` itself.
        clock, plan, probe, post_check, work: as `measure.compare_many` takes them.
        tokens: tokens a launch, where a rate in tokens a second says more than a time; else 0.
        note: what a reader must know about this row.
    """

    label: str
    cache: str
    a: Launch
    b: Launch
    control: Launch | None = None
    clock: Clock | None = None
    plan: SamplePlan | None = None
    probe: StateProbe | None = None
    post_check: Callable[[], Any] | None = None
    work: Work | None = None
    tokens: int = 0
    note: str = ""


@dataclass(frozen=True)
class ArmInfo:
    """What an arm is.

    Attributes:
        name: "A" or "B".
        title: what people read: a tile, a revision, a command.
        verified: what its verification said.
        details: everything that tells it from other arms, as plain values.
    """

    name: str
    title: str
    verified: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompareRow:
    """One contest and what came of it; `comparison` is None where the arms are the same code."""

    label: str
    cache: str
    comparison: Comparison | None
    tokens: int = 0
    note: str = ""

    @property
    def verdict(self) -> str:
        return "SAME" if self.comparison is None else str(self.comparison.verdict)

    @property
    def exit_code(self) -> int:
        return 0 if self.comparison is None else self.comparison.exit_code

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "cache": self.cache,
            "verdict": self.verdict,
            "tokens": self.tokens,
            "note": self.note,
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
        }


@dataclass(frozen=True)
class CompareResult:
    """Everything a `compare` found.

    Attributes:
        kind: "tile", "table", "rev", "activations" or "command".
        subject: the model, or the op.
        a, b: the arms.
        rows: contests in the order they ran; verdicts are adjusted over all of them.
        agreement: how far the arms' texts and logits agree, as plain values; None without a model.
        notes: lines for people.
        faults: what failed verification; any makes the exit code 3.
        interrupted: Ctrl-C ended the run.
    """

    kind: str
    subject: str
    a: ArmInfo
    b: ArmInfo
    rows: tuple[CompareRow, ...]
    agreement: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """3 a failed verification, 4 any SLOWER, 6 any VOID, 5 any UNRESOLVED, else 0."""
        return exit_code_of([*([3] if self.faults else []), *(row.exit_code for row in self.rows)])

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "subject": self.subject,
            "exit_code": self.exit_code,
            "arms": {"a": asdict(self.a), "b": asdict(self.b)},
            "rows": [row.to_dict() for row in self.rows],
            "agreement": self.agreement,
            "notes": list(self.notes),
            "faults": list(self.faults),
            "interrupted": self.interrupted,
        }


def exit_code_of(codes: Iterable[int]) -> int:
    """The code that says most: 3 before 4 (a regression is proven even if another row is void),
    then 6, 5, 0."""
    found = set(codes)
    return next((code for code in (3, 4, 6, 5) if code in found), 0)


def run_contests(
    contests: Iterable[Contest | CompareRow],
    settings: Settings,
    *,
    on_block: Callable[[str, int, Block], Any] | None = None,
    ceiling: Ceiling | None = None,
) -> tuple[tuple[CompareRow, ...], bool]:
    """Run contests in turn; Holm over all of their verdicts.

    Args:
        contests: made one by one; a row among them needs no timing and is passed on.
        settings: how they are run.
        on_block: called after each block with the contest's label, its number of finished blocks
            and the block.
        ceiling: what the machine can do at most.

    Returns:
        (rows, whether Ctrl-C ended the run). What was finished by then is kept.

    Raises:
        KeyboardInterrupt: before the first block was finished.
        MeasureError: a time that beats the ceiling.
    """
    rows: list[CompareRow] = []
    interrupted = False
    try:
        for contest in contests:
            if isinstance(contest, CompareRow):
                rows.append(contest)
                continue
            rows.append(_run(contest, settings, on_block, ceiling))
            comparison = rows[-1].comparison
            if comparison is not None and comparison.interrupted:
                interrupted = True
                break
    except KeyboardInterrupt:
        if not rows:
            raise
        interrupted = True
    timed = [row.comparison for row in rows if row.comparison is not None]
    judged = iter(adjust_family(timed))
    rows = [
        row if row.comparison is None else replace(row, comparison=next(judged)) for row in rows
    ]
    return tuple(rows), interrupted


def _run(
    contest: Contest,
    settings: Settings,
    on_block: Callable[[str, int, Block], Any] | None,
    ceiling: Ceiling | None,
) -> CompareRow:
    done = 0

    def count(block: Block) -> None:
        nonlocal done
        done += 1
        if on_block is not None:
            on_block(f"{contest.label} {contest.cache}", done, block)

    comparison = compare(
        contest.a,
        contest.b,
        blocks=settings.blocks,
        cold=contest.cache == "cold",
        clock=contest.clock,
        plan=contest.plan,
        probe=contest.probe,
        control=contest.control,
        post_check=contest.post_check,
        on_block=count,
        work=contest.work,
        ceiling=ceiling,
        seed=settings.seed,
        alpha=settings.alpha,
        delta=settings.delta,
        sample_us=settings.sample_us,
        warm_up_us=settings.warm_up_us,
    )
    if contest.cache not in ("hot", "cold"):
        comparison = replace(comparison, settings={**comparison.settings, "cache": contest.cache})
    return CompareRow(contest.label, contest.cache, comparison, contest.tokens, contest.note)
