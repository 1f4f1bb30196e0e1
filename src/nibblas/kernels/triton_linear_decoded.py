"""c = a @ b.T with many rows of a: FP4 operands are decoded once a call, then cuBLAS multiplies.

For weights, and FP4 activations, whose codes lie row after row: triton_linear.py decodes in each of its programs, again
for every tile of the other operand, and this once. `code * scale / UNIT` (see triton_decode) is exact in bf16, and of
NVFP4 in fp16 too; fp16 activations meet MXFP4, whose range fp16 can't hold, as two bf16 terms whose sum they are.
cuBLAS sums in fp32, in an order of its own. Where one matrix is asked for that lacks UNIT only, it writes out, rounding
once; else it writes fp32, and UNIT, global scales and bias come after, in fp32, before the one narrowing.
Bound by memory while it decodes (9/16 byte an element read, 2 written), then by the tensor cores.
Weakness: every call takes 2 N K L bytes of scratch, four times the weights, of FP4 activations 2 M K L, and 4 M N L for
the sums in fp32 (8 and another 4 M K L for two terms); decoding the weights takes as long as some 300 rows.
Settings of the process are changed while cuBLAS is called (`sums_in_fp32`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from nibblas.formats import FORMATS, NVFP4
from nibblas.kernel import Kernel
from nibblas.kernels.triton_launch import (
    DEVICE_CODE,
    NVIDIA,
    Launch,
    Target,
    also,
    batch_arguments,
    dot_dtype,
    rows_contiguous,
    target_of,
)
from nibblas.kernels.triton_sums import sums_launch
from nibblas.layouts import LINEAR, BLOCKED_128x4
from nibblas.problem import DTYPES, Problem, bits
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

TILE = 4096  # elements of a program that decodes
UNIT = {"nvfp4": 2.0**7, "mxfp4": 2.0**2}  # what decoded elements lack


def decode_launch(t: ScaledTensor, out: Tensor, target: Target) -> Launch:
    """The launch that writes t ([L,] N, K), divided by UNIT and without its global scale, to out (L, N, K).

    t : codes in LINEAR, scales in LINEAR or BLOCKED_128x4. out is contiguous and of a dtype that holds the result
    exactly: bf16 or fp32, or fp16 for NVFP4.
    """
    L, N, K = out.shape
    blocked = t.layout == BLOCKED_128x4
    t = rows_contiguous(t)
    if blocked and not (t.scale if t.ndim == 2 else t.scale[0]).is_contiguous():
        t = t.contiguous()
    BLOCK_K = min(max(1 << (K - 1).bit_length(), 64), 1024)
    batch = batch_arguments("t", t, 1)
    return Launch(
        "triton_linear_decoded_device",
        "decode_kernel",
        L * -(-N * BLOCK_K // TILE) * -(-K // BLOCK_K),
        {
            "data": t.data,
            "scale": t.scale,
            "out": out,
            **{"N": N, "K": K},
            "data_stride": t.data.stride(-2),
            "data_batch": batch["t_batch"],
            "scale_stride": t.scale.stride(-2),
            "scale_batch": batch["t_scale_batch"],
            "ROWS": TILE // BLOCK_K,
            "BLOCK_K": BLOCK_K,
            "BLOCK_SIZE": t.format.block_size,
            "BLOCKED": blocked,
            "PTX": target.ptx,
            "TAIL": K % BLOCK_K != 0,
        },
        {"num_warps": 4, "enable_fp_fusion": False},
    )


finish_launch = partial(sums_launch, block=1024, num_warps=4)


def in_terms(a: Tensor, dtype: torch.dtype, terms: int) -> Tensor:
    """a as `terms` tensors of dtype whose sum it is, exactly: (terms, *a.shape); two for fp16 in bf16, else one."""
    if terms == 1:
        return a.to(dtype).unsqueeze(0)
    high = a.to(dtype)
    rest = torch.where(a.isfinite(), a.float() - high.float(), 0.0)  # Inf - Inf would be NaN
    return torch.stack((high, rest.to(dtype)))


def multiply(a: Tensor, w: Tensor, sums: Tensor) -> None:
    """Write a @ w.mT in fp32: a (terms, L, M, K), w (L, N, K), sums (terms, L, M, N) contiguous."""
    with sums_in_fp32():
        if len(w) == 1:
            torch.mm(a.reshape(-1, a.shape[-1]), w[0].mT, torch.float32, out=sums.view(-1, sums.shape[-1]))
            return
        for term, into in zip(a, sums, strict=True):
            torch.bmm(term, w.mT, torch.float32, out=into)


def multiply_rounded(a: Tensor, w: Tensor, factor: float, out: Tensor) -> None:
    """Write factor * a @ w.T, rounded once: a (M, K), w (N, K), out (M, N) of one dtype of 16 bits.

    One matrix: of a batch torch does not tell cuBLAS to add the parts of a split K in fp32.
    """
    with sums_in_fp32():
        torch.addmm(out, a, w.T, beta=0, alpha=factor, out=out)


_lock = Lock()
_within = 0
_before: dict[str, Any] = {}


@contextmanager
def sums_in_fp32() -> Iterator[None]:
    """Within, cuBLAS sums 16-bit products in fp32, whatever the process allows it otherwise.

    Other threads' products may be summed so too meanwhile. What the process sets within is lost.
    """
    global _within, _before
    settings = torch.backends.cuda.matmul
    with _lock:
        if not _within:
            _before = {"allow_fp16_accumulation": settings.allow_fp16_accumulation}
            for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
                _before[name] = getattr(settings, name), getattr(settings, f"{name}_split_k")
            for name, value in _before.items():
                setattr(settings, name, (False, value[1]) if isinstance(value, tuple) else False)
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within:
                for name, value in _before.items():
                    setattr(settings, name, value)


def decoded(t: ScaledTensor, dtype: torch.dtype, target: Target) -> Tensor:
    """t ([L,] N, K) as `decode_launch` decodes it, in memory of its own: (L, N, K)."""
    L = t.shape[0] if t.ndim == 3 else 1
    out = torch.empty(L, *t.shape[-2:], dtype=dtype, device=t.device)
    decode_launch(t, out, target).run()
    return out


def dtype_of(a: Tensor | ScaledTensor, b: ScaledTensor, out: torch.dtype, target: Target) -> tuple[torch.dtype, int]:
    """The dtype to multiply in, and how many terms a dense `a` is cut into to be exact in it."""
    if isinstance(a, ScaledTensor) and a.format == b.format == NVFP4 and out == torch.float16:
        return torch.float16, 1
    name, terms = dot_dtype(a, b.format, target)
    return DTYPES[name], terms


def launch(a: Tensor | ScaledTensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> None:
    """Write a @ b.T + bias to out: a ([L,] M, K), b ([L,] N, K), bias (N,), out ([L,] M, N)."""
    target = target_of(out.device)
    dtype, terms = dtype_of(a, b, out.dtype, target)
    w = decoded(b, dtype, target)
    batched = out if out.ndim == 3 else out.unsqueeze(0)
    L, M, N = batched.shape
    if isinstance(a, Tensor):
        x = in_terms(a if a.ndim == 3 else a.unsqueeze(0), dtype, terms)
    else:
        x = decoded(a, dtype, target).unsqueeze(0)
    operands = [t for t in (a, b) if isinstance(t, ScaledTensor)]
    if (L, terms) == (1, 1) and out.dtype == dtype and bias is None and all(t.global_scale is None for t in operands):
        factor = 1.0
        for t in operands:
            factor *= UNIT[t.format.name]
        multiply_rounded(x[0, 0], w[0], factor, batched[0])
        return
    sums = torch.empty(terms, L, M, N, dtype=torch.float32, device=out.device)
    multiply(x, w, sums)
    finish_launch(sums, a, b, bias, out).run()


# The passes that only move bytes reach three quarters of the bandwidth at which the device reads, and each of the three
# or four launches takes 3 us of its own: so estimated, times are within 20 % of what an H200 took.
MOVING, LAUNCH = 0.75, 3e-6


def cost(problem: Problem, line: Roofline) -> float:
    """Decoding by its traffic, the dense product by the roofline, the narrowing of the sums by its traffic."""
    M, N, K, L = problem.M, problem.N, problem.K, problem.L
    terms = 2 if problem.a == "fp16" and problem.b != NVFP4.name else 1
    decodes_a = problem.a in FORMATS
    moved = N * K * (bits(problem.b) / 8 + 2) + M * N * (4 * terms + bits(problem.out) / 8)
    if decodes_a:
        moved += M * K * (bits(problem.a) / 8 + 2)
    operands = 2 * (N * K + terms * M * K) + 4 * terms * M * N
    rate = line.rate("bf16" if terms > 1 or decodes_a else problem.a)
    product = max(operands / line.read_bandwidth, 2 * terms * M * N * K / rate)
    return (4 if decodes_a else 3) * LAUNCH + L * (moved / (MOVING * line.read_bandwidth) + product)


LAYOUTS = ((LINEAR, LINEAR), (BLOCKED_128x4, LINEAR))
_kernel = partial(
    Kernel,
    op="linear",
    outs=tuple(DTYPES),
    launch=launch,
    cost=cost,
    also=also,
    a_layouts=LAYOUTS,
    b_layouts=LAYOUTS,
    sources=(
        *DEVICE_CODE,
        "kernels/triton_linear_decoded.py",
        "kernels/triton_linear_decoded_device.py",
        "kernels/triton_linear_device.py",
        "kernels/triton_sums.py",
    ),
    batched=True,
    decodes_weights=True,
)
DENSE = tuple((a, b) for b in FORMATS for a in ("bf16", "fp16"))
FP4 = tuple((a, b) for b in FORMATS for a in FORMATS)
TAKING_FP4 = ("sm_100", "sm_103", "sm_120", "sm_121")  # archs of triton_linear_native


def also_fp4(problem: Problem) -> str | None:
    """Why FP4 activations had better not be decoded here."""
    if problem.arch in TAKING_FP4 and problem.a == problem.b and problem.a_layouts[0] == BLOCKED_128x4.name:
        return "decodes what this device's tensor cores take as it is"
    return also(problem)


KERNELS = (
    _kernel(name="triton_linear_decoded", archs=NVIDIA, operands=DENSE),
    _kernel(name="triton_linear_fp4_decoded", archs=NVIDIA, operands=FP4, also=also_fp4),
)
