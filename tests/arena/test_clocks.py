"""What NVML tells of clocks, and what of it a record keeps; a fake takes NVML's place."""

import sys
from types import SimpleNamespace

import pytest
import torch

from nibblas.arena import run as arena_run
from nibblas.arena.clocks import REASONS, Clocks, ClockState
from nibblas.arena.record import ClocksSeen

IDLE, POWER_CAP, HARDWARE, SOFTWARE_HEAT, HARDWARE_HEAT = 0x1, 0x4, 0x8, 0x20, 0x40
BITS = {
    "nvmlClocksThrottleReasonGpuIdle": IDLE,
    "nvmlClocksThrottleReasonSwPowerCap": POWER_CAP,
    "nvmlClocksThrottleReasonHwSlowdown": HARDWARE,
    "nvmlClocksThrottleReasonSwThermalSlowdown": SOFTWARE_HEAT,
    "nvmlClocksThrottleReasonHwThermalSlowdown": HARDWARE_HEAT,
}


class NVMLError(Exception):
    pass


class Nvml(SimpleNamespace):
    """pynvml as far as it is used: one device, whose clock and reasons are of these moments in turn, then the last."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, moments):
        super().__init__(**BITS, moments=list(moments), fails=False)

    def nvmlInit(self):
        pass

    def nvmlSystemGetDriverVersion(self):
        return b"580.1"

    def nvmlDeviceGetHandleByPciBusId(self, name):
        assert name == "00000000:1b:00.0"
        return "a handle"

    def nvmlDeviceGetClockInfo(self, handle, clock):
        if self.fails:
            raise NVMLError
        return self.moments[0][0]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        _, reasons = self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]
        return reasons

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return 1980

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000

    def nvmlDeviceGetTemperature(self, handle, sensor):
        raise NVMLError


@pytest.fixture
def nvml(monkeypatch):
    """nvml(moments) puts an Nvml in pynvml's place, and a GPU beside it."""

    def install(*moments):
        fake = Nvml(moments)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.setattr(torch.version, "hip", None)
    return install


def of_gpu():
    return Clocks(torch.device("cuda"))


def test_nvml_has_the_reasons_by_these_names():
    pynvml = pytest.importorskip("pynvml")
    bits = {name: getattr(pynvml, f"nvmlClocksThrottleReason{name}") for name in REASONS}
    assert len(set(bits.values())) == len(REASONS)
    assert BITS.items() <= {f"nvmlClocksThrottleReason{name}": bit for name, bit in bits.items()}.items()


def test_facts_are_those_that_nvml_tells(nvml):
    nvml((345, IDLE))
    found = of_gpu()
    assert found.versions == {"driver": "580.1"}
    assert found.facts == {
        "SM clock": "345 MHz of at most 1980 MHz",
        "memory clock": "345 MHz of at most 1980 MHz",
        "power limit": "700 W",
    }


def test_the_state_of_a_moment_has_the_reasons_that_are_known(nvml):
    nvml((1980, 0), (345, IDLE), (1200, POWER_CAP | HARDWARE_HEAT | 0x400))
    clocks = of_gpu()
    states = [clocks.now() for _ in range(3)]
    assert states == [
        ClockState(1980, frozenset()),
        ClockState(345, frozenset({"idle"})),
        ClockState(1200, frozenset({"SW power cap", "HW thermal slowdown"})),
    ]
    assert [state.is_held_back for state in states] == [False, False, True]


def test_nothing_is_known_where_nvml_is_not_or_fails(nvml, monkeypatch):
    assert Clocks(torch.device("cpu")).now() is None
    fake = nvml((345, 0))
    clocks = of_gpu()
    fake.fails = True
    assert clocks.now() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    without = of_gpu()
    assert without.now() is None
    assert "not known" in without.facts["clocks"]


@pytest.fixture
def timed(arena, problem, nvml, monkeypatch):
    """timed(moments) runs benchmarks on the CPU, beside a GPU whose clocks are such after each call."""
    directory = problem("vector_add")

    def start(*moments):
        nvml(*moments)
        monkeypatch.setattr(arena_run, "Clocks", lambda device: of_gpu())
        return arena(directory, directory / "submission.py", mode="benchmark")

    return start


def told(case):
    return [(f.severity, f.what) for f in case.findings if f.class_id == "throttled"]


def test_a_timed_case_has_the_clocks_of_its_calls_after_warm_up(timed):
    found = timed((345, IDLE), (600, HARDWARE), (1980, 0), (1965, IDLE), (1950, POWER_CAP), (1980, 0))
    first, second = found.cases
    assert found.verdict == "correct here"
    assert first.clocks == ClocksSeen(1950, 1980, ("SW power cap", "idle"))
    assert second.clocks == ClocksSeen(1980, 1980)
    assert sum(sample.reason == "the clocks were throttled" for sample in first.samples) == 1
    assert not told(first), "a power cap is only shown"


def test_heat_and_the_power_brake_are_a_finding(timed):
    first, second = timed(*[(1980, 0)] * 2, (1200, HARDWARE | HARDWARE_HEAT), (1980, 0)).cases
    assert told(first) == [
        ("info", "heat or the power brake held the clocks back in some calls: HW slowdown, HW thermal slowdown")
    ]
    assert not told(second)


def test_a_case_whose_every_call_was_throttled_tells_both(timed):
    found = timed((1200, SOFTWARE_HEAT))
    for case in found.cases:
        assert case.statistics is None
        assert case.clocks == ClocksSeen(1200, 1200, ("SW thermal slowdown",))
        assert [severity for severity, _ in told(case)] == ["info", "flag"]


def test_cases_of_a_cpu_and_tests_have_no_clocks(arena, problem):
    directory = problem("vector_add")
    found = arena(directory, directory / "submission.py", mode="leaderboard")
    assert all(case.clocks is None for case in found.cases)
