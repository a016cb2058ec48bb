"""A profile adds up, names every part, changes nothing, and refuses what cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.gguf_models import FEED_FORWARD, HIDDEN, VOCABULARY, Tiny, reference, write
from tilewright import load
from tilewright.errors import GateError, MeasureError, UnsupportedError
from tilewright.measure import Ceiling
from tilewright.model import peak
from tilewright.model.profile import PhaseProfile, ProfileReport, ProfileRow, profile
from tilewright.model.profile_parts import instruments_for, role_of

TINY = Tiny("llama", {"embd": "Q8_0", "ffn_down": "Q6_K", "": "Q4_1"})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write(file, TINY)
    return file


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def phase(report: ProfileReport, name: str) -> PhaseProfile:
    (found,) = [p for p in report.phases if p.name == name]
    return found


def rows(of: PhaseProfile, **match: Any) -> list[ProfileRow]:
    return [r for r in of.rows if all(getattr(r, k) == v for k, v in match.items())]


def calls(of: PhaseProfile, role: str) -> int:
    return sum(r.calls for r in rows(of, role=role))


def test_every_launch_of_a_captured_model_is_in_one_row(path: Path) -> None:
    model, _ = load(path)
    report = profile(model, prompt=24, steps=4, repetitions=3)
    assert report.method == "launches"
    assert report.activations == "float"
    prefill = phase(report, "prefill")
    assert (prefill.tokens, prefill.depth, prefill.passes) == (24, 0, 3)
    assert {r.role: calls(prefill, r.role) for r in prefill.rows} == {
        "embed": 1, "norm": 5, "q/k/v": 6, "rope": 2, "attention": 2, "o": 2, "gate/up": 4,
        "activation": 2, "down": 2, "head": 1,
    }  # fmt: skip
    assert sum(r.calls for r in prefill.rows) == prefill.launches == 27
    assert sum(r.share for r in prefill.rows) == pytest.approx(1.0)
    assert sum(r.us for r in prefill.rows) == pytest.approx(prefill.sum_us)
    assert [r.us for r in prefill.rows] == sorted((r.us for r in prefill.rows), reverse=True)
    (down,) = rows(prefill, role="down")
    assert (down.op, down.weight_type, down.type_id) == ("mmq", "Q6_K", 14)
    assert down.kernel.startswith("panel-Q6_K")
    (head,) = rows(prefill, role="head")
    assert (head.weight_type, head.type_id) == ("Q8_0", 8)
    decode = phase(report, "decode")
    assert (decode.tokens, decode.depth, decode.passes) == (1, 24, 3)
    assert rows(decode, role="head")[0].kernel.startswith("dot-Q8_0")
    assert decode.by("weight_type")["Q4_1"] > 0
    assert sum(decode.by("role").values()) == pytest.approx(1.0)


def test_rates_follow_from_counts_and_times(path: Path) -> None:
    model, _ = load(path)
    prefill = phase(profile(model, prompt=24, steps=0, repetitions=2), "prefill")
    (down,) = rows(prefill, role="down")
    flops = 2 * 2.0 * 24 * HIDDEN * FEED_FORWARD
    assert down.gflops == pytest.approx(flops / down.us / 1e3)
    packed = HIDDEN * FEED_FORWARD / 256 * 210  # bytes of a block of Q6_K
    moved = 2 * (packed + 4 * 24 * (HIDDEN + FEED_FORWARD))
    assert down.gbps == pytest.approx(moved / down.us / 1e3)
    (attention,) = rows(prefill, role="attention")
    seen = sum(range(1, 25))
    assert attention.gflops == pytest.approx(2 * 4 * seen * HIDDEN / attention.us / 1e3)
    assert rows(prefill, role="norm")[0].gflops is None
    assert down.of_gflops is None


def test_depth_makes_attention_longer(path: Path) -> None:
    model, _ = load(path)
    report = profile(model, prompt=0, steps=3, depth=40)
    (attention,) = rows(phase(report, "decode"), role="attention")
    assert [p.name for p in report.phases] == ["decode"]
    assert attention.gflops is not None
    # 2 layers; the middle one of two passes sees 41 or 42 positions
    seen = attention.gflops * attention.us * 1e3 / (2 * 4 * HIDDEN)
    assert seen == pytest.approx(42, abs=1.01)


def test_8_bit_activations_have_their_own_part(path: Path) -> None:
    model, _ = load(path, activations="int8")
    report = profile(model, prompt=24, steps=2, repetitions=2, ceiling=Ceiling(1e6, 1e6))
    prefill = phase(report, "prefill")
    assert report.activations == "int8"
    assert calls(prefill, "quantize") > 0
    down = rows(prefill, role="down")[0]
    assert down.kernel.startswith("int8-Q6_K")
    assert down.of_gflops is None
    assert down.of_gbps is not None


def test_a_prompt_of_several_pieces_adds_them_up(path: Path) -> None:
    model, _ = load(path)
    prefill = phase(profile(model, prompt=600, steps=0, repetitions=1), "prefill")
    assert calls(prefill, "down") == 4
    assert calls(prefill, "head") == 1


def test_other_models_are_timed_by_their_modules(path: Path) -> None:
    model = reference(TINY, write(path.with_name("again.gguf"), TINY)).bfloat16()
    report = profile(model, prompt=16, steps=3, repetitions=2)
    assert report.method == "modules"
    prefill = phase(report, "prefill")
    assert {r.role for r in prefill.rows} >= {
        "q/k/v", "o", "gate/up", "down", "head", "attention", "norm", "rope", "embed", "activation"
    }  # fmt: skip
    down = rows(prefill, role="down")[0]
    assert (down.op, down.weight_type, down.kernel, down.calls) == (
        "dense",
        "bfloat16",
        "Linear",
        2,
    )
    assert down.gflops == pytest.approx(4.0 * 16 * HIDDEN * FEED_FORWARD / down.us / 1e3)
    head = rows(prefill, role="head")[0]
    assert head.gflops == pytest.approx(2.0 * HIDDEN * VOCABULARY / head.us / 1e3)
    assert prefill.overhead_us > 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_dense_matrices_of_a_captured_model_are_products_too(path: Path) -> None:
    model = reference(TINY, write(path.with_name("dense.gguf"), TINY))
    report = profile(model, prompt=16, steps=2, repetitions=1)
    assert report.method == "launches"
    down = rows(phase(report, "prefill"), role="down")[0]
    assert (down.op, down.weight_type, down.kernel) == ("dense", "float32", "decoder-dense")


def test_a_packed_model_without_captures_is_timed_by_its_modules(path: Path) -> None:
    model, _ = load(path, dtype=torch.bfloat16)
    report = profile(model, prompt=16, steps=0, repetitions=1)
    assert report.method == "modules"
    down = rows(phase(report, "prefill"), role="down")[0]
    assert (down.op, down.weight_type, down.kernel) == ("mmq", "Q6_K", "QuantLinear")


@pytest.mark.parametrize(
    ("path_of", "role"),
    [
        ("model.layers.3.self_attn.q_proj", "q/k/v"),
        ("model.layers.3.self_attn.qkv_proj", "q/k/v"),
        ("model.layers.3.self_attn.o_proj", "o"),
        ("model.layers.3.mlp.up_proj", "gate/up"),
        ("model.layers.3.mlp.gate_up_proj", "gate/up"),
        ("model.layers.3.mlp.down_proj", "down"),
        ("lm_head", "head"),
        ("model.layers.3.mixer.in_proj", "in_proj"),
        ("", "other"),
    ],
)
def test_roles_are_read_from_paths(path_of: str, role: str) -> None:
    assert role_of(path_of) == role


def test_a_rate_above_the_ceiling_is_an_error(path: Path) -> None:
    model, _ = load(path)
    with pytest.raises(MeasureError, match=r"took .* it skipped work, or the clock or the ceiling"):
        profile(model, prompt=24, steps=0, repetitions=1, ceiling=Ceiling(gflops=1e-3, gbps=1e6))


def test_a_token_faster_than_memory_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load(path)
    slow = Ceiling(gflops=1e6, gbps=1e-4)
    profile(model, prompt=0, steps=2, ceiling=slow)  # the cache can hold this model
    monkeypatch.setattr("tilewright.model.profile.last_level_cache_bytes", lambda: 1000)
    with pytest.raises(MeasureError, match="a pass of decode took"):
        profile(model, prompt=0, steps=2, ceiling=slow)


def test_a_pass_that_computes_something_else_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load(path)

    def wrong(of: Any) -> Any:
        found = instruments_for(of)
        right = found.timed.step
        found.timed.step = lambda token: right(token) + 0.5  # type: ignore[method-assign]
        return found

    monkeypatch.setattr("tilewright.model.profile.instruments_for", wrong)
    with pytest.raises(GateError, match="the instrumented pass gives other logits, off by 0.5"):
        profile(model, prompt=0, steps=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 0, "steps": 0}, "give a prompt or steps above 0"),
        ({"prompt": -1}, "prompt -1"),
        ({"repetitions": 0}, "at least 1 repetition"),
        ({"prompt": 2048, "steps": 1}, "2049 tokens do not fit the model's context of 2048"),
    ],
)
def test_bad_calls(path: Path, options: dict[str, Any], message: str) -> None:
    model, _ = load(path)
    with pytest.raises(UnsupportedError, match=message):
        profile(model, **options)


def test_a_report_is_plain_json(path: Path) -> None:
    model, _ = load(path)
    report = profile(model, prompt=8, steps=2, repetitions=1, ceiling=Ceiling(1e6, 1e6))
    whole = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert whole["phases"][0]["rows"][0]["us"] > 0
    assert whole["ceiling"] == {"gflops": 1e6, "gbps": 1e6}
    told: list[tuple[str, int, int]] = []
    profile(model, prompt=8, steps=2, repetitions=1, progress=lambda *what: told.append(what))
    assert told[0] == ("prefill of 8", 0, 3)
    assert told[-1] == ("done", 3, 3)


def test_the_ceiling_is_measured_by_work_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_RUNS", 3)
    monkeypatch.setattr(peak, "_READ_RUNS", 2)
    monkeypatch.setattr(peak, "last_level_cache_bytes", lambda: 1 << 20)
    programs: list[Any] = []
    real = peak._best

    def keep(program: Any, threads: int, runs: int) -> float:
        us = real(program, threads, runs)
        programs.append((program._launches[0][1].copy(), us))
        return us

    monkeypatch.setattr(peak, "_best", keep)
    found = peak.measure_ceiling(1)
    assert found.gflops == pytest.approx(peak._STEPS * peak._FLOPS_A_STEP / programs[0][1] / 1e3)
    assert 0.5 < found.gflops < 1000
    assert found.gbps is not None
    assert 0.1 < found.gbps < 2000


def test_the_multiply_adds_give_the_sum_of_all_their_chains() -> None:
    from tilewright.ops.cpu.runtime import Program, compile_kernel, specialize

    kernel = compile_kernel(
        specialize(peak._multiply_add, "peak_test", HALVES=1), "peak-test-multiply-add"
    )
    values = np.linspace(0.5, 1.0, 16 * 25, dtype=np.float32)
    out = np.zeros(16, np.float32)
    args = np.array([values.ctypes.data, out.ctypes.data, 10], np.int64)
    Program([(kernel, args)]).run(1)
    lanes = values.reshape(25, 16).astype(np.float64)
    right = lanes[0:24:2].sum(axis=0) + 12 * 10 * lanes[0] * lanes[1]
    np.testing.assert_allclose(out, right, rtol=1e-5)
