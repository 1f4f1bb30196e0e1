"""The Triton kernels on a GPU, beyond what test_kernels.py asks of every kernel: sizes that overflow 32 bits, extreme
scales, every term of a split activation, the path without inline PTX, batch invariance, streams, graphs."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from checks import NARROW, assert_close, assert_product, poisoned_empty, random_codes, random_dense
from hopper import generator, on_hopper

from nibblas import reference
from nibblas.formats import FORMATS, MXFP4, NVFP4
from nibblas.kernels import (
    triton_gated_linear,
    triton_gated_linear_decoded,
    triton_grouped_linear,
    triton_linear,
    triton_linear_decoded,
    triton_linear_decoded_sm90,
    triton_quantize,
)
from nibblas.kernels.torch_linear import decode
from nibblas.kernels.triton_launch import also, target_of
from nibblas.kernels.triton_linear import Config
from nibblas.layouts import LINEAR, BLOCKED_128x4
from nibblas.problem import Problem
from nibblas.quantize import dequantize, quantize

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(
        also(Problem("linear", 1, 32, 32)) is not None, reason=also(Problem("linear", 1, 32, 32)) or "triton is there"
    ),
]


def linear(a, b, bias=None, dtype=torch.float32, **options):
    out = poisoned_empty((*b.shape[:-2], a.shape[-2], b.shape[-2]), dtype, "cuda")
    triton_linear.launch(a, b, bias, out, **options)
    return out


@pytest.mark.parametrize("M", [1, 17, 40, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_every_config(format, dtype, M):
    g = generator(M)
    b = random_codes((200, 4192), format, g, scale_bytes=NARROW[format.name], nan_scales=7, device="cuda")
    a = random_dense((M, 4192), dtype, g, "cuda")
    bias = random_dense((200,), torch.float32, g, "cuda")
    assert_product(a, b, bias, linear(a, b, bias), f"{format} {dtype} M={M}")


@pytest.mark.parametrize("layout", triton_linear.SCALES, ids=str)
@pytest.mark.parametrize("a_format", FORMATS)
@pytest.mark.parametrize("b_format", FORMATS)
def test_fp4_activations_of_either_format(a_format, b_format, layout):
    g = generator(1)
    a = random_codes((70, 480), a_format, g, scale_bytes=NARROW[a_format], device="cuda")
    b = random_codes((130, 480), b_format, g, scale_bytes=NARROW[b_format], device="cuda")
    out = linear(a.with_layout(layout), b.with_layout(layout), dtype=torch.bfloat16)
    assert_product(a, b, None, out, f"{a_format} x {b_format} in {layout}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_e8m0_scale_that_fp32_can_hold(dtype):
    g = generator(2)
    b = random_codes((2000, 128), MXFP4, g, scale_bytes=(0, 240), device="cuda")
    a = random_dense((33, 128), dtype, g, "cuda")
    assert_product(a, b, None, linear(a, b), "e8m0 0..240")


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_every_scale_byte_and_both_decoders(format):
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    data = torch.full((256, format.block_size // 2), 0x12, dtype=torch.uint8, device="cuda")  # codes 2 and 1: 1.0, 0.5
    b = random_codes((256, format.block_size), format, generator(0), global_scale=False, device="cuda")
    b = replace(b, data=data, scale=codes[:, None].contiguous())
    exact = 0.75 * format.block_size * format.scale_code.decode(codes)
    target = target_of(torch.device("cuda", 0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a = torch.ones(1, format.block_size, dtype=dtype, device="cuda")
        for ptx in (True, False):
            out = poisoned_empty((1, 256), torch.float32, "cuda")
            for launch in triton_linear.linear_launches(a, b, None, out, target):
                replace(
                    launch,
                    arguments={**launch.arguments, "PTX": ptx} if "PTX" in launch.arguments else launch.arguments,
                ).run()
            torch.testing.assert_close(out[0], exact, rtol=0, atol=0, equal_nan=True)


def test_splits_agree_and_scale_doubles():
    g = generator(3)
    b = random_codes((256, 512), NVFP4, g, global_scale=False, scale_bytes=(56, 56), device="cuda")
    a = torch.randint(-4, 5, (5, 512), generator=g).to(torch.bfloat16).cuda()  # integers: every sum is exact
    outs = [linear(a, b, config=Config(16, 64, 128, SPLIT=split)) for split in (1, 2, 4, 8)]
    assert all(torch.equal(outs[0], out) for out in outs)
    doubled = linear(a, replace(b, global_scale=torch.tensor(2.0, device="cuda")))
    assert torch.equal(doubled, 2 * outs[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_batch_invariant(dtype):
    g = generator(4)
    b = random_codes((300, 4096), NVFP4, g, device="cuda")
    a = random_dense((300, 4096), dtype, g, "cuda")
    invariant = next(k for k in triton_linear.KERNELS if k.batch_invariant)
    outs = {}
    for M in (1, 8, 65, 300):
        outs[M] = poisoned_empty((M, 300), dtype, "cuda")
        invariant.launch(a[:M], b, None, outs[M])
        assert torch.equal(outs[M], linear(a[:M], b, None, dtype, config=triton_linear.INVARIANT))
    for small, large in pairwise(outs.values()):
        assert torch.equal(small, large[: len(small)])


def test_activations_at_the_edges_of_fp32():
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-126
    a = torch.tensor([largest, -largest, torch.inf, torch.nan, 1 + 2**-23, smallest, 0.0, -1.0], device="cuda")
    a = torch.diag(a).repeat(1, 4)  # [8, 32]
    b = random_codes((16, 32), MXFP4, generator(5), scale_bytes=(126, 127), device="cuda")
    b = replace(b, data=torch.full_like(b.data, 0x22), scale=torch.full_like(b.scale, 125))  # 0.25 each
    out = linear(a, b)
    assert torch.equal(out.nan_to_num(7.0), reference.matmul(a, b).float().nan_to_num(7.0))


def test_sizes_past_32_bits():
    M, K = 524_416, 4096
    x = torch.zeros(M, K, dtype=torch.bfloat16, device="cuda")
    x[-1] = random_dense((K,), torch.bfloat16, generator(6), "cuda")
    x[0] = x[-1]
    given = torch.tensor(0.01, device="cuda")
    for format, global_scale in ((NVFP4, given), (MXFP4, None)):
        rule = format.scale_rules[0]
        whole = triton_quantize.launch(x, format, rule, global_scale)
        one = triton_quantize.launch(x[-1:], format, rule, global_scale)
        for row in (0, -1):
            assert torch.equal(whole.data[row], one.data[0])
            assert torch.equal(whole.scale[row], one.scale[0])
        assert torch.equal(triton_quantize.dequantize(whole, torch.bfloat16)[-1], dequantize(one, torch.bfloat16)[0])
        del whole
    b = random_codes((4224, K), NVFP4, generator(7), device="cuda")
    out = linear(x, b, dtype=torch.bfloat16)
    exact = linear(x[-1:], b, dtype=torch.float32)
    for row in (0, -1):
        torch.testing.assert_close(out[row].float(), exact[0], rtol=2**-8, atol=1e-3 * exact.abs().max().item())
    assert not out[1:-1].any()


def test_many_rows():
    x = random_dense((262_145, 32), torch.float32, generator(8), "cuda")
    got, want = triton_quantize.launch(x, MXFP4, "even", None), quantize(x.cpu(), MXFP4, scale_rule="even")
    assert torch.equal(got.data.cpu(), want.data)
    assert torch.equal(got.scale.cpu(), want.scale)
    w = random_codes((2, 16, 32), MXFP4, generator(9), scale_bytes=NARROW["mxfp4"], device="cuda")
    offsets = torch.tensor([0, 65_536, 262_145], device="cuda")
    out = poisoned_empty((262_145, 16), torch.float32, "cuda")
    triton_grouped_linear.launch(x, w, offsets, None, out)
    for g, (start, end) in enumerate([(0, 65_536), (65_536, 262_145)]):
        assert_product(x[start:end], w[g], None, out[start:end], f"group {g}")


@pytest.mark.parametrize("M", [9, 130, 600])
def test_grouped_with_rows_of_no_group(M):
    g = generator(M)
    w = random_codes((3, 72, 160), NVFP4, g, device="cuda")
    x = random_dense((M, 160), torch.bfloat16, g, "cuda")
    offsets = torch.tensor([2, 2, M // 2, M - 3], dtype=torch.int32, device="cuda")
    out = poisoned_empty((M, 72), torch.float32, "cuda")
    triton_grouped_linear.launch(x, w, offsets, None, out)
    assert not out[:2].any()
    assert not out[-3:].any()
    for i, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            assert_product(x[start:end], w[i], None, out[start:end], f"group {i}")


@pytest.mark.parametrize("M", [3, 70, 300])
def test_gated_split_or_not(M):
    g = generator(M)
    gate, up = (random_codes((200, 4192), MXFP4, g, scale_bytes=(117, 121), device="cuda") for _ in "ab")
    x = random_dense((M, 4192), torch.float16, g, "cuda")
    out = poisoned_empty((M, 200), torch.float32, "cuda")
    triton_gated_linear.launch(x, gate, up, None, None, "silu", out)
    exact = reference.gated_linear(x, gate, up)
    size = (reference.magnitude(x, gate) + 1) * (reference.magnitude(x, up) + 1)
    assert_close(out, exact, torch.float32, K=4192, what=f"gated M={M}", magnitude=size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("format", "rule"), [(f, rule) for f in FORMATS.values() for rule in f.scale_rules], ids=str)
def test_quantize_any_bits(format, rule, dtype):
    """Any finite bits, with rows of one magnitude: the largest, the smallest, near ties and far apart."""
    g = generator(10)
    shape = (512, 512) if rule == "search" else (2048, 1024)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    bits = torch.randint(torch.iinfo(integer).min, torch.iinfo(integer).max, shape, generator=g, dtype=integer)
    x = bits.view(dtype)
    x = torch.where(x.isfinite(), x, 1.0)
    x[1::3] = random_dense((len(x[1::3]), shape[1]), dtype, g)
    steps = torch.tensor([0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[2::3] = steps[torch.randint(9, (len(x[2::3]), shape[1]), generator=g)].to(dtype)
    if dtype == torch.float32:
        x[2::6] *= 1 + torch.randint(-2, 3, x[2::6].shape, generator=g) * 2.0**-24
    for given in (None, 1.0, 0.0123, 1 - 2.0**-24, 2.0**-140, 3e38) if format == NVFP4 else (None,):
        given = None if given is None else torch.tensor(given)
        want = quantize(x, format, scale_rule=rule, global_scale=given)
        got = triton_quantize.launch(x.cuda(), format, rule, None if given is None else given.cuda())
        if want.global_scale is not None:
            assert torch.equal(got.global_scale.cpu(), want.global_scale)
        assert torch.equal(got.scale.cpu(), want.scale), given
        assert torch.equal(got.data.cpu(), want.data), given
        for out in DTYPES_OUT:
            mine, theirs = triton_quantize.dequantize(got, out).cpu(), dequantize(want, out)
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


DTYPES_OUT = (torch.bfloat16, torch.float16, torch.float32)


def test_streams_and_graph():
    g = generator(11)
    b = random_codes((7168, 2048), NVFP4, g, device="cuda")
    xs = [random_dense((4, 2048), torch.bfloat16, g, "cuda") for _ in range(2)]
    wants = [linear(x, b) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    outs = [[], []]
    for _ in range(100):
        for x, stream, got in zip(xs, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                got.append(linear(x, b))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for got, want in zip(outs, wants, strict=True) for out in got)

    out = poisoned_empty((4, 7168), torch.float32, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_linear.launch(xs[0], b, None, out)
        q = triton_quantize.launch(xs[0], NVFP4, "absmax", None)
    xs[0].copy_(xs[1])
    graph.replay()
    assert torch.equal(out, wants[1])
    assert torch.equal(q.data, triton_quantize.launch(xs[1], NVFP4, "absmax", None).data)


FRAGMENTS = {kernel.operands[0][1]: kernel.b_layouts[0] for kernel in triton_linear_decoded_sm90.KERNELS}


@on_hopper
@pytest.mark.parametrize("shape", [(40, 2048), (2112, 128), (3, 33, 1120), (2880, 512)], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_fragments_decode_exactly(format, shape):
    every_scale = (0, 126) if format == NVFP4 else (0, 254)
    b = random_codes(shape, format, generator(12), scale_bytes=every_scale, nan_scales=3, device="cuda")
    b = b.with_layout(*FRAGMENTS[format.name])
    exact = decode(b, 1 / 128 if format == NVFP4 else 1 / 4)
    for dtype in DTYPES_OUT if format == NVFP4 else (torch.bfloat16, torch.float32):
        out = poisoned_empty((shape[0] if len(shape) == 3 else 1, *shape[-2:]), dtype, "cuda")
        triton_linear_decoded_sm90.decode_launch(b, out).run()
        got = out.float().view(shape)
        assert ((got.view(torch.int32) == exact.view(torch.int32)) | (got.isnan() & exact.isnan())).all(), dtype


@on_hopper
@pytest.mark.parametrize("M", [65, 128, 300, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_decoded_products(format, dtype, M):
    g = generator(M)
    for shape in ((2112, 2880), (40, 1056), (2, 200, 512)):
        b = random_codes(shape, format, g, scale_bytes=NARROW[format.name], nan_scales=2, device="cuda")
        a = random_dense((*shape[:-2], M, shape[-1]), dtype, g, "cuda")
        for bias in (None, random_dense((shape[-2],), dtype, g, "cuda")):
            for narrow in (dtype, torch.float32):
                out = poisoned_empty((*shape[:-2], M, shape[-2]), narrow, "cuda")
                triton_linear_decoded_sm90.launch(a, b.with_layout(*FRAGMENTS[format.name]), bias, out)
                assert_product(a, b, bias, out, f"{format} {dtype} M={M} {shape} -> {narrow}")


@on_hopper
def test_decoded_infinities_of_fp16():
    b = random_codes((64, 256), MXFP4, generator(13), scale_bytes=NARROW["mxfp4"], device="cuda")
    a = random_dense((80, 256), torch.float16, generator(14), "cuda")
    a[3, 5], a[7, 9], a[9, 200] = torch.inf, -torch.inf, torch.nan
    out = poisoned_empty((80, 64), torch.float32, "cuda")
    triton_linear_decoded_sm90.launch(a, b.with_layout(*FRAGMENTS["mxfp4"]), None, out)
    exact = reference.matmul(a, b)
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out.isinf(), exact.isinf())
    rows = [m for m in range(80) if m not in (3, 7, 9)]
    assert_product(a[rows], b, None, out[rows], "finite rows")


@on_hopper
def test_decoded_product_in_a_graph():
    g = generator(15)
    b = random_codes((2112, 2048), NVFP4, g, device="cuda").with_layout(*FRAGMENTS["nvfp4"])
    xs = [random_dense((300, 2048), torch.bfloat16, g, "cuda") for _ in range(2)]
    wants = [poisoned_empty((300, 2112), torch.bfloat16, "cuda") for _ in xs]
    for x, want in zip(xs, wants, strict=True):
        triton_linear_decoded_sm90.launch(x, b, None, want)
    out, static = poisoned_empty((300, 2112), torch.bfloat16, "cuda"), xs[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_linear_decoded_sm90.launch(static, b, None, out)
    for x, want in zip(xs, wants, strict=True):
        static.copy_(x)
        graph.replay()
        assert torch.equal(out, want)


@pytest.fixture(params=[False, True], ids=["strict", "loose"])
def loose_sums(request):
    """The process lets cuBLAS sum in less than fp32, or not."""
    settings = torch.backends.cuda.matmul
    names = (
        "allow_fp16_accumulation",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = {name: getattr(settings, name) for name in names}
    try:
        for name in names:
            setattr(settings, name, request.param)
        yield request.param
        assert {name: getattr(settings, name) for name in names} == dict.fromkeys(names, request.param)
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
@pytest.mark.parametrize("layout", [LINEAR, BLOCKED_128x4], ids=str)
@pytest.mark.parametrize("a_format", FORMATS)
@pytest.mark.parametrize("b_format", FORMATS)
def test_decoded_fp4_products_are_summed_in_fp32(a_format, b_format, layout, batch, loose_sums):
    """Without global scales, where the library's own rounding may be the only one, and a long K, which it may split."""
    g = generator(5)
    a, b = (
        random_codes((*batch, rows, 8192), name, g, scale_bytes=NARROW[name], global_scale=False, device="cuda")
        for rows, name in ((96, a_format), (200, b_format))
    )
    a = a.with_layout(layout)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        wide = poisoned_empty((*batch, 96, 208), dtype, "cuda")
        triton_linear_decoded.launch(a, b, None, wide[..., :200])
        assert_product(a, b, None, wide[..., :200], f"{a_format} x {b_format} {dtype}")
        assert wide[..., 200:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_decoded_weights_meet_dense_activations(format, dtype, loose_sums):
    g = generator(6)
    b = random_codes((200, 4192), format, g, scale_bytes=NARROW[format.name], nan_scales=7, device="cuda")
    a, bias = random_dense((300, 4192), dtype, g, "cuda"), random_dense((200,), torch.float32, g, "cuda")
    out = poisoned_empty((300, 200), dtype, "cuda")
    triton_linear_decoded.launch(a, b, bias, out)
    assert_product(a, b, bias, out, f"{format} {dtype}")


@pytest.mark.parametrize("activation", ["silu", "swiglu_clamped"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_decoded_gated_products(format, activation, loose_sums):
    g = generator(7)
    gate, up, x = (
        random_codes((rows, 1056), format, g, scale_bytes=NARROW[format.name], device="cuda") for rows in (136, 136, 70)
    )
    for rows in (x, x.with_layout(BLOCKED_128x4), random_dense((70, 1056), torch.float16, g, "cuda")):
        out = poisoned_empty((70, 136), torch.float32, "cuda")
        triton_gated_linear_decoded.launch(rows, gate, up, None, None, activation, out)
        exact = reference.gated_linear(rows, gate, up, activation=activation)
        assert torch.allclose(out.double(), exact, rtol=1e-3, atol=1e-3 * exact.abs().max().item())
