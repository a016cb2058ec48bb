"""A process that answers requests, a line of JSON each, and sleeps between them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import MeasureError

__all__ = ["Child"]


class Child:
    """Starts the process and waits for its first line.

    Args:
        name: what errors call it.
        command: the program and its arguments.
        environment: variables beside this process's own.

    Attributes:
        first: its first answer.

    Raises:
        MeasureError: the process ended, or its answer is an error.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            self.first = self._read()
        except MeasureError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise MeasureError(
                f"the process of {self._name} ended with code {self._process.returncode}; "
                "its own message stands above"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise MeasureError(f"{self._name}: {answer['error']}")
        return answer

    def ask(self, verb: str, argument: Any) -> dict[str, Any]:
        """Its answer to one request.

        Raises:
            MeasureError: the process ended, or its answer is an error.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({verb: argument}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: reading says so
        return self._read()

    def close(self) -> None:
        """End the process by closing its standard input."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # what it was never sent
        self._process.wait(timeout=60)
        self._process.stdout.close()
