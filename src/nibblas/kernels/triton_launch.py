"""What every Triton kernel needs on the host: where it runs, its operands' addresses, and a launch as data.

Device code lies beside each kernel in `<name>_device.py` and is imported at the first launch, so that nibblas imports
without triton. A `Launch` can be compiled for any target with no GPU (tests/kernels/test_triton_compile.py does).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import gcd
from typing import Any, TypeVar

import torch
from torch import Tensor

from nibblas.formats import NVFP4, Format
from nibblas.problem import DTYPE_NAMES, Problem, arch_of
from nibblas.tensor import ScaledTensor

NVIDIA = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
AMD = ("gfx942", "gfx950")
ARCHS = NVIDIA + AMD
DEVICE_CODE = ("kernels/triton_launch.py", "kernels/triton_decode.py")


@dataclass(frozen=True)
class Target:
    """What device code is compiled for. `interpreted`: by triton's interpreter on the CPU, where bf16 is not right."""

    arch: str
    multiprocessors: int
    interpreted: bool = False

    @property
    def ptx(self) -> bool:
        """Whether inline PTX can be used."""
        return self.arch.startswith("sm_")

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory a program may take."""
        if self.arch in ("sm_86", "sm_89", "sm_120", "sm_121"):
            return 99 << 10
        return {"gfx942": 64 << 10, "gfx950": 160 << 10, "sm_80": 163 << 10, "sm_87": 163 << 10}.get(
            self.arch, 227 << 10
        )


@cache
def target_of(device: torch.device) -> Target:
    """The Target of a device."""
    if device.type != "cuda":
        return Target(device.type, 4, interpreted=True)
    return Target(arch_of(device), torch.cuda.get_device_properties(device).multi_processor_count)


def also(problem: Problem) -> str | None:
    """Why Triton kernels can't run here at all."""
    return None if find_spec("triton") else "needs triton, which is not installed"


@dataclass(frozen=True)
class Launch:
    """One launch: `kernel` of module nibblas.kernels.`module` over `grid` programs."""

    module: str
    kernel: str
    grid: int
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def function(self):
        return getattr(import_module(f"nibblas.kernels.{self.module}"), self.kernel)

    def run(self) -> None:
        self.function[(self.grid,)](**self.arguments, **self.options)


def tl_dtype(name: str):
    """triton.language's dtype of this name."""
    import triton.language as tl

    return {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[name]


def block_size(t: Tensor | ScaledTensor) -> int:
    """What device code calls A_BLOCK and B_BLOCK: 0 for a dense operand."""
    return 0 if isinstance(t, Tensor) else t.format.block_size


def dot_dtype(a: Tensor | ScaledTensor, format: Format, target: Target) -> tuple[str, int]:
    """The dtype that tensor cores multiply in, and how many terms a dense `a` is cut into to be exact in it."""
    dtype = DTYPE_NAMES[a.dtype] if isinstance(a, Tensor) else "bf16"
    if dtype == "fp16" and format == NVFP4:
        return "fp16", 1
    if target.interpreted:
        return "fp32", 1
    return "bf16", {"bf16": 1, "fp16": 2, "fp32": 3}[dtype]


Operand = TypeVar("Operand", bound=Tensor | ScaledTensor)


def rows_contiguous(t: Operand) -> Operand:
    """The operand with elements of a row next to each other; a copy only where they are not."""
    parts = (t,) if isinstance(t, Tensor) else (t.data, t.scale)
    return t if all(part.stride(-1) == 1 for part in parts) else t.contiguous()  # type: ignore[return-value]


def scale_align(operands: Iterable[Tensor | ScaledTensor]) -> int:
    """The largest power of two up to 16 that divides every stride of every scale but the last."""
    strides = [s for t in operands if isinstance(t, ScaledTensor) for s in t.scale.stride()[:-1]]
    return gcd(16, *strides)


def operand_arguments(name: str, t: Tensor | ScaledTensor, align: int) -> dict[str, Any]:
    """Addresses and row strides of an operand (rows, K) or (L, rows, K), under the names that device code uses."""
    data, scale, global_scale = (t, None, None) if isinstance(t, Tensor) else (t.data, t.scale, t.global_scale)
    return {
        name: data,
        f"{name}_scale": scale,
        f"{name}_global": global_scale,
        f"{name}_stride": data.stride(-2),
        f"{name}_scale_stride": 0 if scale is None else scale.stride(-2) // align,
    }


def batch_arguments(name: str, t: Tensor | ScaledTensor, align: int) -> dict[str, int]:
    """Strides from matrix to matrix of an operand, 0 where there is one matrix or one global_scale."""
    data, scale, global_scale = (t, None, None) if isinstance(t, Tensor) else (t.data, t.scale, t.global_scale)
    batched = t.ndim == 3
    return {
        f"{name}_batch": data.stride(0) if batched else 0,
        f"{name}_scale_batch": 0 if scale is None or not batched else scale.stride(0) // align,
        f"{name}_global_stride": 0 if global_scale is None or global_scale.ndim == 0 else global_scale.stride(0),
    }
