"""What the baselines of contest/ share: decoding FP4 in plain torch, for cuBLAS.

By one look-up of two values a byte and one product with the scales, which moves fewer bytes than nibblas.dequantize.
"""

from functools import cache

import torch
from torch import Tensor

from nibblas.formats import NVFP4, e2m1_decode, unpack


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two values of dtype that each byte holds, low nibble first, as one 32-bit word a byte: (256,)."""
    codes = unpack(torch.arange(256, dtype=torch.uint8).unsqueeze(-1))
    return e2m1_decode(codes).to(dtype).view(torch.int32).flatten().to(device)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Packed codes (..., K/2) with scales (..., K/16) e4m3 -> (..., K) fp16, or (..., K/32) e8m0 -> bf16; exact."""
    codes = codes.view(torch.uint8)
    is_nvfp4 = scale.shape[-1] * NVFP4.block_size == codes.shape[-1] * 2
    dtype = torch.float16 if is_nvfp4 else torch.bfloat16
    factors = scale if is_nvfp4 else scale.view(torch.float8_e8m0fnu)
    blocks = _pairs(dtype, codes.device).index_select(0, codes.flatten().int()).view(dtype).view(*scale.shape, -1)
    return blocks.mul_(factors.to(dtype)[..., None]).flatten(-2)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T in fp32: of cuBLAS, which sums so anyway; torch has no such sum of 16 bits on a CPU."""
    return torch.mm(a, b.T, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().T
