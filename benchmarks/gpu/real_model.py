"""Does a real GGUF model on a GPU still say what float32 says?

    python benchmarks/gpu/real_model.py model.gguf --text wikitext2-test.txt \\
        --reference benchmarks/results/2026-11-29-quality-model.json

The reference is the kept result of `benchmarks/quality.py`: ids of plain transformers over the
same file, dequantized to float32, with the distance of its two best logits at every step, and its
perplexity. The model is loaded packed onto the GPU, in each dtype, and:

1. continues the reference's prompts greedily; where it first takes another id, the reference's
   distance there is stated;
2. is fed the reference's own ids and asked for the next at every step, so that one other id does
   not hide what comes after it;
3. is scored on the reference's chunks of text.

Kernels are compiled beforehand in many processes (`warm_models`), unless --no-warm says not to. The
result file is written after each dtype; one that fails is noted there, and the others go on.

Exit codes: 1, a dtype failed; 3, an id other than the reference's where that was sure (`SURE`), or
a perplexity off by more than `OFF`. Both follow from the dtype: half a unit of float16 in a logit
of 20 is 0.008.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from device import describe, versions  # noqa: E402
from quality import compare_ids, decode  # noqa: E402
from record import RESULTS, model_record, origin, slug, write  # noqa: E402
from reference import Greedy  # noqa: E402

SURE = {"float16": 0.1, "bfloat16": 0.8, "float32": 0.01}
"""A distance of the reference's two best logits that the roundings of a dtype do not bridge."""
OFF = {"float16": 0.001, "bfloat16": 0.01, "float32": 0.0005}
"""Largest relative deviation of the perplexity."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--reference", type=Path, required=True, help="JSON of quality.py")
    parser.add_argument("--text", type=Path, required=True, help="the reference's text")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--chunks", type=int, help="fewer chunks of text than the reference's")
    parser.add_argument("--no-warm", action="store_true", help="compile where a kernel first runs")
    parser.add_argument("--device", default="cuda", help="the CPU is for trying the script")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(words)


def run(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The result; the file must be the reference's, byte for byte.

    Args:
        keep: is given what there is after every dtype.
    """
    kept = json.loads(args.reference.read_text(encoding="utf-8"))
    model = model_record(args.model)
    if model["sha256"] != kept["model"]["sha256"]:
        raise SystemExit(f"{args.model} is not the file of {args.reference.name}")
    text = args.text.read_text(encoding="utf-8")
    settings = dict(kept["settings"])
    settings["chunks"] = min(args.chunks or settings["chunks"], settings["chunks"])
    where: dict[str, Any] = {**origin(1), "gpu": describe() if args.device != "cpu" else {}}
    where["versions"] |= versions()
    result: dict[str, Any] = {
        "kind": "gpu-quality",
        "origin": where,
        "reference_of": args.reference.name,
        "model": model,
        "settings": settings,
        "perplexity": {"transformers": kept["perplexity"]["transformers"]},
        "greedy": {},
        "fed": {},
        "seconds": {},
        "failed": {},
    }
    right = [Greedy(one["ids"], one["gaps"]) for one in kept["reference"]]
    prompts = [one["prompt_ids"] for one in kept["prompts"]]
    dtypes = args.dtypes.split(",")
    if args.device != "cpu" and not args.no_warm:
        from warm_models import warm_file

        started = time.monotonic()
        context = settings["context"]
        lengths = {context, *map(len, prompts)}
        # Half of a chunk is scored, so the output matrix meets so many rows.
        warm_file(args.model, dtypes, sorted(lengths), (1, context - context // 2))
        result["seconds"]["compiling"] = round(time.monotonic() - started, 1)
    for dtype in dtypes:
        started = time.monotonic()
        try:
            of_dtype(args, dtype, text, prompts, right, result)
        except Exception as error:  # the other dtypes may still be right
            traceback.print_exc()
            result["failed"][dtype] = f"{type(error).__name__}: {error}"[:300]
            for part in ("greedy", "fed", "perplexity"):
                result[part].pop(dtype, None)
        result["seconds"][dtype] = round(time.monotonic() - started, 1)
        result["faults"] = faults(result)
        keep(result)
    return result


def of_dtype(
    args: argparse.Namespace,
    dtype: str,
    text: str,
    prompts: Sequence[Sequence[int]],
    right: Sequence[Greedy],
    result: dict[str, Any],
) -> None:
    """Put what one dtype gives into the result."""
    import torch

    import tilewright
    from tilewright.model.evaluate import perplexity
    from tilewright.model.generate import decoder_for, how_stepped

    model, tokenizer = tilewright.load(args.model, device=args.device, dtype=getattr(torch, dtype))
    count = result["settings"]["new_tokens"]
    result["greedy"][dtype] = [
        compare_ids(decode(model, ids, count), reference)
        for ids, reference in zip(prompts, right, strict=True)
    ]
    decoder = decoder_for(model)
    result["fed"][dtype] = [
        fed(decoder, ids, reference) for ids, reference in zip(prompts, right, strict=True)
    ]
    result.setdefault("stepped", how_stepped(model, decoder))
    settings = result["settings"]
    score = perplexity(
        model, tokenizer, text, context=settings["context"], chunks=settings["chunks"]
    )
    result["perplexity"][dtype] = asdict(score)


def fed(decoder: Any, prompt_ids: Sequence[int], right: Greedy) -> dict[str, Any]:
    """The ids a decoder would take where it is fed the reference's: how many are the same, and the
    reference's distance where they are not."""
    import torch

    decoder.reset()
    logits = decoder.prefill(torch.tensor([list(prompt_ids)]))
    parted = []
    for step, (token, gap) in enumerate(zip(right.ids, right.gaps, strict=True)):
        if int(logits.argmax()) != token:
            parted.append({"step": step, "reference_gap": gap})
        if step + 1 < len(right.ids):
            logits = decoder.step(token)
    return {"steps": len(right.ids), "same": len(right.ids) - len(parted), "parted": parted}


def faults(result: dict[str, Any]) -> list[str]:
    """What breaks a promise: another id where the reference was sure, or another perplexity."""
    found = []
    perplexities = result["perplexity"]
    # A part of the reference's chunks has no kept perplexity to be held to.
    whole = result["settings"]["chunks"] == perplexities["transformers"]["chunks"]
    for dtype, rows in result["greedy"].items():
        for index, row in enumerate(rows):
            if not row["identical"] and row["reference_gap"] > SURE[dtype]:
                found.append(
                    f"{dtype}: prompt {index} parts from the reference at token "
                    f"{row['first_difference']}, where its gap is {row['reference_gap']:.3f}"
                )
        for index, row in enumerate(result["fed"][dtype]):
            found += [
                f"{dtype}: prompt {index}, fed the reference's ids, takes another at token "
                f"{part['step']}, where the gap is {part['reference_gap']:.3f}"
                for part in row["parted"]
                if part["reference_gap"] > SURE[dtype]
            ]
        off = perplexities[dtype]["value"] / perplexities["transformers"]["value"] - 1
        if whole and not abs(off) <= OFF[dtype]:
            found.append(f"{dtype}: perplexity is {off:+.3%} off float32, limit {OFF[dtype]:.1%}")
    return found


def report(result: dict[str, Any]) -> str:
    """A line a dtype, then the faults."""
    right = result["perplexity"]["transformers"]["value"]
    stepped = result.get("stepped")
    lines = [f"{result['model']['file']}; {stepped}; float32 perplexity {right:.4f}"]
    lines += [f"{dtype}: failed: {why}" for dtype, why in result["failed"].items()]
    for dtype, rows in result["greedy"].items():
        steps = sum(row["steps"] for row in result["fed"][dtype])
        same = sum(row["same"] for row in result["fed"][dtype])
        parts = ", ".join(
            f"at token {row['first_difference']} (gap {row['reference_gap']:.4f})"
            for row in rows
            if not row["identical"]
        )
        score = result["perplexity"][dtype]
        value, chunks = score["value"], score["chunks"]
        whole = chunks == result["perplexity"]["transformers"]["chunks"]
        off = f"{value / right - 1:+.3%}" if whole else f"of {chunks} chunks"
        lines.append(
            f"{dtype}: greedy ids identical {sum(row['identical'] for row in rows)} of "
            f"{len(rows)}{'; others part ' + parts if parts else ''}; fed {same} of {steps} the "
            f"same; perplexity {value:.4f} ({off}); "
            f"{result['seconds'][dtype]} s"
        )
    return "\n".join([*lines, *(f"fault: {fault}" for fault in result["faults"])])


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    name = f"h200-quality-{slug(args.model)}"
    result = run(
        args, lambda found: print(f"{write(found, name, args.out).name} written", flush=True)
    )
    print(report(result))
    return 3 if result["faults"] else 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
