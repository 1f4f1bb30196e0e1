"""CUDA C++ compiled at run time by NVRTC (PyPI: cuda-core), kept on disk, and launched through the driver.

A cubin is kept under the hash of all that made it: source, architecture, compiler version, options. It is written under
a name of its own and renamed, so that processes that compile the same kernel at the same time don't meet.
Nothing here needs CUDA before `load` is called.
"""

import ctypes
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from nibblas.paths import cache_dir, writing_cache

# What every kernel of this kind is made of, beside its own files.
SOURCES = ("kernels/cuda_element.h", "kernels/cuda_module.py")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as cuda_element.h numbers them
MOST_LAUNCHES = 4096
SHARED_LIMIT_SM90 = 227 * 1024  # bytes of shared memory that a CTA may have

# Whether kernels that can are launched so that they start before the kernel before them on the stream has ended:
# ops.dependent_launch sets it.
dependent = False

T = TypeVar("T")
_lock = threading.Lock()
_loaded: dict[tuple, int] = {}


@cache
def missing() -> str | None:
    """Why CUDA kernels can't be compiled here; None if they can."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "needs the package cuda-core, which is not installed (pip install 'nibblas[gpu]')"
    return None


@cache
def source_of(*names: str) -> str:
    """The text of a kernel's files in this folder, behind cuda_element.h."""
    folder = Path(__file__).parent
    return "".join((folder / name).read_text() for name in ("cuda_element.h", *names))


def compile_cubin(source: str, arch: str, options: tuple[str, ...]) -> bytes:
    """The cubin of CUDA C++ source for an arch such as "sm_90a"; options as NVRTC takes them, e.g. "-DDEPTH=4"."""
    compiler = _compiler_version()
    key = hashlib.sha256("\0".join((source, arch, compiler, *options)).encode()).hexdigest()
    path = cache_dir() / "cuda" / f"{arch}-{key[:40]}.cubin"
    try:
        return path.read_bytes()
    except OSError:  # not there, or a cache that can't be used
        cubin, _ = _compile(source, arch, options)
    with writing_cache():
        _write(path, cubin)
    return cubin


def _compiler_version() -> str:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"compiling a CUDA kernel needs the package cuda-core with NVRTC: {error}") from error
    return f"nvrtc {major}.{minor}"


def _compile(source: str, arch: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """The cubin, and what the compiler said of it (with "--ptxas-options=--verbose": registers and spills)."""
    from cuda.bindings import nvrtc

    def log() -> str:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        text = b" " * size
        nvrtc.nvrtcGetProgramLog(program, text)
        return text.decode().rstrip("\0 ")

    def check(result, *values):
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC failed ({result.name}) on a kernel of nibblas:\n{log()}")
        return values[0] if values else None

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"nibblas.cu", 0, [], [])
    try:
        flags = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", *(option.encode() for option in options)]
        check(*nvrtc.nvrtcCompileProgram(program, len(flags), flags))
        size = check(*nvrtc.nvrtcGetCUBINSize(program))
        cubin = b" " * size
        check(*nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, log()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(partial, path)


# --- the driver ----------------------------------------------------------------------------------------------------


class _AttributeValue(ctypes.Union):
    _fields_ = (("pad", ctypes.c_char * 64), ("number", ctypes.c_int))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("_pad", ctypes.c_char * 4), ("value", _AttributeValue))


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


# Of enums in cuda.h.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14
_CAPTURE_RELAXED = 2


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def _check(result: int, call: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"{call} failed: {(text.value or b'unknown error').decode()} ({result})")


def load(source: str, arch: str, options: tuple[str, ...], function: str, shared_bytes: int, device: int) -> int:
    """The driver's handle of a kernel, ready to run on a device with up to that much dynamic shared memory.

    Compiled and loaded once a process; may be called while a stream is captured.
    """
    key = (source, arch, options, function, shared_bytes, device)
    handle = _loaded.get(key)
    if handle is None:
        with _lock:
            handle = _loaded.get(key) or _loaded.setdefault(key, _load(*key))
    return handle


@cache
def _library(source: str, arch: str, options: tuple[str, ...]) -> int:
    cubin = compile_cubin(source, arch, options)
    library = ctypes.c_void_p()
    none = (None, None, 0, None, None, 0)
    _check(_driver().cuLibraryLoadData(ctypes.byref(library), cubin, *none), "cuLibraryLoadData")
    return library.value or 0


def _load(source: str, arch: str, options: tuple[str, ...], function: str, shared_bytes: int, device: int) -> int:
    driver = _driver()
    # Loading is no stream's work: let it happen while this or another thread captures one.
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    _check(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        library, kernel = ctypes.c_void_p(_library(source, arch, options)), ctypes.c_void_p()
        _check(driver.cuLibraryGetKernel(ctypes.byref(kernel), library, function.encode()), "cuLibraryGetKernel")
        for attribute, value in ((_MAX_DYNAMIC_SHARED, shared_bytes), (_NON_PORTABLE_CLUSTER, 1)):
            _check(driver.cuKernelSetAttribute(attribute, value, kernel, device), "cuKernelSetAttribute")
        entry = ctypes.c_void_p()
        _check(driver.cuKernelGetFunction(ctypes.byref(entry), kernel), "cuKernelGetFunction")
        return kernel.value or 0
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class Launch:
    """A launch of a kernel that takes one struct: pack that into `arguments`, then call with a stream.

    Its buffers belong to one thread at a time; the driver copies the arguments before the call returns. Clusters are
    the device code's business (__cluster_dims__).

    dependent : the kernel may start before the one before it on the stream has ended.
    """

    def __init__(
        self,
        kernel: int,
        arguments: bytearray,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int = 0,
        dependent: bool = False,
    ):
        self.arguments = arguments
        starts_early = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", _AttributeValue(number=1))
        self._attributes = (_Attribute * 1)(starts_early)
        self._config = _Config(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(threads, 1, 1),
            shared_bytes,
            None,
            self._attributes,
            int(dependent),
        )
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_char.from_buffer(arguments)))
        self._kernel = ctypes.c_void_p(kernel)
        self._by_reference = ctypes.byref(self._config)
        self._launch = _driver().cuLaunchKernelEx

    def __call__(self, stream: int) -> None:
        """Launch on a stream (its raw handle)."""
        self._config.stream = stream
        result = self._launch(self._by_reference, self._kernel, self._pointers, None)
        if result:
            _check(result, "cuLaunchKernelEx")


class Launches(threading.local):
    """Launches by problem; each thread has its own, as a launch's arguments are written into it.

    Where there are more than MOST_LAUNCHES, all are forgotten, and made again when they are asked for.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """This thread's launch, or launches, for a key, made where there are none yet."""
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= MOST_LAUNCHES:
                self._made.clear()
            found = self._made[key] = make()
        return found
