"""All of one implementation, and the bytes of its files."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from nibblas.index.catalog import Catalog
from nibblas.index.compat import Requirement
from nibblas.index.compatibility import fact_of_run, weighed
from nibblas.index.documents import (
    Cell,
    Dossier,
    Finding,
    HardwareAnswer,
    Include,
    Licence,
    NotFoundError,
    NotShownError,
    Ref,
    Revision,
    RunLine,
    SourceText,
    TechniqueUse,
    Way,
)
from nibblas.index.evidence_levels import TIMING, levels
from nibblas.index.lines import FINDING_BODY, RUNS, run_line, shown_claims
from nibblas.index.model import CompatFact, Implementation
from nibblas.index.names import technique_ref
from nibblas.index.prepared import OBSERVED
from nibblas.index.store import unpack
from nibblas.words import counted

MOST_RUNS = 100  # of a dossier
# A finding leaves out what is empty.
DEFAULTS = {"snippet": "", "reason": ""}
SHOWN_FINDINGS = 3  # of a technique, unless all are asked for


def implementation(catalog: Catalog, name: str, include: Collection[Include] = ()) -> Dossier:
    """All that is known of the current revision of a slug, or of the revision with a digest.

    include: "source" gives texts where they may be shown, "samples" those of each run, "findings" each one of a
    technique, not only the first few uses.
    """
    key, digest, what = find(catalog, name)
    findings = _findings(catalog, key)
    licence = licence_of(catalog, key, findings)
    needs = [(finding.path, Requirement(**{**DEFAULTS, **finding.body})) for finding in findings["requirement"]]
    facts = _facts(catalog, key, digest, needs)
    lines, more = _runs_of(catalog, key, "samples" in include)
    return Dossier(
        digest=digest,
        implementation=what,
        revisions=_revisions(catalog, what.slug),
        previous=texts_of(catalog, what.supersedes, "source" in include) if what.supersedes else (),
        files=texts_of(catalog, digest, "source" in include),
        levels=catalog.prepared.levels_of(key, digest),
        cells=_cells(catalog, key, digest),
        runs=lines,
        more_runs=more,
        ways=_ways(what, licence),
        facts=facts,
        hardware=_hardware(catalog, needs, facts),
        techniques=_techniques_of(findings["technique"], "findings" in include),
        licence=licence,
        claims=shown_claims(catalog.store.claims(digest), licence.shown),
        events=tuple(catalog.store.events(digest)),
    )


def file(catalog: Catalog, name: str, path: str) -> tuple[SourceText, bytes]:
    """A file of an implementation and its raw bytes; NotShownError where the terms don't allow to hand it on."""
    _, digest, _ = find(catalog, name)
    found = next((text for text in texts_of(catalog, digest, False) if text.path == path), None)
    if found is None:
        raise NotFoundError(f"{name} has no file {path!r}")
    row = catalog.one(
        "SELECT i.may_show, i.licence_concluded, i.licence_reason, s.terms FROM implementation i"
        " JOIN source s ON s.id = i.source WHERE i.digest = ?",
        digest,
    )
    if row is None or not row["may_show"]:
        terms = f"its source hands it on under {row['terms']}" if row and row["terms"] else "its terms are unknown"
        licence = row["licence_concluded"] if row and row["licence_concluded"] else "unknown"
        why = f". {row['licence_reason'].removesuffix('.')}" if row and row["licence_reason"] else ""
        raise NotShownError(f"{path} of {name} may not be shown: {terms}, and its licence is {licence}{why}")
    return found, catalog.store.content(found.sha256)


def find(catalog: Catalog, name: str) -> tuple[int, str, Implementation]:
    """Row id, digest and record of the current revision of a slug, or of the revision with a digest."""
    row = catalog.one(
        "SELECT id, digest FROM implementation WHERE digest = ?1 UNION ALL"
        " SELECT id, digest FROM implementation WHERE slug = ?1 AND current LIMIT 1",
        name.removeprefix("sha256:"),
    )
    if row is None:
        raise NotFoundError(f"no implementation has the slug or digest {name!r}")
    return row["id"], row["digest"], catalog.store.implementation(row["digest"])


def _revisions(catalog: Catalog, slug: str) -> tuple[Revision, ...]:
    rows = catalog.all(
        "SELECT revision, digest, imported_at FROM implementation WHERE slug = ? ORDER BY revision DESC", slug
    )
    return tuple(Revision(*row) for row in rows)


def texts_of(catalog: Catalog, digest: str, with_text: bool) -> tuple[SourceText, ...]:
    rows = catalog.all(
        "SELECT f.path, file.sha256, file.size, file.lines, scan.media_type, i.may_show FROM implementation i"
        " JOIN implementation_file f ON f.implementation = i.id JOIN scan ON scan.id = f.scan"
        " JOIN file ON file.id = scan.file WHERE i.digest = ? ORDER BY f.path",
        digest,
    )
    found = []
    for *facts, may_show in rows:
        text = SourceText(*facts)
        if with_text and may_show:
            raw = catalog.store.content(text.sha256)
            read = raw.decode("utf-8", "replace")
            text = replace(text, text=read, exact=read.encode() == raw)
        found.append(text)
    return tuple(found)


def _runs_of(catalog: Catalog, key: int, with_samples: bool) -> tuple[tuple[RunLine, ...], int]:
    order = "ORDER BY r.claimed, r.seconds IS NULL, r.seconds, r.id LIMIT ?"
    rows = catalog.all(f"{RUNS} WHERE r.implementation = ? {order}", key, MOST_RUNS)
    (total,) = catalog.one("SELECT count(*) FROM run WHERE implementation = ?", key) or (0,)
    samples: Mapping[int, tuple[float, ...]] = {}
    if with_samples:
        wanted = json.dumps([row["id"] for row in rows])
        found = catalog.all("SELECT id, samples FROM run WHERE id IN (SELECT value FROM json_each(?))", wanted)
        samples = {run: unpack(blob) for run, blob in found}
    return tuple(run_line(catalog, row, samples.get(row["id"], ())) for row in rows), total - len(rows)


def _cells(catalog: Catalog, key: int, digest: str) -> tuple[Cell, ...]:
    """The evidence on each workload and device, those with a measured time first."""
    rows = catalog.all(f"{OBSERVED} WHERE r.implementation = ?", key)
    groups = defaultdict(list)
    for row in rows:
        groups[row["workload"], row["device"]].append(catalog.prepared.observed(row))
    wanted = json.dumps([workload for workload, _ in groups if workload is not None])
    names = {
        key: Ref(digest, name)
        for key, digest, name in catalog.all(
            "SELECT id, digest, name FROM workload WHERE id IN (SELECT value FROM json_each(?))", wanted
        )
    }
    cells = [
        Cell(
            names.get(workload),
            device,
            levels(observed, catalog.prepared.events(digest, [o.run for o in observed])),
        )
        for (workload, device), observed in groups.items()
    ]
    cells.sort(key=lambda cell: (-TIMING.index(cell.levels.timing), cell.device or "", str(cell.workload)))
    return tuple(cells)


def _facts(catalog: Catalog, key: int, digest: str, needs: Iterable[tuple[str, Requirement]]) -> tuple[CompatFact, ...]:
    """All that is known of where it runs: as its source says, as its files require, and as its runs went."""
    rows = catalog.all(
        "SELECT DISTINCT r.status, r.device, e.arch, r.claimed FROM run r JOIN environment e ON e.id = r.environment"
        " WHERE r.implementation = ?",
        key,
    )
    ran = (fact_of_run(status, device, arch, bool(claimed)) for status, device, arch, claimed in rows)
    required = (need.fact(path) for path, need in needs)
    return tuple(dict.fromkeys([*catalog.store.facts(digest), *required, *(fact for fact in ran if fact)]))


def _hardware(
    catalog: Catalog, needs: Sequence[tuple[str, Requirement]], facts: Sequence[CompatFact]
) -> tuple[HardwareAnswer, ...]:
    """The answer for each device, those that it runs on first."""
    found = []
    facts = weighed(facts)
    for device in catalog.prepared.devices.values():
        answer = device.answer(needs, facts)
        found.append(HardwareAnswer(Ref(device.slug, device.name), device.hardware.arch or None, *answer))
    return tuple(sorted(found, key=lambda one: ("yes", "unknown", "no").index(one.answer)))


def _findings(catalog: Catalog, key: int) -> defaultdict[str, list[Finding]]:
    """What the rules read from the files of an implementation, by topic, in the order of the lines."""
    rows = catalog.all(
        f"SELECT finding.topic, f.path, finding.line, {FINDING_BODY} FROM implementation_file f"
        " JOIN implementation i ON i.id = f.implementation JOIN finding ON finding.scan = f.scan"
        " WHERE f.implementation = ? ORDER BY f.path, finding.line, finding.id",
        key,
    )
    found = defaultdict(list)
    for topic, path, line, body in rows:
        found[topic].append(Finding(path, line, json.loads(body)))
    return found


def _techniques_of(findings: Iterable[Finding], every: bool) -> tuple[TechniqueUse, ...]:
    """Techniques that are used come first; of each the uses before the mentions."""
    groups = defaultdict(list)
    for finding in findings:
        groups[finding.body["technique"]].append(finding)
    found = []
    for technique, of in groups.items():
        uses = [finding for finding in of if finding.body["kind"] == "use"]
        shown = of if every else (uses or of)[:SHOWN_FINDINGS]
        found.append(TechniqueUse(technique_ref(technique), len(uses), len(of) - len(uses), tuple(shown)))
    found.sort(key=lambda use: (use.uses == 0, use.technique.slug))
    return tuple(found)


def _ways(what: Implementation, licence: Licence) -> tuple[Way, ...]:
    """How it can be used: its files copied, a module imported, a package installed; and for each why not."""
    files = " and ".join(f"{file.path} ({counted(file.lines, 'line')})" for file in what.files)
    if not what.files:
        vendor = Way("vendor", None, "no source is stored")
    elif licence.shown:
        vendor = Way("vendor", f"Copy {files}, under {licence.shown_under}.", None)
    else:
        vendor = Way("vendor", None, "its terms don't allow to hand on the source")
    module = f"import {what.import_path.rpartition('.')[0] or what.import_path}" if what.import_path else None
    install = f"pip install {what.package}" if what.package else None
    return (
        vendor,
        Way("import", module, None if module else "its source names no module to import"),
        Way("install", install, None if install else "it is in no package that its source names"),
    )


def licence_of(catalog: Catalog, key: int, findings: Mapping[str, list[Finding]]) -> Licence:
    row = catalog.one(
        "SELECT i.licence, i.licence_concluded, i.licence_reason, s.terms, s.attribution, i.may_show, i.shown_under"
        " FROM implementation i JOIN source s ON s.id = i.source WHERE i.id = ?",
        key,
    )
    assert row is not None
    return Licence(
        row["licence"],
        row["licence_concluded"],
        row["licence_reason"],
        row["terms"],
        row["attribution"],
        bool(row["may_show"]),
        row["shown_under"],
        tuple(findings.get("licence", ())),
        tuple(findings.get("third party", ())),
    )
