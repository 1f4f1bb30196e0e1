"""c = a @ b.T with many rows of a on Hopper: b is decoded once, from its prepacked layout, then cuBLAS multiplies.

For prefill with the weights that cuda_linear_sm90.py reads at small M: that kernel reads and decodes all of b for every
64 rows, this one decodes it once a call. A thread turns 16 bytes of layouts.FragmentCodes into 16 elements of two rows:
`code * scale / UNIT` (see triton_decode), exact in bf16, and of NVFP4 in fp16 too. cuBLAS sums in fp32 and writes fp32;
UNIT, global scale and bias come after, in fp32, before the one narrowing. fp16 activations meet MXFP4, whose range fp16
can't hold, as two bf16 terms whose sum they are, in one product of twice the rows.
Bound by memory while it decodes (9/16 byte an element read, 2 written), then by the tensor cores.
Weakness: every call takes 2 N K L bytes of scratch for the decoded b, four times the prepacked one, and 4 M N L more
(8 for two terms) for the sums in fp32, which are written and read once. The decoding takes as long as some 300 rows.
"""

from functools import partial

import torch
from torch import Tensor

from nibblas.formats import NVFP4
from nibblas.kernel import Kernel
from nibblas.kernels.triton_launch import DEVICE_CODE, Launch, also, batch_arguments, dot_dtype, target_of
from nibblas.layouts import (
    FRAGMENT_SCALES_MXFP4,
    FRAGMENT_SCALES_NVFP4,
    FRAGMENTS_MXFP4,
    FRAGMENTS_NVFP4,
)
from nibblas.problem import DTYPES, Problem, bits
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

# Runs of 128 columns of a program's 16 rows: a row of them is stored as 1 KiB.
CHUNKS = 4


def decode_launch(b: ScaledTensor, out: Tensor) -> Launch:
    """The launch that writes b ([L,] N, K), prepacked, divided by UNIT and without its global scale, to out (L, N, K).

    out is contiguous and of a dtype that holds the result exactly: bf16 or fp32, or fp16 for NVFP4.
    """
    L, N, K = out.shape
    if b.ndim == 3 and not (b.data[0].is_contiguous() and b.scale[0].is_contiguous()):
        b = b.contiguous()
    codes, scale = b.data.view(torch.int32), b.scale.view(torch.int32) if b.format == NVFP4 else b.scale
    return Launch(
        "triton_linear_decoded_sm90_device",
        "decode_kernel",
        L * -(-N // 16) * -(-K // (128 * CHUNKS)),
        {
            "codes": codes,
            "scale": scale,
            "out": out,
            **{"N": N, "K": K},
            "codes_batch": codes.stride(0) if b.ndim == 3 else 0,
            "scale_batch": scale.stride(0) if b.ndim == 3 else 0,
            "BLOCK_SIZE": b.format.block_size,
            "CHUNKS": CHUNKS,
        },
        {"num_warps": 4, "enable_fp_fusion": False},
    )


def finish_launch(sums: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> Launch:
    """The launch that writes sums (terms, L, M, N) fp32, added, times what b's elements lack, plus bias (N,) to out."""
    terms, L, M, N = sums.shape
    BLOCK = 1024
    return Launch(
        "triton_linear_device",
        "sum_splits",
        L * M * -(-N // BLOCK),
        {
            "partial": sums,
            "a_global": None,
            "b_global": b.global_scale,
            "bias": bias,
            "out": out,
            **{"M": M, "N": N, "L": L},
            "a_global_stride": 0,
            "b_global_stride": batch_arguments("b", b, 1)["b_global_stride"],
            "out_stride": out.stride(-2),
            "out_batch": out.stride(0) if out.ndim == 3 else 0,
            "SPLIT": terms,
            "BLOCK": BLOCK,
            "A_BLOCK": 0,
            "B_BLOCK": b.format.block_size,
        },
        {"num_warps": 4, "enable_fp_fusion": True},
    )


def in_terms(a: Tensor, dtype: torch.dtype, terms: int) -> Tensor:
    """a as `terms` tensors of dtype whose sum it is, exactly: (terms, *a.shape); two for fp16 in bf16, else one."""
    if terms == 1:
        return a.to(dtype).unsqueeze(0)
    high = a.to(dtype)
    rest = torch.where(a.isfinite(), a.float() - high.float(), 0.0)  # Inf - Inf would be NaN
    return torch.stack((high, rest.to(dtype)))


def multiply(a: Tensor, w: Tensor, sums: Tensor) -> None:
    """Write a @ w.mT in fp32: a (terms, L, M, K), w (L, N, K), sums (terms, L, M, N) contiguous."""
    if len(w) == 1:
        torch.mm(a.reshape(-1, a.shape[-1]), w[0].mT, torch.float32, out=sums.view(-1, sums.shape[-1]))
        return
    for term, into in zip(a, sums, strict=True):
        torch.bmm(term, w.mT, torch.float32, out=into)


def launch(a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> None:
    """Write a @ b.T + bias to out: a ([L,] M, K), b ([L,] N, K) prepacked, bias (N,), out ([L,] M, N)."""
    a = a if a.ndim == 3 else a.unsqueeze(0)
    (L, M, K), N = a.shape, out.shape[-1]
    name, terms = dot_dtype(a, b.format, target_of(out.device))
    w = torch.empty(L, N, K, dtype=DTYPES[name], device=out.device)
    decode_launch(b, w).run()
    sums = torch.empty(terms, L, M, N, dtype=torch.float32, device=out.device)
    multiply(in_terms(a, w.dtype, terms), w, sums)
    finish_launch(sums, b, bias, out).run()


# The passes that only move bytes reach three quarters of the bandwidth at which the device reads, and each of the three
# launches takes 3 us of its own: so estimated, times are within 20 % of what an H200 took.
MOVING, LAUNCHES = 0.75, 9e-6


def cost(problem: Problem, line: Roofline) -> float:
    """Decoding by its traffic, the dense product by the roofline, the narrowing of the sums by its traffic."""
    M, N, K, L = problem.M, problem.N, problem.K, problem.L
    terms = 2 if problem.a == "fp16" and problem.b != NVFP4.name else 1
    decoding = N * K * (bits(problem.b) / 8 + 2)
    narrowing = M * N * (4 * terms + bits(problem.out) / 8)
    operands = 2 * (N * K + terms * M * K) + 4 * terms * M * N
    rate = line.rate("bf16" if terms > 1 else problem.a)
    product = max(operands / line.read_bandwidth, 2 * terms * M * N * K / rate)
    return LAUNCHES + L * ((decoding + narrowing) / (MOVING * line.read_bandwidth) + product)


_kernel = partial(
    Kernel,
    op="linear",
    archs=("sm_90",),
    outs=tuple(DTYPES),
    launch=launch,
    cost=cost,
    also=also,
    sources=(
        *DEVICE_CODE,
        "kernels/triton_linear_decoded_sm90.py",
        "kernels/triton_linear_decoded_sm90_device.py",
        "kernels/triton_linear_device.py",
    ),
    batched=True,
    decodes_weights=True,
)
KERNELS = tuple(
    _kernel(
        name=f"triton_linear_decoded_sm90_{scales.format.name}",
        operands=(("bf16", scales.format.name), ("fp16", scales.format.name)),
        b_layouts=((scales, codes),),
    )
    for scales, codes in (
        (FRAGMENT_SCALES_NVFP4, FRAGMENTS_NVFP4),
        (FRAGMENT_SCALES_MXFP4, FRAGMENTS_MXFP4),
    )
)
