"""Clocks of an NVIDIA GPU and what holds them back, read from outside the worker by nvidia-ml-py."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

# Why a clock is where it is, by NVML's name (nvmlClocksThrottleReason...), in the words of nvidia-smi.
REASONS = {
    "GpuIdle": "idle",
    "ApplicationsClocksSetting": "applications clocks setting",
    "SwPowerCap": "SW power cap",
    "HwSlowdown": "HW slowdown",
    "SyncBoost": "sync boost",
    "SwThermalSlowdown": "SW thermal slowdown",
    "HwThermalSlowdown": "HW thermal slowdown",
    "HwPowerBrakeSlowdown": "HW power brake slowdown",
    "DisplayClockSetting": "display clock setting",
}
# Those of heat and of the power brake, and all by which a clock lies below what the work asks for.
SLOWDOWNS = frozenset(words for name, words in REASONS.items() if name.endswith("Slowdown"))
HELD_BACK = SLOWDOWNS | {REASONS["SwPowerCap"]}


@dataclass(frozen=True)
class ClockState:
    """The SM clock at one moment, and why it is no higher."""

    sm_mhz: int | None  # None where the device does not tell
    reasons: frozenset[str]  # of REASONS

    @property
    def is_held_back(self) -> bool:
        """Whether the clock lies below what the work asks for."""
        return not HELD_BACK.isdisjoint(self.reasons)


class Clocks:
    """The clocks of one device. On a CPU, and where NVML can't be had, nothing is known of them."""

    def __init__(self, device: torch.device):
        self.facts: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self._nvml: Any = None
        if device.type != "cuda" or torch.version.hip:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            bus: Any = torch.cuda.get_device_properties(device)
            name = f"{bus.pci_domain_id:08x}:{bus.pci_bus_id:02x}:{bus.pci_device_id:02x}.0"
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(name)
            self._nvml = pynvml
            self._tell()
        except Exception as error:  # the package, the library, the driver, or rights: each has its own kind
            self.facts["clocks"] = f"not known: {' '.join(str(error).split())[:100]}"

    def _tell(self) -> None:
        nvml, handle = self._nvml, self._handle
        self.versions["driver"] = _text(nvml.nvmlSystemGetDriverVersion())
        for name, clock in (("SM", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM)):
            with suppress(nvml.NVMLError):
                now, most = nvml.nvmlDeviceGetClockInfo(handle, clock), nvml.nvmlDeviceGetMaxClockInfo(handle, clock)
                self.facts[f"{name} clock"] = f"{now} MHz of at most {most} MHz"
        with suppress(nvml.NVMLError):
            self.facts["power limit"] = f"{nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000:.0f} W"
        with suppress(nvml.NVMLError):
            self.facts["temperature"] = f"{nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)} C"

    def now(self) -> ClockState | None:
        """The state of the clocks at this moment; None where it is not known."""
        if self._nvml is None:
            return None
        nvml, handle, clock, bits = self._nvml, self._handle, None, 0
        with suppress(nvml.NVMLError):
            clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        with suppress(nvml.NVMLError):
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        if clock is None and not bits:
            return None
        found = (words for name, words in REASONS.items() if bits & getattr(nvml, f"nvmlClocksThrottleReason{name}", 0))
        return ClockState(clock, frozenset(found))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
