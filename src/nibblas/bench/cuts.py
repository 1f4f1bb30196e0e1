"""The cuts of its work that a CUDA kernel can make, timed: what its cost model is fitted to, and how well it chooses.

    python -m nibblas.bench.cuts FILE                     what `configure` loses to the best cut of each problem in FILE
    python -m nibblas.bench.cuts FILE --measure KERNEL    times cuts first, on a Hopper GPU, and adds them to FILE

The times of an H200 are in evidence/cuts/h200.jsonl, one cut a line: cold weights, medians of graphs of launches.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from nibblas import reference
from nibblas.bench.operands import USUAL_SCALES, compare, draw, rotation_of
from nibblas.bench.timing import interleaved
from nibblas.formats import NVFP4
from nibblas.kernels import cuda_linear_fp4_sm90, cuda_linear_sm90, cuda_linear_wide_sm90, cuda_module
from nibblas.kernels.cuda_prepacked_sm90 import LAYOUTS
from nibblas.memory import cold_bytes
from nibblas.problem import Problem
from nibblas.tensor import ScaledTensor, stack

MOST = 40  # cuts of a problem that are timed: those with the least estimates


@dataclass(frozen=True)
class Cuttable:
    """A kernel with several cuts: how to list them, and what it says of them (microseconds)."""

    config: type
    problems: tuple[Problem, ...]
    candidates: Callable[[Problem], Iterable[Any]]
    estimate: Callable[[Any, Problem], float]
    configure: Callable[[Problem], Any]
    layouts: tuple  # of the weights: of scales, of codes
    launch: Callable[..., None]  # launch(a, b, bias, out, config=...)
    compile: Callable[[Any, Problem], None]  # into the cache on disk

    def best(self, problem: Problem) -> list[Any]:
        """The cuts to time, those with the least estimates."""
        return list(islice(sorted(self.candidates(problem), key=lambda c: self.estimate(c, problem)), MOST))


def _linear_candidates(p: Problem) -> Iterator[cuda_linear_sm90.Config]:
    for config in cuda_linear_sm90._candidates(p.N, p.K, p.M):
        if config.shared_bytes(NVFP4, p.M, p.K) <= cuda_module.SHARED_LIMIT_SM90:
            yield config


def _fp4_candidates(p: Problem) -> Iterator[cuda_linear_fp4_sm90.Config]:
    for config in cuda_linear_fp4_sm90._candidates(p.M):
        if config.shared_bytes(p.M, p.K) <= cuda_module.SHARED_LIMIT_SM90:
            yield config


Options = Callable[[Any, Problem], tuple[str, ...]]


def _compile(files: tuple[str, ...], options: Options, config: Any, problem: Problem) -> None:
    cuda_module.compile_cubin(cuda_module.source_of(*files), "sm_90a", options(config, problem))


SHAPES = ((7168, 16384), (4096, 7168), (7168, 2048), (2112, 7168), (2880, 512), (3072, 1536))
_problem = partial(Problem, "linear", b=NVFP4.name, arch="sm_90")
KERNELS = {
    "cuda_linear_sm90": Cuttable(
        cuda_linear_sm90.Config,
        tuple(_problem(M, N, K) for N, K in SHAPES for M in (1, 8, 16, 32, 64)),
        _linear_candidates,
        lambda config, p: cuda_linear_sm90.estimate(config, p.N, p.K, p.M),
        lambda p: cuda_linear_sm90.configure(p.N, p.K, p.M),
        LAYOUTS[NVFP4],
        cuda_linear_sm90.launch,
        partial(_compile, cuda_linear_sm90.FILES, lambda config, p: config.options(NVFP4, 1, p.M)),
    ),
    "cuda_linear_wide_sm90": Cuttable(
        cuda_linear_wide_sm90.Config,
        tuple(_problem(M, N, K) for N, K in SHAPES for M in (32, 64, 96, 128, 256)),
        lambda p: (config for config in cuda_linear_wide_sm90.configs() if config.cluster <= -(-p.K // 128)),
        lambda config, p: cuda_linear_wide_sm90.estimate(config, p.N, p.K, p.M),
        lambda p: cuda_linear_wide_sm90.configure(p.N, p.K, p.M),
        LAYOUTS[NVFP4],
        cuda_linear_wide_sm90.launch,
        partial(_compile, cuda_linear_wide_sm90.FILES, lambda config, p: config.options(NVFP4, 1)),
    ),
    "cuda_linear_fp4_sm90": Cuttable(
        cuda_linear_fp4_sm90.Config,
        tuple(
            _problem(M, N, K, L, a=NVFP4.name)
            for N, K, L in (
                *((7168, 16384, 1), (4096, 7168, 8), (7168, 2048, 4), (4096, 4096, 1)),
                *((2880, 512, 1), (1024, 8192, 2), (14336, 4096, 1), (512, 4096, 32)),
            )
            for M in (1, 2, 4, 8)
            if M < 8 or K < 16384  # a must fit in shared memory
        ),
        _fp4_candidates,
        lambda config, p: cuda_linear_fp4_sm90.estimate(config, p.M, p.N, p.K, p.L),
        lambda p: cuda_linear_fp4_sm90.configure(p.M, p.N, p.K, p.L),
        (),
        cuda_linear_fp4_sm90.launch,
        partial(_compile, (cuda_linear_fp4_sm90.SOURCE,), lambda config, p: config.options(p.M)),
    ),
}


@dataclass(frozen=True)
class Cut:
    """One cut of one problem, and its median time."""

    kernel: str
    problem: Problem
    config: Any
    us: float

    def to_json(self) -> str:
        p = self.problem
        sizes = {"M": p.M, "N": p.N, "K": p.K, "L": p.L}
        config = {name: int(value) for name, value in asdict(self.config).items()}
        return json.dumps({"kernel": self.kernel, **sizes, "config": config, "us": round(self.us, 3)})

    @classmethod
    def from_json(cls, line: str) -> "Cut":
        """The inverse of to_json; ValueError, KeyError or TypeError for what is none."""
        values = json.loads(line)
        kernel = KERNELS[values["kernel"]]
        sizes = {name: values[name] for name in "MNKL"}
        types = {name: type(value) for name, value in asdict(kernel.config(1, 1, 1, 1)).items()}
        config = kernel.config(**{name: types[name](value) for name, value in values["config"].items()})
        return cls(values["kernel"], replace(kernel.problems[0], **sizes), config, values["us"])


def read(path: Path) -> list[Cut]:
    """The cuts in a file; ValueError with the line that is none."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found.append(Cut.from_json(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"cuts: {path}:{number} is no cut of a kernel as it is now: {error!r}") from None
    return found


# --- measuring -----------------------------------------------------------------------------------------------------


def measure(name: str, path: Path, device: torch.device, rounds: int = 9) -> None:
    """Time the best cuts of every problem of a kernel, and append them to a file, problem by problem.

    A cut that gives a wrong answer is named on stderr and not timed.
    """
    kernel = KERNELS[name]
    if device.type == "cuda":
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            jobs = [(config, problem) for problem in kernel.problems for config in kernel.best(problem)]
            list(pool.map(_compile_one, *zip(*((name, *job) for job in jobs), strict=True), chunksize=8))
    for problem in kernel.problems:
        with path.open("a") as file:
            file.writelines(cut.to_json() + "\n" for cut in _timed(name, kernel, problem, device, rounds))


def _compile_one(name: str, config: Any, problem: Problem) -> None:
    KERNELS[name].compile(config, problem)


def _timed(name: str, kernel: Cuttable, p: Problem, device: torch.device, rounds: int) -> list[Cut]:
    generator = torch.Generator().manual_seed(0)

    def codes(rows: int) -> ScaledTensor:
        drawn = [draw(rows, p.K, NVFP4, USUAL_SCALES[NVFP4.name], generator) for _ in range(p.L)]
        return (drawn[0] if p.L == 1 else stack(drawn)).to(device)

    b = codes(p.N)
    a = codes(p.M) if p.a == NVFP4.name else torch.randn(p.M, p.K, generator=generator).bfloat16().to(device)
    exact, size = reference.matmul(a, b), reference.magnitude(a, b)
    weights = rotation_of(b.with_layout(*kernel.layouts) if kernel.layouts else b, cold_bytes(device))
    functions = {}
    for config in kernel.best(p):
        out = torch.full(exact.shape, torch.nan, dtype=torch.bfloat16, device=device)
        kernel.launch(a, weights(), None, out, config=config)
        _, fault = compare(out, exact, size, p.K)
        if fault:
            print(f"cuts: {name} {p} cut as {config}: {fault}", file=sys.stderr)
        else:
            functions[config] = partial(_launch, kernel, a, weights, out, config)
    samples = interleaved(functions, rounds=rounds, device=device, launches=len(weights.copies))
    return [Cut(name, p, config, median(taken) * 1e6) for config, taken in samples.items()]


def _launch(kernel: Cuttable, a, weights, out: torch.Tensor, config: Any) -> None:
    kernel.launch(a, weights(), None, out, config=config)


# --- judging -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What a kernel's cost model makes of one problem whose cuts were timed."""

    problem: Problem
    chosen: float | None  # microseconds of the cut that configure takes; None if that was not timed
    best: float
    estimates: tuple[float, ...]  # estimate over time, of each cut not twice as slow as the best

    @property
    def regret(self) -> float:
        """Time of the chosen cut over that of the best; NaN if it was not timed."""
        return math.nan if self.chosen is None else self.chosen / self.best


def choices(cuts: Iterable[Cut], name: str) -> list[Choice]:
    """How a kernel's cost model, as it is now, does on cuts that were timed."""
    kernel = KERNELS[name]
    by_problem: dict[Problem, dict[Any, float]] = defaultdict(dict)
    for cut in cuts:
        if cut.kernel == name:
            by_problem[cut.problem][cut.config] = cut.us
    found = []
    for problem, times in by_problem.items():
        best = min(times.values())
        estimates = (kernel.estimate(config, problem) / us for config, us in times.items() if us < 2 * best)
        found.append(Choice(problem, times.get(kernel.configure(problem)), best, tuple(estimates)))
    return found


def error(found: Iterable[Choice]) -> float:
    """RMS of how far estimates are off, as the logarithm of their ratio to the times."""
    return math.sqrt(fmean(math.log(ratio) ** 2 for choice in found for ratio in choice.estimates))


def print_choices(name: str, found: list[Choice], console: Console) -> None:
    table = Table("problem", "chosen, us", "best, us", "regret", title=name)
    for choice in found:
        chosen = "not timed" if choice.chosen is None else f"{choice.chosen:.2f}"
        p = choice.problem
        sizes = f"M={p.M} N={p.N} K={p.K}" + f" L={p.L}" * (p.L > 1)
        table.add_row(sizes, chosen, f"{choice.best:.2f}", f"{choice.regret:.3f}")
    console.print(table)
    regrets = [choice.regret for choice in found if choice.chosen is not None]
    console.print(
        f"regret {fmean(regrets):.3f} on average, {max(regrets):.3f} at most; estimates off by {error(found):.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--measure", choices=KERNELS, metavar="KERNEL", help=", ".join(KERNELS))
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.file, torch.device("cuda", torch.cuda.current_device()))
    cuts = read(given.file)
    for name in dict.fromkeys(cut.kernel for cut in cuts):
        print_choices(name, choices(cuts, name), Console())


if __name__ == "__main__":
    main()
