"""c = a @ b.T with FP4 weights on the CPU, in C (cpu_linear.c): W4A16 and FP4 x FP4.

c = sum_k a[m, k] * code[n, k] * scale[n, k / block_size], products exact, sums in fp32 (in double on the portable
tier), times the global scales, plus bias, narrowed once. A NaN scale makes all it touches NaN; NaN and Inf activations
propagate as IEEE has it. Bound by reading the weights while M is small, by bf16 products above.

A row's result is the same from run to run, for any number of threads, any M, and either layout of the weights.
Known weaknesses: the avx2 tier decodes 8 codes at a time and is several times slower than avx512; a row of activations
with a nonzero magnitude under about 1e-31 (fp32) or 1e-35 (bf16), or over 1e12, is computed in double, some ten times
slower, and so are 16 rows of MXFP4 weights whose scales differ by more than 2^60.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from nibblas.formats import FORMATS
from nibblas.kernel import Kernel
from nibblas.kernels import cpu_library
from nibblas.kernels.cpu_library import Linear, Operand
from nibblas.layouts import LINEAR, ROWS_16x1, ROWS_16x4
from nibblas.problem import DTYPES, Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

DTYPE_CODES = {getattr(torch, name.removeprefix("torch.")): code for name, code in cpu_library.DTYPES.items()}
B_LAYOUTS = ((ROWS_16x1, ROWS_16x4), (LINEAR, LINEAR))


def _dense(t: Tensor) -> tuple[Operand, Tensor]:
    """The operand as C takes it, and the tensor that keeps its memory."""
    row, element = t.stride()
    if element != 1 and t.shape[1] > 1:
        t = t.contiguous()
        row = t.stride(0)
    return Operand(t.data_ptr(), None, row, 0, DTYPE_CODES[t.dtype], 0, 1.0), t


def _packed(t: ScaledTensor, tiled: bool) -> tuple[Operand, ScaledTensor]:
    data, scale = t.data, t.scale
    if not (data.is_contiguous() and scale.is_contiguous()):
        t = t.contiguous()
        data, scale = t.data, t.scale
    global_scale = 1.0 if t.global_scale is None else t.global_scale.item()
    strides = data.shape[1], scale.shape[1]
    return Operand(data.data_ptr(), scale.data_ptr(), *strides, cpu_library.FP4, tiled, global_scale), t


def linear(
    a: Tensor | ScaledTensor,
    b: ScaledTensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Write a @ b.T + bias to out.

    Parameters
    ----------
    a : (M, K) fp32, bf16 or fp16 of any row stride, or a ScaledTensor of b's format in LINEAR layouts.
    b : (N, K) in LINEAR layouts, or in ROWS_16x1 (scale) and ROWS_16x4 (data).
    bias : (N,) fp32, bf16 or fp16, or None.
    out : (M, N) fp32, bf16 or fp16; rows may lie apart, elements of a row may not. No operand's memory.
    threads : None takes torch.get_num_threads().

    Raises RuntimeError if there is no library, ValueError for other layouts or shapes, MemoryError.
    """
    task, _kept = _task(a, b, bias, out, threads)
    _run(task)


def bind(
    a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor, *, threads: int | None = None
) -> Callable[[Tensor, Tensor], None]:
    """Kernel.bind: `linear` with its checks made and its arguments laid out once."""
    parts = b.data, b.scale, *(() if bias is None else (bias,))
    if not all(part.is_contiguous() for part in parts):  # a copy of them would not see what is written to them
        return lambda a, out: linear(a.view(-1, b.shape[1]), b, bias, out.view(-1, b.shape[0]), threads=threads)
    task, kept = _task(a, b, bias, out, threads)
    scale = None if b.global_scale is None else ctypes.c_float.from_address(b.global_scale.data_ptr())

    def run(a: Tensor, out: Tensor, _kept=(kept[1:], b)) -> None:
        task.a.data, task.out = a.data_ptr(), out.data_ptr()
        task.threads = threads or torch.get_num_threads()
        if scale is not None:
            task.b.global_scale = scale.value
        _run(task)

    return run


def _run(task: Linear) -> None:
    if cpu_library.library().nibblas_linear(ctypes.byref(task)):  # type: ignore[union-attr]
        raise MemoryError(f"cpu_linear: no memory for the workspace of M={task.M}, N={task.N}, K={task.K}")


def _task(
    a: Tensor | ScaledTensor, b: ScaledTensor, bias: Tensor | None, out: Tensor, threads: int | None
) -> tuple[Linear, tuple]:
    """What C is to do, checked, and what must live until it is done."""
    if cpu_library.library() is None:
        raise RuntimeError(f"cpu_linear: {cpu_library.status()}")
    (M, K), (N, b_K) = a.shape, b.shape
    if b_K != K or out.shape != (M, N):
        raise ValueError(f"cpu_linear: a {tuple(a.shape)}, b {tuple(b.shape)}, out {tuple(out.shape)} do not fit")
    layouts = b.layout, b.data_layout
    if layouts not in B_LAYOUTS:
        raise ValueError(f"cpu_linear: b in {b.layout}/{b.data_layout}, need LINEAR/LINEAR or ROWS_16x1/ROWS_16x4")
    if isinstance(a, ScaledTensor) and (a.format, a.layout, a.data_layout) != (b.format, LINEAR, LINEAR):
        raise ValueError(f"cpu_linear: a is {a}, need {b.format} like b, in LINEAR layouts")
    out_stride, out_element = out.stride()
    if N > 1 and out_element != 1:
        raise ValueError(f"cpu_linear: out has strides {out.stride()}, need the elements of a row side by side")
    left, a = _dense(a) if isinstance(a, Tensor) else _packed(a, tiled=False)
    right, b = _packed(b, tiled=layouts == B_LAYOUTS[0])
    bias = None if bias is None else bias.contiguous()
    task = Linear(
        M,
        N,
        K,
        left,
        right,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out_stride,
        cpu_library.FORMATS[b.format.name],
        0 if bias is None else DTYPE_CODES[bias.dtype],
        DTYPE_CODES[out.dtype],
        threads or torch.get_num_threads(),
        cpu_library.tier(),
    )
    return task, (a, b, bias)


# As fp32 operations a weight, by tier: of decoding, and of transposing LINEAR weights besides. From times of
# 4096 x 4096 on one thread of a Sapphire Rapids; avx512 between those of it and of a Zen 4.
DECODE_OPERATIONS = {"portable": 60, "avx2": 30, "avx512": 7, "amx": 6}
TRANSPOSE_OPERATIONS = {"portable": 0, "avx2": 0, "avx512": 5, "amx": 3}


def cost(problem: Problem, line: Roofline) -> float:
    """The call, then the slower of reading and decoding, and the products at the rate of what the tier multiplies."""
    tier = cpu_library.TIERS[cpu_library.tier()]
    terms = {"fp32": 3, "fp16": 2}.get(problem.a, 1)
    passes = -(-problem.M * terms // {"amx": 64, "avx512": 8}.get(tier, 512))
    a_weight = DECODE_OPERATIONS[tier] * passes
    if problem.b_layouts == ("LINEAR", "LINEAR"):
        a_weight += TRANSPOSE_OPERATIONS[tier] * (passes if tier == "amx" else 1)
    decoding = a_weight * problem.L * problem.N * problem.K / line.rates["fp32"]
    rate = line.rates["fp32"] / (8 if tier == "portable" else 1)
    if tier in ("avx512", "amx"):
        rate = line.rates.get("bf16", rate) / terms
    if tier == "amx":
        rate /= 2  # loading a tile takes as long as multiplying it
    return 10e-6 + max(problem.bytes / line.read_bandwidth, decoding) + problem.operations / rate


def also(problem: Problem) -> str | None:
    return None if cpu_library.library() is not None else str(cpu_library.status())


KERNELS = (
    Kernel(
        name="cpu_linear",
        op="linear",
        archs=("cpu",),
        operands=tuple((a, b) for b in FORMATS for a in (*DTYPES, b)),
        outs=tuple(DTYPES),
        b_layouts=B_LAYOUTS,
        launch=linear,
        bind=bind,
        cost=cost,
        also=also,
        batch_invariant=True,
        sources=("kernels/cpu_linear.py", "kernels/cpu_linear.c", "kernels/cpu_common.h"),
    ),
)
