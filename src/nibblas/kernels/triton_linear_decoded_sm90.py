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
from nibblas.kernels.triton_launch import DEVICE_CODE, Launch, also, dot_dtype, target_of
from nibblas.kernels.triton_linear_decoded import cost, finish_launch, in_terms, multiply
from nibblas.layouts import (
    FRAGMENT_SCALES_MXFP4,
    FRAGMENT_SCALES_NVFP4,
    FRAGMENTS_MXFP4,
    FRAGMENTS_NVFP4,
)
from nibblas.problem import DTYPES
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


def launch(a: Tensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> None:
    """Write a @ b.T + bias to out: a ([L,] M, K), b ([L,] N, K) prepacked, bias (N,), out ([L,] M, N)."""
    a = a if a.ndim == 3 else a.unsqueeze(0)
    (L, M, K), N = a.shape, out.shape[-1]
    name, terms = dot_dtype(a, b.format, target_of(out.device))
    w = torch.empty(L, N, K, dtype=DTYPES[name], device=out.device)
    decode_launch(b, w).run()
    sums = torch.empty(terms, L, M, N, dtype=torch.float32, device=out.device)
    multiply(in_terms(a, w.dtype, terms), w, sums)
    finish_launch(sums, a, b, bias, out).run()


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
        "kernels/triton_linear_decoded.py",
        "kernels/triton_linear_decoded_sm90.py",
        "kernels/triton_linear_decoded_sm90_device.py",
        "kernels/triton_linear_device.py",
        "kernels/triton_sums.py",
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
