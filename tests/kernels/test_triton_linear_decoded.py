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
from nibblas.kernels.triton_linear_decoded import decode_launch, sums_in_fp32
from nibblas.layouts import LINEAR, BLOCKED_128x4
from nibblas.problem import Problem
from nibblas.roofline import ASSUMED_GPU, STATED

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
def test_few_rows_are_left_to_the_kernels_that_decode_in_registers(kernel, format):
    a = "bf16" if ("bf16", format.name) in kernel.operands else format.name
    for M, decoded_is_cheapest in ((1, False), (32, False), (64, False), (512, True), (2048, True)):
        problem = Problem(kernel.op, M, 4096, 7168, a=a, b=format.name, arch="sm_90")
        able = [k for k in kernels() if replace(k, also=None).why_not(problem) is None]
        assert (min(able, key=lambda k: k.cost(problem, LINE)).name == kernel.name) == decoded_is_cheapest, M
        assert kernel.cost(problem, LINE) > LINE.floor(problem)


@pytest.mark.parametrize("arch", ["sm_100", "sm_120"])
@pytest.mark.parametrize("line", [ASSUMED_GPU, replace(ASSUMED_GPU, rates=ASSUMED_GPU.rates | {"fp8": 3e14})])
def test_tensor_cores_that_take_fp4_get_it(arch, line):
    """Where both scales lie in blocks, which is better there; what they don't take is decoded."""
    blocked = (BLOCKED_128x4.name, LINEAR.name)
    plain = Problem("linear", 4096, 4096, 4096, a="nvfp4", b="nvfp4", arch=arch)
    native = replace(plain, a_layouts=blocked, b_layouts=blocked)

    def costs(problem):
        able = [k for k in kernels() if replace(k, also=k.also if k in KERNELS else None).why_not(problem) is None]
        return {k.name: k.cost(problem, line) for k in able}

    assert min(costs(native), key=costs(native).get) == "triton_linear_native"
    assert min(costs(plain), key=costs(plain).get) == "triton_linear_fp4_decoded"
    assert min(costs(native).values()) < min(costs(plain).values())
    gated = replace(native, op="gated_linear")
    assert not [k for k in KERNELS if k.why_not(gated) is None]


def test_cards_that_take_fp4_are_those_of_the_native_kernel():
    assert next(k.archs for k in kernels() if k.name == "triton_linear_native") == triton_linear_decoded.TAKING_FP4


def test_scales_may_lie_in_blocks():
    kernel = next(k for k in KERNELS if k.name == "triton_linear_fp4_decoded")
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
    made.allow_fp16_accumulation = True
    for dtype, allowed, split_k in (("fp16", True, True), ("bf16", False, False)):
        name = f"allow_{dtype}_reduced_precision_reduction"
        made.__dict__.update({name: allowed, f"{name}_split_k": split_k})
    monkeypatch.setattr(torch.backends.cuda, "matmul", made)
    return made


def test_cublas_sums_in_fp32_and_its_settings_are_put_back(settings):
    entered, leave = threading.Event(), threading.Event()

    def other():
        with sums_in_fp32():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with sums_in_fp32():
        thread.start()
        assert entered.wait(10)
        assert settings.allow_fp16_reduced_precision_reduction == (False, True)
        assert settings.allow_bf16_reduced_precision_reduction == (False, False)
        assert settings.allow_fp16_accumulation is False
    assert settings.allow_fp16_reduced_precision_reduction == (False, True), "another thread is within"
    leave.set()
    thread.join()
    assert settings.allow_fp16_accumulation is True
    assert settings.allow_fp16_reduced_precision_reduction == (True, True)
    assert settings.allow_bf16_reduced_precision_reduction == (False, False)
