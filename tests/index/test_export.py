"""The static site: every link leads to a file, from any folder, and nothing is half written."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from example_index import KERNEL, fill, one_file

from nibblas.index import export as exporting
from nibblas.index import read
from nibblas.index.catalog import Catalog
from nibblas.index.documents import plain
from nibblas.index.export import MARK, SiteError, export, file_of
from nibblas.index.store import Store


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "index.sqlite"
    with Store.open(path) as store:
        fill(store)
    with Catalog(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def site(catalog, tmp_path_factory):
    site = tmp_path_factory.mktemp("site") / "a folder"
    export(catalog, site)
    return site


class Links(HTMLParser):
    """The addresses that a page names, and its anchors."""

    def __init__(self, page: str):
        super().__init__()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        values = dict(attrs)
        self.addresses += [values[name] for name in ("href", "src", "action") if values.get(name)]
        self.anchors |= {values["id"]} if "id" in values else set()


def test_every_link_leads_to_a_file_of_the_site(site):
    found = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    assert len(found) > 40
    reached = {site / "index.html"}
    for path, page in found.items():
        for address in page.addresses:
            parts = urlsplit(address)
            if address == "https://example.org/kernels/gemv.cuh":
                continue  # what a comment of the source names
            assert not parts.scheme, address
            assert not parts.query, address
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            assert target.is_relative_to(site), f"{path}: {address}"
            assert target.is_file(), f"{path}: {address}"
            if parts.fragment and parts.fragment != "main":
                assert parts.fragment in found[target].anchors, f"{path}: {address}"
            reached.add(target)
    assert set(found) <= reached, "a page that nothing leads to"


def test_every_page_has_its_twin(site, catalog):
    for page in site.rglob("*.html"):
        json.loads(page.with_suffix(".json").read_text())
    assert json.loads((site / "operations.json").read_text()) == json.loads(json.dumps(plain(read.operations(catalog))))


def test_there_is_no_script_and_no_form(site):
    for page in site.rglob("*.html"):
        text = page.read_text().lower()
        assert "<script" not in text
        assert "<form" not in text


def test_source_is_copied_byte_for_byte_and_runs_in_no_browser(site):
    (raw,) = (site / "implementations/gemv-tied").rglob("*.txt")
    assert raw.read_bytes() == KERNEL.encode()
    assert not list((site / "implementations/kernelbot-toy-gemv-7").rglob("*.txt"))


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("/", "index.html"),
        ("/operations", "operations.html"),
        ("/implementations/a-b", "implementations/a-b.html"),
        ("/implementations/a/files/src/k.cu", "implementations/a/files/src/k.cu.html"),
    ],
)
def test_addresses_of_files(path, file):
    assert file_of(path) == file


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "a b", "a%2Fb", "ä", "a" * 500, "<b>", "con:", "a\\b"])
def test_no_name_leads_out_of_the_site_or_means_another(name):
    file = file_of(f"/implementations/x/files/{name}", "")
    assert re.fullmatch(r"implementations/x/files/[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,140}", file)
    assert file != file_of(f"/implementations/x/files/{name}_", "")


def test_a_folder_that_is_no_export_is_left_alone(catalog, tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(SiteError, match="no exported index"):
        export(catalog, tmp_path)
    with pytest.raises(SiteError, match="not a folder"):
        export(catalog, tmp_path / "precious.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_an_export_replaces_an_earlier_one_whole_or_not_at_all(catalog, tmp_path, monkeypatch):
    site = tmp_path / "site"
    export(catalog, site)
    (site / "gone.html").write_text("of an implementation that is gone")

    def stops(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_runs", stops)
        with pytest.raises(KeyboardInterrupt):
            export(catalog, site)
    assert (site / "gone.html").exists()
    made = export(catalog, site)
    assert not (site / "gone.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["site"]
    assert json.loads((site / MARK).read_text())["pages"] == made.pages == len(list(site.rglob("*.html")))


def test_long_lists_are_cut_into_pages_and_stay_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "PAGE_SIZE", 2)
    monkeypatch.setattr(exporting, "MOST_PAGES", 3)
    with Store.open(tmp_path / "index.sqlite") as store:
        for number in range(11):
            store.add(one_file(f"k-{number:02}", f"k{number}", "k.py", f"x = {number}\n"))
    with Catalog(tmp_path / "index.sqlite") as catalog:
        export(catalog, tmp_path / "site")
    browse = tmp_path / "site" / "browse"

    def names(path: Path) -> list[str]:
        return [card["slug"] for card in json.loads(path.read_text())["cards"]]

    everything = [tmp_path / "site/browse.json", *(browse / f"page/{n}.json" for n in range(2, 7))]
    assert [name for page in everything for name in names(page)] == [f"k-{number:02}" for number in range(11)]
    assert len(list((browse / "operation/toy-gemv/page").glob("*.html"))) == 5
    assert len(list((browse / "language/python/page").glob("*.html"))) == 2
    assert "leaves out 5" in (browse / "language/python.html").read_text()


def test_a_page_of_a_long_list_links_few_others():
    for last in (1, 7, 500):
        for number in {1, (last + 1) // 2, last}:
            linked = exporting._numbers(number, last)
            assert {1, number, last} <= set(linked) <= set(range(1, last + 1))
            assert len(linked) <= 12


def test_progress_counts_implementations(catalog, tmp_path):
    told = []
    export(catalog, tmp_path / "site", lambda done, total, text: told.append((done, total)))
    total = read.coverage(catalog).implementations
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_a_link_with_a_query_is_a_fault(catalog):
    with pytest.raises(ValueError, match="can't answer"):
        exporting.LocalLinks("/").url("/search", [("q", "x")])


def test_every_page_has_a_file_of_its_own(catalog):
    files = [file_of(page.path) for page in exporting._every(catalog)]
    assert len(files) == len(set(files))
