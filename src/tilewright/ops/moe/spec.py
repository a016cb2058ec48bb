"""moe: tokens times the experts they chose, of every type that mmq and w4a16 multiply.

Operands are the underlying op's, drawn once an expert. GGUF experts lie in one buffer with 0xFF
before, between and behind them, so a slice that begins or ends in the wrong place reads NaN scales.

On the CPU the op has no tile space of its own: each expert is one product of the underlying op,
with its tiles, looked up by the rows of that expert. GPUs multiply for all experts at once, and
have one (`gpu_spec`, `gpu_space`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import INTERPRETER, cpu_device
from tilewright.ops.cases import ordered
from tilewright.ops.check import ErrorModel, activation_variance, product_sigma
from tilewright.ops.contract import (
    DTYPES,
    Case,
    Corruption,
    Inputs,
    OpSpec,
    draw_activations,
    rng_for,
)
from tilewright.ops.mmq.reference import BlockSource
from tilewright.ops.mmq.spec import SPEC as MMQ
from tilewright.ops.moe.reference import MoeSource, expert_rows, expert_x, moe_reference
from tilewright.ops.pieces import THREADS
from tilewright.ops.w4a16.spec import SPEC as W4A16
from tilewright.tiles.tile import Problem

__all__ = ["SPEC", "MoeOperand"]

F64 = npt.NDArray[np.float64]

WEIGHT_TYPES = (*MMQ.weight_types, *W4A16.weight_types)

_GUARD = 64
_MANY = ("Q4_0", "Q4_K", "uint4")  # types that also run with as many experts as models have
_MOST_EXPERTS = 512
_USUAL_EXPERTS, _USUAL_CHOICES = 128, 8
_LARGE = 1 << 25  # values of all experts that take a second to draw


@dataclass(frozen=True, eq=False)
class MoeOperand:
    """What the op reads beside x.

    Attributes:
        experts: `tilewright.ops.moe.experts.PackedExperts`, on a GPU
            `tilewright.layout.experts.GpuExperts`.
        ids: int64 [T, top_k].
    """

    experts: Any
    ids: torch.Tensor


def _underlying(weight_type: str) -> OpSpec:
    """The op that multiplies one expert."""
    return W4A16 if weight_type in W4A16.weight_types else MMQ


def _cases() -> tuple[Case, ...]:
    cases: list[Case] = []
    for name in WEIGHT_TYPES:
        four_bit = name in W4A16.weight_types
        unit = 256 if name.endswith("_K") or name == "IQ4_XS" else 32
        long, short = (512, 256) if unit == 256 else (320, 96)
        groups = {96: 32, 320: 64, 384: 128, 200: -1} if four_bit else {}

        def case(
            dtype: str, m: int, n: int, k: int, mixture: tuple[int, int], *flags: str,
            path: str = "float", routing: str = "even", name: str = name,
            groups: dict[int, int] = groups,
        ) -> Case:  # fmt: skip
            return Case(
                "moe", name, dtype, m, n, k, groups.get(k, 0), path, flags, *mixture, routing
            )

        shapes = ((33, short, (4, 1)), (97, long, (8, 2)), (16, short, (8, 8)), (64, long, (5, 4)))
        for path in ("float", "int8"):
            for i, (n, k, mixture) in enumerate(shapes if path == "float" else shapes[1:3]):
                for j, m in enumerate((1, 2, 5, 17, 33)):
                    dtype = tuple(DTYPES)[(i + j) % len(DTYPES)]
                    cases.append(case(dtype, m, n, k, mixture, path=path))
            cases += [
                case("float16", 0, 97, long, (8, 2), path=path),
                case("float32", 17, 97, long, (8, 2), "outliers", path=path),
                case("bfloat16", 1, 97, long, (8, 2), "outliers", path=path),
                case("float16", 17, 33, short, (4, 2), "strided", path=path),
                case("float32", 5, 64, long, (4, 2), "transposed", path=path),
                case("float32", 17, 33, long, (3, 2), "edge", path=path),
                case("float32", 33, 33, short, (8, 2), path=path, routing="hot"),
                case("float16", 17, 64, long, (8, 3), path=path, routing="few"),
                case("bfloat16", 5, 33, short, (3, 4), path=path, routing="repeat"),
                case("float32", 5, 33, short, (1, 1), path=path),
            ]
            if four_bit:
                cases.append(case("float32", 17, 33, long, (4, 2), "act_order", path=path))
                cases.append(case("float16", 1, 33, long, (4, 2), "act_order", path=path))
                cases.append(case("bfloat16", 17, 33, 384, (4, 2), path=path))
                cases.append(case("float32", 5, 33, 200, (4, 2), path=path))
        if name in _MANY:
            cases.append(case("float32", 33, 16, short, (_MOST_EXPERTS, 8)))
    return ordered(cases)


def _make_inputs(case: Case, seed: int) -> Inputs:
    if case.weight_type not in WEIGHT_TYPES:
        raise ValueError(f"weight_type is {case.weight_type!r}; moe has {list(WEIGHT_TYPES)}")
    if not case.experts:
        raise ValueError("experts is 0; a case of moe has experts and top_k")
    if case.top_k > _choices(case):
        raise ValueError(
            f"top_k is {case.top_k} of {case.experts} experts with routing {case.routing!r}; "
            f"at most {_choices(case)} can be chosen, or more with 'repeat'"
        )
    draw = _draw_many if case.experts * case.N * case.K >= _LARGE else _draw_few
    experts, packed = draw(_weight_of(case), seed)
    ids = _draw_ids(case, seed)
    source = MoeSource(experts, ids)
    return Inputs(
        case, draw_activations(case, seed), source, MoeOperand(packed, torch.from_numpy(ids))
    )


def _weight_of(case: Case) -> Case:
    """What of a case its weight depends on: equal for all cases that share one."""
    flags = tuple(flag for flag in case.flags if flag in ("act_order", "edge"))
    return replace(case, M=0, top_k=1, routing="even", activations="float", flags=flags)


def _fit(case: Case) -> Case:
    """The case itself; one of a table's problem, whose M counts slots and which does not say how
    many experts there are, with those of Qwen3-30B-A3B."""
    if case.experts:
        return case
    choices = min(_USUAL_CHOICES, max(case.M, 1))
    return replace(case, M=case.M // choices, experts=_USUAL_EXPERTS, top_k=choices)


def _choices(case: Case) -> int:
    """The most different experts that a row can choose."""
    if case.routing == "repeat":
        return case.top_k
    return (case.experts - 1) // 2 if case.routing == "few" else case.experts


def _draw_ids(case: Case, seed: int) -> npt.NDArray[np.int64]:
    """Which experts each row chooses, int64 [M, top_k]."""
    rng = rng_for(seed, case.id, "ids")
    if case.routing == "repeat":
        return rng.integers(0, case.experts, (case.M, case.top_k))
    pool = np.arange(case.experts)
    if case.routing == "few":
        pool = pool[1:-1:2]
    first: list[int] = []
    if case.routing == "hot":
        first = [case.experts // 2]
        pool = np.delete(pool, first)
    rest = case.top_k - len(first)
    rows = [[*first, *rng.permutation(pool)[:rest]] for _ in range(case.M)]
    return np.array(rows, dtype=np.int64).reshape(case.M, case.top_k)


def _draw_experts(key: Case, seed: int) -> tuple[tuple[Any, ...], Any]:
    """Sources of all experts, and the packed operand; `key` is what `_weight_of` gives."""
    under = _underlying(key.weight_type)
    one = replace(key, op=under.name, experts=0, top_k=0)
    seeds = rng_for(seed, *key.weight_key).integers(0, 1 << 62, key.experts)

    def draw(seed: int) -> Any:
        return under.make_inputs(one, seed).source

    many = key.experts * key.N * key.K >= _LARGE
    with ThreadPoolExecutor(THREADS if many else 1) as pool:
        experts = tuple(pool.map(draw, map(int, seeds)))
    return experts, _packed(experts)


# Kept apart: the gate draws two sets of many values, which serve all tiles of a problem and its
# other numbers of rows, and small ones between.
_draw_few = functools.lru_cache(maxsize=2)(_draw_experts)
_draw_many = functools.lru_cache(maxsize=2)(_draw_experts)


def _packed(experts: tuple[Any, ...]) -> Any:
    from tilewright.ops.moe.experts import pack_expert_blocks, pack_expert_w4

    if not isinstance(experts[0], BlockSource):
        return pack_expert_w4(experts)
    n, row_bytes = experts[0].raw.shape
    apart = n * row_bytes + _GUARD
    buffer = np.full(_GUARD + len(experts) * apart, 0xFF, dtype=np.uint8)
    raw = buffer[_GUARD:].reshape(len(experts), apart)[:, : n * row_bytes]
    raw = raw.reshape(len(experts), n, row_bytes)
    for place, source in zip(raw, experts, strict=True):
        place[...] = source.raw
    return pack_expert_blocks(raw, experts[0].type_name)


def _reference(inputs: Inputs) -> F64:
    return moe_reference(inputs.x64(), inputs.source)


def _error_model(inputs: Inputs, ref: F64) -> ErrorModel:
    x, source = inputs.x64(), inputs.source
    rounds = inputs.case.activations == "int8"
    sigma = np.zeros(ref.shape)
    for expert, tokens, choices in source.chosen():
        weight = source.experts[expert]
        rows = expert_x(x[tokens], weight)
        variance = activation_variance(rows) if rounds else None
        sigma[tokens, choices] = product_sigma(rows, expert_rows(weight), x_variance=variance)
    return ErrorModel(sigma, inputs.case.dtype, not rounds)


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    from tilewright.ops.moe.op import moe_gemm

    operand: MoeOperand = inputs.weight
    return moe_gemm(
        inputs.x, operand.experts, operand.ids,
        activations=inputs.case.activations, tile=tile, threads=threads,
    )  # fmt: skip


def _flops(problem: Problem) -> float:
    """Of all rows of all experts; the problem's M counts them."""
    return 2.0 * problem.M * problem.N * problem.K


def _bytes(problem: Problem) -> float:
    """With a single expert's weight: how many are read depends on the routing."""
    return _underlying(problem.weight_type).bytes(problem)


def _on_one_expert(name: str) -> Corruption:
    """A corruption of the underlying op, done to the expert that has the most rows."""

    def corrupt(inputs: Inputs) -> Inputs | None:
        source: MoeSource = inputs.source
        under = _underlying(inputs.case.weight_type).corruptions.get(name)
        if under is None or not source.ids.size:
            return None
        expert, tokens, _ = max(source.chosen(), key=lambda found: len(found[1]))
        case = replace(inputs.case, M=len(tokens), experts=0, top_k=0, routing="even")
        x = torch.from_numpy(inputs.x64()[tokens])
        found = under(Inputs(case, x, source.experts[expert]))
        if found is None:
            return None
        experts = list(source.experts)
        experts[expert] = found.source
        return _changed(inputs, MoeSource(tuple(experts), source.ids))

    return corrupt


def _wrong_expert(inputs: Inputs) -> Inputs | None:
    """One choice of one token goes to the next expert."""
    source: MoeSource = inputs.source
    if inputs.case.experts < 2 or not source.ids.size:
        return None
    ids = source.ids.copy()
    ids[-1, -1] = (ids[-1, -1] + 1) % inputs.case.experts
    return _changed(inputs, MoeSource(source.experts, ids))


def _changed(inputs: Inputs, source: MoeSource) -> Inputs:
    operand = MoeOperand(_packed(source.experts), torch.from_numpy(source.ids))
    return replace(inputs, source=source, weight=operand)


def _arch() -> str:
    return cpu_device().arch


def _on_gpu(arch: str | None) -> OpSpec:
    from tilewright.ops.moe.gpu_spec import gpu_spec

    return gpu_spec(arch)


def _interpreted(arch: str | None) -> OpSpec:
    from tilewright.ops.moe.gpu_spec import gpu_spec

    return gpu_spec(INTERPRETER, "cpu")


_CORRUPTIONS: dict[str, Callable[[Inputs], Inputs | None]] = {
    "wrong expert": _wrong_expert,
    **{name: _on_one_expert(name) for name in (*MMQ.corruptions, *W4A16.corruptions)},
}

SPEC = OpSpec(
    name="moe",
    title="MoE",
    version=1,
    weight_types=WEIGHT_TYPES,
    cases=_cases(),
    make_inputs=_make_inputs,
    reference=_reference,
    error_model=_error_model,
    run=_run,
    flops=_flops,
    bytes=_bytes,
    corruptions=_CORRUPTIONS,
    arch=_arch,
    devices={"cuda": _on_gpu, "interpreter": _interpreted},
    fit=_fit,
)
