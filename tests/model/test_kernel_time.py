from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakes import ByteTokenizer, ScriptedModel
from tilewright.errors import UnsupportedError
from tilewright.model.bench import BenchTest, bench
from tilewright.model.kernel_time import (
    KernelReport,
    group_kernels,
    kernel_owners,
    prefill_kernel_time,
    step_kernel_time,
)
from tilewright.report.bench import bench_report, bench_table, kernels_report

OWNERS = {"_mmq_kernel": ("mmq",), "_w4_kernel": ("w4a16",), "_sum_kernel": ("mmq", "w4a16"),
          "_attend_kernel": ("decoder",), "_add_norm_kernel": ("decoder",)}  # fmt: skip


def test_kernels_are_found_in_the_folders_of_their_ops() -> None:
    owners = kernel_owners()
    assert owners["_w4a16_kernel"] == ("w4a16",)
    assert owners["_mmq_kernel"] == ("mmq",)
    assert owners["_moe_kernel"] == ("moe",)
    assert owners["_attend_kernel"] == ("decoder",)
    assert {"mmq", "w4a16"} <= set(owners["_sum_kernel"])
    assert "scales_of" not in owners


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("_mmq_kernel", "mmq"),
        ("_attend_kernel", "attention"),
        ("_add_norm_kernel", "other"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3", "attention"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "dense"),
        ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n", "dense"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "other"),
    ],
)
def test_a_kernel_belongs_to(name: str, op: str) -> None:
    (row,) = group_kernels([(name, 2.0)], OWNERS)
    assert (row.op, row.us, row.share, row.launches) == (op, 2.0, 1.0, 1)


def test_a_shared_name_counts_for_the_op_before_it() -> None:
    launched = [
        ("_w4_kernel", 10.0), ("_sum_kernel", 1.0), ("copy", 5.0), ("_sum_kernel", 2.0),
        ("_mmq_kernel", 20.0), ("_sum_kernel", 4.0), ("_mmq_kernel", 30.0),
    ]  # fmt: skip
    rows = {row.op: row for row in group_kernels(launched, OWNERS)}
    assert list(rows) == ["mmq", "w4a16", "other"]
    assert rows["mmq"].us == 54
    assert rows["mmq"].kernels == (("_mmq_kernel", 50.0, 2), ("_sum_kernel", 4.0, 1))
    assert rows["w4a16"].us == 13
    assert sum(row.share for row in rows.values()) == pytest.approx(1)


def test_no_kernel_takes_no_share() -> None:
    assert group_kernels([], OWNERS) == ()
    (row,) = group_kernels([("_mmq_kernel", 0.0)], OWNERS)
    assert row.share == 0


def kernels() -> KernelReport:
    rows = group_kernels([("_mmq_kernel", 3000.0), ("void flash_fwd<a>(b)", 1000.0)], OWNERS)
    return KernelReport(4096, 4000.0, rows)


def table() -> Any:
    model = ScriptedModel()
    results = bench(model, None, [BenchTest(8, 0)], repetitions=1, clock=model.clock)
    return bench_table(
        results, model="m", model_bytes=1, activations="float", threads=1, provenance={}
    )


def test_json_holds_the_kernels_beside_the_results() -> None:
    whole = json.loads(bench_report(table(), kernels(), "json"))
    assert whole["results"][0]["test"] == "pp8"
    assert whole["kernel_time"]["test"] == "pp4096"
    assert whole["kernel_time"]["total_us"] == 4000
    first = whole["kernel_time"]["rows"][0]
    assert (first["op"], first["share"], first["kernels"][0]["launches"]) == ("mmq", 0.75, 1)


@pytest.mark.parametrize("form", ["terminal", "md"])
def test_people_read_a_second_table(form: str) -> None:
    text = bench_report(table(), kernels(), form)
    assert "GPU kernel time by op, pp4096" in text
    assert "total kernel time at pp4096: 4.00 ms" in text
    assert "75.0%" in text
    assert "flash_fwd" in text
    assert "flash_fwd<" not in text


def test_a_profile_lists_the_kernels_that_count() -> None:
    rows = group_kernels(
        [("_mmq_kernel", 900.0), ("_sum_kernel", 95.0), ("_tiny_kernel", 5.0)],
        {"_mmq_kernel": ("mmq",), "_sum_kernel": ("mmq",), "_tiny_kernel": ("mmq",)},
    )
    reports = [
        KernelReport(512, 1000.0, rows, pass_us=1250.0),
        KernelReport(0, 1000.0, rows, steps=4, depth=512, pass_us=2000.0),
    ]
    text = kernels_report(reports, "md", subject="m", provenance={}, notes=["said."])
    assert "m: GPU kernel time by op, pp512" in text
    assert "without the profiler: 1.25 ms, kernels 80% of it" in text
    assert "without the profiler: 0.500 ms a token, kernels 50% of it" in text
    assert text.count("_sum_kernel") == text.count("9.5%") == text.count("_mmq_kernel") == 2
    assert "_tiny_kernel" not in text
    assert text.rstrip().endswith("said.")


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_lines_hold_results_alone(form: str) -> None:
    assert "mmq" not in bench_report(table(), kernels(), form)
    assert bench_report(table(), None, form) == bench_report(table(), kernels(), form)


def test_a_model_without_tokenizer_is_timed_with_random_ids() -> None:
    model = ScriptedModel()
    bench(model, None, [BenchTest(5, 1)], repetitions=1, warmup=False, clock=model.clock)
    assert [call[0] for call in model.calls] == ["reset", "prefill", "step"]


def test_the_decoder_given_is_the_one_that_runs() -> None:
    model, other = ScriptedModel(), ScriptedModel()
    bench(
        model, ByteTokenizer(), [BenchTest(5, 0)], repetitions=1, warmup=False, clock=other.clock,
        decoder=other.tilewright_decoder(),
    )  # fmt: skip
    assert model.calls == []
    assert other.calls


@pytest.mark.parametrize(
    ("device", "tokens", "message"),
    [("cpu", 4, "the model is on cpu"), ("cuda", 0, "tokens: got 0")],
)
def test_what_cannot_be_read(device: str, tokens: int, message: str) -> None:
    model = SimpleNamespace(device=torch.device(device))
    with pytest.raises(UnsupportedError, match=message):
        prefill_kernel_time(model, ScriptedModel().tilewright_decoder(), tokens)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scripted model that says it is on a GPU; a profiler that sees two kernels a call."""
    from tilewright.model import kernel_time

    def profiled(run: Any) -> Any:
        model.calls.append(("profile",))
        run()
        return group_kernels([("_mmq_kernel", 6.0), ("void flash_fwd<a>(b)", 2.0)], OWNERS)

    model = ScriptedModel()
    monkeypatch.setattr(kernel_time, "_on_gpu", lambda _: None)
    monkeypatch.setattr(kernel_time, "_profiled", profiled)
    return model


def calls_from_the_profile(model: Any) -> list[str]:
    names = [call[0] for call in model.calls]
    return names[names.index("profile") + 1 :]


def test_single_tokens_are_timed_behind_their_context(gpu: Any) -> None:
    report = step_kernel_time(gpu, gpu.tilewright_decoder(), 5, depth=7)
    assert (report.test, report.tokens, report.total_us) == ("tg5 @ d7", 0, 8.0)
    assert report.to_dict()["test"] == "tg5 @ d7"
    assert calls_from_the_profile(gpu) == ["step"] * 5 + ["reset"]
    before = [call[0] for call in gpu.calls][:-7]
    assert before == [
        "reset", "prefill", *["step"] * 3,
        "reset", "prefill", *["step"] * 5,
        "reset", "prefill",
    ]  # fmt: skip


def test_a_prompt_is_timed_behind_its_context(gpu: Any) -> None:
    report = prefill_kernel_time(gpu, gpu.tilewright_decoder(), 9, depth=4)
    assert report.test == "pp9 @ d4"
    assert calls_from_the_profile(gpu) == ["prefill", "reset"]
    assert prefill_kernel_time(gpu, gpu.tilewright_decoder(), 9).test == "pp9"
    assert step_kernel_time(gpu, gpu.tilewright_decoder(), 2).test == "tg2"


def test_no_step_is_refused(gpu: Any) -> None:
    with pytest.raises(UnsupportedError, match="steps: got 0; give 1 or more"):
        step_kernel_time(gpu, gpu.tilewright_decoder(), 0)


def test_steps_of_the_cpu_are_refused() -> None:
    model = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="the model is on cpu"):
        step_kernel_time(model, ScriptedModel().tilewright_decoder(), 1)
