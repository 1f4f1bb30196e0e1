import doctest
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import assert_close, poisoned_empty, random_codes, random_dense

from nibblas import reference
from nibblas.formats import FORMATS, MXFP4, NVFP4, pack, unpack
from nibblas.layouts import BLOCKED_128x4, CDNA_32x8, ROWS_16x1, ROWS_16x4, SHUFFLED_16x16
from nibblas.tensor import ScaledTensor, stack

FORMAT_NAMES = list(FORMATS)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def ones(shape, format, global_scale=None):
    """Every value is 1: code 2, scale 1."""
    *batch, K = shape
    data = torch.full((*batch, K // 2), 0x22, dtype=torch.uint8)
    scale = torch.full((*batch, K // format.block_size), format.scale_code.one, dtype=torch.uint8)
    return ScaledTensor(data, scale, format, global_scale)


def python_values(t):
    """The rows of an (N, K) tensor in LINEAR layout as Python floats, by the formats' definition."""

    def element(code):
        exponent, mantissa = code >> 1 & 3, code & 1
        magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        return -magnitude if code & 8 else magnitude

    def scale(byte):
        if t.format is MXFP4:
            return math.nan if byte == 255 else 2.0 ** (byte - 127)
        exponent, mantissa = byte >> 3 & 15, byte & 7
        if exponent == 15 and mantissa == 7:
            return math.nan
        return (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6

    block, factor = t.format.block_size, 1.0 if t.global_scale is None else t.global_scale.item()
    data, scales = t.data.tolist(), t.scale.tolist()
    return [
        [element(row[k // 2] >> 4 * (k % 2) & 15) * scale(s[k // block]) * factor for k in range(len(row) * 2)]
        for row, s in zip(data, scales, strict=True)
    ]


def python_matmul(a, b):
    return torch.tensor(
        [[math.fsum(x * y for x, y in zip(row, col, strict=True)) for col in b] for row in a], dtype=torch.float64
    )


def test_docstring_examples():
    results = doctest.testmod(reference)
    assert results.attempted
    assert not results.failed


def test_even_k_is_in_the_low_nibble():
    t = ScaledTensor(torch.full((8,), 0x52, dtype=torch.uint8), torch.tensor([0x38], dtype=torch.uint8), NVFP4)
    assert reference.to_float64(t).tolist() == [1.0, 3.0] * 8
    first = torch.zeros(1, 16)
    first[0, 0] = 1
    assert reference.linear(first, replace(t, data=t.data[None], scale=t.scale[None])).tolist() == [[1.0]]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMAT_NAMES)
def test_every_code_times_every_scale_byte(format):
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, format.block_size // 16)
    last = 256 if format is MXFP4 else 128
    scale = torch.arange(last, dtype=torch.uint8)[:, None]
    factor = torch.tensor(0.3) if format is NVFP4 else None
    t = ScaledTensor(pack(codes[:last]), scale, format, factor)
    want = torch.tensor(python_values(t), dtype=torch.float64)
    torch.testing.assert_close(reference.to_float64(t), want, rtol=0, atol=0, equal_nan=True)
    assert want[-1].isnan().all()
    assert want[:-1].isfinite().all()


def test_e8m0_range_survives():
    t = ones((2, 32), MXFP4)
    t.scale[:, 0] = torch.tensor([0, 254], dtype=torch.uint8)
    assert reference.to_float64(t)[:, 0].tolist() == [2.0**-127, 2.0**127]


def test_the_scale_product_is_not_rounded_to_fp32():
    # The fp32 bracket 448 * global rounds; the oracle's does not.
    factor = torch.tensor(1 / 3, dtype=torch.float32)
    t = ones((1, 16), NVFP4, factor)
    t.scale.fill_(0x7D)  # 416
    assert reference.to_float64(t)[0, 0].item() == 416 * factor.item()
    assert (torch.tensor(416.0) * factor).item() != 416 * factor.item()


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (2, 2, 3, 16)])
def test_global_scale_is_one_a_matrix_or_one_for_all(shape):
    assert reference.to_float64(ones(shape, NVFP4, torch.tensor(0.5))).eq(0.5).all()
    per_matrix = torch.arange(1.0, 1 + math.prod(shape[:-2])).reshape(shape[:-2])
    values = reference.to_float64(ones(shape, NVFP4, per_matrix))
    assert values.shape == shape
    want = per_matrix[..., None, None] if len(shape) > 1 else per_matrix
    assert values.eq(want).all()


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMAT_NAMES)
@pytest.mark.parametrize("rotation", [16, 32, 64, 128])
def test_rotation_is_inverted(format, rotation):
    K = 256
    t = random_codes((4, K), format, rng())
    # The transform element by element: H[i, j] = (-1)^(number of bits that i and j share) / sqrt(size).
    sign = [[(-1) ** (i & j).bit_count() for j in range(rotation)] for i in range(rotation)]
    H = torch.tensor(sign, dtype=torch.float64) / rotation**0.5
    values = reference.to_float64(replace(t, rotation=rotation))
    rotated = torch.cat([block @ H.T for block in values.split(rotation, -1)], -1)
    torch.testing.assert_close(rotated, reference.to_float64(t), rtol=1e-13, atol=1e-13)


def test_rotating_both_operands_changes_no_product():
    a, b = random_codes((3, 128), NVFP4, rng(1)), random_codes((5, 128), NVFP4, rng(2))
    rotated = reference.matmul(replace(a, rotation=32), replace(b, rotation=32))
    torch.testing.assert_close(rotated, reference.matmul(a, b), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, torch.float64, torch.float8_e4m3fn])
def test_dense_dtypes(dtype):
    x = torch.tensor([[1.5, -0.25]]).to(dtype)
    assert reference.to_float64(x).tolist() == [[1.5, -0.25]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float4_e2m1fn_x2])
def test_codes_are_not_taken_for_values(dtype):
    with pytest.raises(TypeError, match="to_float64: the tensor has dtype"):
        reference.to_float64(torch.zeros(2, 16, dtype=torch.uint8).view(dtype))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMAT_NAMES)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 32), (3, 5, 64), (2, 7, 96)])
def test_matmul_is_the_sum_of_products(format, M, N, K):
    a, b = random_codes((M, K), format, rng(1)), random_codes((N, K), format, rng(2), nan_scales=int(N > 1))
    want = python_matmul(python_values(a), python_values(b))
    got = reference.matmul(a, b)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14, equal_nan=True)
    assert got.isnan().any(0).sum() == int(N > 1)
    x = random_dense((M, K), BF16, rng(3))
    want = python_matmul(x.tolist(), python_values(b))
    torch.testing.assert_close(reference.linear(x, b), want, rtol=1e-12, atol=1e-14, equal_nan=True)


def test_gated_linear_is_the_formula():
    x, w1, w2 = random_dense((3, 32), FP32, rng(1)), *(random_codes((4, 32), NVFP4, rng(s)) for s in (2, 3))
    gate, up = (python_matmul(x.tolist(), python_values(w)) for w in (w1, w2))
    pairs = zip(gate.ravel().tolist(), up.ravel().tolist(), strict=True)
    want = torch.tensor([g / (1 + math.exp(-g)) * u for g, u in pairs], dtype=torch.float64).reshape(3, 4)
    torch.testing.assert_close(reference.gated_linear(x, w1, w2), want, rtol=1e-12, atol=1e-15)


def test_swiglu_clamped_matches_gpt_oss():
    golden = np.load(Path(__file__).parent / "golden" / "gpt_oss_swiglu.npz")
    interleaved, want = torch.from_numpy(golden["swiglu_in"]), torch.from_numpy(golden["swiglu_out"])
    gate, up = interleaved[:, 0::2], interleaved[:, 1::2]
    got = reference.gated_activation(gate, up, "swiglu_clamped")
    assert_close(want, got, FP32, K=1, what="gpt-oss swiglu")
    assert (up.abs() > 7).any()


def test_swiglu_clamped_bounds():
    gate, up = torch.tensor([100.0, -100.0, 0.0, 1.0]), torch.tensor([100.0, 1.0, 1.0, -100.0])
    got = reference.gated_activation(gate, up, "swiglu_clamped", alpha=1e6, limit=3.0)
    assert got.tolist() == [3.0 * 4.0, 0.0, 0.0, 1.0 * -2.0]


@pytest.mark.parametrize(
    ("format", "K"), [(NVFP4, 16), (NVFP4, 48), (NVFP4, 80), (NVFP4, 112), (MXFP4, 32), (MXFP4, 96), (NVFP4, 4096)]
)
def test_ones_sum_to_K(format, K):
    x, w = torch.ones(2, K), ones((3, K), format)
    assert reference.linear(x, w).eq(K).all()
    assert reference.gemv(w, torch.ones(K)).tolist() == [K] * 3
    assert reference.gemv(w, ones((K,), format)).tolist() == [K] * 3
    assert reference.matmul(w, w).eq(K).all()


@pytest.mark.parametrize("byte", range(256))
def test_sixteen_ones_times_any_e4m3_scale(byte):
    w = ones((1, 16), NVFP4)
    w.scale.fill_(byte)
    value = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).double() * 16
    torch.testing.assert_close(reference.linear(torch.ones(16), w), value, rtol=0, atol=0, equal_nan=True)


def test_a_nan_scale_reaches_its_own_output_only():
    w = ones((3, 64), MXFP4)
    w.data.zero_()
    w.scale[1, 1] = 255
    assert reference.gemv(w, torch.ones(64)).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMAT_NAMES)
def test_empty_sizes(format):
    assert reference.linear(torch.ones(0, 32), ones((3, 32), format)).shape == (0, 3)
    assert reference.linear(torch.ones(2, 32), ones((0, 32), format)).shape == (2, 0)
    bias = torch.tensor([1.0, 2.0, 3.0])
    assert reference.linear(torch.ones(2, 0), ones((3, 0), format)).tolist() == [[0.0] * 3] * 2
    assert reference.linear(torch.ones(2, 0), ones((3, 0), format), bias).tolist() == [bias.tolist()] * 2


@pytest.mark.parametrize(
    ("sizes", "want"), [([0, 3, 0, 5, 0], [64.0] * 3 + [256.0] * 5), ([0, 0], []), ([8], [32.0] * 8), ([], [])]
)
def test_groups_meet_their_own_weight(sizes, want):
    G, N, K = len(sizes), 2, 32
    w = ones((G, N, K), NVFP4, 2.0 ** torch.arange(G))
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    y = reference.grouped_linear(torch.ones(sum(sizes), K), w, offsets)
    assert y.tolist() == [[value] * N for value in want]
    assert y.shape == (sum(sizes), N)


def test_expert_biases_are_weighted():
    E, H, I = 2, 32, 32
    w = ones((E, I, H), MXFP4)
    bias_down = torch.tensor([4.0, 8.0])[:, None].expand(E, H)
    ids, weights = torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.75]])
    assert reference.moe(torch.zeros(1, H), ids, weights, w, w, w, bias_down=bias_down).tolist() == [[7.0] * H]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMAT_NAMES)
def test_batch_is_a_loop(format):
    a, b = random_codes((3, 4, 64), format, rng(1)), random_codes((3, 5, 64), format, rng(2))
    bias = random_dense((3, 5), FP32, rng(3))
    loop = [reference.matmul(a.slice(0, l, l + 1), b.slice(0, l, l + 1), bias[l : l + 1]) for l in range(3)]
    torch.testing.assert_close(reference.matmul(a, b, bias), torch.cat(loop), rtol=1e-14, atol=0)
    x = random_dense((3, 64), BF16, rng(4))
    vectors = [reference.linear(x[l], b.slice(0, l, l + 1))[0] for l in range(3)]
    assert reference.gemv(b, x).shape == (3, 5)
    torch.testing.assert_close(reference.gemv(b, x), torch.stack(vectors), rtol=1e-12, atol=1e-13)


def test_batch_dimensions_broadcast():
    a, b = random_dense((2, 1, 3, 32), FP32, rng(1)), random_codes((4, 5, 32), MXFP4, rng(2))
    c = reference.matmul(a, b)
    assert c.shape == (2, 4, 3, 5)
    torch.testing.assert_close(c[1, 2], reference.matmul(a[1, 0], b.slice(0, 2, 3))[0], rtol=1e-13, atol=1e-13)
    x = a[:, 0]
    assert reference.linear(x, b.slice(0, 0, 1)).shape == (2, 3, 5)


@pytest.mark.parametrize("layout", [BLOCKED_128x4, CDNA_32x8, ROWS_16x1])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMAT_NAMES)
def test_layouts_change_nothing(format, layout):
    x, w = random_dense((2, 160), BF16, rng(1)), random_codes((3, 33, 160), format, rng(2))
    want = reference.linear(x, w)
    assert torch.equal(reference.linear(x, w.with_layout(layout)), want)
    for data_layout in (ROWS_16x4, SHUFFLED_16x16):
        assert torch.equal(reference.linear(x, w.with_layout(layout, data_layout)), want)


def test_chunks_change_nothing(monkeypatch):
    a, b = random_dense((2, 3, 64), FP32, rng(1)), random_codes((2, 50, 64), NVFP4, rng(2), layout=BLOCKED_128x4)
    want, size = reference.matmul(a, b), reference.magnitude(a, b)
    for rows in (1, 7, 50):
        monkeypatch.setattr(reference, "_CHUNK_BYTES", rows * 2 * 64 * 8)
        torch.testing.assert_close(reference.matmul(a, b), want, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(reference.magnitude(a, b), size, rtol=1e-13, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMAT_NAMES)
def test_a_cuda_device_gives_the_same(format):
    a, b = (random_codes((2, 40, 160), format, rng(s), nan_scales=2, layout="BLOCKED_128x4") for s in (1, 2))
    w = random_codes((3, 32, 32), format, rng(3), scale_bytes=(110, 115))
    x, ids, weights = random_dense((5, 32), BF16, rng(4)), torch.tensor([[0], [2], [-1], [1], [2]]), torch.rand(5, 1)
    cpu = reference.matmul(a, b), reference.magnitude(a, b), reference.moe(x, ids, weights, w, w, w)
    a, b, w, x, ids, weights = (t.to("cuda") for t in (a, b, w, x, ids, weights))
    cuda = reference.matmul(a, b), reference.magnitude(a, b), reference.moe(x, ids, weights, w, w, w)
    for here, there in zip(cpu, cuda, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-11, atol=1e-13, equal_nan=True)
    got, facts = cuda[0].to(BF16), {"K": 160, "what": "cuda", "magnitude": cuda[1]}
    assert_close(got, cuda[0], BF16, **facts)
    for wrong in (got * 2, poisoned_empty(got.shape, BF16, "cuda")):
        with pytest.raises(AssertionError, match="elements are wrong"):
            assert_close(wrong, cuda[0], BF16, **facts)
    with pytest.raises(AssertionError, match="device"):
        assert_close(got.cpu(), cuda[0], BF16, **facts)


def test_doubling_a_global_scale_doubles_exactly():
    x, w = random_dense((4, 64), BF16, rng(1)), random_codes((6, 64), NVFP4, rng(2))
    doubled = replace(w, global_scale=2 * w.global_scale)
    assert torch.equal(reference.linear(x, doubled), 2 * reference.linear(x, w))
    one = replace(w, global_scale=torch.tensor(1.0))
    assert torch.equal(reference.linear(x, replace(w, global_scale=None)), reference.linear(x, one))


@pytest.mark.parametrize("layout", ["LINEAR", "BLOCKED_128x4"])
def test_grouped_is_a_loop(layout):
    sizes = [2, 0, 5, 1]
    x, w = random_dense((8, 64), BF16, rng(1)), random_codes((4, 6, 64), NVFP4, rng(2), layout=layout)
    bias = random_dense((4, 6), FP32, rng(3))
    offsets = torch.tensor([0, *sizes]).cumsum(0).int()
    groups = zip(x.split(sizes), reference.to_float64(w), bias, strict=True)
    loop = torch.cat([reference.linear(rows, weight, b) for rows, weight, b in groups])
    assert loop.shape == (8, 6)
    torch.testing.assert_close(reference.grouped_linear(x, w, offsets, bias), loop, rtol=1e-13, atol=1e-14)
    dense = reference.grouped_linear(x, reference.to_float64(w), offsets, bias)
    torch.testing.assert_close(dense, loop, rtol=1e-13, atol=1e-14)


def test_rows_of_no_group_are_zero():
    x, w = torch.randn(6, 64, generator=rng()), random_codes((2, 5, 64), NVFP4, rng(1))
    bias = torch.ones(2, 5)
    y = reference.grouped_linear(x, w, torch.tensor([1, 3, 4]), bias)
    assert torch.equal(y[1:4], reference.grouped_linear(x[1:4], w, torch.tensor([0, 2, 3]), bias))
    assert y[[0, 4, 5]].eq(0).all()
    assert reference.grouped_linear(x, torch.ones(0, 5, 64), torch.tensor([3])).eq(0).all()


def test_grouped_matmul_takes_shapes_of_their_own():
    pairs = [((1, 32), (4, 32)), ((5, 64), (2, 64)), ((0, 32), (3, 32))]
    a, b = ([random_codes(pair[i], NVFP4, rng(i)) for pair in pairs] for i in (0, 1))
    products = reference.grouped_matmul(a, b)
    assert [tuple(c.shape) for c in products] == [(1, 4), (5, 2), (0, 3)]
    assert torch.equal(products[1], reference.matmul(a[1], b[1]))
    with pytest.raises(ValueError, match="zip"):
        reference.grouped_matmul(a, b[:2])


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_gated_is_two_products(activation):
    x, w1, w2 = random_dense((2, 3, 64), BF16, rng(1)), *(random_codes((2, 5, 64), MXFP4, rng(s)) for s in (2, 3))
    b1, b2 = random_dense((2, 5), FP32, rng(4)), random_dense((2, 5), FP32, rng(5))
    got = reference.gated_linear(x, w1, w2, b1, b2, activation)
    want = reference.gated_activation(reference.matmul(x, w1, b1), reference.matmul(x, w2, b2), activation)
    assert got.shape == (2, 3, 5)
    assert torch.equal(got, want)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_moe_is_a_loop_over_tokens(activation):
    T, E, H, I, top_k = 7, 4, 64, 32, 2
    x = random_dense((T, H), BF16, rng(1))
    w_gate, w_up = (random_codes((E, I, H), MXFP4, rng(s), scale_bytes=(120, 125)) for s in (2, 3))
    w_down = random_codes((E, H, I), MXFP4, rng(4), layout="BLOCKED_128x4")
    b_gate, b_up, b_down = random_dense((E, I), FP32, rng(5)), random_dense((E, I), FP32, rng(6)), torch.ones(E, H)
    ids = torch.randint(-1, E, (T, top_k), generator=rng(7))
    ids[0], ids[1] = -1, 2  # a token with no expert, and one with the same expert twice
    weights = torch.rand(T, top_k, generator=rng(8))
    got = reference.moe(x, ids, weights, w_gate, w_up, w_down, b_gate, b_up, b_down, activation)
    gate, up, down = (reference.to_float64(w) for w in (w_gate, w_up, w_down))
    for t in range(T):
        want = torch.zeros(H, dtype=torch.float64)
        for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if e >= 0:
                hidden = reference.gated_linear(x[t], gate[e], up[e], b_gate[e], b_up[e], activation)
                want += weight * (down[e] @ hidden + b_down[e])
        torch.testing.assert_close(got[t], want, rtol=1e-11, atol=1e-11)
    assert got[0].eq(0).all()
    assert got[1].ne(0).any()


def test_moe_shows_hidden_activations_all_at_once():
    w, ids = stack([ones((32, 32), NVFP4)] * 3), torch.tensor([[2, 0], [0, -1]])
    seen = []
    x = torch.tensor([1.0, 2.0])[:, None].expand(2, 32)
    got = reference.moe(x, ids, torch.ones(2, 2), w, w, w, of_hidden=lambda h: seen.append(h) or torch.ones_like(h))
    assert [tuple(h.shape) for h in seen] == [(3, 32)]
    # Expert 0 of both tokens, then expert 2; SiLU of so much is the number itself.
    assert seen[0][:, 0].round().tolist() == [32 * 32, 64 * 64, 32 * 32]
    assert got[:, 0].tolist() == [64.0, 32.0]
    none = torch.full((2, 2), -1)
    assert reference.moe(x, none, torch.ones(2, 2), w, w, w, of_hidden=lambda h: seen.append(h) or h).eq(0).all()
    assert len(seen) == 1


def test_moe_leaves_unused_experts_alone():
    w = stack([random_codes((32, 32), NVFP4, rng(0)), random_codes((32, 32), NVFP4, rng(1), nan_scales=64)])
    x, one = torch.ones(3, 32), torch.ones(3, 1)
    assert reference.moe(x, torch.zeros(3, 1, dtype=torch.int32), one, w, w, w).isfinite().all()
    assert reference.moe(x, torch.ones(3, 1, dtype=torch.int32), one, w, w, w).isnan().all()


def test_magnitude_is_the_size_of_a_sum_of_random_signs():
    a, b = random_codes((2, 2048), NVFP4, rng(1)), random_codes((256, 2048), NVFP4, rng(2))
    ratio = reference.matmul(a, b) / reference.magnitude(a, b)
    assert 0.9 < ratio.square().mean().sqrt() < 1.1
    assert reference.magnitude(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, -1.0]])).item() == 5.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reference.matmul(torch.ones(2, 3), torch.ones(2, 4)), r"matmul: a is \(2, 3\) and b is \(2, 4\)"),
        (lambda: reference.linear(torch.ones(32), ones((2, 64), NVFP4)), r"matmul: a is \(1, 32\) and b is \(2, 64\)"),
        (lambda: reference.matmul(torch.ones(3), torch.ones(2, 3)), "matmul: a is"),
        (lambda: reference.gemv(torch.ones(2, 3), torch.ones(4)), "gemv: a is"),
        (lambda: reference.linear(torch.ones(3), torch.ones(2, 3), torch.ones(1)), r"bias is \(1,\), need \(..., 2\)"),
        (lambda: reference.grouped_linear(torch.ones(4, 3), torch.ones(2, 3), torch.tensor([0, 4])), "need .*G, N, K"),
        (lambda: grouped([0, 4]), r"offsets are \[0, 4\], need 3 numbers"),
        (lambda: grouped([0, 2, 5]), "rise within 0..4"),
        (lambda: grouped([-1, 2, 4]), "rise within 0..4"),
        (lambda: grouped([0, 3, 2]), "rise within 0..4"),
        (lambda: grouped([0, 1, 4], bias=torch.ones(5)), r"bias is \(5,\), need \(2, 5\)"),
        (lambda: moe_ids([[0], [2]]), "expert_ids reach from 0 to 2, need -1 to 1"),
        (lambda: moe_ids([[-2], [0]]), "expert_ids reach from -2"),
        (lambda: moe_ids([[0, 1], [0, 1]]), r"expert_ids \(2, 2\), expert_weights \(2, 1\)"),
        (lambda: reference.gated_activation(torch.ones(1), torch.ones(1), "relu"), "activation is 'relu', need one of"),
    ],
)
def test_errors_name_what_was_given(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def grouped(offsets, bias=None):
    return reference.grouped_linear(torch.ones(4, 3), torch.ones(2, 5, 3), torch.tensor(offsets), bias)


def moe_ids(ids):
    w = torch.ones(2, 3, 3)
    return reference.moe(torch.ones(2, 3), torch.tensor(ids), torch.ones(2, 1), w, w, w)


def product(dtype, K=256, nan_scales=0):
    """A product rounded once, its float64 answer and what assert_close takes beside them."""
    a = random_codes((9, K), NVFP4, rng(1))
    b = random_codes((64, K), NVFP4, rng(2), nan_scales=nan_scales)
    exact = reference.matmul(a, b)
    return exact.to(dtype), exact, {"K": K, "what": "test", "magnitude": reference.magnitude(a, b)}


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("K", [16, 256, 4096])
def test_one_rounding_passes(dtype, K):
    got, exact, facts = product(dtype, K)
    assert_close(got, exact, dtype, **facts)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("K", [16, 4096])
def test_an_fp32_sum_passes(dtype, K):
    a, b = random_codes((9, K), NVFP4, rng(1)), random_codes((64, K), NVFP4, rng(2))
    got = (reference.to_float64(a).float() @ reference.to_float64(b).float().T).to(dtype)
    exact, magnitude = reference.matmul(a, b), reference.magnitude(a, b)
    assert_close(got, exact, dtype, K=K, what="fp32 sum", magnitude=magnitude)


def wrong_controls(got):
    one_unit = got.view(torch.int32 if got.dtype == FP32 else torch.int16).clone()
    one_unit[3, 7] += 256 if got.dtype == FP32 else 1
    nan, inf, zero = got.clone(), got.clone(), got.clone()
    nan[8, 0], inf[0, 1], zero[2, 5] = math.nan, math.inf, 0
    return {
        "zeros": torch.zeros_like(got),
        "ones": torch.ones_like(got),
        "NaN everywhere": torch.full_like(got, math.nan),
        "one NaN": nan,
        "one Inf": inf,
        "one zero": zero,
        "rolled": got.roll(1, 0),
        "doubled": got * 2,
        "negated": -got,
        "one element off by a little more than rounding": one_unit.view(got.dtype),
        "poison": poisoned_empty(got.shape, got.dtype),
    }


CONTROLS = list(wrong_controls(torch.ones(9, 64)))


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_wrong_answers_fail(dtype, control):
    got, exact, facts = product(dtype)
    with pytest.raises(AssertionError, match=r"test: \d+ of 576 elements are wrong; worst at \(\d+, \d+\): got"):
        assert_close(wrong_controls(got)[control], exact, dtype, **facts)
    rows = random_codes((9, 256), NVFP4, rng(1), scale_bytes=(40, 60))  # of one size: the RMS will do
    columns = random_codes((64, 256), NVFP4, rng(2), scale_bytes=(40, 60))
    exact = reference.matmul(rows, columns)
    assert_close(exact.to(dtype), exact, dtype, K=256, what="test")
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_close(wrong_controls(exact.to(dtype))[control], exact, dtype, K=256, what="test")


def test_the_worst_element_is_named():
    got, exact, facts = product(FP32)
    got[4, 30] += 1000
    with pytest.raises(AssertionError, match=r"test: 1 of 576 elements are wrong; worst at \(4, 30\): .* of the RMS"):
        assert_close(got, exact, FP32, **facts)
    got[5, 31] = math.nan
    with pytest.raises(AssertionError, match=r"2 of 576 elements are wrong; worst at \(5, 31\): got nan"):
        assert_close(got, exact, FP32, **facts)


def test_wrong_dtype_shape_or_device_fails():
    got, exact, facts = product(BF16)
    with pytest.raises(AssertionError, match=r"need .*torch\.float16"):
        assert_close(got, exact, FP16, **facts)
    with pytest.raises(AssertionError, match=r"got shape, dtype, device \(\(64, 9\)"):
        assert_close(got.T, exact, BF16, **facts)
    with pytest.raises(AssertionError, match="device"):
        assert_close(got.to("meta"), exact, BF16, **facts)
    with pytest.raises(AssertionError, match=r"exact is torch\.float32"):
        assert_close(got, exact.float(), BF16, **facts)


def test_nan_must_stand_where_the_answer_has_it():
    got, exact, facts = product(FP32, nan_scales=2)
    assert 0 < exact.isnan().sum() < exact.numel()
    assert_close(got, exact, FP32, **facts)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_close(got.nan_to_num(0.0), exact, FP32, **facts)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_close(got.masked_fill(got.isnan(), math.inf), exact, FP32, **facts)


def test_overflow_is_the_infinity_of_the_dtype():
    exact = torch.tensor([1e6, -1e6, 1.0, 3.0], dtype=torch.float64)
    facts = {"K": 16, "what": "overflow"}
    assert_close(torch.tensor([math.inf, -math.inf, 1, 3], dtype=FP16), exact, FP16, **facts)
    for wrong in ([math.inf, math.inf, 1, 3], [65504, -math.inf, 1, 3], [math.nan, -math.inf, 1, 3]):
        with pytest.raises(AssertionError, match="elements are wrong"):
            assert_close(torch.tensor(wrong, dtype=FP16), exact, FP16, **facts)


def test_a_comparison_that_could_not_fail_is_refused():
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="nothing is compared"):
        assert_close(zeros.float(), zeros, FP32, K=16, what="zeros")
    with pytest.raises(AssertionError, match="nothing is compared"):
        assert_close(zeros.float() / 0, zeros / 0, FP32, K=16, what="NaN")
    uneven = torch.tensor([1e6] + [1.0] * 9, dtype=torch.float64)
    with pytest.raises(AssertionError, match="pass magnitude"):
        assert_close(uneven.float(), uneven, FP32, K=16, what="uneven")
    assert_close(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64), FP32, K=16, what="empty")


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_faults_of_kernels_fail(format, dtype):
    M, N, K = 3, 32, 192
    a, b = random_codes((M, K), format, rng(1)), random_codes((N, K), format, rng(2), global_scale=False)
    exact = reference.matmul(a, b)
    facts = {"K": K, "what": "fault", "magnitude": reference.magnitude(a, b)}
    assert_close(exact.to(dtype), exact, dtype, **facts)
    without_last = b.data.clone()
    without_last[:, -1] &= 0x0F
    stale = b.scale.clone()
    stale[N // 2] += 1
    faults = {
        "swapped nibbles": replace(b, data=(b.data << 4) | (b.data >> 4)),
        "scales of the next row": replace(b, scale=b.scale.roll(1, 0)),
        "scales of the next block": replace(b, scale=b.scale.roll(1, 1)),
        "one row's scales one code up": replace(b, scale=stale),
        "last element dropped": replace(b, data=without_last),
        "sign ignored": replace(b, data=b.data & 0x77),
    }
    for fault in faults.values():
        with pytest.raises(AssertionError, match="elements are wrong"):
            assert_close(reference.matmul(a, fault).to(dtype), exact, dtype, **facts)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_narrowing_twice_fails(dtype):
    a, b = random_codes((16, 512), NVFP4, rng(1)), random_codes((64, 512), NVFP4, rng(2))
    halves = [reference.matmul(a.slice(1, k, k + 256), b.slice(1, k, k + 256)).to(dtype) for k in (0, 256)]
    exact, magnitude = reference.matmul(a, b), reference.magnitude(a, b)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_close(halves[0] + halves[1], exact, dtype, K=512, what="split-K in 16 bits", magnitude=magnitude)


def test_an_intermediate_may_be_rounded_where_said():
    x, w = random_dense((8, 64), BF16, rng(1)), random_codes((64, 64), NVFP4, rng(2), scale_bytes=(40, 60))
    hidden = reference.linear(x, w)
    exact = reference.linear(hidden, w)
    got = reference.linear(hidden.to(BF16), w).to(BF16)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_close(got, exact, BF16, K=64, what="two layers")
    assert_close(got, exact, BF16, K=64, what="two layers", intermediate=BF16)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMAT_NAMES)
def test_random_codes_draws_all_codes_and_scale_bytes(format):
    t = random_codes((256, 512), format, rng())
    assert set(unpack(t.data).unique().tolist()) == set(range(16))
    low, high = (0, 0x7E) if format is NVFP4 else (107, 129)
    assert set(t.scale.unique().tolist()) == set(range(low, high + 1))
    assert reference.to_float64(t).isfinite().all()
    every = random_codes((256, 512), MXFP4, rng(), scale_bytes=(0, 254))
    assert (every.scale.min().item(), every.scale.max().item()) == (0, 254)
    spread = every.scale.max(1).values.int() - every.scale.min(1).values.int()
    assert spread.max() == 3
    one = random_codes((8, 64), MXFP4, rng(), scale_bytes=(127, 127))
    assert one.scale.eq(127).all()


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMAT_NAMES)
def test_random_codes_in_layouts(format):
    plain = random_codes((2, 33, 160), format, rng(), nan_scales=3)
    t = random_codes((2, 33, 160), format, rng(), nan_scales=3, layout="BLOCKED_128x4", data_layout="ROWS_16x4")
    assert t.shape == plain.shape
    assert torch.equal(t.linear_data, plain.data)
    assert torch.equal(t.linear_scale, plain.scale)
    assert format.scale_code.is_nan(plain.scale).sum() == 3
    written = t.layout.to(torch.ones_like(plain.scale)).bool()
    assert 0 < written.sum() < written.numel()
    assert t.scale[~written].eq(0xFF).all()
    assert t.data[~t.data_layout.to(torch.ones_like(plain.data)).bool()].eq(0xFF).all()
    assert not torch.equal(random_codes((2, 33, 160), format, rng(1)).data, plain.data)


def test_random_codes_shapes():
    assert random_codes((2, 3, 5, 32), NVFP4, rng()).global_scale.shape == (2, 3)
    assert random_codes((5, 32), "nvfp4", rng(), global_scale=False).global_scale is None
    assert random_codes((5, 32), "mxfp4", rng()).global_scale is None
    assert random_codes((0, 32), NVFP4, rng()).shape == (0, 32)
    assert random_codes((5, 0), MXFP4, rng()).shape == (5, 0)
    with pytest.raises(ValueError, match="random_codes: K = 24"):
        random_codes((5, 24), NVFP4, rng())


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_poison_is_nan(dtype):
    t = poisoned_empty((2, 3), dtype)
    assert (t.shape, t.dtype) == ((2, 3), dtype)
    assert t.float().isnan().all()
    assert poisoned_empty((), torch.uint8).item() == 0xFF
