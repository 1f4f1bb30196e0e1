"""Source files: those in one folder that share a stem (a launcher and its device code) are one implementation.

A local file is known by its folder and name, not by its content: changed and added again it is a new revision. Its slug
is made of the folder's name and its own; where that belongs to a file elsewhere, the import refuses it, and `--slug`
gives another. The licence text that lies beside it, or above it in the same repository, is one of its files, so that
what is concluded from it can be cited.

With `--problem` or `--board` it is a KernelBot submission, and with `--submission` it has the slug that KernelBot's
number gives.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from nibblas.index.ingest import kernelbot
from nibblas.index.ingest.reading import Options, Read, at_home, described, interface_of, read_bytes
from nibblas.index.model import CompatFact, Implementation, Item, Source, kebab, language_of
from nibblas.index.store import Store

HEADER = re.compile(r"^(?:#|//)!POPCORN\s+(leaderboard|gpus?)\s+(.+?)\s*$", re.MULTILINE)


LICENCES = ("license", "licence", "copying")


def takes(path: Path) -> bool:
    """A file whose suffix names a language."""
    return language_of(path.name) is not None


def count(path: Path) -> int:
    return 1


def read(path: Path, options: Options, store: Store) -> Iterator[Read]:
    together = sorted(other for other in path.parent.iterdir() if other.stem == path.stem and takes(other))
    # The first of those with one stem stands for all: a .py before the .c, .cu or .h that it loads.
    main = next((other for other in together if other.suffix == ".py"), together[0])
    if path != main:
        return
    contents = {other.name: read_bytes(other) for other in (*together, *_licences(path.resolve().parent))}
    header = dict(HEADER.findall(contents[main.name].decode(errors="replace")))
    board = options.board or header.get("leaderboard")
    problem = kernelbot.read_problem(options.problem) if options.problem else None
    if problem is None and board:
        problem = kernelbot.Problem(kernelbot.operation(board))
    interface = interface_of(main.name, contents[main.name])
    folder = at_home(main.parent)
    source = Source("file", folder, options.revision, options.terms, options.attribution)
    slug = options.slug or kebab(main.resolve().parent.name, main.stem)
    name = main.name
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
        licence=options.licence,
        record=main.name,
    )
    gpus = re.split(r"[\s,]+", header.get("gpus") or header.get("gpu") or "")
    facts = tuple(
        CompatFact("declared", gpu=kernelbot.device(gpu)[0], reason=f"asks for the runner {gpu}", path=main.name)
        for gpu in gpus
        if gpu
    )
    yield Item(implementation, contents, facts=facts, workloads=problem.workloads if problem else ())


def _licences(folder: Path) -> list[Path]:
    """The licence texts of the nearest folder that has some, from this one up to the root of its repository."""
    up = [folder, *folder.parents]
    root = next((n for n, parent in enumerate(up) if (parent / ".git").exists()), 0)
    for parent in up[: root + 1]:
        texts = [path for path in parent.iterdir() if path.name.lower().startswith(LICENCES) and _is_text(path)]
        if texts:
            return sorted(texts)
    return []


def _is_text(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in ("", ".txt", ".md", ".rst")
