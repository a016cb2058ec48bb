"""Tilewright against llama.cpp and transformers: one paired run on one machine and one file.

Arms: llama.cpp (llama-bench), Tilewright weight-only ("float"), Tilewright with 8-bit activations
("int8"), transformers in float32 on the dequantized checkpoint. A block runs every arm once, and
llama.cpp once more as the control, in random position-balanced order. Ratios are medians over
blocks with bootstrap intervals; verdicts are those of `tilewright.measure`, Holm-adjusted over
the family of one test. Before and after, every arm's logits are held against transformers'.

    python benchmarks/versus_llama_cpp.py model.gguf --llama-bench path/to/llama-bench
    python benchmarks/versus_llama_cpp.py model.gguf --build build/llama.cpp
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import record
import render
from arms import LlamaCppArm, WorkerArm, check_idle

from tilewright.errors import TilewrightError
from tilewright.measure import ReportedClock, SamplePlan, StateProbe, compare_many, judge
from tilewright.measure.sample import Block
from tilewright.measure.stats import holm, sign_test

ENGINES = ("float", "int8", "transformers")
BASELINES = ("llama.cpp", "transformers")
# Largest squared error of the logits against transformers', over their variance.
LOGITS_NMSE = {"float": 1e-6, "int8": 2e-2}
_CHECK_IDS = 64


def main() -> int:
    args = _arguments()
    try:
        result = run(args)
    except TilewrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    path = record.write(result, f"cpu-versus-llama-cpp-{record.slug(args.model)}", args.results)
    print(render.versus_table(result))
    print(f"\nwrote {path}", file=sys.stderr)
    return 6 if any(row["verdict"] == "VOID" for row in _judgements(result)) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--llama-bench", type=Path, help="path of the llama-bench program")
    source.add_argument("--build", type=Path, metavar="DIR", help="build llama.cpp in this folder")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--tests", nargs="+", default=["pp512", "tg64"], metavar="TEST")
    parser.add_argument("--blocks", type=int, default=20, help="blocks a test, at least 6")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=record.RESULTS, metavar="DIR")
    args = parser.parse_args()
    if not args.model.is_file():
        parser.error(f"{args.model} is not a file")
    if args.llama_bench is not None and not args.llama_bench.is_file():
        parser.error(f"{args.llama_bench} is not a file")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the arms, run every test, return the result file's content."""
    binary = args.llama_bench or llama_cpp.build(args.build)
    llama = LlamaCppArm(binary.resolve(), args.model, args.threads)
    with ExitStack() as stack:
        workers: dict[str, WorkerArm] = {}
        for engine in args.engines:
            print(f"loading {engine}", file=sys.stderr)
            workers[engine] = WorkerArm(engine, args.model.resolve(), args.threads)
            stack.callback(workers[engine].close)
        for test in args.tests:
            for worker in workers.values():
                worker.launch(test)()
                worker.launch(test)()
        idle = check_idle(list(workers.values()))
        origin = record.origin(args.threads)
        tests = {test: _test(test, llama, workers, args) for test in args.tests}
        arms = {llama.engine: llama.describe()}
        arms |= {engine: worker.describe() for engine, worker in workers.items()}
        return {
            "kind": "versus-llama-cpp",
            "origin": origin,
            "model": record.model_record(args.model),
            "arms": arms,
            "cpu_share_while_waiting": idle,
            "logits_nmse": logits_errors(workers),
            "tests": tests,
        }


def _test(
    test: str, llama: LlamaCppArm, workers: dict[str, WorkerArm], args: argparse.Namespace
) -> dict[str, Any]:
    blocks: list[Block] = []

    def on_block(block: Block) -> None:
        blocks.append(block)
        rates = ", ".join(f"{k} {_rate(test, us):.0f}" for k, us in sorted(block.us.items()))
        print(f"{test} {len(blocks)}/{args.blocks}: {rates} tok/s", file=sys.stderr)

    comparisons = compare_many(
        llama.launch(test),
        {engine: worker.launch(test) for engine, worker in workers.items()},
        baseline_name=llama.engine,
        blocks=args.blocks,
        clock=ReportedClock(),
        plan=SamplePlan(),
        seed=args.seed,
        probe=StateProbe(pids=tuple(worker.pid for worker in workers.values())),
        post_check=lambda: _logits_fault(workers),
        on_block=on_block,
        warm_up_us=0.0,
    )
    first = next(iter(comparisons.values()))
    void = [r for r in first.judgement.reasons if first.verdict == "VOID"]
    return {
        "tokens": int(test[2:]),
        "settings": first.settings,
        "interrupted": first.interrupted,
        "others_share": float(
            np.median([b.state.others or 0.0 for b in blocks if b.state] or [0.0])
        ),
        "judgements": judgements(blocks, list(workers), void, seed=args.seed),
        "blocks": [block.to_dict() for block in blocks],
    }


def judgements(
    blocks: list[Block], engines: list[str], void: list[str], *, seed: int
) -> list[dict[str, Any]]:
    """Every engine against each baseline; one family for Holm.

    llama.cpp's second run is the control of both baselines: it says how much the machine itself
    moved within a block.
    """
    us = {name: np.array([block.us[name] for block in blocks]) for name in blocks[0].us}
    unrest = us["control"] / us["llama.cpp"]
    pairs = [
        (a, b) for a in BASELINES for b in engines if a in us and b != a and not _backwards(a, b)
    ]
    family = holm([float(sign_test(np.log(us[a] / us[b]))) for a, b in pairs])
    rows = []
    for (a, b), p in zip(pairs, family, strict=True):
        found = judge(us[a], us[b], us[a] * unrest, seed=seed, p_adjusted=p, void=void)
        figures = {"ratio": found.ratio, "low": found.low, "high": found.high}
        control = [found.control, found.control_low, found.control_high]
        rows.append(
            {
                "a": a,
                "b": b,
                "verdict": str(found.verdict),
                **figures,
                "p": found.p,
                "p_adjusted": found.p_adjusted,
                "control": control,
                "reasons": list(found.reasons),
            }
        )
    return rows


def _backwards(a: str, b: str) -> bool:
    """transformers against llama.cpp is stated once, not in both directions."""
    return a == "transformers" and b == "llama.cpp"


def logits_errors(workers: dict[str, WorkerArm]) -> dict[str, float]:
    """Squared error of each engine's logits against transformers', over their variance."""
    if "transformers" not in workers:
        return {}
    ids = np.random.default_rng(0).integers(0, 1000, _CHECK_IDS).tolist()
    right = workers["transformers"].logits(ids).astype(np.float64)
    scale = float(np.mean((right - right.mean()) ** 2))
    return {
        engine: float(np.mean((worker.logits(ids) - right) ** 2)) / scale
        for engine, worker in workers.items()
        if engine != "transformers"
    }


def _logits_fault(workers: dict[str, WorkerArm]) -> str | None:
    for engine, error in logits_errors(workers).items():
        if not error <= LOGITS_NMSE[engine]:
            return f"logits of {engine} are off by {error:.2g} (limit {LOGITS_NMSE[engine]:g})"
    return None


def _rate(test: str, us: float) -> float:
    return int(test[2:]) / us * 1e6


def _judgements(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for test in result["tests"].values() for row in test["judgements"]]


if __name__ == "__main__":
    sys.exit(main())
