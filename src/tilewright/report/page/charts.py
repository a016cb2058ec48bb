"""The charts of a report page, as the plain figures that plotly.js draws.

A color that begins with "@" is the name of one of the page's own colors; the page puts in the
value that fits a light or a dark display. Symbols differ wherever colors do. `labels` of a figure
are two lines for each of its rows, which the page cuts to the width it has, and `lift` is how far
they stand above the row, in pixels.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from tilewright.report.compare import time_text
from tilewright.report.page.words import shown

__all__ = [
    "Interval",
    "interval_figure",
    "ladder_figure",
    "paired_figure",
]

Figure = dict[str, Any]
Interval = Mapping[str, Any]
"""A row of `interval_figure`: label, ratio, low, high, verdict, text; ratio None: no figure."""

_UNITS = ((1e3, "us", 1.0), (1e6, "ms", 1e3), (math.inf, "s", 1e6))
_LABEL_CHARS = 44
_LABEL_PX = 36
_LANE_PX = 16
_TEST_SYMBOLS = ("circle", "diamond", "square", "triangle-up")
_TEST_COLORS = ("@a", "@b", "@c", "@ink")
_LOOKS = {
    "DISJOINT faster": ("star", "@good"),
    "DISJOINT slower": ("star-square", "@bad"),
    "FASTER": ("triangle-right", "@good"),
    "SLOWER": ("triangle-left", "@bad"),
    "SAME": ("circle", "@muted"),
    "UNRESOLVED": ("circle-open", "@muted"),
    "VOID": ("square-x-open", "@bad"),
    "WRONG": ("x", "@bad"),
}


def paired_figure(comparison: Mapping[str, Any], *, delta: float = 0.005) -> Figure:
    """A, B and A once more in every block; below them the ratio of each block; the machine.

    Args:
        comparison: `Comparison.to_dict()`.
        delta: relative difference that counts as none, where its settings do not say.
    """
    blocks = [b for b in comparison.get("blocks") or () if b.get("us")]
    a, b = str(comparison.get("a", "A")), str(comparison.get("b", "B"))
    judgement = comparison.get("judgement") or {}
    delta = (comparison.get("settings") or {}).get("delta", delta)
    x = list(range(1, len(blocks) + 1))
    times = {name: [block["us"].get(name) for block in blocks] for name in (a, b, "control")}
    known = [us for values in times.values() for us in values if us]
    _, unit, factor = next(u for u in _UNITS if median(known or [1.0]) < u[0])
    hover = [_block_text(i, block, a, b) for i, block in zip(x, blocks, strict=True)]
    machine = _machine_trace(x, blocks, hover)
    domains = [[0.66, 1.0], [0.26, 0.56], [0.0, 0.14]] if machine else [[0.6, 1.0], [0.0, 0.46]]

    links_x: list[Any] = []
    links_y: list[Any] = []
    for i, us_a, us_b in zip(x, times[a], times[b], strict=True):
        if us_a and us_b:
            links_x += [i, i, None]
            links_y += [us_a / factor, us_b / factor, None]
    data: list[Figure] = [
        {
            "type": "scatter", "mode": "lines", "x": links_x, "y": links_y, "hoverinfo": "skip",
            "line": {"color": "@grid", "width": 2}, "showlegend": False,
        }
    ]  # fmt: skip
    for name, title, symbol, color in (
        (a, "A", "circle", "@a"),
        ("control", "A' (A again)", "circle-open", "@a"),
        (b, "B", "diamond", "@b"),
    ):
        y = [us / factor if us else None for us in times[name]]
        data.append(_points(title, x, y, hover, symbol, color))
    for other, title, symbol, color in (
        ("control", "A / A' (control)", "circle-open", "@a"),
        (b, "A / B", "diamond", "@b"),
    ):
        ratios = [
            one / two if one and two else None
            for one, two in zip(times[a], times[other], strict=True)
        ]
        data.append({**_points(title, x, ratios, hover, symbol, color), "yaxis": "y2"})

    shapes = [
        _line("y2", 1.0, "@ink", "solid"),
        _line("y2", 1 + delta, "@muted", "dot"),
        _line("y2", 1 - delta, "@muted", "dot"),
    ]
    low, high, ratio = (judgement.get(name) for name in ("low", "high", "ratio"))
    if low and high and ratio:
        shapes += [
            {
                "type": "rect", "xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "y0": low,
                "y1": high, "fillcolor": "@b", "opacity": 0.18, "line": {"width": 0},
                "layer": "below",
            },
            _line("y2", ratio, "@b", "dash"),
        ]  # fmt: skip
    titles = [
        (domains[0][1], f"Time of a launch, {unit}, in each block"),
        (domains[1][1], "Ratio of the times; above 1, B takes less time"),
    ]
    axis = {"zeroline": False, "gridcolor": "@grid", "automargin": True, "nticks": 5}
    layout: Figure = {
        "height": 560 if machine else 460,
        "margin": {"l": 48, "r": 12, "t": 68, "b": 44},
        "hovermode": "closest",
        "shapes": shapes,
        "legend": {"orientation": "h", "x": 0, "y": 1.1, "yanchor": "bottom"},
        "xaxis": {
            "title": {"text": "block, in the order they ran"}, "zeroline": False,
            "gridcolor": "@grid", "anchor": f"y{len(domains)}", "range": [0.4, len(x) + 0.6],
        },
        "yaxis": {**axis, "domain": domains[0]},
        "yaxis2": {**axis, "domain": domains[1], "tickformat": ".3~f"},
    }  # fmt: skip
    if machine:
        trace, title = machine
        data.append({**trace, "yaxis": "y3"})
        titles.append((domains[2][1], title))
        layout["yaxis3"] = {**axis, "domain": domains[2], "nticks": 3, "rangemode": "tozero"}
    layout["annotations"] = [_heading(y, text) for y, text in titles]
    return {"data": data, "layout": layout}


def interval_figure(rows: Sequence[Interval], *, axis: str) -> Figure:
    """One row a comparison or rung: its ratio with the interval, its verdict beside it.

    A row without a ratio (a WRONG rung) is marked at 1 and has no figure.

    Args:
        rows: from top to bottom.
        axis: what a ratio above 1 means.
    """
    data: list[Figure] = []
    verdicts = dict.fromkeys(str(row["verdict"]) for row in rows)
    for verdict in verdicts:
        mine = [(y, row) for y, row in enumerate(rows) if str(row["verdict"]) == verdict]
        symbol, color = _LOOKS.get(verdict, ("circle-open", "@muted"))
        values = [row.get("ratio") or 1.0 for _, row in mine]
        texts = [_escaped([row["label"], row["text"]]) for _, row in mine]
        trace = _points(verdict, values, [y for y, _ in mine], texts, symbol, color)
        trace["marker"]["size"] = 12
        trace["error_x"] = {
            "type": "data", "symmetric": False, "thickness": 2, "width": 5,
            "color": color,
            "array": [(row.get("high") or v) - v for v, (_, row) in zip(values, mine, strict=True)],
            "arrayminus": [
                v - (row.get("low") or v) for v, (_, row) in zip(values, mine, strict=True)
            ],
        }  # fmt: skip
        data.append(trace)
    bounds = [1.0]
    for row in rows:
        bounds += [v for v in (row.get("low"), row.get("ratio"), row.get("high")) if v]
    return _rows_figure(data, [(row["label"], row["text"]) for row in rows], bounds, axis)


def ladder_figure(base: str, rungs: Sequence[Mapping[str, Any]]) -> Figure:
    """Rungs from top to bottom; each test's ratio to the base with its interval.

    Args:
        base: name of the base, the first row.
        rungs: `LadderResult.to_dict()["rungs"]`.
    """
    tests = list(dict.fromkeys(str(t.get("test")) for r in rungs for t in r.get("tests") or ()))
    data, bounds = [], [1.0]
    for index, test in enumerate(tests):
        shift = _LANE_PX / _row_px(len(tests)) * (index - (len(tests) - 1) / 2)
        x: list[float | None] = [1.0]
        y: list[float] = [shift]
        low, high, texts = [0.0], [0.0], [_escaped([f"{base}, {test}", "the base"])]
        own = _TEST_SYMBOLS[index % len(_TEST_SYMBOLS)]
        symbols, control = [own], False
        for row, rung in enumerate(rungs, 1):
            found = next((t for t in rung.get("tests") or () if str(t.get("test")) == test), None)
            judgement = ((found or {}).get("base") or {}).get("judgement") or {}
            ratio = judgement.get("ratio")
            if found is None or ratio is None:
                continue
            control |= bool(found.get("control"))
            wrong = rung.get("status") == "WRONG"
            x.append(ratio)
            y.append(row + shift)
            low.append(ratio - judgement.get("low", ratio))
            high.append(judgement.get("high", ratio) - ratio)
            bounds += [ratio - low[-1], ratio + high[-1]]
            symbols.append("x" if wrong else own)
            verdict = shown(str(judgement.get("verdict")), ratio)
            said = [f"{rung.get('name')}, {test}", f"{verdict} {ratio:.4f}x the base"]
            if wrong:
                said = [said[0], _rung_text(rung), f"it would have passed for {ratio:.4f}x"]
            texts.append(_escaped(said))
        color = "@muted" if control else _TEST_COLORS[index % len(_TEST_COLORS)]
        trace = _points(f"{test}{' (control)' if control else ''}", x, y, texts, "circle", color)
        colors = ["@bad" if symbol == "x" else color for symbol in symbols]
        trace["marker"] |= {"symbol": symbols, "size": 11, "color": colors}
        trace["marker"]["line"] = {"width": 1, "color": colors}
        trace["error_x"] = {
            "type": "data", "symmetric": False, "array": high, "arrayminus": low, "thickness": 2,
            "width": 4, "color": color,
        }  # fmt: skip
        data.append(trace)
    labels = [(base, "the base"), *((str(r.get("name")), _rung_text(r)) for r in rungs)]
    axis = "ratio to the base: above 1, less time"
    return _rows_figure(data, labels, bounds, axis, lanes=len(tests))


def _points(
    name: str, x: Sequence[Any], y: Sequence[Any], text: Sequence[str], symbol: str, color: str
) -> Figure:
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": list(x), "y": list(y),
        "text": list(text), "hoverinfo": "text",
        "marker": {"symbol": symbol, "size": 9, "color": color, "line": {"width": 1.5,
                                                                         "color": color}},
    }  # fmt: skip


def _rows_figure(
    data: list[Figure],
    labels: list[tuple[str, str]],
    bounds: list[float],
    axis: str,
    *,
    lanes: int = 1,
) -> Figure:
    """Traces over rows 0, 1, ... from top to bottom, each below its two lines of label.

    Args:
        lanes: marks that a row has below each other.
    """
    rows, row_px = len(labels), _row_px(lanes)
    above = _LABEL_PX + _LANE_PX * lanes / 2
    pad = max(0.06 * (max(bounds) - min(bounds)), 0.004)
    layout = {
        "height": 100 + row_px * rows,
        "margin": {"l": 8, "r": 8, "t": 48, "b": 52},
        "hovermode": "closest",
        "shapes": [_line("y", 1.0, "@ink", "solid", vertical=True)],
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        "showlegend": True,
        "xaxis": {
            "title": {"text": axis}, "range": [min(bounds) - pad, max(bounds) + pad],
            "zeroline": False, "gridcolor": "@grid", "nticks": 6, "tickformat": ".3~f",
        },
        "yaxis": {
            "range": [rows - above / row_px, -above / row_px], "showticklabels": False,
            "showgrid": False, "zeroline": False,
        },
    }  # fmt: skip
    return {
        "data": data,
        "layout": layout,
        "labels": [list(label) for label in labels],
        "lift": (_LABEL_PX + _LANE_PX * lanes) / 2,
    }


def _row_px(lanes: int) -> int:
    return _LABEL_PX + _LANE_PX * lanes + 10


def _rung_text(rung: Mapping[str, Any]) -> str:
    if rung.get("status") == "WRONG":
        return "WRONG: " + "; ".join(map(str, rung.get("faults") or ("no reason recorded",)))
    parts = []
    for test in rung.get("tests") or ():
        judgement = (test.get("base") or {}).get("judgement") or {}
        if judgement.get("ratio") and not test.get("control"):
            verdict = shown(str(judgement.get("verdict")), judgement["ratio"])
            parts.append(f"{test.get('test')} {verdict} {judgement['ratio']:.3f}x")
    return ", ".join(parts) or "not timed"


def _line(axis: str, at: float, color: str, dash: str, *, vertical: bool = False) -> Figure:
    line = {"color": color, "width": 1, "dash": dash}
    if vertical:
        return {"type": "line", "xref": "x", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1,
                "line": line, "layer": "above"}  # fmt: skip
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": axis, "y0": at, "y1": at,
            "line": line, "layer": "above"}  # fmt: skip


def _heading(y: float, text: str) -> Figure:
    return {
        "x": 0, "xref": "paper", "xanchor": "left", "y": y, "yref": "paper", "yanchor": "bottom",
        "text": text, "showarrow": False, "font": {"color": "@muted"},
    }  # fmt: skip


def _block_text(number: int, block: Mapping[str, Any], a: str, b: str) -> str:
    short = {a: "A", b: "B", "control": "A'"}
    order = ", ".join(short.get(name, name) for name in block.get("order") or ())
    lines = [f"block {number}" + (f", ran as {order}" if order else "")]
    us = block["us"]
    lines += [f"{short[name]} {time_text(us[name])}" for name in (a, "control", b) if us.get(name)]
    if us.get(a) and us.get(b):
        lines.append(f"A / B {us[a] / us[b]:.4f}")
    state = block.get("state") or {}
    if state.get("others") is not None:
        lines.append(f"other processes used {state['others']:.0%} of the CPUs")
    if state.get("throttle"):
        lines.append(f"throttled: {', '.join(state['throttle'])}")
    return _escaped(lines)


def _machine_trace(
    x: list[int], blocks: Sequence[Mapping[str, Any]], hover: list[str]
) -> tuple[Figure, str] | None:
    """The figure of the machine's state that explains most, and its title."""
    states = [block.get("state") or {} for block in blocks]
    gpu = [(state.get("gpu") or {}).get("sm_mhz") for state in states]
    others = [state.get("others") for state in states]
    if any(v is not None for v in gpu):
        values, title = gpu, "GPU clock, MHz"
    elif any(v is not None for v in others):
        values = [None if v is None else 100 * v for v in others]
        title = "CPU share of other processes, %"
    else:
        return None
    trace = {
        "type": "bar", "name": title, "x": x, "y": values, "text": hover, "hoverinfo": "text",
        "textposition": "none", "marker": {"color": "@muted"}, "showlegend": False,
    }  # fmt: skip
    return trace, title


def _escaped(lines: Iterable[str]) -> str:
    """Lines of a hover text, wrapped; plotly.js takes "<" for markup unless it is escaped."""
    wrapped = [part for line in lines for part in textwrap.wrap(str(line), _LABEL_CHARS) or [""]]
    return "<br>".join(html.escape(part, quote=False) for part in wrapped)
