"""Device code of triton_quantize.py: nibblas.quantize restated for a tile of blocks, operation by operation.

Launch with enable_fp_fusion=False: where quantize rounds a product, so must this.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from nibblas.kernels.triton_decode import e2m1_value, e4m3_value, e8m0_value

INFINITY_BITS = tl.constexpr(0x7F800000)
E4M3_NAN = tl.constexpr(0x7F)
E8M0_NAN = tl.constexpr(0xFF)


@triton.jit
def amax_kernel(x, partial, SIZE, STRIDE, BLOCK: tl.constexpr):
    """Each program: fp32 bits of the largest finite magnitude among its elements of x (SIZE,) -> partial[program]."""
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, SIZE, STRIDE):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < SIZE, other=0.0).to(tl.float32)
        magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.where(magnitude < INFINITY_BITS, magnitude, 0))
    tl.store(partial + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def _e4m3_code(value):
    """e4m3 codes nearest to values >= 0 or NaN, ties to even, clamped at 448 (NaN too): fp32 -> int32.

    In integers: on sm_90 triton 3.6 made wrong codes of two conversions to float8e4nv in one kernel.
    """
    value = tl.minimum(value, 448.0)
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the grid has steps of 2^-9, which is what fp32 has at 1.5 * 2^14.
    subnormal = (value + 24576.0).to(tl.int32, bitcast=True) - 0x46C00000
    return tl.where(value < 0.015625, subnormal, normal)


@triton.jit
def _magic(value):
    """1.5 * 2^23 steps of the e2m1 grid around values in 0..6: added to a value it rounds it to the grid, ties to even.

    Returns (the exponent field that sets the step, the magic number's bits).
    """
    power = tl.maximum(value.to(tl.int32, bitcast=True) & INFINITY_BITS, 0x3F800000)
    return power, power + 0x0B400000


@triton.jit
def _e2m1_magnitude_code(value):
    """e2m1 codes nearest to values >= 0 or NaN, ties to even, saturating at 6 (NaN too): fp32 -> int32.

    The code is in the lowest three bits; above them lies anything.
    """
    value = tl.minimum(value, 6.0)
    power, magic = _magic(value)
    steps = (value + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return steps + (power >> 22) + 2


@triton.jit
def _nearest_e2m1(value):
    """The e2m1 value nearest to values >= 0; NaN stays NaN."""
    value = tl.minimum(value, 6.0, propagate_nan=tl.PropagateNan.ALL)
    _, magic = _magic(value)
    magic = magic.to(tl.float32, bitcast=True)
    return tl.where(value == value, value + magic - magic, value)


@triton.jit
def _in_range(divisor):
    """A power of two that takes a divisor >= 0 to 2^-23..4."""
    exponent = tl.minimum(tl.maximum(divisor.to(tl.int32, bitcast=True) >> 23, 1), 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal(x, PTX: tl.constexpr):
    """RN(1 / x)."""
    if PTX:
        y = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.div_rn(1.0, x)
    return y


@triton.jit
def _quotient(x, divisor, reciprocal, FMA: tl.constexpr, CORRECTIONS: tl.constexpr):
    """x / divisor by RN(1 / divisor), all of one shape, where the divisor is in range; NaN where x is infinite.

    After two corrections it is RN(x / divisor), because the reciprocal is rounded right (Markstein). One is enough to
    find the nearest e2m1 code of an x of 11 bits (bf16, fp16): it errs by less than 2^-46, and the quotient of such an
    x comes that near to what separates two roundings around a midpoint of e2m1 only for divisors of all ones, where it
    is right.
    """
    if FMA:
        q = x * reciprocal
        for _ in tl.static_range(CORRECTIONS):
            q = tl.fma(tl.fma(-divisor, q, x), reciprocal, q)
    else:
        q = tl.div_rn(x, divisor)
    return q


@triton.jit
def _block_error(magnitude, step):
    """sum((x - e2m1 * step)^2) of blocks [B, S] under steps [B], summed as a halving tree: [B]."""
    B: tl.constexpr = magnitude.shape[0]
    S: tl.constexpr = magnitude.shape[1]
    step = tl.broadcast_to(step[:, None], (B, S))
    error = magnitude - _nearest_e2m1(tl.div_rn(magnitude, step)) * step
    error = error * error
    error = tl.sum(error.reshape(B, 2, S // 2), 1)
    error = tl.sum(error.reshape(B, 2, S // 4), 1)
    error = tl.sum(error.reshape(B, 2, S // 8), 1)
    error = tl.sum(error.reshape(B, 2, S // 16), 1)
    if S == 32:
        error = tl.sum(error.reshape(B, 2, S // 32), 1)
    return error.reshape(B)


@triton.jit
def _nvfp4_scale(magnitude, amax, global_scale, RULE: tl.constexpr, FMA: tl.constexpr, PTX: tl.constexpr):
    """e4m3 codes of blocks: magnitude [B, 16], amax [B], global_scale () -> [B] int32."""
    six = global_scale * 6.0
    power = _in_range(six)
    six_in_range = tl.broadcast_to(six * power, amax.shape)
    reciprocal = tl.broadcast_to(_reciprocal(six * power, PTX), amax.shape)
    scale = _quotient(amax * power, six_in_range, reciprocal, FMA, 2)
    scale = tl.where(six < float("inf"), scale, 0.0)
    absmax = _e4m3_code(scale)
    if RULE == "absmax":
        return absmax
    power = e8m0_value(254 - (global_scale.to(tl.int32, bitcast=True) >> 23))
    magnitude *= power
    unit = global_scale * power
    if RULE == "four_over_six":
        to_four = _e4m3_code(scale * 1.5)
        error_six = _block_error(magnitude, e4m3_value(absmax) * unit)
        error_four = _block_error(magnitude, e4m3_value(to_four) * unit)
        return tl.where(error_four >= error_six, absmax, to_four)
    first = tl.minimum(tl.maximum(absmax - 5, 1), 111)
    best = absmax
    least = tl.full(amax.shape, float("inf"), tl.float32)
    for i in range(16):
        error = _block_error(magnitude, e4m3_value(first + i) * unit)
        best = tl.where(error < least, first + i, best)
        least = tl.where(error < least, error, least)
    return tl.where(amax == 0.0, 0, best)


@triton.jit
def _mxfp4_scale(magnitude, amax, RULE: tl.constexpr):
    """e8m0 codes of blocks: magnitude [B, 32], amax [B] -> [B] int32."""
    bits = amax.to(tl.int32, bitcast=True)
    if RULE == "even":
        bits += 1 << 21
    elif RULE == "rceil":
        bits += (1 << 22) - 1
    code = tl.minimum(tl.maximum((bits >> 23) - 2, 0), 254)
    if RULE != "search":
        return code
    first = tl.maximum(code - 1, 0)
    magnitude *= e8m0_value(254 - first)[:, None]
    best = first
    least = tl.full(amax.shape, float("inf"), tl.float32)
    for i in tl.static_range(3):
        error = _block_error(magnitude, tl.full(amax.shape, 1 << i, tl.float32))
        best = tl.where(error < least, first + i, best)
        least = tl.where(error < least, error, least)
    return best


@triton.jit
def quantize_kernel(
    x,
    partial,
    global_scale,
    data,
    scale,
    BLOCKS,
    TOP,
    BLOCK_SIZE: tl.constexpr,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PARTIALS: tl.constexpr,
    FMA: tl.constexpr,
    CORRECTIONS: tl.constexpr,
    PTX: tl.constexpr,
):
    """TILES tiles of TILE blocks: x (BLOCKS * BLOCK_SIZE,) -> data (BLOCKS * BLOCK_SIZE / 2,), scale (BLOCKS,).

    PARTIALS > 0: global_scale is computed from amax_kernel's results, with TOP = 6 * the largest scale, and written.
    """
    if PARTIALS > 0:
        amax = tl.max(tl.load(partial + tl.arange(0, PARTIALS)), 0).to(tl.float32, bitcast=True)
        multiplier = tl.maximum(tl.div_rn(amax, TOP), 1.1754943508222875e-38)
        if tl.program_id(0) == 0:
            tl.store(global_scale, multiplier)
    elif BLOCK_SIZE == 16:
        multiplier = tl.load(global_scale)
    # From the end, where amax_kernel left x in the cache.
    last = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILES
    for tile in tl.static_range(TILES):
        block = (last + (TILES - 1 - tile)) * TILE + tl.arange(0, TILE)
        i = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
        inside = block < BLOCKS
        value = tl.load(x + i, mask=inside[:, None], other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True)
        magnitude_bits = bits & 0x7FFFFFFF
        largest = tl.max(magnitude_bits, 1)
        bad = largest >= INFINITY_BITS
        magnitude = magnitude_bits.to(tl.float32, bitcast=True)
        amax = largest.to(tl.float32, bitcast=True)
        if BLOCK_SIZE == 16:
            code = tl.where(bad, E4M3_NAN, _nvfp4_scale(magnitude, amax, multiplier, RULE, FMA, PTX))
            divisor = e4m3_value(code) * multiplier
            power = _in_range(divisor)
            in_range = divisor * power
            reciprocal = tl.broadcast_to(_reciprocal(in_range, PTX)[:, None], i.shape)
            in_range = tl.broadcast_to(in_range[:, None], i.shape)
            quotient = _quotient(magnitude * power[:, None], in_range, reciprocal, FMA, CORRECTIONS)
        else:
            code = tl.where(bad, E8M0_NAN, _mxfp4_scale(magnitude, amax, RULE))
            divisor = e8m0_value(code)
            # A power of two: multiplying by its inverse is the same division.
            quotient = magnitude * e8m0_value(254 - tl.minimum(code, 254))[:, None]
        element = (_e2m1_magnitude_code(quotient) & 7) | ((bits >> 28) & 8)
        low, high = tl.split(element.reshape(TILE, BLOCK_SIZE // 2, 2))
        # A scale of 0 or NaN holds no value.
        packed = tl.where((divisor > 0.0)[:, None], low | (high << 4), 0)
        j = block[:, None] * (BLOCK_SIZE // 2) + tl.arange(0, BLOCK_SIZE // 2)[None, :]
        tl.store(data + j, packed.to(tl.uint8), mask=inside[:, None])
        tl.store(scale + block, code.to(tl.uint8), mask=inside)


@triton.jit
def dequantize_kernel(
    data,
    scale,
    global_scale,
    out,
    BLOCKS,
    BLOCKS_PER_MATRIX,
    global_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE blocks: code * (scale * global_scale), the bracket in fp32, narrowed once: -> out (BLOCKS * BLOCK_SIZE,)."""
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < BLOCKS
    code = tl.load(scale + block, mask=inside, other=0)
    step = e4m3_value(code) if BLOCK_SIZE == 16 else e8m0_value(code)
    if global_scale is not None:
        step *= tl.load(global_scale + block // BLOCKS_PER_MATRIX * global_stride, mask=inside, other=0.0)
    j = block[:, None] * (BLOCK_SIZE // 2) + tl.arange(0, BLOCK_SIZE // 2)[None, :]
    codes = tl.load(data + j, mask=inside[:, None], other=0).to(tl.int32)
    low, high = e2m1_value(codes) * step[:, None], e2m1_value(codes >> 4) * step[:, None]
    values = tl.join(low, high).reshape(TILE, BLOCK_SIZE)
    i = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    tl.store(out + i, values.to(out.dtype.element_ty), mask=inside[:, None])
