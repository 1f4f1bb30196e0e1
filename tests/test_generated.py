"""Parts of documents that programs write."""

import pytest

from nibblas.generated import Part


@pytest.fixture
def part(tmp_path):
    return Part("page.md", "times", "some.module", tmp_path)


def test_a_part_goes_between_its_marks(part, tmp_path):
    start, end = part.marks
    page = tmp_path / "page.md"
    page.write_text(f"before\n{start}\nold\n{end}\nafter\n")
    assert part.read() == "old"
    part.write("new \\1")
    assert page.read_text() == f"before\n{start}\nnew \\1\n{end}\nafter\n"
    page.write_text(f"{start}\n{end}\n")
    assert part.read() == ""


@pytest.mark.parametrize("places", [0, 2])
def test_a_part_has_exactly_one_place(part, tmp_path, places):
    page = tmp_path / "page.md"
    page.write_text(before := "\n".join(part.marks) * places)
    with pytest.raises(ValueError, match=rf"page.md: {places} places lie between"):
        part.write("new")
    assert page.read_text() == before
