from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from report import page_data as d
from report.page_reader import Page, read_page
from tilewright.errors import UnsupportedError
from tilewright.report.page import (
    join_sections,
    page_html,
    render_page,
    sections_of,
    write_page,
)

RESULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tune": lambda: d.tune_report().to_dict(),
    "compare": d.compare_result,
    "ladder": lambda: d.ladder_result().to_dict(),
    "table": d.table,
    "verify": lambda: d.VERIFICATION,
}
CHARTS = {"tune": 3, "compare": 2, "ladder": 4, "table": 0, "verify": 0}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Page]]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {kind: write_page(kind, make(), folder / f"{kind}.html", provenance=d.PROVENANCE)
             for kind, make in RESULTS.items()}  # fmt: skip
    return {kind: (path, read_page(path)) for kind, path in paths.items()}


def page_of(sections: dict[str, Any]) -> Page:
    return read_page(page_html(sections))


@pytest.mark.parametrize("kind", RESULTS)
def test_a_page_is_whole_and_loads_nothing(
    kind: str, written: dict[str, tuple[Path, Page]]
) -> None:
    page = written[kind][1]
    assert page.unclosed == []
    (html,) = page.named("html")
    assert html["lang"] == "en"
    assert {"width=device-width, initial-scale=1"} <= {m.get("content") for m in page.named("meta")}
    assert len(page.named("h1")) == len(page.named("main")) == 1
    loading = {"src", "srcset", "data", "action", "poster", "background"}
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert not loading & set(attributes), (tag, attributes)
        assert attributes.get("href", "#").startswith("#")
    css = (
        Path(d.__file__).parents[2] / "src/tilewright/report/page/templates/page.css"
    ).read_text()
    assert "url(" not in css
    assert "@import" not in css


@pytest.mark.parametrize("kind", RESULTS)
def test_the_policy_runs_the_page_s_own_scripts_and_no_other(
    kind: str, written: dict[str, tuple[Path, Page]]
) -> None:
    page = written[kind][1]
    (policy,) = [
        m["content"] for m in page.named("meta") if m.get("http-equiv", "").startswith("Content-")
    ]
    rules = dict(part.split(" ", 1) for part in policy.split("; "))
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
        for body in page.running
    ]
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == (" ".join(hashes) or "'none'")
    assert len(page.running) == (2 if CHARTS[kind] else 0)
    assert sum("plotly.js v" in body[:100] for body in page.running) == (1 if CHARTS[kind] else 0)


@pytest.mark.parametrize("kind", RESULTS)
def test_hostile_texts_are_shown_and_inert(
    kind: str, written: dict[str, tuple[Path, Page]]
) -> None:
    page = written[kind][1]
    assert len(page.scripts) == (3 if CHARTS[kind] else 0)
    handlers = [a for _, attributes in page.elements for a in attributes if a.startswith("on")]
    assert handlers == []
    shown = {"tune": 3, "compare": 4, "ladder": 2, "table": 0, "verify": 1}
    assert sum(text in page.text for text in d.HOSTILE) == shown[kind]
    for attributes, body in page.scripts:
        if attributes.get("type") == "application/json":
            assert "<" not in body
            assert "owned" in body


@pytest.mark.parametrize("kind", [kind for kind, count in CHARTS.items() if count])
def test_every_chart_is_described_and_is_a_figure_that_plotly_accepts(
    kind: str, written: dict[str, tuple[Path, Page]]
) -> None:
    import plotly.graph_objects as go

    page = written[kind][1]
    charts = page.data
    assert len(charts) == CHARTS[kind]
    images = {e["id"]: e["aria-label"] for e in page.named("div") if e.get("role") == "img"}
    assert set(images) == set(charts)
    assert all(len(alt) > 40 for alt in images.values())
    for figure in (f for chart in charts.values() for f in chart.get("figures", ())):
        plain = json.loads(re.sub(r'"@[a-z]+"', '"#123456"', json.dumps(figure)))
        made = go.Figure(plain["data"], plain["layout"])
        assert len(made.data) == len(figure["data"]) > 0


def test_a_color_of_a_figure_is_one_of_the_page_in_light_and_dark() -> None:
    css, used = _css(), set()
    for kind, make in RESULTS.items():
        data = page_of(sections_of(kind, make())).data
        used |= set(re.findall(r'"@([a-z]+)"', json.dumps(data)))
    script = (_templates() / "page.js").read_text()
    used |= set(re.findall(r'"@([a-z]+)"', script)) | set(re.findall(r'css\("([a-z]+)"\)', script))
    assert used
    for look in _looks(css):
        assert used <= set(look)


@pytest.mark.parametrize("look", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("text", "ground"),
    [
        ("ink", "page"), ("ink", "surface"), ("muted", "page"), ("muted", "surface"),
        ("link", "page"), ("good", "good-bg"), ("bad", "bad-bg"), ("ink", "plain-bg"),
        ("ink", "head"), ("a", "surface"), ("b", "surface"), ("c", "surface"),
        ("ink", "bad-bg"), ("bad", "surface"), ("good", "surface"),
    ],
    ids="-on-".join,
)  # fmt: skip
def test_colors_have_the_contrast_of_wcag_aa(look: int, text: str, ground: str) -> None:
    colors = _looks(_css())[look]
    high, low = sorted((_luminance(colors[text]), _luminance(colors[ground])), reverse=True)
    assert (high + 0.05) / (low + 0.05) >= 4.5


def _templates() -> Path:
    return Path(__file__).parents[2] / "src/tilewright/report/page/templates"


def _css() -> str:
    return (_templates() / "page.css").read_text()


def _looks(css: str) -> list[dict[str, str]]:
    return [dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
            for block in re.findall(r":root \{(.*?)\}", css, re.S)]  # fmt: skip


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_ratio_and_time_in_a_table_has_a_verdict_beside_it(
    written: dict[str, tuple[Path, Page]],
) -> None:
    checked = 0
    for kind in RESULTS:
        for table in written[kind][1].tables:
            verdicts = [c for c in table.columns if c.startswith("verdict") or c == "gate"]
            timed = [c for c in table.columns if c.startswith(("ratio", "worth", "median"))]
            for name in timed:
                assert verdicts, (kind, table.caption)
                for figure, row in zip(table.column(name), table.rows, strict=True):
                    beside = [row[table.columns.index(v)] for v in verdicts]
                    assert not figure or all(beside), (kind, table.caption, row)
                    checked += bool(figure)
    assert checked > 60


def test_no_figure_stands_beside_a_rejected_tile(written: dict[str, tuple[Path, Page]]) -> None:
    page = written["tune"][1]
    table = page.table("Every tile tried on mlp.down_proj")
    rejected = [row for row in table.rows if "REJECTED" in row]
    report = RESULTS["tune"]()["problems"][0]
    assert len(table.rows) == report["tried"]
    assert len(rejected) == sum(report["rejected"].values()) > 0
    for name in ("median in the rounds", "over the tile in use"):
        at = table.columns.index(name)
        assert all(row[at] == "" for row in rejected)
    reasons = {row[table.columns.index("reason")] for row in rejected}
    assert reasons == {" ".join(c["reason"].split()) for c in report["candidates"] if c["reason"]}


def test_planted_tiles_are_listed_with_what_caught_them(
    written: dict[str, tuple[Path, Page]],
) -> None:
    table = written["tune"][1].table("Tiles that are wrong on purpose")
    assert table.column("by") == ["oracle", "guard-bands", "stale-buffer"]
    assert set(table.column("gate")) == {"REJECTED"}


def test_provenance_of_a_table_is_complete(written: dict[str, tuple[Path, Page]]) -> None:
    page = written["table"][1]
    for text in (d.HEADER.kernel_hash, d.HEADER.compiler, d.HEADER.date, d.HEADER.device, d.ARCH):
        assert text in page.text
    table = page.table("Rows of the table")
    assert table.column("samples") == ["20", "20", "20"]
    assert table.column("spread") == ["1.5 us"] * 3
    assert table.column("oracle error") == ["0.3"] * 3
    assert table.column("tried") == ["32"] * 3
    assert (
        table.column("rejected")[0] == "2 by the check oracle, 1 because it did not finish in time"
    )
    assert table.column("source") == ["tuned", "tuned", "published"]
    assert table.column("verdict") == ["no comparison here"] * 3


def test_machine_state_is_there_for_every_block(written: dict[str, tuple[Path, Page]]) -> None:
    tables = [t for t in written["compare"][1].tables if t.caption.startswith("The machine during")]
    assert [len(t.rows) for t in tables] == [20, 20, 20]
    block = d.compare_result()["rows"][0]["comparison"]["blocks"][0]["state"]
    assert tables[0].column("load")[0] == f"{block['load_1m']:.4g}"
    assert tables[0].column("others")[0] == f"{100 * block['others']:.1f} %"
    assert set(tables[0].column("throttled")) == {"no"}
    assert "GPU" not in tables[0].columns


def test_gpu_state_and_throttling_are_shown() -> None:
    found = d.watch(d.comparison(), gpu="H200 <b>").to_dict()
    found["blocks"][3]["state"]["throttle"] = ["gpu-sw-thermal"]
    page = page_of({"comparisons": [found]})
    table = page.table("The machine during")
    assert set(table.column("GPU")) == {"H200 <b>"}
    assert set(table.column("power W")) == {"512.5"}
    assert table.column("throttled")[3] == "gpu-sw-thermal"
    assert "GPU clock, MHz" in json.dumps(page.data)


def test_wrong_rungs_are_marked_everywhere(written: dict[str, tuple[Path, Page]]) -> None:
    page = written["ladder"][1]
    table = page.table("Rungs from the base")
    for row in table.rows:
        wrong = row[0].startswith("drop the tail")
        assert row.count("WRONG") == (2 if wrong else 0)
        assert any(cell.startswith("WRONG: product 3") for cell in row) == (
            wrong and row[1] == "pp512"
        )
    comparisons = page.table("Verdicts on B against A")
    wrong_rows = [row for row in comparisons.rows if row[0].startswith("drop the tail")]
    assert len(wrong_rows) == 3
    assert all("WRONG" in row for row in wrong_rows)


def test_pages_of_several_results_are_joined() -> None:
    parts = [sections_of(kind, make()) for kind, make in RESULTS.items()]
    page = page_of(join_sections(*parts))
    ids = [s["id"] for s in page.named("section") if "id" in s]
    assert ids == [
        "summary", "tune", "ladder", "comparisons", "agreement", "table", "verification",
        "machine", "notes", "provenance",
    ]  # fmt: skip
    labels = page.table("Verdicts on B against A").column("comparison")
    assert len(labels) == 4 + 2 + 12
    assert "Report" in page.text


def test_joining_keeps_the_first_of_what_cannot_be_joined() -> None:
    joined = join_sections(
        {"title": "One", "notes": ["a"], "subject": "x", "machine": {"p": [1]}},
        {"title": "Two", "notes": ["b"], "subject": "y", "machine": {"q": [2]}},
    )
    assert joined == {
        "title": "Report", "notes": ["a", "b"], "subject": "x", "machine": {"p": [1], "q": [2]},
    }  # fmt: skip


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in nested dictionaries, and in the first entry of each list."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))[:1]
    for key, inner in items:
        yield (*path, key)
        yield from paths_of(inner, (*path, key))


def short(value: Any) -> Any:
    """The value with no more than two entries in any list."""
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    return [short(inner) for inner in value[:2]] if isinstance(value, list) else value


def without(value: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(value)
    at = changed
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return changed


def is_given(path: tuple[Any, ...]) -> bool:
    """Whether a name is the user's and not the schema's, so that leaving it out means nothing."""
    return bool({"settings", "tile", "op_versions", "details", "versions"} & set(path[:-1]))


@pytest.mark.parametrize("kind", RESULTS)
def test_any_one_value_may_be_missing_or_none(kind: str) -> None:
    from tilewright.report.page.view import page_view

    whole = short(RESULTS[kind]())
    places = [path for path in paths_of(whole) if not is_given(path)]
    assert len(places) > 20
    for path in places:
        page_view(sections_of(kind, without(whole, path)))
        holed = copy.deepcopy(whole)
        at = holed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = None
        page_view(sections_of(kind, holed))


@pytest.mark.parametrize("name", ["tune", "comparisons", "ladder", "table", "agreement", "machine"])
def test_an_empty_section_shows_nothing(name: str) -> None:
    page = page_of({name: {} if name != "comparisons" else []})
    assert [s for s in page.named("section") if s.get("id") != "summary"] == []


def test_an_empty_page_is_a_page() -> None:
    page = page_of({})
    assert page.unclosed == []
    assert "Report" in page.text


def test_numbers_that_json_lacks_become_null() -> None:
    found = d.comparison().to_dict()
    found["blocks"][0]["us"]["A"] = float("nan")
    found["judgement"]["p_adjusted"] = float("inf")
    page = page_of({"comparisons": [found]})
    (figure,) = page.data["chart-0"]["figures"]
    assert figure["data"][1]["y"][0] is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: write_page("tun", {}, path), "kind is 'tun'; a page is made of tune, comp"),
        (lambda path: render_page({"tuned": {}}, path), "sections has 'tuned'; a page has title"),
        (lambda path: render_page({}, path / "no" / "x.html"), "give a file in a folder that"),
    ],
    ids=["kind", "section", "folder"],
)
def test_bad_calls(call: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        call(tmp_path)


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=rf"needs {package}.*tilewright\[report\]"):
        page_html({})


def test_a_page_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page("table", d.table(), path)
    old = path.read_bytes()
    with pytest.raises(UnsupportedError):
        render_page({"no": 1}, path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_importing_the_page_loads_neither_templates_nor_charts() -> None:
    code = "import sys, tilewright.report.page; print({'jinja2', 'plotly'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
