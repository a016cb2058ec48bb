"""The GPU's comparison with llama.cpp, with no GPU: its programs' output, the plan, pairing, bars.

The products are paired for real, on the CPU, with the ggml that libggml-python ships.
"""

from __future__ import annotations

import importlib
import json
import re
import stat
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from tilewright.errors import MeasureError
from tilewright.measure import MachineState

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not (BENCHMARKS / "gpu" / "versus_llama_cpp.py").exists(),
    reason="benchmarks/ is not part of this copy",
)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script of benchmarks/ by name."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "gpu"), str(BENCHMARKS), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def ggml() -> Path:
    """The folder of a ggml for the CPU."""
    libggml = pytest.importorskip("libggml")
    return Path(libggml.__file__).parent / "lib64"


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# What test-backend-ops of ggml 0.26.0 printed; of the second product, its answer to an op that a
# device does not have.
SQL = """CREATE TABLE IF NOT EXISTS test_backend_ops (
  test_time TEXT,
  backend_reg_name TEXT
);

INSERT INTO test_backend_ops (test_time, build_commit, backend_name, op_name, op_params, test_mode, supported, passed, error_message, time_us, flops, bandwidth_gb_s, memory_kb, n_runs, device_description, backend_reg_name) VALUES ('2026-11-30T06:43:45Z', 'unknown', 'CPU', 'MUL_MAT_ID', 'type_a=q4_K,type_b=f32,n_mats=128,n_used=8,b=0,m=768,n=1,k=2048,amax=1.000000,m_v=0', 'perf', '1', '1', '', '336.972327', '74682168179.086426', '0.000000', '110680', '3180', '', '');
INSERT INTO test_backend_ops (test_time, build_commit, backend_name, op_name, op_params, test_mode, supported, passed, error_message, time_us, flops, bandwidth_gb_s, memory_kb, n_runs, device_description, backend_reg_name) VALUES ('2026-11-30T06:44:20Z', 'unknown', 'CPU', 'MUL_MAT', 'type_a=q4_0,type_b=f32,m=4096,n=8,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,m_v=0,pad=0', 'perf', '0', '0', 'not supported', '0.000000', '0.000000', '0.000000', '0', '0', '', '');
INSERT INTO test_backend_ops (test_time, build_commit, backend_name, op_name, op_params, test_mode, supported, passed, error_message, time_us, flops, bandwidth_gb_s, memory_kb, n_runs, device_description, backend_reg_name) VALUES ('2026-11-30T06:44:20Z', 'unknown', 'CPU', 'MUL_MAT', 'type_a=q4_0,type_b=f32,m=4096,n=1,k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,m_v=0,pad=0', 'perf', '1', '1', '', '6943.420290', '16914717741.9', '0.000000', '32312', '207', '', '');
"""  # noqa: E501


def test_what_test_backend_ops_times_is_read(scripts: Any, tmp_path: Path) -> None:
    body = f"print({SQL!r}); open(sys.argv[0] + '.argv', 'w').write(' '.join(sys.argv[1:]))"
    binary = program(tmp_path / "test-backend-ops", body)
    first, second = scripts("llama_cpp").op_times(binary, ("MUL_MAT", "MUL_MAT_ID"), "^type_a=q4")
    assert (first["op"], first["us"], first["launches"]) == ("MUL_MAT_ID", 336.972327, 3180)
    assert first["parameters"]["type_a"] == "q4_K"
    assert first["parameters"]["n_used"] == "8"
    assert (second["op"], second["us"], second["device"]) == ("MUL_MAT", 6943.42029, "CPU")
    assert second["parameters"]["per"] == "[0,1,2,3]"
    assert second["parameters"]["n"] == "1"
    asked = (tmp_path / "test-backend-ops.argv").read_text()
    assert asked == "perf -o MUL_MAT,MUL_MAT_ID -p ^type_a=q4 --output sql"


@pytest.mark.parametrize(
    ("body", "said"),
    [("print('CREATE TABLE')", "CREATE"), ("sys.exit('no device')", "no device")],
    ids=["nothing", "fails"],
)
def test_a_tool_that_times_nothing_is_an_error(
    scripts: Any, tmp_path: Path, body: str, said: str
) -> None:
    binary = program(tmp_path / "test-backend-ops", body)
    with pytest.raises(MeasureError, match=rf"timed nothing \(code [01]\): .*{said}"):
        scripts("llama_cpp").op_times(binary, ("MUL_MAT",), "n=1", device="CUDA0")


def bench_row(prompt: int, generated: int, ns: int) -> dict[str, Any]:
    """As llama-bench of ggml 0.26.0 gives it, less what nobody reads."""
    return {
        "build_commit": "unknown", "build_number": 0, "gpu_info": "NVIDIA H200",
        "model_filename": "/some/where/m.gguf", "model_type": "llama 8B Q4_K - Medium",
        "n_ubatch": 2048, "flash_attn": 1, "n_gpu_layers": 99, "n_prompt": prompt,
        "n_gen": generated, "samples_ns": [ns],
    }  # fmt: skip


def test_llama_bench_runs_all_tests_in_one_process(scripts: Any, tmp_path: Path) -> None:
    rows = [bench_row(4096, 0, 400_000_000), bench_row(0, 128, 500_000_000)]
    program(tmp_path / "llama-bench", f"assert sys.argv[1:3] == ['-m', 'm.gguf']; "
            f"open(sys.argv[0] + '.argv', 'w').write(' '.join(sys.argv[3:])); "
            f"print({json.dumps(json.dumps(rows))})")  # fmt: skip
    args = Namespace(llama_bin=tmp_path, prompts=[4096], tokens=128)
    arm = scripts("llama_models").LlamaBench(args, Path("m.gguf"))
    assert arm() == {"pp4096": 400_000.0, "tg128": 500_000.0}
    asked = (tmp_path / "llama-bench.argv").read_text()
    assert asked == "-fa 1 -ub 2048 -ngl 99 -p 4096 -n 128 -r 1 -o json"
    assert arm.build["gpu_info"] == "NVIDIA H200"
    assert "model_filename" not in arm.build


def versus(scripts: Any, *words: str) -> Namespace:
    found: Namespace = scripts("versus_llama_cpp").arguments(["--llama-bin", "bin", *words])
    return found


def test_every_product_that_was_asked_for_is_measured(scripts: Any) -> None:
    cases = versus(scripts).cases
    ids = [case.id for case in cases]
    assert len(ids) == len(set(ids)) == 6 * 5 + 7
    assert ids[:5] == [
        "Q4_0-4096x14336-M1", "Q4_0-4096x14336-M1, rotating", "Q4_0-4096x14336-M8",
        "Q4_0-4096x14336-M8, rotating", "Q4_0-4096x14336-M512",
    ]  # fmt: skip
    assert ids[-1] == "Q4_K-128x768x2048-M512"
    assert [c.M for c in cases if c.op == "MUL_MAT_ID" and c.state == "warm"] == [
        1,
        8,
        32,
        128,
        512,
    ]
    # A weight is drawn once: its cases are neighbours.
    keys = [(case.op, *case[:3]) for case in cases]
    assert len(set(keys)) == 1 + sum(a != b for a, b in zip(keys, keys[1:], strict=False))


@pytest.mark.parametrize(
    ("sizes", "launches"),
    [
        ((4096, 14336, 1, 0, 0, "warm"), 128),
        ((4096, 14336, 8, 0, 0, "warm"), 107),  # 100e9 / (2 * 8 * 4096 * 14336), and one more
        ((4096, 14336, 512, 0, 0, "warm"), 16),
        ((768, 2048, 32, 128, 8, "warm"), 125),
        ((4096, 14336, 1, 0, 0, "rotating"), 24),
    ],
)
def test_launches_of_a_graph(scripts: Any, sizes: tuple[Any, ...], launches: int) -> None:
    operators = scripts("llama_operators")
    assert operators.launches_of(operators.Case("Q4_K", *sizes)) == launches


def test_the_tool_is_asked_for_these_products_only(scripts: Any) -> None:
    pattern = scripts("versus_llama_cpp").tool_pattern(versus(scripts).cases)
    # test-backend-ops' own words for some of its perf tests.
    plain = "bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,m_v=0,pad=0"
    many = "type_a=q4_K,type_b=f32,n_mats=128,n_used=8,b=0,m=768"
    for text, wanted in {
        f"type_a=q4_0,type_b=f32,m=4096,n=1,k=14336,{plain}": True,
        f"type_a=q6_K,type_b=f32,m=4096,n=512,k=14336,{plain}": True,
        f"type_a=q4_0,type_b=f32,m=4096,n=2,k=14336,{plain}": False,
        f"type_a=q4_K,type_b=f32,m=4096,n=1,k=4096,{plain}": False,
        f"type_a=iq4_xs,type_b=f32,m=4096,n=1,k=14336,{plain}": False,
        f"{many},n=32,k=2048,amax=1.000000,m_v=0": True,
        f"{many},n=64,k=2048,amax=1.000000,m_v=0": False,
        f"{many},n=32,k=2048,o=1,mul=0": False,  # with a product fused
    }.items():
        assert bool(re.search(pattern, text)) == wanted, text


@pytest.mark.parametrize(
    ("ours", "ggmls"), [("Q4_K", "q4_K"), ("Q4_0", "q4_0"), ("IQ4_NL", "iq4_nl"),
                        ("MXFP4", "mxfp4"), ("IQ4_XS", "iq4_xs")]
)  # fmt: skip
def test_names_of_types(scripts: Any, ours: str, ggmls: str) -> None:
    assert scripts("versus_llama_cpp")._ggml_name(ours) == ggmls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "model"], "--part model needs --model FILE or --synthetic NAME"),
        (["--model", "absent.gguf"], "--model is absent.gguf, which is no file"),
        (["--blocks", "5"], "--blocks is 5; fewer than 6 cannot be significant"),
        (["--product-blocks", "2"], "--product-blocks is 2; fewer than 6"),
        (["--shape", "4096"], "write numbers with ',' or, for --shape, 'x' between them"),
        (["--rows", "1,many"], "write numbers with ','"),
        (["--synthetic", "llama-3-8b", "--model", "m"], "not allowed with argument"),
    ],
    ids=["no model", "no file", "blocks", "product blocks", "shape", "rows", "two models"],
)
def test_a_wrong_argument_is_a_usage_error(
    scripts: Any, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        versus(scripts, *words)
    assert message in capsys.readouterr().err


def test_parts_are_those_there_is_a_model_for(scripts: Any) -> None:
    assert versus(scripts).part == ["operators", "tool"]
    assert versus(scripts, "--synthetic", "llama-3-8b").part == ["operators", "model", "tool"]
    assert versus(scripts, "--part", "tool").part == ["tool"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--synthetic", "llama-3-8b", "--part", "model"], "holds no llama-bench; part 'model'"),
        (["--part", "tool"], "holds no test-backend-ops; part 'tool' runs it"),
        (["--part", "operators"], "holds no libggml-base.so and libggml.so; build llama.cpp with"),
    ],
    ids=["model", "tool", "operators"],
)
def test_what_is_missing_of_llama_cpp_is_named(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    main = scripts("versus_llama_cpp").main
    assert main(["--llama-bin", str(tmp_path), "--device", "cpu", *words]) == 1
    assert message in capsys.readouterr().err


def products(scripts: Any, tmp_path: Path, folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    code = scripts("versus_llama_cpp").main([
        "--llama-bin", str(folder), "--device", "cpu", "--part", "operators", "--shape", "32x512",
        "--experts", "8,2,16,256", "--launches", "3", "--product-blocks", "6",
        "--folder", str(tmp_path), "--out", str(tmp_path), "--name", "x", *words,
    ])  # fmt: skip
    (written,) = tmp_path.glob("*-x.json")
    return code, json.loads(written.read_text())


def test_products_are_paired_with_ggmls(scripts: Any, tmp_path: Path, ggml: Path) -> None:
    words = ("--types", "Q4_K,Q8_0", "--rows", "2,9", "--expert-tokens", "3")
    code, result = products(scripts, tmp_path, ggml, *words)
    assert code in (0, 4)
    assert [case["id"] for case in result["cases"]] == [
        "Q4_K-32x512-M2", "Q4_K-32x512-M2, rotating", "Q4_K-32x512-M9",
        "Q8_0-32x512-M2", "Q8_0-32x512-M2, rotating", "Q8_0-32x512-M9",
        "Q4_K-8x16x256-M3", "Q4_K-8x16x256-M3, rotating",
    ]  # fmt: skip
    for case in result["cases"]:
        assert case["failed"] == {}
        assert case["launches"] == 3
        assert case["copies"] == (1 if case["state"] == "warm" else 3)
        theirs, ours = case["arms"]["llama.cpp"], case["arms"]["tilewright"]
        assert theirs.keys() == ours.keys() == {"error", "error_after"}
        assert ours["error"] < 1e-5
        assert 1e-4 < theirs["error"] < 0.02  # rows of 8 bits
        assert len(case["blocks"]) == 6
        assert sorted(case["blocks"][0]["order"]) == ["control", "llama.cpp", "tilewright"]
        assert case["judgement"]["p_adjusted"] >= case["judgement"]["p"]
    assert result["ggml"]["backend"] == "CPU"
    assert set(result["kernels"]) == {"mmq", "moe"}
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_product_that_cannot_run_does_not_end_the_others(
    scripts: Any, tmp_path: Path, ggml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operators = scripts("llama_operators")
    right = operators.Operands

    class Broken(right):  # type: ignore[misc, valid-type]
        def copies(self, count: int) -> list[Any]:
            if self._type == "Q4_0":
                raise RuntimeError("a kernel broke\nat length")
            return list(super().copies(count))

    operators.Operands = Broken
    words = ("--types", "Q4_0,Q8_0", "--rows", "9", "--expert-types", "")
    _, result = products(scripts, tmp_path, ggml, *words)
    broken, other = result["cases"]
    assert broken["failed"] == {"": "RuntimeError: a kernel broke"}
    assert broken["judgement"] is None
    assert other["failed"] == {}
    assert len(other["blocks"]) == 6
    assert "Q4_0-32x512-M9: failed" in capsys.readouterr().out


def test_a_part_that_fails_is_noted_and_the_others_stay(
    scripts: Any, tmp_path: Path, ggml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for file in ggml.glob("*.so*"):
        (folder / file.name).symlink_to(file)
    program(folder / "test-backend-ops", "sys.exit('no device')")
    words = ("--types", "Q8_0", "--rows", "9", "--expert-types", "", "--part", "tool")
    code, result = products(scripts, tmp_path, folder, *words)
    assert code == 1
    assert "timed nothing (code 1): no device" in result["failed"]["tool"]
    assert list(result["failed"]) == ["tool"]
    assert len(result["cases"][0]["blocks"]) == 6
    assert "error: part 'tool'" in capsys.readouterr().err


def test_the_tool_stands_beside_the_products_it_was_asked_for(scripts: Any, tmp_path: Path) -> None:
    body = f"print({SQL!r}); open(sys.argv[0] + '.argv', 'w').write(sys.argv[5])"
    program(tmp_path / "test-backend-ops", body)
    code = scripts("versus_llama_cpp").main([
        "--llama-bin", str(tmp_path), "--device", "cpu", "--part", "tool", "--types", "Q4_0,Q6_K",
        "--tool-types", "Q4_0", "--out", str(tmp_path), "--name", "x",
    ])  # fmt: skip
    (written,) = tmp_path.glob("*-x.json")
    assert code == 0
    (row,) = json.loads(written.read_text())["tool"]
    assert (row["id"], row["us"]) == ("Q4_0-4096x14336-M1", 6943.42029)
    asked = (tmp_path / "test-backend-ops.argv").read_text()
    assert "type_a=q4_0" in asked
    assert "q6_K" not in asked


class FakePeer:
    """Multiplies what it is given, exactly, and says how long that took."""

    def __init__(self, us: float, scale: float = 1.0) -> None:
        self.us, self.scale = us, scale
        self.opened: dict[str, Any] = {}

    def ask(self, verb: str, argument: Any) -> dict[str, Any]:
        import gguf

        if verb == "open":
            self.opened = argument
            kind = gguf.GGMLQuantizationType[argument["type_name"]]
            weight = gguf.quants.dequantize(np.load(argument["raw"]), kind)
            self.y = np.load(argument["x"]) @ np.tile(weight, (argument["repeats"], 1)).T
        if verb == "result":
            np.save(argument, self.scale * self.y[None])
        return {"us": self.us}


def pair(scripts: Any, peer: Any, *, wrong_after: bool = False) -> tuple[Any, Any]:
    operators = scripts("llama_operators")
    case = operators.Case("Q4_0", 512, 64, 9, 0, 0, "warm")
    operands = operators.Operands(case, "cpu", 0)
    if wrong_after:
        right, calls = operators._captured, iter(range(1 << 20))

        def captured(*args: Any) -> tuple[Callable[[], None], Any]:
            replay, outputs = right(*args)

            def fails_in_time() -> None:
                replay()
                if next(calls) > 20:
                    outputs[0][0] = 0

            return fails_in_time, outputs

        operators._captured = captured
    found: tuple[Any, Any] = operators.pair(case, operands, peer, blocks=6, launches=2, l2_bytes=1)
    return found


def test_the_peer_gets_the_blocks_that_ours_multiplies(scripts: Any) -> None:
    peer = FakePeer(us=1e6)
    record, found = pair(scripts, peer)
    assert record["arms"]["llama.cpp"]["error"] < 1e-6
    assert record["arms"]["tilewright"]["error"] < 1e-6
    assert (peer.opened["N"], peer.opened["repeats"], peer.opened["copies"]) == (512, 2, 1)
    assert found.verdict == "DISJOINT"
    assert record["blocks"][0]["us"]["llama.cpp"] == record["blocks"][0]["us"]["control"] == 1e6


@pytest.mark.parametrize("scale", [1.1, float("nan")])
def test_a_wrong_peer_is_not_timed(scripts: Any, scale: float) -> None:
    record, found = pair(scripts, FakePeer(us=1.0, scale=scale))
    assert found is None
    assert record["judgement"] is None
    assert "relative error" in record["failed"]["llama.cpp"]


def test_a_result_that_goes_wrong_while_it_is_timed_voids_the_product(scripts: Any) -> None:
    record, found = pair(scripts, FakePeer(us=1e6), wrong_after=True)
    assert record["arms"]["tilewright"]["error"] < 1e-6
    assert found.verdict == "VOID"
    assert "tilewright: relative error" in found.judgement.reasons[0]
    assert "error_after" in record["failed"]["tilewright"]


def run_blocks(scripts: Any, *, late_after: int = 99, fault: str = "", throttle: str = "") -> Any:
    """Ours twice as fast at prompts and half as fast at single tokens, on a drifting machine."""
    drift = iter(1.0 + 0.001 * i for i in range(1000))
    taken: list[str] = []

    def arm(name: str, prompt_us: float, token_us: float) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            taken.append(name)
            now = next(drift)
            return {"pp64": prompt_us * now, "tg8": token_us * now}

        return run

    arms = {"llama.cpp": arm("a", 200.0, 80.0), "tilewright": arm("b", 100.0, 160.0),
            "control": arm("a", 200.0, 80.0)}  # fmt: skip
    state = MachineState(throttle=(throttle,) if throttle else ())
    probe = SimpleNamespace(sample=lambda: state)
    found = list(scripts("llama_models").run_blocks(
        arms, 6, 0, probe, lambda: len(taken) >= 3 * late_after, lambda: fault
    ))  # fmt: skip
    return found, taken


def test_tests_of_a_model_are_judged_by_themselves(scripts: Any) -> None:
    found, taken = run_blocks(scripts)
    assert len(found) == 6
    assert taken.count("a") == 12
    tests = found[-1]
    assert list(tests) == ["pp64", "tg8"]
    assert tests["pp64"]["judgement"]["ratio"] == pytest.approx(2, rel=0.01)
    assert tests["pp64"]["judgement"]["verdict"] == "DISJOINT"
    assert tests["tg8"]["judgement"]["ratio"] == pytest.approx(0.5, rel=0.01)
    assert tests["tg8"]["tokens"] == 8
    # Position-balanced: in every three blocks each arm is once first, second and third.
    firsts = [block["order"][0] for block in tests["pp64"]["blocks"]]
    assert sorted(firsts[:3]) == sorted(firsts[3:]) == ["control", "llama.cpp", "tilewright"]


@pytest.mark.parametrize("cause", ["fault", "throttle"])
def test_a_model_that_changes_or_a_slowed_gpu_voids(scripts: Any, cause: str) -> None:
    found, _ = run_blocks(scripts, **{cause: "something happened"})
    judgement = found[-1]["pp64"]["judgement"]
    assert judgement["verdict"] == "VOID"
    assert "something happened" in judgement["reasons"][0]


def test_no_block_begins_late(scripts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found, taken = run_blocks(scripts, late_after=2)
    assert len(found) == 2
    assert len(taken) == 6
    assert "4 blocks were not reached" in capsys.readouterr().out
    assert found[-1]["pp64"]["judgement"]["verdict"] == "UNRESOLVED"


def model_run(scripts: Any, tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """A small synthetic model against a llama-bench that is slow and knows no weights."""
    made = scripts("synthetic_gguf")
    made.SHAPES["llama-3-8b"] = replace(
        made.SHAPES["llama-3-8b"], layers=2, hidden=256, feed_forward=512, heads=4, kv_heads=2,
        head_dim=64, vocabulary=320,
    )  # fmt: skip
    scripts("gguf_models").BARS["llama-3-8b"] = {"pp16": 2.0, "tg2": 1e9}
    rows = [bench_row(16, 0, 50_000_000_000), bench_row(0, 2, 50_000_000_000)]
    program(tmp_path / "llama-bench", f"print({json.dumps(json.dumps(rows))})")
    code = scripts("versus_llama_cpp").main([
        "--llama-bin", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--part", "model",
        "--synthetic", "llama-3-8b", "--prompts", "16", "--tokens", "2", "--check-tokens", "12",
        "--folder", str(tmp_path), "--out", str(tmp_path), "--name", "x", *words,
    ])  # fmt: skip
    (written,) = tmp_path.glob("*-x.json")
    return code, json.loads(written.read_text())


def test_a_model_is_checked_and_paired(scripts: Any, tmp_path: Path) -> None:
    code, result = model_run(scripts, tmp_path)
    assert code == 4  # of single tokens too much was asked
    model = result["model"]
    assert model["check"]["right"]
    assert model["options"] == "-fa 1 -ub 2048 -ngl 99 -p 16 -n 2"
    assert model["tests"]["pp16"]["judgement"]["verdict"] == "DISJOINT"
    assert len(model["tests"]["tg2"]["blocks"]) == 6
    bars = {bar["name"]: bar["holds"] for bar in result["bars"] if bar["holds"] is not None}
    assert bars == {"llama-3-8b, pp16": True, "llama-3-8b, tg2": False}
    assert not list(tmp_path.glob("*.gguf"))
    table = scripts("render_llama").versus_gpu_table(result, "llama-3-8b")
    assert "| pp16 | 0 (0-0) | " in table
    assert "paired blocks" in table


def test_fewer_layers_are_another_model(scripts: Any, tmp_path: Path) -> None:
    code, result = model_run(scripts, tmp_path, "--layers", "1", "--check-layers", "0")
    assert code == 0
    assert result["model"]["name"] == "llama-3-8b, 1 layers"
    assert not [bar for bar in result["bars"] if bar["holds"] is not None]


def test_a_wrong_model_is_not_timed(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = scripts("llama_models")
    monkeypatch.setattr(models, "check", lambda *_: {"right": False, "logits_error": 0.5})
    code, result = model_run(scripts, tmp_path)
    assert code == 3
    assert result["model"]["tests"] == {}


def product(op: str, kind: str, m: int, ratio: float, **changed: Any) -> dict[str, Any]:
    return {
        "id": f"{kind}-M{m}", "op": op, "type_name": kind, "M": m, "state": "warm",
        "judgement": {"ratio": ratio, "verdict": "DISJOINT"}, **changed,
    }  # fmt: skip


def holds(scripts: Any, name: str, *cases: dict[str, Any]) -> Any:
    bars = scripts("versus_llama_cpp").bars_of({"model": None, "cases": list(cases)})
    (found,) = [bar for bar in bars if bar.name == name]
    return found.holds


def test_what_products_must_reach(scripts: Any) -> None:
    wide, few = "512 rows: 3 times as fast, Q6_K 2.5 times", "M=8, one weight again and again"
    dense = "MUL_MAT"
    assert holds(
        scripts, wide, product(dense, "Q4_K", 512, 3.01), product(dense, "Q6_K", 512, 2.51)
    )
    assert not holds(
        scripts, wide, product(dense, "Q4_K", 512, 5), product(dense, "Q6_K", 512, 2.49)
    )
    assert not holds(scripts, wide, product(dense, "Q4_K", 512, 2.99))
    assert holds(scripts, few, product(dense, "Q4_K", 8, 1.11))
    assert not holds(scripts, few, product(dense, "Q4_K", 8, 1.09))
    assert holds(scripts, few, product(dense, "Q4_K", 8, 9, state="rotating")) is None
    assert holds(scripts, "M=8, in turn", product(dense, "Q4_K", 8, 9, state="rotating"))
    for tokens, least in ((128, 4.0), (512, 4.0)):
        name = f"experts, T={tokens}"
        assert holds(scripts, name, product("MUL_MAT_ID", "Q4_K", tokens, least + 0.01))
        assert not holds(scripts, name, product("MUL_MAT_ID", "Q4_K", tokens, least - 0.01))
    name = "experts, T=1, the same ones again and again"
    assert holds(scripts, name, product("MUL_MAT_ID", "Q4_K", 1, 1.01))
    assert not holds(scripts, name, product("MUL_MAT_ID", "Q4_K", 1, 0.99))


def test_a_void_or_failed_product_measures_nothing(scripts: Any) -> None:
    void = product("MUL_MAT", "Q4_K", 512, 9.0, judgement={"ratio": 9.0, "verdict": "VOID"})
    failed = product("MUL_MAT", "Q4_K", 512, 9.0, judgement=None)
    name = "512 rows: 3 times as fast, Q6_K 2.5 times"
    assert holds(scripts, name, void, failed) is None


def test_products_are_rendered_with_the_tools_figures(scripts: Any) -> None:
    us = {"llama.cpp": 346.04, "tilewright": 97.06, "control": 346.0}
    judgement = {"ratio": 3.565, "low": 3.5, "high": 3.6, "verdict": "DISJOINT"}
    arms = {"llama.cpp": {"error": 6e-3}, "tilewright": {"error": 2.4e-4}}
    cases = [
        {"id": "Q4_K-M512", "blocks": [{"us": us}] * 12, "judgement": judgement, "arms": arms},
        {"id": "Q4_K-M8", "blocks": [], "judgement": None,
         "arms": {"llama.cpp": {}, "tilewright": {}}},
    ]  # fmt: skip
    result = {
        "origin": {"date": "2030-01-02T03", "gpu": {"name": "NVIDIA H200"}, "device": "x"},
        "model": None, "cases": cases, "tool": [{"id": "Q4_K-M512", "us": 345.9}],
        "ggml": {"ggml": "0.26.0"},
    }  # fmt: skip
    render = scripts("render_llama")
    assert render.subjects_of(result) == ["products"]
    table = render.versus_gpu_table(result, "products")
    assert "| Q4_K-M512 | 346.0 | 97.1 | 3.56x (3.50-3.60) DISJOINT | 345.9 |" in table
    assert "| Q4_K-M8 | failed | failed |  |  |" in table
    assert "NVIDIA H200, 2030-01-02, ggml 0.26.0; median of 12 paired blocks" in table
    assert "llama.cpp 6.0e-03" in table
    judgement["verdict"] = "VOID"
    assert "| 97.1 | VOID |" in render.versus_gpu_table(result, "products")


def test_a_peer_says_what_it_cannot_do(scripts: Any, tmp_path: Path, ggml: Path) -> None:
    child = scripts("child")
    script = BENCHMARKS / "gpu" / "ggml_peer.py"
    with pytest.raises(MeasureError, match="peer: this llama.cpp sees no gpu"):
        child.Child("peer", [sys.executable, script, ggml, "gpu"])
    peer = child.Child("peer", [sys.executable, script, ggml, "cpu"])
    try:
        with pytest.raises(MeasureError, match="peer: nothing is open"):
            peer.ask("run", 1)
        paths = {"raw": tmp_path / "raw.npy", "x": tmp_path / "x.npy"}
        np.save(paths["raw"], np.zeros((4, 34), np.uint8))
        np.save(paths["x"], np.zeros((1, 64), np.float32))
        fields = {
            "type_name": "Q8_0", "N": 4, "K": 64, "repeats": 1, "ids": "", "copies": 1,
            "launches": 2, **{name: str(path) for name, path in paths.items()},
        }  # fmt: skip
        with pytest.raises(MeasureError, match="a tensor of 272 bytes was given 136"):
            peer.ask("open", fields)
    finally:
        peer.close()
