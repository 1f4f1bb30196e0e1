"""Measurements and where they are kept."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from nibblas import evidence
from nibblas.evidence import NEAR, Measurement, Store, append, distance, numerics_level, read, timing_level
from nibblas.problem import Problem

PROBLEM = Problem("linear", 1, 4096, 4096, b_layouts=("ROWS_16x1", "ROWS_16x4"), bias=True)
MEASURED = Measurement(
    "a_kernel",
    "digest",
    PROBLEM,
    "a CPU",
    2,
    "2026-01-02T03:04:05+00:00",
    "nibblas bench",
    method="cold weights",
    samples=(3e-4, 1.0 / 3, 2.5e-7),
    floor=1e-4,
    error=3e-7,
    hardened=True,
    beside={"torch bf16": 1e-3},
    config={"tile": 64},
    versions={"torch": "2"},
    facts={"host": "x"},
)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "shipped", tmp_path / "local")


def of(problem: Problem = PROBLEM, **fields) -> Measurement:
    return replace(MEASURED, problem=problem, **fields)


def test_json_round_trip():
    line = MEASURED.to_json()
    assert "\n" not in line
    assert Measurement.from_json(line) == MEASURED
    assert Measurement.from_json(of(Problem("quantize", 7, 0, 64, rule="even")).to_json()).problem.rule == "even"


def test_json_holds_only_what_differs_from_the_defaults():
    problem = json.loads(MEASURED.to_json())["problem"]
    assert problem == {"op": "linear", "M": 1, "N": 4096, "K": 4096, "b_layouts": list(PROBLEM.b_layouts), "bias": True}


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "3",
        "[]",
        "{}",
        MEASURED.to_json().replace('"schema":1', '"schema":2'),
        MEASURED.to_json().replace('"kernel"', '"colonel"'),
        MEASURED.to_json().replace('"op"', '"opera"'),
        MEASURED.to_json()[:-20],
        MEASURED.to_json().replace("0.0003", "0"),
        MEASURED.to_json().replace("0.0003", "NaN"),
        MEASURED.to_json().replace("0.0003", '"fast"'),
        MEASURED.to_json().replace('"K":4096', '"K":0'),
        MEASURED.to_json().replace('"K":4096', '"K":"4096"'),
        MEASURED.to_json().replace('"ROWS_16x1"', '["ROWS_16x1"]'),
        MEASURED.to_json().replace('"threads":2', '"threads":null'),
        MEASURED.to_json().replace('"2026-01-02T03:04:05+00:00"', "2026"),
        MEASURED.to_json().replace('"floor":0.0001', '"floor":"low"'),
        MEASURED.to_json().replace('{"host":"x"}', "[]"),
        MEASURED.to_json().replace('{"tile":64}', "null"),
        MEASURED.to_json().replace('{"tile":64}', "[]"),
        MEASURED.to_json().replace('{"torch":"2"}', "null"),
        MEASURED.to_json().replace('{"torch":"2"}', '{"torch":2}'),
        MEASURED.to_json().replace('"nibblas bench"', "null"),
        MEASURED.to_json().replace('"cold weights"', "3"),
        MEASURED.to_json().replace('"hardened":true', '"hardened":"yes"'),
    ],
    ids=[
        "text",
        "number",
        "list",
        "empty",
        "schema",
        "field",
        "problem",
        "torn",
        "zero",
        "nan",
        "sample",
        "K",
        "K-text",
        "layouts",
        "threads",
        "when",
        "floor",
        "facts",
        "config",
        "config-list",
        "versions",
        "version",
        "command",
        "method",
        "hardened",
    ],
)
def test_from_json_refuses(line):
    with pytest.raises(ValueError, match=r".+"):
        Measurement.from_json(line)


def test_median_and_spread():
    m = of(samples=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert m.median == 3.0
    assert m.spread == pytest.approx(1.5 / 3)
    assert of(samples=()).median == math.inf
    assert of(samples=(2.0,)).spread == 0.0


def test_bad_lines_are_named_and_skipped(tmp_path, capsys):
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join([MEASURED.to_json().encode(), b"{}", b"", b"\xff\xfe", MEASURED.to_json().encode()]))
    assert read(path) == [MEASURED, MEASURED]
    complaints = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[1] for line in complaints] == [f"{path}:2", f"{path}:4"]


def test_what_is_no_file_is_named_and_skipped(store, capsys):
    (store.local / "folder.jsonl").mkdir(parents=True)
    store.add([MEASURED])
    assert store.all() == [MEASURED]
    assert f"{store.local / 'folder.jsonl'} ignored: Is a directory" in capsys.readouterr().err


def test_a_store_that_cannot_be_written_still_serves_this_process(tmp_path):
    (tmp_path / "file").touch()
    store = Store(tmp_path / "shipped", tmp_path / "file" / "evidence")
    with pytest.warns(UserWarning, match="nothing is kept in .*: Not a directory"):
        assert store.add([MEASURED]) is None
    assert nearest(store) == (MEASURED, 0.0)


def test_store_reads_shipped_then_local_and_what_was_added(store):
    append(store.shipped / "some.jsonl", [of(kernel="shipped")])
    append(store.local / "measured.jsonl", [of(kernel="old")])
    assert [m.kernel for m in store.all()] == ["shipped", "old"]
    path = store.add([of(kernel="new"), of(kernel="newer")])
    assert [m.kernel for m in store.all()] == ["shipped", "old", "new", "newer"]
    assert [m.kernel for m in Store(store.shipped, store.local).all()] == ["shipped", "old", "new", "newer"]
    assert [m.kernel for m in store.shipped_only()] == ["shipped"]
    assert [m.kernel for m in store.local_only()] == ["old", "new", "newer"]
    assert path.parent == store.local


def test_a_store_reads_a_file_once(store, capsys):
    for folder in (store.shipped, store.local):
        folder.mkdir()
        (folder / "bad.jsonl").write_text("{}\n")
    for ask in (store.shipped_only, store.all, store.local_only, store.shipped_only):
        assert ask() == []
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_append_after_a_torn_line_loses_only_that_line(tmp_path, capsys):
    path = tmp_path / "torn.jsonl"
    append(path, [MEASURED])
    with path.open("a") as file:
        file.write(MEASURED.to_json()[:50])
    append(path, [of(kernel="after")])
    assert [m.kernel for m in read(path)] == ["a_kernel", "after"]
    assert f"{path}:2 ignored" in capsys.readouterr().err


def test_processes_append_at_the_same_time(tmp_path):
    """Four writers of lines longer than any buffer: none is torn, none is lost."""
    path, go = tmp_path / "shared.jsonl", tmp_path / "go"
    code = """if True:
        import sys, time
        from dataclasses import replace
        from pathlib import Path
        from nibblas.evidence import Measurement, append
        from nibblas.problem import Problem
        path, go, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
        m = Measurement(name, "", Problem("linear", 1, 1, 16), "", 1, "", "", samples=(1 / 7,) * 999)
        line = m.to_json()
        Measurement.to_json = lambda self: line  # the loop shall do little but write
        Path(f"{go}.{name}").touch()
        while not go.exists():
            time.sleep(0.001)
        for _ in range(100):
            append(path, [m, m])
    """
    names = ["a", "b", "c", "d"]
    writers = [subprocess.Popen([sys.executable, "-c", code, path, go, name]) for name in names]
    deadline = time.monotonic() + 100
    while not all((tmp_path / f"go.{name}").exists() for name in names) and time.monotonic() < deadline:
        time.sleep(0.01)
    go.touch()
    assert [writer.wait(timeout=100) for writer in writers] == [0] * 4
    found = read(path)
    assert sorted(m.kernel for m in found) == sorted(names * 200)
    assert {len(m.samples) for m in found} == {999}


# --- nearness ------------------------------------------------------------------------------------------------------


def test_distance_counts_octaves_of_every_size():
    assert distance(PROBLEM, PROBLEM) == 0
    assert distance(PROBLEM, replace(PROBLEM, M=4)) == 2
    assert distance(replace(PROBLEM, M=4), PROBLEM) == 2
    assert distance(PROBLEM, replace(PROBLEM, N=2048, K=8192, L=2)) == 3
    assert distance(PROBLEM, replace(PROBLEM, G=3)) == pytest.approx(math.log2(3))


@pytest.mark.parametrize(
    "other",
    [
        {"op": "gated_linear"},
        {"a": "fp32"},
        {"b": "mxfp4"},
        {"out": "fp32"},
        {"bias": False},
        {"b_layouts": ("LINEAR", "LINEAR")},
        {"rule": "even"},
        {"batch_invariant": True},
        {"arch": "sm_90"},
        {"N": 0},
    ],
    ids=str,
)
def test_problems_that_differ_in_more_than_size_are_never_near(other):
    assert distance(PROBLEM, replace(PROBLEM, **other)) == math.inf


def nearest(store, problem=PROBLEM):
    return store.nearest(problem, "a_kernel", "digest", "a CPU", 2)


def test_nearest_takes_the_least_distance_then_the_latest(store):
    far = of(replace(PROBLEM, M=2), when="2026-05")
    early, late = of(when="2026-01", samples=(1.0,)), of(when="2026-02", samples=(2.0,))
    store.add([late, far, early])
    assert nearest(store) == (late, 0.0)
    assert nearest(store, replace(PROBLEM, M=3)) == (far, pytest.approx(math.log2(1.5)))


def test_nearest_stops_at_the_limit(store):
    store.add([MEASURED])
    assert nearest(store, replace(PROBLEM, M=round(2**NEAR))) == (MEASURED, NEAR)
    assert nearest(store, replace(PROBLEM, M=round(2**NEAR) + 1)) is None


@pytest.mark.parametrize(
    "other",
    [{"digest": "stale"}, {"device": "another CPU"}, {"threads": 1}, {"kernel": "another"}, {"samples": ()}],
    ids=str,
)
def test_evidence_of_something_else_is_not_used(store, other):
    store.add([of(**other)])
    assert nearest(store) is None


def test_nearest_compares_only_what_may_be_near(store, monkeypatch):
    """A first call for a new size is quick however much evidence there is."""
    others = [of(replace(PROBLEM, b="mxfp4", M=M)) for M in range(1, 100)] + [of(kernel="another")] * 100
    store.add([*others, MEASURED])
    compared, octaves = [], evidence._octaves
    monkeypatch.setattr(evidence, "_octaves", lambda p, q: compared.append(q) or octaves(p, q))
    assert nearest(store) == (MEASURED, 0.0)
    assert compared == []
    assert nearest(store, replace(PROBLEM, M=2)) == (MEASURED, 1.0)
    assert compared == [(1, 4096, 4096, 1, 1)]


# --- levels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("errors", "level"),
    [
        ([], "none"),
        ([(None, False)], "none"),
        ([(math.inf, True), (math.nan, True)], "none"),
        ([(1e-7, False), (None, True)], "checked"),
        ([(1e-7, False), (1e-7, True)], "checked-hardened"),
    ],
)
def test_numerics_level(errors, level):
    assert numerics_level([of(error=error, hardened=hardened) for error, hardened in errors]) == level


def test_timing_level():
    here = of(samples=(1.00,), facts={"host": "x"})
    assert timing_level([]) == "none"
    assert timing_level([of(samples=())]) == "compiled"
    assert timing_level([here, of(samples=())]) == "measured"
    assert timing_level([here, here]) == "measured"
    assert timing_level([here, of(samples=(1.05,), facts={"host": "y"})]) == "reproduced"
    for other in (
        of(samples=(1.2,), facts={"host": "y"}),
        of(samples=(1.0,), facts={"host": "y"}, device="another CPU"),
        of(samples=(1.0,), facts={"host": "y"}, digest="another"),
        of(samples=(1.0,), facts={"host": "y"}, threads=1),
        of(samples=(1.0,), facts={}),
        of(replace(PROBLEM, M=2), samples=(1.0,), facts={"host": "y"}),
    ):
        assert timing_level([here, other]) == "measured"


def test_timing_says_nothing_about_numerics():
    timed, checked = of(error=None), of(samples=(), error=1e-7)
    assert (numerics_level([timed]), timing_level([timed])) == ("none", "measured")
    assert (numerics_level([checked]), timing_level([checked])) == ("checked-hardened", "compiled")


def test_times_of_dependent_launches_make_no_choice(tmp_path):
    store = Store(tmp_path / "shipped", tmp_path / "local")
    store.add([replace(MEASURED, config={"dependent_launch": True})])
    assert nearest(store) is None
    store.add([MEASURED])
    assert nearest(store) == (MEASURED, 0.0)
