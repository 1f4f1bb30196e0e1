"""A record of the arena: every case of a submission is a run of an implementation.

A record holds digests of the submission's files and not their text. The implementation is the one in the index that
consists of just these files; else they are looked for beside the record, by digest, and become one whose slug is made
of the task's name and the main file's digest. Where neither is there, the record is skipped.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nibblas.index.ingest import kernelbot
from nibblas.index.ingest.reading import (
    MAX_BYTES,
    Attached,
    Options,
    Read,
    Skipped,
    at_home,
    described,
    interface_of,
)
from nibblas.index.model import (
    CompatFact,
    Environment,
    Figure,
    Implementation,
    Item,
    Operation,
    Protocol,
    Run,
    RunStatus,
    Source,
    Workload,
    kebab,
)
from nibblas.index.store import Store

SCHEMA = 1
STATUS: dict[str, RunStatus] = {
    "correct": "passed",
    "wrong": "wrong",
    "crashed": "crashed",
    "timeout": "timeout",
    "refused": "refused",
    "incompatible": "incompatible",
}
# What of a protocol makes times comparable. Seeds and measured rates differ from run to run.
PROTOCOL = ("mode", "dialect", "hardened", "timer", "flush_bytes", "warmup", "stopping_rule", "confidence")
NEEDED = ("schema", "when", "mode", "task", "submission", "environment", "protocol", "cases", "verdict")


def takes(path: Path) -> bool:
    """A JSON file that holds the fields of a record."""
    if path.suffix != ".json":
        return False
    try:
        return set(NEEDED) <= set(_load(path))
    except (OSError, ValueError):
        return False


def count(path: Path) -> int:
    return 1


def read(path: Path, options: Options, store: Store) -> Iterator[Read]:
    record = _load(path)
    if record["schema"] != SCHEMA:
        raise ValueError(f"a record of schema {record['schema']!r}, this nibblas reads schema {SCHEMA}")
    try:
        yield _read(path, record, options, store)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a record of the arena: {type(error).__name__}: {error}") from None


def _load(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > 4 * MAX_BYTES:
        raise ValueError(f"{path}: too large for a record")
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


def _read(path: Path, record: Mapping[str, Any], options: Options, store: Store) -> Read:
    of = kernelbot.operation(record["task"]["name"])
    runs = tuple(_runs(record, of))
    facts = tuple(
        CompatFact("declared", gpu=kernelbot.device(gpu)[0], reason=f"asks for the runner {gpu}")
        for gpu in record["submission"].get("gpus", ())
    )
    digests: dict[str, str] = record["submission"]["files"]
    known = _known(digests, store)
    if known:
        return Attached(known, runs, facts)
    contents = _beside(path.parent, digests)
    missing = sorted(set(digests) - set(contents))
    if missing:
        why = f"its submission ({', '.join(missing)}) is neither in the index nor beside the record: add it first"
        return Skipped(str(path), why)
    main = next(iter(digests))
    interface = interface_of(main, contents[main])
    implementation = Implementation(
        options.slug or kebab("arena", of.slug, digests[main][:12]),
        record["submission"].get("name") or main,
        Source("arena", at_home(path.parent), options.revision, options.terms, options.attribution),
        files=described(contents),
        operation=of,
        authors=options.authors,
        language=interface.language,
        framework=interface.framework,
        entry_point=interface.entry_point,
        signature=interface.signature,
        licence=options.licence,
        record=path.name,
    )
    return Item(implementation, contents, runs=runs, facts=facts)


def _known(digests: Mapping[str, str], store: Store) -> str | None:
    """The digest of the latest current implementation that consists of just the files with these digests."""
    wanted = set(digests.values())
    rows = store.connection.execute(
        "SELECT i.digest FROM file f JOIN scan s ON s.file = f.id JOIN implementation_file if ON if.scan = s.id"
        " JOIN implementation i ON i.id = if.implementation WHERE f.sha256 = ? AND i.current ORDER BY i.id DESC",
        (next(iter(digests.values())),),
    )
    for (digest,) in rows.fetchall():
        if {file.sha256 for file in store.implementation(digest).files} == wanted:
            return digest
    return None


def _beside(folder: Path, digests: Mapping[str, str]) -> dict[str, bytes]:
    """The contents of the files with these digests, of those in a folder."""
    suffixes = {Path(name).suffix for name in digests}
    by_digest = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in suffixes and path.is_file() and path.stat().st_size <= MAX_BYTES:
            raw = path.read_bytes()
            by_digest[hashlib.sha256(raw).hexdigest()] = raw
    return {name: by_digest[digest] for name, digest in digests.items() if digest in by_digest}


def _runs(record: Mapping[str, Any], of: Operation) -> Iterator[Run]:
    given = record["environment"]
    environment = Environment(
        given["device"],
        given["arch"],
        given["threads"],
        {"python": given["python"], "torch": given["torch"], **given["versions"]},
        {"cpu": given["cpu"], "system": given["system"], **given["facts"]},
    )
    details = {name: record["protocol"][name] for name in PROTOCOL if record["protocol"].get(name) is not None}
    protocol = Protocol("nibblas arena", "nibblas arena", details=details)
    stands_in = record.get("stand_ins") or ()
    for case in record["cases"]:
        status = STATUS.get(case["verdict"])
        if status is None:  # it was not run
            continue
        values = case["values"]
        axes = {name: value for name, value in values.items() if type(value) is int and name != "seed"}
        workload = Workload(of, case["text"], axes, {name: value for name, value in values.items() if name not in axes})
        # Times of a call that a stand-in answered are not the submission's own, so they are no latency.
        own = not case.get("stand_ins") and not stands_in
        found = _numbers(case)
        timer = (case.get("statistics") or {}).get("timer")
        yield Run(
            of,
            workload,
            protocol,
            environment,
            status,
            False,
            reason=case.get("message") or None,
            observed_at=record["when"],
            figures=(*_times(case, own), *found),
            samples=tuple(_samples(case, timer)) if own else (),
            floor=_seconds(case.get("floor_ns")),
            error=_error(case),
            hardened=bool(record["protocol"].get("hardened")),
            config={"stand-ins": list(case.get("stand_ins") or stands_in)} if not own else {},
            integrity=tuple(_finding(f) for f in (*record.get("findings", ()), *case.get("findings", ()))),
            command=record.get("command"),
            record=f"{record['id']}, {case['kind']} {case['text']}",
        )


def _times(case: Mapping[str, Any], own: bool) -> Iterator[Figure]:
    found = case.get("statistics")
    if found:
        median, low, high = (found[name] * 1e-9 for name in ("median_ns", "low_ns", "high_ns"))
        yield Figure("latency" if own else "latency with stand-ins", "median", median, low, high, found["n"])


def _numbers(case: Mapping[str, Any]) -> Iterator[Figure]:
    """The largest errors of the case's outputs."""
    for metric, key in (("ulp", "max_ulp"), ("relative rms", "max_relative_rms"), ("absolute", "max_absolute")):
        values = [error[key] for error in case.get("errors", ()) if error.get(key) is not None]
        if values:
            yield Figure(f"error {metric}", "max", max(values))


def _samples(case: Mapping[str, Any], timer: str | None) -> Iterator[float]:
    """Seconds of the valid samples by the timer whose samples make the statistics."""
    for sample in case.get("samples", ()):
        value = sample["claimed_ns"].get(timer) if timer in sample["claimed_ns"] else sample.get("observed_ns")
        if sample.get("valid", True) and isinstance(value, int | float) and 0 < value < math.inf:
            yield value * 1e-9


def _error(case: Mapping[str, Any]) -> float | None:
    """The largest deviation over the expected size of an element, as in a Measurement; else over the answer's RMS."""
    for key in ("max_relative_size", "max_relative_rms"):
        values = [error.get(key) for error in case.get("errors", ())]
        known = [value for value in values if value is not None]
        if known:
            return max(known)
    return None


def _finding(finding: Mapping[str, Any]) -> dict[str, Any]:
    """A finding with its kind under "class", and without what is empty."""
    found = {"class" if name == "class_id" else name: value for name, value in finding.items()}
    return {name: value for name, value in found.items() if value not in ("", {}, None)}


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns * 1e-9
