from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fakes import BOS, ByteTokenizer, ScriptedModel
from tilewright.cli.main import cli

Invoke = Callable[..., Result]


class Stage:
    """Runs `tilewright run` on a scripted model and a file that only has to exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.path = path
        path.write_bytes(b"")
        self.model = ScriptedModel(b"hello there")
        self.tokenizer = ByteTokenizer(chat_template="{{ messages }}")
        self.loaded: list[tuple[Path, str]] = []

        def load(path: Path, *, activations: str, device: str) -> tuple[Any, Any]:
            self.loaded.append((path, activations))
            return self.model, self.tokenizer

        monkeypatch.setattr("tilewright.cli.run.load_model", load)

    def run(self, *arguments: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(cli, ["run", str(self.path), *arguments], input=stdin)

    @property
    def fed(self) -> bytes:
        return bytes(i for i in self.model.calls[0][1] if i < 256)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path / "m.gguf")


def test_answer_on_stdout_and_speeds_on_stderr(stage: Stage) -> None:
    result = stage.run("hi")
    assert result.exit_code == 0
    assert result.stdout == "hello there\n"
    assert re.fullmatch(
        r"prefill 15 tokens, [\d.]+ tok/s \| decode 11 tokens, [\d.]+ tok/s \| "
        r"first token after \d+ ms\n",
        result.stderr,
    )
    assert stage.loaded == [(stage.path, "float")]


def test_the_chat_template_is_the_default(stage: Stage) -> None:
    stage.run("hi", "--system", "be kind")
    assert stage.fed == b"[system]be kind[user]hi[reply]"
    assert BOS not in stage.model.calls[0][1]


def test_plain_text_when_asked(stage: Stage) -> None:
    stage.run("hi", "--no-chat-template")
    assert stage.model.calls[0] == ("prefill", [BOS, *b"hi"])


def test_plain_text_and_a_note_when_the_model_has_no_template(stage: Stage) -> None:
    stage.tokenizer.chat_template = None
    result = stage.run("hi")
    assert stage.fed == b"hi"
    assert "no chat template in this model" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["-"]], ids=["left-out", "dash"])
def test_prompt_from_standard_input(stage: Stage, arguments: list[str]) -> None:
    result = stage.run(*arguments, stdin="from a pipe\n")
    assert result.exit_code == 0
    assert b"[user]from a pipe[reply]" in stage.fed


def test_max_tokens_cuts_and_says_so(stage: Stage) -> None:
    result = stage.run("hi", "-n", "3")
    assert result.stdout == "hel\n"
    assert "cut at --max-tokens" in result.stderr


def test_activations_and_threads_are_passed_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int | None] = []
    monkeypatch.setattr("tilewright.cli.run.set_threads", given.append)
    stage.run("hi", "--activations", "int8", "-t", "1")
    assert stage.loaded == [(stage.path, "int8")]
    assert given == [1]


def test_sampling_prints_the_seed_it_drew(stage: Stage) -> None:
    assert re.search(r"\| seed \d+", stage.run("hi", "--temp", "0.7").stderr)
    assert "| seed 5\n" in stage.run("hi", "--temp", "0.7", "--seed", "5").stderr
    assert "seed" not in stage.run("hi").stderr


def test_ctrl_c_keeps_the_text_and_prints_the_stats(stage: Stage) -> None:
    class InterruptedDecoder:
        """Ctrl-C arrives while the fourth token is computed."""

        def __init__(self) -> None:
            self.inner = ScriptedModel(b"hello there").tilewright_decoder()
            self.steps = 0

        def prefill(self, ids: Any) -> Any:
            return self.inner.prefill(ids)

        def step(self, token_id: int) -> Any:
            self.steps += 1
            if self.steps == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return self.inner.step(token_id)

    stage.model.tilewright_decoder = InterruptedDecoder  # type: ignore[assignment, method-assign]
    before = signal.getsignal(signal.SIGINT)
    result = stage.run("hi")
    assert result.exit_code == 0
    assert result.stdout == "hell\n"
    assert "decode 4 tokens" in result.stderr
    assert "interrupted" in result.stderr
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_first_token_aborts(stage: Stage) -> None:
    class StuckDecoder:
        def prefill(self, ids: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)

    stage.model.tilewright_decoder = StuckDecoder  # type: ignore[assignment, method-assign]
    result = stage.run("hi")
    assert result.exit_code == 130
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], "  \n", "standard input is empty"),
        (["hi", "--system", "x", "--no-chat-template"], None, "--system needs a chat template"),
        (["ab\udcff"], None, "PROMPT is not UTF-8 at character 2; convert it first"),
        ([], b"ab\xff", "PROMPT: standard input is not UTF-8 at byte 2; convert it first"),
        (["hi", "--system", "\udcff"], None, "--system is not UTF-8 at character 0"),
    ],
    ids=[
        "empty-stdin",
        "system-without-template",
        "prompt-no-utf8",
        "stdin-no-utf8",
        "system-no-utf8",
    ],
)
def test_usage_errors(
    stage: Stage, arguments: list[str], stdin: str | bytes | None, message: str
) -> None:
    result = stage.run(*arguments, stdin=stdin)
    assert result.exit_code == 2
    assert message in result.stderr
