"""Whole runs: small problems with honest, wrong and wild submissions, interrupted and resumed ones."""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nibblas.arena import case as arena_case
from nibblas.arena import record as records
from nibblas.arena import run as arena_run
from nibblas.arena.commands import app
from nibblas.arena.harden import NO_ZEROS
from nibblas.arena.lint import lint_problem
from nibblas.arena.parties import Contestant
from nibblas.arena.problem import ArenaError
from nibblas.arena.record import Comparison
from nibblas.arena.show import floor_share
from nibblas.arena.timing import Stopping
from nibblas.bench import probe
from nibblas.evidence import store
from nibblas.roofline import Roofline, keep


def verdicts(record) -> list[tuple[str, str]]:
    return [(case.kind, case.verdict) for case in record.cases]


@pytest.fixture
def write(tmp_path):
    """write(code) is the path of a submission with this code."""

    def to_file(code: str) -> Path:
        path = tmp_path / "submission.py"
        path.write_text(code)
        return path

    return to_file


MOODY = """
import os, sys, time, torch
n = 0
kept = {}

def custom_kernel(data):
    global n
    n += 1
    a, b = data
    c = a + b
    size = a.numel()
    if size == 1: return [c]
    if size == 2: return c.double()
    if size == 3: return torch.nn.Parameter(c)
    if size == 4: a.zero_(); return c
    if size == 5: c[-1] += 1; return c
    if size == 6: return kept.setdefault(size, c)
    if size == 7: raise ValueError("tired")
    if size == 8: raise SystemExit(0)
    if size == 9: os.write(CHANNEL, b"\\0\\0\\0\\2{}"); return c
    if size == 10: os._exit(0)
    if size == 11: time.sleep(60)
    if size == 12:
        kept.setdefault(size, torch.empty(size)).copy_(c)
        return kept[size]
    return c

CHANNEL = int(sys.argv[1])
"""


LARGE = 1_000_000


def test_each_failure_has_its_verdict_and_ends_its_own_case_only(arena, problem, tmp_path, write, monkeypatch):
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path / "cache"))
    keep(Roofline("slow", "cpu", 1, 1e8, {"fp32": 1e9}, "measured"), torch.device("cpu"))
    directory = tmp_path / "add"
    directory.mkdir()
    for path in problem("vector_add").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    text = (directory / "task.yml").read_text()
    tests = "".join(f"  - {{size: {size}, seed: 1}}\n" for size in [*range(1, 14), LARGE])
    (directory / "task.yml").write_text(f"{text[: text.index('tests:')]}tests:\n{tests}test_timeout: 8\n")
    found = arena(directory, write(MOODY))
    assert found.verdict == "refused"
    assert found.complete
    seen = {
        case.values["size"]: (case.verdict, case.message.splitlines()[0] if case.message else "")
        for case in found.cases
    }
    assert seen[1] == ("wrong", "call 0, with the public seed: the output is a list, the reference gives a tensor")
    assert seen[2][0] == "wrong"
    assert "float64" in seen[2][1]
    assert seen[3][0] == "refused"
    assert "Parameter" in seen[3][1]
    assert seen[4] == ("correct", "")
    assert seen[5] == ("wrong", "call 0, with the public seed: 1 elements are wrong")
    assert seen[6] == ("wrong", "call 1, with a secret seed: 6 elements are wrong"), "an output that is kept is stale"
    assert seen[7][0] == "crashed"
    assert seen[8][0] == "crashed"
    assert seen[9][0] == "refused"
    assert "channel" in seen[9][1]
    assert seen[10] == ("crashed", "a call: it ended with status 0")
    assert seen[11] == ("timeout", "a call took longer than 8 s")
    assert seen[12] == ("correct", ""), "a static buffer is honest"
    assert seen[13] == ("correct", "")
    assert seen[LARGE][0] == "refused"
    assert "to move the bytes" in seen[LARGE][1]
    classes = {case.values["size"]: [finding.class_id for finding in case.findings] for case in found.cases}
    assert {size: ids for size, ids in classes.items() if ids} == {
        3: ["output-type"], 4: ["input-mutation"], 9: ["result-channel"], LARGE: ["below-floor"],
    }  # fmt: skip
    crash = next(case.message for case in found.cases if case.values["size"] == 7)
    assert "submission.py" in crash
    assert "worker.py" not in crash


def test_data_of_all_kinds_reaches_the_submission(arena, problem):
    directory = problem("scaled_layers")
    found = arena(directory, directory / "submission.py")
    assert found.verdict == "correct here", found.reason
    assert [case.values["bias"] for case in found.cases] == [False, True]
    assert all(case.stand_ins == () for case in found.cases)


IDLE_AT_SECOND = """
n = 0
def custom_kernel(data):
    global n
    a, b, c = data
    n += 1
    for i in range(c.shape[2] if n == 1 else 0):
        c[:, :, i] = a[:, :, i] @ b[:, :, i].t()
    return c
"""


def test_an_output_argument_holds_no_earlier_answer(arena, problem, write):
    directory = problem("fill_c")
    found = arena(directory, write(IDLE_AT_SECOND))
    assert verdicts(found) == [("test", "wrong")]
    assert "call 1" in found.reason
    assert "nan" in found.reason
    assert found.stand_ins == ("device cuda on a CPU",)
    assert found.cases[0].stand_ins == (), "the submission itself asked for no GPU"


def test_a_submission_against_itself(arena, problem, monkeypatch, tmp_path):
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path))
    keep(Roofline("fast", "cpu", 1, 1e12, {"fp32": 1e9}, "measured"), torch.device("cpu"))
    directory = problem("fill_c")
    own = directory / "submission.py"
    found = arena(directory, own, mode="benchmark", against=own)
    assert found.verdict == "correct here", found.reason
    (case,) = found.cases
    assert case.values["m"] == 48, "ranked by the last"
    (ratio,) = found.comparison.ratios
    assert ratio.low <= ratio.ratio <= ratio.high
    assert len(ratio.samples) == len(ratio.noise_samples) >= 3
    assert [this for this, _ in ratio.samples] == [s.claimed_ns["host"] for s in case.samples[2:]]
    needed = (48 + 32) * 64 * 2 * 4
    assert case.floor_ns == pytest.approx(needed / 1e12 * 1e9), "a and b; the output fits into the cache"
    places = [sample.fresh_addresses for sample in case.samples]
    assert all(sorted(places[at : at + 4]) == [False, False, True, True] for at in range(0, len(places) - 3, 4))


def test_a_run_without_a_known_bandwidth_says_once_that_it_has_no_floors(arena, problem, monkeypatch, tmp_path):
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path / "cache"))
    keep(Roofline("unknown", "cpu", 1, 1e10, {"fp32": 1e9}, "assumed"), torch.device("cpu"))
    directory = problem("vector_add")
    own = directory / "submission.py"
    found = arena(directory, own, mode="benchmark", budget=0.1)
    assert [case.floor_ns for case in found.cases] == [None, None]
    (told,) = [finding for finding in found.all_findings if finding.class_id == "no-floor"]
    assert told.what == "no floor: this device's bandwidth is not known (`nibblas doctor` measures it)"
    assert told.severity == "info"
    again = arena(directory, own, mode="benchmark", budget=0.1, resumed=replace(found, cases=found.cases[:1]))
    assert again.all_findings.count(told) == 1
    assert told not in arena(directory, own).all_findings, "tests take no times"


SLEEP_AT_FIRST = "time.sleep(0 if calls else 0.3); calls.append(1)"


@pytest.mark.parametrize(
    ("probing", "changes", "why"),
    [
        (3.0, {}, None),
        (0.0, {}, "the reference is too slow for its reads to be probed"),
        (0.5, {"import torch": "import time, torch; calls = []", "a, b =": f"{SLEEP_AT_FIRST}; a, b ="}, None),
        (3.0, {"ref_kernel": "right"}, "the problem has no ref_kernel whose reads could be probed"),
        (
            3.0,
            {"ref_kernel(data)": "sum(data)", "return a + b": "return torch.randn_like(a)"},
            "the reference gives no tensors, or others each time",
        ),
    ],
)
def test_a_case_without_a_floor_says_why(probing, changes, why, arena, problem, monkeypatch, tmp_path):
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path / "cache"))
    keep(Roofline("fast", "cpu", 1, 1e15, {"fp32": 1e9}, "measured"), torch.device("cpu"))
    monkeypatch.setitem(arena_case.PROBING, "benchmark", probing)
    directory = changed(problem("vector_add"), tmp_path / "add", changes)
    found = arena(directory, directory / "submission.py", mode="benchmark", budget=0.1)
    assert found.verdict == "correct here", found.reason
    for case in found.cases:
        told = [finding.what for finding in case.findings if "floor" in finding.class_id]
        assert told == ([f"no floor: {why}"] if why else [])
        assert (case.floor_ns is None) == bool(why)


def changed(directory: Path, target: Path, changes: dict[str, str]) -> Path:
    """A copy of a problem with changes to its reference."""
    shutil.copytree(directory, target)
    text = (target / "reference.py").read_text()
    for was, becomes in changes.items():
        text = text.replace(was, becomes)
    (target / "reference.py").write_text(text)
    return target


def test_a_floor_from_a_part_of_the_data_says_so(arena, problem, monkeypatch, tmp_path):
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path / "cache"))
    keep(Roofline("fast", "cpu", 1, 1e12, {"fp32": 1e9}, "measured"), torch.device("cpu"))
    monkeypatch.setitem(arena_case.PROBING, "benchmark", 0.5)  # for two calls, and then a few of eight
    slow = {"import torch": "import time, torch", "a, b =": "time.sleep(0.1); a, b ="}
    directory = changed(problem("vector_add"), tmp_path / "add", slow)
    case = arena(directory, directory / "submission.py", mode="benchmark", budget=0.1).cases[-1]
    (told,) = [finding for finding in case.findings if "floor" in finding.class_id]
    tried = re.fullmatch(r"the floor is from (0\.\d+) of 0\.032 MB tried: there was no time for more", told.what)
    assert case.has_partial_floor
    assert 0 < case.floor_ns <= float(tried[1]) * 1e6 / 1e12 * 1e9 * 1.01
    assert floor_share(case).startswith("≥ ")


SLOW_AT_FIRST = """
import time
time.sleep(1)
n = 0
def custom_kernel(data):
    global n
    n += 1
    time.sleep(1 if n == 1 else 0)
    return data[0] + data[1]
"""


def test_the_budget_is_for_the_calls_that_count(arena, problem, write, monkeypatch):
    seen = []
    is_reached = Stopping.is_reached

    def looked_at(rule, samples, taken, seconds):
        seen.append((taken, seconds))
        return is_reached(rule, samples, taken, seconds)

    monkeypatch.setattr(Stopping, "is_reached", looked_at)
    found = arena(problem("vector_add"), write(SLOW_AT_FIRST), mode="benchmark", budget=0.5)
    assert found.verdict == "correct here", found.reason
    assert found.cases[0].first_call_ns > 1e9
    first = [seconds for taken, seconds in seen if taken == 1]
    assert len(first) == len(found.cases)
    assert all(0 < seconds < 2 for seconds in first), "neither the import nor the first call is in it"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("def custom_kernel(data): raise ValueError('tired')", "crashed: Traceback.*tired"),
        ("import nosuchmodule\ndef custom_kernel(data): pass", "incompatible: .*nosuchmodule"),
        ("def custom_kernel(data): return data[0]", "wrong: call 0, "),
        (
            "import os, sys\nn = 0\ndef custom_kernel(data):\n    global n\n    n += 1\n"
            "    if n == 4: os.write(int(sys.argv[1]), b'\\0\\0\\0\\2{}')\n    return data[0] + data[1]",
            "refused: .* channel",
        ),
    ],
)
def test_what_the_other_submission_does_is_not_held_against_this_one(code, what, arena, problem, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(code)
    directory = problem("fill_c") if "data[0] +" not in code else problem("vector_add")
    found = arena(directory, directory / "submission.py", mode="benchmark", against=other)
    assert found.verdict == "correct here", found.reason
    assert found.score is not None
    assert found.comparison.ratios == ()
    for case in found.cases:
        assert case.statistics.n == len(case.samples) - 2 >= 3
        (finding,) = [finding for finding in case.findings if finding.class_id == "comparison"]
        assert finding.severity == "flag"
        assert re.match(f"other.py was not compared: it is {what}", finding.what)


def test_the_same_submission_fails_in_any_of_its_workers(arena, problem, tmp_path):
    directory = problem("fill_c")
    own = tmp_path / "own.py"
    own.write_text("def custom_kernel(data): return data[-1].zero_()")
    found = arena(directory, own, mode="benchmark", against=own)
    assert verdicts(found) == [("benchmark", "wrong")]
    assert found.all_findings == () or {finding.severity for finding in found.all_findings} == {"info"}


def test_an_output_that_no_memory_holds_is_the_submissions_fault(arena, problem, write):
    code = "import torch\ndef custom_kernel(data): return torch.empty(1).expand(2**46)"
    found = arena(problem("vector_add"), write(code))
    assert found.verdict == "crashed"
    assert "the output has 262144.0 GiB" in found.reason


NO_ROOM = """
import sys
def new(worker, nbytes, kind):
    raise RuntimeError("can't allocate memory: you tried to allocate 3 bytes")
def custom_kernel(x):
    sys.modules["__main__"].Worker._new = new
    for _ in range(8):
        x = x.tanh()
    return x
"""


def test_data_that_finds_no_memory_is_not_the_submissions_fault(arena, problem, write):
    found = arena(problem("smooth"), write(NO_ROOM), mode="benchmark")
    assert found.verdict == "incompatible here", found.reason
    assert "the data takes 0.0 GiB of memory, once or twice, of which a submission may have" in found.reason
    assert "you tried to allocate 3 bytes" in found.reason


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ("if 'spans' in values: values['spans'] = {'host': 10**400}", "timer"),
        ("if 'output' in values: values['output'] = {'tree': {'float': '0x1p9999'}, 'tensors': []}", "result-channel"),
        ("fds = [1]", "result-channel"),
    ],
)
def test_a_worker_that_was_taken_over_is_refused(change, finding, arena, problem, write):
    code = f"""
from nibblas.arena.wire import Channel

def reply(self, nonce, fds=(), **values):
    {change}
    self._send({{"nonce": nonce, **values}}, fds)

def custom_kernel(data):
    Channel.reply = reply
    return data[0] + data[1]
"""
    found = arena(problem("vector_add"), write(code))
    assert found.verdict == "refused", found.reason
    assert finding in {finding.class_id for finding in found.all_findings}


@pytest.mark.parametrize(("mode", "key"), [("test", "tests"), ("leaderboard", "benchmarks")])
def test_a_problem_without_cases_of_the_mode_is_refused(mode, key, arena, problem, tmp_path):
    directory = tmp_path / "add"
    shutil.copytree(problem("vector_add"), directory)
    text = (directory / "task.yml").read_text()
    (directory / "task.yml").write_text(re.sub(rf"^{key}:\n(  - .*\n)+", "", text, flags=re.MULTILINE))
    with pytest.raises(ArenaError, match=f"add has no {key}, which mode {mode} runs"):
        arena(directory, directory / "submission.py", mode=mode)


def test_what_this_machine_lacks_is_incompatible(arena, problem, write):
    directory = problem("vector_add")
    found = arena(directory, write("import cutlass\ndef custom_kernel(data): pass"))
    assert found.verdict == "incompatible here"
    assert "cutlass" in found.reason
    assert {case.verdict for case in found.cases} == {"incompatible"}


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupt_when():
    """Sends this process a Ctrl-C once something is so."""
    # Where the tests run in the background, SIGINT comes to them ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(happened) -> None:
        def watch():
            deadline = time.monotonic() + 300
            while time.monotonic() < deadline and not happened():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=watch, daemon=True).start()

    yield start
    signal.signal(signal.SIGINT, previous)


def test_a_run_that_was_interrupted_goes_on_and_an_honest_submission_passes_every_stage(
    problem, tmp_path, interrupt_when
):
    directory, output = problem("vector_add"), tmp_path / "record.json"
    arguments = ["run", str(directory), str(directory / "submission.py"), "--threads", "1", "--mode", "leaderboard"]
    arguments += ["--budget", "1"]
    interrupt_when(lambda: output.exists() and len(records.read(output).cases) >= 2)
    result = CliRunner().invoke(app, [*arguments, "--output", str(output)])
    assert result.exit_code != 0
    assert "--resume" in result.stderr
    cut = records.read(output)
    assert not cut.complete
    assert (cut.verdict, cut.reason) == ("unfinished", "interrupted")
    assert verdicts(cut)[:2] == [("test", "correct")] * 2

    result = CliRunner().invoke(app, [*arguments, "--resume", str(output), "--popcorn"])
    assert result.exit_code == 0, result.output
    assert "check: pass" in result.stdout
    found = records.read(output)
    assert found.verdict == "correct here"
    assert found.complete
    assert verdicts(found) == [
        ("test", "correct"), ("test", "correct"), ("benchmark", "correct"), ("benchmark", "correct"),
        ("leaderboard", "correct"), ("leaderboard", "correct"),
    ]  # fmt: skip
    assert found.cases[:2] == cut.cases[:2]
    assert [case.start for case in found.cases[:2]] == [0, 0]
    assert found.cases[-1].start == 1
    assert len(found.protocol.seeds) == 2
    assert all(seed.commitment == records.commit(seed.seed, seed.salt) for seed in found.protocol.seeds)
    assert "refuse" not in {finding.severity for finding in found.all_findings}
    ranked = [case.statistics for case in found.cases if case.kind == "leaderboard"]
    assert found.score == pytest.approx((ranked[0].median_ns * ranked[1].median_ns) ** 0.5 * 1e-9)
    for case in found.cases:
        assert case.calls == len(case.samples)
        assert case.first_call_ns > 0
        assert {e.against for e in case.errors} == {"exact", "reference"}
        assert [c.tensor for c in case.coverage] == ["data[0]", "data[1]"]
        assert [sample.reason for sample in case.samples[:2]] == ["warm-up"] * 2
        if case.kind != "test":
            assert case.statistics.n == len(case.samples) - 2 >= 3


def test_a_run_goes_on_as_it_began_and_keeps_what_was_seen(arena, problem, tmp_path):
    directory, other = problem("vector_add"), tmp_path / "other.py"
    own = directory / "submission.py"
    other.write_text(own.read_text() + "# other\n")
    found = arena(directory, own)
    cut = replace(found, complete=False, cases=found.cases[:1], stand_ins=("seen before",))
    for options, what in (
        ({"mode": "benchmark"}, "--mode was test in the record, and is benchmark now"),
        ({"hardened": True}, "--hardened was off in the record, and is on now"),
        ({"dialect": "kernelbot"}, "--dialect was nibblas in the record, and is kernelbot now"),
        ({"threads": 2}, "--threads was 1 in the record, and is 2 now"),
        ({"seed": 7}, "--seed was none in the record, and is 7 now"),
        ({"stand_ins": "none"}, "--stand-ins was auto in the record, and is none now"),
        ({"budget": 2.0}, "--budget was 0.5 in the record, and is 2 now"),
        ({"against": other}, r"--against was none in the record, and is other\.py"),
    ):
        with pytest.raises(ArenaError, match=what):
            arena(directory, own, resumed=cut, **options)
    with pytest.raises(ArenaError, match=r"--against was submission\.py .* in the record, and is other\.py"):
        arena(directory, own, resumed=replace(cut, comparison=Comparison(found.submission)), against=other)
    with pytest.raises(ArenaError, match=r"the submission was submission\.py .* and is other\.py"):
        arena(directory, other, resumed=cut)
    before = replace(cut, environment=replace(cut.environment, torch="1.0"))
    with pytest.raises(ArenaError, match=r"torch was 1\.0 in the record, and is"):
        arena(directory, own, resumed=before)
    untold = replace(cut, protocol=replace(cut.protocol, budget=None))  # as records of before had it
    with pytest.raises(ArenaError, match=r"--budget was none in the record, and is 0\.5 now"):
        arena(directory, own, resumed=untold)
    again = arena(directory, own, resumed=replace(cut, cases=found.cases))
    assert again.cases == found.cases
    assert again.stand_ins == ("seen before",)
    faster = replace(cut.protocol, bandwidth=1e15, bandwidth_source="measured")
    again = arena(directory, own, resumed=replace(cut, cases=found.cases, protocol=faster))
    assert again.protocol.bandwidth == 1e15, "floors stay those that the finished cases had"
    assert again.isolation == found.isolation != {}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--device", "cuda:99"], "device 'cuda:99' is not here"),
        (["--device", "meta"], "device 'meta' is unknown; need cpu, cuda"),
        (["--against", "self"], "--against compares times"),
        (["--resume", "record"], "complete"),
    ],
)
def test_wrong_usage_is_told(arguments, what, problem, tmp_path):
    directory = problem("vector_add")
    if "record" in arguments:
        path = tmp_path / "record.json"
        path.write_text(COMPLETE)
        arguments = ["--resume", str(path)]
    with pytest.raises(ValueError, match=what):
        CliRunner().invoke(
            app, ["run", str(directory), str(directory / "submission.py"), *arguments], catch_exceptions=False
        )


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--output", "."], "is a directory"),
        (["--budget", "5"], "mode test takes no times and has no --budget"),
        (["--popcorn", "--json"], "--popcorn and --json are given, need one of them"),
    ],
)
def test_options_that_can_not_be_heeded_are_wrong_usage(arguments, what, problem, tmp_path, monkeypatch):
    directory = problem("vector_add")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, ["run", str(directory), str(directory / "submission.py"), *arguments])
    assert done.exit_code == 2
    assert what in " ".join(done.output.replace("│", " ").split())
    assert sorted(tmp_path.rglob("*")) == before


COMPLETE = json.dumps(
    {
        "schema": records.SCHEMA,
        "id": "1",
        "when": "2026-12-01T00:00:00+00:00",
        "command": "",
        "mode": "test",
        "task": {"name": "x", "files": {}},
        "submission": {"name": "x", "files": {}},
        "environment": {
            "device": "a CPU",
            "arch": "cpu",
            "threads": 1,
            "cpu": "a CPU",
            "system": "",
            "python": "",
            "torch": "",
        },
        "isolation": {},
        "protocol": {"mode": "test", "seeds": [{"commitment": "0" * 64}]},
        "verdict": "unfinished",
        "complete": True,
    }
)


def test_a_record_names_the_host_as_a_measurement_does(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "vm")
    cpu = torch.device("cpu")
    assert arena_run._environment(cpu, 1).facts["host"] == probe.facts(cpu)["host"] == "5bce98f73f3e"


def test_evidence_that_is_shipped_tells_no_hosts_name():
    hosts = {m.facts["host"] for m in store().shipped_only() if "host" in m.facts}
    assert hosts
    assert all(re.fullmatch("[0-9a-f]{12}", host) for host in hosts)


def test_a_timed_case_is_called_once_more_under_a_profiler(arena, problem, monkeypatch):
    """A CPU has no profiler of a device's work, so that it sees none."""
    directory = problem("vector_add")
    found = arena(directory, directory / "submission.py", mode="benchmark")
    assert all(case.traced is None for case in found.cases)
    monkeypatch.setattr(arena_run._Run, "_is_traceable", lambda run: True)
    found = arena(directory, directory / "submission.py", mode="benchmark")
    assert found.verdict == "correct here"
    first, *others = found.cases
    assert first.traced is not None
    assert first.traced.why_not == "the profiler saw no kernels"
    assert first.calls == len(first.samples) + 2
    assert all(case.traced is None for case in others), "where it sees nothing it is not asked again"


def test_the_traced_call_is_checked_like_all_others(arena, problem, write, monkeypatch):
    monkeypatch.setattr(arena_run._Run, "_is_traceable", lambda run: True)
    calls = []
    call = Contestant.call

    def counted(contestant, made, *arguments, **options):
        calls.extend([options["traced"]] if "traced" in options else [])
        return call(contestant, made, *arguments, **options)

    monkeypatch.setattr(Contestant, "call", counted)
    directory = problem("vector_add")
    lazy = write(
        "import inspect\n"
        "def custom_kernel(data):\n"
        "    traced = any(frame.function == 'traced' for frame in inspect.stack())\n"
        "    return data[0] if traced else data[0] + data[1]\n"
    )
    found = arena(directory, lazy, mode="benchmark")
    assert calls == [False, True]
    assert found.verdict == "wrong"
    assert found.cases[0].statistics is None
    assert "secret seed" in found.cases[0].message


def test_a_profiler_that_fails_is_no_fault_of_the_submission(arena, problem, write, monkeypatch):
    monkeypatch.setattr(arena_run._Run, "_is_traceable", lambda run: True)
    directory = problem("vector_add")
    fails = write(
        "import inspect\n"
        "def custom_kernel(data):\n"
        "    if any(frame.function == 'traced' for frame in inspect.stack()):\n"
        "        raise RuntimeError('no profiler')\n"
        "    return data[0] + data[1]\n"
    )
    found = arena(directory, fails, mode="benchmark")
    assert found.verdict == "correct here"
    assert found.cases[0].statistics is not None
    assert "no profiler" in found.cases[0].traced.why_not


def test_two_runs_do_not_write_one_record(problem, tmp_path):
    directory, path = problem("vector_add"), tmp_path / "record.json"
    arguments = ["arena", "run", str(directory), str(directory / "submission.py"), "--output", str(path)]
    command = [sys.executable, "-m", "nibblas", *arguments]
    with records.only_writer(path):
        refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert f"{path}: another run is writing this record" in refused.stderr
    assert not path.exists()
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_runs_that_start_together_name_their_records_apart(problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = problem("vector_add")
    for _ in range(2):
        assert CliRunner().invoke(app, ["run", str(directory), str(directory / "submission.py")]).exit_code == 0
    assert len(list(tmp_path.glob("arena-vector_add-*.json"))) == 2


def test_cases_of_one_text_are_each_run_when_a_run_goes_on(problem, tmp_path, arena):
    directory = tmp_path / "twice"
    shutil.copytree(problem("vector_add"), directory)
    task = (directory / "task.yml").read_text()
    (directory / "task.yml").write_text(task.replace("{size: 1000, seed: 2}", "{size: 7, seed: 1}"))
    own = directory / "submission.py"
    found = arena(directory, own)
    assert verdicts(found) == [("test", "correct")] * 2
    again = arena(directory, own, resumed=replace(found, cases=found.cases[:1], complete=False))
    assert verdicts(again) == [("test", "correct")] * 2


def test_hardened_inputs_are_of_tests_and_a_case_tells_where_there_are_none(problem, arena):
    directory = problem("vector_add")
    with pytest.raises(ArenaError, match="mode benchmark runs none"):
        arena(directory, directory / "submission.py", mode="benchmark", hardened=True)
    found = arena(directory, directory / "submission.py", hardened=True)
    assert "hardened" in {finding.class_id for finding in found.all_findings}


@pytest.fixture
def mxfp4_gemv(problem, tmp_path):
    """weak_gemv with scales of MXFP4; a submission and a reference that decode to fp16 are beside it."""
    directory = tmp_path / "mxfp4_gemv"
    shutil.copytree(problem("weak_gemv"), directory)
    for path in directory.iterdir():
        text = path.read_text().replace("16", "32").replace("float8_e4m3fn", "float8_e8m0fnu")
        path.write_text(text.replace("m: 32, k: 128", "m: 128, k: 512").replace("randint(0, 3", "randint(1, 3"))
    in_half = (directory / "submission.py").read_text().replace("scales.float()", "scales.half().float()")
    (directory / "in_half.py").write_text(in_half)
    return directory


def hardened_remarks(record):
    return [finding.what for finding in record.all_findings if finding.class_id == "hardened"]


def test_scales_that_no_fp16_holds_stand_at_zeros(mxfp4_gemv, arena):
    right = arena(mxfp4_gemv, mxfp4_gemv / "submission.py", hardened=True)
    assert (right.verdict, hardened_remarks(right)) == ("correct here", [])
    (scales,) = [found for found in right.cases[0].coverage if found.kind == "e8m0"]
    assert scales.byte_codes == "00-fe"
    assert arena(mxfp4_gemv, mxfp4_gemv / "in_half.py").verdict == "correct here"
    assert arena(mxfp4_gemv, mxfp4_gemv / "in_half.py", hardened=True).verdict == "wrong"


def test_a_reference_that_multiplies_infinity_by_zero_is_told_of(mxfp4_gemv, arena):
    reference = mxfp4_gemv / "reference.py"
    reference.write_text(reference.read_text().replace("scales.float()", "scales.half().float()"))
    found = arena(mxfp4_gemv, mxfp4_gemv / "submission.py", hardened=True)
    assert found.verdict == "correct here"
    assert hardened_remarks(found) == [NO_ZEROS]
    (linted,) = lint_problem(mxfp4_gemv, hardened=True, budget=10, kinds=("test",))
    assert NO_ZEROS in linted.faults


def test_a_check_that_takes_wrong_answers_is_told_of(problem, arena):
    found = arena(problem("long_softmax"), problem("softmax") / "submission.py")
    assert found.verdict == "correct here"
    told = [finding.what for finding in found.all_findings if finding.class_id == "weak-check"]
    assert any("all zeros" in what for what in told)
    strict = arena(problem("vector_add"), problem("vector_add") / "submission.py")
    assert "weak-check" not in {finding.class_id for finding in strict.all_findings}
