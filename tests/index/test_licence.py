"""Licences as findings, and what is concluded from them: with hits, near misses and broken input."""

import time

import pytest

pytest.importorskip("license_expression")

from nibblas.index import licence, read
from nibblas.index.catalog import Catalog
from nibblas.index.documents import NotShownError
from nibblas.index.ingest import add
from nibblas.index.ingest.reading import Options
from nibblas.index.licence import Conclusion, LicenceFinding, conclude, findings, may_show, third_party

MIT = """Permission is hereby granted, free of charge, to any person obtaining a copy of this
software and associated documentation files (the "Software"), to deal in the Software without
restriction, including without limitation the rights to use, copy, modify, merge, publish,
distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or
substantial portions of the Software.
"""
BSD = """Redistribution and use in source and binary forms, with or without modification, are
permitted provided that the following conditions are met:
1. Redistributions of source code must retain the above copyright notice, this list of
   conditions and the following disclaimer.
2. Redistributions in binary form must reproduce the above copyright notice, this list of
   conditions and the following disclaimer in the documentation.
"""
NAMES = """3. Neither the name of the copyright holder nor the names of its contributors may be used
   to endorse or promote products derived from this software without specific prior written
   permission.
"""


def commented(text: str, mark: str) -> str:
    return "".join(f"{mark} {line}".rstrip() + "\n" for line in text.splitlines())


def stated(path: str, text: str) -> list[tuple[str | None, str, int]]:
    return [(one.expression, one.method, one.line) for one in findings(path, text) if one.expression]


def stating(expression: str, method="header", line=1) -> LicenceFinding:
    return LicenceFinding(expression, method, line, line, "", 1.0)


@pytest.mark.parametrize(
    ("path", "text", "expression"),
    [
        ("k.py", "# SPDX-License-Identifier: Apache-2.0\n", "Apache-2.0"),
        ("k.cu", "/* SPDX-License-Identifier: mit OR apache-2.0 */\n", "MIT OR Apache-2.0"),
        ("k.cuh", " * before\n// SPDX-License-Identifier: BSD-3-Clause\n", "BSD-3-Clause"),
        ("k.py", "# SPDX-License-Identifier: LicenseRef-NvidiaProprietary\n", "LicenseRef-NvidiaProprietary"),
        ("k.py", '"""A kernel.\n\nSPDX-License-Identifier: GPL-3.0\n"""\n', "GPL-3.0-only"),
        ("k.py", "# SPDX-License-Identifier: Proprietary\n", "LicenseRef-Proprietary"),
        (
            "k.py",
            'src = r"""\n// SPDX-License-Identifier: MIT\n__global__ void k() {}\n"""\n',
            "MIT",
        ),
    ],
)
def test_a_tag(path, text, expression):
    (found,) = findings(path, text)
    assert (found.expression, found.method) == (expression, "spdx-tag")
    assert "SPDX-License-Identifier" in text.splitlines()[found.line - 1]


@pytest.mark.parametrize(
    ("sentence", "expression"),
    [
        ('Licensed under the Apache License, Version 2.0 (the "License");', "Apache-2.0"),
        ("This file is released under the MIT License.", "MIT"),
        ("License: MIT", "MIT"),
        ("Distributed under the terms of the BSD 3-Clause License", "BSD-3-Clause"),
        ("Use it under the 2-clause BSD license.", "BSD-2-Clause"),
        (
            "it under the terms of the GNU General Public License as published by\n"
            "the Free Software Foundation, either version 3 of the License, or\n(at your option) any later version.",
            "GPL-3.0-or-later",
        ),
        ("under the terms of the GNU General Public License version 2 only", "GPL-2.0-only"),
        (
            "under the terms of the GNU Lesser General Public License as published, either\n"
            "version 2.1 of the License, or (at your option) any later version",
            "LGPL-2.1-or-later",
        ),
        ("under the terms of the GNU Affero General Public License, version 3", "AGPL-3.0-only"),
        ("This Source Code Form is subject to the terms of the Mozilla Public\nLicense, v. 2.0.", "MPL-2.0"),
        ("Distributed under the Boost Software License, Version 1.0.", "BSL-1.0"),
        ("Released under the Unlicense", "Unlicense"),
        ("Released under CC0", "CC0-1.0"),
        (
            "NVIDIA CORPORATION and its licensors retain all intellectual property\nand proprietary rights",
            "LicenseRef-NVIDIA-Proprietary",
        ),
        ("License: CC-BY-NC-4.0", "CC-BY-NC-4.0"),
        ("This file is licensed under the Business Source License 1.1", "BUSL-1.1"),
        ("For non-commercial use only.", "LicenseRef-Non-Commercial"),
        ("Confidential and proprietary to A Club", "LicenseRef-Confidential"),
        ("Unauthorized copying of this file, via any medium, is\nstrictly prohibited", "LicenseRef-Confidential"),
    ],
)
@pytest.mark.parametrize(("path", "mark"), [("k.py", "#"), ("k.cu", "//"), ("k.cpp", " *")])
def test_a_sentence_in_a_header(sentence, expression, path, mark):
    comment = commented(sentence, mark)
    text = f"\n/*\n{comment} */\n" if mark == " *" else f"\n{comment}"
    assert stated(path, text) == [(expression, "header", 3 if mark == " *" else 2)]


@pytest.mark.parametrize(
    "text",
    [
        "# From a course at MIT on performance.\n",
        "# The licence is unknown.\n",
        "# Used in research, not in commercial products; for use in tests only.\n",
        "# This is not licensed under the MIT License.\n",
        "# SPDX-License-Identifier: whatever we like\n",
        'print("SPDX-License-Identifier: MIT")\n',
        'x = "Licensed under the Apache License, Version 2.0"\n',
        'url = "https://a.example//Licensed under the MIT License"\n',
        "# All of the above copyright notice and the permission notice\n",
        "licence = mit = apache = 2.0\n",
    ],
)
def test_a_near_miss(text):
    assert stated("k.py", text) == []


@pytest.mark.parametrize(("text", "expression"), [(MIT, "MIT"), (BSD, "BSD-2-Clause"), (BSD + NAMES, "BSD-3-Clause")])
@pytest.mark.parametrize(("path", "mark"), [("k.py", "#"), ("k.cu", "//"), ("LICENSE", ""), ("LICENSE.of-b", "")])
def test_a_full_text(text, expression, path, mark):
    body = commented(text, mark) if mark else text
    (found,) = findings(path, "\n\n" + body)
    assert (found.expression, found.method, found.line) == (expression, "full-text", 3)
    assert found.line < found.end_line <= 2 + len(text.splitlines())


def test_a_text_that_was_changed_is_another():
    assert stated("LICENSE", MIT.replace("sell copies", "lend copies")) == []
    assert stated("LICENSE", MIT + "The Software shall be used for Good, not Evil.") == []
    assert stated("LICENSE", BSD[: BSD.index("2.")]) == []


def test_a_text_that_tells_how_to_apply_it_is_found_once():
    text = (
        "Apache License\nVersion 2.0, January 2004\nTERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION\n"
        "3. Grant of Patent License.\nLicensed under the Apache License, Version 2.0\n"
    )
    assert stated("LICENSE", text) == [("Apache-2.0", "full-text", 1)]


def test_copyright():
    text = "// Copyright (c) 2024 A Club\n// (c) 2025 Somebody\n// the copyright of others\nint copyright = 2025;\n"
    assert [(one.line, one.method, one.expression) for one in findings("k.cu", text)] == [
        (1, "copyright", None),
        (2, "copyright", None),
    ]


def test_third_parties_of_cuda_in_python():
    text = (
        "import torch\n"
        "# see https://docs.example/ptx#mma.\n"
        'home = "https://github.com/a/b/blob/main/k.cu"\n'
        'src = """\n'
        "#include <cuda.h>\n"
        "// Taken from https://github.com/a/b/blob/1f/ptx.cuh\n"
        "// https://docs.example/mbarrier\n"
        "__device__ int f() { return 1; } /* adapted from\n"
        " * (https://example.org/x_(y)), Apache-2.0 */\n"
        'const char* s = "// copied from https://example.org/no";\n'
        "// https://github.com/a/b/tree/main/include\n"
        '"""\n'
    )
    found = [(one.line, one.column, one.url, one.hint, one.licence_hint) for one in third_party("k.py", text)]
    assert found == [
        (2, 7, "https://docs.example/ptx#mma", "link", None),
        (6, 15, "https://github.com/a/b/blob/1f/ptx.cuh", "taken from", None),
        (7, 4, "https://docs.example/mbarrier", "link", None),
        (9, 5, "https://example.org/x_(y)", "adapted from", "Apache-2.0"),
        (11, 4, "https://github.com/a/b/tree/main/include", "code", None),
    ]


def test_a_comment_that_is_put_together_from_strings():
    text = 'src = (\n    "// copied from https://example.org/k.cu\\n"\n    "int x;"\n)\n'
    (found,) = third_party("k.py", text)
    assert (found.line, found.column, found.url) == (2, 21, "https://example.org/k.cu")


@pytest.mark.parametrize(
    "text",
    [
        'open("https://example.org/taken from")\n',
        "# taken from the paper\n",
        "x = 1  # no address: http\n",
        '"""\n',
        "src = '''// \n",
        "/* https",
        "\x00\ud800 # \n",
    ],
)
def test_no_third_party(text):
    assert third_party("k.py", text) == []
    assert third_party("README.md", "copied from https://example.org/a\n") == []


@pytest.mark.parametrize(
    ("declared", "found", "expected"),
    [
        ("MIT", [], "MIT"),
        ("Apache License 2.0", [], "Apache-2.0"),
        ("MIT OR Apache-2.0", ["MIT"], "MIT OR Apache-2.0"),
        ("GPL-3.0-or-later", ["GPL-3.0-only"], "GPL-3.0-or-later"),
        ("MIT", ["GPL-3.0-only"], None),
        ("free for all", [], None),
        ("free for all", ["MIT"], None),
        (None, [], None),
        (None, ["MIT", "MIT"], "MIT"),
        (None, ["MIT", "BSD-3-Clause"], None),
        ("MIT", ["LicenseRef-NVIDIA-Proprietary"], "LicenseRef-NVIDIA-Proprietary"),
    ],
)
def test_what_is_concluded(declared, found, expected):
    conclusion = conclude(declared, [stating(one) for one in found], "CC-BY-4.0")
    assert conclusion.expression == expected
    assert conclusion.reason.endswith(".")


@pytest.mark.parametrize("tag", ["Apache-2.0 AND Own", "Own Software Licence", "(MIT"])
def test_a_tag_that_can_not_be_read_makes_it_unknown(tag):
    found = findings("k.cu", f"// SPDX-License-Identifier: {tag}\n// Licensed under the MIT License\n")
    for declared in (None, "MIT", "Apache-2.0"):
        conclusion = conclude(declared, found, None)
        assert conclusion == Conclusion(None, "The tag in line 1 is no SPDX expression.")


def test_a_declared_licence_is_named_as_spdx_names_it():
    assert conclude("mit", [], None) == Conclusion("MIT", "MIT is declared.")


def test_a_tag_is_more_exact_than_a_text():
    found = [stating("GPL-3.0-only", "full-text"), stating("GPL-3.0-or-later", "spdx-tag", 2)]
    assert conclude(None, found, None).expression == "GPL-3.0-or-later"


def test_code_of_others_never_raises_a_conclusion():
    unknown = third_party("k.cu", "// taken from https://example.org/k.cu\n")
    known = third_party("k.cu", "// taken from https://example.org/k.cu (BSD-3-Clause)\n")
    idea = third_party("k.cu", "// based on https://example.org/k.cu\n// https://example.org/docs\n")
    assert conclude("MIT", [], None, unknown).expression is None
    assert "line 1 names code taken from https://example.org/k.cu" in conclude("MIT", [], None, unknown).reason
    assert conclude("MIT", [], None, known).expression == "MIT AND BSD-3-Clause"
    assert conclude("MIT", [], None, idea).expression == "MIT"
    assert conclude(None, [], None, known).expression is None


@pytest.mark.parametrize(
    ("expression", "terms", "expected"),
    [
        ("MIT", None, (True, "MIT")),
        ("GPL-3.0-only", None, (True, "GPL-3.0-only")),
        ("Apache-2.0 WITH LLVM-exception", None, (True, "Apache-2.0 WITH LLVM-exception")),
        ("MIT OR LicenseRef-Own", None, (True, "MIT OR LicenseRef-Own")),
        ("MIT AND LicenseRef-Own", None, (False, None)),
        ("CC-BY-NC-4.0", "MIT", (False, None)),
        ("LicenseRef-NVIDIA-Proprietary", "CC-BY-4.0", (False, None)),
    ],
)
def test_what_may_be_shown(expression, terms, expected):
    assert may_show(Conclusion(expression, ""), terms) == expected


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ("CC-BY-4.0", (True, "CC-BY-4.0")),
        ("mit", (True, "MIT")),
        ("LicenseRef-GPUMode-Reciprocity-1.0", (False, None)),
        ("unknown", (False, None)),
        (None, (False, None)),
    ],
)
def test_terms_of_a_collection_speak_for_what_says_nothing_else_of_itself(terms, expected):
    copyright = findings("k.cu", "// Copyright (c) 2026 A Club\n")
    for declared in (None, "", " "):
        for found in ([], copyright):
            conclusion = conclude(declared, found, terms)
            assert conclusion.expression is None
            assert may_show(conclusion, terms) == expected
    copied = third_party("k.cu", "// taken from https://example.org/k.cu\n")
    assert may_show(conclude("MIT", [], terms, copied), terms) == expected


@pytest.mark.parametrize(
    ("declared", "text", "reason"),
    [
        ("Custom, ask us", "", "The declared licence 'Custom, ask us' is no SPDX expression"),
        ("Custom, ask us", "// License: MIT\n", "The declared licence 'Custom, ask us' is no SPDX expression"),
        (None, "// SPDX-License-Identifier: Custom, ask us\n", "The tag in line 1 is no SPDX expression"),
        ("LicenseRef-Own", "// License: MIT\n", "LicenseRef-Own is declared, but line 1 states MIT"),
        ("LicenseRef-Own", "// taken from https://example.org/k.cu\n", "whose licence isn't known"),
    ],
)
def test_what_it_says_of_itself_wins_over_the_terms_of_its_collection(declared, text, reason):
    conclusion = conclude(declared, findings("k.cu", text), "CC-BY-4.0", third_party("k.cu", text))
    assert conclusion.expression is None
    assert reason in conclusion.reason
    assert may_show(conclusion, "CC-BY-4.0") == (False, None)


@pytest.mark.parametrize("stated", ["", " ", "MIT (", "OR", "MIT License of ours", "foo", "(" * 900, None])
def test_what_is_no_expression(stated):
    assert licence.normalised(stated) is None


def test_every_licence_that_may_be_shown_is_in_the_list_of_spdx():
    assert all(licence.normalised(one) == one for one in licence._may_show())
    assert all(licence.normalised(one.id) == one.id for one in licence._licences())


def test_it_is_stored(store, tmp_path):
    closed, opened = tmp_path / "closed.cu", tmp_path / "opened.cu"
    closed.write_text("// taken from https://example.org/k.cu\n__global__ void k() {}\n")
    opened.write_text("// SPDX-License-Identifier: MIT\n__global__ void k() {}\n")
    add(store, [closed, opened], Options())
    rows = store.connection.execute(
        "SELECT licence_concluded, may_show, shown_under, licence_reason FROM implementation ORDER BY slug"
    ).fetchall()
    assert [tuple(row) for row in rows] == [
        (None, 0, None, "No licence is declared, and none is found in the files."),
        ("MIT", 1, "MIT", "Line 1 states MIT (spdx-tag)."),
    ]


def test_a_licence_of_its_own_withholds_the_lines_of_source(store, tmp_path):
    code = "// a kernel\n__global__ void k(float* x) { __shared__ float kept[8]; x[0] = kept[0]; }\n"
    (tmp_path / "own.cu").write_text(code)
    (tmp_path / "silent.cu").write_text(code.replace("kept", "held"))
    add(store, [tmp_path / "own.cu"], Options(slug="own", licence="Custom, ask us", terms="CC-BY-4.0"))
    add(store, [tmp_path / "silent.cu"], Options(slug="silent", terms="CC-BY-4.0"))
    with Catalog(store.path) as catalog:
        silent, own = (read.implementation(catalog, name, ("source", "findings")) for name in ("silent", "own"))
        assert (silent.licence.shown, silent.licence.shown_under) == (True, "CC-BY-4.0")
        assert "held" in silent.files[0].text
        assert any("snippet" in one.body for use in silent.techniques for one in use.findings)
        assert (own.licence.concluded, own.licence.shown, own.licence.shown_under) == (None, False, None)
        assert "'Custom, ask us' is no SPDX expression" in own.licence.reason
        assert own.files[0].text is None
        assert own.techniques
        assert not any("snippet" in one.body for use in own.techniques for one in use.findings)
        with pytest.raises(NotShownError, match="'Custom, ask us' is no SPDX expression"):
            read.file(catalog, "own", "own.cu")


def test_broken_and_long_input_takes_no_time():
    start = time.process_time()
    for text in ('"' * 100_000, "/*" * 50_000, "'''" * 30_000, "# http://" * 20_000, "// licence " * 10_000):
        for path in ("k.py", "k.cu"):
            findings(path, text)
            third_party(path, text)
    assert time.process_time() - start < 10
