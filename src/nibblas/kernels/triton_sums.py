"""Launches of what comes after products that left sums in fp32: added, made whole, and narrowed once."""

from torch import Tensor

from nibblas.kernels.triton_launch import Launch, batch_arguments, block_size
from nibblas.tensor import ScaledTensor

# gpt-oss's constants, as nibblas.reference.gated_activation has them.
ALPHA, LIMIT = 1.702, 7.0


def sums_launch(
    sums: Tensor,
    a: Tensor | ScaledTensor,
    b: ScaledTensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    block: int,
    num_warps: int,
) -> Launch:
    """The launch that writes sums (parts, L, M, N) fp32, added, times what decoded elements lack, plus bias to out.

    a, b : the operands, of which global scales and formats count. block : columns of a program.
    """
    parts, L, M, N = sums.shape
    return Launch(
        "triton_linear_device",
        "sum_splits",
        L * M * -(-N // block),
        {
            "partial": sums,
            "a_global": None if isinstance(a, Tensor) else a.global_scale,
            "b_global": b.global_scale,
            "bias": bias,
            "out": out,
            **{"M": M, "N": N, "L": L},
            "a_global_stride": batch_arguments("a", a, 1)["a_global_stride"],
            "b_global_stride": batch_arguments("b", b, 1)["b_global_stride"],
            "out_stride": out.stride(-2),
            "out_batch": out.stride(0) if out.ndim == 3 else 0,
            "SPLIT": parts,
            "BLOCK": block,
            "A_BLOCK": block_size(a),
            "B_BLOCK": block_size(b),
        },
        {"num_warps": num_warps, "enable_fp_fusion": True},
    )


def gated_sums_launch(
    sums: Tensor,
    x: Tensor | ScaledTensor,
    w_gate: ScaledTensor,
    w_up: ScaledTensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
    out: Tensor,
    *,
    block: int,
    num_warps: int,
) -> Launch:
    """The launch that writes both products (parts, 2, M, N) fp32, added, made whole and gated, to out (M, N)."""
    parts, _, M, N = sums.shape
    return Launch(
        "triton_gated_linear_device",
        "sum_gated_splits",
        M * -(-N // block),
        {
            "partial": sums,
            "a_global": None if isinstance(x, Tensor) else x.global_scale,
            "gate_global": w_gate.global_scale,
            "up_global": w_up.global_scale,
            "bias_gate": bias_gate,
            "bias_up": bias_up,
            "out": out,
            **{"M": M, "N": N, "alpha": ALPHA, "limit": LIMIT},
            "out_stride": out.stride(0),
            "SPLIT": parts,
            "CLAMPED": activation == "swiglu_clamped",
            "A_BLOCK": block_size(x),
            "B_BLOCK": block_size(w_up),
            "BLOCK": block,
        },
        {"num_warps": num_warps, "enable_fp_fusion": True},
    )
