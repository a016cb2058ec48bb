"""Whether a spec can tell right from wrong; one that cannot is refused with the reason.

Read from the spec itself:

* a name of its own, cases, and among them some with a row; cases of this op;
* a tile space, where there is one, with a planted tile that its own rules refuse.

Found by running its smallest cases:

* The oracle returns float64 that was computed as such: values that all fit float32 were not,
  unless the error model says that the result is exact.
* It depends on its operands, is not one of them, changes none, and repeats itself.
* It stands without the kernel. It is asked before the kernel first runs; then the kernel runs, its
  result is overwritten, and the oracle must still say the same. Both are traced: no function that
  handles arrays, and no compiled kernel, may serve both of them. This package's own contract,
  formats and oracles, and numpy, torch and scipy, may.
* The error model is finite, allows at most `TOLERANCE` (root mean square, relative to the result),
  and rejects a result one row of which is zero.

What the planted tiles do is the gate's to find, which runs them: `tilewright verify --gate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.errors import GateError, UnsupportedError
from tilewright.ops.check import ErrorModel, check_output
from tilewright.ops.contract import Case, Inputs, OpSpec
from tilewright.ops.user_spec_trace import shared_code, traced

__all__ = ["TOLERANCE", "audit"]

F64 = npt.NDArray[np.float64]

TOLERANCE = 0.1
"""The largest error, relative to the result, that an error model may allow."""

_ENOUGH_VALUES = 16
_MANY_VALUES = 256
_MOST_ROWS = 16
_SEED = 20_231


def audit(spec: OpSpec, where: str) -> None:
    """Refuse a spec that cannot tell right from wrong.

    Args:
        spec: the op.
        where: what messages call it: the text that it was loaded by.

    Raises:
        UnsupportedError: it is incomplete.
        GateError: it lies.
    """
    try:
        incomplete = next(_incomplete(spec), None)
        lie = None if incomplete is not None else next(_lies(spec), None)
    except Exception as error:
        raise UnsupportedError(
            f"{where}: the spec cannot be audited: {type(error).__name__}: {error}"
        ) from error
    if incomplete is not None:
        raise UnsupportedError(f"{where}: {incomplete}")
    if lie is not None:
        raise GateError(f"{where}: the spec is refused: {lie}")


def _incomplete(spec: OpSpec) -> Iterator[str]:
    from tilewright.ops.catalog import SPECS

    if not spec.name.replace("_", "").replace("-", "").isalnum():
        yield f"its name is {spec.name!r}; use letters, digits, '_' and '-': it names a table"
    if spec.name in SPECS and SPECS[spec.name] is not spec:
        yield f"its name is {spec.name!r}, which is an op of the catalog; give it one of its own"
    foreign = next((case for case in spec.cases if case.op != spec.name), None)
    if foreign is not None:
        yield f"its case {foreign.id} is one of op {foreign.op!r}; cases of {spec.name!r} belong"
    if spec.space is not None:
        space = spec.space()
        if not space.fields:
            yield f"its tile space {space.name!r} has no fields; a spec without tiles has no space"


def _lies(spec: OpSpec) -> Iterator[str]:
    if not any(case.M for case in spec.cases):
        yield "its list of cases is empty" if not spec.cases else "none of its cases has a row"
        return
    if spec.space is not None:
        yield from _planted_reasons(spec)
    small = sorted((c for c in spec.cases if c.M), key=lambda c: (c.M * c.N * c.K, c.id))
    probe = next((c for c in small if c.M * c.N >= _ENOUGH_VALUES), small[0])
    yield from _oracle_reasons(spec, probe)
    for case in _one_of_each_kind(small):
        yield from _model_reasons(spec, case)


def _one_of_each_kind(small: list[Case]) -> list[Case]:
    """Of each type, dtype, path and set of flags the smallest case with enough results to judge a
    tolerance by: a few results may be small by cancellation alone."""
    kinds: dict[tuple[object, ...], Case] = {}
    for case in small:
        kind = (case.weight_type, case.act_dtype, case.activations, case.flags)
        kept = kinds.setdefault(kind, case)
        if kept.M * kept.N < min(_MANY_VALUES, case.M * case.N):
            kinds[kind] = case
    return list(kinds.values())


def _planted_reasons(spec: OpSpec) -> Iterator[str]:
    space = spec.space()  # type: ignore[misc]
    if not space.planted:
        yield (
            f"its tile space {space.name!r} has no planted tile; add one that is wrong and fast, "
            "which the gate must reject"
        )
    names = [planted.name for planted in space.planted]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        yield f"two planted tiles of {space.name!r} are called {repeated!r}"
    for planted in space.planted:
        if not planted.cases:
            yield f"its planted tile {planted.name!r} has no case to run on"


def _oracle_reasons(spec: OpSpec, case: Case) -> Iterator[str]:
    at = f"case {case.id}"
    inputs = spec.make_inputs(case, _SEED)
    x = inputs.x.detach().clone()
    try:
        first = spec.reference(inputs)
    except Exception as error:
        yield f"its oracle fails without the kernel ({at}): {type(error).__name__}: {error}"
        return
    if not isinstance(first, np.ndarray) or first.dtype != np.float64:
        kind = getattr(first, "dtype", type(first).__name__)
        yield f"its oracle returns {kind} ({at}); it must return a float64 numpy array"
        return
    first = first.copy()
    if not _equal(x, inputs.x):
        yield f"its oracle changes its input x ({at})"
    if not _equal(x, spec.make_inputs(case, _SEED).x):
        yield f"its make_inputs draws other operands from the same seed ({at})"
    if not _same(first, spec.reference(spec.make_inputs(case, _SEED))):
        yield f"its oracle does not repeat itself ({at})"
    yield from _dependence(spec, inputs, first, at)
    if first.size == x.numel() and np.array_equal(first.reshape(-1), inputs.x64().reshape(-1)):
        yield f"its oracle returns its input ({at})"
    exact = not np.any(np.asarray(spec.error_model(inputs, first).sigma) > 0)
    if _fits_float32(first) and not exact:
        yield (
            f"its oracle is not float64 ({at}): every value fits float32, so it was computed in "
            "float32 and converted"
        )
    if _same(first, spec.reference(spec.make_inputs(case, _SEED + 1))):
        yield f"its oracle gives the same result for other operands ({at})"


def _dependence(spec: OpSpec, inputs: Inputs, first: F64, at: str) -> Iterator[str]:
    """Whether the oracle stands without the kernel. A kernel that raises is verify's to report."""
    # Both have run once before they are traced, so that nothing compiles while it is.
    with contextlib.suppress(Exception):
        _overwrite(spec.run(inputs))
    if not _same(first, spec.reference(inputs)):
        yield f"its oracle follows the kernel's result ({at}): it changed when that was overwritten"
        return
    kernel = traced(lambda: spec.run(inputs))
    oracle = traced(lambda: spec.reference(inputs))
    shared = shared_code(kernel, oracle)
    if shared:
        yield (
            f"its oracle calls the kernel ({at}): both run {', '.join(shared)}; an error there "
            "would be in both and cancel out. Write the oracle in float64 numpy"
        )


def _overwrite(y: Any) -> None:
    if isinstance(y, torch.Tensor) and y.is_floating_point():
        y.detach().fill_(float("nan"))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    return a.shape == b.shape and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))


def _same(a: F64, b: F64) -> bool:
    return np.shape(a) == np.shape(b) and np.array_equal(a, b, equal_nan=True)


def _fits_float32(ref: F64) -> bool:
    values = ref[np.isfinite(ref) & (ref != 0)]
    if len(values) < _ENOUGH_VALUES:
        return False
    with np.errstate(over="ignore"):
        return bool(np.all(values.astype(np.float32) == values))


def _model_reasons(spec: OpSpec, case: Case) -> Iterator[str]:
    at = f"case {case.id}"
    inputs = spec.make_inputs(case, _SEED)
    ref = spec.reference(inputs)
    model: Any = spec.error_model(inputs, ref)
    if not isinstance(model, ErrorModel):
        yield f"its error_model returns {type(model).__name__} ({at}); it must be an ErrorModel"
        return
    sigma = np.asarray(model.sigma, dtype=np.float64)
    if not (np.isfinite(sigma).all() and (sigma >= 0).all()):
        yield f"its error model holds NaN, Inf or a negative number ({at})"
        return
    power = float(np.mean(np.square(ref))) if ref.size else 0.0
    if power == 0:
        return
    allowed = model.safety * float(np.sqrt(np.mean(np.square(sigma)) / power))
    if not allowed <= TOLERANCE:
        yield (
            f"its tolerance is {allowed:.3g} of the result ({at}); at most {TOLERANCE} is allowed. "
            "Derive sigma from the operands as tilewright.ops.check does"
        )
        return
    row = _zeroed_row(ref, model)
    if row is not None:
        yield f"its error model accepts zeros for row {row} of the result ({at})"


def _zeroed_row(ref: F64, model: ErrorModel) -> int | None:
    """A row as large as the others that may be zero instead; of many rows, some are tried."""
    exact = torch.from_numpy(ref).to(model.out_dtype)
    rows = exact.reshape(-1, ref.shape[-1] if ref.ndim else 1)
    if rows.shape[1] < _ENOUGH_VALUES:
        return None
    size = rows.double().square().mean(dim=1).sqrt()
    for row in sorted({*range(min(len(rows), _MOST_ROWS)), len(rows) - 1}):
        kept = rows[row].clone()
        rows[row] = 0
        if size[row] >= size.median() / 2 and check_output(exact, ref, model).passed:
            return row
        rows[row] = kept
    return None
