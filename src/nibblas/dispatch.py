"""Choosing a kernel: what can run, what evidence says it takes, else what the cost model expects."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from nibblas import evidence
from nibblas.evidence import Measurement
from nibblas.kernel import Kernel, storage_layouts
from nibblas.kernels import kernels
from nibblas.layouts import LINEAR, Layout
from nibblas.problem import Problem
from nibblas.roofline import device_name, roofline, threads_of
from nibblas.words import time_text


class NoKernelError(RuntimeError):
    """No kernel answers the problem, or the one asked for by name can't; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """A kernel with what speaks for or against it on one problem."""

    kernel: Kernel
    why_not: str | None
    seconds: float  # expected; infinite where why_not says no
    basis: str  # "measured", "near" or "cost"; "none" where why_not says no
    record: Measurement | None = None
    distance: float = 0.0

    @property
    def noise(self) -> float:
        """Half the quartile distance of what was measured, over the median."""
        return 0.0 if self.record is None else self.record.spread

    @property
    def refusal(self) -> str:
        return f"{self.kernel.name} can't: {self.why_not}"

    @property
    def basis_in_words(self) -> str:
        if self.record is None:
            return "cost model"
        when = f"measured {self.record.when}"
        return when if self.basis == "measured" else f"from {self.record.problem} ({self.distance:.1f} away), {when}"


@dataclass(frozen=True)
class Explanation:
    """Every kernel of an op and how it fared; prints as a table."""

    problem: Problem
    floor: float
    floor_source: str
    threads: int  # of the CPU; 0 on other devices
    chosen: Kernel | None
    candidates: tuple[Candidate, ...]

    @property
    def floor_in_words(self) -> str:
        if self.floor_source == "assumed":
            threads = f" --threads {self.threads}" if self.threads else ""
            return f"floor unknown: `nibblas doctor{threads}` measures this device once"
        return f"floor {time_text(self.floor)} (bandwidth and rates {self.floor_source})"

    def share(self, candidate: Candidate) -> str:
        """How near to the floor a kernel should come; "?" where no floor is named."""
        return "?" if self.floor_source == "assumed" else f"{self.floor / candidate.seconds:.0%}"

    def __str__(self) -> str:
        able = [c for c in self.candidates if c.why_not is None]
        lines = [str(self.problem), self.floor_in_words]
        if not able:
            lines.append(NONE_CAN)
        cells = [(c.kernel.name, time_text(c.seconds), f"{self.share(c)} of floor", c.basis_in_words) for c in able]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for candidate, (name, time, share, why) in zip(able, cells, strict=True):
            mark = ">" if candidate.kernel is self.chosen else " "
            lines.append(f"{mark} {name:<{widths[0]}}  {time:>{widths[1]}}  {share:>{widths[2]}}  {why}")
        return "\n".join(lines + [c.refusal for c in self.candidates if c.why_not is not None])


NONE_CAN = "no kernel can run this"


def choose(problem: Problem, device: torch.device, kernel: str | None = None) -> Kernel:
    """The kernel for a problem on a device; `kernel` forces one by name. Raises NoKernelError with the reasons."""
    return _choose(problem, device, threads_of(device), kernel)


@lru_cache(maxsize=4096)
def _choose(problem: Problem, device: torch.device, threads: int, name: str | None) -> Kernel:
    candidates = rank(problem, device, threads)
    if name is not None:
        for c in candidates:
            if c.kernel.name == name:
                if c.why_not is None:
                    return c.kernel
                raise NoKernelError(f"{problem.op}: kernel {name!r} {c.why_not}")
        raise NoKernelError(
            f"{problem.op}: no kernel is called {name!r}; there are {', '.join(c.kernel.name for c in candidates)}"
        )
    if candidates and candidates[0].why_not is None:
        return candidates[0].kernel
    reasons = "; ".join(f"{c.kernel.name} {c.why_not}" for c in candidates)
    raise NoKernelError(f"no kernel for {problem}: {reasons or 'none exists'}")


def rank(problem: Problem, device: torch.device, threads: int) -> list[Candidate]:
    """Every kernel of the problem's op, the best first, those that can't last.

    Evidence puts a kernel before the cost model's favourite only if it beats it by more than the noise of both.
    """
    found = [_candidate(kernel, problem, device, threads) for kernel in kernels() if kernel.op == problem.op]
    if problem.batch_invariant and problem.M != 1:  # nor may the choice depend on M
        places = {c.kernel.name: i for i, c in enumerate(rank(replace(problem, M=1), device, threads))}
        return sorted(found, key=lambda c: (c.why_not is not None, places[c.kernel.name]))
    order = sorted(found, key=lambda c: (c.why_not is not None, c.seconds, c.kernel.name))
    tied = [c for c in order if c.why_not is None and c.seconds <= order[0].seconds * (1 + c.noise + order[0].noise)]
    if len(tied) > 1:
        line = roofline(device, threads)
        first = min(tied, key=lambda c: (c.kernel.cost(problem, line), c.seconds, c.kernel.name))
        order.remove(first)
        order.insert(0, first)
    return order


def _candidate(kernel: Kernel, problem: Problem, device: torch.device, threads: int) -> Candidate:
    why_not = kernel.why_not(problem)
    if why_not is not None:
        return Candidate(kernel, why_not, float("inf"), "none")
    line = roofline(device, threads)
    near = evidence.store().nearest(problem, kernel.name, kernel.digest, device_name(device), threads)
    if near is None:
        return Candidate(kernel, None, kernel.cost(problem, line), "cost")
    record, distance = near
    if distance == 0:
        return Candidate(kernel, None, record.median, "measured", record)
    # Of a near problem the cost model is expected to be as far off as it was of the measured one.
    scaled = record.median * kernel.cost(problem, line) / kernel.cost(record.problem, line)
    return Candidate(kernel, None, scaled, "near", record, distance)


def best_storage(problem: Problem, device: torch.device) -> tuple[Kernel, tuple[Layout, Layout]]:
    """The kernel to expect most of where b may lie as it likes, and the (scale, data) layouts for that.

    A kernel that decodes the weight is taken only where no other runs; LINEAR where the kernel does not care.
    """
    threads = threads_of(device)
    offers = []
    for layouts in storage_layouts(kernel for kernel in kernels() if kernel.op == problem.op):
        names = (layouts[0].name, layouts[1].name)
        ranked = rank(replace(problem, b_layouts=names), device, threads)
        first = next((c for c in ranked if c.why_not is None and not c.kernel.decodes_weights), ranked[0])
        liked = first.kernel.b_layouts is None or first.kernel.b_layouts[0] == layouts
        moved = layouts != (LINEAR, LINEAR)
        offers.append((first.kernel.decodes_weights, first.seconds, not liked, moved, names, first.kernel, layouts))
    *_, kernel, layouts = min(offers, key=lambda offer: offer[:5])
    return kernel, layouts


def explain_problem(problem: Problem, device: torch.device) -> Explanation:
    """How `choose` decides on this problem."""
    threads = threads_of(device)
    line = roofline(device, threads)
    candidates = tuple(rank(problem, device, threads))
    chosen = candidates[0].kernel if candidates and candidates[0].why_not is None else None
    return Explanation(problem, line.floor(problem), line.source, threads, chosen, candidates)


_age = 0


def age() -> int:
    """How often choices were dropped: one remembered elsewhere holds while this stays the same."""
    return _age


def forget() -> None:
    """Drop remembered choices, after new evidence or a new roofline."""
    global _age
    _age += 1
    _choose.cache_clear()
