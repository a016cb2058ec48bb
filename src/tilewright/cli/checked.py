"""The check of a model's own products before they are timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewright.cli.common import progress_bar

if TYPE_CHECKING:
    from tilewright.ops.contract import Case

__all__ = ["checked"]

_MOST_ROWS = {"cpu": 512, "cuda": 2048}  # a longer prompt runs the same kernels
# What the check of a product may take, in multiply-adds: larger ones are checked at fewer rows, and
# an output matrix at one, all that it is ever applied to.
_MOST_WORK = {"cpu": 1 << 33, "cuda": 1 << 37}


def checked(
    model: Any, activations: str, prompts: Sequence[int], seed: int, device: str = "cpu"
) -> str:
    """Verify a model's products at the sizes to be timed; what the check said.

    Args:
        prompts: tokens of the prompts to be timed; 0 for single tokens, which are always checked.

    Raises:
        GateError: one of them is wrong, so no speed may be reported.
    """
    from tilewright.errors import GateError
    from tilewright.model.check import model_cases, verify_cases
    from tilewright.report.verify import failure_lines

    sizes = sorted({1, *(min(p, _MOST_ROWS[device]) for p in prompts if p)})
    vocabulary = model.config.get_text_config().vocab_size
    cases: dict[str, list[Case]] = {}
    fewer = 0
    for op, some in model_cases(model, paths=[activations], batches=sizes).items():
        fitted = {case: _fitted(case, _MOST_WORK[device]) for case in some}
        fewer += sum(one != case and case.N != vocabulary for case, one in fitted.items())
        cases[op] = list(
            dict.fromkeys(
                one for case, one in fitted.items() if one == case or case.N != vocabulary
            )
        )
    with progress_bar("verify") as move:
        report = verify_cases(
            cases, seed=seed, on_case=lambda row, done, total: move(done, total, row.label)
        )
    if report.failures:
        lines = "\n".join(failure_lines(report.failures))
        raise GateError(f"the model's products are not right, so nothing is timed\n{lines}")
    if not report.complete:
        raise KeyboardInterrupt
    rows = ", ".join(map(str, sizes))
    large = f", large ones ({fewer}) at fewer rows" if fewer else ""
    return (
        f"verified: {len(report.rows)}/{len(report.rows)} products of this model, M = {rows}{large}"
    )


def _fitted(case: Case, work: int) -> Case:
    """The case with half its rows, or a quarter, .. until it takes no more than `work`."""
    rows = case.M
    while rows > 1 and rows * case.N * case.K > work:
        rows //= 2
    return case if rows == case.M else replace(case, M=rows)
