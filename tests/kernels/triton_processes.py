"""Triton in processes of its own: its interpreter, and each version that is here as a compiler."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OTHER = "NIBBLAS_TRITON_DIR"  # names a folder with another triton
VERSIONS = ("installed", OTHER)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def interpreted(script: str) -> str:
    """What a script of triton_interpreter/ prints; it fails where the script does."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(HERE / "triton_interpreter" / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def compiled(version: str, script: str, *arguments: str) -> list[dict]:
    """Facts of machine code that a script prints, a JSON object a line, by one of VERSIONS; skips without that one."""
    environment = dict(os.environ)
    if version == OTHER:
        if OTHER not in os.environ:
            pytest.skip(f"{OTHER} names no folder with another triton")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ[OTHER], os.environ.get("PYTHONPATH"))))
    elif find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
