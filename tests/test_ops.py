"""The public operations: what they accept, refuse and promise. That kernels are right is test_kernels.py's matter."""

import copy
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from checks import assert_close, random_codes
from torch.autograd import forward_ad

import nibblas as nb
from nibblas import dispatch, ops, reference
from nibblas.formats import FORMATS
from nibblas.kernels import triton_launch
from nibblas.layouts import LINEAR, BLOCKED_128x4, ROWS_16x1, ROWS_16x4
from nibblas.operators import as_arguments
from nibblas.problem import Problem
from nibblas.quantize import dequantize as reference_dequantize
from nibblas.quantize import quantize
from nibblas.roofline import ASSUMED_GPU


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def weights(format, *shape, seed=1):
    return random_codes(shape, format, torch.Generator().manual_seed(seed), scale_bytes=MODERATE[format])


MODERATE = {"nvfp4": (40, 56), "mxfp4": (121, 125)}


def exactly(got, exact, K, a=None, b=None):
    size = None if a is None else reference.magnitude(a, b)
    assert_close(got, exact, got.dtype, K=K, what="op", magnitude=size)


def test_the_example_of_the_readme():
    weight, x, bias = torch.randn(64, 128), torch.randn(5, 128).bfloat16(), torch.randn(64)
    w = nb.quantize(weight, nb.NVFP4, scale_rule="search")
    assert (w.data.shape, w.data.dtype) == ((64, 64), torch.uint8)
    assert (w.scale.shape, w.scale.dtype) == ((64, 8), torch.uint8)
    assert (w.global_scale.shape, w.global_scale.dtype) == ((), torch.float32)
    assert (w.format, w.layout, w.shape) == (nb.NVFP4, nb.LINEAR, (64, 128))
    assert nb.dequantize(w, dtype=torch.float32).shape == (64, 128)
    assert nb.linear(x, w, bias).dtype == torch.bfloat16
    text = str(nb.explain("linear", x, w))
    assert "linear M=5 N=64 K=128 bf16 x nvfp4" in text
    assert ">" in text


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,), (2, 0, 3)], ids=str)
def test_linear_takes_any_leading_dimensions(format, leading):
    w = weights(format, 24, 64)
    x = torch.randn(*leading, 64)
    y = nb.linear(x, w)
    assert y.shape == (*leading, 24)
    if y.numel():
        exactly(y, reference.linear(x, w), 64)


@pytest.mark.parametrize("format", FORMATS)
def test_linear_of_fp4_activations_with_batches(format):
    w, x = weights(format, 24, 64), weights(format, 2, 3, 64)
    if x.global_scale is not None:
        x = nb.ScaledTensor(x.data, x.scale, x.format, torch.tensor(0.5))
    y = nb.linear(x, w)
    assert (y.shape, y.dtype) == ((2, 3, 24), torch.bfloat16)
    exactly(y, reference.linear(x, w), 64)


@pytest.mark.parametrize("format", FORMATS)
def test_ones_gemv_of_every_K(format):
    # B28: codes 2 are 1.0, so y = K.
    fmt = FORMATS[format]
    for K in range(fmt.block_size, 12 * fmt.block_size, fmt.block_size):
        scale = torch.full((5, K // fmt.block_size), fmt.scale_code.one, dtype=torch.uint8)
        w = nb.ScaledTensor(torch.full((5, K // 2), 0x22, dtype=torch.uint8), scale, fmt)
        assert nb.linear(torch.ones(2, K), w).eq(K).all()


def test_zero_sizes():
    # B29: M = 0, N = 0 and K = 0 are answers, not errors; K = 0 leaves the bias.
    w = weights("nvfp4", 24, 64)
    assert nb.linear(torch.ones(0, 64), w).shape == (0, 24)
    assert nb.linear(torch.ones(2, 64), w.slice(0, 0, 0)).shape == (2, 0)
    nothing = w.slice(1, 0, 0)
    bias = torch.arange(24.0)
    assert nb.linear(torch.ones(2, 0), nothing).eq(0).all()
    assert torch.equal(nb.linear(torch.ones(2, 0), nothing, bias), bias.expand(2, 24))
    assert nb.quantize(torch.empty(0, 64), nb.NVFP4).data.shape == (0, 32)
    assert nb.quantize(torch.empty(3, 0), nb.MXFP4).scale.shape == (3, 0)


@pytest.mark.parametrize("format", FORMATS)
def test_matmul_forms(format):
    a = torch.randn(2, 3, 64)
    b, one = weights(format, 2, 24, 64), weights(format, 24, 64)
    exactly(nb.matmul(a, b), reference.matmul(a, b), 64, a, b)
    exactly(nb.bmm(a, b), reference.matmul(a, b), 64, a, b)
    exactly(nb.matmul(a[0], b), reference.matmul(a[0], b), 64, a[0], b)
    exactly(nb.matmul(a, one), reference.matmul(a, one), 64, a, one)
    exactly(nb.matmul(one, a[0]), reference.matmul(one, a[0]), 64, one, a[0])
    exactly(nb.matmul(b, a), reference.matmul(b, a), 64, b, a)
    exactly(nb.matmul(b, b, out_dtype=torch.float32), reference.matmul(b, b), 64, b, b)
    out = torch.full((2, 24, 3), torch.nan)
    assert nb.matmul(b, a, out=out) is out
    exactly(out, reference.matmul(b, a), 64, b, a)


@pytest.mark.parametrize("batch", [(2,), (2, 1, 2)], ids=str)
def test_matmul_of_matrices_with_scales_of_their_own(batch):
    a, b = weights("nvfp4", *batch, 5, 64), weights("nvfp4", 24, 64, seed=2)
    assert a.global_scale.unique().numel() > 1
    exactly(nb.matmul(a, b, out_dtype=torch.float32), reference.matmul(a, b), 64, a, b)
    explanation = nb.explain("matmul", a, b)
    assert a.global_scale.numel() == explanation.problem.L
    refused(ValueError, "linear: x .* has one global_scale a matrix", lambda: nb.linear(a, b))
    refused(ValueError, "gated_linear: x .* has one global_scale a matrix", lambda: nb.gated_linear(a, b, b))


def test_grouped_rows_outside_every_group_are_zero():
    w = weights("nvfp4", 2, 24, 64)
    y = nb.grouped_linear(torch.ones(6, 64), w, torch.tensor([1, 3, 4]))
    assert y[0].eq(0).all()
    assert y[4:].eq(0).all()
    assert y[1:4].ne(0).any()


def test_grouped_values():
    # B30: empty groups shift nothing. Codes 2, scale 1, global 2^g, K = 32, x = ones.
    data, scale = torch.full((5, 8, 16), 0x22, dtype=torch.uint8), torch.full((5, 8, 2), 0x38, dtype=torch.uint8)
    w = nb.ScaledTensor(data, scale, nb.NVFP4, 2.0 ** torch.arange(5))
    y = nb.grouped_linear(torch.ones(8, 32), w, torch.tensor([0, 0, 3, 3, 8, 8]))
    assert y[:3].eq(64).all()
    assert y[3:].eq(256).all()
    assert nb.grouped_linear(torch.ones(0, 32), w, torch.zeros(6, dtype=torch.int32)).shape == (0, 8)


@pytest.mark.parametrize("kernel", ["torch_linear", None])
def test_operands_that_are_parts_of_others(kernel):
    """A bias, offsets and a gate's weights that lie otherwise than kernels read them."""
    x, w, w3 = torch.randn(5, 64), weights("nvfp4", 24, 64), weights("nvfp4", 2, 24, 64)
    joined, offsets = torch.randn(2, 48), torch.tensor([0, 7, 2, 7, 5])[::2]
    bias, bias3 = joined[0, ::2], joined[:, 1::2]
    assert torch.equal(nb.linear(x, w, bias, kernel=kernel), nb.linear(x, w, bias.clone(), kernel=kernel))
    assert torch.equal(
        nb.grouped_linear(x, w3, offsets, bias3), nb.grouped_linear(x, w3, offsets.clone(), bias3.clone())
    )
    gated = nb.gated_linear(x, w, w3[0], bias, bias3[0])
    assert torch.equal(nb.gated_linear(x, w, w3[0], bias.clone(), bias3[0].clone()), gated)
    assert torch.equal(nb.gated_linear(x, w.with_layout("BLOCKED_128x4"), w3[0], bias, bias3[0]), gated)


def test_autocast_narrows_nothing():
    x, w = torch.randn(5, 256, requires_grad=True), weights("nvfp4", 24, 256)

    def both():
        y = nb.linear(x, w, kernel="torch_linear")
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    need = both()
    with torch.autocast("cpu", torch.bfloat16):
        got = both()
    assert torch.equal(got[0], need[0])
    assert torch.equal(got[1], need[1])


def test_no_groups_no_rows_no_columns():
    w = weights("mxfp4", 2, 8, 32)
    assert nb.grouped_linear(torch.ones(3, 32), w.slice(0, 0, 0), torch.tensor([1])).eq(torch.zeros(3, 8)).all()
    assert nb.grouped_linear(torch.ones(0, 32), w, torch.tensor([0, 0, 0])).shape == (0, 8)
    empty = torch.zeros(2, 8, 0, dtype=torch.uint8)
    bias = torch.arange(16.0).view(2, 8)
    y = nb.grouped_linear(torch.ones(3, 0), nb.ScaledTensor(empty, empty, nb.MXFP4), torch.tensor([0, 1, 3]), bias)
    assert torch.equal(y, bias[[0, 1, 1]])


def test_grouped_matmul_is_a_list_of_products():
    shapes = [(3, 24, 64), (0, 8, 32), (1, 40, 96)]
    a = [torch.randn(M, K) for M, _, K in shapes]
    b = [weights("mxfp4", N, K) for _, N, K in shapes]
    outs = [torch.full((M, N), torch.nan) for M, N, _ in shapes]
    for got, x, w in zip(nb.grouped_matmul(a, b), a, b, strict=True):
        assert torch.equal(got, nb.matmul(x, w))
    for got, x, w in zip(nb.grouped_matmul(iter(a), iter(b), out=(c for c in outs)), a, b, strict=True):
        assert torch.equal(got, nb.matmul(x, w))
    with pytest.raises(ValueError, match="a has 3 matrices, b 2"):
        nb.grouped_matmul(a, b[:2])
    with pytest.raises(ValueError, match="a has 1 matrix, b 2"):
        nb.grouped_matmul(a[:1], b[:2])
    for given, named in (
        ((a[0], b[0]), "a is a Tensor"),
        ((a, b[0]), "b is a ScaledTensor"),
        ((None, b), "a is a None"),
    ):
        with pytest.raises(TypeError, match=f"grouped_matmul: {named}.*, need a list of matrices"):
            nb.grouped_matmul(*given)
    with pytest.raises(TypeError, match="grouped_matmul: out is a Tensor, need a list"):
        nb.grouped_matmul(a[:1], b[:1], out=outs[0])


def test_moe_weighs_biases():
    # B36: 0.25 * 4 + 0.75 * 8 = 7, not 12.
    gate, down = weights("mxfp4", 2, 32, 32), weights("mxfp4", 2, 32, 32)
    bias_down = torch.tensor([4.0, 8.0])[:, None].expand(2, 32)
    ids, share = torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.75]])
    y = nb.moe(torch.zeros(1, 32), ids, share, gate, gate, down, bias_down=bias_down)
    assert y.eq(7).all()


@pytest.mark.parametrize(("dtype", "E"), [(torch.int8, 130), (torch.uint8, 256), (torch.int16, 3)], ids=str)
def test_moe_takes_ids_of_any_integer_dtype(dtype, E):
    w = weights("mxfp4", E, 32, 32)
    x, share = torch.randn(6, 32) * 0.1, torch.rand(6, 2)
    ids = torch.randint(0, min(E, 127), (6, 2))
    y = nb.moe(x, ids.to(dtype), share, w, w, w)
    exact = reference.moe(x, ids, share, w, w, w)
    assert exact.norm() > 0
    assert (y - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("weight", [torch.nan, torch.inf])
def test_moe_without_an_expert_has_no_weight(weight):
    w = weights("mxfp4", 2, 32, 32)
    x, ids, share = torch.randn(2, 32), torch.tensor([[0, -1], [-1, -1]]), torch.tensor([[1.0, weight], [weight, 1.0]])
    y = nb.moe(x, ids, share, w, w, w)
    assert torch.equal(y[:1], nb.moe(x[:1], ids[:1, :1], share[:1, :1], w, w, w))
    assert y[0].ne(0).any()
    assert y[1].eq(0).all()


@pytest.mark.parametrize("format", FORMATS)
def test_moe_of_quantized_tokens_quantizes_what_meets_w_down(format):
    E, I, H, T, rule = 4, 64, 96, 9, nb.formats.FORMATS[format].scale_rules[1]
    gate, up, down = (weights(format, E, *s, seed=i) for i, s in enumerate([(I, H), (I, H), (H, I)]))
    ids, share = torch.randint(-1, E, (T, 2)), torch.rand(T, 2)
    x = nb.quantize(torch.randn(T, H) * 0.1, format, scale_rule=rule)
    y = nb.moe(x, ids, share, gate, up, down)
    assert y.dtype == torch.bfloat16

    def error(of_hidden) -> float:
        exact = reference.moe(x, ids, share, gate, up, down, of_hidden=of_hidden)
        return ((nb.moe(x, ids, share, gate, up, down, out_dtype=torch.float32) - exact).norm() / exact.norm()).item()

    assert error(lambda hidden: quantize(hidden.bfloat16(), format, scale_rule=rule)) < 1e-5
    assert error(lambda hidden: quantize(hidden.bfloat16(), format)) > 1e-3
    assert error(lambda hidden: hidden) > 1e-2
    rows = x.take_rows(torch.tensor([2, 0]))
    if format == "mxfp4":  # where a token does not depend on the others
        assert torch.equal(nb.moe(rows, ids[[2, 0]], share[[2, 0]], gate, up, down), y[[2, 0]])
    assert nb.moe(x.slice(0, 0, 0), ids[:0], share[:0], gate, up, down).shape == (0, H)
    assert nb.moe(x, ids[:, :0], share[:, :0], gate, up, down).eq(0).all()


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_moe_equals_the_reference(format, activation):
    E, I, H, T = 4, 64, 96, 9
    gate, up, down = (weights(format, E, *s, seed=i) for i, s in enumerate([(I, H), (I, H), (H, I)]))
    x, ids, share = torch.randn(T, H) * 0.1, torch.randint(-1, E, (T, 2)), torch.rand(T, 2)
    y = nb.moe(x, ids, share, gate, up, down, activation=activation)
    exact = reference.moe(x, ids, share, gate, up, down, activation=activation)
    assert (y - exact).norm() < 1e-5 * exact.norm()
    assert exact.norm() > 0
    out = torch.full((T, H), torch.nan)
    assert nb.moe(x, ids, share, gate, up, down, activation=activation, out=out) is out
    assert torch.equal(out, y)


@pytest.mark.parametrize("format", FORMATS)
def test_out_dtypes_round_once(format):
    w, x = weights(format, 24, 64), torch.randn(3, 64).bfloat16()
    full = nb.linear(x, w, out_dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(nb.linear(x, w, out_dtype=dtype), full.to(dtype))


def test_doubling_the_global_scale_doubles_exactly():
    # B50
    w, x = weights("nvfp4", 24, 64), torch.randn(3, 64)
    double = nb.ScaledTensor(w.data, w.scale, w.format, w.global_scale * 2)
    assert torch.equal(nb.linear(x, double), 2 * nb.linear(x, w))
    absent, one = (nb.ScaledTensor(w.data, w.scale, w.format, g) for g in (None, torch.tensor(1.0)))
    assert torch.equal(nb.linear(x, absent), nb.linear(x, one))


def test_layouts_do_not_change_a_bit():
    w, x = weights("nvfp4", 130, 80), torch.randn(3, 80)
    y = nb.linear(x, w)
    for layouts in [("BLOCKED_128x4", "LINEAR"), ("CDNA_32x8", "SHUFFLED_16x16")]:
        other = nb.linear(x, w.with_layout(*layouts), kernel="torch_linear")
        assert torch.equal(other, nb.linear(x, w, kernel="torch_linear"))
    exactly(y, reference.linear(x, w), 80)


@pytest.mark.parametrize("rotation", [16, 32, 64, 128])
def test_rotation_cancels_in_a_product(rotation):
    weight, x = torch.randn(24, 256), torch.randn(3, 256)
    w = nb.quantize(weight, nb.NVFP4, rotation=rotation)
    exactly(nb.linear(x, w), reference.linear(x, w), 256)
    both = nb.linear(nb.quantize(x, nb.NVFP4, rotation=rotation), w, out_dtype=torch.float32)
    assert (both - x @ weight.T).norm() < 0.2 * (x @ weight.T).norm()
    with pytest.raises(ValueError, match="x was rotated by 0, the weights by"):
        nb.linear(nb.quantize(x, nb.NVFP4), w)


def test_views_are_read_where_they_lie():
    w, wide = weights("nvfp4", 24, 64), torch.randn(9, 200)
    assert torch.equal(nb.linear(wide[::2, 5:69], w), nb.linear(wide[::2, 5:69].clone(), w))
    assert torch.equal(nb.linear(wide.T[5:69].T, w), nb.linear(wide[:, 5:69].clone(), w))
    cut = w.slice(0, 3, 19)
    assert torch.equal(nb.linear(wide[:, :64], cut), nb.linear(wide[:, :64], w)[:, 3:19])


def test_out_of_any_strides():
    w, x = weights("nvfp4", 24, 64), torch.randn(2, 3, 64)
    y = nb.linear(x, w)
    for out in (torch.full((2, 3, 24), torch.nan), torch.full((2, 3, 48), torch.nan)[..., ::2]):
        assert nb.linear(x, w, out=out) is out
        assert torch.equal(out, y)
    rows, y = x.view(6, 64), y.view(6, 24)
    batch, offsets = nb.stack([w, w]), torch.tensor([0, 2, 6])
    runs = {
        "linear": partial(nb.linear, rows, w),
        "grouped_linear": partial(nb.grouped_linear, rows, batch, offsets),
        "matmul": partial(nb.matmul, rows.expand(2, 6, 64), batch),
    }
    for op, run in runs.items():
        shape = (2, 24, 6) if op == "matmul" else (24, 6)
        for out in (torch.full(shape, torch.nan).mT, torch.full((*shape[:-2], 6, 48), torch.nan)[..., ::2]):
            run(out=out)
            torch.testing.assert_close(out, y.expand_as(out), msg=op)
        refused(ValueError, f"{op}: out has strides", partial(run, out=torch.empty(1, 24).expand(*shape[:-2], 6, 24)))


def test_threads_do_not_disturb_each_other():
    # B59: first calls of many shapes at once equal the serial ones.
    shapes = [(M, 8 * n, 32 * k) for M in (1, 3) for n in range(1, 6) for k in range(1, 6)]
    work = [(torch.randn(M, K), weights("mxfp4", N, K, seed=N + K)) for M, N, K in shapes]
    barrier = threading.Barrier(8)

    def run(part):
        barrier.wait()
        return [nb.linear(x, w) for x, w in work[part::8]]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(8)))
    for part in range(8):
        for got, (x, w) in zip(found[part], work[part::8], strict=True):
            assert torch.equal(got, nb.linear(x, w))


def test_batch_invariant_rows():
    w, x = weights("nvfp4", 40, 256), torch.randn(8, 256).bfloat16()
    try:
        alone = nb.linear(x[:1], w, batch_invariant=True)
    except nb.NoKernelError as refusal:
        pytest.skip(str(refusal))
    assert torch.equal(alone[0], nb.linear(x, w, batch_invariant=True)[0])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rotation", [0, 32])
def test_linear_gives_the_gradient_of_x_and_bias(format, rotation):
    w = nb.quantize(torch.randn(24, 64), format, rotation=rotation)
    x, bias = torch.randn(2, 3, 64, requires_grad=True), torch.randn(24, requires_grad=True)
    grad = torch.randn(2, 3, 24)
    nb.linear(x, w, bias).backward(grad)
    torch.testing.assert_close(x.grad, grad @ nb.dequantize(w), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))


def test_the_gradient_has_a_gradient():
    w = weights("nvfp4", 24, 64)
    w = nb.ScaledTensor(w.data, w.scale, w.format, torch.tensor(0.1))
    x, ahead = torch.randn(2, 3, 64, requires_grad=True), torch.randn(2, 3, 24, requires_grad=True)
    (gradient,) = torch.autograd.grad(nb.linear(x, w), x, ahead, create_graph=True)
    back = torch.randn(2, 3, 64)
    (found,) = torch.autograd.grad(gradient, ahead, back)
    torch.testing.assert_close(found, back @ nb.dequantize(w).T, rtol=1e-4, atol=1e-5)


forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.")  # torch.func.jvp scripts some of its rules
TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (2 * x,))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "twice": lambda f, x: torch.func.jacfwd(torch.func.jacfwd(lambda x: f(x).square().sum()))(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
    "compiled": lambda f, x: torch.compile(partial(torch.func.jvp, f), backend="eager", fullgraph=True)((x,), (x,))[1],
}


@forward_mode
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_forward_mode_differentiates_the_product(transform):
    w, x, bias = weights("nvfp4", 24, 64), torch.randn(3, 64), torch.randn(24)
    dense, tokens = nb.dequantize(w), nb.quantize(x, nb.NVFP4)
    products = (
        (x, lambda x: nb.linear(x, w, bias), lambda x: x @ dense.T + bias),
        (x, lambda x: nb.matmul(w, x), lambda x: dense @ x.T),
        (bias, lambda b: nb.linear(tokens, w, b, out_dtype=b.dtype), lambda b: nb.dequantize(tokens) @ dense.T + b),
    )
    for at, product, like in products:
        torch.testing.assert_close(transform(product, at), transform(like, at), rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.func.jvp(lambda x: nb.linear(x, w), (x,), (x,))[1]
    torch.testing.assert_close(found, x @ dense.T, rtol=1e-4, atol=1e-4)


@forward_mode
def test_the_gradient_has_a_forward_mode():
    w, x, ahead = weights("nvfp4", 24, 64), torch.randn(3, 64, requires_grad=True), torch.randn(3, 24)
    y = nb.linear(x, w)
    with forward_ad.dual_level():
        (gradient,) = torch.autograd.grad(y, x, forward_ad.make_dual(ahead, 2 * ahead))
        found = forward_ad.unpack_dual(gradient).tangent
    torch.testing.assert_close(found, 2 * ahead @ nb.dequantize(w), rtol=1e-4, atol=1e-5)


@forward_mode
def test_other_operations_refuse_forward_mode():
    w, x = weights("nvfp4", 2, 24, 64), torch.randn(3, 64)
    products = {
        "grouped_linear: has no": lambda x: nb.grouped_linear(x, w, torch.tensor([0, 1, 3])),
        "gated_linear: has no": lambda x: nb.gated_linear(x, w[0], w[1]),
        "linear: out= keeps no gradient": lambda x: nb.linear(x, w[0], out=torch.empty(3, 24)),
    }
    for match, product in products.items():
        with pytest.raises((NotImplementedError, RuntimeError), match=match):
            torch.func.jvp(product, (x,), (x,))
        with forward_ad.dual_level():
            assert torch.equal(product(x), product(x))  # no tangent in x


COMPILED_WITH_GRADIENTS = """
import torch, nibblas as nb
from torch._subclasses import FakeTensorMode

w = nb.quantize(torch.randn(64, 64), nb.NVFP4)
if {first!r} == "eager":
    nb.dequantize(w)

def layers(x):
    return nb.linear(torch.relu(nb.linear(x, w)), w)

x = torch.randn(3, 64, requires_grad=True)
found, = torch.autograd.grad(torch.compile(layers, fullgraph=True)(x).sum(), x)
need, = torch.autograd.grad(layers(x).sum(), x)
torch.testing.assert_close(found, need)
values = torch.compile(lambda: nb.dequantize(w), fullgraph=True)()
with FakeTensorMode(allow_non_fake_inputs=True):
    assert nb.dequantize(w).shape == (64, 64)
assert torch.equal(values, nb.dequantize(w))
"""


@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_compile_with_gradients(first):
    # In a process of its own: what a trace leaves behind stays for good.
    code = COMPILED_WITH_GRADIENTS.format(first=first)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


def test_other_operations_refuse_a_gradient():
    w, x = weights("nvfp4", 2, 24, 64), torch.randn(3, 64, requires_grad=True)
    y = nb.grouped_linear(x, w, torch.tensor([0, 1, 3]))
    with pytest.raises(NotImplementedError, match="grouped_linear: has no gradient"):
        y.sum().backward()
    with pytest.raises(NotImplementedError, match="gated_linear: has no gradient"):
        nb.gated_linear(x, w[0], w[1]).sum().backward()
    for given, out in ((x, torch.empty(3, 24)), (x.detach(), torch.ones(3, 24, requires_grad=True) * 2)):
        with pytest.raises(RuntimeError, match="linear: out= keeps no gradient"):
            nb.linear(given, w[0], out=out)


def test_opcheck():

    x, w, batch = torch.randn(5, 64), weights("nvfp4", 24, 64), weights("nvfp4", 2, 24, 64)
    dense = (x, None, None, "")
    samples = {
        "linear": (*dense, *as_arguments(w), torch.randn(24), None, False, torch.bfloat16),
        "linear_out": (*dense, *as_arguments(w), None, None, False, torch.empty(5, 24)),
        "grouped_linear": (*dense, *as_arguments(batch), torch.tensor([0, 2, 5]), None, None, torch.float32),
        "grouped_linear_out": (*dense, *as_arguments(batch), torch.tensor([0, 2, 5]), None, None, torch.empty(5, 24)),
        "gated_linear": (*dense, *as_arguments(w), *as_arguments(w), None, None, "silu", None, torch.float32),
        "gated_linear_out": (*dense, *as_arguments(w), *as_arguments(w), None, None, "silu", None, torch.empty(5, 24)),
        "linear_backward": (torch.randn(5, 24, requires_grad=True), *as_arguments(w), torch.float32),
        "quantize": (x, None, "nvfp4", "absmax", None),
        "dequantize": (*as_arguments(batch), torch.bfloat16),
    }
    for name, arguments in samples.items():
        torch.library.opcheck(getattr(torch.ops.nibblas, name).default, arguments)


@pytest.mark.parametrize("format", FORMATS)
def test_compile_without_a_break(format):
    w = weights(format, 24, 64)

    def layers(x):
        quantized = nb.quantize(x, format)
        into = nb.linear(x, w, out=torch.empty(len(x), 24))
        return into + nb.linear(x, w) + nb.linear(quantized, w, out_dtype=x.dtype) + nb.gated_linear(x, w, w)

    compiled = torch.compile(layers, fullgraph=True, dynamic=True)
    for M in (1, 5, 128, 129):
        x = torch.randn(M, 64)
        torch.testing.assert_close(compiled(x), layers(x))


PRODUCTS = {
    "linear": lambda x, w: nb.linear(x, w),
    "linear, out": lambda x, w: nb.linear(x, w, out=torch.empty(*x.shape[:-1], 24)),
    "linear, strided out": lambda x, w: nb.linear(x, w, out=torch.empty(*x.shape[:-1], 48)[..., ::2]),
    "matmul": lambda x, w: nb.matmul(w, x),
    "gated": lambda x, w: nb.gated_linear(x, w, w),
    "quantize": lambda x, w: nb.linear(nb.quantize(x, nb.NVFP4), w, out_dtype=x.dtype),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_graph_takes_other_batches(product):
    class Product(torch.nn.Module):
        def forward(self, x):
            return product(x, w)

    w, x, other = weights("nvfp4", 24, 64), torch.randn(3, 5, 64), torch.randn(7, 5, 64)
    graph = torch.export.export(Product(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("b", max=64)}})
    assert torch.equal(graph.module()(other), product(other, w))
    assert torch.equal(torch.jit.trace(Product(), x, check_trace=False)(other), product(other, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layouts", [(LINEAR, LINEAR), (BLOCKED_128x4, LINEAR), (ROWS_16x1, ROWS_16x4)], ids=str)
@pytest.mark.parametrize("shape", [(3, 40, 64), (40, 64), (2, 3, 8, 32), (0, 32), (2, 0, 32)], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_gives_the_references_values(format, shape, layouts, dtype):
    w = random_codes(shape, format, torch.Generator().manual_seed(1), nan_scales=2).with_layout(*layouts)
    got, need = nb.dequantize(w, dtype), reference_dequantize(w, dtype)
    torch.testing.assert_close(got, need, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() & ~got.isnan(), need.signbit() & ~need.isnan())


def test_dequantize_rotates_back_and_checks():
    w = nb.quantize(torch.randn(4, 64), nb.NVFP4, rotation=32)
    assert torch.equal(nb.dequantize(w), reference_dequantize(w))
    with pytest.raises(TypeError, match=r"dequantize: dtype torch\.int8"):
        nb.dequantize(w, torch.int8)
    with pytest.raises(TypeError, match="dequantize: w is a Tensor"):
        nb.dequantize(torch.ones(2))


def test_products_of_the_largest_scales():
    # 6 * 2^127 is no fp32 number; times 2^-120 it is one, and so is a sum of them.
    data, scale = torch.full((3, 64), 0x77, dtype=torch.uint8), torch.full((3, 4), 254, dtype=torch.uint8)
    w = nb.ScaledTensor(data, scale, nb.MXFP4)
    for kernel in (None, "torch_linear"):
        assert nb.linear(torch.full((2, 128), 2.0**-120), w, kernel=kernel).eq(128 * 6 * 2.0**7).all()
    least = nb.ScaledTensor(torch.full((2, 64), 0x11, dtype=torch.uint8), torch.zeros_like(scale[:2]), nb.MXFP4)
    for kernel in (None, "torch_linear"):
        assert nb.linear(least, w, kernel=kernel, out_dtype=torch.float32).eq(128 * 3).all()
        assert nb.linear(torch.full((2, 128), 2.0**20), least, kernel=kernel).eq(2.0**-101).all()


def test_bytes_of_a_problem():
    once = Problem("linear", M=2, N=64, K=32, b="mxfp4").bytes
    weight = 64 * 32 * 4.25 / 8
    assert once == 2 * 2 * (64 + 32) + weight
    assert Problem("linear", M=2, N=64, K=32, b="mxfp4", G=4).bytes == once
    assert Problem("gated_linear", M=2, N=64, K=32, b="mxfp4").bytes == once + weight
    assert Problem("linear", M=2, N=64, K=32, b="mxfp4", L=3).bytes == 3 * once
    for G, read in [(1, 1), (2, 2), (128, 2)]:
        assert Problem("grouped_linear", M=2, N=64, K=32, b="mxfp4", G=G).bytes == once + (read - 1) * weight
    assert Problem("grouped_linear", M=0, N=64, K=32, b="mxfp4", G=4).bytes == 0


def refused(kind, match, run):
    with pytest.raises(kind, match=match):
        run()


def test_bad_operands_are_refused_by_name():
    w, x, batch = weights("nvfp4", 24, 64), torch.randn(3, 64), weights("nvfp4", 2, 24, 64)
    refused(TypeError, "linear: w is a Tensor, need a ScaledTensor", lambda: nb.linear(x, torch.randn(24, 64)))
    refused(TypeError, "linear: x is a list", lambda: nb.linear([1.0], w))
    refused(TypeError, r"linear: x has dtype torch.float64", lambda: nb.linear(x.double(), w))
    refused(TypeError, r"linear: x has dtype torch.int32", lambda: nb.linear(x.int(), w))
    refused(TypeError, r"matmul: a has dtype torch.int32", lambda: nb.matmul(x.int(), w))
    refused(TypeError, r"matmul: b has dtype torch.int32", lambda: nb.matmul(w, x.int()))
    gates = r"gated_linear: w_gate is nvfp4 \(24, 64\) rotated by 0, w_up nvfp4 \(8, 64\) rotated by 0; need the same$"
    refused(ValueError, gates, lambda: nb.gated_linear(x, w, weights("nvfp4", 8, 64)))
    for device in ("zz", None):
        refused(ValueError, f"scale_layout: device {device!r} is unknown", lambda: nb.scale_layout("nvfp4", device))  # noqa: B023
    refused(TypeError, "load: path is a NoneType, need a path", lambda: nb.load(None))
    refused(ValueError, r"linear: K differs: x has shape \(3, 48\)", lambda: nb.linear(x[:, :48], w))
    refused(ValueError, r"matmul: K differs: a has shape \(24, 64\), b \(3, 48\)", lambda: nb.matmul(w, x[:, :48]))
    overlapping = torch.empty(100).as_strided((3, 24), (1, 1))
    refused(ValueError, "need memory of its own for each element", lambda: nb.linear(x, w, out=overlapping))
    strided = torch.empty(24, 2, 3).permute(1, 2, 0)[1]
    assert torch.equal(nb.linear(x, w, out=strided), nb.linear(x, w))
    refused(ValueError, "linear: x has no dimension", lambda: nb.linear(torch.tensor(1.0), w))
    refused(
        ValueError,
        r"linear: w has shape \(2, 24, 64\), need \(N, K\)",
        lambda: nb.linear(x, batch),
    )
    refused(ValueError, r"linear: bias has shape \(23,\), need \(24,\)", lambda: nb.linear(x, w, torch.ones(23)))
    refused(TypeError, "linear: bias has dtype torch.int64", lambda: nb.linear(x, w, torch.ones(24).long()))
    refused(TypeError, "linear: out_dtype is torch.int8", lambda: nb.linear(x, w, out_dtype=torch.int8))
    refused(ValueError, "linear: operands are on different devices", lambda: nb.linear(x.to("meta"), w))
    refused(nb.NoKernelError, "no kernel is called 'fast'", lambda: nb.linear(x, w, kernel="fast"))
    refused(TypeError, "matmul: neither operand is a ScaledTensor", lambda: nb.matmul(x, x))
    refused(
        ValueError,
        r"matmul: batch dimensions differ: a has shape",
        lambda: nb.matmul(torch.ones(3, 2, 64), batch),
    )
    refused(ValueError, "bmm: a has shape", lambda: nb.bmm(x, w))
    refused(TypeError, "bmm: a is a list", lambda: nb.bmm([1], batch))
    dense = torch.ones(2, 3, 64)
    refused(TypeError, "bmm: neither operand is a ScaledTensor", lambda: nb.bmm(dense, dense))
    refused(ValueError, "bmm: K differs", lambda: nb.bmm(dense[..., :48], batch))
    refused(ValueError, "bmm: out is", lambda: nb.bmm(dense, batch, out=torch.empty(2, 3, 23)))
    refused(TypeError, "bmm: kernel is 3", lambda: nb.bmm(dense, batch, kernel=3))
    refused(TypeError, "bmm: out_dtype is torch.int32", lambda: nb.bmm(batch, dense, out_dtype=torch.int32))
    refused(ValueError, "grouped_matmul: K differs", lambda: nb.grouped_matmul([x[:, :48]], [w]))
    refused(ValueError, r"matmul: out is torch.float32 \(3, 65\)", lambda: nb.matmul(x, w, out=torch.empty(3, 65)))
    refused(TypeError, r"explain\(\) got an unexpected keyword", lambda: nb.explain("linear", x, w, kernel="a"))
    refused(TypeError, "explain: w is a Tensor", lambda: nb.explain("matmul", x, x))


def test_what_is_no_tensor_is_refused_by_name():
    w, x, batch = weights("nvfp4", 24, 64), torch.randn(3, 64), weights("nvfp4", 2, 24, 64)
    experts, ids, share = weights("nvfp4", 2, 64, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    products = {
        "linear": lambda **more: nb.linear(x, w, **more),
        "matmul": lambda **more: nb.matmul(x, w, **more),
        "grouped_linear": lambda **more: nb.grouped_linear(x, batch, torch.tensor([0, 1, 3]), **more),
        "gated_linear": lambda **more: nb.gated_linear(x, w, w, **more),
        "moe": lambda **more: nb.moe(x, ids, share, experts, experts, experts, **more),
    }
    for op, product in products.items():
        refused(TypeError, f"{op}: out is a int, need a Tensor", partial(product, out=3))
        refused(TypeError, f"{op}: kernel is 3, need the name", partial(product, kernel=3))
    batched = partial(nb.matmul, x.expand(2, 3, 64), batch)
    refused(TypeError, "matmul: out is a int", partial(batched, out=3))
    refused(TypeError, "matmul: kernel is 3", partial(batched, kernel=3))
    refused(TypeError, "linear: bias is a list, need a Tensor", lambda: nb.linear(x, w, [1.0] * 24))
    refused(TypeError, "grouped_linear: offsets is a list", lambda: nb.grouped_linear(x, batch, [0, 1, 3]))
    refused(TypeError, "moe: expert_ids is a list", lambda: nb.moe(x, [[0]] * 3, share, experts, experts, experts))
    refused(TypeError, "moe: expert_weights is a float", lambda: nb.moe(x, ids, 1.0, experts, experts, experts))
    refused(TypeError, "dequantize: w is a Tensor", lambda: nb.dequantize(x))
    refused(TypeError, "quantize: out is a Tensor", lambda: nb.quantize(x, nb.NVFP4, out=x))
    refused(TypeError, "quantize: kernel is 3", lambda: nb.quantize(x, nb.NVFP4, kernel=3))
    refused(TypeError, "quantize: global_scale is a str", lambda: nb.quantize(x, nb.NVFP4, global_scale="a"))
    refused(TypeError, "quantize: x is a ndarray, need a Tensor", lambda: nb.quantize(x.numpy(), nb.NVFP4))
    sparse = x.to_sparse()
    refused(TypeError, "quantize: x is torch.sparse_coo, need a dense", lambda: nb.quantize(sparse, nb.NVFP4))
    refused(TypeError, "linear: x is torch.sparse_coo, need a dense", lambda: nb.linear(sparse, w))
    refused(TypeError, "matmul: b is torch.sparse_coo, need a dense", lambda: nb.matmul(w, sparse))
    refused(TypeError, "FP4Linear: x is torch.sparse_coo", lambda: nb.nn.FP4Linear(64, 24)(sparse))
    meta = torch.ones((), device="meta")
    refused(
        ValueError,
        "quantize: x is on cpu, global_scale on meta",
        lambda: nb.quantize(x, nb.NVFP4, global_scale=meta),
    )


def test_every_tensor_is_on_one_device():
    # What lies elsewhere is never read: on meta there is nothing to read.
    x, w, offsets = torch.randn(3, 64), weights("nvfp4", 2, 64, 64), torch.tensor([0, 1, 3])
    ids, share, bias = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), torch.ones(2, 64)
    elsewhere = "operands are on different devices: cpu, meta"
    refused(ValueError, f"grouped_linear: {elsewhere}", lambda: nb.grouped_linear(x, w, offsets.to("meta")))
    refused(ValueError, f"grouped_linear: {elsewhere}", lambda: nb.grouped_linear(x, w, offsets, bias.to("meta")))
    given = {"x": x, "expert_ids": ids, "expert_weights": share, "w_gate": w, "w_up": w, "w_down": w}
    given |= {"bias_gate": bias, "bias_up": bias, "bias_down": bias}
    assert nb.moe(**given).isfinite().all()
    for name, t in given.items():
        refused(ValueError, f"moe: {elsewhere}", partial(nb.moe, **given | {name: t.to("meta")}))


def test_out_must_fit_and_stand_alone():
    w, x = weights("nvfp4", 64, 64), torch.randn(3, 64)
    refused(ValueError, r"linear: out is torch.float32 \(3, 65\)", lambda: nb.linear(x, w, out=torch.empty(3, 65)))
    refused(
        ValueError, "need torch.bfloat16", lambda: nb.linear(x, w, out=torch.empty(3, 64), out_dtype=torch.bfloat16)
    )
    before = x.clone()
    refused(ValueError, "linear: out shares memory with an operand", lambda: nb.linear(x, w, out=x))
    assert torch.equal(x, before)
    whole = torch.randn(4, 64)
    refused(ValueError, "shares memory", lambda: nb.linear(whole[:3], w, out=whole[1:]))


def test_out_may_lie_beside_an_operand():
    w, buffer = weights("nvfp4", 64, 64), torch.randn(2, 5, 160)
    y = nb.linear(buffer[..., 16:80], w)
    beside = buffer[..., 80:144]
    assert nb.linear(buffer[..., 16:80], w, out=beside) is beside
    assert torch.equal(beside, y)
    for first in (17, 40, 79, 96):
        x = buffer[..., first : first + 64]
        refused(ValueError, "shares memory", partial(nb.linear, x, w, out=buffer[..., 80:144]))
    # Rows of 160 against rows of 320, and columns that reach into the next row.
    flat = buffer.flatten()
    refused(
        ValueError, "shares memory", lambda: nb.linear(flat[:1600].view(5, 320)[:, :64], w, out=buffer[0, :, 64:128])
    )
    wrapped = flat.as_strided((4, 64), (160, 1), 120)
    refused(ValueError, "shares memory", lambda: nb.linear(wrapped, w, out=buffer[0, :4, :64]))
    assert nb.linear(wrapped, w, out=buffer[0, :4, 24:88]).isfinite().all()


def test_bad_groups_are_refused():
    w, x = weights("nvfp4", 2, 24, 64), torch.randn(3, 64)
    refused(
        ValueError,
        r"grouped_linear: offsets are torch.int64 \(2,\), need int32 or int64 \(3,\)",
        lambda: nb.grouped_linear(x, w, torch.tensor([0, 3])),
    )
    refused(ValueError, "must ascend within 0..3", lambda: nb.grouped_linear(x, w, torch.tensor([0, 2, 1])))
    refused(ValueError, "must ascend within 0..3", lambda: nb.grouped_linear(x, w, torch.tensor([0, 2, 4])))
    refused(ValueError, "offsets are torch.float32", lambda: nb.grouped_linear(x, w, torch.zeros(3)))


def test_bad_moe_is_refused():
    gate, down = weights("mxfp4", 2, 32, 64), weights("mxfp4", 2, 64, 32)
    x, ids, share = torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    refused(ValueError, "expert_ids span 2..2, need -1..1", lambda: nb.moe(x, ids + 2, share, gate, gate, down))
    refused(ValueError, "must both be", lambda: nb.moe(x, ids[:2], share, gate, gate, down))
    refused(TypeError, "expert_ids are torch.float32", lambda: nb.moe(x, share, share, gate, gate, down))
    refused(TypeError, "expert_ids are torch.bool", lambda: nb.moe(x, ids.bool(), share, gate, gate, down))
    refused(ValueError, "moe: K differs", lambda: nb.moe(x[:, :32], ids, share, gate, gate, down))
    refused(TypeError, "moe: x has dtype torch.float64", lambda: nb.moe(x.double(), ids, share, gate, gate, down))
    refused(
        ValueError,
        r"moe: bias_down has shape \(3,\), need \(2, 64\)",
        lambda: nb.moe(x, ids, share, gate, gate, down, bias_down=torch.ones(3)),
    )
    refused(ValueError, "the transpose of w_down", lambda: nb.moe(x, ids, share, down, down, down))
    refused(
        ValueError, "activation 'tanh' is unknown", lambda: nb.moe(x, ids, share, gate, gate, down, activation="tanh")
    )
    refused(ValueError, "activation 'tanh'", lambda: nb.gated_linear(x, gate[0], gate[0], activation="tanh"))


@pytest.mark.parametrize("kernel", [None, "torch_quantize"])
def test_bad_quantize_is_refused(kernel):
    refused(
        ValueError,
        "K = 24 is not a multiple of nvfp4's block_size 16",
        lambda: nb.quantize(torch.ones(2, 24), nb.NVFP4, kernel=kernel),
    )
    refused(ValueError, "K = 33", lambda: nb.quantize(torch.ones(2, 33), nb.MXFP4, kernel=kernel))
    refused(TypeError, "torch.float64", lambda: nb.quantize(torch.ones(2, 32).double(), nb.MXFP4, kernel=kernel))
    refused(
        ValueError,
        "scale_rule 'floor' is unknown",
        lambda: nb.quantize(torch.ones(2, 32), nb.NVFP4, scale_rule="floor"),
    )
    refused(
        ValueError,
        "^quantize: format 'nvfp3' is unknown; formats are nvfp4",
        lambda: nb.quantize(torch.ones(2, 32), "nvfp3"),
    )
    bad = torch.ones(2, 32)
    bad[1, 3] = torch.nan
    refused(ValueError, "1 of 4 blocks hold", lambda: nb.quantize(bad, nb.NVFP4, strict=True, kernel=kernel))


def test_explain_names_what_it_takes():
    refused(ValueError, "explain: op is 'conv'", lambda: nb.explain("conv", torch.ones(1, 32), weights("mxfp4", 8, 32)))
    w = weights("mxfp4", 2, 8, 64)
    grouped = nb.explain("grouped_linear", torch.ones(5, 64), w, torch.ones(2, 8), out_dtype=torch.bfloat16)
    sizes = {"op": "grouped_linear", "M": 5, "N": 8, "K": 64, "G": 2, "a": "fp32", "b": "mxfp4", "bias": True}
    assert grouped.problem.as_dict() == sizes
    x = torch.ones(5, 64)
    gated = nb.explain("gated_linear", torch.ones(2, 3, 64), w[0])
    assert gated.problem.as_dict() == {
        "op": "gated_linear", "M": 6, "N": 8, "K": 64, "a": "fp32", "b": "mxfp4", "out": "fp32"
    }  # fmt: skip
    refused(
        ValueError,
        "grouped_linear has no batch_invariant",
        lambda: nb.explain("grouped_linear", x, w, batch_invariant=True),
    )
    for op, given, fitting, message in (
        ("grouped_linear", x, w[0], r"grouped_linear takes x \(M, K\) and w \(G, N, K\)"),
        ("grouped_linear", torch.ones(2, 3, 64), w, "x has shape"),
        ("bmm", torch.ones(3, 64), w, r"bmm takes x \(L, M, K\)"),
        ("matmul", torch.ones(64), w, r"matmul takes x \(\.\.\., M, K\)"),
        ("matmul", torch.ones(3, 5, 64), w, "batch dimensions differ"),
    ):
        refused(ValueError, f"explain: .*{message}", partial(nb.explain, op, given, fitting))
    refused(ValueError, "explain: bmm has no bias", lambda: nb.explain("bmm", x, w, torch.ones(2, 8)))
    rotated = nb.quantize(torch.randn(8, 64), nb.NVFP4, rotation=32)
    assert nb.explain("linear", torch.ones(2, 64).bfloat16(), rotated).problem.a == "fp32", "as x is once it is rotated"
    explanation = nb.explain("bmm", torch.ones(2, 3, 64), weights("mxfp4", 2, 8, 64))
    assert explanation.problem.L == 2


def test_rows_beyond_two_gigabytes():
    # B32: the second row lies 2^31 elements after the first; memory that is never touched costs nothing.
    far, w = 2**31, weights("mxfp4", 8, 64)
    x = torch.empty(far + 64, dtype=torch.bfloat16).as_strided((2, 64), (far, 1))
    out = torch.empty(far + 8, dtype=torch.bfloat16).as_strided((2, 8), (far, 1))
    near = torch.randn(2, 64).bfloat16()
    x.copy_(near)
    assert torch.equal(nb.linear(x, w, out=out), nb.linear(near, w))
    assert torch.equal(nb.quantize(x, nb.NVFP4).data, nb.quantize(near, nb.NVFP4).data)


@pytest.mark.parametrize("shape", [(2, 4, 0), (0, 4, 16), (2, 0, 16), (2, 3, 4, 32)], ids=str)
def test_quantize_with_a_global_scale_a_matrix(shape):
    x, factors = torch.randn(shape), torch.rand(shape[:-2]) + 0.5
    got, want = nb.quantize(x, nb.NVFP4, global_scale=factors), quantize(x, nb.NVFP4, global_scale=factors)
    assert got.shape == shape
    for part in ("data", "scale", "global_scale"):
        assert torch.equal(getattr(got, part), getattr(want, part))


@pytest.mark.parametrize("format", FORMATS)
def test_what_quantize_makes_is_a_constant(format):
    x = torch.nn.Parameter(torch.randn(3, 2, 64))
    given = [None] if format == "mxfp4" else [None, torch.tensor(0.1, requires_grad=True)]
    given += [] if format == "mxfp4" else [torch.ones(3, requires_grad=True)]
    for global_scale in given:
        w = nb.quantize(x, format, global_scale=global_scale)
        parts = [p for p in (w.data, w.scale, w.global_scale) if p is not None]
        assert not any(p.requires_grad for p in parts)
        copied = copy.deepcopy(w)
        assert torch.equal(nb.dequantize(copied), nb.dequantize(w))
        (nb.matmul(x, copied).sum() + x.sum()).backward()
    assert x.grad is not None


def test_strict_is_refused_while_tracing():
    strict = torch.compile(lambda x: nb.quantize(x, nb.NVFP4, strict=True).data, fullgraph=True)
    with pytest.raises(Exception, match="strict=True reads values"):
        strict(torch.ones(2, 32))


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_into_another(format):
    x, out = torch.randn(3, 64), nb.quantize(torch.ones(3, 64), format)
    assert nb.quantize(x, format, out=out) is out
    want = nb.quantize(x, format)
    assert torch.equal(out.data, want.data)
    assert torch.equal(out.scale, want.scale)
    assert torch.equal(nb.dequantize(out), nb.dequantize(want))
    refused(ValueError, "quantize: out is .* need the like of", lambda: nb.quantize(torch.ones(2, 64), format, out=out))
    refused(ValueError, "need the like of", lambda: nb.quantize(x, format, scale_rule="search", out=out))


@pytest.mark.parametrize(
    ("format", "arch", "layout"),
    [
        ("nvfp4", "cpu", nb.LINEAR),
        ("mxfp4", "cpu", nb.LINEAR),
        ("nvfp4", "sm_90", nb.LINEAR),
        ("nvfp4", "sm_100", nb.BLOCKED_128x4),
        ("mxfp4", "sm_120", nb.BLOCKED_128x4),
        ("nvfp4", "gfx950", nb.LINEAR),
        ("mxfp4", "gfx950", nb.BLOCKED_128x4),
    ],
)
def test_scales_are_blocked_where_tensor_cores_want_them(monkeypatch, format, arch, layout):
    if arch != "cpu":
        monkeypatch.setattr(ops, "arch_of", lambda device: arch)
        monkeypatch.setattr(triton_launch, "find_spec", lambda name: object())  # triton need not be installed
        monkeypatch.setattr(dispatch, "roofline", lambda device, threads: ASSUMED_GPU)
    ops._scale_layout.cache_clear()
    try:
        assert nb.scale_layout(format, "cpu") == layout
    finally:
        ops._scale_layout.cache_clear()


def test_scale_layout_refuses_an_unknown_format():
    refused(ValueError, "^scale_layout: format 'fp5' is unknown", lambda: nb.scale_layout("fp5", "cpu"))
