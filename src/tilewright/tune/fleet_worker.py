"""What a fleet runs on each of its devices: verifying tiles of any problem, timing those of one.

Requests and answers are plain data, so that they mean the same on every machine. What is wrong
with a tile is part of an answer; a method raises only where the worker itself cannot go on.

Verification happens in a further process (`tilewright.tune.isolate`), as it does on one machine.
Timing happens here, so that a problem's samples all come from one process on one device.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright import __version__
from tilewright.device import Device, arch_of, cpu_device
from tilewright.errors import GateError, TilewrightError
from tilewright.measure import Clock, CpuClock, EventClock
from tilewright.ops.catalog import SPECS, load_spec
from tilewright.ops.choose import running_of
from tilewright.ops.contract import OpSpec
from tilewright.tiles.local import local_device
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.fleet_floor import cpu_text
from tilewright.tune.isolate import IsolatedGate
from tilewright.tune.outcome import Gatekeeper
from tilewright.tune.rounds import Bench, LaunchFailed, Timing

__all__ = ["DeviceWorker"]

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class DeviceWorker:
    """One device of a fleet.

    Args:
        setup: "sources": by op, what it is loaded from (see `IsolatedGate`); "seed"; "kind": "cpu",
            or "gpu" for the first GPU that torch sees here.
        specs: ops by name; None loads them from their sources.
        gate: verifies tiles; None starts a process for it.
        clock: None is the CPU's.
    """

    def __init__(
        self,
        setup: Mapping[str, Any],
        *,
        specs: Mapping[str, OpSpec] | None = None,
        gate: Gatekeeper | None = None,
        clock: Clock | None = None,
    ) -> None:
        import torch

        self._seed = int(setup["seed"])
        sources = dict(setup["sources"])
        self._failed = ""
        self._specs: Mapping[str, OpSpec] = specs or {}
        if specs is None:
            try:
                self._specs = {op: _load(source) for op, source in sources.items()}
            except TilewrightError as error:
                self._failed = str(error)
        self._kind = str(setup.get("kind", "cpu"))
        self._threads = torch.get_num_threads()
        self._gate: Gatekeeper = gate or IsolatedGate(
            sources, seed=self._seed, threads=self._threads
        )
        self._clock = clock
        self._prepared: Problem | None = None
        self._bench: Bench | None = None
        self._finalists = 0

    def about(self) -> dict[str, Any]:
        """What this worker is, to be held against what the driver expects.

        Returns:
            version, python; host, boot, uses and place, which say where it runs (workers of one
            boot that use the same thing disturb each other); arch, device, units; running: by op
            its compiler, kernel_hash and op_version; failed: why it cannot serve, or "".
        """
        device, uses, place = self._device()
        failed = self._failed
        if device is None and not failed:
            failed = "torch sees no GPU there"
        running = {op: running_of(spec) for op, spec in self._specs.items()}
        return {
            "version": __version__,
            "python": platform.python_version(),
            "host": platform.node(),
            "boot": _boot_id(),
            "uses": uses,
            "place": place,
            "arch": "" if device is None else device.arch,
            "device": "" if device is None else device.name,
            "units": 0 if device is None else device.units,
            "failed": failed,
            "running": {
                op: {
                    "compiler": now.compiler,
                    "kernel_hash": now.kernel_hash,
                    "op_version": now.op_version,
                }
                for op, now in running.items()
            },
        }

    def _device(self) -> tuple[Device | None, list[str], str]:
        """The device, what it uses of its machine, and that in short."""
        if self._kind == "gpu":
            return _gpu()
        cpus = _cpus()
        device = local_device(cpu_device().arch)
        return device, [f"cpu{n}" for n in cpus], f"cpu{cpu_text(cpus)}"

    def check(self, problem: Mapping[str, Any], tile: Mapping[str, Any]) -> dict[str, Any]:
        """Verify a tile: {"outcome": ...}, or {"failed": why} where the op's oracle fails."""
        wanted = Problem(**problem)
        try:
            if wanted != self._prepared:
                self._prepared = None
                self._gate.prepare(wanted)
                self._prepared = wanted
            return {"outcome": self._gate.check(wanted, Tile.from_mapping(tile)).as_dict()}
        except GateError as error:
            return {"failed": str(error)}

    def planted(self, problem: Mapping[str, Any]) -> dict[str, Any]:
        """Verify an op's planted tiles: {"planted": [[tile, fault, outcome], ...]}, or failed."""
        self._prepared = None
        try:
            found = self._gate.planted(Problem(**problem))
        except GateError as error:
            return {"failed": str(error)}
        return {"planted": [[t.as_dict(), fault, out.as_dict()] for t, fault, out in found]}

    def open(
        self,
        problem: Mapping[str, Any],
        timing: Mapping[str, Any],
        finalists: int,
        left_us: float,
    ) -> dict[str, Any]:
        """Draw the operands of a problem; those of the one before are let go.

        Args:
            problem: fields of the Problem.
            timing: fields of the Timing.
            finalists: at most this many will be in the finals.
            left_us: time in which the finals should have ended.

        Returns:
            {"cold": whether caches are emptied before each sample}.
        """
        wanted = Problem(**problem)
        self._bench = None
        clock = self._clock or (EventClock() if self._kind == "gpu" else CpuClock())
        self._bench = Bench(
            self._specs[wanted.op],
            wanted,
            Timing(**timing),
            seed=self._seed,
            clock=clock,
            ends_us=clock.now_us() + left_us,
        )
        self._finalists = finalists
        return {"cold": self._bench.cold}

    def sample(
        self, incumbent: Mapping[str, Any], tiles: Sequence[Mapping[str, Any]], rounds: int
    ) -> dict[str, Any]:
        """Rounds of the search: {"blocks", "finals_us"}, or {"raised", "reason"} of a tile.

        "finals_us" is how long finals of 1, 2, ... finalists would take.
        """
        bench = self._opened()
        try:
            blocks, _ = bench.run(_tile(incumbent), [_tile(t) for t in tiles], rounds)
        except LaunchFailed as failed:
            return {"raised": failed.tile.as_dict(), "reason": str(failed)}
        return {
            "blocks": [block.to_dict() for block in blocks],
            "finals_us": [bench.finals_us(n) for n in range(1, self._finalists + 1)],
        }

    def finals(
        self, incumbent: Mapping[str, Any], finalists: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Finals: {"comparisons" in the order of `finalists`, "faults"}, or as `sample`.

        "faults" are those of `Bench.faults`: [[tile, check, reason], ...].
        """
        tiles, bench = [_tile(t) for t in finalists], self._opened()
        try:
            found = bench.finals(_tile(incumbent), tiles)
        except LaunchFailed as failed:
            return {"raised": failed.tile.as_dict(), "reason": str(failed)}
        return {
            "comparisons": [found[tile].to_dict() for tile in tiles],
            "faults": [[t.as_dict(), check, why] for t, (check, why) in bench.faults.items()],
        }

    def close(self) -> None:
        """End the process that verifies."""
        self._bench = None
        self._gate.close()

    def _opened(self) -> Bench:
        if self._bench is None:
            raise RuntimeError("no problem was opened on this worker")
        return self._bench


def _load(source: str) -> OpSpec:
    if source.partition("@")[0] in SPECS:
        return load_spec(source)
    from tilewright.ops.user_spec import load_user_spec

    return load_user_spec(source, audited=False)  # the driver has, and its source is the same


def _tile(row: Mapping[str, Any]) -> Tile:
    return Tile.from_mapping(row)


def _gpu() -> tuple[Device | None, list[str], str]:
    """The first GPU that torch sees, what names it, and its number on this machine."""
    import torch

    if not torch.cuda.is_available():
        return None, [], "no gpu"
    device = local_device(arch_of(torch.device("cuda", 0)))
    listed = next((os.environ[name] for name in _VISIBLE if os.environ.get(name)), "0")
    index = listed.split(",")[0]
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return device, [f"gpu {uuid or index}"], f"gpu{index}"


def _cpus() -> list[int]:
    """Numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _boot_id() -> str:
    """The same text in every process, container or not, of one running kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
