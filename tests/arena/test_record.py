"""A record survives its JSON, and the JSON Schema says the same as the dataclasses."""

import dataclasses
import json
import math
import re
import types
import typing

import pytest
from arena_records import BAD, GOOD, SIZES, timed, untimed
from jsonschema import Draft202012Validator

from nibblas.arena import record as records
from nibblas.arena.problem import Task
from nibblas.arena.record import (
    CaseResult,
    ClocksSeen,
    Comparison,
    Coverage,
    Environment,
    Errors,
    Finding,
    PairedRatio,
    Protocol,
    Record,
    Sample,
    Seed,
    Statistics,
    SubmissionFacts,
    TaskFacts,
    Traced,
    commit,
)


@pytest.mark.parametrize("record", [GOOD, BAD], ids=["good", "bad"])
def test_a_record_survives_its_json(record):
    assert Record.from_json(record.to_json()) == record


def test_files_are_written_whole_and_name_themselves_when_unreadable(tmp_path):
    path = tmp_path / "new folder" / "record.json"
    records.write(GOOD, path)
    assert records.read(path) == GOOD
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"record\.json: not a record: .*line"):
        records.read(path)


def test_numbers_that_are_not_finite_become_null():
    sample = Sample({"host": math.nan, "event": math.inf}, 5.0)
    case = dataclasses.replace(GOOD.cases[0], samples=(sample,))
    back = Record.from_json(dataclasses.replace(GOOD, cases=(case,), score=None).to_json())
    assert back.cases[0].samples[0].claimed_ns == {"host": None, "event": None}


def test_text_that_no_encoding_holds_can_be_kept():
    message = "\x1b[31m\udcff\u2028é"
    case = dataclasses.replace(GOOD.cases[2], message=message)
    record = dataclasses.replace(GOOD, cases=(case,), score=None)
    assert Record.from_json(record.to_json()).cases[0].message == message


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema": 2}, "schema 2, this nibblas reads schema 1"),
        ({"verdict": "excellent"}, r"\$\.verdict: 'excellent' is not one of"),
        ({"cases": [{"kind": "test"}]}, r"\$\.cases\[0\]: 'text' is a required property"),
        ({"extra": 1}, "'extra' was unexpected"),
        ({"task": {"name": "add", "files": {"task.yml": "12"}}}, r"task\.yml.* does not match"),
    ],
)
def test_other_documents_are_refused_with_the_field(change, error):
    document = json.loads(GOOD.to_json()) | change
    with pytest.raises(ValueError, match=error):
        Record.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "{"])
def test_what_is_no_record_at_all(text):
    with pytest.raises(ValueError, match="not a record"):
        Record.from_json(text)


CONTRADICTIONS = {
    "protocol.seeds.0.seed": (6, "$.protocol.seeds[0]: the commitment is not that"),
    "protocol.seeds.0.salt": (None, "$.protocol.seeds[0]: of seed and salt only one"),
    "cases.1.start": (1, "$.cases[1].start: 1, and the seeds of the protocol are 1"),
    "cases.0.verdict": ("wrong", "$.verdict: 'correct here', and its cases make it 'wrong'"),
    "cases": ([], "$.verdict: 'correct here', and its cases make it 'unfinished'"),
    "verdict": ("wrong", "$.verdict: 'wrong', and its cases make it 'correct here'"),
    "complete": (False, "$.verdict: 'correct here', and a run that is not complete is 'unfinished'"),
    "cases.2.samples.5.valid": (False, "$.cases[2].statistics: n is 40, and 39 samples are valid"),
    "cases.2.samples.5.claimed_ns.event": (-5, "$.cases[2].samples: a valid one claims -5 ns"),
    "cases.2.samples": ([], "$.cases[2].statistics: n is 40, and 0 samples are valid"),
    "cases.2.statistics": (None, "$.cases[2].statistics: null, and 40 samples"),
    "cases.2.statistics.median_ns": (1.0, "$.cases[2].statistics: median_ns is 1.0, and the median"),
    "cases.2.statistics.low_ns": (1e9, "$.cases[2].statistics: the median is not within"),
    "cases.2.statistics.timer": ("host", "$.cases[2].statistics: of the timer 'host'"),
    "score": (1e-9, "$.score: 1e-09, and the medians make it 2.4"),
    "mode": ("test", "$.score: told of a run that"),
    "cases.2.first_call_ns": (math.nan, "$.cases[2].first_call_ns: a number that is not finite"),
    "cases.2.floor_ns": (-math.inf, "$.cases[2].floor_ns: a number that is not finite"),
    "cases.3.samples.7.observed_ns": (10**400, "$.cases[3].samples[7].observed_ns: a number that is not finite"),
}


def changed(record, path, value):
    """The JSON of a record with one value replaced."""
    document = place = json.loads(record.to_json())
    *names, last = (int(name) if name.isdigit() else name for name in path.split("."))
    for name in names:
        place = place[name]
    place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize("path", CONTRADICTIONS)
def test_a_record_that_was_changed_contradicts_itself_and_says_where(path):
    value, error = CONTRADICTIONS[path]
    with pytest.raises(ValueError, match=re.escape(error)):
        Record.from_json(changed(GOOD, path, value))


def test_clocks_survive_json_are_in_order_and_need_not_be_there():
    case = dataclasses.replace(GOOD.cases[2], clocks=ClocksSeen(1200, 1980, ("SW power cap",)))
    record = dataclasses.replace(GOOD, cases=(*GOOD.cases[:2], case, *GOOD.cases[3:]))
    assert Record.from_json(record.to_json()) == record
    with pytest.raises(ValueError, match=r"\$\.cases\[2\]\.clocks: the lowest is 1981, the highest 1980"):
        Record.from_json(changed(record, "cases.2.clocks.low_mhz", 1981))
    document = json.loads(GOOD.to_json())
    for case in document["cases"]:
        del case["clocks"]
    assert Record.from_json(json.dumps(document)) == GOOD


def test_a_number_too_large_for_a_float_is_not_finite():
    text = GOOD.to_json().replace('"first_call_ns": 2000000000.0', '"first_call_ns": 1e999', 1)
    with pytest.raises(ValueError, match=r"\$\.cases\[2\]\.first_call_ns: a number that is not finite"):
        Record.from_json(text)


def test_values_that_are_nested_too_deeply_are_refused():
    text = changed(GOOD, "cases.0.values", {"m": "deep"}).replace('"deep"', "[" * 5000 + "]" * 5000)
    with pytest.raises(ValueError, match="nested too deeply"):
        Record.from_json(text)


@pytest.mark.parametrize("ranking_by", ["last", "mean", "geom"])
def test_the_score_is_that_of_the_problem(ranking_by):
    cases = (*GOOD.cases[:-1], timed("leaderboard", SIZES[1], ns=50e3))
    seconds = [case.statistics.median_ns * 1e-9 for case in cases[-2:]]
    rule = types.SimpleNamespace(ranking_by=ranking_by)
    task = dataclasses.replace(GOOD.task, ranking_by=ranking_by)
    record = dataclasses.replace(GOOD, task=task, cases=cases, score=Task.score(rule, seconds))
    assert Record.from_json(record.to_json()) == record
    with pytest.raises(ValueError, match=rf"\$\.score: .* \(ranking_by {ranking_by}\)"):
        Record.from_json(dataclasses.replace(record, score=record.score * 1.001).to_json())


UNFINISHED = dataclasses.replace(GOOD, verdict="unfinished", reason="interrupted", score=None, complete=False)


@pytest.mark.parametrize(
    "record",
    [
        UNFINISHED,
        dataclasses.replace(UNFINISHED, cases=()),
        dataclasses.replace(UNFINISHED, cases=(untimed(256, verdict="wrong"),)),
        dataclasses.replace(GOOD, cases=(untimed(256, verdict="not run"),), verdict="unfinished", score=None),
        dataclasses.replace(
            GOOD, cases=(untimed(256, verdict="incompatible"),), verdict="incompatible here", score=None
        ),
        dataclasses.replace(
            GOOD,
            protocol=dataclasses.replace(GOOD.protocol, seeds=(Seed(commit(4, "bb")), Seed(commit(5, "aa"), 5, "aa"))),
            cases=(*GOOD.cases[:3], *(dataclasses.replace(case, start=1) for case in GOOD.cases[3:])),
        ),
    ],
    ids=["interrupted", "none done", "after a wrong case", "not run", "incompatible", "resumed"],
)
def test_records_of_all_that_can_become_of_a_run_are_read(record):
    assert Record.from_json(record.to_json()) == record


def schema_parts():
    """Each dataclass with the schema of its object."""
    top = records.schema()
    parts = top["$defs"]
    properties = top["properties"]
    return [
        (Record, top),
        (TaskFacts, properties["task"]),
        (Environment, properties["environment"]),
        (Protocol, properties["protocol"]),
        (Seed, properties["protocol"]["properties"]["seeds"]["items"]),
        (Comparison, properties["comparison"]["anyOf"][0]),
        (PairedRatio, parts["paired_ratio"]),
        (SubmissionFacts, parts["submission"]),
        (CaseResult, parts["case"]),
        (Coverage, parts["coverage"]),
        (Errors, parts["errors"]),
        (Statistics, parts["statistics"]),
        (Traced, parts["traced"]),
        (ClocksSeen, parts["clocks_seen"]),
        (Sample, parts["sample"]),
        (Finding, parts["finding"]),
    ]


@pytest.mark.parametrize(("kind", "part"), schema_parts(), ids=lambda value: getattr(value, "__name__", ""))
def test_schema_and_dataclass_have_the_same_fields(kind, part):
    Draft202012Validator.check_schema(records.schema())
    fields = {field.name: field for field in dataclasses.fields(kind)}
    assert set(part["properties"]) == set(fields)
    without_default = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    told_of_every_record = {"schema", "verdict", "complete"} if kind is Record else set()
    assert set(part["required"]) == without_default | told_of_every_record
    hints = typing.get_type_hints(kind)
    for name, schema in part["properties"].items():
        if typing.get_origin(hints[name]) is typing.Literal:
            named = schema.get("enum") or records.schema()["$defs"]["mode"]["enum"]
            assert set(named) == set(typing.get_args(hints[name])), name


def test_all_dataclasses_of_the_module_are_in_the_schema():
    kinds = {value for value in vars(records).values() if dataclasses.is_dataclass(value)}
    assert kinds == {kind for kind, _ in schema_parts()}


def test_times_are_the_valid_claims_of_the_timer_that_counts():
    samples = (
        Sample({"event": 1.0, "host": 9.0}, 10.0),
        Sample({"event": 2.0, "host": 9.0}, 10.0, valid=False, reason="warm-up"),
        Sample({"event": None, "host": 9.0}, 10.0),
        Sample({"event": 4.0}, None),
    )
    case = CaseResult("benchmark", "m: 1", {"m": 1}, "correct", samples=samples)
    assert case.times == []
    case = dataclasses.replace(case, statistics=Statistics("event", 2.5, 1.0, 4.0, 2))
    assert case.times == [1.0, 4.0]


def test_a_commitment_is_what_sha256sum_prints():
    """printf 'ab:7' | sha256sum"""
    assert commit(7, "ab") == "b7e1dfec11fd191bb4abfdfe9c58ecd7de250cda6278f0dac33b9cb642a20ca8"
