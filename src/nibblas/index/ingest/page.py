"""The text of a saved catalog page (KernelIndex): its fields, its claims, and the source that it mirrors.

What a browser copies of such a page loses indentation, empty lines, table values, and the space between a label and its
value or between the end of one entry and the name of the next. Nothing is put back by guess: the file that is kept is
what the text holds, every field is kept as a claim with the line of the text that it stands in, and what can be seen to
be lost is told as a limitation. The page's revision digest is that of the catalog's own manifest, which the text does
not hold, so it can't be checked.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nibblas.index import languages
from nibblas.index.ingest.reading import Options, Read, Skipped, described, interface_of, read_bytes
from nibblas.index.model import (
    Claim,
    CompatFact,
    Implementation,
    Item,
    Operation,
    Source,
)
from nibblas.index.store import Store
from nibblas.words import counted

SECTIONS = ("Use it", "Compatibility", "Benchmark evidence", "Source and license", "Techniques")
LABELS = {
    "Compatibility": ("measured on", "declared hardware", "architectures", "dtypes"),
    "Source and license": (
        "source",
        "revision digest",
        "license declared",
        "license concluded",
        "authors",
        "imported",
    ),
}
SUFFIXES = "|".join(sorted((suffix[1:].replace("+", r"\+") for suffix in languages.SUFFIXES), key=len, reverse=True))
HEADING = re.compile(rf"^(.+\.(?:{SUFFIXES}))(\d+) lines$")
END = re.compile(r"(?:scrolls · )(\d+) lines total$")
ADDRESS = re.compile(r"(https?://[^\s\"']+/implementations/([a-z0-9-]+))")
CREDIT = re.compile(r"^Source code from (.+) · (.+)$")
LEVEL = re.compile(r"^Best evidence level for this revision: (.+)$")
KERNELBOT = re.compile(r"^kernelbot-(.+)-(\d+)$")
# Terms that pages name in words.
TERMS = {"June 9 Researcher Reciprocity License v1.0": "LicenseRef-GPUMode-Reciprocity-1.0"}


@dataclass(frozen=True)
class Page:
    """The parts of a page's text. Lines are counted from 1, as `line` of a claim."""

    lines: Sequence[str]
    sections: dict[str, range]  # indices of the lines under each heading
    heading: int  # index of the line with the file's name
    end: int  # index of the last line of the source
    file: str
    claimed_lines: int

    @property
    def source(self) -> str:
        """The mirrored file as the text holds it."""
        return "\n".join([*self.lines[self.heading + 1 : self.end], END.sub("", self.lines[self.end])])


def takes(path: Path) -> bool:
    """A text with the headings of such a page."""
    if path.suffix.lower() not in (".txt", ".text"):
        return False
    try:
        lines = set(read_bytes(path).decode(errors="replace").splitlines())
    except (OSError, ValueError):
        return False
    return set(SECTIONS) <= lines


def count(path: Path) -> int:
    return 1


def read(path: Path, options: Options, store: Store) -> Iterator[Read]:
    text = read_bytes(path).decode(errors="replace")
    found = ADDRESS.search(text)
    if not found:
        yield Skipped(str(path), "the page names no address of its implementation, so it has no slug")
        return
    yield _item(_page(text), found[2], found[1].replace("/api/v1/", "/"), path.name, options)


def _page(text: str) -> Page:
    """The parts of a text; ValueError where the source can't be told from the rest."""
    lines = text.splitlines()
    starts = [lines.index(section) for section in SECTIONS]
    headings = [i for i in range(starts[-1] + 1, len(lines)) if lines[i - 1].endswith("Kernel source")]
    found = HEADING.match(lines[headings[0]]) if headings else None
    if not found:
        raise ValueError('no line "NAME LINES lines" under "Kernel source": the page mirrors no source')
    heading = headings[0]
    end = next((i for i in range(len(lines) - 1, heading, -1) if END.search(lines[i])), None)
    if end is None:
        raise ValueError('no "LINES lines total" after the source: where it ends can\'t be told')
    stops = [*starts[1:], heading]
    sections = {name: range(a + 1, b) for name, a, b in zip(SECTIONS, starts, stops, strict=True)}
    return Page(lines, sections, heading, end, found[1], int(found[2]))


def _item(page: Page, slug: str, address: str, record: str, options: Options) -> Item:
    content = page.source.encode()
    interface = interface_of(page.file, content)
    fields = {claim.subject: claim for claim in _labelled(page)}
    measured = page.sections["Benchmark evidence"]
    techniques, uncited = _techniques(page)
    credit = next((m for line in page.lines[page.end :] if (m := CREDIT.match(line))), None)
    level = [Claim("evidence level", m[1], i) for i, line in enumerate(page.lines, 1) if (m := LEVEL.match(line))]
    authors = _value(fields, "authors")
    held = content.count(b"\n") + 1
    limitations = []
    if held != page.claimed_lines:
        says = counted(page.claimed_lines, "line")
        limitations.append(f"The page says {says}, its text holds {held}: this is not the file that was measured.")
    if not any(line[:1].isspace() for line in page.source.splitlines()):
        limitations.append("The text of the page lost all indentation, so Python can't run the file as it is kept.")
    if fields.get("revision digest"):
        limitations.append(
            "The page's revision digest is of the catalog's manifest, which the page does not hold: not checked."
        )
    rows = _between(page, measured, "Observed", "Reported")
    if not rows and any("measurement" in page.lines[i] for i in measured):
        limitations.append("The page tells of measurements, but its text has lost their values.")
    if uncited:
        cite = "cites" if len(uncited) == 1 else "cite"
        limitations.append(f"{counted(len(uncited), 'line')} of the page's techniques {cite} no line of its source.")
    board = KERNELBOT.match(slug)
    implementation = Implementation(
        options.slug or slug,
        page.lines[0].strip(),
        Source(
            "catalog-page",
            address,
            revision=options.revision,
            terms=options.terms or (TERMS.get(credit[2]) if credit else None),
            attribution=options.attribution or (credit[0] if credit else None),
        ),
        files=described({page.file: content}),
        operation=Operation(board[1], board[1]) if board else None,
        authors=options.authors or (tuple(a.strip() for a in authors.split(",")) if authors else ()),
        language=interface.language,
        framework=interface.framework,
        entry_point=interface.entry_point,
        signature=interface.signature,
        licence=options.licence or _known(_value(fields, "license declared")),
        limitations=tuple(limitations),
        record=record,
    )
    claims = [
        Claim("title", page.lines[1].strip(), 2),
        *(Claim("use", page.lines[i].strip(), i + 1) for i in page.sections["Use it"]),
        *fields.values(),
        *(Claim("measurements", page.lines[i].strip(), i + 1) for i in measured if "measurement" in page.lines[i]),
        *(Claim("measurement", page.lines[i].strip(), i + 1) for i in rows),
        *techniques,
        *uncited,
        Claim("lines", str(page.claimed_lines), page.heading + 1),
        *level,
    ]
    facts = [
        *(CompatFact("declared", gpu=gpu) for gpu in _list(fields, "declared hardware")),
        *(CompatFact("declared", arch=arch) for arch in _list(fields, "architectures")),
        *(CompatFact("measured", gpu=gpu, claimed=True) for gpu in _list(fields, "measured on")),
    ]
    return Item(implementation, {page.file: content}, facts=tuple(facts), claims=tuple(claims))


def _labelled(page: Page) -> Iterator[Claim]:
    """The lines whose value follows its label with nothing between."""
    for section, labels in LABELS.items():
        for i in page.sections[section]:
            label = max((label for label in labels if page.lines[i].startswith(label)), key=len, default=None)
            if label:
                yield Claim(label, page.lines[i][len(label) :].strip(), i + 1)


def _techniques(page: Page) -> tuple[list[Claim], list[Claim]]:
    """The cited line of each technique, and the lines that cite no line of the source.

    The name of a technique is glued to the end of the citation before it, so they are parted where the longest line of
    the source ends that the text begins with.
    """
    indices = [i for i in page.sections["Techniques"] if not page.lines[i].endswith("cites its line.")]
    sourced = {line.strip() for line in page.source.splitlines()} - {""}
    cited: list[Claim] = []
    lost: list[Claim] = []
    name = page.lines[indices[0]].strip() if indices else ""
    for i in indices[1:]:
        text = page.lines[i].strip().removesuffix("Kernel source")
        citation = next((text[:n] for n in range(len(text), 0, -1) if text[:n].strip() in sourced), None)
        if citation is None:
            lost.append(Claim("technique, not cited", text, i + 1))
            continue
        cited.append(Claim(f"technique {name}", citation.strip(), i + 1))
        name = text[len(citation) :].strip() or name
    return cited, lost


def _between(page: Page, indices: range, first: str, last: str) -> list[int]:
    """Indices of the lines after the one that is `first` and before the one that begins with `last`."""
    start = next((i + 1 for i in indices if page.lines[i] == first), indices.stop)
    stop = next((i for i in range(start, indices.stop) if page.lines[i].startswith(last)), indices.stop)
    return list(range(start, stop))


def _value(fields: dict[str, Claim], label: str) -> str | None:
    return _known(fields[label].value) if label in fields else None


def _known(value: str | None) -> str | None:
    return value if value and value.lower() != "unknown" else None


def _list(fields: dict[str, Claim], label: str) -> list[str]:
    value = _value(fields, label)
    return [part.strip() for part in value.split(",") if part.strip()] if value else []
