"""Launches every kernel that is made for this GPU, at small sizes, for a tool such as compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python tests/kernels/every_launch.py [SHARE SHARES [WITHOUT]]

Several processes may take shares of it: number SHARE, from 0, of SHARES. Kernels whose names hold WITHOUT are left out.
Operands are made on the CPU and copied, so that initcheck knows them as written. Results are not looked at:
test_kernels.py compares them. Prints how often each kernel was launched.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for checks

from checks import NARROW, random_codes, random_dense

from nibblas import operators, ops
from nibblas.formats import FORMATS
from nibblas.kernel import PLAIN, Kernel
from nibblas.kernels import kernels
from nibblas.problem import DTYPES, Problem, arch_of

torch.set_num_threads(1)  # several processes at once would wait for each other
CUDA = torch.device("cuda", 0)
generator = torch.Generator().manual_seed(0)


def codes(shape: tuple[int, ...], format: str):
    return random_codes(shape, format, generator, scale_bytes=NARROW[format])


def activations(shape: tuple[int, ...], name: str, format: str):
    made = codes(shape, format) if name == "fp4" else random_dense(shape, DTYPES[name], generator)
    return made.to(CUDA)


Launch = Callable[[], object]


def linear(kernel: Kernel) -> Iterator[Launch]:
    sizes = ((33, 160, 1), (130, 1152, 1), (40, 128, 3))
    for format, name, M, (N, K, L) in product(FORMATS, (*DTYPES, "fp4"), (1, 5, 12, 64, 70), sizes):
        if L > 1 and not kernel.batched:
            continue
        batch = () if L == 1 else (L,)
        a, plain = activations((*batch, M, K), name, format), codes((*batch, N, K), format)
        bias = random_dense((N,), torch.bfloat16, generator).to(CUDA) if M == 12 else None
        problem = replace(operators.linear_problem(a, plain, bias, torch.bfloat16), arch=arch_of(CUDA))
        layouts = kernel.b_layouts or PLAIN
        for scale_layout, layout in layouts if M == 5 else layouts[:1]:
            if kernel.why_not(replace(problem, b_layouts=(scale_layout.name, layout.name))) is None:
                b = plain.with_layout(scale_layout, layout).to(CUDA)
                yield partial(kernel.launch, a, b, bias, torch.empty((*batch, M, N), dtype=torch.bfloat16, device=CUDA))


def grouped_linear(kernel: Kernel) -> Iterator[Launch]:
    for format, name, sizes in product(FORMATS, ("bf16", "fp4"), ([0, 3, 0, 5], [17, 2, 40])):
        x, w = activations((sum(sizes), 96), name, format), codes((len(sizes), 40, 96), format).to(CUDA)
        offsets = torch.tensor([0, *sizes]).cumsum(0).to(CUDA)
        problem = Problem("grouped_linear", sum(sizes), 40, 96, G=len(sizes), b=format, arch=arch_of(CUDA))
        if kernel.why_not(replace(problem, a=format if name == "fp4" else name)) is None:
            out = torch.empty(sum(sizes), 40, dtype=torch.bfloat16, device=CUDA)
            yield partial(operators.launch_grouped, x, w, offsets, None, out, kernel.name)


def gated_linear(kernel: Kernel) -> Iterator[Launch]:
    for format, name, M in product(FORMATS, ("bf16", "fp4"), (1, 33)):
        x, gate, up = activations((M, 160), name, format), *(codes((56, 160), format).to(CUDA) for _ in range(2))
        problem = Problem("gated_linear", M, 56, 160, a=format if name == "fp4" else name, b=format, out="fp32")
        if kernel.why_not(replace(problem, arch=arch_of(CUDA))) is None:
            out = torch.empty(M, 56, device=CUDA)
            yield partial(operators.launch_gated, x, gate, up, None, None, "silu", out, kernel.name)


def quantize(kernel: Kernel) -> Iterator[Launch]:
    for format, dtype, rows in product(FORMATS.values(), DTYPES, (1, 7, 64)):
        x = random_dense((rows, 288), DTYPES[dtype], generator).to(CUDA)
        for rule in format.scale_rules:
            problem = Problem("quantize", rows, 0, 288, a=dtype, b=format.name, out=format.name, rule=rule)
            if kernel.why_not(replace(problem, arch=arch_of(CUDA))) is None:
                yield partial(kernel.launch, x, format, rule, None)


def main(share: str = "0", shares: str = "1", without: str = "") -> None:
    here = [
        kernel for kernel in kernels() if arch_of(CUDA) in kernel.archs and not (without and without in kernel.name)
    ]
    for dependent in (False, True):
        ops.dependent_launch(dependent)
        for kernel in here:
            if dependent and not kernel.name.startswith("cuda_linear_sm90"):
                continue
            times = 0
            for launch in islice(globals()[kernel.op](kernel), int(share), None, int(shares)):
                launch()
                times += 1
            torch.cuda.synchronize()
            print(f"{kernel.name}{', dependent' * dependent}: {times}", flush=True)
            assert times or share != "0", f"{kernel} was never launched"


if __name__ == "__main__":
    main(*sys.argv[1:])
