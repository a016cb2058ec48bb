"""Work for several processes side by side, one task at a time each.

Most of a verification on a GPU is compiling, one kernel after the other, and every kernel is the
next process's business as well as this one's: so tasks are handed to processes as they become free.
A task that ends its process (a crash, a kernel that the driver kills) is known by name; the process
is started anew, and the other tasks never notice.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Died", "apart"]

_END_S = 5.0


@dataclass(frozen=True)
class Died:
    """In the place of a task's result: it raised, or its process ended.

    Attributes:
        reason: what happened.
    """

    reason: str


class _Worker:
    """A process, and the task that it is at."""

    def __init__(self, function: Callable[..., Any], threads: int) -> None:
        context = get_context("spawn")  # a forked process cannot use a GPU
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, function, threads), daemon=True
        )
        self._process.start()
        theirs.close()
        self.task: int | None = None

    def give(self, index: int, task: tuple[Any, ...]) -> None:
        self.task = index
        try:
            self.connection.send(task)
        except BrokenPipeError:
            pass  # `take` says how it ended

    def take(self) -> tuple[Any, bool]:
        """The result of its task, and whether it can take another."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Died(f"its process ended with {how}"), False

    def stop(self) -> None:
        """Have it end, without waiting for that."""
        self._process.terminate()

    def end(self) -> None:
        self.stop()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.connection.close()


def apart(
    function: Callable[..., Any],
    tasks: Sequence[tuple[Any, ...]],
    *,
    jobs: int,
    threads: int = 1,
    spent: Callable[[Any], bool] | None = None,
    limit_s: float | None = None,
) -> Iterator[tuple[int, Any]]:
    """Call a function with the arguments of every task, in processes of their own.

    Args:
        function: found by its name in its module; what it gives can be pickled.
        tasks: the arguments of each call.
        jobs: the most processes at a time.
        threads: torch's, of each process.
        spent: of a result, whether its process should run no other task.
        limit_s: seconds from the first process on after which no result is waited for: tasks that
            have none by then are left out.

    Yields:
        (index of the task, its result or `Died`), as they come. A caller that stops early, by an
        exception or KeyboardInterrupt, ends the processes.
    """
    began = time.monotonic()
    left = iter(range(len(tasks)))
    workers: dict[Connection, _Worker] = {}

    def next_for(worker: _Worker | None) -> None:
        index = next(left, None)
        if index is None:
            if worker is not None:
                workers.pop(worker.connection).end()
            return
        if worker is None:
            worker = _Worker(function, threads)
            workers[worker.connection] = worker
        worker.give(index, tasks[index])

    try:
        for _ in range(min(jobs, len(tasks))):
            next_for(None)
        while workers:
            left_s = None if limit_s is None else max(0.0, limit_s - (time.monotonic() - began))
            answers = wait(list(workers), left_s)
            if not answers:
                return
            for ready in answers:
                worker = workers[ready]  # type: ignore[index]
                index = worker.task
                assert index is not None
                result, alive = worker.take()
                if alive and not (spent is not None and spent(result)):
                    next_for(worker)
                else:
                    workers.pop(worker.connection).end()
                    next_for(None)
                yield index, result
    finally:
        for worker in workers.values():
            worker.stop()
        for worker in workers.values():
            worker.end()


def _serve(connection: Connection, function: Callable[..., Any], threads: int) -> None:
    """The process: tasks in, (result, True) out, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            result = function(*task)
        except Exception as error:
            result = Died(f"{type(error).__name__}: {error}")
        connection.send((result, True))
