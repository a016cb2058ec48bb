"""The machine's ceiling: a time below what it allows is an error, not a record."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.errors import MeasureError

__all__ = ["Ceiling", "Work", "check_roofline"]


@dataclass(frozen=True)
class Work:
    """What one launch must do at least.

    Attributes:
        flops: floating-point operations, a multiply-add counting as two.
        bytes: bytes that must come from or go to memory.
    """

    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Ceiling:
    """What the machine can do at most; None where it is not known.

    Attributes:
        gflops: peak arithmetic, 1e9 operations a second, for the kind of arithmetic used.
        gbps: peak memory bandwidth, 1e9 bytes a second.
    """

    gflops: float | None = None
    gbps: float | None = None

    def least_us(self, work: Work, *, from_memory: bool) -> float:
        """The least time that `work` can take, in microseconds.

        Args:
            work: operations and bytes of one launch.
            from_memory: whether the bytes come from memory; caches are not held to `gbps`.
        """
        least = 0.0
        if self.gflops:
            least = work.flops / (self.gflops * 1e3)
        if self.gbps and from_memory:
            least = max(least, work.bytes / (self.gbps * 1e3))
        return least


def check_roofline(
    name: str, us: float, work: Work, ceiling: Ceiling, *, from_memory: bool
) -> None:
    """Raise MeasureError when a time of `us` microseconds beats the machine's ceiling.

    Args:
        name: whose time it is.
        us: measured time of one launch.
        work: what that launch must do.
        ceiling: what the machine can do.
        from_memory: whether the bytes come from memory (cold cache, or more than it holds).
    """
    least = ceiling.least_us(work, from_memory=from_memory)
    if us < least:
        raise MeasureError(
            f"{name} took {us:.3f} us, but {work.flops:.3g} operations and {work.bytes:.3g} bytes "
            f"need at least {least:.3f} us at {ceiling.gflops} GFLOP/s and {ceiling.gbps} GB/s: "
            "it skipped work, or the clock or the ceiling is wrong"
        )
