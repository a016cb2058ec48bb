"""Does a quantized model still say the same? Greedy ids and perplexity against float32.

The reference is the same checkpoint dequantized to float32 in plain transformers. Greedy ids of
each prompt are identical to the reference's, or the first difference is stated with the distance
of the reference's two best logits there. Perplexity is counted as llama-perplexity counts it.
Exit code 3: other ids in the weight-only path, or a perplexity off by more than it may be.

    python benchmarks/quality.py model.gguf --prompts prompts.json --text wikitext2-test.txt \\
        --llama-perplexity path/to/llama-perplexity

The prompts' file holds {"model": file name, "prompts": [{"prompt", "prompt_ids", "greedy_ids",
"top2_gap"}, ...]}; ids and gaps are another engine's on that model and are used only there.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp
import record
import render
import torch
from reference import Greedy, greedy, load_reference

import tilewright
from tilewright.errors import TilewrightError
from tilewright.model.evaluate import perplexity, text_ids
from tilewright.model.generate import decoder_for

ENGINES = ("transformers", "float", "int8")
# Largest relative deviation of the perplexity: of the weight-only path from float32, and of the
# 8-bit-activation path from llama.cpp, which quantizes activations alike.
FLOAT_LIMIT = 0.002
INT8_LIMIT = 0.005


def main() -> int:
    args = _arguments()
    torch.set_num_threads(args.threads)
    try:
        result = run(args)
    except TilewrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    path = record.write(result, f"quality-{record.slug(args.model)}", args.results)
    print(render.quality_table(result))
    print(f"\nwrote {path}", file=sys.stderr)
    for fault in result["faults"]:
        print(f"fault: {fault}", file=sys.stderr)
    return 3 if result["faults"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON file of prompts")
    parser.add_argument("--text", type=Path, required=True, help="text for perplexity")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=512, help="tokens a chunk")
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("-t", "--threads", type=int, default=2)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--llama-perplexity", type=Path, help="path of that program, to run it")
    given.add_argument("--llama-value", type=float, help="its value, from a run elsewhere")
    parser.add_argument("--results", type=Path, default=record.RESULTS, metavar="DIR")
    args = parser.parse_args()
    for path in (args.model, args.prompts, args.text, args.llama_perplexity):
        if path is not None and not path.is_file():
            parser.error(f"{path} is not a file")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every engine in turn, one model in memory at a time."""
    origin = record.origin(args.threads)
    text = args.text.read_text(encoding="utf-8")
    scores: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[Greedy]] = {}
    prompts: list[dict[str, Any]] = []
    same_ids = None
    for engine in ENGINES:
        print(f"{engine}: loading", file=sys.stderr)
        if engine == "transformers":
            model, tokenizer = load_reference(args.model)
            prompts = _prompts(args, tokenizer)
            reference_ids = text_ids(tokenizer, text[:100_000])
        else:
            model, tokenizer = tilewright.load(args.model, activations=engine)
            same_ids = text_ids(tokenizer, text[:100_000]) == reference_ids
        print(f"{engine}: {len(prompts)} prompts", file=sys.stderr)
        run_greedy = greedy if engine == "transformers" else decode
        texts[engine] = [run_greedy(model, p["prompt_ids"], args.new_tokens) for p in prompts]
        print(f"{engine}: perplexity", file=sys.stderr)
        score = perplexity(model, tokenizer, text, context=args.context, chunks=args.chunks)
        scores[engine] = asdict(score)
        del model, tokenizer
        gc.collect()
    llama = _llama_cpp(args)
    if llama is not None:
        scores["llama.cpp"] = llama
    compared: dict[str, list[dict[str, Any]]] = {
        engine: [
            compare_ids(ids, right)
            for ids, right in zip(texts[engine], texts["transformers"], strict=True)
        ]
        for engine in ENGINES[1:]
    }
    if all("greedy_ids" in prompt for prompt in prompts):
        compared["llama.cpp"] = [
            compare_ids(Greedy(p["greedy_ids"][: args.new_tokens], p["top2_gap"]), right)
            for p, right in zip(prompts, texts["transformers"], strict=True)
        ]
    return {
        "kind": "quality",
        "origin": origin,
        "model": record.model_record(args.model),
        "settings": {
            "text": args.text.name,
            "context": args.context,
            "chunks": args.chunks,
            "new_tokens": args.new_tokens,
        },
        "tokenizers_agree": same_ids,
        "prompts": [{key: p[key] for key in ("prompt", "prompt_ids")} for p in prompts],
        "reference": [asdict(text) for text in texts["transformers"]],
        "greedy": compared,
        "perplexity": scores,
        "faults": faults(compared, scores),
    }


def faults(
    compared: dict[str, list[dict[str, Any]]], scores: dict[str, dict[str, Any]]
) -> list[str]:
    """What breaks a promise: other greedy ids than float32's in the weight-only path, or a
    perplexity too far from that of the engine it should match."""
    found = [
        f"float: prompt {index} parts from the reference at token {row['first_difference']}"
        for index, row in enumerate(compared["float"])
        if not row["identical"]
    ]
    for engine, right, limit in (
        ("float", "transformers", FLOAT_LIMIT),
        ("int8", "llama.cpp", INT8_LIMIT),
    ):
        if right not in scores:
            continue
        deviation = scores[engine]["value"] / scores[right]["value"] - 1
        if not abs(deviation) <= limit:
            found.append(f"{engine}: perplexity is {deviation:+.2%} off {right}, limit {limit:.1%}")
    return found


def _prompts(args: argparse.Namespace, tokenizer: Any) -> list[dict[str, Any]]:
    """The file's prompts; ids made for another model are made anew."""
    content = json.loads(args.prompts.read_text(encoding="utf-8"))
    if content["model"] == args.model.name:
        return list(content["prompts"])
    return [
        {"prompt": p["prompt"], "prompt_ids": list(tokenizer(p["prompt"])["input_ids"])}
        for p in content["prompts"]
    ]


@torch.inference_mode()
def decode(model: Any, prompt_ids: Sequence[int], count: int) -> Greedy:
    """`count` greedy ids by the model's own decoder; no id ends the text."""
    decoder = decoder_for(model)
    logits = decoder.prefill(torch.tensor([list(prompt_ids)]))
    ids: list[int] = []
    gaps: list[float] = []
    while True:
        best = logits.float().topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        ids.append(int(logits.argmax()))
        if len(ids) == count:
            return Greedy(ids, gaps)
        logits = decoder.step(ids[-1])


def compare_ids(ours: Greedy, right: Greedy) -> dict[str, Any]:
    """Where `ours` first parts from the reference, and how sure both were there."""
    at = next((i for i, (a, b) in enumerate(zip(ours.ids, right.ids, strict=True)) if a != b), None)
    row: dict[str, Any] = {"identical": at is None, "ids": ours.ids}
    if at is not None:
        row |= {"first_difference": at, "reference_gap": right.gaps[at], "own_gap": ours.gaps[at]}
    return row


def _llama_cpp(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.llama_value is not None:
        return {"value": args.llama_value, "standard_error": 0.0, "given": True}
    if args.llama_perplexity is None:
        return None
    print("llama.cpp: perplexity", file=sys.stderr)
    value, error = llama_cpp.perplexity(
        args.llama_perplexity.resolve(),
        args.model,
        args.text,
        context=args.context,
        chunks=args.chunks,
        threads=args.threads,
    )
    return {"value": value, "standard_error": error, "given": False}


if __name__ == "__main__":
    sys.exit(main())
