"""The process in which candidates are compiled and first run: it takes the crash, the tuner not.

Started by `tilewright.tune.isolate` as ``python -m tilewright.tune.worker``. Requests and answers
are JSON, one a line::

    {"threads": 2, "seed": 0, "sources": {"mmq": "mmq"}, "parent": 4711}      ->  {"ready": true}
    {"do": "prepare", "problem": {...}, "limit_s": 120}                       ->  {"done": true}
    {"do": "check", "problem": {...}, "tile": {...}, "limit_s": 30, "memory_bytes": n}
                                                                         ->  {"outcome": {...}}
    whatever raises                                                      ->  {"failed": "..."}

Answers go to the standard output that the process was started with; what libraries print goes to
standard error instead. The process ends with its input, with its parent, and at the latest some
seconds after a time limit has passed: a kernel that loops forever outlives nobody.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = ["main"]

_GRACE_S = 10.0
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def main() -> None:
    """Serve requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    opening = json.loads(sys.stdin.readline())
    _end_with(opening["parent"])
    _leave_no_core()
    gate = _open(opening)
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        with _alarm(request["limit_s"] + _GRACE_S):
            try:
                answer = _serve(gate, request)
            except Exception as error:
                answer = {"failed": f"{type(error).__name__}: {error}"}
        _answer(answers, answer)


def _open(opening: Mapping[str, Any]) -> Any:
    import torch

    from tilewright.ops.catalog import SPECS, load_spec
    from tilewright.tune.outcome import DirectGate

    torch.set_num_threads(opening["threads"])
    specs = {}
    for op, source in opening["sources"].items():
        if source.partition("@")[0] in SPECS:
            specs[op] = load_spec(source)
        else:
            from tilewright.ops.user_spec import load_user_spec

            specs[op] = load_user_spec(source, audited=False)  # the tuner has audited it
    return DirectGate(specs, seed=opening["seed"])


def _serve(gate: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    from tilewright.tiles.tile import Problem, Tile

    problem = Problem(**request["problem"])
    if request["do"] == "planted":
        found = gate.planted(problem)
        return {"planted": [[t.as_dict(), fault, out.as_dict()] for t, fault, out in found]}
    if request["do"] == "prepare":
        gate.prepare(problem)
        return {"done": True}
    with _memory(request.get("memory_bytes")):
        outcome = gate.check(problem, Tile.from_mapping(request["tile"]))
    return {"outcome": outcome.as_dict()}


def _answer(answers: IO[str], answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _end_with(parent: int) -> None:
    """Die when the parent does, in native code too (Linux; elsewhere the alarm must do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # it had died before
            os._exit(1)


def _leave_no_core() -> None:
    """A crash here is an answer, not something to be examined."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """End the process, whatever it is doing, if the block takes longer: no handler, no way out."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _memory(limit_bytes: int | None) -> Iterator[None]:
    """Let the address space grow by at most `limit_bytes` (Linux).

    Not where there is a GPU: its driver reserves addresses by the terabyte. The tuner watches how
    much memory the process really holds in either case.
    """
    import torch

    size = _address_space()
    if limit_bytes is None or size is None or torch.cuda.is_available():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _address_space() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
