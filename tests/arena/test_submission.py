"""Submissions: which files come along, headers, imports, and why this machine may be unable to run one."""

import doctest
import hashlib
import sys

import pytest

import nibblas.arena.submission
from nibblas.arena.new import new
from nibblas.arena.problem import ArenaError, read_task
from nibblas.arena.submission import (
    MAX_BYTES,
    imports,
    incompatibility,
    read_header,
    read_submission,
    static_findings,
    why_not,
)

KERNEL = "def custom_kernel(data):\n    return data\n"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return read_task(new("product", tmp_path_factory.mktemp("problems")))


@pytest.fixture
def submission_of(tmp_path, task):
    def read(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return read_submission(path, task)

    return read


def test_one_file_takes_the_name_that_the_problem_gives_it(submission_of):
    submission = submission_of("#!POPCORN leaderboard product\n#!POPCORN gpus B200 H100\n" + KERNEL)
    assert list(submission.files) == ["submission.py"]
    facts = submission.facts
    assert (facts.name, facts.leaderboard, facts.gpus) == ("mine.py", "product", ("B200", "H100"))
    assert facts.files == {"submission.py": hashlib.sha256(submission.files["submission.py"]).hexdigest()}


def test_a_folder_brings_its_files_but_not_hidden_ones(tmp_path, task):
    for name in ("submission.py", "kernels/add.cu", ".git/config", "__pycache__/x.pyc", "kernels/.swp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(read_submission(tmp_path, task).files) == ["submission.py", "kernels/add.cu"]


def test_the_problems_own_folder_is_a_submission(tmp_path):
    folder = new("product", tmp_path)
    (folder / "kernel.cu").write_text("")
    (folder / "task.yml").write_text((folder / "task.yml").read_text().replace("source: eval.py", "source: utils.py"))
    assert list(read_submission(folder, read_task(folder)).files) == ["submission.py", "kernel.cu"]


def test_a_file_of_the_problem_can_not_be_replaced(tmp_path, task):
    (tmp_path / "submission.py").write_text(KERNEL)
    (tmp_path / "utils.py").write_bytes(task.file("utils.py").content)
    assert list(read_submission(tmp_path, task).files) == ["submission.py"]
    (tmp_path / "utils.py").write_text("def check_close(*_): return True, ''\n")
    with pytest.raises(ArenaError, match=r"utils\.py is a file of the problem"):
        read_submission(tmp_path, task)


def test_what_can_not_be_read_is_refused(tmp_path, task, submission_of):
    with pytest.raises(ArenaError, match="no such file or folder"):
        read_submission(tmp_path / "gone.py", task)
    with pytest.raises(ArenaError, match=r"the folder has no submission\.py, which is what product calls"):
        read_submission(tmp_path, task)
    with pytest.raises(ArenaError, match=r"the suffix is '\.txt', product needs a \.py file"):
        submission_of(KERNEL, "mine.txt")
    with pytest.raises(ArenaError, match="larger than 16 MiB together"):
        submission_of("#" * (MAX_BYTES + 1))
    (tmp_path / "submission.py").write_text(KERNEL)
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(ArenaError, match="link: need plain files"):
        read_submission(tmp_path, task)


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("", (None, ())),
        ("// a comment\n//!POPCORN leaderboard x\n", ("x", ())),
        ("#!/usr/bin/env python\n#!POPCORN gpu A\n\n#!POPCORN leaderboard x\n", (None, ("A",))),
        ("import torch\n#!POPCORN leaderboard x\n", (None, ())),
        ("#!POPCORN LEADERBOARD x\n", ("x", ())),
    ],
)
def test_only_the_first_block_of_comments_is_a_header(text, header):
    assert read_header(text) == header


def test_a_header_behind_a_byte_order_mark(tmp_path, task):
    path = tmp_path / "bom.py"
    path.write_bytes(b"\xef\xbb\xbf#!POPCORN leaderboard add\n")
    assert read_submission(path, task).leaderboard == "add"


@pytest.mark.parametrize("line", ["leaderboard", "", "board x", "gpus"])
def test_a_wrong_directive_is_refused(line):
    with pytest.raises(ArenaError, match="need !POPCORN leaderboard NAME or !POPCORN gpus NAME"):
        read_header(f"#!POPCORN {line}\n")


def test_a_directive_given_twice_is_refused():
    with pytest.raises(ArenaError, match="the header gives gpus twice"):
        read_header("#!POPCORN gpu A\n#!POPCORN gpus B\n")


IMPORTS = """
import torch, numpy.linalg
from task import input_t
from submission import x
from . import y
try:
    import fast
except ImportError:
    import slow
try:
    import needed
finally:
    pass
if torch.cuda.is_available():
    import on_gpu
def f():
    import later
class C:
    import inside
"""


def test_imports_that_run_at_loading_and_those_it_can_do_without(submission_of):
    found = {(each.module, each.name): each.optional for each in imports(submission_of(IMPORTS))}
    assert found == {
        ("torch", None): False, ("numpy.linalg", None): False, ("task", "input_t"): False, ("fast", None): True,
        ("slow", None): True, ("needed", None): False, ("on_gpu", None): True, ("inside", None): False,
    }  # fmt: skip
    assert imports(submission_of("def broken(:")) == []


def test_a_missing_module_is_a_reason_with_its_line(submission_of, task):
    reason = why_not(submission_of("import torch\nfrom cutlass_of_tomorrow.cute import gemm\n"), task, "cpu")
    assert reason == "submission.py:2 imports cutlass_of_tomorrow.cute, which is not installed here"
    assert why_not(submission_of("try:\n    import missing_one\nexcept Exception:\n    pass\n"), task, "cpu") is None
    assert why_not(submission_of("from task import input_t\nimport reference, utils\n"), task, "cpu") is None


def test_a_missing_module_that_gives_exceptions_only_is_no_reason(submission_of, task):
    text = "from cutlass_of_tomorrow import OpError\ntry:\n    pass\nexcept OpError:\n    pass\n"
    assert why_not(submission_of(text), task, "cpu") is None
    assert why_not(submission_of(text + "print(OpError)\n"), task, "cpu") is not None


def test_a_stand_in_answers_for_a_module_but_only_for_the_names_it_has(submission_of, task, monkeypatch):
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    good = "from aiter import dtypes, QuantType\nfrom aiter.ops.shuffle import shuffle_weight\nimport aiter.mla\n"
    assert why_not(submission_of(good), task, "cpu") is None
    reason = why_not(submission_of("from aiter.ops.gemm_op_a4w4 import gemm_a4w4_asm"), task, "cpu")
    assert "imports aiter.ops.gemm_op_a4w4.gemm_a4w4_asm, which our stand-in for aiter lacks (AMD's kernels" in reason
    reason = why_not(submission_of("from aiter.ops.shuffle import shuffle_everything"), task, "cpu")
    assert "aiter.ops.shuffle.shuffle_everything" in reason
    assert why_not(submission_of(good), task, "cpu", stands_in=lambda module, name: False) is not None


@pytest.mark.parametrize(
    ("flags", "runs_on"),
    [
        ("'-gencode=arch=compute_100a,code=sm_100a'", {"sm_100"}),
        ("'-gencode', 'arch=compute_90a,code=sm_90a'", {"sm_90"}),
        ("'-arch=sm_80'", {"sm_80", "sm_86"}),
        ("'-gencode=arch=compute_80,code=compute_80'", {"sm_80", "sm_86", "sm_90", "sm_100", "sm_120"}),
        ("'-arch=sm_90a', '-gencode=arch=compute_100a,code=sm_100a'", {"sm_90", "sm_100"}),
        ("'--offload-arch=gfx942', '-O3'", {"gfx942"}),
        (
            "'-O3', 'sm_100a', 'kernel for arch=sm_100a'",
            {"cpu", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942"},
        ),
    ],
)
def test_targets_named_to_a_compiler(submission_of, task, flags, runs_on):
    submission = submission_of(f"import torch\nFLAGS = [{flags}]\n")
    archs = ("cpu", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
    assert {arch for arch in archs if why_not(submission, task, arch) is None} == runs_on
    if "cpu" not in runs_on:
        assert why_not(submission, task, "cpu").startswith("submission.py:2 compiles for ")
        assert why_not(submission, task, "cpu").endswith(" only, this is a CPU")


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['TORCH_CUDA_ARCH_LIST'] = '9.0a 10.0a'\n",
        "import os\nos.environ.setdefault('TORCH_CUDA_ARCH_LIST', '9.0a;10.0a')\n",
    ],
)
def test_an_architecture_list_in_the_environment(submission_of, task, text):
    assert why_not(submission_of(text), task, "sm_90") is None
    assert "submission.py:2 compiles for sm_100a, sm_90a only, this" in why_not(submission_of(text), task, "sm_86")
    assert why_not(submission_of(text.replace("10.0a", "8.0+PTX")), task, "sm_120") is None


def test_a_version_is_no_architecture(submission_of, task):
    text = (
        "VERSION = '1.0'\nFLAGS = ['-O3', '-DVERSION=9.0', f'-arch=sm_{100}a', '-arch=native']\nprint('9.0', '8.6')\n"
    )
    assert why_not(submission_of(text), task, "cpu") is None


def test_options_are_found_in_a_file_that_has_lost_its_indentation(submission_of, task):
    text = "def f():\nreturn 1\nload(flags=['-gencode=arch=compute_100a,code=sm_100a'])\n"
    assert "submission.py:3 compiles for compute_100a, sm_100a only" in why_not(submission_of(text), task, "sm_90")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("load_inline(name='x', cpp_sources='', cuda_sources=SOURCE)", True),
        ("torch.utils.cpp_extension.load_inline('x', cpp_sources=SOURCE, cuda_sources=['a', 'b'])", True),
        ("load('x', sources=['a.cpp', 'b.cu'])", True),
        ("load_inline('x', cpp_sources=SOURCE, cuda_sources=[])", False),
        ("load_inline('x', cpp_sources=SOURCE)", False),
        ("load('x', sources=['a.cpp'])", False),
    ],
)
def test_code_for_a_gpu_can_not_be_compiled_for_a_cpu(submission_of, task, call, reason):
    submission = submission_of(f"SOURCE = ''\n{call}\n")
    expected = "submission.py:2 compiles code for a GPU, this is a CPU" if reason else None
    assert why_not(submission, task, "cpu") == expected
    assert why_not(submission, task, "sm_90") is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("ModuleNotFoundError", "No module named 'cutlass.utils'"),
        ("ImportError", "cannot import name 'gemm_a4w4_asm' from 'aiter' (unknown location)"),
        ("AssertionError", "Torch not compiled with CUDA enabled"),
        ("RuntimeError", "0 active drivers ([]). There should only be one."),
        ("RuntimeError", "Tried to instantiate dummy base class CUDAGraph"),
        ("RuntimeError", "CUDA error: no kernel image is available for execution on the device"),
        ("RuntimeError", "ptxas /tmp/a.ptx, line 9; error: Instruction 'tcgen05.mma' not supported on .target 'sm_90'"),
        ("OSError", "CUDA_HOME environment variable is not set. Please set it to your CUDA install root."),
        ("NotImplementedError", "nibblas' stand-in for aiter's gemm_a4w4 takes no bias, alpha or beta"),
    ],
)
def test_errors_that_are_the_machines(submission_of, task, error, message):
    assert message[:60] in incompatibility(error, message, submission_of(KERNEL), task)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("ModuleNotFoundError", "No module named 'reference'"),
        ("ModuleNotFoundError", "No module named 'submission.kernels'"),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
        ("AssertionError", "a is not contiguous"),
        ("ImportError", ""),
    ],
)
def test_errors_that_are_the_submissions(submission_of, task, error, message):
    assert incompatibility(error, message, submission_of(KERNEL), task) is None


def test_kernelguard_is_heard_and_decides_nothing(submission_of):
    patched = "import torch\nclass Event(torch.cuda.Event):\n    def elapsed_time(self, other): return 1e-3\n"
    findings = static_findings(submission_of(patched + "torch.cuda.Event = Event\n" + KERNEL))
    assert {finding.severity for finding in findings} == {"info"}
    assert any("TIMER_MONKEYPATCH" in finding.what for finding in findings)
    assert all(finding.evidence["version"] for finding in findings)
    (clean,) = static_findings(submission_of("def custom_kernel(data):\n    return data[0] + data[1]\n"))
    assert clean.evidence["should_filter"] is False


def test_kernelguard_may_be_missing_or_fail(submission_of, monkeypatch):
    import kernelguard

    submission = submission_of(KERNEL)
    monkeypatch.setattr(kernelguard, "analyze_code", lambda *_, **__: 1 / 0)
    assert "kernelguard failed: ZeroDivisionError" in static_findings(submission)[0].what
    monkeypatch.setitem(sys.modules, "kernelguard", None)
    assert "kernelguard is not installed" in static_findings(submission)[0].what


def test_examples():
    assert doctest.testmod(nibblas.arena.submission).failed == 0
