"""Every kernel that is made for this GPU under compute-sanitizer, at small sizes (every_launch.py)."""

import os
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


SHARES = max(1, (os.cpu_count() or 1) // 2)


def launch_all(*tool: str, without: str = "") -> list[str]:
    """What the processes wrote that made all launches, each its share, in the tool; none may fail."""
    commands = [[*tool, sys.executable, str(PROGRAM), str(share), str(SHARES), without] for share in range(SHARES)]
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    processes = [subprocess.Popen(command, **merged) for command in commands]
    told = [process.communicate()[0] for process in processes]
    for process, text in zip(processes, told, strict=True):
        assert process.returncode == 0, text[-3000:]
    return told


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Kernels are compiled before tools watch, or each tool would wait for the compilers."""
    launch_all()


# initcheck takes all of some products that cuBLAS wrote for memory that nobody wrote, so that it says nothing of those.
@pytest.mark.parametrize(
    ("tool", "without"), [("memcheck", ""), ("racecheck", ""), ("synccheck", ""), ("initcheck", "decoded")]
)
def test_no_errors(tool, without):
    for told in launch_all("compute-sanitizer", "--tool", tool, without=without):
        assert re.search(r"SUMMARY: (?:0 errors|\d+ hazards? displayed \(0 errors)", told), told[:3000]
