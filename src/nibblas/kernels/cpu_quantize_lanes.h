/* The quantizers over LANES blocks at once, lane b of every vector for block b: a block's amax, its scale and the
 * halving tree of its errors are then plain operations between vectors. cpu_quantize.c includes this once for each
 * tier, with LANES (4, 8 or 16), TARGET (an attribute) and TIER(name).
 *
 * Every product, sum and division is one fp32 operation in the reference's order. multiply_add rounds once or twice, as
 * the tier has it: it stands where its product is exact, and in `divide`.
 */

#define Floats TIER(Floats)
#define Ints TIER(Ints)
#define Bits TIER(Bits)
#define select TIER(select)
#define select_float TIER(select_float)
#define smaller TIER(smaller)
#define larger_int TIER(larger_int)
#define multiply_add TIER(multiply_add)
#define divide TIER(divide)
#define encode_e4m3 TIER(encode_e4m3)
#define decode_e4m3 TIER(decode_e4m3)
#define decode_e8m0 TIER(decode_e8m0)
#define nearest_e2m1 TIER(nearest_e2m1)
#define square_error TIER(square_error)
#define block_error TIER(block_error)
#define exponent_rule TIER(exponent_rule)
#define four_over_six TIER(four_over_six)
#define search_e4m3 TIER(search_e4m3)
#define search_e8m0 TIER(search_e8m0)
#define block_scale TIER(block_scale)
#define encode_blocks TIER(encode_blocks)
#define quantize_elements TIER(quantize_elements)
#define columns TIER(columns)
#define decode_fp16 TIER(decode_fp16)
#define load_blocks TIER(load_blocks)
#define store_codes TIER(store_codes)
#define store_scales TIER(store_scales)
#define quantize_group TIER(quantize_group)
#define quantize_blocks TIER(quantize_blocks)
#define group_absmax TIER(group_absmax)
#define group_four_over_six TIER(group_four_over_six)
#define group_search_e4m3 TIER(group_search_e4m3)
#define group_even TIER(group_even)
#define group_floor TIER(group_floor)
#define group_rceil TIER(group_rceil)
#define group_search_e8m0 TIER(group_search_e8m0)

#define INNER TARGET INLINE

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

/* mask ? a : b, where each lane of mask is 0 or -1. */
INNER Ints select(Ints mask, Ints a, Ints b) { return (mask & a) | (~mask & b); }
INNER Floats select_float(Ints mask, Floats a, Floats b) { return (Floats)select(mask, (Ints)a, (Ints)b); }

/* b where a is NaN. */
INNER Floats smaller(Floats a, Floats b) {
#if LANES == 16
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select_float(a < b, a, b);
#endif
}

INNER Ints larger_int(Ints a, Ints b) {
#if LANES == 16
    return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif LANES == 8
    return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return select(a > b, a, b);
#endif
}

INNER Floats multiply_add(Floats a, Floats b, Floats c) {
#if LANES == 16
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* a / b as far as its e2m1 code goes, for numbers far from the ends of fp32; `inverse` is 1 / b.
 *
 * Where there is a fused multiply-add: a * inverse, corrected once by its exact remainder. That gave the code of the
 * true quotient for all 2^23 mantissas of b and every a within 8 units in the last place of b times a midpoint of
 * e2m1; further off, an error below 2 units changes no code. If a * inverse overflows this is NaN: `smaller` drops it.
 */
INNER Floats divide(Floats a, Floats b, Floats inverse) {
#if LANES == 4
    (void)inverse;
    return a / b;
#else
    const Floats quotient = a * inverse;
    return multiply_add(multiply_add(-quotient, b, a), inverse, quotient);
#endif
}

/* Codes of numbers that are neither negative nor NaN: clamped to 448, ties to even. */
INNER Ints encode_e4m3(Floats value) {
    const Floats clamped = smaller(value, (Floats){} + 448);
    const Ints bits = (Ints)clamped;
    const Ints subnormal = (Ints)(clamped + 0x1p14f) - 0x46800000;
    return select(clamped < 0x1p-6f, subnormal, (bits + 0x7FFFF + (bits >> 20 & 1) - (120 << 23)) >> 20);
}

/* Of codes 0..0x7E. */
INNER Floats decode_e4m3(Ints code) {
    const Floats subnormal = __builtin_convertvector(code, Floats) * 0x1p-9f;
    return select_float(code < 8, subnormal, (Floats)((code << 20) + (120 << 23)));
}

/* Of codes 0..254. */
INNER Floats decode_e8m0(Ints code) { return (Floats)select(code == 0, (Ints){} + 0x00400000, code << 23); }

/* The nearest e2m1 value of a magnitude, by adding and taking off 1.5 * 2^23 steps of the grid it lies on. */
INNER Floats nearest_e2m1(Floats magnitude) {
    const Floats clamped = smaller(magnitude, (Floats){} + 6), grid = (Floats){} + 0x1.8p22f;
    const Floats power = (Floats)larger_int((Ints)clamped & 0x7F800000, (Ints){} + 0x3F800000);
    return multiply_add(-power, grid, multiply_add(power, grid, clamped));
}

/* (magnitude - q * step)^2 with q = e2m1(magnitude / step); `inverse` is 1 / step. */
INNER Floats square_error(int format, Floats magnitude, Floats step, Floats inverse) {
    /* MXFP4's steps are powers of two: times the inverse is the quotient itself. */
    const Floats quotient = format == MXFP4 ? magnitude * inverse : divide(magnitude, step, inverse);
    const Floats off = magnitude - nearest_e2m1(quotient) * step;
    return off * off;
}

/* The squared errors of each block, summed as a halving tree. */
INNER Floats block_error(int format, const Floats *magnitude, Floats step) {
    const Floats inverse = 1 / step;
    const int half_block = format == NVFP4 ? 8 : 16;
    Floats error[16];
    UNROLL for (int i = 0; i < half_block; i++)
        error[i] = square_error(format, magnitude[i], step, inverse) +
                   square_error(format, magnitude[i + half_block], step, inverse);
    UNROLL for (int half = half_block / 2; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) error[i] += error[i + half];
    return error[0];
}

INNER Ints exponent_rule(Floats amax, int32_t rounding) {
    const Ints code = larger_int((((Ints)amax + rounding) >> 23) - 2, (Ints){});
    return select(code > LARGEST_E8M0, (Ints){} + LARGEST_E8M0, code);
}

INNER Ints four_over_six(const Floats *raised, Floats scale, float unit) {
    const Ints to_six = encode_e4m3(scale), to_four = encode_e4m3(1.5f * scale);
    const Floats six = decode_e4m3(to_six) * unit, four = decode_e4m3(to_four) * unit;
    const Floats error_six = block_error(NVFP4, raised, six), error_four = block_error(NVFP4, raised, four);
    /* A scale of 0 loses. */
    return select((to_six != 0) & (error_four >= error_six), to_six, to_four);
}

INNER Ints search_e4m3(const Floats *raised, Floats amax, Floats scale, float unit) {
    const Ints absmax = encode_e4m3(scale), lowest = larger_int(absmax - 5, (Ints){} + 1);
    const Ints first = select(lowest > LARGEST_E4M3 - 15, (Ints){} + (LARGEST_E4M3 - 15), lowest);
    Ints best = absmax;
    Floats least = (Floats){} + INFINITY;
    for (int i = 0; i < 16; i++) {
        const Floats error = block_error(NVFP4, raised, decode_e4m3(first + i) * unit);
        const Ints better = error < least;
        best = select(better, first + i, best);
        least = select_float(better, error, least);
    }
    return best & (amax != 0);
}

INNER Ints search_e8m0(const Floats *magnitude, Floats amax) {
    const Ints first = larger_int(exponent_rule(amax, 0) - 1, (Ints){});
    const Floats power = decode_e8m0(LARGEST_E8M0 - first);
    Floats raised[32], least = (Floats){} + INFINITY;
    for (int i = 0; i < 32; i++) raised[i] = magnitude[i] * power;
    Ints best = first;
    for (int i = 0; i < 3; i++) {
        const Floats error = block_error(MXFP4, raised, (Floats){} + (float)(1 << i));
        const Ints better = error < least;
        best = select(better, first + i, best);
        least = select_float(better, error, least);
    }
    return best;
}

/* Scale codes of blocks with magnitudes below infinity. */
INNER Ints block_scale(int rule, const Floats *x, Floats amax, float global_scale) {
    const int block = rule <= SEARCH_E4M3 ? 16 : 32;
    Floats magnitude[32];
    if (rule == EVEN) return exponent_rule(amax, 1 << 21);
    if (rule == FLOOR) return exponent_rule(amax, 0);
    if (rule == RCEIL) return exponent_rule(amax, (1 << 22) - 1);
    if (rule == SEARCH_E8M0) {
        UNROLL for (int i = 0; i < block; i++) magnitude[i] = (Floats)((Ints)x[i] & INT32_MAX);
        return search_e8m0(magnitude, amax);
    }
    const Floats scale = amax / (6 * global_scale);
    if (rule == ABSMAX) return encode_e4m3(scale);
    const float power = inverse_power((int)(bits_of(global_scale) >> 23)), unit = global_scale * power;
    UNROLL for (int i = 0; i < block; i++) magnitude[i] = (Floats)((Ints)x[i] & INT32_MAX) * power;
    return rule == SEARCH_E4M3 ? search_e4m3(magnitude, amax, scale, unit) : four_over_six(magnitude, scale, unit);
}

/* Codes of elements under their steps: words[block / 8], eight to a word; `far` from where `divide` is right. */
INNER void encode_blocks(int format, int far, const Floats *x, Floats step, Floats inverse, Ints live, Ints *words) {
    const int count = format == NVFP4 ? 2 : 4;
    UNROLL for (int j = 0; j < count; j++) {
        Bits word = {};
        UNROLL for (int i = 8 * j; i < 8 * j + 8; i++) {
            const Floats quotient = format == MXFP4 ? x[i] * inverse : far ? x[i] / step : divide(x[i], step, inverse);
            const Floats clamped = smaller((Floats)((Ints)quotient & INT32_MAX), (Floats){} + 6);
            const Ints power = larger_int((Ints)clamped & 0x7F800000, (Ints){} + 0x3F800000);
            /* As in nearest_e2m1. The sum's last bits count the grid's steps from 0; 0, 2 or 4 more, where power is 1,
             * 2 or 4, make the code. (power >> 22) is 14 more than that, modulo 16, and the magic number adds 2. */
            const Ints sum = (Ints)multiply_add((Floats)power, (Floats){} + (0x1.8p22f + 1), clamped);
            word = word >> 4 | (Bits)(((Ints)x[i] & INT32_MIN) | (sum + (power >> 22)) << 28);
        }
        words[j] = (Ints)word & live;
    }
}

/* Element i of each block in x[i] -> scale codes, and the codes of the elements in words[block / 8]. */
INNER Ints quantize_elements(int rule, const Floats *x, float global_scale, Ints *words) {
    const int format = rule <= SEARCH_E4M3 ? NVFP4 : MXFP4, block = format == NVFP4 ? 16 : 32;
    Ints largest = {};
    UNROLL for (int i = 0; i < block; i++) largest = larger_int(largest, (Ints)x[i] & INT32_MAX);
    /* Of blocks with a NaN or Inf only the scale code counts. */
    const Ints finite = largest < 0x7F800000;
    const Ints code = block_scale(rule, x, (Floats)(largest & finite), global_scale);
    const Floats step = format == NVFP4 ? decode_e4m3(code) * global_scale : decode_e8m0(code);
    /* A scale of 0 or NaN holds no value. */
    const Ints live = (step > 0) & finite;
    if (format == MXFP4)
        encode_blocks(MXFP4, 0, x, step, decode_e8m0(LARGEST_E8M0 - code), live, words);
    else if (global_scale > 0x1p-80f && global_scale < 0x1p80f)
        encode_blocks(NVFP4, 0, x, step, 1 / step, live, words);
    else
        encode_blocks(NVFP4, 1, x, step, step, live, words);
    return select(finite, code, (Ints){} + (format == NVFP4 ? 0x7F : 0xFF));
}

/* Eight 32-bit columns of LANES rows that start `stride` bytes apart. */
INNER void columns(const uint8_t *from, int64_t stride, Ints *to) {
#if LANES == 4
    for (int i = 0; i < 8; i++)
        for (int b = 0; b < LANES; b++) {
            int32_t word;
            memcpy(&word, from + b * stride + 4 * i, 4);
            to[i][b] = word;
        }
#elif LANES == 8
    __m256i row[8], pair[8], four[8];
    for (int b = 0; b < 8; b++) row[b] = _mm256_loadu_si256((const __m256i *)(from + b * stride));
    for (int b = 0; b < 8; b += 2) {
        pair[b] = _mm256_unpacklo_epi32(row[b], row[b + 1]);
        pair[b + 1] = _mm256_unpackhi_epi32(row[b], row[b + 1]);
    }
    for (int b = 0; b < 8; b += 4)
        for (int i = 0; i < 2; i++) {
            four[b + 2 * i] = _mm256_unpacklo_epi64(pair[b + i], pair[b + 2 + i]);
            four[b + 2 * i + 1] = _mm256_unpackhi_epi64(pair[b + i], pair[b + 2 + i]);
        }
    for (int i = 0; i < 4; i++) {
        to[i] = (Ints)_mm256_permute2x128_si256(four[i], four[i + 4], 0x20);
        to[i + 4] = (Ints)_mm256_permute2x128_si256(four[i], four[i + 4], 0x31);
    }
#else
    /* Row b beside row b + 4, so that columns i and i + 4 of eight rows end up in the 128-bit lanes of one register. */
    __m512i row[8], pair[8], four[8];
    for (int b = 0; b < 8; b++) {
        const uint8_t *low = from + (b % 4 + b / 4 * 8) * stride;
        row[b] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)low)),
                                    _mm256_loadu_si256((const __m256i *)(low + 4 * stride)), 1);
    }
    for (int b = 0; b < 8; b += 2) {
        pair[b] = _mm512_unpacklo_epi32(row[b], row[b + 1]);
        pair[b + 1] = _mm512_unpackhi_epi32(row[b], row[b + 1]);
    }
    for (int b = 0; b < 8; b += 4)
        for (int i = 0; i < 2; i++) {
            four[b + 2 * i] = _mm512_unpacklo_epi64(pair[b + i], pair[b + 2 + i]);
            four[b + 2 * i + 1] = _mm512_unpackhi_epi64(pair[b + i], pair[b + 2 + i]);
        }
    for (int i = 0; i < 4; i++) {
        to[i] = (Ints)_mm512_shuffle_i32x4(four[i], four[i + 4], 0x88);
        to[i + 4] = (Ints)_mm512_shuffle_i32x4(four[i], four[i + 4], 0xDD);
    }
#endif
}

/* fp16 in the low half of each lane. */
INNER Floats decode_fp16(Ints half) {
#if LANES == 16
    return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)half));
#else
    const Ints magnitude = (half & 0x7FFF) << 13, rebiased = (Ints)((Floats)magnitude * 0x1p112f);
    return (Floats)(select(magnitude >= 0x0F800000, magnitude | 0x7F800000, rebiased) | (half & 0x8000) << 16);
#endif
}

/* LANES blocks side by side -> element i of each in to[i]. */
INNER void load_blocks(const uint8_t *from, int block, int dtype, Floats *to) {
    const int words = dtype == FP32 ? block : block / 2;
    Ints word[32];
    UNROLL for (int i = 0; i < words; i += 8) columns(from + 4 * i, 4 * words, word + i);
    UNROLL for (int i = 0; i < words; i++) {
        if (dtype == FP32)
            to[i] = (Floats)word[i];
        else if (dtype == BF16) {
            to[2 * i] = (Floats)(word[i] << 16);
            to[2 * i + 1] = (Floats)(word[i] & (int32_t)0xFFFF0000);
        } else {
            to[2 * i] = decode_fp16(word[i]);
            to[2 * i + 1] = decode_fp16(word[i] >> 16);
        }
    }
}

/* words[i] of each block -> bytes, block after block. */
INNER void store_codes(const Ints *words, int count, uint8_t *to) {
#if LANES == 16
    if (count == 2) {
        const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        _mm512_storeu_si512(to, _mm512_permutex2var_epi32((__m512i)words[0], low, (__m512i)words[1]));
        _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi32((__m512i)words[0], high, (__m512i)words[1]));
        return;
    }
#endif
    for (int b = 0; b < LANES; b++)
        for (int i = 0; i < count; i++) {
            const int32_t word = words[i][b];
            memcpy(to + 4 * (b * count + i), &word, 4);
        }
}

INNER void store_scales(Ints code, uint8_t *to) {
#if LANES == 16
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)code));
#else
    for (int b = 0; b < LANES; b++) to[b] = (uint8_t)code[b];
#endif
}

/* LANES blocks side by side. */
INNER void quantize_group(int rule, const Quantize *p, const uint8_t *x, uint8_t *data, uint8_t *scale) {
    const int block = rule <= SEARCH_E4M3 ? 16 : 32;
    Floats elements[32];
    Ints words[4];
    if (p->x_dtype == FP32)
        load_blocks(x, block, FP32, elements);
    else if (p->x_dtype == BF16)
        load_blocks(x, block, BF16, elements);
    else
        load_blocks(x, block, FP16, elements);
    store_scales(quantize_elements(rule, elements, p->global_scale, words), scale);
    store_codes(words, block / 8, data);
}

#define RULE(name, rule)                                                                          \
    TARGET static void name(const Quantize *p, const uint8_t *x, uint8_t *data, uint8_t *scale) { \
        quantize_group(rule, p, x, data, scale);                                                  \
    }
RULE(group_absmax, ABSMAX)
RULE(group_four_over_six, FOUR_OVER_SIX)
RULE(group_search_e4m3, SEARCH_E4M3)
RULE(group_even, EVEN)
RULE(group_floor, FLOOR)
RULE(group_rceil, RCEIL)
RULE(group_search_e8m0, SEARCH_E8M0)
#undef RULE

/* Any number of blocks side by side; the last ones, fewer than LANES, by way of copies. */
TARGET static void quantize_blocks(const Quantize *p, const uint8_t *x, int64_t blocks, uint8_t *data, uint8_t *scale) {
    static void (*const groups[])(const Quantize *, const uint8_t *, uint8_t *, uint8_t *) = {
        group_absmax, group_four_over_six, group_search_e4m3, group_even, group_floor, group_rceil, group_search_e8m0};
    const int data_bytes = p->format == NVFP4 ? 8 : 16, x_bytes = data_bytes * (p->x_dtype == FP32 ? 8 : 4);
    const int64_t last = blocks % LANES, whole = blocks - last;
    for (int64_t b = 0; b < whole; b += LANES)
        groups[p->rule](p, x + b * x_bytes, data + b * data_bytes, scale + b);
    if (!last) return;
    uint8_t last_x[LANES * 128] = {0}, last_data[LANES * 16], last_scale[LANES];
    memcpy(last_x, x + whole * x_bytes, last * x_bytes);
    groups[p->rule](p, last_x, last_data, last_scale);
    memcpy(data + whole * data_bytes, last_data, last * data_bytes);
    memcpy(scale + whole, last_scale, last);
}

#undef Floats
#undef Ints
#undef Bits
#undef select
#undef select_float
#undef smaller
#undef larger_int
#undef multiply_add
#undef divide
#undef encode_e4m3
#undef decode_e4m3
#undef decode_e8m0
#undef nearest_e2m1
#undef square_error
#undef block_error
#undef exponent_rule
#undef four_over_six
#undef search_e4m3
#undef search_e8m0
#undef block_scale
#undef encode_blocks
#undef quantize_elements
#undef columns
#undef decode_fp16
#undef load_blocks
#undef store_codes
#undef store_scales
#undef quantize_group
#undef quantize_blocks
#undef group_absmax
#undef group_four_over_six
#undef group_search_e4m3
#undef group_even
#undef group_floor
#undef group_rceil
#undef group_search_e8m0
#undef INNER
#undef LANES
#undef TARGET
#undef TIER
