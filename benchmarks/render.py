"""Render the README's tables from results/*.json, so that no figure there is typed by hand.

Between `<!-- results:NAME -->` and `<!-- /results -->` stands what the newest result files of
kind NAME say, one table a model:

    python benchmarks/render.py             rewrite README.md
    python benchmarks/render.py --check     exit 4 if README.md is not what the files say
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

from render_gpu import (  # noqa: E402
    against_table,
    bars_table,
    gguf_model_table,
    hybrid_table,
    ladder_table,
    real_model_table,
)
from render_llama import subjects_of, versus_gpu_table  # noqa: E402
from tables import markdown  # noqa: E402

_BLOCK = re.compile(
    r"(?P<open><!-- results:(?P<name>[a-z0-9-]+) -->\n)(?P<body>.*?)(?P<close><!-- /results -->)",
    re.DOTALL,
)
_BARS = "gpu-bars"  # what was asked of all kinds of GPU results
_BUSY = 0.05  # share of CPU time that other programs may use in silence
_ENGINES = {
    "llama.cpp": "llama.cpp",
    "float": "Tilewright, weight-only",
    "int8": "Tilewright, 8-bit activations",
    "transformers": "transformers, float32",
}


class RenderError(Exception):
    """A marker names results that do not exist."""


def versus_table(result: dict[str, Any]) -> str:
    """Rates, ratios and verdicts of one run against llama.cpp and transformers."""
    tests: dict[str, dict[str, Any]] = result["tests"]
    header = ["engine"]
    for name in tests:
        header += [f"{name} tok/s", "vs llama.cpp", "vs transformers"]
    rows = []
    for engine in result["arms"]:
        row = [_ENGINES[engine]]
        for test in tests.values():
            rates = [test["tokens"] / block["us"][engine] * 1e6 for block in test["blocks"]]
            row.append(f"{statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})")
            row += [_ratio(test["judgements"], a, engine) for a in ("llama.cpp", "transformers")]
        rows.append(row)
    origin = result["origin"]
    blocks = "/".join(str(len(test["blocks"])) for test in tests.values())
    note = (
        f"`{result['model']['file']}` on {origin['device']}, {origin['threads']} threads, "
        f"{origin['date'][:10]}; median (range) of {blocks} blocks in random order; ratio above "
        "1 is faster, with its 95 % interval."
    )
    busy = max(test["others_share"] for test in tests.values())
    if busy > _BUSY:
        note += f" The machine was busy: other programs used {busy:.0%} of its CPU time."
    return f"{markdown(header, rows)}\n\n{note}"


def _ratio(judgements: Sequence[dict[str, Any]], a: str, b: str) -> str:
    for row in judgements:
        if (row["a"], row["b"]) == (a, b):
            if row["verdict"] == "VOID":
                return "VOID"
            interval = f"{row['low']:.2f}-{row['high']:.2f}"
            return f"{row['ratio']:.2f}x ({interval}) {row['verdict']}"
    return ""


def quality_table(result: dict[str, Any]) -> str:
    """Perplexity and greedy agreement with the float32 reference."""
    right = result["perplexity"]["transformers"]["value"]
    header = ["engine", "perplexity", "vs float32", "greedy ids identical", "first differences"]
    rows = []
    for engine, entry in result["perplexity"].items():
        deviation = "" if engine == "transformers" else f"{entry['value'] / right - 1:+.2%}"
        row = [
            _ENGINES[engine],
            f"{entry['value']:.4f} +/- {entry['standard_error']:.4f}",
            deviation,
            *_greedy_cells(result["greedy"].get(engine)),
        ]
        rows.append(row)
    origin, count = result["origin"], len(result["prompts"])
    note = (
        f"`{result['model']['file']}` on {origin['device']}, {origin['date'][:10]}; "
        f"{result['settings']['chunks']} chunks of {result['settings']['context']} tokens of "
        f"{result['settings']['text']}; {count} prompts of {result['settings']['new_tokens']} "
        "greedy tokens; a gap is the distance of the reference's two best logits where the ids "
        "part."
    )
    return f"{markdown(header, rows)}\n\n{note}"


def _greedy_cells(prompts: Sequence[dict[str, Any]] | None) -> list[str]:
    if prompts is None:
        return ["", ""]
    same = sum(prompt["identical"] for prompt in prompts)
    parts = [
        f"token {prompt['first_difference']} (gap {prompt['reference_gap']:.4f})"
        for prompt in prompts
        if not prompt["identical"]
    ]
    return [f"{same} of {len(prompts)}", ", ".join(parts) or "none"]


_ARMS = {
    "cublas/float16": "cuBLAS fp16",
    "humming/float16": "Humming",
    "gemlite/float16": "gemlite",
    "tinygemm/bfloat16": "torch int4, bf16",
    "triton/float16": "portable Triton",
    "triton/bfloat16": "portable Triton bf16",
    "tilewright/float16": "Tilewright fp16",
    "tilewright/bfloat16": "Tilewright bf16",
}
_CACHES = {"prefill": "cold", "small": "cold", "decode": "rotating"}
_CACHE_WORDS = {
    "cold": "the L2 flushed before each launch",
    "rotating": "launches in turn over copies of the weight that no L2 holds together",
}


def gpu_table(result: dict[str, Any], part: str) -> str:
    """Times of every arm of one part of a GPU run, and what the bars of that part say."""
    if part.startswith("ladder"):
        return _gpu_ladder(result, part)
    cases = [case for case in result["cases"] if part in (case["part"], _subject(case))]
    part = part.partition(",")[0]
    if part == "error":
        return _gpu_errors(result, cases)
    cache = _CACHES[part]
    arms = [arm for arm in _ARMS if any(_us(case, cache, arm) for case in cases)]
    ours = "tilewright/float16" if "tilewright/float16" in arms else "triton/float16"
    peers = [peer for peer in ("cublas/float16", "humming/float16") if peer in arms]
    header = ["N x K, M", *(f"{_ARMS[arm]} us" for arm in arms)]
    header += [f"vs {_ARMS[peer].removesuffix(' fp16')}" for peer in peers]
    rows = []
    for case in cases:
        cells = [f"{case['N']} x {case['K']}, {case['M']}"]
        for arm in arms:
            us = _us(case, cache, arm)
            wrong = "failed" if arm in case["failed"] else ""
            cells.append(f"{statistics.median(us):.1f}" if us else wrong)
        cells += [_faster(case, cache, peer, ours) for peer in peers]
        rows.append(cells)
    gpu = result["origin"]["gpu"]
    note = (
        f"{gpu['name']}, {result['origin']['date'][:10]}; median of {_blocks(cases, cache)} blocks "
        f"in random order, {_CACHE_WORDS[cache]}; a ratio above 1 is {_ARMS[ours]} being faster."
    )
    return f"{markdown(header, rows)}\n\n{note}"


def _us(case: dict[str, Any], cache: str, arm: str) -> list[float]:
    if arm in case["failed"] or cache not in case:
        return []
    return [block["us"][arm] for block in case[cache]["blocks"] if arm in block["us"]]


def _faster(case: dict[str, Any], cache: str, peer: str, arm: str) -> str:
    theirs, ours = _us(case, cache, peer), _us(case, cache, arm)
    if not theirs or not ours:
        return ""
    return f"{statistics.median(a / b for a, b in zip(theirs, ours, strict=True)):.2f}x"


def _blocks(cases: Sequence[dict[str, Any]], cache: str) -> str:
    return "/".join(sorted({str(len(case[cache]["blocks"])) for case in cases if cache in case}))


def _gpu_ladder(result: dict[str, Any], part: str) -> str:
    """What each rung of a ladder is worth; `part` is "ladder" and the ladder's title."""
    cases = [case for case in result["cases"] if case["part"] == "ladder"]
    arms = list(dict.fromkeys(arm for case in cases for arm in case["arms"]))
    header = [part.removeprefix("ladder ")]
    for case in cases:
        name = f"{case['N']} x {case['K']}, M = {case['M']}"
        header += [f"{name}: us", "vs the base", "vs the one before"]
    rows = []
    for arm in arms:
        cells = [arm.replace("/", ", ")]
        for case in cases:
            us = _us(case, "cold", arm)
            base = case["cold"]["baseline"]
            stands = _stands(case, arms, arm)
            first = stands.pop(base, "")
            before = next(iter(stands.values()), "")
            cells += [f"{statistics.median(us):.1f}" if us else "failed", first, before]
        rows.append(cells)
    gpu = result["origin"]["gpu"]
    note = (
        f"{gpu['name']}, {result['origin']['date'][:10]}; median of {_blocks(cases, 'cold')} "
        f"blocks in random order, {_CACHE_WORDS['cold']}; ratio above 1 is faster."
    )
    return f"{markdown(header, rows)}\n\n{note}"


def _stands(case: dict[str, Any], arms: Sequence[str], arm: str) -> dict[str, str]:
    """How an arm stands to the base and to the arm before it; with verdicts if they were kept."""
    if "pairs" in case:
        return {
            row["a"]: f"{row['ratio']:.3f}x {row['verdict']}"
            for row in case["pairs"]
            if row["b"] == arm
        }
    base = case["cold"]["baseline"]
    before = arms[arms.index(arm) - 1] if arm in arms[1:] else base
    found = {}
    for other in (base, before):
        theirs, ours = _us(case, "cold", other), _us(case, "cold", arm)
        # The first arm of the control has no arm of its own kind before it.
        alike = other == base or other.startswith("control") == arm.startswith("control")
        if other != arm and alike and theirs and ours:
            times = (a / b for a, b in zip(theirs, ours, strict=True))
            found[other] = f"{statistics.median(times):.3f}x"
    return found


def _gpu_errors(result: dict[str, Any], cases: Sequence[dict[str, Any]]) -> str:
    worst: dict[str, float] = {}
    for case in cases:
        for arm, row in case["arms"].items():
            error = float("inf") if row["error"] is None else row["error"]
            worst[arm] = max(worst.get(arm, 0.0), error)
    rows = [[_ARMS.get(arm, arm), f"{error:.1e}"] for arm, error in sorted(worst.items())]
    note = (
        f"{result['origin']['gpu']['name']}, {result['origin']['date'][:10]}; relative Frobenius "
        f"error against float64 products of the exact weights, the worst of {len(cases)} products, "
        "plain and replayed from a CUDA graph."
    )
    return f"{markdown(['kernel', 'worst relative error'], rows)}\n\n{note}"


def gpu_model_table(result: dict[str, Any], subject: str) -> str:
    """Time to the first token of each arm of the synthetic model."""
    rows = []
    for arm in result["arms"]:
        name = arm["name"]
        us = [block["us"][name] for block in result["blocks"] if name in block["us"]]
        stands = [
            f"{row['ratio']:.3f}x ({row['low']:.3f}-{row['high']:.3f}) "
            f"{row['verdict']} of {row['a']}"
            for row in result["judgements"]
            if row["b"] == name
        ]
        time = f"{statistics.median(us) / 1e3:.2f}" if us else "wrong"
        rows.append([name, time, "; ".join(stands)])
    note = (
        f"{subject}, {result['input_len']} tokens in, on {result['origin']['gpu'].get('name')}, "
        f"{result['origin']['date'][:10]}; median of {len(result['blocks'])} blocks in random "
        "order; ratio above 1 is faster, with its 95 % interval."
    )
    return f"{markdown(['change set', 'TTFT ms', 'against'], rows)}\n\n{note}"


@dataclass(frozen=True)
class _Kind:
    """How a kind of result is shown: a table for each of its subjects."""

    show: Callable[[dict[str, Any], str], str]
    subjects: Callable[[dict[str, Any]], list[str]]


def _model_file(result: dict[str, Any]) -> list[str]:
    return [result["model"]["file"]]


def _parts(result: dict[str, Any]) -> list[str]:
    if all(case["part"] == "ladder" for case in result["cases"]):
        file = re.search(r"--ladder (\S+?)(\.toml)?( |$)", result["origin"].get("command", ""))
        return [f"ladder {result.get('title') or (file[1] if file else '')}"]
    return list(dict.fromkeys(_subject(case) for case in result["cases"]))


def _subject(case: dict[str, Any]) -> str:
    """Its part; those of the portable kernel alone, and of one shape of few rows, are apart."""
    if case["part"] == "decode":
        return f"decode, {case['N']} x {case['K']}"
    alone = case["part"] != "error" and "tilewright/float16" not in case["arms"]
    return f"{case['part']}, portable" if alone else str(case["part"])


def _measured_parts(result: dict[str, Any]) -> list[str]:
    timed = [case for case in result["cases"] if case.get("cold") or case.get("rotating")]
    return list(dict.fromkeys(case.get("part", "") for case in timed))


_KINDS = {
    "versus-llama-cpp": _Kind(lambda result, _: versus_table(result), _model_file),
    "quality": _Kind(lambda result, _: quality_table(result), _model_file),
    "gpu-w4a16": _Kind(gpu_table, _parts),
    "gpu-w4a16-model": _Kind(gpu_model_table, _model_file),
    "gpu-mmq": _Kind(against_table, _measured_parts),
    "gpu-moe": _Kind(against_table, _measured_parts),
    "gpu-ssd": _Kind(against_table, _measured_parts),
    "gpu-ladder": _Kind(ladder_table, lambda result: [result["title"]]),
    "gpu-gguf-model": _Kind(gguf_model_table, lambda result: [result["model"]["name"]]),
    "gpu-hybrid-decode": _Kind(hybrid_table, lambda result: [result["model"]["name"]]),
    "gpu-quality": _Kind(real_model_table, _model_file),
    "gpu-versus-llama-cpp": _Kind(versus_gpu_table, subjects_of),
}


def newest(folder: Path, kind: str) -> dict[str, dict[str, Any]]:
    """The newest result of `kind` for each subject: a model's file, or a part of a GPU run.

    Raises:
        RenderError: there is none, or the kind is unknown.
    """
    if kind not in _KINDS:
        raise RenderError(f"results:{kind} names no kind of result; known are {', '.join(_KINDS)}")
    latest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("kind") != kind:
            continue
        for subject in _KINDS[kind].subjects(result):
            old = latest.get(subject)
            if old is None or result["origin"]["date"] >= old["origin"]["date"]:
                latest[subject] = result
    if not latest:
        raise RenderError(f"results:{kind}: no result of that kind lies in {folder}")
    return {subject: latest[subject] for subject in sorted(latest)}


def _with_bars(folder: Path) -> list[dict[str, Any]]:
    """Results of GPUs that state what was asked of them, by date.

    Raises:
        RenderError: there is none.
    """
    read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found = [
        result for result in read
        if result.get("kind") == "gpu-gguf-model"
        or (result.get("kind") in _KINDS and result.get("bars"))
    ]  # fmt: skip
    if not found:
        raise RenderError(f"results:{_BARS}: no result with bars lies in {folder}")
    return sorted(found, key=lambda result: str(result["origin"]["date"]))


def render(text: str, folder: Path) -> str:
    """`text` with every marked block replaced by what the result files say.

    Raises:
        RenderError: a marker names no result, or `text` has no complete marker.
    """
    if text.count("<!-- results:") != len(_BLOCK.findall(text)):
        raise RenderError("a results marker is malformed or lacks its <!-- /results -->")

    def fill(match: re.Match[str]) -> str:
        if match["name"] == _BARS:
            return f"{match['open']}{bars_table(_with_bars(folder))}\n{match['close']}"
        found = newest(folder, match["name"])
        show = _KINDS[match["name"]].show
        tables = "\n\n".join(show(result, subject) for subject, result in found.items())
        return f"{match['open']}{tables}\n{match['close']}"

    return _BLOCK.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=_HERE.parent / "README.md")
    parser.add_argument("--results", type=Path, default=_HERE / "results")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 4 if stale")
    args = parser.parse_args()
    text = args.file.read_text()
    try:
        fresh = render(text, args.results)
    except RenderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if fresh == text:
        return 0
    if args.check:
        print(f"{args.file} is not what {args.results} says; run render.py", file=sys.stderr)
        return 4
    args.file.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
