"""Figures of a kernel that nobody compiled."""

from __future__ import annotations

from typing import Any

from tilewright.isa.count import FORMS, KINDS
from tilewright.isa.figures import Figures
from tilewright.isa.resources import Resources

__all__ = ["kernel"]


def kernel(arch: str = "gfx1151", name: str = "_gemm", **resources: Any) -> dict[str, Any]:
    counts = {"total": 20, **{key: i for i, key in enumerate((*KINDS, *FORMS))}}
    taken = {
        "vgprs": 96, "agprs": None, "sgprs": 34, "spills": 0, "scratch_bytes": 0,
        "lds_bytes": 8192, "programs": 16, "waves": 16.0, **resources,
    }  # fmt: skip
    return Figures(
        name, arch, "triton 3.7.1", ".LBB0_4", counts, "v_wmma_f32_16x16x16_f16", 64, 4.69, 10.0,
        Resources(**taken),
    ).as_dict()  # fmt: skip
