"""`tilewright tune --ray`: the same verb over the devices of a Ray cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import note, show, status

if TYPE_CHECKING:
    from tilewright.ops.contract import OpSpec
    from tilewright.tune.fleet import FleetReport
    from tilewright.tune.tuner import Progress, Settings, Target

__all__ = ["Fleet"]


class Fleet:
    """A connection to the cluster at `options["ray"]`, made when this is.

    Args:
        options: of the verb.

    Raises:
        UnsupportedError, TilewrightError: as `RayExecutor`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options["dry_run"]:
            raise click.UsageError("--dry-run looks at this machine; leave out --ray")
        from tilewright.tune.fleet_ray import RayExecutor

        self._options = options
        with status(f"connecting to Ray at {options['ray']}"):
            self._executor = RayExecutor(options["ray"])

    def tune(
        self,
        targets: Sequence[Target],
        specs: Mapping[str, OpSpec] | None,
        settings: Settings,
        out: Path | None,
        log: Path | None,
        record: Mapping[str, Any],
        on_event: Callable[[Progress], Any] | None,
    ) -> FleetReport:
        """See `tilewright.tune.fleet.tune_fleet`; workers that are refused are named on stderr."""
        from tilewright.tune.fleet import tune_fleet
        from tilewright.tune.isolate import sources

        options = self._options
        return tune_fleet(
            targets,
            self._executor,
            specs=specs,
            sources=None if specs is None else sources(dict.fromkeys(specs, options["spec"])),
            out=out,
            log=log,
            budget_s=options["budget"],
            strategy=options["strategy"],
            seed=options["seed"],
            threads=options["threads"],
            resume=options["resume"],
            on_event=on_event,
            on_refused=lambda refused: note(f"not used: {refused.worker}: {refused.reason}"),
            settings=settings,
            provenance=record,
        )

    def show(self, report: FleetReport, subject: str, as_json: bool, html: Path | None) -> None:
        """Print what came of it, write the pages, and leave with the exit code."""
        from tilewright.report.fleet import fleet_table
        from tilewright.report.tune import tune_table

        for table in report.tables:
            table.settings["subject"] = subject
        if as_json:
            click.echo(json.dumps(report.to_dict(), allow_nan=False))
        else:
            for table in report.tables:
                show(tune_table(table))
            show(fleet_table(report))
        if html is not None:
            from tilewright.report.page import write_page

            several = len(report.tables) > 1
            for table in report.tables:
                stem = f"{html.stem}.{Path(table.table).stem}" if several else html.stem
                write_page("tune", table.to_dict(), html.with_stem(stem))
        if report.exit_code:
            sys.exit(report.exit_code)
