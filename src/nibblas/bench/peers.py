"""Other libraries' W4A16 products, to be timed beside ours. A peer is imported when it is asked for, never before.

A peer takes our codes and scales and packs them in its own way. `nibblas bench --peers` compares its answers with the
oracle's before it is timed, and says which peers refused a problem, and why.
"""

import copy
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from nibblas.formats import NVFP4
from nibblas.quantize import dequantize
from nibblas.tensor import ScaledTensor

# a (M, K) -> out (M, N), the next copy of the weights at each call.
Product = Callable[[Tensor | ScaledTensor], Tensor]


def humming(b: ScaledTensor, dtype: torch.dtype, copies: int) -> Product:
    """humming-kernels (PyPI): JIT-compiled CUDA, the best public W4A16 on Hopper. b (N, K) in LINEAR layouts."""
    from humming.layer import HummingLayer

    N, K = b.shape
    nvfp4 = b.format == NVFP4
    config = {"quant_method": "modelopt", "quant_algo": "nvfp4"} if nvfp4 else {"quant_method": "mxfp4"}
    layer = HummingLayer(N, K, config, torch_dtype=dtype).to(b.device)
    tensors = {"weight": b.data, "weight_scale": b.scale_as_float8 if nvfp4 else b.scale}
    if nvfp4:
        tensors["weight_scale_2"] = torch.ones(1, device=b.device) if b.global_scale is None else b.global_scale[None]
    layer.load_from_tensors(tensors)
    layer.transform()
    layers = cycle([layer, *(copy.deepcopy(layer) for _ in range(copies - 1))])
    return lambda a: next(layers)(a)


def gemlite(b: ScaledTensor, dtype: torch.dtype, copies: int) -> Product:
    """gemlite (PyPI): Triton kernels. Takes MXFP4 only here: its NVFP4 path fails in triton 3.6."""
    if b.format == NVFP4:
        raise NotImplementedError("gemlite's NVFP4 path fails in triton 3.6")
    from gemlite.helper import A16W4_MXFP

    N, K = b.shape
    dense = torch.nn.Linear(K, N, bias=False, device=b.device, dtype=dtype)
    dense.weight.data.copy_(dequantize(b))  # it quantizes these values anew
    layer = A16W4_MXFP(device=str(b.device), dtype=dtype).from_linear(dense)
    layers = cycle([layer, *(copy.deepcopy(layer) for _ in range(copies - 1))])
    return lambda a: next(layers)(a)


PEERS: dict[str, Callable[[ScaledTensor, torch.dtype, int], Product]] = {"humming": humming, "gemlite": gemlite}
# cuBLAS is what torch's bf16 product calls on CUDA: always timed, as "torch bf16".
ALWAYS_TIMED = ("cublas",)
# How far a peer's answers may be off, relative to the RMS of the exact ones: it may round sums to bf16.
PEER_TOLERANCE = 0.02


def check(product: Product, a: Tensor | ScaledTensor, exact: Tensor) -> None:
    """Raise ArithmeticError where a peer's answers are not those of the product that it is timed for."""
    error = (product(a).double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    if not error <= PEER_TOLERANCE:
        raise ArithmeticError(f"its answers are off by {error:.1%} of the exact ones' RMS")
