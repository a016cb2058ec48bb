"""The report page as Chromium draws it: skipped where there is no Chromium or no Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from report import page_data as d
from tilewright.report.page import join_sections, render_page, sections_of, write_page

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
)

pytestmark = pytest.mark.slow

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on the PATH: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    tune, compare = d.tune_report().to_dict(), d.compare_result()
    ladder, origin = d.ladder_result().to_dict(), d.PROVENANCE
    parts = [sections_of("tune", tune), sections_of("compare", compare, provenance=origin)]
    return {
        "tune": write_page("tune", tune, folder / "tune.html"),
        "compare": write_page("compare", compare, folder / "compare.html", provenance=origin),
        "ladder": write_page("ladder", ladder, folder / "ladder.html", provenance=origin),
        "table": write_page("table", d.table(), folder / "table.html"),
        "joined": render_page(join_sections(*parts), folder / "joined.html"),
    }


@dataclass
class View:
    """An open page and everything that it said or asked for since."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def marks(self, chart: str) -> int:
        """Drawn points of a chart's scatter traces."""
        return int(self.page.locator(f"#{chart} .scatterlayer path.point").count())

    def chosen(self, chart: str, field: str) -> Any:
        """The select of a heat map's field."""
        return self.page.locator(f"[data-controls={chart}] select[data-field='{field}']")

    def detail(self, chart: str) -> str:
        return str(self.page.locator(f"[data-detail={chart}]").text_content())

    def overflow(self) -> list[Any]:
        """How far the document, and any box that does not scroll, is wider than the window."""
        return list(
            self.page.evaluate(
                """() => [document.documentElement.scrollWidth - innerWidth,
                  ...[...document.querySelectorAll("section, .scroll, figure, svg, select, dl")]
                  .filter((e) => e.getClientRects().length)
                  .map((e) => Math.ceil(e.getBoundingClientRect().right - innerWidth))]
                  .filter((over) => over > 0)"""
            )
        )


@pytest.fixture
def see(chromium: Any, pages: dict[str, Path]) -> Iterator[Any]:
    contexts = []

    def open_page(name: str, width: int = 1280, scheme: str = "light") -> View:
        context = chromium.new_context(
            viewport={"width": width, "height": 1000}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        view = View(context.new_page())
        view.page.on("console", lambda message: view.said.append(f"{message.type}: {message.text}"))
        view.page.on("pageerror", lambda error: view.said.append(f"error: {error}"))
        view.page.on("request", lambda request: view.asked.append(request.url))
        view.page.on("dialog", lambda dialog: view.said.append(f"dialog: {dialog.message}"))
        view.page.goto(pages[name].as_uri())
        if name != "table":
            view.page.wait_for_selector("html[data-drawn=yes]", state="attached", timeout=60_000)
        return view

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("name", "scheme"),
    [("tune", "light"), ("compare", "light"), ("ladder", "dark"), ("table", "light"),
     ("joined", "dark")],
)  # fmt: skip
def test_a_page_is_drawn_and_fits(name: str, scheme: str, width: int, see: Any) -> None:
    view = see(name, width, scheme)
    assert view.said == []
    assert len(view.asked) == 1
    assert view.asked[0].endswith(f"{name}.html")
    assert "owned" not in view.page.title()
    assert view.page.locator("#undrawn").count() == 0
    for chart in view.page.locator(".chart").all():
        assert chart.locator("svg.main-svg").count() > 0
        assert chart.locator("svg path").count() > 5
        assert chart.bounding_box()["height"] > 100
    view.page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert view.overflow() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_pointing_at_a_rejected_tile_shows_its_reason(width: int, see: Any) -> None:
    view = see("tune", width)
    point = view.page.locator("#chart-0 .scatterlayer .trace").first.locator("path.point").last
    point.hover(force=True)
    label = view.page.locator("#chart-0 .hoverlayer .hovertext")
    label.wait_for()
    problem = d.tune_report().problems[0]
    rejected = [
        c for c in problem.candidates
        if c.tile.algorithm == "panel" and (c.tile.mr, c.tile.nv) == (12, 4)
    ]  # fmt: skip
    assert len(rejected) == 2
    shown = "".join(label.text_content().split())
    for candidate in rejected:
        said = f"rejected by the gate's check oracle on {candidate.outcome.case}"
        for text in (str(candidate.tile), said, candidate.outcome.reason):
            assert text in view.detail("chart-0")
            assert "".join(text.split()) in shown
    box = label.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert "owned" not in view.page.title()
    assert view.said == []


def test_the_heat_map_marks_what_is_in_the_data(see: Any) -> None:
    view = see("tune")
    names = [t.text_content() for t in view.page.locator("#chart-0 .legendtext").all()]
    assert names == [
        "rejected: wrong result", "rejected: did not run", "some tiles rejected",
        "tile from now on",
    ]  # fmt: skip
    assert view.marks("chart-0") == 2 + 1 + 2 + 1  # (12, 3..4); (8, 4); (12, 1..2); the winner
    view.chosen("chart-0", "block_parts").select_option(label="16")
    # (12, 3..4) wrong, (8, 4) stopped, (12, 1..2) passed with 16 parts, the tile before at (8, 3)
    assert view.marks("chart-0") == 2 + 1 + 1
    view.chosen("chart-0", "across").select_option("block_parts")
    assert view.chosen("chart-0", "down").input_value() == "nv"
    assert view.page.locator("#chart-0 .xtick text").count() == 2
    assert view.page.locator("#chart-0 .ytick text").count() == 4
    view.chosen("chart-0", "algorithm").select_option("blas")
    assert view.page.locator("#chart-0 .xtick text").count() == 2
    assert view.marks("chart-0") == 1
    assert view.said == []


def test_the_heat_map_changes_its_product(see: Any) -> None:
    view = see("tune")
    view.chosen("chart-0", "product").select_option("1")
    assert view.chosen("chart-0", "algorithm").count() == 0
    assert view.page.locator("#chart-0 .xtick text").count() == 4
    assert view.marks("chart-0") == 1
    point = view.page.locator("#chart-0 .scatterlayer path.point").first
    point.click(force=True)
    assert view.detail("chart-0").startswith("dot(threads=0, unroll=4)")
    assert view.said == []


def test_controls_keep_the_focus_when_used_from_the_keyboard(see: Any) -> None:
    view = see("tune")
    down = view.chosen("chart-0", "down")
    down.focus()
    view.page.keyboard.press("ArrowUp")
    assert view.page.evaluate("document.activeElement.dataset.field") == "down"
    tables = view.page.locator(".scroll[tabindex='0'][role=region]")
    assert tables.count() == view.page.locator("table").count() > 0


def test_the_paired_plot_follows_its_select(see: Any) -> None:
    view = see("compare")
    chart = view.page.locator("select[data-chart]").get_attribute("data-chart")
    before = view.marks(chart)
    assert before == 5 * 20
    assert view.detail(chart).startswith("B is faster than A: 1.05")
    view.page.locator(f"select[data-chart={chart}]").select_option("1")
    assert view.detail(chart).startswith("B is slower than A: 0.9")
    assert view.marks(chart) == before
    view.page.locator(f"select[data-chart={chart}]").select_option("2")
    assert view.detail(chart).startswith("Proves nothing: the check after timing failed")
    assert view.said == []


def test_the_ladder_draws_every_rung_and_crosses_the_wrong_one(see: Any) -> None:
    view = see("ladder")
    assert view.marks("chart-0") == 3 * 5
    labels = [t.text_content() for t in view.page.locator("#chart-0 .annotation-text").all()]
    assert len(labels) == 5
    assert sum("WRONG" in label for label in labels) == 1
    view.page.locator("#chart-0 .scatterlayer .trace").first.locator("path.point").nth(2).hover(
        force=True
    )
    label = view.page.locator("#chart-0 .hoverlayer .hovertext")
    label.wait_for()
    assert "WRONG: product 3 is wrong" in label.text_content()
    assert view.said == []


def test_colors_follow_the_display(see: Any) -> None:
    view = see("compare")
    line = view.page.locator("#chart-0 .legendtext").first
    light = line.evaluate("(e) => getComputedStyle(e).fill")
    view.page.emulate_media(color_scheme="dark")
    view.page.wait_for_function(
        "(was) => getComputedStyle(document.querySelector('#chart-0 .legendtext')).fill !== was",
        arg=light,
    )
    assert light == "rgb(27, 31, 36)"
    assert line.evaluate("(e) => getComputedStyle(e).fill") == "rgb(230, 234, 239)"


def test_a_window_made_narrow_still_fits(see: Any) -> None:
    view = see("joined")
    view.page.set_viewport_size({"width": 390, "height": 844})
    view.page.wait_for_function(
        "() => [...document.querySelectorAll('.chart svg')]"
        ".every((e) => e.getBoundingClientRect().right <= innerWidth)"
    )
    assert view.overflow() == []


def test_tables_stand_alone_without_scripts(chromium: Any, pages: dict[str, Path]) -> None:
    context = chromium.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(pages["tune"].as_uri())
    assert page.get_by_text("Every figure in them also stands in the tables").is_visible()
    assert page.locator("table").first.is_visible()
    rows = page.get_by_text("Every tile tried on mlp.down_proj").first
    rows.click()
    assert page.get_by_text("it did not finish in 20 s").first.is_visible()
    context.close()
