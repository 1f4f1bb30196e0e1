"""Compiling Triton kernels for GPUs that are not at hand: what the machine code is made of, kept as evidence.

    python -m nibblas.bench.compiled                every kernel for every architecture, a table
    python -m nibblas.bench.compiled --write FILE   and add a Measurement without samples for each to a JSONL file

A kernel so kept is "compiled" there, never "measured". evidence/compiled.jsonl is made so.
"""

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import nibblas
from nibblas import evidence
from nibblas.evidence import Measurement
from nibblas.formats import FORMATS, Format
from nibblas.kernel import Kernel
from nibblas.kernels import kernels as all_kernels
from nibblas.kernels import (
    triton_gated_linear,
    triton_gated_linear_decoded,
    triton_grouped_linear,
    triton_linear,
    triton_linear_decoded,
    triton_quantize,
)
from nibblas.kernels.triton_launch import Launch, Target
from nibblas.layouts import LINEAR, BLOCKED_128x4, TiledLayout
from nibblas.problem import Problem
from nibblas.tensor import ScaledTensor

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
MULTIPROCESSORS = 132
# What N, K and M launches are compiled for: multiples of 16, as Triton specializes nearly every real shape.
N, K, EXPERTS = 256, 2048, 4
Ms = (1, 64, 512)
# Instructions of tensor cores, in machine code of NVIDIA and AMD.
TENSOR = re.compile(r"(?:UTC\w*MMA|HGMMA|HMMA|OMMA|v_mfma)\S*")
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Case:
    """A kernel on a problem, as the launches that it would make."""

    kernel: Kernel
    problem: Problem
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class Code:
    """Machine code of one launch."""

    launch: str
    registers: int
    spills: int  # vector registers spilled (AMD), instructions that touch local memory (NVIDIA)
    shared: int  # bytes
    opcodes: dict[str, int]


# --- what is compiled ----------------------------------------------------------------------------------------------


def cases(arch: str) -> Iterator[Case]:
    """What every Triton kernel made for an architecture does there, for each format and each M that it is tiled for."""
    for kernel in all_kernels():
        if arch in kernel.archs and kernel.name in LAUNCHES:
            for a, b in dict.fromkeys(kernel.operands):
                if a == "bf16" or (a == b and "bf16" not in {name for name, _ in kernel.operands}):
                    yield from LAUNCHES[kernel.name](kernel, FORMATS[b], Target(arch, MULTIPROCESSORS))


def weights(format: Format, *shape: int, layout: TiledLayout = LINEAR) -> ScaledTensor:
    """Zeros (..., rows, columns), as launches need no more than shapes, types and layouts."""
    *batch, rows, columns = shape
    data = torch.zeros(*batch, rows, columns // 2, dtype=torch.uint8)
    scale = torch.zeros(*batch, rows, columns // format.block_size, dtype=torch.uint8)
    global_scale = torch.ones(batch) if format.has_global_scale else None
    return ScaledTensor(data, scale, format, global_scale).with_layout(layout, LINEAR)


def _dense(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16)


def _linear(kernel: Kernel, format: Format, target: Target) -> Iterator[Case]:
    config = triton_linear.INVARIANT if kernel.batch_invariant else None
    operands: list[Tensor | ScaledTensor] = [*(_dense(M, K) for M in Ms), weights(format, 64, K)]
    for a in operands:
        M, name = a.shape[0], "bf16" if isinstance(a, Tensor) else format.name
        launches = triton_linear.linear_launches(a, weights(format, N, K), None, _dense(M, N), target, config)
        yield Case(kernel, Problem("linear", M, N, K, a=name, b=format.name, arch=target.arch), tuple(launches))


def _native(kernel: Kernel, format: Format, target: Target) -> Iterator[Case]:
    a, b = (weights(format, rows, K, layout=BLOCKED_128x4) for rows in (512, N))
    launch = triton_linear.native_launch(a, b, None, _dense(512, N), target)
    yield Case(kernel, _native_problem("linear", format, target), (launch,))


def _grouped(kernel: Kernel, format: Format, target: Target, native: bool = False) -> Iterator[Case]:
    layout = BLOCKED_128x4 if native else LINEAR
    x = weights(format, 512, K, layout=layout) if native else _dense(512, K)
    w, offsets = weights(format, EXPERTS, N, K, layout=layout), torch.zeros(EXPERTS + 1, dtype=torch.int32)
    launch = triton_grouped_linear.grouped_launch(x, w, offsets, None, _dense(512, N), target, native=native)
    plain = Problem("grouped_linear", 512, N, K, G=EXPERTS, b=format.name, arch=target.arch)
    problem = _native_problem("grouped_linear", format, target, G=EXPERTS) if native else plain
    yield Case(kernel, problem, (launch,))


def _native_problem(op: str, format: Format, target: Target, G: int = 1) -> Problem:
    stored = BLOCKED_128x4.name, LINEAR.name
    problem = Problem(op, 512, N, K, G=G, a=format.name, b=format.name, arch=target.arch)
    return replace(problem, a_layouts=stored, b_layouts=stored)


def _gated(kernel: Kernel, format: Format, target: Target) -> Iterator[Case]:
    for M in (1, 512):
        b = weights(format, N, K)
        launches = triton_gated_linear.gated_launches(_dense(M, K), b, b, None, None, "silu", _dense(M, N), target)
        yield Case(kernel, Problem("gated_linear", M, N, K, b=format.name, arch=target.arch), tuple(launches))


def _decoded(kernel: Kernel, format: Format, target: Target) -> Iterator[Case]:
    """What is beside the product, which is the vendor's."""
    gated, fp4 = kernel.op == "gated_linear", "bf16" not in {a for a, _ in kernel.operands}
    x = weights(format, 512, K) if fp4 else _dense(512, K)
    b, out, sums = weights(format, N, K), _dense(512, N), torch.empty(1, 2 if gated else 1, 512, N)
    decoded = [t for t in (x, b) if not isinstance(t, Tensor)]
    launches = [triton_linear_decoded.decode_launch(t, _dense(*t.shape).unsqueeze(0), target) for t in decoded]
    if gated:
        launches.append(triton_gated_linear_decoded.finish_launch(sums, x, b, b, None, None, "silu", out))
    else:
        launches.append(triton_linear_decoded.finish_launch(sums, x, b, None, out))
    problem = Problem(kernel.op, 512, N, K, a=format.name if fp4 else "bf16", b=format.name, arch=target.arch)
    yield Case(kernel, problem, tuple(launches))


def _quantize(kernel: Kernel, format: Format, target: Target) -> Iterator[Case]:
    for rule in format.scale_rules:
        _, launches = triton_quantize.quantize_launches(_dense(512, K), format, rule, None, target)
        problem = Problem("quantize", 512, 0, K, b=format.name, out=format.name, rule=rule, arch=target.arch)
        yield Case(kernel, problem, tuple(launches))


LAUNCHES: dict[str, Callable[[Kernel, Format, Target], Iterator[Case]]] = {
    "triton_linear": _linear,
    "triton_linear_invariant": _linear,
    "triton_linear_native": _native,
    "triton_linear_native_gfx950": _native,
    "triton_grouped_linear": _grouped,
    "triton_grouped_linear_native": partial(_grouped, native=True),
    "triton_grouped_linear_native_gfx950": partial(_grouped, native=True),
    "triton_gated_linear": _gated,
    "triton_linear_decoded": _decoded,
    "triton_linear_fp4_decoded": _decoded,
    "triton_gated_linear_decoded": _decoded,
    "triton_gated_linear_fp4_decoded": _decoded,
    "triton_quantize": _quantize,
}


# --- compiling -----------------------------------------------------------------------------------------------------


def compile(launch: Launch, arch: str) -> Code:
    """The machine code of a launch for an architecture, with no GPU of it."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
    compiled = triton.compile(_source(launch), target=target, options=launch.options)
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        spills = _number(r"\.vgpr_spill_count:\s+(\d+)", text)
        opcodes = re.findall(r"^\s+([a-z]+_[a-z0-9_]+)", text, re.MULTILINE)
        return Code(launch.kernel, registers, spills, shared, dict(Counter(opcodes)))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text, usage = _tool("nvdisasm", "-c", file.name), _tool("cuobjdump", "-res-usage", file.name)
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", text, re.MULTILINE)
    spills = sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes)
    return Code(launch.kernel, _number(r"REG:(\d+)", usage), spills, shared, dict(Counter(opcodes)))


def _source(launch: Launch):
    """The launch's arguments as Triton specializes them: None and 1 are constants, multiples of 16 known as such."""
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.function.params):
        value = launch.arguments[parameter.name]
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if parameter.is_constexpr or value is None or (is_int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif is_int:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return ASTSource(launch.function, signature, constants, attributes)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if not found:
        raise ValueError(f"compiled: {pattern} is nowhere in what the compiler printed: {text[:500]}")
    return int(found[1])


def _tool(name: str, *arguments: str) -> str:
    """What a program that came with triton prints."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], check=True, capture_output=True, text=True).stdout


# --- evidence ------------------------------------------------------------------------------------------------------


def measurement(case: Case, codes: list[Code]) -> Measurement:
    """A Measurement without samples: that the kernel was compiled, and what for and into what."""
    import triton

    tensor: Counter[str] = Counter()
    for code in codes:
        tensor.update({name: n for name, n in code.opcodes.items() if TENSOR.match(name)})
    return Measurement(
        kernel=case.kernel.name,
        digest=case.kernel.digest,
        problem=case.problem,
        device=case.problem.arch,
        threads=0,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        command=f"python -m nibblas.bench.compiled {case.problem.arch}",
        method="compiled, not run",
        versions={"nibblas": nibblas.__version__, "triton": triton.__version__},
        facts={
            "registers": str(max(code.registers for code in codes)),
            "spills": str(sum(code.spills for code in codes)),
            "shared bytes": str(max(code.shared for code in codes)),
            "tensor instructions": ", ".join(f"{n} {name}" for name, n in sorted(tensor.items())) or "none",
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="*", default=ARCHS, metavar="ARCH", help=f"by default {', '.join(ARCHS)}")
    parser.add_argument("--write", type=Path, metavar="FILE")
    given = parser.parse_args()
    table = Table("arch", "kernel", "problem", "registers", "spills", "tensor instructions")
    for arch in given.archs:
        found = [measurement(case, [compile(launch, arch) for launch in case.launches]) for case in cases(arch)]
        for m in found:
            facts = (m.facts[name] for name in ("registers", "spills", "tensor instructions"))
            table.add_row(arch, m.kernel, str(m.problem).removesuffix(f" on {arch}"), *facts)
        if given.write:
            evidence.append(given.write, found)
    Console().print(table)


if __name__ == "__main__":
    main()
