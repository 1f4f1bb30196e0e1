"""task.yml: every key, what is refused and how it says so, cases in both dialects, seeds and scores."""

import doctest
import hashlib
import re
from pathlib import Path

import pytest
import yaml

import nibblas.arena.problem
from nibblas.arena.problem import (
    OPTIONAL_KEYS,
    REQUIRED_KEYS,
    ArenaError,
    Case,
    combine_seed,
    parse_case,
    read_task,
)

REFERENCE = "def generate_input(seed): ...\ndef check_implementation(data, output): ...\n"
FILES = [
    {"name": "submission.py", "source": "@SUBMISSION@"},
    {"name": "task.py", "source": "task.py"},
    {"name": "reference.py", "source": "reference.py"},
    {"name": "eval.py", "source": "../eval.py"},
]
HOLDS_ITSELF: list = []
HOLDS_ITSELF.append(HOLDS_ITSELF)
TASK = {"files": FILES, "lang": "py", "description": "Add.", "config": {"main": "eval.py"}}


@pytest.fixture
def directory(tmp_path):
    """A problem folder that lacks its task.yml, with one file a level up."""
    folder = tmp_path / "add"
    folder.mkdir()
    (folder / "task.py").write_text("")
    (folder / "reference.py").write_text(REFERENCE)
    (tmp_path / "eval.py").write_text("pass\n")
    return folder


def written(directory, **keys):
    """task.yml with these keys over the least ones (None leaves a key out), and the folder."""
    task = {name: value for name, value in {**TASK, **keys}.items() if value is not None}
    (directory / "task.yml").write_text(yaml.safe_dump(task))
    return directory


def refused(directory, **keys):
    with pytest.raises(ArenaError) as caught:
        read_task(written(directory, **keys))
    assert str(directory / "task.yml") in str(caught.value)
    return str(caught.value)


def test_the_least_task_has_kernelbots_defaults(directory):
    task = read_task(written(directory))
    assert (task.name, task.lang, task.submission_name, task.description) == ("add", "py", "submission.py", "Add.")
    assert (task.test_timeout, task.benchmark_timeout, task.ranked_timeout) == (180, 180, 180)
    assert (task.ranking_by, task.seed, task.multi_gpu, task.tests, task.benchmarks) == ("last", None, False, (), ())
    assert read_task(directory / "task.yml") == task


def test_files_are_read_once_with_the_digests_of_sha256sum(directory):
    task = read_task(written(directory))
    assert [file.name for file in task.files] == ["task.py", "reference.py", "eval.py"]
    assert task.file("eval.py").content == b"pass\n"
    assert task.digests["eval.py"] == hashlib.sha256(b"pass\n").hexdigest()
    assert task.digests["task.yml"] == hashlib.sha256((directory / "task.yml").read_bytes()).hexdigest()
    (directory / "reference.py").write_text("changed")
    assert task.file("reference.py").content.decode() == REFERENCE
    assert task.file("utils.py") is None


def test_every_key(directory):
    task = read_task(
        written(
            directory,
            tests=[{"seed": 1}],
            benchmarks=[{"seed": 2}, {"seed": 3}],
            test_timeout=1.5,
            benchmark_timeout=2,
            ranked_timeout=3,
            ranking_by="geom",
            seed=7,
            multi_gpu=False,
            libraries=["cutlass"],
            templates={"Python": "submission.py"},
            gpus=["B200"],
            validation={"version": "1", "script": "validation.py"},
        )
    )
    assert [task.timeout(mode) for mode in ("test", "benchmark", "profile", "leaderboard")] == [1.5, 2, 2, 3]
    assert (task.ranking_by, task.seed, task.libraries, task.gpus) == ("geom", 7, ("cutlass",), ("B200",))
    assert task.templates == {"Python": "submission.py"}
    assert [case.text for case in task.cases("test")] == ["seed: 1"]
    assert [case.text for case in task.cases("leaderboard")] == ["seed: 2", "seed: 3"]


def test_of_benchmarks_ranked_by_the_last_the_last_alone_is_run(directory):
    task = read_task(written(directory, benchmarks=[{"seed": 2}, {"seed": 3}]))
    assert [case.text for case in task.cases("benchmark")] == ["seed: 3"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"timeout": 3}, "no key 'timeout'; there are files, lang, description"),
        ({"lang": None}, "lacks lang"),
        ({"lang": "rust"}, "lang is 'rust', need py or cu"),
        ({"lang": ["py"]}, "lang is ['py'], need py or cu"),
        ({"config": {"main": "main.py"}}, "config names ['main.py'], need names among files: task.py"),
        ({"config": {"sources": ["eval.cu"]}}, "config has no key 'sources'; there are main"),
        ({"files": []}, "files is [], need a list"),
        ({"files": FILES[1:]}, "0 files have the source @SUBMISSION@, need one"),
        ({"files": [*FILES, {"name": "other.py", "source": "@SUBMISSION@"}]}, "2 files have the source @SUBMISSION@"),
        ({"files": [*FILES, FILES[1]]}, "files names 'task.py' twice"),
        ({"files": [*FILES, {"name": "./reference.py", "source": "task.py"}]}, "files names 'reference.py' twice"),
        ({"files": [*FILES, {"name": "../up.py", "source": "task.py"}]}, "files names '../up.py', need a path that"),
        ({"files": [*FILES, {"name": "/etc/x", "source": "task.py"}]}, "files names '/etc/x', need a path that"),
        ({"files": [*FILES, {"name": "utils.py", "source": "utils.py"}]}, "utils.py, is no file"),
        ({"files": [*FILES, {"name": "utils.py"}]}, "an entry of files lacks source"),
        ({"files": [file for file in FILES if file["name"] != "reference.py"]}, "files has no reference.py"),
        ({"ranking_by": "median"}, "ranking_by is 'median', need one of last, mean, geom"),
        ({"test_timeout": 0}, "test_timeout is 0, need seconds above 0"),
        ({"test_timeout": True}, "test_timeout is True, need seconds above 0"),
        ({"seed": "7"}, "seed is '7', need a whole number"),
        ({"multi_gpu": "yes"}, "multi_gpu is 'yes', need true or false"),
        ({"gpus": "B200"}, "gpus is 'B200', need a list of words"),
        ({"templates": {"Rust": "x.rs"}}, "templates has no key 'Rust'; there are CUDA, Python, Triton, HIP, CuteDSL"),
        ({"tests": {"seed": 1}}, "tests is {'seed': 1}, need a list"),
        ({"tests": [[1]]}, "tests[0] is [1], need a mapping"),
        ({"tests": [{"seed": 1}, {"two words": 1}]}, "tests[1] has the key 'two words', need the name of an argument"),
        ({"tests": [{"sizes": {"m": 1}}]}, "tests[0]: sizes is {'m': 1}, need a number"),
        ({"multi_gpu": True, "tests": [{"seed": 1}]}, "tests[0] has no world_size"),
        ({"tests": [{"sizes": HOLDS_ITSELF}]}, "a value holds itself"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_needed(directory, keys, says):
    assert says in refused(directory, **keys)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("files: [", "not YAML"),
        ("lang: py\nlang: cu\n", "the key 'lang' is given twice"),
        ("- 1\n", "task is [1], need a mapping of files, lang"),
        ("", "task is None, need a mapping"),
    ],
)
def test_what_is_no_mapping_is_refused(directory, text, says):
    (directory / "task.yml").write_text(text)
    with pytest.raises(ArenaError, match=r"task\.yml") as caught:
        read_task(directory)
    assert says in str(caught.value)


def test_a_folder_without_a_task_is_refused(tmp_path):
    with pytest.raises(ArenaError, match=r"no task\.yml here, so this is no problem directory"):
        read_task(tmp_path)


def test_a_problem_with_an_evaluation_of_its_own_is_refused_with_the_reason(directory):
    (directory / "reference.py").write_text("def generate_inputs(b, v): ...\ndef reference_forward(x): ...\n")
    message = refused(directory)
    assert "reference.py defines no generate_input and no check_implementation" in message
    assert "an evaluation of its own in eval.py" in message


@pytest.mark.parametrize(
    "reference",
    [
        "from utils import generate_input, check_implementation",
        "import utils as generate_input\ncheck_implementation = generate_input.match(1)",
        "try:\n    def generate_input(): ...\nexcept ImportError: ...\nif 1:\n    check_implementation: object = 1",
    ],
)
def test_what_a_reference_defines_is_seen_without_running_it(directory, reference):
    (directory / "reference.py").write_text(reference + "\nraise SystemExit\n")
    assert read_task(written(directory)).name == "add"


def test_a_reference_that_is_not_python_is_refused(directory):
    (directory / "reference.py").write_text("def generate_input(:")
    assert "is not Python" in refused(directory)


def test_cuda_tasks_name_their_sources(directory):
    (directory / "eval.cu").write_text("")
    files = [{"name": "submission.cu", "source": "@SUBMISSION@"}, {"name": "eval.cu", "source": "eval.cu"}]
    config = {"sources": ["eval.cu", "submission.cu"], "compile_flags": ["-O3"]}
    task = read_task(written(directory, lang="cu", files=files, config=config))
    assert task.config == config
    assert task.submission_name == "submission.cu"
    assert "need names among files" in refused(directory, lang="cu", files=files, config={"sources": ["gone.cu"]})
    task = read_task(written(directory, lang="cu", files=files, config={**config, "compile_flags": None}))
    assert "compile_flags" not in task.config, "nothing given is as good as none"
    for key, value, says in (
        ("compile_flags", "-O3", "config's compile_flags is '-O3', need a list of words"),
        ("include_dirs", [1], "config's include_dirs is [1], need a list of words"),
        ("defines", ["A"], "config's defines is ['A'], need a mapping"),
    ):
        assert says in refused(directory, lang="cu", files=files, config={**config, key: value})


CASES = """
tests:
  - {m: 128, eps: 1e-3, scale: 0.5, nomask: False, kind: normal, sizes: [64, 72], shapes: [[1, 2], [3]], none: ~}
"""


def test_yaml_values_are_taken_as_they_are(directory):
    (directory / "task.yml").write_text(yaml.safe_dump(TASK) + CASES)
    (case,) = read_task(directory).tests
    assert case.values == {
        "m": 128, "eps": 1e-3, "scale": 0.5, "nomask": False, "kind": "normal", "sizes": [64, 72],
        "shapes": [[1, 2], [3]], "none": None,
    }  # fmt: skip
    assert case.text == (
        "m: 128; eps: 0.001; scale: 0.5; nomask: False; kind: normal; sizes: [64, 72]; shapes: [[1, 2], [3]]; "
        "none: None"
    )


def test_the_dialect_kernelbot_gives_what_its_evaluation_reads(directory):
    written(directory, tests=[{"m": 128, "nomask": False, "kind": "normal", "sizes": [64, 72], "n": -3}])
    (case,) = read_task(directory, "kernelbot").tests
    assert case.values == {"m": 128, "nomask": "False", "kind": "normal", "sizes": (64, 72), "n": -3}
    assert case.values["nomask"]  # the mask is never left on: that is the fault which the other dialect mends


def test_what_kernelbot_can_not_read_is_refused_in_its_dialect(directory):
    written(directory, benchmarks=[{"m": 1}, {"eps": 0.5}])
    assert read_task(directory).benchmarks[1].values == {"eps": 0.5}
    with pytest.raises(ArenaError, match=r"benchmarks\[1\]: case 'eps: 0\.5': KernelBot can't read 'eps: 0\.5'"):
        read_task(directory, "kernelbot")
    with pytest.raises(ArenaError, match="dialect 'popcorn' is unknown, need nibblas or kernelbot"):
        read_task(directory, "popcorn")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a: 1; b: +2;c:-3", {"a": 1, "b": 2, "c": -3}),
        ("a: (1,2) ; b: []", {"a": (1, 2), "b": ()}),
        ("a: [x, y]", {"a": "[x, y]"}),
        ("seed_2: word_2", {"seed_2": "word_2"}),
    ],
)
def test_case_lines(text, values):
    assert parse_case(text) == values


@pytest.mark.parametrize("text", ["", "a", "a: 1;", "a: 1.5", "a: two words", "2a: 1", "a: 1e3", "a: é"])
def test_lines_that_are_no_case(text):
    with pytest.raises(ArenaError, match="KernelBot can't read"):
        parse_case(text)


def test_a_yaml_anchor_can_share_arguments(directory):
    text = "tests:\n  - &base {m: 1, seed: 2}\n  - {<<: *base, m: 3}\n"
    (directory / "task.yml").write_text(yaml.safe_dump(TASK) + text)
    assert read_task(directory).tests[1].values == {"m": 3, "seed": 2}


def test_a_secret_changes_the_seed_and_nothing_else():
    case = Case.of({"m": 5, "seed": 10})
    assert case.seeded(None) == case.values
    assert case.seeded(4) == {"m": 5, "seed": combine_seed(10, 4)}
    assert Case.of({"m": 5}).seeded(4) == {"m": 5}
    assert case.values["seed"] == 10


def test_seeds_are_combined_one_to_one_within_64_bits():
    seeds = {combine_seed(a, b) for a in range(60) for b in range(60)}
    assert len(seeds) == 3600
    assert combine_seed(10**7, 2**31 - 1) < 2**63


def test_scores(directory):
    def score(ranking_by, *seconds):
        return read_task(written(directory, ranking_by=ranking_by)).score(list(seconds))

    assert score("last", 1.0, 4.0) == 4.0
    assert score("mean", 1.0, 4.0) == 2.5
    assert score("geom", 1.0, 4.0) == pytest.approx(2.0)
    assert score("geom", 1e-200, 1e-200) == pytest.approx(1e-200)  # a product of times would be 0
    assert score("mean") is None


def test_too_few_gpus_are_a_reason_with_numbers(directory):
    assert read_task(written(directory)).why_not(0) is None
    tests = [{"world_size": 2}, {"world_size": 8}]
    task = read_task(written(directory, multi_gpu=True, tests=tests))
    assert task.why_not(1) == "its cases need 8 GPUs (world_size), this machine has 1"
    assert task.why_not(8) is None


def test_the_documentation_names_every_key():
    page = (Path(__file__).parents[2] / "docs" / "arena.md").read_text()
    section = page.split("## Problems", 1)[1].split("\n## ", 1)[0]
    names = {name for row in re.findall(r"^\| ([a-z_, ]+) \|", section, re.MULTILINE) for name in row.split(", ")}
    assert names - {"key"} == {*REQUIRED_KEYS, *OPTIONAL_KEYS}


def test_examples():
    assert doctest.testmod(nibblas.arena.problem).failed == 0
