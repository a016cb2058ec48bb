"""What a run must show, computed from its recorded samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "Bar", "bar_of", "bars_of", "bars_text", "finite", "floor_us", "median_us", "ratio",
    "show_times",
]  # fmt: skip

BANDWIDTH = 4.3e12  # bytes a second that a copy reaches on an H200, reads and writes counted
_ERRORS = {"float16": 3e-4, "bfloat16": 2.5e-3}
_OURS, _PORTABLE, _BLAS, _HUMMING = "tilewright", "triton", "cublas/float16", "humming/float16"

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """A claim with what was found.

    Attributes:
        name: the claim.
        least: what the geometric mean must reach (what the worst may reach, for errors: `most`).
        mean: geometric mean over the cases; None without cases.
        worst: the worst case's figure and its id.
        floor: what every single case must reach; None where only the mean counts.
        cases: figures by case id.
    """

    name: str
    least: float
    mean: float | None
    worst: float | None
    worst_case: str
    floor: float | None
    cases: dict[str, float]
    most: bool = False

    @property
    def holds(self) -> bool | None:
        """None: nothing was measured for it."""
        if self.mean is None or self.worst is None:
            return None
        if self.most:
            return self.worst <= self.least
        return self.mean >= self.least and (self.floor is None or self.worst >= self.floor)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def samples(record: Record, cache: str, arm: str) -> list[float]:
    """Microseconds of an arm by block; empty where it was not timed or its result was wrong."""
    if arm in record["failed"] or cache not in record:
        return []
    return [block["us"][arm] for block in record[cache]["blocks"] if arm in block["us"]]


def ratio(record: Record, cache: str, slow: str, fast: str) -> float | None:
    """exp(median over blocks of log(t_slow / t_fast)): above 1 where `fast` is faster."""
    a, b = samples(record, cache, slow), samples(record, cache, fast)
    if not a or not b:
        return None
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    return math.exp(statistics.median(logs))


def median_us(record: Record, cache: str, arm: str) -> float | None:
    found = samples(record, cache, arm)
    return statistics.median(found) if found else None


def floor_us(record: Record, bandwidth: float = BANDWIDTH) -> float:
    """Time in which codes, scales, zero points, x and y can cross the memory bus."""
    n, k, m = record["N"], record["K"], record["M"]
    groups = n * (1 if record["group"] == -1 else k // record["group"])
    zeros = 0 if record["symmetric"] else groups / 2
    return (n * k / 2 + 2 * groups + zeros + 2 * m * (n + k)) / bandwidth * 1e6


def best_peer(record: Record, cache: str, fast: str) -> float | None:
    """Against the better of cuBLAS and Humming, by their medians in this case."""
    peers = [p for p in (_BLAS, _HUMMING) if samples(record, cache, p)]
    if not peers:
        return None
    best = min(peers, key=lambda arm: statistics.median(samples(record, cache, arm)))
    return ratio(record, cache, best, fast)


def bars_of(records: Sequence[Record]) -> list[Bar]:
    """Every bar, those without a measurement among them."""
    ours, bf16, portable = f"{_OURS}/float16", f"{_OURS}/bfloat16", f"{_PORTABLE}/float16"

    def of(part: str) -> list[Record]:
        return [record for record in records if record["part"] == part]

    def wide(record: Record) -> bool:
        return bool(record["N"] > record["K"])

    def rate(record: Record) -> float | None:
        us = median_us(record, "rotating", ours)
        return None if us is None else floor_us(record) / us

    decode = of("decode")
    return [
        _bar("prefill fp16 over cuBLAS fp16", 1.0, of("prefill"),
             lambda r: ratio(r, "cold", _BLAS, ours)),
        _bar("prefill fp16 over Humming", 1.08, of("prefill"),
             lambda r: ratio(r, "cold", _HUMMING, ours)),
        _bar("prefill bf16 over our fp16", 0.95, of("prefill"),
             lambda r: ratio(r, "cold", ours, bf16)),
        _bar("portable Triton prefill over cuBLAS fp16", 0.80, of("prefill"),
             lambda r: ratio(r, "cold", _BLAS, portable)),
        _bar("M 16..512 over the better of cuBLAS and Humming", 1.0, of("small"),
             lambda r: best_peer(r, "cold", ours), floor=0.9),
        _bar("decode, share of the bytes floor, N > K", 0.65, [r for r in decode if wide(r)],
             rate, floor=0.65),
        _bar("decode, share of the bytes floor, N < K", 0.5, [r for r in decode if not wide(r)],
             rate, floor=0.5),
        _bar("decode over Humming, rotating weights", 1.15, decode,
             lambda r: ratio(r, "rotating", _HUMMING, ours)),
        *[_error_bar(dtype, most, records) for dtype, most in _ERRORS.items()],
    ]  # fmt: skip


def _bar(
    name: str,
    least: float,
    records: Sequence[Record],
    figure: Callable[[Record], float | None],
    floor: float | None = None,
) -> Bar:
    found = {r["id"]: value for r in records if (value := figure(r)) is not None}
    if not found:
        return Bar(name, least, None, None, "", floor, {})
    worst = min(found, key=lambda case: found[case])
    return Bar(
        name, least, statistics.geometric_mean(found.values()), found[worst], worst, floor, found
    )


def _error_bar(dtype: str, most: float, records: Sequence[Record]) -> Bar:
    """The worst relative error of ours, plain calls, replays and after timing."""
    found: dict[str, float] = {}
    for record in records:
        for arm, row in record["arms"].items():
            name, _, kind = arm.partition("/")
            if kind == dtype and name not in ("cublas", "humming", "gemlite", "tinygemm"):
                errors = [v for key, v in row.items() if "error" in key]  # null: not finite
                found[f"{record['id']} {name}"] = max(math.inf if v is None else v for v in errors)
        for arm in record["failed"]:
            name, _, kind = arm.partition("/")
            if kind == dtype and name == _OURS and arm not in record["arms"]:
                found[f"{record['id']} {name}"] = math.inf
    label = f"relative error {dtype}"
    if not found:
        return Bar(label, most, None, None, "", None, {}, most=True)
    worst = max(found, key=lambda case: found[case])
    mean = statistics.fmean(found.values())
    return Bar(label, most, mean, found[worst], worst, None, found, most=True)


def bars_text(bars: Sequence[Bar]) -> str:
    """One line a bar."""
    lines = []
    for bar in bars:
        state = {True: "holds", False: "MISSED", None: "not measured"}[bar.holds]
        if bar.mean is None or bar.worst is None:
            lines.append(f"{state:12} {bar.name}")
            continue
        if bar.most:
            lines.append(
                f"{state:12} {bar.name}: worst {bar.worst:.2e} ({bar.worst_case}), "
                f"at most {bar.least:.1e}, {len(bar.cases)} results"
            )
            continue
        floor = "" if bar.floor is None else f", each at least {bar.floor}"
        lines.append(
            f"{state:12} {bar.name}: {bar.mean:.3f} in geometric mean of {len(bar.cases)}, worst "
            f"{bar.worst:.3f} ({bar.worst_case}); at least {bar.least}{floor}"
        )
    return "\n".join(lines)


def bar_of(
    name: str, found: dict[str, float], least: float, floor: float | None = None, most: bool = False
) -> Bar:
    """The bar of what was found, by case; without a figure where nothing was."""
    if not found:
        return Bar(name, least, None, None, "", floor, {}, most)
    worst = (max if most else min)(found, key=lambda case: found[case])
    logs = [math.log(v) if v > 0 else -math.inf for v in found.values()]
    return Bar(
        name, least, math.exp(sum(logs) / len(logs)), found[worst], worst, floor, found, most
    )


def show_times(record: dict[str, Any]) -> None:
    """Print a case: every arm's kernel, times and error, and what failed."""
    cells = []
    for arm, row in record["arms"].items():
        times = [f"{cache} {us:.1f}" for cache in ("cold", "rotating", "warm")
                 if (us := median_us(record, cache, arm)) is not None]  # fmt: skip
        algorithm = row.get("tile", "").partition("(")[0]
        cells.append(f"{arm} {algorithm} {' '.join(times)} ({row.get('error', math.nan):.1e})")
    cells += [f"{arm} FAILED: {why[:80]}" for arm, why in record["failed"].items()]
    print(f"{record['id']}: {' | '.join(cells)}", flush=True)


def finite(value: Any) -> Any:
    """JSON has no infinities: they become null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
