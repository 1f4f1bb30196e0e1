"""`nibblas bench --op quantize`: every quantizer that can run, beside a plain copy of its input.

Each result is compared with the reference's bytes before anything is timed, on matrices with ties, zeros, both ends of
fp32, NaN and Inf; a kernel that differs is not timed. All kernels of a problem run interleaved, on inputs that are out
of the caches.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from nibblas import dispatch
from nibblas.bench import probe
from nibblas.bench.operands import rotation_of
from nibblas.bench.sweep import Result, Timed, measured, named_kernels
from nibblas.bench.timing import CPU, Rotation, interleaved
from nibblas.bench.timing import torch_threads as with_threads
from nibblas.formats import Format, as_format
from nibblas.kernel import Kernel
from nibblas.memory import cold_bytes
from nibblas.operators import on_device
from nibblas.problem import DTYPES, Problem, arch_of
from nibblas.quantize import quantize
from nibblas.roofline import Roofline
from nibblas.statistics import paired_ratio

COPY = "torch copy"


def sweep_quantize(
    shapes: Sequence[tuple[int, int]],
    formats: Sequence[Format | str],
    dtype: str = "bf16",
    *,
    device: torch.device = CPU,
    threads: int | None = None,
    names: Sequence[str] | None = None,
    rounds: int = 30,
    seconds: float = 1.0,
    progress: Callable[[int, int, str], None] | None = None,
    keep: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Time quantize on (N, K) matrices of a dtype, by every scale rule of each format, global scales found in the call.

    Results, options and errors are as those of `sweep.sweep`, but that ratios are to a copy of the input.
    """
    wanted = [(as_format(format), rule) for format in formats for rule in as_format(format).scale_rules]
    kernels = named_kernels("bench", "quantize", names, arch_of(device))
    if dtype not in DTYPES:
        raise ValueError(f"bench: activations {dtype!r} can't be quantized; there are {', '.join(DTYPES)}")
    for format, _ in wanted:
        for _, K in shapes:
            format.check_K("bench", K)
    line = probe.measure(device, threads)
    results: list[Result] = []
    with on_device(device), with_threads(line.threads), torch.no_grad():
        for N, K in shapes:
            x = rotation_of(torch.randn(N, K, dtype=DTYPES[dtype], device=device), cold_bytes(device))
            hard = [matrix.to(DTYPES[dtype]).to(device) for matrix in hard_inputs(K)]
            for format, rule in wanted:
                problem = Problem(
                    "quantize", N, 0, K, a=dtype, b=format.name, out=format.name, rule=rule, arch=arch_of(device)
                )
                if progress:
                    progress(len(results), len(shapes) * len(wanted), str(problem))
                results.append(_result(problem, format, kernels, x, hard, line, device, rounds, seconds))
                if keep:
                    keep(results[-1])
    dispatch.forget()
    return results


def hard_inputs(K: int) -> list[Tensor]:
    """Matrices (16, K) fp32, each with its own global scale: all sizes, ties, any bits at all, zeros of both signs."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(16, K, generator=generator)
    sizes = torch.exp2(torch.randint(-40, 20, (16, K), generator=generator).float())
    ties = torch.randint(-28, 29, (16, K), generator=generator) / 4.0
    bits = torch.randint(-(1 << 31), 1 << 31, (16, K), generator=generator).int().view(torch.float32)
    zeros = torch.where(normal > 0.5, normal, normal.clamp(max=0) * 0)
    zeros[0] = 0
    return [normal * sizes, ties, bits, zeros]


def _result(
    problem: Problem,
    format: Format,
    kernels: Sequence[Kernel],
    x: Rotation[Tensor],
    hard: Sequence[Tensor],
    line: Roofline,
    device: torch.device,
    rounds: int,
    seconds: float,
) -> Result:
    """Check all kernels, then time the right ones and the copy."""
    right: dict[str, Kernel] = {}
    wrong: dict[str, str] = {}
    unable: dict[str, str] = {}
    for kernel in kernels:
        if why_not := kernel.why_not(problem):
            unable[kernel.name] = why_not
        elif faults := [fault for given in (*hard, x()) if (fault := _fault(kernel, given, format, problem.rule))]:
            wrong[kernel.name] = faults[0]
        else:
            right[kernel.name] = kernel
    functions: dict[str, Callable[[], object]] = {COPY: lambda: x().clone()}
    functions |= {name: partial(_launch, kernel, x, format, problem.rule) for name, kernel in right.items()}
    choice = dispatch.choose(problem, device) if right else None
    samples = interleaved(functions, rounds=rounds, device=device, seconds=seconds, launches=len(x.copies))
    floor = line.floor(problem)
    timed = [
        Timed(
            name,
            problem if name in right else None,
            taken,
            paired_ratio(samples[COPY], taken),
            0.0 if name in right else None,
            right.get(name) is choice is not None,
            name if name in right else None,
        )
        for name, taken in samples.items()
    ]
    timed.sort(key=lambda t: t.median)
    measurements = measured(
        timed,
        right,
        line,
        device,
        floor,
        arguments=f"--op quantize --shapes {problem.M}x{problem.K} --formats {problem.b} --activations {problem.a}",
        caches="cold input" if x.is_cold else "input partly in the caches",
        hardened=True,
    )
    return Result(problem, line.device, line.threads, floor, tuple(timed), wrong, unable, measurements, COPY)


def _fault(kernel: Kernel, x: Tensor, format: Format, rule: str) -> str | None:
    """How the kernel's bytes differ from the reference's, None if they don't."""
    got, need = kernel.launch(x, format, rule, None), quantize(x, format, scale_rule=rule)
    scales, codes = int((got.scale != need.scale).sum()), int((got.data != need.data).sum())
    if got.global_scale != need.global_scale:
        return f"its global_scale is {got.global_scale}, the reference's {need.global_scale}"
    if scales or codes:
        return f"{scales} scale codes and {codes} bytes of codes differ from the reference"
    return None


def _launch(kernel: Kernel, x: Rotation[Tensor], format: Format, rule: str) -> object:
    return kernel.launch(x(), format, rule, None)
