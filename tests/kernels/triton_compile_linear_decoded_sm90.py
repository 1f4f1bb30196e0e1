"""Compiles triton_linear_decoded_sm90's kernels without a GPU and prints facts of the machine code, as
triton_compile.py does; test_triton_linear_decoded_sm90.py runs it for each version of triton."""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from checks import random_codes
from triton_compile import print_facts

from nibblas.bench.compiled import compile
from nibblas.kernels.triton_launch import Launch
from nibblas.kernels.triton_linear_decoded import finish_launch
from nibblas.kernels.triton_linear_decoded_sm90 import KERNELS, decode_launch


def cases() -> Iterator[tuple[str, Launch]]:
    """(name, launch) of what is compiled: K of whole runs of chunks and not."""
    generator = torch.Generator().manual_seed(0)
    for kernel in KERNELS:
        format = kernel.operands[0][1]
        for K in (2048, 1120):
            b = random_codes((2, 40, K), format, generator).with_layout(*kernel.b_layouts[0])
            for dtype in (torch.bfloat16, torch.float16) if format == "nvfp4" else (torch.bfloat16,):
                out = torch.empty(2, 40, K, dtype=dtype)
                yield f"decode {format} {dtype} K={K}", decode_launch(b, out)
        for terms in (1, 2):
            sums, out = torch.empty(terms, 2, 64, 4096), torch.empty(2, 64, 4096, dtype=torch.bfloat16)
            yield f"finish {format} terms={terms}", finish_launch(sums, out, b, None, out)


if __name__ == "__main__":
    for name, launch in cases():
        print_facts(name, name.split()[1], "sm_90", compile(launch, "sm_90"))
