from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import click
import pytest
from click.testing import CliRunner

from tilewright import __version__
from tilewright.cli import main as main_module
from tilewright.cli.main import cli
from tilewright.errors import (
    FormatError,
    GateError,
    LayoutError,
    MeasureError,
    TileError,
    TilewrightError,
    UnsupportedError,
)

VERBS = [
    "run", "bench", "verify", "tune", "tables", "compare", "ladder", "profile", "isa", "info",
    "perplexity", "demo-model",
]  # fmt: skip


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make `tilewright demo-model` raise what a test puts into `fail_with.error`."""

    def broken(*_: object, **__: object) -> NoReturn:
        raise broken.error  # type: ignore[attr-defined]

    monkeypatch.setattr("tilewright.model.demo.demo_model_path", broken)
    return broken  # type: ignore[return-value]


def test_help_lists_every_verb() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    for verb in VERBS:
        assert f"\n  {verb} " in result.output
    assert "Exit codes" in result.output


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples(verb: str) -> None:
    result = CliRunner().invoke(cli, [verb, "--help"])
    assert result.exit_code == 0
    assert "Examples:\n" in result.output
    assert f"\n    tilewright {verb}" in result.output
    assert result.output.count("--debug") == 1


def test_the_list_of_verbs_cuts_no_line_short() -> None:
    for group in ([], ["tables"]):
        result = CliRunner().invoke(cli, [*group, "--help"], terminal_width=80)
        listed = result.output.partition("Commands:")[2].partition("\n\n")[0]
        assert listed
        assert "..." not in listed


@pytest.mark.parametrize("verb", ["show", "validate", "diff", "join", "export"])
def test_what_a_bug_asks_for_works_on_verbs_of_tables_too(verb: str) -> None:
    result = CliRunner().invoke(cli, ["tables", verb, "--help"])
    assert result.output.count("--debug") == 1


@pytest.mark.parametrize("verb", ["run", "bench", "verify", "tune", "compare", "ladder", "profile"])
@pytest.mark.parametrize("seed", ["-1", str(1 << 63), "1.5"])
def test_a_seed_that_no_generator_takes_is_a_usage_error(verb: str, seed: str) -> None:
    result = CliRunner().invoke(cli, [verb, "--seed", seed])
    assert result.exit_code == 2
    assert f"got '{seed}'; give a whole number from 0 to 2^63 - 1" in result.output


@pytest.mark.parametrize("verb", ["tune", "compare", "ladder"])
def test_a_page_that_could_not_be_written_ends_a_run_before_it_begins(
    verb: str, tmp_path: Path
) -> None:
    page = tmp_path / "nowhere" / "page.html"
    result = CliRunner().invoke(cli, [verb, "--html", str(page)])
    assert result.exit_code == 2
    assert "cannot be written; give a file in a folder that exists" in result.output


def test_version() -> None:
    assert CliRunner().invoke(cli, ["--version"]).output == f"tilewright, version {__version__}\n"


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tilewright.cli.main import main\n"
        "sys.argv = ['tilewright', '--help']\n"
        "try:\n    main()\n"
        "finally:\n"
        "    print(*(m for m in ('torch', 'numba', 'numpy', 'transformers', 'rich', 'triton')"
        " if m in sys.modules), file=sys.stderr)\n"
    )
    seconds = []
    for _ in range(3):
        before = os.times()  # the child's own, which programs beside it do not lengthen
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
        assert done.stderr.strip() == ""
        assert "perplexity" in done.stdout
    assert min(seconds) < 0.5


def test_python_m_tilewright_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tilewright", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert __version__ in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuchverb"], "No such command 'nosuchverb'"),
        (["run", "nosuchfile.gguf", "hi"], "'nosuchfile.gguf' does not exist"),
        (["info"], "Missing argument 'MODEL'"),
        (["bench", ".", "-p", "x"], "got 'x'; give a number"),
        (["bench", ".", "-p", "-5"], "got '-5'; give 0 or more"),
        (["bench", ".", "-pg", "5"], "got '5'; give two counts"),
        (["bench", ".", "-p", "0", "-n", "0"], "no test: give -p, -n or -pg"),
        (["bench", ".", "-o", "xml"], "'xml' is not one of"),
        (["perplexity", "."], "Missing option '--text'"),
        (["perplexity", ".", "--text", "nosuchtext"], "'nosuchtext' does not exist"),
        (["run", ".", "hi", "--temp", "-1"], "-1.0 is not in the range"),
        (["run", ".", "hi", "--top-p", "0"], "0.0 is not in the range"),
        (["run", ".", "hi", "-n", "0"], "0 is not in the range"),
        (["run", ".", "hi", "--activations", "int4"], "'int4' is not one of"),
        (["demo-model", "--model", "llama"], "'llama' is not one of"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_exit_with_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TilewrightError("no"), 1),
        (FormatError("cut short", file="m.gguf", tensor="t", offset=5), 1),
        (LayoutError("no"), 1),
        (UnsupportedError("no"), 1),
        (TileError("no"), 1),
        (MeasureError("no"), 1),
        (GateError("wrong number"), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_our_errors_are_one_message_and_their_exit_code(
    error: TilewrightError, code: int, fail_with: pytest.MonkeyPatch
) -> None:
    fail_with.error = error  # type: ignore[attr-defined]
    result = CliRunner().invoke(cli, ["demo-model"])
    assert result.exit_code == code
    assert result.stderr == f"error: {error}\n"


def test_an_unexpected_error_asks_for_a_report(fail_with: pytest.MonkeyPatch) -> None:
    fail_with.error = ZeroDivisionError("by zero")  # type: ignore[attr-defined]
    result = CliRunner().invoke(cli, ["demo-model"])
    assert result.exit_code == 1
    assert "unexpected error: ZeroDivisionError: by zero\n" in result.stderr
    assert "--debug" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        (["--debug", "demo-model"], None),
        (["demo-model", "--debug"], None),
        (["demo-model"], "1"),
    ],
    ids=["before-the-verb", "after-the-verb", "environment"],
)
def test_the_traceback_is_behind_debug(
    arguments: list[str], variable: str | None, fail_with: pytest.MonkeyPatch
) -> None:
    fail_with.error = ZeroDivisionError("by zero")  # type: ignore[attr-defined]
    result = CliRunner(env={main_module.DEBUG_VARIABLE: variable}).invoke(cli, arguments)
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "ZeroDivisionError: by zero" in result.stderr


def test_ctrl_c_exits_with_130(fail_with: pytest.MonkeyPatch) -> None:
    fail_with.error = KeyboardInterrupt()  # type: ignore[attr-defined]
    result = CliRunner().invoke(cli, ["demo-model"])
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_verbs_are_commands_of_the_names_they_are_listed_by() -> None:
    context = click.Context(cli)
    for verb in VERBS:
        command = cli.get_command(context, verb)
        assert command is not None
        assert command.name == verb
