"""Whether CUDA source compiles for an architecture, and what its machine code says of the techniques found in it.

Compiling runs no code of the source. Triton, CuTe DSL and the like are compiled only by running the Python around them,
which the index never does: what is known of those comes from the arena.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from nibblas.index.model import CompatFact
from nibblas.index.parse import read
from nibblas.index.rule import techniques
from nibblas.index.techniques import TechniqueFinding

TIMEOUT = 300  # seconds
# What a disassembler prints before an instruction: its address, a predicate.
_INSTRUCTION = re.compile(
    r"^\s*(?:/\*[0-9a-f]{4,}\*/)\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*(?:\.[\w:]+)*)"
)
_ERROR = re.compile(r"error|fatal", re.IGNORECASE)


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of a source for an architecture, or why it made nothing.

    lines : first and last line of the part of the file that it was given; None for all of it.
    """

    arch: str
    compiler: str
    cubin: bytes | None
    problem: str | None = None
    lines: tuple[int, int] | None = None

    def fact(self, path: str) -> CompatFact | None:
        """That it was compiled; None where it wasn't, which says as much of this machine as of the source."""
        if self.cubin is None:
            return None
        part = f", lines {self.lines[0]} to {self.lines[1]}" if self.lines else ""
        return CompatFact("compiled", arch=self.arch, reason=self.compiler + part, path=path)

    def holds(self, finding: TechniqueFinding) -> bool:
        """Whether the finding stands in what was compiled: machine code says nothing of the rest."""
        return self.lines is None or self.lines[0] <= finding.line <= self.lines[1]


@dataclass(frozen=True)
class Confirmation:
    """What the machine code says of a finding: the instruction that confirms it, or that none is there."""

    finding: TechniqueFinding
    state: Literal["confirmed", "refuted", "open"]
    opcode: str | None = None


@cache
def compiler() -> str | None:
    """The name and version of the compiler that is at hand, "nvcc 13.0"; None without one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    release = re.search(r"release ([\d.]+)", said.stdout)
    return f"nvcc {release[1]}" if release else None


def compiled(path: str, text: str, arch: str) -> Compiled:
    """Compile the device code of a file, CUDA itself or in Python's strings, for an arch such as "sm_90a".

    Of several strings it is the longest. RuntimeError where no compiler is at hand, ValueError where the file holds no
    CUDA.
    """
    name = compiler()
    if name is None:
        raise RuntimeError("compiling needs nvcc on the path, which isn't there")
    read_source = read(path, text)
    regions = [region for region in read_source.regions if region.language == "cuda"]
    if not regions:
        raise ValueError(f"{path}: no CUDA was found to compile")
    longest = max(regions, key=lambda region: len(region.text))
    first, last = (read_source.lines.position(at)[0] for at in (longest.start, longest.end))
    lines = (first, last) if len(regions) > 1 else None
    with tempfile.TemporaryDirectory(prefix="nibblas-") as folder:
        source, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        source.write_text(longest.text, encoding="utf-8")
        command = [
            "nvcc",
            f"-arch={arch}",
            "-std=c++17",
            "-cubin",
            "-w",
            *_includes(longest.text),
            "-o",
            str(cubin),
            str(source),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=folder)
        except subprocess.TimeoutExpired:
            return Compiled(arch, name, None, f"not done after {TIMEOUT} seconds")
        if done.returncode:
            said = done.stderr.replace(f"{folder}/", "").splitlines()
            return Compiled(arch, name, None, next((line for line in said if _ERROR.search(line)), "failed"))
        return Compiled(arch, name, cubin.read_bytes(), lines=lines)


def _includes(text: str) -> list[str]:
    """Flags for torch's and Python's headers, where they are asked for."""
    if not re.search(r'#\s*include\s*[<"](?:torch|ATen|c10)/', text):
        return []
    import sysconfig

    from torch.utils.cpp_extension import include_paths

    return [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]


@cache
def disassembler() -> str | None:
    """The path of nvdisasm: on PATH, or in the packages of CUDA or Triton; None without one."""
    if found := shutil.which("nvdisasm"):
        return found
    folders = [Path(folder) for folder in sys.path if folder]
    places = ("nvidia/cu13/bin/nvdisasm", "nvidia/cuda_nvdisasm/bin/nvdisasm", "triton/backends/nvidia/bin/nvdisasm")
    return next((str(folder / place) for folder in folders for place in places if (folder / place).is_file()), None)


def disassembled(cubin: bytes) -> str:
    """The machine code of a cubin as text; RuntimeError where no disassembler is at hand or it can't read this."""
    tool = disassembler()
    if tool is None:
        raise RuntimeError("reading machine code needs nvdisasm (package nvidia-cuda-nvdisasm), which isn't there")
    with tempfile.TemporaryDirectory(prefix="nibblas-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", path], capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr.strip() or 'failed'}")
    return done.stdout


def opcodes(code: str) -> list[str]:
    """Each instruction of disassembled code once, without operands, in the order of their first place."""
    found = (_INSTRUCTION.match(line) for line in code.splitlines())
    return list(dict.fromkeys(one["opcode"] for one in found if one))


def confirm(findings: Iterable[TechniqueFinding], code: str) -> list[Confirmation]:
    """What disassembled machine code says of the uses among the findings of its source.

    A use is refuted where no kernel has an instruction of its technique: the compiler may have left it out, or does the
    same by other means. Techniques that are no instructions stay open, and so does everything for code without any.
    """
    present = opcodes(code)
    answers = []
    for finding in findings:
        if finding.kind != "use":
            continue
        sass = techniques()[finding.technique].sass
        opcode = next((one for one in present if sass and re.match(sass, one)), None)
        state: Literal["confirmed", "refuted", "open"] = "open" if not sass or not present else "refuted"
        answers.append(Confirmation(finding, "confirmed" if opcode else state, opcode))
    return answers
