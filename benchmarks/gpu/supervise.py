"""Runs the cases of a GPU benchmark in child processes, so that no arm can end the run.

A child is the command of the run with `--child ORDERS`: a JSON file of the ids of its cases, the
arms that it must leave out of each, and whether it only prepares. It tells what it begins and what
it has finished, one line of JSON each, after `MARK`.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plan import Case, arm_name, weight_key

__all__ = ["MARK", "Supervisor", "prepare", "run_all"]

MARK = "@@ "
_STRIKES = 3  # an arm that broke this many processes is left out of all that follows
_PREPARED = 60.0  # seconds; what is not ready by then is compiled when it is measured

OnRecord = Callable[[dict[str, Any]], None]


class Supervisor:
    """Runs children until every case is done, left out, or time is up."""

    def __init__(
        self, args: argparse.Namespace, cases: list[Case], command: list[str], on_record: OnRecord
    ) -> None:
        self._args, self._command, self._on_record = args, command, on_record
        self._pending = {case.id: case for case in cases}
        self._skip: dict[str, dict[str, str]] = {}
        self._strikes: dict[str, int] = {}
        self.records: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.device: dict[str, Any] = {}

    def run(self, end: float) -> None:
        """Until `end`, by time.monotonic()."""
        while self._pending and time.monotonic() < end:
            last, reason = self._child(end)
            if not reason:
                break
            if last is None:
                self.notes.append(f"a process ended before its first case: {reason}")
                break
            if last["arm"] == "":  # no single arm is to blame: the case is given up
                self.notes.append(f"{last['case']}: {reason} ({last['stage']})")
                self._pending.pop(last["case"], None)
                continue
            self._strike(last, reason)
        for case in self._pending.values():
            self.notes.append(f"{case.id}: not run")

    def _strike(self, last: dict[str, Any], reason: str) -> None:
        """The arm that a process broke at is left out: of this case, in the end of all."""
        arm = last["arm"]
        text = f"{reason} ({last['stage']})"
        self._skip.setdefault(last["case"], {})[arm] = text
        self._strikes[arm] = self._strikes.get(arm, 0) + 1
        self.notes.append(f"{last['case']}, {arm}: {text}")
        if self._strikes[arm] >= _STRIKES:
            for case in self._pending:
                self._skip.setdefault(case, {}).setdefault(arm, "broke too many processes")

    def _child(self, end: float) -> tuple[dict[str, Any] | None, str]:
        """(what was last begun, why the process ended; "" when it finished all it was given)."""
        with tempfile.TemporaryDirectory() as folder:
            orders = Path(folder) / "orders.json"
            orders.write_text(json.dumps({"cases": list(self._pending), "skip": self._skip}))
            child = subprocess.Popen(
                [*self._command, "--child", str(orders)], stdout=subprocess.PIPE, bufsize=0
            )
            try:
                return self._listen(child, end)
            finally:
                child.kill()
                child.wait()
                if child.stdout is not None:
                    child.stdout.close()

    def _listen(
        self, child: subprocess.Popen[bytes], end: float
    ) -> tuple[dict[str, Any] | None, str]:
        last: dict[str, Any] | None = None
        assert child.stdout is not None
        rest = b""
        with selectors.DefaultSelector() as news:
            news.register(child.stdout, selectors.EVENT_READ)
            while True:
                left = end - time.monotonic()
                if left <= 0:
                    return last, ""
                if not news.select(min(left, self._args.stall)):
                    if left <= self._args.stall:
                        return last, ""
                    return last, f"no news for {self._args.stall:g} s"
                found = os.read(child.stdout.fileno(), 1 << 16)
                if not found:
                    code = child.wait()
                    return last, "" if code == 0 else f"its process ended with code {code}"
                *lines, rest = (rest + found).split(b"\n")
                for line in lines:
                    last = self._event(line.decode(errors="replace")) or last

    def _event(self, line: str) -> dict[str, Any] | None:
        """Take in a line of the child; the event if it says what begins."""
        if not line.startswith(MARK):
            print(line, file=sys.stderr)
            return None
        event: dict[str, Any] = json.loads(line[len(MARK) :])
        if event["event"] == "begin":
            return event
        if event["event"] == "device":
            self.device = event["device"]
        else:
            record = event["record"]
            self.records.append(record)
            self._pending.pop(record["id"])
            self._on_record(record)
        return None


def prepare(args: argparse.Namespace, cases: list[Case], command: list[str]) -> None:
    """Fill the compilers' caches: every arm of every weight launches once, many at the same time.

    Nothing is checked or timed here, and what fails will fail again where it is recorded.
    """
    end = time.monotonic() + min(_PREPARED, args.seconds)
    wanted = {
        (weight_key(case), (name, dtype)): None for case in cases for name, dtype in case.arms
        if name not in ("cublas", "tinygemm", "gemlite")  # which compile nothing, or keep nothing
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for number, (key, arm) in enumerate(wanted):
            ids = [c.id for c in cases if weight_key(c) == key and arm in c.arms]
            orders = Path(folder) / f"{number}.json"
            orders.write_text(json.dumps({"cases": ids, "skip": {}, "prepare": arm_name(*arm)}))
            children.append(
                subprocess.Popen(
                    [*command, "--child", str(orders)], stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )  # fmt: skip
        for child in children:
            try:
                child.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def run_all(
    args: argparse.Namespace, cases: list[Case], command: list[str], on_record: OnRecord
) -> Supervisor:
    """Timed cases alone on the machine; then the others, several processes at once.

    Returns:
        One supervisor with the records and notes of all.
    """
    end = time.monotonic() + args.seconds
    timed = [case for case in cases if case.caches]
    whole = Supervisor(args, timed, command, on_record)
    try:
        if args.jobs > 1 and len(timed) > 1:
            prepare(args, timed, command)
        whole.run(end)
        checked = [case for case in cases if not case.caches]
        keys = list(dict.fromkeys(weight_key(case) for case in checked))
        parts = [
            Supervisor(args, [c for c in checked if keys.index(weight_key(c)) % args.jobs == i],
                       command, on_record)
            for i in range(min(args.jobs, len(keys)))
        ]  # fmt: skip
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            for future in [pool.submit(part.run, end) for part in parts]:
                future.result()
        for part in parts:
            whole.records += part.records
            whole.notes += part.notes
            whole.device = whole.device or part.device
    except KeyboardInterrupt:
        whole.notes.append("interrupted")
    return whole
