"""Reading sources: the reader of Python against ast, places inside strings of code, and input that is no source."""

import ast
import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tree_sitter_cuda")

from nibblas.index import parse_python
from nibblas.index.parse import read
from nibblas.index.positions import Lines, Mapped
from nibblas.index.techniques import find

PACKAGE = Path(parse_python.__file__).parents[1]
STDLIB = Path(sysconfig.get_path("stdlib"))
FILES = [
    *sorted(PACKAGE.glob("kernels/*.py"))[:6],
    PACKAGE / "cli.py",
    *(STDLIB / name for name in ("argparse.py", "dataclasses.py", "textwrap.py", "ast.py", "inspect.py")),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_python_is_read_as_ast_reads_it(path):
    text = path.read_text()
    tree, lines = ast.parse(text), Lines(text)
    items = parse_python.parse(Mapped.whole(text)).items

    def at(kind):
        found = ((item.start, text[item.start : item.end]) for item in items if item.kind == kind)
        return {(lines.position(start)[0], name.rpartition(".")[2]) for start, name in found}

    # What stands in the fields of an f-string is text here.
    fields = {id(node) for joined in ast.walk(tree) if isinstance(joined, ast.JoinedStr) for node in ast.walk(joined)}
    nodes = [node for node in ast.walk(tree) if id(node) not in fields]
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    assert {name for _, name in at("definition")} == functions
    calls = {
        (node.func.end_lineno, node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
    }
    decorators = {line for line, _ in at("decorator")}
    # The call of a decorator is a decorator.
    assert {call for call in calls if call[0] not in decorators} - at("call") == set()
    keywords = {(node.lineno, node.arg) for node in nodes if isinstance(node, ast.keyword) and node.arg}
    assert {one for one in keywords if one[0] not in decorators} - at("keyword") == set()
    parameters = {(node.lineno, node.arg) for node in nodes if isinstance(node, ast.arg)}
    assert parameters - at("binding") == set()


LETTERS = st.text(st.sampled_from("ab{}\\\"'\n\t😀é%$#/*; "), max_size=30)


@settings(max_examples=60, deadline=None)
@given(LETTERS, st.booleans())
def test_the_value_of_a_string_and_the_place_of_each_character(value, prefixed):
    literal = repr(value)
    text = ("x = 1\n" if prefixed else "") + "name = (" + literal + ")"
    start = text.index(literal)
    inner = parse_python.value_of(Mapped.whole(text).cut(start, start + len(literal)), lambda field: field)
    assert inner.text == value
    places = [inner.offset(index) for index in range(len(value))]
    assert places == sorted(set(places)), "each character has a place of its own, in order"
    for character, place in zip(value, places, strict=True):
        assert text[place] in (character, "\\")


CODE = """
__global__ void k(int* p)
{
    %s atomicAdd(p, 1);
}
"""


@pytest.mark.parametrize(
    "text",
    [
        f'src = """{CODE % ""}"""\n',
        f"src = r'''{CODE % ''}'''\n",
        f'src = """{CODE % "/* é😀 */"}"""\n',
        "src = " + repr(CODE % "") + "\n",
        'A = "#include <a>\\n"\nsrc = A + """' + CODE % "\t" + '"""\n',
        'N = "int"\nsrc = f"""' + (CODE % "").replace("{", "{{").replace("}", "}}") + ' {N} x;"""\n',
        'src = """' + (CODE % "").replace("{", "{{").replace("}", "}}") + '""".format(x=1)\n',
        'src = "".join(["__global__ void k(int* p) {", " atomicAdd(p, 1); ", "}"])\n',
        'src = ("__global__ void k(int* p) {\\n"\n       "  // first\\n"\n       "  atomicAdd(p, 1);\\n}")\n',
        'm = build(cuda_sources=["""' + CODE % "" + '"""])\n',
        'src = """' + CODE % "int x = \\\\\n" + '"""\n',
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_code_in_strings_is_found_in_its_place(text, ending):
    text = text.replace("\n", ending)
    found = [one for one in find("x.py", text) if one.technique == "atomics" and one.kind == "use"]
    assert len(found) == 1
    line = text.split("\n")[found[0].line - 1]
    assert line[found[0].column - 1 :].startswith("atomicAdd")


def test_regions_tell_languages_and_places():
    text = 'src = """\n__global__ void k() { asm("bar.sync 0;"); }\n"""\n'
    source = read("x.py", text)
    assert [region.language for region in source.regions] == ["python", "cuda"]
    assert text[source.regions[1].start : source.regions[1].end].strip().startswith("__global__")


def test_assembler_of_another_processor_is_text():
    assert read("x.s", "  vfmadd231ps (%rsi), %zmm1, %zmm0\n").language == "text"
    assert read("x.s", "  v_fma_f32 v0, v1, v2, v0\n").language == "gcn"


def test_a_docstring_is_no_code():
    assert [one.kind for one in find("x.py", '"""Kernels of __global__ void k() {; }; atomic."""\n')] == ["comment"]


def test_triton_in_a_string_is_python():
    code = "import triton\nimport triton.language as tl\n@triton.jit\ndef k(p):\n    tl.atomic_add(p, 1)\n"
    text = f'code = """\n{code}"""\n'
    assert [(one.line, one.kind) for one in find("x.py", text) if one.technique == "atomics"] == [(6, "use")]


HOSTILE = {
    "nul": "\0" * 20_000,
    "a long line": "tma_" + "x" * 200_000,
    "brackets": "([{" * 10_000,
    "calls": "f(" * 8_000 + ")" * 8_000,
    "quotes": '"""' * 5_001,
    "backslashes": "\\" * 20_000,
    "comparisons": "a == 1 == " * 5_000,
    "f-strings": 'f"{' * 3_000,
    "doubling": 's = "#include <a>;"\n' + "s = s + s\n" * 400,
    "growing": 's = "#include <a>;"\n' + 's = s + "x;"\n' * 1_000,
    "macros": "".join(f"#define F{n}(x) tma(x)\n" for n in range(500)),
    "unclosed comment": "/*" * 20_000,
    "left out": "#if 0\n" * 3_000,
    "statements of asm": 'asm volatile("mov.b32 %0, %1;");\n' * 500,
    "unclosed asm": 'asm volatile("' * 2_000,
    "templates": "a<" * 5_000,
    "lambdas": "if lambda:" * 5_000,
    "emoji": "# 😀 tma\n" * 2_000,
    "surrogates": "\ud800" * 1_000 + "\nimport triton",
    "bytes": bytes(range(256)).decode("utf-8", "replace") * 50,
    "old line ends": "x = 1\r" * 5_000,
    "spaces": " " * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", ["x.py", "x.cu", "x.ptx", "x.s"])
def test_hostile_input_is_read_in_time(name, path):
    start = time.process_time()
    found = find(path, HOSTILE[name])
    assert time.process_time() - start < 5, "seconds"
    lines = HOSTILE[name].count("\n") + 1
    assert all(1 <= one.line <= one.end_line <= lines and one.column >= 1 for one in found)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                '"',
                "'",
                '"""',
                "\\",
                "\n",
                "\r\n",
                "(",
                ")",
                "[",
                "]",
                "{",
                "}",
                "#",
                "//",
                "/*",
                "*/",
                "f'",
                "tma(",
                "asm(",
                "def f():",
                " ",
                "\t",
                "😀",
                "\0",
                "=",
                "==",
                ":",
                ";",
                ",",
                "lambda",
                "in",
                "import",
                "@",
                "<<<",
                ">>>",
                "__global__",
                "__shared__",
                "#if 0",
                "#endif",
                "#define X",
                'R"(',
                ')"',
                "mov.b32 a;",
                "split_k",
                ".",
            ]
        ),
        max_size=60,
    ),
    st.sampled_from(["x.py", "x.cu", "x.hip", "x.ptx"]),
)
def test_anything_can_be_read(pieces, path):
    text = "".join(pieces)
    for one in find(path, text):
        line = text.split("\n")[one.line - 1]
        assert 1 <= one.column <= len(line) + 1
