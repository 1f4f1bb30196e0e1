"""Device code that Triton products share: FP4 to numbers in registers, operand tiles, exact products.

A decoded element is `code * scale / UNIT` of its format, exact in each dtype it is asked in:

- NVFP4 (16): at most 6 significant bits between 2^-17 and 21, exact in fp16, bf16 and fp32.
- MXFP4 (32): 2 significant bits between 2^-130 and 6 * 2^125, exact in bf16 (subnormals included) and fp32. fp16 can't
  hold that range, so fp16 activations meet MXFP4 as two bf16 terms.

The power of two UNIT keeps the largest scale from overflowing and saves NVFP4 a multiplication; it joins the global
scale at the end. A NaN scale makes all 16 or 32 elements NaN.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

NVFP4_UNIT = tl.constexpr(2.0**7)
MXFP4_UNIT = tl.constexpr(2.0**2)
POWER_120 = tl.constexpr(2.0**120)
POWER_126 = tl.constexpr(2.0**126)
# e4m3 values times this, times codes shifted into bf16 or fp32 (code * 2^-126) or fp16 (code * 2^-14), lack the UNIT.
E4M3_TO_BF16 = tl.constexpr(2.0**119)
E4M3_TO_FP16 = tl.constexpr(2.0**7)

# Four bytes of codes -> bf16x2 of their low nibbles (two registers) and of their high nibbles (two), times the scales.
# Sign and magnitude moved into a half's own fields read as code * 2^-126 (bf16) or code * 2^-14 (fp16), zero and the
# subnormal code 1 included; multiplications keep subnormals, and the addend -0 keeps the sign of a zero.
_ASM = """
{{
.reg .b32 t, u, m, s, z, r;
mov.b32 z, 0x80008000;
mov.b32 r, {rescale};
prmt.b32 t, $4, 0, 0x4140;
prmt.b32 u, $4, 0, 0x4342;
{low0}
{low1}
{high0}
{high1}
}}
"""


def _asm(kind: str, shift_low: int, shift_high: int, mask: str, rescale: str) -> str:
    def half(out: int, source: str, shift: int, sign_shift: int, scale: int) -> str:
        lines = [
            f"shl.b32 m, {source}, {shift};",
            f"and.b32 m, m, {mask};",
            f"shl.b32 s, {source}, {sign_shift};",
            "lop3.b32 m, s, z, m, 0xEA;",
            f"fma.rn.{kind} m, m, r, z;" if rescale else "",
            f"fma.rn.{kind} ${out}, m, ${scale}, z;",
        ]
        return "\n".join(line for line in lines if line)

    return _ASM.format(
        rescale=rescale or 0,
        low0=half(0, "t", shift_low, 12, 5),
        low1=half(1, "u", shift_low, 12, 6),
        high0=half(2, "t", shift_high, 8, 5),
        high1=half(3, "u", shift_high, 8, 6),
    )


_ASM_BF16_E4M3 = tl.constexpr(_asm("bf16x2", 6, 2, "0x01C001C0", ""))
_ASM_BF16_E8M0 = tl.constexpr(_asm("bf16x2", 6, 2, "0x01C001C0", "0x7E807E80"))  # 2^126 first
_ASM_FP16_E4M3 = tl.constexpr(_asm("f16x2", 9, 5, "0x0E000E00", ""))
_ASM_CONSTRAINTS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")


@triton.jit
def e4m3_value(code):
    """Values of e4m3 codes, exact: uint8 -> fp32."""
    code = code.to(tl.int32)
    # Exponent and mantissa moved into fp32's fields read as value * 2^-120, subnormals included.
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * POWER_120
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e8m0_value(code):
    """Values of e8m0 codes, exact: uint8 -> fp32; code 0 is the subnormal 2^-127."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def e2m1_value(code):
    """Values of e2m1 codes (bits above the fourth are ignored), exact: int32 -> fp32, -0 kept."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * POWER_126


@triton.jit
def _scale_factor(scale, BLOCK_SIZE: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """What shifted codes are multiplied by: scale codes -> scale * 2^119 or scale * 2^7 (e4m3), scale / 4 (e8m0)."""
    if BLOCK_SIZE == 16:
        value = e4m3_value(scale)
        factor = value * (E4M3_TO_FP16 if PTX and tl.float16 == DTYPE else E4M3_TO_BF16)
    else:
        code = scale.to(tl.int32)
        bits = tl.where(code > 2, (code - 2) << 23, 0x00100000 << (code & 3))
        factor = tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    return factor.to(DTYPE) if PTX else factor


@triton.jit
def decode(data, scale, BLOCK_SIZE: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Elements divided by UNIT: codes [R, H] and scale codes [R, 2H/BLOCK_SIZE], uint8 -> [R, 2H] of DTYPE."""
    R: tl.constexpr = data.shape[0]
    H: tl.constexpr = data.shape[1]
    factor = _scale_factor(scale, BLOCK_SIZE, DTYPE, PTX)
    factor = tl.broadcast_to(factor[:, :, None], (R, 2 * H // BLOCK_SIZE, BLOCK_SIZE // 2)).reshape(R, H)
    if PTX:
        if tl.float16 == DTYPE:
            low, high = tl.inline_asm_elementwise(
                _ASM_FP16_E4M3, _ASM_CONSTRAINTS, [data, factor], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
        else:
            asm: tl.constexpr = _ASM_BF16_E8M0 if BLOCK_SIZE == 32 else _ASM_BF16_E4M3
            low, high = tl.inline_asm_elementwise(
                asm, _ASM_CONSTRAINTS, [data, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    else:
        code = data.to(tl.int32)
        low = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
        high = (((code & 0x70) << 18) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
        if BLOCK_SIZE == 32:
            low, high = low * POWER_126, high * POWER_126
        low, high = (low * factor).to(DTYPE), (high * factor).to(DTYPE)
    return tl.join(low, high).reshape(R, 2 * H)


@triton.jit
def _load_fp4(operand, rows, k, end, BLOCK_K: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASK: tl.constexpr):
    """Packed codes [R, BLOCK_K/2] and scale codes [R, BLOCK_K/BLOCK_SIZE] of elements k..; zeros from `end` on."""
    data, scale, _, data_stride, scale_stride = operand
    # k is a multiple of BLOCK_K; the compiler loses that in a division, and with it wide loads.
    j = tl.multiple_of(k // 2, BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    b = tl.multiple_of(k // BLOCK_SIZE, BLOCK_K // BLOCK_SIZE) + tl.arange(0, BLOCK_K // BLOCK_SIZE)
    data += rows[:, None] * data_stride + j[None, :]
    scale += rows[:, None] * scale_stride + b[None, :]
    if MASK:
        codes = tl.load(data, mask=j[None, :] < end // 2, other=0)
        scales = tl.load(scale, mask=b[None, :] < end // BLOCK_SIZE, other=0)
    else:
        codes, scales = tl.load(data), tl.load(scale)
    return codes, scales


@triton.jit
def load_tile(
    operand,
    rows,
    k,
    end,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
    MASK: tl.constexpr,
):
    """Elements k.. of some rows of an operand, zeros from `end` on: [R, BLOCK_K]; DTYPE if FP4, its own if dense.

    operand : (data, scale, global_scale, row stride of data, row stride of scale); BLOCK_SIZE is 0 if it is dense.
    rows : [R] int64, all inside the operand.
    """
    if BLOCK_SIZE == 0:
        ks = k + tl.arange(0, BLOCK_K)
        pointers = operand[0] + rows[:, None] * operand[3] + ks[None, :]
        tile = tl.load(pointers, mask=ks[None, :] < end, other=0.0) if MASK else tl.load(pointers)
    else:
        data, scale = _load_fp4(operand, rows, k, end, BLOCK_K, BLOCK_SIZE, MASK)
        tile = decode(data, scale, BLOCK_SIZE, DTYPE, PTX)
    return tile


@triton.jit
def multiply(a, b, acc, TERMS: tl.constexpr):
    """acc + a @ b.T in fp32: a [BLOCK_M, BLOCK_K], b [BLOCK_N, BLOCK_K].

    TERMS > 1 cuts a (fp16 in two, fp32 in three) into bf16 terms whose sum is a: 8 significant bits each, cut off
    rather than rounded, so that the largest finite a keeps a finite first term.
    """
    rest = a.to(tl.float32) if TERMS > 1 else a
    for term in tl.static_range(TERMS):
        if TERMS == 1:
            part = a.to(b.dtype)
        elif term == TERMS - 1:
            part = rest.to(b.dtype)
        else:
            bits = rest.to(tl.int32, bitcast=True)
            magnitude = bits & 0x7FFFFFFF
            top = (bits & -65536).to(tl.float32, bitcast=True)
            part = tl.where(magnitude > 0x7F800000, float("nan"), top).to(b.dtype)
            rest = tl.where(magnitude == 0x7F800000, 0.0, rest - top)
        acc = tl.dot(part, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def tile_of(pid, M_TILES, N_TILES, GROUP: tl.constexpr):
    """Tile (m, n) of a program: columns of GROUP row tiles, so that programs that run together share operands in L2."""
    per_group = GROUP * N_TILES
    first = (pid // per_group) * GROUP
    rows = tl.minimum(M_TILES - first, GROUP)
    inside = pid % per_group
    return first + inside % rows, inside // rows


@triton.jit
def k_range(split, K, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """Where split number `split` starts along K, where its whole steps of BLOCK_K end, and where it ends.

    A split may be empty: then all three are its start.
    """
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT)
    start = split * steps * BLOCK_K
    end = tl.maximum(tl.minimum(start + steps * BLOCK_K, K), start)
    return start, tl.maximum(tl.minimum(end, K // BLOCK_K * BLOCK_K), start), end


@triton.jit
def global_factor(operand, matrix, stride, BLOCK_SIZE: tl.constexpr):
    """The operand's global scale times the UNIT its decoded elements lack; 1 if it is dense."""
    factor = 1.0
    if BLOCK_SIZE == 16:
        factor = NVFP4_UNIT
    elif BLOCK_SIZE == 32:
        factor = MXFP4_UNIT
    if operand[2] is not None:
        factor = tl.load(operand[2] + matrix * stride) * factor
    return factor


@triton.jit
def blocked_scale(scale, rows, columns, COLUMNS, MASK: tl.constexpr):
    """Scale codes of (rows, columns) of a matrix of COLUMNS scale columns in BLOCKED_128x4: [R, C] uint8."""
    offset = (rows // 128) * (tl.cdiv(COLUMNS, 4) * 512) + (rows % 32) * 16 + (rows // 32 % 4) * 4
    pointers = scale + offset[:, None] + (columns // 4 * 512 + columns % 4)[None, :]
    # Padding is not data, whatever it holds.
    return tl.load(pointers, mask=columns[None, :] < COLUMNS, other=0) if MASK else tl.load(pointers)


@triton.jit
def load_scaled(
    operand,
    rows,
    k,
    K,
    BLOCK_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASK: tl.constexpr,
):
    """Packed codes [R, BLOCK_K/2] and BLOCKED_128x4 scale codes [R, BLOCK_K/BLOCK_SIZE] as tensor cores take them."""
    j = tl.multiple_of(k // 2, BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    pointers = operand[0] + rows[:, None] * operand[3] + j[None, :]
    data = tl.load(pointers, mask=j[None, :] < K // 2, other=0) if MASK else tl.load(pointers)
    columns = tl.multiple_of(k // BLOCK_SIZE, BLOCK_K // BLOCK_SIZE) + tl.arange(0, BLOCK_K // BLOCK_SIZE)
    scale = blocked_scale(operand[1], rows, columns, K // BLOCK_SIZE, MASK)
    if BLOCK_SIZE == 16:
        scale = scale.to(tl.float8e4nv, bitcast=True)
    return data, scale
