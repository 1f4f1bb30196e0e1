"""Where the tests of Hopper's kernels run: on a GPU, or as C++ on this CPU (cuda_on_cpu.h). Their machine code, and
what those that take prepacked weights have to stand."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checks import poisoned_empty, random_codes, random_dense

from nibblas import ops
from nibblas.formats import Format
from nibblas.kernels import cuda_module
from nibblas.kernels.cuda_prepacked_sm90 import LAYOUTS
from nibblas.problem import arch_of
from nibblas.tensor import ScaledTensor

Launch = Callable[..., None]  # launch(a, b, bias, out)

HOPPER = torch.cuda.is_available() and arch_of(torch.device("cuda", 0)) == "sm_90"
COMPILER = shutil.which("c++")
on_hopper = pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")
WHERE = [
    pytest.param("cpu", marks=pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")),
    pytest.param("cuda", marks=on_hopper),
]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prepacked(t: ScaledTensor) -> ScaledTensor:
    return t.with_layout(*LAYOUTS[t.format])


def prepacked_product(launch: Launch, a, b, bias=None, **options) -> torch.Tensor:
    """What a launch makes of weights (N, K) in LINEAR, prepacked for it, in fp32 on the GPU."""
    out = poisoned_empty((*b.shape[:-2], a.shape[-2], b.shape[-2]), torch.float32, "cuda")
    launch(a, prepacked(b), bias, out, **options)
    return out


class Recorder:
    """A launch that keeps what it would have passed to the device code, whose Arguments are laid out by a Struct."""

    def __init__(self, arguments: struct.Struct):
        self._layout, self.arguments = arguments, bytearray(arguments.size)
        self.seen: list[tuple] = []

    def __call__(self, stream: int) -> None:
        self.seen.append(self._layout.unpack(self.arguments))


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


def assert_streams_agree(launch: Launch, b: ScaledTensor, Ms: Sequence[int]) -> None:
    """200 times on a stream for each M, with b (N, K) prepacked, the results are those of one launch alone."""
    N, K = b.shape
    inputs = [random_dense((M, K), torch.bfloat16, generator(M), "cuda") for M in Ms]
    first = [torch.empty(len(a), N, device="cuda") for a in inputs]
    for a, out in zip(inputs, first, strict=True):
        launch(a, b, None, out)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    outs = [torch.empty(200, *out.shape, device="cuda") for out in first]
    for i in range(200):
        for stream, a, out in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                launch(a, b, None, out[i])
    torch.cuda.synchronize()
    for out, expected in zip(outs, first, strict=True):
        assert torch.equal(out, expected.expand_as(out))


def assert_chain(launches: Sequence[Launch], format: Format, M: int, *, dependent: bool) -> None:
    """In one graph each product's activations are the result of the one before; kernels that can start early."""
    one, g = format.scale_code.one, generator(13)
    narrow = {"scale_bytes": (one - 1, one), "global_scale": False}  # of growing values, all finite
    b = prepacked(random_codes((512, 512), format, g, **narrow, device="cuda"))
    x = [random_dense((M, 512), torch.bfloat16, g, "cuda")]
    x += [torch.empty_like(x[0]) for _ in launches]
    expected = [x[0], *(torch.empty_like(x[0]) for _ in launches)]
    for launch, (source, out) in zip(launches, pairwise(expected), strict=True):
        launch(source, b, None, out)
        torch.cuda.synchronize()
    assert all(out.isfinite().all() and out.any() for out in expected)
    ops.dependent_launch(dependent)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch, (source, out) in zip(launches, pairwise(x), strict=True):
                launch(source, b, None, out)
        for _ in range(20):
            for out in x[1:]:
                out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            for out, right in zip(x, expected, strict=True):
                assert torch.equal(out, right)
    finally:
        ops.dependent_launch(False)
