"""Compiling for an architecture, and findings that machine code confirms or refutes."""

from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_cuda")

from nibblas.index import machine_code
from nibblas.index.machine_code import compiled, confirm, opcodes
from nibblas.index.techniques import find

SOURCE = """\
__global__ void sum(const float4* in, float* out)
{
    float4 v = in[threadIdx.x];
    float s = v.x + v.y + v.z + v.w;
    s += __shfl_xor_sync(0xffffffff, s, 1);
    if (threadIdx.x == 0)
        atomicAdd(out, s);
}
"""
CODE = """\
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0090*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0100*/                   FADD R0, R4, R5 ;
        /*0110*/               @P0 EXIT ;
        /*0120*/              @!P1 RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ;
"""


def test_opcodes_are_read_without_predicates_and_operands():
    assert opcodes(CODE) == ["LDC", "LDG.E.128.CONSTANT", "FADD", "EXIT", "RED.E.ADD.F32.FTZ.RN.STRONG.GPU"]


def test_uses_are_confirmed_refuted_or_left_open():
    states = {one.finding.technique: (one.state, one.opcode) for one in confirm(find("x.cu", SOURCE), CODE)}
    assert states == {
        "cuda-cpp": ("open", None),
        "vector-access": ("confirmed", "LDG.E.128.CONSTANT"),
        "warp-shuffle": ("refuted", None),
        "atomics": ("confirmed", "RED.E.ADD.F32.FTZ.RN.STRONG.GPU"),
    }


def test_code_without_instructions_refutes_nothing():
    assert {one.state for one in confirm(find("x.cu", SOURCE), "")} == {"open"}


def test_what_holds_no_cuda_is_not_compiled(monkeypatch):
    monkeypatch.setattr(machine_code, "compiler", lambda: "nvcc 0")
    with pytest.raises(ValueError, match="no CUDA"):
        compiled("x.py", "import triton\n", "sm_90a")


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(machine_code, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match="nvcc"):
        compiled("x.cu", SOURCE, "sm_90a")


def test_of_several_strings_only_what_was_compiled_is_told(monkeypatch):
    class Done:
        returncode, stderr = 0, ""

    def run(command, **of):
        Path(command[command.index("-o") + 1]).write_bytes(b"cubin")
        return Done

    monkeypatch.setattr(machine_code, "compiler", lambda: "nvcc 0")
    monkeypatch.setattr(machine_code.subprocess, "run", run)
    other = "__global__ void f(int* a)\n{\n    atomicAdd(a, 1);\n}\n"
    text = f'a = """\n{SOURCE}"""\nb = """\n{other}"""\n'
    made = compiled("x.py", text, "sm_90a")
    assert made.fact("x.py").reason == "nvcc 0, lines 1 to 10"
    told = {finding.line: made.holds(finding) for finding in find("x.py", text) if finding.technique == "atomics"}
    assert told == {8: True, 14: False}


@pytest.mark.skipif(machine_code.compiler() is None, reason="needs nvcc")
def test_compiled_is_a_fact_with_its_compiler():
    made = compiled("x.py", f'src = """{SOURCE}"""\n', "sm_90a")
    assert made.problem is None
    fact = made.fact("x.py")
    assert fact is not None
    assert (fact.kind, fact.arch, fact.reason) == ("compiled", "sm_90a", machine_code.compiler())
    failed = compiled("x.cu", '__global__ void k() { asm("tcgen05.wait::ld.sync.aligned;"); }\n', "sm_90a")
    assert failed.cubin is None
    assert failed.fact("x.cu") is None
    assert "tcgen05" in failed.problem or "error" in failed.problem
