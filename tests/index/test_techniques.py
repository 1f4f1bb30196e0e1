"""Technique findings: each rule by its own examples, sources of our own line by line, and mentions apart from uses."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("tree_sitter_cuda")

from nibblas.index import rule, techniques
from nibblas.index.techniques import TechniqueFinding, find

SOURCES = Path(__file__).parent / "sources"
PATHS = {"python": "x.py", "c++": "x.cu", "cuda": "x.cu", "hip": "x.hip", "ptx": "x.ptx", "gcn": "x.s"}
RULES = rule.rules("rule")


def places(findings: list[TechniqueFinding], kind: str | None = None) -> list[tuple[str, int]]:
    return [(one.technique, one.line) for one in findings if kind in (None, one.kind)]


def used_by(which: rule.Rule, text: str) -> bool:
    """Whether a rule finds a use in a text, in that of its languages that the text is in."""
    both = {"python", "c++"} <= set(which.languages)
    other = "python" if re.search(r"[;}]\s*$|#include", text) else "c++"
    found = [one for name in which.languages if not (both and name == other) for one in find(PATHS[name], text)]
    return any(one.rule == which.id and one.kind == "use" for one in found)


@pytest.mark.parametrize("which", RULES, ids=lambda which: which.id)
def test_rule_finds_its_hits_and_not_its_misses(which):
    assert which.misses, "a rule needs a near miss"
    uses = which.finding in ("", "use") and set(which.on) - techniques._DECLARING
    assert which.hits or not uses, "a rule that can find a use needs a hit"
    for hit in which.hits:
        assert used_by(which, hit), hit
    for miss in which.misses:
        assert not used_by(which, miss), miss


def test_rules_name_techniques_and_are_told_apart():
    assert len({which.id for which in RULES}) == len(RULES)
    assert {which.data["technique"] for which in RULES} == set(rule.techniques())
    assert all(which.version >= 1 for which in RULES)
    assert all(set(which.data) == {"technique"} for which in RULES), "a misspelt key would be kept without effect"


@pytest.mark.parametrize("which", [*RULES, *rule.rules("requirement")], ids=lambda which: which.id)
def test_every_name_that_a_rule_matches_is_wanted(which):
    if rule._NAMES.isdisjoint(which.on) or which.on == ("specifier",):
        pytest.skip("looks at no names")

    @settings(max_examples=25, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.from_regex(re.compile(which.match.pattern, re.ASCII), fullmatch=True))
    def check(name):
        assert len(name) > 200 or rule.interesting().search(name.lower()), name

    check()


@pytest.mark.parametrize("technique", rule.techniques().values(), ids=lambda technique: technique.id)
def test_phrases_hold_one_of_their_words(technique):
    for phrase in technique.prose:

        @settings(
            max_examples=15, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        @given(st.from_regex(phrase))
        def check(text):
            assert any(word in text.lower() for word in technique.words), text

        check()


def expected(path: Path) -> set[tuple[str, int, str]]:
    """What a source says of itself: the table beside it, a line a finding."""
    rows = path.with_suffix(path.suffix + ".tsv").read_text().splitlines()
    return {(technique, int(line), kind) for technique, line, kind in (row.split("\t") for row in rows)}


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.*[!v]")), ids=lambda path: path.name)
def test_sources_line_by_line(path):
    found = {(one.technique, one.line, one.kind) for one in find(path.name, path.read_text())}
    assert found == expected(path)


WRAPPED = """\
__device__ void mbarrier_arrive(uint64_t* bar)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar));
}
__device__ void mbarrier_inval(uint64_t* bar)
{
    asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(bar));
}
__global__ void kernel(uint64_t* bar) { mbarrier_arrive(bar); }
"""


def test_a_wrapper_is_a_declaration_and_its_instruction_a_use_where_it_is_called():
    found = {(one.line, one.kind) for one in find("x.cu", WRAPPED) if one.technique == "mbarrier"}
    assert found == {(1, "declaration"), (3, "use"), (5, "declaration"), (7, "declaration"), (9, "use")}
    unused = next(one for one in find("x.cu", WRAPPED) if one.line == 7 and one.technique == "mbarrier")
    assert unused.detail.endswith("in mbarrier_inval, which nothing calls")


def test_what_only_prepares_or_names_is_a_declaration():
    text = "def prepare_for_tma(s):\n    return s\ns = prepare_for_tma(s)\nd = tma_descriptor(s)\n"
    assert places(find("x.py", text), "declaration") == [("tma", 1), ("tma", 3)]
    assert places(find("x.py", text), "use") == [("tma", 4)]
    text = "void f(void* p) {\n  auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled>(p);\n  encode(p);\n}\n"
    assert places(find("x.cu", text)) == [("tma", 2)]
    assert places(find("x.cu", text), "declaration") == [("tma", 2)]


def test_an_alias_in_python_is_a_declaration_and_what_it_is_used_in_a_use():
    text = "import cutlass\nab = cutlass.Float4E2M1FN\ndef f(p):\n    return make_ptr(ab, p)\n"
    assert [(one.line, one.kind) for one in find("x.py", text)][-2:] == [(2, "declaration"), (4, "use")]
    parameter = text.replace("def f(p)", "def f(p, ab)")
    again = text + "ab = choose()\n"
    for other in (parameter, again):
        assert ("fp4", 4) not in places(find("x.py", other)), "not the name that the module binds once"


def test_a_long_list_of_numbers_takes_no_time():
    start = time.process_time()
    find("x.py", "TABLE = [" + "12345, " * 200 + "]\n")
    assert time.process_time() - start < 2


def test_an_operator_that_is_declared_hides_nothing():
    text = "struct S { int x; };\nS operator*(S a, S b);\n__global__ void k(float* p) { atomicAdd(p, 1.f); }\n"
    assert ("atomics", 3) in places(find("x.cu", text), "use")


def test_a_submission_is_entered_at_its_entry_point_only():
    text = "import triton\nimport triton.language as tl\n@triton.jit\ndef k(p):\n    tl.atomic_add(p, 1)\n"
    assert ("atomics", 5) in places(find("x.py", text), "use")
    whole = text + "def custom_kernel(data):\n    return data\n"
    assert ("atomics", 5) in places(find("x.py", whole), "declaration")
    called = text + "def custom_kernel(data):\n    k[(1,)](data)\n"
    assert ("atomics", 5) in places(find("x.py", called), "use")


def test_a_statement_of_assembler_is_one_finding():
    text = (
        "__global__ void k() {\n"
        '  asm volatile("{\\n"\n'
        '    ".reg .f16x2 a;\\n"\n'
        '    "cvt.rn.f16x2.e2m1x2 a, b;\\n"\n'
        '    "fma.rn.f16x2 s, a, a, s;\\n"\n'
        '    "fma.rn.f16x2 s, a, a, s;\\n"\n'
        '    "}" : : "h"(1));\n}\n'
    )
    found = {(one.technique, one.kind): (one.line, one.end_line) for one in find("x.cu", text)}
    assert found["packed-half", "use"] == (5, 6)
    assert found["packed-half", "declaration"] == (3, 3)
    assert found["fp16-accumulation", "use"] == (5, 6)
    assert found["fp4-conversion", "use"] == (4, 4)
    assert found["inline-asm", "use"] == (2, 7)


def test_an_opcode_that_goes_over_literals_is_one_instruction():
    text = (
        'void f() {\n  asm("cp.async.bulk.tensor.2d.shared::cluster.global"\n'
        '      ".L2::cache_hint [%0], [%1, {%2}], %3;");\n}\n'
    )
    found = {(one.technique, one.line, one.column) for one in find("x.cu", text) if one.kind == "use"}
    assert ("tma", 2, 8) in found
    assert ("cache-hint", 3, 8) in found


def test_the_strongest_kind_stands_for_its_line():
    found = find("x.py", "import triton.language as tl\nx = tl.atomic_add(p, 1)  # an atomic sum\n")
    assert [one.kind for one in found if one.technique == "atomics"] == ["use"]


def test_a_page_that_lost_its_indentation_is_read():
    text = (
        "import torch\ndef gemv(a):\nif a.size(1) == 128:\nreturn m.f(a)\n"
        'src = """\n__global__ void k() {\n__shared__ int s[4];\n}\n"""\n'
    )
    assert {("hard-coded-shapes", 3), ("shared-memory", 7)} <= set(places(find("x.py", text), "use"))


def test_code_left_out_by_the_preprocessor_is_a_comment():
    found = find("x.cu", "#if 0\n__global__ void k() { atomicAdd(p, 1); }\n#endif\nint x;\n")
    assert places(found, "use") == []
    assert ("atomics", 2) in places(found, "comment")


def test_columns_count_characters():
    text = "x = '😀'; y = tl.atomic_add(p, 1)  # 😀 atomic\n"
    found = next(one for one in find("x.py", text) if one.technique == "atomics")
    assert text[found.column - 1 :].startswith("tl.atomic_add")


def test_mentions_are_apart_from_uses():
    found = find("x.cu", WRAPPED + "// no swizzle here\n")
    kinds = [(one.technique, one.kind == "use") for one in found]
    assert (kinds.count(("mbarrier", True)), kinds.count(("mbarrier", False))) == (2, 3)
    assert (kinds.count(("swizzle", True)), kinds.count(("swizzle", False))) == (0, 1)


def test_a_thousand_lines_take_little_time():
    path = SOURCES / "kernels.cu"
    text = path.read_text()
    lines = text * (1000 // text.count("\n") + 1)
    find(path.name, lines)
    start = time.process_time()
    find(path.name, lines + "\n")
    took = time.process_time() - start
    start = time.process_time()
    for _ in range(400_000):
        pass
    assert took < max(0.2, 20 * (time.process_time() - start)), "seconds for a thousand lines"
