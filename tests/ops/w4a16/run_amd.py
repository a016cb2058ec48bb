"""Compiles and executes tiles of the algorithm "amd": jobs on stdin, results on stdout, JSON.

Run by test_amd_*.py in a process of its own, since Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from tilewright.errors import GateError, TileError, TilewrightError
from tilewright.isa.count import count, inner_loop, parse
from tilewright.isa.emulate_launch import emulate_launch, emulate_w4a16
from tilewright.isa.resources import resources
from tilewright.layout.triton import WordsW4, pack_w4_words
from tilewright.ops.check import check_output
from tilewright.ops.contract import Case
from tilewright.ops.cross import Compiled, cross_compile
from tilewright.ops.w4a16.amd_gemm import launch_w4a16_amd
from tilewright.ops.w4a16.gpu_spec import gpu_spec
from tilewright.tiles.tile import Tile

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def executed(job: dict[str, Any]) -> dict[str, Any]:
    """One case of w4a16 as the chip would compute it, held to the float64 oracle."""
    spec = gpu_spec(job["arch"], "cpu")
    named = job["case"]
    case = spec.case(named) if isinstance(named, str) else Case(*named)
    inputs = spec.make_inputs(case, 0)
    ref = spec.reference(inputs)
    try:
        y = emulate_w4a16(Tile.from_mapping(job["tile"]), case, job["arch"]).reshape(ref.shape)
    except GateError as error:
        return {"passed": False, "reason": str(error), "frobenius": None}
    verdict = check_output(y, ref, spec.error_model(inputs, ref))
    return {
        "passed": verdict.passed,
        "reason": verdict.reason,
        "frobenius": _distance(y, ref),
    }


def _distance(y: torch.Tensor, ref: Any) -> float | None:
    distance = float(np.linalg.norm(y.double().numpy() - ref) / np.linalg.norm(ref))
    return distance if np.isfinite(distance) else None


def varied(job: dict[str, Any]) -> dict[str, Any]:
    """A case whose packed weight differs from what `pack_w4_words` makes of it by itself."""
    spec = gpu_spec(job["arch"], "cpu")
    inputs = spec.make_inputs(spec.case(job["case"]), 0)
    ref = spec.reference(inputs)
    weight = pack_w4_words(inputs.source, pack_zeros=job.get("pack_zeros", True))
    if "scales" in job:
        scales = weight.scales.to(getattr(torch, job["scales"]))
        weight = WordsW4(**{**vars(weight), "scales": scales})
    if job.get("padded"):  # rows further apart than they are long, and not at 16 bytes
        wide = torch.full((weight.N, weight.words.shape[1] + 3), -1, dtype=torch.int32)
        wide[:, : weight.words.shape[1]] = weight.words
        weight = WordsW4(**{**vars(weight), "words": wide[:, : weight.words.shape[1]]})
    y = torch.full((inputs.case.M, inputs.case.N), float("nan"), dtype=inputs.case.dtype)
    if job.get("transposed"):
        y = torch.full((inputs.case.N, inputs.case.M), float("nan"), dtype=y.dtype).t()
    tile = Tile.from_mapping(job["tile"])
    emulate_launch(launch_w4a16_amd, (inputs.x, weight, inputs.bias, y, tile, None), job["arch"])
    return {"frobenius": _distance(y, ref)}


def compiled(job: dict[str, Any]) -> dict[str, Any]:
    """What the inner loop issues, and what the kernel takes of the chip."""
    kernel = cross(**job)
    body = inner_loop(parse(kernel.text("amdgcn"), "amd"), "amd")
    if body is None:
        raise TileError("the kernel has no loop")
    names = [i.mnemonic for i in body.body]
    return {
        "counts": count(body.body, "amd"),
        "mnemonics": sorted(set(names)),
        "loads": Counter(name for name in names if "buffer_load" in name),
        "loads_then_multiplies": _loads_then_multiplies(names),
        "text": kernel.text("amdgcn"),
        "stores": Counter(re.findall(r"buffer_store_\w+", kernel.text("amdgcn"))),
        "resources": asdict(resources(kernel)),
        "mentions_fault": bool(re.search("FAULT", kernel.text("ttgir"))),
    }


def _loads_then_multiplies(names: list[str]) -> bool:
    """Every load of the loop is issued before its first matrix instruction."""
    loads = [i for i, name in enumerate(names) if "buffer_load" in name]
    multiplies = [i for i, name in enumerate(names) if re.match("v_wmma|v_mfma", name)]
    return max(loads) < min(multiplies)


def cross(
    arch: str,
    tile: dict[str, Any],
    dtype: str = "float16",
    m: int = 256,
    n: int = 4096,
    k: int = 4096,
    group: int = 128,
    symmetric: bool = False,
    order: str = "k8",
    scales: str = "",
) -> Compiled:
    def meta(*shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    real, groups = _DTYPES[dtype], 1 if group == -1 else k // group
    weight = WordsW4(
        meta(n, -(-k // 8)), meta(n, groups, of=_DTYPES[scales or dtype]),
        None if symmetric else meta(-(-n // 8), groups), n, k, k // groups, None, order,
    )  # fmt: skip
    operands = meta(m, k, of=real), weight, None, meta(m, n, of=real)
    return cross_compile(lambda: launch_w4a16_amd(*operands, Tile.from_mapping(tile)), arch)[0]


KINDS = {"executed": executed, "varied": varied, "compiled": compiled}


def result(job: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in job.items() if name != "kind"}
    try:
        return {"error": "", **KINDS[job["kind"]](rest)}
    except TilewrightError as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    json.dump({name: result(job) for name, job in json.load(sys.stdin).items()}, sys.stdout)
