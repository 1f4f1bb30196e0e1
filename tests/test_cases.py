"""Faults met in other FP4 software, as small inputs and right values: one test a case, its number in the docstring.

Operands are such that the right answer is exact, so results are compared for equality. A test of kernels runs every
one that can run here, by name, in every layout and with every kind of activation that it takes; the others say why.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from checks import poisoned_empty, random_codes, random_dense
from torch import Tensor
from torch._subclasses import FakeTensorMode

import nibblas as nb
from nibblas import operators, reference
from nibblas.formats import FORMATS, MXFP4, NVFP4, Format, e2m1_encode, pack
from nibblas.kernel import PLAIN, Kernel
from nibblas.kernels import kernels
from nibblas.problem import Problem
from nibblas.tensor import ScaledTensor

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
each_device = pytest.mark.parametrize("device", DEVICES)
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=str)


def each_kernel(op: str):
    return pytest.mark.parametrize("kernel", [kernel for kernel in kernels() if kernel.op == op], ids=str)


def each_linear(test):
    return each_device(each_format(each_kernel("linear")(test)))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Integers -4..4 in fp32: each is an e2m1 value, and their sums are exact."""
    return torch.randint(-4, 5, shape, generator=generator).float()


def fp4(values: Tensor, format: Format, scale: Tensor | None = None, global_scale: Tensor | None = None):
    """e2m1 values (.., K) under scale codes, those of 1.0 by default."""
    if scale is None:
        shape = (*values.shape[:-1], values.shape[-1] // format.block_size)
        scale = torch.full(shape, format.scale_code.one, dtype=torch.uint8, device=values.device)
    return ScaledTensor(pack(e2m1_encode(values)), scale, format, global_scale)


def powers(exponents: Tensor, format: Format) -> Tensor:
    """Scale codes of 2^exponents, of normal size."""
    return (exponents + 127 if format is MXFP4 else exponents + 7 << 3).to(torch.uint8)


def runs(kernel: Kernel, x: Tensor, w: ScaledTensor, bias: Tensor | None = None, **options):
    """(x, w) as the kernel takes them: fp32, bf16 and FP4 values of x, layouts of w. Skips with its reason if none."""
    taken, refusals = [], []
    for a in (x, x.bfloat16(), fp4(x, w.format)):
        for layout, data_layout in kernel.b_layouts or PLAIN:
            problem = operators.linear_problem(a, w, bias, torch.float32, **options)
            reason = kernel.why_not(replace(problem, b_layouts=(layout.name, data_layout.name)))
            if reason is None:
                taken.append((a, w.with_layout(layout, data_layout)))
            else:
                refusals.append(reason)
    if not taken:
        pytest.skip(f"{kernel} {refusals[0]}")
    return taken


# --- values --------------------------------------------------------------------------------------------------------


@each_linear
def test_zeros_times_anything_are_zero(kernel, format, device):
    """B02: the global scale of zeros is no infinity, so no product is NaN."""
    zeros, dense = torch.zeros(40, 64, device=device), random_dense((3, 64), torch.float32, seeded(), device)
    for x, w in runs(kernel, dense, nb.quantize(zeros, format)):
        assert nb.linear(x, w, kernel=kernel.name, out_dtype=torch.float32).eq(0).all()
    codes = random_codes((40, 64), format, seeded(), device=device)
    for x, w in runs(kernel, zeros[:3], codes):
        assert nb.linear(x, w, kernel=kernel.name, out_dtype=torch.float32).eq(0).all()


@each_device
@each_format
def test_quantized_zeros_as_activations(format, device):
    """B02: and their global scale meets that of the weights."""
    w = random_codes((40, 64), format, seeded(), device=device)
    assert nb.linear(nb.quantize(torch.zeros(3, 64, device=device), format), w).eq(0).all()


@each_device
@each_format
@each_kernel("quantize")
def test_ties_go_to_even(kernel, format, device):
    """B06: at scale 1, on every path."""
    values = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=device)
    x = torch.cat((values, -values)).repeat(2).unsqueeze(0)
    options = {"global_scale": 1.0} if format.has_global_scale else {"scale_rule": "floor"}
    w = quantized(kernel, x, format, **options)
    assert w.scale.eq(format.scale_code.one).all()
    assert w.data[0, :8].tolist() == [0x07, 0x22, 0x44, 0x66, 0x8F, 0xAA, 0xCC, 0xEE]


def quantized(kernel: Kernel, x: Tensor, format: Format, **options) -> ScaledTensor:
    """x by the named quantizer; skips with its reason if it can't."""
    try:
        return nb.quantize(x, format, kernel=kernel.name, **options)
    except nb.NoKernelError as refusal:
        pytest.skip(str(refusal))


@each_linear
def test_a_nan_scale_takes_its_row_alone(kernel, format, device):
    """B09: also over codes 0, and for both NaN of e4m3."""
    for byte in {format.scale_code.nan, 0xFF}:
        w = fp4(torch.zeros(3, 64), format)
        w.scale[1, 1] = byte
        for x, b in runs(kernel, torch.ones(1, 64, device=device), w.to(device)):
            y = nb.linear(x, b, kernel=kernel.name, out_dtype=torch.float32)
            assert y.isnan().tolist() == [[False, True, False]]


@each_device
@each_kernel("linear")
def test_every_e4m3_scale_in_a_product(kernel, device):
    """B12: 16 ones under each of the 256 bytes; subnormal, negative and NaN ones too."""
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    need = 16 * scale.view(torch.float8_e4m3fn).float().T
    w = fp4(torch.ones(256, 16), NVFP4, scale).to(device)
    for x, b in runs(kernel, torch.ones(1, 16, device=device), w):
        y = nb.linear(x, b, kernel=kernel.name, out_dtype=torch.float32)
        torch.testing.assert_close(y.cpu(), need, rtol=0, atol=0, equal_nan=True)


@each_linear
def test_repeats_are_identical(kernel, format, device):
    """B15: twenty calls, byte for byte."""
    w = random_codes((64, 4096), format, seeded(), scale_bytes=MODERATE[format], device=device)
    for x, b in runs(kernel, random_dense((4, 4096), torch.float32, seeded(1), device), w):
        first = nb.linear(x, b, kernel=kernel.name)
        assert first.isfinite().all()
        assert first.any()
        for _ in range(19):
            assert torch.equal(nb.linear(x, b, kernel=kernel.name), first)


MODERATE = {NVFP4: (40, 56), MXFP4: (121, 125)}


@each_linear
def test_batch_invariant_rows(kernel, format, device):
    """B15: a row alone has the bits that it has among others."""
    w = random_codes((64, 4096), format, seeded(), scale_bytes=MODERATE[format], device=device)
    dense = random_dense((64, 4096), torch.float32, seeded(1), device)
    options = {"kernel": kernel.name, "batch_invariant": True, "out_dtype": torch.float32}
    for x, b in runs(kernel, dense, w, batch_invariant=True):
        alone = nb.linear(rows(x, 0, 1), b, **options)
        assert alone.any()
        for M in (4, 8, 64):
            assert torch.equal(nb.linear(rows(x, 0, M), b, **options)[:1], alone)


def rows(x: Tensor | ScaledTensor, start: int, end: int):
    return x[start:end] if isinstance(x, Tensor) else x.slice(0, start, end)


# --- layouts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned():
    """What torch allocates starts as NaN, or as the largest integer: bytes 0xFF."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2, dtype=torch.uint8).eq(0xFF).all()
    yield
    torch.use_deterministic_algorithms(False)


@each_device
@each_kernel("quantize")
def test_padding_of_blocked_scales_is_zero(kernel, device, poisoned):
    """B17: M = 5, K = 80: 25 scales in 128 x 8 bytes, whatever the memory held."""
    x = random_dense((5, 80), torch.float32, seeded(), device)
    first = quantized(kernel, x, NVFP4).with_layout(nb.BLOCKED_128x4)
    assert first.scale.shape == (128, 8)
    inside = nb.BLOCKED_128x4.to(torch.ones(5, 5, dtype=torch.bool, device=device))
    assert inside.sum() == 25
    assert first.scale[inside].all()
    assert not first.scale[~inside].any()
    for _ in range(9):
        again = nb.quantize(x, NVFP4, kernel=kernel.name).with_layout(nb.BLOCKED_128x4)
        assert torch.equal(again.scale, first.scale)
        assert torch.equal(again.data, first.data)


@each_linear
def test_every_scale_is_read_where_it_lies(kernel, format, device):
    """B21: a row of x meets one column of scales, whose exponents are the digits of a scale's place: all differ."""
    N, blocks, lowest, base = 300, 9, *{NVFP4: (-6, 15), MXFP4: (-63, 127)}[format]
    place = torch.arange(N * blocks).view(N, blocks)
    digits = [place // base**i % base for i in range(3)]
    assert len(set(zip(*(d.flatten().tolist() for d in digits), strict=True))) == N * blocks
    x = torch.zeros(blocks, blocks, format.block_size)
    for m in range(blocks):
        x[m, m, 5 * m % format.block_size] = 1
    for digit in digits:
        w = fp4(torch.ones(N, blocks * format.block_size), format, powers(digit + lowest, format))
        for a, b in runs(kernel, x.flatten(1).to(device), w.to(device)):
            y = nb.linear(a, b, kernel=kernel.name, out_dtype=torch.float32)
            assert torch.equal(y.cpu(), torch.exp2(digit.T.float() + lowest))


@each_linear
def test_shards_of_K_add_up(kernel, format, device):
    """B23: four shards that are no whole tiles of any layout, exactly the product of the whole."""
    shard = {NVFP4: 464, MXFP4: 480}[format]
    K, generator = 4 * shard, seeded()
    scale = powers(torch.randint(0, 3, (40, K // format.block_size), generator=generator), format)
    w = fp4(integers((40, K), generator), format, scale).to(device)
    x = integers((3, K), generator).to(device)
    exact = reference.linear(x, w).float()
    assert exact.any()
    for a, b in runs(kernel, x, w):
        assert torch.equal(nb.linear(a, b, kernel=kernel.name, out_dtype=torch.float32), exact)
        total = torch.zeros_like(exact)
        for start in range(0, K, shard):
            part = a[:, start : start + shard] if isinstance(a, Tensor) else a.slice(1, start, start + shard)
            total += nb.linear(part, b.slice(1, start, start + shard), kernel=kernel.name, out_dtype=torch.float32)
        assert torch.equal(total, exact)


@each_linear
def test_even_k_is_the_low_nibble(kernel, format, device):
    """B24: bytes 0x52 are 1.0, 3.0; under a scale of 2 the first is 2, the second 6."""
    w = fp4(
        torch.tensor([1.0, 3.0]).repeat(5, 32), format, powers(torch.ones(5, 64 // format.block_size).int(), format)
    )
    assert w.data.eq(0x52).all()
    x = torch.zeros(2, 64, device=device)
    x[0, 0] = x[1, 1] = 1
    for a, b in runs(kernel, x, w.to(device)):
        y = nb.linear(a, b, kernel=kernel.name, out_dtype=torch.float32)
        assert y.tolist() == [[2.0] * 5, [6.0] * 5]


# --- shapes --------------------------------------------------------------------------------------------------------


@each_linear
@pytest.mark.parametrize("K", [64, 512, 4096])
def test_splits_of_K_read_their_own_scales(kernel, format, K, device):
    """B27: scales 2^(g % 4) along K, integers, few rows: however K is split the sum is exact."""
    generator, blocks = seeded(K), K // format.block_size
    w = fp4(integers((24, K), generator), format, powers((torch.arange(blocks) % 4).expand(24, blocks), format))
    x = integers((2, K), generator).to(device)
    w = w.to(device)
    exact = reference.linear(x, w).float()
    assert exact.any()
    for a, b in runs(kernel, x, w):
        assert torch.equal(nb.linear(a, b, kernel=kernel.name, out_dtype=torch.float32), exact)


@each_linear
def test_no_tail_of_K_is_dropped(kernel, format, device):
    """B28: ones sum to K."""
    for K in {NVFP4: (16, 48, 80, 112, 240), MXFP4: (32, 96, 160, 480)}[format]:
        for a, b in runs(kernel, torch.ones(2, K, device=device), fp4(torch.ones(5, K), format).to(device)):
            assert nb.linear(a, b, kernel=kernel.name, out_dtype=torch.float32).eq(K).all()


@pytest.mark.parametrize(("format", "K"), [(NVFP4, 24), (NVFP4, 33), (MXFP4, 48), (MXFP4, 33)], ids=str)
def test_parts_of_blocks_are_refused(format, K):
    """B28: the message names K and the block size."""
    with pytest.raises(ValueError, match=rf"K = {K} is not a multiple of {format}'s block_size {format.block_size}"):
        nb.quantize(torch.ones(2, K), format)
    if K % 2 == 0:
        scale = torch.full((2, -(-K // format.block_size)), format.scale_code.one, dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"K = {K} is not a multiple"):
            ScaledTensor(torch.zeros(2, K // 2, dtype=torch.uint8), scale, format)


def test_no_rows_have_no_blocked_scales():
    """B29"""
    w = nb.quantize(torch.empty(0, 64), NVFP4).with_layout(nb.BLOCKED_128x4)
    assert w.data.shape == (0, 32)
    assert w.scale.numel() == 0
    assert nb.linear(torch.ones(0, 64), nb.quantize(torch.ones(24, 64), NVFP4)).shape == (0, 24)


@each_device
@pytest.mark.parametrize(
    ("sizes", "want"), [([0, 3, 0, 5, 0], [64.0] * 3 + [256.0] * 5), ([0, 0], []), ([8], [32.0] * 8)], ids=str
)
@each_kernel("grouped_linear")
def test_empty_groups_shift_nothing(kernel, sizes, want, device):
    """B30: the global scale of group g is 2^g, K = 32, all else is ones; out starts as NaN."""
    G, M = len(sizes), sum(sizes)
    w = fp4(torch.ones(G, 24, 32), NVFP4, global_scale=2.0 ** torch.arange(G)).to(device)
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0)
    out = poisoned_empty((M, 24), torch.float32, device)
    dense = torch.ones(M, 32, device=device)
    y = grouped(kernel, dense, w, offsets, out=out)
    assert y.tolist() == [[value] * 24 for value in want]


def grouped(kernel: Kernel, x: Tensor, w: ScaledTensor, offsets: Tensor, **options) -> Tensor:
    """A grouped product in fp32 by the named kernel; skips with its reason if it can't."""
    a_layout, *_ = kernel.a_layouts or PLAIN
    layout, data_layout = (kernel.b_layouts or PLAIN)[0]
    problem = Problem("grouped_linear", M=max(len(x), 1), N=w.shape[1], K=w.K, a="fp32", b=w.format.name, out="fp32")
    refusals = []
    for a, name in ((x, "fp32"), (fp4(x, w.format), w.format.name)):
        layouts = {"a_layouts": tuple(l.name for l in a_layout), "b_layouts": (layout.name, data_layout.name)}
        reason = kernel.why_not(replace(problem, a=name, arch=operators.arch_of(w.device), **layouts))
        if reason is None:
            a = a if isinstance(a, Tensor) else a.with_layout(*a_layout)
            b = w.with_layout(layout, data_layout)
            return nb.grouped_linear(a, b, offsets, kernel=kernel.name, out_dtype=torch.float32, **options)
        refusals.append(reason)
    pytest.skip(f"{kernel} {refusals[0]}")


@each_device
@each_format
@each_kernel("quantize")
def test_more_rows_than_a_grid_dimension_holds(kernel, format, device):
    """B33: M = 262145 is its parts."""
    x = random_dense((262_145, 32), torch.bfloat16, seeded(), device)
    options = {"global_scale": 0.01} if format.has_global_scale else {}
    whole = quantized(kernel, x, format, **options)
    for start, end in ((0, 65_536), (65_536, 262_144), (262_144, 262_145)):
        part = nb.quantize(x[start:end], format, kernel=kernel.name, **options)
        assert torch.equal(whole.data[start:end], part.data)
        assert torch.equal(whole.scale[start:end], part.scale)


@each_device
@each_format
@each_kernel("grouped_linear")
def test_more_routed_rows_than_a_grid_dimension_holds(kernel, format, device):
    """B33: 65536 routed rows are two halves."""
    M, half, generator = 65_536, 32_768, seeded()
    x = integers((M, 32), generator).to(device)
    w = fp4(integers((3, 16, 32), generator), format).to(device)
    offsets = torch.tensor([0, 10_000, 40_000, M], device=device)
    whole = grouped(kernel, x, w, offsets)
    assert whole.any(1).sum() > 0.9 * M
    assert torch.equal(whole[:half], grouped(kernel, x[:half], w, offsets.clamp(max=half)))
    assert torch.equal(whole[half:], grouped(kernel, x[half:], w, (offsets - half).clamp(min=0)))


@each_linear
def test_bias_counts_once(kernel, format, device):
    """B36: however K is split, in the kernel or between two of them, 3 stays 3."""
    w, bias = fp4(torch.ones(24, 4096), format).to(device), torch.full((24,), 3.0, device=device)
    for x, b in runs(kernel, torch.zeros(2, 4096, device=device), w, bias):
        assert nb.linear(x, b, bias, kernel=kernel.name, out_dtype=torch.float32).eq(3).all()
        halves = [(x[:, s] if isinstance(x, Tensor) else x.slice(1, s.start, s.stop), s) for s in HALVES]
        (a0, s0), (a1, s1) = halves
        first = nb.linear(a0, b.slice(1, s0.start, s0.stop), bias, kernel=kernel.name, out_dtype=torch.float32)
        rest = nb.linear(a1, b.slice(1, s1.start, s1.stop), kernel=kernel.name, out_dtype=torch.float32)
        assert (first + rest).eq(3).all()


HALVES = (slice(0, 2048), slice(2048, 4096))


# --- dispatch ------------------------------------------------------------------------------------------------------


@each_device
@each_format
@each_kernel("linear")
def test_a_named_kernel_answers_or_refuses(kernel, format, device):
    """B48: out is right or untouched, never half a result."""
    layout, data_layout = (kernel.b_layouts or PLAIN)[0]
    w = fp4(torch.ones(24, 64), format).to(device)
    if getattr(layout, "format", format) == format:
        w = w.with_layout(layout, data_layout)
    out = torch.full((3, 24), torch.nan, device=device)
    refusal = None
    try:
        nb.linear(torch.ones(3, 64, device=device), w, out=out, kernel=kernel.name)
    except nb.NoKernelError as error:
        refusal = str(error)
    if refusal is None:
        assert out.eq(64).all()
    else:
        assert kernel.name in refusal
        assert out.isnan().all()


def test_native_kernels_are_not_for_hopper():
    """B48: no kernel that needs FP4 tensor cores is offered where there are none."""
    native = [kernel for kernel in kernels() if "native" in kernel.name]
    assert len(native) >= 2
    for kernel in native:
        a, b = kernel.operands[0]
        layouts = tuple(layout.name for layout in (kernel.b_layouts or PLAIN)[0])
        problem = Problem(kernel.op, 64, 128, 512, a=a, b=b, a_layouts=layouts, b_layouts=layouts, arch="sm_90")
        assert "this is sm_90" in str(kernel.why_not(problem))


@each_device
@each_kernel("linear")
def test_doubling_a_global_scale_doubles_exactly(kernel, device):
    """B50: on every path; None is exactly 1."""
    w = random_codes((24, 64), NVFP4, seeded(), scale_bytes=MODERATE[NVFP4], device=device)
    for x, b in runs(kernel, random_dense((3, 64), torch.float32, seeded(1), device), w):
        given = (b.global_scale, 2 * b.global_scale, torch.ones_like(b.global_scale), None)
        once, twice, one, none = (
            nb.linear(x, replace(b, global_scale=g), kernel=kernel.name, out_dtype=torch.float32) for g in given
        )
        assert once.any()
        assert torch.equal(twice, 2 * once)
        assert torch.equal(one, none)


# --- dtypes --------------------------------------------------------------------------------------------------------


@each_format
def test_traced_shapes_are_the_real_ones(format):
    """B51: M = 5 and a K of five NVFP4 blocks; codes, scales in two layouts, the product."""
    K = 5 * format.block_size
    x, w = torch.randn(5, K), nb.quantize(torch.randn(24, K), format)
    for layout in (nb.LINEAR, nb.BLOCKED_128x4):
        real = nb.quantize(x, format).with_layout(layout)
        with FakeTensorMode():
            traced = nb.quantize(torch.empty(5, K), format).with_layout(layout)
        assert (traced.data.shape, traced.scale.shape) == (real.data.shape, real.scale.shape)
    arguments = (*operators.as_arguments(x), *operators.as_arguments(w), None, None, False, torch.float32)
    torch.library.opcheck(torch.ops.nibblas.linear.default, arguments, test_utils="test_faketensor")


@each_device
@each_kernel("quantize")
def test_fp32_is_quantized_from_fp32(kernel, device):
    """B53: 3.9999 lies below 4, its bf16 does not."""
    x = torch.full((1, 32), 3.9999, device=device)
    assert quantized(kernel, x, MXFP4, scale_rule="floor").scale.item() == 126
    assert quantized(kernel, x.bfloat16(), MXFP4, scale_rule="floor").scale.item() == 127


@each_linear
def test_fp32_bias_and_activations_are_not_narrowed(kernel, format, device):
    """B53: -1 + (1 + 2^-12) in bf16 is 2^-12; a bf16 bias would give 0. So would a bf16 activation."""
    w, fine = fp4(torch.ones(5, 64), format).to(device), 1 + 2.0**-12
    x, bias = torch.zeros(1, 64, device=device), torch.full((5,), fine, device=device)
    x[0, 7] = -1
    for a, b in runs(kernel, x, w, bias):
        y = nb.linear(a, b, bias, kernel=kernel.name, out_dtype=torch.bfloat16)
        assert y.dtype == torch.bfloat16
        assert y.eq(2.0**-12).all()
        if isinstance(a, Tensor) and a.dtype == torch.float32:
            a[0, 9] = fine
            assert nb.linear(a, b, kernel=kernel.name, out_dtype=torch.bfloat16).eq(2.0**-12).all()
            a[0, 9] = 0


# --- memory, devices, threads --------------------------------------------------------------------------------------


def test_out_that_overlaps_an_operand_is_refused():
    """B56: grouped, gated and MoE products; nothing has been written by then."""
    buffer = integers((65, 64), seeded())
    x, kept = buffer[:64], buffer.clone()
    w = random_codes((2, 64, 64), NVFP4, seeded(1), scale_bytes=MODERATE[NVFP4])
    ids, share, offsets = torch.zeros(64, 1, dtype=torch.int64), torch.ones(64, 1), torch.tensor([0, 30, 64])
    for out in (x, buffer[1:]):
        for op, run in {
            "grouped_linear": lambda out: nb.grouped_linear(x, w, offsets, out=out),
            "gated_linear": lambda out: nb.gated_linear(x, w[0], w[1], out=out),
            "moe": lambda out: nb.moe(x, ids, share, w, w, w, out=out),
        }.items():
            with pytest.raises(ValueError, match=f"{op}: out shares memory with an operand"):
                run(out)
            assert torch.equal(buffer, kept)
            assert run(torch.empty(64, 64)).any()


@each_format
def test_quantizing_into_the_memory_of_the_input(format):
    """B56: the bytes are those that memory of its own would get."""
    buffer = integers((4, 64), seeded())
    apart = nb.quantize(buffer, format)
    data = buffer.view(torch.uint8).flatten()[: apart.data.numel()].view(apart.data.shape)
    out = replace(apart, data=data, scale=torch.empty_like(apart.scale))
    nb.quantize(buffer, format, out=out)
    assert torch.equal(out.data, apart.data)
    assert torch.equal(out.scale, apart.scale)


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    """B58: every launch stands inside the guard of the operands' device, and the guard is torch.cuda.device."""
    current: list[torch.device] = []

    @contextmanager
    def guard(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with operators.on_device(torch.device("cuda", 1)):
        assert current == [torch.device("cuda", 1)]
    with operators.on_device(torch.device("cuda", 0)):
        assert not current  # it is the current one
    with operators.on_device(torch.device("cpu")):
        assert not current

    launched, choose = [], operators.choose

    def watched(problem, device, name=None):
        kernel = choose(problem, device, name)

        def launch(*arguments, **options):
            launched.append((problem.op, list(current)))
            return kernel.launch(*arguments, **options)

        return replace(kernel, launch=launch)

    monkeypatch.setattr(operators, "choose", watched)
    monkeypatch.setattr(operators, "on_device", guard)
    x, w = torch.ones(4, 64), fp4(torch.ones(2, 24, 64), NVFP4)
    nb.linear(x, w[0], kernel="torch_linear")
    nb.bmm(torch.ones(2, 4, 64), w)
    nb.grouped_linear(x, w, torch.tensor([0, 2, 4]))
    nb.gated_linear(x, w[0], w[1])
    nb.quantize(x, NVFP4)
    assert {op for op, _ in launched} == {"linear", "grouped_linear", "gated_linear", "quantize"}
    assert all(guards and set(guards) == {torch.device("cpu")} for _, guards in launched)
    assert not current


def test_operands_of_two_devices_are_refused():
    """B58: parts of a tensor, and operands of a product."""
    w = fp4(torch.ones(24, 64), NVFP4, global_scale=torch.tensor(1.0))
    for moved in ("data", "scale", "global_scale"):
        with pytest.raises(ValueError, match="ScaledTensor: parts are on different devices: cpu, meta"):
            replace(w, **{moved: getattr(w, moved).to("meta")})
    for x, b, bias in (
        (torch.ones(3, 64, device="meta"), w, None),
        (torch.ones(3, 64), w.to("meta"), None),
        (torch.ones(3, 64), w, torch.ones(24, device="meta")),
    ):
        with pytest.raises(ValueError, match="linear: operands are on different devices: cpu, meta"):
            nb.linear(x, b, bias)


FIRST_CALLS = """
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import nibblas as nb

random.seed(0)
shapes = [(random.randint(1, 40), 8 * random.randint(1, 24), 32 * random.randint(1, 16)) for _ in range(50)]
inputs = [(torch.randn(M, K), torch.randn(N, K)) for M, N, K in shapes]
barrier = threading.Barrier(8)

def run(x, weight):
    w = nb.quantize(weight, "nvfp4")
    return w.data, w.scale, nb.linear(x, w)

def share(i):
    barrier.wait()
    return [run(*pair) for pair in inputs[i::8]]

with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(share, range(8)))
for i in range(8):
    for got, pair in zip(found[i], inputs[i::8], strict=True):
        assert all(map(torch.equal, got, run(*pair)))
print(sum(map(len, found)), "are equal")
"""


def run_alone(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_threads_that_all_call_first(tmp_path):
    """B59: 50 shapes in 8 threads, with nothing in the cache, equal the serial ones."""
    assert run_alone(FIRST_CALLS, NIBBLAS_CACHE=str(tmp_path / "cache"), OMP_NUM_THREADS="1") == "50 are equal"


BARE = """
import sys

blocked = ["triton", "cuda", "cutlass"]
sys.modules |= dict.fromkeys(blocked)

import torch

import nibblas as nb
from nibblas.quantize import quantize

assert not torch.cuda.is_available()
for format in (nb.NVFP4, nb.MXFP4):
    x = torch.randn(24, 64)
    w, fast = quantize(x, format), nb.quantize(x, format)
    assert torch.equal(w.data, fast.data) and torch.equal(w.scale, fast.scale)
    y, exact = nb.linear(x, w), nb.reference.linear(x, w)
    assert exact.norm() > 0 and (y - exact).norm() < 1e-5 * exact.norm()
    nb.explain("linear", x, w)
assert all(sys.modules[name] is None for name in blocked)
print("works")
"""


def test_works_without_triton_cuda_and_a_gpu():
    """B73: import, the reference, and the public calls."""
    assert run_alone(BARE, CUDA_VISIBLE_DEVICES="") == "works"
