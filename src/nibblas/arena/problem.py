"""A problem directory: task.yml, the files that it names, and its cases. docs/arena.md lists the keys.

Files are read once, so that the digests are of what runs.
"""

import ast
import hashlib
import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from nibblas.arena.record import Dialect, Mode, score_of

try:
    import yaml
except ImportError:
    raise ImportError("arena: pyyaml is not installed: pip install 'nibblas[arena]'") from None

DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
TASK_FILE = "task.yml"
SUBMISSION = "@SUBMISSION@"  # the source, in task.yml, of the file that a submission takes the place of
RANKINGS = ("last", "mean", "geom")
DEFAULT_TIMEOUT = 180  # seconds
REQUIRED_KEYS = ("files", "lang", "description", "config")
OPTIONAL_KEYS = (
    "tests", "benchmarks", "test_timeout", "benchmark_timeout", "ranked_timeout", "ranking_by", "seed", "multi_gpu",
    "libraries", "templates", "gpus", "validation",
)  # fmt: skip
CONFIG_KEYS = {"py": ("main",), "cu": ("sources", "include_dirs", "defines", "compile_flags")}
TEMPLATE_KINDS = ("CUDA", "Python", "Triton", "HIP", "CuteDSL")
# What the arena calls in reference.py. ref_kernel is used where it is there.
NEEDED_FUNCTIONS = ("generate_input", "check_implementation")


class ArenaError(ValueError):
    """A problem, a submission or a record that the arena can't work with; the message says what is needed."""


@dataclass(frozen=True)
class Case:
    """One case: the arguments of generate_input, and the line that KernelBot writes for it.

    >>> Case.of({"m": 128, "seed": 7}).text
    'm: 128; seed: 7'
    """

    values: dict[str, Any]
    text: str

    @classmethod
    def of(cls, values: Mapping[str, Any], dialect: Dialect = "nibblas") -> "Case":
        """The case of a mapping in task.yml; in the dialect "kernelbot" with the values that its text is read back to.

        Raises ArenaError for a value that the dialect has no way to read.
        """
        text = "; ".join(f"{key}: {value}" for key, value in values.items())
        return cls(parse_case(text) if dialect == "kernelbot" else dict(values), text)

    def seeded(self, secret: int | None) -> dict[str, Any]:
        """The arguments with their public seed, if they have one, combined with a secret one."""
        if secret is None or type(self.values.get("seed")) is not int:
            return dict(self.values)
        return {**self.values, "seed": combine_seed(self.values["seed"], secret)}


@dataclass(frozen=True)
class TaskFile:
    """A file that the problem puts beside the submission: its name there and its bytes here."""

    name: str
    path: Path
    content: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        """The digest that `sha256sum` prints."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class Task:
    """What task.yml says, with the files that it names. Timeouts are seconds."""

    directory: Path
    name: str
    lang: Literal["py", "cu"]
    description: str
    files: tuple[TaskFile, ...]
    submission_name: str  # what the submission's main file is called beside those files
    config: dict[str, Any]
    tests: tuple[Case, ...] = ()
    benchmarks: tuple[Case, ...] = ()
    test_timeout: float = DEFAULT_TIMEOUT
    benchmark_timeout: float = DEFAULT_TIMEOUT
    ranked_timeout: float = DEFAULT_TIMEOUT
    ranking_by: Literal["last", "mean", "geom"] = "last"
    seed: int | None = None
    multi_gpu: bool = False
    libraries: tuple[str, ...] = ()
    templates: dict[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    dialect: Dialect = "nibblas"
    digest: str = ""  # sha256 of task.yml

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of task.yml and of each file that it names, by name."""
        return {TASK_FILE: self.digest, **{file.name: file.sha256 for file in self.files}}

    def file(self, name: str) -> TaskFile | None:
        """The file of that name, or None."""
        return next((file for file in self.files if file.name == name), None)

    def cases(self, mode: Mode) -> tuple[Case, ...]:
        """The tests in mode "test", else the benchmarks: of those that are ranked by the last, the last alone."""
        if mode == "test":
            return self.tests
        return self.benchmarks[-1:] if self.ranking_by == "last" else self.benchmarks

    def timeout(self, mode: Mode) -> float:
        """Seconds that a call in this mode may take; of lang cu, a run of all cases."""
        return {"test": self.test_timeout, "leaderboard": self.ranked_timeout}.get(mode, self.benchmark_timeout)

    def score(self, seconds: list[float]) -> float | None:
        """The score of the benchmarks' times, by `ranking_by`; None without any."""
        return score_of(seconds, self.ranking_by) if seconds else None

    def why_not(self, devices: int) -> str | None:
        """Why this machine, with that many GPUs, can't run the problem; None where it can."""
        if self.multi_gpu:
            sizes = [case.values["world_size"] for case in self.tests + self.benchmarks]
            if devices < max(sizes, default=2):
                return f"its cases need {max(sizes, default=2)} GPUs (world_size), this machine has {devices}"
        return None


def combine_seed(public: int, secret: int) -> int:
    """One seed of two: Cantor's pairing a + (a + b) (a + b + 1) / 2, which is what KernelBot does.

    A secret below 2^31 leaves the result, for any seed in use, inside the 64 bits that torch.manual_seed takes.

    >>> combine_seed(1, 2)
    7
    """
    total = public + secret
    return public + total * (total + 1) // 2


_PAIR = re.compile(r"\s*(?P<key>[A-Za-z_]\w*)\s*:\s*(?P<value>\[[^\]]*\]|\([^)]*\)|[A-Za-z_]\w*|[+-]?\d+)\s*", re.ASCII)


def parse_case(text: str) -> dict[str, int | str | tuple[int, ...]]:
    """The arguments that KernelBot reads from a case line: whole numbers, tuples of them, and words, nothing else.

    Its evaluation programs differ; this takes what any of them takes. So `True` is the word "True", and a list of
    anything but whole numbers stays a word. ArenaError for what none of them reads, such as a float.

    >>> parse_case("m: [64, 72]; nomask: False")
    {'m': (64, 72), 'nomask': 'False'}
    """
    values: dict[str, int | str | tuple[int, ...]] = {}
    for part in text.split(";"):
        match = _PAIR.fullmatch(part)
        if match is None:
            raise ArenaError(
                f"case {text!r}: KernelBot can't read {part.strip()!r}, need key: value with a whole number, a word, "
                "or a list of whole numbers (the dialect nibblas reads all that YAML can say)"
            )
        values[match["key"]] = _kernelbot_value(match["value"])
    return values


def _kernelbot_value(text: str) -> int | str | tuple[int, ...]:
    try:
        if text[0] in "[(":
            return tuple(int(item) for item in text[1:-1].split(",")) if text[1:-1].strip() else ()
        return int(text)
    except ValueError:
        return text


def read_task(directory: Path | str, dialect: Dialect = "nibblas") -> Task:
    """Read the problem in a directory.

    Parameters
    ----------
    directory : the folder that holds task.yml, or the path of task.yml.
    dialect : "nibblas" takes the values of cases as YAML has them; "kernelbot" passes them through the text that
        KernelBot writes and what it reads back, where False becomes the true word "False".

    Raises
    ------
    ArenaError that names the file, the key, what was found and what is needed.
    """
    directory = Path(directory)
    path = directory if directory.name == TASK_FILE else directory / TASK_FILE
    directory = path.parent
    if dialect not in DIALECTS:
        raise ArenaError(f"dialect {dialect!r} is unknown, need {' or '.join(DIALECTS)}")
    if not path.is_file():
        raise ArenaError(f"{directory}: no {TASK_FILE} here, so this is no problem directory")
    content = path.read_bytes()
    try:
        raw = yaml.load(content, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ArenaError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    try:
        return _task(directory, raw, dialect, hashlib.sha256(content).hexdigest())
    except ArenaError as error:
        raise ArenaError(f"{path}: {error}") from None
    except RecursionError:
        raise ArenaError(f"{path}: a value holds itself, or lists are nested too deep") from None


class _Loader(yaml.SafeLoader):
    """Plain data only; a key given twice is an error, and 1e-3 a float as it is in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        plain = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in plain]
        for key in keys:
            if isinstance(key, Hashable) and keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _task(directory: Path, raw: Any, dialect: Dialect, digest: str) -> Task:
    known = REQUIRED_KEYS + OPTIONAL_KEYS
    _check_keys("task", raw, known, REQUIRED_KEYS)
    lang = raw["lang"]
    if lang not in list(CONFIG_KEYS):  # which can be asked for what has no hash as well
        raise ArenaError(f"lang is {lang!r}, need {' or '.join(CONFIG_KEYS)}")
    files, submission_name = _files(directory, raw["files"])
    names = [file.name for file in files] + [submission_name]
    config = _config(lang, raw["config"], names)
    ranking_by = raw.get("ranking_by", "last")
    if ranking_by not in RANKINGS:
        raise ArenaError(f"ranking_by is {ranking_by!r}, need one of {', '.join(RANKINGS)}")
    seed, multi_gpu = raw.get("seed"), raw.get("multi_gpu", False)
    if seed is not None and type(seed) is not int:
        raise ArenaError(f"seed is {seed!r}, need a whole number")
    if type(multi_gpu) is not bool:
        raise ArenaError(f"multi_gpu is {multi_gpu!r}, need true or false")
    templates = raw.get("templates") or {}
    _check_keys("templates", templates, TEMPLATE_KINDS)
    timeouts = {key: _timeout(key, raw.get(key)) for key in ("test_timeout", "benchmark_timeout", "ranked_timeout")}
    task = Task(
        directory,
        directory.resolve().name,
        lang,
        str(raw["description"] or ""),
        files,
        submission_name,
        config,
        _cases("tests", raw.get("tests"), dialect, multi_gpu),
        _cases("benchmarks", raw.get("benchmarks"), dialect, multi_gpu),
        ranking_by=ranking_by,
        seed=seed,
        multi_gpu=multi_gpu,
        libraries=_words("libraries", raw.get("libraries")),
        templates=templates,
        gpus=_words("gpus", raw.get("gpus")),
        dialect=dialect,
        digest=digest,
        **timeouts,
    )
    if lang == "py":
        _check_reference(task)
    return task


def _check_keys(what: str, mapping: Any, known: tuple[str, ...], required: tuple[str, ...] = ()) -> None:
    if not isinstance(mapping, dict):
        raise ArenaError(f"{what} is {_brief(mapping)}, need a mapping of {', '.join(known)}")
    unknown = [repr(key) for key in mapping if key not in known]
    if unknown:
        raise ArenaError(f"{what} has no key {', '.join(unknown)}; there are {', '.join(known)}")
    if missing := [key for key in required if key not in mapping]:
        raise ArenaError(f"{what} lacks {', '.join(missing)}")


def _files(directory: Path, raw: Any) -> tuple[tuple[TaskFile, ...], str]:
    """The files that the problem brings, and the name that the submission gets."""
    if not isinstance(raw, list) or not raw:
        raise ArenaError(f"files is {_brief(raw)}, need a list of {{name, source}}")
    files: dict[str, TaskFile] = {}
    submissions: list[str] = []
    for entry in raw:
        _check_keys("an entry of files", entry, ("name", "source"), ("name", "source"))
        name, source = entry["name"], entry["source"]
        if not isinstance(name, str) or not is_plain(name):
            raise ArenaError(f"files names {name!r}, need a path that stays inside the working folder")
        name = str(PurePosixPath(name))  # ./task.py is task.py
        if name in files or name in submissions:
            raise ArenaError(f"files names {name!r} twice")
        if source == SUBMISSION:
            submissions.append(name)
            continue
        if not isinstance(source, str):
            raise ArenaError(f"the source of {name} is {_brief(source)}, need a path or {SUBMISSION}")
        path = directory / source
        if not path.is_file():
            raise ArenaError(f"the source of {name}, {source}, is no file (paths are relative to task.yml)")
        files[name] = TaskFile(name, path, path.read_bytes())
    if len(submissions) != 1:
        raise ArenaError(f"{len(submissions)} files have the source {SUBMISSION}, need one")
    return tuple(files.values()), submissions[0]


def is_plain(name: str) -> bool:
    """Whether a name is a relative path that can't lead out of the folder that it is put into."""
    path = PurePosixPath(name)
    return (
        bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not re.search(r"[\\\0-\x1f:]", name)
    )


def _config(lang: str, raw: Any, names: list[str]) -> dict[str, Any]:
    _check_keys("config", raw, CONFIG_KEYS[lang], CONFIG_KEYS[lang][:1])
    wanted = [raw["main"]] if lang == "py" else raw["sources"]
    if not isinstance(wanted, list) or not wanted or not set(map(str, wanted)) <= set(names):
        raise ArenaError(f"config names {_brief(wanted)}, need names among files: {', '.join(names)}")
    config = {key: value for key, value in raw.items() if value is not None}
    for key in {"include_dirs", "compile_flags"} & config.keys():
        _words(f"config's {key}", config[key])
    if not isinstance(defines := config.get("defines", {}), dict):
        raise ArenaError(f"config's defines is {_brief(defines)}, need a mapping of names to values")
    return config


def _timeout(key: str, value: Any) -> float:
    if value is None:
        return DEFAULT_TIMEOUT
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ArenaError(f"{key} is {value!r}, need seconds above 0")
    return value


def _words(key: str, raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list) or not all(isinstance(word, str) for word in raw):
        raise ArenaError(f"{key} is {_brief(raw)}, need a list of words")
    return tuple(raw)


def _cases(key: str, raw: Any, dialect: Dialect, multi_gpu: bool) -> tuple[Case, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise ArenaError(f"{key} is {_brief(raw)}, need a list of mappings")
    found = []
    for number, values in enumerate(raw):
        where = f"{key}[{number}]"
        if not isinstance(values, dict) or not values:
            raise ArenaError(f"{where} is {_brief(values)}, need a mapping of arguments for generate_input")
        for name, value in values.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ArenaError(f"{where} has the key {name!r}, need the name of an argument")
            if not _is_value(value):
                raise ArenaError(f"{where}: {name} is {_brief(value)}, need a number, true or false, a word, or a list")
        if multi_gpu and type(values.get("world_size")) is not int:
            raise ArenaError(f"{where} has no world_size, which every case of a multi_gpu problem needs")
        try:
            found.append(Case.of(values, dialect))
        except ArenaError as error:
            raise ArenaError(f"{where}: {error}") from None
    return tuple(found)


def _is_value(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_value, value))
    return value is None or isinstance(value, int | float | str)


def _check_reference(task: Task) -> None:
    """Raise unless the problem can be judged: task.py apart, reference.py must define what the arena calls."""
    reference = task.file("reference.py")
    if reference is None:
        raise ArenaError("files has no reference.py, whose generate_input and check_implementation the arena calls")
    try:
        defined = _defined_names(ast.parse(reference.content))
    except (SyntaxError, ValueError) as error:
        raise ArenaError(f"{reference.path} is not Python: {error}") from None
    missing = [name for name in NEEDED_FUNCTIONS if name not in defined]
    if missing:
        raise ArenaError(
            f"reference.py defines no {' and no '.join(missing)}: the problem has an evaluation of its own in "
            f"{task.config['main']}, and the arena runs only those that are judged by these functions"
        )


def _defined_names(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top, also inside if, try and with."""
    names: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        else:
            waiting += [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
    return names


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
