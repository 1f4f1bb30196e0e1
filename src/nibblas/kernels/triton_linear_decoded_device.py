"""Device code of triton_linear_decoded.py."""

# mypy: ignore-errors
import triton
import triton.language as tl

from nibblas.kernels.triton_decode import blocked_scale, decode, load_tile


@triton.jit
def decode_kernel(
    data,
    scale,
    out,
    N,
    K,
    data_stride,
    data_batch,
    scale_stride,
    scale_batch,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKED: tl.constexpr,
    PTX: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Elements divided by UNIT (see triton_decode) of ROWS rows and BLOCK_K columns of a matrix: out (L, N, K).

    BLOCKED : scales lie in BLOCKED_128x4, which has no row stride, else in rows.
    """
    steps = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(N, ROWS)
    l = (tl.program_id(0) // steps // tiles).to(tl.int64)
    rows = (tl.program_id(0) // steps % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) % steps * BLOCK_K
    inside = tl.minimum(rows, N - 1)
    data += l * data_batch
    scale += l * scale_batch
    DTYPE: tl.constexpr = out.dtype.element_ty
    if BLOCKED:
        j = tl.multiple_of(k // 2, BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        codes = tl.load(data + inside[:, None] * data_stride + j[None, :], mask=j[None, :] < K // 2, other=0)
        columns = tl.multiple_of(k // BLOCK_SIZE, BLOCK_K // BLOCK_SIZE) + tl.arange(0, BLOCK_K // BLOCK_SIZE)
        scales = blocked_scale(scale, inside, columns, K // BLOCK_SIZE, TAIL)
        tile = decode(codes, scales, BLOCK_SIZE, DTYPE, PTX)
    else:
        operand = (data, scale, None, data_stride, scale_stride)
        tile = load_tile(operand, inside, k, K, BLOCK_K, BLOCK_SIZE, DTYPE, PTX, TAIL)
    ks = k + tl.arange(0, BLOCK_K)
    tl.store(out + (l * N + rows)[:, None] * K + ks[None, :], tile, mask=(rows < N)[:, None] & (ks < K)[None, :])
