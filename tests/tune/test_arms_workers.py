"""Workers: real processes that open products and models, answer, fail, die and are replaced."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from model.gguf_models import Tiny, write
from tilewright import load
from tilewright.errors import GateError, MeasureError, TileError
from tilewright.model import worker_parts
from tilewright.model.captured import CapturedDecoder
from tilewright.model.generate import TransformersDecoder, decoder_for
from tilewright.model.graphs import GraphDecoder
from tilewright.model.worker import ModelArm, serve
from tilewright.ops.contract import Case
from tilewright.tune.arms import Contest, Settings, run_contests
from tilewright.tune.worker_contests import (
    LogitsCheck,
    WorkerProbe,
    sample_launches,
    verify_workers,
    worker_contests,
)
from tilewright.tune.workers import Host, Place, Pool, Worker

CASE = Case("mmq", "Q4_1", "float32", 5, 48, 64)
OPENING = {"spec": "mmq", "cases": [asdict(CASE)], "seed": 0}
HERE = Place(threads=1)
QUICK = Settings(blocks=6, sample_us=500.0, warm_up_us=0.0)


def tile_rule(tile: dict[str, Any], **match: Any) -> dict[str, Any]:
    return {"tile": tile, **match}


PANEL = {"algorithm": "panel", "mr": 2, "nv": 1, "block_parts": 8}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """One process for the tests that do not end it."""
    host = Host(HERE)
    yield host
    host.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write(path, Tiny("llama", {"embd": "Q8_0", "": "Q4_1"}))
    return path


def test_a_product_is_opened_verified_timed_and_checked_again(host: Host) -> None:
    worker = Worker("A", {**OPENING, "rules": [tile_rule(PANEL, m=[2, None])]}, host)
    assert worker.about["tiles"] == ["panel(block_parts=8, mr=2, nv=1, threads=0)"]
    assert worker.about["threads"] == 1
    assert verify_workers([worker]) == {"A": "1/1 products right"}
    launches, readings = sample_launches(worker, CASE.id, sample_us=20_000.0)
    assert launches > 1
    assert readings % 2 == 1
    us = worker.launch(CASE.id, launches=launches, readings=readings)()
    assert 0.1 < us < 1e5
    assert worker.recheck() == []
    assert worker.ask("recheck") == {"rows": 0, "failures": []}


def test_contests_of_one_process_have_cold_and_hot_caches(host: Host) -> None:
    worker = Worker("hot and cold", OPENING, host)
    contests = list(
        worker_contests(worker, worker, None, {CASE.id: 0}, caches=("hot", "cold"), sample_us=500.0)
    )
    assert [c.cache for c in contests] == ["hot", "cold"]
    rows, _ = run_contests(contests[:1], QUICK)
    comparison = rows[0].comparison
    assert comparison is not None
    assert len(comparison.blocks) == 6
    assert comparison.settings["clock"] == "reported"
    assert comparison.blocks[0].state is not None


@pytest.mark.parametrize(
    ("opening", "error", "message"),
    [
        ({"cases": []}, MeasureError, "arm X: 'spec'"),
        ({**OPENING, "spec": "conv"}, Exception, "conv"),
        (
            {**OPENING, "rules": [tile_rule(PANEL, type="Q9*")]},
            MeasureError,
            "names no product of this arm",
        ),
        (
            {**OPENING, "rules": [tile_rule({**PANEL, "mr": 3})]},
            TileError,
            "arm X: .*mr=3 is none of",
        ),
        ({"model": "no/such.gguf"}, Exception, "there is no such file"),
    ],
    ids=["no spec", "unknown op", "rule of nothing", "illegal tile", "no model"],
)
def test_what_cannot_be_opened_raises_here_and_leaves_the_process(
    host: Host, opening: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Worker("X", opening, host)
    assert host.answers


@pytest.mark.parametrize("verb", ["fly", "_operands", "logits"])
def test_an_unknown_request_is_an_error(host: Host, verb: str) -> None:
    worker = Worker("asked", OPENING, host)
    with pytest.raises(MeasureError, match=f"arm asked: request '{verb}'"):
        worker.ask(verb)
    with pytest.raises(MeasureError, match="there is no arm 'nobody'"):
        host.ask("nobody", "verify")


def test_a_process_that_dies_is_reported_with_its_code() -> None:
    host = Host(HERE)
    worker = Worker("A", OPENING, host)
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(MeasureError, match="arm A: its process ended with code -9"):
        worker.ask("verify")
    assert not host.answers
    host.restart()
    assert verify_workers([worker]) == {"A": "1/1 products right"}
    host.close()
    host.close()


def test_an_interpreter_that_does_not_start_is_an_error() -> None:
    with pytest.raises(MeasureError, match="interpreter /no/python does not start"):
        Host(Place(python="/no/python"))


def test_words_of_a_process_that_fails_at_once_are_shown(tmp_path: Path) -> None:
    package = tmp_path / "tilewright"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('this revision is broken')")
    host = Host(Place(source=tmp_path))
    with pytest.raises(MeasureError, match="ended with code .*\n?.*this revision is broken"):
        Worker("A", OPENING, host)
    host.close()


def test_ctrl_c_does_not_reach_the_process(host: Host) -> None:
    assert os.getpgid(host.pid) == host.pid != os.getpgid(0)
    assert os.getsid(host.pid) == host.pid


def test_an_answer_that_ctrl_c_cut_off_is_not_taken_for_the_next(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker("cut", OPENING, host)

    def interrupted() -> str:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "_process", _Reading(host._process, interrupted))
    with pytest.raises(KeyboardInterrupt):
        worker.launch(CASE.id)()
    assert not host.answers
    assert worker.recheck() == []
    assert host.answers
    assert worker.verify()[0] == 1
    host.close_arm("cut")


class _Reading:
    """A process whose answers are read by another function."""

    def __init__(self, process: Any, readline: Any) -> None:
        self._process, self.stdout = process, SimpleNamespace(readline=readline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def test_equal_places_share_a_process_and_others_are_fresh_for_every_sample() -> None:
    other = Place(threads=1, env=(("SOME_SETTING", "1"),))
    with ExitStack() as stack:
        pool = Pool([HERE, HERE])
        a, b = (stack.enter_context(pool.open(n, OPENING, HERE)) for n in "AB")
        assert pool.shared
        assert a.host is b.host
        pid = a.host.pid
        a.launch(CASE.id)()
        assert a.host.pid == pid
        assert WorkerProbe([a, b])._now() == (pid,)
    assert not a.host.answers
    with ExitStack() as stack:
        pool = Pool([HERE, other])
        c = stack.enter_context(pool.open("A", OPENING, HERE))
        d = stack.enter_context(pool.open("B", OPENING, other))
        assert not pool.shared
        assert c.host is not d.host
        before = (c.host.pid, d.host.pid)
        probe = WorkerProbe([c, d])
        probe.sample()
        c.launch(CASE.id)()
        assert c.host.pid != before[0]
        assert d.host.pid == before[1]
        assert probe.sample().others is not None
        assert c.recheck() == []


def test_an_arm_that_fails_leaves_the_others() -> None:
    pool = Pool([HERE, HERE])
    with pool.open("A", OPENING, HERE) as a:
        with pytest.raises(GateError), pool.open("B", OPENING, HERE):
            raise GateError("wrong")
        with (
            pytest.raises(TileError),
            pool.open("C", {**OPENING, "rules": [tile_rule({**PANEL, "mr": 3})]}, HERE),
        ):
            pass
        assert verify_workers([a]) == {"A": "1/1 products right"}


def test_a_wrong_product_is_never_timed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("wrong", OPENING, host)
    monkeypatch.setattr(
        Worker, "verify", lambda self, seed: (9, ["Q4_1 off by 0.3"]) if self is worker else (1, [])
    )
    with pytest.raises(GateError, match=r"arm wrong: 1 of 9 products.*\nFAILED Q4_1 off by 0.3"):
        verify_workers([worker])


def test_two_models_in_one_process_say_what_they_would_alone(host: Host, tiny: Path) -> None:
    plain = {"model": str(tiny), "tests": ["pp8", "tg2"]}
    a = Worker("float", plain, host)
    b = Worker("int8", {**plain, "activations": "int8"}, host)
    text = a.tokens(["hello world hello world"])[0]
    assert len(text) > 4
    assert np.allclose(a.logits(text)[-1], a.last(text), atol=1e-3)
    for worker in (a, b):
        model, _ = load(tiny, activations=worker.about["activations"])
        right = decoder_for(model).prefill(torch.tensor([text]))
        assert np.array_equal(worker.last(text), right.numpy())
        (made,) = worker.greedy([text], 3)
        assert made[0] == int(right.argmax())
        assert len(made) == 3
    assert not np.array_equal(a.last(text), b.last(text))
    assert a.launch("pp8")() > 0
    assert b.launch("tg2 @ d4")() > 0
    assert verify_workers([a])["float"].endswith("products right")


def test_pinned_tiles_are_an_arms_own(host: Host, tiny: Path) -> None:
    plain = {"model": str(tiny), "tests": ["pp8"]}
    pinned = Worker("pinned", {**plain, "rules": [tile_rule(PANEL, m=[2, None])]}, host)
    free = Worker("free", plain, host)
    hows = {c["how"] for c in pinned.about["choices"] if c["M"] > 1}
    assert hows == {"pinned"}
    assert {c["tile"] for c in pinned.about["choices"] if c["M"] > 1} == {
        "panel(block_parts=8, mr=2, nv=1, threads=0)"
    }
    assert "pinned" not in {c["how"] for c in free.about["choices"]}
    pinned.launch("pp8")()
    again = host.open("free again", plain)
    assert "pinned" not in {c["how"] for c in again["choices"]}


def test_an_older_revision_that_cannot_pin_tiles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Case("mmq", "Q4_1", "float32", 8, 48, 64).problem(worker_parts.arch_of_cpu())
    monkeypatch.delattr("tilewright.tiles.table.pin")
    with pytest.raises(ValueError, match="this revision's tables cannot pin tiles"):
        worker_parts.TileState(None, [tile_rule(PANEL, m=[2, None])], [problem])


def test_launches_on_a_gpu_are_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call returns before its work is done: the host's clock would see it begin, no more."""
    asked: list[Any] = []

    class Events:
        def __init__(self, device: Any) -> None:
            asked.append(device)

        def time_us(self, launch: Any, launches: int) -> float:
            asked.append(launches)
            return 7.0

    monkeypatch.setattr("tilewright.measure.EventClock", Events)
    monkeypatch.setattr("tilewright.measure.GpuFlusher", lambda device: lambda: device)
    gpu = torch.device("cuda", 1)
    assert worker_parts.timer_of(gpu)(lambda: None, 3) == 7.0
    assert asked == [1, 3]
    assert worker_parts.flusher_of(gpu)() == gpu
    ran: list[int] = []
    us = worker_parts.timer_of(torch.device("cpu"))(lambda: ran.append(1), 3)
    assert us > 0
    assert len(ran) == 3
    assert asked == [1, 3]


def test_a_library_tile_needs_the_plain_decoder(host: Host, tiny: Path) -> None:
    rules = [tile_rule({"algorithm": "blas", "panel_rows": 64}, m=[2, None])]
    plain = {"model": str(tiny), "tests": ["pp8"], "rules": rules}
    with pytest.raises(MeasureError, match=r"cannot hold the algorithms \['blas'\]"):
        Worker("captured", plain, host)
    worker = Worker("eager", {**plain, "decoder": "transformers"}, host)
    assert worker.about["decoder"] == "TransformersDecoder"
    assert worker.launch("pp8")() > 0


def arm_on_gpu(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> ModelArm:
    """An arm whose model, on a GPU, is stepped by `decoder`."""
    arm = object.__new__(ModelArm)
    arm.model, arm._key = None, ("model", "float", "cuda")
    monkeypatch.setattr("tilewright.model.generate.decoder_for", lambda model: decoder)
    return arm


@pytest.mark.parametrize("kind", [GraphDecoder, CapturedDecoder])
def test_a_cuda_graph_holds_any_algorithm(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = object.__new__(kind)
    arm = arm_on_gpu(decoder, monkeypatch)
    for asked in ("auto", "captured"):
        assert arm._make_decoder(asked, {"hopper", "slots"}) is decoder


def test_a_model_without_graphs_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = object.__new__(TransformersDecoder)
    arm = arm_on_gpu(decoder, monkeypatch)
    assert arm._make_decoder("auto", {"hopper"}) is decoder
    with pytest.raises(ValueError, match="this model has no captured programs"):
        arm._make_decoder("captured", set())


class Changing:
    """An arm whose logits change after the first time."""

    name = "B"

    def __init__(self, *changes: float) -> None:
        self._logits = iter([0.0, *changes])

    def last(self, ids: Any) -> Any:
        return np.full(3, next(self._logits), np.float32)


def test_logits_that_change_while_an_arm_is_timed_are_told() -> None:
    check = LogitsCheck([Changing(0.0, 0.25)], [1, 2])  # type: ignore[list-item]
    assert check() is None
    assert check() == "the logits of B have changed by up to 0.25"


def test_requests_are_lines_of_json() -> None:
    answers: list[dict[str, Any]] = []
    lines = [
        json.dumps({"open": {"arm": "A", **OPENING}}),
        json.dumps({"run": {"arm": "A", "test": CASE.id, "readings": 2}}),
        json.dumps({"run": {"arm": "A", "test": "other"}}),
        json.dumps({"close": {"arm": "A"}}),
        json.dumps({"run": {"arm": "A", "test": CASE.id}}),
    ]
    serve(iter(lines), answers.append)
    assert [list(a) for a in answers] == [["ok"], ["ok"], ["error"], ["ok"], ["error"]]
    assert len(answers[1]["ok"]["us"]) == 2
    assert answers[2]["error"]["kind"] == "ValueError"
    assert "this arm has ['Q4_1-M5-N48-K64-fp32']" in answers[2]["error"]["message"]
    assert "there is no arm 'A'" in answers[4]["error"]["message"]


def test_a_contest_keeps_its_tokens(host: Host) -> None:
    worker = Worker("tokens", OPENING, host)
    (contest,) = worker_contests(worker, worker, worker, {"pp8": 8})
    assert isinstance(contest, Contest)
    assert contest.tokens == 8
    assert contest.cache == "as run"
    assert contest.control is not None
