"""The API: shapes, errors, headers, caching, and input that means harm.

NIBBLAS_KERNELINDEX_OPENAPI names KernelIndex's OpenAPI document (packages/sdk/openapi.json of its repository, which is
not kept here); without it the answers are held against our own description of its shapes alone.
"""

import hashlib
import json
import os
import threading
from functools import cache
from pathlib import Path
from urllib.parse import quote

import pytest
import shelf
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from made_up import make_item
from pydantic import TypeAdapter

from nibblas.index import api, cursor, guard, kernelindex, kernelindex_shapes, read
from nibblas.index.api import API, create_app
from nibblas.index.documents import Query, RunFilter
from nibblas.index.model import RunStatus
from nibblas.index.store import Store, StoreError

GEMV = "kernelbot-toy-gemv-{}".format
OPENAPI = os.environ.get("NIBBLAS_KERNELINDEX_OPENAPI")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    app = create_app(shelf.fill(tmp_path_factory.mktemp("index") / "index.sqlite"))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def catalog(client):
    return client.app.state.catalog


@pytest.fixture(scope="module")
def runs(client):
    return client.get(f"{API}/runs").json()["runs"]


def shaped(catalog, runs):
    """Reads that KernelIndex has too: its route, ours, the body that is sent, and the shape."""
    dossier, operation = kernelindex_shapes.ImplementationDossier, kernelindex_shapes.OperationDossier
    key = read.operation(catalog, "toy-gemv").cohorts[0].key
    workload = read.workloads(catalog)[0].digest
    statuses = [read.runs(catalog, RunFilter(status=status)).runs for status in read.STATUSES]
    ids = [lines[0].digest for lines in statuses if lines]
    compared = [run["id"] for run in runs[:3]]
    return [
        *(
            ("/implementations/{idOrSlug}", f"/implementations/{slug}{include}", None, dossier)
            for slug in shelf.items()
            for include in ("", "?include=source", "?include=source,samples,findings")
        ),
        ("/operations", "/operations", None, kernelindex_shapes.Operations),
        ("/operations", "/operations?family=gemv", None, kernelindex_shapes.Operations),
        ("/operations", "/operations?tag=x", None, kernelindex_shapes.Operations),
        ("/operations/{idOrSlug}", "/operations/toy-gemv", None, operation),
        ("/operations/{idOrSlug}", "/operations/toy-gemm", None, operation),
        ("/operations/{idOrSlug}", f"/operations/toy-gemv?workload={workload}&cohort={key}", None, operation),
        *(("/runs", f"/runs?limit=2&status={status}", None, kernelindex_shapes.Runs) for status in read.STATUSES),
        *(("/runs", f"/runs?status={s}", None, kernelindex_shapes.Runs) for s in kernelindex.STATUSES.values()),
        ("/runs", "/runs?status=incorrect_shape&hardware=NVIDIA H200", None, kernelindex_shapes.Runs),
        *(("/runs/{idOrDigest}", f"/runs/{digest}", None, kernelindex_shapes.RunDossier) for digest in ids),
        *(("/runs/{idOrDigest}", f"/runs/{run['digest']}", None, kernelindex_shapes.RunDossier) for run in runs),
        *(
            ("/search", f"/search?q={quote(text)}", None, kernelindex_shapes.Search)
            for text in ("", "submission", "toy-gemv", "nothing like it", "cleo", GEMV(8))
        ),
        ("/search", f"/search?q=toy-gemv&cohort={key}", None, kernelindex_shapes.Search),
        ("/hardware", "/hardware", None, kernelindex_shapes.HardwareList),
        ("/sources", "/sources", None, kernelindex_shapes.Sources),
        ("/coverage", "/coverage", None, kernelindex_shapes.CoverageFacts),
        ("/compare", "/compare", compared, kernelindex_shapes.RunComparison),
        ("/compare", "/compare", [compared[0], "none"], kernelindex_shapes.RunComparison),
        ("/compare", "/compare", ids, kernelindex_shapes.RunComparison),
    ]


adapter = cache(TypeAdapter)


@cache
def validator(path: str, method: str) -> Draft202012Validator:
    document = json.loads(Path(OPENAPI or "").read_text())
    schema = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": document["components"]})


def test_answers_have_kernelindex_s_shapes(client, catalog, runs):
    for path, address, compared, shape in shaped(catalog, runs):
        sent = client.get(API + address) if compared is None else client.post(API + address, json={"runs": compared})
        assert sent.status_code == 200, (address, sent.text)
        body = sent.json()
        adapter(shape).validate_python(body, strict=True)
        assert '"nibblas":' in sent.text or not body.get("runs", True)
        if OPENAPI:
            errors = validator(path, "get" if compared is None else "post").iter_errors(body)
            assert not [(address, error.json_path, error.message) for error in errors]


@pytest.mark.skipif(not OPENAPI, reason="NIBBLAS_KERNELINDEX_OPENAPI names no document")
def test_problems_have_kernelindex_s_shape(client):
    document = json.loads(Path(OPENAPI).read_text())
    schema = document["paths"]["/runs"]["get"]["responses"]["400"]["content"]["application/json"]["schema"]
    for address in ("/runs?cursor=x", "/runs/none", "/runs?limit=0", "/nowhere"):
        Draft202012Validator(schema).validate(client.get(API + address).json())


def test_every_status_of_ours_has_one_of_theirs():
    assert set(kernelindex.STATUSES) == set(read.STATUSES) == set(RunStatus.__args__)


def test_search_gives_the_ranks_of_one_operation(client):
    body = client.get(f"{API}/search?q=toy-gemv").json()
    assert (body["mode"], body["operation"]["slug"]) == ("exact", "toy-gemv")
    rows = body["groups"]["exact"]
    assert [(row["implementation"]["slug"], row["rank"]) for row in rows[:4]] == [
        (GEMV(3), 1),
        (GEMV(1), 1),
        (GEMV(2), 2),
        (GEMV(9), 3),
    ]
    assert rows[0]["primary"]["value"] == 1.1e-5
    assert rows[0]["evidence"] == "verified"
    assert body["bestVerified"]["implementation"]["slug"] == GEMV(3)
    assert next(row for row in rows if row["implementation"]["slug"] == GEMV(5))["evidence"] == "reported"
    chooser = client.get(f"{API}/search?q=MIT").json()
    assert chooser["mode"] == "none"
    chooser = client.get(f"{API}/search?q=submission").json()
    assert chooser["mode"] == "chooser"
    assert [match["slug"] for match in chooser["matches"]] == ["toy-gemv", "toy-gemm"]


def test_comparison_of_runs_says_what_differs(client, catalog):
    def run_of(number, place=0):
        return read.implementation(catalog, GEMV(number)).runs[place].digest

    both = client.post(f"{API}/compare", json={"runs": [run_of(1), run_of(4)]}).json()
    assert (both["comparable"], [run["rank"] for run in both["runs"]]) == (True, [1, 5])
    other = client.post(f"{API}/compare", json={"runs": [run_of(1), run_of(3, 1), "none"]}).json()
    assert (other["comparable"], other["firstMaterialMismatch"]) == (False, "device")
    assert other["missingIds"] == ["none"]
    wrong = client.post(f"{API}/compare", json={"runs": [run_of(1), run_of(6)]}).json()
    assert not wrong["comparable"]
    assert "its status is wrong" in wrong["explanation"]


def test_source_is_the_file_s_bytes(client):
    sent = client.get(f"{API}/implementations/hostile/files/submission.py")
    digest = hashlib.sha256(sent.content).hexdigest()
    assert sent.content == shelf.HOSTILE.encode()
    assert sent.headers["etag"] == f'"sha256:{digest}"'
    assert sent.headers["content-type"].startswith("text/plain")
    dossier = client.get(f"{API}/implementations/hostile?include=source").json()
    assert dossier["sourceCode"]["content"].encode() == sent.content
    assert dossier["nibblas"]["files"][0]["sha256"] == digest
    assert client.get(dossier["source"]["url"]).content == sent.content


def test_source_that_may_not_be_shown_names_its_terms(client):
    sent = client.get(f"{API}/implementations/{GEMV(5)}/files/submission.py")
    assert (sent.status_code, sent.json()["code"]) == (403, "SOURCE_NOT_SHOWN")
    assert "terms are unknown" in sent.json()["detail"]
    dossier = client.get(f"{API}/implementations/{GEMV(5)}?include=source").json()
    assert dossier["sourceCode"] is None
    assert "claimed = 1" not in json.dumps(dossier)


@pytest.mark.parametrize(
    ("method", "address", "status", "code"),
    [
        ("GET", "/implementations?cursor=x", 400, "BAD_QUERY"),
        ("GET", "/implementations/x?include=all", 400, "BAD_QUERY"),
        ("GET", "/implementations?operaton=gemv", 400, "BAD_QUERY"),
        ("GET", "/runs?since=yesterday", 400, "BAD_QUERY"),
        ("GET", "/implementations/none", 404, "NOT_FOUND"),
        ("GET", "/runs/none", 404, "NOT_FOUND"),
        ("GET", "/operations/none", 404, "NOT_FOUND"),
        ("GET", "/techniques/none", 404, "NOT_FOUND"),
        ("GET", "/hardware/none", 404, "NOT_FOUND"),
        ("GET", "/compare?a=none&b=none", 404, "NOT_FOUND"),
        ("GET", "/nowhere", 404, "NOT_FOUND"),
        ("GET", "/nowhere?operaton=gemv", 404, "NOT_FOUND"),
        ("GET", "/implementations?limit=0", 422, "INVALID_REQUEST"),
        ("GET", "/implementations?timing=fast", 422, "INVALID_REQUEST"),
        ("GET", "/runs?status=fine", 422, "INVALID_REQUEST"),
        ("GET", f"/search?q={'x' * 501}", 422, "INVALID_REQUEST"),
        ("GET", "/compare", 422, "INVALID_REQUEST"),
        ("POST", "/compare", 422, "INVALID_REQUEST"),
        ("POST", "/search", 405, "METHOD_NOT_ALLOWED"),
        ("DELETE", "/implementations/x", 405, "METHOD_NOT_ALLOWED"),
        ("GET", f"/search?q={'x' * 9000}", 414, "ADDRESS_TOO_LONG"),
        ("GET", f"/implementations/{'x' * 3000}", 414, "ADDRESS_TOO_LONG"),
    ],
)
def test_errors_have_one_shape(client, method, address, status, code):
    sent = client.request(method, API + address)
    body = sent.json()
    assert (sent.status_code, body["status"], body["code"]) == (status, status, code)
    assert sent.headers["content-type"] == "application/problem+json"
    assert set(body) == {"type", "title", "status", "code", "detail", "requestId"}
    if status == 405:
        assert "GET, HEAD, OPTIONS" in sent.headers["allow"]


def test_a_parameter_that_an_address_does_not_take_is_refused(client):
    """A filter that is misspelt and ignored would give everything."""
    document = client.get(f"{API}/openapi.json").json()
    routes = [(path, method, of[method]) for path, of in document["paths"].items() for method in of]
    assert {f"{API}/implementations", f"{API}/runs"} <= {path for path, _, _ in routes}
    for path, method, described in routes:
        names = [one["name"] for one in described.get("parameters", ()) if one["in"] == "query"]
        sent = client.request(method, path.replace("{", "").replace("}", "") + "?operaton=gemv")
        assert (sent.status_code, sent.json()["code"]) == (400, "BAD_QUERY"), path
        there_are = f"there are {', '.join(names)}" if names else "it takes none"
        assert sent.json()["detail"] == f"there is no parameter 'operaton' at this address; {there_are}"


@pytest.mark.skipif(not OPENAPI, reason="NIBBLAS_KERNELINDEX_OPENAPI names no document")
def test_every_parameter_of_kernelindex_s_reads_is_taken(client):
    theirs = json.loads(Path(OPENAPI).read_text())["paths"]
    ours = client.get(f"{API}/openapi.json").json()["paths"]
    names = {"/implementations/{idOrSlug}": "/implementations/{name}", "/operations/{idOrSlug}": "/operations/{name}"}
    shared = {path: f"{API}{names.get(path, path)}" for path in theirs if f"{API}{names.get(path, path)}" in ours}
    assert {"/search", "/runs", "/operations", "/hardware", *names} <= set(shared)
    for path, of in shared.items():
        for method in set(theirs[path]) & set(ours[of]):
            wanted, taken = (
                {one["name"] for one in described.get("parameters", ()) if one["in"] == "query"}
                for described in (theirs[path][method], ours[of][method])
            )
            assert wanted <= taken, path


def test_a_fault_is_told_in_the_same_shape_without_its_details(client, monkeypatch, caplog):
    monkeypatch.setattr(read, "technique", lambda catalog, slug, query: 1 / 0)
    sent = client.get(f"{API}/techniques/tma?limit=7")
    assert (sent.status_code, sent.json()["code"]) == (500, "INTERNAL")
    assert "division" not in sent.text
    assert "division" in caplog.text


def test_the_store_s_faults_are_told(client, monkeypatch):
    def gone(catalog, operation):
        raise StoreError("the file is gone")

    monkeypatch.setattr(read, "workloads", gone)
    sent = client.get(f"{API}/workloads?operation=gone")
    assert (sent.status_code, sent.json()["detail"]) == (503, "the file is gone")


def test_bodies_have_a_limit(client):
    for content in (b"x" * (guard.MOST_BODY + 1), iter([b"x" * 4096] * 17)):
        sent = client.post(f"{API}/compare", content=content, headers={"Content-Type": "application/json"})
        assert (sent.status_code, sent.json()["status"]) == (413, 413)


ADDRESSES = (
    "/implementations",
    "/implementations/hostile",
    "/implementations/hostile/files/submission.py",
    "/search?q=x",
    "/operations/toy-gemv",
    "/hardware",
    "/openapi.json",
)


@pytest.mark.parametrize("address", [*ADDRESSES, "/nowhere"])
def test_every_answer_has_the_headers(client, address):
    sent = client.get(API + address)
    for name, value in guard.HEADERS.items():
        assert sent.headers[name] == value
    assert "script-src" not in sent.headers["content-security-policy"]
    assert not [name for name in sent.headers if name.startswith("access-control")]


@pytest.mark.parametrize("address", ADDRESSES)
def test_head_is_get_without_the_body(client, address):
    get, head = client.get(API + address), client.head(API + address)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert dict(head.headers) == dict(get.headers)


def test_head_of_the_export_makes_nothing(client, monkeypatch):
    monkeypatch.setattr(api.jsonl, "lines", lambda catalog: pytest.fail("it was made"))
    assert client.head(f"{API}/exports/catalog.jsonl").status_code == 200


def test_options_tells_the_methods(client):
    assert client.options(f"{API}/search").headers["allow"] == "GET, HEAD, OPTIONS"
    assert client.options(f"{API}/compare").headers["allow"] == "GET, POST, HEAD, OPTIONS"
    preflight = client.options(f"{API}/compare", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in preflight.headers


def test_an_etag_saves_the_body_until_the_index_changes(client):
    first = client.get(f"{API}/implementations?q=toy")
    tag = first.headers["etag"]
    assert tag == f'"sha256:{hashlib.sha256(first.content).hexdigest()}"'
    for given_tag in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = client.get(f"{API}/implementations?q=toy", headers={"If-None-Match": given_tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    for given_tag in ('"other"', "", tag[:-2]):
        assert client.get(f"{API}/implementations?q=toy", headers={"If-None-Match": given_tag}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "LOCALHOST"])
def test_it_answers_to_its_own_names(client, host):
    assert client.get(f"{API}/hardware", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "127.0.0.1.evil.example:80", "[::2]"])
def test_it_answers_to_no_other_name(client, host):
    sent = client.get(f"{API}/hardware", headers={"Host": host})
    assert (sent.status_code, sent.json()["code"]) == (421, "UNKNOWN_HOST")


def test_the_export_is_found_and_streamed(client):
    sent = client.get(f"{API}/exports/catalog.jsonl.zst", follow_redirects=False)
    assert (sent.status_code, sent.headers["location"]) == (302, f"http://localhost{API}/exports/catalog.jsonl")
    lines = client.get(sent.headers["location"]).text.splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("implementation") == 12


def test_openapi_describes_every_route(client):
    document = client.get(f"{API}/openapi.json").json()
    search = document["paths"][f"{API}/implementations"]["get"]["parameters"]
    assert {parameter["name"] for parameter in search} == {"q", *FILTERS}
    Draft202012Validator.check_schema(document["components"]["schemas"]["Results"])
    for path, methods in document["paths"].items():
        assert path.startswith(API)
        for method in methods.values():
            assert method["summary"]
            assert method["description"]


def test_no_index_no_server(tmp_path):
    with pytest.raises(StoreError, match="no index"):
        create_app(tmp_path / "none.sqlite")


# Harm

ROUTES = (
    "/implementations/{}",
    "/implementations/{}/files/{}",
    "/implementations/hostile/files/{}",
    "/operations/{}",
    "/runs/{}",
    "/techniques/{}",
    "/hardware/{}",
    "/{}",
)
FILTERS = [name for name in Query.__dataclass_fields__ if name != "text"]
PARAMETERS = (
    *(f"/implementations?{name}=" for name in ["q", *FILTERS]),
    "/implementations/hostile?include=",
    "/search?q=",
    "/search?q=toy-gemv&cohort=",
    "/operations?family=",
    "/operations/toy-gemv?workload=",
    "/operations/toy-gemv?cohort=",
    "/workloads?operation=",
    *(f"/runs?{name}=" for name in RunFilter.__dataclass_fields__),
    "/compare?a=hostile&b=",
    "/techniques/tma?cursor=",
    "/hardware/nvidia-b200?answer=",
)
FTS = st.lists(
    st.sampled_from([*"\"*^:(){}-+,'\\/.;\0\n", "AND", "OR", "NOT", "NEAR", "NEAR(", "name:", "gemv", "ﬀ", "́", "日本"]),
    max_size=12,
).map(" ".join)
SQL = st.sampled_from(["' OR 1=1 --", "'; DROP TABLE implementation; --", "%", "_", "1e999", "-1", "9" * 40, "null"])
PATHS = st.sampled_from(
    ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "submission.py/..", "//", "~", "."]
)
MARKUP = st.sampled_from(["<script>alert(1)</script>", "{{7*7}}", "javascript:alert(1)", "\r\nSet-Cookie: a=b"])
ANYTHING = st.text(max_size=60) | FTS | SQL | PATHS | MARKUP
BYTES = st.binary(max_size=30).map(lambda raw: quote(raw, safe=""))
HARM = ANYTHING.map(lambda text: quote(text.encode("utf-8", "surrogatepass"), safe="")) | BYTES | st.just("x" * 4000)
CURSORS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3),
    max_leaves=5,
).map(lambda value: cursor.encode(value))
often = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def harmless(sent):
    assert sent.status_code < 500, sent.text
    assert sent.headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in sent.headers
    assert not sent.headers["content-type"].startswith("text/html")
    if sent.status_code >= 400:
        assert sent.json()["status"] == sent.status_code


@often
@given(route=st.sampled_from(ROUTES), one=HARM, two=HARM)
def test_no_name_does_harm(client, route, one, two):
    harmless(client.get(API + route.format(one, two)))


@often
@given(parameter=st.sampled_from(PARAMETERS), value=HARM | CURSORS)
def test_no_parameter_does_harm(client, parameter, value):
    harmless(client.get(API + parameter + value))


@often
@given(
    body=st.binary(max_size=200)
    | st.dictionaries(st.just("runs"), st.lists(ANYTHING, max_size=10)).map(json.dumps)
    | st.just('{"runs": ["\\ud800", "\\u0000"]}')
)
def test_no_body_does_harm(client, body):
    harmless(client.post(f"{API}/compare", content=body, headers={"Content-Type": "application/json"}))


PAGES = (
    "/search?q={}",
    "/search?uses={}&author={}",
    "/search.json?cursor={}",
    "/implementations/{}",
    "/implementations/{}.json",
    "/implementations/hostile/files/{}",
    "/implementations/{}/files/{}",
    "/implementations/hostile/raw/{}",
    "/operations/{}",
    "/operations/toy-gemv?workload={}&cohort={}",
    "/techniques/{}",
    "/hardware/{}",
    "/runs/{}",
    "/runs?since={}&status={}",
    "/compare?a={}&b={}",
    "/static/{}",
    "/{}",
)


@often
@given(route=st.sampled_from(PAGES), one=HARM | CURSORS, two=HARM)
def test_no_page_is_harmed(client, route, one, two):
    sent = client.get(route.format(one, two))
    assert sent.status_code < 500, sent.text
    assert sent.headers["content-security-policy"] == guard.HEADERS["Content-Security-Policy"]
    assert "set-cookie" not in sent.headers
    if sent.headers["content-type"].startswith("text/html"):
        assert "<script" not in sent.text
        assert shelf.HOSTILE not in sent.text


def test_pages_of_hostile_content_hold_it_as_text(client):
    for address in ("/implementations/hostile", "/implementations/hostile/files/submission.py", "/search?q=hostile"):
        sent = client.get(address)
        assert sent.status_code == 200
        assert "<script" not in sent.text
        assert "&lt;script&gt;" in sent.text


def test_readers_are_not_troubled_by_a_writer(tmp_path):
    path = shelf.fill(tmp_path / "index.sqlite")
    troubles = []
    with TestClient(create_app(path), base_url="http://localhost") as client, Store.open(path) as store:

        def look(number: int) -> None:
            for i in range(8):
                for address in (f"/implementations?q=toy&limit={i + 1}", f"/implementations/{GEMV(2)}", "/runs"):
                    sent = client.get(API + address, headers={"X-Reader": str(number)})
                    if sent.status_code != 200:
                        troubles.append(sent.text)

        readers = [threading.Thread(target=look, args=(number,)) for number in range(4)]
        for reader in readers:
            reader.start()
        for number in range(100, 110):
            store.add(make_item(number, f"n = {number}\n".encode(), source=shelf.OPEN))
        for reader in readers:
            reader.join()
    assert not troubles


def test_nothing_was_written(client, catalog):
    assert read.search(catalog, Query()).total == 11
    assert catalog.one("PRAGMA query_only")[0] == 1
