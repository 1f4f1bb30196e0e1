"""quantize, dequantize and amax on the CPU, in C (cpu_quantize.c): byte for byte what quantize.py gives.

One pass over the input (two where the global scale has to be found). All rules are bound by arithmetic rather than by
memory: some 14 operations encode an element, and 12 make the error of one candidate scale, of which `four_over_six` has
2, MXFP4's `search` 3 and NVFP4's 16.
"""

import ctypes

import torch
from torch import Tensor

from nibblas.formats import FORMATS, NVFP4, Format
from nibblas.kernel import Kernel
from nibblas.kernels import cpu_library
from nibblas.kernels.cpu_library import Quantize
from nibblas.layouts import LINEAR
from nibblas.problem import DTYPES, Problem
from nibblas.quantize import global_scale_from_amax
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

RULES = {
    ("nvfp4", "absmax"): 0,
    ("nvfp4", "four_over_six"): 1,
    ("nvfp4", "search"): 2,
    ("mxfp4", "even"): 3,
    ("mxfp4", "floor"): 4,
    ("mxfp4", "rceil"): 5,
    ("mxfp4", "search"): 6,
}


def _call(
    job: str,
    x: Tensor,
    format: Format,
    rule: str | None = None,
    data: Tensor | None = None,
    scale: Tensor | None = None,
    global_scale: float = 1.0,
) -> float | None:
    found = cpu_library.library()
    if found is None:
        raise RuntimeError(f"cpu_{job}: {cpu_library.status()}")
    rows, K = x.shape
    task = Quantize(
        rows,
        K,
        x.data_ptr(),
        x.stride(0),
        None if data is None else data.data_ptr(),
        None if scale is None else scale.data_ptr(),
        global_scale,
        cpu_library.DTYPES[str(x.dtype)],
        cpu_library.FORMATS[format.name],
        0 if rule is None else RULES[format.name, rule],
        torch.get_num_threads(),
        cpu_library.tier(),
    )
    return getattr(found, f"nibblas_{job}")(ctypes.byref(task))


def _rows_side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def amax(x: Tensor) -> Tensor:
    """The largest magnitude among the finite elements of x (rows, K) fp32, bf16 or fp16: () fp32, 0 if none."""
    return torch.tensor(_call("amax", _rows_side_by_side(x), NVFP4), dtype=torch.float32)


def quantize(x: Tensor, format: Format, rule: str, global_scale: Tensor | None) -> ScaledTensor:
    """x (rows, K) fp32, bf16 or fp16 -> LINEAR ScaledTensor; global_scale () fp32, or None for the rule's own."""
    x = _rows_side_by_side(x)
    rows, K = x.shape
    format.check_K("quantize", K)
    if format.has_global_scale and global_scale is None:
        global_scale = global_scale_from_amax(amax(x), rule)
    data = torch.empty(rows, K // 2, dtype=torch.uint8)
    scale = torch.empty(rows, K // format.block_size, dtype=torch.uint8)
    _call("quantize", x, format, rule, data, scale, 1.0 if global_scale is None else global_scale.item())
    return ScaledTensor(data, scale, format, global_scale, scale_rule=rule)


def dequantize(w: ScaledTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """code * (scale * global_scale) of w (rows, K), the bracket in fp32: (rows, K) fp32, bf16 or fp16.

    Any rotation of w is left in place.
    """
    w = w.with_layout(LINEAR, LINEAR).contiguous()
    out = torch.empty(w.shape, dtype=dtype)
    global_scale = 1.0 if w.global_scale is None else w.global_scale.item()
    _call("dequantize", out, w.format, None, w.data, w.scale, global_scale)
    return out


# Multiply-adds, as roofline.rates counts them, in whose time an element is quantized: measured on AVX-512, one thread.
OPERATIONS = {
    ("nvfp4", "absmax"): 50,
    ("nvfp4", "four_over_six"): 95,
    ("nvfp4", "search"): 430,
    ("mxfp4", "even"): 32,
    ("mxfp4", "floor"): 32,
    ("mxfp4", "rceil"): 32,
    ("mxfp4", "search"): 95,
}


def cost(problem: Problem, line: Roofline) -> float:
    """Seconds expected: the larger of arithmetic and the memory's share, x being read twice for a global scale."""
    operations = OPERATIONS[problem.b, problem.rule] * problem.M * problem.K
    return 5e-6 + max(problem.bytes * 2 / line.read_bandwidth, operations / line.rates["fp32"])


def also(problem: Problem) -> str | None:
    return None if cpu_library.library() is not None else str(cpu_library.status())


KERNELS = (
    Kernel(
        name="cpu_quantize",
        op="quantize",
        archs=("cpu",),
        operands=tuple((dtype, format) for dtype in DTYPES for format in FORMATS),
        outs=tuple(FORMATS),
        launch=quantize,
        cost=cost,
        also=also,
        sources=(
            "kernels/cpu_quantize.py",
            "kernels/cpu_quantize.c",
            "kernels/cpu_quantize_lanes.h",
            "kernels/cpu_common.h",
        ),
    ),
)
