"""The workers of a fleet as people read them: what each did, and how those that were lost ended."""

from __future__ import annotations

from typing import Any

from tilewright.report.table import Column, Table
from tilewright.tune.fleet import FleetReport

__all__ = ["fleet_table"]


def fleet_table(report: FleetReport) -> Table:
    """One row a device; below it the losses, and the workers and problems that were given up."""
    rows = [_row(worker) for worker in report.workers]
    notes = [
        f"{worker['name']} was lost: {reason}"
        for worker in report.workers
        for reason in worker["losses"]
    ]
    notes += [f"{refused.worker} was not used: {refused.reason}" for refused in report.refused]
    notes += [
        f"{problem}: {reason}; `tilewright tune --resume` tries again"
        for reasons in report.given_up.values()
        for problem, reason in reasons.items()
    ]
    return Table("", _COLUMNS, rows, notes=notes, key="workers")


def _row(worker: dict[str, Any]) -> dict[str, Any]:
    return {**worker, "lost": len(worker["losses"])}


_COLUMNS = (
    Column("name", "worker"),
    Column("device", "device"),
    Column("arch", "arch"),
    Column("units", "units", right=True),
    Column("verified", "verified", right=True),
    Column("timed", "problems timed", right=True),
    Column("lost", "lost", right=True),
    Column("state", "at the end"),
)
