"""Cache size, flushing, roofline and machine state, on folders and libraries made for the test."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.errors import MeasureError
from tilewright.measure import (
    Ceiling,
    CpuFlusher,
    MachineState,
    StateProbe,
    Work,
    check_roofline,
    last_level_cache_bytes,
    state,
)


def cache(root: Path, cpu: int, index: int, level: int, kind: str, size: str, shared: str) -> None:
    folder = root / f"cpu{cpu}" / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in (
        ("level", level),
        ("type", kind),
        ("size", size),
        ("shared_cpu_list", shared),
    ):
        (folder / name).write_text(f"{text}\n")


def test_last_level_cache_adds_up_its_instances_once_each(tmp_path: Path) -> None:
    for cpu in range(4):
        cache(tmp_path, cpu, 0, 1, "Data", "32K", str(cpu))
        cache(tmp_path, cpu, 1, 1, "Instruction", "32K", str(cpu))
        cache(tmp_path, cpu, 2, 3, "Unified", "16M", "0-1" if cpu < 2 else "2-3")
    assert last_level_cache_bytes(tmp_path) == 2 * 16 * 2**20


@pytest.mark.parametrize(
    ("size", "expected"), [("512K", 512 << 10), ("2M", 2 << 20), ("1G", 1 << 30), ("4096", 4096)]
)
def test_cache_sizes(tmp_path: Path, size: str, expected: int) -> None:
    cache(tmp_path, 0, 0, 2, "Unified", size, "0")
    assert last_level_cache_bytes(tmp_path) == expected


def test_unknown_cache_size_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="pass it as cache_bytes="):
        last_level_cache_bytes(tmp_path)


def test_flusher_writes_at_least_twice_the_cache() -> None:
    flusher = CpuFlusher(cache_bytes=100_001, threads=3)
    flusher()
    flusher()
    assert flusher.flush_bytes == 200_002
    assert sum(share.nbytes for share in flusher._shares) >= 200_002
    assert all((share == 2).all() for share in flusher._shares)


@pytest.mark.parametrize("size", [0, -5])
def test_flusher_refuses_a_cache_of_no_size(size: int) -> None:
    with pytest.raises(MeasureError, match=f"cache_bytes is {size}"):
        CpuFlusher(size)


@pytest.mark.parametrize(
    ("ceiling", "from_memory", "least_us"),
    [
        (Ceiling(gflops=100.0), True, 20.0),
        (Ceiling(gbps=10.0), True, 100.0),
        (Ceiling(gbps=10.0), False, 0.0),
        (Ceiling(gflops=100.0, gbps=10.0), True, 100.0),
        (Ceiling(gflops=100.0, gbps=10.0), False, 20.0),
        (Ceiling(), True, 0.0),
    ],
)
def test_least_time_by_hand(ceiling: Ceiling, from_memory: bool, least_us: float) -> None:
    work = Work(flops=2e6, bytes=1e6)  # at 100 GFLOP/s: 20 us; at 10 GB/s: 100 us
    assert ceiling.least_us(work, from_memory=from_memory) == pytest.approx(least_us)


def test_roofline_error_names_the_arm_and_both_times() -> None:
    work, ceiling = Work(flops=2e6), Ceiling(gflops=100.0)
    check_roofline("B", 20.1, work, ceiling, from_memory=True)
    with pytest.raises(MeasureError, match=r"B took 19.900 us, .* at least 20.000 us"):
        check_roofline("B", 19.9, work, ceiling, from_memory=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_probe_on_this_machine() -> None:
    probe = StateProbe()
    x = np.random.default_rng(0).random((400, 400))
    for _ in range(20):
        x = x @ x / 400
    seen = probe.sample()
    assert seen.load_1m is not None
    assert seen.load_1m >= 0
    assert seen.others is not None
    assert 0 <= seen.others <= 1
    assert seen.switches is not None
    assert seen.switches >= 0
    assert seen.gpu is None
    assert MachineState.from_dict(seen.to_dict()) == seen


def test_probe_splits_own_time_from_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tick = state.os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    monkeypatch.setattr(state, "_STAT", stat)
    own = iter([(0.0, 0.0, 0.0, 0.0, 0.0), (2.0, 1.0, 0.0, 0.0, 0.0)])
    monkeypatch.setattr(state.os, "times", lambda: next(own))
    stat.write_text(f"cpu {' '.join(['0'] * 10)}\n")
    probe = StateProbe()
    # 20 s: 4 user, 1 system, 14 idle, 1 stolen; 3 of the 5 busy seconds are this process's.
    stat.write_text(f"cpu {4 * tick} 0 {tick} {14 * tick} 0 0 0 {tick} 0 0\n")
    seen = probe.sample()
    assert seen.others == pytest.approx(0.1)
    assert seen.steal == pytest.approx(0.05)


def test_probe_without_proc_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_STAT", "_CPUS", "_CPUINFO"):
        monkeypatch.setattr(state, name, tmp_path / "absent")
    seen = StateProbe().sample()
    assert (seen.others, seen.steal, seen.frequency_mhz) == (None, None, None)


def test_cpu_throttle_events_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counter = tmp_path / "cpu0" / "thermal_throttle" / "core_throttle_count"
    counter.parent.mkdir(parents=True)
    counter.write_text("3\n")
    monkeypatch.setattr(state, "_CPUS", tmp_path)
    probe = StateProbe()
    assert probe.sample().throttle == ()
    counter.write_text("4\n")
    assert probe.sample().throttle == ("cpu-thermal",)
    assert probe.sample().throttle == ()


def fake_nvml(mask: int) -> types.ModuleType:
    library: Any = types.ModuleType("pynvml")
    library.NVML_CLOCK_SM, library.NVML_CLOCK_MEM, library.NVML_TEMPERATURE_GPU = 1, 2, 0
    library.nvmlInit = lambda: None
    library.nvmlDeviceGetHandleByIndex = lambda index: index
    library.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    library.nvmlDeviceGetName = lambda handle: b"Test GPU"
    library.nvmlDeviceGetClockInfo = lambda handle, which: {1: 1980, 2: 3201}[which]
    library.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: mask
    library.nvmlDeviceGetPowerUsage = lambda handle: 350_500

    def unsupported(*args: object) -> None:
        raise RuntimeError("Not Supported")

    library.nvmlDeviceGetTemperature = unsupported
    return library


@pytest.mark.parametrize(
    ("mask", "throttle", "capped"),
    [
        (0x00, (), False),
        (0x01, (), False),
        (0x04, (), True),
        (0x60, ("gpu-sw-thermal", "gpu-hw-thermal"), False),
        (0x88, ("gpu-hw-slowdown", "gpu-hw-power-brake"), False),
    ],
    ids=["none", "idle", "power cap", "thermal", "power brake"],
)
@pytest.mark.parametrize("device", [0, "GPU-1234"])
def test_nvml_state(
    monkeypatch: pytest.MonkeyPatch,
    mask: int,
    throttle: tuple[str, ...],
    capped: bool,
    device: int | str,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(mask))
    seen = StateProbe(gpu=device).sample()
    assert seen.throttle == throttle
    assert seen.gpu == state.GpuState("Test GPU", 1980, 3201, 350.5, capped, None)
    assert MachineState.from_dict(seen.to_dict()) == seen


def fake_amdsmi(status: object) -> types.ModuleType:
    library: Any = types.ModuleType("amdsmi")
    library.amdsmi_init = lambda: None
    library.amdsmi_get_processor_handles = lambda: ["card"]
    library.AmdSmiClkType = types.SimpleNamespace(GFX=1, MEM=2)
    library.AmdSmiTemperatureType = types.SimpleNamespace(HOTSPOT=1)
    library.AmdSmiTemperatureMetric = types.SimpleNamespace(CURRENT=1)
    library.amdsmi_get_gpu_asic_info = lambda handle: {"market_name": "Test Radeon"}
    library.amdsmi_get_clock_info = lambda handle, kind: {"clk": 100 * kind}
    library.amdsmi_get_power_info = lambda handle: {
        "average_socket_power": "N/A",
        "current_socket_power": 80,
    }
    library.amdsmi_get_temp_metric = lambda handle, kind, metric: 55
    library.amdsmi_get_gpu_metrics_info = lambda handle: {"throttle_status": status}
    return library


@pytest.mark.parametrize(
    ("status", "throttle"),
    [
        (0, ()),
        ("N/A", ()),
        (False, ()),
        (0xFFFFFFFF, ()),
        (True, ("gpu-throttle",)),
        (0x20, ("gpu-throttle",)),
    ],
)
def test_amd_smi_state(
    monkeypatch: pytest.MonkeyPatch, status: object, throttle: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", fake_amdsmi(status))
    seen = StateProbe(gpu=0).sample()
    assert seen.throttle == throttle
    assert seen.gpu == state.GpuState("Test Radeon", 100, 200, 80, None, 55)


def test_without_a_management_library_there_is_no_gpu_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert StateProbe(gpu=0).sample().gpu is None
