"""Timing that can be trusted: functions interleaved, operands out of the caches."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from nibblas.memory import use_huge_pages
from nibblas.tensor import ScaledTensor

AT_LEAST = 5  # rounds, however little time there is
SHORTEST = 20e-6  # seconds of one CPU sample: the clock's own cost stays under 1 %
MAX_COPIES = 8192  # of one operand: a tiny one is left in the caches rather than copied without end
ALIGNMENT = 256  # bytes, of each copy

CPU = torch.device("cpu")
Function = Callable[[], object]
T = TypeVar("T", Tensor, ScaledTensor)


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Run the block with this many torch threads (None: as many as now), then restore the number."""
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleaved(
    functions: Mapping[str, Function],
    *,
    rounds: int = 30,
    warmup: int = 2,
    threads: int | None = None,
    device: torch.device = CPU,
    seconds: float | None = None,
    launches: int = 16,
) -> dict[str, tuple[float, ...]]:
    """Seconds that each function takes, one sample a round; each round calls all of them, in shuffled order.

    Drift (clocks, neighbours on the machine) so hits all alike, and samples of one round can be compared as pairs.

    Parameters
    ----------
    functions : what to time, by name; called without arguments.
    rounds : samples of each. At least 5 are taken, then no more once `seconds` are over.
    warmup : calls of each before the first round.
    threads : torch threads during the run, restored after it; None leaves them.
    device : on a CPU a sample is as many calls as make 20 us, at least one, by the wall clock. On CUDA it is `launches`
        calls, timed by events: as one graph if the function can be captured, else called from Python.

    Returns name -> samples in the order of rounds, seconds a call.
    """
    with torch_threads(threads), torch.no_grad():
        timers = {name: _timer(function, warmup, device, launches) for name, function in functions.items()}
        samples: dict[str, list[float]] = {name: [] for name in functions}
        order, shuffle = list(functions), random.Random(0).shuffle
        start = time.perf_counter()
        for done in range(1, rounds + 1):
            shuffle(order)
            for name in order:
                samples[name].append(timers[name]())
            if seconds is not None and done >= AT_LEAST and time.perf_counter() - start > seconds:
                break
    return {name: tuple(taken) for name, taken in samples.items()}


def _timer(function: Function, warmup: int, device: torch.device, launches: int) -> Callable[[], float]:
    if device.type == "cuda":
        return _cuda_timer(function, warmup, device, launches)
    spent = float("inf")
    for _ in range(max(warmup, 1)):
        start = time.perf_counter()
        function()
        spent = min(spent, time.perf_counter() - start)
    calls = max(1, round(SHORTEST / max(spent, 1e-9)))

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls

    return sample


def _cuda_timer(function: Function, warmup: int, device: torch.device, launches: int) -> Callable[[], float]:
    def calls() -> None:
        for _ in range(launches):
            function()

    with torch.cuda.device(device):
        for _ in range(max(warmup, 1)):
            function()
        torch.cuda.synchronize(device)
        run = _captured(calls) or calls

    def sample() -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e-3 / launches

    return sample


def _captured(calls: Function) -> Function | None:
    """The calls as one CUDA graph; None if something in them can't be captured, such as a wait for the device."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


# --- cold operands -------------------------------------------------------------------------------------------------


class Rotation(Generic[T]):
    """Copies of an operand taken in turn, so that each use finds it out of the caches.

    Calling it gives the next copy. There are as many as make `beyond` bytes together, but not more than `at_most`; all
    functions of a run that use the operand share one Rotation, or one would find warm what another has just read.

    >>> rotation = Rotation(torch.zeros(16, 16), beyond=4096)
    >>> len(rotation.copies), rotation() is rotation.copies[0], rotation() is rotation.copies[1]
    (4, True, True)
    """

    def __init__(self, operand: T, beyond: int, at_most: int = MAX_COPIES):
        self.beyond = beyond
        count = min(max(1, -(-beyond // max(operand.nbytes, 1))), at_most)
        self.copies = _copies(operand, count)
        self.nbytes = count * operand.nbytes
        self._next = 0

    @property
    def is_cold(self) -> bool:
        """Whether the copies together span what was asked for."""
        return self.nbytes >= self.beyond

    def __call__(self) -> T:
        copy = self.copies[self._next]
        self._next = (self._next + 1) % len(self.copies)
        return copy


def _copies(operand, count: int) -> list:
    if isinstance(operand, Tensor):
        return _tensor_copies(operand, count)
    parts = (operand.data, operand.scale, operand.global_scale)
    copied = ([None] * count if part is None else _tensor_copies(part, count) for part in parts)
    return [
        replace(operand, data=data, scale=scale, global_scale=factor)
        for data, scale, factor in zip(*copied, strict=True)
    ]


def _tensor_copies(tensor: Tensor, count: int) -> list[Tensor]:
    """Copies in one allocation, each on its own alignment, in huge pages as nn stores weights."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    stride = -(-max(raw.numel(), 1) // ALIGNMENT) * ALIGNMENT
    slab = torch.empty(count, stride, dtype=torch.uint8, device=tensor.device)
    use_huge_pages(slab)
    slab[:, : raw.numel()] = raw
    return [row[: raw.numel()].view(tensor.dtype).view(tensor.shape) for row in slab]
