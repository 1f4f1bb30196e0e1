"""What importers share: what they are told, what they yield, and what a source file says of its interface."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from nibblas.index import languages
from nibblas.index.model import CompatFact, Item, Run, SourceFile
from nibblas.index.store import Store

MAX_BYTES = 16 << 20  # of one source file or record
# The first that a file imports names its framework; those that bring their own compiler stand before torch.
FRAMEWORKS = {
    "helion": "helion",
    "tilelang": "tilelang",
    "cutlass.cute": "cute-dsl",
    "cuda.tile": "cutile",
    "triton": "triton",
    "numba": "numba",
    "torch.utils.cpp_extension": "torch-extension",
    "torch": "torch",
}
INCLUDES = {"cutlass/": "cutlass", "cute/": "cutlass", "ck/": "composable-kernel", "torch/": "torch-extension"}
KERNELBOT_ENTRY = "custom_kernel"
DEFINITION = re.compile(r"^(?:async )?def (\w+)\((.*)\)\s*(?:->\s*(.+?))?\s*:\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Options:
    """What the person who imports says of the things imported.

    Parameters
    ----------
    slug : of one implementation.
    authors, licence, terms : where the source itself doesn't say. licence is declared for the implementation, terms are
        those under which the source hands it on (SPDX expressions).
    revision, attribution : of the data set.
    board, submission, problem : KernelBot's name of the problem, number of the submission, and problem folder.
    boards : of a data set, only these; all if empty.
    top : of a data set, only so many of the fastest of each board and runner.
    """

    slug: str | None = None
    authors: tuple[str, ...] = ()
    licence: str | None = None
    terms: str | None = None
    revision: str | None = None
    attribution: str | None = None
    board: str | None = None
    submission: str | None = None
    problem: Path | None = None
    boards: tuple[str, ...] = ()
    top: int | None = None


class Skipped(NamedTuple):
    """Something that is not imported, and why. `things` says how many `what` names."""

    what: str
    why: str
    things: int = 1


class Attached(NamedTuple):
    """Runs and facts of a revision that is in the index, by its digest; it need not be the current one."""

    digest: str
    runs: tuple[Run, ...]
    facts: tuple[CompatFact, ...] = ()


class Known(NamedTuple):
    """Something that need not even be read: it is in the index as it is."""

    what: str


Read = Item | Attached | Skipped | Known


class Importer(Protocol):
    """A module of this package."""

    def takes(self, path: Path) -> bool:
        """Whether this file is of the importer's kind; its content may be looked at, not trusted."""

    def count(self, path: Path) -> int:
        """How many things `read` will yield, about."""

    def read(self, path: Path, options: Options, store: Store) -> Iterator[Read]:
        """Each thing in the file. OSError or ValueError where the rest can't be read."""


class Interface(NamedTuple):
    """What a source file itself says of how it is called; None where it doesn't."""

    language: str | None = None
    framework: str | None = None
    entry_point: str | None = None
    signature: str | None = None


def interface_of(path: str, raw: bytes) -> Interface:
    """Its language, framework by imports, and the function to call: KernelBot's, else the only public one."""
    text = raw.decode(errors="replace")
    language = languages.of_file(path, text)
    if language == "python":
        modules, functions = _python(text)
        framework = next((name for module, name in FRAMEWORKS.items() if _imports(modules, module)), None)
        public = [name for name in functions if not name.startswith("_")]
        entry = KERNELBOT_ENTRY if KERNELBOT_ENTRY in functions else public[0] if len(public) == 1 else None
        return Interface(language, framework, entry, functions[entry] if entry else None)
    if language in ("cuda", "hip", "c++"):
        included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', text, re.MULTILINE)
        framework = next((name for head, name in INCLUDES.items() if any(i.startswith(head) for i in included)), None)
        return Interface(language, framework)
    return Interface(language)


def _imports(modules: set[str], wanted: str) -> bool:
    return any(module == wanted or module.startswith(wanted + ".") for module in modules)


def _python(text: str) -> tuple[set[str], Mapping[str, str]]:
    """The modules that a text imports, and the functions at its top with their signatures."""
    modules: set[str] = set()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # A text that lost its indentation still has lines that can be nothing else.
        for module, names in re.findall(r"^(?:from|import) ([\w.]+)(?: import ([\w, ]+))?", text, re.MULTILINE):
            modules |= {module, *(f"{module}.{name.strip()}" for name in names.split(",") if name.strip())}
        signatures = {name: _signature(name, inside, result) for name, inside, result in DEFINITION.findall(text)}
        return modules, {name: s for name, s in signatures.items() if name == KERNELBOT_ENTRY}
    for statement in _statements(tree.body):
        if isinstance(statement, ast.Import):
            modules |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            modules |= {statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)}
    functions = {
        node.name: _signature(node.name, ast.unparse(node.args), ast.unparse(node.returns) if node.returns else "")
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    return modules, functions


def _statements(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement of a block, and of the blocks inside; expressions, which are most of a tree, are not entered."""
    for statement in block:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _signature(name: str, inside: str, result: str) -> str:
    return f"{name}({inside})" + (f" -> {result}" if result else "")


def read_bytes(path: Path) -> bytes:
    """The content of a file that may be text; ValueError where it is too large, empty or no text."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes, at most {MAX_BYTES} are taken for a source")
    raw = path.read_bytes()
    if not raw.strip():
        raise ValueError("the file is empty")
    if b"\0" in raw:
        raise ValueError("not a text: it holds zero bytes")
    return raw


def described(contents: Mapping[str, bytes]) -> tuple[SourceFile, ...]:
    """The files of an implementation, sorted by path."""
    return tuple(SourceFile.of(path, contents[path]) for path in sorted(contents))


def at_home(path: Path) -> str:
    """An absolute path with the user's home folder as "~", so that it names no user."""
    path = path.resolve()
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) and path != home else str(path)
