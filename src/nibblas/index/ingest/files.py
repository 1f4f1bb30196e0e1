"""Source files: those in one folder that share a stem (a launcher and its device code) are one implementation.

A local file is known by its folder and name, not by its content: changed and added again it is a new revision. Its slug
is made of the folder's name and its own; where that belongs to a file elsewhere, the import refuses it, and `--slug`
gives another. The licence text that lies beside it, or above it in the same repository, is one of its files, so that
what is concluded from it can be cited; where there is none, what a README beside it states is what is declared, if that
is one licence.

With `--problem` or `--board` it is a KernelBot submission, and with `--submission` it has the slug that KernelBot's
number gives.
"""

from collections.abc import Iterator
from pathlib import Path

from nibblas.index import languages, licence
from nibblas.index.ingest import kernelbot
from nibblas.index.ingest.reading import MAX_BYTES, Options, Read, at_home, described, interface_of, read_bytes
from nibblas.index.model import Claim, Implementation, Item, Source, kebab
from nibblas.index.store import Store

LICENCES = ("license", "licence", "copying")


def takes(path: Path) -> bool:
    """A file whose suffix names a language; assembler also by its text."""
    language = languages.of_path(path.name)
    if language != "gcn":
        return language is not None
    try:
        return languages.of_file(path.name, read_bytes(path).decode(errors="replace")) is not None
    except (OSError, ValueError):
        return False


def count(path: Path) -> int:
    return 1


def main(path: Path) -> Path:
    """The file that stands for all of its folder with its stem: a .py before the .c, .cu or .h that it loads."""
    together = _together(path)
    return next((other for other in together if other.suffix == ".py"), together[0])


def read(path: Path, options: Options, store: Store) -> Iterator[Read]:
    contents = {other.name: read_bytes(other) for other in (*_together(path), *_licences(path.resolve().parent))}
    board = options.board or kernelbot.leaderboard(contents[path.name].decode(errors="replace"))
    problem = kernelbot.read_problem(options.problem) if options.problem else None
    if problem is None and board:
        problem = kernelbot.Problem(kernelbot.operation(board))
    claims = () if options.licence or len(contents) > len(_together(path)) else tuple(_said(path.resolve().parent))
    interface = interface_of(path.name, contents[path.name])
    folder = at_home(path.parent)
    source = Source("file", folder, options.revision, options.terms, options.attribution)
    if options.submission and not problem:
        raise ValueError(f"submission {options.submission} of which problem? --board or --problem names it")
    slug = options.slug or kebab(path.resolve().parent.name, path.stem)
    name = path.name
    if options.submission and problem:
        source = Source("kernelbot-submission", folder, options.revision, options.terms, options.attribution)
        slug = options.slug or kernelbot.slug(problem.operation, options.submission)
        name = f"submission {options.submission}"
    implementation = Implementation(
        slug,
        name,
        source,
        files=described(contents),
        operation=problem.operation if problem else None,
        authors=options.authors,
        language=interface.language,
        framework=interface.framework,
        entry_point=interface.entry_point,
        signature=interface.signature,
        licence=options.licence or (claims[0].value if len({claim.value for claim in claims}) == 1 else None),
        record=path.name,
    )
    facts = kernelbot.declared(path.name, contents[path.name])
    yield Item(implementation, contents, facts=facts, claims=claims, workloads=problem.workloads if problem else ())


def _together(path: Path) -> list[Path]:
    return sorted(
        other for other in path.parent.iterdir() if other.stem == path.stem and takes(other) and other.is_file()
    )


def _licences(folder: Path) -> list[Path]:
    """The licence texts of the nearest folder that has some, from this one up to the root of its repository."""
    up = [folder, *folder.parents]
    root = next((n for n, parent in enumerate(up) if (parent / ".git").exists()), 0)
    for parent in up[: root + 1]:
        texts = [path for path in parent.iterdir() if path.name.lower().startswith(LICENCES) and _is_text(path)]
        if texts:
            return sorted(texts)
    return []


def _said(folder: Path) -> Iterator[Claim]:
    """The licences that a README states for what lies beside it."""
    for path in sorted(folder.iterdir()):
        if path.name.lower().startswith("readme") and _is_text(path) and path.stat().st_size <= MAX_BYTES:
            for finding in licence.findings(path.name, path.read_text(errors="replace")):
                if finding.expression:
                    yield Claim(f"licence in {path.name}", finding.expression, finding.line)


def _is_text(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in ("", ".txt", ".md", ".rst")
