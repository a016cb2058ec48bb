"""Machine state beside every block: what else could explain a time."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["GpuState", "MachineState", "StateProbe"]

_CPUS = Path("/sys/devices/system/cpu")
_STAT = Path("/proc/stat")
_CPUINFO = Path("/proc/cpuinfo")
_UNKNOWN_U32, _UNKNOWN_U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF  # amdsmi's "not supported"


@dataclass(frozen=True)
class GpuState:
    """One reading of a GPU's management library; None where the driver does not say.

    A power cap is a state, not a fault: heavy products run into it as a rule, in every arm.
    """

    name: str
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    power_capped: bool | None = None
    temperature_c: float | None = None


@dataclass(frozen=True)
class MachineState:
    """State over one block; None where the system does not say.

    Attributes:
        load_1m: load average of the last minute.
        frequency_mhz: mean CPU frequency at the block's end.
        others: share of the machine's CPU time that other processes used during the block.
        steal: share that the hypervisor gave to other guests.
        switches: involuntary context switches of this process.
        throttle: reasons for reduced clocks, named by the CPU or GPU; empty is good.
        gpu: the GPU's own reading.
    """

    load_1m: float | None = None
    frequency_mhz: float | None = None
    others: float | None = None
    steal: float | None = None
    switches: int | None = None
    throttle: tuple[str, ...] = ()
    gpu: GpuState | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "throttle": list(self.throttle)}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> MachineState:
        gpu = row.get("gpu")
        return cls(
            **{
                **row,
                "throttle": tuple(row.get("throttle", ())),
                "gpu": GpuState(**gpu) if gpu else None,
            }
        )


class StateProbe:
    """Reads the machine's state; every `sample` covers the time since the one before it.

    Args:
        gpu: UUID or index of the GPU to watch; None watches the CPU alone. Where its management
            library (nvidia-ml-py, amdsmi) is not installed, the state names no GPU.
        pids: processes that belong to the measurement, beside this one and its children.
    """

    def __init__(self, gpu: int | str | None = None, pids: tuple[int, ...] = ()) -> None:
        self._pids = pids
        self._gpu = None if gpu is None else _open_gpu(gpu)
        self._last = self._counters()

    def sample(self) -> MachineState:
        """State since the last call, or since this probe was made."""
        before, now = self._last, self._counters()
        self._last = now
        total = now["total"] - before["total"]
        busy = (now["busy"] - before["busy"]) - (now["own"] - before["own"])
        throttle = ["cpu-thermal"] if now["throttles"] > before["throttles"] else []
        gpu = None
        if self._gpu is not None:
            gpu, reasons = self._gpu.read()
            throttle += reasons
        return MachineState(
            load_1m=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            frequency_mhz=_frequency_mhz(),
            others=max(0.0, busy / total) if total > 0 else None,
            steal=(now["steal"] - before["steal"]) / total if total > 0 else None,
            switches=int(now["switches"] - before["switches"]),
            throttle=tuple(throttle),
            gpu=gpu,
        )

    def _counters(self) -> dict[str, float]:
        busy, steal, total = _cpu_seconds()
        own = os.times()
        return {
            "busy": busy,
            "steal": steal,
            "total": total,
            "own": sum(own[:4]) + sum(_process_seconds(pid) for pid in self._pids),
            "switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
            "throttles": _cpu_throttles(),
        }


def _cpu_seconds() -> tuple[float, float, float]:
    """Seconds since boot over all CPUs: busy, stolen, and all of them."""
    try:
        fields = [int(f) for f in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, idle, iowait, irq, softirq, steal = fields
    busy = user + nice + system + irq + softirq
    return busy / tick, steal / tick, (busy + idle + iowait + steal) / tick


def _process_seconds(pid: int) -> float:
    """CPU seconds of one process and of the children it has waited for; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return sum(int(f) for f in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _frequency_mhz() -> float | None:
    values = []
    for path in _CPUS.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        try:
            values.append(int(path.read_text()) / 1e3)
        except (OSError, ValueError):
            continue
    if not values:
        try:
            lines = _CPUINFO.read_text().splitlines()
        except OSError:
            return None
        values = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return sum(values) / len(values) if values else None


def _cpu_throttles() -> int:
    """Thermal throttle events since boot, where the CPU's driver counts them."""
    count = 0
    for path in _CPUS.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        try:
            count += int(path.read_text())
        except (OSError, ValueError):
            continue
    return count


def _open_gpu(device: int | str) -> _Nvml | _AmdSmi | None:
    for reader in (_Nvml, _AmdSmi):
        try:
            return reader(device)
        except Exception:  # the libraries raise their own types; without one there is no state
            continue
    return None


class _Nvml:
    """NVIDIA's management library through nvidia-ml-py."""

    # Bits of nvmlClocksEventReasons that mean trouble; idle and application clocks do not.
    _POWER_CAP = 0x04
    _REASONS = {
        0x08: "gpu-hw-slowdown",
        0x20: "gpu-sw-thermal",
        0x40: "gpu-hw-thermal",
        0x80: "gpu-hw-power-brake",
    }

    def __init__(self, device: int | str) -> None:
        self._lib: Any = import_module("pynvml")
        self._lib.nvmlInit()
        if isinstance(device, str):
            self._handle = self._lib.nvmlDeviceGetHandleByUUID(device)
        else:
            self._handle = self._lib.nvmlDeviceGetHandleByIndex(device)

    def read(self) -> tuple[GpuState, list[str]]:
        lib, handle = self._lib, self._handle
        name = lib.nvmlDeviceGetName(handle)
        mask = _ask(lib.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        power = _ask(lib.nvmlDeviceGetPowerUsage, handle)
        state = GpuState(
            name=name.decode() if isinstance(name, bytes) else str(name),
            sm_mhz=_ask(lib.nvmlDeviceGetClockInfo, handle, lib.NVML_CLOCK_SM),
            memory_mhz=_ask(lib.nvmlDeviceGetClockInfo, handle, lib.NVML_CLOCK_MEM),
            power_w=None if power is None else power / 1e3,
            power_capped=bool(int(mask) & self._POWER_CAP),
            temperature_c=_ask(lib.nvmlDeviceGetTemperature, handle, lib.NVML_TEMPERATURE_GPU),
        )
        return state, [text for bit, text in self._REASONS.items() if int(mask) & bit]


class _AmdSmi:
    """AMD's management library through amdsmi."""

    def __init__(self, device: int | str) -> None:
        self._lib: Any = import_module("amdsmi")
        self._lib.amdsmi_init()
        handles = self._lib.amdsmi_get_processor_handles()
        if isinstance(device, str) and len(handles) > 1:
            raise LookupError("several AMD GPUs and no index: no state beats another GPU's")
        self._handle = handles[device if isinstance(device, int) else 0]

    def read(self) -> tuple[GpuState, list[str]]:
        lib, handle = self._lib, self._handle
        board = _ask(lib.amdsmi_get_gpu_asic_info, handle) or {}
        core = _ask(lib.amdsmi_get_clock_info, handle, lib.AmdSmiClkType.GFX) or {}
        memory = _ask(lib.amdsmi_get_clock_info, handle, lib.AmdSmiClkType.MEM) or {}
        power = _ask(lib.amdsmi_get_power_info, handle) or {}
        state = GpuState(
            name=str(board.get("market_name", "AMD GPU")),
            sm_mhz=_number(core.get("clk")),
            memory_mhz=_number(memory.get("clk")),
            power_w=_number(power.get("average_socket_power"), power.get("current_socket_power")),
            temperature_c=_ask(
                lib.amdsmi_get_temp_metric,
                handle,
                lib.AmdSmiTemperatureType.HOTSPOT,
                lib.AmdSmiTemperatureMetric.CURRENT,
            ),
        )
        metrics = _ask(lib.amdsmi_get_gpu_metrics_info, handle) or {}
        status = metrics.get("throttle_status")
        throttled = isinstance(status, int) and status not in (0, _UNKNOWN_U32, _UNKNOWN_U64)
        return state, ["gpu-throttle"] if throttled else []


def _ask(query: Any, *args: Any) -> Any:
    """The answer of a management library, or None where this device does not support it."""
    try:
        return query(*args)
    except Exception:  # each library has its own error type
        return None


def _number(*values: Any) -> float | None:
    for value in values:
        if isinstance(value, int | float):
            return float(value)
    return None
