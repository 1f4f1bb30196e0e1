"""Pictures and listings: units, places on a scale, markup that nothing can break out of."""

import re
from xml.etree import ElementTree

import pytest

from nibblas.index import listing, pictures


def test_rates():
    assert pictures.rate_text(4.4e12, "B/s") == "4.40 TB/s"
    assert pictures.rate_text(999.9, "B") == "1.00 kB"
    assert pictures.rate_text(25927, "B") == "25.9 kB"


def percent(text: str) -> float:
    return float(text.removesuffix("%"))


def drawn(markup: str, cls: str) -> list[ElementTree.Element]:
    return [tag for tag in ElementTree.fromstring(markup).iter() if tag.get("class") == cls]


def test_samples_stand_in_order_at_their_time():
    times = [3e-6, 1e-6, 2e-6]
    markup = pictures.samples(times, floor=5e-7, interval=(1e-6, 3e-6))
    dots = drawn(markup, "dot")
    at = [percent(dot.get("cx")) for dot in dots]
    assert at[0] == pytest.approx(3 * at[1], rel=1e-3)
    assert at[2] == pytest.approx(2 * at[1], rel=1e-3)
    assert [percent(dot.get("cy")) for dot in dots] == sorted(percent(dot.get("cy")) for dot in dots)
    (floor,), (middle,), (band,) = drawn(markup, "floor"), drawn(markup, "middle"), drawn(markup, "band")
    assert percent(floor.get("x1")) == pytest.approx(at[1] / 2, rel=1e-3)
    assert percent(middle.get("x1")) == pytest.approx(at[2], rel=1e-3)
    assert percent(band.get("x")) == pytest.approx(at[1], rel=1e-3)
    assert "3 samples from 1.00 us to 3.00 us, median 2.00 us; floor 500 ns" in markup
    assert max(at) <= 100


def test_an_even_number_of_samples_has_its_median_between_two():
    assert "median 1.50 us" in pictures.samples([1e-6, 2e-6])


def test_many_samples_are_thinned_and_it_is_said():
    markup = pictures.samples([1e-6] * 2500)
    assert len(drawn(markup, "dot")) <= pictures.MOST_DOTS
    assert "2500 samples" in markup
    assert "one in 3 is drawn" in markup
    assert "no floor is known" in markup


def test_samples_need_one():
    with pytest.raises(ValueError, match="needs a sample"):
        pictures.samples([])


def test_an_interval_starts_at_zero():
    markup = pictures.interval(2e-6, 3e-6, 4e-6, 8e-6, floor=1e-6)
    (span,), (middle,), (floor,) = (drawn(markup, cls) for cls in ("range", "middle", "floor"))
    assert [percent(span.get(x)) for x in ("x1", "x2")] == [25, 50]
    assert percent(middle.get("x1")) == 37.5
    assert percent(floor.get("x1")) == 12.5


def test_a_roofline_is_logarithmic_and_its_runs_stand_below_their_roof():
    points = [
        pictures.Point(1.0, 1e9, 1e10, "1", "a <b>"),
        pictures.Point(10.0, 1e10, 1e11, "2", "c"),
    ]
    markup = pictures.roofline(points)
    first, second = drawn(markup, "dot")
    assert percent(second.get("cx")) - percent(first.get("cx")) == 100
    assert percent(first.get("cy")) - percent(second.get("cy")) == pytest.approx(50)
    (roof,) = drawn(markup, "roof")
    assert percent(roof.get("y1")) == pytest.approx(percent(first.get("cy")) - 50)
    assert "a &lt;b&gt;" in markup
    with pytest.raises(ValueError, match="needs a point"):
        pictures.roofline([])


def text_of(markup: str) -> str:
    return "".join(ElementTree.fromstring(f"<a>{markup}</a>").itertext())


SOURCE = '''import torch  # a < b
code = r"""
__global__ void f() { if (a < b && c) return; }
"""


@triton.jit
def f(x):
\treturn x & 1
'''


@pytest.mark.parametrize("path", ["a.py", "a.cu", "a.h", "a.hip", "a.cpp", "a.ptx", "a.s", "a.txt", "a"])
def test_a_listing_keeps_every_line(path):
    assert [text_of(line) for line in listing.lines(path, SOURCE)] == SOURCE.removesuffix("\n").split("\n")


def test_a_listing_is_coloured():
    lines = listing.lines("a.py", SOURCE)
    assert lines[0].startswith('<span class="tk">import</span>')
    assert '<span class="tc"># a &lt; b</span>' in lines[0]
    assert '<span class="tf">f</span>' in lines[7]


def test_cuda_in_a_python_string_is_coloured_as_cuda():
    lines = listing.lines("a.py", SOURCE)
    assert lines[1] == 'code = <span class="ts">r&#34;&#34;&#34;</span>'
    assert '<span class="tk">__global__</span>' in lines[2]
    plain = listing.lines("a.py", SOURCE.replace("__global__ void f() { if (a < b && c) return; }", "return of f"))
    assert plain[2] == '<span class="ts">return of f</span>'


@pytest.mark.parametrize(
    ("text", "lines"), [("", [""]), ("a", ["a"]), ("a\n\n", ["a", ""]), ("a\r\nb\r\n", ["a", "b"]), ("a\rb\n", ["a b"])]
)
def test_lines_are_counted_as_editors_do(text, lines):
    assert [str(line) for line in listing.lines("a.txt", text)] == lines


def test_what_would_hide_or_reorder_a_line_is_shown():
    line = str(listing.lines("a.py", "x = 1  # \N{RIGHT-TO-LEFT OVERRIDE}evil\x00\n")[0])
    assert "⟨U+202E⟩evil⟨U+0000⟩" in line
    assert not re.search("[\u202e\x00]", line)


def test_a_long_file_is_shown_without_colours():
    text = "import torch\n" * (listing.MOST_HIGHLIGHTED // 13 + 1)
    lines = listing.lines("a.py", text)
    assert len(lines) == text.count("\n")
    assert lines[0] == "import torch"


def test_a_difference_has_both_numbers():
    old = "".join(f"line {i}\n" for i in range(1, 31))
    new = old.replace("line 3\n", "line three\n").replace("line 28\n", "")
    rows = listing.diff("a.txt", old, new)
    assert rows is not None
    assert [(row.kind, row.old, row.new, str(row.text)) for row in rows if row.kind not in ("same", "gap")] == [
        ("removed", 3, None, "line 3"),
        ("added", None, 3, "line three"),
        ("removed", 28, None, "line 28"),
    ]
    same = [(row.old, row.new) for row in rows if row.kind == "same"]
    assert same == [(1, 1), (2, 2), (4, 4), (5, 5), (6, 6), (25, 25), (26, 26), (27, 27), (29, 28), (30, 29)]
    assert [row.kind for row in rows].count("gap") == 1
    assert listing.diff("a.txt", old, old) == []


def test_what_is_too_long_is_not_compared():
    assert listing.diff("a.txt", "", "x\n" * (listing.MOST_COMPARED + 1)) is None
