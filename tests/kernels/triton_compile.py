"""Compiles the Triton kernels for a target without a GPU and prints facts of the machine code, a JSON object a line.

`python triton_compile.py sm_90 sm_100 ...`; test_triton_compile.py runs it in a process of its own for each version of
triton and asserts on the facts.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from checks import random_codes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nibblas.formats import FORMATS
from nibblas.kernels import triton_gated_linear, triton_grouped_linear, triton_linear, triton_quantize
from nibblas.kernels.triton_launch import Launch, Target
from nibblas.layouts import BLOCKED_128x4

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# What N, K and M a launch is compiled for: multiples of 16, as Triton specializes nearly every real shape.
N, K = 256, 2048


def source(launch: Launch) -> ASTSource:
    """The launch's arguments as Triton specializes them: None and 1 are constants, multiples of 16 known as such."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.function.params):
        value = launch.arguments[parameter.name]
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if parameter.is_constexpr or value is None or (is_int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif is_int:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return ASTSource(launch.function, signature, constants, attributes)


def gpu_target(arch: str) -> GPUTarget:
    return GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)


def facts(launch: Launch, arch: str) -> dict:
    """Registers, bytes spilled or instructions that touch local memory, shared memory, and opcode counts."""
    compiled = triton.compile(source(launch), target=gpu_target(arch), options=launch.options)
    found = {"kernel": launch.kernel, "shared": compiled.metadata.shared}
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        found["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        found["spills"] = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
        opcodes = re.findall(r"^\s+([a-z]+_[a-z0-9_]+)", text, re.MULTILINE)
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            sass = _tool("nvdisasm", "-c", file.name)
            usage = _tool("cuobjdump", "-res-usage", file.name)
        found["registers"] = int(re.search(r"REG:(\d+)", usage)[1])
        opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", sass, re.MULTILINE)
        found["spills"] = sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes)
    return {**found, "opcodes": Counter(opcodes)}


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(BINARIES / name), *arguments], check=True, capture_output=True, text=True).stdout


def cases(arch: str) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of what is compiled for a target."""
    target = Target(arch, 132)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.zeros(5, dtype=torch.int32)
    native = {"sm_100": FORMATS, "sm_120": FORMATS, "gfx950": {"mxfp4": FORMATS["mxfp4"]}}.get(arch, {})
    for format in FORMATS.values():
        b, w = random_codes((N, K), format, generator), random_codes((4, N, K), format, generator)
        x = {M: torch.empty(M, K, dtype=torch.bfloat16) for M in (1, 64, 512)}
        out = {M: torch.empty(M, N, dtype=torch.bfloat16) for M in (1, 64, 512)}
        for M in x:
            launches = triton_linear.linear_launches(x[M], b, None, out[M], target)
            yield from ((f"linear {format} M={M} {each.kernel}", each) for each in launches)
            if M != 64:
                launches = triton_gated_linear.gated_launches(x[M], b, b, None, None, "silu", out[M], target)
                yield from ((f"gated {format} M={M} {each.kernel}", each) for each in launches)
        grouped = triton_grouped_linear.grouped_launch(x[512], w, offsets, None, out[512], target)
        yield f"grouped {format}", grouped
        _, launches = triton_quantize.quantize_launches(x[512], format, format.scale_rules[0], None, target)
        yield from ((f"quantize {format} {each.kernel}", each) for each in launches)
        yield f"dequantize {format}", triton_quantize.dequantize_launch(b, torch.empty(N, K, dtype=torch.bfloat16))
        if format.name in native:
            a = random_codes((512, K), format, generator, layout=BLOCKED_128x4)
            b, w = b.with_layout(BLOCKED_128x4), w.with_layout(BLOCKED_128x4)
            yield f"native {format}", triton_linear.native_launch(a, b, None, out[512], target)
            yield (
                f"native grouped {format}",
                triton_grouped_linear.grouped_launch(a, w, offsets, None, out[512], target, native=True),
            )


if __name__ == "__main__":
    for arch in sys.argv[1:]:
        limit = Target(arch, 132).shared_memory
        for name, launch in cases(arch):
            found = facts(launch, arch)
            print(json.dumps({"arch": arch, "name": name, "shared_limit": limit, **found}), flush=True)
