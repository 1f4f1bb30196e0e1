"""The command line: what it prints, its exit statuses, its errors."""

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import nibblas
from nibblas import cli, dispatch, evidence, roofline, storage, terminal
from nibblas.bench import doctor, operands, probe, sweep
from nibblas.kernels import kernels
from nibblas.problem import OPS

COMMANDS = ["doctor", "report", "quantize", "inspect", "explain", "bench", "tune"]
LINE = roofline.Roofline("a CPU", "cpu", 1, 1e10, {"fp32": 1e11, "bf16": 2e11}, "measured")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, with this machine's roofline in it."""
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)
    forget = (evidence.store.cache_clear, roofline.roofline.cache_clear, dispatch.forget)
    for each in forget:
        each()
    yield
    for each in forget:
        each()


@pytest.fixture
def run(capsys):
    """Run a command line in this process: (status, stdout, stderr)."""

    def run(*arguments) -> tuple[int, str, str]:
        status = cli.run([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def model(tmp_path):
    """A small checkpoint of bf16 weights."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "model.safetensors"
    weights = {f"layers.{i}.up.weight": torch.randn(32, 64, generator=generator).bfloat16() for i in range(3)}
    save_file({**weights, "norm.weight": torch.ones(64), "embed.weight": torch.ones(8, 64)}, path)
    return path


def process(*arguments, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "nibblas.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


# --- the frame -----------------------------------------------------------------------------------------------------


def test_help_lists_every_command():
    done = CliRunner().invoke(cli.app, ["--help"])
    assert done.exit_code == 0
    assert [name for name in COMMANDS if f" {name} " not in done.output] == []
    assert {command.callback.__name__ for command in cli.app.registered_commands} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example_that_fits(command):
    done = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"nibblas {command}" in done.output.split("Example")[1]
    assert max(map(len, done.output.splitlines())) <= 80


def test_no_arguments_print_the_help():
    done = CliRunner().invoke(cli.app, [])
    assert "Usage" in done.output


def test_version(run):
    assert run("--version") == (0, f"nibblas {nibblas.__version__}\n", "")


def test_nothing_heavy_is_imported_before_a_command_runs():
    modules = "arena.commands arena.record index.commands paths terminal words"
    light = {f"nibblas.{name}" for name in modules.split()}  # held to it too
    package = Path(cli.__file__).parent
    for path in (Path(cli.__file__), *(package.parent / f"{name.replace('.', '/')}.py" for name in sorted(light))):
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {getattr(node, "module", None) or node.names[0].name for node in top} - light
        assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "typer", "rich"}, path


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["--nonsense"],
        ["quantize", "only-one"],
        ["quantize", "a", "b", "--format", "fp8"],
        ["explain", "convolution"],
        ["explain", "linear", "1x4096"],
        ["explain", "linear", "1x0x16"],
        ["explain", "linear", "--M", "0"],
        ["explain", "linear", "--a", "int8"],
        ["explain", "linear", "--out", "nvfp4"],
        ["explain", "linear", "--G", "4"],
        ["explain", "gated_linear", "--G", "4"],
        ["explain", "grouped_linear", "--L", "2"],
        ["explain", "gated_linear", "--L", "2"],
        ["explain", "linear", "--rule", "absmax"],
        ["explain", "quantize", "--rule", "even"],
        ["explain", "quantize", "--bias"],
        ["explain", "quantize", "--N", "64"],
        ["explain", "quantize", "1x64x64"],
        ["explain", "gated_linear", "--batch-invariant"],
        ["explain", "linear", "1x64x64", "--M", "4"],
        ["explain", "quantize", "--batch-invariant"],
        ["explain", "quantize", "--out", "bf16"],
        ["explain", "linear", "1x64x64", "--M", "1"],
        ["explain", "quantize", "--N", "4096"],
        ["bench", "--formats", "nvfp4,fp8"],
        ["bench", "--shapes", "64"],
        ["bench", "--M", "1,x"],
        ["bench", "--M", ""],
        ["bench", "--shapes", ","],
        ["bench", "--formats", ""],
        ["tune", ""],
        ["tune", "64x64", "--M", ""],
        ["tune", "64x64", "--formats", " "],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(run, arguments):
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    assert "Error" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "gated_linear", "--L", "1", "--G", "1"], "gated_linear has no --L, --G"),
        (["explain", "linear", "1x64x64", "--K", "64"], "sizes are given twice, as 1x64x64 and by --K"),
        (["bench", "--op", "quantize", "--M", "1,4"], "quantize has no --M"),
        (["bench", "--op", "quantize", "--random", "3"], "quantize has no --random"),
        (["bench", "--op", "gated_linear", "--peers", "humming"], "gated_linear has no --peers"),
        (["bench", "--random", "3", "--M", "4"], "--random takes the place of --M"),
        (["bench", "--dependent-launch"], "cpu has no --dependent-launch"),
        (["tune", "64x64", "--G", "8"], "linear has no --G"),
        (["tune", "64x64", "--op", "grouped_linear", "--L", "2"], "grouped_linear has no --L"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_apply_are_refused(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize("command", [["explain"], ["bench"], ["tune", "64x64"], ["report"]], ids=" ".join)
def test_a_gpu_has_no_threads(run, monkeypatch, command):
    monkeypatch.setattr(roofline, "device_called", lambda name: torch.device("cuda", 0))
    status, _, err = run(*command, "--device", "cuda", "--threads", "2")
    assert status == 2
    assert "cuda:0 has no --threads" in err


@pytest.mark.parametrize("formats", [("mxfp4", "nvfp4"), ("nvfp4", "mxfp4")], ids="-".join)
def test_explain_needs_whole_blocks_of_both_operands(run, formats):
    status, _, err = run("explain", "linear", "1x64x16", "--a", formats[0], "--b", formats[1])
    assert status == 1
    assert "explain: K = 16 is not a multiple of mxfp4's block_size 32" in err


def test_an_unknown_kernel_is_answered_with_the_known_ones(run):
    status, _, err = run("bench", "--kernels", "no_such_kernel,torch_linear")
    assert status == 1
    assert "error: bench: no linear kernel is called no_such_kernel; there are " in err
    assert "torch_linear" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "absent.safetensors"], "absent.safetensors: No such file or directory"),
        (["inspect", "text"], "text: not a safetensors file"),
        (["quantize", "text", "out"], "text: not a safetensors file"),
        (["quantize", "absent", "out"], "absent: No such file or directory"),
        (
            ["quantize", "model.safetensors", "out", "--scale-rule", "best"],
            "scale_rule 'best' is unknown; nvfp4 has absmax",
        ),
        (["quantize", "model.safetensors", "out", "--rotation", "17"], "rotation is 17, need 0 or one of 16, 32"),
        (["quantize", "model.safetensors", "out", "--include", "*norm*"], "nothing to quantize"),
        (["quantize", "model.safetensors", "out", "--exclude", "nothing"], "exclude pattern 'nothing' matches none of"),
        (["quantize", "model.safetensors", "model.safetensors"], "is the source"),
        (["explain", "linear", "1x64x40", "--b", "mxfp4"], "K = 40 is not a multiple of mxfp4's block_size 32"),
        (["bench", "--shapes", "64x40"], "K = 40 is not a multiple"),
        (["bench", "--activations", "int8"], "bench: activations 'int8' are unknown"),
        (["tune", "64x64", "--activations", "int8"], "tune: activations 'int8' are unknown"),
        (["tune", "64x40"], "tune: K = 40 is not a multiple"),
        (["report", "absent"], "absent"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_one_line_and_status_1(run, model, monkeypatch, arguments, message):
    monkeypatch.chdir(model.parent)
    Path("text").write_text("this is no tensor file")
    status, out, err = run(*arguments)
    assert status == 1
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not list(model.parent.glob("out*"))


@pytest.mark.parametrize(
    "command",
    [
        ["explain", "linear"],
        ["bench"],
        ["tune", "64x64"],
        ["report"],
        ["arena", "run", "problem", "submission.py"],
        ["arena", "lint", "problem"],
    ],
    ids=" ".join,
)
def test_every_command_tells_of_a_device_in_the_same_words(run, command):
    doctor = "(`nibblas doctor` tells what there is)"
    gpus = torch.cuda.device_count()
    sees = f"torch sees {gpus or 'no'} GPU{'s' if gpus > 1 else ''}"
    unknown = "error: device {!r} is unknown; need cpu, cuda, or cuda:1 ...\n".format
    for name, told in (
        ("abacus", unknown("abacus")),
        ("meta", unknown("meta")),
        ("cuda:x", unknown("cuda:x")),
        ("cuda:99", f"error: device 'cuda:99' is not here; {sees} {doctor}\n"),
    ):
        assert run(*command, "--device", name) == (1, "", told)


@pytest.mark.parametrize("arguments", [["--debug", "inspect", "absent"], ["inspect", "absent", "--debug"]])
def test_debug_shows_the_traceback(arguments):
    with pytest.raises(FileNotFoundError):
        cli.run(arguments)
    done = process(*arguments)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "FileNotFoundError" in done.stderr


def test_a_fault_of_our_own_is_called_one(run, monkeypatch):
    def broken(path):
        raise KeyError("oops")

    monkeypatch.setattr("nibblas.checkpoint.inspect.inspect_file", broken)
    assert run("inspect", "file") == (1, "", "error: KeyError: 'oops' (a fault of nibblas: --debug shows where)\n")


def test_python_m_nibblas():
    done = subprocess.run([sys.executable, "-m", "nibblas", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nibblas {nibblas.__version__}\n", "")


def test_a_process_of_its_own(model, tmp_path):
    """Statuses and streams as a shell sees them; pipes get neither colours nor a progress bar."""
    out = tmp_path / "out.safetensors"
    done = process("quantize", model, out, "--json", FORCE_COLOR="")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["format"] == "nvfp4"
    done = process("inspect", model.parent / "absent")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .*absent: No such file or directory\n", done.stderr)
    assert process("quantize", model).returncode == 2


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_is_status_130(tmp_path):
    source, fifo = tmp_path / "source", tmp_path / "source" / "model.safetensors"
    source.mkdir()
    os.mkfifo(fifo)  # whoever opens it waits until somebody writes
    running = subprocess.Popen(
        [sys.executable, "-m", "nibblas.cli", "inspect", fifo],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, SIGINT comes to them ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline, writer = time.monotonic() + 60, None
    while writer is None and time.monotonic() < deadline:
        try:
            writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            time.sleep(0.05)
    assert writer is not None
    ended = False
    while not ended and time.monotonic() < deadline:
        # A signal that comes just before the read blocks is only seen at the next one.
        running.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = running.communicate(timeout=5)
            ended = True
    os.close(writer)
    assert ended
    assert running.returncode == 130
    assert "Traceback" not in err
    assert out == ""


def test_a_reader_that_stops_early_is_no_error(tmp_path):
    big = {f"layers.{i}.some_long_name_of_a_tensor.weight": torch.ones(2, 16) for i in range(2000)}
    w = nibblas.quantize(torch.ones(2, 16), "nvfp4")
    storage.save(tmp_path / "big.safetensors", dict.fromkeys(big, w))
    command = f"{sys.executable} -m nibblas.cli inspect {tmp_path / 'big.safetensors'} --json | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "{\n"
    assert done.stderr == ""


# --- quantize and inspect ------------------------------------------------------------------------------------------


def test_quantize_then_inspect(run, model, tmp_path):
    out = tmp_path / "out.safetensors"
    status, text, err = run("quantize", model, out, "--format", "MXFP4", "--exclude", "layers.0.*")
    assert (status, err) == (0, "")
    assert "mxfp4, scale rule even" in text
    assert "2 tensors quantized, 3 copied" in text
    assert "excluded by .*embed*: embed.weight" in text
    assert "excluded by layers.0.*: layers.0.up.weight" in text
    loaded = storage.load(out)
    assert loaded["layers.1.up.weight"].format is nibblas.MXFP4
    assert not isinstance(loaded["embed.weight"], nibblas.ScaledTensor)
    status, text, err = run("inspect", out)
    assert (status, err) == (0, "")
    assert "2 FP4 tensors, stored as by nibblas" in text
    assert re.search(r"layers\.1\.up\.weight +mxfp4 +32x64", text)
    assert max(map(len, text.splitlines())) <= cli.MAX_WIDTH or str(out) in text


def test_quantize_without_the_default_exclude(run, model, tmp_path):
    _, text, _ = run("quantize", model, tmp_path / "out", "--no-default-exclude", "--exclude", "layers.*", "--json")
    assert [tensor["name"] for tensor in json.loads(text)["quantized"]] == ["embed.weight"]


def test_quantize_says_whose_error_it_tells(run, tmp_path):
    src, out = tmp_path / "src", tmp_path / "out"
    src.mkdir()
    for i in (1, 2):
        save_file({f"layers.{i}.up.weight": torch.randn(32, 64)}, src / f"{i}.safetensors")
    weight_map = {f"layers.{i}.up.weight": f"{i}.safetensors" for i in (1, 2)}
    (src / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _, text, _ = run("quantize", src, out)
    assert "written now" not in text
    (out / "2.safetensors").unlink()
    _, text, _ = run("quantize", src, out)
    assert "relative squared error of the 1 written now 0.0" in text
    assert "finished by an earlier run: 1.safetensors" in text


def test_quantize_json_has_everything(run, model, tmp_path):
    arguments = ["quantize", model, tmp_path / "out", "--scale-rule", "search", "--rotation", "16", "--json"]
    status, text, _ = run(*arguments, "--include", "layers.0.*", "--include", "layers.1.*")
    found = json.loads(text)
    assert status == 0
    assert (found["format"], found["scale_rule"], found["rotation"]) == ("nvfp4", "search", 16)
    assert [t["name"] for t in found["quantized"]] == ["layers.0.up.weight", "layers.1.up.weight"]
    assert all(0 < t["relative_mse"] < 0.02 for t in found["quantized"])
    assert "layers.2.up.weight" in [t["name"] for t in found["skipped"]]


def test_quantize_tells_of_nan(run, model, tmp_path):
    tensors = load_file(model)
    tensors["layers.1.up.weight"][2, 3], tensors["layers.1.up.weight"][5, 40] = torch.nan, torch.inf
    save_file(tensors, model)
    status, text, err = run("quantize", model, tmp_path / "out", "--overwrite")
    assert status == 0
    assert err == "warning: layers.1.up.weight: 2 blocks held NaN or Inf and became NaN (--strict refuses)\n"
    assert "nan" not in text.replace(str(tmp_path), "")
    status, text, err = run("quantize", model, tmp_path / "out", "--overwrite", "--json")
    assert status == 0
    assert "2 blocks" in err
    rows = {row["name"]: row for row in json.loads(text, parse_constant=pytest.fail)["quantized"]}
    assert (rows["layers.1.up.weight"]["bad_blocks"], rows["layers.1.up.weight"]["relative_mse"]) == (2, None)
    assert rows["layers.0.up.weight"]["bad_blocks"] == 0
    status, text, err = run("quantize", model, tmp_path / "strict", "--strict")
    assert (status, text) == (1, "")
    assert "layers.1.up.weight holds NaN or Inf" in err
    assert not (tmp_path / "strict").exists()


def test_json_is_json(capsys):
    terminal.print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": -float("inf")}})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": ["nan", ["inf", 1.5]], "b": {"c": "-inf"}}


def test_quantize_asks_before_it_replaces(run, model, tmp_path):
    out = tmp_path / "out.safetensors"
    assert run("quantize", model, out)[0] == 0
    before = out.read_bytes()
    status, _, err = run("quantize", model, out, "--format", "mxfp4")
    assert status == 1
    assert "overwrite" in err
    assert out.read_bytes() == before
    assert run("quantize", model, out, "--format", "mxfp4", "--overwrite")[0] == 0
    assert out.read_bytes() != before


def test_inspect_warns_and_is_data(run, tmp_path):
    w = nibblas.quantize(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), "nvfp4")
    w.scale[1, 1] = 0x7F
    path = tmp_path / "bad[red].safetensors"  # brackets are no markup
    storage.save(path, {"a[0].weight": w, "plain": torch.ones(3)})
    status, text, _ = run("inspect", path)
    assert status == 0
    assert "1 of 8 scales are NaN" in text
    assert "1 FP4 tensor, stored as by nibblas" in text
    assert "a[0].weight (!)" in text
    assert "bad[red].safetensors" in text
    assert "1 other tensor of F32" in text
    status, text, _ = run("inspect", path, "--json")
    found = json.loads(text)
    assert found["tensors"][0]["scale"]["nans"] == 1
    assert found["tensors"][0]["warnings"] == ["1 of 8 scales are NaN"]


# --- explain, bench, doctor ----------------------------------------------------------------------------------------


@pytest.fixture
def measured():
    """This machine's roofline, as if `nibblas doctor` had run on one thread."""
    line = replace(LINE, device=roofline.device_name(doctor.CPU))
    roofline.keep(line, doctor.CPU)
    return line


@pytest.mark.parametrize("op", OPS)
def test_explain(run, measured, op):
    arguments = ["explain", op, "8x2048" if op == "quantize" else "8x1024x2048", "--threads", "1"]
    status, text, err = run(*arguments)
    assert (status, err) == (0, "")
    assert f"{op} M=8 {'' if op == 'quantize' else 'N=1024 '}K=2048 " in text
    assert "floor " in text
    assert "(bandwidth and rates measured)" in text
    of_op = [kernel.name for kernel in kernels() if kernel.op == op]
    assert all(name in text for name in of_op)
    assert len(re.findall("^ *> ", text, re.MULTILINE)) == 1
    assert max(map(len, text.splitlines())) <= cli.MAX_WIDTH
    status, text, _ = run(*arguments, "--json")
    found = json.loads(text)
    assert {row["kernel"] for row in found["kernels"]} == set(of_op)
    problem = nibblas.problem.Problem.from_dict(found["problem"])
    assert found["floor"] == pytest.approx(measured.floor(problem))
    times = [row["seconds"] for row in found["kernels"] if row["why_not"] is None]
    assert times == sorted(times)


def test_explain_takes_sizes_and_dtypes_as_options(run):
    status, text, _ = run(
        *(
            "explain",
            "grouped_linear",
            "--M",
            "5",
            "--N",
            "48",
            "--K",
            "64",
            "--G",
            "3",
            "--a",
            "MXFP4",
            "--b",
            "mxfp4",
        ),
        *("--out", "fp32", "--bias", "--json"),
    )
    assert status == 0
    assert json.loads(text)["problem"] == {
        **{"op": "grouped_linear", "M": 5, "N": 48, "K": 64, "G": 3, "a": "mxfp4", "b": "mxfp4", "out": "fp32"},
        "bias": True,
    }


def test_explain_without_a_measured_device(run, measured):
    status, text, _ = run("explain", "--threads", "3")
    assert status == 0
    assert "floor unknown: `nibblas doctor --threads 3` measures" in text
    assert "%" not in text


def test_explain_says_why_a_kernel_cannot(run, monkeypatch):
    some = next(kernel for kernel in kernels() if kernel.op == "linear")
    gpu_only = replace(some, name="gpu_only", archs=("sm_90",))
    monkeypatch.setattr(dispatch, "kernels", lambda: (gpu_only,))
    status, text, _ = run("explain")
    assert status == 1
    assert "can't: runs on sm_90, this is cpu" in text
    assert "no kernel can run this" in text
    status, text, _ = run("explain", "--json")
    assert status == 1
    assert [row["seconds"] for row in json.loads(text)["kernels"]] == [None]


@pytest.fixture
def quick(monkeypatch, measured):
    monkeypatch.setattr(probe, "measure", lambda device, threads=None, again=False: measured)
    monkeypatch.setattr(sweep, "cold_bytes", lambda device: 1 << 16)


BENCH = ["bench", "--shapes", "64x128", "--M", "1,2", "--formats", "nvfp4", "--rounds", "5", "--threads", "1"]


def test_bench_prints_and_keeps_its_evidence(run, quick):
    status, text, err = run(*BENCH)
    assert (status, err) == (0, "")
    assert "torch bf16" in text
    assert "torch_linear" in text
    assert "of the best kernel" in text.replace("\n", " ")
    store = evidence.Store(Path("absent"), nibblas.paths.cache_dir() / "evidence")
    assert {m.problem.M for m in store.all()} == {1, 2}
    assert all(m.command.startswith("nibblas bench --shapes 64x128 --M") for m in store.all())
    assert run("explain", "linear", "1x64x128", "--threads", "1")[1].count("measured 20") >= 1


def test_bench_of_a_mixture_of_experts(run, quick):
    status, text, err = run(*BENCH, "--op", "grouped_linear", "--G", "3")
    assert (status, err) == (0, "")
    assert "grouped_linear: nvfp4 weights, N = 64, K = 128, G = 3" in text
    assert "composite_grouped_linear" in text
    store = evidence.Store(Path("absent"), nibblas.paths.cache_dir() / "evidence")
    assert {(m.problem.op, m.problem.G) for m in store.all()} == {("grouped_linear", 3)}
    status, _, err = run(*BENCH, "--L", "2", "--peers", "humming")
    assert status == 1
    assert "humming can be timed beside linear with L = 1 only" in err


def test_a_cache_that_cannot_be_written_is_a_warning(run, quick, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path / "file"))
    evidence.store.cache_clear()
    with pytest.warns(UserWarning, match="nothing is kept in .*file: Not a directory"):
        status, text, err = run(*BENCH)
    assert (status, err) == (0, "")
    assert "torch_linear" in text
    assert "measurements added" not in text
    # What was measured serves this process all the same.
    assert "measured 20" in run("explain", "linear", "1x64x128", "--threads", "1")[1]


def test_tune_keeps_evidence_and_tells_what_it_changed(run, quick):
    status, text, err = run("tune", "64x128", "--M", "1,2", "--formats", "nvfp4", "--seconds", "1", "--threads", "1")
    assert (status, err) == (0, "")
    assert "linear M=1 N=64 K=128 bf16 x nvfp4" in text
    assert "kept" in text or "instead of" in text
    store = evidence.Store(Path("absent"), nibblas.paths.cache_dir() / "evidence")
    assert {m.problem.M for m in store.all()} == {1, 2}


def test_tune_of_a_mixture_of_experts(run, quick):
    sizes = ["64x128", "--op", "grouped_linear", "--G", "3", "--M", "4", "--formats", "nvfp4"]
    status, text, err = run("tune", *sizes, "--seconds", "1", "--threads", "1")
    assert (status, err) == (0, "")
    assert "grouped_linear M=4 N=64 K=128 G=3 bf16 x nvfp4" in text


def test_bench_writes_elsewhere_and_json(run, quick, tmp_path):
    output = tmp_path / "new" / "measured.jsonl"
    status, text, _ = run(*BENCH, "--kernels", "torch_linear", "--output", output, "--json")
    assert status == 0
    found = json.loads(text)
    assert [result["problem"]["M"] for result in found] == [1, 2]
    assert {row["name"] for row in found[0]["timed"]} == {"torch_linear", "torch bf16", "torch fp32"}
    assert len(evidence.read(output)) == 2
    assert not (nibblas.paths.cache_dir() / "evidence").exists()


def test_bench_that_is_stopped_keeps_what_it_wrote(run, quick, monkeypatch, tmp_path):
    result = sweep._Run.result

    def stopped_at_two_rows(self, *arguments):
        if self.M == 2:
            raise KeyboardInterrupt
        return result(self, *arguments)

    monkeypatch.setattr(sweep._Run, "result", stopped_at_two_rows)
    output = tmp_path / "measured.jsonl"
    status, _, _ = run(*BENCH, "--kernels", "torch_linear", "--output", output)
    assert status != 0
    assert [m.problem.M for m in evidence.read(output)] == [1]


@pytest.mark.parametrize("command", ["bench --shapes", "tune"])
def test_what_was_measured_is_stored_when_stopped(run, quick, monkeypatch, command):
    result = sweep._Run.result

    def stopped_at_two_rows(self, *arguments):
        if self.M == 2:
            raise KeyboardInterrupt
        return result(self, *arguments)

    monkeypatch.setattr(sweep._Run, "result", stopped_at_two_rows)
    options = ["64x128", "--M", "1,2", "--formats", "nvfp4", "--seconds", "1", "--threads", "1"]
    assert run(*command.split(), *options)[0] == 130
    store = evidence.Store(Path("absent"), nibblas.paths.cache_dir() / "evidence")
    assert {m.problem.M for m in store.all()} == {1}


def test_bench_of_no_kernel_that_runs_here_fails(run, quick):
    status, text, err = run(*BENCH, "--kernels", "triton_linear")
    assert status == 1
    assert "added" not in text
    assert re.fullmatch(r"error: no kernel was timed: triton_linear: runs on .*, this is cpu\n", err)
    assert not (nibblas.paths.cache_dir() / "evidence").exists()


def test_bench_tells_that_a_cpu_has_no_cublas(run, quick):
    status, text, _ = run(*BENCH, "--kernels", "torch_linear", "--peers", "cublas")
    assert status == 0
    assert "cublas: needs a GPU, this is cpu" in text


def test_bench_fails_on_a_wrong_kernel(run, quick, monkeypatch):
    monkeypatch.setattr(operands, "compare", lambda *_: (1.0, "all elements are wrong"))
    status, text, _ = run(*BENCH)
    assert status == 1
    assert "not timed at M = 1: torch_linear: all elements are wrong" in text.replace("\n", " ")


def test_doctor(run, quick, monkeypatch):
    evidence.append(
        nibblas.paths.cache_dir() / "evidence" / "old.jsonl",
        [evidence.Measurement("gone", "", nibblas.problem.Problem("linear", 1, 1, 16), "", 1, "", "")],
    )
    with (nibblas.paths.cache_dir() / "evidence" / "old.jsonl").open("a") as file:
        file.write("torn\n")
    status, text, err = run("doctor", "--threads", "1")
    assert status == 0
    assert re.fullmatch(r"nibblas: .*old\.jsonl:2 ignored: .*\n", err)
    for kernel in kernels():
        assert kernel.name in text
    assert "reads 10.0 GB/s" in text
    assert torch.__version__ in text
    assert "1 measurement in 1 file, 1 of them stale" in text
    assert "tier" in text or "no CPU library" in text
    status, text, _ = run("doctor", "--json")
    found = json.loads(text)
    assert found["versions"]["nibblas"] == nibblas.__version__
    assert {row["name"] for row in found["kernels"]} >= {kernel.name for kernel in kernels()}
    assert found["devices"][0]["rates"] == LINE.rates


@pytest.mark.parametrize("kernel", kernels(), ids=str)
def test_a_typical_problem_is_refused_only_for_the_machine(kernel):
    """What doctor asks a kernel fits the kernel in all but the device."""
    arch = kernel.archs[0] if kernel.archs else "cpu"
    for problem in doctor.typical_problems(kernel, arch):
        assert replace(kernel, also=None).why_not(problem) is None
