"""Tuning over several workers: verify anywhere, time each problem on one device.

::

    executor      starts a worker on every device (Ray: `tilewright.tune.fleet_ray`)
    admission     a worker with another package, kernel or compiler is refused by name
    groups        devices of one arch and unit count share a table; each group is a run of its own
    run           `tilewright.tune.fleet_run`: problems to devices, candidates to whoever is idle

The log is on the machine that runs this, and so is the table: every event is written as it comes
in, as the tuner of one machine does. A worker that dies takes nothing with it that was finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilewright import __version__
from tilewright.device import cpu_device
from tilewright.errors import UnsupportedError
from tilewright.measure import Clock, CpuClock
from tilewright.ops.catalog import SPECS, specs_on
from tilewright.ops.choose import running_of
from tilewright.ops.contract import OpSpec
from tilewright.tiles.local import INTERPRETER
from tilewright.tiles.table import TableHeader, TileTable, problem_text, user_table_path
from tilewright.tiles.tile import Problem
from tilewright.tune.fleet_floor import Device, Executor, Floor
from tilewright.tune.fleet_hub import Hub, Interrupts
from tilewright.tune.fleet_parts import FleetGate
from tilewright.tune.fleet_run import FleetRun
from tilewright.tune.host import Progress, Settings, Target
from tilewright.tune.isolate import sources as catalog_sources
from tilewright.tune.record import Record
from tilewright.tune.refresh import new_header
from tilewright.tune.result import TuneReport
from tilewright.tune.search import STRATEGIES
from tilewright.tune.tuner import log_path, ordered_targets

__all__ = ["FleetReport", "Refused", "tune_fleet"]

_ABOUT_S = 180.0


@dataclass(frozen=True)
class Refused:
    """A worker that is not used, and why."""

    worker: str
    reason: str


@dataclass
class FleetReport:
    """What a fleet did.

    Attributes:
        tables: the report of each table: one for every arch and unit count among the devices.
        workers: of each device its name, host, arch, what it did and how its worker was lost.
        refused: workers that were not used.
        timed_on: by table, problem -> device.
        given_up: by table, problem -> why no device finished it.
    """

    tables: list[TuneReport] = field(default_factory=list)
    workers: list[dict[str, Any]] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    timed_on: dict[str, dict[str, str]] = field(default_factory=dict)
    given_up: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """The gravest of the tables' codes; 1 if a problem was given up and nothing is graver."""
        codes = [report.exit_code for report in self.tables]
        if any(self.given_up.values()):
            codes.append(1)
        return next((code for code in (3, 130, 1, 6, 5) if code in codes), 0)

    def to_dict(self) -> dict[str, Any]:
        """Values of JSON."""
        return {
            "exit_code": self.exit_code,
            "tables": [report.to_dict() for report in self.tables],
            "workers": self.workers,
            "refused": [dict(refused.__dict__) for refused in self.refused],
            "timed_on": self.timed_on,
            "given_up": self.given_up,
        }


def tune_fleet(
    problems: Sequence[Problem | Target],
    executor: Executor,
    *,
    specs: Mapping[str, OpSpec] | None = None,
    sources: Mapping[str, str] | None = None,
    out: Path | None = None,
    log: Path | None = None,
    budget_s: float = 60.0,
    strategy: str = "local",
    seed: int = 0,
    threads: int | None = None,
    resume: bool = False,
    on_event: Callable[[Progress], Any] | None = None,
    on_refused: Callable[[Refused], Any] | None = None,
    settings: Settings | None = None,
    clock: Clock | None = None,
    provenance: Mapping[str, Any] | None = None,
    interrupts: Interrupts | None = None,
) -> FleetReport:
    """Tune `problems` on every kind of device that a fleet has.

    Args:
        problems: what to tune; their arch is replaced by that of each group of devices.
        executor: starts the workers; it is closed at the end.
        specs: ops by name; None for those of the catalog.
        sources: by op, what workers load it from, if not the catalog: see `IsolatedGate`.
        out: the table; a folder, if the fleet needs several. None for where `lookup` finds them.
        log: the log; None for one beside each table.
        budget_s, strategy, seed, resume, on_event, settings, provenance: as
            `tilewright.tune.tuner.tune`; the budget begins when the workers are there.
        threads: of the kernels on every device; None for what each machine's processes use.
        on_refused: called with each worker that is not used.
        clock: of the budget.
        interrupts: counts Ctrl-C; None makes one.

    Returns:
        The report. Ctrl-C as in `tune`.

    Raises:
        UnsupportedError: no worker is fit, an unknown op or strategy, or files for fewer tables
            than the fleet needs.
        TileError, GateError: as `tune`.
        TilewrightError: there is no such fleet, or a log is another's.
    """
    if strategy not in STRATEGIES:
        raise UnsupportedError(f"strategy is {strategy!r}; use one of {', '.join(STRATEGIES)}")
    catalog = specs is None
    arch = _first_arch(problems)
    specs = specs_on(arch) if specs is None else specs
    targets = ordered_targets(problems, specs)
    ops = list(dict.fromkeys(target.problem.op for target in targets))
    setup = {
        "sources": dict(sources or _sources(ops, arch)),
        "seed": seed,
        "threads": threads,
        "kind": _kind({target.problem.arch for target in targets}),
    }
    interrupts = interrupts or Interrupts()
    report = FleetReport()
    try:
        devices = _admitted(executor, setup, {op: specs[op] for op in ops}, report, on_refused)
        groups = _groups(devices)
        own = None if ops[0] in SPECS else ops[0]
        paths = _paths(groups, out, log, own)
        tell = _one_at_a_time(on_event)
        here = new_header([specs[op] for op in ops], cpu_device().arch)

        def tuned(group: tuple[str, int]) -> TuneReport:
            arch, units = group
            header = _header(here, groups[group])
            table, record = paths[group]
            with _run(
                executor,
                groups[group],
                interrupts,
                record,
                specs=specs_on(arch) if catalog else specs,
                budget_s=budget_s,
                strategy=strategy,
                seed=seed,
                units=units,
                settings=settings or Settings(),
                clock=CpuClock() if clock is None else clock,
                on_event=tell,
                table=TileTable(header),
                table_path=table,
                report=TuneReport(
                    header, {}, table=str(table), log=str(record), provenance=provenance or {}
                ),
            ) as run:
                there = [replace(t, problem=replace(t.problem, arch=arch)) for t in targets]
                found = run.go(there, resume)
            report.timed_on[arch_text(group)] = _by_text(run.timed_on)
            report.given_up[arch_text(group)] = _by_text(run.given_up)
            return found

        with interrupts.caught():
            report.tables = _all(tuned, list(groups))
        report.workers = [device.to_dict() for device in devices]
        return report
    finally:
        executor.close()


def arch_text(group: tuple[str, int]) -> str:
    """("sm_90", 132) is "sm_90, 132 units"."""
    return f"{group[0]}, {group[1]} units"


def _sources(ops: Sequence[str], arch: str) -> dict[str, str]:
    known = catalog_sources(arch=arch)
    return {op: known.get(op, op) for op in ops}


def _first_arch(problems: Sequence[Problem | Target]) -> str:
    plain = [given.problem if isinstance(given, Target) else given for given in problems]
    return plain[0].arch if plain else cpu_device().arch


def _kind(archs: Collection[str]) -> str:
    """What the problems run on: "cpu" or "gpu".

    Raises:
        UnsupportedError: on both, or on Triton's interpreter.
    """
    if INTERPRETER in archs:
        raise UnsupportedError(
            "kernels under Triton's interpreter are not timed by a fleet; unset TRITON_INTERPRET"
        )
    kinds = {"cpu" if arch == "cpu" or arch.startswith("cpu-") else "gpu" for arch in archs}
    if len(kinds) != 1:
        raise UnsupportedError(f"the problems are for {', '.join(sorted(archs))}; tune one kind")
    return kinds.pop()


def _admitted(
    executor: Executor,
    setup: Mapping[str, Any],
    specs: Mapping[str, OpSpec],
    report: FleetReport,
    on_refused: Callable[[Refused], Any] | None,
) -> list[Device]:
    """The devices whose workers run the same code as this process.

    Raises:
        UnsupportedError: there is none.
    """
    found, devices = executor.start(setup), []
    asked = {h: executor.call(h, "about") for h, reason in found.items() if not reason}
    for handle, reason in found.items():
        about: dict[str, Any] = {}
        if not reason:
            reason, about = _answer(asked[handle])
        if not reason:
            reason = _difference(about, specs)
        if reason:
            where = f" ({about['host']})" if "host" in about else ""
            refused = Refused(f"{executor.name(handle)}{where}", reason)
            report.refused.append(refused)
            if on_refused is not None:
                on_refused(refused)
        else:
            devices.append(Device(handle, about))
    if not devices:
        reasons = "; ".join(f"{refused.worker}: {refused.reason}" for refused in report.refused)
        raise UnsupportedError(
            f"no worker of the fleet can be used: {reasons or 'it has none with a CPU to give'}"
        )
    _name_apart(devices)
    return devices


def _answer(asked: Future[Any]) -> tuple[str, dict[str, Any]]:
    """(why a worker has not said what it is, or what it said)."""
    try:
        return "", asked.result(timeout=_ABOUT_S)
    except NoAnswer:
        return f"it did not say within {_ABOUT_S:g} s what it is", {}
    except Exception as error:
        return f"it could not say what it is: {error}", {}


def _difference(about: Mapping[str, Any], specs: Mapping[str, OpSpec]) -> str:
    """How a worker's code differs from this process's; "" if it does not."""
    if about["version"] != __version__:
        return f"it has tilewright {about['version']}, this machine has {__version__}"
    if about["failed"]:
        return str(about["failed"])
    for op, spec in specs.items():
        here, there = running_of(spec), about["running"][op]
        if there["op_version"] != here.op_version:
            return f"its {op} is version {there['op_version']}, here it is {here.op_version}"
        if there["kernel_hash"] != here.kernel_hash:
            return (
                f"its kernels of {op} are {there['kernel_hash'][:12]}, here they are "
                f"{here.kernel_hash[:12]}: install the same source on both"
            )
        if there["compiler"] != here.compiler:
            return f"it has {there['compiler']}; here are {here.compiler}"
    return ""


def _name_apart(devices: Sequence[Device]) -> None:
    """Give devices of one name, such as two containers of one host, a number each."""
    for name in {device.name for device in devices}:
        same = [device for device in devices if device.name == name]
        if len(same) > 1:
            for number, device in enumerate(same, 1):
                device.name = f"{name}#{number}"


def _groups(devices: Sequence[Device]) -> dict[tuple[str, int], list[Device]]:
    found: dict[tuple[str, int], list[Device]] = {}
    for device in devices:
        found.setdefault(device.group, []).append(device)
    return found


def _paths(
    groups: Mapping[tuple[str, int], Sequence[Device]],
    out: Path | None,
    log: Path | None,
    own: str | None,
) -> dict[tuple[str, int], tuple[Path, Path]]:
    """Table and log of each group.

    Raises:
        UnsupportedError: a file is named where several are needed.
    """
    several = len(groups) > 1
    kinds = "; ".join(map(arch_text, groups))
    found = {}
    archs = [arch for arch, _ in groups]
    for arch, units in groups:
        stem = arch if archs.count(arch) == 1 else f"{arch}.{units}-units"
        table = user_table_path(stem, own)
        if out is not None and out.suffix != ".json":
            table = out / table.name
        elif out is not None:
            if several:
                raise UnsupportedError(
                    f"out is {out}, one table, but the fleet needs {len(groups)} ({kinds}); "
                    "name a folder, or leave it out"
                )
            table = out
        if log is not None and several:
            raise UnsupportedError(
                f"log is {log}, one file, but the fleet needs {len(groups)} ({kinds}); leave it "
                "out: each is written beside its table"
            )
        found[arch, units] = table, log_path(table) if log is None else log
    return found


def _header(header: TableHeader, devices: Sequence[Device]) -> TableHeader:
    """`header` for the devices of a group instead of this machine."""
    arch, units = devices[0].group
    makers = list(dict.fromkeys(str(device.about["device"]) for device in devices))
    notes = [f"{device.name}: {device.about['device']}, {units} units" for device in devices]
    return replace(
        header,
        arch=arch,
        valid_for=(arch,),
        units=units,
        device="; ".join(makers),
        notes=(*header.notes, *notes),
    )


@contextmanager
def _run(
    executor: Executor,
    devices: Sequence[Device],
    interrupts: Interrupts,
    log: Path,
    **rest: Any,
) -> Iterator[FleetRun]:
    """The run of one table; its parts know of each other, and end with it."""
    hub = Hub(interrupts)
    floor = Floor(
        devices, executor, on_loss=lambda device, reason, then: run.log_loss(device, reason, then)
    )
    gate = FleetGate(
        floor, hub, on_retry=lambda problem, tile, reason: run.log_retry(problem, tile, reason)
    )
    with Record(log) as record:
        run = FleetRun(gate=gate, fleet_gate=gate, floor=floor, hub=hub, record=record, **rest)
        try:
            yield run
        finally:
            floor.close()
            hub.close()
            gate.close()


def _all(
    tuned: Callable[[tuple[str, int]], TuneReport], groups: Sequence[tuple[str, int]]
) -> list[TuneReport]:
    """Every group's run: the only one in this thread, several at the same time."""
    if len(groups) == 1:
        return [tuned(groups[0])]
    with ThreadPoolExecutor(len(groups), thread_name_prefix="table") as pool:
        futures = [pool.submit(tuned, group) for group in groups]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


def _one_at_a_time(
    on_event: Callable[[Progress], Any] | None,
) -> Callable[[Progress], Any] | None:
    """`on_event`, called by one run at a time."""
    if on_event is None:
        return None
    lock = threading.Lock()

    def tell(progress: Progress) -> None:
        with lock:
            on_event(progress)

    return tell


def _by_text(found: Mapping[Problem, str]) -> dict[str, str]:
    return {problem_text(problem): text for problem, text in found.items()}
