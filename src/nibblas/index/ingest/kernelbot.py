"""KernelBot: problem folders, rows of its public data set, and the text of one submission.

Data set: parquet files of one row a run, in the flat layout (one score a row) or the richer one (times of each case and
facts of the machine). All but the column `code` is read first; code is read, in small batches, only for rows that pass
the filters and are not in the index yet. A row is known by its submission, code and runner, so that an import that was
stopped goes on without reading code again. A submission's slug names one thing everywhere: other code under the same
slug, or the same code under other terms, becomes a revision.

A text whose first line is "submission N" holds the submission's file after that line and one empty line. It names no
board: `--board` does, else the slug is "kernelbot-N" and the operation stays unknown.
"""

import ast
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibblas.index import compat
from nibblas.index.ingest.reading import Known, Options, Read, Skipped, described, interface_of, read_bytes
from nibblas.index.licence import normalised
from nibblas.index.model import (
    Claim,
    CompatFact,
    Environment,
    Figure,
    Implementation,
    Item,
    Operation,
    Protocol,
    Run,
    RunStatus,
    Source,
    Workload,
    kebab,
    kernelbot_slug,
)
from nibblas.index.store import Store

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

KEYS = ("submission_id", "leaderboard_id", "code_id", "file_name")
FLAT = {*KEYS, "problem_name", "score", "passed", "runner", "code"}
RICH = {*KEYS, "run_mode", "run_score", "run_passed", "run_result", "run_system_info", "code"}
CODE_ROWS = 256  # that are held in memory at once
TEXT = re.compile(r"^submission (\d+)\r?\n(?:\r?\n)?")
CASE = re.compile(r"^benchmark\.(\d+)\.(spec|runs|mean|std|best|worst)$")
# Names of the runners, and the device and arch that each is. "NVIDIA" is the data set's word for its own B200 machines.
RUNNERS = {
    "NVIDIA": ("NVIDIA B200", "sm_100"),
    "B200": ("NVIDIA B200", "sm_100"),
    "B200_Nebius": ("NVIDIA B200", "sm_100"),
    "H100": ("NVIDIA H100", "sm_90"),
    "A100": ("NVIDIA A100", "sm_80"),
    "L4": ("NVIDIA L4", "sm_89"),
    "T4": ("Tesla T4", "sm_75"),
    "MI300": ("AMD Instinct MI300X", "gfx942"),
    "MI300X": ("AMD Instinct MI300X", "gfx942"),
    "MI355X": ("AMD Instinct MI355X", "gfx950"),
    "AMD Instinct MI300X": ("AMD Instinct MI300X", "gfx942"),
    "AMD Instinct MI355X": ("AMD Instinct MI355X", "gfx950"),
}


@dataclass(frozen=True)
class Problem:
    """What a problem folder defines."""

    operation: Operation
    workloads: tuple[Workload, ...] = ()


@cache
def operation(board: str, axes: tuple[str, ...] = ()) -> Operation:
    """The operation of a board, known by its name alone."""
    return Operation(kebab(board), board, axes=axes)


def slug(of: Operation, submission: str) -> str:
    """The slug of a submission to the board of this operation."""
    return kernelbot_slug(of.slug, submission)


def device(runner: str | None) -> tuple[str | None, str | None]:
    """Product and arch of a runner; a name that is not known stands for itself, its arch is unknown."""
    return RUNNERS.get(runner, (runner, None)) if runner else (None, None)


def leaderboard(text: str) -> str | None:
    """The board that a submission names in its own directives."""
    found = re.search(r"^(?:#|//)!POPCORN\s+leaderboard\s+(\S+)", text, re.MULTILINE)
    return found[1] if found else None


def declared(path: str, raw: bytes) -> tuple[CompatFact, ...]:
    """The devices that a submission names in its own directives."""
    facts = compat.declared(path, raw.decode(errors="replace"))
    return tuple(replace(fact, gpu=device(fact.gpu)[0]) for fact in facts)


def read_problem(folder: Path) -> Problem:
    """The operation and the workloads of a problem folder. ValueError where its task.yml can't be read as one."""
    try:
        import yaml
    except ImportError:
        raise ImportError("index add --problem: pyyaml is not installed: pip install 'nibblas[arena]'") from None

    path = folder / "task.yml"
    try:
        task = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    try:
        cases = [dict(case) for kind in ("tests", "benchmarks") for case in task.get(kind) or ()]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{path}: need a mapping whose tests and benchmarks are lists of mappings") from None
    board = folder.resolve().name
    sizes = [set(_axes(case)) for case in cases]
    axes = tuple(key for key in (cases[0] if cases else {}) if all(key in size for size in sizes))
    of = operation(board, axes)
    workloads = [_workload(of, case) for case in cases]
    return Problem(of, tuple({workload.digest: workload for workload in workloads}.values()))


def _workload(of: Operation, case: Mapping[str, Any]) -> Workload:
    axes = _axes(case)
    name = "; ".join(f"{key}: {value}" for key, value in case.items())
    return Workload(of, name, axes, {key: value for key, value in case.items() if key not in axes})


def _axes(case: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of a case: its whole numbers but the seed."""
    return {key: value for key, value in case.items() if type(value) is int and key != "seed"}


def case_of(text: str) -> dict[str, Any]:
    """The case that KernelBot writes as "m: 128; k: 256"."""
    pairs = [part.partition(":") for part in text.split(";") if part.strip()]
    values = ((key.strip(), value.strip()) for key, _, value in pairs)
    return {key: int(value) if re.fullmatch(r"-?\d+", value) else value for key, value in values}


def takes(path: Path) -> bool:
    """A parquet file, or a text that begins with the number of a submission."""
    if path.suffix == ".parquet":
        return True
    if path.suffix.lower() not in (".txt", ".text"):
        return False
    with open(path, "rb") as file:
        return TEXT.match(file.read(64).decode(errors="replace")) is not None


def count(path: Path) -> int:
    return _open(path).metadata.num_rows if path.suffix == ".parquet" else 1


def read(path: Path, options: Options, store: Store) -> Iterator[Read]:
    if path.suffix == ".parquet":
        return _read_data_set(path, options, store)
    return iter([_read_text(path, options)])


def _read_text(path: Path, options: Options) -> Item:
    text = read_bytes(path).decode(errors="replace")
    found = TEXT.match(text)
    assert found, "takes() saw it"
    number, code = found[1], text[found.end() :]
    raw = code.encode()
    board = options.board or leaderboard(code)
    problem = read_problem(options.problem) if options.problem else Problem(operation(board)) if board else None
    name = _file_name(code)
    interface = interface_of(name, raw)
    implementation = Implementation(
        options.slug or (slug(problem.operation, number) if problem else kebab("kernelbot", number)),
        f"submission {number}",
        Source("kernelbot-submission", path.name, options.revision, options.terms, options.attribution),
        files=described({name: raw}),
        operation=problem.operation if problem else None,
        authors=options.authors,
        language=interface.language,
        framework=interface.framework,
        entry_point=interface.entry_point,
        signature=interface.signature,
        licence=options.licence,
        limitations=(f"Its source names no file; {name} is what KernelBot calls such a file.",),
        record=f"submission {number}",
    )
    workloads = problem.workloads if problem else ()
    return Item(implementation, {name: raw}, facts=declared(name, raw), workloads=workloads)


def _file_name(code: str) -> str:
    """What KernelBot calls a file with this text."""
    try:
        if ast.parse(code).body:
            return "submission.py"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return "submission.cu" if re.search(r"^\s*#\s*include\b", code, re.MULTILINE) else "submission.txt"


def _open(path: Path) -> "ParquetFile":
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ImportError(f"index add {path}: pyarrow is not installed: pip install 'nibblas[index]'") from None
    return ParquetFile(path)


def _read_data_set(path: Path, options: Options, store: Store) -> Iterator[Read]:
    with _open(path) as file:
        names = set(file.schema_arrow.names)
        if not (names >= FLAT or names >= RICH):
            missing = ", ".join(sorted(FLAT - names))
            yield Skipped(str(path), f"a parquet file, but not of KernelBot's submissions: no column {missing}")
            return
        reader = _Rows(path, options, store, _boards(path))
        fastest = _fastest(file, options.top, reader) if options.top else None
        first = 0
        for group in range(file.num_row_groups):
            rows = file.read_row_group(group, columns=sorted(names - {"code"})).to_pylist()
            wanted = {}
            for index, row in enumerate(rows):
                answer = reader.without_code(row, fastest is None or first + index in fastest)
                if answer is None:
                    wanted[index] = row
                else:
                    yield answer
            first += len(rows)
            if wanted:
                for index, code in _codes(file, group):
                    if index in wanted:
                        yield reader.item(wanted[index], code.as_py())


def _codes(file: "ParquetFile", group: int) -> Iterator[tuple[int, Any]]:
    """Each row's code in a row group, as Arrow holds it, read a few rows at a time."""
    first = 0
    for batch in file.iter_batches(CODE_ROWS, row_groups=[group], columns=["code"]):
        yield from enumerate(batch.column(0), first)
        first += batch.num_rows


def _fastest(file: "ParquetFile", top: int, reader: "_Rows") -> set[int]:
    """The rows with the least scores of each board and runner."""
    names = [name for name in file.schema_arrow.names if name not in ("code", "run_result")]
    ranked: dict[tuple, list[tuple[float, int]]] = defaultdict(list)
    for index, row in enumerate(file.read(columns=names).to_pylist()):
        score = _score(row)
        if score is not None and _passed(row):
            ranked[reader.board(row), _runner(row)].append((score, index))
    return {index for scores in ranked.values() for _, index in sorted(scores)[:top]}


class _Rows:
    """Rows of one file of the data set, and what is the same for all of them."""

    def __init__(self, path: Path, options: Options, store: Store, boards: Mapping[int, str]):
        self.options, self.store, self.boards = options, store, boards
        terms = options.terms or _card_terms(path)
        self.source = Source("kernelbot-dataset", path.name, options.revision, terms, options.attribution)

    def board(self, row: Mapping[str, Any]) -> str:
        """The name of the row's board; by its number where no name is given."""
        number = row["leaderboard_id"]
        return row.get("problem_name") or self.boards.get(number) or self.options.board or f"leaderboard-{number}"

    def without_code(self, row: Mapping[str, Any], fast: bool) -> Read | None:
        """What becomes of a row that needs no look at its code; None for one that does."""
        board = self.board(row)
        name = f"{board}, submission {row['submission_id']}"
        if row["submission_id"] is None:
            return Skipped(name, "the row has no submission_id")
        if self.options.boards and board not in self.options.boards:
            return Skipped(name, "of another board than --only names")
        if not _passed(row):
            return Skipped(name, "did not pass")
        if not fast:
            return Skipped(name, f"not among the {self.options.top} fastest of its board and runner")
        found = self.store.connection.execute(
            "SELECT 1 FROM implementation i JOIN source s ON s.id = i.source JOIN run r ON r.implementation = i.id"
            " WHERE i.slug = ? AND s.kind = ? AND s.terms IS ? AND r.record = ?",
            (kernelbot_slug(board, row["submission_id"]), self.source.kind, self.source.terms, _record(row)),
        ).fetchone()
        return Known(name) if found else None

    def item(self, row: Mapping[str, Any], code: str | None) -> Read:
        """The row as an item, or why it can't be one."""
        board = self.board(row)
        number = row["submission_id"]
        name = f"{board}, submission {number}"
        if not code or not code.strip():
            return Skipped(name, "the row has no code")
        path = row["file_name"] or _file_name(code)
        raw = code.encode()
        of = operation(board)
        interface = interface_of(path, raw)
        implementation = Implementation(
            slug(of, number),
            f"submission {number}",
            self.source,
            files=described({path: raw}),
            operation=of,
            authors=(row["user_name"],) if row.get("user_name") else (),
            language=interface.language,
            framework=interface.framework,
            entry_point=interface.entry_point,
            signature=interface.signature,
            licence=self.options.licence,
            record=f"submission {number}, code {row['code_id']}",
        )
        claims = {"user id": row.get("user_id"), "submitted": _time(row.get("submission_time")), "mode": _mode(row)}
        return Item(
            implementation,
            {path: raw},
            runs=tuple(_runs(row, of)),
            facts=declared(path, raw),
            claims=tuple(Claim(subject, str(value)) for subject, value in claims.items() if value is not None),
        )


def _runs(row: Mapping[str, Any], of: Operation) -> Iterator[Run]:
    """What a row claims: the score of the whole board, and of the richer layout the times of each case."""
    mode = _mode(row)
    protocol = _protocol(mode)
    system = _system(row)
    environment = _environment(_runner(row), system.get("cpu"), system.get("platform"), system.get("torch"))
    status: RunStatus = "passed"
    at, record = _time(row.get("submission_time")), _record(row)
    score = _score(row)
    # A row without a score is kept as a run without figures, so that the index knows the row.
    figures = () if score is None else (Figure("score", None, score),)
    yield Run(of, None, protocol, environment, status, True, observed_at=at, figures=figures, record=record)
    for case in _cases(row).values():
        spec = case_of(str(case.get("spec") or ""))
        mean = _number(case.get("mean"))
        if not spec or mean is None:
            continue
        runs = _number(case.get("runs"))
        times = {"mean": mean, "std": _number(case.get("std")), "best": _number(case.get("best"))}
        times["worst"] = _number(case.get("worst"))
        yield Run(
            of,
            _workload(of, spec),
            protocol,
            environment,
            status,
            True,
            observed_at=at,
            figures=tuple(
                Figure("latency" if name != "std" else "spread", name, ns * 1e-9, n=int(runs) if runs else None)
                for name, ns in times.items()
                if ns is not None
            ),
            record=record,
        )


def _cases(row: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The entries benchmark.<i>.<what> of a row's results, by i."""
    result = row.get("run_result") or {}
    if isinstance(result, str):
        result = json.loads(result)
    pairs = result.items() if isinstance(result, Mapping) else result
    cases: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, value in pairs:
        if (found := CASE.match(key)) and value is not None:
            cases[int(found[1])][found[2]] = value
    return dict(sorted(cases.items()))


# The same objects for all rows, so that their digests are computed once.
@cache
def _protocol(mode: str | None) -> Protocol:
    return Protocol("KernelBot", "kernelbot", details={"mode": mode} if mode else {})


@cache
def _environment(runner: str | None, cpu: str | None, platform: str | None, torch: str | None) -> Environment:
    facts = {"runner": runner, "cpu": cpu, "platform": platform}
    return Environment(
        *device(runner),
        versions={"torch": torch} if torch else {},
        facts={name: value for name, value in facts.items() if value},
    )


def _system(row: Mapping[str, Any]) -> Mapping[str, Any]:
    system = row.get("run_system_info") or {}
    return json.loads(system) if isinstance(system, str) else dict(system)


def _runner(row: Mapping[str, Any]) -> str | None:
    return row.get("runner") or _system(row).get("gpu")


def _mode(row: Mapping[str, Any]) -> str | None:
    return row.get("mode") or row.get("run_mode")


def _passed(row: Mapping[str, Any]) -> bool:
    return bool(row["passed"] if "passed" in row else row["run_passed"])


def _score(row: Mapping[str, Any]) -> float | None:
    return _number(row["score"] if "score" in row else row["run_score"])


def _number(value: Any) -> float | None:
    """A positive finite number, also one in a text; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < math.inf else None


def _record(row: Mapping[str, Any]) -> str:
    """What finds a row again, whatever file of the data set it is in."""
    run = f", run {row['run_id']}" if row.get("run_id") is not None else ""
    return f"submission {row['submission_id']}, code {row['code_id']}, runner {_runner(row)}{run}"


def _time(value: Any) -> str | None:
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).astimezone(UTC).isoformat(timespec="seconds")
    return str(value) if value else None


def _boards(path: Path) -> dict[int, str]:
    """Names of boards by number, from the data set's own list beside this file."""
    beside = path.with_name("leaderboards.parquet")
    if not beside.is_file():
        return {}
    with _open(beside) as file:
        if not {"id", "name"} <= set(file.schema_arrow.names):
            return {}
        return {row["id"]: row["name"] for row in file.read(columns=["id", "name"]).to_pylist()}


def _card_terms(path: Path) -> str | None:
    """The licence that the data set's card beside this file states in its head, as an SPDX expression."""
    try:
        head = re.match(r"---\n(.*?)\n---", path.with_name("README.md").read_text(errors="replace"), re.DOTALL)
    except OSError:
        return None
    stated = dict(re.findall(r"^(license|license_name):\s*(\S.*?)\s*$", head[1], re.MULTILINE)) if head else {}
    return normalised(stated.get("license_name") or stated.get("license"))
