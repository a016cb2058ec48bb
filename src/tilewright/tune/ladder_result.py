"""What a ladder found, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from tilewright.measure import Comparison, Verdict, adjust_family
from tilewright.tune.arms import exit_code_of
from tilewright.tune.ladder_file import ChangeSet

__all__ = [
    "LadderResult",
    "LeftOut",
    "RungResult",
    "RungTest",
    "judged_left",
    "judged_rungs",
]

_MOVED = (Verdict.FASTER, Verdict.SLOWER, Verdict.DISJOINT)


@dataclass(frozen=True)
class RungTest:
    """One test of one rung.

    Attributes:
        test, tokens: what ran, and its tokens; 0 for a product.
        control: it must not move.
        below, base: the rung against the rung below, and against the base.
    """

    test: str
    tokens: int
    control: bool
    below: Comparison
    base: Comparison

    @property
    def us(self) -> float:
        """The rung's median time, microseconds."""
        return float(median(self.base.samples_us(self.base.b)))

    @property
    def base_us(self) -> float:
        """The base's median time in the same blocks."""
        return float(median(self.base.samples_us(self.base.a)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "test": self.test, "tokens": self.tokens, "control": self.control, "us": self.us,
            "base_us": self.base_us, "below": self.below.to_dict(), "base": self.base.to_dict(),
        }  # fmt: skip


@dataclass(frozen=True)
class RungResult:
    """One rung.

    Attributes:
        change: its own change set.
        below: name of what it stands on.
        verified: what the check of its products said.
        faults: why it is WRONG; empty where it is right.
        agreement: with the base, as plain values.
        tests: in the ladder's order; fewer after Ctrl-C.
        details: what its arm runs.
    """

    change: ChangeSet
    below: str
    verified: str
    faults: tuple[str, ...]
    agreement: dict[str, Any] | None
    tests: tuple[RungTest, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.change.name

    @property
    def right(self) -> bool:
        return not self.faults

    @property
    def moved(self) -> tuple[RungTest, ...]:
        """Control tests that moved and must not have."""
        return tuple(
            t
            for t in self.tests
            if t.control and t.test not in self.change.moves and t.below.verdict in _MOVED
        )

    @property
    def exit_code(self) -> int:
        codes = [t.below.exit_code for t in self.tests if not t.control]
        return exit_code_of([*([] if self.right else [3]), *([6] if self.moved else []), *codes])

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "below": self.below,
            "status": "right" if self.right else "WRONG",
            "change": self.change.to_dict(),
            "verified": self.verified,
            "faults": list(self.faults),
            "agreement": self.agreement,
            "moved": [t.test for t in self.moved],
            "tests": [t.to_dict() for t in self.tests],
            "details": self.details,
        }


@dataclass(frozen=True)
class LeftOut:
    """The finished stack without one change set.

    Attributes:
        name: of the change set.
        comparisons: by test, the whole stack (B) against the stack without it (A): a ratio
            above 1 is what the change set is worth.
        reason: why there is none.
    """

    name: str
    comparisons: dict[str, Comparison]
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "reason": self.reason,
            "comparisons": {test: c.to_dict() for test, c in self.comparisons.items()},
        }


@dataclass(frozen=True)
class LadderResult:
    """What a ladder found.

    Attributes:
        title, subject: of the file, and what it was run on.
        base: the base's change set.
        rungs, left_out: in order; verdicts are adjusted over all rungs, and over all left out.
        verified: what the check of the base's products said.
        interrupted: Ctrl-C ended the run.
    """

    title: str
    subject: str
    base: ChangeSet
    rungs: tuple[RungResult, ...]
    left_out: tuple[LeftOut, ...] = ()
    verified: str = ""
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """3 a rung is WRONG, 4 a rung is SLOWER than the one below, 6 a comparison is VOID or the
        control moved, 5 any is UNRESOLVED, else 0."""
        return exit_code_of(rung.exit_code for rung in self.rungs)

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "subject": self.subject,
            "exit_code": self.exit_code,
            "base": self.base.to_dict(),
            "verified": self.verified,
            "rungs": [rung.to_dict() for rung in self.rungs],
            "left_out": [left.to_dict() for left in self.left_out],
            "notes": list(self.notes),
            "interrupted": self.interrupted,
        }


def judged_rungs(rungs: Sequence[RungResult]) -> list[RungResult]:
    """The rungs with verdicts adjusted over all of them: against below, against the base, and of
    the control, each a family."""
    families: dict[tuple[str, bool], list[Comparison]] = {}
    for rung in rungs:
        for test in rung.tests:
            families.setdefault(("below", test.control), []).append(test.below)
            families.setdefault(("base", test.control), []).append(test.base)
    judged = {key: iter(adjust_family(found)) for key, found in families.items()}
    return [
        replace(
            rung,
            tests=tuple(
                replace(
                    test,
                    below=next(judged["below", test.control]),
                    base=next(judged["base", test.control]),
                )
                for test in rung.tests
            ),
        )
        for rung in rungs
    ]


def judged_left(left: Sequence[LeftOut]) -> list[LeftOut]:
    judged = iter(adjust_family([c for out in left for c in out.comparisons.values()]))
    return [
        replace(out, comparisons={test: next(judged) for test in out.comparisons}) for out in left
    ]
