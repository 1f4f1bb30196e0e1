"""The worker's way with a GPU, whose calls are taken by fakes: in what order, and what becomes of what they tell."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from nibblas.arena import device
from nibblas.arena.device import HELD_WORDS, Gpu, Work
from nibblas.arena.worker import Worker


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
    """A profiler of calls that empty the caches by two kernels, and of what else it is told to see."""

    seen: tuple = ()
    used = 0

    def __init__(self, activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        Profile.used += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def events(self):
        def event(start, end, kind=DeviceType.CUDA, name="", **more):
            span = SimpleNamespace(start=start, end=end)
            return SimpleNamespace(time_range=span, device_type=kind, name=name, **more)

        own = [event(50, 90, name="sum"), event(0, 50, name="fill")]
        host, note = event(0, 500, DeviceType.CPU), event(0, 500, is_user_annotation=True)
        others = [event(start, end, name=name) for start, end, name in Profile.seen if Profile.used > 2]
        return [*others, *own, host, note]


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
        "current_stream": lambda device: SimpleNamespace(stream_id=3, device_index=0, device_type=1),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_CudaEventBase", Event, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_synchronize", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_setStream", lambda *, stream_id, device_index, device_type: None, raising=False
    )
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(Profile, "used", 0)
    monkeypatch.setattr(Profile, "seen", ())
    monkeypatch.setattr(device, "cold_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(device, "_persisting_lines_forgotten", lambda: lambda: None)
    monkeypatch.setattr(device, "_clock_rate", lambda device: 1e9)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **more: zeros(*sizes, **more))
    return lambda name: (Gpu(torch.device(name)), chosen)


@pytest.fixture
def here(gpu):
    """A Gpu whose data lies on the CPU."""
    made, _ = gpu("cuda")
    made.device = torch.device("cpu")
    return made


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_may_be_named_without_its_number(gpu, name, number):
    made, chosen = gpu(name)
    assert chosen == [number]
    assert made.device == torch.device("cuda", number)


def test_a_call_is_timed_by_events_and_the_host_and_the_caches_are_emptied_before(gpu):
    made, _ = gpu("cuda")
    made._buffer.fill_(7)
    seen = []
    for _ in range(12):
        spans, output = made.timed(lambda data: int(made._buffer.sum()) + data, 1)
        assert output == 1
        assert 0 < spans["event"] < spans["host"]
        seen += set(spans)
    assert set(seen) == set(made.timers)
    assert (seen.count("tail"), seen.count("late")) == (8, 4)  # a device is waited for at once, or some time later


def test_a_pause_before_the_device_is_waited_for_is_part_of_no_time(gpu, monkeypatch):
    made, _ = gpu("cuda")
    monkeypatch.setattr(device, "PAUSE_NS", 50_000_000)
    assert all(max(made.timed(lambda data: data, 1)[0].values()) < 40e6 for _ in range(3))


def test_what_a_call_does_in_which_order(here):
    log, data = [], torch.arange(100)
    here.hold_back([data.untyped_storage()])

    def logged(name, function):
        def call(*arguments):
            log.append(name)
            return function(*arguments)

        return call

    for name in ("_set_stream", "_sleep", "_zero_", "_sum", "_copy_", "_synchronize"):
        setattr(here, name, logged(name, getattr(here, name)))
    events = dict(zip(here._events, ("zeroth", "first", "last"), strict=True))
    here._record = lambda event, stream: logged(events[event], event.record)()
    here.timed(lambda data: log.append("call"), data)
    before = ["_set_stream", "zeroth", "_sleep", "_zero_", "_sum", "_copy_", "first"]
    assert log == [*before, "call", "last", "_synchronize"]


def test_what_the_profiler_saw_is_the_calls_own_work(gpu, monkeypatch):
    made, _ = gpu("cuda")
    monkeypatch.setattr(Profile, "seen", ((112, 130, "mine"), (100, 110, "sum")))
    spans, output, work = made.traced(lambda data: data, 1)
    assert output == 1
    assert spans["event"] > 0
    assert work == Work(kernels=2, span_ns=30e3, busy_ns=28e3)


def test_work_on_another_stream_before_the_span_is_seen(gpu, monkeypatch):
    made, _ = gpu("cuda")
    monkeypatch.setattr(Profile, "seen", ((10, 30, "mine"), (100, 110, "mine")))
    _, _, work = made.traced(lambda data: data, 1)
    assert work == Work(kernels=2, span_ns=100e3, busy_ns=30e3, early_ns=80e3)


@pytest.mark.parametrize("nbytes", [8, 20, 4096, 1_000_000])
def test_data_is_wrong_before_the_span_and_right_in_it(here, nbytes):
    data = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    right, places = data.clone(), set()
    for _ in range(20):
        here.hold_back([data.untyped_storage()])
        wrong = (data != right).nonzero().flatten()
        assert min(nbytes // 8, 64) <= len(wrong) // 8 <= HELD_WORDS
        assert nbytes < 10_000 or max(wrong) - min(wrong) > nbytes * 0.99
        places.add(int(wrong[0]))
        _, seen = here.timed(torch.clone, data)
        assert torch.equal(seen, right)
    assert len(places) > 1 or nbytes < 600, "nobody knows before which words are held back"


def test_the_largest_tensors_that_hold_data_are_held_back(here):
    tensors = [torch.arange(10 * n) for n in range(1, 13)]
    tensors[10].fill_(-1)  # poisoned, for the call to fill
    right = [t.clone() for t in tensors]
    here.hold_back([t.untyped_storage() for t in tensors])
    changed = [n for n, (t, was) in enumerate(zip(tensors, right, strict=True)) if not torch.equal(t, was)]
    assert changed == [2, 3, 4, 5, 6, 7, 8, 9, 11][-device.HELD_TENSORS :]
    here.release()
    assert all(torch.equal(t, was) for t, was in zip(tensors, right, strict=True))


def test_data_of_other_devices_and_less_than_a_word_are_left_alone(gpu):
    made, _ = gpu("cuda")
    data = torch.arange(100)
    made.hold_back([data.untyped_storage()])
    assert torch.equal(data, torch.arange(100))
    made.device, small = torch.device("cpu"), torch.ones(7, dtype=torch.uint8)
    made.hold_back([small.untyped_storage()])
    assert small.eq(1).all()


class Log:
    """A device that notes what is asked of it."""

    device = torch.device("cpu")

    def __init__(self):
        self.done = []

    def __getattr__(self, name):
        return lambda *arguments: self.done.append((name, *(len(a) for a in arguments)))


def test_a_worker_holds_its_data_back_last_and_lets_go_of_the_old_first():
    worker = Worker()
    worker.device, worker.storages = Log(), [torch.ones(4).untyped_storage()]
    worker.prepare({}, [])
    assert worker.device.done == [("hold_back", 0), ("hold_back", 1), ("settle",), ("synchronize",)]


def test_a_profiled_call_has_its_data():
    worker, seen = Worker(), []
    worker.device, worker.data = Log(), 5
    worker.kernel = lambda data: seen.append((data, list(worker.device.done)))
    assert "report" in worker.profile({"by_runner": False}, [])
    assert seen == [(5, [("release",), ("synchronize",)])]
