"""Device code of triton_linear.py."""

# mypy: ignore-errors
import triton
import triton.language as tl

from nibblas.kernels.triton_decode import (
    global_factor,
    k_range,
    load_scaled,
    load_tile,
    multiply,
    tile_of,
)


@triton.jit
def product(
    a,
    b,
    a_rows,
    b_rows,
    start,
    full,
    end,
    BLOCK_K: tl.constexpr,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    TERMS: tl.constexpr,
    PTX: tl.constexpr,
    TAIL: tl.constexpr,
):
    """sum over start..end of a[a_rows] * b[b_rows], lacking both UNITs: [BLOCK_M, BLOCK_N] fp32.

    Whole steps of BLOCK_K end at `full`; TAIL says that K has more than those.
    """
    acc = tl.zeros((a_rows.shape[0], b_rows.shape[0]), tl.float32)
    # A mask along K would make loads narrow, so that only the last step has one.
    for k in tl.range(start, full, BLOCK_K):
        x = load_tile(a, a_rows, k, end, BLOCK_K, A_BLOCK, DTYPE, PTX, False)
        w = load_tile(b, b_rows, k, end, BLOCK_K, B_BLOCK, DTYPE, PTX, False)
        acc = multiply(x, w, acc, TERMS)
    if TAIL:  # noqa: SIM102 - one is a constant, the other is not
        if full < end:
            x = load_tile(a, a_rows, full, end, BLOCK_K, A_BLOCK, DTYPE, PTX, True)
            w = load_tile(b, b_rows, full, end, BLOCK_K, B_BLOCK, DTYPE, PTX, True)
            acc = multiply(x, w, acc, TERMS)
    return acc


@triton.jit
def scaled_product(a, b, a_rows, b_rows, K, BLOCK_K: tl.constexpr, BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr):
    """sum over K of a[a_rows] * b[b_rows] on tensor cores that take block scales: [BLOCK_M, BLOCK_N] fp32."""
    acc = tl.zeros((a_rows.shape[0], b_rows.shape[0]), tl.float32)
    full = K // BLOCK_K * BLOCK_K if TAIL else K
    for k in tl.range(0, full, BLOCK_K):
        x, x_scale = load_scaled(a, a_rows, k, K, BLOCK_K, BLOCK_SIZE, False)
        w, w_scale = load_scaled(b, b_rows, k, K, BLOCK_K, BLOCK_SIZE, False)
        acc = tl.dot_scaled(x, x_scale, "e2m1", tl.trans(w), w_scale, "e2m1", acc)
    if TAIL:
        x, x_scale = load_scaled(a, a_rows, full, K, BLOCK_K, BLOCK_SIZE, True)
        w, w_scale = load_scaled(b, b_rows, full, K, BLOCK_K, BLOCK_SIZE, True)
        acc = tl.dot_scaled(x, x_scale, "e2m1", tl.trans(w), w_scale, "e2m1", acc)
    return acc


@triton.jit
def add_bias(acc, bias, columns, N):
    """acc [BLOCK_M, BLOCK_N] + bias at `columns` [BLOCK_N], in fp32; bias may be None."""
    if bias is not None:
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def store(out, stride, acc, rows, end, columns, N):
    """Narrow acc [BLOCK_M, BLOCK_N] once into rows below `end` and columns below N of out."""
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * stride + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def linear_kernel(
    a,
    a_scale,
    a_global,
    b,
    b_scale,
    b_global,
    bias,
    out,
    M,
    N,
    K,
    L,
    a_stride,
    a_scale_stride,
    a_batch,
    a_scale_batch,
    a_global_stride,
    b_stride,
    b_scale_stride,
    b_batch,
    b_scale_batch,
    b_global_stride,
    out_stride,
    out_batch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ALIGN: tl.constexpr,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    TERMS: tl.constexpr,
    PTX: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One tile of out (L, M, N), or of one split's partial sums (SPLIT, L, M, N) in fp32 if SPLIT > 1."""
    pid = tl.program_id(0)
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    outer = pid // (m_tiles * n_tiles)
    m, n = tile_of(pid % (m_tiles * n_tiles), m_tiles, n_tiles, GROUP)
    l = (outer % L).to(tl.int64)
    split = outer // L

    rows = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Scale strides come in units of SCALE_ALIGN, so that the compiler knows what divides them.
    A = (a + l * a_batch, a_scale, a_global, a_stride, a_scale_stride * SCALE_ALIGN)
    B = (b + l * b_batch, b_scale + l * b_scale_batch * SCALE_ALIGN, b_global, b_stride, b_scale_stride * SCALE_ALIGN)
    if A_BLOCK > 0:
        A = (A[0], a_scale + l * a_scale_batch * SCALE_ALIGN, a_global, A[3], A[4])
    start, full, end = k_range(split, K, BLOCK_K, SPLIT)
    acc = product(
        A,
        B,
        tl.minimum(rows, M - 1),
        tl.minimum(columns, N - 1),
        start,
        full,
        end,
        BLOCK_K,
        A_BLOCK,
        B_BLOCK,
        DTYPE,
        TERMS,
        PTX,
        TAIL,
    )
    if SPLIT > 1:
        store(out + (split * L + l) * M * N, N, acc, rows, M, columns, N)
    else:
        acc = acc * global_factor(A, l, a_global_stride, A_BLOCK) * global_factor(B, l, b_global_stride, B_BLOCK)
        store(out + l * out_batch, out_stride, add_bias(acc, bias, columns, N), rows, M, columns, N)


@triton.jit
def sum_splits(
    partial,
    a_global,
    b_global,
    bias,
    out,
    M,
    N,
    L,
    a_global_stride,
    b_global_stride,
    out_stride,
    out_batch,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
):
    """out (L, M, N) from partial sums (SPLIT, L, M, N), added in the order of the splits."""
    tiles = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    l = row // M
    inside = columns < N
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT):
        acc += tl.load(partial + (split * L * M + row) * N + columns, mask=inside, other=0.0)
    A, B = (None, None, a_global), (None, None, b_global)
    acc = acc * global_factor(A, l, a_global_stride, A_BLOCK) * global_factor(B, l, b_global_stride, B_BLOCK)
    if bias is not None:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + l * out_batch + (row % M) * out_stride + columns, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def native_kernel(
    a,
    a_scale,
    a_global,
    b,
    b_scale,
    b_global,
    bias,
    out,
    M,
    N,
    K,
    a_stride,
    a_batch,
    a_scale_batch,
    a_global_stride,
    b_stride,
    b_batch,
    b_scale_batch,
    b_global_stride,
    out_stride,
    out_batch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One tile of out (L, M, N) on tensor cores that take FP4 with block scales; scales in BLOCKED_128x4."""
    pid = tl.program_id(0)
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    l = (pid // (m_tiles * n_tiles)).to(tl.int64)
    m, n = tile_of(pid % (m_tiles * n_tiles), m_tiles, n_tiles, GROUP)
    rows = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    A = (a + l * a_batch, a_scale + l * a_scale_batch, a_global, a_stride)
    B = (b + l * b_batch, b_scale + l * b_scale_batch, b_global, b_stride)
    acc = scaled_product(A, B, tl.minimum(rows, M - 1), tl.minimum(columns, N - 1), K, BLOCK_K, BLOCK_SIZE, TAIL)
    # The tensor core multiplied by the whole scale: no UNIT is left over.
    acc = acc * global_factor(A, l, a_global_stride, 0) * global_factor(B, l, b_global_stride, 0)
    store(out + l * out_batch, out_stride, add_bias(acc, bias, columns, N), rows, M, columns, N)
