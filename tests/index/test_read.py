"""What reads give: search, dossiers, cohorts, runs, comparison; and what keeps being right while it is written."""

import json
from dataclasses import replace

import pytest
import shelf
from hypothesis import given
from hypothesis import strategies as st
from made_up import make_item

from nibblas.index import jsonl, read
from nibblas.index.catalog import Catalog
from nibblas.index.documents import (
    NotFoundError,
    NotShownError,
    Query,
    QueryError,
    RunFilter,
    plain,
    to_json,
)
from nibblas.index.evidence_levels import TIMING
from nibblas.index.lines import RUNS
from nibblas.index.model import Environment, Event
from nibblas.index.read.runs import LATEST, run_conditions
from nibblas.index.scan import Scan
from nibblas.index.store import Store

GEMV = "kernelbot-toy-gemv-{}".format


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    path = shelf.fill(tmp_path_factory.mktemp("index") / "index.sqlite")
    with Catalog(path) as opened:
        yield opened


def slugs(catalog, **query):
    return [card.slug for card in read.search(catalog, Query(**{"limit": 200, "sort": "name", **query})).cards]


def every(catalog, **query):
    """The slugs of all pages."""
    found, cursor = [], None
    while True:
        page = read.search(catalog, Query(**query, cursor=cursor))
        found += [card.slug for card in page.cards]
        cursor = page.next
        if cursor is None:
            return found


def test_every_current_implementation_is_found(catalog):
    assert slugs(catalog) == sorted(shelf.items())


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ({"text": "submission 3"}, [3]),
        ({"text": "CLEO"}, [2]),
        ({"text": "cle"}, [2]),
        ({"text": "cl"}, []),
        ({"text": "kernelbot-toy-gemv-4"}, [4]),
        ({"text": "nothing-like-it"}, []),
        ({"text": "ann -- cleo"}, []),
        ({"author": "cleo"}, [2]),
        ({"author": "cl"}, []),
        ({"language": "cuda"}, [6]),
        ({"framework": "unknown"}, [6]),
        ({"operation": "unknown"}, [8]),
        ({"source": "catalog-page"}, [4, 5, 8]),
        ({"licence": "unknown"}, [4, 5, 8]),
        ({"timing": "reported"}, [1, 2, 3, 4, 5, 9]),
        ({"numerics": "checked-hardened"}, [1, 2, 3, 9]),
        ({"numerics": "claimed", "timing": "measured", "author": "cleo"}, [2]),
        ({"uses": ("tma",), "language": "python"}, [3, 4, 5, 7, 8, 9]),
        ({"uses": ("tma", "split-k")}, [4, 6, 8]),
        ({"uses": ("split-k",)}, [2, 4, 6, 8]),
        ({"uses": ("unheard-of",)}, []),
        ({"origin": "model"}, []),
    ],
)
def test_filters(catalog, query, numbers):
    found = [slug for slug in slugs(catalog, **query) if slug.startswith("kernelbot")]
    assert found == [GEMV(number) for number in numbers]


def test_mentions_include_uses(catalog):
    assert slugs(catalog, mentions=("split-k",)) == slugs(catalog)


def test_the_best_known_come_first_and_the_newest_of_those_alike(catalog):
    found = every(catalog, limit=3)
    assert sorted(found) == slugs(catalog)
    known = {card.slug: card.levels for card in read.search(catalog, Query(limit=200)).cards}
    timing = [TIMING.index(known[slug].timing) for slug in found]
    assert timing == sorted(timing, reverse=True)
    assert found.index(GEMV(3)) < found.index(GEMV(1)) < found.index(GEMV(4))


@pytest.mark.parametrize("sort", ["evidence", "newest", "name"])
@pytest.mark.parametrize("limit", [1, 2, 5, 200])
def test_pages_hold_each_once(catalog, sort, limit):
    found = every(catalog, sort=sort, limit=limit)
    assert sorted(found) == slugs(catalog)
    assert found == every(catalog, sort=sort, limit=200)


def test_a_cursor_of_another_sort_is_refused(catalog):
    cursor = read.search(catalog, Query(limit=1, sort="name")).next
    for wrong in (cursor, "x", "WyJ4", "bnVsbA", "NQ", "ImFiIg", "☃", "W1siYSJdLDFd"):
        with pytest.raises(QueryError, match="cursor"):
            read.search(catalog, Query(limit=1, sort="newest", cursor=wrong))


def test_facets_say_what_each_value_would_leave(catalog):
    results = read.search(catalog, Query(source="kernelbot-dataset", uses=("tma",)))
    assert [facet.name for facet in results.facets] == list(read.FACETS)
    for facet in results.facets:
        for value in facet.values:
            chosen = (*results.query.uses, value.value) if facet.name == "uses" else value.value
            there = read.search(catalog, replace(results.query, **{facet.name: chosen}), facets=False)
            assert there.total == value.count, (facet.name, value)
    selected = {value.value for facet in results.facets for value in facet.values if value.selected}
    assert selected == {"kernelbot-dataset", "tma"}


def test_a_facet_shows_the_most_frequent_and_what_is_chosen(catalog):
    selection = catalog.prepared.selection
    counts, more = selection.count("source", selection.all, (), 1)
    assert counts == [("kernelbot-dataset", 8)]
    assert more == 1
    counts, more = selection.count("source", selection.all, ("catalog-page", "none such"), 1)
    assert counts == [("kernelbot-dataset", 8), ("catalog-page", 3)]
    assert more == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0},
        {"limit": 201},
        {"sort": "size"},
        {"numerics": "proved"},
        {"timing": "fast"},
        {"answer": "maybe"},
        {"text": "a " * 33},
        {"text": "a" * 501},
        {"uses": ("a",) * 17},
    ],
)
def test_queries_that_can_t_be_meant(catalog, wrong):
    with pytest.raises(QueryError, match=r"need|more than"):
        read.search(catalog, Query(**wrong))


@given(text=st.text(max_size=40))
def test_any_text_can_be_searched_for(catalog, text):
    found = read.search(catalog, Query(text=text))
    assert 0 <= found.total <= 11
    to_json(found).encode("utf-8", "replace")


def test_a_card_tells_what_a_list_needs(catalog):
    (card,) = read.search(catalog, Query(text="submission-3", operation="toy-gemv", author="ann", uses=("tma",))).cards
    assert (card.slug, card.operation.slug, card.authors) == (GEMV(3), "toy-gemv", ("ann", "bob"))
    assert card.devices == ("NVIDIA B200", "NVIDIA H200")
    assert card.fastest.figure.value == 1.1e-5
    assert card.fastest.workload.name == "m: 128; k: 64; seed: 7"
    assert (card.levels.numerics, card.levels.timing) == ("checked-hardened", "measured")
    assert card.techniques == ("tma",)


def test_a_dossier_has_all_that_is_stored(catalog):
    dossier = read.implementation(catalog, GEMV(2), ("source", "samples", "findings"))
    assert dossier.implementation.revision == 2
    assert [revision.revision for revision in dossier.revisions] == [2, 1]
    assert dossier.files[0].text == "new = 1\nsame = 2\n"
    assert dossier.previous[0].text == "old = 1\nsame = 2\n"
    assert dossier.runs[0].samples == shelf.RUN.samples
    assert [event.kind for event in dossier.events] == ["publish"]
    assert dossier.licence.declared == "MIT"
    assert dossier.licence.shown
    assert [(cell.device, cell.levels.timing) for cell in dossier.cells] == [("NVIDIA B200", "measured")]
    assert {claim.subject for claim in dossier.claims} == {"user id", "lines"}
    older = read.implementation(catalog, dossier.revisions[1].digest)
    assert older.implementation.revision == 1
    assert older.levels.timing == "measured"
    assert older.runs[0].standing.reasons == ("a later revision supersedes it",)


def test_texts_samples_and_findings_come_where_they_are_asked_for(catalog):
    dossier = read.implementation(catalog, GEMV(9))
    assert dossier.files[0].text is None
    assert dossier.runs[0].samples == ()
    tma = next(use for use in dossier.techniques if use.technique.slug == "tma")
    assert (tma.uses, tma.mentions, len(tma.findings)) == (7, 0, 3)
    every = read.implementation(catalog, GEMV(9), ("findings",))
    assert [len(use.findings) for use in every.techniques] == [7, 1]
    assert [(use.technique.slug, use.uses, use.mentions) for use in every.techniques] == [
        ("tma", 7, 0),
        ("split-k", 0, 1),
    ]


def test_a_source_whose_terms_are_unknown_is_not_shown(catalog):
    dossier = read.implementation(catalog, GEMV(5), ("source",))
    assert dossier.files[0].text is None
    assert dossier.files[0].sha256
    assert dossier.ways[0].why_not
    with pytest.raises(NotShownError, match="terms are unknown"):
        read.file(catalog, GEMV(5), "submission.py")


@pytest.mark.parametrize(("number", "may_show"), [(5, False), (6, True)])
def test_lines_of_source_are_cited_only_where_it_may_be_shown(catalog, number, may_show):
    dossier = read.implementation(catalog, GEMV(number), ("findings",))
    assert dossier.licence.shown == may_show
    found = [finding.body for use in dossier.techniques for finding in use.findings]
    (example,) = [at for ref, at in read.technique(catalog, "tma").examples if ref.slug == GEMV(number)]
    assert {("snippet" in body) for body in (*found, example.body)} == {may_show}
    assert {(body["technique"], body["line"]) for body in found} >= {("split-k", 1), ("tma", 1)}


def test_a_file_is_given_as_its_bytes(catalog):
    found, raw = read.file(catalog, "hostile", "submission.py")
    assert raw == shelf.HOSTILE.encode()
    assert found.size == len(raw)
    for path in ("../submission.py", "/etc/passwd", "", "submission.py\0"):
        with pytest.raises(NotFoundError):
            read.file(catalog, "hostile", path)


def test_ways_to_use_it(catalog):
    ways = {way.name: way for way in read.implementation(catalog, "toy-gemm-compiled").ways}
    assert ways["install"].how == "pip install toy"
    assert ways["import"].how == "import toy"
    assert "submission.py (1 line), under MIT" in ways["vendor"].how
    ways = {way.name: way for way in read.implementation(catalog, GEMV(8)).ways}
    assert all(way.how is None and way.why_not for way in ways.values())


def test_ranks_of_a_cohort(catalog):
    page = read.operation(catalog, "toy-gemv")
    first = page.cohorts[0]
    assert (first.device, first.claimed, first.size) == ("NVIDIA B200", False, 6)
    assert [(line.implementation.slug, line.standing.rank, line.standing.tied) for line in first.runs] == [
        (GEMV(1), 1, True),
        (GEMV(3), 1, True),
        (GEMV(2), 2, False),
        (GEMV(9), 3, False),
        ("hostile", 4, False),
        (GEMV(4), 5, False),
    ]
    assert {line.implementation.slug: line.standing.reasons for line in first.excluded} == {
        GEMV(2): ("a later revision supersedes it",),
        GEMV(6): ("its status is wrong",),
    }
    devices = {(cohort.device, cohort.claimed) for cohort in page.cohorts}
    assert devices == {("NVIDIA B200", False), ("NVIDIA B200", True), ("NVIDIA H200", False)}
    assert page.line.implementations == 9


def test_an_operation_by_workload_cohort_and_page_size(catalog):
    workload = read.workloads(catalog, "toy-gemv")[0]
    assert (workload.runs, workload.implementations) == (8, 7)
    page = read.operation(catalog, "toy-gemv", workload=workload.digest)
    assert {cohort.workload.slug for cohort in page.cohorts} == {workload.digest}
    key = page.cohorts[0].key
    (only,) = read.operation(catalog, "toy-gemv", cohort=key, limit=2).cohorts
    assert (only.key, len(only.runs), only.more, only.size) == (key, 2, 4, 6)
    for wrong in ({"workload": "none"}, {"cohort": "none"}):
        with pytest.raises(NotFoundError):
            read.operation(catalog, "toy-gemv", **wrong)
    with pytest.raises(NotFoundError):
        read.operation(catalog, "toy")
    with pytest.raises(QueryError):
        read.operation(catalog, "toy-gemv", limit=0)


def test_an_operation_of_which_nothing_was_run(catalog):
    page = read.operation(catalog, "toy-gemm")
    assert [table.size for table in page.cohorts] == [0]
    assert [card.slug for card in page.implementations] == ["toy-gemm-compiled"]


@pytest.mark.parametrize("limit", [1, 3, 200])
def test_runs_come_newest_first_and_once(catalog, limit):
    found, cursor = [], None
    while True:
        page = read.runs(catalog, RunFilter(limit=limit, cursor=cursor))
        found += page.runs
        cursor = page.next
        if cursor is None:
            break
    assert len({line.digest for line in found}) == len(found) == 10
    assert all(line.status == "passed" for line in found)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({"status": "wrong"}, 1),
        ({"status": "compiled"}, 1),
        ({"status": "timeout"}, 0),
        ({"operation": "toy-gemv"}, 10),
        ({"operation": "toy-gemm"}, 0),
        ({"operation": "none"}, 0),
        ({"hardware": "NVIDIA H200"}, 1),
        ({"hardware": "nvidia-h200"}, 1),
        ({"hardware": "!"}, 0),
        ({"source": "catalog-page"}, 3),
        ({"since": "2026-01-02T03:04:05Z"}, 10),
        ({"since": "2026-01-02T05:04:05+02:00"}, 10),
        ({"since": "2026-01-02T03:04:06Z"}, 0),
    ],
)
def test_filters_of_runs(catalog, wanted, count):
    assert len(read.runs(catalog, RunFilter(**wanted)).runs) == count


@pytest.mark.parametrize(
    "wrong", [{"limit": 0}, {"status": "fine"}, {"since": "yesterday"}, {"cursor": "x"}, {"cursor": "WzEsMl0"}]
)
def test_filters_of_runs_that_can_t_be_meant(catalog, wrong):
    with pytest.raises(QueryError):
        read.runs(catalog, RunFilter(**wrong))


def test_a_run_with_all_that_is_stored(catalog):
    line = read.implementation(catalog, GEMV(9)).runs[0]
    page = read.run(catalog, line.digest)
    assert page.run.samples == shelf.RUN.samples
    assert dict(page.cohort)["device"] == "NVIDIA B200"
    assert {state.kind for state in page.line.levels.states} == {"disputed", "not reproduced"}
    assert [event.kind for event in page.events] == ["dispute", "attest"]
    with pytest.raises(NotFoundError):
        read.run(catalog, "none")


def test_comparison_pairs_runs_of_one_cohort(catalog):
    found = read.compare(catalog, GEMV(1), GEMV(4))
    (pair,) = found.pairs
    assert pair.faster == "a"
    assert pair.ratio == pytest.approx(1 / 9)
    assert pair.low == pytest.approx(0.9e-5 / 9e-5)
    assert pair.high == pytest.approx(1.1e-5 / 9e-5)
    assert read.compare(catalog, GEMV(4), GEMV(1)).pairs[0].faster == "b"
    assert read.compare(catalog, GEMV(1), GEMV(3)).pairs[0].faster == "neither"
    assert {difference.fact for difference in found.differences} >= {"licence declared", "files", "kind of source"}
    assert {difference.fact for difference in found.same} >= {"operation", "language"}


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (1, 8, ["the operations differ: toy_gemv and unknown", "submission 8 has no ranked run"]),
        (
            1,
            5,
            ["the workloads differ: m: 128; k: 64; seed: 7 and the whole board", "protocols differ", "words differ"],
        ),
        (6, 7, ["submission 6 has no ranked run", "submission 7 has no ranked run"]),
    ],
)
def test_comparison_says_why_nothing_is_paired(catalog, a, b, why):
    found = read.compare(catalog, GEMV(a), GEMV(b))
    assert found.pairs == ()
    assert all(any(reason in given for given in found.why_not) for reason in why)


def test_techniques_count_uses_and_mentions(catalog):
    lines = {line.slug: line for line in read.techniques(catalog)}
    assert (lines["split-k"].uses, lines["split-k"].mentions) == (5, 6)
    assert (lines["tma"].uses, lines["tma"].mentions) == (9, 0)
    assert lines["split-k"].description
    assert [line.uses for line in lines.values()] == sorted((line.uses for line in lines.values()), reverse=True)
    page = read.technique(catalog, "tma")
    assert page.results.total == 9
    assert all(finding.body["kind"] == "use" for _, finding in page.examples)
    assert len(page.examples) == 9
    with pytest.raises(NotFoundError):
        read.technique(catalog, "unheard-of")


def test_devices(catalog):
    lines = {line.slug: line for line in read.hardware(catalog)}
    assert (lines["nvidia-b200"].runs, lines["nvidia-h200"].runs) == (9, 1)
    assert (lines["nvidia-h200"].yes, lines["nvidia-h200"].no, lines["nvidia-h200"].unknown) == (1, 2, 8)
    assert lines["amd-mi355x"].runs == 0
    page = read.device(catalog, "nvidia-b200")
    assert page.cohorts[0].size == 6
    assert page.facts["architecture"]["name"] == "Blackwell"
    assert read.device(catalog, "NVIDIA B200").line == page.line
    with pytest.raises(NotFoundError):
        read.device(catalog, "abacus")
    with pytest.raises(QueryError, match="abacus"):
        read.search(catalog, Query(hardware="abacus"))


def test_answers_name_the_run_the_refusal_or_the_line(catalog):
    def answer(number, device):
        found = read.implementation(catalog, GEMV(number)).hardware
        return next(one for one in found if one.hardware.slug == device)

    ran = answer(3, "nvidia-h200")
    assert (ran.answer, ran.reason) == ("yes", "It ran on NVIDIA H200.")
    assert answer(3, "nvidia-b200").reason == "It ran on NVIDIA B200."
    assert answer(8, "nvidia-b200").reason == "It ran on NVIDIA B200: its source says so."
    assert answer(7, "nvidia-h200").answer == "no"
    forbidden = answer(9, "nvidia-h200")
    assert (forbidden.answer, forbidden.path, forbidden.line) == ("no", "submission.py", 3)
    assert "sm_100a" in forbidden.reason
    assert answer(1, "nvidia-h200").answer == "unknown"


def test_what_is_counted_for_all_is_what_one_is_answered(catalog):
    for slug in shelf.items():
        for one in read.implementation(catalog, slug).hardware:
            for answer in ("yes", "no", "unknown"):
                found = slugs(catalog, hardware=one.hardware.slug, answer=answer)
                assert (slug in found) == (answer == one.answer), (slug, one)


def test_the_five_facts_stay_apart(catalog):
    facts = read.implementation(catalog, GEMV(7)).facts
    assert [(fact.kind, fact.gpu, fact.claimed) for fact in facts] == [
        ("declared", "NVIDIA B200", False),
        ("measured", "NVIDIA B200", True),
        ("refused", "NVIDIA H200", False),
    ]
    required = [fact for fact in read.implementation(catalog, GEMV(9)).facts if fact.kind == "required"]
    assert [(fact.arch, fact.path, fact.line) for fact in required] == [
        ("sm_100a", "submission.py", 3),
        ("gfx950", "submission.py", 4),
    ]


def test_a_device_that_no_table_lists_is_known_by_its_name(tmp_path):
    cpu = Environment("A CPU", "cpu", 2)
    with Store.open(tmp_path / "index.sqlite") as store:
        store.add(make_item(1, b"a = 1\n", (shelf.timed(1.0, environment=cpu),)))
        scan = Scan("test", (shelf.needs("sm_100a", 1),))
        store.add(make_item(2, b"b = 1\n", ()), {"submission.py": scan})
        store.add(make_item(3, b"c = 1\n", ()))
    with Catalog(tmp_path / "index.sqlite") as catalog:
        found = {answer: slugs(catalog, hardware="a-cpu", answer=answer) for answer in ("yes", "no", "unknown")}
        assert found == {"yes": [GEMV(1)], "no": [GEMV(2)], "unknown": [GEMV(3)]}
        line = read.device(catalog, "A CPU").line
        assert (line.vendor, line.arch, line.yes) == (None, "cpu", 1)


def test_sources_and_coverage(catalog):
    lines = read.sources(catalog)
    assert [(line.source.kind, line.implementations) for line in lines] == [
        ("kernelbot-dataset", 8),
        ("catalog-page", 3),
    ]
    assert (lines[1].shown, lines[1].runs) == (0, 3)
    found = read.coverage(catalog)
    assert (found.implementations, found.revisions, found.operations) == (11, 12, 2)
    assert sum(found.timing.values()) == sum(found.numerics.values()) == 11
    assert dict(found.families)["gemv"][found.devices.index("NVIDIA H200")] == 1


def test_the_export_has_a_line_for_everything(catalog):
    lines = [json.loads(line) for line in jsonl.lines(catalog)]
    kinds = [line["kind"] for line in lines]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "operation": 2,
        "workload": 1,
        "implementation": 12,
        "event": 15,
    }
    one = next(line for line in lines if line["kind"] == "implementation")
    assert one["record"]["files"][0]["path"] == "submission.py"
    assert one["runs"][0]["samples"] == list(shelf.RUN.samples)


def test_what_is_added_is_seen(tmp_path):
    path = shelf.fill(tmp_path / "index.sqlite")
    with Catalog(path) as catalog:
        assert read.search(catalog, Query()).total == 11
        before = catalog.state()
        assert catalog.state() == before
        with Store.open(path) as store:
            store.add(make_item(99, b"added = 1\n", (shelf.timed(1e-7, 1e-9),), source=shelf.OPEN))
            retracted = store.implementation(GEMV(1)).digest
            store.record(Event("retract", retracted, "ann", "a stale buffer"))
        catalog.prepared.seconds = 0.0  # else it waits a while, so as not to prepare all the time
        assert catalog.state() != before
        assert read.search(catalog, Query(text="99")).total == 1
        first = read.operation(catalog, "toy-gemv").cohorts[0]
        assert first.runs[0].implementation.slug == GEMV(99)
        reasons = {line.implementation.slug: line.standing.reasons for line in first.excluded}
        assert reasons[GEMV(1)] == ("retracted: a stale buffer",)
        assert read.implementation(catalog, GEMV(1)).levels.timing == "none"


def test_an_empty_index_is_read(tmp_path):
    Store.open(tmp_path / "index.sqlite").close()
    with Catalog(tmp_path / "index.sqlite") as catalog:
        assert read.search(catalog, Query(text="x")).total == 0
        assert read.search(catalog, Query()).cards == ()
        assert read.coverage(catalog).implementations == 0
        assert read.operations(catalog) == ()
        assert not any(line.runs or line.yes or line.unknown for line in read.hardware(catalog))
        assert not any(line.uses or line.mentions for line in read.techniques(catalog))
        assert read.runs(catalog, RunFilter()).runs == ()
        assert list(jsonl.lines(catalog)) == []


def test_json_of_results_is_that_of_the_document(catalog):
    results = read.search(catalog, Query(text="submission", limit=3))
    for _ in range(2):  # the second time with parts that are kept
        assert json.loads(to_json(results)) == json.loads(json.dumps(plain(results)))


def test_numbers_that_are_not_finite_become_null():
    assert json.loads(to_json({"a": float("nan"), "b": (float("inf"), 1.0)})) == {"a": None, "b": [None, 1.0]}
    assert plain({"a": -float("inf")}) == {"a": None}
    with pytest.raises(TypeError):
        to_json({"a": object()})


@pytest.mark.parametrize(
    "wanted",
    [{}, {"operation": "toy-gemv"}, {"hardware": "NVIDIA B200"}, {"status": "wrong"}, {"since": "2026-01-02"}],
)
def test_runs_are_listed_by_an_index_alone(catalog, wanted):
    wanted_by = run_conditions(catalog, RunFilter(**wanted)) | {"(r.observed_at, r.id) < (?, ?)": (LATEST, 0)}
    values = [value for of in wanted_by.values() for value in of]
    query = f"EXPLAIN QUERY PLAN {RUNS} WHERE {' AND '.join(wanted_by)} ORDER BY r.observed_at DESC, r.id DESC"
    steps = [row["detail"] for row in catalog.all(query, *values) if row["parent"] == 0]
    assert steps
    assert not [step for step in steps if step.startswith("SCAN") or "TEMP B-TREE" in step]
