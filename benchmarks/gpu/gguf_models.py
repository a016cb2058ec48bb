"""A GGUF model on a GPU against llama.cpp's figures: checked, then timed.

    python benchmarks/gpu/gguf_models.py
    python benchmarks/gpu/gguf_models.py --model qwen3-30b-a3b --prompts 4096 --repetitions 3

The file is made on the device (`synthetic_gguf`): the shapes and types of a Q4_K_M model, seeded.

1. A file of few layers, all widths as in the model, is loaded packed, and its logits after every
   token of a prompt, the last of them fed one at a time, are held to the plain model of the same
   file: weights dequantized by the gguf package, everything in float32. Then tokens are generated
   greedily by the captured step, by the same step launch after launch, and from a few tokens by
   transformers' own forward: the first two must agree in every logit.
2. The whole file is loaded, and llama-bench's tests are timed, repetitions interleaved. A prompt's
   kernels are listed by op.

Kernels are compiled beforehand in many processes (`warm_models`). The result file is written after
the check and again after every round of samples: a run that is cut short has shown what it got to.

What llama.cpp reached on an H200 with a file of the same shapes and types stands beside it
(`ANCHORS`), and what was to be reached (`BARS`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from device import describe, versions  # noqa: E402
from record import RESULTS, origin, write  # noqa: E402
from synthetic_gguf import SHAPES, Shape, write_model  # noqa: E402

ANCHORS = {
    "llama-3-8b": {
        "source": "llama.cpp (ggml 0.26.0, built for sm_90, flash attention on, ub 2048), "
        "llama-bench, mean of 3, NVIDIA H200, synthetic Llama-3-8B Q4_K_M of 4.58 GiB; tg128 at "
        "ub 512, 252 at ub 2048",
        "pp4096": 10345.0,
        "pp16384": 9636.0,
        "tg128": 253.0,
    }
}
"""Tokens a second."""

BARS = {"llama-3-8b": {"pp4096": 2.8, "pp16384": 2.5, "tg128": 0.8}}
"""Times the anchor."""

_STEPS = 8  # tokens of the checked prompt that are fed one at a time
_FEW = 16  # tokens from which transformers' forward generates
_MOST_ERROR = {"float16": 0.01, "bfloat16": 0.08, "float32": 1e-3}
"""Of the logits, relative, in the Frobenius norm: a wrong product gives about 1."""
_PARTED = 10
"""How much more a mixture may be off in that norm, if its median token is off by no more: where two
experts are nearly as good, a rounding takes the other, and such a token is off by a tenth."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="time a file of fewer layers")
    parser.add_argument("--check-layers", type=int, default=2, help="0 leaves the check out")
    parser.add_argument("--check-tokens", type=int, default=4096)
    parser.add_argument("--check-vocabulary", type=int, default=8192)
    parser.add_argument("--prompts", default="4096,16384")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="begin no round of samples after so long"
    )
    parser.add_argument("--dtype", choices=sorted(_MOST_ERROR), default="float16")
    parser.add_argument("--activations", choices=("float", "int8"), default="float")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", help="the CPU is for trying the script")
    parser.add_argument("--folder", type=Path, help="where the files are made; memory if there is")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", help="of the result file")
    return parser.parse_args(words)


def folder_for(size_bytes: int, given: Path | None) -> Path:
    """Memory where it is large enough, since a model is read once; else the temporary folder."""
    if given is not None:
        return given
    memory = Path("/dev/shm")
    if memory.is_dir():
        free = os.statvfs(memory)
        if free.f_bavail * free.f_frsize > 1.2 * size_bytes:
            return memory
    return Path("/tmp")


def check(
    args: argparse.Namespace, shape: Shape, path: Path, ready: Callable[[], None]
) -> dict[str, Any]:
    """Logits of a file of few layers against the plain model; generated ids three ways."""
    import torch
    from gguf_reference import plain_model

    import tilewright
    from tilewright.model.generate import TransformersDecoder, decoder_for, how_stepped
    from tilewright.model.graphs import GraphDecoder

    small = replace(
        shape,
        layers=min(args.check_layers, shape.layers),
        vocabulary=min(args.check_vocabulary, shape.vocabulary),
    )
    write_model(path, small, seed=args.seed + 1, device=args.device)
    model, _ = tilewright.load(
        path, device=args.device, dtype=getattr(torch, args.dtype), activations=args.activations
    )
    ids = torch.randint(
        0, small.vocabulary, (1, args.check_tokens), generator=torch.Generator().manual_seed(1)
    )
    decoder: Any = decoder_for(model)
    plain = plain_model(path, device=args.device)
    path.unlink()
    ready()
    with torch.inference_mode():
        found = _logits(decoder, model, ids.to(args.device)).double()
        right = plain(input_ids=ids.to(args.device)).logits[0].double().cpu()
    del plain

    def off(first: int) -> float:
        return float((found[first:] - right[first:]).norm() / right[first:].norm())

    each = (found - right).norm(dim=1) / right.norm(dim=1)
    steps, same = _generated(decoder, {"transformers": TransformersDecoder(model)}, ids[:, :_FEW])
    if args.device != "cpu":
        launched = {"launched": GraphDecoder(model, capture=False)}
        same |= _generated(decoder, launched, ids)[1]
    most = _MOST_ERROR[args.dtype]
    equal = same.get("launched", {"logits_differ": 0.0})["logits_differ"] == 0.0
    near = all(
        within(each[first:], off(first), most, mixture=shape.experts > 0) for first in (0, -_STEPS)
    )
    return {
        "layers": small.layers,
        "tokens": args.check_tokens,
        "logits_error": off(0),
        "steps_error": off(-_STEPS),
        "worst_token_error": float(each.max()),
        "median_token_error": float(each.median()),
        "most_error": most,
        "same_first": float((found.argmax(1) == right.argmax(1)).double().mean()),
        "steps": steps,
        "same_as": same,
        "stepped": how_stepped(model, decoder),
        "right": near and equal,
    }


def within(each: Any, whole: float, most: float, *, mixture: bool) -> bool:
    """Whether logits are near enough to the plain model's.

    Args:
        each: relative error of every token, [T].
        whole: of all of them, in the Frobenius norm.
    """
    if not mixture:
        return whole <= most
    return float(each.median()) <= most and whole <= _PARTED * most


def _logits(decoder: Any, model: Any, ids: Any) -> Any:
    """After every one of ids [1, T], float32 [T, V]; the last tokens are fed one at a time."""
    import torch

    if not hasattr(decoder, "logits"):
        return model(input_ids=ids).logits[0].cpu()
    ids = ids.cpu()
    decoder.reset()
    prompt = decoder.logits(ids[:, :-_STEPS])
    steps = [decoder.step(int(token)) for token in ids[0, -_STEPS:]]
    return torch.cat([prompt, torch.stack(steps)])


def _generated(
    decoder: Any, others: dict[str, Any], ids: Any, steps: int = 24
) -> tuple[int, dict[str, dict[str, float]]]:
    """Feed what `decoder` chooses to all: largest difference of logits, and share of same ids."""
    import torch

    decoder.reset()
    logits = [decoder.prefill(ids)]
    for _ in range(steps):
        logits.append(decoder.step(int(logits[-1].argmax())))
    same = {}
    for name, other in others.items():
        theirs = [other.prefill(ids)]
        for mine in logits[:-1]:
            theirs.append(other.step(int(mine.argmax())))
        a, b = torch.stack(logits), torch.stack(theirs)
        same[name] = {
            "logits_differ": float((a - b).abs().max()),
            "ids_equal": float((a.argmax(1) == b.argmax(1)).double().mean()),
        }
    return steps, same


def measure(
    args: argparse.Namespace,
    shape: Shape,
    path: Path,
    ready: Callable[[], None],
    keep: Callable[[dict[str, Any]], None],
    late: Callable[[], bool],
) -> None:
    """Load the whole file and time llama-bench's tests, a sample of each in a round.

    Args:
        ready: waits until the kernels are compiled.
        keep: is given what there is after every round.
        late: whether the time is up.
    """
    import torch

    import tilewright
    from tilewright.model.bench import BenchResult, BenchTest, bench
    from tilewright.model.generate import decoder_for, how_stepped
    from tilewright.model.kernel_time import prefill_kernel_time

    started = time.monotonic()
    size = write_model(path, shape, seed=args.seed, device=args.device)
    made_s = time.monotonic() - started
    started = time.monotonic()
    model, tokenizer = tilewright.load(
        path, device=args.device, dtype=getattr(torch, args.dtype), activations=args.activations
    )
    if args.device != "cpu":
        torch.cuda.synchronize()
    loaded_s = time.monotonic() - started
    path.unlink()
    ready()
    decoder = decoder_for(model)
    prompts = [int(word) for word in args.prompts.split(",") if int(word)]
    tests = [BenchTest(count, 0) for count in prompts]
    tests += [BenchTest(0, args.tokens)] if args.tokens else []
    timed: dict[str, Any] = {
        "bytes": size,
        "made_s": round(made_s, 2),
        "loaded_s": round(loaded_s, 2),
        "packed": {t: vars(c) for t, c in model.tilewright_info.packed.items()},
        "stepped": None,
        "results": [],
        "kernel_time": None,
    }
    samples: dict[BenchTest, tuple[float, ...]] = dict.fromkeys(tests, ())
    for done in range(args.repetitions):
        if done and late():
            break
        for one in bench(
            model, tokenizer, tests, repetitions=1, warmup=not done, seed=args.seed + done,
            decoder=decoder,
        ):  # fmt: skip
            samples[one.test] += one.samples_s
        found = [BenchResult(test, some) for test, some in samples.items()]
        timed["results"] = [_row(args.model, shape, result) for result in found]
        timed["stepped"] = how_stepped(model, decoder)
        if not done and args.device != "cpu" and prompts:
            keep(timed)
            report = prefill_kernel_time(model, decoder, prompts[0], seed=args.seed)
            timed["kernel_time"] = report.to_dict()
        keep(timed)


def _row(name: str, shape: Shape, result: Any) -> dict[str, Any]:
    """The samples of a test, and how their median stands to llama.cpp's figure."""
    test = result.test.name
    row: dict[str, Any] = {
        "test": test,
        "median_ts": result.median_tok_s,
        "avg_ts": result.mean_tok_s,
        "stddev_ts": result.stddev_tok_s,
        "samples_ts": list(result.samples_tok_s),
    }
    bar = BARS.get(name, {}).get(test)
    if bar is not None and shape.layers == SHAPES[name].layers:
        anchor = float(ANCHORS[name][test])  # type: ignore[arg-type]
        ratio = result.median_tok_s / anchor
        row |= {"llama_cpp_ts": anchor, "ratio": ratio, "bar": bar, "holds": ratio >= bar}
    return row


def report(result: dict[str, Any]) -> str:
    """A line a test, then a line an op."""
    lines = []
    checked = result["check"]
    if checked is not None:
        verdict = "right" if checked["right"] else "WRONG"
        lines.append(
            f"{verdict}: logits off by {checked['logits_error']:.2e}, of single steps by "
            f"{checked['steps_error']:.2e} (most "
            f"{checked['most_error']:g}), same first token {checked['same_first']:.1%}; "
            f"{checked['stepped']}; " + "; ".join(
                f"{name} differs by {row['logits_differ']:.2e}, {row['ids_equal']:.0%} ids equal"
                for name, row in checked["same_as"].items()
            )
        )  # fmt: skip
    timed = result["timed"]
    if timed is None:
        return "\n".join(lines)
    lines.append(
        f"made in {timed['made_s']} s, {timed['bytes'] / 2**30:.2f} GiB loaded in "
        f"{timed['loaded_s']} s; {timed['stepped']}"
    )
    for row in timed["results"]:
        against = ""
        if "ratio" in row:
            against = (
                f"  {row['ratio']:.2f}x of llama.cpp's {row['llama_cpp_ts']:.0f}, to reach "
                f"{row['bar']}x: {'holds' if row['holds'] else 'FAILS'}"
            )
        lines.append(f"{row['test']:10} {row['median_ts']:10.1f} tok/s{against}")
    kernels = timed["kernel_time"]
    if kernels is not None:
        for row in kernels["rows"]:
            lines.append(
                f"{row['op']:10} {row['us'] / 1e3:9.2f} ms {row['share']:6.1%} "
                f"{row['launches']:6} launches  {row['kernels'][0]['name'][:60]}"
            )
        lines.append(f"total kernel time at {kernels['test']}: {kernels['total_us'] / 1e3:.2f} ms")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    started = time.monotonic()
    shape = SHAPES[args.model]
    if args.layers:
        shape = replace(shape, layers=args.layers)
    ready = _warming(args, shape)
    import torch

    folder = folder_for(24 << 30 if shape.experts else 6 << 30, args.folder)
    path = folder / f"tilewright-synthetic-{args.model}-{os.getpid()}.gguf"
    result: dict[str, Any] = {
        "kind": "gpu-gguf-model",
        "origin": {
            **origin(torch.get_num_threads()),
            "gpu": {} if args.device == "cpu" else describe(),
        },
        "model": {"name": args.model, "seed": args.seed, **vars(shape)},
        "dtype": args.dtype,
        "activations": args.activations,
        "check": None,
        "timed": None,
        "anchors": ANCHORS.get(args.model),
    }
    result["origin"]["versions"] |= versions()
    written = Path()

    def keep(timed: dict[str, Any] | None) -> None:
        nonlocal written
        result["timed"] = timed
        result["seconds"] = round(time.monotonic() - started, 1)
        written = write(result, args.name or f"h200-gguf-{args.model}", args.out)
        print(f"{report(result)}\n{result['seconds']} s", flush=True)

    try:
        if args.check_layers:
            result["check"] = check(args, shape, path, ready)
            keep(None)
        if args.device != "cpu":
            torch.cuda.empty_cache()
        right = result["check"] is None or result["check"]["right"]
        if right:
            measure(
                args, shape, path, ready, keep,
                lambda: time.monotonic() - started > args.seconds,
            )  # fmt: skip
    finally:
        path.unlink(missing_ok=True)
    print(written.name)
    return 0 if right else 3


def _warming(args: argparse.Namespace, shape: Shape) -> Callable[[], None]:
    """Begin to compile; what is returned waits for it."""
    if args.device == "cpu":
        return lambda: None
    from warm_models import Warming

    longest = max([int(word) for word in args.prompts.split(",")] or [1])
    rows = {1, _FEW, min(longest, 4096), *([args.check_tokens] if args.check_layers else [])}
    rows |= {longest} if shape.experts else set()  # experts meet other tiles there
    return Warming(shape, sorted(rows), args.dtype, args.activations).wait


if __name__ == "__main__":
    sys.exit(main())
