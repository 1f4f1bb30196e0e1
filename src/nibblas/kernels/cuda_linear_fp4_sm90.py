"""c = a @ b.T, both NVFP4 in LINEAR layouts, for at most 8 rows of a on Hopper, in CUDA C++: bound by reading b once.

Nothing is prepacked: the codes of b, as a lane reads them, serve as fragments of its mma, and a, decoded once a CTA
into shared memory, has its K in the same order. K is split over the warps of a CTA, whose sums are added in a fixed
order.
Weakness: eight codes where they lie take 19 operations to decode, 12 in a prepacked layout; every CTA decodes a anew.
It was compiled, and run only on a CPU that stood in for the GPU.
"""

import struct
from functools import cache

import torch
from torch import Tensor

from nibblas.formats import NVFP4
from nibblas.kernel import Kernel
from nibblas.kernels.cuda_module import SHARED_LIMIT_SM90, SOURCES, TYPES, Launch, Launches, load, missing, source_of
from nibblas.problem import DTYPES, Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

SOURCE = "cuda_linear_fp4_sm90.cu"
MAX_ROWS = 8  # of a: the columns of one mma
ROWS = 16  # of b, a CTA
# The device code's Arguments: addresses of b, its scales, a, its scales, out, bias and the global scales; bytes between
# rows and between matrices of the first five; floats between global scales; M, N, K; types of bias and out.
ARGUMENTS = struct.Struct("18Q7i4x")


def shared_bytes(M: int, K: int, warps: int) -> int:
    """Shared memory of a CTA: a in fp16, a word more each row; sums of the warps."""
    return M * (K // 8 + 1) * 16 + warps * MAX_ROWS * ROWS * 4


@cache
def warps_of(K: int) -> int:
    """Warps that split K: as many as have four chunks of 128 columns each, 4 to 16."""
    return next(warps for warps in (16, 8, 4) if warps == 4 or 4 * warps <= K // 128)


_launches = Launches()


def prepare(M: int, N: int, K: int, L: int, device: int, warps: int) -> Launch:
    """A launch of the kernel for these sizes, its arguments (`ARGUMENTS`) yet to be packed into it."""
    kernel = load(source_of(SOURCE), "sm_90a", (f"-DWARPS={warps}",), "nibblas_linear_fp4", SHARED_LIMIT_SM90, device)
    grid = (-(-N // ROWS), L, 1)
    return Launch(kernel, bytearray(ARGUMENTS.size), grid, 32 * warps, 1, shared_bytes(M, K, warps))


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
        *(out.shape[-2], out.shape[-1], a.K),
        0 if bias is None else TYPES[bias.dtype],
        TYPES[out.dtype],
    )


def in_rows(t: Tensor, align: int) -> Tensor:
    """The tensor itself where its rows can be read `align` bytes at a time, else a copy of it."""
    fits = t.stride(-1) == 1 and not any(stride % align for stride in t.stride()[:-1]) and t.data_ptr() % align == 0
    return t if fits else t.clone(memory_format=torch.contiguous_format)


def launch(a: ScaledTensor, b: ScaledTensor, bias: Tensor | None, out: Tensor, *, warps: int | None = None) -> None:
    """Write a @ b.T + bias to out: a ([L,] M, K), b ([L,] N, K), bias (N,), out ([L,] M, N)."""
    (M, N), K, L = out.shape[-2:], a.K, out.shape[0] if out.ndim == 3 else 1
    a, b = (ScaledTensor(in_rows(t.data, 16), in_rows(t.scale, 8), t.format, t.global_scale) for t in (a, b))
    result = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    if bias is not None:
        bias = bias.contiguous()
    device, warps = out.device.index, warps or warps_of(K)
    key = (M, N, K, L, device, warps)
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
    if (need := shared_bytes(problem.M, problem.K, warps_of(problem.K))) > SHARED_LIMIT_SM90:
        return f"keeps a in shared memory: {need:,} bytes, there are {SHARED_LIMIT_SM90:,}"
    if problem.L > 65535:
        return f"takes L up to 65,535, got {problem.L}"
    return missing()


def cost(problem: Problem, line: Roofline) -> float:
    """What an H200 would take by counting, scaled to the device's bandwidth; nothing of it was measured.

    The slower of reading b at 86 % of 4.4 TB/s and of decoding it, 24 operations for 8 codes and 20 for 8 of a, of
    which each of 132 multiprocessors does 128 a clock at 1.7 GHz; and 3 us to start and to end.
    """
    elements = problem.N * problem.K * problem.L
    memory = elements * 0.5625 / 4.4e12 / 0.86
    anew = problem.M * 20 / ROWS
    decoding = elements / 8 * (24 + anew) / (132 * 128 * 1.7e9)
    return (3e-6 + max(memory, decoding)) * 4.4e12 / line.read_bandwidth


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
