"""Groups of rows, each against its own FP4 weights, in Triton: one launch whose grid is known without the offsets.

A group of m rows takes ceil(m / BLOCK_M) tiles; ceil(M / BLOCK_M) + G + 2 tiles are enough for any offsets, the groups'
and the two runs of rows before and after them, which become zero. Each program finds its tile by a scan over the
groups' tile counts on the device: no host waits for the offsets, so it can be captured in a graph. Decoding as in
triton_linear.py, and its bounds; native where tensor cores take FP4 (see there; compiled, never run).
Known weakness: few rows a group are padded to BLOCK_M of 16, and K is not split.
"""

from functools import partial
from typing import Any

from torch import Tensor

from nibblas.formats import FORMATS, MXFP4
from nibblas.kernel import Kernel
from nibblas.kernels.triton_launch import (
    ARCHS,
    DEVICE_CODE,
    Launch,
    Target,
    also,
    batch_arguments,
    block_size,
    dot_dtype,
    operand_arguments,
    rows_contiguous,
    scale_align,
    target_of,
    tl_dtype,
)
from nibblas.kernels.triton_linear import (
    Config,
    is_crowded,
    native_config,
    operands_in_registers,
    stages_for,
    tile_for,
)
from nibblas.layouts import LINEAR, BLOCKED_128x4
from nibblas.problem import DTYPES, Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor


def config_for(M: int, N: int, G: int, terms: int, crowded: bool, target: Target) -> Config:
    """The tile by the mean rows of a group."""
    mean = M / G
    if mean <= 32 or (mean <= 256 and terms == 1) or operands_in_registers(target):
        return tile_for(mean, terms, crowded, target)
    return Config(64, 64, 64, num_stages=2) if terms > 1 else Config(128, 128, 64, num_stages=stages_for(target))


def grouped_launch(
    x: Tensor | ScaledTensor,
    w: ScaledTensor,
    offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    target: Target,
    *,
    native: bool = False,
    config: Config | None = None,
) -> Launch:
    """The launch that writes every group's product to out; shapes as in `launch`."""
    x, w = rows_contiguous(x), rows_contiguous(w)
    (M, K), (G, N, _) = x.shape, w.shape
    dtype, terms = dot_dtype(x, w.format, target)
    align = 1 if native else scale_align((x, w))
    crowded = is_crowded(x, align)
    config = config or (native_config(target) if native else config_for(M, N, G, terms, crowded, target))
    constants: dict[str, Any] = config.constants
    del constants["SPLIT"], constants["GROUP"]
    return Launch(
        "triton_grouped_linear_device",
        "grouped_kernel",
        (-(-M // config.BLOCK_M) + G + 2) * -(-N // config.BLOCK_N),
        {
            **operand_arguments("a", x, align),
            **operand_arguments("b", w, align),
            **batch_arguments("b", w, align),
            "offsets": offsets.to(out.device),
            "bias": bias,
            "bias_stride": 0 if bias is None else bias.stride(0),
            "out": out,
            **{"M": M, "N": N, "K": K, "G": G},
            "out_stride": out.stride(0),
            **constants,
            "RUNS": 1 << (G + 2).bit_length(),
            "SCALE_ALIGN": align,
            "A_BLOCK": block_size(x),
            "B_BLOCK": block_size(w),
            "DTYPE": tl_dtype(dtype),
            "TERMS": terms,
            "PTX": target.ptx,
            "TAIL": K % config.BLOCK_K != 0,
            "NATIVE": native,
        },
        config.options,
    )


def launch(
    x: Tensor | ScaledTensor,
    w: ScaledTensor,
    offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    linear: Any = None,
    native: bool = False,
) -> None:
    """Rows offsets[g]:offsets[g+1] of x (M, K) meet w[g] (N, K) and bias[g] (N,); rows of no group become zero.

    offsets (G+1,) int32 or int64, ascending within 0..M. `linear` is not needed. native: FP4 x FP4 of one format with
    scales in BLOCKED_128x4, on tensor cores that take them.
    """
    grouped_launch(x, w, offsets, bias, out, target_of(out.device), native=native).run()


def cost(problem: Problem, line: Roofline) -> float:
    """Fitted to five sets of groups on an H200."""
    floors = 3.2 if problem.M <= 256 * problem.G else 1.8
    return 6.5e-6 + floors * line.floor(problem)


_decoding = partial(
    Kernel,
    op="grouped_linear",
    archs=ARCHS,
    operands=tuple((a, b) for b in FORMATS for a in (*DTYPES, *FORMATS)),
    outs=tuple(DTYPES),
    launch=launch,
    cost=cost,
    sources=(
        *DEVICE_CODE,
        "kernels/triton_linear.py",
        "kernels/triton_linear_device.py",
        "kernels/triton_sums.py",
        "kernels/triton_grouped_linear.py",
        "kernels/triton_grouped_linear_device.py",
    ),
    also=also,
)
_native = partial(
    _decoding,
    launch=partial(launch, native=True),
    cost=lambda problem, line: 1.5 * line.floor(problem) + 8e-6,
    a_layouts=((BLOCKED_128x4, LINEAR),),
    b_layouts=((BLOCKED_128x4, LINEAR),),
)
KERNELS = (
    _decoding(name="triton_grouped_linear"),
    _native(
        name="triton_grouped_linear_native",
        archs=("sm_100", "sm_103", "sm_120", "sm_121"),
        operands=tuple((name, name) for name in FORMATS),
    ),
    _native(name="triton_grouped_linear_native_gfx950", archs=("gfx950",), operands=((MXFP4.name, MXFP4.name),)),
)
