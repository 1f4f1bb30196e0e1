"""Other libraries' W4A16 products, to be timed beside ours. A peer is imported when it is asked for, never before.

torch (cuBLAS on CUDA) is always timed and needs no name here. A peer takes our codes and scales and packs them in its
own way; `nibblas bench --peers` says which peers refused a problem, and why.
"""

import copy
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from nibblas.formats import NVFP4
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
    layer = A16W4_MXFP(device=str(b.device), dtype=dtype).from_linear(dense)
    layers = cycle([layer, *(copy.deepcopy(layer) for _ in range(copies - 1))])
    return lambda a: next(layers)(a)


PEERS: dict[str, Callable[[ScaledTensor, torch.dtype, int], Product]] = {"humming": humming, "gemlite": gemlite}
