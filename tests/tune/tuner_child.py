"""A tuner that kills itself at a chosen point: `python tuner_child.py OUT POINT COUNT`.

POINT is the kind of a progress event, "save" (just before a table takes the place of the old one)
or "saved" (just after). At its COUNT-th occurrence the process gets SIGKILL. With POINT "interrupt"
it gets SIGINT at the COUNT-th "sampled"; with "never" it runs to its end.
"""

from __future__ import annotations

import os
import signal
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.tiles import table_file
from tilewright.tiles.tile import Tile
from tilewright.tune.host import Progress, Settings
from tilewright.tune.outcome import Outcome
from tilewright.tune.rounds import Timing
from tilewright.tune.tuner import tune
from tune.toy_op import FLAT, Machine, ScriptedGate, loop, problem

PROBLEMS = [problem(N=64), problem(N=4)]
COSTS = {loop(64, 2): 60.0, loop(64, 4): 70.0, FLAT: 180.0}


class Killer:
    def __init__(self, point: str, count: int) -> None:
        self.point, self.left = point, count

    def at(self, point: str) -> None:
        if point == self.point:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def event(self, progress: Progress) -> None:
        self.at(progress.kind)
        if self.point == "interrupt" and progress.kind == "sampled":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    out, point, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    killer = Killer(point, count)
    plain = os.replace

    def watched(source: Any, target: Any) -> None:
        if str(target) == str(out):
            killer.at("save")
        plain(source, target)
        if str(target) == str(out):
            killer.at("saved")

    table_file.os.replace = watched  # type: ignore[assignment]
    seed = zlib.crc32(f"{point} {count}".encode())  # times differ from run to run, always alike
    machine = Machine(lambda tile: COSTS.get(tile, 100.0), seed=seed)
    rejected: dict[Tile, Outcome] = {loop(128, 4): Outcome(False, "oracle", "wrong", "case")}
    report = tune(
        PROBLEMS,
        specs={"toy": machine.spec()},
        gate=ScriptedGate(machine, rejected),
        clock=machine.clock,
        out=out,
        resume=True,
        on_event=killer.event,
        settings=replace(Settings(), batch=3, timing=Timing(cache="hot")),
    )
    print(report.exit_code, [p.status for p in report.problems])


if __name__ == "__main__":
    main()
