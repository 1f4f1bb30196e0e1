"""Every kernel there is. A file is `<backend>_<op>[_<arch>].py` with its .c or .cu beside it; this is the one list."""

from nibblas.kernel import Kernel
from nibblas.kernels import (
    composite,
    cpu_grouped_linear,
    cpu_linear,
    cpu_quantize,
    cuda_linear_fp4_sm90,
    cuda_linear_sm90,
    cuda_linear_wide_sm90,
    cuda_quantize_sm90,
    torch_linear,
    torch_quantize,
    triton_gated_linear,
    triton_gated_linear_decoded,
    triton_grouped_linear,
    triton_linear,
    triton_linear_decoded,
    triton_linear_decoded_sm90,
    triton_quantize,
)

MODULES = (
    cpu_linear,
    cpu_grouped_linear,
    cpu_quantize,
    cuda_linear_sm90,
    cuda_linear_wide_sm90,
    cuda_linear_fp4_sm90,
    triton_linear_decoded_sm90,
    triton_linear,
    triton_linear_decoded,
    triton_grouped_linear,
    triton_gated_linear,
    triton_gated_linear_decoded,
    cuda_quantize_sm90,
    triton_quantize,
    torch_linear,
    torch_quantize,
    composite,
)


def kernels() -> tuple[Kernel, ...]:
    """All kernels, on every device."""
    return tuple(kernel for module in MODULES for kernel in module.KERNELS)
