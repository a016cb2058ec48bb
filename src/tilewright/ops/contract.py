"""The contract of an op: what verify, the tuner, the bench and the tests know about it.

An `OpSpec` is one frozen object an op. It holds no kernel code: `run` imports the op's public
function when it is called, so reading a spec compiles and loads nothing.

::

    case, seed -> make_inputs -> Inputs(x, source, weight, bias)
                                    |  source: the codes,        weight: the bytes that
                                    v  what the oracle reads     v  the kernel reads
                              reference -> float64           run -> y
                                    '--------> check_output <----'   limits: error_model

`source` is drawn first and `weight` is packed from it; the oracle never unpacks what was packed,
so an error of the packing cannot cancel out. Every x lies in a larger buffer filled with NaN, and
GGUF bytes in one filled with 0xFF: a kernel that reads past an edge and uses what it found there
returns NaN or garbage, not a lucky zero.

Corruptions are the negative controls. Each changes the packed operand in one place, as a real
fault would, and a check that does not notice is not a check. They act on the source and pack
anew, so that they hold for the layout of any device.

A new op is a folder with a `spec.py` that defines `SPEC`, and one line in `catalog.py`; an op
outside the package is a file (`tilewright.ops.user_spec`).
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import INTERPRETER, arch_of
from tilewright.ops.check import ErrorModel
from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Problem

__all__ = [
    "DTYPES",
    "FLAGS",
    "ROUTINGS",
    "SCAN_FLAGS",
    "Case",
    "Corruption",
    "Inputs",
    "OpSpec",
    "Results",
    "draw_activations",
    "draw_bias",
    "joined",
    "rng_for",
    "spec_arch",
]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Activation dtypes by the names that `Problem` and `Case` use."""

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

FLAGS = {
    "outliers": "a few activations of 1e3 to 1e4 in every row, and one of 6.2e4",
    "strided": "x is a view whose rows lie further apart than K",
    "transposed": "x is a view whose columns lie apart (K is not its fastest dimension)",
    "ndim3": "x has three dimensions",
    "bias": "the product has a bias",
    "act_order": "the columns of the weight are a permutation of x's",
    "edge": "rows with zero, negative, huge and tiny scales, and codes at both ends",
}
"""What a case may ask for beyond its shape."""

SCAN_FLAGS = {
    "packed": "sequences of many lengths, 0 and 1 among them, lie one behind the other",
    "initial": "sequences begin with a state",
    "plain": "no skip, no bias, and dt as it is",
    "gate": "the result is multiplied with silu(z)",
    "wide-skip": "the skip has a factor for each channel, not for each head",
    "limit": "dt is clamped to a range on both sides",
    "strong": "states decay within a token",
    "weak": "states hardly decay",
    "threshold": "dt lies around 20, where softplus becomes the identity",
    "silu": "the result goes through silu",
    **{f"chunk{q}": f"chunks of {q} tokens" for q in (16, 32, 64, 128, 192, 256, 512)},
}
"""What a case of an op over sequences may ask for as well."""

ROUTINGS = {
    "even": "every row chooses different experts at random",
    "hot": "one expert is the first choice of every row",
    "few": "half of the experts, the first and the last among them, get no row",
    "repeat": "a row may choose an expert more than once",
}
"""How the rows of a case choose among its experts."""

_GUARD = 64
_OUTLIERS = 3
_LARGEST = 6.2e4
_GROUPS_OF_HEADS = ("ssd",)  # ops whose group counts heads, not values of K


@dataclass(frozen=True)
class Case:
    """One product to verify: y[M, N] = x[M, K] @ W[N, K].T (+ bias).

    An op that is no product uses the same names: x is [M, K], y is [M, N]; one that maps rows to
    rows, a softmax for instance, has N = K.

    Attributes:
        op: name of the op in the catalog.
        weight_type: a weight type of that op. An op without weights names its own variant, such
            as "rows": reports and tables group by it, so it is never empty.
        act_dtype: dtype of x and y, a key of DTYPES.
        M, N, K: rows of x, rows of W, columns of both.
        group: values that share one scale, -1 for all of K; 0 when the weight type fixes it.
        activations: "float" or "int8".
        flags: keys of FLAGS and SCAN_FLAGS, sorted.
        experts: matrices [N, K] of a mixture; 0 for an op that has one.
        top_k: experts that each row of x is multiplied with; y is [M, top_k, N].
        routing: a key of ROUTINGS: how rows choose their experts.
        sequences: that the M rows are tokens of, for an op over sequences: 0 for one (or, packed,
            for a few).
    """

    op: str
    weight_type: str
    act_dtype: str
    M: int
    N: int
    K: int
    group: int = 0
    activations: str = "float"
    flags: tuple[str, ...] = ()
    experts: int = 0
    top_k: int = 0
    routing: str = "even"
    sequences: int = 0

    def __post_init__(self) -> None:
        if self.act_dtype not in DTYPES:
            raise ValueError(f"act_dtype is {self.act_dtype!r}; it must be one of {list(DTYPES)}")
        if self.activations not in ("float", "int8"):
            raise ValueError(f"activations is {self.activations!r}; it must be 'float' or 'int8'")
        unknown = sorted(set(self.flags) - set(FLAGS) - set(SCAN_FLAGS))
        if unknown:
            raise ValueError(f"flags hold {unknown}; a case knows {[*FLAGS, *SCAN_FLAGS]}")
        if self.M < 0 or self.N < 1 or self.K < 1:
            raise ValueError(f"M, N, K are {self.M}, {self.N}, {self.K}; M >= 0, N and K >= 1")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing is {self.routing!r}; it must be one of {list(ROUTINGS)}")
        if min(self.experts, self.top_k) < 0 or bool(self.experts) != bool(self.top_k):
            raise ValueError(
                f"experts, top_k are {self.experts}, {self.top_k}; both positive, or both 0"
            )
        if self.sequences < 0:
            raise ValueError(f"sequences is {self.sequences}; it must be at least 0")
        object.__setattr__(self, "flags", tuple(sorted(set(self.flags))))

    @property
    def id(self) -> str:
        """Such as "Q4_1-M17-N97-K576-fp16-int8-bias-strided" or, of a mixture of experts,
        "Q4_K-E8-top2-M17-N97-K512-fp32-hot": unique within an op."""
        group = {0: [], -1: ["gK"]}.get(self.group, [f"g{self.group}"])
        several = [f"S{self.sequences}"] if self.sequences else []
        path = [] if self.activations == "float" else [self.activations]
        mixture = [f"E{self.experts}", f"top{self.top_k}"] if self.experts else []
        shape = [f"M{self.M}", f"N{self.N}", f"K{self.K}", _SHORT[self.act_dtype]]
        routing = [] if self.routing == "even" else [self.routing]
        path += routing
        return "-".join([self.weight_type, *group, *mixture, *several, *shape, *path, *self.flags])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x and y."""
        return DTYPES[self.act_dtype]

    @property
    def weight_key(self) -> tuple[object, ...]:
        """Cases with equal keys multiply the same weight, given the same seed."""
        flags = tuple(f for f in self.flags if f in ("act_order", "edge"))
        key = (self.op, self.weight_type, self.act_dtype, self.N, self.K, self.group, flags)
        return (*key, self.experts) if self.experts else key

    def problem(self, arch: str) -> Problem:
        """The product as a tile table of `arch` sees it; a group of all K values is -1 there, and
        M counts the rows of all experts."""
        whole = self.group == self.K and self.op not in _GROUPS_OF_HEADS
        group = -1 if whole else self.group
        return Problem(
            self.op, arch, self.act_dtype, self.weight_type, self.activations,
            self.M * (self.top_k or 1), self.N, self.K, group,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Inputs:
    """The operands of one case.

    Attributes:
        case: the case they were drawn for.
        x: [..., K] of the case's dtype; M rows in all. Of an op that is no product, any shape.
        source: what the oracle reads beside x: codes and scales, in the op's own class; None for
            an op without weights.
        weight: what the kernel reads, packed from `source` for the device of x.
        bias: [N] of the case's dtype, or None.
    """

    case: Case
    x: torch.Tensor
    source: Any = None
    weight: Any = None
    bias: torch.Tensor | None = None

    def x64(self) -> npt.NDArray[np.float64]:
        """x as float64, its dimensions but the last joined: [M, K] of a product."""
        x = self.x.detach().to("cpu", torch.float64).numpy()
        return np.ascontiguousarray(x.reshape(-1, x.shape[-1]))

    def bias64(self) -> npt.NDArray[np.float64] | None:
        """The bias as float64 [N], or None."""
        if self.bias is None:
            return None
        return np.asarray(self.bias.detach().to("cpu", torch.float64).numpy())


@dataclass(frozen=True, eq=False)
class Results:
    """Several tensors that one launch returns. They are timed as they are and judged as one.

    Attributes:
        parts: the tensors.
        join: parts -> one tensor, of the shape and dtype of the oracle's result.
    """

    parts: tuple[torch.Tensor, ...]
    join: Callable[..., torch.Tensor]


def joined(made: Any) -> Any:
    """What of a run's result is held to the oracle: a tensor itself, or `Results` as one."""
    return made.join(*made.parts) if isinstance(made, Results) else made


Corruption = Callable[[Inputs], Inputs | None]
"""Inputs with one place of the weight changed, in `source` and in `weight`; None where the weight
has no such place (no zero points, a single row)."""


@dataclass(frozen=True, eq=False)
class OpSpec:
    """Everything about an op but its kernels.

    Attributes:
        name: its name in the catalog, "w4a16".
        title: the name that reports print, "W4A16".
        version: raised when the op's meaning changes; tables keep it with their rows.
        weight_types: the weight types it multiplies.
        cases: what `verify` runs.
        make_inputs: (case, seed) -> Inputs. Same arguments, same numbers, in any process.
        reference: Inputs -> the exact result, float64 numpy array of y's shape, from `source`.
        error_model: (Inputs, the exact result) -> what a right result may differ by.
        run: (Inputs, tile=None, threads=None) -> y, or `Results`; tile None lets the op choose as
            it does for its users.
        flops: floating-point operations of a Problem, an fma counted as two.
        bytes: bytes a Problem must move at least: packed weight, x, y.
        corruptions: negative controls by name; none for an op without weights.
        space: () -> the op's tile space; None if it has none.
        deterministic: two runs with one tile and thread count agree bit for bit.
        sources: all modules and packages that the kernels are made of: a table row is stale when
            one of their files has changed. Empty for what `ops.kernel_files` finds.
        arch: () -> the arch of the device that operands lie on; None looks at those of a case.
        uses: per algorithm of the space, the installed packages that its results depend on, as
            `tilewright.tiles.table.Running` keeps them; empty for all.
        devices: (arch, None for the one at hand) -> the same op on another kind of device ("cuda",
            "interpreter"): its operands, tiles and sources, with this op's name and meaning.
        fit: a case of any M, N and K -> the nearest one that the op can have. Those who vary the
            shape of a case call it.
    """

    name: str
    title: str
    version: int
    weight_types: tuple[str, ...]
    cases: tuple[Case, ...]
    make_inputs: Callable[[Case, int], Inputs]
    reference: Callable[[Inputs], npt.NDArray[np.float64]]
    error_model: Callable[[Inputs, npt.NDArray[np.float64]], ErrorModel]
    run: Callable[..., torch.Tensor | Results]
    flops: Callable[[Problem], float]
    bytes: Callable[[Problem], float]
    corruptions: Mapping[str, Corruption] = field(default_factory=dict)
    space: Callable[[], TileSpace] | None = None
    deterministic: bool = True
    sources: tuple[str, ...] = ()
    arch: Callable[[], str] | None = None
    uses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    devices: Mapping[str, Callable[[str | None], OpSpec]] = field(default_factory=dict)
    fit: Callable[[Case], Case] = lambda case: case
    _by_id: dict[str, Case] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_id = {case.id: case for case in self.cases}
        if len(by_id) != len(self.cases):
            raise ValueError(f"{self.name}: two of its cases have the same id")
        object.__setattr__(self, "_by_id", by_id)

    def case(self, case_id: str) -> Case:
        """The case with this id.

        Raises:
            KeyError: there is none.
        """
        if case_id not in self._by_id:
            raise KeyError(f"op {self.name!r} has no case {case_id!r}")
        return self._by_id[case_id]

    def on(self, kind: str, arch: str | None = None) -> OpSpec:
        """This op on a kind of device; itself where it has no operands of its own for that kind.

        Args:
            kind: "cpu", "cuda" or "interpreter", as `tilewright.device.kind_of` names it.
            arch: of the device; None for that of the one at hand.
        """
        return self.devices[kind](arch) if kind in self.devices else self

    def with_run(self, run: Callable[..., torch.Tensor | Results]) -> OpSpec:
        """The same op computed by another function: a kernel under development, a test's own."""
        return replace(self, run=run)


@functools.lru_cache(maxsize=64)
def spec_arch(spec: OpSpec) -> str:
    """The arch of the device that a spec's operands lie on, as in tile tables."""
    if spec.arch is not None:
        return spec.arch()
    smallest = min((c for c in spec.cases if c.M), key=lambda c: c.M * c.N * c.K)
    x = spec.make_inputs(smallest, 0).x
    if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return INTERPRETER
    return arch_of(x.device)


def rng_for(seed: int, *parts: object) -> np.random.Generator:
    """A generator that depends on `seed` and on what it is for, the same in every process."""
    digest = hashlib.sha256(repr((seed, *parts)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def draw_activations(case: Case, seed: int) -> torch.Tensor:
    """x of a case: standard normal values, and what its flags ask for.

    Returns:
        [M, K] of the case's dtype, [a, M/a, K] with "ndim3". A view into a buffer of NaN: there
        are NaN before it, behind it and in every gap between its rows or columns.
    """
    m, k = case.M, case.K
    rng = rng_for(seed, case.id, "x")
    values = rng.standard_normal((m, k), dtype=np.float32)
    if "outliers" in case.flags and m:
        for row in range(m):
            at = rng.choice(k, size=min(_OUTLIERS, k), replace=False)
            values[row, at] *= rng.uniform(1e3, 3e3, len(at))
        values[rng.integers(m), rng.integers(k)] = _LARGEST
        values = np.clip(values, -_LARGEST, _LARGEST)
    column = 1
    row = k
    if "strided" in case.flags:
        row = k + 24
    if "transposed" in case.flags:
        column, row = m + 3, 1
    span = (m - 1) * row + (k - 1) * column + 1 if m else 0
    buffer = torch.full((_GUARD + span + _GUARD,), float("nan"), dtype=case.dtype)
    x = buffer.as_strided((m, k), (row, column), _GUARD)
    x.copy_(torch.from_numpy(values))
    if "ndim3" in case.flags:
        outer = 2 if m % 2 == 0 else 1
        x = x.unflatten(0, (outer, m // outer))
    return x


def draw_bias(case: Case, seed: int) -> torch.Tensor | None:
    """The bias of a case, [N] of its dtype, or None without the flag."""
    if "bias" not in case.flags:
        return None
    values = rng_for(seed, case.id, "bias").standard_normal(case.N, dtype=np.float32)
    return torch.from_numpy(values).to(case.dtype)
