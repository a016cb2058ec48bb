"""The parts of a fleet: the thread that owns the log, who may use a device, reaching a cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tilewright.errors import TilewrightError, UnsupportedError
from tilewright.tune import fleet_ray, fleet_shell
from tilewright.tune.fleet_floor import Device, Floor, WorkerLost, cpu_text
from tilewright.tune.fleet_hub import Hub, Interrupts
from tilewright.tune.fleet_parts import RemoteLaunchFailed
from tune.toy_op import loop, problem

# The hub


def in_thread(work: Any) -> Future[Any]:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def test_work_of_other_threads_runs_in_the_owners() -> None:
    hub = Hub(Interrupts())
    asked = in_thread(lambda: hub.do(threading.current_thread))
    assert hub.wait(asked) is threading.current_thread()


def test_what_work_raises_reaches_who_asked() -> None:
    hub = Hub(Interrupts())

    def fails() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        hub.wait(in_thread(lambda: hub.do(fails)))


def test_a_closed_hub_refuses() -> None:
    hub = Hub(Interrupts())
    waiting = in_thread(lambda: hub.do(lambda: None))
    time.sleep(0.1)
    hub.close()
    for asked in (waiting, in_thread(lambda: hub.do(lambda: None))):
        with pytest.raises(RuntimeError, match="the run is over"):
            asked.result(10)


def test_who_gives_up_waits_no_longer() -> None:
    hub = Hub(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        hub.wait(Future(), lambda: True)


def test_ctrl_c_is_counted_and_then_python_s_own_again() -> None:
    interrupts, before = Interrupts(), signal.getsignal(signal.SIGINT)
    with interrupts.caught():
        for presses in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 10
            while interrupts.count < presses and time.monotonic() < deadline:
                time.sleep(0.01)
            assert interrupts.count == presses
    assert signal.getsignal(signal.SIGINT) is before


# The floor


class Silent:
    """An executor whose workers answer only `about`, and start again as told."""

    def __init__(self, about: dict[str, Any], restarts: bool = True) -> None:
        self.about, self.restarts = about, restarts

    def start(self, setup: Any) -> dict[str, str]:
        return {"a": ""}

    def name(self, handle: str) -> str:
        return handle

    def call(self, handle: str, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if method == "about":
            answer.set_result(self.about)
        return answer

    def restart(self, handle: str) -> None:
        if not self.restarts:
            raise WorkerLost("its node is gone")

    def close(self) -> None:
        pass


def about(*uses: str) -> dict[str, Any]:
    return {"host": "node", "boot": "one", "uses": list(uses), "place": uses[0], "running": {}}


def test_a_worker_that_does_not_answer_in_time_is_lost() -> None:
    device = Device("a", about("cpu0"))
    losses: list[tuple[str, str]] = []
    floor = Floor(
        [device], Silent(about("cpu0")), limit_s=0.1,
        on_loss=lambda device, reason, then: losses.append((reason, then)),
    )  # fmt: skip
    with pytest.raises(WorkerLost, match=r"node/cpu0: check: no answer within 0\.1 s"):
        floor.call(device, "check")
    assert losses == [("check: no answer within 0.1 s", "restarted")]
    assert (device.state, device.life) == ("up", 1)


@pytest.mark.parametrize(
    ("executor", "then"),
    [
        (Silent(about("gpu1")), "out: it came back as another device"),
        (Silent(about("cpu0"), restarts=False), "out: its node is gone"),
    ],
    ids=["another-device", "node-gone"],
)
def test_a_lost_worker_that_cannot_come_back_is_out(executor: Silent, then: str) -> None:
    device = Device("a", about("cpu0"))
    said: list[str] = []
    floor = Floor([device], executor, limit_s=0.1, on_loss=lambda d, reason, t: said.append(t))
    with pytest.raises(WorkerLost):
        floor.call(device, "check")
    assert device.state == "out"
    assert said[0].startswith(then)
    with pytest.raises(WorkerLost, match="no worker is left"), floor.any_device(problem()):
        pass
    with pytest.raises(WorkerLost, match="is out"), floor.timing(device):
        pass


def test_a_worker_is_started_again_a_bounded_number_of_times() -> None:
    device = Device("a", about("cpu0"))
    floor = Floor([device], Silent(about("cpu0")), limit_s=0.01)
    states = []
    for _ in range(4):
        with pytest.raises(WorkerLost):
            floor.call(device, "check")
        states.append(device.state)
    assert states == ["up", "up", "up", "out"]


def test_verifying_waits_for_who_wants_to_time() -> None:
    device, order = Device("a", about("cpu0")), []
    floor = Floor([device], Silent(about("cpu0")))

    def times() -> None:
        with floor.timing(device):
            order.append("time")

    with floor.any_device(problem()):
        timing = in_thread(times)
        while not device.wanted:
            time.sleep(0.01)
        order.append("verify")
    with floor.any_device(problem()):
        order.append("verify again")
    timing.result(10)
    assert order == ["verify", "time", "verify again"]


def test_the_device_that_will_time_it_and_then_the_prepared_one_are_preferred() -> None:
    a, b, c = (Device(name, about(f"cpu{n}")) for n, name in enumerate("abc"))
    floor = Floor([a, b, c], Silent(about("cpu0")))
    with floor.any_device(problem(), prefer=b) as first:
        assert first is b
        with floor.any_device(problem(), prefer=b) as second:
            assert second is a
    with floor.any_device(problem(N=99), prefer=c):
        pass
    with floor.any_device(problem(N=99)) as prepared:
        assert prepared is c


def test_lanes_count_devices_that_can_be_timed_at_once() -> None:
    devices = [Device(n, about(*uses)) for n, uses in
               {"a": ("cpu0", "cpu1"), "b": ("cpu1",), "c": ("cpu2",)}.items()]  # fmt: skip
    floor = Floor(devices, Silent(about("cpu0")))
    assert floor.lanes == 2
    devices[2].state = "out"
    assert floor.lanes == 1


@pytest.mark.parametrize(
    ("cpus", "text"), [([0], "0"), ([0, 1, 2, 3], "0-3"), ([5, 0, 1, 2], "0-2,5"), ([], "")]
)
def test_cpus_in_short(cpus: list[int], text: str) -> None:
    assert cpu_text(cpus) == text


def test_a_launch_that_failed_elsewhere_names_its_tile() -> None:
    failed = RemoteLaunchFailed(loop(16, 1), "ValueError: no")
    assert (failed.tile, str(failed)) == (loop(16, 1), "ValueError: no")


# The shell


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("given", "of_parent", "expected"), [
    (3, "5", "3"), (None, "5", "5"), (None, None, None),
])  # fmt: skip
def test_threads_are_those_asked_for_or_those_of_a_plain_process(
    given: int | None, of_parent: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if of_parent is not None:
        environment["OMP_NUM_THREADS"] = of_parent
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # it runs: what it was given can be read
        monkeypatch.setattr(fleet_shell.os, "getppid", lambda: parent.pid)
        monkeypatch.setenv("OMP_NUM_THREADS", "64")  # what Ray gives its workers
        fleet_shell.settle_threads(given)
        parent.communicate(b"\n")
    assert os.environ.get("OMP_NUM_THREADS") == expected


def test_the_shell_loads_nothing_that_reads_the_number_of_threads() -> None:
    code = (
        "import sys, tilewright.tune.fleet_shell as s; "
        "print(sorted({'torch', 'numba', 'numpy', 'ray'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert found.stdout.strip() == "[]"


# Reaching a cluster


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"needs Ray.*pip install 'tilewright\[fleet\]'"):
        fleet_ray.RayExecutor("auto")


class Stub:
    """Ray as far as connecting goes."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self, error: Exception) -> None:
        self._error = error
        self._private = SimpleNamespace()

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: Any) -> None:
        raise self._error


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """Something on a port of this machine that says `answer` to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            line, _ = server.accept()
            with line:
                line.recv(64)
                line.sendall(answer)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        serving.join(10)


SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@pytest.mark.parametrize("address", ["nowhere", "host:", ":6379", "host:port", "host:99999"])
def test_what_is_no_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_ray, "_import_ray", lambda: Stub(RuntimeError("not reached")))
    with pytest.raises(UnsupportedError, match="give HOST:PORT, ray://HOST:PORT, auto or local"):
        fleet_ray.RayExecutor(address)


def test_an_address_where_nothing_listens_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_ray, "_import_ray", lambda: Stub(RuntimeError("not reached")))
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    with pytest.raises(TilewrightError, match=f"no Ray cluster answers at 127.0.0.1:{free}.*start"):
        fleet_ray.RayExecutor(f"127.0.0.1:{free}")


def test_another_server_at_the_address_is_told_from_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_ray, "_import_ray", lambda: Stub(RuntimeError("not reached")))
    with (
        listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address,
        pytest.raises(TilewrightError, match="what listens there is no Ray server"),
    ):
        fleet_ray.RayExecutor(address)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.40.0\n"),
            UnsupportedError,
            r"Version mismatch.*Ray: 2\.40\.0.*install the same Ray and Python on both sides",
        ),
        (ConnectionError("timed out"), TilewrightError, "no Ray cluster answers at .*: timed out"),
        (RuntimeError("no token"), TilewrightError, "Ray at .*: no token"),
    ],
    ids=["version", "connection", "other"],
)
def test_why_ray_does_not_connect_is_said(
    error: Exception, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_ray, "_import_ray", lambda: Stub(error))
    with listening(SETTINGS) as address, pytest.raises(kind, match=message):
        fleet_ray.RayExecutor(address)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: Shell\n"
            "The actor died because its node has died. Node Id: 12ab\n\tmore",
            "The actor died because its node has died",
        ),
        ("Something new.", "Something new"),
        ("", "RuntimeError"),
    ],
)
def test_the_sentence_that_says_why_is_taken_from_rays_message(text: str, cause: str) -> None:
    assert fleet_ray._cause(RuntimeError(text)) == cause
