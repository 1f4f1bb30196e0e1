"""The command line, as a person types it."""

import json

import pytest
from made_up import RUN, make_item
from test_ingest import PAGE, PYTHON, data_set, flat, write
from typer.testing import CliRunner

from nibblas.index import commands
from nibblas.index.commands import app
from nibblas.index.ingest import Report
from nibblas.index.ingest.reading import Skipped
from nibblas.index.model import Source
from nibblas.index.store import Store, StoreError, default_path, no_index


@pytest.fixture
def nibblas_index(tmp_path, monkeypatch):
    """Runs a command on an index in the cache; what it prints, its status, and its error as it came."""
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path / "cache"))

    def run(*arguments):
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return run


def opened(tmp_path) -> Store:
    return Store.open(tmp_path / "cache" / "index.sqlite")


def test_add_tells_what_it_did(nibblas_index, tmp_path):
    write(tmp_path / "in" / "a.py", PYTHON)
    write(tmp_path / "in" / "notes.md", "notes")
    done = nibblas_index("add", tmp_path / "in")
    assert done.stdout.splitlines() == [
        "1 added",
        f"skipped 1: no importer takes .md files: {tmp_path / 'in' / 'notes.md'}",
    ]
    done = nibblas_index("add", tmp_path / "in", "--json")
    assert json.loads(done.stdout)["unchanged"] == 1
    assert json.loads(done.stdout)["skipped"] == [
        {"what": str(tmp_path / "in" / "notes.md"), "why": "no importer takes .md files", "things": 1}
    ]


def test_add_counts_reasons(nibblas_index, tmp_path):
    rows = [{**row, "passed": False} for row in flat(5)]
    done = nibblas_index("add", data_set(tmp_path / "toy.parquet", rows))
    nothing, skipped = done.stdout.splitlines()
    assert nothing == "nothing added"
    assert skipped.startswith("skipped 5: did not pass: ")
    assert skipped.endswith(" and 2 more")


def test_options_of_add(nibblas_index, tmp_path):
    path = write(tmp_path / "a.py", PYTHON)
    problem = write(tmp_path / "toy_gemv" / "task.yml", "tests: [{m: 1}]\n").parent
    options = ["--author", "ann", "--author", "bob", "--licence", "MIT", "--terms", "Apache-2.0", "--revision", "r1"]
    nibblas_index("add", path, *options, "--attribution", "thanks", "--problem", problem, "--submission", 7)
    with opened(tmp_path) as store:
        found = store.implementation("kernelbot-toy-gemv-7")
    assert (found.authors, found.licence) == (("ann", "bob"), "MIT")
    assert found.source == Source("kernelbot-submission", str(tmp_path), "r1", "Apache-2.0", "thanks")


@pytest.mark.parametrize(
    "arguments",
    [["add", "--board", "x"], ["add", "a.py", "b.py", "--slug", "x"], ["add", "a.py", "--slug", "A B/../c"], ["add"]],
)
def test_wrong_usage(nibblas_index, arguments):
    assert nibblas_index(*arguments).exit_code == 2


def test_a_search_is_as_wide_as_is_asked_for(nibblas_index, tmp_path, monkeypatch):
    nibblas_index("add", write(tmp_path / "page.txt", PAGE))

    def width() -> int:
        return max(map(len, nibblas_index("search", "toy").stdout.splitlines()))

    monkeypatch.delenv("COLUMNS", raising=False)
    assert width() > 80
    monkeypatch.setenv("COLUMNS", "80")
    assert width() <= 80


def test_search_and_show(nibblas_index, tmp_path):
    nibblas_index("add", write(tmp_path / "page.txt", PAGE))
    done = nibblas_index("search", "toy", "submission", "--json")
    assert [card["slug"] for card in json.loads(done.stdout)["cards"]] == ["kernelbot-toy-gemv-4242"]
    assert "kernelbot-toy-gemv-4242" in nibblas_index("search", "toy").stdout.replace("\n", "")
    assert json.loads(nibblas_index("search", "nothing like it", "--json").stdout)["total"] == 0
    assert nibblas_index("search", "nothing like it").stdout == "nothing found\n"
    shown = nibblas_index("show", "kernelbot-toy-gemv-4242").stdout
    assert "custom_kernel(data: tuple) -> int" in shown
    assert "limitation    The page says 9 lines" in shown
    document = json.loads(nibblas_index("show", "kernelbot-toy-gemv-4242", "--json").stdout)
    assert document["implementation"]["slug"] == "kernelbot-toy-gemv-4242"
    with pytest.raises(StoreError, match="'nothing'"):
        nibblas_index("show", "nothing")


def test_source_is_shown_where_its_terms_allow(nibblas_index, tmp_path):
    path = write(tmp_path / "kernels" / "a.py", PYTHON)
    nibblas_index("add", path)
    with pytest.raises(PermissionError, match="may not be shown under the terms unknown"):
        nibblas_index("show", "kernels-a", "--source")
    nibblas_index("add", path, "--terms", "MIT", "--licence", "MIT")
    assert nibblas_index("show", "kernels-a", "--source").stdout == PYTHON


def test_things_left_out_are_counted(capsys):
    stale = "of code with the digest 0, not in the index"
    skipped = [Skipped("3 measurements of a", stale, 3), Skipped("a.md", "no importer"), Skipped("b.md", "no importer")]
    commands._print_report(Report(skipped=skipped))
    assert capsys.readouterr().out.splitlines() == [
        "nothing added",
        f"skipped 3: {stale}: 3 measurements of a",
        "skipped 2: no importer: a.md, b.md",
    ]


def test_who_has_no_index_is_told_of_the_demos(tmp_path, monkeypatch):
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path))
    path, demo = default_path(), tmp_path / "index-demo.sqlite"
    assert str(no_index(path)).endswith("makes one of nibblas's own kernels")
    demo.touch()
    assert str(no_index(path)).endswith(f"own kernels, --db {demo} is the demo's")


def test_check_and_backup(nibblas_index, tmp_path):
    with pytest.raises(StoreError, match="no index there"):
        nibblas_index("check")
    with opened(tmp_path) as store:
        store.add(make_item())
    assert nibblas_index("check").stdout == "1 revision stored, all as their digests say\n"
    assert nibblas_index("backup", tmp_path / "copy").stdout == f"{tmp_path / 'copy'}\n"
    with Store.open(tmp_path / "copy", read_only=True) as copy:
        assert len(copy.digests()) == 1
    with opened(tmp_path) as store:
        store.connection.execute("UPDATE file SET lines = 7")
    done = nibblas_index("check")
    assert done.exit_code == 1
    assert "7 lines" in done.stderr


def test_note(nibblas_index, tmp_path):
    with opened(tmp_path) as store:
        store.add(make_item())
    digest = make_item().implementation.digest
    said = ["--by", "ann", "--reason", "on my card"]
    done = nibblas_index(
        "note", "attest", "kernelbot-toy-gemv-1", *said, "--outcome", "not reproduced", "--ratio", "1.5"
    )
    assert done.stdout == f"attest: {digest}\n"
    nibblas_index("note", "dispute", RUN.digest_for(digest), *said)
    with opened(tmp_path) as store:
        _, attested, disputed = store.events()
    assert (attested.kind, attested.subject, attested.by, attested.reason) == ("attest", digest, "ann", "on my card")
    assert attested.body == {"outcome": "not reproduced", "ratio": 1.5}
    assert (disputed.kind, disputed.subject, disputed.body) == ("dispute", RUN.digest_for(digest), {})
    with pytest.raises(StoreError, match="no implementation or run"):
        nibblas_index("note", "retract", "nothing", *said)
    assert nibblas_index("note", "attest", digest, *said).exit_code == 2
    assert nibblas_index("note", "dispute", digest, "--by", " ", "--reason", "slow").exit_code == 2
    assert nibblas_index("note", "dispute", digest, "--by", "ann", "--reason", "").exit_code == 2
    assert nibblas_index("note", "retract", digest, *said, "--ratio", "2").exit_code == 2


def test_scan(nibblas_index, tmp_path):
    with pytest.raises(StoreError, match="no index there"):
        nibblas_index("scan")
    with opened(tmp_path) as store:
        store.add(make_item())
    assert nibblas_index("scan").stdout == "1 file read by newer rules\n"
    assert nibblas_index("scan").stdout == "every file was read by the rules as they are\n"


def test_another_index(nibblas_index, tmp_path):
    nibblas_index("add", write(tmp_path / "a.py", PYTHON), "--db", tmp_path / "other.sqlite")
    assert (tmp_path / "other.sqlite").exists()
    assert not (tmp_path / "cache").exists()


def test_errors_of_sqlite_are_told_in_words(nibblas_index, tmp_path):
    with opened(tmp_path) as store:
        store.connection.execute("DROP TABLE file")
    with pytest.raises(StoreError, match=r"index.sqlite: no such table: file"):
        nibblas_index("scan")
