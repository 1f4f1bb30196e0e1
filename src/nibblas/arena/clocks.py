"""Clocks of an NVIDIA GPU and what holds them back, read from outside the worker by nvidia-ml-py."""

from contextlib import suppress
from typing import Any

import torch

# Reasons by which a clock lies below what the work asks for; the names of NVML's constants tell what they mean.
HELD_BACK = (
    "nvmlClocksThrottleReasonSwPowerCap",
    "nvmlClocksThrottleReasonHwSlowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
)


class Clocks:
    """The clocks of one device. On a CPU, and where NVML can't be had, nothing is known and nothing is throttled."""

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

    def throttled(self) -> bool:
        """Whether something holds the clocks back now."""
        if self._nvml is None:
            return False
        try:
            reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except self._nvml.NVMLError:
            return False
        return any(reasons & getattr(self._nvml, name, 0) for name in HELD_BACK)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
