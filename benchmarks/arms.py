"""The engines of a comparison, each behind one call: run a test, get its microseconds."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import psutil
from child import Child

from tilewright.errors import MeasureError

__all__ = ["LlamaCppArm", "WorkerArm", "check_idle"]

_HERE = Path(__file__).parent
# Threads of the arm that ran last spin for a few milliseconds before they sleep.
_PAUSE_S = 0.05
_IDLE_SHARE = 0.02


class WorkerArm:
    """An engine in a long-lived process that blocks on its standard input between tests.

    Args:
        engine: "float", "int8" or "transformers".
        model: the GGUF file.
        threads: threads of its products.
    """

    def __init__(self, engine: str, model: Path, threads: int) -> None:
        self.engine = engine
        count = str(threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
        self._child = Child(
            f"arm {engine!r}",
            [sys.executable, _HERE / "worker.py", engine, model, "--threads", count],
            {**dict.fromkeys(names, count), "TQDM_DISABLE": "1"},
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def launch(self, test: str) -> Callable[[], float]:
        """A call that runs `test` once and returns its microseconds."""

        def launch() -> float:
            time.sleep(_PAUSE_S)
            return float(self._child.ask("run", test)["us"])

        return launch

    def logits(self, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Logits float32 [V] after the last of `ids`."""
        return np.frombuffer(base64.b64decode(self._child.ask("logits", ids)["logits"]), np.float32)

    def describe(self) -> dict[str, Any]:
        return self._child.ask("describe", True)

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        """End the process by closing its standard input."""
        self._child.close()


class LlamaCppArm:
    """llama-bench, started for every test; it warms up and times one repetition."""

    engine = "llama.cpp"

    def __init__(self, binary: Path, model: Path, threads: int) -> None:
        self._binary, self._model, self._threads = binary, model, threads
        self.build: dict[str, Any] = {}

    def launch(self, test: str) -> Callable[[], float]:
        def launch() -> float:
            time.sleep(_PAUSE_S)
            row = llama_cpp.bench(self._binary, self._model, test, self._threads)
            self.build = {k: v for k, v in row.items() if k in llama_cpp.BUILD_FIELDS}
            return float(row["samples_ns"][0]) / 1e3

        return launch

    def describe(self) -> dict[str, Any]:
        return {"engine": self.engine, "command": "llama-bench -r 1", **self.build}


def check_idle(arms: list[WorkerArm], seconds: float = 1.0) -> dict[str, float]:
    """CPU seconds a second that each waiting worker uses; a busy one would slow the others.

    Raises:
        MeasureError: a worker uses over 2 % of a CPU while it waits.
    """
    time.sleep(_PAUSE_S)
    before = [arm.cpu_seconds() for arm in arms]
    time.sleep(seconds)
    shares = {
        arm.engine: (arm.cpu_seconds() - start) / seconds
        for arm, start in zip(arms, before, strict=True)
    }
    for engine, share in shares.items():
        if share > _IDLE_SHARE:
            raise MeasureError(
                f"arm {engine!r} uses {share:.0%} of a CPU while it waits; "
                "set OMP_WAIT_POLICY=passive and try again"
            )
    return shares
