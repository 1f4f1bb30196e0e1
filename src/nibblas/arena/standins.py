"""What takes the place of things that a problem made for other hardware wants and this machine lacks.

Each stand-in replaces names of torch, or modules that are not installed, until it is uninstalled, and counts its calls.
What it computes is right, not fast: a call that went through one says nothing about time. docs/arena.md lists them.
"""

import ast
import functools
import importlib.util
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nibblas import reference
from nibblas.arena import aiter
from nibblas.arena.rounding import round_once
from nibblas.formats import MXFP4, NVFP4
from nibblas.layouts import BLOCKED_128x4
from nibblas.problem import arch_of
from nibblas.tensor import ScaledTensor

SCALED_MM = "torch._scaled_mm with FP4"
CUDA = "device cuda on a CPU"
AITER = "aiter"
NAMES_ONLY = "names of exceptions"
ALL = (SCALED_MM, CUDA, AITER, NAMES_ONLY)


@dataclass
class StandIns:
    """The stand-ins in force; a context manager that uninstalls them. `used` counts calls by name."""

    used: Counter[str] = field(default_factory=Counter)
    _undo: list[Callable[[], object]] = field(default_factory=list)

    def __enter__(self) -> "StandIns":
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def uninstall(self) -> None:
        """Put everything back as it was, the latest first."""
        while self._undo:
            self._undo.pop()()

    def take_used(self) -> tuple[str, ...]:
        """Names of the stand-ins that were called since the last time this was asked."""
        names = tuple(sorted(self.used))
        self.used.clear()
        return names

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `uninstall`."""
        if name in vars(owner):
            self._undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
        else:
            self._undo.append(functools.partial(delattr, owner, name))
        setattr(owner, name, value)

    def _counted(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.used[name] += 1
            return function(*args, **kwargs)

        return call

    def _add_module(self, name: str, contents: dict[str, Any]) -> None:
        module = ModuleType(name, "A stand-in of nibblas.")
        module.__path__ = []  # so that modules below it can be looked for
        vars(module).update(contents)
        sys.modules[name] = module
        self._undo.append(functools.partial(sys.modules.pop, name, None))
        parent, _, last = name.rpartition(".")
        if parent:
            self._replace(sys.modules[parent], last, module)


def install(device: torch.device, names: Iterable[str] = ALL, sources: Iterable[bytes | str] = ()) -> StandIns:
    """Put those stand-ins in place, among `names`, that this device lacks the original of.

    `sources` are the texts of the files that are going to be loaded: missing modules of which they name exceptions
    alone get empty ones.
    """
    stand_ins, names = StandIns(), tuple(names)
    if unknown := [name for name in names if name not in ALL]:
        raise ValueError(f"stand-ins {', '.join(unknown)} are unknown, there are {', '.join(ALL)}")
    if SCALED_MM in names and not _multiplies_fp4(device):
        _install_scaled_mm(stand_ins)
    if CUDA in names and device.type == "cpu" and not torch.cuda.is_available():
        _install_cuda(stand_ins)
    if AITER in names and _is_missing("aiter"):
        for module, contents in aiter.MODULES.items():
            counted = {
                name: stand_ins._counted(f"{module}.{name}", value) if _is_function(value) else value
                for name, value in contents.items()
            }
            stand_ins._add_module(module, counted)
    if NAMES_ONLY in names:
        for module, exceptions in exception_modules(sources).items():
            _add_exceptions(stand_ins, module, exceptions)
    return stand_ins


def provides(module: str, name: str | None = None) -> bool:
    """Whether a stand-in has this module, and, if a name is given, that name in it."""
    if f"{module}.{name}" in aiter.MODULES:
        return True
    return module in aiter.MODULES and (name is None or name in aiter.MODULES[module])


def _is_missing(module: str) -> bool:
    return module not in sys.modules and importlib.util.find_spec(module) is None


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _multiplies_fp4(device: torch.device) -> bool:
    return device.type == "cuda" and arch_of(device).startswith(("sm_10", "sm_11", "sm_12"))


def _install_scaled_mm(stand_ins: StandIns) -> None:
    original = torch._scaled_mm

    @functools.wraps(original)
    def scaled_mm(self: Tensor, mat2: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype != torch.float4_e2m1fn_x2:
            return original(self, mat2, *args, **kwargs)
        stand_ins.used[SCALED_MM] += 1
        return fp4_scaled_mm(self, mat2, *args, **kwargs)

    stand_ins._replace(torch, "_scaled_mm", scaled_mm)


def fp4_scaled_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """torch._scaled_mm for FP4 operands: (M, K/2) times (K/2, N), both float4_e2m1fn_x2, to (M, N) of out_dtype.

    Scales in BLOCKED_128x4, e4m3 a block of 16 (NVFP4) or e8m0 a block of 32 (MXFP4), of any shape. The sum and the
    bias are float64, rounded once.
    """
    op = "_scaled_mm"
    if mat2.dtype != self.dtype or self.ndim != 2 or mat2.ndim != 2 or self.shape[1] != mat2.shape[0]:
        raise ValueError(
            f"{op}: operands are {tuple(self.shape)} {self.dtype} and {tuple(mat2.shape)} {mat2.dtype}, "
            "need (M, K/2) and (K/2, N) float4_e2m1fn_x2"
        )
    if scale_result is not None or out_dtype is None:
        raise ValueError(f"{op}: FP4 operands need an out_dtype and no scale_result")
    exact = reference.matmul(_blocked(op, self, scale_a), _blocked(op, mat2.t(), scale_b), bias)
    result = round_once(exact, out_dtype)
    return result if out is None else out.copy_(result)


def _blocked(op: str, data: Tensor, scale: Tensor) -> ScaledTensor:
    formats = {torch.float8_e4m3fn: NVFP4, torch.float8_e8m0fnu: MXFP4}
    if scale.dtype not in formats:
        raise ValueError(f"{op}: scales of FP4 operands are {scale.dtype}, need float8_e4m3fn or float8_e8m0fnu")
    format = formats[scale.dtype]
    stored = BLOCKED_128x4.shape(data.shape[0], data.shape[1] * 2 // format.block_size)
    if scale.numel() != stored[0] * stored[1]:
        raise ValueError(
            f"{op}: {scale.numel()} scales for an operand of {data.shape[0]} rows and K = {data.shape[1] * 2}, need "
            f"{stored[0]} x {stored[1]} (BLOCKED_128x4)"
        )
    # torch can't make a float4 tensor contiguous on every device; bytes it can.
    codes = data.view(torch.uint8).contiguous()
    scales = scale.to(data.device).view(torch.uint8).reshape(stored)
    return ScaledTensor(codes, scales.contiguous(), format, layout=BLOCKED_128x4)


# Functions of torch that take device=...
FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")


def _install_cuda(stand_ins: StandIns) -> None:
    used = stand_ins.used

    def on_cpu(device: Any) -> Any:
        """The CPU for any way to write a CUDA device."""
        is_index = isinstance(device, int) and not isinstance(device, bool)
        if not is_index and not (isinstance(device, str | torch.device) and str(device).startswith("cuda")):
            return device
        used[CUDA] += 1
        return torch.device("cpu")

    def redirected(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                kwargs["device"] = on_cpu(kwargs["device"])
            return function(*args, **kwargs)

        return call

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        return _tensor_to(tensor, *args, **kwargs)

    def cuda(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        used[CUDA] += 1
        return tensor

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> "Generator":
            return super().__new__(cls, on_cpu(device))  # type: ignore[call-arg]

    def seed_cpu(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def noted(result: Any = None) -> Callable:
        def call(*_: Any, **__: Any) -> Any:
            used[CUDA] += 1
            return result

        return call

    _tensor_to = Tensor.to
    for name in FACTORIES:
        stand_ins._replace(torch, name, redirected(getattr(torch, name)))
    for name in METHODS[:-1]:
        stand_ins._replace(Tensor, name, redirected(getattr(Tensor, name)))
    stand_ins._replace(Tensor, "to", to)
    stand_ins._replace(Tensor, "cuda", cuda)
    stand_ins._replace(torch, "Generator", Generator)
    set_default_device = torch.set_default_device
    stand_ins._replace(torch, "set_default_device", lambda device: set_default_device(on_cpu(device)))
    for name, value in {
        "synchronize": noted(),
        "set_device": noted(),
        "current_device": noted(0),
        "current_stream": noted(HostStream()),
        "default_stream": noted(HostStream()),
        "stream": _host_stream,
        "Stream": HostStream,
        "Event": HostEvent,
        # Without a device of their own, random numbers "on the GPU" come from the CPU's generator.
        "manual_seed": seed_cpu,
        "manual_seed_all": seed_cpu,
    }.items():
        stand_ins._replace(torch.cuda, name, value)


class HostEvent:
    """torch.cuda.Event by the host's clock: all work is done by the time that a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._ns: int | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: it has happened."""
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds from this event to another; both must have been recorded."""
        if self._ns is None or end._ns is None:
            raise RuntimeError("elapsed_time: both events must be recorded first")
        return (end._ns - self._ns) / 1e6


class HostStream:
    """torch.cuda.Stream on a CPU, where there is one order only."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Record an event, a new one if none is given."""
        event = event or HostEvent()
        event.record()
        return event


@contextmanager
def _host_stream(stream: Any) -> Iterator[Any]:
    yield stream


def exception_modules(sources: Iterable[bytes | str]) -> dict[str, set[str]]:
    """Missing modules with the names that the sources import from them, where all stand in except clauses alone."""
    found: dict[str, set[str]] = defaultdict(set)
    needed: set[str] = set()
    for source in sources:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # whoever loads it will be told
        types = [node.type for node in nodes if isinstance(node, ast.ExceptHandler) and node.type]
        caught = {id(name): name.id for kind in types for name in ast.walk(kind) if isinstance(name, ast.Name)}
        elsewhere = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in caught}
        for node in nodes:
            if isinstance(node, ast.Import):
                needed |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = {alias.asname or alias.name for alias in node.names}
                if names <= set(caught.values()) - elsewhere:
                    found[node.module] |= {alias.name for alias in node.names}
                else:
                    needed.add(node.module.split(".")[0])
    tops = {module: module.split(".")[0] for module in found}
    return {module: found[module] for module, top in tops.items() if top not in needed and _is_missing(top)}


def _add_exceptions(stand_ins: StandIns, module: str, names: set[str]) -> None:
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join(parts[:length])
        if path not in sys.modules:
            stand_ins._add_module(path, {})
    for name in names:
        stand_ins._replace(sys.modules[module], name, type(name, (Exception,), {"__module__": module}))
