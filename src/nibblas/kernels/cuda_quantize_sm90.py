"""Quantize on Hopper in CUDA C++, byte for byte as nibblas.quantize does, by the rules that need no search.

Bound by reading x and writing the codes once. NVFP4's own global_scale takes one more read: a first kernel leaves a
maximum a CTA, which each warp of the second reduces, and the second begins at the end of x, which the L2 still holds.
No atomics, no host wait.
Weakness: with 12 to 15 instructions an element the arithmetic takes nearly as long as the bytes of bf16; of the two
passes for NVFP4's own global_scale neither hides the other.
"""

import functools
import struct

import torch
from torch import Tensor

from nibblas.formats import E2M1_MAX, FORMATS, Format
from nibblas.kernel import Kernel
from nibblas.kernels.cuda_module import SOURCES, TYPES, Launch, Launches, load, missing, source_of
from nibblas.problem import DTYPES, Problem
from nibblas.quantize import TOP_SCALE
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

SOURCE = "cuda_quantize_sm90.cu"
# What each MXFP4 rule adds to the bits of a block's largest magnitude, of which the exponent is then taken.
ROUNDING = {"floor": 0, "even": 1 << 21, "rceil": (1 << 22) - 1}
RULES = ("absmax", *ROUNDING)
# The first pass: CTAs, each of which leaves a maximum (a multiple of 32), and threads of each.
PARTIALS, AMAX_THREADS = 256, 512
SMS = 132  # multiprocessors of an H200
# The device code's Arguments: addresses of x, the maxima, global_scale, codes, scales; chunks of 16 elements;
# CTAs; ROUNDING of the rule; 6 * TOP_SCALE of the rule.
ARGUMENTS = struct.Struct("6Q2If4x")

_launches = Launches()


def prepare(
    function: str,
    ctas: int,
    dtype: torch.dtype,
    format: Format,
    device: int,
    dependent: bool,
    threads: int,
    chunks: int,
) -> Launch:
    """A launch of `function`, its arguments (`ARGUMENTS`) yet to be packed into it.

    dependent : it may start, and read x, while the kernel before it in the stream, which must be the first pass, ends.
    """
    first = function == "nibblas_amax"
    values = {
        "TYPE": TYPES[dtype],
        "BLOCK": format.block_size,
        "THREADS": threads,
        "CHUNKS": chunks,
        "PARTIALS": PARTIALS,
        "AMAX_THREADS": AMAX_THREADS,
    }
    options = ("--fmad=false", *(f"-D{name}={value}" for name, value in values.items()))
    shared = AMAX_THREADS // 32 * 4 if first else 0
    kernel = load(source_of(SOURCE), "sm_90a", options, function, shared, device)
    threads = AMAX_THREADS if first else threads
    return Launch(kernel, bytearray(ARGUMENTS.size), (ctas, 1, 1), threads, shared, dependent)


def launch(
    x: Tensor,
    format: Format,
    rule: str,
    global_scale: Tensor | None,
    *,
    threads: int = 128,
    chunks: int | None = None,
) -> ScaledTensor:
    """x (rows, K) -> ScaledTensor over it in LINEAR layouts; global_scale () fp32 or None for the rule's own.

    threads : of a CTA, a multiple of 32.
    chunks : of 16 elements, that a thread takes; it loads all of them first. By default 4, and 1 of an x that so would
        leave multiprocessors without work.
    """
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    rows, K = x.shape
    data = torch.empty(rows, K // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, K // format.block_size, dtype=torch.uint8, device=x.device)
    if chunks is None:
        chunks = 4 if x.numel() >= 2 * SMS * 16 * threads * 4 else 1
    # One CTA at least: it writes the global_scale.
    ctas = max(-(-x.numel() // (16 * threads * chunks)), 1)
    passes, partial = [("nibblas_quantize", ctas, False)], None
    if format.has_global_scale and global_scale is None:
        global_scale = torch.empty((), dtype=torch.float32, device=x.device)
        partial = torch.empty(PARTIALS, dtype=torch.int32, device=x.device)
        passes = [("nibblas_amax", PARTIALS, False), ("nibblas_quantize", ctas, True)]
    arguments = ARGUMENTS.pack(
        *(0 if t is None else t.data_ptr() for t in (x, partial, global_scale, data, scale)),
        x.numel() // 16,
        ctas,
        ROUNDING.get(rule, 0),
        E2M1_MAX * TOP_SCALE.get(rule, 1.0),
    )
    device = x.device.index
    stream = torch._C._cuda_getCurrentRawStream(device)
    for function, grid, dependent in passes:
        key = (function, grid, x.dtype, format, device, dependent, threads, chunks)
        ready = _launches.get(key, functools.partial(prepare, *key))
        ready.arguments[:] = arguments
        ready(stream)
    return ScaledTensor(data, scale, format, global_scale, scale_rule=rule)


def _why_not(problem: Problem) -> str | None:
    if problem.rule and problem.rule not in RULES:
        return f"takes the rules {', '.join(RULES)}; asked for {problem.rule}"
    return missing()


def cost(problem: Problem, line: Roofline) -> float:
    """Of bf16 4096 x 7168 what an H200 took, else in proportion: the bytes at 95 %, 3 us to start and to end; where
    NVFP4 finds its own global_scale, x once more.
    """
    first_pass = 1e-6 + problem.M * problem.K * DTYPES[problem.a].itemsize / line.read_bandwidth
    return 3e-6 + problem.bytes / line.read_bandwidth / 0.95 + (first_pass if problem.b == "nvfp4" else 0.0)


KERNELS = (
    Kernel(
        name="cuda_quantize_sm90",
        op="quantize",
        archs=("sm_90",),
        operands=tuple((dtype, format) for dtype in DTYPES for format in FORMATS),
        outs=tuple(FORMATS),
        launch=launch,
        cost=cost,
        also=_why_not,
        sources=(f"kernels/{SOURCE}", "kernels/cuda_quantize_sm90.py", *SOURCES, "quantize.py"),
    ),
)
