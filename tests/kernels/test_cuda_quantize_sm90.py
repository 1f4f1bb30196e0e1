"""The Hopper quantizer: its machine code, and its bytes against the reference's, on a GPU or compiled for this CPU."""

import ctypes
import re
import subprocess
from dataclasses import replace
from functools import cache

import pytest
import torch
from checks import random_dense
from hopper import COMPILER, WHERE, generator, library_for_cpu, on_hopper

from nibblas.formats import FORMATS, MXFP4, NVFP4, Format
from nibblas.index.machine_code import disassembler
from nibblas.kernels import cuda_module
from nibblas.kernels import cuda_quantize_sm90 as kernel
from nibblas.problem import DTYPES, Problem
from nibblas.quantize import SMALLEST_GLOBAL_SCALE, quantize

RULES = [(format, rule) for format in FORMATS.values() for rule in format.scale_rules if rule in kernel.RULES]
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
every_rule = pytest.mark.parametrize(("format", "rule"), RULES, ids=str)
GIVEN = (None, 1.0, 0.0123, 1 - 2.0**-24, 2.0**-140, 3e38)

# What the device code says in PTX, or takes from CUDA, beyond what cuda_on_cpu.h has.
IN_CPLUSPLUS = """
#include <cmath>

static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
static inline uint32_t __float_as_uint(float value) { return bits_as<uint32_t>(value); }

static inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
    uint32_t most = 0;
    for (int lane = 0; lane < 32; lane++) most = max(most, __shfl_sync(mask, value, lane));
    return most;
}

static inline uint32_t larger_half(uint32_t a, uint32_t b, uint32_t infinity) {
    a &= 0x7FFF, b &= 0x7FFF;
    return a > infinity || b > infinity ? 0x7FFF : max(a, b);
}

static inline uint32_t larger(uint32_t a, uint32_t b) {
    const uint32_t sign = (a ^ b) & (TYPE ? 0x80008000u : 0x80000000u);
    if (!TYPE) {
        a &= 0x7FFFFFFF, b &= 0x7FFFFFFF;
        return a > 0x7F800000 || b > 0x7F800000 ? 0x7FFFFFFF : max(a, b) | sign;
    }
    const uint32_t infinity = TYPE == 1 ? 0x7F80 : 0x7C00;
    return larger_half(a >> 16, b >> 16, infinity) << 16 | larger_half(a, b, infinity) | sign;
}

static inline uint8_t float_to_e4m3(float value) {
    if (value != value) return 0x7F;
    uint8_t code = 0;
    // The code below each midpoint is the even one where it is 0, 2, ..
    while (code < 0x7E) {
        const float midpoint = (e4m3_to_float(code) + e4m3_to_float(code + 1)) / 2;
        if (code % 2 ? value < midpoint : value <= midpoint) break;
        code++;
    }
    return code;
}

static inline float __fmaf_ru(float a, float b, float c) {
    const float nearest = fmaf(a, b, c);
    return fma((double)a, b, (double)c - nearest) > 0 ? nextafterf(nearest, INFINITY) : nearest;
}

static int units_off;  // of approximate_inverse: as far as the hardware's may be

static inline float approximate_inverse(float x) { return bits_as<float>(bits_as<uint32_t>(1.0f / x) + units_off); }

static inline uint4 load_vector(const uint4* from) {
    if ((uintptr_t)from % 16) abort();
    return *from;
}

static inline void start_next_kernel() {}
static inline void wait_for_last_kernel() {}
"""
RUN = """
extern "C" void run(const Arguments* arguments, int first, int ctas, int threads) {
    if (first) run_blocks([arguments] { nibblas_amax(*arguments); }, ctas, 1, threads);
    else run_blocks([arguments] { nibblas_quantize(*arguments); }, ctas, 1, threads);
}

// For every divisor in [1, 2): the elements of 8 or 11 bits next to what separates codes, .25, .75, 1.25 and 1.75 times
// the divisor; between 2 and 8 the same numbers separate codes. How many get another code than their rounded quotient.
extern "C" int wrong_quotients(int off) {
    units_off = off;
    const float separate[] = {0.25f, 0.75f, 1.25f, 1.75f};
    int wrong = 0;
    for (u32 bits = 0x3F800000; bits < 0x40000000; bits++) {
        const float d = __uint_as_float(bits);
        const Divisor divisor(d);
        for (int i = 0; i < 4; i++) {
            const float near = separate[i] * d;  // exact but for 1.25 and 1.75; what it is cut to is the same
            const u32 unit = 1u << (TYPE == BF16 ? 16 : 13);
            const u32 below = __float_as_uint(near) & -unit;
            for (u32 x = below - unit; x <= below + unit; x += unit) {
                const float value = __uint_as_float(x), quotient = value / d;
                const int code = i + (i % 2 ? quotient >= separate[i] : quotient > separate[i]);
                wrong += (rounded(divisor.quotient(value)) & 7) != code;
            }
        }
    }
    return wrong;
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The device code compiled for this CPU, by its options."""
    folder = tmp_path_factory.mktemp("cuda_on_cpu")

    @cache
    def library(dtype: torch.dtype, block: int, threads: int, chunks: int) -> ctypes.CDLL:
        values = {"TYPE": cuda_module.TYPES[dtype], "BLOCK": block, "THREADS": threads, "CHUNKS": chunks}
        values |= {"PARTIALS": kernel.PARTIALS, "AMAX_THREADS": kernel.AMAX_THREADS}
        options = ("-O2", "-ffp-contract=off", *(f"-D{name}={value}" for name, value in values.items()))
        return library_for_cpu(folder, kernel.SOURCE, options, RUN, before=IN_CPLUSPLUS)

    return library


@pytest.fixture
def launch(compiled, monkeypatch):
    """kernel.launch, with whatever stands in for a GPU where x is on the CPU, its results poisoned before."""

    class Launch:
        def __init__(self, function, ctas, dtype, format, device, dependent, threads, chunks):
            self.arguments = bytearray(kernel.ARGUMENTS.size)
            self.first, self.ctas = function == "nibblas_amax", ctas
            self.threads = kernel.AMAX_THREADS if self.first else threads
            self.library = compiled(dtype, format.block_size, threads, chunks)

        def __call__(self, stream):
            self.library.run(bytes(self.arguments), self.first, self.ctas, self.threads)

    empty = torch.empty

    def poisoned(*size, **options):
        made = empty(*size, **options)
        made.reshape(-1).view(torch.uint8).fill_(0xFF)
        return made

    def run(x, format, rule, global_scale=None, *, threads=64, **options):
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "PARTIALS", 32 if x.device.type == "cpu" else kernel.PARTIALS)
            patch.setattr(torch, "empty", poisoned)
            if x.device.type == "cpu":
                patch.setattr(kernel, "AMAX_THREADS", 64)
                patch.setattr(kernel, "prepare", Launch)
                patch.setattr(kernel, "_launches", cuda_module.Launches())
                patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
            return kernel.launch(x, format, rule, global_scale, threads=threads, **options)

    return run


def assert_same(got, x: torch.Tensor, format: Format, rule: str, global_scale: torch.Tensor | None = None) -> None:
    """That a result is the reference's, byte for byte."""
    want = quantize(x.cpu(), format, scale_rule=rule, global_scale=None if global_scale is None else global_scale.cpu())
    if want.global_scale is not None:
        assert torch.equal(got.global_scale.cpu(), want.global_scale)
    assert torch.equal(got.scale.cpu(), want.scale)
    assert torch.equal(got.data.cpu(), want.data)
    assert got.scale_rule == rule


def any_bits(dtype: torch.dtype, rows: int, K: int) -> torch.Tensor:
    """Any finite bits; normal values; ties, and for fp32 what is next to them; all sizes; zeros of both signs."""
    g = generator(1)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(integer)
    x = torch.randint(limits.min, limits.max, (rows, K), generator=g, dtype=integer).view(dtype)
    x = torch.where(x.isfinite(), x, 1.0)
    x[1::5] = random_dense(x[1::5].shape, dtype, g)
    steps = torch.tensor([0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0])
    x[2::5] = steps[torch.randint(12, x[2::5].shape, generator=g)].to(dtype)
    if dtype == torch.float32:
        x[2::10] *= 1 + torch.randint(-2, 3, x[2::10].shape, generator=g) * 2.0**-24
    sizes = torch.exp2(torch.randint(-20, 13, (*x[3::5].shape[:1], K // 16, 1), generator=g).float())
    x[3::5] = (torch.randn(*sizes.shape[:2], 16, generator=g) * sizes).view(-1, K).to(dtype)
    x[4::5] = torch.where(torch.rand(x[4::5].shape, generator=g) < 0.9, 0.0, x[4::5])
    x[4] = torch.where(torch.arange(K) % 3 == 0, -0.0, 0.0)
    return x


@pytest.mark.parametrize("device", WHERE)
@every_dtype
@every_rule
def test_any_bits(launch, format, rule, dtype, device):
    x = any_bits(dtype, 40, 1024).to(device)
    for given in GIVEN if format == NVFP4 else (None,):
        given = None if given is None else torch.tensor(given, device=device)
        assert_same(launch(x, format, rule, given), x, format, rule, given)
    # With global scales of their own; those of a type with fp32's exponents also near both ends of it.
    ends = [x[1::5] * 2.0**power for power in (-130, -118, -100, 100, 124)] if dtype != torch.float16 else []
    for part in (x[1::5], x[2::5], x[3::5], *ends):
        assert_same(launch(part, format, rule), part, format, rule)


@pytest.mark.parametrize("device", WHERE)
@every_dtype
@every_rule
def test_nan_and_inf_mark_their_block_alone(launch, format, rule, dtype, device):
    x = random_dense((6, 512), dtype, generator(2))
    x[0, 5], x[1, 40], x[2, 511], x[3, 16:32] = torch.nan, torch.inf, -torch.inf, torch.nan
    x[4] = torch.nan
    x = x.to(device)
    assert_same(launch(x, format, rule), x, format, rule)
    nothing = launch(x[4:5], format, rule)
    assert_same(nothing, x[4:5], format, rule)
    assert format == MXFP4 or nothing.global_scale == SMALLEST_GLOBAL_SCALE


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize(("threads", "chunks"), [(32, 4), (64, 2), (256, 1)])
@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (5, 2080), (17, 1024), (0, 64), (3, 0)], ids=str)
def test_sizes(launch, shape, threads, chunks, device):
    x = random_dense(shape, torch.bfloat16, generator(3), device)
    for format, rule in ((NVFP4, "absmax"), (MXFP4, "even")):
        assert_same(launch(x, format, rule, chunks=chunks, threads=threads), x, format, rule)


@pytest.mark.parametrize("device", WHERE)
@every_dtype
def test_operands_that_lie_anywhere(launch, dtype, device):
    x = random_dense((64, 70), dtype, generator(4), device)
    for view in (x[:, 3:35], x.T[1:65:2], x.flatten()[1:1025].view(8, 128)):
        assert_same(launch(view, MXFP4, "rceil"), view, MXFP4, "rceil")
        assert_same(launch(view, NVFP4, "absmax"), view, NVFP4, "absmax")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("units_off", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_divisor(compiled, dtype, units_off):
    """By whatever approximation of its inverse within a unit in the last place."""
    assert compiled(dtype, 16, 32, 1).wrong_quotients(units_off) == 0


@on_hopper
@every_dtype
@every_rule
def test_large(format, rule, dtype):
    x = random_dense((4099, 7168), dtype, generator(5), "cuda")
    want = quantize(x, format, scale_rule=rule)
    for options in ({}, {"threads": 128, "chunks": 1}, {"threads": 512, "chunks": 2}):
        got = kernel.launch(x, format, rule, None, **options)
        assert torch.equal(got.scale, want.scale)
        assert torch.equal(got.data, want.data)
        assert format == MXFP4 or torch.equal(got.global_scale, want.global_scale)


@on_hopper
def test_sizes_past_32_bits():
    x = torch.zeros(524_416, 4096, dtype=torch.bfloat16, device="cuda")
    x[-1] = random_dense((4096,), torch.bfloat16, generator(6), "cuda")
    x[0] = x[-1]
    for format in FORMATS.values():
        rule = format.scale_rules[0]
        whole, one = (kernel.launch(part, format, rule, None) for part in (x, x[-1:]))
        for row in (0, -1):
            assert torch.equal(whole.data[row], one.data[0])
            assert torch.equal(whole.scale[row], one.scale[0])
        assert not whole.data[1:-1].any()


@on_hopper
def test_streams_and_graph():
    xs = [random_dense((512, 2048), torch.bfloat16, generator(seed), "cuda") for seed in (7, 8)]
    wants = [kernel.launch(x, NVFP4, "absmax", None) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    outs = [[], []]
    for _ in range(100):
        for x, stream, got in zip(xs, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                got.append(kernel.launch(x, NVFP4, "absmax", None))
    torch.cuda.synchronize()
    for got, want in zip(outs, wants, strict=True):
        assert all(torch.equal(q.data, want.data) and torch.equal(q.scale, want.scale) for q in got)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = kernel.launch(xs[0], NVFP4, "absmax", None)
    xs[0].copy_(xs[1])
    for _ in range(3):
        graph.replay()
    assert torch.equal(q.data, wants[1].data)
    assert torch.equal(q.scale, wants[1].scale)
    assert torch.equal(q.global_scale, wants[1].global_scale)


def test_only_the_second_of_two_passes_starts_early(monkeypatch):
    """What comes before x in a stream, or x itself, may be unfinished when a kernel starts early."""
    made = []

    class Launch:
        arguments = bytearray(kernel.ARGUMENTS.size)

        def __init__(self, function, ctas, dtype, format, device, dependent, *options):
            made.append((function, dependent))

        def __call__(self, stream):
            pass

    monkeypatch.setattr(kernel, "prepare", Launch)
    monkeypatch.setattr(kernel, "_launches", cuda_module.Launches())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    x = torch.ones(2, 32)
    for format, rule, given in ((NVFP4, "absmax", torch.ones(())), (NVFP4, "absmax", None), (MXFP4, "even", None)):
        kernel.launch(x, format, rule, given)
    alone = ("nibblas_quantize", False)
    assert made == [alone, ("nibblas_amax", False), ("nibblas_quantize", True), alone]


def test_what_it_takes():
    taken = Problem("quantize", 4096, 0, 7168, a="bf16", b="nvfp4", out="nvfp4", rule="absmax", arch="sm_90")
    (found,) = kernel.KERNELS
    missing = cuda_module.missing()
    for rule in kernel.RULES:
        assert found.why_not(replace(taken, rule=rule)) == missing
    for change, why in (
        ({"rule": "search"}, "takes the rules absmax, floor, even, rceil; asked for search"),
        ({"rule": "four_over_six"}, "asked for four_over_six"),
        ({"arch": "sm_80"}, "runs on sm_90, this is sm_80"),
    ):
        assert why in found.why_not(replace(taken, **change))


@pytest.mark.skipif(cuda_module.missing() is not None, reason=str(cuda_module.missing()))
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@every_dtype
def test_machine_code(dtype, format, chunks, monkeypatch, tmp_path):
    options = []
    monkeypatch.setattr(kernel, "load", lambda source, arch, flags, *rest: options.append((source, arch, flags)))
    monkeypatch.setattr(kernel, "Launch", lambda *arguments, **named: None)
    kernel.prepare("nibblas_quantize", 1, dtype, format, 0, False, 256, chunks)
    ((source, arch, flags),) = options
    cubin, report = cuda_module._compile(source, arch, (*flags, "--ptxas-options=--verbose"))
    assert report.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 2
    # Two CTAs of 256 threads an SM at least, three up to two chunks of 16 bits.
    most = 64 if chunks <= 2 and dtype != torch.float32 else 128
    assert all(int(used) <= most for used in re.findall(r"Used (\d+) registers", report))
    if not (tool := disassembler()):
        pytest.skip("no nvdisasm")
    (tmp_path / "cubin").write_bytes(cubin)
    text = subprocess.run([tool, "-c", tmp_path / "cubin"], capture_output=True, text=True, check=True).stdout
    code = text[text.index(".text.nibblas_quantize:") :]
    assert len(re.findall(r"LDG\.E\.128", code)) == chunks * dtype.itemsize
    assert len(re.findall(r"STG\.E\.64", code)) == chunks
    assert not re.search(r"\b(LDL|STL|ATOM|RED)\b", code)
