"""What the baselines of contest/ share: FP4 decoded to 16 bits, for cuBLAS."""

import torch
from torch import Tensor

import nibblas as nb


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Packed codes (..., K/2) with scales (..., K/16) e4m3 -> (..., K) fp16, or (..., K/32) e8m0 -> bf16; exact."""
    data = codes.view(torch.uint8)
    is_nvfp4 = scale.shape[-1] * nb.NVFP4.block_size == data.shape[-1] * 2
    format, dtype = (nb.NVFP4, torch.float16) if is_nvfp4 else (nb.MXFP4, torch.bfloat16)
    return nb.dequantize(nb.ScaledTensor(data, scale.view(torch.uint8), format), dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T in fp32: of cuBLAS, which sums so anyway; torch has no such sum of 16 bits on a CPU."""
    return torch.mm(a, b.T, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().T
