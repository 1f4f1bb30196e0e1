"""Documents in the shapes of KernelIndex's API, so that its clients work with this index.

What those shapes require and no source here says is "unknown" where they want a text, and null where they allow that.
The id of a thing is its digest. Their ladder of evidence is put together from our two axes: reported is somebody's
word, reproducible was timed here, verified also checked against the oracle, replicated agrees on two machines.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from nibblas.index import kernelindex_shapes as shapes
from nibblas.index.documents import (
    Card,
    CohortTable,
    Coverage,
    Dossier,
    FacetValue,
    HardwareLine,
    OperationLine,
    OperationPage,
    Ref,
    Results,
    RunLine,
    RunPage,
    RunsPage,
    SourceLine,
)
from nibblas.index.evidence_levels import POLICY, Levels
from nibblas.index.model import Event, Figure, Source, Tensor, Workload
from nibblas.index.names import device_slug

UNKNOWN = "unknown"
WHOLE_BOARD = "the whole board"
STATUSES: dict[str, shapes.Status] = {
    "passed": "passed",
    "wrong": "incorrect_numerical",
    "crashed": "runtime_error",
    "timeout": "timeout",
    "refused": "suspected_reward_hack",
    "incompatible": "incomplete_evidence",
    "compiled": "incomplete_evidence",
    "not run": "incomplete_evidence",
}
# What this index calls a status of theirs, where it has another word.
OURS: dict[str, str] = {
    "incorrect_numerical": "wrong",
    "runtime_error": "crashed",
    "suspected_reward_hack": "refused",
    "incomplete_evidence": "incompatible",
}
LANGUAGES: dict[str | None, Literal["python", "cpp"]] = {
    "python": "python",
    "cuda": "cpp",
    "hip": "cpp",
    "c++": "cpp",
    "c": "cpp",
}
ATTESTED: dict[Any, Literal["reproduced", "could_not_reproduce"]] = {
    "reproduced": "reproduced",
    "not reproduced": "could_not_reproduce",
}


class Whose(NamedTuple):
    """What a row says of its implementation."""

    implementation: Ref
    revision: int
    authors: tuple[str, ...]
    source_kind: str
    language: str | None
    framework: str | None
    licence: shapes.LicencePair
    shown: bool
    package: str | None
    imported_at: str | None


def search(
    text: str,
    found: Results,
    operations: Sequence[tuple[FacetValue, OperationLine]],
    tables: Sequence[CohortTable],
    chosen: CohortTable | None,
    at: str,
) -> shapes.Search:
    """The answer to a search.

    Parameters
    ----------
    operations : those that results belong to, with how many each.
    tables, chosen : where it is one operation, its cohorts, and the one whose ranks are shown.
    at : the time of the index's latest event.
    """
    mode: Literal["exact", "chooser", "browse", "none"] = "exact"
    if not text.strip():
        mode = "browse"
    elif not found.total:
        mode = "none"
    elif len(operations) > 1:
        mode = "chooser"
    rows = ranked(found.cards, chosen) if mode == "exact" else []
    left_out = found.total - len(found.cards) if mode == "exact" else 0
    words = f"{found.total} implementation{'' if found.total == 1 else 's'}" if text.strip() else "Search the index"
    if mode == "exact" and operations:
        words = f"Operation {operations[0][1].name} · {words}"
    return {
        "query": text,
        "interpretation": words,
        "mode": mode,
        "operation": named(operations[0][1]) if mode == "exact" and operations else None,
        "policyVersion": POLICY,
        "cohort": cohort(chosen) if chosen else None,
        "cohortOptions": [option(table) for table in tables],
        "bestVerified": next((row for row in rows if row["evidence"] in ("verified", "replicated")), None),
        "bestDeployable": next((row for row in rows if row["sourceAvailable"] and row["license"]["concluded"]), None),
        "groups": {"exact": rows, "compatible": [], "supportedUnmeasured": [], "reported": []},
        "overflow": {"exact": left_out, "compatible": 0, "supportedUnmeasured": 0, "reported": 0},
        "matches": [
            {
                "name": line.name,
                "slug": line.slug,
                "family": line.family or UNKNOWN,
                "aliases": [],
                "runs": line.runs,
                "lastObservedAt": line.observed_at,
            }
            for _, line in operations
        ]
        if mode == "chooser"
        else None,
        "nearest": None,
        "sources": [],
        "generatedAt": at,
        "nibblas": {"total": found.total, "facets": found.facets},
    }


def ranked(cards: Iterable[Card], chosen: CohortTable | None) -> list[shapes.ResultRow]:
    """Cards as rows: those with a rank in a cohort first, then the others by their fastest run."""
    places = {line.implementation.slug: line for line in chosen.runs} if chosen else {}
    rows = [row(_of_card(card), card.operation, card.levels, places.get(card.slug), card) for card in cards]
    return sorted(rows, key=lambda row: (row["rank"] is None, row["rank"]))


def _of_card(card: Card) -> Whose:
    return Whose(
        Ref(card.slug, card.name),
        card.revision,
        card.authors,
        card.source_kind,
        card.language,
        card.framework,
        {"declared": card.licence, "concluded": card.licence_concluded},
        card.source_shown,
        card.package,
        card.imported_at,
    )


def row(
    whose: Whose, operation: Ref | None, levels: Levels, line: RunLine | None, card: Card | None = None
) -> shapes.ResultRow:
    """An implementation with one of its runs; without one, with the fastest of its card, or with none."""
    fastest = card.fastest if card and line is None else None
    figure = line.figure if line else fastest.figure if fastest else None
    workload = line.workload if line else fastest.workload if fastest else None
    device = line.device if line else fastest.device if fastest else None
    run = line.digest if line else fastest.run if fastest else None
    claimed = line.claimed if line else bool(fastest and fastest.claimed)
    return {
        "runId": run,
        "implementation": named(whose.implementation),
        "install": install(whose.package),
        "project": project(whose.authors, whose.source_kind),
        "revision": str(whose.revision),
        "operation": named(operation),
        "workloadSummary": (workload.name if workload else WHOLE_BOARD) if run else UNKNOWN,
        "hardware": {"model": device or UNKNOWN, "architecture": line.arch if line else None},
        "framework": whose.framework,
        "language": whose.language,
        "primary": primary(figure),
        "solScore": _share_of_floor(line),
        "baseline": False,
        "evidence": evidence(line.levels if line else levels),
        "match": "exact",
        "mismatches": [],
        "rank": line.standing.rank if line else None,
        "tiedWithPrevious": bool(line and line.standing.tied),
        "cohortSize": line.standing.size if line else None,
        "sourceAvailable": whose.shown,
        "installable": whose.package is not None,
        "license": whose.licence,
        "lastTestedAt": line.observed_at if line else None,
        "indexedAt": whose.imported_at,
        "stale": False,
        "disputed": any(state.kind == "disputed" for state in levels.states),
        "caveats": _caveats(levels, claimed, whose),
        "attestations": 0,
    }


def _caveats(levels: Levels, claimed: bool, whose: Whose) -> list[str]:
    found = [f"{state.kind}: {state.reason}" if state.reason else state.kind for state in levels.states]
    if claimed:
        found.append("its source says so; it was not measured here")
    if not whose.shown:
        found.append("its source may not be shown")
    if whose.licence["concluded"] is None:
        found.append("its licence is unknown")
    return found


def _share_of_floor(line: RunLine | None) -> float | None:
    """The least time that physics allows over the time it took."""
    if line is None or line.floor is None or line.figure is None:
        return None
    return line.floor / line.figure.value


def evidence(levels: Levels) -> shapes.Evidence | None:
    """Their one ladder from both axes."""
    if levels.timing == "reproduced":
        return "replicated"
    if levels.timing == "measured":
        return "verified" if levels.numerics in ("checked", "checked-hardened") else "reproducible"
    return "reported" if levels.timing == "reported" or levels.numerics == "claimed" else None


def run_evidence(line: RunLine) -> shapes.Evidence:
    """A run always has some: at least that of whoever tells of it."""
    return evidence(line.levels) or ("reported" if line.claimed else "reproducible")


def named(ref: Ref | OperationLine | None) -> shapes.Named:
    """A name with its slug."""
    return {"name": ref.name, "slug": ref.slug} if ref else {"name": UNKNOWN, "slug": UNKNOWN}


def project(authors: Sequence[str], source_kind: str) -> shapes.Named:
    """The first author stands for a project; without one, the kind of source."""
    name = authors[0] if authors else source_kind
    return {"name": name, "slug": device_slug(name) or UNKNOWN}


def install(package: str | None) -> shapes.Install | None:
    """How to install a package."""
    return {"kind": "pip", "command": f"pip install {package}"} if package else None


def primary(figure: Figure | None) -> shapes.Primary | None:
    """A figure that ranks, in seconds."""
    if figure is None:
        return None
    interval: shapes.Uncertainty | None = None
    if figure.low is not None and figure.high is not None:
        interval = {"low": figure.low, "high": figure.high}
    return {
        "metric": figure.metric,
        "unit": _unit(figure.metric),
        "statistic": figure.statistic or "value",
        "value": figure.value,
        "sampleCount": figure.n,
        "uncertainty": interval,
    }


def _unit(metric: str) -> str:
    return "s" if metric.startswith(("latency", "score", "spread")) else ""


def cohort(table: CohortTable) -> shapes.Cohort:
    """What a cohort has in common."""
    facts = {
        "operation": table.operation.name,
        "workload": table.workload.name if table.workload else WHOLE_BOARD,
        "protocol": table.protocol,
        "device": table.device,
        **({"threads": str(table.threads)} if table.threads else {}),
        **table.settings,
    }
    return {
        "comparisonKey": table.key,
        "profile": profile(table.claimed),
        "description": " · ".join((facts["workload"], table.device, table.protocol)),
        "facts": pairs(facts),
    }


def profile(claimed: bool) -> shapes.Profile:
    """Somebody's own figures, or those of one protocol here."""
    return "source_native" if claimed else "strict_exact"


def option(table: CohortTable) -> shapes.CohortOption:
    """A cohort to choose."""
    head = table.runs[0] if table.runs else None
    figure = primary(head.figure) if head else None
    return {
        "key": table.key,
        "label": " · ".join((table.device, table.workload.name if table.workload else WHOLE_BOARD)),
        "runs": table.size,
        "head": {"runId": head.digest, "implementation": named(head.implementation), "primary": figure}
        if head and figure
        else None,
    }


def pairs(facts: Mapping[str, Any]) -> list[shapes.KeyValue]:
    """Facts as texts; those that are unknown are left out."""
    return [{"key": str(key), "value": str(value)} for key, value in facts.items() if value is not None]


def source_ref(source: Source, record: str | None, at: str | None) -> shapes.SourceRef:
    """Where something came from."""
    return {
        "name": source.locator,
        "kind": source.kind,
        "url": source.locator if source.locator.startswith(("https://", "http://")) else None,
        "license": source.terms,
        "externalId": record,
        "observedAt": at,
    }


def implementation(found: Dossier, file_address: str | None, with_text: bool) -> shapes.ImplementationDossier:
    """All of an implementation.

    file_address: of its first file's bytes, where they may be had.
    """
    it = found.implementation
    whose = Whose(
        Ref(it.slug, it.name),
        it.revision or 1,
        it.authors,
        it.source.kind,
        it.language,
        it.framework,
        {"declared": found.licence.declared, "concluded": found.licence.concluded},
        found.licence.shown,
        it.package,
        it.imported_at,
    )
    operation = Ref(it.operation.slug, it.operation.name) if it.operation else None
    newer = next((revision for revision in found.revisions if revision.revision > whose.revision), None)
    main = found.files[0] if found.files else None
    level = evidence(found.levels)
    facts = [fact for fact in found.facts if fact.kind in ("declared", "measured")]
    return {
        "illustrative": False,
        "implementation": {
            "id": found.digest,
            "slug": it.slug,
            "name": it.name,
            "digest": f"sha256:{found.digest}",
            "revision": str(whose.revision),
            "supersededById": newer.digest if newer else None,
        },
        "project": {**project(it.authors, it.source.kind), "repositoryUrl": None},
        "usage": {
            "install": install(it.package),
            "invocationExample": it.signature,
            "requirements": [
                {"name": fact.needs, "constraint": fact.reason or ""}
                for fact in found.facts
                if fact.kind == "required" and fact.needs
            ],
        },
        "interface": {
            "language": it.language or UNKNOWN,
            "framework": it.framework,
            "symbol": it.entry_point,
            "sourcePath": main.path if main else None,
        },
        "support": {
            "hardware": _once(fact.gpu for fact in facts),
            "architectures": _once(fact.arch for fact in facts),
            "dtypes": _once(tensor.dtype for tensor in it.tensors),
            "layouts": _once(tensor.layout for tensor in it.tensors),
            "axes": list(it.operation.axes) if it.operation else [],
        },
        "source": {
            "available": found.licence.shown and main is not None,
            "url": file_address,
            "commit": None,
            "treeDigest": None,
        },
        "license": {
            **whose.licence,
            "evidencePath": found.licence.findings[0].path if found.licence.findings else None,
        },
        "trust": {"evidence": level, "summary": _summary(found.levels)},
        "standing": {"records": sum(line.standing.rank == 1 for line in found.runs)},
        "bestResults": [row(whose, operation, line.levels, line) for line in found.runs if line.status == "passed"],
        "limitations": list(it.limitations),
        "provenance": {
            "source": source_ref(it.source, it.record, it.imported_at),
            "authors": list(it.authors),
            "importedAt": it.imported_at,
        },
        "sourceCode": source_code(found, with_text),
        "nibblas": found,
    }


def _summary(levels: Levels) -> str:
    lacking = [gap for gap in (levels.next_numerics, levels.next_timing) if gap]
    missing = "; ".join(f"for {gap.level}: {', '.join(gap.facts)}" for gap in lacking)
    return f"numerics {levels.numerics}, timing {levels.timing}" + (f"; missing {missing}" if missing else "")


def _once(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


def source_code(found: Dossier, with_text: bool) -> shapes.SourceCode | None:
    """The first file, whose text stands there only where it was asked for and may be shown."""
    if not found.files or not found.licence.shown:
        return None
    main = found.files[0]
    under, attribution = found.licence.shown_under, found.licence.attribution
    code: shapes.SourceCode = {
        "fileName": main.path,
        "language": LANGUAGES.get(found.implementation.language, "text"),
        "license": under,
        "attribution": {"text": attribution, "url": None} if attribution else None,
    }
    if with_text and main.text is not None:
        code["content"] = main.text
    return code


def operation(
    found: OperationPage, selected: str | None, tables: Sequence[CohortTable], chosen: CohortTable | None
) -> shapes.OperationDossier:
    """An operation with the ranks of one cohort."""
    it = found.operation
    whose = {card.slug: _of_card(card) for card in found.implementations}
    levels = [card.levels for card in found.implementations]
    ladder = [evidence(level) for level in levels]
    return {
        "illustrative": False,
        "operation": {
            "id": found.digest,
            "slug": it.slug,
            "name": it.name,
            "family": it.family or UNKNOWN,
            "aliases": [],
            "equivalents": [],
            "models": [],
            "semanticDigest": f"sha256:{found.digest}",
            "summary": it.semantics or UNKNOWN,
            "supersededById": None,
        },
        "semantics": {
            "inputs": [argument(tensor) for tensor in it.tensors if tensor.role == "input"],
            "outputs": [argument(tensor) for tensor in it.tensors if tensor.role == "output"],
            "axes": [{"name": axis, "role": "variable", "value": None, "constraint": None} for axis in it.axes],
            "expression": it.semantics,
            "determinism": UNKNOWN,
            "constraints": [],
        },
        "workloads": [
            {
                "id": line.digest,
                "digest": f"sha256:{line.digest}",
                "label": line.workload.name,
                "axes": axes(line.workload),
                "dtypes": _dtypes(line.workload),
                "toleranceSummary": _tolerance(line.workload),
            }
            for line in found.workloads
        ],
        "selectedWorkloadId": selected,
        "cohortOptions": [option(table) for table in tables],
        "cohort": cohort(chosen) if chosen else None,
        "records": [
            row(whose.get(line.implementation.slug) or _of_line(line), line.operation, line.levels, line)
            for line in (chosen.runs if chosen else ())
        ],
        "sweep": None,
        "implementations": [
            {
                "slug": card.slug,
                "name": card.name,
                "project": project(card.authors, card.source_kind),
                "language": card.language,
                "framework": card.framework,
                "evidence": evidence(card.levels),
                "bestPrimary": primary(card.fastest.figure) if card.fastest else None,
                "sourceAvailable": card.source_shown,
                "installable": card.package is not None,
                "license": {"declared": card.licence, "concluded": card.licence_concluded},
            }
            for card in found.implementations
        ],
        "coverage": {
            "verified": sum(level in ("verified", "replicated") for level in ladder),
            "reproducible": ladder.count("reproducible"),
            "reported": ladder.count("reported"),
            "lastObservedAt": found.line.observed_at,
        },
        "sources": [],
        "nibblas": found,
    }


def _of_line(line: RunLine) -> Whose:
    """What a run alone says of its implementation."""
    return Whose(
        line.implementation,
        line.revision,
        line.authors,
        line.source_kind,
        None,
        None,
        {"declared": None, "concluded": None},
        line.source_shown,
        None,
        None,
    )


def argument(tensor: Tensor) -> shapes.Argument:
    """A tensor of an operation."""
    shape = f"({', '.join(tensor.shape)})" if tensor.shape is not None else UNKNOWN
    return {"name": tensor.name, "dtype": tensor.dtype or UNKNOWN, "shape": shape, "layout": tensor.layout}


def axes(workload: Workload) -> dict[str, float | str]:
    """The sizes of a workload."""
    return {name: size for name, size in workload.axes.items()}


def _dtypes(workload: Workload) -> list[str]:
    return _once(str(workload.parameters[name]) for name in ("a", "b", "out") if name in workload.parameters)


def _tolerance(workload: Workload) -> str:
    return ", ".join(f"{name} {value}" for name, value in workload.correctness.items()) or UNKNOWN


def run(found: RunPage) -> shapes.RunDossier:
    """All of a run."""
    it, line = found.run, found.line
    standing = line.standing
    retracted = next((event for event in found.events if event.kind in ("retract", "refute")), None)
    disputed = next((event for event in found.events if event.kind == "dispute"), None)
    figure = primary(line.figure)
    return {
        "illustrative": False,
        "run": {
            "id": found.digest,
            "digest": f"sha256:{found.digest}",
            "status": "revoked" if retracted else STATUSES[line.status],
            "observedAt": line.observed_at or UNKNOWN,
            "publishedAt": None,
        },
        "evidence": run_evidence(line),
        "lifecycle": {
            "supersedesId": None,
            "supersededById": None,
            "retracted": {"at": retracted.at or UNKNOWN, "reason": retracted.reason or UNKNOWN} if retracted else None,
            "disputed": {"reason": disputed.reason or UNKNOWN} if disputed else None,
            "stale": False,
        },
        # Their shape wants a figure of every run; one without a time has no samples, and that is a figure.
        "primary": figure
        or {
            "metric": "samples",
            "unit": "",
            "statistic": "count",
            "value": len(it.samples),
            "sampleCount": len(it.samples),
            "uncertainty": None,
        },
        "sourceNativeMetrics": {figure.metric: figure.value for figure in it.figures} if it.claimed else None,
        "cohort": {
            "comparisonKey": standing.cohort or "",
            "profile": profile(it.claimed),
            "rank": standing.rank,
            "eligible": standing.rank is not None,
            "ineligibleReasons": list(standing.reasons),
            "headRunId": None,
        },
        "implementation": {**named(line.implementation), "revision": str(line.revision)},
        "project": project(line.authors, line.source_kind),
        "operation": named(line.operation),
        "workload": {
            "id": line.workload.slug if line.workload else "",
            "digest": f"sha256:{line.workload.slug}" if line.workload else "",
            "label": line.workload.name if line.workload else WHOLE_BOARD,
            "axes": axes(it.workload) if it.workload else {},
            "tensors": pairs(it.workload.parameters) if it.workload else [],
            "tolerance": pairs(it.workload.correctness) if it.workload else [],
        },
        "correctness": {
            "comparator": "the float64 oracle, largest deviation over the expected size",
            "maxAbsoluteError": None,
            "maxRelativeError": it.error,
            "matchedRatio": None,
            "passed": line.status == "passed",
        }
        if it.error is not None
        else None,
        "measurements": [
            {
                "metric": figure.metric,
                "statistic": figure.statistic or "value",
                "value": figure.value,
                "unit": _unit(figure.metric),
                "sampleCount": figure.n,
            }
            for figure in it.figures
        ],
        "protocol": pairs(
            {"name": it.protocol.name, "harness": it.protocol.harness, "version": it.protocol.version}
            | dict(it.protocol.details)
        ),
        "environment": pairs(
            {"device": it.environment.device, "arch": it.environment.arch, "threads": it.environment.threads}
            | dict(it.environment.versions)
            | dict(it.environment.facts)
        ),
        "artifacts": [],
        "provenance": {
            "source": {
                "name": line.source_kind,
                "kind": line.source_kind,
                "url": None,
                "license": found.licence.terms,
                "externalId": it.record,
                "observedAt": line.observed_at,
            },
            "externalId": it.record,
            "parserVersion": None,
            "snapshotDigest": None,
        },
        "attestations": [
            attestation(i, event) for i, event in enumerate(found.events) if event.body.get("outcome") in ATTESTED
        ],
        "nibblas": found,
    }


def attestation(place: int, event: Event) -> shapes.Attestation:
    """What somebody says of a run."""
    return {
        "id": str(place),
        "type": ATTESTED[event.body["outcome"]],
        "body": event.reason or "",
        "evidenceUrl": None,
        "observedNs": None,
        "environmentSummary": None,
        "author": event.by or UNKNOWN,
        "at": event.at or UNKNOWN,
    }


def runs(found: RunsPage, at: str) -> shapes.Runs:
    """A page of runs."""
    return {
        "runs": [
            {
                "id": line.digest,
                "digest": f"sha256:{line.digest}",
                "operation": line.operation.slug,
                "implementation": line.implementation.slug,
                "hardware": line.device or UNKNOWN,
                "status": STATUSES[line.status],
                "primary": primary(line.figure),
                "evidence": run_evidence(line),
                "sourceAvailable": line.source_shown,
                "source": line.source_kind,
                "observedAt": line.observed_at or UNKNOWN,
                "nibblas": {
                    "workload": line.workload.name if line.workload else None,
                    "claimed": line.claimed,
                    "numerics": line.levels.numerics,
                    "timing": line.levels.timing,
                    "cohort": line.standing.cohort,
                    "rank": line.standing.rank,
                    "error": line.error,
                    "floor": line.floor,
                },
            }
            for line in found.runs
        ],
        "nextCursor": found.next,
        "generatedAt": at,
    }


def compare(pages: Sequence[RunPage], missing: Sequence[str]) -> shapes.RunComparison:
    """Runs side by side; they are comparable where all have a rank in one cohort."""
    lines = [page.line for page in pages]
    keys = {line.standing.cohort for line in lines}
    eligible = all(line.standing.rank is not None for line in lines)
    comparable = len(lines) > 1 and len(keys) == 1 and eligible
    fields = [_field(name, material, lines_values) for name, material, lines_values in _aligned(pages)]
    mismatch = next((field["field"] for field in fields if field["material"] and field["differs"]), None)
    return {
        "illustrative": False,
        "runs": [_compared(page) for page in pages],
        "comparable": comparable,
        "profile": profile(lines[0].claimed) if comparable else None,
        "comparisonKey": lines[0].standing.cohort if comparable else None,
        "fields": fields,
        "firstMaterialMismatch": mismatch,
        "explanation": _explanation(lines, comparable, mismatch),
        "missingIds": list(missing),
        "policyVersion": POLICY,
        "nibblas": pages,
    }


def _explanation(lines: Sequence[RunLine], comparable: bool, mismatch: str | None) -> str:
    if len(lines) < 2:
        return "Fewer than two of the runs are in this index."
    if comparable:
        return "All runs are of one cohort: their times can be compared."
    if mismatch:
        return f"Times of different cohorts are not compared: {mismatch} differs."
    reasons = [f"{line.implementation.name}: {', '.join(line.standing.reasons)}" for line in lines]
    return f"Not every run counts: {'; '.join(reason for reason in reasons if not reason.endswith(': '))}."


def _aligned(pages: Sequence[RunPage]) -> Iterable[tuple[str, bool, list[str | None]]]:
    def each(value) -> list[str | None]:
        return [None if (found := value(page)) is None else str(found) for page in pages]

    yield "operation", True, each(lambda page: page.line.operation.slug)
    yield "workload", True, each(lambda page: page.line.workload.name if page.line.workload else WHOLE_BOARD)
    yield "protocol", True, each(lambda page: page.run.protocol.digest)
    yield "device", True, each(lambda page: page.line.device)
    yield "threads", True, each(lambda page: page.line.threads)
    yield "whose word", True, each(lambda page: "the source's" if page.line.claimed else "measured here")
    yield "cohort", True, each(lambda page: page.line.standing.cohort)
    yield "status", False, each(lambda page: page.line.status)
    yield "error", False, each(lambda page: page.line.error)
    yield "floor", False, each(lambda page: page.line.floor)
    yield "command", False, each(lambda page: page.run.command)
    names = sorted({name for page in pages for name in page.run.environment.versions})
    for name in names:
        yield name, False, [page.run.environment.versions.get(name) for page in pages]


def _field(name: str, material: bool, values: list[str | None]) -> shapes.ComparedField:
    return {"field": name, "material": material, "values": values, "differs": len(set(values)) > 1}


def _compared(page: RunPage) -> shapes.ComparedRun:
    line = page.line
    return {
        "runId": page.digest,
        "digest": f"sha256:{page.digest}",
        "implementation": named(line.implementation),
        "project": project(line.authors, line.source_kind),
        "operation": named(line.operation),
        "workloadLabel": line.workload.name if line.workload else WHOLE_BOARD,
        "hardware": line.device or UNKNOWN,
        "primary": primary(line.figure),
        "evidence": run_evidence(line),
        "status": STATUSES[line.status],
        "comparisonKey": line.standing.cohort or "",
        "rank": line.standing.rank,
        "tiedWithPrevious": line.standing.tied,
        "eligible": line.standing.rank is not None,
        "ineligibleReasons": list(line.standing.reasons),
        "license": {"declared": page.licence.declared, "concluded": page.licence.concluded},
        "install": None,
        "sourceAvailable": line.source_shown,
        "observedAt": line.observed_at or UNKNOWN,
    }


def operations(found: Sequence[OperationLine], at: str) -> shapes.Operations:
    """All operations."""
    return {
        "operations": [
            {
                "slug": line.slug,
                "name": line.name,
                "family": line.family or UNKNOWN,
                "tags": [],
                "workloads": line.workloads,
                "runs": line.runs,
            }
            for line in found
        ],
        "generatedAt": at,
        "nibblas": found,
    }


def hardware(found: Sequence[HardwareLine], at: str) -> shapes.HardwareList:
    """All devices."""
    return {
        "hardware": [
            {
                "slug": line.slug,
                "model": line.name,
                "vendor": line.vendor,
                "architecture": line.arch,
                "kernelRuns": line.runs,
                "servingRuns": 0,
                "operations": line.operations,
                "families": line.families,
                "lastObservedAt": line.observed_at,
            }
            for line in found
        ],
        "generatedAt": at,
        "nibblas": found,
    }


def sources(found: Sequence[SourceLine], at: str) -> shapes.Sources:
    """All sources."""
    return {"sources": [_source_item(line) for line in found], "generatedAt": at, "nibblas": found}


def _source_item(line: SourceLine) -> shapes.SourceItem:
    return {
        "slug": line.slug,
        "kind": "kernel",
        "runs": line.runs,
        "indexed": line.implementations,
        "breadth": line.operations,
        "hardware": line.devices,
        "lastFetched": line.imported_at,
    }


def coverage(found: Coverage) -> shapes.CoverageFacts:
    """How much there is."""
    return {
        "illustrative": False,
        "sources": [_source_item(line) for line in found.sources],
        "hero": {
            "gpus": list(found.devices),
            "rows": [
                {"family": family, "runs": list(counts), "total": sum(counts)} for family, counts in found.families
            ],
        },
        "nibblas": found,
    }
