"""What the worker does to its device around a call: wait for it, empty its caches, time it.

The functions of torch that time, wait and empty caches are looked up when the class is made, which is before the
submission is imported: what a submission puts in their place later is not called here.
"""

import ctypes
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.profiler
from torch.autograd import DeviceType

from nibblas.arena.wire import storage_bytes
from nibblas.memory import cold_bytes

LEAD = 10e-3  # seconds for which a GPU is kept from the work of a call, so that all of it has been launched by then
WORD = 8  # bytes of data that are held back together: an element, or several
PAUSE_NS = 100_000  # for which the device is left alone after some calls: several times what it takes to wait for it
HELD_WORDS, HELD_TENSORS = 4096, 8  # how many of a tensor, and of how many


class Device(Protocol):
    """A device as the worker uses it; `flush_bytes` are written and read to empty its caches."""

    device: torch.device
    flush_bytes: int

    @property
    def timers(self) -> tuple[str, ...]:
        """Names of the spans that `timed` returns, not all of them after each call; the first one ranks."""

    def hold_back(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Make the data of the next `timed` call wrong until its span begins, where work could begin earlier."""

    def release(self) -> None:
        """Make it right now."""

    def settle(self) -> None:
        """Leave the device idle; where `timed` does not do so, with the data of earlier work out of its caches."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def timed(self, function: Callable[[Any], Any], data: Any) -> tuple[dict[str, int], Any]:
        """Nanoseconds of a call by each timer, and what it returned; all of the device's work is waited for."""

    def traced(self, function: Callable[[Any], Any], data: Any) -> tuple[dict[str, int], Any, "Work"]:
        """`timed` under a profiler, and what that saw on the device; the process is slower for good afterwards."""


@dataclass(frozen=True)
class Work:
    """Kernels, copies and fills of one call on a device: how many, from the first start to the last end, the time in
    which at least one of them ran, and for how long before the span of the call; nanoseconds, 0 where a profiler sees
    none."""

    kernels: int = 0
    span_ns: float = 0.0
    busy_ns: float = 0.0
    early_ns: float = 0.0


def work_of(runs: Iterable[tuple[float, float]], since: float = -math.inf) -> Work:
    """The Work of these starts and ends, in a call whose span began at `since`."""
    kernels, busy, first, last = 0, 0.0, math.inf, -math.inf
    for start, end in sorted(runs):
        kernels, first = kernels + 1, min(first, start)
        busy += max(end - max(start, last), 0.0)
        last = max(last, end)
    return Work(kernels, last - first, busy, max(since - first, 0.0)) if kernels else Work()


def device_of(name: str) -> Device:
    """The Device of "cpu", "cuda" or "cuda:1"."""
    device = torch.device(name)
    return Cpu() if device.type == "cpu" else Gpu(device)


class Cpu:
    """The host's clock around the call."""

    timers: tuple[str, ...] = ("host",)

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.flush_bytes = cold_bytes(self.device)
        self._buffer = torch.zeros(max(self.flush_bytes // 8, 1), dtype=torch.int64)
        self._add_, self._clock = torch.Tensor.add_, time.perf_counter_ns

    def hold_back(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Nothing: the call itself begins the span."""

    def release(self) -> None:
        """Nothing was held back."""

    def settle(self) -> None:
        """Read and write as many bytes as are in all caches, by as many threads as compute."""
        self._add_(self._buffer, 1)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def timed(self, function: Callable[[Any], Any], data: Any) -> tuple[dict[str, int], Any]:
        """See Device."""
        clock = self._clock
        start = clock()
        output = function(data)
        end = clock()
        return {"host": end - start}, output

    def traced(self, function: Callable[[Any], Any], data: Any) -> tuple[dict[str, int], Any, Work]:
        """See Device: nothing runs on a device here."""
        return *self.timed(function, data), Work()


class Gpu:
    """Events around the call, on the stream that was current at the start, and the host's clock around all.

    Before the first event the device is kept busy, for LEAD seconds and then with emptying its caches, so that launches
    run ahead of it and are not timed; how long that took is "lead". The caches are written and then read, which leaves
    little in them to write back. A submission could use that time on another stream, which the events don't see. So
    some words of its data, at places that nobody knows before, are not there until the first event. After the last one
    has come the whole device is waited for: how much longer that takes is "tail", and is work on other streams too, or
    what such a wait costs where there are other streams. In one call of three, nobody knows which, the device is left
    alone for PAUSE_NS before: what the wait takes then is "late", and less where there was work.
    """

    timers: tuple[str, ...] = ("event", "host", "tail", "late", "lead")

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device.index or 0)
        torch.cuda.init()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.flush_bytes = cold_bytes(self.device)
        self._buffer = torch.zeros(self.flush_bytes // 8, dtype=torch.int64, device=self.device)
        events = torch._C._CudaEventBase
        self._record, self._wait, self._elapsed = events.record, events.synchronize, events.elapsed_time
        self._new_event, self._stream = torch.cuda.Event, torch.cuda.current_stream(self.device)
        stream, self._synchronize = self._stream, torch._C._cuda_synchronize
        place = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
        self._set_stream = partial(torch._C._cuda_setStream, **place)
        self._zero_, self._sum, self._clock = torch.Tensor.zero_, torch.Tensor.sum, time.perf_counter_ns
        self._arange, self._select, self._equal = torch.arange, torch.Tensor.index_select, torch.equal
        self._fill_, self._copy_ = torch.Tensor.index_fill_, torch.Tensor.index_copy_
        self._random, self._shuffle = random.SystemRandom().randrange, random.SystemRandom().shuffle
        self._pauses: list[int] = []
        self._sleep, self._sleep_cycles = torch._C._cuda_sleep, round(LEAD * _clock_rate(self.device))
        self._held: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._profile, self._activities = torch.profiler.profile, [torch.profiler.ProfilerActivity.CUDA]
        self._forget = _persisting_lines_forgotten()
        self._events = self._new_events()

    def _new_events(self) -> tuple[Any, Any, Any]:
        events = tuple(self._new_event(enable_timing=True) for _ in range(3))
        for event in events:
            self._record(event, self._stream)  # an event takes its resources when it is first recorded
        return events  # type: ignore[return-value]

    def hold_back(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """See Device: HELD_WORDS words of each of the largest tensors become NaN or -1, and are kept to be put back.

        Tensors that are poisoned, to be written by the call, are none of them.
        """
        self._held = []
        on_device = [s for s in storages if s.device == self.device and s.nbytes() >= WORD]
        for storage in sorted(on_device, key=torch.UntypedStorage.nbytes, reverse=True):
            words = storage_bytes(storage)[: storage.nbytes() // WORD * WORD].view(torch.int64)
            # Few enough that what they bring into the caches is a small part of the tensor.
            step = max(words.numel() // HELD_WORDS, min(words.numel() // 64, 64), 1)
            places = self._arange(self._random(step), words.numel(), step, device=self.device)
            values = self._select(words, 0, places)
            self._fill_(words, 0, places, -1)
            if not self._equal(values, self._select(words, 0, places)):
                self._held.append((words, places, values))
            if len(self._held) == HELD_TENSORS:
                break

    def release(self) -> None:
        """See Device."""
        for words, places, values in self._held:
            self._copy_(words, 0, places, values)

    def settle(self) -> None:
        """Wait, and take back the part of the L2 that earlier kernels may have set aside to keep data in."""
        self.synchronize()
        self._forget()

    def synchronize(self) -> None:
        """Wait for all streams."""
        self._synchronize()

    def timed(self, function: Callable[[Any], Any], data: Any) -> tuple[dict[str, int], Any]:
        """See Device."""
        clock, record, stream, (zeroth, first, last) = self._clock, self._record, self._stream, self._events
        self._set_stream()  # a submission may have left another
        start = clock()
        record(zeroth, stream)
        self._sleep(self._sleep_cycles)
        self._zero_(self._buffer)
        self._sum(self._buffer)
        self.release()
        record(first, stream)
        output = function(data)
        record(last, stream)
        self._wait(last)
        come = paused = clock()
        if pause := self._pause():
            while paused - come < pause:
                paused = clock()
        self._synchronize()
        end = clock()
        lead, event = (round(self._elapsed(*pair) * 1e6) for pair in ((zeroth, first), (first, last)))
        waited = {"late" if pause else "tail": end - paused}
        return {"event": event, "host": end - start - (paused - come), "lead": lead, **waited}, output

    def _pause(self) -> int:
        """Nanoseconds to leave the device alone after a call: PAUSE_NS in one of three."""
        if not self._pauses:
            self._pauses = [PAUSE_NS, 0, 0]
            self._shuffle(self._pauses)
        return self._pauses.pop()

    def traced(self, function: Callable[[Any], Any], data: Any) -> tuple[dict[str, int], Any, Work]:
        """See Device. Calls of nothing, traced before, tell which of the runs are our own; a profiler may lose some."""
        own = [Counter(name for _, _, name in self._profiled(lambda data: None, data)[2]) for _ in range(2)]
        spans, output, runs = self._profiled(function, data)
        ours, others, until = own[0] | own[1], [], -math.inf
        if not ours:
            return spans, output, Work()
        for start, end, name in runs:
            if ours[name]:
                ours[name] -= 1
                until = max(until, end)
            else:
                others.append((start, end))
        return spans, output, work_of(others, until)

    def _profiled(
        self, function: Callable[[Any], Any], data: Any
    ) -> tuple[dict[str, int], Any, list[tuple[float, float, str]]]:
        """`timed` under a profiler, and from when to when, in nanoseconds, what ran on the device."""
        with self._profile(activities=self._activities) as found:
            self._zero_(self._buffer)  # the first kernel of a session may be lost
            self._synchronize()
            spans, output = self.timed(function, data)
        runs = sorted(
            (event.time_range.start * 1e3, event.time_range.end * 1e3, event.name)
            for event in found.events()
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        )
        return spans, output, runs


def _clock_rate(device: torch.device) -> float:
    """The highest clock of a GPU's multiprocessors in Hz; 1.5 GHz where torch doesn't tell."""
    return 1e3 * getattr(torch.cuda.get_device_properties(device), "clock_rate", 1.5e6)


def _persisting_lines_forgotten() -> Callable[[], None]:
    """A function that resets lines of the L2 that were marked as persisting, where the driver knows such."""
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        reset, limit = driver.cuCtxResetPersistingL2Cache, driver.cuCtxSetLimit
        persisting_l2_cache_size = 6  # of CUlimit

        def forget() -> None:
            reset()
            limit(persisting_l2_cache_size, ctypes.c_size_t(0))

        return forget
    return lambda: None
