"""Importers, on made-up sources in the forms that they read."""

import json
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pytest
from made_up import make_item
from pyarrow import parquet
from starlette.testclient import TestClient

from nibblas import evidence
from nibblas.index import languages, synthetic
from nibblas.index.api import create_app
from nibblas.index.ingest import Report, add, add_own, kernelbot
from nibblas.index.ingest.evidence import run_of
from nibblas.index.ingest.reading import Interface, Options, Skipped, interface_of
from nibblas.index.model import Claim, CompatFact, Environment, Source, Tensor
from nibblas.index.store import Store

PYTHON = """import torch
import triton


def custom_kernel(data: tuple) -> torch.Tensor:
    return data[0]
"""
PAGE = """submission 4242
robin · python · License unknown
Use it
Vendorable · source mirrored · license unknownView source →
No package. Vendor the mirrored source: 9 lines, June 9 Researcher Reciprocity License v1.0.
toy.py
curl "https://example.org/api/v1/implementations/kernelbot-toy-gemv-4242?include=source"interfacepython
Compatibility
measured onNVIDIA H100
declared hardwareNVIDIA H100, NVIDIA A100
architecturessm_90
dtypesnvfp4
Benchmark evidence
1 measurement across 1 GPU, fastest first.
Operation / workload
Hardware
Latency
Rank
Observed
Reported · How evidence levels are derived →
Source and license
sourceavailable
revision digestsha256:00ff
license declaredunknown
license concludedunknown
authorsrobin
imported2026-08-15
Techniques
Extracted from the mirrored source by pattern, never inferred. Each row cites its line.
atomics
tl.atomic_add(c, v)triton
import tritonvector-width = uint2
something that the source does not holdKernel source
toy.py9 lines
import triton
import triton.language as tl
@triton.jit
def toy(c, v):
tl.atomic_add(c, v)
def custom_kernel(data: tuple) -> int:
return 0scrolls · 9 lines total
Source code from A Club and its data · June 9 Researcher Reciprocity License v1.0
Best evidence level for this revision: reported
JSON
"""
TASK = """
files:
  - {name: submission.py, source: "@SUBMISSION@"}
lang: py
description: a toy
config: {main: eval.py}
tests:
  - {m: 16, k: 64, seed: 1, causal: True}
benchmarks:
  - {m: 128, k: 64, seed: 7, causal: False}
  - {m: 16, k: 64, seed: 1, causal: True}
"""


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def numbers(report: Report) -> tuple[int, int, int, int, int]:
    return report.added, report.revised, report.updated, report.unchanged, len(report.skipped)


# Interfaces


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("a.py", PYTHON, ("python", "triton", "custom_kernel", "custom_kernel(data: tuple) -> torch.Tensor")),
        ("a.py", "import torch\ndef _f(): pass\ndef g(x, *, y=1): pass\n", ("python", "torch", "g", "g(x, *, y=1)")),
        ("a.py", "def f(): pass\ndef g(): pass\n", ("python", None, None, None)),
        ("a.py", "try:\n    import helion\nexcept ImportError:\n    import triton\n", ("python", "helion", None, None)),
        (
            "a.py",
            "def f():\n    from torch.utils.cpp_extension import load\n",
            ("python", "torch-extension", "f", "f()"),
        ),
        ("a.py", "import cutlass.cute as cute\n", ("python", "cute-dsl", None, None)),
        ("a.py", "from cutlass import cute\n", ("python", "cute-dsl", None, None)),
        ("a.py", '"""import triton"""\n', ("python", None, None, None)),
        ("a.py", "import tritonish\n", ("python", None, None, None)),
        ("a.py", "from triton import jit\nif x:\nreturn\n", ("python", "triton", None, None)),
        ("a.cu", '#include "cutlass/cutlass.h"\n', ("cuda", "cutlass", None, None)),
        ("a.cu", "// #include <ck/ck.hpp>\n__global__ void f() {}\n", ("cuda", None, None, None)),
        ("a.txt", "import triton", (None, None, None, None)),
    ],
)
def test_interface(path, text, expected):
    assert interface_of(path, text.encode()) == Interface(*expected)


# Files


def test_a_file(store, tmp_path):
    path = write(tmp_path / "kernels" / "my_gemv.py", PYTHON)
    assert numbers(add(store, [path])) == (1, 0, 0, 0, 0)
    found = store.item("kernels-my-gemv")
    assert found.contents == {"my_gemv.py": PYTHON.encode()}
    assert found.implementation.source == Source("file", str(tmp_path / "kernels"))
    assert found.implementation.authors == ()
    assert found.implementation.licence is None
    assert found.implementation.operation is None
    assert numbers(add(store, [path])) == (0, 0, 0, 1, 0)


def test_a_file_that_changed_is_a_revision_and_one_from_elsewhere_is_refused(store, tmp_path):
    path = write(tmp_path / "kernels" / "a.py", PYTHON)
    add(store, [path])
    write(path, PYTHON + "# faster\n")
    assert numbers(add(store, [path.parent])) == (0, 1, 0, 0, 0)
    other = write(tmp_path / "other" / "kernels" / "a.py", "x = 1\n")
    report = add(store, [other])
    assert numbers(report) == (0, 0, 0, 0, 1)
    assert "give another by --slug" in report.skipped[0].why
    assert numbers(add(store, [other], Options(slug="mine"))) == (1, 0, 0, 0, 0)


def test_a_folder(store, tmp_path):
    folder = tmp_path / "kernels"
    write(folder / "gemm.py", PYTHON)
    write(folder / "gemm.cu", "__global__ void f() {}\n")
    write(folder / "deep" / "moe.cu", "__global__ void g() {}\n")
    write(folder / "LICENSE", "a licence")
    write(folder / ".hidden.py", PYTHON)
    write(folder / "__pycache__" / "gemm.py", PYTHON)
    write(folder / "notes.md", "notes")
    write(folder / "empty.py", "\n")
    write(folder / "binary.cu", b"\0\1")
    report = add(store, [folder])
    assert sorted(report.skipped) == [
        Skipped(str(folder / "binary.cu"), "not a text: it holds zero bytes"),
        Skipped(str(folder / "empty.py"), "the file is empty"),
        Skipped(str(folder / "notes.md"), "no importer takes .md files"),
    ]
    assert report.added == 2
    assert sorted(store.item("kernels-gemm").contents) == ["LICENSE", "gemm.cu", "gemm.py"]
    found = store.item("deep-moe")
    assert found.implementation.language == "cuda"
    assert list(found.contents) == ["moe.cu"], "what lies above is not of the same repository"


def test_every_language_that_is_parsed_is_taken(store, tmp_path):
    for suffix in languages.SUFFIXES:
        write(tmp_path / "kernels" / f"{suffix[1:]}_kernel{suffix}", "s_endpgm\n")
    report = add(store, [tmp_path / "kernels"])
    assert report.skipped == []
    assert report.added == len(languages.SUFFIXES)
    assert store.implementation("kernels-ptx-kernel").language == "ptx"


def test_assembler_is_taken_where_it_is_gcn(store, tmp_path):
    x86 = write(tmp_path / "kernels" / "gemm_avx512.s", "s_loop:\n    vfmadd231ps (%rsi), %zmm1, %zmm0\n    ret\n")
    gcn = write(tmp_path / "kernels" / "gemm_mi300.s", "loop:\n    v_fma_f32 v0, v1, v2, v0\n    s_endpgm\n")
    empty = write(tmp_path / "kernels" / "nothing.s", "\n")
    report = add(store, [tmp_path / "kernels"])
    assert report.skipped == [Skipped(str(path), "no importer takes .s files") for path in (x86, empty)]
    assert report.added == 1
    found = store.implementation("kernels-gemm-mi300")
    assert (found.language, [file.media_type for file in found.files]) == ("gcn", ["text/x-gcn"])
    assert interface_of(gcn.name, gcn.read_bytes()) == Interface("gcn")
    assert interface_of(x86.name, x86.read_bytes()) == Interface()


def test_the_licence_that_a_readme_states(store, tmp_path):
    path = write(tmp_path / "kernels" / "a.py", PYTHON)
    write(tmp_path / "kernels" / "README.md", "# Kernels\n\nThese are licensed under the MIT license.\n")
    add(store, [path])
    found = store.item("kernels-a")
    assert found.implementation.licence == "MIT"
    assert found.claims == (Claim("licence in README.md", "MIT", 3),)
    assert list(found.contents) == ["a.py"]
    add(store, [path], Options(licence="Apache-2.0"))
    assert store.implementation("kernels-a").licence == "Apache-2.0"


def test_a_readme_that_states_several_licences_declares_none(store, tmp_path):
    text = "The code is licensed under the MIT license.\n\nThe kernels are licensed under CC-BY-NC-4.0.\n"
    write(tmp_path / "kernels" / "README.md", text)
    add(store, [write(tmp_path / "kernels" / "a.py", PYTHON)])
    found = store.item("kernels-a")
    assert found.implementation.licence is None
    assert [claim.value for claim in found.claims] == ["MIT", "CC-BY-NC-4.0"]


def test_one_file_of_several_stands_for_all(store, tmp_path):
    write(tmp_path / "kernels" / "gemm.py", PYTHON)
    device = write(tmp_path / "kernels" / "gemm.cu", "__global__ void f() {}\n")
    assert numbers(add(store, [device])) == (1, 0, 0, 0, 0)
    assert sorted(store.item("kernels-gemm").contents) == ["gemm.cu", "gemm.py"]
    assert numbers(add(store, [tmp_path / "kernels"])) == (0, 0, 0, 1, 0)


def test_the_licence_of_a_repository(store, tmp_path):
    write(tmp_path / "LICENSE", "of something else")
    write(tmp_path / "repository" / ".git" / "HEAD", "ref")
    write(tmp_path / "repository" / "LICENSE.txt", "a licence")
    add(store, [write(tmp_path / "repository" / "kernels" / "deep" / "a.py", PYTHON)])
    assert store.item("deep-a").contents == {"LICENSE.txt": b"a licence", "a.py": PYTHON.encode()}


def test_a_path_that_is_not_there(store, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing.py: no such file"):
        add(store, [write(tmp_path / "a.py", PYTHON), tmp_path / "nothing.py"])
    assert store.digests() == []


def test_a_file_that_names_its_board(store, tmp_path):
    text = "#!POPCORN leaderboard toy_gemv\n#!POPCORN gpus MI300 X9\n" + PYTHON
    add(store, [write(tmp_path / "mine.py", text)])
    (slug,) = [store.implementation(digest).slug for digest in store.digests()]
    found = store.item(slug)
    assert found.implementation.operation.slug == "toy-gemv"
    assert [(fact.kind, fact.gpu) for fact in found.facts] == [("declared", "AMD Instinct MI300X"), ("declared", "X9")]


def test_a_submission_with_its_problem(store, tmp_path):
    problem = write(tmp_path / "toy_gemv" / "task.yml", TASK).parent
    path = write(tmp_path / "mine.py", PYTHON)
    options = Options(problem=problem, submission="17", authors=("robin",), licence="MIT")
    add(store, [path], options)
    found = store.implementation("kernelbot-toy-gemv-17")
    assert (found.name, found.source.kind, found.authors) == ("submission 17", "kernelbot-submission", ("robin",))
    assert found.operation.axes == ("m", "k")
    workloads = [tuple(row) for row in store.connection.execute("SELECT name, axes, parameters FROM workload")]
    assert workloads == [
        ("m: 16; k: 64; seed: 1; causal: True", '{"m":16,"k":64}', '{"seed":1,"causal":true}'),
        ("m: 128; k: 64; seed: 7; causal: False", '{"m":128,"k":64}', '{"seed":7,"causal":false}'),
    ]


@pytest.mark.parametrize("text", ["tests: [1, 2]", "- a\n- b", "a: b: c"])
def test_a_problem_that_can_not_be_read(store, tmp_path, text):
    problem = write(tmp_path / "toy" / "task.yml", text).parent
    report = add(store, [write(tmp_path / "mine.py", PYTHON)], Options(problem=problem))
    assert "task.yml" in report.skipped[0].why
    assert store.digests() == []


# Texts of submissions


def test_the_text_of_a_submission(store, tmp_path):
    path = write(tmp_path / "000.txt", "submission 108\n\n" + PYTHON)
    add(store, [path])
    found = store.item("kernelbot-108")
    assert found.contents == {"submission.py": PYTHON.encode()}
    assert (found.implementation.operation, found.implementation.authors) == (None, ())
    assert found.implementation.source.terms is None
    assert found.runs == found.facts == found.claims == ()
    add(store, [path], Options(board="toy_gemv"))
    assert store.implementation("kernelbot-toy-gemv-108").operation.slug == "toy-gemv"


@pytest.mark.parametrize(
    ("code", "name"),
    [("#include <cuda.h>\n", "submission.cu"), ("x = 1\n", "submission.py"), ("neither of both\n", "submission.txt")],
)
def test_the_name_of_a_submission_that_has_none(store, tmp_path, code, name):
    add(store, [write(tmp_path / "a.txt", "submission 1\n\n" + code)])
    found = store.item("kernelbot-1")
    assert list(found.contents) == [name]
    assert found.implementation.limitations


def test_a_number_without_its_problem_is_told(store, tmp_path):
    path = write(tmp_path / "a.py", PYTHON)
    (skipped,) = add(store, [path], Options(submission="7")).skipped
    assert "--board or --problem" in skipped.why
    assert store.digests() == []
    assert add(store, [path], Options(submission="7", board="toy_gemv")).added == 1


# Pages


def test_a_saved_page(store, tmp_path):
    report = add(store, [write(tmp_path / "page.txt", PAGE)])
    assert numbers(report) == (1, 0, 0, 0, 0)
    found = store.item("kernelbot-toy-gemv-4242")
    text = found.contents["toy.py"].decode()
    assert text.splitlines() == [
        "import triton",
        "import triton.language as tl",
        "@triton.jit",
        "def toy(c, v):",
        "tl.atomic_add(c, v)",
        "def custom_kernel(data: tuple) -> int:",
        "return 0",
    ]
    implementation = found.implementation
    assert implementation.name == "submission 4242"
    assert implementation.authors == ("robin",)
    assert implementation.operation.slug == "toy-gemv"
    assert implementation.licence is None
    assert (implementation.framework, implementation.entry_point) == ("triton", "custom_kernel")
    assert implementation.signature == "custom_kernel(data: tuple) -> int"
    assert implementation.source == Source(
        "catalog-page",
        "https://example.org/implementations/kernelbot-toy-gemv-4242",
        terms="LicenseRef-GPUMode-Reciprocity-1.0",
        attribution="Source code from A Club and its data · June 9 Researcher Reciprocity License v1.0",
    )
    assert found.facts == (
        CompatFact("declared", gpu="NVIDIA H100"),
        CompatFact("declared", gpu="NVIDIA A100"),
        CompatFact("declared", arch="sm_90"),
        CompatFact("measured", gpu="NVIDIA H100", claimed=True),
    )
    assert found.runs == ()
    assert [text.split()[0] for text in implementation.limitations] == ["The", "The", "The", "The", "1"]


def test_the_claims_of_a_saved_page(store, tmp_path):
    add(store, [write(tmp_path / "page.txt", PAGE)])
    claims = store.claims(store.implementation("kernelbot-toy-gemv-4242").digest)
    lines = PAGE.splitlines()
    for claim in claims:
        assert claim.value in lines[claim.line - 1] or claim.value in lines[claim.line - 1].lower()
    said = {(claim.subject, claim.value) for claim in claims}
    assert said >= {
        ("lines", "9"),
        ("revision digest", "sha256:00ff"),
        ("license declared", "unknown"),
        ("dtypes", "nvfp4"),
        ("imported", "2026-08-15"),
        ("measurements", "1 measurement across 1 GPU, fastest first."),
        ("evidence level", "reported"),
        ("technique atomics", "tl.atomic_add(c, v)"),
        ("technique triton", "import triton"),
        ("technique, not cited", "something that the source does not hold"),
    }


def test_lines_of_source_that_a_page_cites_are_not_handed_on(store, tmp_path):
    add(store, [write(tmp_path / "page.txt", PAGE)])
    slug = "kernelbot-toy-gemv-4242"
    with TestClient(create_app(store.path), base_url="http://localhost") as client:
        for address in (
            f"/implementations/{slug}",
            f"/implementations/{slug}.json",
            f"/api/v1/implementations/{slug}?include=source,findings",
            "/api/v1/exports/catalog.jsonl",
        ):
            text = client.get(address).text
            assert "technique atomics" in text
            assert "tl.atomic_add(c, v)" not in text
    add(store, [write(tmp_path / "page.txt", PAGE)], Options(slug="open", licence="MIT"))
    with TestClient(create_app(store.path), base_url="http://localhost") as client:
        assert "tl.atomic_add(c, v)" in client.get("/implementations/open").text


def test_a_page_that_kept_its_values_and_its_lines(store, tmp_path):
    page = PAGE.replace("Observed\n", "Observed\n12.5 us on a B200\n").replace("9 lines", "7 lines")
    page = page.replace("tl.atomic_add(c, v)\ndef", "    tl.atomic_add(c, v)\ndef")
    add(store, [write(tmp_path / "page.txt", page)])
    found = store.item("kernelbot-toy-gemv-4242")
    assert [claim.value for claim in found.claims if claim.subject == "measurement"] == ["12.5 us on a B200"]
    assert len(found.implementation.limitations) == 2


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("/implementations/", "/elsewhere/", "no address"),
        ("toy.py9 lines", "no heading", "mirrors no source"),
        ("scrolls · 9 lines total", "", "where it ends"),
    ],
)
def test_a_page_that_lacks_a_part(store, tmp_path, old, new, why):
    report = add(store, [write(tmp_path / "page.txt", PAGE.replace(old, new))])
    assert why in report.skipped[0].why
    assert store.digests() == []


# The data set


def data_set(path: Path, rows: list[dict], row_group: int = 4) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group)
    return path


def flat(count: int = 10) -> list[dict]:
    return list(synthetic.rows(count))


def test_the_flat_layout(store, tmp_path):
    rows = flat()
    path = data_set(tmp_path / "toy.parquet", rows)
    report = add(store, [path], Options(terms="MIT", revision="r1", attribution="a club"))
    assert numbers(report) == (10, 0, 0, 0, 0)
    row = rows[3]
    found = store.item(kernelbot.slug(kernelbot.operation(row["problem_name"]), row["submission_id"]))
    assert found.contents == {"submission.py": row["code"].encode()}
    assert found.implementation.source == Source("kernelbot-dataset", "toy.parquet", "r1", "MIT", "a club")
    assert found.implementation.authors == (row["user_name"],)
    (run,) = found.runs
    assert run.claimed
    assert run.workload is None
    assert [(figure.metric, figure.statistic, figure.value) for figure in run.figures] == [
        ("score", None, row["score"])
    ]
    assert run.environment == Environment(*kernelbot.device(row["runner"]), facts={"runner": row["runner"]})
    assert Claim("user id", row["user_id"]) in found.claims
    assert store.check() == []


def test_rows_that_are_known_are_not_read_again(store, tmp_path, monkeypatch):
    path = data_set(tmp_path / "toy.parquet", flat())
    add(store, [path])

    def fail(*_):
        raise AssertionError("code was read")

    monkeypatch.setattr(kernelbot, "_codes", fail)
    assert numbers(add(store, [path])) == (0, 0, 0, 10, 0)
    shutil.copy(path, tmp_path / "copy.parquet")
    assert numbers(add(store, [tmp_path / "copy.parquet"])) == (0, 0, 0, 10, 0)


def test_rows_of_another_runner_and_of_other_code(store, tmp_path):
    rows = flat(3)
    add(store, [data_set(tmp_path / "a.parquet", rows)])
    slug = kernelbot.slug(kernelbot.operation(rows[0]["problem_name"]), rows[0]["submission_id"])
    again = [{**rows[0], "runner": "L4", "score": 2.0}, {**rows[1], "code": "x = 1\n", "code_id": 99}]
    assert numbers(add(store, [data_set(tmp_path / "b.parquet", again)])) == (0, 1, 1, 0, 0)
    runs = store.runs(store.implementation(slug).digest)
    assert [run.environment.device for run in runs][1] == "NVIDIA L4"


def test_other_terms_are_another_revision(store, tmp_path):
    path = data_set(tmp_path / "toy.parquet", flat(2))
    add(store, [path], Options(terms="MIT"))
    assert numbers(add(store, [path], Options(terms="CC-BY-4.0"))) == (0, 2, 0, 0, 0)
    assert numbers(add(store, [path], Options(terms="MIT"))) == (0, 0, 0, 2, 0)


def test_rows_that_are_left_out(store, tmp_path):
    rows = flat(6)
    rows[0]["passed"] = False
    rows[1]["code"] = None
    rows[2]["problem_name"] = "another"
    rows[3]["score"] = float("nan")
    rows[4]["file_name"] = "../../escape.py"
    boards = tuple({row["problem_name"] for row in rows} - {"another"})
    report = add(store, [data_set(tmp_path / "toy.parquet", rows)], Options(boards=boards))
    assert report.added == 2
    assert sorted(why.split(";")[0][:40] for _, why, _ in report.skipped) == sorted(
        [
            "did not pass",
            "the row has no code",
            "of another board than --only names",
            f"{store_slug(rows[4])}: a file is called '../../escape.py', need a plain relative path"[:40],
        ]
    )
    assert store.runs(store.implementation(store_slug(rows[3])).digest)[0].figures == ()


def store_slug(row: dict) -> str:
    return kernelbot.slug(kernelbot.operation(row["problem_name"]), row["submission_id"])


def test_only_the_fastest(store, tmp_path):
    rows = [{**row, "problem_name": "toy", "runner": "B200"} for row in flat(9)]
    report = add(store, [data_set(tmp_path / "toy.parquet", rows)], Options(top=3))
    fastest = sorted(rows, key=lambda row: row["score"])[:3]
    assert sorted(store.implementation(digest).slug for digest in store.digests()) == sorted(map(store_slug, fastest))
    assert list(report.reasons) == ["not among the 3 fastest of its board and runner"]


def test_the_rich_layout(store, tmp_path):
    result = {
        "benchmark-count": "1",
        "benchmark.0.spec": "m: 128; k: 64; seed: 7",
        "benchmark.0.mean": "1500.0",
        "benchmark.0.std": "10",
        "benchmark.0.best": "1400",
        "benchmark.0.worst": "1600",
        "benchmark.0.runs": "100",
        "check": "pass",
    }
    row = {
        "submission_id": 5,
        "leaderboard_id": 463,
        "user_id": 7,
        "submission_time": "2025-05-01T00:00:00",
        "file_name": "toy.py",
        "code": PYTHON,
        "code_id": 50,
        "run_id": 500,
        "run_mode": "leaderboard",
        "run_score": 1.5e-6,
        "run_passed": True,
        "run_result": list(result.items()),
        "run_system_info": {"cpu": "a CPU", "gpu": "AMD Instinct MI300X", "platform": "Linux", "torch": "2.8"},
    }
    schema = pa.Table.from_pylist([{k: v for k, v in row.items() if k != "run_result"}]).schema
    schema = schema.append(pa.field("run_result", pa.map_(pa.string(), pa.string())))
    folder = tmp_path / "data"
    folder.mkdir()
    parquet.write_table(pa.Table.from_pylist([row], schema), folder / "rich.parquet")
    data_set(folder / "leaderboards.parquet", [{"id": 463, "name": "toy_mla"}])
    assert numbers(add(store, [folder])) == (1, 0, 0, 0, 0)
    score, case = store.runs(store.implementation("kernelbot-toy-mla-5").digest)
    assert score.figures[0].value == 1.5e-6
    assert (case.workload.axes, case.workload.parameters) == ({"m": 128, "k": 64}, {"seed": 7})
    times = {figure.statistic: (figure.metric, figure.value, figure.n) for figure in case.figures}
    assert times["mean"] == ("latency", pytest.approx(1.5e-6), 100)
    assert times["std"] == ("spread", pytest.approx(1e-8), 100)
    assert case.environment == Environment(
        "AMD Instinct MI300X",
        "gfx942",
        versions={"torch": "2.8"},
        facts={"runner": "AMD Instinct MI300X", "cpu": "a CPU", "platform": "Linux"},
    )


def test_other_parquet_files(store, tmp_path):
    report = add(store, [data_set(tmp_path / "a.parquet", [{"x": 1}]), write(tmp_path / "b.parquet", "no parquet")])
    assert [Path(skipped.what).name for skipped in report.skipped] == ["a.parquet", "b.parquet"]
    assert "not of KernelBot's submissions" in report.skipped[0].why


def test_terms_of_the_data_set_card(store, tmp_path):
    write(tmp_path / "README.md", "---\nlicense: cc-by-4.0\ntags: [a]\n---\n# A data set\nlicense: mit\n")
    add(store, [data_set(tmp_path / "toy.parquet", flat(1))])
    assert store.implementation(store.digests()[0]).source.terms == "CC-BY-4.0"


def test_progress_counts_every_row(store, tmp_path):
    seen = []
    add(
        store,
        [data_set(tmp_path / "toy.parquet", flat(7)), write(tmp_path / "a.py", PYTHON)],
        progress=lambda done, total, text: seen.append((done, total, text)),
    )
    assert seen == [(7, 8, "toy.parquet"), (8, 8, "a.py")]


# Records of the arena


def record(files: dict[str, str]) -> dict:
    from nibblas.arena import record as arena

    case = arena.CaseResult(
        "leaderboard",
        "m: 128; k: 64; seed: 7",
        {"m": 128, "k": 64, "seed": 7},
        "correct",
        calls=2,
        errors=(
            arena.Errors("result", "exact", "fp16", 128, 1.5, 1e-3, 2e-3, 1.0, (0,), 1.0, 1.0, max_relative_size=5e-4),
        ),
        samples=(
            arena.Sample({"event": 1000.0}, 1500.0),
            arena.Sample({"event": 1200.0}, 1600.0),
            arena.Sample({"event": 9000.0}, 9500.0, valid=False, reason="throttled"),
        ),
        statistics=arena.Statistics("event", 1100.0, 1000.0, 1200.0, 2),
        floor_ns=500.0,
        findings=(arena.Finding("threads", "flag", "two threads"),),
    )
    wrong = replace(
        case, text="m: 1; k: 64; seed: 7", verdict="wrong", message="3 elements", samples=(), statistics=None
    )
    return json.loads(
        arena.Record(
            "an id",
            "2026-03-04T05:06:07+00:00",
            "nibblas arena run",
            "leaderboard",
            arena.TaskFacts("toy_gemv", {"task.yml": "0" * 64}),
            arena.SubmissionFacts("mine", files, "toy_gemv", ("B200",)),
            arena.Environment("NVIDIA H200", "sm_90", 0, "a CPU", "Linux", "3.12", "2.9", {"driver": "580"}),
            {"network": True},
            arena.Protocol("leaderboard", (arena.Seed("0" * 64),), timer="event", flush_bytes=1 << 26),
            cases=(case, wrong, replace(wrong, verdict="not run")),
            verdict="wrong",
            complete=True,
        ).to_json()
    )


def test_a_record_beside_its_submission(store, tmp_path):
    source = write(tmp_path / "mine.py", PYTHON)
    add(store, [source])
    digest = store.implementation(store.digests()[0]).files[0].sha256
    path = write(tmp_path / "runs" / "record.json", json.dumps(record({"submission.py": digest})))
    assert numbers(add(store, [path])) == (0, 0, 1, 0, 0)
    assert numbers(add(store, [path])) == (0, 0, 0, 1, 0)
    right, wrong = store.runs(store.digests()[0])
    assert right.workload.axes == {"m": 128, "k": 64}
    assert not right.claimed
    assert right.samples == (pytest.approx(1e-6), pytest.approx(1.2e-6))
    figures = {figure.metric: figure for figure in right.figures}
    assert figures["latency"].value == pytest.approx(1.1e-6)
    assert (figures["latency"].low, figures["latency"].high) == (pytest.approx(1e-6), pytest.approx(1.2e-6))
    assert figures["error ulp"].value == 1.5
    assert (right.error, right.floor) == (5e-4, pytest.approx(5e-7))
    assert right.environment.versions["driver"] == "580"
    assert right.integrity == ({"class": "threads", "severity": "flag", "what": "two threads"},)
    assert (wrong.status, wrong.reason, wrong.samples) == ("wrong", "3 elements", ())


def test_a_record_of_a_submission_that_is_only_beside_it(store, tmp_path):
    digest = make_item(code=PYTHON.encode()).implementation.files[0].sha256
    path = write(tmp_path / "runs" / "record.json", json.dumps(record({"submission.py": digest})))
    report = add(store, [path])
    assert "is neither in the index nor beside the record" in report.skipped[0].why
    write(tmp_path / "runs" / "mine.py", PYTHON)
    assert numbers(add(store, [path])) == (1, 0, 0, 0, 0)
    found = store.item(f"arena-toy-gemv-{digest[:12]}")
    assert found.contents == {"submission.py": PYTHON.encode()}
    assert len(found.runs) == 2


def test_a_record_is_imported_after_its_submission(store, tmp_path):
    digest = make_item(code=PYTHON.encode()).implementation.files[0].sha256
    write(tmp_path / "runs" / "a_record.json", json.dumps(record({"submission.py": digest})))
    write(tmp_path / "runs" / "z" / "mine.py", PYTHON)
    assert numbers(add(store, [tmp_path / "runs"])) == (1, 0, 1, 0, 0)
    assert len(store.runs(store.implementation("z-mine").digest)) == 2


def test_times_of_stand_ins_are_no_latency(store, tmp_path):
    given = record({"submission.py": make_item(code=PYTHON.encode()).implementation.files[0].sha256})
    given["cases"][0]["stand_ins"] = ["torch._scaled_mm"]
    write(tmp_path / "runs" / "mine.py", PYTHON)
    add(store, [write(tmp_path / "runs" / "record.json", json.dumps(given))])
    run = next(run for digest in store.digests() for run in store.runs(digest))
    assert run.samples == ()
    assert run.figures[0].metric == "latency with stand-ins"
    assert [tuple(row) for row in store.connection.execute("SELECT DISTINCT seconds FROM run")] == [(None,)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda given: given.update(schema=99), "a record of schema 99"),
        (lambda given: given["cases"][0].pop("text"), "KeyError: 'text'"),
        (lambda given: given.update(environment=[]), "TypeError"),
        (lambda given: given.update(submission={"files": []}), "not a record of the arena"),
    ],
)
def test_a_record_that_is_none(store, tmp_path, change, why):
    given = record({"submission.py": "0" * 64})
    change(given)
    report = add(store, [write(tmp_path / "record.json", json.dumps(given))])
    assert why in report.skipped[0].why
    assert store.digests() == []


# nibblas's own


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A store of evidence with one Measurement of a kernel as it is, and one of code that is gone."""
    from nibblas.kernels import kernels
    from nibblas.problem import Problem

    kernel = next(kernel for kernel in kernels() if kernel.name == "cpu_linear")
    scale, data = kernel.b_layouts[0]
    layouts = scale.name, data.name
    one = evidence.Measurement(
        kernel.name,
        kernel.digest,
        Problem("linear", 1, 256, 512, b_layouts=layouts),
        "a CPU",
        2,
        "2026-01-02T03:04:05+00:00",
        "nibblas bench",
        method="cold weights",
        samples=(3e-4, 2e-4, 4e-4),
        floor=1e-4,
        error=3e-7,
        hardened=True,
        beside={"torch bf16": 1e-3},
        config={"tile": 64},
        versions={"torch": "2"},
        facts={"host": "x"},
    )
    kept = evidence.Store(tmp_path / "shipped", tmp_path / "local")
    kept.add([one, replace(one, digest="0" * 64)])
    monkeypatch.setattr(evidence, "store", lambda: kept)
    return one


def test_own_kernels(store, measured):
    from nibblas.kernel import PACKAGE
    from nibblas.kernels import kernels

    report = add_own(store)
    assert report.added == len(kernels())
    assert report.skipped == [
        Skipped("1 measurement of cpu_linear", "of code with the digest 000000000000, not in the index")
    ]
    for kernel in kernels():
        found = store.item(f"nibblas-{kernel.name.replace('_', '-')}")
        assert found.contents == {source: (PACKAGE / source).read_bytes() for source in kernel.sources}
        assert [fact.arch for fact in found.facts] == list(kernel.archs)
        assert found.implementation.licence == found.implementation.source.terms == "Apache-2.0"
        assert found.implementation.operation.name == kernel.op
        written_in = {"cuda": "cuda", "cpu": "c"}.get(kernel.name.split("_")[0], "python")
        assert found.implementation.language == written_in
    assert add_own(store).unchanged == len(kernels())


def test_own_entry_points_are_there(store):
    add_own(store)
    for digest in store.digests():
        module, _, function = store.implementation(digest).entry_point.rpartition(".")
        assert callable(getattr(import_module(module), function))


def test_a_measurement_becomes_a_run(store, measured):
    add_own(store)
    (run,) = store.runs(store.implementation("nibblas-cpu-linear").digest)
    assert run == run_of(measured)
    assert run.workload.axes == {"L": 1, "M": 1, "N": 256, "K": 512}
    assert run.workload.name == "linear M=1 N=256 K=512 bf16 x nvfp4 -> bf16"
    assert run.config == {"tile": 64, "b_layouts": list(measured.problem.b_layouts)}
    (figure,) = run.figures
    assert (figure.value, figure.n) == (3e-4, 3)
    assert (run.samples, run.floor, run.error, run.hardened) == (measured.samples, 1e-4, 3e-7, True)
    compiled = run_of(replace(measured, samples=(), error=None))
    assert (compiled.status, compiled.figures) == ("compiled", ())
    assert (compiled.environment.device, compiled.environment.arch) == (None, measured.problem.arch)


def test_a_file_of_measurements(store, measured, tmp_path):
    path = write(tmp_path / "m.jsonl", f"{measured.to_json()}\nno measurement\n")
    report = add(store, [path])
    assert numbers(report) == (1, 0, 0, 0, 1)
    assert report.skipped[0].what == f"{path}:2"
    assert len(store.runs(store.implementation("nibblas-cpu-linear").digest)) == 1


def test_measurements_of_an_older_revision_stay_with_it(store, measured, tmp_path, monkeypatch):
    """The same kernel with another file, as after a change of its code."""
    from nibblas.index.ingest import evidence as importer
    from nibblas.kernels import kernels

    add_own(store)
    old = store.implementation("nibblas-cpu-linear")
    changed = [replace(k, sources=(*k.sources, "formats.py")) if k.name == "cpu_linear" else k for k in kernels()]
    monkeypatch.setattr("nibblas.kernels.kernels", lambda: tuple(changed))
    report = add_own(store)
    assert (report.revised, report.updated) == (1, 0)
    later = replace(measured, when="2026-05-05T00:00:00+00:00")
    assert numbers(add(store, [write(tmp_path / "m.jsonl", later.to_json())])) == (0, 0, 1, 0, 0)
    now = store.implementation("nibblas-cpu-linear")
    assert (now.revision, now.supersedes) == (2, old.digest)
    assert store.runs(now.digest) == ()
    assert store.runs(old.digest) == (importer.run_of(measured), importer.run_of(later))


def test_tensors_of_own_kernels(store):
    add_own(store)
    found = store.implementation("nibblas-cpu-linear").tensors
    assert [tensor.name for tensor in found] == ["a", "b", "c"]
    assert isinstance(found[0], Tensor)
    assert "nvfp4" in found[1].dtype


def test_what_can_not_be_stored_is_told(store, tmp_path, monkeypatch):
    def fail(self, item, scans):
        raise ValueError("no room")

    monkeypatch.setattr(Store, "add", fail)
    report = add(store, [write(tmp_path / "a.py", PYTHON)])
    assert report.skipped[0].why == "no room"
