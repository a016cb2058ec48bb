"""Specs that lie, one lie each: refused, and the message says which."""

from __future__ import annotations

import sys

import pytest

from tilewright.errors import GateError, UnsupportedError
from tilewright.ops.catalog import SPECS, load_spec
from tilewright.ops.user_spec_audit import audit
from tilewright.tune.gate_proof import prove
from tilewright.tune.verify import verify_op
from user_specs import write_spec

REFERENCE = """\
def reference(inputs):
    x = inputs.x64().reshape(rows_of(inputs), -1)
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)
"""
ORACLE = "    return e / e.sum(axis=1, keepdims=True)\n\n\ndef error_model"
MODEL = "    return ErrorModel(2.0**-24 * ref * (8 + inputs.case.K**0.5), inputs.case.dtype)"
KERNEL = """\
def kernel(x):
    e = torch.exp(x - x.max(dim=1, keepdim=True).values)
    return e / e.sum(dim=1, keepdim=True)
"""
COMPILED = """\
import numba


@numba.njit
def compiled(x, y):
    for m in range(len(x)):
        e = np.exp(x[m] - x[m].max())
        y[m] = e / e.sum()


def kernel(x):
    y = torch.empty(x.shape)
    compiled(x.numpy(), y.numpy())
    return y
"""


def oracle(body: str) -> tuple[str, str]:
    return REFERENCE, f"def reference(inputs):\n    {body}\n"


def ending(expression: str) -> tuple[str, str]:
    return ORACLE, ORACLE.replace("e / e.sum(axis=1, keepdims=True)", expression)


def model(expression: str) -> tuple[str, str]:
    return MODEL, f"    return {expression}"


LIES = {
    "oracle calls run": (
        *oracle("return run(inputs).double().numpy()"),
        r"its oracle calls the kernel .*run\(\) at .*kernel\(\)",
    ),
    "oracle calls the kernel in float64": (
        *oracle("return kernel(inputs.x.double()).numpy()"),
        r"its oracle calls the kernel \(case rows-M1-N33-K33-fp32\): both run kernel\(\) at ",
    ),
    "oracle runs the kernel through the spec": (
        *oracle("return SPEC.run(inputs).double().numpy()"),
        "its oracle calls the kernel",
    ),
    "oracle fails without the kernel": (
        *oracle("return LAST[inputs.case.id]"),
        "its oracle fails without the kernel .*NameError: name 'LAST' is not defined",
    ),
    "empty case list": ("cases=CASES", "cases=()", "its list of cases is empty"),
    "no case with a row": (
        "cases=CASES",
        'cases=(Case("rowsoftmax", "rows", "float32", 0, 8, 8),)',
        "none of its cases has a row",
    ),
    "float32 oracle": (
        *ending("(e / e.sum(axis=1, keepdims=True)).astype(np.float32)"),
        "its oracle returns float32 .*; it must return a float64 numpy array",
    ),
    "tensor for an oracle": (
        *ending("torch.from_numpy(e)"),
        r"its oracle returns torch.float64 .*; it must return a float64 numpy array",
    ),
    "float32 oracle, converted": (
        *ending("(e / e.sum(axis=1, keepdims=True)).astype(np.float32).astype(np.float64)"),
        "its oracle is not float64 .*: every value fits float32",
    ),
    "oracle returns its input": (*oracle("return inputs.x64()"), "its oracle returns its input"),
    "oracle is a constant": (
        *oracle("return np.full((inputs.case.M, inputs.case.K), 1 / 3)"),
        "its oracle gives the same result for other operands",
    ),
    "oracle changes x": (
        *oracle("e = np.exp(inputs.x64()); inputs.x[0, 0] = 0; return e / e.sum()"),
        "its oracle changes its input x",
    ),
    "oracle rolls dice": (
        *ending("e / e.sum() * np.random.default_rng().uniform(0.999, 1.0)"),
        "its oracle does not repeat itself",
    ),
    "operands from a clock": (
        "draw_activations(case, seed))",
        "draw_activations(case, seed) * np.random.default_rng().uniform(1.0, 2.0))",
        "its make_inputs draws other operands from the same seed",
    ),
    "tolerance": (
        *model("ErrorModel(0.02 * np.abs(ref), inputs.case.dtype)"),
        "its tolerance is 0.14 of the result .*; at most 0.1 is allowed",
    ),
    "tolerance through safety": (
        *model("ErrorModel(1e-3 * np.abs(ref), inputs.case.dtype, safety=500.0)"),
        "its tolerance is 0.5 of the result",
    ),
    "endless tolerance": (
        *model("ErrorModel(1e-7 * ref, inputs.case.dtype, safety=float('inf'))"),
        "its tolerance is inf of the result",
    ),
    "sigma is NaN": (
        *model("ErrorModel(ref * float('nan'), inputs.case.dtype)"),
        "its error model holds NaN, Inf or a negative number",
    ),
    "sigma is negative": (
        *model("ErrorModel(-1e-6 * ref, inputs.case.dtype)"),
        "its error model holds NaN, Inf or a negative number",
    ),
    "no error model": (*model("1e-2"), "the spec cannot be audited: AttributeError"),
    "another op's case": (
        "cases=CASES",
        'cases=(*CASES, Case("softmax", "rows", "float32", 1, 8, 8))',
        "its case rows-M1-N8-K8-fp32 is one of op 'softmax'; cases of 'rowsoftmax' belong",
    ),
    "a name of the catalog": (
        "rowsoftmax",
        "mmq",
        "its name is 'mmq', which is an op of the catalog; give it one of its own",
    ),
    "a name that is a path": ("rowsoftmax", "../mmq", "its name is '../mmq'; use letters"),
    "no planted tile": (
        "planted=(PLANTED,)",
        "planted=()",
        "its tile space 'rowsoftmax/cpu' has no planted tile; add one that is wrong and fast",
    ),
    "planted twice": (
        "planted=(PLANTED,)",
        "planted=(PLANTED, PLANTED)",
        "two planted tiles of 'rowsoftmax/cpu' are called 'partial-rows'",
    ),
    "planted without a case": (
        "run_planted, CASES[2:],",
        "run_planted, (),",
        "its planted tile 'partial-rows' has no case to run on",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_spec_that_lies_is_refused(tmp_path, lie):
    old, new, message = LIES[lie]
    path = write_spec(tmp_path, old, new)
    with pytest.raises((GateError, UnsupportedError), match=message) as caught:
        load_spec(f"{path}:SPEC")
    assert str(caught.value).startswith(f"{path}:SPEC: ")
    if isinstance(caught.value, GateError):
        assert "the spec is refused: " in str(caught.value)
        assert caught.value.exit_code == 3


def spoiled(folder, *changes):
    path = write_spec(folder)
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return f"{path}:SPEC"


def test_an_oracle_that_keeps_the_kernels_result_is_refused(tmp_path):
    text = spoiled(
        tmp_path,
        ("import torch\n", "import torch\n\nKEPT = {}\n"),
        (KERNEL, KERNEL.replace("return ", "KEPT[0] = ") + "    return KEPT[0]\n"),
        (ORACLE, ORACLE.replace("return", "return KEPT[0].double().numpy() if KEPT else")),
    )
    with pytest.raises(GateError, match="its oracle follows the kernel's result"):
        load_spec(text)


def test_an_oracle_that_calls_the_compiled_kernel_is_refused(tmp_path):
    body = "y = np.empty(inputs.x.shape); compiled(inputs.x64(), y); return y"
    text = spoiled(tmp_path, (KERNEL, COMPILED), oracle(body))
    with pytest.raises(GateError, match=r"both run the compiled kernel compiled of spec\.py"):
        load_spec(text)


def test_a_compiled_oracle_of_its_own_is_accepted(tmp_path):
    own = COMPILED[: COMPILED.index("def kernel")].replace("compiled", "own")
    body = "y = np.empty(inputs.x.shape); own(inputs.x64(), y); return y"
    text = spoiled(tmp_path, (KERNEL, COMPILED), ("def rows_of", f"{own}def rows_of"), oracle(body))
    assert load_spec(text).name == "rowsoftmax"


def test_what_prepares_operands_for_both_is_refused(tmp_path):
    """A helper that hands the same wrong operand to kernel and oracle hides its own error."""
    text = spoiled(
        tmp_path,
        ("kernel(inputs.x.reshape(rows_of(inputs), -1))", "kernel(flat(inputs))"),
        ("inputs.x64().reshape(rows_of(inputs), -1)", "flat(inputs).double().numpy()"),
        ("def rows_of", "def flat(inputs):\n    return inputs.x.reshape(1, -1)\n\n\ndef rows_of"),
    )
    with pytest.raises(GateError, match=r"both run flat\(\) at spec.py:"):
        load_spec(text)


def test_a_tolerance_of_one_row_is_found(tmp_path):
    """Small over the whole result, and enough for one row to be left out."""
    text = spoiled(
        tmp_path,
        ("((1, 33), (5, 64), (17, 40))", "((17, 33), (2500, 40))"),
        ("CASES[2:]", "CASES[:1]"),
        model(
            "ErrorModel(ref * np.where(np.arange(len(ref)) == 3, 0.7 * (len(ref) > 17), 1e-6)"
            "[:, None], inputs.case.dtype)"
        ),
        ('"rows", "float32", m', '"rows" if m < 18 else "many", "float32", m'),
    )
    with pytest.raises(GateError, match="accepts zeros for row 3 of the result"):
        load_spec(text)


def test_a_planted_tile_that_is_right_is_found_by_the_gate(tmp_path):
    """The audit runs no planted tile; whoever relies on the gate does: verify --gate and tune."""
    honest = prove(load_spec(f"{write_spec(tmp_path)}:SPEC"))
    assert honest.passed, honest.lines()
    (tmp_path / "right").mkdir()
    text = spoiled(tmp_path / "right", ("    y[: len(y) // 16 * 16] =", "    return"),
                   ("kernel(inputs.x)[: len(y) // 16 * 16]", "kernel(inputs.x)"))  # fmt: skip
    proof = prove(load_spec(text))
    assert not proof.passed
    assert "a planted tile got through: rows(block=16, planted=partial-rows)" in proof.lines()[-2]


def test_a_kernel_that_raises_is_no_lie(tmp_path):
    """verify reports it; a machine without the kernel's device can still read the spec."""
    spec = load_spec(spoiled(tmp_path, (KERNEL, "def kernel(x):\n    raise OSError('no GPU')\n")))
    (row,) = verify_op(spec, cases=spec.cases[:1]).rows
    assert row.reason == "crashed: OSError: no GPU"


def test_an_exact_op_may_have_values_of_float32(tmp_path):
    text = spoiled(
        tmp_path,
        oracle("return np.sort(inputs.x64(), axis=1)"),
        (KERNEL, "def kernel(x):\n    return x.sort(dim=1).values\n"),
        model("ErrorModel(0 * ref, inputs.case.dtype)"),
    )
    assert verify_op(load_spec(text)).passed


def test_tracing_leaves_no_trace(tmp_path):
    text = spoiled(tmp_path, (KERNEL, COMPILED))
    spec = load_spec(text)
    module = sys.modules[spec.run.__module__]
    assert type(module.compiled).__module__.startswith("numba.")
    assert sys.getprofile() is None


@pytest.mark.parametrize("name", list(SPECS))
def test_the_catalogs_own_specs_hold(name):
    audit(SPECS[name], name)
