"""Device code of triton_linear_decoded_sm90.py."""

# mypy: ignore-errors
import triton
import triton.language as tl

from nibblas.kernels.triton_decode import POWER_126, e8m0_value

# Sign and magnitude of the two codes of a pair in a word of layouts.FragmentCodes.
PAIR = tl.constexpr(0x81C081C0)
HIGH = tl.constexpr(0xFFFF0000)


@triton.jit
def _nvfp4_factors(scale, chunk, inside):
    """Scales of rows g and of rows g + 8, times 2^119: [CHUNKS, 2 halves, 32 lanes] fp32 each."""
    lane = tl.arange(0, 32)
    word = tl.load(scale + chunk[:, None] * 32 + lane[None, :], mask=inside[:, None], other=0)
    word = word.to(tl.uint32, bitcast=True)
    halves = tl.join(word, (word >> 8) | (word << 24)).permute(0, 2, 1)
    pair = (halves & 0x0FF00FF0) | 0x70007000  # two bf16 numbers, NaN included
    return (pair << 16).to(tl.float32, bitcast=True), (pair & HIGH).to(tl.float32, bitcast=True)


@triton.jit
def _mxfp4_factors(scale, chunk, inside, largest):
    """Scales of rows g and of rows g + 8, divided by 4: [CHUNKS, 1, 32 lanes] fp32 each."""
    CHUNKS: tl.constexpr = chunk.shape[0]
    byte = tl.arange(0, 64)
    relative = tl.load(scale + chunk[:, None] * 64 + byte[None, :], mask=inside[:, None], other=0).to(tl.int32)
    # [CHUNKS, 32 lanes, 2 rows]
    row = tl.arange(0, 32)[:, None] // 4 + tl.arange(0, 2)[None, :] * 8
    relative = relative.reshape(CHUNKS, 32, 2)
    code = tl.where(relative == 255, 255, relative - 254 + tl.load(largest + row).to(tl.int32)[None, :, :])
    top, bottom = tl.split(e8m0_value(code) * 0.25)
    return top[:, None, :], bottom[:, None, :]


@triton.jit
def _half_tile(first, second, factor, BLOCK_SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Eight rows of a tile from the pairs of k, k + 1 and of k + 2, k + 3: [8, CHUNKS * 128] of DTYPE.

    first, second : [CHUNKS, 2 halves, 32 lanes, 4 words] uint32; factor broadcasts to [CHUNKS, 2 halves, 32 lanes].
    """
    CHUNKS: tl.constexpr = first.shape[0]
    fields = tl.join(tl.join(first << 16, second << 16), tl.join(first & HIGH, second & HIGH))
    value = fields.to(tl.float32, bitcast=True)  # code * 2^-126: [CHUNKS, 2, 32, 4, k / 2 % 2, k % 2]
    if BLOCK_SIZE == 32:
        value *= POWER_126
    value = (value * factor[:, :, :, None, None, None]).to(DTYPE).reshape(CHUNKS, 2, 8, 4, 16)
    # Of a chunk of 128 columns a lane has the t-th block: of 16 in each half, or of 32.
    value = value.permute(2, 0, 1, 3, 4) if BLOCK_SIZE == 16 else value.permute(2, 0, 3, 1, 4)
    return value.reshape(8, CHUNKS * 128)


@triton.jit
def decode_kernel(codes, scale, out, N, K, codes_batch, scale_batch, BLOCK_SIZE: tl.constexpr, CHUNKS: tl.constexpr):
    """Elements divided by UNIT (see triton_decode) of 16 rows and CHUNKS * 128 columns of b: out (L, N, K).

    codes : words of layouts.FragmentCodes; scale : of FragmentScales, words for NVFP4, bytes for MXFP4; strides from
        matrix to matrix in the same units.
    """
    chunks = tl.cdiv(K, 128)
    steps = tl.cdiv(chunks, CHUNKS)
    tiles = tl.cdiv(N, 16)
    tile = (tl.program_id(0) // steps % tiles).to(tl.int64)
    l = (tl.program_id(0) // steps // tiles).to(tl.int64)
    first = tl.program_id(0) % steps * CHUNKS
    inside = first + tl.arange(0, CHUNKS) < chunks
    chunk = tile * chunks + first + tl.arange(0, CHUNKS)

    place = tl.arange(0, 256)
    words = codes + l * codes_batch + chunk[:, None] * 256 + place[None, :]
    word = tl.load(words, mask=inside[:, None], other=0).to(tl.uint32, bitcast=True).reshape(CHUNKS, 2, 32, 4)
    if BLOCK_SIZE == 16:
        top, bottom = _nvfp4_factors(scale + l * scale_batch, chunk, inside)
    else:
        own = scale + l * scale_batch + tile * 16
        top, bottom = _mxfp4_factors(own, chunk, inside, own + (tile + 1) * chunks * 64)

    DTYPE: tl.constexpr = out.dtype.element_ty
    rotated = (word >> 6) | (word << 26)
    mixed = (word << 6) ^ (word >> 2)
    top = _half_tile(word & PAIR, rotated & PAIR, top, BLOCK_SIZE, DTYPE)
    bottom = _half_tile((word << 4) & PAIR, mixed & PAIR, bottom, BLOCK_SIZE, DTYPE)

    row = tile * 16 + tl.arange(0, 8)
    k = first * 128 + tl.arange(0, CHUNKS * 128)
    to = out + (l * N + row)[:, None] * K + k[None, :]
    tl.store(to, top, mask=(row < N)[:, None] & (k < K)[None, :])
    tl.store(to + 8 * K, bottom, mask=(row + 8 < N)[:, None] & (k < K)[None, :])
