"""What sources require, line by line, and what follows for a device."""

import pytest

pytest.importorskip("tree_sitter_cuda")

from nibblas.index import compat, rule
from nibblas.index.compat import covers, declared, device, required, runs_on
from nibblas.index.model import CompatFact

PATHS = {"python": "x.py", "c++": "x.cu", "ptx": "x.ptx", "gcn": "x.s"}
H200, B200, B300 = (compat.hardware()[name] for name in ("H200", "B200", "B300"))
MI355X = compat.hardware()["MI355X"]

CONVERTS = """\
__global__ void k(unsigned short* a) {
  asm("cvt.rn.f16x2.e2m1x2 %0, %1;" : "=r"(x) : "h"(a[0]));
}
"""
BUILT = f'''\
import torch
from torch.utils.cpp_extension import load_inline
m = load_inline(name="m", cuda_sources="""{CONVERTS}""",
    extra_cuda_cflags=["-gencode=arch=compute_100a,code=sm_100a"])
'''


def answers(text: str, on, *facts: CompatFact, path: str = "x.py"):
    return runs_on([(path, one) for one in required(path, text)], facts, on)


@pytest.mark.parametrize("which", rule.rules("requirement"), ids=lambda which: which.id)
def test_rule_finds_its_hits_and_not_its_misses(which):
    def found(text):
        return any(one.rule == which.id for name in which.languages for one in required(PATHS[name], text))

    assert which.hits
    assert which.misses
    assert all(map(found, which.hits))
    assert not any(map(found, which.misses))
    assert which.data["source"]
    assert ("arch" in which.data) != ("needs" in which.data)


@pytest.mark.parametrize(
    ("arch", "on", "expected"),
    [
        ("sm_90a", "sm_100", False),
        ("sm_90a sm_100f", "sm_100", True),
        ("gfx942 gfx950", "gfx950", True),
        ("nvidia", "sm_90", True),
        ("amd", "sm_90", False),
        ("sm_90+", "gfx950", False),
    ],
)
def test_covers(arch, on, expected):
    assert covers(arch, on) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("nvidia b200", "B200"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("AMD Instinct MI355X OAM", "MI355X"),
        ("GB200", "GB200"),
        ("a toaster", None),
    ],
)
def test_device(name, expected):
    found = device(name)
    assert (found.name if found else None) == expected


def test_every_device_has_a_known_architecture():
    assert {one.arch for one in compat.hardware().values()} <= set(compat.architectures())
    assert all(one.source for one in (*compat.hardware().values(), *compat.architectures().values()))


def test_a_flag_and_an_instruction_are_cited_by_line():
    found = {(one.kind, one.arch, one.line) for one in required("x.py", BUILT)}
    assert ("build", "sm_100a", 7) in found
    assert ("instruction", "sm_100f sm_110f sm_120f", 4) in found


def test_no_names_the_line():
    answer = answers(BUILT, H200)
    assert (answer.answer, answer.line) == ("no", 7)
    assert answers(BUILT, B300).answer == "no"
    answer = answers(CONVERTS, H200, path="x.cu")
    assert (answer.answer, answer.line) == ("no", 2)
    assert "e2m1x2" in answer.reason


def test_what_is_built_for_a_family_runs_on_no_other():
    text = 'm = load_inline(extra_cuda_cflags=["-gencode=arch=compute_100f,code=[sm_100f,compute_100f]"])\n'
    assert answers(text, B300).answer == "unknown"
    for name in ("RTX 5090", "GB10"):
        answer = answers(text, compat.hardware()[name])
        assert (answer.answer, answer.line) == ("no", 1)
        assert "built for sm_100f or compute_100f" in answer.reason


def test_only_a_measurement_makes_a_yes():
    assert answers(BUILT, B200).answer == "unknown"
    assert answers(BUILT, B200, CompatFact("declared", gpu="NVIDIA B200")).answer == "unknown"
    assert answers(BUILT, B200, CompatFact("compiled", arch="sm_100a", reason="nvcc 13.0")).answer == "unknown"
    assert answers(BUILT, B200, CompatFact("measured", gpu="NVIDIA B200")).answer == "yes"
    assert answers(BUILT, B200, CompatFact("refused", gpu="NVIDIA B200", reason="it crashed")).answer == "no"


def test_a_run_and_a_refusal_leave_it_unknown():
    both = CompatFact("measured", gpu="B200"), CompatFact("refused", gpu="B200", reason="it crashed")
    assert answers(BUILT, B200, *both).answer == "unknown"


def test_a_run_on_a_sibling_is_told_but_is_no_yes():
    answer = answers("import torch\n", H200, CompatFact("measured", gpu="NVIDIA H100"))
    assert answer.answer == "unknown"
    assert "H100" in answer.reason


def test_code_that_nothing_calls_requires_nothing():
    text = '__device__ void f() { asm("wgmma.fence.sync.aligned;"); }\n__global__ void k() {}\n'
    assert not [one for one in required("x.cu", text) if one.arch]


def test_code_for_some_architectures_only_is_no_certain_need():
    text = '__global__ void k() {\n#if __CUDA_ARCH__ >= 900\n  asm("griddepcontrol.wait;");\n#endif\n}\n'
    assert [one.certain for one in required("x.cu", text) if one.rule == "sm-90-instructions"] == [False]
    assert answers(text, compat.hardware()["A100"], path="x.cu").answer == "unknown"


def test_code_for_several_architectures_is_unknown_on_each():
    text = (
        '__global__ void a() { asm("wgmma.fence.sync.aligned;"); }\n'
        '__global__ void b() { asm("tcgen05.wait::ld.sync.aligned;"); }\n'
    )
    assert answers(text, H200, path="x.cu").answer == "unknown"
    assert "several architectures" in answers(text, H200, path="x.cu").reason


def test_vendors_by_import():
    assert answers("import aiter\n", H200).answer == "no"
    assert answers("import aiter\n", MI355X).answer == "unknown"
    assert answers("try:\n    import aiter\nexcept ImportError:\n    aiter = None\n", H200).answer == "unknown"


@pytest.mark.parametrize(
    "text",
    [
        'if arch == "sm_90a":\n    go()\n',
        'fast = arch == "sm_90a"\n',
        'if arch in ("sm_80", "sm_90a"):\n    go()\n',
        'raise RuntimeError("build it with -arch=sm_90a")\n',
        'raise RuntimeError(\n    "build it with -arch=sm_90a"\n)\n',
        'logging.warning("slow without -arch=sm_90a")\n',
    ],
)
def test_a_flag_that_is_compared_or_told_builds_nothing(text):
    assert required("x.py", text) == []
    assert answers(text, B200).answer == "unknown"


@pytest.mark.parametrize(
    "text",
    ['flags = ["-arch=sm_90a"]\n', 'for arch in ["sm_90a"]:\n    go()\n', 'if fast: flags = ["-arch=sm_90a"]\n'],
)
def test_a_flag_builds(text):
    assert answers(text, B200).answer == "no"


@pytest.mark.parametrize(
    ("flag", "needs"),
    [
        ("-arch=sm_90", ["cuda>=11.8"]),
        ("-arch=sm_90a", ["cuda>=12.0"]),
        ("-gencode=arch=compute_100f,code=[sm_100f,compute_103]", ["cuda>=12.8", "cuda>=12.9"]),
        ("-arch=sm_80", []),
        ("--offload-arch=gfx950", []),
    ],
)
def test_a_flag_needs_the_first_toolkit_that_builds_for_its_targets(flag, needs):
    found = required("x.py", f'flags = ["{flag}"]\n')
    assert sorted(one.needs for one in found if one.rule == "build-toolkit") == needs


def test_an_import_after_a_condition_is_no_certain_need():
    assert answers("if torch.version.hip: import aiter\n", H200).answer == "unknown"


def test_one_side_of_an_else_is_no_certain_need():
    text = (
        '#ifdef FAST\n__global__ void k() { asm("wgmma.fence.sync.aligned;"); }\n'
        "#else\n__global__ void k() {}\n#endif\n"
    )
    assert answers(text, B200, path="x.cu").answer == "unknown"
    (fact,) = [one.fact() for one in required("x.cu", text) if one.arch]
    assert fact.reason.endswith("it is one of several ways")
    assert answers(text.replace("#else\n__global__ void k() {}\n", ""), B200, path="x.cu").answer == "no"


def test_what_is_not_native_is_no_hindrance():
    text = "import triton.language as tl\nacc = tl.dot_scaled(a, s, 'e2m1', b, t, 'e2m1', acc)\n"
    answer = answers(text, H200)
    assert (answer.answer, answer.line) == ("unknown", 2)


def test_versions():
    assert {one.needs for one in required("x.py", "# needs triton>=3.4, <4\nimport triton\n")} == {
        "triton>=3.4,<4",
        "triton",
    }
    text = "void f() { auto g = (PFN_cuTensorMapEncodeTiled)p; }\n"
    assert {one.needs for one in required("x.cu", text)} == {"cuda<13"}


def test_directives_declare_devices():
    facts = declared("x.py", "#!POPCORN leaderboard gemv\n#!POPCORN gpus B200 H100\n")
    assert [(fact.kind, fact.gpu, fact.line) for fact in facts] == [("declared", "B200", 2), ("declared", "H100", 2)]


@pytest.mark.parametrize(
    "text", ["", "\0", "-gencode=arch=", "import", '"sm_"', "#if\n#endif\n#endif\n" * 99, "#" * 9999]
)
def test_broken_sources_are_read(text):
    for path in ("x.py", "x.cu", "x.ptx", "x.txt"):
        assert isinstance(required(path, text), list)
