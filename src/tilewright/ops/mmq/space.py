"""The tile spaces of mmq."""

from __future__ import annotations

from tilewright.ops.cpu.space import cpu_space

__all__ = ["CPU_SPACE"]

CPU_SPACE = cpu_space("mmq")
