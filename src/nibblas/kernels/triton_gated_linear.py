"""act(x @ w_gate.T) * (x @ w_up.T) in Triton: both products in one kernel, which reads x once and rounds once.

Decoding, exactness, split K and bounds as in triton_linear.py; twice the accumulators, so narrower tiles.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nibblas.formats import FORMATS
from nibblas.kernel import Kernel
from nibblas.kernels.triton_launch import (
    ARCHS,
    DEVICE_CODE,
    Launch,
    Target,
    also,
    block_size,
    dot_dtype,
    operand_arguments,
    rows_contiguous,
    scale_align,
    target_of,
    tl_dtype,
)
from nibblas.kernels.triton_linear import Config, cost, operands_in_registers, split_for, stages_for
from nibblas.kernels.triton_sums import ALPHA, LIMIT, gated_sums_launch
from nibblas.problem import DTYPES
from nibblas.tensor import ScaledTensor


def config_for(M: int, N: int, K: int, terms: int, target: Target) -> Config:
    """The tile for a gated product, by M and by how many programs fill the device."""
    stages, programs = stages_for(target), 6.0 if M <= 32 else 2.0
    BLOCK_M = 16 if M <= 16 else 32 if M <= 32 else 64
    if terms > 1 and target.ptx and (M <= 64 or operands_in_registers(target)):
        config = Config(BLOCK_M, 64, 32, num_stages=stages)
    elif M <= 64:
        # Two decoded tiles of 256 spill on CDNA.
        config = Config(BLOCK_M, 64, 256 if M <= 32 and target.ptx else 128, num_stages=stages)
    elif terms > 1:
        config = Config(64, 32, 64, num_stages=2)
    else:
        config, programs = Config(128, 64, 64, num_warps=8, num_stages=stages), 1.5
    tiles = -(-M // config.BLOCK_M) * -(-N // config.BLOCK_N)
    return replace(config, SPLIT=split_for(tiles, -(-K // config.BLOCK_K), round(programs * target.multiprocessors)))


def gated_launches(
    x: Tensor | ScaledTensor,
    w_gate: ScaledTensor,
    w_up: ScaledTensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
    out: Tensor,
    target: Target,
    config: Config | None = None,
) -> list[Launch]:
    """The launches that write the gated product to out; shapes as in `launch`."""
    x, w_gate, w_up = rows_contiguous(x), rows_contiguous(w_gate), rows_contiguous(w_up)
    (M, K), N = x.shape, w_up.shape[0]
    dtype, terms = dot_dtype(x, w_up.format, target)
    config = config or config_for(M, N, K, terms, target)
    split, align = config.SPLIT, scale_align((x, w_gate, w_up))
    partial_sums = out.new_empty((split, 2, M, N), dtype=torch.float32) if split > 1 else None
    gate, up = operand_arguments("gate", w_gate, align), operand_arguments("up", w_up, align)
    shared = {
        "bias_gate": bias_gate,
        "bias_up": bias_up,
        **{"M": M, "N": N, "alpha": ALPHA, "limit": LIMIT},
        "out_stride": out.stride(0),
        "SPLIT": split,
        "CLAMPED": activation == "swiglu_clamped",
        "A_BLOCK": block_size(x),
        "B_BLOCK": block_size(w_up),
    }
    product = Launch(
        "triton_gated_linear_device",
        "gated_kernel",
        -(-M // config.BLOCK_M) * -(-N // config.BLOCK_N) * split,
        {
            **operand_arguments("a", x, align),
            **gate,
            **up,
            **shared,
            "out": out if partial_sums is None else partial_sums,
            "K": K,
            **config.constants,
            "SCALE_ALIGN": align,
            "DTYPE": tl_dtype(dtype),
            "TERMS": terms,
            "PTX": target.ptx,
            "TAIL": K % config.BLOCK_K != 0,
        },
        config.options,
    )
    if partial_sums is None:
        return [product]
    sums = x, w_gate, w_up, bias_gate, bias_up, activation, out
    return [product, gated_sums_launch(partial_sums, *sums, block=256, num_warps=2)]


def launch(
    x: Tensor | ScaledTensor,
    w_gate: ScaledTensor,
    w_up: ScaledTensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
    out: Tensor,
    *,
    linear: Any = None,
) -> None:
    """Write act(x @ w_gate.T + bias_gate) * (x @ w_up.T + bias_up) to out, in fp32 until the end.

    x (M, K); w_gate, w_up (N, K) of one format; biases (N,) or None; activation "silu" or "swiglu_clamped"; out (M, N).
    `linear` is not needed.
    """
    for each in gated_launches(x, w_gate, w_up, bias_gate, bias_up, activation, out, target_of(out.device)):
        each.run()


KERNELS = (
    Kernel(
        name="triton_gated_linear",
        op="gated_linear",
        archs=ARCHS,
        operands=tuple((a, b) for b in FORMATS for a in (*DTYPES, *FORMATS)),
        outs=tuple(DTYPES),
        launch=launch,
        cost=cost,
        sources=(
            *DEVICE_CODE,
            "kernels/triton_linear.py",
            "kernels/triton_linear_device.py",
            "kernels/triton_gated_linear.py",
            "kernels/triton_gated_linear_device.py",
            "kernels/triton_sums.py",
        ),
        also=also,
    ),
)
