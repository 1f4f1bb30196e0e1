"""The Triton kernels without a GPU: their records, triton's interpreter, and machine code for five targets.

The interpreter and each version of triton run in processes of their own. The installed triton is used, and one more
from the folder that NIBBLAS_TRITON_DIR names (`pip install --no-deps --target FOLDER triton==3.6.0`, the oldest one).
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from triton_processes import VERSIONS, compiled, interpreted, needs_triton

from nibblas.kernel import Kernel
from nibblas.kernels import triton_gated_linear, triton_grouped_linear, triton_linear, triton_quantize
from nibblas.problem import Problem

HERE = Path(__file__).parent
KERNELS = [k for m in (triton_linear, triton_grouped_linear, triton_gated_linear, triton_quantize) for k in m.KERNELS]
TARGETS = ("sm_90", "sm_100", "sm_120", "gfx942", "gfx950")


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_record(kernel: Kernel):
    a, b = kernel.operands[0]
    names = [(layout.name, data.name) for layout, data in kernel.b_layouts]
    problem = Problem(kernel.op, 8, 128, 512, a=a, b=b, out=kernel.outs[0], b_layouts=names[0], arch=kernel.archs[0])
    if a == b:
        problem = Problem(**{**problem.__dict__, "a_layouts": names[0]})
    assert kernel.why_not(problem) == (None if find_spec("triton") else "needs triton, which is not installed")
    assert "this is cpu" in kernel.why_not(Problem(kernel.op, 8, 128, 512, arch="cpu"))
    assert len(kernel.digest) == 64
    for source in kernel.sources:
        imported = (HERE.parents[1] / "src/nibblas" / source).read_text().split("from nibblas.kernels.")[1:]
        needed = {f"kernels/{line.split(' ')[0]}.py" for line in imported}
        assert needed <= set(kernel.sources), f"{source} imports {needed - set(kernel.sources)}, not among the sources"


def test_records_need_no_triton():
    modules = ", ".join(
        f"nibblas.kernels.{name}" for name in ("triton_linear", "triton_quantize", "triton_gated_linear")
    )
    code = f"import sys, nibblas.kernels.triton_grouped_linear, {modules}; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@needs_triton
def test_interpreter():
    """What the interpreter computes against the reference; see triton_interpreter/run.py."""
    assert interpreted("run.py").count(" s\n") == 7


@pytest.fixture(scope="module", params=VERSIONS)
def machine_code(request) -> dict[tuple[str, str], dict]:
    """Facts of the machine code of every kernel by (target, name), as one version of triton makes it."""
    found = compiled(request.param, "triton_compile.py", *TARGETS)
    return {(fact["arch"], fact["name"]): fact for fact in found}


def test_machine_code_fits(machine_code):
    """No spills, shared memory within the device's, at most 255 registers (512 on CDNA)."""
    assert {arch for arch, _ in machine_code} == set(TARGETS)
    for (arch, name), fact in machine_code.items():
        assert fact["spills"] == 0, (arch, name, fact)
        assert fact["shared"] <= fact["shared_limit"], (arch, name, fact)
        assert 0 < fact["registers"] <= (255 if arch.startswith("sm_") else 512), (arch, name, fact)


def count(fact: dict, *prefixes: str) -> int:
    return sum(n for opcode, n in fact["opcodes"].items() if opcode.startswith(prefixes))


def test_products_use_tensor_cores_and_wide_copies(machine_code):
    tensor = {"sm_90": ("HGMMA", "HMMA"), "sm_100": ("UTCHMMA", "HMMA"), "sm_120": ("HMMA",)}
    for (arch, name), fact in machine_code.items():
        if fact["launch"] not in ("linear_kernel", "grouped_kernel", "gated_kernel") or "native" in name:
            continue
        assert count(fact, *tensor.get(arch, ("v_mfma_f32",))), (arch, name, fact["opcodes"])
        if arch.startswith("sm_"):
            # Codes and activations travel 16 bytes a thread, past the registers.
            assert count(fact, "LDGSTS.E.BYPASS.128", "LDGSTS.E.BYPASS.LTC128B.128"), (arch, name, fact["opcodes"])
        else:
            wide = ("global_load_dwordx4", "buffer_load_dwordx4", "global_load_lds_dwordx4", "buffer_load_dwordx2")
            assert count(fact, *wide), (arch, name, fact["opcodes"])


def test_native_products_use_block_scaled_instructions(machine_code):
    block_scaled = {"sm_100": "UTCOMMA", "sm_120": "OMMA.SF", "gfx950": "v_mfma_scale_f32"}
    seen = set()
    for (arch, name), fact in machine_code.items():
        if "native" in name:
            assert count(fact, block_scaled[arch]), (arch, name, fact["opcodes"])
            seen.add((arch, name.split()[0], fact["format"]))
    assert seen == {
        (arch, f"triton_{kind}linear_native{'_gfx950' * (arch == 'gfx950')}", format)
        for arch in block_scaled
        for kind in ("", "grouped_")
        for format in ("nvfp4", "mxfp4")
        if (arch, format) != ("gfx950", "nvfp4")
    }


def test_quantize_loads_wide_and_rounds_precisely(machine_code):
    for (arch, name), fact in machine_code.items():
        if name.startswith("triton_quantize") and arch.startswith("sm_"):
            assert count(fact, "LDG.E.128", "LDG.E.ENL2.256", "LDG.E.NA.128"), (arch, name, fact["opcodes"])
