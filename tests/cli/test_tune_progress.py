"""The progress bar of `tilewright tune`, drawn as on a terminal of a given width."""

from __future__ import annotations

import io
import re
import sys

import pytest

from tilewright.cli.tune import _progress
from tilewright.tiles.tile import Tile
from tilewright.tune.host import Progress

BUDGET_S = 60.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, *states: Progress) -> str:
    """The last line that is drawn before the bar goes, without colors."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with _progress(BUDGET_S) as on_event:
        assert on_event is not None
        for state in states:
            on_event(state)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    lines = [line.strip() for line in re.split(r"[\r\n]+", plain) if line.strip()]
    return lines[-1]


def test_before_the_first_problem_it_says_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    line = drawn(monkeypatch, Progress(seconds_left=60.0, text="verifying planted tiles"))
    assert line.startswith("tune ")
    assert "60 s left 0 tried, 0 rejected" in line
    assert line.endswith("verifying planted tiles")
    assert "best so far" not in line


def test_it_shows_place_time_counts_and_best(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = Progress(index=1, problems=5, tried=3, seconds_left=50.0)
    now = Progress(
        index=2, problems=5, tried=41, rejected=3, best=1.0625, best_tile=Tile.of("panel", mr=8),
        seconds_left=17.4, text="finals",
    )  # fmt: skip
    line = drawn(monkeypatch, earlier, now)
    assert line.startswith("2/5 ")
    assert "17 s left 41 tried, 3 rejected best so far 1.062x panel(mr=8) finals" in line


@pytest.mark.parametrize(("left", "share"), [(60.0, 0.0), (45.0, 0.25), (15.0, 0.75), (0.0, 1.0)])
def test_the_bar_is_the_part_of_the_budget_that_is_spent(
    monkeypatch: pytest.MonkeyPatch, left: float, share: float
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")  # without colors, what is to come is not drawn at all
    with _progress(BUDGET_S) as on_event:
        assert on_event is not None
        on_event(Progress(index=1, problems=1, seconds_left=left))
    last = [line for line in re.split(r"[\r\n]+", screen.getvalue()) if "s left" in line][-1]
    assert last.count("━") + last.count("╸") == pytest.approx(20 * share, abs=1)


def test_text_in_brackets_is_text_and_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    line = drawn(monkeypatch, Progress(seconds_left=1.0, text="[/bold] of [red]"))
    assert line.endswith("[/bold] of [red]")


def test_nothing_is_drawn_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with _progress(BUDGET_S) as on_event:
        assert on_event is None
    assert screen.getvalue() == ""
