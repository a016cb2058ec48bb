"""The arms of a ladder as worker processes: of a model, or of one op's products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright.errors import UnsupportedError
from tilewright.measure import Clock, ReportedClock, SamplePlan, StateProbe
from tilewright.measure.clock import Launch
from tilewright.model.compare import CHECK_IDS, Speech, fallbacks, test_tokens
from tilewright.ops.contract import Case, OpSpec
from tilewright.tune.agreement import Agreement, agree
from tilewright.tune.ladder_file import ChangeSet, Ladder, stack
from tilewright.tune.revisions import Revision
from tilewright.tune.worker_contests import (
    LogitsCheck,
    WorkerProbe,
    sample_launches,
    verify_workers,
)
from tilewright.tune.workers import Place, Pool, Worker

__all__ = ["ModelBench", "ProductBench"]


class _WorkerBench:
    """What both kinds share.

    Args:
        ladder: decides whether one process can hold all arms.
        revisions: those that change sets name, checked out.
        threads: of arms whose change sets set none.
        seed: of operands.
    """

    def __init__(
        self,
        ladder: Ladder,
        revisions: Mapping[str, Revision],
        threads: int | None,
        seed: int,
    ) -> None:
        self.clock: Clock = ReportedClock()
        self.plan: SamplePlan | None = SamplePlan()
        self._revisions, self._threads, self._seed = revisions, threads, seed
        whole = [stack(ladder.base, ladder.rungs[:n]) for n in range(len(ladder.rungs) + 1)]
        self._pool = Pool([self._place(change) for change in whole])
        self.own_control = not self._pool.shared

    def _place(self, change: ChangeSet) -> Place:
        revision = None if change.rev is None else self._revisions[change.rev]
        return Place(
            None if revision is None else revision.source,
            None if revision is None else revision.python,
            change.threads or self._threads,
            tuple(sorted(change.env.items())),
        )

    def _start(
        self, name: str, change: ChangeSet, opening: Mapping[str, Any]
    ) -> AbstractContextManager[Worker]:
        whole = {
            **opening,
            "table": None if change.table is None else str(change.table),
            "rules": [rule.to_dict() for rule in change.tiles],
        }
        return self._pool.open(name, whole, self._place(change))

    def verify(self, arm: Worker) -> str:
        return verify_workers([arm], self._seed)[arm.name]

    def probe(self, arms: Sequence[Worker]) -> StateProbe:
        return WorkerProbe(arms)


class ModelBench(_WorkerBench):
    """Arms of one model.

    Args:
        model: path or hub id.
        ladder: its tests and control.
        device: where the model lies.
        speech: what arms are asked to say.
        revisions, threads, seed: as of every bench of workers.

    Raises:
        UnsupportedError: a text is no test.
    """

    def __init__(
        self,
        model: str,
        ladder: Ladder,
        *,
        speech: Speech | None = None,
        revisions: Mapping[str, Revision] | None = None,
        threads: int | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        super().__init__(ladder, revisions or {}, threads, seed)
        self._model, self._speech, self._device = model, speech or Speech(), device
        try:
            self._tests = test_tokens([*ladder.tests, *ladder.control])
        except ValueError as error:
            raise UnsupportedError(f"the ladder's {error}") from error
        self._ids: tuple[list[list[int]], list[int]] | None = None

    @contextmanager
    def open(self, name: str, change: ChangeSet) -> Iterator[Worker]:
        opening = {
            "model": self._model,
            "device": self._device,
            "activations": change.activations or "float",
            "decoder": change.decoder or "auto",
            "tests": list(self._tests),
        }
        with self._start(name, change, opening) as worker:
            if self._ids is None:
                self._ids = self._speech.ids(worker)
            yield worker

    def agree(self, base: Worker, arm: Worker, *, same_function: bool) -> Agreement:
        prompts, text = self._spoken()
        return agree(
            base,
            arm,
            prompts,
            text,
            tokens=self._speech.new_tokens,
            same_function=same_function,
        )

    def _spoken(self) -> tuple[list[list[int]], list[int]]:
        assert self._ids is not None  # the first arm has been opened
        return self._ids

    def tests(self) -> dict[str, int]:
        return self._tests

    def launch(self, arm: Worker, test: str) -> Launch:
        return arm.launch(test)

    def post_check(self, arms: Sequence[Worker]) -> Callable[[], Any]:
        return LogitsCheck(arms, self._spoken()[1][:CHECK_IDS])

    def details(self, arm: Worker) -> dict[str, Any]:
        told = {k: v for k, v in arm.about.items() if k != "source"}
        lines = fallbacks([arm]) if arm.opening.get("table") else []
        return {**told, "fallbacks": lines}


def _fields(case: Case) -> dict[str, Any]:
    """The fields of a case that a worker makes it of; one of an older revision may know less."""
    found = asdict(case)
    if not case.sequences:
        del found["sequences"]
    return found


class ProductBench(_WorkerBench):
    """Arms of products of one op; a test is a product.

    Args:
        spec: the op.
        spec_text: how a worker finds it: a name in the catalog, or file.py:NAME.
        ladder: its products.
        sample_us: time of one sample.
        revisions, threads, seed: as of every bench of workers.

    Raises:
        UnsupportedError: a product's type is none of the op's.
    """

    def __init__(
        self,
        spec: OpSpec,
        spec_text: str,
        ladder: Ladder,
        *,
        revisions: Mapping[str, Revision] | None = None,
        threads: int | None = None,
        seed: int = 0,
        sample_us: float = 20_000.0,
    ) -> None:
        super().__init__(ladder, revisions or {}, threads, seed)
        self._spec, self._spec_text, self._sample_us = spec, spec_text, sample_us
        self._products = ladder.products
        for product in self._products:
            if product.type not in spec.weight_types:
                raise UnsupportedError(
                    f"a product's type is {product.type!r}; {spec.name} has "
                    f"{', '.join(spec.weight_types)}"
                )
        self._names = [case.id for case in self._cases("float")]
        self._plans: dict[str, tuple[int, int]] = {}

    def _cases(self, activations: str) -> list[Case]:
        default = 128 if self._spec.name == "w4a16" else 0
        return [
            self._spec.fit(Case(
                self._spec.name, p.type, p.dtype, m, *p.shape,
                default if p.group is None else p.group, activations,
            ))
            for p in self._products
            for m in p.m
        ]  # fmt: skip

    def open(self, name: str, change: ChangeSet) -> AbstractContextManager[Worker]:
        cases = self._cases(change.activations or "float")
        return self._start(
            name,
            change,
            {"spec": self._spec_text, "cases": [_fields(c) for c in cases], "seed": self._seed},
        )

    def agree(self, base: Worker, arm: Worker, *, same_function: bool) -> None:
        return None

    def tests(self) -> dict[str, int]:
        return dict.fromkeys(self._names, 0)

    def launch(self, arm: Worker, test: str) -> Launch:
        index = self._names.index(test)
        case = arm.opening["cases"][index]
        own = Case(**{**case, "flags": tuple(case["flags"])}).id
        if test not in self._plans:
            self._plans[test] = sample_launches(arm, own, sample_us=self._sample_us)
        launches, readings = self._plans[test]
        return arm.launch(own, launches=launches, readings=readings)

    def post_check(self, arms: Sequence[Worker]) -> Callable[[], Any]:
        def check() -> str | None:
            faults = [f"{arm.name}: {fault}" for arm in arms for fault in arm.recheck()]
            return "; ".join(faults) or None

        return check

    def details(self, arm: Worker) -> dict[str, Any]:
        return {k: v for k, v in arm.about.items() if k != "source"}


def revisions_of(ladder: Ladder) -> list[str]:
    """The revisions that its change sets name, each once."""
    found = [change.rev for change in (ladder.base, *ladder.rungs) if change.rev is not None]
    return list(dict.fromkeys(found))


def spec_text_of(spec: str, beside: Path) -> str:
    """file.py:NAME with the file as found beside the ladder; any other name as it is."""
    path, _, name = spec.rpartition(":")
    file = beside / path
    return f"{file.resolve()}:{name}" if path and file.is_file() else spec
