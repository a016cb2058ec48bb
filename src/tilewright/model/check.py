"""Verify a loaded model's own products: their shapes, types and activation path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.device import arch_of
from tilewright.model.layers import model_problems
from tilewright.model.moe import expert_cases
from tilewright.model.placement import device_of
from tilewright.model.ssm import scan_cases
from tilewright.ops.catalog import load_spec
from tilewright.ops.contract import Case
from tilewright.tiles.tile import Problem
from tilewright.tune.verify import (
    MODEL_BATCHES,
    VerifyReport,
    VerifyRow,
    problems_to_cases,
    verify_op,
)

__all__ = ["model_cases", "verify_cases"]

_ACT_DTYPES = {"torch.float32": "float32", "torch.float16": "float16", "torch.bfloat16": "bfloat16"}


def model_cases(
    model: Any,
    *,
    paths: Sequence[str] = ("float", "int8"),
    batches: Sequence[int] = MODEL_BATCHES,
) -> dict[str, tuple[Case, ...]]:
    """Cases by op for every distinct packed product and scan of a model from `tilewright.load`; of
    one on a GPU by "op@cuda", as `tilewright.ops.catalog.load_spec` takes it.

    Args:
        model: the model; the dtype it computes in is that of the cases.
        paths: activation paths, "float" and "int8".
        batches: rows of x.

    Raises:
        UnsupportedError: the model has neither a product that runs packed nor a scan.
    """
    device, dtype = device_of(model), _ACT_DTYPES[str(model.dtype)]
    arch = arch_of(device)
    if device.type != "cpu":
        paths = ["float"]
    others = {
        "moe": expert_cases(model, dtype, paths, batches),
        "ssd": scan_cases(model, dtype, batches),
    }
    others = {op: some for op, some in others.items() if some}
    problems = [
        Problem(p.op, arch, dtype, p.type, path, 1, p.N, p.K, p.group)
        for path in paths
        for p in model_problems(model)
    ]
    # Scans may be all that there is to verify: their projections need not be packed.
    cases = problems_to_cases(problems, batches) if problems or not others else {}
    cases |= others
    on = "" if device.type == "cpu" else f"@{device.type}"
    return {f"{op}{on}": some for op, some in cases.items()}


def verify_cases(
    cases: Mapping[str, Sequence[Case]],
    *,
    seed: int = 0,
    on_case: Callable[[VerifyRow, int, int], None] | None = None,
) -> VerifyReport:
    """Run cases of several ops as one report; Ctrl-C ends it and marks it incomplete.

    Args:
        cases: op -> its cases; the op as `tilewright.ops.catalog.load_spec` takes it.
        seed: draws the operands.
        on_case: called after each row with the row, rows run, and rows in all.
    """
    total = sum(len(some) for some in cases.values())
    reports: list[VerifyReport] = []
    done = 0

    def count(row: VerifyRow, _ran: int, _planned: int) -> None:
        nonlocal done
        done += 1
        if on_case is not None:
            on_case(row, done, total)

    for op, some in cases.items():
        reports.append(verify_op(load_spec(op), seed=seed, cases=some, on_case=count))
        if not reports[-1].complete:
            break
    joined = VerifyReport.join(reports)
    return VerifyReport(joined.rows, joined.seed, joined.complete, planned=total)
