"""`nibblas bench`: every kernel that can run, against torch, over a grid of problems; right ones only.

Operands are drawn as codes and scale bytes, so that no quantizer stands between a kernel and its test. Each output is
compared with the float64 oracle before anything is timed, and a wrong kernel is not timed. All kernels of a problem and
torch's bf16 and fp32 F.linear run interleaved, on weights that are out of the caches.
"""

import math
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from statistics import geometric_mean

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import nibblas
from nibblas import dispatch, reference
from nibblas.bench import probe
from nibblas.bench.peers import ALWAYS_TIMED, PEERS, Product, check
from nibblas.bench.timing import CPU, MAX_COPIES, Rotation, interleaved
from nibblas.bench.timing import torch_threads as with_threads
from nibblas.dispatch import in_words
from nibblas.evidence import Measurement
from nibblas.formats import Format, as_format
from nibblas.kernel import Kernel
from nibblas.kernels import cuda_module
from nibblas.kernels import kernels as all_kernels
from nibblas.layouts import LINEAR
from nibblas.memory import cold_bytes
from nibblas.problem import DTYPE_NAMES, DTYPES, Problem, arch_of, operand_name
from nibblas.roofline import Roofline
from nibblas.statistics import Ratio, paired_ratio, quartiles
from nibblas.tensor import ScaledTensor

TORCH = {"torch bf16": torch.bfloat16, "torch fp32": torch.float32}
BASELINE = "torch bf16"
# Scale bytes as quantized weights have them, for what is timed: a kernel may have a slow path for extremes.
USUAL_SCALES = {"nvfp4": (80, 0x7E), "mxfp4": (115, 123)}
# Scales of one row lie this close, or its larger blocks would hide an error in the smaller ones.
SPREAD = {"nvfp4": 16, "mxfp4": 4}
GRAPH = 512  # launches in a CUDA graph, at most


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
    device: torch.device = CPU,
    threads: int | None = None,
    names: Sequence[str] | None = None,
    peers: Sequence[str] = (),
    rounds: int = 30,
    seconds: float = 1.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Result]:
    """Time linear on every combination of weights (N, K), rows M and format.

    activations : "fp4" (of the weights' format) or a dtype name; the result is bf16 for fp4, else of that dtype.
    threads : of the CPU, torch's own number by default.
    names : kernels to time, all that are made for the device by default.
    peers : other libraries to time beside them, by name (bench/peers.py).
    rounds, seconds : samples of each function of a problem, and when to stop taking more.
    progress : called with problems done, all problems, and the one to come.

    Nothing is stored: the caller gives `Result.measurements` to evidence.Store.add. ValueError for unknown names.
    """
    wanted = [as_format(format) for format in formats]
    chosen = named_kernels("linear", names, arch_of(device))
    peers = [name for name in peers if name not in ALWAYS_TIMED]
    if unknown := set(peers) - set(PEERS):
        names_known = ", ".join((*PEERS, *ALWAYS_TIMED))
        raise ValueError(f"bench: no peer is called {', '.join(sorted(unknown))}; there are {names_known}")
    if activations not in (*DTYPES, "fp4"):
        raise ValueError(f"bench: activations {activations!r} are unknown; there are {', '.join(DTYPES)}, fp4")
    for format in wanted:
        for _, K in shapes:
            format.check_K("bench", K)
    line = probe.measure(device, threads)
    total = len(shapes) * len(wanted) * len(Ms)
    results: list[Result] = []
    cold = cold_bytes(device)
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with on_device, with_threads(line.threads), torch.no_grad():
        for N, K in shapes:
            dense = {
                dtype: rotation_of(torch.randn(N, K, dtype=dtype, device=device), cold) for dtype in TORCH.values()
            }
            for format in wanted:
                legal = legal_scales(format, activations)
                hard = _Operands.drawn(max(Ms), N, K, format, activations, legal, 0, device)
                usual = _Operands.drawn(max(Ms), N, K, format, activations, USUAL_SCALES[format.name], cold, device)
                others = _peers(peers, usual, cold)
                for M in Ms:
                    if progress:
                        progress(len(results), total, f"{format} {M} x {N} x {K}")
                    run = _Run(usual, hard, hard.covers(legal), M, dense, others, line, device)
                    results.append(run.result(chosen, rounds, seconds))
    dispatch.forget()
    return results


def random_problems(count: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """(N, K, M) of products to expect: N and K multiples of 64 up to 16384, M up to 64, all log-uniform."""
    draw = random.Random(seed)

    def size(most: int, multiple: int) -> int:
        return multiple * round(2 ** draw.uniform(0, math.log2(most // multiple)))

    return [(size(16384, 64), size(16384, 64), size(64, 1)) for _ in range(count)]


def kernels_of(op: str) -> list[Kernel]:
    """The op's kernels, for any device."""
    return [kernel for kernel in all_kernels() if kernel.op == op]


def named_kernels(op: str, names: Sequence[str] | None, arch: str) -> list[Kernel]:
    """The op's kernels of these names, by default all that are made for arch. ValueError for an unknown name."""
    known = kernels_of(op)
    unknown = set(names or ()) - {kernel.name for kernel in known}
    if unknown:
        listed = ", ".join(kernel.name for kernel in known)
        raise ValueError(f"bench: no {op} kernel is called {', '.join(sorted(unknown))}; there are {listed}")
    if names is None:
        return [kernel for kernel in known if not kernel.archs or arch in kernel.archs]
    return [kernel for kernel in known if kernel.name in names]


def _peers(names: Sequence[str], operands: "_Operands", beyond: int) -> dict[str, Product | str]:
    """The peers' products of these weights by name, or why one has none."""
    copies = max(1, -(-beyond // operands.b.nbytes))
    found: dict[str, Product | str] = {}
    for name in names:
        try:
            product = PEERS[name](operands.b, operands.out, min(copies, GRAPH))
            rows = operands.exact.shape[0]
            check(product, operands.rows(rows), operands.exact)
            found[name] = product
        except Exception as error:  # whatever another library raises is its reason
            found[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    return found


def rotation_of(operand, beyond: int):
    """Copies of an operand, as many as the device's calls take turns on."""
    return Rotation(operand, beyond, GRAPH if operand.device.type == "cuda" else MAX_COPIES)


# --- operands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operands:
    """a (max M, K), b (N, K) with its copies in each layout, and the oracle's answer."""

    a: Tensor | ScaledTensor
    b: ScaledTensor
    out: torch.dtype
    exact: Tensor  # (max M, N) float64
    size: Tensor  # (max M, N) float64: what errors are compared with
    beyond: int  # bytes that the copies span
    rotations: dict[tuple[str, str], Rotation[ScaledTensor]]

    @classmethod
    def drawn(
        cls,
        M: int,
        N: int,
        K: int,
        format: Format,
        activations: str,
        scales: tuple[int, int],
        beyond: int,
        device: torch.device,
    ) -> "_Operands":
        generator = torch.Generator().manual_seed(0)
        out = torch.bfloat16 if activations == "fp4" else DTYPES[activations]
        a: Tensor | ScaledTensor
        if activations == "fp4":
            a = draw(M, K, format, scales, generator).to(device)
        else:
            a = torch.randn(M, K, generator=generator).to(out).to(device)
        b = draw(N, K, format, scales, generator).to(device)
        return cls(a, b, out, reference.matmul(a, b), reference.magnitude(a, b), beyond, {})

    def covers(self, scales: tuple[int, int]) -> bool:
        """Whether b has all pairs of codes and all of these scale bytes."""
        return len(self.b.data.unique()) == 256 and len(self.b.scale.unique()) == scales[1] - scales[0] + 1

    def problem(self, M: int) -> Problem:
        """The question, for weights in LINEAR layouts."""
        N, K = self.b.shape
        a, out = operand_name(self.a, "bench"), DTYPE_NAMES[self.out]
        return Problem("linear", M, N, K, a=a, b=self.b.format.name, out=out, arch=arch_of(self.b.device))

    def rows(self, M: int) -> Tensor | ScaledTensor:
        return self.a[:M] if isinstance(self.a, Tensor) else self.a.slice(-2, 0, M)

    def weights(self, layouts: tuple[str, str]) -> Rotation[ScaledTensor]:
        if layouts not in self.rotations:
            self.rotations[layouts] = rotation_of(self.b.with_layout(*layouts), self.beyond)
        return self.rotations[layouts]

    def check(self, kernel: Kernel, problem: Problem) -> tuple[float, str | None]:
        """`compare` for what the kernel makes of these operands."""
        M = problem.M
        out = torch.full((M, problem.N), torch.nan, dtype=self.out, device=self.b.device)
        kernel.launch(self.rows(M), self.weights(problem.b_layouts)(), None, out)
        return compare(out, self.exact[:M], self.size[:M], problem.K)


def legal_scales(format: Format, activations: str) -> tuple[int, int]:
    """Lowest and highest scale byte that a kernel must get right: those with which the result stays finite.

    Every e4m3 that is not negative; e8m0 up to 240 with activations near 1 (129 where the result is fp16), and a range
    in the middle where both operands have scales.
    """
    if format.has_global_scale:
        return 0, format.scale_code.largest
    return {"fp4": (64, 183), "fp16": (0, 129)}.get(activations, (0, 240))


def draw(rows: int, K: int, format: Format, scale_bytes: tuple[int, int], generator: torch.Generator) -> ScaledTensor:
    """(rows, K) of all 16 codes alike, and scale bytes from lowest to highest: each row its own short range of them."""
    (low, high), spread = scale_bytes, SPREAD[format.name]
    data = torch.randint(256, (rows, K // 2), dtype=torch.uint8, generator=generator)
    place = torch.randperm(rows, generator=generator) / max(rows - 1, 1)
    first = low + (place * (high - low - spread + 1)).round().int()
    steps = torch.randint(spread, (rows, K // format.block_size), generator=generator)
    scale = (first[:, None] + steps).to(torch.uint8)
    global_scale = (
        torch.rand((), dtype=torch.float32, generator=generator).add_(0.5).div_(448)
        if format.has_global_scale
        else None
    )
    return ScaledTensor(data, scale, format, global_scale)


def compare(got: Tensor, exact: Tensor, size: Tensor, K: int) -> tuple[float, str | None]:
    """The largest deviation from the float64 answer over the element's size, and what is wrong (None if nothing is).

    The size is the larger of |exact| and `size` (reference.magnitude). An element may be off by half a unit in its last
    place, and by the error of a sum of K terms in fp32: 1e-6, and a truncation of the running sum every 16 products.
    """
    deviation = (got.double() - exact).abs()
    size = torch.maximum(size, exact.abs())
    dtype = torch.finfo(got.dtype)
    half_ulp = dtype.eps / 2 * (size + dtype.tiny)
    allowed = half_ulp + (1e-6 + K * 2.0**-23 / 16) * size
    bad = ~(deviation <= allowed)
    error = (deviation / size).max().item()
    if not bad.any():
        return error, None
    excess = (deviation / allowed).nan_to_num(math.inf).max().item()
    return (
        error,
        f"{int(bad.sum())} of {bad.numel()} elements are wrong, the worst by {excess:.3g} times what is allowed",
    )


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

    usual: _Operands
    hard: _Operands
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
        for kernel in kernels:
            layouts = [(scale.name, data.name) for scale, data in kernel.b_layouts or ((LINEAR, LINEAR),)]
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
        a, N, K = self.usual.rows(self.M), *self.usual.b.shape
        out = torch.empty(self.M, N, dtype=self.usual.out, device=self.device)
        functions: dict[str, Callable[[], object]] = {
            name: partial(_launch, t.kernel, a, self.usual.weights(t.problem.b_layouts), out)
            for name, t in right.items()
        }
        for name, dtype in TORCH.items():
            functions[name] = partial(
                _torch, torch.randn(self.M, K, dtype=dtype, device=self.device), self.dense[dtype]
            )
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
        cold = all(rotation.is_cold for rotation in self.rotations(right))
        return measured(
            timed,
            {name: t.kernel for name, t in right.items()},
            self.line,
            self.device,
            floor,
            arguments=f"--shapes {plain.N}x{plain.K} --M {self.M} --formats {plain.b} --activations {activations}",
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


def _launch(kernel: Kernel, a: Tensor | ScaledTensor, weights: Rotation[ScaledTensor], out: Tensor) -> None:
    kernel.launch(a, weights(), None, out)


def _torch(x: Tensor, weights: Rotation[Tensor]) -> Tensor:
    return torch.nn.functional.linear(x, weights())


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
            title = f"[bold]{p.b}[/] weights, N = {p.N}, K = {p.K}; {p.a} activations"
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
    threads = f", {results[0].threads} thread{'s' * (results[0].threads > 1)}" if results[0].threads else ""
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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("M", justify="right", no_wrap=True)
    if results[0].problem.rule:
        table.add_column("rule", no_wrap=True)
    table.add_column("kernel", overflow="fold", min_width=18)
    for header in ("time", "spread", "of floor", f"vs {results[0].baseline}", "error"):
        table.add_column(header, justify="right", no_wrap=True)
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
        in_words(middle),
        f"{(high - low) / 2 / middle:.0%}",
        f"{result.floor / middle:.1%}" if timed.problem else "",
        "" if timed.name == result.baseline else str(timed.against),
        "" if timed.error is None else f"{timed.error:.0e}",
    )
