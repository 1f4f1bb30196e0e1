"""triton_linear_decoded and triton_gated_linear_decoded without a GPU: records, choice, interpreter, machine code.

What a GPU computes is asked in test_kernels.py and test_triton_gpu.py.
"""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton_processes import interpreted, needs_triton

from nibblas.bench.compiled import compile, weights
from nibblas.formats import MXFP4, NVFP4
from nibblas.kernels import kernels, triton_gated_linear_decoded, triton_linear_decoded
from nibblas.kernels.triton_launch import Target
from nibblas.kernels.triton_linear_decoded import _sums_in_fp32, decode_launch
from nibblas.layouts import LINEAR, BLOCKED_128x4
from nibblas.problem import Problem
from nibblas.roofline import STATED

HERE = Path(__file__).parent
LINE = STATED["NVIDIA H200"]
KERNELS = (*triton_linear_decoded.KERNELS, *triton_gated_linear_decoded.KERNELS)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_sources_are_all_that_is_imported(kernel):
    for source in kernel.sources:
        imported = (HERE.parents[1] / "src/nibblas" / source).read_text().split("from nibblas.kernels.")[1:]
        assert {f"kernels/{line.split(' ')[0]}.py" for line in imported} <= set(kernel.sources)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=str)
def test_few_rows_are_left_to_the_kernel_that_decodes_in_registers(kernel, format):
    other = next(k for k in kernels() if k.name == kernel.name.removesuffix("_decoded"))
    for M, decoded_is_cheaper in ((1, False), (32, False), (256, True), (2048, True)):
        problem = Problem(kernel.op, M, 4096, 7168, a=format.name, b=format.name, arch="sm_90")
        assert (kernel.cost(problem, LINE) < other.cost(problem, LINE)) == decoded_is_cheaper, M
        assert kernel.cost(problem, LINE) > LINE.floor(problem)


def test_scales_may_lie_in_blocks():
    (kernel,) = triton_linear_decoded.KERNELS
    problem = Problem("linear", 256, 512, 512, a="nvfp4", b="nvfp4", arch="sm_90")
    blocked = (BLOCKED_128x4.name, LINEAR.name)
    for a in (problem.a_layouts, blocked):
        for b in (problem.b_layouts, blocked):
            reason = kernel.why_not(replace(problem, a_layouts=a, b_layouts=b))
            assert reason is None or reason.startswith("needs triton")


@needs_triton
def test_interpreter():
    """Decoding and the rest of a launch against the layouts and the reference; see the script."""
    assert interpreted("linear_decoded.py").count(" s\n") == 5


@needs_triton
@pytest.mark.parametrize("layout", [LINEAR, BLOCKED_128x4], ids=str)
@pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=str)
def test_machine_code_of_decoding(format, layout):
    """Each thread: 16 bytes of codes, and four stores of 16 bytes."""
    launch = decode_launch(
        weights(format, 64, 2048, layout=layout), torch.empty(1, 64, 2048, dtype=torch.bfloat16), Target("sm_90", 132)
    )
    code = compile(launch, "sm_90")
    assert code.spills == 0
    assert code.registers <= 64
    assert code.opcodes["STG.E.128"] == 4
    assert code.opcodes.get("LDG.E.128", 0) * 16 + code.opcodes.get("LDG.E.64", 0) * 8 == 16


@pytest.fixture
def settings(monkeypatch):
    """The process's settings of cuBLAS, of which one was chosen by the user."""
    made = SimpleNamespace()
    for dtype, allowed, split_k in (("fp16", True, True), ("bf16", False, False)):
        name = f"allow_{dtype}_reduced_precision_reduction"
        made.__dict__.update({name: allowed, f"{name}_split_k": split_k})
    monkeypatch.setattr(torch.backends.cuda, "matmul", made)
    return made


def test_cublas_sums_in_fp32_and_its_settings_are_put_back(settings):
    entered, leave = threading.Event(), threading.Event()

    def other():
        with _sums_in_fp32():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with _sums_in_fp32():
        thread.start()
        assert entered.wait(10)
        assert settings.allow_fp16_reduced_precision_reduction == (False, True)
        assert settings.allow_bf16_reduced_precision_reduction == (False, False)
    assert settings.allow_fp16_reduced_precision_reduction == (False, True), "another thread is within"
    leave.set()
    thread.join()
    assert settings.allow_fp16_reduced_precision_reduction == (True, True)
    assert settings.allow_bf16_reduced_precision_reduction == (False, False)
