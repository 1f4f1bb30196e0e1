"""What the rules find is kept once, by version, and what follows from it is kept with it."""

import json

import pytest
from made_up import CODE, make_item

from nibblas.index import ingest, licence, scan, techniques
from nibblas.index.ingest.reading import Options
from nibblas.index.model import Source
from nibblas.index.scan import identifiers
from nibblas.index.store import Store

KERNEL = b"""# SPDX-License-Identifier: MIT
import triton
import triton.language as tl


@triton.jit
def kernel(a, c):
    tl.atomic_add(c, tl.load(a))


def custom_kernel(data):
    kernel[(1,)](*data)
"""


def scanned(store: Store, item) -> None:
    store.add(item, {path: scan.scan(path, raw) for path, raw in item.contents.items()})


def findings(store: Store) -> list[tuple[str, int, dict]]:
    rows = store.connection.execute("SELECT topic, line, body FROM finding ORDER BY id")
    return [(topic, line, json.loads(body)) for topic, line, body in rows]


def techniques_of(store: Store, slug: str) -> dict[str, tuple[int, int]]:
    rows = store.connection.execute(
        "SELECT technique, uses, mentions FROM implementation_technique t JOIN implementation i"
        " ON i.id = t.implementation WHERE i.slug = ?",
        (slug,),
    )
    return {technique: (uses, mentions) for technique, uses, mentions in rows}


def found(store: Store, words: str) -> list[str]:
    rows = store.connection.execute(
        "SELECT i.slug FROM search s JOIN implementation i ON i.id = s.rowid WHERE search MATCH ?", (words,)
    )
    return [slug for (slug,) in rows]


def test_findings_are_kept_as_the_rules_give_them(store):
    scanned(store, make_item(code=KERNEL))
    text = KERNEL.decode()
    kept = findings(store)
    for topic, found_in_text in (
        ("technique", techniques.find("submission.py", text)),
        ("licence", licence.findings("submission.py", text)),
    ):
        bodies = [body for kind, _, body in kept if kind == topic]
        assert len(bodies) == len(found_in_text) > 0
        for body, finding in zip(bodies, found_in_text, strict=True):
            assert body == {name: value for name, value in vars(finding).items() if value not in (None, "", ())}
    assert all(line == body["line"] for _, line, body in kept)


def test_uses_are_counted_apart_from_mentions(store):
    scanned(store, make_item(code=KERNEL.replace(b"import triton\n", b"import triton  # no atomics here\n")))
    uses, mentions = techniques_of(store, "kernelbot-toy-gemv-1")["atomics"]
    assert (uses, mentions) == (1, 1)
    assert found(store, "techniques: atomics") == ["kernelbot-toy-gemv-1"]


def test_a_file_of_several_implementations_is_scanned_once(store):
    scanned(store, make_item(1, code=KERNEL))
    before = findings(store)
    scanned(store, make_item(2, code=KERNEL))
    assert findings(store) == before
    assert techniques_of(store, "kernelbot-toy-gemv-2") == techniques_of(store, "kernelbot-toy-gemv-1") != {}


def test_newer_rules_take_the_place_of_older(store, monkeypatch):
    scanned(store, make_item(1, code=KERNEL))
    scanned(store, make_item(2, code=KERNEL))
    store.add(make_item(3, code=CODE))
    assert ingest.scan(store) == 1, "the file that no rules have read"
    assert ingest.scan(store) == 0
    before = findings(store)
    monkeypatch.setattr(ingest, "versions", lambda: "newer")
    monkeypatch.setattr(scan, "versions", lambda: "newer")
    monkeypatch.setattr(techniques, "find", lambda path, text: [])
    seen = []
    assert ingest.scan(store, lambda *progress: seen.append(progress)) == 2
    assert seen == [(2, 2, "files")]
    after = findings(store)
    assert {topic for topic, _, _ in before} - {topic for topic, _, _ in after} == {"technique"}
    assert techniques_of(store, "kernelbot-toy-gemv-1") == techniques_of(store, "kernelbot-toy-gemv-2") == {}
    assert found(store, "techniques: atomics") == []
    assert store.check() == []


def test_a_source_on_which_a_reader_fails_is_kept(store, monkeypatch):
    def fail(path, text):
        raise IndexError("too deep")

    monkeypatch.setattr(techniques, "find", fail)
    scanned(store, make_item(code=KERNEL))
    problem, versions = store.connection.execute("SELECT problem, versions FROM scan").fetchone()
    assert problem == "technique: IndexError: too deep"
    assert versions == scan.versions()
    assert {topic for topic, _, _ in findings(store)} >= {"licence"}


@pytest.mark.parametrize(
    ("declared", "terms", "shown"),
    [(None, None, False), ("MIT", None, True), (None, "CC-BY-4.0", True), (None, "LicenseRef-secret", False)],
)
def test_source_is_searched_where_it_may_be_shown(store, declared, terms, shown):
    scanned(store, make_item(code=CODE, licence=declared, source=Source("kernelbot-dataset", "toy", terms=terms)))
    assert bool(found(store, "source: custom_kernel")) is shown
    assert found(store, "name: submission")
    concluded, may_show, under = store.connection.execute(
        "SELECT licence_concluded, may_show, shown_under FROM implementation"
    ).fetchone()
    assert (concluded, bool(may_show)) == (declared, shown)
    assert under == ((declared or terms) if shown else None)


def test_versions_follow_what_decides(monkeypatch, tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "rule.py").write_text("a")
    monkeypatch.setattr(scan, "PACKAGE", folder)
    digests = set()
    for text in ("a", "b"):
        (folder / "rule.py").write_text(text)
        digests.add(scan.versions.__wrapped__())
    assert len(digests) == 2


def test_every_reader_is_there():
    for pattern in scan.READERS:
        assert list(scan.PACKAGE.glob(pattern)), pattern


def test_identifiers():
    assert identifiers([b"a_b = f(a_b, 12) # \xff n\xc3\xa4her", b"f(x1)"]) == "a_b näher x1"


def test_scans_in_other_processes_are_the_same(store, tmp_path, monkeypatch):
    from test_ingest import data_set, flat

    path = data_set(tmp_path / "toy.parquet", flat(5))
    ingest.add(store, [path], Options(terms="MIT"))
    monkeypatch.setattr(scan, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(scan.os, "cpu_count", lambda: 2)
    with Store.open(tmp_path / "other.sqlite") as other:
        ingest.add(other, [path], Options(terms="MIT"))
        assert findings(other) == findings(store) != []
