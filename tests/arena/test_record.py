"""A record survives its JSON, and the JSON Schema says the same as the dataclasses."""

import dataclasses
import json
import math
import typing

import pytest
from jsonschema import Draft202012Validator

from nibblas.arena import record as records
from nibblas.arena.record import (
    CaseResult,
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
    commit,
)

SHA = "0" * 64

ERRORS = Errors("result[1]", "exact", "torch.float16", 8, 1.0, 0.25, 0.01, 25.0, (0, 3), 1.25, 1.0, 1e-3, 1)
COVERAGE = Coverage("data[0]", "torch.uint8", (2, 4), "perhaps e2m1 pairs", 0.5, low_codes="0f", high_codes="0")
CASE = CaseResult(
    "benchmark",
    "m: 128; k: 256",
    {"m": 128, "k": 256, "ids": [1, 2], "bias": False, "scale": 0.5},
    "correct",
    calls=3,
    errors=(ERRORS,),
    coverage=(COVERAGE,),
    first_call_ns=1e9,
    samples=(
        Sample({"host": 100.0, "event": 90.0}, 120.0, fresh_addresses=True),
        Sample({"host": 1.0}, None, valid=False, reason="the call never ended", throttled=True),
    ),
    statistics=Statistics("host", 100.0, 99.0, 101.0, 1),
    floor_ns=50.0,
    findings=(Finding("timer", "flag", "claims 1 ns, observed 100 ns", "call 2", {"claimed": 1.0, "observed": 100}),),
    stand_ins=("aiter.gemm_a4w4",),
)
RECORD = Record(
    id="2026-12-01T00:00:00+00:00-abcd",
    when="2026-12-01T00:00:00+00:00",
    command="nibblas arena run add submission.py",
    mode="benchmark",
    task=TaskFacts("add", {"task.yml": SHA}),
    submission=SubmissionFacts("submission.py", {"submission.py": SHA}, "add", ("H200",)),
    environment=Environment("a CPU", "cpu", 2, "a CPU", "Linux 6.1", "3.12.1", "2.13.0", {"nibblas": "0.1.0"}),
    isolation={"user": True, "network": "unshare: not permitted"},
    protocol=Protocol("benchmark", (Seed(commit(7, "ab"), 7, "ab"),), timeouts={"test": 180.0}),
    stand_ins=("aiter.gemm_a4w4",),
    cases=(CASE, CaseResult("benchmark", "m: 1; k: 1", {"m": 1, "k": 1}, "not run")),
    findings=(Finding("kernelguard", "info", "valid"),),
    comparison=Comparison(
        SubmissionFacts("other.py", {"other.py": SHA}),
        (PairedRatio("m: 128; k: 256", 0.9, 0.88, 0.92, 0.99, 1.01, ((1.0, 2.0),), ((1.0, 1.0),)),),
    ),
    verdict="correct here",
    score=1e-7,
    complete=True,
)


def test_a_record_survives_its_json():
    assert Record.from_json(RECORD.to_json()) == RECORD


def test_files_are_written_whole_and_name_themselves_when_unreadable(tmp_path):
    path = tmp_path / "new folder" / "record.json"
    records.write(RECORD, path)
    assert records.read(path) == RECORD
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"record\.json: not a record: .*line"):
        records.read(path)


def test_numbers_that_are_not_finite_become_null():
    sample = Sample({"host": math.nan, "event": math.inf}, 5.0)
    case = dataclasses.replace(CASE, samples=(sample,))
    back = Record.from_json(dataclasses.replace(RECORD, cases=(case,)).to_json())
    assert back.cases[0].samples[0].claimed_ns == {"host": None, "event": None}


def test_text_that_no_encoding_holds_can_be_kept():
    message = "\x1b[31m\udcff\u2028é"
    case = dataclasses.replace(CASE, message=message)
    assert Record.from_json(dataclasses.replace(RECORD, cases=(case,)).to_json()).cases[0].message == message


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
    document = json.loads(RECORD.to_json()) | change
    with pytest.raises(ValueError, match=error):
        Record.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "{"])
def test_what_is_no_record_at_all(text):
    with pytest.raises(ValueError, match="not a record"):
        Record.from_json(text)


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


def test_a_commitment_is_what_sha256sum_prints():
    """printf 'ab:7' | sha256sum"""
    assert commit(7, "ab") == "b7e1dfec11fd191bb4abfdfe9c58ecd7de250cda6278f0dac33b9cb642a20ca8"
