"""Every kernel over every case, against the float64 oracle. What a kernel can't do is skipped in its own words."""

import zlib
from dataclasses import dataclass, replace

import pytest
import torch
from checks import NARROW, assert_close, poisoned_empty, random_codes, random_dense

from nibblas import operators, reference
from nibblas.formats import FORMATS, as_format
from nibblas.kernel import Kernel
from nibblas.kernels import kernels
from nibblas.layouts import LINEAR, BLOCKED_128x4
from nibblas.problem import DTYPES, Problem, arch_of
from nibblas.quantize import quantize as reference_quantize

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
ran: set[tuple[str, str]] = set()  # (kernel, device)


@dataclass(frozen=True)
class Case:
    M: int
    N: int
    K: int
    L: int = 1
    a: str = "bf16"
    out: str = "bf16"
    bias: bool = False
    nan_scales: int = 0
    offset_views: bool = False

    def __str__(self) -> str:
        extras = "-bias" * self.bias + "-nan" * bool(self.nan_scales) + "-views" * self.offset_views
        return f"{self.M}x{self.N}x{self.K}x{self.L}-{self.a}-{self.out}{extras}"


LINEAR_CASES = [
    Case(1, 64, 128),
    Case(1, 33, 96, a="fp32", out="fp32", bias=True),
    Case(33, 17, 160, a="fp16", out="fp16"),
    Case(2, 1, 32, out="fp32"),
    Case(5, 200, 480, bias=True),
    Case(8, 130, 2880, out="fp32", bias=True),
    Case(16, 2112, 224, a="fp16", out="fp32"),
    Case(64, 48, 512, a="fp32", out="bf16"),
    Case(100, 70, 192, out="fp32"),
    Case(7, 40, 128, L=3, bias=True),
    Case(3, 40, 128, nan_scales=5, out="fp32"),
    Case(4, 72, 96, offset_views=True, out="fp32"),
    Case(1, 33, 96, a="fp4", out="fp32"),
    Case(33, 40, 480, a="fp4", bias=True),
    Case(6, 40, 128, L=2, a="fp4", out="fp16"),
    Case(5, 24, 160, a="fp4", out="fp32", nan_scales=3),
]


def of(op: str) -> list[Kernel]:
    return [kernel for kernel in kernels() if kernel.op == op]


def seeded(*facts) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(list(map(str, facts))).encode()))


def activations(case: Case, format: str, generator: torch.Generator, device: str):
    """a ([L,] M, K), dense or FP4 by the case; a view into larger memory if asked."""
    shape = (case.M, case.K) if case.L == 1 else (case.L, case.M, case.K)
    if case.a == "fp4":
        return random_codes(shape, format, generator, scale_bytes=NARROW[format], device=device)
    if not case.offset_views:
        return random_dense(shape, DTYPES[case.a], generator, device)
    wide = random_dense((*shape[:-1], case.K + 9), DTYPES[case.a], generator, device)
    return wide[..., 3 : 3 + case.K]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kernel", of("linear"), ids=str)
def test_linear(kernel, format, case, device):
    generator = seeded(format, case)
    shape = (case.N, case.K) if case.L == 1 else (case.L, case.N, case.K)
    plain = random_codes(
        shape, format, generator, scale_bytes=NARROW[format], nan_scales=case.nan_scales, device=device
    )
    a = activations(case, format, generator, device)
    bias = random_dense((case.N,), torch.bfloat16, generator, device) if case.bias else None
    exact, size = reference.matmul(a, plain, bias), reference.magnitude(a, plain)
    dtype = DTYPES[case.out]
    skipped = []
    for layout, data_layout in kernel.b_layouts or ((LINEAR, LINEAR), (BLOCKED_128x4, LINEAR)):
        problem = operators.linear_problem(a, plain, bias, dtype)
        why_not = kernel.why_not(replace(problem, b_layouts=(layout.name, data_layout.name)))
        if why_not is not None:
            skipped.append(why_not)
            continue
        b = plain.with_layout(layout, data_layout)
        out = poisoned_empty((*shape[:-2], case.M, case.N), dtype, device)
        operators.launch_linear(a, b, bias, out, kernel.name, False)
        size_with_bias = size if bias is None else torch.maximum(size, bias.double().abs())
        assert_close(out, exact, dtype, K=case.K, what=f"{kernel} {format} {case} {layout}", magnitude=size_with_bias)
        again = poisoned_empty(tuple(out.shape), dtype, device)
        operators.launch_linear(a, b, bias, again, kernel.name, False)
        assert torch.equal(out.view(torch.uint8), again.view(torch.uint8)), f"{kernel}: two runs differ"
        ran.add((kernel.name, device))
    if skipped and len(skipped) == len(kernel.b_layouts or (1, 2)):
        pytest.skip(f"{kernel} {skipped[0]}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [[0, 3, 0, 5, 0], [1], [0, 0], [17, 2, 40]], ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("a", ["bf16", "fp4"])
@pytest.mark.parametrize("kernel", of("grouped_linear"), ids=str)
def test_grouped_linear(kernel, a, format, sizes, device):
    generator = seeded(a, format, sizes)
    G, T, N, K = len(sizes), sum(sizes), 40, 96
    w = random_codes((G, N, K), format, generator, scale_bytes=NARROW[format], device=device)
    x = activations(Case(T, N, K, a=a), format, generator, device)
    bias = random_dense((G, N), torch.bfloat16, generator, device)
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], device=device)
    problem = Problem("grouped_linear", T, N, K, G=G, a="bf16" if a == "bf16" else format, b=format, bias=True)
    problem = replace(problem, arch=arch_of(w.device))
    if why_not := kernel.why_not(problem):
        pytest.skip(f"{kernel} {why_not}")
    out = poisoned_empty((T, N), torch.bfloat16, device)
    operators.launch_grouped(x, w, offsets, bias, out, kernel.name)
    ran.add((kernel.name, device))
    exact = reference.grouped_linear(x, w, offsets, bias)
    rows = torch.repeat_interleave(torch.arange(G, device=device), torch.tensor(sizes, device=device))
    sizes_of = [reference.magnitude(_rows(x, t), w[int(g)]) for t, g in enumerate(rows)]
    size = torch.cat(sizes_of) if sizes_of else exact
    size = torch.maximum(size, bias.double().abs()[rows]) if T else size
    assert_close(out, exact, torch.bfloat16, K=K, what=f"{kernel} {format} {sizes}", magnitude=size)


def _rows(x, t):
    return x[t : t + 1] if isinstance(x, torch.Tensor) else x.slice(0, t, t + 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("M", [1, 33])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kernel", of("gated_linear"), ids=str)
def test_gated_linear(kernel, format, M, activation, device):
    generator = seeded(format, M, activation)
    N, K = 56, 160
    # Scales that leave the products near 1, where the activations bend.
    gate, up = (
        random_codes((N, K), format, generator, scale_bytes=GATED[format], global_scale=False, device=device)
        for _ in range(2)
    )
    if gate.format.has_global_scale:
        gate, up = (replace(w, global_scale=torch.tensor(0.05, device=device)) for w in (gate, up))
    x = random_dense((M, K), torch.bfloat16, generator, device)
    problem = Problem("gated_linear", M, N, K, b=format, out="fp32", arch=arch_of(x.device))
    if why_not := kernel.why_not(problem):
        pytest.skip(f"{kernel} {why_not}")
    out = poisoned_empty((M, N), torch.float32, device)
    operators.launch_gated(x, gate, up, None, None, activation, out, kernel.name)
    ran.add((kernel.name, device))
    exact = reference.gated_linear(x, gate, up, activation=activation)
    size = (reference.magnitude(x, gate) + 1) * (reference.magnitude(x, up) + 1)
    assert_close(out, exact, torch.float32, K=K, what=f"{kernel} {format} {activation}", magnitude=size)


GATED = {"nvfp4": (40, 58), "mxfp4": (121, 125)}


def special_values(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Rows that meet every branch of a quantizer: ties, zeros, signed zeros, tiny, huge, NaN and Inf blocks."""
    x = torch.randn(24, 256, generator=generator)
    x[1] = 0
    x[2, :64] = -0.0
    x[3] *= torch.exp2(torch.randint(-20, 20, (256,), generator=generator).float())
    x[4] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(32) * torch.tensor([1, -1]).repeat(128)
    x[5] *= 2.0**-14
    x[6] *= 1000
    x[7, 37] = torch.nan
    x[8, 70] = torch.inf
    x[9, 70] = -torch.inf
    return x.to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "rule"), [(name, rule) for name in FORMATS for rule in FORMATS[name].scale_rules])
@pytest.mark.parametrize("given", [False, True], ids=["own", "static"])
@pytest.mark.parametrize("kernel", of("quantize"), ids=str)
def test_quantize(kernel, given, format, rule, dtype, device):
    problem = Problem(
        "quantize", 24, 0, 256, a=dtype, b=format, out=format, rule=rule, arch=arch_of(torch.device(device))
    )
    if why_not := kernel.why_not(problem):
        pytest.skip(f"{kernel} {why_not}")
    if given and not as_format(format).has_global_scale:
        pytest.skip(f"{format} has no global_scale")
    x = special_values(DTYPES[dtype], seeded(format, rule, dtype)).to(device)
    global_scale = torch.tensor(0.0123, device=device) if given else None
    got = kernel.launch(x, as_format(format), rule, global_scale)
    ran.add((kernel.name, device))
    want = reference_quantize(x, format, scale_rule=rule, global_scale=global_scale)
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.data, want.data)
    if want.global_scale is not None:
        assert torch.equal(got.global_scale, want.global_scale)


def test_every_kernel_ran_on_its_own_device():
    """Runs after the others in this file; a kernel that no case reached is not tested."""
    for device in DEVICES:
        arch = arch_of(torch.device(device))
        for kernel in kernels():
            here = not kernel.archs or arch in kernel.archs
            usable = here and _some_problem(kernel, arch)
            assert not usable or (kernel.name, device) in ran, f"{kernel} ran no case on {device}"


def _some_problem(kernel: Kernel, arch: str) -> bool:
    """Whether the kernel accepts a plain problem of its kind here (its compiler or library may be missing)."""
    a, b = kernel.operands[0]
    layout, data_layout = (kernel.b_layouts or ((LINEAR, LINEAR),))[0]
    rule = FORMATS[b].scale_rules[0] if kernel.op == "quantize" else ""
    problem = Problem(
        kernel.op,
        8,
        128,
        512,
        a=a,
        b=b,
        out=kernel.outs[0],
        rule=rule,
        arch=arch,
        b_layouts=(layout.name, data_layout.name),
    )
    return kernel.why_not(problem) is None


def test_names_are_unique():
    names = [kernel.name for kernel in kernels()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kernel", kernels(), ids=str)
def test_digest_covers_real_files(kernel):
    assert len(kernel.digest) == 64
