"""Time to first token of a synthetic Llama-3-8B in W4A16, change sets paired in one run.

    python benchmarks/gpu/model_8b.py benchmarks/ladders/w4a16-seed.toml \
        --control benchmarks/ladders/w4a16-seed-bf16.toml --input-len 2048

The model is made on the device: transformers' Llama with the shapes of Llama-3-8B, seeded random
4-bit codes (asymmetric, group 128), our QuantLinear in every block. An arm runs the whole model,
its tiles pinned to what a ladder's rungs say, one on top of the other; the other arms are ours as
a user gets it and the dense model of the same weights. `--control` names a ladder whose rungs must
not move; its last rung is held against its base in the same blocks.

A sample is the time of one forward pass over the prompt that gives the first token
(`--output-len 1`). Every arm is first held to the dense model: relative error of the logits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from device import describe, versions  # noqa: E402
from ladders import judged_pairs, stacks_of, tile_of  # noqa: E402
from record import RESULTS, origin, write  # noqa: E402

LLAMA_3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
_GROUP = 128
_MOST_ERROR = {"float16": 0.02, "bfloat16": 0.1}
"""Of the logits against the dense model: rounding grows over 32 layers; a wrong product gives 1."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ladder", type=Path, nargs="?", help="change sets, of float16 activations")
    parser.add_argument("--control", type=Path, help="a ladder of bfloat16 that must not move")
    parser.add_argument("--input-len", type=int, default=2048)
    parser.add_argument("--output-len", type=int, choices=(1,), default=1)
    parser.add_argument("--layers", type=int, default=LLAMA_3_8B["num_hidden_layers"])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--no-dense", action="store_true", help="without the dense model as an arm")
    parser.add_argument("--device", default="cuda", help="the CPU is for trying the script")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="w4a16-model-8b")
    return parser.parse_args(words)


@dataclass(frozen=True)
class ArmPlan:
    """An arm: whose weights run, in which dtype, with which tile rules.

    Attributes:
        family: "words" for the portable kernels, "dense" for the dequantized weights, "own" for
            what a user gets on this device.
        rules: of `tilewright.tune.ladder_file`, the last that matches decides; None for tables
            and defaults.
    """

    name: str
    dtype: str
    family: str
    rules: Sequence[Any] | None = None


def arms_of(args: argparse.Namespace) -> list[ArmPlan]:
    """The base first. A ladder gives an arm for each rung, a control its base and its last."""
    plans: list[ArmPlan] = []
    if args.ladder is not None:
        plans = [
            ArmPlan(name, dtype, "words", rules)
            for name, dtype, rules in stacks_of(args.ladder, args.control)
        ]
    plans.append(ArmPlan("tilewright", "float16", "own"))
    if not args.no_dense:
        plans.append(ArmPlan("dense", "float16", "dense"))
    return plans


def arch_on(device: str) -> str:
    """The arch of the device, as in tile tables."""
    import torch

    from tilewright.device import arch_of, cpu_device

    return cpu_device().arch if device == "cpu" else arch_of(torch.device(device, 0))


class Model:
    """The synthetic model in one dtype and one form of its weights.

    Attributes:
        arch: of its device, as in tile tables.
        shapes: (N, K) of its packed products.
    """

    def __init__(
        self, shape: Mapping[str, Any], family: str, dtype: str, seed: int, device: str
    ) -> None:
        import torch
        from contenders import weight_copy, words_weight
        from operands import DTYPES, draw_weight
        from transformers import LlamaConfig, LlamaForCausalLM

        from tilewright.layout.pack import pack_w4_for
        from tilewright.model.layers import QuantLinear

        self._torch = torch
        self._device = device
        self.arch = arch_on(device)
        config = LlamaConfig(**shape, tie_word_embeddings=False)
        kind = DTYPES[dtype]
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config).to(kind).eval()
        made: dict[tuple[int, int], Any] = {}
        self.shapes: set[tuple[int, int]] = set()
        for path, module in list(self.model.named_modules()):
            if not isinstance(module, torch.nn.Linear) or path == "lm_head":
                continue
            n, k = module.out_features, module.in_features
            self.shapes.add((n, k))
            if (n, k) not in made:
                # A row's squares then sum to about 1, and activations keep their scale.
                largest = 1 / (4.2 * math.sqrt(k))
                weight = draw_weight(n, k, _GROUP, seed=seed, largest=largest, device=device)
                if family == "dense":
                    made[n, k] = weight.rounded(kind)
                elif family == "words" and device != "cpu":
                    made[n, k] = words_weight(weight, kind)
                else:
                    made[n, k] = pack_w4_for(weight.host, device, act_dtype=kind)
                del weight
            template = made[n, k]  # every layer reads memory of its own
            own = template.clone() if family == "dense" else weight_copy(template)
            if family == "dense":
                linear = torch.nn.Linear(k, n, bias=False, device="meta")
                linear.weight = torch.nn.Parameter(own, requires_grad=False)
                self.model.set_submodule(path, linear)
            else:
                self.model.set_submodule(path, QuantLinear(own))
        self._fill(kind, seed)

    def _fill(self, kind: Any, seed: int) -> None:
        """Embedding and output matrix from `seed`, norms of 1, the rotary table anew."""
        torch = self._torch
        generator = torch.Generator(self._device).manual_seed(seed)
        for name, parameter in list(self.model.named_parameters()):
            if parameter.device.type != "meta":
                continue
            value = torch.ones(parameter.shape, dtype=kind, device=self._device)
            if parameter.dim() == 2:
                scale = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
                value.normal_(0, scale, generator=generator)
            owner, _, leaf = name.rpartition(".")
            fresh = torch.nn.Parameter(value, requires_grad=False)
            setattr(self.model.get_submodule(owner), leaf, fresh)
        rotary = self.model.model.rotary_emb
        self.model.model.rotary_emb = type(rotary)(self.model.config).to(self._device)

    def logits(self, ids: Any) -> Any:
        """Logits after the last id: [vocabulary]; the keys and values of the prompt are kept."""
        with self._torch.inference_mode():
            out = self.model(ids, use_cache=True, logits_to_keep=1)
            return out.logits[0, -1]


def pinned(plan: ArmPlan, model: Model, m: int) -> dict[Any, Any]:
    """The tiles that an arm's rules give the products of the model at M = m.

    Raises:
        SystemExit: a product that no rule names: the arm would run the table's tile.
    """
    from tilewright.tiles.tile import Problem

    tiles = {}
    for n, k in sorted(model.shapes):
        problem = Problem(
            "w4a16", model.arch, plan.dtype, "uint4", "float", m, n, k, _GROUP
        ).bucketed()
        tile = tile_of(plan.rules or (), problem)
        if tile is None:
            raise SystemExit(f"error: {plan.name} has no tile for N={n} K={k} M={problem.M}")
        tiles[problem] = tile
    return tiles


def launch_of(plan: ArmPlan, model: Model, ids: Any) -> Callable[[], Any]:
    from tilewright.tiles.table import pin

    if plan.rules is None:
        return lambda: model.logits(ids)
    tiles = pinned(plan, model, ids.shape[1])

    def launch() -> Any:
        with pin(tiles, note=plan.name):
            return model.logits(ids)

    return launch


def check(
    launches: Mapping[str, Callable[[], Any]], right: Mapping[str, Any], plans: Sequence[ArmPlan]
) -> dict[str, dict[str, Any]]:
    """Each arm's logits against the dense model's of its dtype."""
    import torch

    found = {}
    for plan in plans:
        logits = launches[plan.name]().float()
        dense = right[plan.dtype].float()
        error = float(torch.linalg.vector_norm(logits - dense) / torch.linalg.vector_norm(dense))
        found[plan.name] = {
            "logits_error": error if math.isfinite(error) else None,
            "first_token": int(logits.argmax()),
            "dense_first_token": int(dense.argmax()),
            "right": error <= _MOST_ERROR[plan.dtype],
        }
    return found


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    import torch

    from tilewright.measure import Block, SamplePlan, compare_many

    started = time.monotonic()
    shape = {**LLAMA_3_8B, "num_hidden_layers": args.layers}
    plans = arms_of(args)
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(0, shape["vocab_size"], (1, args.input_len), generator=generator)
    ids = ids.to(args.device)

    right = {}
    models: dict[tuple[str, str], Model] = {}
    for dtype in dict.fromkeys(plan.dtype for plan in plans):
        dense = Model(shape, "dense", dtype, args.seed, args.device)
        right[dtype] = dense.logits(ids).clone()
        if any((p.family, p.dtype) == ("dense", dtype) for p in plans):
            models["dense", dtype] = dense
        del dense
        if args.device != "cpu":
            torch.cuda.empty_cache()
    for plan in plans:
        key = (plan.family, plan.dtype)
        if key not in models:
            models[key] = Model(shape, *key, args.seed, args.device)
    launches = {p.name: launch_of(p, models[p.family, p.dtype], ids) for p in plans}
    checked = check(launches, right, plans)
    wrong = [name for name, row in checked.items() if not row["right"]]
    for name in wrong:
        print(f"{name}: logits error {checked[name]['logits_error']}: not timed")
    timed = [plan.name for plan in plans if plan.name not in wrong]
    if len(timed) < 2:
        print("error: fewer than two right arms are left", file=sys.stderr)
        return 1

    clock, probe = _clock(args.device)
    blocks: list[Block] = []
    found = compare_many(
        launches[timed[0]],
        {name: launches[name] for name in timed[1:]},
        baseline_name=timed[0],
        blocks=args.blocks,
        clock=clock,
        plan=SamplePlan(1, 1),
        seed=args.seed,
        probe=probe,
        on_block=blocks.append,
    )
    after = check(launches, right, plans)
    taken = [block.to_dict() for block in blocks]
    result = {
        "kind": "gpu-w4a16-model",
        "origin": {
            **origin(torch.get_num_threads()),
            "gpu": {} if args.device == "cpu" else describe(),
        },
        "model": {"file": "synthetic Llama-3-8B", "seed": args.seed, "group": _GROUP, **shape},
        "input_len": args.input_len,
        "output_len": args.output_len,
        "arms": [_arm_row(plan, checked[plan.name], after[plan.name]) for plan in plans],
        "judgements": judged_pairs(taken, timed, timed[0]),
        "settings": next(iter(found.values())).settings,
        "blocks": taken,
        "seconds": round(time.monotonic() - started, 1),
    }
    result["origin"]["versions"] |= versions()
    print(report(result))
    print(write(result, args.name, args.out).name)
    return 0 if not wrong and all(row["right"] for row in after.values()) else 3


def _clock(device: str) -> tuple[Any, Any]:
    from tilewright.measure import CpuClock, EventClock, StateProbe

    if device == "cpu":
        return CpuClock(), StateProbe()
    clock = EventClock()
    return clock, StateProbe(gpu=clock.device_id)


def _arm_row(plan: ArmPlan, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": plan.name, "dtype": plan.dtype, "family": plan.family,
        "tiles": None if plan.rules is None else [rule.to_dict() for rule in plan.rules],
        "check": before, "check_after": after,
    }  # fmt: skip


def report(result: Mapping[str, Any]) -> str:
    """A line an arm: median time to the first token, and how it stands to the one before."""
    lines = [f"{'arm':44} {'TTFT ms':>9} {'tok/s':>8}  against"]
    for arm in result["arms"]:
        us = [block["us"][arm["name"]] for block in result["blocks"] if arm["name"] in block["us"]]
        if not us:
            lines.append(f"{arm['name']:44} wrong")
            continue
        median = statistics.median(us)
        stands = "; ".join(
            f"{row['a']}: {row['ratio']:.3f}x [{row['low']:.3f}, {row['high']:.3f}] "
            f"{row['verdict']}"
            for row in result["judgements"]
            if row["b"] == arm["name"]
        )
        rate = result["input_len"] / median * 1e6
        lines.append(f"{arm['name']:44} {median / 1e3:9.2f} {rate:8.0f}  {stands}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
