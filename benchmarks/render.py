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
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_BLOCK = re.compile(
    r"(?P<open><!-- results:(?P<name>[a-z0-9-]+) -->\n)(?P<body>.*?)(?P<close><!-- /results -->)",
    re.DOTALL,
)
_BUSY = 0.05  # share of CPU time that other programs may use in silence
_ENGINES = {
    "llama.cpp": "llama.cpp",
    "float": "Tilewright, weight-only",
    "int8": "Tilewright, 8-bit activations",
    "transformers": "transformers, float32",
}


class RenderError(Exception):
    """A marker names results that do not exist."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


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


_KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "versus-llama-cpp": versus_table,
    "quality": quality_table,
}


def newest(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The newest result of `kind` for each model file, by model name.

    Raises:
        RenderError: there is none, or the kind is unknown.
    """
    if kind not in _KINDS:
        raise RenderError(f"results:{kind} names no kind of result; known are {', '.join(_KINDS)}")
    latest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("kind") == kind:
            file = result["model"]["file"]
            if file not in latest or result["origin"]["date"] >= latest[file]["origin"]["date"]:
                latest[file] = result
    if not latest:
        raise RenderError(f"results:{kind}: no result of that kind lies in {folder}")
    return [latest[file] for file in sorted(latest)]


def render(text: str, folder: Path) -> str:
    """`text` with every marked block replaced by what the result files say.

    Raises:
        RenderError: a marker names no result, or `text` has no complete marker.
    """
    if text.count("<!-- results:") != len(_BLOCK.findall(text)):
        raise RenderError("a results marker is malformed or lacks its <!-- /results -->")

    def fill(match: re.Match[str]) -> str:
        show = _KINDS.get(match["name"], versus_table)  # `newest` refuses an unknown name
        tables = "\n\n".join(show(result) for result in newest(folder, match["name"]))
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
