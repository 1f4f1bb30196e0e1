"""c = a @ b.T, both NVFP4 in LINEAR layouts, for at most 8 rows of a on Hopper, in CUDA C++: bound by reading b once.

Nothing is prepacked. Codes become integers by byte permutations that take them as selectors, a block's products are
summed exactly by integer mma, and only those sums meet the scales: 16 instructions for 8 codes of b and a lane where a
has one row, of 29 for which there is time. K is split over the warps of a CTA, whose sums are added in a fixed order.
Weakness: every further row of a costs 3 instructions for 8 codes of b, which from 3 rows on take longer than reading
them; every CTA decodes all of a anew, and holds it.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from nibblas.formats import NVFP4
from nibblas.kernel import Kernel
from nibblas.kernels.cuda_module import SHARED_LIMIT_SM90, SOURCES, TYPES, Launch, Launches, load, missing, source_of
from nibblas.problem import DTYPES, Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

SOURCE = "cuda_linear_fp4_sm90.cu"
MAX_ROWS = 8  # of a
STAGE = 2304  # bytes of b of a warp's 16 rows and 256 columns
SMS, SHARED_SM = 132, 228 * 1024  # multiprocessors of an H200, and bytes of shared memory of each
# The device code's Arguments: addresses of b, its scales, a, its scales, out, bias and the global scales; bytes between
# rows and between matrices of the first five; floats between global scales; N, K; types of bias and out.
ARGUMENTS = struct.Struct("18Q6i")


@dataclass(frozen=True)
class Config:
    """How the work is cut: see the device code."""

    row_warps: int
    k_warps: int
    depth: int = 2
    min_blocks: int = 1
    lines: bool = True

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps

    @property
    def rows(self) -> int:
        """Rows of b that a CTA computes."""
        return 16 * self.row_warps

    def options(self, M: int) -> tuple[str, ...]:
        """The device code's compile-time values, as compiler options."""
        values = {
            "M": M,
            "ROW_WARPS": self.row_warps,
            "K_WARPS": self.k_warps,
            "DEPTH": self.depth,
            "MIN_BLOCKS": self.min_blocks,
            "LINES": int(self.lines),
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())

    def shared_bytes(self, M: int, K: int) -> int:
        """Shared memory of a CTA: rings, a as bytes with its negative, scales of a, sums of the warps."""
        stages = -(-K // 256)
        ring = self.row_warps * self.k_warps * self.depth * STAGE
        return ring + M * (stages * (512 + 64) + 64 + self.k_warps * self.rows * 4)


def _candidates(M: int) -> Iterator[Config]:
    at_once = 1024 if M == 1 else 768 if M == 2 else 512  # threads that have registers enough
    depths = (3, 2) if M == 1 else (2,)  # the first is a little faster, where it fits
    for row_warps, k_warps, depth in product((1, 2, 4, 8), (1, 2, 4, 8, 16), depths):
        if 4 <= row_warps * k_warps <= 16:
            yield Config(row_warps, k_warps, depth, max(1, at_once // (32 * row_warps * k_warps)), lines=M == 1)


def estimate(config: Config, M: int, N: int, K: int, L: int) -> float:
    """Microseconds that an H200 takes: fitted to 999 measurements of 31 problems, with an RMS error of 8 %.

    Of three things that overlap the slowest counts most: the reads and the products of the multiprocessor that has most
    to do, and a warp's own steps. Each wave of CTAs has to start and to decode a.
    """
    warps, stages, CTAs = config.row_warps * config.k_warps, -(-K // 256), -(-N // config.rows) * L
    most = -(-CTAs // SMS)
    resident = min(config.min_blocks, max(1, SHARED_SM // (config.shared_bytes(M, K) + 1024)), most)
    waves, steps = -(-most // resident), -(-stages // config.k_warps)
    memory = (0.0665 + 0.0064 / config.k_warps) * most * config.row_warps * stages
    products = (0.0064 + 0.0164 * M) * most * config.row_warps * steps * config.k_warps
    chain = (0.21 + 0.116 * M) * waves * steps
    a = waves * M * stages * (0.011 * resident + 0.045 / warps)
    return 3.19 + (memory**2.7 + products**2.7 + chain**2.7) ** (1 / 2.7) + a + 0.85 * (waves - 1)


@cache
def configure(M: int, N: int, K: int, L: int) -> Config | None:
    """The cut with the least estimate for a (L, M, K) and b (L, N, K); None if none holds a in shared memory."""
    fitting = [config for config in _candidates(M) if config.shared_bytes(M, K) <= SHARED_LIMIT_SM90]
    return min(fitting, key=lambda config: estimate(config, M, N, K, L), default=None)


_launches = Launches()


def prepare(M: int, N: int, K: int, L: int, device: int, config: Config | None = None) -> Launch:
    """A launch of the kernel for these sizes, its arguments (`ARGUMENTS`) yet to be packed into it."""
    config = config or configure(M, N, K, L)
    assert config is not None  # _why_not has asked
    kernel = load(source_of(SOURCE), "sm_90a", config.options(M), "nibblas_linear_fp4", SHARED_LIMIT_SM90, device)
    grid = (-(-N // config.rows), L, 1)
    return Launch(kernel, bytearray(ARGUMENTS.size), grid, config.threads, config.shared_bytes(M, K))


def pack(a: ScaledTensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> bytes:
    """The device code's Arguments for operands whose rows are contiguous and lie at multiples of 16 bytes."""
    tensors = (b.data, b.scale, a.data, a.scale, out)
    global_scales = (a.global_scale, b.global_scale)
    batched = out.ndim == 3
    return ARGUMENTS.pack(
        *(t.data_ptr() for t in tensors),
        *(0 if t is None else t.data_ptr() for t in (bias, *global_scales)),
        *(t.stride(-2) * t.itemsize for t in tensors),
        *(t.stride(0) * t.itemsize if batched else 0 for t in tensors),
        *(t.stride(0) if batched and t is not None and t.ndim else 0 for t in global_scales),
        out.shape[-1],
        a.K,
        0 if bias is None else TYPES[bias.dtype],
        TYPES[out.dtype],
    )


def in_rows(t: Tensor, align: int) -> Tensor:
    """The tensor itself where its rows can be read `align` bytes at a time, else a copy of it."""
    fits = t.stride(-1) == 1 and not any(stride % align for stride in t.stride()[:-1]) and t.data_ptr() % align == 0
    return t if fits else t.clone(memory_format=torch.contiguous_format)


def launch(a: ScaledTensor, b: ScaledTensor, bias: Tensor | None, out: Tensor, *, config: Config | None = None) -> None:
    """Write a @ b.T + bias to out: a ([L,] M, K), b ([L,] N, K), bias (N,), out ([L,] M, N)."""
    (M, N), K, L = out.shape[-2:], a.K, out.shape[0] if out.ndim == 3 else 1
    a, b = (ScaledTensor(in_rows(t.data, 16), in_rows(t.scale, 8), t.format, t.global_scale) for t in (a, b))
    result = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    if bias is not None:
        bias = bias.contiguous()
    device = out.device.index
    key = (M, N, K, L, device, config)
    ready = _launches.get(key, lambda: prepare(*key))
    ready.arguments[:] = pack(a, b, bias, result)
    ready(torch._C._cuda_getCurrentRawStream(device))
    if result is not out:
        out.copy_(result)


def _why_not(problem: Problem) -> str | None:
    if problem.M > MAX_ROWS:
        return f"takes at most {MAX_ROWS} rows of a, got {problem.M}"
    if problem.K % 128:
        return f"takes K a multiple of 128, got {problem.K}"
    if problem.L > 65535:
        return f"takes L up to 65,535, got {problem.L}"
    if configure(problem.M, problem.N, problem.K, problem.L) is None:
        need = min(config.shared_bytes(problem.M, problem.K) for config in _candidates(problem.M))
        return f"keeps a in shared memory: {need:,} bytes, there are {SHARED_LIMIT_SM90:,}"
    return missing()


def cost(problem: Problem, line: Roofline) -> float:
    """What `estimate` says of an H200, scaled to the device's bandwidth."""
    config = configure(problem.M, problem.N, problem.K, problem.L)
    if config is None:
        return float("inf")
    return estimate(config, problem.M, problem.N, problem.K, problem.L) * 1e-6 * 4.4e12 / line.read_bandwidth


KERNELS = (
    Kernel(
        name="cuda_linear_fp4_sm90",
        op="linear",
        archs=("sm_90",),
        operands=((NVFP4.name, NVFP4.name),),
        outs=tuple(DTYPES),
        launch=launch,
        cost=cost,
        also=_why_not,
        sources=(f"kernels/{SOURCE}", "kernels/cuda_linear_fp4_sm90.py", *SOURCES),
        batched=True,
    ),
)
