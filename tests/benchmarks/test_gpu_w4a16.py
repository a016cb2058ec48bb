"""The GPU benchmark's own logic, with no GPU: plan, bars, supervision, result file."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(
    not (GPU / "w4a16.py").exists(), reason="benchmarks/ is not part of this copy"
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script of benchmarks/gpu by name, as `python benchmarks/gpu/x.py` finds it."""
    monkeypatch.setattr(sys, "path", [str(GPU), str(GPU.parent), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and GPU.parent in Path(file).parents:
            del sys.modules[name]


def record(
    part: str,
    us: dict[str, float],
    *,
    cache: str = "cold",
    n: int = 24576,
    k: int = 4096,
    m: int = 1024,
    errors: dict[str, float | None] | None = None,
    failed: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A case whose arms took these microseconds, drifting alike over six blocks."""
    blocks = [{"us": {arm: t * (1 + i / 10) for arm, t in us.items()}} for i in range(6)]
    found = errors or dict.fromkeys(us, 1e-4)
    return {
        "id": f"{part}-{n}x{k}-M{m}",
        "part": part,
        "N": n,
        "K": k,
        "M": m,
        "group": 128,
        "symmetric": False,
        "arms": {arm: {"error": error} for arm, error in found.items()},
        "failed": failed or {},
        cache: {"blocks": blocks},
    }


def bar(script: Any, records: list[dict[str, Any]], name: str) -> Any:
    found = [b for b in script("bars").bars_of(records) if name in b.name]
    assert len(found) == 1
    return found[0]


def test_ratios_are_taken_block_by_block(script: Any) -> None:
    case = record("prefill", {"cublas/float16": 110.0, "tilewright/float16": 100.0})
    assert script("bars").ratio(
        case, "cold", "cublas/float16", "tilewright/float16"
    ) == pytest.approx(1.1)


def test_prefill_bar_is_a_geometric_mean(script: Any) -> None:
    cases = [
        record("prefill", {"cublas/float16": 50.0, "tilewright/float16": 100.0}, m=1024),
        record("prefill", {"cublas/float16": 400.0, "tilewright/float16": 100.0}, m=2048),
    ]
    found = bar(script, cases, "prefill fp16 over cuBLAS")
    assert found.mean == pytest.approx(math.sqrt(0.5 * 4))
    assert found.worst == pytest.approx(0.5)
    assert found.worst_case == cases[0]["id"]
    assert found.holds is True  # only the mean counts here


def test_small_bar_takes_the_better_peer_and_holds_each_case(script: Any) -> None:
    times = {"cublas/float16": 200.0, "humming/float16": 85.0, "tilewright/float16": 100.0}
    good = {"cublas/float16": 300.0, "humming/float16": 400.0, "tilewright/float16": 100.0}
    found = bar(script, [record("small", times), record("small", good, m=64)], "M 16..512")
    assert found.cases == {
        "small-24576x4096-M1024": pytest.approx(0.85), "small-24576x4096-M64": pytest.approx(3.0)
    }  # fmt: skip
    assert found.mean > 1
    assert found.holds is False


def test_decode_is_held_to_the_bytes_that_must_move(script: Any) -> None:
    # 24576 x 4096 at M = 1: 50,331,648 of codes, 1,572,864 of scales, 393,216 of zero points,
    # 57,344 of x and y, at 4.3 TB/s.
    right = 52_355_072 / 4.3e12 * 1e6
    case = record("decode", {"tilewright/float16": right / 0.7}, cache="rotating", m=1)
    assert script("bars").floor_us(case) == pytest.approx(right)
    found = bar(script, [case], "N > K")
    # The median block of `record` is 1.25 times as slow as its first.
    assert found.mean == pytest.approx(0.7 / 1.25)
    assert found.holds is False
    assert bar(script, [case], "N < K").holds is None


@pytest.mark.parametrize(
    ("errors", "failed", "worst", "holds"),
    [
        ({"tilewright/float16": 2e-4, "humming/float16": 9e-1}, {}, 2e-4, True),
        ({"tilewright/float16": 4e-4}, {}, 4e-4, False),
        ({"tilewright/float16": None}, {}, math.inf, False),
        ({}, {"tilewright/float16": "RuntimeError"}, math.inf, False),
        ({"triton/float16": 5e-4}, {}, 5e-4, False),
    ],
    ids=["peers-do-not-count", "over", "not-finite", "failed", "portable-counts"],
)
def test_error_bar(
    script: Any, errors: dict[str, float | None], failed: dict[str, str], worst: float, holds: bool
) -> None:
    case = record("error", {"x/float16": 1.0}, errors={"x/bfloat16": 0.0, **errors}, failed=failed)
    found = bar(script, [case], "relative error float16")
    assert found.worst == worst
    assert found.holds is holds


def test_a_wrong_arm_has_no_time(script: Any) -> None:
    case = record(
        "prefill", {"cublas/float16": 50.0, "tilewright/float16": 1.0},
        failed={"tilewright/float16": "relative error 0.9 after timing: void"},
    )  # fmt: skip
    assert bar(script, [case], "prefill fp16 over cuBLAS").mean is None
    assert "not measured" in script("bars").bars_text(script("bars").bars_of([case]))


def test_plan_covers_what_the_claims_need(script: Any) -> None:
    plan = script("plan")
    names = ("cublas", "tilewright", "triton", "humming", "gemlite", "tinygemm")
    cases = {part: plan.cases_of(part, contenders=names) for part in plan.PARTS}
    assert len(cases["prefill"]) == 16
    assert len(cases["small"]) == 24
    assert len(cases["decode"]) == 8
    assert all(c.caches == ("rotating", "cold") for c in cases["decode"])
    assert all(("tilewright", "bfloat16") in c.arms for c in cases["prefill"])
    assert {c.group for c in cases["error"]} == {32, 64, 128, 256, -1}
    assert {c.symmetric for c in cases["error"]} == {False, True}
    assert min(c.M for c in cases["error"]) == 0
    assert max(c.M for c in cases["error"]) == 8192
    assert not any(name in ("cublas", "humming") for c in cases["error"] for name, _ in c.arms)
    every = [case.id for group in cases.values() for case in group]
    assert len(every) == len(set(every))
    for group in cases.values():  # one packed weight is held at a time
        keys = [plan.weight_key(case) for case in group]
        assert len(set(keys)) == 1 + sum(a != b for a, b in zip(keys, keys[1:], strict=False))


LADDER = """
spec = "w4a16"
[[products]]
type = "uint4b8"
shape = [256, 128]
group = 64
m = [16, 1]
[base]
name = "old"
[[base.tiles]]
tile = "a(x=1)"
[[rung]]
name = "packed"
[[rung.tiles]]
m = "2-"
tile = "a(x=2)"
[[rung]]
name = "wide"
[[rung.tiles]]
n = 256
m = 16
tile = "b(y=3)"
"""


def test_a_ladder_gives_an_arm_a_rung_and_the_ends_of_its_control(
    script: Any, tmp_path: Path
) -> None:
    path = tmp_path / "ladder.toml"
    path.write_text(LADDER)
    args = script("w4a16").arguments(["--ladder", str(path), "--control", str(path)])
    sixteen, one = script("w4a16").plan_of(args)
    assert sixteen.arms == (
        ("old", "float16"), ("packed", "float16"), ("wide", "float16"),
        ("control: old", "bfloat16"), ("control: wide", "bfloat16"),
    )  # fmt: skip
    assert (sixteen.M, sixteen.N, sixteen.K, sixteen.group, sixteen.symmetric) == (
        16, 256, 128, 64, True,
    )  # fmt: skip
    tiles = {"old": "a(x=1)", "packed": "a(x=2)", "wide": "b(y=3)", "control: old": "a(x=1)",
             "control: wide": "b(y=3)"}  # fmt: skip
    assert dict(sixteen.tiles) == tiles
    assert set(dict(one.tiles).values()) == {"a(x=1)"}  # no rule of a rung names M = 1


def test_a_ladder_without_a_tile_for_a_product_is_refused(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "ladder.toml"
    path.write_text(LADDER.replace('tile = "a(x=1)"', 'tile = "a(x=1)"\nk = 64'))
    args = script("w4a16").arguments(["--ladder", str(path)])
    with pytest.raises(SystemExit, match="old has no tile for N=256 K=128 M=16"):
        script("w4a16").plan_of(args)


def test_rungs_are_judged_against_the_one_below_and_the_base(script: Any) -> None:
    us = {"old/float16": 200.0, "packed/float16": 100.0, "wide/float16": 50.0,
          "control: old/bfloat16": 300.0, "control: wide/bfloat16": 300.0}  # fmt: skip
    case = record("ladder", us)
    case["cold"]["blocks"] = [
        {"us": {**{arm: t * (1 + i / 100) for arm, t in us.items()}, "control": 200 + 2.0 * i}}
        for i in range(8)
    ]
    rows = script("ladders").judged_pairs(case["cold"]["blocks"], list(us), "old/float16")
    found = {(row["a"], row["b"]): (row["ratio"], row["verdict"]) for row in rows}
    assert found["old/float16", "wide/float16"] == (pytest.approx(4.0), "DISJOINT")
    assert found["packed/float16", "wide/float16"] == (pytest.approx(2.0), "DISJOINT")
    control = found["control: old/bfloat16", "control: wide/bfloat16"]
    assert control == (pytest.approx(1.0), "SAME")
    assert ("wide/float16", "control: old/bfloat16") not in found
    case["cold"]["baseline"] = "old/float16"
    case["pairs"] = script("w4a16").ladder_pairs(case)
    assert [(r["a"], r["b"], r["ratio"]) for r in case["pairs"]] == [
        (r["a"], r["b"], r["ratio"]) for r in rows
    ]
    text = script("w4a16").ladder_text(case)
    assert "2.000x [2.000, 2.000] DISJOINT of packed/float16" in text


def test_blocks_of_a_throttled_gpu_prove_nothing(script: Any) -> None:
    state: dict[str, Any] = {"throttle": []}
    blocks = [
        {"us": {"a": 100.0 + i, "b": 50.0, "control": 100.0 + i}, "state": state} for i in range(8)
    ]
    ladders = script("ladders")
    for throttle, verdict in (([], "DISJOINT"), (["power cap"], "VOID")):
        blocks[3]["state"] = {"throttle": throttle}
        rows = ladders.judged_pairs(blocks, ["a", "b"], "a")
        rows += ladders.judged_against(blocks, ["a"], "b", "a")
        assert [row["verdict"] for row in rows] == [verdict] * 2


def test_float64_products_come_from_the_codes(script: Any) -> None:
    operands = script("operands")
    weight = operands.draw_weight(24, 96, 32, device="cpu")
    x = operands.activations(3, 96, torch.float16, device="cpu")
    bias = operands.activations(1, 24, torch.float16, device="cpu")[0]
    right = x.double().numpy() @ weight.host.dequantize().astype(np.float64).T
    got = weight.product(x, bias).numpy()
    np.testing.assert_allclose(got, right + bias.double().numpy(), rtol=1e-14)
    assert torch.equal(weight.scales, weight.scales.to(torch.float16).float())
    assert operands.relative_error(torch.full((3, 24), math.nan), weight.product(x)) == math.inf
    assert operands.relative_error(weight.product(x) * 1.5, weight.product(x)) == pytest.approx(0.5)


def test_words_hold_code_i_at_bit_4i(script: Any) -> None:
    codes = torch.tensor([[[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0, 0, 15]]], dtype=torch.uint8)
    words = script("contenders")._words(codes)
    assert words.dtype == torch.int32
    assert [int(w) & 0xFFFFFFFF for w in words[0]] == [0x87654321, 0xF0000000]


CHILD = """
import json, sys, time
orders = json.load(open(sys.argv[sys.argv.index("--child") + 1]))
if "prepare" in orders:
    with open(__file__ + ".prepared", "a") as file:
        file.write(f"{len(orders['cases'])} {orders['prepare']}\\n")
    sys.exit(3)
def tell(**event): print("@@ " + json.dumps(event), flush=True)
def done(case, failed): tell(event="done", record={
    "id": case, "part": "prefill", "N": 8, "K": 8, "M": 1, "group": 8, "symmetric": False,
    "arms": {"tilewright/float16": {"error": 1e-4}}, "failed": failed, "cold": {"blocks": []}})
print("chatter")
tell(event="device", device={"name": "fake", "arch": "sm_00"})
for case in orders["cases"]:
    skip = orders["skip"].get(case, {})
    tell(event="begin", case=case, arm="cublas/float16", stage="check")
    if "FAULT" not in skip:
        tell(event="begin", case=case, arm="FAULT", stage="capture cold")
        BREAK
    done(case, skip)
"""


def supervisor(script: Any, tmp_path: Path, fault: str, how: str, *words: str) -> Any:
    child = tmp_path / "child.py"
    child.write_text(CHILD.replace("FAULT", fault).replace("BREAK", how))
    main = script("w4a16")
    args = main.arguments(["--part", "prefill", "--shapes", "4096x4096", *words])
    cases, command = main.plan_of(args), [sys.executable, str(child)]
    return script("supervise").run_all(args, cases, command, main.show_record)


def test_an_arm_that_kills_its_process_is_left_out(script: Any, tmp_path: Path) -> None:
    found = supervisor(script, tmp_path, "humming/float16", "sys.exit(70)")
    assert [r["M"] for r in found.records] == [1] * 4
    assert not found._pending
    reasons = [r["failed"]["humming/float16"] for r in found.records]
    assert reasons[:3] == ["its process ended with code 70 (capture cold)"] * 3
    assert reasons[3] == "broke too many processes"  # three processes, not four
    assert len(found.notes) == 3
    assert found.device["name"] == "fake"


def test_arms_that_compile_are_prepared_once_a_weight(script: Any, tmp_path: Path) -> None:
    found = supervisor(script, tmp_path, "x", "pass")
    lines = sorted((tmp_path / "child.py.prepared").read_text().splitlines())
    assert lines == sorted(
        ["4 tilewright/float16", "4 tilewright/bfloat16", "4 triton/float16", "4 humming/float16"]
    )
    assert len(found.records) == 4  # whatever became of the preparation


def test_an_arm_that_hangs_is_left_out(script: Any, tmp_path: Path) -> None:
    found = supervisor(
        script, tmp_path, "gemlite/float16", "time.sleep(60)", "--rows", "1024", "--stall", "1"
    )
    assert found.records[0]["failed"]["gemlite/float16"] == "no news for 1 s (capture cold)"


def test_a_process_that_breaks_while_timing_costs_its_case(script: Any, tmp_path: Path) -> None:
    found = supervisor(script, tmp_path, "", "sys.exit(70) if case.endswith('M2048') else 0")
    assert len(found.records) == 3
    assert not found._pending
    assert found.notes == [
        "prefill-4096x4096-g128-asym-M2048: its process ended with code 70 (capture cold)"
    ]


def test_time_that_is_up_ends_the_run(script: Any, tmp_path: Path) -> None:
    found = supervisor(script, tmp_path, "x", "time.sleep(60)", "--seconds", "1")
    assert found.records == []
    assert found.notes[0].endswith("not run")
    assert len(found.notes) == 4


def test_what_is_only_checked_runs_in_several_processes(script: Any, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(CHILD.replace("FAULT", "x").replace("BREAK", "pass"))
    main = script("w4a16")
    args = main.arguments(["--part", "error", "--rows", "1,16", "--jobs", "5"])
    command = [sys.executable, str(child)]
    found = script("supervise").run_all(args, main.plan_of(args), command, main.show_record)
    assert sorted(r["id"] for r in found.records) == sorted(c.id for c in main.plan_of(args))
    assert found.notes == []


def test_result_file_holds_every_sample_and_its_origin(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = supervisor(script, tmp_path, "x", "pass", "--out", str(tmp_path / "results"))
    main = script("w4a16")
    args = main.arguments(["--part", "prefill"])
    path = script("record").write(main.result_of(found, args), "w4a16", tmp_path / "results")
    result = json.loads(path.read_text())
    assert result["kind"] == "gpu-w4a16"
    assert len(result["cases"]) == 4
    assert result["origin"]["gpu"]["name"] == "fake"
    assert "torch" in result["origin"]["versions"]
    assert {b["name"]: b["holds"] for b in result["bars"]}["relative error float16"] is True
    assert main.main(["--bars", str(path)]) == 0
    assert "holds        relative error float16: worst 1.00e-04" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--blocks", "5"], "--blocks is 5; fewer than 6"),
        (["--arms", "cublas,magic"], "--arms names ['magic']"),
        (["--tile", "cublas=x(a=1)"], "write NAME=algorithm"),
        (["--tile", "mine"], "write NAME=algorithm"),
        (["--part", "all"], "invalid choice: 'all'"),
    ],
    ids=["blocks", "arm", "taken-name", "no-tile", "part"],
)
def test_bad_arguments(
    script: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        script("w4a16").arguments(words)
    assert left.value.code == 2
    assert message in capsys.readouterr().err
