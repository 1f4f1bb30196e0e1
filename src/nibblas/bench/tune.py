"""`nibblas tune`: measure given shapes on this machine, within a time, so that the dispatcher chooses by evidence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console

from nibblas import dispatch, evidence
from nibblas.bench.sweep import Result, sweep
from nibblas.bench.timing import CPU, torch_threads
from nibblas.formats import Format
from nibblas.problem import Problem
from nibblas.roofline import threads_of
from nibblas.words import time_text


@dataclass(frozen=True)
class Tuned:
    """What evidence made of the choice for one problem, layouts of the weights included."""

    problem: Problem
    before: str
    after: str
    times: dict[str, float]  # median seconds by kernel; expected ones of a choice that was not timed in these layouts

    @property
    def gain(self) -> float:
        """Time of the choice before over that of the choice after."""
        return self.times[self.before] / self.times[self.after]


def tune(
    shapes: Sequence[tuple[int, int]],
    Ms: Sequence[int],
    formats: Sequence[Format],
    activations: str = "bf16",
    *,
    op: str = "linear",
    L: int = 1,
    G: int | None = None,
    device: torch.device = CPU,
    threads: int | None = None,
    seconds: float = 60.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Tuned]:
    """Time every kernel on weights (N, K) and M rows of each format, keep the evidence, and say what it changed.

    op, L and G are as in `sweep`. Takes about `seconds` in all, and keeps what was measured also where it is stopped.
    Kernels that give a wrong answer are not timed.
    A choice changes only if the other kernel beats it by more than the noise of both (dispatch.rank).
    """
    each = seconds / max(1, len(shapes) * len(Ms) * len(formats))
    results: list[Result] = []
    try:
        sweep(
            shapes,
            Ms,
            formats,
            activations,
            op=op,
            L=L,
            G=G,
            device=device,
            threads=threads,
            rounds=1000,
            seconds=each,
            progress=progress,
            keep=results.append,
            command="tune",
        )
    finally:  # not before the end, since it changes the choices
        if results:
            evidence.store().add(m for result in results for m in result.measurements)
            dispatch.forget()
    with torch_threads(threads):
        return [tuned for result in results for tuned in _compare(result, device)]


def _compare(result: Result, device: torch.device) -> list[Tuned]:
    found = []
    for before in result.timed:
        if before.problem is None or not before.chosen:
            continue
        rivals = {t.kernel: t.median for t in result.timed if t.problem == before.problem and t.kernel}
        after, *_ = dispatch.rank(before.problem, device, threads_of(device))
        rivals.setdefault(after.kernel.name, after.seconds)
        found.append(Tuned(before.problem, before.kernel or "", after.kernel.name, rivals))
    return found


def print_tuned(tuned: Sequence[Tuned], console: Console) -> None:
    """A line a problem: what is chosen now, and whether evidence changed that."""
    for t in tuned:
        told = f"[bold]{t.after}[/] instead of {t.before}, {t.gain:.2f}x" if t.after != t.before else f"{t.after}, kept"
        console.print(f"{t.problem}: {time_text(t.times[t.after])} with {told}", highlight=False)
