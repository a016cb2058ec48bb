"""Measurement: clocks, paired statistics, machine state, verdicts. Knows callables, knows no op."""

from tilewright.measure.cache import CpuFlusher, GpuFlusher, last_level_cache_bytes
from tilewright.measure.clock import Clock, CpuClock, EventClock, ReplayClock, ReportedClock
from tilewright.measure.compare import Comparison, adjust_family, compare, compare_many
from tilewright.measure.roofline import Ceiling, Work, check_roofline
from tilewright.measure.sample import Block, SamplePlan
from tilewright.measure.state import GpuState, MachineState, StateProbe
from tilewright.measure.verdict import Judgement, Verdict, judge

__all__ = [
    "Block",
    "Ceiling",
    "Clock",
    "Comparison",
    "CpuClock",
    "CpuFlusher",
    "EventClock",
    "GpuFlusher",
    "GpuState",
    "Judgement",
    "MachineState",
    "ReplayClock",
    "ReportedClock",
    "SamplePlan",
    "StateProbe",
    "Verdict",
    "Work",
    "adjust_family",
    "check_roofline",
    "compare",
    "compare_many",
    "judge",
    "last_level_cache_bytes",
]
