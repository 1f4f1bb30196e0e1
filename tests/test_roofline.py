"""Device facts: where they come from, where they are kept, and what is made of damaged ones."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from nibblas import dispatch, roofline
from nibblas.problem import Problem
from nibblas.roofline import Roofline

CPU = torch.device("cpu")
LINE = Roofline("a CPU", "cpu", 1, 1e10, {"fp32": 1e11}, "measured")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path / "cache"))
    roofline.roofline.cache_clear()
    dispatch.forget()
    yield tmp_path / "cache"
    roofline.roofline.cache_clear()
    dispatch.forget()


@pytest.mark.parametrize("device", ["meta", "mps", "xpu"])
def test_a_device_that_nobody_described_has_kernels_with_costs(device):
    device = torch.device(device)
    assert roofline.threads_of(device) == 0
    problem = Problem("linear", 1, 512, 512, arch=device.type)
    assert dispatch.choose(problem, device).name == "torch_linear"
    assert roofline.roofline(device, 0).source == "assumed"


def test_evidence_of_a_cpu_is_not_another_devices():
    assert roofline.device_name(torch.device("meta")) == "meta"
    assert roofline.device_name(CPU) != "meta"


def test_what_was_kept_is_found_by_later_processes(cache):
    roofline.keep(LINE, CPU)
    roofline._kept.clear()
    roofline.roofline.cache_clear()
    assert roofline.roofline(CPU, 1) == LINE


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "3",
        json.dumps(asdict(LINE) | {"read_bandwidth": 0}),
        json.dumps(asdict(LINE) | {"read_bandwidth": float("nan")}),
        json.dumps(asdict(LINE) | {"rates": {"fp32": -1.0}}),
        json.dumps(asdict(LINE) | {"rates": {"bf16": 1e12}}),
        json.dumps(asdict(LINE) | {"rates": {"fp32": "fast"}}),
        json.dumps(asdict(LINE) | {"rates": [1]}),
    ],
)
def test_a_damaged_file_is_named_and_ignored(cache, capsys, content):
    path = roofline._path(CPU, 1)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert roofline.roofline(CPU, 1).source == "assumed"
    assert f"{path} ignored: " in capsys.readouterr().err
    path.unlink()
    path.mkdir()
    roofline.roofline.cache_clear()
    assert roofline.roofline(CPU, 1).source == "assumed"
    assert f"{path} ignored: " in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_a_warning(cache, capsys):
    cache.write_text("a file")
    with pytest.warns(UserWarning, match=r"nothing is kept in .*cache: .*NIBBLAS_CACHE"):
        roofline.keep(LINE, CPU)
    assert roofline.roofline(CPU, 1) == LINE
    assert roofline.roofline(CPU, 2) == replace(roofline.roofline(CPU, 2), source="assumed")
    assert capsys.readouterr().err == ""


def test_a_device_is_called_by_its_name(monkeypatch):
    for gpus, current, called in (
        (0, 0, {None: "cpu", "cpu": "cpu"}),
        (2, 1, {None: "cuda:0", "cpu": "cpu", "cuda": "cuda:1", "cuda:0": "cuda:0", "cuda:1": "cuda:1"}),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert {name: str(roofline.device_called(name)) for name in called} == called
    for name, told in (
        ("cuda:2", "device 'cuda:2' is not here; torch sees 2 GPUs"),
        ("cuda:", "device 'cuda:' is unknown"),
        ("xpu", "device 'xpu' is unknown; need cpu, cuda, or cuda:1"),
    ):
        with pytest.raises(ValueError, match=told):
            roofline.device_called(name)
