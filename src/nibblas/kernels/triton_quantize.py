"""Quantize and dequantize in Triton, byte for byte as nibblas.quantize does.

One pass over x for MXFP4 and for NVFP4 with a given global_scale; NVFP4's own global_scale takes one more, whose
results (a maximum a program) the second kernel reduces: no atomics, no host wait. absmax and the MXFP4 exponent rules
are bound by instructions more than by memory (20 an element of MXFP4, near 30 of NVFP4: Triton gives each block to two
threads or more, so that what is done once a block counts twice); four_over_six and the searches by the divisions of
their candidates.
"""

import torch
from torch import Tensor

from nibblas.formats import E2M1_MAX, FORMATS, Format
from nibblas.kernel import Kernel
from nibblas.kernels.triton_launch import ARCHS, Launch, Target, also, target_of
from nibblas.problem import DTYPES, Problem
from nibblas.quantize import TOP_SCALE
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

# Programs of the first pass; device code reads this many maxima, so a power of two.
PARTIALS = 1024
AMAX_BLOCK = 4096
# Elements of a program's tile, and tiles of a program.
TILE_ELEMENTS = 4096
TILES = 2
SEARCH_ELEMENTS = 1024


def quantize_launches(
    x: Tensor, format: Format, rule: str, global_scale: Tensor | None, target: Target
) -> tuple[ScaledTensor, list[Launch]]:
    """The result, unwritten, and the launches that write it; arguments as in `launch`."""
    x = x.contiguous()
    rows, K = x.shape
    blocks = rows * K // format.block_size
    data = torch.empty(rows, K // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, K // format.block_size, dtype=torch.uint8, device=x.device)
    launches = []
    partial_amax = None
    multiplier = global_scale
    if format.has_global_scale and global_scale is None:
        multiplier = torch.empty((), dtype=torch.float32, device=x.device)
        partial_amax = torch.empty(PARTIALS, dtype=torch.int32, device=x.device)
        launches.append(
            Launch(
                "triton_quantize_device",
                "amax_kernel",
                PARTIALS,
                {
                    "x": x,
                    "partial": partial_amax,
                    "SIZE": x.numel(),
                    "STRIDE": PARTIALS * AMAX_BLOCK,
                    "BLOCK": AMAX_BLOCK,
                },
                {"num_warps": 4, "enable_fp_fusion": False},
            )
        )
    by_error = rule in ("search", "four_over_six")
    tile = (SEARCH_ELEMENTS if by_error else TILE_ELEMENTS) // format.block_size
    launches.append(
        Launch(
            "triton_quantize_device",
            "quantize_kernel",
            # One program at least: it writes the global_scale.
            max(-(-blocks // (tile * TILES)), 1),
            {
                "x": x,
                "partial": partial_amax,
                "global_scale": multiplier,
                "data": data,
                "scale": scale,
                "BLOCKS": blocks,
                "TOP": E2M1_MAX * TOP_SCALE.get(rule, 1.0),
                "BLOCK_SIZE": format.block_size,
                "RULE": rule,
                "TILE": tile,
                "TILES": TILES,
                "PARTIALS": 0 if partial_amax is None else PARTIALS,
                "FMA": not target.interpreted,
                "CORRECTIONS": 2 if x.dtype == torch.float32 else 1,
                "PTX": target.ptx,
            },
            {"num_warps": 4, "enable_fp_fusion": False},
        )
    )
    return ScaledTensor(data, scale, format, multiplier, scale_rule=rule), launches


def launch(x: Tensor, format: Format, rule: str, global_scale: Tensor | None) -> ScaledTensor:
    """x (rows, K) -> ScaledTensor over it in LINEAR layouts; global_scale () fp32 or None for the rule's own."""
    result, launches = quantize_launches(x, format, rule, global_scale, target_of(x.device))
    for each in launches:
        each.run()
    return result


def dequantize_launch(w: ScaledTensor, out: Tensor) -> Launch:
    """The launch that writes the values of w (LINEAR layouts, contiguous, not rotated) to out, contiguous."""
    block_size = w.format.block_size
    matrix = w.scale.shape[-2:].numel() if w.ndim > 1 else w.scale.numel()
    tile = TILE_ELEMENTS // block_size
    return Launch(
        "triton_quantize_device",
        "dequantize_kernel",
        -(-w.scale.numel() // tile),
        {
            "data": w.data,
            "scale": w.scale,
            "global_scale": w.global_scale,
            "out": out,
            "BLOCKS": w.scale.numel(),
            "BLOCKS_PER_MATRIX": matrix,
            "global_stride": 0 if w.global_scale is None or w.global_scale.ndim == 0 else 1,
            "BLOCK_SIZE": block_size,
            "TILE": tile,
        },
        {"num_warps": 4, "enable_fp_fusion": False},
    )


def dequantize(w: ScaledTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """nibblas.quantize.dequantize of a tensor that is not rotated, on a GPU: (..., N, K) of fp32, bf16 or fp16."""
    if w.rotation:
        raise ValueError(f"dequantize: {w} is rotated, need rotation 0 (nibblas.dequantize rotates back)")
    plain = ScaledTensor(w.linear_data.contiguous(), w.linear_scale.contiguous(), w.format, w.global_scale)
    out = torch.empty(plain.shape, dtype=dtype, device=plain.device)
    if out.numel():
        dequantize_launch(plain, out).run()
    return out


def cost(problem: Problem, line: Roofline) -> float:
    """1.5 times the traffic, one more read where NVFP4 finds its own global_scale; searches by their divisions."""
    elements = problem.M * problem.K
    divisions = {"four_over_six": 2, "search": 16 if problem.b == "nvfp4" else 3}.get(problem.rule, 0)
    return 2.5 * problem.bytes / line.read_bandwidth + elements * divisions * 40 / line.rates["fp32"] + 6e-6


KERNELS = (
    Kernel(
        name="triton_quantize",
        op="quantize",
        archs=ARCHS,
        operands=tuple((dtype, format) for dtype in DTYPES for format in FORMATS),
        outs=tuple(FORMATS),
        launch=launch,
        cost=cost,
        sources=(
            "kernels/triton_launch.py",
            "kernels/triton_decode.py",
            "kernels/triton_quantize.py",
            "kernels/triton_quantize_device.py",
            "quantize.py",
        ),
        also=also,
    ),
)
