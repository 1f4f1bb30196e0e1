"""The store: what goes in comes out, once; revisions, events, one writer, readers, damage, backup."""

import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from made_up import CODE, OPERATION, RUN, make_item

from nibblas.index import store as store_module
from nibblas.index.model import Claim, CompatFact, Event, Operation, Source, SourceFile, Tensor
from nibblas.index.store import Store, StoreError


def rows(store: Store, query: str) -> list[tuple]:
    return [tuple(row) for row in store.connection.execute(query)]


def found(store: Store, words: str) -> list[str]:
    query = "SELECT i.slug FROM search s JOIN implementation i ON i.id = s.rowid WHERE search MATCH ? ORDER BY i.slug"
    return [slug for (slug,) in store.connection.execute(query, (words,))]


def test_what_goes_in_comes_out(store, item):
    assert store.add(item) == "added"
    back = store.item(item.implementation.slug)
    known = {"revision": 1, "imported_at": back.implementation.imported_at}
    assert back == replace(item, implementation=replace(item.implementation, **known))
    assert back.implementation.digest == item.implementation.digest
    assert store.item(item.implementation.digest) == back
    assert store.run(RUN.digest_for(item.implementation.digest)) == RUN


def test_unknown_values_stay_unknown(store):
    bare = make_item(
        runs=(replace(RUN, workload=None, figures=(), samples=(), floor=None, error=None, observed_at=None),),
        authors=(),
        operation=None,
        language=None,
        framework=None,
        licence=None,
        tensors=(),
        source=Source("file", "somewhere"),
    )
    store.add(bare)
    back = store.item(bare.implementation.slug)
    assert back.runs == bare.runs
    assert back.implementation.operation is None
    assert back.implementation.source == Source("file", "somewhere")


def test_the_same_again_changes_nothing(store, item):
    store.add(item)
    before = list(store.connection.iterdump())
    assert store.add(item) == "unchanged"
    assert list(store.connection.iterdump()) == before


def test_what_is_new_of_a_known_implementation_is_added(store, item):
    store.add(item)
    later = replace(RUN, observed_at="2026-02-01T00:00:00+00:00")
    more = replace(item, runs=(RUN, later), facts=(CompatFact("compiled", arch="sm_100a"),), claims=(Claim("a", "b"),))
    assert store.add(more) == "updated"
    assert store.add(more) == "unchanged"
    back = store.item(item.implementation.slug)
    assert back.runs == (RUN, later)
    assert back.facts == (*item.facts, *more.facts)
    assert back.claims == (*item.claims, *more.claims)
    better = replace(item, implementation=replace(item.implementation, entry_point="other"))
    assert store.add(better) == "updated"
    assert store.implementation(item.implementation.slug).entry_point == "other"


def test_other_code_under_a_slug_is_a_revision(store, item):
    store.add(item)
    changed = make_item(code=CODE + b"# faster\n")
    assert store.add(changed) == "revised"
    now = store.implementation(item.implementation.slug)
    assert (now.revision, now.supersedes) == (2, item.implementation.digest)
    assert store.implementation(item.implementation.digest).revision == 1
    assert store.digests(now.slug) == [item.implementation.digest, changed.implementation.digest]
    kinds = [(event.kind, event.subject) for event in store.events()]
    first, second = item.implementation.digest, changed.implementation.digest
    assert kinds == [("publish", first), ("supersede", first), ("publish", second)]
    assert store.add(item) == "unchanged", "a revision that was superseded is known"
    assert found(store, "submission") == [now.slug]


def test_a_local_file_does_not_supersede_one_from_another_place(store):
    here = make_item(slug="kernels-a", source=Source("file", "~/kernels"), record="a.py")
    store.add(here)
    assert store.add(make_item(slug="kernels-a", code=b"1\n", source=Source("file", "~/kernels"), record="a.py")) == (
        "revised"
    )
    there = make_item(slug="kernels-a", code=b"2\n", source=Source("file", "~/other/kernels"), record="a.py")
    with pytest.raises(StoreError, match=r"kernels-a belongs to a.py from ~/kernels; give another by --slug"):
        store.add(there)


def test_a_local_file_that_is_as_it_was_is_current_again(store):
    def version(code: bytes):
        return make_item(slug="kernels-a", code=code, source=Source("file", "~/kernels"), record="a.py")

    first, second = version(b"a = 1\n"), version(b"b = 2\n")
    assert [store.add(item) for item in (first, second, first)] == ["added", "revised", "revised"]
    assert store.implementation("kernels-a").digest == first.implementation.digest
    third = version(b"c = 3\n")
    assert store.add(third) == "revised"
    now = store.implementation("kernels-a")
    assert (now.revision, now.supersedes) == (3, first.implementation.digest)
    assert [event.kind for event in store.events()].count("supersede") == 3


def test_runs_are_attached_to_any_revision(store, item):
    store.add(item)
    store.add(make_item(code=b"x = 1\n", runs=()))
    later = replace(RUN, observed_at="2026-02-01T00:00:00+00:00")
    digest = item.implementation.digest
    assert [store.attach(digest, [later]) for _ in range(2)] == ["updated", "unchanged"]
    assert store.runs(digest) == (RUN, later)
    assert store.implementation(item.implementation.slug).revision == 2
    with pytest.raises(KeyError, match="no implementation of this digest"):
        store.attach("nothing", [later])


def test_files_are_kept_once(store):
    store.add(make_item(1))
    store.add(make_item(2))
    assert rows(store, "SELECT count(*) FROM file") == [(1,)]
    assert rows(store, "SELECT count(*) FROM implementation_file") == [(2,)]


def test_an_operation_gains_what_later_sources_say(store):
    store.add(make_item(1, operation=Operation("toy-gemv", "toy_gemv"), runs=()))
    store.add(make_item(2, operation=replace(OPERATION, name="other name"), runs=()))
    assert store.implementation("kernelbot-toy-gemv-1").operation == OPERATION


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda item: replace(item, contents={"submission.py": b"other"}), "is not what its description says"),
        (lambda item: replace(item, contents={}), r"files are \['submission.py'\], need the contents' paths \[\]"),
        (lambda item: replace(item, contents={**item.contents, "more.py": b""}), "need the contents' paths"),
        (lambda item: replace(item, runs=(RUN, replace(RUN, floor=float("nan")))), "nan"),
    ],
    ids=["other bytes", "no bytes", "a file not described", "a figure that is no number"],
)
def test_nothing_is_kept_of_a_wrong_item(store, item, wrong, message):
    before = list(store.connection.iterdump())
    with pytest.raises(ValueError, match=message):
        store.add(wrong(item))
    assert list(store.connection.iterdump()) == before


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../a.py", "a/../../b.py", "a\\b.py", "a\nb.py", "./a.py", "a//b"])
def test_paths_stay_inside(store, item, path):
    implementation = replace(item.implementation, files=(SourceFile.of(path, CODE),))
    with pytest.raises(ValueError, match="relative path"):
        store.add(replace(item, implementation=implementation, contents={path: CODE}))


def test_one_bad_item_of_a_batch_is_undone_alone(store, item):
    with store.transaction():
        store.add(item)
        with pytest.raises(ValueError, match="need the contents' paths"):
            store.add(replace(make_item(2), contents={}))
        store.add(make_item(3))
    assert [d[:8] for d in store.digests()] == [i.implementation.digest[:8] for i in (item, make_item(3))]
    assert store.check() == []


def test_a_batch_that_fails_leaves_nothing(store, item):
    def batch():
        with store.transaction():
            store.add(item)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch()
    assert store.digests() == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE event SET kind = 'retract'",
        "DELETE FROM event",
        "INSERT OR REPLACE INTO event (id, at, kind, subject, body) VALUES (1, 'x', 'retract', 'x', '{}')",
    ],
)
def test_events_are_only_added(store, item, statement):
    store.add(item)
    before = store.events()
    with pytest.raises(sqlite3.IntegrityError, match="rows are only added"):
        store.connection.execute(statement)
    assert store.events() == before


def test_events_are_recorded(store, item):
    store.add(item)
    run = RUN.digest_for(item.implementation.digest)
    event = Event("dispute", run, "ann", "timer", {"ratio": 1.5}, "2026-01-01T00:00:00+00:00")
    store.record(event)
    assert store.events(run) == [event]
    assert store.subject(item.implementation.slug) == item.implementation.digest
    with pytest.raises(KeyError, match="no implementation or run"):
        store.record(Event("retract", "nothing"))
    with pytest.raises(KeyError, match="needs a digest"):
        store.record(Event("retract", item.implementation.slug))


def test_the_text_index_follows(store):
    store.add(make_item(1))
    store.add(make_item(2, authors=("cleo",)))
    assert found(store, "ann") == ["kernelbot-toy-gemv-1"]
    assert found(store, "toy gemv") == ["kernelbot-toy-gemv-1", "kernelbot-toy-gemv-2"]
    store.add(make_item(1, authors=("dora",)))
    assert found(store, "ann") == []
    assert found(store, "dora") == ["kernelbot-toy-gemv-1"]


def test_one_writer_who_is_named(tmp_path):
    path = tmp_path / "index.sqlite"
    code = (
        "import sys, time; from nibblas.index.store import Store; store = Store.open(sys.argv[1]);"
        " print('open', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match=rf"process {other.pid} \(.*\), since .*, is writing it"):
            Store.open(path, wait=0.1)
        with Store.open(path, read_only=True) as reader:
            assert reader.digests() == []
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    with Store.open(path, wait=0) as store:
        assert store.digests() == []


def test_a_writer_waits_for_the_one_before(tmp_path):
    first = Store.open(tmp_path / "index.sqlite")
    timer = threading.Timer(0.2, first._lock.close)
    timer.start()
    Store.open(tmp_path / "index.sqlite", wait=30).close()
    timer.join()
    first.connection.close()


def test_readers_see_a_whole_state_while_others_write(store, item):
    store.add(item)
    with Store.open(store.path, read_only=True) as reader, store.transaction():
        store.add(make_item(2))
        assert len(store.digests()) == 2
        assert len(reader.digests()) == 1
    with Store.open(store.path, read_only=True) as reader:
        assert len(reader.digests()) == 2
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.connection.execute("DELETE FROM searched")


def test_an_index_on_a_disk_that_can_not_be_written(tmp_path, monkeypatch):
    folder = tmp_path / "read only"
    with Store.open(folder / "index.sqlite") as store:
        store.add(make_item())
    folder.chmod(0o555)
    monkeypatch.setattr(store_module.os, "access", lambda *_: False)  # root may write everywhere
    with Store.open(folder / "index.sqlite", read_only=True) as reader:
        assert len(reader.digests()) == 1
    folder.chmod(0o755)


def test_what_is_no_index(tmp_path):
    with pytest.raises(StoreError, match="no index there"):
        Store.open(tmp_path / "none.sqlite", read_only=True)
    text = tmp_path / "text.sqlite"
    text.write_text("this is no SQLite file\n" * 100)
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    for read_only in (True, False):
        with pytest.raises(StoreError, match="can't be read as an index"):
            Store.open(text, read_only=read_only)
        with pytest.raises(StoreError, match="not an index of nibblas"):
            Store.open(other, read_only=read_only)
    assert text.read_text().startswith("this is no")


def test_an_index_of_another_version(tmp_path):
    path = tmp_path / "index.sqlite"
    with Store.open(path) as store:
        store.connection.execute("PRAGMA user_version = 99")
    for read_only in (True, False):
        with pytest.raises(StoreError, match="of a newer nibblas"):
            Store.open(path, read_only=read_only)


def test_an_older_index_is_brought_up_to_date(tmp_path, monkeypatch):
    path = tmp_path / "index.sqlite"
    with Store.open(path) as store:
        store.add(make_item())
    schema = tmp_path / "schema"
    schema.mkdir()
    for migration in store_module.SCHEMA.glob("*.sql"):
        (schema / migration.name).write_text(migration.read_text())
    (schema / "9998_more.sql").write_text("ALTER TABLE author ADD COLUMN homepage TEXT;")
    monkeypatch.setattr(store_module, "SCHEMA", schema)
    with pytest.raises(StoreError, match="of an older nibblas"):
        Store.open(path, read_only=True)
    with Store.open(path) as store:
        assert rows(store, "SELECT name, homepage FROM author") == [("ann", None), ("bob", None)]
    (schema / "9999_wrong.sql").write_text("ALTER TABLE author ADD COLUMN age INTEGER; SELECT nothing;")
    with pytest.raises(sqlite3.OperationalError):
        Store.open(path)
    (schema / "9999_wrong.sql").unlink()
    with Store.open(path) as store:
        assert "age" not in [name for _, name, *_ in rows(store, "PRAGMA table_info(author)")]
        assert store.check() == []


def test_check_finds_damage(store, item):
    store.add(item)
    store.add(make_item(2))
    assert store.check() == []
    with store.transaction():
        store.connection.execute("UPDATE file SET content = zeroblob(20)")
    assert "its content is damaged" in store.check()[0]
    with store.transaction():
        store.connection.execute("UPDATE file SET content = ?", (store_module.zlib.compress(b"other"),))
        store.connection.execute("UPDATE implementation SET name = 'other' WHERE slug LIKE '%-1'")
        store.connection.execute("UPDATE run SET error = 0 WHERE implementation = 2")
        store.connection.execute("DROP TRIGGER searched_changed")
        store.connection.execute("UPDATE searched SET name = 'other'")
    told = "\n".join(store.check())
    assert "its content has the digest" in told
    assert f"its digest is not {item.implementation.digest}" in told
    assert "kernelbot-toy-gemv-2: a run (a record) is not what its digest says" in told
    assert "text index" in told


def test_backup_is_whole_and_replaces_whole(store, item, tmp_path):
    store.add(item)
    target = store.backup(tmp_path / "copies" / "copy.sqlite")
    with Store.open(target, read_only=True) as copy:
        assert list(copy.connection.iterdump()) == list(store.connection.iterdump())
    store.add(make_item(2))
    with store.transaction():
        store.add(make_item(3))
        # A copy holds what was kept, not what a transaction may still undo.
        with Store.open(store.path, read_only=True) as reader:
            assert reader.backup(tmp_path / "copies") == tmp_path / "copies" / "index.sqlite"
    with Store.open(tmp_path / "copies" / "index.sqlite") as copy:
        assert len(copy.digests()) == 2
        assert copy.check() == []
    assert not list((tmp_path / "copies").glob("*.partial"))
    with pytest.raises(StoreError, match="is the index itself"):
        store.backup(store.path)
    other = tmp_path / "kernel.py"
    other.write_text("x = 1\n")
    with pytest.raises(StoreError, match="no index"):
        store.backup(other)
    assert other.read_text() == "x = 1\n"


def test_tensors_without_a_shape(store):
    tensors = (Tensor("a", "input"), Tensor("c", "output", "fp16", ()))
    store.add(make_item(tensors=tensors))
    assert store.implementation("kernelbot-toy-gemv-1").tensors == tensors
