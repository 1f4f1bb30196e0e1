"""triton_linear_decoded_sm90 without a GPU: its records and choice, triton's interpreter, the machine code for sm_90.

What a GPU computes is asked in test_kernels.py and test_triton_gpu.py. Versions of triton as in test_triton.py.
"""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from triton_processes import VERSIONS, compiled, interpreted, needs_triton

from nibblas.kernel import Kernel
from nibblas.kernels import cuda_linear_sm90, triton_linear_decoded_sm90
from nibblas.kernels.triton_linear_decoded import in_terms
from nibblas.kernels.triton_linear_decoded_sm90 import KERNELS
from nibblas.problem import Problem
from nibblas.roofline import STATED

HERE = Path(__file__).parent


def problem_of(kernel: Kernel, M: int, N: int = 7168, K: int = 16384) -> Problem:
    a, b = kernel.operands[0]
    layouts = tuple(layout.name for layout in kernel.b_layouts[0])
    return Problem("linear", M, N, K, a=a, b=b, b_layouts=layouts, arch="sm_90")


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_record(kernel):
    problem = problem_of(kernel, 300)
    assert kernel.why_not(problem) == (None if find_spec("triton") else "needs triton, which is not installed")
    assert "this is sm_100" in kernel.why_not(replace(problem, arch="sm_100"))
    assert "takes b in FRAGMENT" in kernel.why_not(replace(problem, b_layouts=("LINEAR", "LINEAR")))
    for source in kernel.sources:
        imported = (HERE.parents[1] / "src/nibblas" / source).read_text().split("from nibblas.kernels.")[1:]
        assert {f"kernels/{line.split(' ')[0]}.py" for line in imported} <= set(kernel.sources)


def test_record_needs_no_triton():
    code = f"import sys, {triton_linear_decoded_sm90.__name__}; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_cost_leaves_few_rows_to_the_skinny_kernel(kernel):
    """Both take the same weights, so that the cost models decide where nothing was measured."""
    line = STATED["NVIDIA H200"]
    skinny = next(k for k in cuda_linear_sm90.KERNELS if k.b_layouts == kernel.b_layouts)
    for M, decoded_is_cheaper in ((1, False), (64, False), (128, False), (320, True), (1024, True), (8192, True)):
        problem = problem_of(kernel, M)
        assert (kernel.cost(problem, line) < skinny.cost(problem, line)) == decoded_is_cheaper, M
        assert kernel.cost(problem, line) > line.floor(problem)


def test_fp16_is_the_sum_of_its_terms():
    a = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    high, low = in_terms(a, torch.bfloat16, 2)
    assert high.dtype == low.dtype == torch.bfloat16
    both = high.double() + low.double()
    assert torch.equal(both[~a.isnan()], a[~a.isnan()].double())
    assert both[a.isnan()].isnan().all()


@needs_triton
def test_interpreter():
    """Decoding and the rest of a launch against the layouts and the reference; see the script."""
    assert interpreted("linear_decoded_sm90.py").count(" s\n") == 3


@pytest.fixture(scope="module", params=VERSIONS)
def machine_code(request) -> dict[str, dict]:
    """Facts of the machine code by name, as one version of triton makes it."""
    return {fact["name"]: fact for fact in compiled(request.param, "triton_compile_linear_decoded_sm90.py")}


def opcodes(fact: dict, prefix: str) -> dict[str, int]:
    return {opcode: n for opcode, n in fact["opcodes"].items() if opcode.startswith(prefix)}


def test_machine_code_of_decoding(machine_code):
    """Each thread: two loads of 16 bytes of codes, one or three narrow ones of scales, eight stores of 16 bytes."""
    found = {name: fact for name, fact in machine_code.items() if name.startswith("decode")}
    assert len(found) == 6
    for name, fact in found.items():
        assert fact["spills"] == 0, (name, fact)
        assert fact["registers"] <= 64, (name, fact)
        loads, stores = opcodes(fact, "LDG"), opcodes(fact, "STG")
        assert loads.pop("LDG.E.128") == 2, (name, fact)
        assert sum(loads.values()) == (1 if "nvfp4" in name else 3), (name, fact)
        assert stores == {"STG.E.128": 8}, (name, fact)
        # Subnormals are values here: fields are code * 2^-126, and e8m0 goes down to 2^-127.
        assert set(opcodes(fact, "FMUL")) == {"FMUL"}, (name, fact)


def test_machine_code_of_finishing(machine_code):
    found = {name: fact for name, fact in machine_code.items() if name.startswith("finish")}
    assert len(found) == 4
    for name, fact in found.items():
        assert fact["spills"] == 0, (name, fact)
        assert opcodes(fact, "LDG.E.128")["LDG.E.128"] == (4 if "terms=2" in name else 2), (name, fact)
        assert opcodes(fact, "STG") == {"STG.E.128": 1}, (name, fact)
