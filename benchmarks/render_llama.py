"""Tables of a paired run against llama.cpp on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from tables import markdown

__all__ = ["PRODUCTS", "subjects_of", "versus_gpu_table"]

PRODUCTS = "products"
_BASE, _OURS = "llama.cpp", "tilewright"


def subjects_of(result: Mapping[str, Any]) -> list[str]:
    """The model that was timed, by name, and `PRODUCTS` if some were."""
    model = result["model"]
    found = [model["name"]] if model and model["tests"] else []
    return found + ([PRODUCTS] if any(case["blocks"] for case in result["cases"]) else [])


def versus_gpu_table(result: Mapping[str, Any], subject: str) -> str:
    """What both arms reached, the ratio with its interval, the verdict."""
    return _products(result) if subject == PRODUCTS else _model(result)


def _model(result: Mapping[str, Any]) -> str:
    model = result["model"]
    rows = []
    for name, test in model["tests"].items():
        rates = {
            arm: [test["tokens"] / block["us"][arm] * 1e6 for block in test["blocks"]]
            for arm in (_BASE, _OURS)
        }
        cells = [f"{statistics.median(r):.0f} ({min(r):.0f}-{max(r):.0f})" for r in rates.values()]
        rows.append([name, *cells, _stands(test["judgement"])])
    header = [model["name"], "llama.cpp tok/s", "Tilewright tok/s", "vs llama.cpp"]
    blocks = _each(len(test["blocks"]) for test in model["tests"].values())
    check = model["check"]
    right = f" Ours gives logits within {check['logits_error']:.1e}." if check else ""
    note = (
        f"{_where(result)}; median (range) of {blocks} paired blocks in random order; `llama-bench "
        f"{model['options']}` of the same file and ours in {model['dtype']}, both warmed up; ratio "
        f"above 1 is faster, with its 95 % interval.{right}"
    )
    return f"{markdown(header, rows)}\n\n{note}"


def _products(result: Mapping[str, Any]) -> str:
    tool = {row["id"]: row["us"] for row in result["tool"]}
    header = ["product", "llama.cpp us", "Tilewright us", "vs llama.cpp"]
    header += ["test-backend-ops us*"] if tool else []
    rows = []
    for case in result["cases"]:
        cells = [case["id"]]
        for arm in (_BASE, _OURS):
            us = [block["us"][arm] for block in case["blocks"]]
            cells.append(f"{statistics.median(us):.1f}" if us else "failed")
        cells.append(_stands(case["judgement"]) if case["judgement"] else "")
        if tool:
            own = tool.get(case["id"])
            cells.append(f"{own:.1f}" if own else "")
        rows.append(cells)
    worst = {
        arm: max((case["arms"][arm].get("error") or 0.0) for case in result["cases"])
        for arm in (_BASE, _OURS)
    }
    blocks = _each(len(case["blocks"]) for case in result["cases"] if case["blocks"])
    note = (
        f"{_where(result)}; median of {blocks} paired blocks in random order, graphs of many "
        "launches over the same blocks, rows and ids: of one weight again and again, or where it "
        "says rotating of copies that no L2 holds together. Ratio above 1 is faster, with its 95 % "
        f"interval; largest relative error of llama.cpp {worst[_BASE]:.1e}, which rounds rows to 8 "
        f"bits, and of Tilewright {worst[_OURS]:.1e}."
    )
    if tool:
        note += (
            " * What llama.cpp's own program says, on operands of its own and a row for each "
            "expert of a token: not paired."
        )
    return f"{markdown(header, rows)}\n\n{note}"


def _each(counts: Iterable[int]) -> str:
    return "/".join(str(count) for count in sorted(set(counts)))


def _stands(judgement: Mapping[str, Any]) -> str:
    if judgement["verdict"] == "VOID":
        return "VOID"
    interval = f"{judgement['low']:.2f}-{judgement['high']:.2f}"
    return f"{judgement['ratio']:.2f}x ({interval}) {judgement['verdict']}"


def _where(result: Mapping[str, Any]) -> str:
    origin = result["origin"]
    gpu = origin.get("gpu", {}).get("name") or origin["device"]
    ggml = f", ggml {result['ggml']['ggml']}" if result["ggml"] else ""
    return f"{gpu}, {origin['date'][:10]}{ggml}"
