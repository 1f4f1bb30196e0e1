"""Pages for people: each is a document of read.py, shown by a template, with the same document as its JSON twin.

A page is made by a function of the catalog, the parts of its address and its query.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any, get_args

from markupsafe import Markup

from nibblas.index import evidence_levels as policy
from nibblas.index import listing, pictures, read
from nibblas.index.catalog import Catalog
from nibblas.index.documents import (
    Dossier,
    Finding,
    HardwareAnswer,
    Include,
    NotFoundError,
    OperationPage,
    Query,
    QueryError,
    RunFilter,
    RunLine,
    TechniqueUse,
)
from nibblas.index.model import CompatFact, Event, FactKind, RunStatus, Workload
from nibblas.index.render import Crumbs, Page, count, params
from nibblas.problem import OPS, Problem
from nibblas.words import counted

Params = Mapping[str, Sequence[str]]
SEARCH_PARAMETERS = tuple("q" if field.name == "text" else field.name for field in fields(Query))
RUN_PARAMETERS = tuple(field.name for field in fields(RunFilter))

SECTIONS = (
    ("use", "Use it"),
    ("compatibility", "Compatibility"),
    ("evidence", "Evidence"),
    ("techniques", "Techniques"),
    ("licence", "Licence"),
    ("source", "Source"),
    ("provenance", "Provenance"),
)
FACETS = {
    "uses": "Technique used",
    "mentions": "Technique mentioned",
    "hardware": "Runs on",
    "licence": "Licence concluded",
    "numerics": "Numerics, at least",
    "timing": "Timing, at least",
    "source": "Kind of source",
    "origin": "Written by",
}
Kinds = dict[str, list[Finding]]
KINDS: tuple[FactKind, ...] = get_args(FactKind)
SOURCE: tuple[Include, ...] = ("source",)
INDEX: Crumbs = (("Index", "/"),)
MOST_ON_HOME = 24  # links of one kind
MOST_LINES = 10  # of one technique and kind in a dossier
MOST_PICTURES = 2  # of samples in a dossier
MOST_RANKED = 20  # of one cohort of an operation
MOST_POINTS = 40  # of one roofline


def home(catalog: Catalog) -> Page:
    """The first page: how much there is, and every way in."""
    document = {
        "coverage": read.coverage(catalog),
        "operations": read.operations(catalog),
        "techniques": read.techniques(catalog),
        "hardware": read.hardware(catalog),
        "newest": read.search(catalog, Query(sort="newest", limit=6)),
    }
    description = (
        "A catalog of kernels for 4-bit block-scaled floats: what runs where, who measured it, who may use it."
    )
    return Page("home.html", "/", "nibblas index", description, document, {"most": MOST_ON_HOME})


def search(catalog: Catalog, given: Params) -> Page:
    """A search with its facets."""
    query = query_of(given)
    pairs = params(query)
    values = {
        "query": query,
        "hardware": read.hardware(catalog),
        "kept": [(name, value) for name, value in pairs if name not in ("q", "hardware", "answer", "sort", "cursor")],
        "active": [
            (
                f"{FACETS.get(name, name.capitalize())}: {value}" + (f", {query.answer}" if name == "hardware" else ""),
                [pair for pair in pairs if pair != (name, value)],
            )
            for name, value in pairs
            if name not in ("q", "sort", "answer", "cursor", "limit")
        ],
        "facet_names": FACETS,
    }
    title = f"{query.text}, search" if query.text else "Search"
    return Page(
        "search.html",
        "/search",
        "Search",
        "Implementations by words and by facts.",
        read.search(catalog, query),
        values,
        title=title,
        query=pairs,
        indexed=not pairs,
    )


def implementation(catalog: Catalog, name: str) -> Page:
    """All that is known of an implementation: of its current revision by slug, of any by digest."""
    dossier = read.implementation(catalog, name, ("samples", "findings"))
    it, levels = dossier.implementation, dossier.levels
    values = {
        "name": name,
        "current": dossier.digest if name == it.slug else read.implementation(catalog, it.slug).digest,
        "sections": SECTIONS,
        "answers": answers(dossier),
        "matrix": matrix(dossier.facts),
        "kinds": KINDS,
        "axes": [
            ("Numerics", levels.numerics, policy.NUMERICS, levels.next_numerics),
            ("Timing", levels.timing, policy.TIMING, levels.next_timing),
        ],
        "groups": run_groups(dossier.runs),
        "pictures": [
            (run, picture(run)) for run in islice((run for run in dossier.runs if run.samples), MOST_PICTURES)
        ],
        "technique_groups": technique_groups(dossier.techniques),
        "most_lines": MOST_LINES,
        "by_machine_code": by_machine_code,
        "third_parties": third_parties(dossier.licence.third_party),
    }
    crumbs = INDEX
    if it.operation:
        crumbs += (("Operations", "/operations"), (it.operation.name, f"/operations/{it.operation.slug}"))
    what = f"{it.operation.name if it.operation else 'operation unknown'}, {it.language or 'language unknown'}"
    return Page(
        "implementation.html",
        f"/implementations/{name}",
        it.name,
        f"{it.name}: {what}. Compatibility, evidence, techniques, licence and source.",
        dossier,
        values,
        crumbs=crumbs,
    )


def source_file(catalog: Catalog, name: str, path: str) -> Page:
    """A source file with an anchor for every line, or why it is not shown."""
    dossier = read.implementation(catalog, name, ("source", "findings"))
    it = dossier.implementation
    file = next((file for file in dossier.files if file.path == path), None)
    if file is None:
        raise NotFoundError(f"{name}: it has no file {path}")
    values = {
        "name": name,
        "it": it,
        "file": file,
        "licence": dossier.licence,
        "lines": None if file.text is None else listing.lines(path, file.text),
        "cited": cited(dossier, path),
    }
    return Page(
        "file.html",
        f"/implementations/{name}/files/{path}",
        path,
        f"Source of {it.name}: {path}, {counted(file.lines, 'line')}.",
        {"implementation": it.slug, "revision": it.revision, "digest": dossier.digest, "file": file},
        values,
        title=f"{path}, {it.name}",
        crumbs=(*INDEX, (it.name, f"/implementations/{name}")),
    )


def changes(catalog: Catalog, name: str) -> Page:
    """What differs between a revision and the one before."""
    dossier = read.implementation(catalog, name, SOURCE)
    it = dossier.implementation
    if not it.supersedes:
        raise NotFoundError(f"{name}: there is no revision before it")
    heading = f"Revision {it.revision} against {(it.revision or 1) - 1}"
    return Page(
        "changes.html",
        f"/implementations/{name}/changes",
        heading,
        f"What revision {it.revision} of {it.name} changed.",
        dossier,
        {"name": name, "it": it, "files": list(changed(dossier))},
        title=f"{it.name}, {heading[0].lower()}{heading[1:]}",
        crumbs=(*INDEX, (it.name, f"/implementations/{name}")),
    )


def operations(catalog: Catalog) -> Page:
    """Every operation."""
    document = read.operations(catalog)
    return Page("operations.html", "/operations", "Operations", "What is computed.", document, crumbs=INDEX)


def operation(catalog: Catalog, slug: str, given: Params) -> Page:
    """An operation with its ranks, or with those of one workload or cohort."""
    workload, cohort = _one(given, "workload"), _one(given, "cohort")
    found = read.operation(catalog, slug, workload, cohort, MOST_RANKED)
    wanted = [(name, value) for name, value in (("workload", workload), ("cohort", cohort)) if value]
    return Page(
        "operation.html",
        f"/operations/{slug}",
        found.operation.name,
        f"{found.operation.name}: implementations, and ranks by workload and device.",
        found,
        {"wanted": wanted, "roofs": roofs(found)},
        query=wanted,
        crumbs=(*INDEX, ("Operations", "/operations")),
        indexed=not wanted,
    )


def techniques(catalog: Catalog) -> Page:
    """Every technique that the rules know."""
    document = read.techniques(catalog)
    description = "Techniques read from source by rule, and how many implementations use each."
    return Page("techniques.html", "/techniques", "Techniques", description, document, crumbs=INDEX)


def technique(catalog: Catalog, slug: str) -> Page:
    """A technique and what uses it."""
    found = read.technique(catalog, slug)
    description = f"{found.line.name}: which implementations use it, and the lines that show it."
    crumbs = (*INDEX, ("Techniques", "/techniques"))
    shown = {card.slug for card in found.results.cards if card.source_shown}
    values = {"shown": shown}
    return Page("technique.html", f"/techniques/{slug}", found.line.name, description, found, values, crumbs=crumbs)


def hardware(catalog: Catalog) -> Page:
    """Every device."""
    document = read.hardware(catalog)
    return Page("hardware.html", "/hardware", "Hardware", "What runs where.", document, crumbs=INDEX)


def device(catalog: Catalog, slug: str) -> Page:
    """A device with its ranks and what runs on it."""
    found = read.device(catalog, slug)
    description = f"What runs on {found.line.name}, and how fast."
    crumbs = (*INDEX, ("Hardware", "/hardware"))
    return Page("device.html", f"/hardware/{slug}", found.line.name, description, found, crumbs=crumbs)


def runs(catalog: Catalog, given: Params) -> Page:
    """Runs, newest first."""
    wanted = run_filter_of(given)
    values = {
        "operations": read.operations(catalog),
        "hardware": read.hardware(catalog),
        "statuses": get_args(RunStatus),
        "numbers": (),
        "cut": False,
    }
    return Page(
        "runs.html",
        "/runs",
        "Runs",
        "Runs of implementations, newest first.",
        read.runs(catalog, wanted),
        values,
        query=params(wanted),
        crumbs=INDEX,
        indexed=not params(wanted),
    )


def run(catalog: Catalog, digest: str) -> Page:
    """All that is known of a run."""
    found = read.run(catalog, digest)
    line = found.line
    name = f"{line.implementation.name}, {line.workload.name if line.workload else 'the whole board'}"
    return Page(
        "run.html",
        f"/runs/{digest}",
        name,
        f"A run of {line.implementation.name} on {line.device or 'an unknown device'}.",
        found,
        {"picture": picture(replace(line, samples=found.run.samples)) if found.run.samples else None},
        title=f"Run of {name}",
        crumbs=(*INDEX, ("Runs", "/runs")),
    )


def compare(catalog: Catalog, given: Params) -> Page:
    """Two implementations side by side; only the form where not both are named."""
    a, b = _one(given, "a") or "", _one(given, "b") or ""
    found = read.compare(catalog, a, b) if a and b else None
    return Page(
        "compare.html",
        "/compare",
        "Compare",
        "Two implementations side by side.",
        found,
        {"a": a, "b": b},
        title=f"{found.a.name} and {found.b.name}" if found else "",
        query=(("a", a), ("b", b)) if found else (),
        crumbs=INDEX,
        indexed=found is None,
    )


def sources(catalog: Catalog) -> Page:
    """Every source and its terms."""
    document = read.sources(catalog)
    description = "Where implementations came from, and under which terms."
    return Page("sources.html", "/sources", "Sources", description, document, crumbs=INDEX)


def methodology(catalog: Catalog) -> Page:
    """How levels and ranks are computed: the policy at work on examples."""
    document = {
        "policy": policy.POLICY,
        "numerics": policy.NUMERICS,
        "timing": policy.TIMING,
        "agreement": policy.AGREEMENT,
        "settings": policy.SETTINGS,
        "rules": read.coverage(catalog).rules,
        "examples": [{"given": given, "levels": levels} for given, levels in policy_examples()],
    }
    description = "How levels of evidence and ranks are computed from what is stored."
    return Page("methodology.html", "/methodology", "Methodology", description, document, crumbs=INDEX)


def about(catalog: Catalog) -> Page:
    """What the index is, how much it holds, and its API."""
    document = read.coverage(catalog)
    return Page("about.html", "/about", "About and API", "What this index is, and its API.", document, crumbs=INDEX)


def problem(path: str, name: str, detail: str) -> Page:
    """A page that says what went wrong."""
    return Page("error.html", path, name, detail, values={"detail": detail}, indexed=False)


# Queries from addresses


def query_of(given: Params) -> Query:
    """A Query as an address holds it in SEARCH_PARAMETERS; QueryError for a number that is none."""
    return _filled(Query, {"text" if name == "q" else name: values for name, values in given.items()})


def run_filter_of(given: Params) -> RunFilter:
    """A RunFilter as an address holds it in RUN_PARAMETERS."""
    return _filled(RunFilter, given)


def _filled(kind: type[Any], given: Params) -> Any:
    defaults = {f.name: f.default for f in fields(kind)}
    found: dict[str, Any] = {}
    for name, values in given.items():
        values = [value for value in values if value]
        if not values:
            continue  # a field of a form that was left empty
        if isinstance(defaults[name], tuple):
            found[name] = tuple(values)
        elif name == "limit":
            if not values[-1].isdecimal():
                raise QueryError(f"limit is {values[-1]!r}, need a whole number")
            found[name] = int(values[-1])
        else:
            found[name] = values[-1]
    return kind(**found)


def _one(given: Params, name: str) -> str | None:
    return next((value for value in reversed(given.get(name, ())) if value), None)


# What a template shows beside a document


def policy_examples() -> list[tuple[str, policy.Levels]]:
    """What the policy makes of stored facts, from none to all: the policy itself computes it."""
    word = policy.Observed("1", "passed", True, "a workload", "this device", seconds=1e-3)
    run_here = policy.Observed("2", "passed", False, "a workload", "this device", host="here", seconds=1e-3, samples=20)
    checked = run_here._replace(error=1e-3)
    hardened = checked._replace(hardened=True)
    elsewhere = hardened._replace(run="3", host="there", seconds=1.05e-3)
    slower = elsewhere._replace(seconds=1.5e-3)
    wrong = policy.Observed("4", "wrong", False, "a workload", "this device")
    return [
        ("Nothing", policy.levels([])),
        ("A compile for an architecture", policy.levels([], compiled=True)),
        ("Its source says that it passed, in 1.00 ms", policy.levels([word])),
        ("A run here of 1.00 ms, with its samples, its result not checked", policy.levels([word, run_here])),
        ("The same, its error against the float64 oracle known", policy.levels([word, checked])),
        ("The same, its inputs covering all codes and scales", policy.levels([word, hardened])),
        ("A second machine with the same device takes 1.05 ms", policy.levels([word, hardened, elsewhere])),
        ("A second machine with the same device takes 1.50 ms", policy.levels([hardened, slower])),
        ("Its source says that it passed; a run here is wrong", policy.levels([word, wrong])),
        ("A run here, which was retracted later", policy.levels([hardened], [Event("retract", "2")])),
    ]


def answers(dossier: Dossier) -> list[tuple[str, HardwareAnswer, list[HardwareAnswer]]]:
    """Devices with the same answer for the same reason: the reason, the first of them, all of them."""
    facts = {(fact.path, fact.line): fact.reason for fact in reversed(dossier.facts) if fact.line and fact.reason}
    found: dict[tuple[str, str, str | None, int | None], list[HardwareAnswer]] = {}
    for row in dossier.hardware:
        why = facts.get((row.path, row.line or 0)) or row.reason.replace(row.hardware.name, "it")
        found.setdefault((row.answer, why, row.path, row.line), []).append(row)
    return [
        (why if rows[1:] else rows[0].reason.removeprefix(f"Line {line}: "), rows[0], rows)
        for (_, why, _, line), rows in found.items()
    ]


def matrix(facts: Iterable[CompatFact]) -> dict[str, dict[FactKind, list[CompatFact]]]:
    """The five kinds of facts by what each is about: a device, an architecture, a thing that is needed."""
    found: dict[str, dict[FactKind, list[CompatFact]]] = {}
    for fact in facts:
        found.setdefault(subject(fact), {kind: [] for kind in KINDS})[fact.kind].append(fact)
    return found


def subject(fact: CompatFact) -> str:
    """What a fact is about."""
    return fact.gpu or fact.arch or fact.needs or "everywhere"


def run_groups(runs: Iterable[RunLine]) -> list[tuple[str, list[RunLine]]]:
    """Runs under the same conditions, in the order of the first of each."""
    found: dict[str, list[RunLine]] = {}
    for run in runs:
        threads = f", {count(run.threads, 'thread')}" if run.threads else ""
        whose = "reported by its source" if run.claimed else "run here"
        conditions = f"{run.device or 'unknown device'}{threads} · {run.protocol} · {whose}"
        found.setdefault(conditions, []).append(run)
    return list(found.items())


def technique_groups(found: Iterable[TechniqueUse]) -> list[tuple[str, list[tuple[TechniqueUse, Kinds]], str]]:
    """Techniques that are used, then those that are only mentioned; each with what is said if there is none."""
    kinds = [(use, by_kind(use)) for use in found]
    used, mentioned = [entry for entry in kinds if entry[0].uses], [entry for entry in kinds if not entry[0].uses]
    return [
        ("Used", used, "No rule found a use."),
        ("Only mentioned", mentioned, "Nothing is mentioned that isn't used as well."),
    ]


def by_kind(use: TechniqueUse) -> Kinds:
    """The findings of a technique by kind: uses, declarations, comments, strings."""
    found: Kinds = {}
    for finding in use.findings:
        found.setdefault(finding.body["kind"], []).append(finding)
    return found


def by_machine_code(found: Iterable[Finding]) -> list[str]:
    """What compiled binaries say of uses of a technique, each answer once."""
    told = []
    for finding in found:
        if answer := finding.body.get("machine_code"):
            seen = f"confirmed by {answer['opcode']}" if answer["state"] == "confirmed" else "no such instruction"
            told.append(f"{seen} in the machine code of {answer['by']}")
    return list(dict.fromkeys(told))


def third_parties(found: Iterable[Finding]) -> list[tuple[str, list[Finding]]]:
    """Whose code comments name, then what they only link to, each address once."""
    once = {finding.body["url"]: finding for finding in reversed(list(found))}
    entries = sorted(once.values(), key=lambda finding: (finding.path, finding.line or 0))
    return [
        ("Code of others", [finding for finding in entries if finding.body["hint"] != "link"]),
        ("Links", [finding for finding in entries if finding.body["hint"] == "link"]),
    ]


def cited(dossier: Dossier, path: str) -> dict[int, dict[str, bool]]:
    """What was found on each line of a file (a technique, a licence, a fact), and whether it is more than a mention."""
    licence = dossier.licence
    named: list[tuple[str, bool, Iterable[Any]]] = [
        (use.technique.name, kind == "use", found) for use in dossier.techniques for kind, found in by_kind(use).items()
    ]
    named += [("licence", True, licence.findings), ("third party", True, licence.third_party)]
    named += [(f"{fact.kind}: {subject(fact)}", True, (fact,)) for fact in dossier.facts]
    found: dict[int, dict[str, bool]] = {}
    for name, used, entries in named:
        for entry in entries:
            if entry.path == path and entry.line:
                names = found.setdefault(entry.line, {})
                names[name] = names.get(name, False) or used
    return dict(sorted(found.items()))


def changed(dossier: Dossier) -> Iterator[tuple[str, str, list[listing.Row] | None]]:
    """Each file that differs from the revision before: its lines, or why there are none to show."""
    old = {file.path: file for file in dossier.previous}
    new = {file.path: file for file in dossier.files}
    for path in sorted(old | new):
        was, now = old.get(path), new.get(path)
        if was and now and was.sha256 == now.sha256:
            continue
        if was is None or now is None:
            yield path, "This revision adds the file." if was is None else "This revision removes the file.", None
        elif was.text is None or now.text is None:
            yield path, "It differs; its source is not shown here.", None
        else:
            yield path, "It differs, and is too long to be compared here.", listing.diff(path, was.text, now.text)


def picture(run: RunLine) -> Markup:
    """The samples of a run, its interval and its floor."""
    figure = run.figure
    known = figure is not None and figure.low is not None and figure.high is not None
    return pictures.samples(run.samples, run.floor, (figure.low, figure.high) if known else None)  # type: ignore


def roofs(page: OperationPage) -> list[tuple[str, Markup, list[tuple[pictures.Point, RunLine]]]]:
    """A roofline for each device and number of threads, of runs whose floor and whose workload's traffic are known."""
    traffic = {line.digest: traffic_of(line.workload) for line in page.workloads}
    found: dict[str, list[tuple[pictures.Point, RunLine]]] = {}
    for table in page.cohorts:
        known = traffic.get(table.workload.slug) if table.workload else None
        if known is None:
            continue
        operations, moved = known
        conditions = table.device + (f", {count(table.threads, 'thread')}" if table.threads else "")
        points = found.setdefault(conditions, [])
        for line in table.runs:
            if line.floor and line.figure and len(points) < MOST_POINTS:
                name = f"{line.implementation.name}, {table.workload.name}"  # type: ignore[union-attr]
                attained, roof = operations / line.figure.value, operations / line.floor
                points.append((pictures.Point(operations / moved, attained, roof, str(len(points) + 1), name), line))
    return [
        (conditions, pictures.roofline([point for point, _ in points]), points)
        for conditions, points in found.items()
        if points
    ]


def traffic_of(workload: Workload) -> tuple[int, int] | None:
    """Operations and least bytes of a workload that is a Problem of the library; None of any other."""
    if workload.operation.name not in OPS:
        return None
    try:
        asked = Problem.from_dict({"op": workload.operation.name, **workload.axes, **workload.parameters})
        return (asked.operations, asked.bytes) if asked.operations > 0 and asked.bytes > 0 else None
    except (TypeError, KeyError, ValueError):
        return None
