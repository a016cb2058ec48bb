"""A fleet on Ray: one actor a device, which holds it while we tune.

For CPU kernels that is one actor a node, with all CPUs that Ray gave the node, so that no other Ray
work runs beside what is timed; a head node that was started with ``--num-cpus 0`` only manages. For
GPU kernels it is one actor a GPU, with its part of the node's CPUs.

Ray's own restarts and retries are off: who is started again, and what is asked again of whom, is
decided and logged by `tilewright.tune.fleet_floor` and `fleet_parts`.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tilewright.errors import TilewrightError, UnsupportedError
from tilewright.tune.fleet_floor import WorkerLost
from tilewright.tune.fleet_shell import Shell

__all__ = ["RayExecutor"]

_START_S = 180.0
_RESTART_S = 60.0
_REACH_S = 5.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # RFC 9113, 3.4 and 6.5
_SETTINGS = 4
_START_A_CLUSTER = (
    "start one with `ray start --head --port=6379` and, on each machine, "
    "`ray start --address=HEAD:6379`"
)


@dataclass(frozen=True)
class _Place:
    """Where an actor runs, and what it holds there."""

    node: str
    address: str
    cpus: float
    gpus: int

    @classmethod
    def on(cls, node: Mapping[str, Any], wanted: str) -> _Place:
        has = node["Resources"]
        parts = int(has["GPU"]) if wanted == "GPU" else 1
        return cls(
            node["NodeID"],
            node["NodeManagerAddress"],
            has.get("CPU", 0.0) / parts,
            1 if wanted == "GPU" else 0,
        )


class RayExecutor:
    """An `Executor` over the nodes of a Ray cluster.

    Args:
        address: "host:port" of the cluster, "auto" for the one on this machine, "local" for one
            that is started here and ends with this process, or "ray://host:port" of a Ray client
            server.

    Raises:
        UnsupportedError: Ray is not installed, or of another version than the cluster's.
        TilewrightError: nothing answers at the address.
    """

    def __init__(self, address: str) -> None:
        self._ray = _import_ray()
        self._address = address
        self._setup: Mapping[str, Any] = {}
        self._actors: dict[str, Any] = {}
        self._places: dict[str, _Place] = {}
        self._ours = not self._ray.is_initialized()
        if self._ours:
            self._connect()

    def start(self, setup: Mapping[str, Any]) -> dict[str, str]:
        self._setup = dict(setup)
        wanted = "GPU" if setup.get("kind") == "gpu" else "CPU"
        for node in self._ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            count = int(has.get(wanted, 0))
            for number in range(count if wanted == "GPU" else min(count, 1)):
                self._places[f"{node['NodeID']}/{number}"] = _Place.on(node, wanted)
        ready = {handle: self._spawn(handle) for handle in self._places}
        deadline = time.monotonic() + _START_S
        return {
            handle: self._why_not(one, max(0.0, deadline - time.monotonic()), _START_S)
            for handle, one in ready.items()
        }

    def name(self, handle: str) -> str:
        place = self._places[handle]
        return f"{place.address} (node {place.node[:8]}, {handle.rpartition('/')[2]})"

    def call(self, handle: str, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if handle not in self._actors:
            answer.set_exception(WorkerLost("it is gone"))
            return answer
        try:
            asked = self._actors[handle].do.remote(method, *arguments).future()
        except self._ray.exceptions.RayError as error:
            answer.set_exception(WorkerLost(_first_line(error)))
            return answer
        asked.add_done_callback(lambda done: self._pass_on(done, answer))
        return answer

    def restart(self, handle: str) -> None:
        self._kill(handle)
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if self._places[handle].node not in alive:
            raise WorkerLost("its node is gone")
        reason = self._why_not(self._spawn(handle), _RESTART_S, _RESTART_S)
        if reason:
            self._kill(handle)
            raise WorkerLost(reason)

    def close(self) -> None:
        for handle in list(self._actors):
            self._kill(handle)
        if self._ours and self._ray.is_initialized():
            self._ray.shutdown()

    def _connect(self) -> None:
        _reach(self._address)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address == "local":
            options["include_dashboard"] = False
        try:
            self._ray.init(address=self._address, **options)
        except RuntimeError as error:
            if "version mismatch" not in str(error).lower():
                raise TilewrightError(f"Ray at {self._address}: {error}") from error
            text = " ".join(str(error).split())
            raise UnsupportedError(
                f"{text}; install the same Ray and Python on both sides"
            ) from error
        except (OSError, ValueError, self._ray.exceptions.RayError) as error:
            raise TilewrightError(
                f"no Ray cluster answers at {self._address}: {_first_line(error)}; "
                f"{_START_A_CLUSTER}"
            ) from error
        _mute(self._ray)

    def _spawn(self, handle: str) -> Any:
        """Start an actor; the object that is there when it runs."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = self._places[handle]
        actor = (
            self._ray.remote(Shell)
            .options(
                num_cpus=place.cpus,
                num_gpus=place.gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False),
                max_restarts=0,
                max_task_retries=0,
            )
            .remote(dict(self._setup))
        )
        self._actors[handle] = actor
        return actor.__ray_ready__.remote()

    def _why_not(self, ready: Any, wait_s: float, limit_s: float) -> str:
        """Why an actor does not run; "" when it does."""
        try:
            self._ray.get(ready, timeout=wait_s)
        except self._ray.exceptions.GetTimeoutError:
            return (
                f"it did not start within {limit_s:g} s; other work of the cluster may hold its "
                "CPUs, all of which are needed while it is timed"
            )
        except self._ray.exceptions.RayError as error:
            if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
                return f"tilewright does not load there: {_last_line(error)}; install it"
            return f"it did not start: {_last_line(error)}"
        return ""

    def _pass_on(self, done: Future[Any], answer: Future[Any]) -> None:
        """Give `answer` what came of a call."""
        if answer.cancelled():
            return
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            answer.set_exception(error.as_instanceof_cause())
        else:
            answer.set_exception(WorkerLost(_cause(error)))

    def _kill(self, handle: str) -> None:
        actor = self._actors.pop(handle, None)
        if actor is not None:
            try:
                self._ray.kill(actor, no_restart=True)
            except self._ray.exceptions.RayError:
                pass  # it is dead already


def _import_ray() -> Any:
    """Ray, without its reports to its makers and without its word on how it was imported.

    Raises:
        UnsupportedError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError(
            f"tuning over several workers needs Ray ({error}); install it with "
            "`pip install 'tilewright[fleet]'`, here and on every worker"
        ) from error
    return ray


def _reach(address: str) -> None:
    """Find out in seconds what Ray finds out in minutes: whether such a server listens there.

    Ray's servers speak gRPC, and so HTTP/2: one answers the preface with a frame of settings.

    Raises:
        UnsupportedError: it is no address.
        TilewrightError: nothing does.
    """
    if address in ("auto", "local"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UnsupportedError(
            f"the address of a Ray cluster is {address!r}; give HOST:PORT, ray://HOST:PORT, "
            "auto or local"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S) as line:
            if os.environ.get("RAY_USE_TLS", "0") in ("0", ""):
                line.sendall(_PREFACE)
                answer = line.recv(9)
                if len(answer) < 4 or answer[3] != _SETTINGS:
                    raise OSError("what listens there is no Ray server")
    except OSError as error:
        raise TilewrightError(
            f"no Ray cluster answers at {address}: {error}; {_START_A_CLUSTER}"
        ) from error


def _mute(ray: Any) -> None:
    """Keep Ray from printing a dead node's log: the fleet reports the loss itself."""
    inner: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(inner, "_worker_logs_enabled"):
        inner._worker_logs_enabled = False


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def _first_line(error: BaseException) -> str:
    return (_lines(error) or [type(error).__name__])[0]


def _last_line(error: BaseException) -> str:
    return (_lines(error) or [type(error).__name__])[-1]


def _cause(error: BaseException) -> str:
    """The sentence of Ray's message that says why, without the ids around it."""
    starts = ("The actor died because", "The actor is dead because", "The actor is not schedulable")
    line = next((x for x in _lines(error) if x.startswith(starts)), _first_line(error))
    return line.split(". ")[0].rstrip(".")[:300]
