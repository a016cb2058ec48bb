"""Single tokens of a hybrid on a GPU: a CUDA graph against transformers' loop, paired in one run.

    python benchmarks/gpu/hybrid_decode.py
    python benchmarks/gpu/hybrid_decode.py --layers 8 --steps 16

The model has the shapes of Nemotron-H-8B: 24 scans, 24 feed-forward layers and 4 attentions, every
matrix of random valid Q4_K blocks (the output matrix Q6_K), seeded. Both arms run the same modules
and kernels. The base launches each operation of each token from Python, keys and values in a cache
that grows; ours replays one graph a token over a cache of fixed places
(`tilewright.model.captured`). A sample is the mean time of `--steps` tokens behind a prompt.

Before anything is timed, ours and the loop, there with transformers' own norms, are fed the same
prompt and the same tokens behind it: their logits may differ by roundings alone.
What ours computes is compared again, bit for bit, after the timing; then torch's profiler says
which kernels its tokens are made of. Exit code 3: logits differ, or nothing was captured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

import numpy as np  # noqa: E402
from device import describe, versions  # noqa: E402
from record import RESULTS, origin, write  # noqa: E402
from synthetic_gguf import draw_blocks  # noqa: E402

from tilewright.measure import Block, Comparison, EventClock, StateProbe, judge  # noqa: E402
from tilewright.measure.sample import block_orders  # noqa: E402

PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
"""Nemotron-H-8B's layers: a scan, a feed-forward layer or an attention."""

NAME = "Nemotron-H-8B's shapes"
SIZES: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "chunk_size": 128, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip

_KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
_CHECKED = 24  # tokens fed to both
_PROFILED = 16
_MOST_ERROR = {"float16": 0.02, "bfloat16": 0.15, "float32": 1e-3}
"""Of a token's logits, relative, in the Euclidean norm."""

BASE, OURS, CONTROL = "transformers' loop", "graph", "control"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=len(PATTERN), help="the first so many")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before, untimed")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no block after so long")
    parser.add_argument("--dtype", choices=sorted(_MOST_ERROR), default="float16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", help="the CPU is for trying the script")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="h200-hybrid-decode")
    return parser.parse_args(words)


def model_of(args: argparse.Namespace) -> Any:
    """The synthetic model on the device, its matrices packed and its mixers ours."""
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    from tilewright.layout.blocks import pack_blocks_for
    from tilewright.model.layers import QuantLinear
    from tilewright.model.ssm import QuantHead, inject_ssm

    kinds = [_KINDS[kind] for kind in PATTERN[: args.layers]]
    config = NemotronHConfig(**SIZES, layers_block_type=kinds)
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    with torch.device("meta"):
        model = NemotronHForCausalLM(config).to(dtype).eval().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            n, k = module.out_features, module.in_features
            kind = "Q6_K" if name == "lm_head" else "Q4_K"
            raw = draw_blocks(kind, n, k, generator, k**-0.5)
            packed: Any = pack_blocks_for(
                raw if args.device != "cpu" else raw.numpy(), kind, args.device
            )
            if name == "lm_head":
                linear: QuantLinear = QuantHead(packed, None, dtype=dtype)
            else:
                linear = QuantLinear(packed)
            model.set_submodule(name, linear)
    model.to_empty(device=args.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.empty_like(parameter).normal_(generator=generator)
            if name.endswith("A_log"):
                draw.uniform_(-4, 1.5, generator=generator)
            elif name.endswith("dt_bias"):
                draw -= 1.5
            elif parameter.dim() == 1:
                draw = 1 + 0.2 * draw
            elif "embed" not in name:
                draw *= 0.5 / parameter.shape[-1] ** 0.5  # a convolution's
            parameter.copy_(draw)
    left = [name for name, buffer in model.named_buffers() if buffer.numel()]
    if left:
        raise SystemExit(f"{left[0]}: a buffer of the model that nothing fills")
    inject_ssm(model)
    return model


def fed(decoder: Any, prompt: Any, tokens: Any) -> Any:
    """Logits [T, V] after each of `tokens` [T], fed one at a time behind a prompt [1, P]."""
    import torch

    decoder.reset()
    decoder.prefill(prompt)
    return torch.stack([decoder.step(int(token)) for token in tokens])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Check, time, and check again."""
    import torch

    from tilewright.model.captured import CapturedDecoder
    from tilewright.model.generate import TransformersDecoder, how_stepped
    from tilewright.model.kernel_time import step_kernel_time
    from tilewright.model.norms import fuse_norms

    started = time.monotonic()
    model, gpu = model_of(args), args.device != "cpu"
    draw = torch.Generator().manual_seed(args.seed)
    prompt = torch.randint(0, SIZES["vocab_size"], (1, args.prompt), generator=draw)
    tokens = torch.randint(0, SIZES["vocab_size"], (_CHECKED,), generator=draw)
    right = fed(TransformersDecoder(model), prompt, tokens)
    if gpu:
        fuse_norms(model)  # as loading does
    loop, ours = TransformersDecoder(model), CapturedDecoder(model)
    found = fed(ours, prompt, tokens)
    each = (found - right).norm(dim=1) / right.norm(dim=1)
    result: dict[str, Any] = {
        "kind": "gpu-hybrid-decode",
        "origin": {**origin(torch.get_num_threads()), "gpu": describe() if gpu else {}},
        "model": {"name": NAME, "pattern": PATTERN[: args.layers], "seed": args.seed, **SIZES},
        "dtype": args.dtype, "prompt": args.prompt, "steps": args.steps,
        "error": float(each.max()), "most_error": _MOST_ERROR[args.dtype],
        "same_first": float((found.argmax(1) == right.argmax(1)).double().mean()),
        "stepped": how_stepped(model, ours), "fault": None, "judgement": None, "blocks": [],
        "kernel_time": None,
    }  # fmt: skip
    result["origin"]["versions"] |= versions()
    result["fault"] = fault(result, captured=not gpu or ours.captured)
    if result["fault"] is None:
        arms = {BASE: loop, OURS: ours, CONTROL: loop}
        probe = StateProbe(gpu=EventClock().device_id if gpu else None)
        probe.sample()
        blocks: list[Block] = []
        for order in block_orders(list(arms), args.blocks, np.random.default_rng(args.seed)):
            if time.monotonic() - started > args.seconds:
                break
            us = {name: sample(arms[name], prompt, args.steps) for name in order}
            blocks.append(Block(order, us, probe.sample()))
        result["blocks"] = [block.to_dict() for block in blocks]
        result["judgement"] = judged(blocks, args.seed)
        if not torch.equal(found, fed(ours, prompt, tokens)):
            result["fault"] = "our logits changed while they were timed"
        elif gpu:
            kernels = step_kernel_time(model, ours, _PROFILED, depth=args.prompt, seed=args.seed)
            result["kernel_time"] = kernels.to_dict()
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def sample(decoder: Any, prompt: Any, steps: int) -> float:
    """Microseconds a token, of `steps` behind the prompt."""
    decoder.reset()
    decoder.prefill(prompt)
    begin = time.perf_counter()
    for token in range(steps):
        decoder.step(token)
    return (time.perf_counter() - begin) / steps * 1e6


def judged(blocks: Sequence[Block], seed: int) -> dict[str, Any] | None:
    """Ours against the loop; None where there is nothing to judge."""
    if not blocks:
        return None
    us = {arm: np.array([block.us[arm] for block in blocks]) for arm in (BASE, OURS, CONTROL)}
    slow = {reason for block in blocks if block.state for reason in block.state.throttle}
    void = [f"throttled: {', '.join(sorted(slow))}"] if slow else []
    found = judge(us[BASE], us[OURS], us[CONTROL], seed=seed, void=void)
    judgement: dict[str, Any] = Comparison(BASE, OURS, found, ()).to_dict()["judgement"]
    return judgement


def fault(result: dict[str, Any], *, captured: bool) -> str | None:
    """Why nothing may be timed."""
    if not result["error"] <= result["most_error"]:
        return f"logits are off by {result['error']:.2g}, limit {result['most_error']:g}"
    return None if captured else str(result["stepped"])


def report(result: dict[str, Any]) -> str:
    lines = [
        f"{len(result['model']['pattern'])} layers, {result['dtype']}: logits differ by "
        f"{result['error']:.1e}, same first token {result['same_first']:.0%}; {result['stepped']}"
    ]
    if result["fault"] is not None:
        lines.append(f"fault: {result['fault']}")
    judgement = result["judgement"]
    if judgement is not None:
        us = {arm: float(np.median([b["us"][arm] for b in result["blocks"]]))
              for arm in (BASE, OURS)}  # fmt: skip
        lines.append(
            f"a token: {us[BASE]:.0f} us by {BASE}, {us[OURS]:.0f} us by a {OURS}: "
            f"{judgement['verdict']} {judgement['ratio']:.3f}x in {len(result['blocks'])} blocks"
        )
    kernels = result["kernel_time"]
    for row in kernels["rows"] if kernels else ():
        lines.append(
            f"{row['op']:10} {row['us'] / _PROFILED:8.1f} us a token {row['share']:6.1%} "
            f"{row['launches'] / _PROFILED:6.1f} launches  {row['kernels'][0]['name'][:60]}"
        )
    return "\n".join([*lines, f"{result['seconds']} s"])


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    result = run(args)
    path = write(result, args.name, args.out)
    print(f"{report(result)}\n{path.name}")
    return 0 if result["fault"] is None else 3


if __name__ == "__main__":
    sys.exit(main())
