"""What is compiled for GPUs that are not at hand, and the evidence of it."""

from pathlib import Path

import pytest
import torch

from nibblas import evidence
from nibblas.bench.compiled import ARCHS, LAUNCHES, MULTIPROCESSORS, Code, K, N, cases, compile, measurement, weights
from nibblas.formats import FORMATS
from nibblas.kernels import kernels
from nibblas.kernels.triton_launch import Target
from nibblas.kernels.triton_linear import linear_launches

SHIPPED = Path(__file__).parents[1] / "evidence" / "compiled.jsonl"


@pytest.mark.parametrize("arch", ARCHS)
def test_every_triton_kernel_made_for_an_architecture_is_compiled_for_it(arch):
    pytest.importorskip("triton")
    expected = {k.name for k in kernels() if arch in k.archs and k.name in LAUNCHES}
    found = list(cases(arch))
    assert {case.kernel.name for case in found} == expected
    for case in found:
        assert case.problem.arch == arch
        others = "needs triton"  # nothing but a missing package speaks against it
        assert (case.kernel.why_not(case.problem) or others).startswith(others)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_tiles_do_not_spill_where_tensor_cores_take_operands_from_registers(arch, format):
    """Of many rows, of `a` in terms and of `a` that is decoded too: they need the most registers."""
    pytest.importorskip("triton")
    for a in (torch.empty(512, K, dtype=torch.bfloat16), torch.empty(64, K), weights(format, 64, K)):
        out = torch.empty(a.shape[0], N, dtype=torch.bfloat16)
        launch, *_ = linear_launches(a, weights(format, N, K), None, out, Target(arch, MULTIPROCESSORS))
        code = compile(launch, arch)
        assert code.spills == 0, (tuple(a.shape), code)


def test_kernels_that_are_left_out_run_where_they_are_measured():
    assert {k.name for k in kernels() if k.name.startswith("triton")} - set(LAUNCHES) == {
        "triton_linear_decoded_sm90_nvfp4",
        "triton_linear_decoded_sm90_mxfp4",
    }


def test_what_was_compiled_is_no_time():
    pytest.importorskip("triton")
    case = next(cases("sm_100"))
    code = Code("linear_kernel", 96, 0, 1024, {"UTCHMMA": 16, "LDG.E": 4})
    m = measurement(case, [code, Code("sum_splits", 20, 0, 0, {"FADD": 1})])
    assert evidence.timing_level([m]) == "compiled"
    assert (m.samples, m.error) == ((), None)
    assert m.facts == {
        "registers": "96",
        "spills": "0",
        "shared bytes": "1024",
        "tensor instructions": "16 UTCHMMA",
    }
    assert evidence.Measurement.from_json(m.to_json()) == m


def test_shipped_evidence_names_every_kernel_and_block_scaled_instruction():
    found = evidence.read(SHIPPED)
    assert {(m.kernel, m.problem.arch) for m in found} == {
        (k.name, arch) for k in kernels() for arch in ARCHS if arch in k.archs and k.name in LAUNCHES
    }
    block_scaled = {"sm_100": "UTCOMMA", "sm_120": "OMMA.SF", "gfx950": "v_mfma_scale"}
    native = [m for m in found if "native" in m.kernel]
    assert {m.problem.arch for m in native} == set(block_scaled)
    for m in native:
        assert block_scaled[m.problem.arch] in m.facts["tensor instructions"]
    assert not any(m.samples for m in found)
    assert [str(m.problem) for m in found if m.facts["spills"] != "0"] == []
