"""Tables of what GPUs measured: mmq, moe, ssd and whole models."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tables import markdown

__all__ = [
    "against_table",
    "bars_table",
    "gguf_model_table",
    "hybrid_table",
    "ladder_table",
    "real_model_table",
]

_KEPT_FIGURES = {"gpu-mmq": "llama_cpp_us", "gpu-moe": "llama_cpp_us", "gpu-ssd": "mamba_ssm_us"}
_PEERS = {"llama_cpp_us": "llama.cpp", "mamba_ssm_us": "mamba_ssm"}


def against_table(result: Mapping[str, Any], subject: str) -> str:
    """Times of every arm by case; and how much faster than the peer's best, with its verdict, where
    the peer ran in the same blocks. Elsewhere figures of another run stand there, named as such.

    `subject` is a part of the result, or "" where it has none.
    """
    figures = _KEPT_FIGURES[result["kind"]]
    cases = [case for case in result["cases"] if case.get("part", "") == subject]
    arms = list(
        dict.fromkeys(a for case in cases for cache in _caches(case) for a in _arms(case, cache))
    )
    base = next(case[cache]["baseline"] for case in cases for cache in _caches(case))
    peer = _PEERS[figures]
    header = ["case", *(f"{arm} us" for arm in arms)]
    if base != "tilewright":
        header.append(f"vs {base}")
    kept = {case["id"]: _figure(result[figures], case) for case in cases}
    paired = any(case.get("pairs") for case in cases)
    if paired:
        kept = dict.fromkeys(kept)
        header.append(f"vs the best of {peer}")
    if any(kept.values()):
        header += [f"{peer} us*", f"vs {peer}*"]
    rows = []
    for case in cases:
        for cache in _caches(case):
            us = {arm: _us(case, cache, arm) for arm in arms}
            name = case["id"] if cache == "cold" else f"{case['id']}, {cache}"
            failed = {arm: "failed" if arm in case["failed"] else "" for arm in arms}
            cells = [name]
            cells += [f"{statistics.median(us[a]):.1f}" if us[a] else failed[a] for a in arms]
            ours = us["tilewright"]
            if base != "tilewright":
                pairs = zip(us[base], ours, strict=True) if us[base] and ours else ()
                ratios = [theirs / mine for theirs, mine in pairs]
                cells.append(f"{statistics.median(ratios):.2f}x" if ratios else "")
            if paired:
                best = min(case.get("pairs", ()), key=lambda row: row["ratio"], default=None)
                cells.append(f"{best['ratio']:.2f}x {best['verdict']}" if best else "")
            if any(kept.values()):
                figure = kept[case["id"]]
                faster = figure / statistics.median(ours) if figure and ours else None
                cells += [f"{figure:g}" if figure else "", f"{faster:.2f}x" if faster else ""]
            rows.append(cells)
    blocks = "/".join(
        sorted({str(len(case[cache]["blocks"])) for case in cases for cache in _caches(case)})
    )
    worst = max(
        (row["error"], case["id"])
        for case in cases
        for arm, row in case["arms"].items()
        if arm == "tilewright" and row.get("error") is not None
    )
    note = (
        f"{result['origin']['gpu']['name']}, {result['origin']['date'][:10]}; median of {blocks} "
        f"blocks in random order, caches flushed or weights in turn; largest relative error of "
        f"Tilewright {worst[0]:.1e} ({worst[1]})."
    )
    if any(kept.values()):
        note += f" * {peer}'s times are of another run on such a GPU, not paired with these."
    return f"{markdown(header, rows)}\n\n{note}"


def ladder_table(result: Mapping[str, Any], subject: str) -> str:
    """Times of every rung that changes a case, and what it is worth: against the one below it, and
    taken out of the finished stack."""
    cases = [case for case in result["cases"] if case.get("cold")]
    rows = []
    for case in cases:
        name = case["id"]
        for rung, row in case["arms"].items():
            if rung.startswith("without ") or row["as"] != rung:
                continue
            us = _us(case, "cold", rung)
            below = [p for p in case["pairs"] if p["b"] == rung][-1:]
            left = [p for p in case["left"] if p["a"] == f"without {rung}"]
            rows.append([
                name, rung, f"{statistics.median(us):.1f}" if us else "**wrong**",
                *(f"{p[0]['ratio']:.3f}x {p[0]['verdict']}" if p else "" for p in (below, left)),
            ])  # fmt: skip
            name = ""
    header = [subject, "rung", "us", "vs below", "left out"]
    worst = max(
        (max(row["errors"]), f"{case['id']}, {arm}")
        for case in cases
        for arm, row in case["arms"].items()
        if "errors" in row and arm not in case["failed"]
    )
    blocks = "/".join(sorted({str(len(case["cold"]["blocks"])) for case in cases}))
    note = (
        f"{result['origin']['gpu']['name']}, {result['origin']['date'][:10]}; median of {blocks} "
        "blocks in random order, the L2 flushed before each launch; a ratio above 1 is faster than "
        "the rung below it, or the finished stack faster than without it. Wrong results: "
        f"{sum(len(case['failed']) for case in cases)}; largest relative error {worst[0]:.1e} "
        f"({worst[1]})."
    )
    return f"{markdown(header, rows)}\n\n{note}"


def _caches(case: Mapping[str, Any]) -> list[str]:
    return [cache for cache in ("cold", "rotating", "warm") if case.get(cache)]


def _arms(case: Mapping[str, Any], cache: str) -> list[str]:
    """Those that were timed, as the file lists them; not the control."""
    return [arm for arm in case["arms"] if arm in case[cache]["blocks"][0]["us"]]


def _us(case: Mapping[str, Any], cache: str, arm: str) -> list[float]:
    if arm in case["failed"]:
        return []
    return [block["us"][arm] for block in case[cache]["blocks"] if arm in block["us"]]


def _figure(figures: Mapping[str, Any], case: Mapping[str, Any]) -> float | None:
    """What another run took for this case, in microseconds."""
    if "layer" in case:  # a scan: by model and tokens
        found = figures.get(case["layer"], {}).get(str(case.get("tokens")))
        kept = (case.get("part"), case.get("dtype")) == ("scan", "bfloat16")
        return found if kept else None
    if "T" in case:  # experts: by tokens
        ours = (case["part"], case["type_name"]) == ("product", "Q4_K")
        return figures.get(str(case["T"])) if ours else None
    if (case["N"], case["K"]) != (4096, 14336):
        return None
    found = figures.get(case["type_name"], {}).get(str(case["M"]))
    return None if found is None else float(found)


def gguf_model_table(result: Mapping[str, Any], subject: str) -> str:
    """Throughput of a synthetic model, and where its kernels spend a prefill."""
    timed, gpu, checked = result["timed"], result["origin"]["gpu"]["name"], result["check"]
    anchored = any("llama_cpp_ts" in row for row in timed["results"])
    rows = []
    for row in timed["results"]:
        some = row["samples_ts"]
        peer, ratio = row.get("llama_cpp_ts"), row.get("ratio")
        rows.append(
            [row["test"], f"{row['median_ts']:.0f} ({min(some):.0f}-{max(some):.0f})"]
            + [f"{peer:g}" if peer else "", f"{ratio:.2f}x" if ratio else ""][: 2 * anchored]
        )
    header = [subject, "tok/s", *["llama.cpp*", "vs llama.cpp*"][: 2 * anchored]]
    lines = [markdown(header, rows), ""]
    if timed["kernel_time"]:
        kernels = timed["kernel_time"]
        rows = [
            [r["op"], f"{r['us'] / 1e3:.2f}", f"{r['share']:.1%}", str(r["launches"])]
            for r in kernels["rows"]
        ]
        total = f"total kernel time at {kernels['test']}"
        rows.append([total, f"{kernels['total_us'] / 1e3:.2f}", "", ""])
        lines += [markdown(["op", "ms", "share", "launches"], rows), ""]
    # Of a mixture the median token says it: near choices of experts part.
    median = result["model"].get("experts") and checked.get("median_token_error")
    within = f"{median:.1e} (median token)" if median else f"{checked['logits_error']:.1e}"
    note = (
        f"{gpu}, {result['origin']['date'][:10]}; seeded random weights, {result['dtype']}; median "
        f"(range) of {len(timed['results'][0]['samples_ts'])} repetitions; logits within "
        f"{within} of the dequantized weights'."
    )
    if anchored:
        note += (
            " * llama.cpp's figures are of another run on such a GPU (flash attention on), not "
            "paired with these."
        )
    return "\n".join([*lines, note])


def hybrid_table(result: Mapping[str, Any], subject: str) -> str:
    """What a token of a hybrid takes launch by launch and as a graph, and which kernels it runs."""
    judgement, blocks = result["judgement"], result["blocks"]
    base, ours = "transformers' loop", "graph"
    us = {arm: statistics.median(block["us"][arm] for block in blocks) for arm in (base, ours)}
    found = (
        f"{judgement['ratio']:.2f}x ({judgement['low']:.2f}-{judgement['high']:.2f}) "
        f"{judgement['verdict']}"
    )
    rows = [[base, f"{us[base]:.0f}", ""], [ours, f"{us[ours]:.0f}", found]]
    lines = [markdown([subject, "us a token", f"vs {base}"], rows), ""]
    kernels = result["kernel_time"]
    if kernels:
        rows = [
            [r["op"], f"{r['us'] / kernels['steps']:.0f}", f"{r['share']:.1%}",
             f"{r['launches'] / kernels['steps']:.0f}"]
            for r in kernels["rows"]
        ]  # fmt: skip
        rows.append(["all", f"{kernels['total_us'] / kernels['steps']:.0f}", "", ""])
        lines += [markdown(["kernels of", "us a token", "share", "launches"], rows), ""]
    lines.append(
        f"{result['origin']['gpu']['name']}, {result['origin']['date'][:10]}; seeded random "
        f"weights, Q4_K, {result['dtype']}; medians of {len(blocks)} blocks in random order, "
        f"{result['steps']} tokens each behind a prompt of {result['prompt']}; ratio above 1 is "
        f"faster, with its 95 % interval; logits of both differ by {result['error']:.1e} at most."
    )
    return "\n".join(lines)


_TITLES = {
    "gpu-w4a16": "W4A16",
    "gpu-mmq": "GGUF",
    "gpu-moe": "experts",
    "gpu-ssd": "Mamba-2",
    "gpu-gguf-model": "model",
    "gpu-versus-llama-cpp": "llama.cpp, paired",
}


def bars_table(results: Sequence[Mapping[str, Any]]) -> str:
    """What was asked of GPU kernels and what they reached, each claim once.

    Args:
        results: in the order of their dates; a later file's figure replaces an earlier one's,
            but of errors the larger stays.
    """
    found: dict[tuple[str, str], list[str]] = {}
    gpus: dict[str, None] = {}
    pairs = {
        bar["name"]
        for result in results
        if result["kind"] == "gpu-versus-llama-cpp"
        for bar in result.get("bars", ())
        if bar["holds"] is not None
    }
    published: dict[str, bool] = {}  # by claim: against a figure of another run
    for result in results:
        kind = result["kind"]
        published |= {
            bar["name"]: "(published)" in bar["worst_case"]
            for bar in result.get("bars", ())
            if bar["name"].endswith("over mamba_ssm") and bar["holds"] is not None
        }
        for name, cases, asked, reached, worst, holds, most in _claims(result):
            if _is_superseded(kind, name, pairs):
                continue
            gpus[f"{result['origin']['gpu']['name']}, {result['origin']['date'][:10]}"] = None
            key = (_TITLES[kind], name)
            old = found.get(key)
            if old is not None and most and float(old[5]) > float(worst):
                continue
            found[key] = [*key, cases, asked, reached, worst, "yes" if holds else "**no**"]
    rows = list(found.values())
    header = ["of", "claim", "cases", "asked", "mean", "worst", "holds"]
    paired = _TITLES["gpu-versus-llama-cpp"]
    but = f', but where it says "{paired}"' if any(row[0] == paired for row in rows) else ""
    others = "llama.cpp" if published and not any(published.values()) else "llama.cpp and mamba_ssm"
    note = (
        f"{'; '.join(gpus)}; geometric means, and the worst single case. Against {others} stand "
        f"figures of other runs on such a GPU{but}; every other ratio is paired."
    )
    return f"{markdown(header, rows)}\n\n{note}"


def _is_superseded(kind: str, claim: str, pairs: set[str]) -> bool:
    """Whether a claim against a figure of another run has paired ones in its place."""
    if not pairs or not ("llama.cpp" in claim and kind != "gpu-versus-llama-cpp"):
        return False
    return kind != "gpu-gguf-model" or claim.removesuffix(" over llama.cpp") in pairs


def _claims(result: Mapping[str, Any]) -> list[tuple[str, str, str, str, str, bool, bool]]:
    """Of what was measured: claim, cases, asked, mean, worst, whether it holds, whether less is
    better."""
    if result["kind"] == "gpu-gguf-model":
        timed = result["timed"] or {"results": []}
        return [
            (f"{result['model']['name']}, {r['test']} over llama.cpp", "1", f"{r['bar']:g}",
             f"{r['ratio']:.3g}", f"{r['ratio']:.3g}", bool(r["holds"]), False)
            for r in timed["results"] if "bar" in r
        ]  # fmt: skip
    claims = []
    for bar in result.get("bars", []):
        if bar["holds"] is None:
            continue
        most = bool(bar["most"])
        asked = f"{bar['least']:g}"
        if not most and bar["floor"] not in (None, bar["least"]):
            asked += f", each {bar['floor']:g}"
        mean = "" if most or bar["mean"] is None else f"{bar['mean']:.3g}"
        worst = "inf" if bar["worst"] is None else f"{bar['worst']:.3g}"
        cases = str(len(bar["cases"]))
        claims.append((bar["name"], cases, asked, mean, worst, bool(bar["holds"]), most))
    return claims


def real_model_table(result: Mapping[str, Any], subject: str) -> str:
    """Perplexity and greedy ids of a real model on a GPU, against float32."""
    right = result["perplexity"]["transformers"]
    header = ["dtype", "perplexity", "vs float32", "greedy ids identical", "first differences",
              "next id the same, fed the reference's"]  # fmt: skip
    rows = [["float32, transformers", f"{right['value']:.4f}", "", "", "", ""]]
    for dtype, texts in result["greedy"].items():
        score, fed = result["perplexity"][dtype], result["fed"][dtype]
        parts = [
            f"token {text['first_difference']} (gap {text['reference_gap']:.4f})"
            for text in texts
            if not text["identical"]
        ]
        whole = score["chunks"] == right["chunks"]
        rows.append(
            [
                dtype,
                f"{score['value']:.4f}",
                f"{score['value'] / right['value'] - 1:+.3%}" if whole else "",
                f"{len(texts) - len(parts)} of {len(texts)}",
                ", ".join(parts) or "none",
                f"{sum(one['same'] for one in fed)} of {sum(one['steps'] for one in fed)}",
            ]
        )
    origin, settings = result["origin"], result["settings"]
    note = (
        f"`{subject}`, packed, on {origin['gpu'].get('name')}, {origin['date'][:10]}; "
        f"{settings['chunks']} chunks of {settings['context']} tokens of {settings['text']}; "
        f"prompts continued by {settings['new_tokens']} tokens; a gap is the distance of the "
        f"reference's two best logits where the ids part. {result['stepped'][0].upper()}"
        f"{result['stepped'][1:]}."
    )
    return f"{markdown(header, rows)}\n\n{note}"
