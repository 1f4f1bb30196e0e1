"""Digests: what they cover and what they don't."""

import hashlib
import json
from dataclasses import replace

import pytest
from made_up import CODE, OPERATION, RUN, WORKLOAD, make_item

from nibblas.index.languages import of_file, of_path
from nibblas.index.model import Operation, SourceFile, digest_of, kebab, kernelbot_slug


def test_a_digest_is_sha256_of_canonical_json():
    text = '{"kind":"Workload","spec":{"a":[1,"é"],"b":1e-7}}'
    assert digest_of("Workload", {"b": 1e-7, "a": [1, "é"]}) == hashlib.sha256(text.encode()).hexdigest()
    assert json.loads(text)["spec"] == {"a": [1, "é"], "b": 1e-7}


def test_a_file_has_the_digest_that_sha256sum_prints():
    file = SourceFile.of("a.py", b"x = 1\ny = 2")
    assert file.sha256 == hashlib.sha256(b"x = 1\ny = 2").hexdigest()
    assert (file.size, file.lines, file.media_type) == (11, 2, "text/x-python")
    assert [SourceFile.of("a.bin", raw).lines for raw in (b"", b"a", b"a\n", b"a\n\n")] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "fields",
    [{"name": "other"}, {"authors": ("bob", "ann")}, {"licence": "Apache-2.0"}, {"operation": None}, {"files": ()}],
    ids=lambda fields: next(iter(fields)),
)
def test_what_makes_another_implementation(fields):
    implementation = make_item().implementation
    assert replace(implementation, **fields).digest != implementation.digest


@pytest.mark.parametrize(
    "fields",
    [
        {"imported_at": "2026-01-01T00:00:00+00:00", "revision": 3, "supersedes": "x", "record": "a row"},
        {"framework": None, "entry_point": "f", "signature": "f()", "tensors": (), "limitations": ()},
        {"operation": replace(OPERATION, semantics="c = a b")},
    ],
    ids=["when", "what an importer reads from the files", "a better description of the operation"],
)
def test_what_leaves_an_implementation_the_same(fields):
    implementation = make_item().implementation
    assert replace(implementation, **fields).digest == implementation.digest


def test_other_terms_make_another_implementation_and_another_place_does_not():
    implementation = make_item().implementation
    source = implementation.source
    assert replace(implementation, source=replace(source, locator="elsewhere")).digest == implementation.digest
    assert replace(implementation, source=replace(source, terms="CC-BY-4.0")).digest != implementation.digest


def test_a_run_is_of_one_implementation():
    assert RUN.digest_for("a") != RUN.digest_for("b")
    assert replace(RUN, record="elsewhere").digest_for("a") == RUN.digest_for("a")
    assert replace(RUN, samples=RUN.samples[:2]).digest_for("a") != RUN.digest_for("a")


def test_a_workload_is_of_one_operation():
    other = Operation("other", "other")
    assert replace(WORKLOAD, operation=other).digest != WORKLOAD.digest


def test_empty_fields_leave_a_digest_the_same():
    assert "threads" not in replace(RUN.environment, threads=None).spec
    assert replace(RUN.environment, threads=0).spec["threads"] == 0


def test_slugs():
    assert kernelbot_slug("nvfp4_gemv", 111151) == "kernelbot-nvfp4-gemv-111151"
    assert kebab("A b", "c__d-") == "a-b-c-d"
    with pytest.raises(ValueError, match="needs a letter or a digit"):
        kebab("__", "é")


def test_languages():
    expected = {"a.PY": "python", "b.cu": "cuda", "c.h": "c", "d.cxx": "c++", "e.ptx": "ptx", "f.md": None, "g": None}
    assert {name: of_path(name) for name in expected} == expected
    types = [SourceFile.of(name, CODE).media_type for name in ("b.cu", "c.h", "d.cxx", "e.ptx", "f.md")]
    assert types == ["text/x-cuda", "text/x-c", "text/x-c++", "text/x-ptx", "text/plain"]


def test_assembler_is_told_by_its_text():
    texts = {"gcn": "  s_mov_b32 s0, 0\n", "x86": "s_mask:\n  vfmadd231ps (%rsi), %zmm1, %zmm0\n"}
    assert {name: of_file("a.S", text) for name, text in texts.items()} == {"gcn": "gcn", "x86": None}
    assert of_file("a.cu", texts["x86"]) == "cuda"
    types = {name: SourceFile.of("a.s", text.encode()).media_type for name, text in texts.items()}
    assert types == {"gcn": "text/x-gcn", "x86": "text/plain"}
