"""Where the tests of Hopper's kernels run: on a GPU, or as C++ on this CPU (cuda_on_cpu.h); their machine code."""

import ctypes
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nibblas.kernels import cuda_module
from nibblas.problem import arch_of

HOPPER = torch.cuda.is_available() and arch_of(torch.device("cuda", 0)) == "sm_90"
COMPILER = shutil.which("c++")
on_hopper = pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")
WHERE = [
    pytest.param("cpu", marks=pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")),
    pytest.param("cuda", marks=on_hopper),
]


def library_for_cpu(folder: Path, kernel: str, options: tuple[str, ...], run: str, before: str = "") -> ctypes.CDLL:
    """Device code compiled for this CPU.

    kernel : its file among nibblas's. options : the compiler's. run : C++ that calls it. before : what stands in for
    the kernel's own PTX beyond cuda_on_cpu.h.
    """
    name = "".join(options)
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    header = Path(__file__).with_name("cuda_on_cpu.h")
    source.write_text(f'#include "{header}"\n{before}{cuda_module.source_of(kernel)}{run}')
    flags = ["-std=c++17", "-fPIC", "-shared", "-w", "-DNIBBLAS_ON_CPU", *options]
    subprocess.run([COMPILER, *flags, "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def disassembled(cubin: bytes, folder: Path) -> str:
    """A cubin's code as triton's disassembler prints it; "" without triton."""
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        return ""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    nvdisasm = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True).stdout
