"""A thousand random products by the CUDA kernels, against the float64 oracle; shapes, types and layouts drawn anew for
each seed, so that a failure is repeated by its name."""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from checks import NARROW, assert_product, poisoned_empty, random_codes, random_dense
from hopper import on_hopper

from nibblas.formats import FORMATS, NVFP4, Format
from nibblas.kernel import PLAIN, Kernel
from nibblas.kernels import kernels
from nibblas.layouts import Layout
from nibblas.problem import DTYPE_NAMES, DTYPES, Problem

SEEDS, SHAPES = 20, 50
pytestmark = on_hopper
KERNELS = [kernel for kernel in kernels() if kernel.op == "linear" and kernel.name.startswith("cuda_")]


@dataclass(frozen=True)
class Shape:
    M: int
    N: int
    K: int
    L: int
    format: Format
    a: str  # a dtype's name, or fp4
    out: torch.dtype
    bias: bool


def drawn(draw: random.Random) -> Shape:
    """Sizes log-uniform, every third K a multiple of 128. Where both operands are FP4, what such a kernel takes."""

    def size(most: int) -> int:
        return round(2 ** draw.uniform(0, math.log2(most)))

    a = draw.choice(("bf16", "bf16", "fp16", "fp4"))
    format = NVFP4 if a == "fp4" else draw.choice(list(FORMATS.values()))
    step = 128 if a == "fp4" or draw.random() < 0.3 else format.block_size
    return Shape(
        M=size(8 if a == "fp4" else draw.choice((90, 700))),
        N=size(5000),
        K=step * size(8192 // step),
        L=draw.choice((1, 1, 1, 3)),
        format=format,
        a=a,
        out=draw.choice((torch.float32, torch.bfloat16, torch.float16)),
        bias=draw.random() < 0.5,
    )


def problem(shape: Shape) -> Problem:
    """The question that a shape poses, for weights in LINEAR layouts."""
    a = shape.format.name if shape.a == "fp4" else shape.a
    sizes = {"M": shape.M, "N": shape.N, "K": shape.K, "L": shape.L}
    return Problem(
        "linear", **sizes, a=a, b=shape.format.name, out=DTYPE_NAMES[shape.out], bias=shape.bias, arch="sm_90"
    )


def layouts(kernel: Kernel) -> tuple[Layout, Layout]:
    """The (scale, data) layouts in which a kernel is given its weights."""
    return (kernel.b_layouts or PLAIN)[0]


def able(kernel: Kernel, problem: Problem) -> bool:
    scale, data = layouts(kernel)
    return kernel.why_not(replace(problem, b_layouts=(scale.name, data.name))) is None


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_products(seed):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(SHAPES):
        shape = drawn(draw)
        L = () if shape.L == 1 else (shape.L,)
        scales = {"scale_bytes": NARROW[shape.format.name], "device": "cuda"}
        b = random_codes((*L, shape.N, shape.K), shape.format, generator, **scales)
        if shape.a == "fp4":
            a = random_codes((*L, shape.M, shape.K), shape.format, generator, **scales)
        else:
            a = random_dense((*L, shape.M, shape.K), DTYPES[shape.a], generator, "cuda")
        bias = random_dense((shape.N,), torch.bfloat16, generator, "cuda") if shape.bias else None
        for kernel in KERNELS:
            if able(kernel, problem(shape)):
                out = poisoned_empty((*L, shape.M, shape.N), shape.out, "cuda")
                kernel.launch(a, b.with_layout(*layouts(kernel)), bias, out)
                assert_product(a, b, bias, out, f"{kernel} {shape}")


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_kernel_meets_its_share_of_them(kernel):
    problems = (problem(drawn(draw)) for draw in map(random.Random, range(SEEDS)) for _ in range(SHAPES))
    assert sum(able(kernel, each) for each in problems) >= 30
