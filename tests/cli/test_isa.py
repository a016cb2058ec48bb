"""`tilewright isa`: what it prints, in a process that compiles, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

import tilewright
from isa.compiling import HAS_TRITON, NO_TRITON, run_python
from report.isa_data import kernel
from tilewright.cli.isa import isa_command
from tilewright.cli.main import cli
from tilewright.isa.survey import Entry
from user_specs import write_spec

MAIN = "import sys; from tilewright.cli.main import main; sys.argv[0] = 'tilewright'; main()"
LABEL = "legality and resources, not speed"

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)


def isa(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(MAIN, "isa", *arguments)


@needs_triton
def test_two_tiles_as_markdown_with_their_assembly(tmp_path: Path) -> None:
    done = isa(
        "--op", "w4a16", "--arch", "gfx1151,sm_90", "-o", "md", "--asm", str(tmp_path / "asm"),
        "--shape", "256,256", "--m", "64",
        "--tile", "triton(block_k=64, num_stages=2, dequant=asm, order=xw)",
        "--tile", "triton(block_k=64, num_stages=2, dequant=scalar, order=xw)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    amd, nvidia = (part for part in done.stdout.split("w4a16 uint4 float16")[1:])
    for part, arch in ((amd, "gfx1151"), (nvidia, "sm_90")):
        assert f" g=128 M=64 N=256 K=256, {arch}: {LABEL}\n" in part
        assert "|   packed maths " in part
        assert "dequant=asm" in part
        assert "dequant=scalar" in part
    names = {path.name for path in (tmp_path / "asm").iterdir()}
    assert {
        "gfx1151-A-w4a16_kernel.amdgcn", "gfx1151-B-w4a16_kernel.amdgcn",
        "sm_90-A-w4a16_kernel.sass", "sm_90-A-w4a16_kernel.ptxas.log", "sm_90-B-w4a16_kernel.ptx",
    } <= names  # fmt: skip
    assert "v_wmma" in (tmp_path / "asm" / "gfx1151-A-w4a16_kernel.amdgcn").read_text()
    assert "HGMMA" in (tmp_path / "asm" / "sm_90-A-w4a16_kernel.sass").read_text()


@needs_triton
def test_json_with_a_tile_that_is_illegal_on_one_arch_goes_on_and_exits_1() -> None:
    done = isa(
        "--op", "w4a16", "--arch", "gfx1151,sm_80", "-o", "json", "--shape", "256,256",
        "--tile", "triton(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=3, "
        "dequant=packed, order=xw)",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    whole = json.loads(done.stdout)
    assert whole["label"] == LABEL
    amd, nvidia = whole["results"]
    assert "breaks rule 'shared memory'" in amd["error"]
    assert amd["kernels"] == []
    assert nvidia["error"] == ""
    assert nvidia["kernels"][0]["counts"]["matrix"] > 0


@needs_triton
@pytest.mark.parametrize(
    ("words", "shape"),
    [("--op ssd --type p16", "M=64 N=2048 K=128"), ("--op conv1d --type w2", "M=64 N=10240 K=2")],
)
def test_a_shape_that_is_not_asked_for_is_one_of_the_type(words: str, shape: str) -> None:
    done = isa(*words.split(), "--arch", "sm_80", "--m", "64")
    assert done.returncode == 0, done.stderr
    assert shape in done.stdout


EAGER = """\
def kernel(x):
    e = torch.exp(x - x.max(dim=1, keepdim=True).values)
    return e / e.sum(dim=1, keepdim=True)
"""
LAUNCHED = """\
import triton
import triton.language as tl


@triton.jit
def rows_kernel(x_ptr, y_ptr, K, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for at in range(0, K, BLOCK):
        k = at + tl.arange(0, BLOCK)
        total += tl.sum(tl.exp(tl.load(x_ptr + row * K + k, k < K, -float("inf"))), 0)
    for at in range(0, K, BLOCK):
        k = at + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, k < K, 0.0)
        tl.store(y_ptr + row * K + k, tl.exp(x) / total, k < K)


def kernel(x):
    y = torch.empty_like(x)
    rows_kernel[(len(x),)](x, y, x.shape[1], BLOCK=64, num_warps=2)
    return y
"""


@needs_triton
def test_a_kernel_of_ones_own_is_compiled_through_its_spec(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, EAGER, LAUNCHED)
    done = isa(
        "--spec", f"{spec}:SPEC", "--arch", "gfx90a,sm_80", "--shape", "100,100", "--m", "8",
        "--dtype", "float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"rowsoftmax rows float32 M=8 N=100 K=100: {LABEL}" in done.stdout
    assert "gfx90a: rows(block=16)" in done.stdout
    assert "  rows_kernel: loop " in done.stdout


@needs_triton
def test_our_own_spec_of_a_triton_kernel_is_compiled_too() -> None:
    done = isa(
        "--spec", "tilewright.ops.w4a16.triton_spec:SPEC", "--arch", "gfx90a", "--shape", "64,128",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "  _w4a16_kernel: loop " in done.stdout


@needs_triton
def test_an_op_that_launches_no_kernel_says_so(tmp_path: Path) -> None:
    spec = write_spec(
        tmp_path, EAGER, EAGER.replace("    return", "    print(e.sum().item())\n    return")
    )
    done = isa("--spec", f"{spec}:SPEC", "--arch", "gfx90a", "--shape", "100,100")
    assert done.returncode == 1
    assert "its run raises RuntimeError on operands of the meta device" in done.stderr
    spec = write_spec(tmp_path)
    done = isa("--spec", f"{spec}:SPEC", "--arch", "gfx90a", "--shape", "100,100")
    assert "nothing was launched: only Triton and Gluon kernels are compiled" in done.stderr


DEEP = """
import dataclasses as _dataclasses
_given = TRITON_SPACE.default
TRITON_SPACE = _dataclasses.replace(
    TRITON_SPACE, default=lambda problem: _given(problem).replace(num_stages=3)
)
"""


@needs_triton
def test_two_revisions_side_by_side(tmp_path: Path) -> None:
    """The default of the working tree loads three steps ahead; that of the commit does not."""
    source, top = Path(tilewright.__file__).parent, tmp_path / "repo"
    shutil.copytree(
        source, top / "src" / "tilewright", ignore=shutil.ignore_patterns("__pycache__")
    )
    (top / "pyproject.toml").write_text('[project]\nname = "tilewright"\n')
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@t.example", "commit", "-q", "-m", "one"],
    ):
        subprocess.run(["git", "-C", str(top), *words], check=True)
    space = top / "src" / "tilewright" / "ops" / "w4a16" / "triton_space.py"
    space.write_text(space.read_text() + DEEP)
    done = isa(
        "--op", "w4a16", "--arch", "gfx1151", "--tile", "triton(block_m=64, block_k=32)",
        "--shape", "256,256", "--rev", "HEAD", "--rev", ".", "--repo", str(top), "-o", "json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    a, b = json.loads(done.stdout)["results"]
    assert a["revision"].startswith("HEAD (")
    assert b["revision"] == ". (working tree)"
    assert "num_stages=3" not in a["tile"]
    assert "num_stages=3" in b["tile"]
    assert a["kernels"][0]["counts"] != b["kernels"][0]["counts"]


@needs_triton
def test_a_revision_whose_isa_fails_says_what_it_said(tmp_path: Path) -> None:
    package = tmp_path / "src" / "tilewright"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "tilewright"\n')
    said = (
        ("raise SystemExit(\"Error: No such command 'isa'.\")", "has no `tilewright isa`; take a"),
        ("raise SystemExit('error: tile x')", "error: revision . (working tree): tile x"),
    )
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    for code, message in said:
        (package / "__main__.py").write_text(code)
        arms = ("--rev", ".", "--rev", ".", "--repo", str(tmp_path))
        result = CliRunner().invoke(cli, ["isa", "--op", "w4a16", "--arch", "gfx1151", *arms])
        assert result.exit_code == 1
        assert message in result.stderr


@needs_triton
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "moe", "--arch", "gfx1151", "--activations", "int8"],
         "--activations is 'int8'; on GPUs moe takes x as it is: leave it out. mmq has int8"),
        (["--op", "ssd", "--arch", "gfx1151", "--type", "q64"], "--type is 'q64'; ssd has p8, p16"),
        (["--op", "ssd", "--arch", "gfx1151", "--shape", "8192,100"],
         "K is 100, group is 16; of ssd with heads of 64 channels"),
        (["--op", "conv1d", "--arch", "gfx90a", "--shape", "64,3"], "K is 3; of conv1d K is the"),
        (["--op", "gemv", "--arch", "gfx1151"], "op is 'gemv'; the catalog has"),
        (["--op", "w4a16", "--arch", "gfx1151", "--type", "Q4_0"],
         "--type is 'Q4_0'; w4a16 has uint4, uint4b8"),
        (["--op", "w4a16", "--arch", "gfx1151", "--tile", "triton("], "tile is 'triton('"),
        (["--op", "w4a16", "--arch", "gfx1151", "--tile", "panel(mr=8)"],
         "algorithm is 'panel'; the kernels for GPUs are triton"),
        (["--op", "w4a16", "--arch", "gfx1151", "--tile", "triton(block_k=256)"],
         "gfx1151: tile triton(block_k=256"),
        (["--op", "w4a16", "--arch", "gfx1151", "--shape", "64,100", "--group", "64"],
         "group_size is 64; it must be a positive divisor of K = 100"),
        (["--spec", "nothing.py:SPEC", "--arch", "gfx1151"], "there is no file nothing.py"),
    ],
    ids=["activations", "heads", "state", "taps", "op", "type", "text", "algorithm", "rule",
         "group", "spec"],
)  # fmt: skip
def test_errors(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["isa", *arguments])
    assert result.exit_code == 1
    assert message in result.stderr
    assert "unexpected" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "gfx1151"], "give one of --op and --spec"),
        (["--op", "w4a16", "--spec", "a.py:S", "--arch", "gfx1151"], "give one of --op and --spec"),
        (["--op", "w4a16"], "Missing option '--arch'"),
        (["--op", "w4a16", "--arch", "gfx1151,rdna3"], "arch is 'rdna3'"),
        (["--op", "w4a16", "--arch", "gfx1151", "--group", "0"], "or -1 for all of K"),
        (["--op", "w4a16", "--arch", "gfx1151", "--shape", "4096"], "give N,K of the weight"),
        (["--op", "w4a16", "--arch", "gfx1151", "--m", "0"], "0 is not in the range x>=1"),
        (["--op", "w4a16", "--arch", "gfx1151", "--rev", "main"], "--rev is given 1 times"),
        (["--op", "w4a16", "--arch", "gfx1151", "--python", "python3"], "belongs to --rev"),
    ],
    ids=["neither", "both", "no arch", "arch", "group", "shape", "m", "rev", "python"],
)  # fmt: skip
def test_usage_errors(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["isa", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_serialized_wgmma_exits_3(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "ptxas info : (C7515) Potential Performance Loss: wgmma.mma_async are serialized"
    bad = kernel("sm_90", warnings=(line,), failures=(line,))
    entries = [Entry("sm_90", "t(a=1)", "", (kernel("sm_90"),)), Entry("sm_90", "t", "", (bad,))]
    monkeypatch.setattr("tilewright.isa.survey.survey", lambda *_, **__: entries)
    result = CliRunner().invoke(cli, ["isa", "--op", "w4a16", "--arch", "sm_90"])
    assert result.exit_code == 3, result.output
    assert f"  FAILED _gemm: {line}" in result.stdout


def test_code_that_would_be_wrong_exits_3(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "'HADD2 R80' writes the left operand of 'HGMMA R24' while it may be read"
    bad = {**kernel("sm_90"), "faults": (fault,)}
    older = {name: value for name, value in kernel("sm_90").items() if name != "faults"}
    entries = [Entry("sm_90", "t(a=1)", "", (older,)), Entry("sm_90", "t", "", (bad,))]
    monkeypatch.setattr("tilewright.isa.survey.survey", lambda *_, **__: entries)
    result = CliRunner().invoke(cli, ["isa", "--op", "w4a16", "--arch", "sm_90"])
    assert result.exit_code == 3, result.output
    assert f"  FAILED _gemm: {fault}" in result.stdout


DOC = (Path(__file__).parents[2] / "docs" / "isa.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:\$ )?tilewright (isa .*)$", DOC, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_are_understood(command: str) -> None:
    name, *words = shlex.split(command)
    isa_command.make_context(name, words)


@needs_triton
def test_the_page_shows_the_lines_that_are_printed() -> None:
    (command, shown) = re.findall(
        r"```\n\$ tilewright (isa [^\n]*-o md[^\n]*)\n(.*?)```", DOC, re.S
    )[0]
    done = isa(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    assert labels(done.stdout) == labels(shown)


def labels(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
