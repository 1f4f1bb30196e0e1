"""`nibblas bench`: every kernel that can run, against torch, over a grid of problems; right ones only.

Each output is compared with the float64 oracle before anything is timed, and a wrong kernel is not timed. All kernels
of a problem and torch's bf16 and fp32 products run interleaved, on weights that are out of the caches.
"""

import math
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from statistics import geometric_mean

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import nibblas
from nibblas import dispatch
from nibblas.bench import probe
from nibblas.bench.operands import GRAPH, PRODUCTS, USUAL_SCALES, Operands, drawn, legal_scales, rotation_of
from nibblas.bench.peers import ALWAYS_TIMED, PEERS, Product, check
from nibblas.bench.timing import CPU, Rotation, interleaved
from nibblas.bench.timing import torch_threads as with_threads
from nibblas.evidence import Measurement
from nibblas.formats import Format
from nibblas.kernel import PLAIN, Kernel, storage_layouts
from nibblas.kernels import cuda_module
from nibblas.kernels import kernels as all_kernels
from nibblas.memory import cold_bytes
from nibblas.operators import on_device
from nibblas.ops import format_for
from nibblas.problem import DTYPES, Problem, arch_of
from nibblas.roofline import Roofline
from nibblas.statistics import Ratio, paired_ratio, quartiles
from nibblas.terminal import table_of
from nibblas.words import counted, time_text

TORCH = {"torch bf16": torch.bfloat16, "torch fp32": torch.float32}
BASELINE = "torch bf16"
GROUPS = 8


@dataclass(frozen=True)
class Timed:
    """One kernel (or torch) on one problem: seconds, one sample a round."""

    name: str
    problem: Problem | None  # with the layouts that its weights were in; None for torch
    samples: tuple[float, ...]
    against: Ratio  # how many times faster than the Result's baseline
    error: float | None  # as Measurement.error
    chosen: bool  # by the dispatcher, before this run, for weights in these layouts
    kernel: str | None = None  # None for torch and peers

    @property
    def median(self) -> float:
        return quartiles(self.samples)[1]


@dataclass(frozen=True)
class Result:
    """What one problem showed. `timed` has the fastest first."""

    problem: Problem
    device: str
    threads: int
    floor: float
    timed: tuple[Timed, ...]
    wrong: dict[str, str]  # kernels that were not timed, and how far off they were
    unable: dict[str, str]  # kernels that can't run, and why
    measurements: tuple[Measurement, ...]
    baseline: str = BASELINE

    @property
    def regret(self) -> dict[str, float]:
        """For each layout of the weights: time of the dispatcher's choice over that of the best kernel."""
        found = {}
        for choice in self.timed:
            if choice.chosen and choice.problem:
                rivals = [t.median for t in self.timed if t.problem == choice.problem]
                found["/".join(choice.problem.b_layouts)] = choice.median / min(rivals)
        return found

    def as_dict(self) -> dict:
        """Plain data for JSON; times in seconds."""
        return {
            "problem": self.problem.as_dict(),
            "device": self.device,
            "threads": self.threads,
            "floor": self.floor,
            "timed": [
                {
                    "name": t.name,
                    "b_layouts": list(t.problem.b_layouts) if t.problem else None,
                    "quartiles": quartiles(t.samples),
                    "samples": t.samples,
                    "share_of_floor": self.floor / t.median,
                    f"faster_than_{self.baseline.replace(' ', '_')}": asdict(t.against),
                    "error": t.error,
                    "chosen": t.chosen,
                }
                for t in self.timed
            ],
            "wrong": self.wrong,
            "unable": self.unable,
            "regret": self.regret,
        }


def sweep(
    shapes: Sequence[tuple[int, int]],
    Ms: Sequence[int],
    formats: Sequence[Format | str],
    activations: str = "bf16",
    *,
    op: str = "linear",
    L: int = 1,
    G: int | None = None,
    device: torch.device = CPU,
    threads: int | None = None,
    names: Sequence[str] | None = None,
    peers: Sequence[str] = (),
    rounds: int = 30,
    seconds: float = 1.0,
    progress: Callable[[int, int, str], None] | None = None,
    keep: Callable[[Result], None] | None = None,
    command: str = "bench",
) -> list[Result]:
    """Time an op on every combination of weights (N, K), rows M and format.

    op : linear, grouped_linear or gated_linear.
    L : matrices of a linear. G : groups of a grouped_linear, 8 by default, to which the M rows are dealt at random.
    activations : "fp4" (of the weights' format) or a dtype name; the result is bf16 for fp4, else of that dtype.
    threads : of the CPU, torch's own number by default.
    names : kernels to time, all that are made for the device by default.
    peers : other libraries to time beside a plain linear, by name (bench/peers.py).
    rounds, seconds : samples of each function of a problem, and when to stop taking more.
    progress : called with problems done, all problems, and the one to come.
    keep : called with each result when it is there.
    command : what errors name.

    Nothing is stored: the caller gives `Result.measurements` to evidence.Store.add. ValueError for unknown names.
    """
    wanted = [format_for(command, format) for format in formats]
    if op not in PRODUCTS:
        raise ValueError(f"{command}: op {op!r} is no product; there are {', '.join(PRODUCTS)}")
    for name, is_unfit in (("L", L > 1 and op != "linear"), ("G", G is not None and op != "grouped_linear")):
        if is_unfit:
            raise ValueError(f"{command}: {op} has no {name}")
    chosen = named_kernels(command, op, names, arch_of(device))
    peers = [name for name in peers if name not in ALWAYS_TIMED or device.type != "cuda"]
    if unknown := set(peers) - {*PEERS, *ALWAYS_TIMED}:
        names_known = ", ".join((*PEERS, *ALWAYS_TIMED))
        raise ValueError(f"{command}: no peer is called {', '.join(sorted(unknown))}; there are {names_known}")
    if peers and (op != "linear" or L > 1):
        raise ValueError(f"{command}: {', '.join(peers)} can be timed beside linear with L = 1 only")
    if activations not in (*DTYPES, "fp4"):
        raise ValueError(f"{command}: activations {activations!r} are unknown; there are {', '.join(DTYPES)}, fp4")
    for format in wanted:
        for _, K in shapes:
            format.check_K(command, K)
    line = probe.measure(device, threads)
    total = len(shapes) * len(wanted) * len(Ms)
    results: list[Result] = []
    cold = cold_bytes(device)
    draw = partial(drawn, op, Ms, device=device, L=L, G=G or GROUPS)
    with on_device(device), with_threads(line.threads), torch.no_grad():
        for N, K in shapes:
            dense: dict[torch.dtype, Rotation[Tensor]] = {}
            for format in wanted:
                legal = legal_scales(op, format, activations)
                hard = draw(N, K, format, activations, legal, 0)
                usual = draw(N, K, format, activations, USUAL_SCALES[format.name], cold)
                dense = dense or {
                    dtype: rotation_of(torch.randn(*usual.b.shape, dtype=dtype, device=device), usual.beyond)
                    for dtype in TORCH.values()
                }
                others = _peers(peers, usual, cold)
                for M in Ms:
                    if progress:
                        progress(len(results), total, f"{op} {format} {M} x {N} x {K}")
                    run = _Run(usual, hard, hard.covers(legal), M, dense, others, line, device)
                    results.append(run.result(chosen, rounds, seconds))
                    if keep:
                        keep(results[-1])
    dispatch.forget()
    return results


def random_problems(count: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """(N, K, M) of products to expect: N and K multiples of 64 up to 16384, M up to 64, all log-uniform."""
    draw = random.Random(seed)

    def size(most: int, multiple: int) -> int:
        return multiple * round(2 ** draw.uniform(0, math.log2(most // multiple)))

    return [(size(16384, 64), size(16384, 64), size(64, 1)) for _ in range(count)]


def named_kernels(command: str, op: str, names: Sequence[str] | None, arch: str) -> list[Kernel]:
    """The op's kernels of these names, by default all that are made for arch. ValueError for an unknown name."""
    known = [kernel for kernel in all_kernels() if kernel.op == op]
    unknown = set(names or ()) - {kernel.name for kernel in known}
    if unknown:
        listed = ", ".join(kernel.name for kernel in known)
        raise ValueError(f"{command}: no {op} kernel is called {', '.join(sorted(unknown))}; there are {listed}")
    if names is None:
        return [kernel for kernel in known if not kernel.archs or arch in kernel.archs]
    return [kernel for kernel in known if kernel.name in names]


def _peers(names: Sequence[str], operands: Operands, beyond: int) -> dict[str, Product | str]:
    """The peers' products of these weights by name, or why one has none."""
    copies = max(1, -(-beyond // operands.b.nbytes))
    found: dict[str, Product | str] = {}
    for name in names:
        if name in ALWAYS_TIMED:
            found[name] = f"needs a GPU, this is {operands.b.device}"
            continue
        try:
            product = PEERS[name](operands.b, operands.out, min(copies, GRAPH))
            check(product, operands.a, operands.answer(operands.a.shape[-2])[0])
            found[name] = product
        except Exception as error:  # whatever another library raises is its reason
            found[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    return found


# --- one problem ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Timeable:
    """A kernel that gave the right answers on weights in one pair of layouts."""

    kernel: Kernel
    problem: Problem
    error: float


@dataclass(frozen=True)
class _Run:
    """One problem: operands to time, and others, with all legal scales, to check on."""

    usual: Operands
    hard: Operands
    hardened: bool
    M: int
    dense: dict[torch.dtype, Rotation[Tensor]]
    peers: dict[str, Product | str]  # a reason where one refused the weights
    line: Roofline
    device: torch.device

    def result(self, kernels: Sequence[Kernel], rounds: int, seconds: float) -> Result:
        """Check all kernels, then time the right ones and torch."""
        plain = self.usual.problem(self.M)
        right: dict[str, _Timeable] = {}
        wrong: dict[str, str] = {}
        unable = {name: peer for name, peer in self.peers.items() if isinstance(peer, str)}
        stored = storage_layouts(kernels)
        for kernel in kernels:
            accepted = [layouts for layouts in kernel.b_layouts or PLAIN if layouts in stored]
            layouts = [(scale.name, data.name) for scale, data in accepted]
            for pair in layouts:
                problem = replace(plain, b_layouts=pair)
                name = kernel.name if len(layouts) == 1 else f"{kernel.name} {'/'.join(dict.fromkeys(pair))}"
                if why_not := kernel.why_not(problem):
                    unable[name] = why_not
                    continue
                _, fault = self.hard.check(kernel, problem)
                error, usual_fault = self.usual.check(kernel, problem)
                if fault or usual_fault:
                    wrong[name] = fault or usual_fault or ""
                else:
                    right[name] = _Timeable(kernel, problem, error)

        choices = {t.problem: dispatch.choose(t.problem, self.device) for t in right.values()}
        samples = self.samples(right, rounds, seconds)
        floor = self.line.floor(plain)
        timed = []
        for name, taken in samples.items():
            against, found = paired_ratio(samples[BASELINE], taken), right.get(name)
            if found:
                chosen = choices[found.problem] is found.kernel
                timed.append(Timed(name, found.problem, taken, against, found.error, chosen, found.kernel.name))
            else:
                timed.append(Timed(name, None, taken, against, None, False))
        timed.sort(key=lambda t: t.median)
        measurements = self.measurements(right, timed, floor)
        return Result(plain, self.line.device, self.line.threads, floor, tuple(timed), wrong, unable, measurements)

    def rotations(self, right: dict[str, _Timeable]) -> list[Rotation]:
        return [*(self.usual.weights(t.problem.b_layouts) for t in right.values()), *self.dense.values()]

    def samples(self, right: dict[str, _Timeable], rounds: int, seconds: float) -> dict[str, tuple[float, ...]]:
        a, out = self.usual.rows(self.M), torch.empty_like(self.usual.answer(self.M)[0], dtype=self.usual.out)
        functions: dict[str, Callable[[], object]] = {
            name: partial(self.usual.call(t.kernel, t.problem), out) for name, t in right.items()
        }
        for name, dtype in TORCH.items():
            product = self.usual.of_torch(torch.randn(*a.shape, dtype=dtype, device=self.device))
            functions[name] = partial(_of_next, product, self.dense[dtype])
        for name, peer in self.peers.items():
            if not isinstance(peer, str):
                functions[name] = partial(peer, a)
        launches = max(len(rotation.copies) for rotation in self.rotations(right))
        return interleaved(functions, rounds=rounds, device=self.device, seconds=seconds, launches=launches)

    def measurements(
        self, right: dict[str, _Timeable], timed: Sequence[Timed], floor: float
    ) -> tuple[Measurement, ...]:
        plain = self.usual.problem(self.M)
        activations = "fp4" if plain.a == plain.b else plain.a
        op = f"--op {plain.op} " * (plain.op != "linear")
        op += f"--L {plain.L} " * (plain.L > 1) + f"--G {plain.G} " * (plain.op == "grouped_linear")
        cold = all(rotation.is_cold for rotation in self.rotations(right))
        return measured(
            timed,
            {name: t.kernel for name, t in right.items()},
            self.line,
            self.device,
            floor,
            arguments=f"{op}--shapes {plain.N}x{plain.K} --M {self.M} --formats {plain.b} --activations {activations}",
            caches="cold weights" if cold else "weights partly in the caches",
            hardened=self.hardened,
        )


def measured(
    timed: Sequence[Timed],
    kernels: Mapping[str, Kernel],
    line: Roofline,
    device: torch.device,
    floor: float,
    *,
    arguments: str,
    caches: str,
    hardened: bool,
) -> tuple[Measurement, ...]:
    """A Measurement of each of our kernels in `timed`; `kernels` by Timed.name, `arguments` of the command."""
    where = f"--threads {line.threads}" if line.threads else f"--device {device.type}"
    calls = "graphs of launches" if device.type == "cuda" else "single calls"
    config = {"dependent_launch": True} if cuda_module.dependent else {}
    when, facts = datetime.now(UTC).isoformat(timespec="seconds"), probe.facts(device)
    return tuple(
        Measurement(
            kernel=kernels[t.name].name,
            digest=kernels[t.name].digest,
            problem=t.problem,
            device=line.device,
            threads=line.threads,
            when=when,
            command=f"nibblas bench {arguments} {where}{' --dependent-launch' * bool(config)}",
            method=f"{caches}, {calls}, interleaved",
            samples=t.samples,
            floor=floor,
            error=t.error,
            hardened=hardened,
            beside={other.name: other.median for other in timed if other is not t},
            config=config,
            versions=_versions(),
            facts=facts,
        )
        for t in timed
        if t.problem is not None
    )


def _of_next(product: Callable[[Tensor], Tensor], weights: Rotation[Tensor]) -> Tensor:
    return product(weights())


def _versions() -> dict[str, str]:
    return {"nibblas": nibblas.__version__, "torch": torch.__version__, "python": platform.python_version()}


# --- printing ------------------------------------------------------------------------------------------------------


def print_results(results: Sequence[Result], console: Console) -> None:
    """A table for each weight matrix, or what is quantized, and how much the dispatcher's choices lose to the best."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        p = result.problem
        if p.op == "quantize":
            title = f"{p.a} quantized to [bold]{p.b}[/], K = {p.K}"
        else:
            op = "" if p.op == "linear" else f"{p.op}: "
            batch = f", L = {p.L}" * (p.L > 1) + f", G = {p.G}" * (p.op == "grouped_linear")
            title = f"{op}[bold]{p.b}[/] weights, N = {p.N}, K = {p.K}{batch}; {p.a} activations"
        groups.setdefault(title, []).append(result)
    for title, members in groups.items():
        console.print(title, highlight=False)
        console.print(_table(members))
        for result in members:
            for name, fault in result.wrong.items():
                console.print(f"[red]not timed[/] at M = {result.problem.M}: {name}: {fault}", highlight=False)
        unable = {name: why for result in members for name, why in result.unable.items()}
        for name, why in unable.items():
            console.print(f"[dim]{name}: {why}[/]", highlight=False)
        console.print()
    if not results:
        return
    threads = f", {counted(results[0].threads, 'thread')}" if results[0].threads else ""
    console.print(f"{results[0].device}{threads}", highlight=False)
    if any(t.problem and t.median < r.floor for r in results for t in r.timed):
        console.print(
            "Something beat the floor: operands were partly in the caches, or this machine was busy when its limits "
            "were measured (`nibblas doctor --again`).",
            highlight=False,
        )
    regrets = {(r.problem, layouts): lost for r in results for layouts, lost in r.regret.items()}
    if regrets:
        (problem, layouts), worst = max(regrets.items(), key=lambda item: item[1])
        where = f" ({problem}, weights in {layouts})" if worst > 1 else ""
        console.print(
            f"> is the dispatcher's choice: {geometric_mean(regrets.values()):.2f}x the time of the best kernel for "
            f"those layouts on average, {worst:.2f}x at worst{where}.",
            highlight=False,
        )


def _table(results: Sequence[Result]) -> Table:
    rule = ["rule"] if results[0].problem.rule else []
    numbers = ("time", "spread", "of floor", f"vs {results[0].baseline}", "error")
    table = table_of("M", *rule, "kernel", *numbers, right=("M", *numbers), whole=rule)
    table.columns[len(rule) + 1].min_width = 18
    for result in results:
        for i, timed in enumerate(result.timed):
            last = i == len(result.timed) - 1
            heads = (str(result.problem.M), *filter(None, [result.problem.rule]))
            table.add_row(*("" if i else head for head in heads), *_cells(result, timed), end_section=last)
    return table


def _cells(result: Result, timed: Timed) -> tuple[str, ...]:
    low, middle, high = quartiles(timed.samples)
    name = f"[bold]> {timed.name}[/]" if timed.chosen else f"  {timed.name}"
    return (
        name if timed.problem else f"[dim]{name}[/]",
        time_text(middle),
        f"{(high - low) / 2 / middle:.0%}",
        f"{result.floor / middle:.1%}" if timed.problem else "",
        "" if timed.name == result.baseline else str(timed.against),
        "" if timed.error is None else f"{timed.error:.0e}",
    )
