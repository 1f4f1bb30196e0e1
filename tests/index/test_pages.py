"""Pages: each says what its document says, its twin is that document, and nothing stored becomes markup."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from example_index import HOSTILE, fill
from starlette.testclient import TestClient

from nibblas.index import pages, read, render
from nibblas.index.api import create_app
from nibblas.index.catalog import Catalog
from nibblas.index.documents import Query, QueryError, RunFilter, plain
from nibblas.index.store import Store


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "index.sqlite"
    with Store.open(path) as store:
        fill(store)
    return path


@pytest.fixture(scope="module")
def catalog(path):
    with Catalog(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(path):
    with TestClient(create_app(path), base_url="http://localhost") as opened:
        yield opened


def get(client: TestClient, address: str, status: int = 200) -> str:
    answer = client.get(address)
    assert answer.status_code == status, answer.text
    return answer.text


class Text(HTMLParser):
    """The words of a page, and its tags."""

    def __init__(self, page: str):
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def __str__(self) -> str:
        return " ".join(" ".join(self.words).split())


EVERY = [
    "/",
    "/search",
    "/search?q=gemv&language=python&sort=name",
    "/implementations/gemv-fast",
    "/implementations/gemv-fast/changes",
    "/implementations/gemv-fast/files/gemv.py",
    "/implementations/hostile",
    "/operations",
    "/operations/toy-gemv",
    "/operations/linear",
    "/techniques",
    "/hardware",
    "/hardware/nvidia-b200",
    "/runs",
    "/runs?status=wrong",
    "/compare",
    "/compare?a=gemv-fast&b=gemv-slow",
    "/sources",
    "/methodology",
    "/about",
]


@pytest.mark.parametrize("address", EVERY)
def test_every_page_has_a_name_a_language_and_landmarks(client, address):
    page = Text(get(client, address))
    tags = [tag for tag, _ in page.tags]
    assert ("html", {"lang": "en"}) in page.tags
    assert tags.count("h1") == 1
    assert tags.count("main") == 1
    assert tags.index("title") < tags.index("body")
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels)), levels
    ids = [values["id"] for _, values in page.tags if "id" in values]
    assert len(ids) == len(set(ids))
    assert not [values for _, values in page.tags if "style" in values or any(name.startswith("on") for name in values)]
    assert "script" not in tags


@pytest.mark.parametrize("address", [address for address in EVERY if address != "/compare"])
def test_every_page_names_its_twin(client, address):
    page = Text(get(client, address))
    (twin,) = [values["href"] for tag, values in page.tags if tag == "link" and values["rel"] == "alternate"]
    answer = client.get(twin)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.json()


def test_a_twin_is_the_document_of_its_page(client, catalog):
    assert client.get("/operations.json").json() == plain(read.operations(catalog))
    dossier = read.implementation(catalog, "gemv-fast", ("samples", "findings"))
    assert client.get("/implementations/gemv-fast.json").json() == json.loads(json.dumps(plain(dossier)))
    assert client.get("/search.json?q=gemv").json() == plain(read.search(catalog, Query(text="gemv")))


def test_what_is_stored_is_never_markup(client):
    for address in ("/", "/search", "/implementations/hostile", "/search?q=" + HOSTILE):
        page = get(client, address)
        assert "<script" not in page.lower(), address
        assert 'onload="' not in page, address
    assert HOSTILE in str(Text(get(client, "/implementations/hostile")))


def test_numbers_have_units_and_the_unknown_is_said(client):
    page = str(Text(get(client, "/implementations/gemv-fast")))
    assert "5.00 us" in page
    assert "Missing for reproduced" in page
    assert "passed" in page
    claimed = str(Text(get(client, "/implementations/kernelbot-toy-gemv-7")))
    assert "reported by its source" in claimed
    assert "no floor is known" not in claimed  # there are no samples to draw
    assert "Signature unknown" in claimed
    assert "Concluded unknown" in claimed


def test_a_tie_shares_its_rank(client):
    page = str(Text(get(client, "/operations/toy-gemv")))
    assert "1 = gemv_fast" in page
    assert "1 = gemv_tied" in page
    assert "2 gemv_slow" in page
    assert "gemv_wrong" in page


def test_an_excluded_run_says_why(client):
    page = str(Text(get(client, "/operations/toy-gemv")))
    assert "its status is wrong" in page
    assert "a later revision supersedes it" in page


def test_devices_with_one_reason_stand_together_and_lead_to_its_line(client):
    page = get(client, "/implementations/gemv-b200")
    rows = [Text(row) for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if "/hardware/" in row]
    (no,) = [row for row in rows if str(row).startswith("no ")]
    assert "NVIDIA H200" in str(no)
    assert "AMD MI355X" in str(no)
    assert "NVIDIA B200" not in str(no)
    (line,) = [values["href"] for tag, values in no.tags if tag == "a" and "/files/" in values["href"]]
    assert line == "/implementations/gemv-b200/files/b200.py#L4"
    found = Text(get(client, "/implementations/gemv-b200/files/b200.py"))
    assert "required: sm_100a" in str(found)


def test_uses_stand_apart_from_mentions(client):
    page = get(client, "/implementations/gemv-fast")
    used, mentioned = page.split("<h3>Only mentioned</h3>")
    assert 'href="/techniques/atomics"' in used.split("<h3>Used</h3>")[1]
    assert 'href="/techniques/atomics"' not in mentioned


def test_a_technique_shows_lines_only_of_source_that_may_be_shown(client, catalog):
    page = get(client, "/techniques/atomics")
    assert "tl.atomic_add(c, tl.sum(tl.load(a + k)))" in str(Text(page))
    for card in read.technique(catalog, "atomics").results.cards:
        assert card.source_shown or f"{card.slug}/files" not in page


def test_a_dispute_is_shown_where_it_is_seen_first(client):
    page = str(Text(get(client, "/implementations/gemv-slow")))
    assert page.index("disputed") < page.index("Use it")
    assert "it was timed on a shared card" in page


def test_a_roofline_needs_floors_and_traffic(client):
    assert 'class="picture roofline"' in get(client, "/operations/linear")
    assert 'class="picture roofline"' not in get(client, "/operations/toy-gemv")


def test_an_old_revision_says_so_and_keeps_its_own_files(client, catalog):
    newest, oldest = read.implementation(catalog, "gemv-fast").revisions
    page = get(client, f"/implementations/{oldest.digest}")
    assert "superseded" in page
    assert f'href="/implementations/{oldest.digest}/files/gemv.py"' in page
    assert "superseded" not in get(client, f"/implementations/{newest.digest}")
    get(client, f"/implementations/{oldest.digest}/changes", 404)


def test_changes_show_both_numbers(client):
    page = Text(get(client, "/implementations/gemv-fast/changes"))
    assert "128" in str(page)
    kinds = [values.get("class", "") for tag, values in page.tags if tag == "span"]
    assert kinds.count("line removed") == 1
    assert kinds.count("line added") == 1


def test_every_line_of_a_file_has_an_anchor(client, catalog):
    page = Text(get(client, "/implementations/gemv-fast/files/gemv.py"))
    lines = [values["id"] for _, values in page.tags if re.fullmatch(r"L\d+", values.get("id", ""))]
    dossier = read.implementation(catalog, "gemv-fast")
    assert lines == [f"L{i}" for i in range(1, dossier.files[0].lines + 1)]


def test_source_is_hidden_where_no_terms_allow_it(client):
    page = get(client, "/implementations/kernelbot-toy-gemv-7/files/submission.py")
    assert "not shown" in page
    assert "x = 1" not in page
    assert "LicenseRef-Unknown-1.0" in page


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/nowhere", 404),
        ("/implementations/nothing", 404),
        ("/implementations/gemv-fast/files/other.py", 404),
        ("/runs/0123", 404),
        ("/compare?a=gemv-fast&b=nothing", 404),
        ("/search?colour=red", 400),
        ("/search?limit=x", 400),
        ("/search?sort=age", 400),
        ("/search?cursor=x", 400),
        ("/static/nothing.css", 404),
        ("/static/..%2fpages.py", 404),
    ],
)
def test_what_went_wrong_is_a_page_of_the_same_style(client, address, status):
    answer = client.get(address)
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/html")
    assert '<main id="main"' in answer.text
    assert 'name="robots" content="noindex"' in answer.text


def test_a_twin_of_nothing_is_a_problem(client):
    answer = client.get("/implementations/nothing.json")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert client.get("/search.json?colour=red").json()["status"] == 400


def test_a_page_is_not_sent_twice(client):
    first = client.get("/operations")
    again = client.get("/operations", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


def test_queries_and_addresses_are_inverse():
    query = Query("a b", uses=("tma", "mma"), hardware="nvidia-b200", answer="no", sort="name", limit=5)
    given: dict[str, list[str]] = {}
    for name, value in render.params(query):
        given.setdefault(name, []).append(value)
    assert pages.query_of(given) == query
    assert pages.query_of({"q": ["gemv"], "operation": [""], "uses": [""]}) == Query("gemv")
    assert pages.run_filter_of({"status": ["wrong"], "limit": ["7"]}) == RunFilter(status="wrong", limit=7)
    with pytest.raises(QueryError, match="limit is 'x'"):
        pages.query_of({"limit": ["x"]})


@pytest.mark.parametrize("address", [*EVERY, "/techniques/tma", "/search.json", "/operations.json"])
def test_a_page_refuses_a_parameter_that_it_does_not_take(client, address):
    """One that is misspelt and ignored would give everything."""
    page = get(client, f"{address}{'&' if '?' in address else '?'}operaton=linear", 400)
    assert "there is no parameter" in page.lower()
    assert "operaton" in page


def test_a_page_names_the_parameters_that_it_takes(client):
    assert client.get("/compare.json?c=x").json()["detail"] == (
        "there is no parameter 'c' at this address; there are a, b"
    )
    assert client.get("/about.json?c=x").json()["detail"] == "there is no parameter 'c' at this address; it takes none"
    assert "; there are q, operation, language," in client.get("/search.json?text=x").json()["detail"]


def test_a_facet_adds_and_removes_its_value(client):
    page = Text(get(client, "/search?language=python"))
    links = [values["href"] for tag, values in page.tags if tag == "a"]
    assert "/search?operation=toy-gemv&language=python" in links
    assert "/search" in links  # the filter taken away again


def test_the_policy_is_shown_at_work(client):
    for example in client.get("/methodology.json").json()["examples"]:
        assert example["levels"]["policy"] == "evidence-1"
    levels = {tuple(e["levels"][axis] for axis in ("numerics", "timing")) for e in pages_examples()}
    assert {("none", "none"), ("claimed", "reported"), ("checked-hardened", "reproduced")} <= levels


def pages_examples() -> list[dict]:
    return [{"levels": plain(levels)} for _, levels in pages.policy_examples()]


def test_values_in_words():
    assert render.count(1, "run") == "1\N{NO-BREAK SPACE}run"
    assert render.count(1234, "run") == "1\N{NARROW NO-BREAK SPACE}234\N{NO-BREAK SPACE}runs"
    assert render.percent(0.544) == "54\N{NO-BREAK SPACE}%"
    assert render.percent(0.00391) == "0.39\N{NO-BREAK SPACE}%"
    assert render.size(512) == "512 B"
    assert render.size(25927) == "25.9 kB"
    assert render.date(None) is None
    assert str(render.date("yesterday <b>")) == "yesterday &lt;b&gt;"
    assert "2026-11-29 21:54 UTC" in render.moment("2026-11-29T21:54:23+00:00")
    assert "2026-11-29 20:54 UTC" in render.moment("2026-11-29T21:54:23+01:00")
