"""How the CPU library is found, built and refused. Each test runs fresh processes with a cache of their own."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nibblas.kernels import cpu_library

SHOW = """
from nibblas.kernels import cpu_library
print(cpu_library.status())
print(cpu_library.TIERS[cpu_library.tier()])
"""

needs_compiler = pytest.mark.skipif(cpu_library.find_compiler() is None, reason="no C compiler here")
needs_library = pytest.mark.skipif(cpu_library.library() is None, reason=str(cpu_library.status()))


def start(cache: Path, code: str = SHOW, **environment: str) -> subprocess.Popen:
    own = {k: v for k, v in os.environ.items() if k not in ("NIBBLAS_CACHE", "NIBBLAS_CC", "CC", "NIBBLAS_CPU_TIER")}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**own, "XDG_CACHE_HOME": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()


@pytest.fixture
def hasty(tmp_path) -> str:
    """A compiler that doesn't optimize, for tests that only look at what becomes of the library."""
    command = tmp_path / "hasty"
    compiler = shlex.join(cpu_library.find_compiler())
    command.write_text(
        "#!/bin/sh\n"
        'for flag; do shift; [ "$flag" = -O3 ] && flag=-O0; set -- "$@" "$flag"; done\n'
        f'exec {compiler} "$@"\n'
    )
    command.chmod(0o755)
    return str(command)


@needs_compiler
def test_four_processes_build_at_once_later_ones_find_it_and_mend_it(tmp_path, hasty):
    processes = [start(tmp_path, NIBBLAS_CC=hasty) for _ in range(4)]
    for process in processes:
        status, tier = lines(process)
        assert "compiled" in status
        assert tier in cpu_library.TIERS
    (built,) = (tmp_path / "nibblas" / "cpu").iterdir()
    before = built.stat()
    status, _ = lines(start(tmp_path, NIBBLAS_CC=hasty))
    assert f"{built} (compiled before)" in status
    assert built.stat().st_mtime_ns == before.st_mtime_ns
    built.write_bytes(b"not a library")
    status, _ = lines(start(tmp_path, NIBBLAS_CC=hasty))
    assert "compiled now" in status


@needs_compiler
def test_a_cache_that_cannot_be_written_costs_a_compilation(tmp_path, hasty):
    (tmp_path / "nibblas").write_text("a file")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    status, tier = lines(start(tmp_path, TMPDIR=str(temporary), NIBBLAS_CC=hasty))
    assert "compiled for this process, as the cache can't be used: " in status
    assert tier == cpu_library.TIERS[cpu_library.tier()]
    assert not list(temporary.iterdir())


def test_an_empty_NIBBLAS_CC_forbids_compiling(tmp_path):
    status, tier = lines(start(tmp_path, NIBBLAS_CC=""))
    assert status == "no CPU library: no C compiler: '' named"
    assert tier == "portable"
    assert not (tmp_path / "nibblas").exists()


def test_a_compiler_that_fails_or_is_missing_is_a_reason(tmp_path):
    failing, missing = start(tmp_path, NIBBLAS_CC="false"), start(tmp_path, CC="no-such-compiler")
    assert "no CPU library: false failed: status 1" in lines(failing)[0]
    assert "'no-such-compiler' named" in lines(missing)[0]


def test_kernels_say_why_they_cannot_run(tmp_path):
    code = """
import torch
from nibblas.formats import NVFP4
from nibblas.kernels import cpu_linear, cpu_quantize
from nibblas.problem import Problem
print(cpu_linear.KERNELS[0].why_not(Problem("linear", 1, 16, 32)))
print(cpu_quantize.KERNELS[0].why_not(Problem("quantize", 1, 0, 32, out="nvfp4")))
try:
    cpu_quantize.quantize(torch.ones(1, 16), NVFP4, "absmax", None)
except RuntimeError as error:
    print(error)
"""
    for line in lines(start(tmp_path, code, NIBBLAS_CC="")):
        assert "no C compiler" in line


@needs_library
def test_a_prebuilt_library_is_taken_only_if_made_of_these_sources(tmp_path):
    good, stale = tmp_path / "good.so", tmp_path / "stale.so"
    good.write_bytes(cpu_library.status().path.read_bytes())
    stale.write_bytes(good.read_bytes().replace(cpu_library.source_digest().encode(), b"0" * 64))
    code = """
from pathlib import Path
from nibblas.kernels import cpu_library
cpu_library.PREBUILT = Path({!r})
print(cpu_library.status())
"""
    (found,) = lines(start(tmp_path, code.format(str(good)), NIBBLAS_CC=""))
    assert "built with the package" in found
    (refused,) = lines(start(tmp_path, code.format(str(stale)), NIBBLAS_CC=""))
    assert "stale.so was made of other sources" in refused


@needs_library
def test_probes_measure_something():
    rates = cpu_library.probe_rates(1)
    assert rates["fp32"] > 1e8
    assert cpu_library.probe_bandwidth(1) > 1e8
