"""The CPU kernels' shared library: found, compiled or refused with a reason, loaded once by ctypes.

One file holds every tier of instructions behind a C ABI, so it serves any Python and, for one machine type, any CPU.
It is looked for next to this module (a wheel built where there was a compiler carries it), then in the cache, and is
compiled into the cache at first use otherwise: with $NIBBLAS_CC, $CC, cc, gcc or clang; where the cache can't be used,
into a temporary folder, by each process anew. An empty NIBBLAS_CC forbids compiling.
NIBBLAS_CPU_TIER=portable|avx2|avx512|amx takes a lower tier than the best.

The build hook (hatch_build.py) loads this file by its path, where neither torch nor nibblas is installed: only the
standard library may be imported above.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("cpu_library.c", "cpu_linear.c", "cpu_quantize.c", "cpu_probe.c")
HEADERS = ("cpu_common.h", "cpu_quantize_lanes.h")
PREBUILT = FOLDER / "_cpu.so"
# No contraction: a product and a sum are fused only where the source says so, or quantizers would differ by compiler.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")
OPENMP = "-fopenmp"

TIERS = ("portable", "avx2", "avx512", "amx")
DTYPES = {"torch.float32": 0, "torch.bfloat16": 1, "torch.float16": 2}
FP4 = 3
PROBES = {"fp32": 0, "bf16": 1, "int8": FP4}
FORMATS = {"nvfp4": 0, "mxfp4": 1}


class CompileError(RuntimeError):
    """The library could not be compiled; the message says by what and why."""


class WriteError(CompileError):
    """There is no writing where the library should go."""


# --- building ------------------------------------------------------------------------------------------------------


def source_digest() -> str:
    """sha256 over the C sources."""
    digest = hashlib.sha256()
    for name in (*HEADERS, *SOURCES):
        digest.update(name.encode() + b"\0" + (FOLDER / name).read_bytes())
    return digest.hexdigest()


def find_compiler() -> list[str] | None:
    """The C compiler's command, or None where there is none or NIBBLAS_CC is empty."""
    named = os.environ.get("NIBBLAS_CC", os.environ.get("CC") or None)
    if named is not None:
        command = shlex.split(named)
        return command if command and shutil.which(command[0]) else None
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def compile_to(target: Path, compiler: list[str]) -> None:
    """Compile the library to `target`, which appears complete or not at all. Raises CompileError, or its WriteError."""
    digest = source_digest()
    sources = [str(FOLDER / name) for name in SOURCES]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            last = ""
            for openmp in ([OPENMP], []):
                flags = [*FLAGS, *openmp, f'-DNIBBLAS_DIGEST="{digest}"']
                done = subprocess.run(
                    [*compiler, *flags, "-o", str(made), *sources, "-lm"], capture_output=True, text=True
                )
                if done.returncode == 0:
                    os.replace(made, target)
                    return
                last = done.stderr.strip()
    except OSError as error:
        raise WriteError(f"{shlex.join(compiler)} could not write {target}: {error}") from error
    raise CompileError(f"{shlex.join(compiler)} failed: {last[-500:] or f'status {done.returncode}'}")


def _version(compiler: list[str]) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    except OSError as error:
        raise CompileError(f"{shlex.join(compiler)} can't be run: {error}") from error


def _cached(compiler: list[str]) -> Path:
    from nibblas.paths import cache_dir

    facts = (source_digest(), *FLAGS, OPENMP, _version(compiler), platform.machine(), platform.system())
    return cache_dir() / "cpu" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.so"


# --- finding and loading -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Status:
    """Where the library came from, or why there is none."""

    library: ctypes.CDLL | None
    path: Path | None
    reason: str

    def __str__(self) -> str:
        if self.library is None:
            return f"no CPU library: {self.reason}"
        openmp = "" if self.library.nibblas_has_openmp() else ", without OpenMP: one thread"
        return f"{self.path} ({self.reason}), tier {TIERS[self.library.nibblas_tier()]}{openmp}"


_lock = threading.Lock()
_status: Status | None = None


def status() -> Status:
    """The library, found or compiled at the first call; later calls give the same answer. Never raises."""
    global _status
    if _status is None:
        with _lock:
            if _status is None:
                _status = _find()
    return _status


def library() -> ctypes.CDLL | None:
    """The loaded library, or None: `status()` says why."""
    return status().library


def _find() -> Status:
    reasons = []
    if PREBUILT.exists():
        try:
            if f"nibblas-sources:{source_digest()}".encode() in PREBUILT.read_bytes():
                return Status(_load(PREBUILT), PREBUILT, "built with the package")
            reasons.append(f"{PREBUILT.name} was made of other sources")
        except OSError as error:
            reasons.append(f"{PREBUILT.name} can't be loaded: {error}")
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("NIBBLAS_CC", os.environ.get("CC"))
        none = (
            "no C compiler: none of cc, gcc, clang is on PATH" if named is None else f"no C compiler: {named!r} named"
        )
        return Status(None, None, "; ".join([*reasons, none]))
    try:
        path = _cached(compiler)
        if path.exists():
            with suppress(OSError):
                return Status(_load(path), path, "compiled before")
        try:
            compile_to(path, compiler)
            return Status(_load(path), path, "compiled now")
        except (WriteError, OSError) as error:
            with tempfile.TemporaryDirectory() as folder:
                made = Path(folder) / path.name
                compile_to(made, compiler)
                # What is loaded stays when its file goes.
                return Status(_load(made), made, f"compiled for this process, as the cache can't be used: {error}")
    except (CompileError, OSError) as error:
        return Status(None, None, "; ".join([*reasons, str(error)]))


def _load(path: Path) -> ctypes.CDLL:
    import torch  # noqa: F401  its OpenMP runtime first: the library then shares it, and its threads

    found = ctypes.CDLL(str(path))
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


# --- the C ABI -----------------------------------------------------------------------------------------------------


class Operand(ctypes.Structure):
    """struct Operand of cpu_linear.c."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("data_stride", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("tiled", ctypes.c_int32),
        ("global_scale", ctypes.c_float),
    )


class Linear(ctypes.Structure):
    """struct Linear of cpu_linear.c."""

    _fields_ = (
        ("M", ctypes.c_int64),
        ("N", ctypes.c_int64),
        ("K", ctypes.c_int64),
        ("a", Operand),
        ("b", Operand),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("tier", ctypes.c_int32),
    )


class Quantize(ctypes.Structure):
    """struct Quantize of cpu_quantize.c."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("K", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("global_scale", ctypes.c_float),
        ("x_dtype", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("tier", ctypes.c_int32),
    )


SIGNATURES: dict[str, tuple] = {
    "nibblas_tier": (ctypes.c_int,),
    "nibblas_has_openmp": (ctypes.c_int,),
    "nibblas_linear": (ctypes.c_int, ctypes.POINTER(Linear)),
    "nibblas_quantize": (None, ctypes.POINTER(Quantize)),
    "nibblas_dequantize": (None, ctypes.POINTER(Quantize)),
    "nibblas_amax": (ctypes.c_float, ctypes.POINTER(Quantize)),
    "nibblas_probe_read": (ctypes.c_double, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int),
    "nibblas_probe_rate": (ctypes.c_double, ctypes.c_int, ctypes.c_int, ctypes.c_int),
}


@cache
def _best_tier() -> int:
    found = library()
    return 0 if found is None else found.nibblas_tier()


def tier() -> int:
    """Index in TIERS of what kernels use: the best here, or the lower one NIBBLAS_CPU_TIER names."""
    named = os.environ.get("NIBBLAS_CPU_TIER")
    if named is None:
        return _best_tier()
    if named not in TIERS:
        raise ValueError(f"NIBBLAS_CPU_TIER is {named!r}, need one of {', '.join(TIERS)}")
    return min(TIERS.index(named), _best_tier())


# --- what the machine can do ---------------------------------------------------------------------------------------


def probe_bandwidth(threads: int) -> float:
    """Bytes a second that threads read from memory together: the best of a few passes over 400 MB, in huge pages."""
    import torch

    from nibblas.memory import use_huge_pages

    found = library()
    assert found is not None
    buffer = torch.empty(400_000_000, dtype=torch.uint8)
    use_huge_pages(buffer)
    buffer.zero_()
    return max(found.nibblas_probe_read(buffer.data_ptr(), buffer.nbytes, threads, tier()) for _ in range(4))


def probe_rates(threads: int) -> dict[str, float]:
    """Operations a second by what is multiplied (fp32, and bf16 and int8 where the tier has them), threads together."""
    found = library()
    assert found is not None
    rates = {name: found.nibblas_probe_rate(code, threads, tier()) for name, code in PROBES.items()}
    return {name: rate for name, rate in rates.items() if rate}
