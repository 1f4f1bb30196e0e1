"""That an implementation compiles, and what its machine code says, kept with it."""

import json

import pytest
from made_up import make_item
from starlette.testclient import TestClient

from nibblas.index import machine_code, scan
from nibblas.index.api import create_app
from nibblas.index.compilation import Outcome, compile_stored
from nibblas.index.machine_code import Compiled
from nibblas.index.model import CompatFact

CUDA = b'''source = r"""
__global__ void sum(const float4* in, float* out) {
    float4 v = in[threadIdx.x];
    float s = __shfl_xor_sync(0xffffffff, v.x, 1);
    atomicAdd(out, s);
}
"""
'''
CODE = """
        /*0090*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0120*/                   RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ;
"""
SLUG = "kernelbot-toy-gemv-1"


@pytest.fixture
def kept(store, monkeypatch):
    """A store with one implementation in CUDA, and a compiler that takes sm_100a alone."""

    def compiled(path, text, arch):
        if "__global__" not in text:
            raise ValueError(f"{path}: no CUDA")
        return Compiled(arch, "nvcc 13.0", *((b"", None) if arch == "sm_100a" else (None, "error: no such arch")))

    monkeypatch.setattr(machine_code, "compiled", compiled)
    monkeypatch.setattr(machine_code, "disassembler", lambda: "nvdisasm")
    monkeypatch.setattr(machine_code, "disassembled", lambda cubin: CODE)
    item = make_item(code=CUDA)
    store.add(item, {"submission.py": scan.scan("submission.py", CUDA)})
    return store


def said(store) -> dict[str, dict]:
    rows = store.connection.execute("SELECT body FROM finding WHERE topic = 'technique'")
    bodies = [json.loads(body) for (body,) in rows]
    return {body["technique"]: body["machine_code"] for body in bodies if "machine_code" in body}


def test_a_compile_is_a_fact_and_confirms_findings(kept):
    assert compile_stored(kept, SLUG, "sm_100a") == [Outcome("submission.py", "sm_100a", "nvcc 13.0", None, 2, 1)]
    facts = kept.facts(kept.subject(SLUG))
    assert facts[-1] == CompatFact("compiled", arch="sm_100a", reason="nvcc 13.0", path="submission.py")
    by = "nvcc 13.0 for sm_100a"
    assert said(kept) == {
        "vector-access": {"state": "confirmed", "opcode": "LDG.E.128", "by": by},
        "atomics": {"state": "confirmed", "opcode": "RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "by": by},
        "warp-shuffle": {"state": "refuted", "opcode": None, "by": by},
    }
    with TestClient(create_app(kept.path), base_url="http://localhost") as client:
        page = client.get(f"/implementations/{SLUG}").text
    assert f"confirmed by LDG.E.128 in the machine code of {by}" in page
    assert f"no such instruction in the machine code of {by}" in page
    compile_stored(kept, SLUG, "sm_100a")
    assert kept.facts(kept.subject(SLUG)) == facts
    assert kept.check() == []


def test_machine_code_says_nothing_of_what_was_not_compiled(kept, monkeypatch):
    monkeypatch.setattr(
        machine_code, "compiled", lambda path, text, arch: Compiled(arch, "nvcc 13.0", b"", None, (3, 4))
    )
    (outcome,) = compile_stored(kept, SLUG, "sm_100a")
    assert (outcome.confirmed, outcome.refuted) == (1, 1)
    assert set(said(kept)) == {"vector-access", "warp-shuffle"}


def test_what_does_not_compile_here_is_no_fact(kept):
    (outcome,) = compile_stored(kept, SLUG, "sm_20")
    assert outcome.problem == "error: no such arch"
    assert "compiled" not in [fact.kind for fact in kept.facts(kept.subject(SLUG))]
    assert said(kept) == {}


def test_without_a_disassembler(kept, monkeypatch):
    monkeypatch.setattr(machine_code, "disassembler", lambda: None)
    (outcome,) = compile_stored(kept, SLUG, "sm_100a")
    assert (outcome.confirmed, outcome.refuted) == (None, None)
    assert said(kept) == {}
    assert "compiled" in [fact.kind for fact in kept.facts(kept.subject(SLUG))]


def test_what_can_not_be_compiled(kept):
    kept.add(make_item(2))
    with pytest.raises(ValueError, match="none of its files holds CUDA"):
        compile_stored(kept, "kernelbot-toy-gemv-2", "sm_100a")
    with pytest.raises(KeyError, match="no implementation"):
        compile_stored(kept, "nothing", "sm_100a")
