"""Techniques, what uses them, and lines that show it."""

import json
from dataclasses import replace

from nibblas.index.catalog import Catalog
from nibblas.index.documents import Finding, NotFoundError, Query, Ref, TechniqueLine, TechniquePage
from nibblas.index.lines import FINDING_BODY
from nibblas.index.read.search import search
from nibblas.index.rule import techniques as known_techniques


def techniques(catalog: Catalog) -> tuple[TechniqueLine, ...]:
    """Every technique that the rules know, those most used first."""
    selection = catalog.prepared.selection
    uses, mentions = selection.facet("uses"), selection.facet("mentions")
    found = []
    for slug, known in known_techniques().items():
        used = uses.size(slug)
        found.append(TechniqueLine(slug, known.name, known.about, used, mentions.size(slug) - used))
    found.sort(key=lambda line: (-line.uses, -line.mentions, line.slug))
    return tuple(found)


def technique(catalog: Catalog, slug: str, query: Query | None = None) -> TechniquePage:
    """A technique, and one page of the implementations that use it."""
    line = next((line for line in techniques(catalog) if line.slug == slug), None)
    if line is None:
        raise NotFoundError(f"no technique has the slug {slug!r}")
    query = query or Query()
    results = search(catalog, replace(query, uses=(*query.uses, slug) if slug not in query.uses else query.uses))
    wanted = json.dumps([card.digest for card in results.cards])
    rows = catalog.all(
        f"SELECT i.slug, i.name, f.path, finding.line, {FINDING_BODY} FROM json_each(?) wanted"
        " JOIN implementation i ON i.digest = wanted.value JOIN implementation_file f ON f.implementation = i.id"
        " JOIN finding ON finding.scan = f.scan AND finding.topic = 'technique'"
        " WHERE finding.body ->> 'technique' = ? AND finding.body ->> 'kind' = 'use' ORDER BY wanted.key, finding.line",
        wanted,
        slug,
    )
    examples: dict[str, tuple[Ref, Finding]] = {}
    for of, name, path, number, body in rows:
        examples.setdefault(of, (Ref(of, name), Finding(path, number, json.loads(body))))
    return TechniquePage(line, results, tuple(examples.values()))
