"""The worker's way with a GPU, whose calls are taken by fakes: in what order, and what becomes of what they tell."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from nibblas.arena import device
from nibblas.arena.device import Gpu, Work


class Event:
    """An event that comes when it is recorded."""

    def __init__(self, enable_timing=False):
        self.ns = None

    def record(self, stream=None):
        self.ns = time.perf_counter_ns()

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.ns - self.ns) / 1e6


class Profile:
    """A profiler that saw the caches emptied, two kernels after that unless it is the first, and what is no work."""

    used = 0

    def __init__(self, activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        Profile.used += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def events(self):
        def event(start, end, kind=DeviceType.CUDA, **more):
            return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end), device_type=kind, **more)

        host, note = event(0, 500, DeviceType.CPU), event(0, 500, is_user_annotation=True)
        kernels = [] if Profile.used == 1 else [event(100, 110), event(112, 130)]
        return [*kernels, event(0, 40), event(40, 90), host, note]


@pytest.fixture
def gpu(monkeypatch):
    """A Gpu over the fakes; `chosen` are the numbers of the devices that were made the current one."""
    chosen, zeros = [], torch.zeros

    def set_device(number):
        assert type(number) is int, "torch takes no device without a number here"
        chosen.append(number)

    fakes = {
        "set_device": set_device,
        "init": lambda: None,
        "current_device": lambda: chosen[-1],
        "Event": Event,
        "current_stream": lambda device: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_CudaEventBase", Event, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_synchronize", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(Profile, "used", 0)
    monkeypatch.setattr(device, "cold_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(device, "_persisting_lines_forgotten", lambda: lambda: None)
    monkeypatch.setattr(device, "_clock_rate", lambda device: 1e9)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **more: zeros(*sizes, **more))
    return lambda name: (Gpu(torch.device(name)), chosen)


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_may_be_named_without_its_number(gpu, name, number):
    made, chosen = gpu(name)
    assert chosen == [number]
    assert made.device == torch.device("cuda", number)


def test_a_call_is_timed_by_events_and_the_host_and_the_caches_are_emptied_before(gpu):
    made, _ = gpu("cuda")
    made._buffer.fill_(7)
    spans, output = made.timed(lambda data: int(made._buffer.sum()) + data, 1)
    assert output == 1
    assert set(spans) == set(made.timers)
    assert 0 < spans["event"] < spans["host"]


def test_what_the_profiler_saw_is_the_calls_own_work(gpu):
    made, _ = gpu("cuda")
    spans, output, work = made.traced(lambda data: data, 1)
    assert output == 1
    assert set(spans) == set(made.timers)
    assert work == Work(kernels=2, span_ns=30e3, busy_ns=28e3)


@pytest.mark.parametrize("nbytes", [8, 20, 4096, 100_000])
def test_data_is_wrong_before_the_span_and_right_in_it(gpu, nbytes):
    made, _ = gpu("cuda")
    made.device = torch.device("cpu")  # where the data of this test lies
    data = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    right = data.clone()
    made.hold_back([data.untyped_storage()])
    wrong = int((data != right).sum())
    assert min(nbytes // 8 * 8, 64 * 8) == wrong
    _, seen = made.timed(torch.clone, data)
    assert torch.equal(seen, right)


def test_data_of_other_devices_and_less_than_a_word_are_left_alone(gpu):
    made, _ = gpu("cuda")
    data = torch.arange(100)
    made.hold_back([data.untyped_storage()])
    assert torch.equal(data, torch.arange(100))
    made.device, small = torch.device("cpu"), torch.ones(7, dtype=torch.uint8)
    made.hold_back([small.untyped_storage()])
    assert small.eq(1).all()
