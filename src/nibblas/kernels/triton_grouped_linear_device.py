"""Device code of triton_grouped_linear.py."""

# mypy: ignore-errors
import triton
import triton.language as tl

from nibblas.kernels.triton_decode import global_factor
from nibblas.kernels.triton_linear_device import add_bias, product, scaled_product, store


@triton.jit
def group_of(offsets, tile, M, G, BLOCK_M: tl.constexpr, RUNS: tl.constexpr):
    """The run of rows that row tile number `tile` belongs to: (run, first row of the tile, end of the run).

    Run 0 is the rows before the first group, runs 1..G are the groups, run G+1 the rows after the last; each is cut
    into tiles of its own. Past the last tile the run is RUNS. RUNS is a power of two above G+1.
    """
    run = tl.arange(0, RUNS)
    start = tl.load(offsets + run - 1, mask=(run > 0) & (run <= G + 1), other=0).to(tl.int64)
    end = tl.load(offsets + run, mask=run <= G, other=0).to(tl.int64)
    end = tl.where(run > G, M, end)
    start = tl.where(run > G + 1, M, start)
    tiles = tl.cdiv(tl.maximum(end - start, 0), BLOCK_M)
    last = tl.cumsum(tiles, 0)
    found = tl.sum((last <= tile).to(tl.int32), 0)
    mine = run == found
    first = tl.sum(tl.where(mine, start + (tile - (last - tiles)) * BLOCK_M, 0), 0)
    return found, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def grouped_kernel(
    a,
    a_scale,
    a_global,
    b,
    b_scale,
    b_global,
    offsets,
    bias,
    out,
    M,
    N,
    K,
    G,
    a_stride,
    a_scale_stride,
    b_stride,
    b_scale_stride,
    b_batch,
    b_scale_batch,
    b_global_stride,
    bias_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUNS: tl.constexpr,
    SCALE_ALIGN: tl.constexpr,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    TERMS: tl.constexpr,
    PTX: tl.constexpr,
    TAIL: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One tile of out (M, N); rows of no group become zero. NATIVE: scales are in BLOCKED_128x4, FP4 tensor cores."""
    n_tiles = tl.cdiv(N, BLOCK_N)
    run, first, end = group_of(offsets, tl.program_id(0) // n_tiles, M, G, BLOCK_M, RUNS)
    if run > G + 1:
        return
    n = tl.program_id(0) % n_tiles
    rows = first + tl.arange(0, BLOCK_M)
    columns = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (run == 0) | (run == G + 1):
        store(out, out_stride, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), rows, end, columns, N)
        return
    g = (run - 1).to(tl.int64)
    A = (a, a_scale, a_global, a_stride, a_scale_stride * SCALE_ALIGN)
    B = (b + g * b_batch, b_scale + g * b_scale_batch * SCALE_ALIGN, b_global, b_stride, b_scale_stride * SCALE_ALIGN)
    inside_rows, inside_columns = tl.minimum(rows, end - 1), tl.minimum(columns, N - 1)
    if NATIVE:
        acc = scaled_product(A, B, inside_rows, inside_columns, K, BLOCK_K, B_BLOCK, TAIL)
        acc = acc * global_factor(A, 0, 0, 0) * global_factor(B, g, b_global_stride, 0)
    else:
        acc = product(
            A,
            B,
            inside_rows,
            inside_columns,
            0,
            K // BLOCK_K * BLOCK_K,
            K,
            BLOCK_K,
            A_BLOCK,
            B_BLOCK,
            DTYPE,
            TERMS,
            PTX,
            TAIL,
        )
        acc = acc * global_factor(A, 0, 0, A_BLOCK) * global_factor(B, g, b_global_stride, B_BLOCK)
    if bias is not None:
        acc = add_bias(acc, bias + g * bias_stride, columns, N)
    store(out, out_stride, acc, rows, end, columns, N)
