"""A submission: its files, what its header asks for, what it imports, and why this machine may be unable to run it.

Nothing of a submission is executed here; its text is read.
"""

import ast
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nibblas.arena.problem import ArenaError, Task, is_plain
from nibblas.arena.record import Finding, Scalar, SubmissionFacts
from nibblas.arena.standins import exception_modules, provides
from nibblas.targets import runs

SUFFIXES = {"py": (".py",), "cu": (".cu", ".cuh", ".cpp")}
MAX_BYTES = 16 << 20  # of all files of a submission together
MAX_OPTION = 500  # characters of a string that may be compiler options


@dataclass(frozen=True)
class Submission:
    """What a person hands in: the bytes of each file by the name that it gets beside the problem's, the main one first.

    `leaderboard` and `gpus` come from the `#!POPCORN` header of the main file.
    """

    path: Path
    main: str
    files: dict[str, bytes] = field(repr=False)
    language: Literal["py", "cu"] = "py"
    leaderboard: str | None = None
    gpus: tuple[str, ...] = ()

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of each file, as `sha256sum` prints it."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.files.items()}

    @property
    def facts(self) -> SubmissionFacts:
        """What the record keeps."""
        return SubmissionFacts(self.path.name, self.digests, self.leaderboard, self.gpus, self.language)


@dataclass(frozen=True)
class Import:
    """An import that runs when its file is loaded: `from module import name`, or of the module alone.

    `optional` is one that the file can do without: inside try with an except that takes ImportError.
    """

    module: str
    name: str | None
    where: str  # file:line
    optional: bool = False


def read_submission(path: Path | str, task: Task) -> Submission:
    """Read a submission to a problem: one file, or a folder that holds the file named as the problem calls it.

    Of a folder all files go along but for hidden ones, bytecode and exact copies of the problem's own files; of the
    problem's folder, what is not the problem's.
    Raises ArenaError where there is nothing to read, the suffix is not one of the problem's language, a header is
    wrong, a file would stand in for one of the problem's, or the files are larger than MAX_BYTES together.
    """
    path = Path(path)
    main = task.submission_name
    if path.is_dir():
        if not (path / main).is_file():
            raise ArenaError(f"{path}: the folder has no {main}, which is what {task.name} calls a submission")
        sources = {main: path / main, **_folder(path)}
    elif path.is_file():
        if path.suffix not in SUFFIXES[task.lang]:
            wanted = " or ".join(SUFFIXES[task.lang])
            raise ArenaError(f"{path}: the suffix is {path.suffix!r}, {task.name} needs a {wanted} file")
        sources = {main: path}
    else:
        raise ArenaError(f"{path}: no such file or folder")
    is_problem = path.resolve() == task.directory.resolve()
    files, total = {}, 0
    for name, source in sources.items():
        total += source.stat().st_size
        if total > MAX_BYTES:
            raise ArenaError(f"{path}: the files are larger than {MAX_BYTES >> 20} MiB together")
        content = source.read_bytes()
        own = task.file(name)
        if own is not None and (is_problem or own.content == content):
            continue
        if own is not None:
            raise ArenaError(f"{path}: {name} is a file of the problem, a submission can't bring another one")
        files[name] = content
    leaderboard, gpus = read_header(files[main].decode("utf-8-sig", errors="replace"), str(path))
    return Submission(path, main, files, task.lang, leaderboard, gpus)


def _folder(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(names):
            path = Path(directory, name)
            inside = path.relative_to(folder).as_posix()
            if name.startswith(".") or path.suffix == ".pyc" or inside == "task.yml":
                continue
            if path.is_symlink() or not path.is_file() or not is_plain(inside):
                raise ArenaError(f"{path}: need plain files with plain names, no links or devices")
            found[inside] = path
    return found


_HEADER_KEYS = {"leaderboard": "leaderboard", "gpu": "gpus", "gpus": "gpus"}


def read_header(text: str, where: str = "submission") -> tuple[str | None, tuple[str, ...]]:
    """The leaderboard and the GPUs that the first block of comments of a file names.

    Raises ArenaError for a directive that is unknown, empty or given twice.

    >>> read_header("#!POPCORN leaderboard nvfp4_gemv\\n#!POPCORN gpus B200 H100\\n")
    ('nvfp4_gemv', ('B200', 'H100'))
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith(("#", "//")):
            break
        mark, *words = line.split()
        if mark not in ("#!POPCORN", "//!POPCORN"):
            continue
        key = _HEADER_KEYS.get(words[0].lower()) if words else None
        if key is None or len(words) < 2:
            raise ArenaError(f"{where}: {line.strip()!r}: need !POPCORN leaderboard NAME or !POPCORN gpus NAME ...")
        if key in found:
            raise ArenaError(f"{where}: the header gives {key} twice")
        found[key] = words[1:]
    leaderboard = found.get("leaderboard")
    return leaderboard[0] if leaderboard else None, tuple(found.get("gpus", ()))


def imports(submission: Submission) -> list[Import]:
    """The imports that run when the submission is loaded, in its order; those inside functions are left out.

    A file that is not Python has none. Relative imports and those of the submission's own files are left out.
    """
    own = _names_beside(submission)
    found = (each for file, tree in _trees(submission) for each in _imports_of(tree.body, file, optional=False))
    return [each for each in found if each.module.split(".")[0] not in own]


def _names_beside(submission: Submission, task: Task | None = None) -> set[str]:
    """Top names of the modules that the submission's files, and the problem's, are."""
    names = [*submission.files, *(file.name for file in (task.files if task else ()))]
    return {name.split("/")[0].removesuffix(".py") for name in names}


def _imports_of(body: Iterable[ast.stmt], file: str, optional: bool) -> Iterator[Import]:
    for node in body:
        where = f"{file}:{node.lineno}"
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, where, optional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (Import(node.module, alias.name, where, optional) for alias in node.names)
        elif isinstance(node, ast.Try):
            guarded = any(map(_takes_import_error, node.handlers))
            yield from _imports_of(node.body, file, optional or guarded)
            # What a handler imports instead is needed only where the first choice is missing.
            for handler in node.handlers:
                yield from _imports_of(handler.body, file, optional=True)
            yield from _imports_of([*node.orelse, *node.finalbody], file, optional)
        elif isinstance(node, ast.If):
            yield from _imports_of([*node.body, *node.orelse], file, optional=True)
        elif isinstance(node, ast.With | ast.For | ast.While | ast.ClassDef):
            yield from _imports_of(node.body, file, optional)


def _takes_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(names & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def _trees(submission: Submission) -> Iterator[tuple[str, ast.Module]]:
    for name, content in submission.files.items():
        if name.endswith(".py"):
            try:
                yield name, ast.parse(content)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue  # the worker's own attempt tells what is wrong with it


def why_not(
    submission: Submission, task: Task, arch: str, stands_in: Callable[[str, str | None], bool] = provides
) -> str | None:
    """Why this machine can't run a submission, as far as its text tells; None where it may be tried.

    `arch` is the device's (nibblas.problem.arch_of): "cpu", "sm_90", "gfx950". `stands_in(module, name)` tells whether
    something of ours takes the place of a module, or of a name in it (name None asks for the module).
    """
    beside = _names_beside(submission, task)
    only_caught = exception_modules([*submission.files.values(), *(file.content for file in task.files)])
    for found in imports(submission):
        top = found.module.split(".")[0]
        if found.optional or top in beside or found.module in only_caught:
            continue
        if stands_in(found.module, found.name) or _is_installed(top):
            continue
        if stands_in(top, None):
            what = ".".join(filter(None, (found.module, found.name)))
            return f"{found.where} imports {what}, which our stand-in for {top} lacks{_about(top)}"
        return f"{found.where} imports {found.module}, which is not installed here{_about(top)}"
    return _why_not_arch(submission, arch)


_MODULES = {
    "aiter": "AMD's kernels, for ROCm",
    "cutlass": "NVIDIA's CuTe DSL, the package nvidia-cutlass-dsl",
    "hip": "HIP for Python, for ROCm",
    "helion": "Helion, a kernel language over Triton",
    "triton": "Triton, for GPUs",
}


def _about(module: str) -> str:
    return f" ({_MODULES[module]})" if module in _MODULES else ""


def _is_installed(top: str) -> bool:
    if top in sys.modules or top in sys.stdlib_module_names:
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


# Targets as they are given to compilers: -gencode=arch=compute_100a,code=sm_100a, --offload-arch=gfx942.
_TARGET = re.compile(
    r"(?:arch|code)[=\s]\s*\[?(?:(?P<kind>compute|sm)_(?P<number>\d{2,3}[af]?)|(?P<gfx>gfx[0-9a-f]+))\b"
)
_ARCH_LIST = "TORCH_CUDA_ARCH_LIST"  # torch's environment variable: 9.0a;10.0a+PTX


def _why_not_arch(submission: Submission, arch: str) -> str | None:
    """A reason where the submission names targets for its compiler, and none of them runs on this device."""
    targets = dict(_named_targets(submission))
    if targets and not any(runs(target, arch) for target in targets):
        device = "this is a CPU" if arch == "cpu" else f"this device is {arch}"
        return f"{next(iter(targets.values()))} compiles for {', '.join(sorted(targets))} only, {device}"
    if arch == "cpu":
        for file, tree in _trees(submission):
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and _compiles_for_gpu(node):
                    return f"{file}:{node.lineno} compiles code for a GPU, this is a CPU"
    return None


def _named_targets(submission: Submission) -> Iterator[tuple[str, str]]:
    """Targets that compiler options or torch's list of architectures name, with their file and line."""
    trees = dict(_trees(submission))
    for file, content in submission.files.items():
        if file in trees:
            for node in ast.walk(trees[file]):
                where = f"{file}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield from ((target, where) for target in _targets(node.value))
                elif isinstance(node, ast.Assign | ast.Call) and _ARCH_LIST in (texts := _texts(node)):
                    yield from ((target, where) for text in texts for target in _listed_targets(text))
        elif file.endswith(".py"):  # not Python, say for want of indentation: options stand in quotes all the same
            for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
                for text in re.findall(r"[\"']([^\"']+)[\"']", line):
                    yield from ((target, f"{file}:{number}") for target in _targets(text))


def _texts(node: ast.AST) -> list[str]:
    """The strings in an assignment or a call; of a call, its own arguments alone."""
    inside = node.args if isinstance(node, ast.Call) else ast.walk(node)
    return [each.value for each in inside if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def _targets(text: str) -> Iterator[str]:
    """Targets in a string that is one or more compiler options."""
    if text.lstrip().startswith(("-", "arch=", "code=")) and len(text) < MAX_OPTION:
        for match in _TARGET.finditer(text):
            yield match["gfx"] or f"{match['kind']}_{match['number']}"


def _listed_targets(text: str) -> Iterator[str]:
    for major, minor, ptx in re.findall(r"\b(\d+)\.(\d[af]?)(\+PTX)?", text):
        yield f"sm_{major}{minor}"
        if ptx:
            yield f"compute_{major}{minor}"


def _compiles_for_gpu(call: ast.Call) -> bool:
    """load_inline(cuda_sources=...) with sources, or load(sources=[... .cu])."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in ("load_inline", "load"):
        return False
    given = {word.arg: word.value for word in call.keywords}
    if name == "load_inline":
        sources = given.get("cuda_sources")
        empty = isinstance(sources, ast.List) and not sources.elts
        return sources is not None and not empty and not (isinstance(sources, ast.Constant) and not sources.value)
    texts = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return any(text.endswith((".cu", ".hip")) for text in texts)


# What errors say where the machine, not the submission, is at fault: of torch, compilers, CuTe DSL and Triton.
_LACKS = re.compile(
    "|".join(
        (
            r"not compiled with CUDA enabled",
            r"no NVIDIA driver on your system",
            r"No (CUDA|HIP) GPUs are available",
            r"Cannot access accelerator device when none is available",
            r"instantiate dummy base class",
            r"requires CUDA support",
            r"without ATen_cuda library",
            r"NVTX functions not installed",
            r"CUDA_HOME environment variable is not set",
            r"Ninja is required to load",
            r"no kernel image is available",
            r"invalid device function",
            r"(nvcc|hipcc)['\"]?: (command )?not found|No such file or directory: '[^']*(nvcc|hipcc)'",
            r"not supported on \.target|requires \.target|unsupported gpu architecture",
            r"is not defined for option 'gpu-name'",
            r"expects arch to be one of",
            r"nibblas' stand-in for",
        )
    ),
    re.IGNORECASE,
)


def incompatibility(error: str, message: str, submission: Submission, task: Task) -> str | None:
    """Why an error that a submission raised means that this machine lacks something; None where it means no such thing.

    `error` is the name of the exception's type. That reference.py is out of reach is no lack of the machine.
    """
    brief = " ".join(message.split())
    brief = brief if len(brief) <= 200 else f"{brief[:197]}..."
    if error in ("ModuleNotFoundError", "ImportError"):
        missing = re.search(r"No module named '([\w.]+)'|cannot import name '\w+' from '([\w.]+)'", message)
        top = (missing[1] or missing[2]).split(".")[0] if missing else ""
        return f"{brief}{_about(top)}" if top and top not in _names_beside(submission, task) else None
    if "active drivers" in message:
        return f"Triton finds no GPU: {brief}"
    return brief if _LACKS.search(message) else None


def static_findings(submission: Submission) -> list[Finding]:
    """What kernelguard, a separate package of rules for reward hacking, says of the text; telemetry, never a verdict.

    One Finding that says so where it is not installed or fails.
    """
    try:
        import kernelguard
    except ImportError:
        return [Finding("static", "info", "not looked at: kernelguard is not installed (pip install 'nibblas[arena]')")]
    from importlib.metadata import version

    tool: dict[str, Scalar] = {"tool": "kernelguard", "version": version("kernelguard")}
    found = []
    for name, content in submission.files.items():
        try:
            seen = kernelguard.analyze_code(content.decode(errors="replace"), compute_structural_hash=False)
        except Exception as error:  # a fault of its rules is no fault of the submission
            found.append(Finding("static", "info", f"kernelguard failed: {type(error).__name__}: {error}", name, tool))
            continue
        summary = f"kernelguard calls it {seen['classification']}"
        found.append(Finding("static", "info", summary, name, {**tool, "should_filter": bool(seen["should_filter"])}))
        for match in seen["matched_patterns"]:
            text = f"{match['pattern']} ({match['severity']}): {match.get('evidence', '')}"
            found.append(Finding("static", "info", text[:300], name, tool))
    return found
