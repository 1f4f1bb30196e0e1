"""nibblas: matrix multiplication for 4-bit block-scaled floats (NVFP4, MXFP4) in PyTorch.

>>> w = nb.quantize(torch.randn(64, 128), nb.NVFP4, scale_rule="search")
>>> nb.linear(torch.randn(3, 128), w).shape
torch.Size([3, 64])
"""

from nibblas import nn, reference
from nibblas.dispatch import NoKernelError
from nibblas.formats import MXFP4, NVFP4, Format
from nibblas.layouts import LINEAR, BLOCKED_128x4, CDNA_32x8, SHUFFLED_16x16, TiledLayout
from nibblas.ops import (
    bmm,
    dependent_launch,
    dequantize,
    explain,
    gated_linear,
    grouped_linear,
    grouped_matmul,
    linear,
    matmul,
    moe,
    quantize,
    scale_layout,
)
from nibblas.problem import Problem
from nibblas.quantize import rotate
from nibblas.storage import StorageError, load, save
from nibblas.tensor import ScaledTensor, stack

__version__ = "0.1.0"

__all__ = [
    "LINEAR",
    "MXFP4",
    "NVFP4",
    "BLOCKED_128x4",
    "CDNA_32x8",
    "Format",
    "NoKernelError",
    "Problem",
    "SHUFFLED_16x16",
    "ScaledTensor",
    "StorageError",
    "TiledLayout",
    "bmm",
    "dependent_launch",
    "dequantize",
    "explain",
    "gated_linear",
    "grouped_linear",
    "grouped_matmul",
    "linear",
    "load",
    "matmul",
    "moe",
    "nn",
    "quantize",
    "reference",
    "rotate",
    "save",
    "scale_layout",
    "stack",
]
