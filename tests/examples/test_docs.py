"""The walkthrough shows the example as it is, and what its verbs really print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.cli.main import cli

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "bring-your-own-kernel.md").read_text(encoding="utf-8")
EXAMPLE = (ROOT / "examples" / "softmax.py").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SESSIONS = dict(re.findall(r"```\n\$ (.*?)\n(.*?)```", TEXT, re.DOTALL))


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the audit would count the function that fills it as code of the example's."""


@pytest.mark.parametrize("block", CODE, ids=lambda block: block.split("\n")[0].strip()[:30])
def test_code_is_the_examples(block):
    assert block in EXAMPLE


def test_its_length_is_stated():
    assert f"in {len(EXAMPLE.splitlines())} lines" in TEXT


def without_times(text: str) -> str:
    return re.sub(r"\d+\.\d s", "0.0 s", text)


@pytest.mark.parametrize(
    "command", [command for command in SESSIONS if command.startswith("tilewright verify")]
)
def test_what_verify_prints(command, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if "liar.py" in command:
        liar = re.sub(
            r"(?m)^    e = np.exp.*\n.*", "    return run(inputs).double().numpy()", EXAMPLE
        )
        monkeypatch.chdir(tmp_path)
        (tmp_path / "liar.py").write_text(liar)
    else:
        monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(cli, command.split()[1:])
    assert done.exit_code == (3 if "liar.py" in command else 0), done.output
    assert digits(without_times(done.output)) == digits(without_times(SESSIONS[command]))


def digits(text: str) -> str:
    """With numbers to three places: the last ones depend on the CPU's vector unit."""
    return re.sub(r"(\d\.\d{0,3})\d*", r"\1", text)


def test_every_verb_is_shown():
    verbs = {command.split()[1] for command in SESSIONS}
    assert verbs == {"verify", "tune", "compare"}
