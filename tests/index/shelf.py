"""A small index with something of everything, for what reads it."""

import json
from dataclasses import replace
from pathlib import Path

from made_up import RUN, make_item

from nibblas.index import scan as scan_module
from nibblas.index.compat import Requirement
from nibblas.index.model import Environment, Event, Figure, Item, Operation, Protocol, Run, Source
from nibblas.index.scan import Found, Scan
from nibblas.index.store import Store

H200 = Environment("NVIDIA H200", "sm_90a", 0, {"torch": "2.10"}, {"host": "here"})
GEMM = Operation("toy-gemm", "toy_gemm", "gemm", ("m", "n", "k"))
HOSTILE = "<script>alert('x')</script> \" -- ﬀ"
OPEN = Source("kernelbot-dataset", "toy.parquet", "r1", "MIT", "thanks", "2026-01-01")
CLOSED = Source("catalog-page", "https://catalog.example/implementations/x", terms=None)


def timed(seconds: float, half: float | None = None, **changes) -> Run:
    """The made-up run, as if it had taken so long."""
    interval = (None, None) if half is None else (seconds - half, seconds + half)
    return replace(RUN, figures=(Figure("latency", "median", seconds, *interval, 3),), **changes)


def score(seconds: float | None, **changes) -> Run:
    """Somebody's figure for a whole board."""
    figures = () if seconds is None else (Figure("score", None, seconds),)
    known = {"workload": None, "claimed": True, "samples": (), "error": None, "hardened": False, "floor": None}
    return replace(RUN, protocol=Protocol("KernelBot", "kernelbot"), figures=figures, **{**known, **changes})


def items() -> dict[str, Item]:
    """What is on the shelf, by slug; "kernelbot-toy-gemv-2" has two revisions."""
    made = [
        make_item(1, b"fast = 1\n", (timed(1e-5, 1e-6),), source=OPEN),
        make_item(2, b"old = 1\nsame = 2\n", (timed(5e-6, 1e-7),), source=OPEN, authors=("cleo",)),
        make_item(3, b"tied = 1\n", (timed(1.1e-5, 1e-6), timed(3e-5, environment=H200)), source=OPEN),
        make_item(4, b"slow = 1\n", (timed(9e-5, error=None),), source=CLOSED, licence=None, authors=()),
        make_item(5, b"claimed = 1\n", (score(2e-5), score(None)), source=CLOSED, licence=None),
        make_item(
            6,
            b"wrong = 1\n",
            (timed(1e-6, status="wrong", reason="element 3 is 7, need 2"),),
            source=OPEN,
            language="cuda",
            framework=None,
        ),
        make_item(7, b"elsewhere = 1\n", (timed(1e-6, status="incompatible", environment=H200),), source=OPEN),
        make_item(8, b"nothing = 1\n", (), source=CLOSED, operation=None, licence=None, tensors=()),
        make_item(9, b"disputed = 1\n", (timed(7e-5),), source=OPEN),
        make_item(
            10,
            b"compiled = 1\n",
            (
                replace(
                    RUN,
                    operation=GEMM,
                    workload=None,
                    status="compiled",
                    figures=(),
                    samples=(),
                    error=None,
                    observed_at=None,
                ),
            ),
            source=OPEN,
            operation=GEMM,
            slug="toy-gemm-compiled",
            package="toy",
            import_path="toy.gemm",
        ),
    ]
    hostile = make_item(11, HOSTILE.encode(), (timed(8e-5),), source=OPEN, authors=(HOSTILE,), slug="hostile")
    hostile = replace(hostile, implementation=replace(hostile.implementation, name=HOSTILE))
    return {item.implementation.slug: item for item in (*made, hostile)}


def found(technique: str, kind: str, line: int) -> Found:
    """A finding of the rules."""
    body = {"technique": technique, "kind": kind, "line": line, "rule": f"{technique}-1", "snippet": HOSTILE}
    return Found("technique", line, json.dumps(body))


def needs(arch: str, line: int, certain: bool = True) -> Found:
    """A requirement that the rules read from a source."""
    need = Requirement("build-flag", 1, "build", line, 1, "-arch", f"built for {arch}", arch, certain=certain)
    return scan_module._found("requirement", need)


def fill(path: Path) -> Path:
    """Make the index."""
    with Store.open(path) as store:
        for number, (slug, item) in enumerate(items().items()):
            findings = [found("split-k", "use" if number % 2 else "comment", 1)]
            findings += [found("tma", "use", line) for line in range(1, number)]
            if number == 8:
                findings += [needs("sm_100a", 3), needs("gfx950", 4, certain=False)]
            scan = Scan("test", tuple(findings))
            store.add(item, {"submission.py": scan})
            if slug == "kernelbot-toy-gemv-2":
                newer = make_item(2, b"new = 1\nsame = 2\n", (timed(2e-5, 1e-6),), source=OPEN, authors=("cleo",))
                store.add(newer, {"submission.py": scan})
        disputed = items()["kernelbot-toy-gemv-9"]
        digest = disputed.runs[0].digest_for(disputed.implementation.digest)
        store.record(Event("dispute", digest, "ann", "the clocks were locked"))
        store.record(Event("attest", digest, "bob", body={"outcome": "not reproduced", "ratio": 1.5}))
        # Whether a source may be shown is concluded by rules of their own, with tests of their own.
        for may_show, under, which in ((1, "MIT", "NOT NULL"), (0, None, "NULL")):
            store.connection.execute(
                "UPDATE implementation SET may_show = ?, shown_under = ?, licence_concluded = ?"
                f" WHERE licence IS {which}",
                (may_show, under, under),
            )
    return path
