"""Device code of triton_gated_linear.py."""

# mypy: ignore-errors
import triton
import triton.language as tl

from nibblas.kernels.triton_decode import global_factor, k_range, load_tile, multiply, tile_of
from nibblas.kernels.triton_linear_device import add_bias, store


@triton.jit
def gate_with(gate, up, CLAMPED: tl.constexpr, alpha, limit):
    """silu(gate) * up, or gpt-oss's gate with its clamps, in fp32."""
    if CLAMPED:
        # Comparisons that a NaN makes false: it goes through.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
    else:
        alpha = 1.0
    return gate / (1.0 + tl.exp(-alpha * gate)) * up


@triton.jit
def gated_kernel(
    a,
    a_scale,
    a_global,
    gate,
    gate_scale,
    gate_global,
    up,
    up_scale,
    up_global,
    bias_gate,
    bias_up,
    out,
    M,
    N,
    K,
    a_stride,
    a_scale_stride,
    gate_stride,
    gate_scale_stride,
    up_stride,
    up_scale_stride,
    out_stride,
    alpha,
    limit,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ALIGN: tl.constexpr,
    CLAMPED: tl.constexpr,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    TERMS: tl.constexpr,
    PTX: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One tile of out (M, N), or of one split's partial sums of both products (SPLIT, 2, M, N) in fp32 if SPLIT > 1."""
    pid = tl.program_id(0)
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    split = pid // (m_tiles * n_tiles)
    m, n = tile_of(pid % (m_tiles * n_tiles), m_tiles, n_tiles, GROUP)
    rows = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_rows, b_rows = tl.minimum(rows, M - 1), tl.minimum(columns, N - 1)
    A = (a, a_scale, a_global, a_stride, a_scale_stride * SCALE_ALIGN)
    GATE = (gate, gate_scale, gate_global, gate_stride, gate_scale_stride * SCALE_ALIGN)
    UP = (up, up_scale, up_global, up_stride, up_scale_stride * SCALE_ALIGN)

    g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    u = g
    start, full, end = k_range(split, K, BLOCK_K, SPLIT)
    for k in tl.range(start, full, BLOCK_K):
        x = load_tile(A, a_rows, k, end, BLOCK_K, A_BLOCK, DTYPE, PTX, False)
        w = load_tile(GATE, b_rows, k, end, BLOCK_K, B_BLOCK, DTYPE, PTX, False)
        g = multiply(x, w, g, TERMS)
        w = load_tile(UP, b_rows, k, end, BLOCK_K, B_BLOCK, DTYPE, PTX, False)
        u = multiply(x, w, u, TERMS)
    if TAIL:  # noqa: SIM102 - one is a constant, the other is not
        if full < end:
            x = load_tile(A, a_rows, full, end, BLOCK_K, A_BLOCK, DTYPE, PTX, True)
            w = load_tile(GATE, b_rows, full, end, BLOCK_K, B_BLOCK, DTYPE, PTX, True)
            g = multiply(x, w, g, TERMS)
            w = load_tile(UP, b_rows, full, end, BLOCK_K, B_BLOCK, DTYPE, PTX, True)
            u = multiply(x, w, u, TERMS)

    if SPLIT > 1:
        first = split.to(tl.int64) * 2
        store(out + first * M * N, N, g, rows, M, columns, N)
        store(out + (first + 1) * M * N, N, u, rows, M, columns, N)
    else:
        a_factor = global_factor(A, 0, 0, A_BLOCK)
        g = add_bias(g * a_factor * global_factor(GATE, 0, 0, B_BLOCK), bias_gate, columns, N)
        u = add_bias(u * a_factor * global_factor(UP, 0, 0, B_BLOCK), bias_up, columns, N)
        store(out, out_stride, gate_with(g, u, CLAMPED, alpha, limit), rows, M, columns, N)


@triton.jit
def sum_gated_splits(
    partial,
    a_global,
    gate_global,
    up_global,
    bias_gate,
    bias_up,
    out,
    M,
    N,
    out_stride,
    alpha,
    limit,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CLAMPED: tl.constexpr,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
):
    """out (M, N) from partial sums of both products (SPLIT, 2, M, N), added in the order of the splits."""
    tiles = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    g = tl.zeros((BLOCK,), tl.float32)
    u = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT):
        g += tl.load(partial + (2 * split * M + row) * N + columns, mask=inside, other=0.0)
        u += tl.load(partial + ((2 * split + 1) * M + row) * N + columns, mask=inside, other=0.0)
    a_factor = global_factor((None, None, a_global), 0, 0, A_BLOCK)
    g = g * a_factor * global_factor((None, None, gate_global), 0, 0, B_BLOCK)
    u = u * a_factor * global_factor((None, None, up_global), 0, 0, B_BLOCK)
    if bias_gate is not None:
        g += tl.load(bias_gate + columns, mask=inside, other=0.0).to(tl.float32)
    if bias_up is not None:
        u += tl.load(bias_up + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * out_stride + columns, gate_with(g, u, CLAMPED, alpha, limit).to(out.dtype.element_ty), mask=inside
    )
