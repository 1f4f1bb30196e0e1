"""Every kernel that is made for this GPU under compute-sanitizer, at small sizes (every_launch.py)."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "every_launch.py"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="no NVIDIA GPU"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed"),
]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Kernels are compiled before tools watch, or each tool would wait for the compilers."""
    subprocess.run([sys.executable, PROGRAM], check=True)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_no_errors(tool):
    command = ["compute-sanitizer", "--tool", tool, sys.executable, PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    told = done.stdout + done.stderr
    assert done.returncode == 0, told[-3000:]
    assert re.search(r"SUMMARY: (?:0 errors|\d+ hazards? displayed \(0 errors)", told), told[:3000]
