"""Tilewright against llama.cpp on one GPU: models and products, paired in one run.

    python benchmarks/gpu/versus_llama_cpp.py --llama-bin build/bin --synthetic llama-3-8b
    python benchmarks/gpu/versus_llama_cpp.py --llama-bin build/bin --model model.gguf --part model
    python benchmarks/gpu/versus_llama_cpp.py --llama-bin build/bin --part operators --types Q4_K

`--llama-bin` is the folder of a llama.cpp build for this GPU. CUDA's of an H200 is made by

    cmake -B build -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90 -DLLAMA_BUILD_TESTS=ON
    cmake --build build --target llama-bench test-backend-ops

1. "operators": products over the same blocks, rows and ids (`llama_operators.py`).
2. "model": both load the same file and run llama-bench's tests (`llama_models.py`). A synthetic
   file is made on the device, and ours is checked first, as `gguf_models.py` does.
3. "tool": what llama.cpp's own `test-backend-ops perf` says of the products of 1. It draws operands
   of its own, so nothing is paired with it: it says that the arm of 1. is no slower than it should
   be. Its rows of products with experts are one for each expert that a token meets.

Verdicts are those of `tilewright.measure`; those of the products are Holm-adjusted over all of
them. The result file is written after every block of a model and every product. A part that fails
is noted there, and the others go on.

Exit codes: 0 every measured bar holds, 1 an error, 3 a wrong model, 4 a bar was missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

import llama_cpp  # noqa: E402
import llama_models  # noqa: E402
import llama_operators as operators  # noqa: E402
import numpy as np  # noqa: E402
from bars import Bar, bar_of, bars_text, finite  # noqa: E402
from child import Child  # noqa: E402
from device import describe, versions  # noqa: E402
from ggml_peer import LibraryError, libraries_in  # noqa: E402
from gguf_models import BARS as MODEL_BARS  # noqa: E402
from llama_operators import BASE, OURS, Case  # noqa: E402
from record import RESULTS, origin, write  # noqa: E402
from synthetic_gguf import SHAPES  # noqa: E402

from tilewright.errors import MeasureError, TilewrightError  # noqa: E402
from tilewright.measure import Comparison, StateProbe, adjust_family  # noqa: E402

PARTS = ("operators", "model", "tool")
PROGRAMS = {"model": "llama-bench", "tool": "test-backend-ops"}
PREFILL = {name: 2.5 if name == "Q6_K" else 3.0 for name in operators.TYPES}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--llama-bin", type=Path, required=True, metavar="DIR", help="llama.cpp's programs")
    file = parser.add_mutually_exclusive_group()
    file.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file")
    file.add_argument("--synthetic", choices=sorted(SHAPES), help="make a file of such a shape")
    add("--part", choices=PARTS, action="append", help="default: all; a model if one is named")
    add("--blocks", type=int, default=6, help="paired blocks of the model")
    add("--prompts", default="4096,16384", help="tokens of each")
    add("--tokens", type=int, default=128, help="single tokens generated")
    add("--layers", type=int, help="of the synthetic file, fewer than the shape's")
    add("--check-layers", type=int, default=2, help="of the checked one; 0 leaves the check out")
    add("--check-tokens", type=int, default=4096)
    add("--check-vocabulary", type=int, default=8192)
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="of ours")
    add("--types", default=",".join(operators.TYPES), help="of matrices; '' for none")
    add("--rows", default=_joined(operators.ROWS))
    add("--shape", default="x".join(map(str, operators.SHAPE)), help="N x K of matrices")
    add("--expert-types", default="Q4_K", help="'' for none")
    add("--expert-tokens", default=_joined(operators.TOKENS))
    add("--experts", default=_joined((operators.EXPERTS, operators.USED, *operators.EXPERT_SHAPE)),
        help="how many, how many a token meets, N and K of each")  # fmt: skip
    add("--tool-types", help="of what the tool times; default: of all products")
    add("--product-blocks", type=int, default=12, help="paired blocks of a product")
    add("--launches", type=int, help="of a graph of products, instead of its own")
    add("--seconds", type=float, default=float("inf"), help="begin nothing after so long")
    add("--seed", type=int, default=0)
    add("--jobs", type=int, default=min(14, os.cpu_count() or 1), help="processes that compile")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="the CPU is for trying this")
    add("--folder", type=Path, help="where files are made; memory if there is")
    add("--out", type=Path, default=RESULTS)
    add("--name", default="h200-versus-llama-cpp", help="of the result file")
    args = parser.parse_args(words)
    named = args.model is not None or args.synthetic is not None
    args.part = args.part or [part for part in PARTS if part != "model" or named]
    if "model" in args.part and not named:
        parser.error("--part model needs --model FILE or --synthetic NAME")
    if args.model is not None and not args.model.is_file():
        parser.error(f"--model is {args.model}, which is no file")
    for name, blocks in (("--blocks", args.blocks), ("--product-blocks", args.product_blocks)):
        if blocks < 6:
            parser.error(f"{name} is {blocks}; fewer than 6 cannot be significant")
    try:
        args.prompts = _numbers(args.prompts)
        args.cases = _cases(args)
    except ValueError as error:
        parser.error(f"{error}; write numbers with ',' or, for --shape, 'x' between them")
    return args


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str, between: str = ",") -> list[int]:
    return [int(word) for word in text.split(between) if word]


def _cases(args: argparse.Namespace) -> list[Case]:
    n, k = _numbers(args.shape, "x")
    count, used, expert_n, expert_k = _numbers(args.experts)
    types, expert_types = (
        [name for name in text.split(",") if name] for text in (args.types, args.expert_types)
    )
    return operators.cases_of(
        types, _numbers(args.rows), expert_types, _numbers(args.expert_tokens),
        shape=(n, k), experts=(count, used, expert_n, expert_k),
    )  # fmt: skip


def need(args: argparse.Namespace) -> None:
    """That llama.cpp's folder holds what the parts of a run need.

    Raises:
        MeasureError: it does not.
    """
    for part in args.part:
        if part in PROGRAMS and not (args.llama_bin / PROGRAMS[part]).is_file():
            raise MeasureError(
                f"--llama-bin is {args.llama_bin}, which holds no {PROGRAMS[part]}; part {part!r} "
                "runs it: build it (see --help), or choose other parts with --part"
            )
    if "operators" in args.part:
        try:
            libraries_in(args.llama_bin)
        except LibraryError as error:
            raise MeasureError(f"--llama-bin: {error}") from error


class Run:
    """The result file of a run, written as it grows."""

    def __init__(self, args: argparse.Namespace, probe: StateProbe) -> None:
        self.args, self.probe = args, probe
        self.comparisons: list[Comparison] = []
        self._started = time.monotonic()
        whole = origin(os.cpu_count() or 1)
        if args.device == "cuda":
            whole["gpu"] = describe()
            whole["versions"] |= versions()
        self.result: dict[str, Any] = {
            "kind": "gpu-versus-llama-cpp", "title": "", "origin": whole,
            "kernels": kernels_of(args.device), "ggml": None,
            "settings": {"seed": args.seed, "blocks": args.blocks,
                         "product_blocks": args.product_blocks},
            "model": None, "cases": [], "tool": [], "failed": {}, "bars": [],
        }  # fmt: skip

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def late(self) -> bool:
        return self.seconds > self.args.seconds

    def keep_model(self, entry: dict[str, Any]) -> None:
        self.result["model"] = entry
        self.write()

    def keep_case(self, record: dict[str, Any], found: Comparison | None) -> None:
        """Note a product; all that were compared are judged anew, as one family."""
        self.result["cases"].append(record)
        if found is not None:
            self.comparisons.append(found)
            compared = [case for case in self.result["cases"] if case["judgement"] is not None]
            for case, one in zip(compared, adjust_family(self.comparisons), strict=True):
                case["judgement"] = one.to_dict()["judgement"]
        self.write()

    def write(self) -> Path:
        self.result["bars"] = [bar.to_dict() for bar in bars_of(self.result)]
        self.result["seconds"] = round(self.seconds, 1)
        return write(finite(self.result), self.args.name, self.args.out)


def kernels_of(device: str) -> dict[str, str]:
    """What identifies our kernels: a hash of the sources of each op."""
    import torch

    from tilewright.device import arch_of
    from tilewright.ops.choose import running

    arch = arch_of(torch.device(device))
    return {op: running(op, arch).kernel_hash for op in ("mmq", "moe")}


def compile_products(args: argparse.Namespace) -> None:
    """Launch every product once, in many processes: the compiler's cache is on disk."""
    jobs = [(case, args.device, args.seed) for case in args.cases if case.state == "warm"]
    if args.device == "cpu" or not jobs:
        return
    with multiprocessing.get_context("spawn").Pool(min(args.jobs, len(jobs))) as pool:
        for why in filter(None, pool.map(operators.launch_once, jobs, chunksize=1)):
            print(f"note: {why}", flush=True)


def operators_part(run: Run) -> None:
    """Pair every product; one that fails is recorded, and the others go on."""
    args = run.args
    compile_products(args)
    print(f"compiled at {run.seconds:.0f} s", flush=True)
    device = "gpu" if args.device == "cuda" else "cpu"
    command = [sys.executable, _HERE / "ggml_peer.py", args.llama_bin, device]
    l2_bytes = run.result["origin"].get("gpu", {}).get("l2_bytes", 1 << 20)
    operands, key = None, None
    peer = Child("llama.cpp's products", command)
    run.result["ggml"] = peer.first
    try:
        for at, case in enumerate(args.cases):
            if run.late():
                print(f"note: {len(args.cases) - at} products were not reached")
                return
            found = None
            try:
                if operands is None or key != (case.op, *case[:3]):
                    operands, key = None, (case.op, *case[:3])
                    operands = operators.Operands(case, args.device, args.seed)
                record, found = operators.pair(
                    case, operands, peer, blocks=args.product_blocks, seed=args.seed,
                    launches=args.launches, l2_bytes=l2_bytes, probe=run.probe,
                    folder=args.folder,
                )  # fmt: skip
            except Exception as error:  # of a kernel, or of the peer: others may still run
                record = operators.failed(case, error)
                peer.close()
                peer = Child("llama.cpp's products", command)
            run.keep_case(record, found)
            print(_line(record, found), flush=True)
    finally:
        peer.close()


def _line(record: dict[str, Any], found: Comparison | None) -> str:
    if found is None:
        return f"{record['id']}: failed: {record['failed']}"
    us = {arm: float(np.median(found.samples_us(arm))) for arm in (BASE, OURS)}
    errors = ", ".join(f"{row['error']:.1e}" for row in record["arms"].values())
    return f"{record['id']}: {us[BASE]:.2f} and {us[OURS]:.2f} us; {found}; errors {errors}"


def tool_part(run: Run) -> None:
    """What test-backend-ops says of the products that it has, too."""
    args = run.args
    types = [case.type_name for case in args.cases]
    wanted = args.tool_types.split(",") if args.tool_types else types
    cases = [case for case in args.cases if case.state == "warm" and case.type_name in wanted]
    warm = {(case.op, _ggml_name(case.type_name), str(case.M)): case.id for case in cases}
    found = llama_cpp.op_times(
        args.llama_bin / "test-backend-ops", ("MUL_MAT", "MUL_MAT_ID"), tool_pattern(cases),
        device="CPU" if args.device == "cpu" else None,
    )  # fmt: skip
    rows = [
        {**row, "id": warm.get((row["op"], row["parameters"]["type_a"], row["parameters"]["n"]))}
        for row in found
    ]
    run.result["tool"] = [row for row in rows if row["id"] is not None]


def tool_pattern(cases: Sequence[Case]) -> str:
    """A regular expression of test-backend-ops' parameters of these products."""
    parts = []
    for case in dict.fromkeys(case._replace(state="warm") for case in cases):
        begins = f"type_a={_ggml_name(case.type_name)},type_b=f32"
        sizes = f"m={case.N},n={case.M},k={case.K}"
        if case.experts:
            parts.append(
                f"{begins},n_mats={case.experts},n_used={case.used},b=0,{sizes},amax=1\\.0"
            )
        else:
            parts.append(f"{begins},{sizes},bs=\\[1,1\\],nr=\\[1,1\\],per=\\[0,1,2,3\\],k_v=0,o=1,")
    return f"^({'|'.join(parts)})"


def _ggml_name(type_name: str) -> str:
    """ "Q4_K" is "q4_K" to ggml, and "IQ4_NL" "iq4_nl"."""
    whole, _, last = type_name.partition("_")
    return f"{whole.lower()}_{last if last in ('K', '') else last.lower()}".rstrip("_")


def bars_of(result: dict[str, Any]) -> list[Bar]:
    """Every bar, those without a measurement among them; what is VOID measures nothing."""

    def of(op: str, rows: int, state: str, least: dict[str, float]) -> dict[str, float]:
        """How far ahead of llama.cpp, in units of what is asked for."""
        return {
            case["id"]: case["judgement"]["ratio"] / least.get(case["type_name"], 1.0)
            for case in result["cases"]
            if (case["op"], case["M"], case["state"]) == (op, rows, state)
            and case["judgement"] is not None and case["judgement"]["verdict"] != "VOID"
        }  # fmt: skip

    model = result["model"] or {"name": "", "tests": {}}
    bars = []
    for name, asked in MODEL_BARS.get(model["name"], {}).items():
        judgement = model["tests"].get(name, {}).get("judgement", {"verdict": "VOID"})
        found = {} if judgement["verdict"] == "VOID" else {name: judgement["ratio"]}
        bars.append(bar_of(f"{model['name']}, {name}", found, asked, asked))
    wide = of("MUL_MAT", 512, "warm", PREFILL)
    bars.append(bar_of("512 rows: 3 times as fast, Q6_K 2.5 times", wide, 1.0, 1.0))
    for m in (1, 8):
        for state, words in (("warm", "one weight again and again"), ("rotating", "in turn")):
            bars.append(bar_of(f"M={m}, {words}", of("MUL_MAT", m, state, {}), 1.1, 1.1))
    for t in (1, 8):
        for state, words in (("warm", "the same ones again and again"), ("rotating", "in turn")):
            few = of("MUL_MAT_ID", t, state, {})
            bars.append(bar_of(f"experts, T={t}, {words}", few, 1.0, 1.0))
    bars += [
        bar_of(f"experts, T={t}", of("MUL_MAT_ID", t, "warm", {}), 4.0, 4.0) for t in (128, 512)
    ]
    return bars


def run_part(run: Run, part: str) -> int:
    """0, or an exit code; what goes wrong is noted in the result."""
    try:
        if part == "operators":
            operators_part(run)
        elif part == "tool":
            tool_part(run)
        elif not llama_models.measure_model(run.args, run.probe, run.late, run.keep_model):
            print("error: our model is wrong; it was not timed", file=sys.stderr)
            return 3
    except Exception as error:
        if not isinstance(error, TilewrightError):
            traceback.print_exc()
        run.result["failed"][part] = f"{type(error).__name__}: {error}"[:300]
        print(f"error: part {part!r}: {error}", file=sys.stderr)
        return 1
    return 0


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    try:
        need(args)
        gpu = None
        if args.device == "cuda":
            from tilewright.measure import EventClock

            gpu = EventClock().device_id
        run = Run(args, StateProbe(gpu=gpu))
    except TilewrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    codes = [run_part(run, part) for part in PARTS if part in args.part and not run.late()]
    path = run.write()
    bars = [bar for bar in bars_of(run.result) if bar.holds is not None]
    print(f"{bars_text(bars)}\n{path.name}, {run.result['seconds']} s")
    if any(codes):
        return max(codes)
    return 4 if any(bar.holds is False for bar in bars) else 0


if __name__ == "__main__":
    sys.exit(main())
