"""The page on fleets: its commands are commands, and its numbers are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from tilewright.cli.main import cli
from tilewright.tune.fleet_floor import MOST_RESTARTS
from tilewright.tune.fleet_parts import ATTEMPTS

TEXT = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text(encoding="utf-8")
COMMANDS = [
    found.replace("\\\n", " ") for found in re.findall(r"\$ (tilewright (?:.*\\\n)*.*)\n", TEXT)
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_understood(command: str) -> None:
    _, verb, *words = shlex.split(command)
    given = ["--op", "mmq", "--ray", "auto"] if "..." in words else []
    words = [*given, *(word for word in words if word != "...")]
    command_of = cli.get_command(click.Context(cli), verb)
    assert command_of is not None
    context = command_of.make_context(verb, words)
    assert context.params["ray"]


def test_its_numbers_are_those_of_the_code() -> None:
    words = {3: "three"}
    assert f"at most {words[MOST_RESTARTS]} times" in TEXT
    assert TEXT.count(f"workers, {words[ATTEMPTS]} times with one") == 2
