"""The launches of one tile on one product, and what each of them must leave behind.

The order is that of `tilewright.tune.gate`, which says what is demanded and why.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tilewright.ops.check import CheckResult, ErrorModel, check_output
from tilewright.ops.contract import Case, Inputs, OpSpec, Results, joined
from tilewright.tiles.tile import Tile
from tilewright.tune.gate_memory import Guards, Snapshot, operand_bytes, rehoused

__all__ = ["Operands", "Rejected", "Trial", "another"]

_CACHE_BYTES = 1 << 28
_CACHE_BYTES_GPU = 1 << 32  # beside a GPU, whose products are larger and whose host has the memory


class Rejected(Exception):
    """The check that does not hold, and what it saw."""

    def __init__(self, check: str, reason: str) -> None:
        super().__init__(reason)
        self.check = check


@dataclass(frozen=True, eq=False)
class Operands:
    """Operands of one launch, and what a right result is; no oracle when that is left out."""

    inputs: Inputs
    ref: np.ndarray | None
    model: ErrorModel | None

    @property
    def nbytes(self) -> int:
        oracle = 0 if self.ref is None else 2 * self.ref.nbytes
        return operand_bytes(self.inputs) + oracle


class _Kept(threading.local):
    """Operands and oracles of late, for the next tiles on the same products."""

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[Any, ...], tuple[int, Operands]] = OrderedDict()

    def get(self, key: tuple[Any, ...], make: Callable[[], Operands]) -> Operands:
        if key not in self.entries:
            made = make()
            self.entries[key] = (made.nbytes, made)
        self.entries.move_to_end(key)
        found = self.entries[key][1]
        most = _CACHE_BYTES if found.inputs.x.device.type == "cpu" else _CACHE_BYTES_GPU
        while len(self.entries) > 1 and sum(n for n, _ in self.entries.values()) > most:
            self.entries.popitem(last=False)
        return found


_KEPT = _Kept()


class Trial:
    """One tile under the checks `on`; collects the worst of all launches."""

    def __init__(
        self, spec: OpSpec, tile: Tile | None, seed: int, threads: int | None, on: frozenset[str]
    ) -> None:
        self.spec = spec
        self.tile = tile
        self.seed = seed
        self.threads = threads
        self.on = on
        self.failure: tuple[str, str, Case] | None = None
        self.nmse = 0.0
        self.worst = 0.0
        self.cases = 0

    def run(self, case: Case) -> None:
        """Every launch of one product; sets `failure` at the first that is wrong."""
        self.cases += 1
        try:
            first, changed, second = self._operands(case)
        except Exception as error:
            self.failure = ("oracle", f"its operands or its oracle failed: {_text(error)}", case)
            return
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="gate") as pool:
                pool.submit(self._launches, first, changed, second).result()
        except Rejected as rejected:
            self.failure = (rejected.check, str(rejected), case)

    def _operands(self, case: Case) -> tuple[Operands, Operands | None, Operands | None]:
        """The operands A; A with another x; B."""
        changed = second = None
        first = self._drawn(case, self.seed)
        if "stale-buffer" in self.on:
            changed = self._drawn(case, self.seed, first.inputs)
        if "fresh-operands" in self.on:
            second = self._drawn(case, self.seed + 1)
        return first, changed, second

    def _drawn(self, case: Case, seed: int, like: Inputs | None = None) -> Operands:
        """Operands of `seed`; those of `like` with another x, where it is given."""

        def make() -> Operands:
            inputs = self.spec.make_inputs(case, seed) if like is None else like
            x = inputs.x if like is None else another(inputs.x)
            return self.judged(replace(inputs, x=rehoused(x, nan="edge-reads" in self.on)))

        key = (
            self.spec.make_inputs, self.spec.reference, self.spec.error_model, case, seed,
            like is None, "edge-reads" in self.on, "oracle" in self.on,
        )  # fmt: skip
        return _KEPT.get(key, make)

    def judged(self, inputs: Inputs) -> Operands:
        if "oracle" not in self.on:
            return Operands(inputs, None, None)
        ref = self.spec.reference(inputs)
        return Operands(inputs, ref, self.spec.error_model(inputs, ref))

    def _launches(self, first: Operands, changed: Operands | None, second: Operands | None) -> None:
        pristine = Snapshot(first.inputs)
        guards = Guards(nan="nan-fill" in self.on)
        try:
            y = self.launch(first.inputs, guards)
            self.compare(y, first)
            if "repeat" in self.on:
                pristine.restore()
                again = self.launch(first.inputs, guards)
                self._same(again, y, first, "repeat", "the second of two launches")
            if changed is not None:
                first.inputs.x.copy_(changed.inputs.x)
                other = self.launch(first.inputs, guards)
                self.compare(other, changed, "stale-buffer", "with another x in the same memory")
                pristine.restore()
                back = self.launch(first.inputs, guards)
                self._same(back, y, first, "stale-buffer", "after a launch with another x")
            if second is not None:
                other = self.launch(second.inputs, guards)
                self.compare(other, second, "fresh-operands", "on other operands of this shape")
        finally:
            pristine.restore()

    def launch(self, inputs: Inputs, guards: Guards) -> torch.Tensor:
        """One launch; its result, copied, or what it did to memory that is not its own."""
        before = Snapshot(inputs)
        try:
            with guards:
                y = self.spec.run(inputs, tile=self.tile, threads=self.threads)
            y = joined(y)
            if not isinstance(y, torch.Tensor):
                raise TypeError(f"the op returned a {type(y).__name__}; it must return a tensor")
            y = y.detach().clone()
        except Exception as error:
            before.restore()
            raise Rejected("launch", _text(error)) from error
        broken, changed = guards.broken(), before.changed()
        if changed is not None:
            before.restore()  # first of all: the operands are kept for the next tiles
        if broken is not None and "guard-bands" in self.on:
            raise Rejected("guard-bands", broken)
        if changed is not None and "inputs" in self.on:
            raise Rejected("inputs", f"the op changed {changed}, which it may only read")
        return y

    def compare(
        self,
        y: torch.Tensor | Results,
        operands: Operands,
        check: str | None = None,
        when: str = "",
    ) -> None:
        if operands.ref is None or operands.model is None:
            return
        try:
            found = check_output(joined(y), operands.ref, operands.model)
        except ValueError as error:
            raise Rejected("oracle", f"its oracle failed: {error}") from error
        self.nmse = max(self.nmse, found.nmse)
        self.worst = max(self.worst, found.worst_ratio)
        if found.passed:
            return
        when = f"{when}: " if when else ""
        if _only_blocks(found):
            if "block-error" in self.on:
                raise Rejected("block-error", when + found.reason)
        elif check is not None:
            raise Rejected(check, when + found.reason)
        else:
            raise Rejected(*self._blame(found, operands.inputs))

    def _same(
        self, y: torch.Tensor, first: torch.Tensor, operands: Operands, check: str, when: str
    ) -> None:
        if not self.spec.deterministic:
            self.compare(y, operands, check, when)
            return
        if not _same_bits(y, first):
            differ = int((y != first).sum()) if y.shape == first.shape else y.numel()
            raise Rejected(
                check,
                f"{when} differs from the first in {differ} of {y.numel()} outputs on the same "
                "operands, and the op declares itself deterministic",
            )

    def _blame(self, found: CheckResult, inputs: Inputs) -> tuple[str, str]:
        """Which check showed a wrong first result: a NaN that ours explains is named for it."""
        if "NaN" not in found.reason:
            return "oracle", found.reason
        if "nan-fill" in self.on and self._finite(inputs, Guards(nan=False)):
            return "nan-fill", f"{found.reason}: never written, or added to before they were"
        between_zeros = replace(inputs, x=rehoused(inputs.x, nan=False))
        if "edge-reads" in self.on and self._finite(
            between_zeros, Guards(nan="nan-fill" in self.on)
        ):
            return "edge-reads", f"{found.reason}: they depend on what lies past the edges of x"
        return "oracle", found.reason

    def _finite(self, inputs: Inputs, guards: Guards) -> bool:
        """Whether one more launch, with fresh workspaces, gives finite numbers."""
        before = Snapshot(inputs)

        def launch() -> bool:
            with guards:
                y = self.spec.run(inputs, tile=self.tile, threads=self.threads)
            return bool(torch.isfinite(joined(y)).all())

        try:
            with ThreadPoolExecutor(1, thread_name_prefix="gate") as pool:
                return pool.submit(launch).result()
        except Exception:
            return False
        finally:
            before.restore()


def _only_blocks(found: CheckResult) -> bool:
    """Columns or tiles are off, while every element and the whole tensor are within limits."""
    averaged = "column" in found.reason or "tile" in found.reason
    return averaged and "element" not in found.reason and "NMSE" not in found.reason


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def another(x: torch.Tensor) -> torch.Tensor:
    """x with its values in reverse order and halved (integers only reversed): same strides."""
    turned = x.flip(tuple(range(x.dim())))
    other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return other.copy_(turned * 0.5 if x.is_floating_point() else turned)
