"""Wrong answers are made as they should be, and a problem whose check takes one is told so."""

import io
import math
import re
import shutil

import pytest
import torch
from rich.console import Console

from nibblas.arena.lint import CaseLint, lint_problem, print_lint
from nibblas.arena.mutants import MUTANTS, Situation
from nibblas.arena.problem import ArenaError

FP4 = torch.float4_e2m1fn_x2
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def mutant(name, data, ref, outputs=()):
    right = ref(data)
    return BY_NAME[name].make(Situation(data, right, ref(tuple(t + 1 for t in data)), ref, outputs)), right


def double(data):
    return data[0] * 2


def test_faults_in_the_output():
    x = torch.tensor([1.0, -2.0, 3.0, 4.0])
    for name, expected in {
        "all zeros": [0, 0, 0, 0],
        "every second element zero": [2, 0, 6, 0],
        "answer to another seed": [4, -2, 8, 10],
        "input passed through": [1, -2, 3, 4],
    }.items():
        found, right = mutant(name, (x,), double)
        assert found.tolist() == expected, name
        assert right.tolist() == [2, -4, 6, 8]
    found, right = mutant("one element off", (x,), double)
    assert (found - right).tolist() == pytest.approx([0, 0, 0, math.sqrt(30)])
    found, _ = mutant("all NaN", (x,), double)
    assert found.isnan().all()
    assert mutant("one element off", (torch.tensor([1, 2]),), double)[0].tolist() == [2, 5]


def test_the_structure_of_the_output_stays():
    found, _ = mutant("all zeros", (torch.ones(2),), lambda data: (data[0] * 2, {"n": torch.tensor([3])}))
    assert found[0].tolist() == [0, 0]
    assert found[1]["n"].tolist() == [0]


def test_rounding():
    x = torch.tensor([1 + 1 / 8, 1 + 1 / 16, 1 + 1 / 256, -1 - 3 / 16])
    assert mutant("output rounded to 4 bits", (x,), lambda data: data[0])[0].tolist() == [1.125, 1.0, 1.0, -1.25]
    assert mutant("inputs rounded to 4 bits", (x,), double)[0].tolist() == [2.25, 2.0, 2.0, -2.5]
    assert mutant("output rounded to bf16", (x,), double)[0].tolist() == x.mul(2).bfloat16().float().tolist()
    assert mutant("output rounded to bf16", (x.bfloat16(),), double)[0] is None


def test_half_of_the_inputs():
    data = (torch.ones(2, 4), torch.ones(4))
    found, _ = mutant("second half of the inputs ignored", data, lambda data: data[0] * data[1])
    assert found.tolist() == [[1, 1, 0, 0]] * 2
    assert data[0].sum() == 8


def fp4_situation():
    codes = torch.tensor([0x21, 0xE7], dtype=torch.uint8).view(FP4)
    scale = torch.tensor([3.0, 1.0]).to(torch.float8_e4m3fn)

    def ref(data):
        return torch.stack([data[0].view(torch.uint8).float(), data[1].float()])

    return Situation((codes, scale), ref((codes, scale)), None, ref, ())


@pytest.mark.parametrize(
    ("name", "codes", "scales"),
    [
        ("high nibbles ignored", [0x01, 0x07], [3, 1]),
        ("low nibbles ignored", [0x20, 0xE0], [3, 1]),
        ("signs of FP4 ignored", [0x21, 0x67], [3, 1]),
        ("FP4 above 1.5 taken for less", [0x21, 0xA3], [3, 1]),
        ("scales ignored", [0x21, 0xE7], [1, 1]),
        ("mantissas of scales ignored", [0x21, 0xE7], [2, 1]),
        ("second half of the inputs ignored", [0x21, 0], [3, 1]),
    ],
)
def test_faults_in_reading_fp4(name, codes, scales):
    assert BY_NAME[name].make(fp4_situation()).tolist() == [codes, scales]


def test_what_makes_no_sense_is_no_mutant():
    x = torch.ones(1)
    for name in ("every second element zero", "high nibbles ignored", "scales ignored", "output argument not written"):
        assert mutant(name, (x,), double)[0] is None, name

    def ref(data):
        raise IndexError

    broken = Situation((torch.ones(4),), x, None, ref, ())
    assert BY_NAME["second half of the inputs ignored"].make(broken) is None


def test_output_arguments_are_not_passed_through_but_may_be_left_unwritten():
    data = (torch.ones(2, 2), torch.full((2,), 7.0))

    def ref(data):
        return data[1].copy_(data[0].sum(0)).clone()

    s = Situation(data, torch.tensor([2.0, 2.0]), None, ref, ("data[1]",))
    assert BY_NAME["input passed through"].make(s) is None
    assert BY_NAME["output argument not written"].make(s).tolist() == [7, 7]


# --- a problem -----------------------------------------------------------------------------------------------------

REFERENCE = """
import os

import torch


def generate_input(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(6, 6, generator=generator) for _ in range(2))
    if kind == "dies":
        os._exit(3)
    if kind == "raises":
        raise RuntimeError("out of luck")
    if kind == "blind":
        x = x * 0
    if kind == "unseeded":
        x = x + int.from_bytes(os.urandom(4))
    if kind == "fp4":
        x = torch.randint(4, (6, 4), generator=generator, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        y = torch.randint(1, 3, (6, 4), generator=generator).to(torch.float8_e4m3fn)
    return x, y, kind


def ref_kernel(data):
    x, y, kind = data
    if kind == "fp4":
        return (x.view(torch.uint8) & 15).float() * y.float() + (x.view(torch.uint8) >> 4).float()
    if kind == "writes":
        y += 1
    return x @ y


def check_implementation(data, output):
    kind = data[2]
    if kind == "picky":
        return False, "not today"
    tolerance = 100.0 if kind == "lax" else 1e-4
    return torch.allclose(output, ref_kernel(data), rtol=0, atol=tolerance), ""
"""
KINDS = ("good", "dies", "raises", "blind", "unseeded", "fp4", "writes", "picky", "lax", "good")
TASK = """
lang: py
description: of many kinds
config: {main: eval.py}
files:
  - {name: submission.py, source: "@SUBMISSION@"}
  - {name: reference.py, source: reference.py}
  - {name: eval.py, source: eval.py}
"""


@pytest.fixture(scope="module")
def linted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "eval.py").write_text("")
    cases = "".join(f"  - {{kind: {kind}, seed: 3}}\n" for kind in KINDS)
    (folder / "task.yml").write_text(f"{TASK}tests:\n{cases}")
    return lint_problem(folder)


def of_kind(linted, kind):
    return linted[KINDS.index(kind)]


def test_a_good_case(linted):
    case = of_kind(linted, "good")
    assert (case.text, case.weak, case.faults, case.gaps) == ("kind: good; seed: 3", (), (), ())
    assert case.mutants["all zeros"] == case.mutants["inputs rounded to 4 bits"] == "refused"
    assert case.mutants["high nibbles ignored"] == "none"
    assert 0 < case.tolerance < 1e-3


def test_the_answer_is_zero_whatever_a_kernel_does(linted):
    found = of_kind(linted, "blind")
    assert found.mutants["all zeros"] == "unseen"
    assert found.tolerance is None
    assert {"all zeros", "answer to another seed"} <= set(found.weak)


def test_faults_that_the_inputs_never_reach(linted):
    found = of_kind(linted, "fp4")
    assert {"high nibbles ignored", "signs of FP4 ignored", "mantissas of scales ignored"} <= set(found.weak)
    assert found.mutants["low nibbles ignored"] == found.mutants["scales ignored"] == "refused"
    assert "data[0]: only 4 of 16 codes in low nibbles (0123), 1 of 16 codes in high nibbles (0)" in found.gaps


def test_a_check_that_takes_anything(linted):
    found = of_kind(linted, "lax")
    assert "all zeros" in found.weak
    assert "the tolerance is as wide as the answer's RMS" in found.faults


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("raises", "RuntimeError: out of luck"),
        ("unseeded", "generate_input gives other inputs for the same seed"),
        ("writes", r"the reference writes to data\[1\] and does not return it"),
        ("picky", "the check refuses the reference's own answer: not today"),
        ("dies", r"the process ended \(3\)"),
    ],
)
def test_faults_of_the_problem_itself(linted, kind, fault):
    assert any(re.match(fault, found) for found in of_kind(linted, kind).faults)


def test_a_case_that_is_there_twice(linted):
    assert linted[-1].faults == ("repeats test 0",)
    assert len(linted) == len(KINDS)


def test_a_case_that_takes_too_long(tmp_path):
    (tmp_path / "reference.py").write_text(
        "import time\ncheck_implementation = None\ndef generate_input(n): time.sleep(60)\n"
    )
    (tmp_path / "eval.py").write_text("")
    (tmp_path / "task.yml").write_text(f"{TASK}tests:\n  - {{n: 1}}\n")
    (found,) = lint_problem(tmp_path, budget=0.1, starting=6.0)
    assert found.faults == ("took longer than 0.3 s",)


def test_the_table_names_faults_and_cases(linted):
    console = Console(width=100, record=True, file=io.StringIO())
    print_lint(linted, console)
    text = console.export_text()
    assert re.search(r"all zeros +in test 3, test 8 +the check takes it|all zeros +in test \d", text)
    assert re.search(r"high nibbles ignored +in test 5 +no input shows it", text)
    assert "in test 1: the process ended (3)" in text


def test_hostile_text_is_printed_as_text():
    console = Console(width=100, record=True, file=io.StringIO())
    print_lint([CaseLint("test", "[bold]", {}, ("\x1b[31m[red]x[/red]",))], console)
    assert "\ufffd[31m[red]x[/red]" in console.export_text()


def test_a_problem_that_can_not_be_loaded_is_told_so_for_each_case(tmp_path):
    (tmp_path / "reference.py").write_text("import no_such_module\ngenerate_input = check_implementation = None\n")
    (tmp_path / "eval.py").write_text("")
    (tmp_path / "task.yml").write_text(f"{TASK}tests:\n  - {{n: 1}}\n  - {{n: 2}}\n")
    first, second = lint_problem(tmp_path)
    assert first.faults == second.faults
    assert "can't be loaded: ModuleNotFoundError: No module named 'no_such_module'" in first.faults[0]


def test_a_problem_in_cpp(tmp_path):
    (tmp_path / "eval.cu").write_text("")
    text = (
        TASK.replace("lang: py", "lang: cu")
        .replace("main: eval.py", "sources: [eval.cu]")
        .replace("eval.py", "eval.cu")
    )
    lines = [line for line in text.splitlines() if "reference.py" not in line]
    (tmp_path / "task.yml").write_text("\n".join(lines))
    with pytest.raises(ArenaError, match=r"lint needs a reference\.py"):
        lint_problem(tmp_path)


def test_a_problem_without_cases(tmp_path, problem):
    directory = tmp_path / "empty"
    shutil.copytree(problem("vector_add"), directory)
    text = (directory / "task.yml").read_text()
    (directory / "task.yml").write_text("".join(line for line in text.splitlines(True) if "seed:" not in line))
    with pytest.raises(ArenaError, match="neither tests nor benchmarks"):
        lint_problem(directory)


def test_a_folder_that_is_no_problem(tmp_path):
    with pytest.raises(ArenaError, match=r"no task\.yml here"):
        lint_problem(tmp_path)
