/* quantize and dequantize, bit for bit as quantize.py has them; docs/formats.md states each rule.
 *
 * Plain C over blocks of 16 or 32, which the compiler turns into vectors for each tier. Every product, sum and division
 * is one fp32 operation in the reference's order: nothing here may be contracted or reassociated.
 */
#include "cpu_common.h"

/* In the order of formats.py's scale_rules; cpu_quantize.py numbers them. */
enum { ABSMAX, FOUR_OVER_SIX, SEARCH_E4M3, EVEN, FLOOR, RCEIL, SEARCH_E8M0 };

enum { PIECE_K = 512, LARGEST_E4M3 = 0x7E, LARGEST_E8M0 = 254 };

typedef struct {
    int64_t rows, K;
    const void *x;                 /* (rows, K), or what dequantize writes */
    int64_t x_stride;              /* elements */
    uint8_t *data, *scale;         /* (rows, K / 2), (rows, K / block_size), contiguous */
    float global_scale;
    int32_t x_dtype, format, rule, threads, tier;
} Quantize;

/* e4m3 code of a number that is not negative: clamped to 448, ties to even, NaN to 0x7F. */
INLINE uint8_t e4m3_encode(float value) {
    if (value != value) return 0x7F;
    const float clamped = value > 448 ? 448 : value;
    const uint32_t bits = bits_of(clamped);
    if (clamped < 0x1p-6f) return (uint8_t)(bits_of(clamped + 0x1p14f) - bits_of(0x1p14f));
    return (uint8_t)((bits + 0x7FFFF + (bits >> 20 & 1) - (120u << 23)) >> 20);
}

INLINE uint8_t e2m1_encode(float value) {
    const float m = fabsf(value);
    const int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return (uint8_t)(code | (bits_of(value) >> 28 & 8));
}

/* The nearest e2m1 value of a magnitude, by adding and taking off 1.5 * 2^23 steps of the grid it lies on. */
INLINE float nearest_e2m1(float value) {
    const float clamped = value > 6 ? 6 : value;
    const float power = float_of(bits_of(clamped) & 0x7F800000u);
    const float magic = (power < 1 ? 1 : power) * 0x1.8p22f;
    return clamped + magic - magic;
}

/* Squared error of a block under a step, summed as a halving tree. */
INLINE float block_error(const float *magnitude, int block, float step) {
    float error[32];
    for (int i = 0; i < block; i++) {
        const float off = magnitude[i] - nearest_e2m1(magnitude[i] / step) * step;
        error[i] = off * off;
    }
    for (int half = block / 2; half; half /= 2)
        for (int i = 0; i < half; i++) error[i] += error[i + half];
    return error[0];
}

INLINE float inverse_power(int exponent) { return e8m0_decode((uint8_t)(LARGEST_E8M0 - exponent)); }

INLINE void multiply(const float *from, float factor, int block, float *to) {
    for (int i = 0; i < block; i++) to[i] = from[i] * factor;
}

INLINE uint8_t exponent_rule(float amax, uint32_t rounding) {
    const int code = (int)((bits_of(amax) + rounding) >> 23) - 2;
    return (uint8_t)(code < 0 ? 0 : code > LARGEST_E8M0 ? LARGEST_E8M0 : code);
}

INLINE uint8_t four_over_six(const float *magnitude, float amax, float global_scale) {
    const float scale = amax / (6 * global_scale);
    const uint8_t to_six = e4m3_encode(scale), to_four = e4m3_encode(1.5f * scale);
    const float power = inverse_power((int)(bits_of(global_scale) >> 23)), unit = global_scale * power;
    float raised[16];
    multiply(magnitude, power, 16, raised);
    const float error_six = block_error(raised, 16, e4m3_decode(to_six) * unit);
    const float error_four = block_error(raised, 16, e4m3_decode(to_four) * unit);
    return error_four >= error_six ? to_six : to_four;
}

INLINE uint8_t search_e4m3(const float *magnitude, float amax, float global_scale) {
    if (amax == 0) return 0;
    const int absmax = e4m3_encode(amax / (6 * global_scale));
    const float power = inverse_power((int)(bits_of(global_scale) >> 23)), unit = global_scale * power;
    float raised[16], least = INFINITY;
    multiply(magnitude, power, 16, raised);
    const int lowest = absmax - 5 < 1 ? 1 : absmax - 5;
    const int first = lowest > LARGEST_E4M3 - 15 ? LARGEST_E4M3 - 15 : lowest;
    int best = absmax;
    for (int code = first; code < first + 16; code++) {
        const float error = block_error(raised, 16, e4m3_decode((uint8_t)code) * unit);
        if (error < least) {
            best = code;
            least = error;
        }
    }
    return (uint8_t)best;
}

INLINE uint8_t search_e8m0(const float *magnitude, float amax) {
    const int floor_code = exponent_rule(amax, 0), first = floor_code > 0 ? floor_code - 1 : 0;
    float raised[32], least = INFINITY;
    multiply(magnitude, inverse_power(first), 32, raised);
    int best = first;
    for (int i = 0; i < 3; i++) {
        const float error = block_error(raised, 32, (float)(1 << i));
        if (error < least) {
            best = first + i;
            least = error;
        }
    }
    return (uint8_t)best;
}

INLINE void quantize_block(int format, int rule, const float *x, float global_scale, uint8_t *data, uint8_t *scale) {
    const int block = format == NVFP4 ? 16 : 32;
    float magnitude[32];
    uint32_t largest = 0, largest_finite = 0;
    for (int i = 0; i < block; i++) {
        const uint32_t bits = bits_of(x[i]) & 0x7FFFFFFF, finite = bits < 0x7F800000u ? bits : 0;
        largest = bits > largest ? bits : largest;
        largest_finite = finite > largest_finite ? finite : largest_finite;
        magnitude[i] = float_of(finite);
    }
    const float amax = float_of(largest_finite);
    uint8_t code;
    switch (rule) {
    case ABSMAX: code = e4m3_encode(amax / (6 * global_scale)); break;
    case FOUR_OVER_SIX: code = four_over_six(magnitude, amax, global_scale); break;
    case SEARCH_E4M3: code = search_e4m3(magnitude, amax, global_scale); break;
    case EVEN: code = exponent_rule(amax, 1u << 21); break;
    case FLOOR: code = exponent_rule(amax, 0); break;
    case RCEIL: code = exponent_rule(amax, (1u << 22) - 1); break;
    default: code = search_e8m0(magnitude, amax);
    }
    if (largest >= 0x7F800000u) code = format == NVFP4 ? 0x7F : 0xFF;
    *scale = code;
    const float divisor = scale_decode(code, format) * global_scale;
    /* A scale of 0 or NaN holds no value. */
    if (!(divisor > 0)) {
        memset(data, 0, block / 2);
        return;
    }
    uint8_t codes[32];
    for (int i = 0; i < block; i++) codes[i] = e2m1_encode(x[i] / divisor);
    for (int i = 0; i < block / 2; i++) data[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

INLINE void load_piece(const void *x, int64_t at, int64_t count, int dtype, float *to) {
    if (dtype == FP32)
        memcpy(to, (const float *)x + at, count * sizeof(float));
    else if (dtype == BF16)
        for (int64_t i = 0; i < count; i++) to[i] = load_float(x, at + i, BF16);
    else
        for (int64_t i = 0; i < count; i++) to[i] = load_float(x, at + i, FP16);
}

INLINE void quantize_piece(int format, int rule, const float *x, int64_t count, float global_scale, uint8_t *data,
                           uint8_t *scale) {
    const int block = format == NVFP4 ? 16 : 32;
    for (int64_t k = 0; k < count; k += block)
        quantize_block(format, rule, x + k, global_scale, data + k / 2, scale + k / block);
}

INLINE void quantize_row(const Quantize *p, int64_t row) {
    const int block = p->format == NVFP4 ? 16 : 32;
    const float g = p->global_scale;
    float x[PIECE_K];
    for (int64_t k = 0; k < p->K; k += PIECE_K) {
        const int64_t count = p->K - k < PIECE_K ? p->K - k : PIECE_K;
        uint8_t *data = p->data + (row * p->K + k) / 2, *scale = p->scale + (row * p->K + k) / block;
        load_piece(p->x, row * p->x_stride + k, count, p->x_dtype, x);
        switch (p->rule) {
        case ABSMAX: quantize_piece(NVFP4, ABSMAX, x, count, g, data, scale); break;
        case FOUR_OVER_SIX: quantize_piece(NVFP4, FOUR_OVER_SIX, x, count, g, data, scale); break;
        case SEARCH_E4M3: quantize_piece(NVFP4, SEARCH_E4M3, x, count, g, data, scale); break;
        case EVEN: quantize_piece(MXFP4, EVEN, x, count, g, data, scale); break;
        case FLOOR: quantize_piece(MXFP4, FLOOR, x, count, g, data, scale); break;
        case RCEIL: quantize_piece(MXFP4, RCEIL, x, count, g, data, scale); break;
        default: quantize_piece(MXFP4, SEARCH_E8M0, x, count, g, data, scale);
        }
    }
}

/* Largest magnitude among a row's finite elements, as fp32 bits. */
INLINE uint32_t amax_row(const Quantize *p, int64_t row) {
    float x[PIECE_K];
    uint32_t largest = 0;
    for (int64_t k = 0; k < p->K; k += PIECE_K) {
        const int64_t count = p->K - k < PIECE_K ? p->K - k : PIECE_K;
        load_piece(p->x, row * p->x_stride + k, count, p->x_dtype, x);
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = bits_of(x[i]) & 0x7FFFFFFF, finite = bits < 0x7F800000u ? bits : 0;
            largest = finite > largest ? finite : largest;
        }
    }
    return largest;
}

INLINE void dequantize_row(const Quantize *p, int64_t row) {
    const int block = p->format == NVFP4 ? 16 : 32;
    void *out = (void *)p->x;
    for (int64_t k0 = 0; k0 < p->K; k0 += block) {
        const float step = scale_decode(p->scale[(row * p->K + k0) / block], p->format) * p->global_scale;
        const uint8_t *data = p->data + (row * p->K + k0) / 2;
        const int64_t at = row * p->x_stride + k0;
        float values[32];
        for (int i = 0; i < block; i++) values[i] = E2M1_VALUES[data[i / 2] >> (i % 2 * 4) & 15] * step;
        if (p->x_dtype == FP32)
            memcpy((float *)out + at, values, block * sizeof(float));
        else if (p->x_dtype == BF16)
            for (int i = 0; i < block; i++) store_float(out, at + i, BF16, values[i]);
        else
            for (int i = 0; i < block; i++) store_float(out, at + i, FP16, values[i]);
    }
}

/* One job on one row, for each tier. */
enum { QUANTIZE, AMAX, DEQUANTIZE };

INLINE uint32_t do_row(const Quantize *p, int job, int64_t row) {
    if (job == QUANTIZE) quantize_row(p, row);
    if (job == DEQUANTIZE) dequantize_row(p, row);
    return job == AMAX ? amax_row(p, row) : 0;
}

static uint32_t row_portable(const Quantize *p, int job, int64_t row) { return do_row(p, job, row); }
#ifdef NIBBLAS_X86
TARGET_AVX2 static uint32_t row_avx2(const Quantize *p, int job, int64_t row) { return do_row(p, job, row); }
TARGET_AVX512 static uint32_t row_avx512(const Quantize *p, int job, int64_t row) { return do_row(p, job, row); }
#endif

static uint32_t all_rows(const Quantize *p, int job) {
    uint32_t (*do_one)(const Quantize *, int, int64_t) = row_portable;
#ifdef NIBBLAS_X86
    if (p->tier >= AVX2) do_one = p->tier >= AVX512 ? row_avx512 : row_avx2;
#endif
    uint32_t largest = 0;
    const int threads = p->rows * p->K > 1 << 14 ? p->threads : 1;
#pragma omp parallel num_threads(threads) reduction(max : largest) if (threads > 1)
    {
        const unsigned old = exact_float();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < p->rows; row++) {
            const uint32_t found = do_one(p, job, row);
            largest = found > largest ? found : largest;
        }
        restore_float(old);
    }
    return largest;
}

EXPORT void nibblas_quantize(const Quantize *p) { all_rows(p, QUANTIZE); }

EXPORT void nibblas_dequantize(const Quantize *p) { all_rows(p, DEQUANTIZE); }

EXPORT float nibblas_amax(const Quantize *p) { return float_of(all_rows(p, AMAX)); }
