"""`nibblas arena lint`: whether a problem's cases can fail, tried with answers that are wrong.

A problem's code runs in a process of its own, which is given one case after the other and can be ended. That process
is this module as a program.
"""

import copy
import importlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any, Literal

import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from torch import Tensor
from torch.utils import _pytree as pytree

from nibblas.arena import standins
from nibblas.arena.correctness import is_same, named_tensors, passes
from nibblas.arena.coverage import coverage, gaps
from nibblas.arena.harden import NO_ZEROS, Hardener
from nibblas.arena.mutants import MUTANTS, Kernel, Situation, rms
from nibblas.arena.poison import output_arguments
from nibblas.arena.problem import TASK_FILE, ArenaError, Case, Task, read_task
from nibblas.arena.record import Mode
from nibblas.arena.show import clean
from nibblas.terminal import table_of

BUDGET = 60.0  # seconds for a case
STARTING = 300.0  # seconds, beyond that, for a process to import torch and the problem
# "refused" is as it should be. "accepted": the check takes it. "unseen": it is the right answer, since the inputs never
# reach the fault. "none": makes no sense here. "not tried": no time was left.
Outcome = Literal["refused", "accepted", "unseen", "none", "not tried"]
FINEST = -20  # of the tolerances tried, as a power of two of the RMS


@dataclass(frozen=True)
class CaseLint:
    """What lint found about one case. `faults` are of the problem itself.

    `tolerance` is the largest share of the answer's RMS, of powers of two, by which every element may be off at once;
    0.0 where no error that was tried is taken, None where that can't be said.
    """

    kind: Mode
    text: str
    mutants: dict[str, Outcome]
    faults: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    tolerance: float | None = None
    seconds: float = 0.0

    @property
    def weak(self) -> tuple[str, ...]:
        """The faulty kernels that would pass."""
        musts = [mutant.name for mutant in MUTANTS if mutant.must_fail]
        return tuple(name for name in musts if self.mutants.get(name) in ("accepted", "unseen"))


Progress = Callable[[str], None]


def lint_problem(
    directory: Path | str,
    device: str = "cpu",
    *,
    hardened: bool = False,
    budget: float = BUDGET,
    starting: float = STARTING,
    kinds: Sequence[Mode] = ("test", "benchmark"),
    progress: Progress = lambda text: None,
) -> list[CaseLint]:
    """Try every case of a problem with wrong answers.

    Parameters
    ----------
    directory : the folder that holds task.yml.
    device : what the problem's tensors are to lie on.
    hardened : lint the inputs that `run --hardened` adds, in place of the problem's own.
    budget : seconds for each case; what does not fit in is "not tried", and a case that takes three times as long is
        ended. starting : seconds on top of that for a process to import torch and the problem.
    kinds : which lists of cases. progress : told what is going on.

    Returns one CaseLint a case, in the order of task.yml. ArenaError for what is no problem directory, or has no
    reference.py.
    """
    task = read_task(directory)
    if task.file("reference.py") is None:
        raise ArenaError(f"{task.directory}: lint needs a reference.py, and this problem (lang: {task.lang}) has none")
    cases = [(kind, case) for kind in kinds for case in _of_kind(task, kind)]
    if not cases:
        raise ArenaError(f"{task.directory}: {TASK_FILE} has neither tests nor benchmarks to lint")
    found: list[CaseLint] = []
    while len(found) < len(cases):
        for result in _linted(task, cases[len(found) :], device, hardened, budget, starting, progress):
            found.append(result)
    return [_told_of_repetition(case, found[:i]) for i, case in enumerate(found)]


def _of_kind(task: Task, kind: Mode) -> tuple[Case, ...]:
    return task.tests if kind == "test" else task.benchmarks


def _told_of_repetition(case: CaseLint, before: Sequence[CaseLint]) -> CaseLint:
    same = next((i for i, other in enumerate(before) if (other.kind, other.text) == (case.kind, case.text)), None)
    return case if same is None else replace(case, faults=(*case.faults, f"repeats {case.kind} {same}"))


def _linted(
    task: Task,
    cases: Sequence[tuple[Mode, Case]],
    device: str,
    hardened: bool,
    budget: float,
    starting: float,
    progress: Progress,
) -> Iterator[CaseLint]:
    """What one process finds; it ends early, with a fault of the case at hand, where the process does."""
    with tempfile.TemporaryDirectory(prefix="arena-lint-") as name, open(Path(name, "printed"), "w+") as printed:
        folder = Path(name, "problem")
        for file in task.files:
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
        job = {
            "device": device,
            "hardened": hardened,
            "budget": budget,
            "cases": [[kind, case.text, case.values] for kind, case in cases],
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nibblas.arena.lint", json.dumps(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            cwd=folder,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines: Queue[str] = Queue()
        threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True).start()
        try:
            for number, (kind, case) in enumerate(cases):
                progress(f"{kind} {case.text}")
                try:
                    line = lines.get(timeout=3 * budget + (starting if number == 0 else 0))
                except Empty:
                    yield CaseLint(kind, case.text, {}, (f"took longer than {3 * budget:g} s",))
                    return
                if not line:
                    printed.seek(0)
                    last = "".join(printed.read()[-300:].strip().splitlines()[-1:])
                    yield CaseLint(kind, case.text, {}, (f"the process ended ({process.wait()}): {last}",))
                    return
                yield _read(line)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _pass_on(source: IO[str], lines: Queue[str]) -> None:
    for line in source:
        lines.put(line)
    lines.put("")


def _read(line: str) -> CaseLint:
    values: dict[str, Any] = json.loads(line)
    return CaseLint(**values | {"faults": tuple(values["faults"]), "gaps": tuple(values["gaps"])})


# --- in the process that runs the problem's code -------------------------------------------------------------------


def main() -> None:
    """Lint the cases of the job that is the first argument, with the problem's files in the current folder."""
    job = json.loads(sys.argv[1])
    told, sys.stdout = sys.stdout, sys.stderr
    device = torch.device(job["device"])
    sys.path.insert(0, str(Path.cwd()))
    standins.install(device, sources=[path.read_bytes() for path in Path().rglob("*.py")])
    try:
        reference, fault = importlib.import_module("reference"), ""
    except Exception as error:  # whatever the problem's code raises is told
        reference, fault = None, f"reference.py can't be loaded: {type(error).__name__}: {error}"[:300]
    for kind, text, values in job["cases"]:
        if reference is None:
            found = CaseLint(kind, text, {}, (fault,))
        else:
            found = _Linted(reference, values, job["hardened"], job["budget"]).result(kind, text)
        print(json.dumps(asdict(found)), file=told, flush=True)


class _Linted:
    """One case, tried within a budget of seconds."""

    def __init__(self, reference: Any, values: dict[str, Any], hardened: bool, budget: float):
        self.reference, self.values = reference, values
        self.ref_kernel: Kernel | None = getattr(reference, "ref_kernel", None)
        self.harden = Hardener(self.ref_kernel) if hardened and self.ref_kernel is not None else None
        self.started = time.monotonic()
        self.deadline = self.started + budget
        self.faults: list[str] = []

    def result(self, kind: Mode, text: str) -> CaseLint:
        """All that can be said of the case."""
        mutants: dict[str, Outcome] = dict.fromkeys((mutant.name for mutant in MUTANTS), "not tried")
        left_out: tuple[str, ...] = ()
        tolerance = None
        try:
            seed = self.values.get("seed", 0)
            data = self._data(seed)
            left_out = gaps(coverage(data))
            if self.harden is not None and not self.harden.has_zeros:
                self.faults.append(NO_ZEROS)
            ref_kernel = self.ref_kernel
            if ref_kernel is None:
                self.faults.append("reference.py has no ref_kernel, so that there is no right answer to change")
            elif situation := self._situation(data, seed, ref_kernel):
                for mutant in MUTANTS:
                    if time.monotonic() < self.deadline:
                        mutants[mutant.name] = self._outcome(mutant.make(situation), situation)
                tolerance = self._tolerance(situation)
        except Exception as error:  # whatever the problem's code raises is told
            self.faults.append(f"{type(error).__name__}: {error}"[:300])
        seconds = time.monotonic() - self.started
        return CaseLint(kind, text, mutants, tuple(self.faults), left_out, tolerance, seconds)

    def _data(self, seed: int) -> Any:
        random.seed(seed)
        torch.manual_seed(seed)
        data = self.reference.generate_input(**self.values | ({"seed": seed} if "seed" in self.values else {}))
        return data if self.harden is None else self.harden(data, seed)

    def _situation(self, data: Any, seed: int, ref_kernel: Kernel) -> Situation | None:
        """The right answers; None, with the faults told, where the problem does not take them itself."""
        outputs = output_arguments(data, ref_kernel)
        if not is_same(data, self._data(seed), outputs):
            self.faults.append("generate_input gives other inputs for the same seed")
        given = copy.deepcopy(data)
        with torch.no_grad():
            result = ref_kernel(given)
            right = _cloned(result)
            again = _cloned(ref_kernel(copy.deepcopy(data)))
        if not is_same(right, again):
            self.faults.append("the reference gives another answer each time")
        good, message = passes(self.reference.check_implementation, copy.deepcopy(data), _cloned(right))
        if not good:
            self.faults.append(f"the check refuses the reference's own answer: {message}"[:300])
            return None
        self._tell_of_writing(data, given, result, outputs)
        with torch.no_grad():
            other = _cloned(ref_kernel(self._data(seed + 1)))
        return Situation(data, right, other, ref_kernel, outputs)

    def _tell_of_writing(self, before: Any, after: Any, result: Any, outputs: Sequence[str]) -> None:
        returned = {t.untyped_storage().data_ptr() for t in named_tensors(result, "result").values()}
        tensors = named_tensors(after, "data")
        for name, t in named_tensors(before, "data").items():
            is_output = name in outputs or tensors[name].untyped_storage().data_ptr() in returned
            if not is_output and not is_same(t, tensors[name]):
                self.faults.append(f"the reference writes to {name} and does not return it")

    def _outcome(self, output: Any, s: Situation) -> Outcome:
        if output is None:
            return "none"
        if is_same(output, s.right):
            return "unseen"
        return "accepted" if self._takes(output, s) else "refused"

    def _takes(self, output: Any, s: Situation) -> bool:
        return passes(self.reference.check_implementation, copy.deepcopy(s.data), _cloned(output))[0]

    def _tolerance(self, s: Situation) -> float | None:
        """The largest 2^n times the RMS by which all elements may be off, in random directions; 0.0 if none tried."""
        floats = [t for t in named_tensors(s.right, "result").values() if t.is_floating_point() and t.numel()]
        if not floats or max(map(rms, floats)) == 0.0:
            return None
        signs = torch.Generator().manual_seed(0)

        def off_by(power: int) -> Any:
            def change(t: Tensor) -> Tensor:
                if not t.is_floating_point():
                    return t
                sign = torch.randint(2, t.shape, generator=signs).mul_(2).sub_(1).to(t.device)
                return (t.double() + sign * rms(t) * 2.0**power).to(t.dtype)

            return pytree.tree_map_only(Tensor, change, s.right)

        low, high = FINEST - 1, 3  # `low` is taken, so far as was tried; `high` is not
        while high - low > 1:
            if time.monotonic() > self.deadline:
                return None
            middle = (low + high) // 2
            output = off_by(middle)
            if is_same(output, s.right) or self._takes(output, s):
                low = middle
            else:
                high = middle
        if low >= 0:
            self.faults.append("the tolerance is as wide as the answer's RMS")
        return 2.0**low if low >= FINEST else 0.0


def _cloned(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value)


# --- printing ------------------------------------------------------------------------------------------------------


def print_lint(found: Sequence[CaseLint], console: Console) -> None:
    """Which faulty kernels would pass and in which cases, then the faults of the problem and what its inputs lack."""
    names = [f"{case.kind} {i}" for i, case in enumerate(found)]
    _print_mutants(found, names, console)
    for heading, texts in (("Faults of the problem", "faults"), ("What the inputs leave out", "gaps")):
        told: dict[str, list[str]] = {}
        for case, name in zip(found, names, strict=True):
            for text in getattr(case, texts):
                told.setdefault(text, []).append(name)
        if told:
            console.print(f"\n[bold]{heading}[/]")
        for text, where in told.items():
            console.print(Padding(Text(f"{_some(where, len(found))}: {clean(text, 400)}"), (0, 0, 0, 2)))


def _print_mutants(found: Sequence[CaseLint], names: Sequence[str], console: Console) -> None:
    fault = "a kernel with this fault"
    table = table_of(fault, "would pass", "because", whole=[fault], edge=False)
    for mutant in MUTANTS:
        for outcome, why in (("accepted", "the check takes it"), ("unseen", "no input shows it")):
            where = [name for name, case in zip(names, found, strict=True) if case.mutants.get(mutant.name) == outcome]
            if where:
                tone, may = ("red", "") if mutant.must_fail else ("yellow", ", and may mean to")
                table.add_row(f"[{tone}]{mutant.name}[/]", _some(where, len(found)), f"{why}{may}")
    if table.rows:
        console.print(table)
    refused = [m.name for m in MUTANTS if any(case.mutants.get(m.name) == "refused" for case in found)]
    passed = {m.name for m in MUTANTS for case in found if case.mutants.get(m.name) in ("accepted", "unseen")}
    if always := [name for name in refused if name not in passed]:
        console.print(f"[green]Refused wherever it was tried:[/] {', '.join(always)}.", highlight=False)
    tolerances = [case.tolerance for case in found if case.tolerance is not None]
    if tolerances:
        low, high = (_share(f(tolerances)) for f in (min, max))
        share = low if low == high else f"{low} to {high}"
        console.print(f"Tolerance, of the answer's RMS, for all elements at once: {share}.", highlight=False)
    untried = {n: list(case.mutants.values()).count("not tried") for n, case in zip(names, found, strict=True)}
    if any(untried.values()):
        listed = ", ".join(f"{count} in {name}" for name, count in untried.items() if count)
        console.print(f"[yellow]Not tried, for lack of time or right answers:[/] {listed}.", highlight=False)


def _some(names: Sequence[str], total: int) -> str:
    """Names of cases, or "all", or how many where they are many."""
    if len(names) == total:
        return "in all cases" if total > 1 else f"in {names[0]}"
    return f"in {', '.join(names)}" if len(names) <= 4 else f"in {len(names)} of {total} cases"


def _share(tolerance: float) -> str:
    return f"{tolerance:.1e}" if tolerance else "none"


if __name__ == "__main__":
    main()
