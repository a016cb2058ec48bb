"""ssd as verify, the gate, the tuner and the tests see it.

A case has M tokens in all, N = H P columns (P is in its weight type: "p64"), K the state's
dimension and `group` heads that share B and C. A run returns y and the leaving states; the judge
sees them as one matrix, rows of tokens over rows of states::

    [M + S K, N]    y [b, L, H, P] as [M, H P]
                    states [S, H, P, N] as [S K, H P]

Operands are drawn as trained layers have them: x, B, C near 1, dt through bias and softplus between
1e-3 and 1e-1, and A from 0.1 to 1e3 over the heads, so that every case has heads that hardly forget
and heads that forget within a token. With "strided", x, B, C, z and dt are views of one projection,
with "transposed" of one whose tokens are its fastest dimension, as a convolution leaves it. All lie
between NaN.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import INTERPRETER, cpu_device
from tilewright.ops.cases import ordered, sequence_lengths
from tilewright.ops.check import ErrorModel, half_ulp
from tilewright.ops.contract import DTYPES, Case, Inputs, OpSpec, Results, rng_for
from tilewright.ops.space import TileSpace
from tilewright.ops.ssd.args import ScanArgs
from tilewright.ops.ssd.cpu_space import CHUNKS
from tilewright.ops.ssd.draw import guarded, laid_out, rates
from tilewright.ops.ssd.error_model import scan_sigma
from tilewright.ops.ssd.reference import ssd_reference
from tilewright.tiles.tile import Problem

__all__ = [
    "SPEC",
    "SsdOperand",
    "chunk_of",
    "head_dim",
    "judged_heads",
    "operands",
    "results",
    "scan_error_model",
]

F64 = npt.NDArray[np.float64]

WEIGHT_TYPES = tuple(f"p{p}" for p in (*range(8, 129, 8), 192, 256))
_OP = "ssd"
_MOST_STATE = 256
_JUDGED_VALUES = 1 << 14  # of the states of judged heads
_MODELS = (  # heads, head dimension, state, groups, tokens, sequences
    (16, 64, 128, 2, 128, 4),
    (8, 64, 256, 2, 128, 4),
    (4, 128, 128, 4, 32, 2),
    (128, 80, 128, 1, 256, 1),
    (80, 64, 128, 8, 600, 2),
    (80, 64, 128, 1, 130, 1),
    (128, 64, 128, 8, 130, 1),
    (128, 80, 128, 8, 130, 1),
    (64, 64, 128, 8, 130, 1),
    (48, 64, 128, 1, 130, 1),
)


@dataclass(frozen=True, eq=False)
class SsdOperand:
    """What the scan reads beside x: the arguments of `tilewright.ops.ssd.op.ssd_scan`."""

    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    dt_softplus: bool
    dt_limit: tuple[float, float]
    initial_states: torch.Tensor | None
    cu_seqlens: torch.Tensor | None

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments that the oracle and the op share."""
        positional = ("dt", "A", "B", "C")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in positional}


def head_dim(case: Case) -> int:
    """P of a case."""
    return int(case.weight_type.removeprefix("p"))


def chunk_of(case: Case) -> int | None:
    """Tokens a chunk that the flags of a case ask for; None where the tile decides."""
    named = [flag for flag in case.flags if flag.startswith("chunk")]
    return int(named[0].removeprefix("chunk")) if named else None


def _case(
    p: int, heads: int, groups: int, n: int, m: int, dtype: str, *flags: str, sequences: int = 0
) -> Case:
    return Case(
        _OP, f"p{p}", dtype, m, heads * p, n, heads // groups, flags=flags, sequences=sequences
    )


def _cases() -> tuple[Case, ...]:
    fp32, fp16, bf16 = dtypes = tuple(DTYPES)
    cases: list[Case] = []
    for i, name in enumerate(WEIGHT_TYPES):
        p = int(name[1:])
        n = (16, 32, 96, 64)[i % 4]
        cases += [_case(p, 4, 2, n, m, dtypes[i % 3]) for m in (0, 1, 15, 17, 65, 129)]
        cases.append(_case(p, 6, 2, n, 70, dtypes[i % 3], "packed", "initial", "strided"))
        cases.append(_case(p, 3, 1, n, 40, dtypes[(i + 1) % 3], "gate", "transposed"))
    for n in (8, 16, 24, 40, 64, 96, 128, 160, 192, 256):
        cases.append(_case(64, 4, 2, n, 67, fp32))
        cases.append(_case(32, 4, 4, n, 33, fp16, "packed"))
    for groups in (1, 2, 3, 6):
        cases += [_case(16, 6, groups, 32, 50, dtype) for dtype in dtypes]
    for flag in ("plain", "gate", "wide-skip", "limit", "strong", "weak", "threshold", "initial",
                 "packed", "strided", "transposed"):  # fmt: skip
        cases += [_case(64, 4, 2, 64, 150, dtype, flag) for dtype in dtypes]
    for flag in ("strong", "weak", "threshold", "limit"):
        cases.append(_case(64, 4, 2, 128, 530, fp32, flag, "initial"))
        cases.append(_case(80, 4, 2, 96, 300, bf16, flag, "packed", "gate", "strided"))
    cases += [
        _case(64, 4, 2, 64, 0, fp16, "packed", "initial"),
        _case(64, 4, 2, 64, 0, fp32, sequences=3),
        _case(64, 4, 2, 64, 3, bf16, "packed", "initial", sequences=7),
        _case(64, 4, 2, 64, 1, fp16, "initial", "gate", "wide-skip"),
        _case(64, 2, 1, 128, 513, fp32),
        _case(32, 2, 1, 128, 1025, fp16, "initial"),
        _case(16, 2, 2, 64, 2050, bf16),
        _case(64, 1, 1, 16, 33, fp32),
        _case(64, 4, 2, 64, 390, fp16, "initial", "strided", sequences=3),
        _case(64, 4, 2, 64, 400, fp32, "packed", "transposed", "initial", sequences=9),
    ]
    for q in CHUNKS:
        chunk = f"chunk{q}"
        cases += [
            _case(64, 2, 2, 128, q + q // 2 + 3, fp32, chunk),
            _case(16, 4, 2, 96, min(3 * q, 600) + 1, fp16, chunk, "packed", "initial", "strided"),
            _case(24, 2, 1, 32, 2 * q + 1, bf16, chunk, "initial", "transposed"),
            _case(32, 3, 1, 16, q - 1, fp32, chunk, "strong"),
        ]
    for i, (heads, p, n, groups, m, sequences) in enumerate(_MODELS):
        for dtype in (dtypes[i % 3], dtypes[(i + 1) % 3]):
            cases.append(_case(p, heads, groups, n, m, dtype, sequences=sequences))
    cases.append(_case(64, 16, 2, 128, 300, fp16, "packed", "strided", "initial", "gate"))
    return ordered(cases)


def _fit(case: Case) -> Case:
    """The nearest case with whole heads, whole groups of them (one, where `group` is 0) and equal
    sequences."""
    p = head_dim(case)
    unit = p * max(case.group, 1)
    n = -(-case.N // unit) * unit
    k = min(-(-case.K // 8) * 8, _MOST_STATE)
    sequences = case.sequences
    if "packed" not in case.flags and sequences and case.M % sequences:
        sequences = math.gcd(case.M, sequences)
    return replace(case, N=n, K=k, group=case.group or n // p, sequences=sequences)


def _sizes(case: Case) -> tuple[int, int, int]:
    """H, P, G of a case."""
    if case.weight_type not in WEIGHT_TYPES:
        raise ValueError(f"weight_type is {case.weight_type!r}; ssd has {list(WEIGHT_TYPES)}")
    p = head_dim(case)
    heads = case.N // p
    if case.group < 1 or case.N % p or heads % case.group or case.K % 8 or case.K > _MOST_STATE:
        raise ValueError(
            f"N, K, group are {case.N}, {case.K}, {case.group}; N holds heads of {p} values, "
            f"`group` divides their number, and K is a multiple of 8 up to {_MOST_STATE}"
        )
    return heads, p, heads // case.group


def _make_inputs(case: Case, seed: int) -> Inputs:
    heads, p, groups = _sizes(case)
    lengths = sequence_lengths(case)
    packed = "packed" in case.flags
    rows, length = (1, case.M) if packed else (len(lengths), lengths[0])
    rng = rng_for(seed, case.id, "operands")

    def normal(*shape: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    A, bias, raw = rates(case, heads, (rows, length), rng)
    gate = "gate" in case.flags
    # C . B is of size 1, whatever the number of its terms.
    parts = {
        "x": normal(rows, length, heads, p),
        "B": normal(rows, length, groups, case.K, scale=case.K**-0.25),
        "C": normal(rows, length, groups, case.K, scale=case.K**-0.25),
        "z": normal(rows, length, heads, p) if gate else None,
        "dt": raw,
    }
    views = laid_out({k: v for k, v in parts.items() if v is not None}, case)
    D = initial = cu_seqlens = None
    if "plain" not in case.flags:
        D = guarded(normal(heads, p) if "wide-skip" in case.flags else normal(heads))
    if "initial" in case.flags:
        initial = guarded(normal(len(lengths), heads, p, case.K))
    if packed:
        cu_seqlens = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))
    operand = SsdOperand(
        dt=views["dt"], A=guarded(A), B=views["B"], C=views["C"], D=D, z=views.get("z"),
        dt_bias=None if bias is None else guarded(bias), dt_softplus=bias is not None,
        dt_limit=(0.004, 0.05) if "limit" in case.flags else (0.0, float("inf")),
        initial_states=initial, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return Inputs(case, views["x"], operand, operand)


def judged_heads(case: Case) -> list[int]:
    """Heads that the oracle computes: all of them, or where that takes too long the first, the
    last, those at the edges of groups, and some between."""
    heads, p, groups = _sizes(case)
    most = max(2, _JUDGED_VALUES // (p * case.K))
    if heads <= most:
        return list(range(heads))
    per_group = heads // groups
    wanted = [1, heads - 1, per_group, per_group - 1, 0, heads // 2, heads - per_group - 1]
    wanted += list(range(2, heads, 3))
    return sorted(list(dict.fromkeys(h for h in wanted if 0 <= h < heads))[:most])


def _matrix(y: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """y [b, L, h, P] and states [S, h, P, N] as one [M + S N, h P]."""
    width = y.shape[2] * y.shape[3]
    of_states = states.permute(0, 3, 1, 2).reshape(-1, width)
    return torch.cat([y.reshape(-1, width).to(of_states.dtype), of_states])


_ALONE = threading.Lock()


@contextmanager
def _one_thread() -> Iterator[None]:
    """A token's work on a few heads is less than what threads cost to wake, token by token.

    What torch is told here, new threads begin with: only one caller at a time tells it anything.
    """
    if not _ALONE.acquire(blocking=False):
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _ALONE.release()


def _reference(inputs: Inputs) -> F64:
    o: SsdOperand = inputs.source
    with _one_thread():
        y, states = ssd_reference(
            inputs.x.cpu(), o.dt, o.A, o.B, o.C, **o.keywords(), heads=judged_heads(inputs.case)
        )
    return np.asarray(_matrix(y, states).numpy())


def scan_error_model(inputs: Inputs, ref: F64, unit: float = 0.0, step: float = 0.0,
                     exp: float = 0.0) -> ErrorModel:  # fmt: skip
    """The error model of a scan.

    Args:
        unit: unit roundoff of the type that a kernel rounds operands to before it multiplies them;
            0 for float32.
        step: distance of that type's smallest numbers, where it matters.
        exp: relative error of the chip's exp, in units of float32's roundoff.
    """
    case = inputs.case
    heads, p, _ = _sizes(case)
    judged = judged_heads(case)
    with _one_thread():
        of_y, of_states = scan_sigma(inputs.source, inputs.x.cpu(), judged, unit, step, exp)
    sigma = _matrix(of_y, of_states).numpy()
    rounding = np.zeros_like(sigma)
    tokens = slice(0, case.M)
    if case.act_dtype != "float32":
        rounding[tokens] = half_ulp(np.abs(ref[tokens]) + 7 * sigma[tokens], case.dtype)
    columns = None
    if len(judged) < heads:
        columns = (np.array(judged)[:, None] * p + np.arange(p)).reshape(-1)
    return ErrorModel(
        sigma, torch.float32, columns_independent=False, columns=columns, of=case.N,
        rounding=rounding,
    )  # fmt: skip


def operands(inputs: Inputs) -> ScanArgs:
    """The operands as launchers take them, with new results."""
    from tilewright.ops.ssd.op import scan_args

    o: SsdOperand = inputs.weight
    return scan_args(inputs.x, o.dt, o.A, o.B, o.C, **o.keywords())


def results(args: ScanArgs) -> Results:
    """What a launch has written, as a run returns it."""
    return Results((args.y, args.final_states), _matrix)


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Results:
    from tilewright.ops.ssd.op import ssd_scan

    o: SsdOperand = inputs.weight
    chunk = None if tile is not None else chunk_of(inputs.case)
    made = ssd_scan(inputs.x, o.dt, o.A, o.B, o.C, **o.keywords(), chunk=chunk, tile=tile)
    return Results(made, _matrix)


def _space() -> TileSpace:
    from tilewright.ops.ssd.cpu_space import CPU_SPACE

    return CPU_SPACE


def _flops(problem: Problem) -> float:
    """Of the recurrence: a state is decayed, added to, and read; an fma counts as two."""
    return 4.0 * problem.M * problem.N * problem.K


def _bytes(problem: Problem) -> float:
    """x, y, dt, B and C once, and the leaving state of one sequence."""
    heads = problem.N // int(problem.weight_type.removeprefix("p"))
    groups = heads // max(problem.group, 1)
    each = 2 * problem.N + heads + 2 * groups * problem.K
    return float(problem.M * each * DTYPES[problem.act_dtype].itemsize + 4 * problem.N * problem.K)


def _changed(inputs: Inputs, **new: torch.Tensor) -> Inputs:
    operand = replace(inputs.source, **new)
    return replace(inputs, source=operand, weight=operand)


def _middle(inputs: Inputs) -> int:
    return int(inputs.source.B.shape[1]) // 2


def _other_group(inputs: Inputs) -> Inputs | None:
    """One token takes B of the next group."""
    B = inputs.source.B
    if B.shape[2] < 2 or not B.numel():
        return None
    B, t = B.clone(), _middle(inputs)
    B[:, t] = B[:, t].roll(1, dims=1)
    return _changed(inputs, B=B)


def _next_token(inputs: Inputs) -> Inputs | None:
    """One token takes dt of the next one."""
    dt = inputs.source.dt
    t = _middle(inputs)
    if t + 1 >= dt.shape[1]:
        return None
    dt = dt.clone()
    dt[:, t] = dt[:, t + 1]
    return _changed(inputs, dt=dt)


def _other_head(inputs: Inputs) -> Inputs | None:
    """A of the first two heads exchanged."""
    A = inputs.source.A
    if len(A) < 2 or not inputs.x.numel():
        return None
    A = A.clone()
    A[:2] = A[:2].flip(0)
    return _changed(inputs, A=A)


def _flipped_sign(inputs: Inputs) -> Inputs | None:
    """The largest value of C of the last token with the other sign."""
    C = inputs.source.C
    if not C.numel():
        return None
    C = C.clone()
    last = C[-1, -1, 0]
    last[int(last.abs().argmax())] *= -1
    return _changed(inputs, C=C)


def _arch() -> str:
    return cpu_device().arch


def _on_gpu(arch: str | None) -> OpSpec:
    from tilewright.ops.ssd.gpu_spec import gpu_spec

    return gpu_spec(arch)


def _interpreted(arch: str | None) -> OpSpec:
    from tilewright.ops.ssd.gpu_spec import gpu_spec

    return gpu_spec(INTERPRETER, "cpu")


SPEC = OpSpec(
    name=_OP,
    title="SSM_SCAN",
    version=1,
    weight_types=WEIGHT_TYPES,
    cases=_cases(),
    make_inputs=_make_inputs,
    reference=_reference,
    error_model=scan_error_model,
    run=_run,
    flops=_flops,
    bytes=_bytes,
    corruptions={
        "B of the next group": _other_group,
        "dt of the next token": _next_token,
        "A of the next head": _other_head,
        "flipped sign in C": _flipped_sign,
    },
    space=_space,
    sources=("tilewright.ops.ssd.cpu", "tilewright.ops.ssd.step"),
    arch=_arch,
    uses={"chunked": ("torch",)},
    devices={"cuda": _on_gpu, "interpreter": _interpreted},
    fit=_fit,
)
