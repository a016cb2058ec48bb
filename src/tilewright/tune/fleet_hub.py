"""One thread that owns the log and the table, and the requests that others make of it.

A fleet has a thread per device. The log is open in one thread only, and a row goes into log and
table in one step, so device threads hand such work to the hub and wait until it is done.

Ctrl-C is counted here. Once means: begin nothing new, finish what can be decided. Twice means:
leave everything as it is.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["Hub", "Interrupts"]

_POLL_S = 0.1
T = TypeVar("T")


class Interrupts:
    """How often Ctrl-C was pressed, for the hubs of a fleet."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Count Ctrl-C instead of raising it, where Python lets this thread do so.

        A log that is being written is then never left in the middle of a step.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda number, frame: self.add())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Hub:
    """Made in the thread that owns the log.

    Args:
        interrupts: shared by all hubs of a fleet.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self.interrupts = interrupts
        self._owner = threading.current_thread()
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def do(self, work: Callable[[], T]) -> T:
        """Have the owner run `work`; its result, or what it raised.

        Raises:
            RuntimeError: the hub is closed.
        """
        if threading.current_thread() is self._owner:
            return work()
        done: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the run is over")
            self._asked.put((work, done))
        return done.result()

    def wait(self, future: Future[T], give_up: Callable[[], bool] = lambda: False) -> T:
        """The result of a future; in the owner's thread requests are served meanwhile.

        Raises:
            KeyboardInterrupt: `give_up` said so first.
        """
        owner = threading.current_thread() is self._owner
        if owner:
            future.add_done_callback(lambda _: self._asked.put((_nothing, Future())))
        while not future.done():
            if give_up():
                raise KeyboardInterrupt
            if owner:
                self._serve(_POLL_S)
            else:
                wait([future], timeout=_POLL_S)
        return future.result()

    def close(self) -> None:
        """Refuse whatever is still asked."""
        with self._lock:
            self._closed = True
        while self._serve(0.0, refuse=True):
            pass

    def _serve(self, timeout_s: float, *, refuse: bool = False) -> bool:
        """Do one thing that was asked; whether there was one."""
        try:
            work, done = self._asked.get(timeout=timeout_s) if timeout_s else self._asked.get(False)
        except queue.Empty:
            return False
        if refuse:
            done.set_exception(RuntimeError("the run is over"))
            return True
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        return True


def _nothing() -> None:
    """Wakes the owner."""
