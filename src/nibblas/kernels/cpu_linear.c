/* out = a @ b.T with FP4 weights b. cpu_linear.py says what is computed; here is how.
 *
 * Weights are taken 16 rows (a group) at a time as "lines": 64 bytes hold 8 k of each row, a row a 32-bit lane (layout
 * ROWS_16x4); the scales of a block are 16 bytes (ROWS_16x1). LINEAR weights are transposed into such lines, in L1 or
 * in registers.
 *
 * Tiers:
 *   amx       codes times scales, exact in bf16, become tiles.
 *   avx512    codes become bf16 pairs by vpermw; vdpbf16ps sums a block, one fp32 FMA a block applies the scale.
 *   avx2      codes times scales become fp32 panels for FMA.
 *   portable  the same in double. It also takes what the others could get wrong: rows of activations so small or large
 *             that a product leaves the normal fp32 numbers (vdpbf16ps and AMX flush subnormals).
 *
 * A row of fp16 or fp32 activations is the exact sum of 2 or 3 rows of bf16 ("terms"), whose results are added.
 * Threads share out groups, never a sum: results do not depend on their number.
 */
#include "cpu_common.h"

typedef struct {
    const void *data;
    const uint8_t *scale;          /* FP4 only */
    int64_t data_stride;           /* a row: elements if dense, bytes if FP4 */
    int64_t scale_stride;          /* a row: bytes */
    int32_t dtype;                 /* FP32, BF16, FP16 or FP4 */
    int32_t tiled;                 /* FP4 in ROWS_16x4 and ROWS_16x1; else LINEAR */
    float global_scale;
} Operand;

typedef struct {
    int64_t M, N, K;
    Operand a, b;
    const void *bias;              /* (N,) or NULL */
    void *out;
    int64_t out_stride;            /* elements */
    int32_t format, bias_dtype, out_dtype, threads, tier;
} Linear;

enum {
    LANES = 16,                    /* rows of weights in a group */
    LINE_K = 8,                    /* k in a line */
    CHUNK_K = 1024,                /* k of a group decoded or transposed at a time, at most */
    STEP_K = 32,                   /* activations lie in pieces of so many k: a row of an AMX tile */
    ROWS_AT_ONCE = 512,            /* bf16 rows of activations that are prepared at a time, at most */
    EXACT_ROWS = 32,               /* rows of activations in double at a time, at most */
    EXACT_K = 128,
    /* How far ahead codes are asked for, in bytes; measured on Sapphire Rapids. */
    PREFETCH = 4096,               /* of lines */
    ROW_PREFETCH = 256,            /* of a LINEAR row */
};

INLINE int block_size(int format) { return format == NVFP4 ? 16 : 32; }

INLINE int64_t groups_of(const Linear *p) { return (p->N + LANES - 1) / LANES; }

/* --- weights as lines -------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *lines;          /* [k / 8][16 rows][4 bytes] */
    const uint8_t *scales;         /* [k / block_size][16 rows] */
} Lines;

/* What LINEAR weights are transposed into: a group, some k of it. */
typedef struct {
    uint8_t *lines, *scales;
} LinesBuffer;

static LinesBuffer lines_buffer(const Linear *p, int64_t K) {
    if (p->b.tiled) return (LinesBuffer){NULL, NULL};
    /* gather_avx512 writes whole vectors. */
    const int64_t bytes = LANES * K / 2 + 64;
    uint8_t *both = allocate(bytes + LANES * K / block_size(p->format) + 64);
    return (LinesBuffer){both, both ? both + bytes : NULL};
}

static int is_missing(const Linear *p, LinesBuffer buffer) { return !p->b.tiled && !buffer.lines; }

/* `bytes` of 16 LINEAR rows -> [bytes / unit][16][unit]. Rows past the last repeat it. */
INLINE void gather(const uint8_t *from, int64_t stride, int64_t rows, int64_t bytes, int unit, uint8_t *to) {
    for (int64_t r = 0; r < LANES; r++) {
        const uint8_t *row = from + (r < rows ? r : rows - 1) * stride;
        for (int64_t i = 0; i < bytes / unit; i++) memcpy(to + (i * LANES + r) * unit, row + i * unit, unit);
    }
}

/* `next` is where the next call will read. */
typedef void Gather(const uint8_t *from, const uint8_t *next, int64_t stride, int64_t rows, int64_t bytes, int unit,
                    uint8_t *to);

static void gather_portable(const uint8_t *from, const uint8_t *next, int64_t stride, int64_t rows, int64_t bytes,
                            int unit, uint8_t *to) {
    (void)next;
    if (unit == 4)
        gather(from, stride, rows, bytes, 4, to);
    else
        gather(from, stride, rows, bytes, 1, to);
}

/* Lines of group g for k in k0..k1, which `buffer` has room for. */
INLINE Lines lines_of(const Linear *p, int64_t g, int64_t k0, int64_t k1, Gather *gather_lines, LinesBuffer *buffer) {
    const Operand *b = &p->b;
    const int block = block_size(p->format);
    const int64_t row = g * LANES;
    const uint8_t *data = (const uint8_t *)b->data + row * b->data_stride, *scale = b->scale + row * b->scale_stride;
    if (b->tiled) return (Lines){data + k0 / LINE_K * 64, scale + k0 / block * LANES};
    const int64_t rows = min64(LANES, p->N - row);
    /* The rest of these rows, else the rows two groups on. */
    const uint8_t *next_data = k1 < p->K ? data + k1 / 2 : data + 2 * LANES * b->data_stride;
    const uint8_t *next_scale = k1 < p->K ? scale + k1 / block : scale + 2 * LANES * b->scale_stride;
    gather_lines(data + k0 / 2, next_data, b->data_stride, rows, (k1 - k0) / 2, 4, buffer->lines);
    gather_lines(scale + k0 / block, next_scale, b->scale_stride, rows, (k1 - k0) / block, 1, buffer->scales);
    return (Lines){buffer->lines, buffer->scales};
}

/* --- results ----------------------------------------------------------------------------------------------------- */

/* Store a group of one row of results: global scales and bias in fp32, one narrowing. */
INLINE void store_row(const Linear *p, int64_t m, int64_t g, const float *sums) {
    const int64_t n = g * LANES, columns = min64(LANES, p->N - n);
    float value[LANES], bias[LANES] = {0};
    if (p->bias)
        for (int64_t j = 0; j < columns; j++) bias[j] = load_float(p->bias, n + j, p->bias_dtype);
    for (int j = 0; j < LANES; j++)
        value[j] = sums[j] * p->a.global_scale * p->b.global_scale + bias[j];
    const int64_t at = m * p->out_stride + n;
    if (columns < LANES) {
        for (int64_t j = 0; j < columns; j++) store_float(p->out, at + j, p->out_dtype, value[j]);
    } else if (p->out_dtype == FP32) {
        for (int j = 0; j < LANES; j++) store_float(p->out, at + j, FP32, value[j]);
    } else if (p->out_dtype == BF16) {
        for (int j = 0; j < LANES; j++) store_float(p->out, at + j, BF16, value[j]);
    } else {
        for (int j = 0; j < LANES; j++) store_float(p->out, at + j, FP16, value[j]);
    }
}

/* --- portable: everything in double ------------------------------------------------------------------------------ */

static void exact_row(const Linear *p, int64_t m, double *x) {
    const Operand *a = &p->a;
    if (a->dtype != FP4) {
        for (int64_t k = 0; k < p->K; k++) x[k] = load_float(a->data, m * a->data_stride + k, a->dtype);
        return;
    }
    const int block = block_size(p->format);
    const uint8_t *codes = (const uint8_t *)a->data + m * a->data_stride, *scale = a->scale + m * a->scale_stride;
    for (int64_t k = 0; k < p->K; k += 2) {
        const double s = scale_decode(scale[k / block], p->format);
        x[k] = E2M1_VALUES[codes[k / 2] & 15] * s;
        x[k + 1] = E2M1_VALUES[codes[k / 2] >> 4] * s;
    }
}

/* The listed rows of one group, in double: x[count][K], results to out. */
static void exact_group(const Linear *p, const int64_t *rows, int count, const double *x, int64_t g,
                        LinesBuffer *buffer) {
    const int block = block_size(p->format);
    double sums[EXACT_ROWS][LANES] = {{0}}, panel[EXACT_K][LANES];
    for (int64_t k0 = 0; k0 < p->K; k0 += EXACT_K) {
        const int64_t k1 = min64(p->K, k0 + EXACT_K);
        const Lines w = lines_of(p, g, k0, k1, gather_portable, buffer);
        for (int64_t k = 0; k < k1 - k0; k += block) {
            double scale[LANES];
            for (int r = 0; r < LANES; r++) scale[r] = scale_decode(w.scales[k / block * LANES + r], p->format);
            for (int64_t i = k; i < k + block; i++) {
                const uint8_t *bytes = w.lines + i / LINE_K * 64 + i % LINE_K / 2;
                for (int r = 0; r < LANES; r++)
                    panel[i][r] = E2M1_VALUES[bytes[r * 4] >> (i % 2 * 4) & 15] * scale[r];
            }
        }
        for (int m = 0; m < count; m++) {
            double sum[LANES];
            const double *row = x + m * p->K + k0;
            memcpy(sum, sums[m], sizeof sum);
            for (int64_t k = 0; k < k1 - k0; k++)
                for (int r = 0; r < LANES; r++) sum[r] += row[k] * panel[k][r];
            memcpy(sums[m], sum, sizeof sum);
        }
    }
    const double global_scale = (double)p->a.global_scale * p->b.global_scale;
    Linear rest = *p;
    rest.a.global_scale = rest.b.global_scale = 1;
    for (int m = 0; m < count; m++) {
        float sum[LANES];
        for (int r = 0; r < LANES; r++) sum[r] = (float)(sums[m][r] * global_scale);
        store_row(&rest, rows[m], g, sum);
    }
}

/* The listed rows of all groups, or of those marked in `only`. */
static int exact_rows(const Linear *p, const int64_t *rows, int64_t count, const uint8_t *only) {
    const int64_t at_once = min64(count, EXACT_ROWS), groups = groups_of(p);
    double *x = allocate(at_once * p->K * sizeof(double));
    if (!x) return -1;
    int failed = 0;
    for (int64_t first = 0; first < count; first += at_once) {
        const int64_t some = min64(at_once, count - first);
#pragma omp parallel num_threads(p->threads)
        {
            const unsigned old = exact_float();
            LinesBuffer buffer = lines_buffer(p, EXACT_K);
            const int missing = is_missing(p, buffer);
            if (missing) {
#pragma omp atomic write
                failed = 1;
            }
#pragma omp for
            for (int64_t m = 0; m < some; m++) exact_row(p, rows[first + m], x + m * p->K);
#pragma omp for schedule(dynamic)
            for (int64_t g = 0; g < groups; g++)
                if (!missing && (!only || only[g])) exact_group(p, rows + first, (int)some, x, g, &buffer);
            free(buffer.lines);
            restore_float(old);
        }
    }
    free(x);
    return failed ? -1 : 0;
}

static int exact_range(const Linear *p, int64_t m0, int64_t count, const uint8_t *only) {
    int64_t rows[ROWS_AT_ONCE];
    for (int64_t m = 0; m < count; m++) rows[m] = m0 + m;
    return exact_rows(p, rows, count, only);
}

static int portable_linear(const Linear *p) {
    for (int64_t m = 0; m < p->M; m += ROWS_AT_ONCE)
        if (exact_range(p, m, min64(ROWS_AT_ONCE, p->M - m), NULL)) return -1;
    return 0;
}

/* --- activations ------------------------------------------------------------------------------------------------- */

#ifdef NIBBLAS_X86

/* Magnitudes of a row's finite elements other than zero, as fp32 bits: smallest and largest (largest 0 if none). */
typedef struct {
    uint32_t smallest, largest;
} Span;

static const Span NOT_TAME = {1, 0x7F000000u};

INLINE int exponent_of(uint32_t bits) { return (int)(bits >> 23) - 127; }

/* Bits below the leading one in which an element can have ones. */
INLINE int fraction_bits(int dtype) { return dtype == FP32 ? 23 : dtype == FP16 ? 10 : 7; }

INLINE int terms_of(int dtype) { return dtype == FP32 ? 3 : dtype == FP16 ? 2 : 1; }

/* Whether sums of products of such elements with codes, in any order, are 0 or normal in fp32, so that flushing
 * subnormals changes nothing: the smallest product is 0.5 times the smallest element's last bit. */
INLINE int is_tame(Span span, int dtype) {
    if (!span.largest) return 1;
    return exponent_of(span.smallest) - fraction_bits(dtype) - 1 >= -126 && exponent_of(span.largest) < 40;
}

typedef struct {
    int64_t m0, rows;              /* rows of a that are prepared */
    int terms;                     /* prepared rows a row of a */
    int64_t height;                /* prepared rows in a tile */
    int64_t tile;                  /* elements in a tile of `height` rows of all K */
    /* [tiles][K / 32][height][32] bf16, in the order of decoded lines; avx2: fp32, k in order. */
    void *x;
} Rows;

/* Elements from a piece of a row to its next. */
INLINE int64_t step_of(const Rows *rows) { return rows->height * STEP_K; }

INLINE int64_t offset_of(const Rows *rows, int64_t m) {
    return m / rows->height * rows->tile + m % rows->height * STEP_K;
}

/* --- avx2 -------------------------------------------------------------------------------------------------------- */

enum { PANEL2_K = 128 };

TARGET_AVX2 static Span prepare_avx2(const Linear *p, int64_t m, float *x) {
    const Operand *a = &p->a;
    if (a->dtype == FP4) {
        const int block = block_size(p->format);
        const uint8_t *codes = (const uint8_t *)a->data + m * a->data_stride, *scale = a->scale + m * a->scale_stride;
        for (int64_t k0 = 0; k0 < p->K; k0 += block) {
            const float s = scale_decode(scale[k0 / block], p->format);
            for (int64_t k = k0; k < k0 + block; k += 2) {
                x[k] = E2M1_VALUES[codes[k / 2] & 15] * s;
                x[k + 1] = E2M1_VALUES[codes[k / 2] >> 4] * s;
            }
            /* 6 * 2^126 is no fp32: leave the row to the exact path. */
            if (p->format == MXFP4 && scale[k0 / block] != 255 && scale[k0 / block] > 252) return NOT_TAME;
        }
    } else if (a->dtype == FP32) {
        memcpy(x, (const float *)a->data + m * a->data_stride, p->K * sizeof(float));
    } else if (a->dtype == BF16) {
        for (int64_t k = 0; k < p->K; k++) x[k] = load_float(a->data, m * a->data_stride + k, BF16);
    } else {
        for (int64_t k = 0; k < p->K; k++) x[k] = load_float(a->data, m * a->data_stride + k, FP16);
    }
    uint32_t below = 0xFFFFFFFFu, largest = 0;
    for (int64_t k = 0; k < p->K; k++) {
        const uint32_t magnitude = bits_of(x[k]) & 0x7FFFFFFF, finite = magnitude < 0x7F800000u ? magnitude : 0;
        below = magnitude - 1 < below ? magnitude - 1 : below;
        largest = finite > largest ? finite : largest;
    }
    return (Span){below + 1, largest};
}

/* Lines -> values with their scales, fp32 [k][16]. */
TARGET_AVX2 static void panel_avx2(Lines w, int64_t K, int format, float *panel) {
    const int block = block_size(format);
    const __m256 magnitudes = _mm256_loadu_ps(E2M1_VALUES);
    const __m256i sign = _mm256_set1_epi32((int)0x80000000u);
    for (int64_t k0 = 0; k0 < K; k0 += block) {
        float scales[LANES];
        for (int r = 0; r < LANES; r++) scales[r] = scale_decode(w.scales[k0 / block * LANES + r], format);
        for (int half = 0; half < 2; half++) {
            const __m256 scale = _mm256_loadu_ps(scales + 8 * half);
            for (int64_t k = k0; k < k0 + block; k += LINE_K) {
                const __m256i codes = _mm256_loadu_si256((const __m256i *)(w.lines + k / LINE_K * 64 + 32 * half));
#pragma GCC unroll 8
                for (int i = 0; i < LINE_K; i++) {
                    const __m256 magnitude = _mm256_permutevar8x32_ps(magnitudes, _mm256_srli_epi32(codes, 4 * i));
                    const __m256i negative = _mm256_and_si256(_mm256_slli_epi32(codes, 28 - 4 * i), sign);
                    const __m256 signed_scale = _mm256_xor_ps(scale, _mm256_castsi256_ps(negative));
                    _mm256_storeu_ps(panel + (k + i) * LANES + 8 * half, _mm256_mul_ps(magnitude, signed_scale));
                }
            }
        }
    }
}

/* sums[rows][16] += x[rows][K] times the panel, in two chains (even and odd k) whatever the number of rows. */
TARGET_AVX2 INLINE void tile_avx2(int rows, const float *x, int64_t stride, const float *panel, int64_t K,
                                  float *sums) {
    __m256 sum[3][2][2];
#pragma GCC unroll 3
    for (int m = 0; m < rows; m++)
        for (int h = 0; h < 2; h++) sum[m][0][h] = sum[m][1][h] = _mm256_setzero_ps();
    for (int64_t k = 0; k < K; k += 2)
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++) {
            const __m256 w0 = _mm256_loadu_ps(panel + (k + c) * LANES);
            const __m256 w1 = _mm256_loadu_ps(panel + (k + c) * LANES + 8);
#pragma GCC unroll 3
            for (int m = 0; m < rows; m++) {
                const __m256 element = _mm256_broadcast_ss(x + m * stride + k + c);
                sum[m][c][0] = _mm256_fmadd_ps(element, w0, sum[m][c][0]);
                sum[m][c][1] = _mm256_fmadd_ps(element, w1, sum[m][c][1]);
            }
        }
#pragma GCC unroll 3
    for (int m = 0; m < rows; m++)
        for (int h = 0; h < 2; h++) {
            const __m256 both = _mm256_add_ps(sum[m][0][h], sum[m][1][h]);
            float *to = sums + m * LANES + 8 * h;
            _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), both));
        }
}

TARGET_AVX2 static void group_avx2(const Linear *p, const Rows *rows, int64_t g, LinesBuffer *buffer, float *sums) {
    _Alignas(64) float panel[PANEL2_K * LANES];
    memset(sums, 0, rows->rows * LANES * sizeof(float));
    for (int64_t k0 = 0; k0 < p->K; k0 += PANEL2_K) {
        const int64_t k1 = min64(p->K, k0 + PANEL2_K);
        panel_avx2(lines_of(p, g, k0, k1, gather_portable, buffer), k1 - k0, p->format, panel);
        const float *x = (const float *)rows->x + k0;
        int64_t m = 0;
        for (; m + 3 <= rows->rows; m += 3)
            tile_avx2(3, x + m * rows->tile, rows->tile, panel, k1 - k0, sums + m * LANES);
        if (rows->rows - m == 2)
            tile_avx2(2, x + m * rows->tile, rows->tile, panel, k1 - k0, sums + m * LANES);
        else if (rows->rows - m == 1)
            tile_avx2(1, x + m * rows->tile, rows->tile, panel, k1 - k0, sums + m * LANES);
    }
    for (int64_t m = 0; m < rows->rows; m++) store_row(p, rows->m0 + m, g, sums + m * LANES);
}

/* --- avx512: activations as bf16 terms --------------------------------------------------------------------------- */

/* 8 consecutive k of a line sit in a dword as 8 codes; shifted by 0, 4, 8 and 12 bits, its two words give the pairs
 * (0, 4), (1, 5), (2, 6) and (3, 7). Activations are put in that order. */
TARGET_AVX512 INLINE __m512 load_activations(int dtype, int format, const void *row, const uint8_t *scale, int64_t k) {
    if (dtype == FP32) return _mm512_loadu_ps((const float *)row + k);
    if (dtype == FP4) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)((const uint8_t *)row + k / 2));
        const __m128i codes = _mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4));
        const __m512 value = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), _mm512_loadu_ps(E2M1_VALUES));
        return _mm512_mul_ps(value, _mm512_set1_ps(scale_decode(scale[k / block_size(format)], format)));
    }
    const __m256i words = _mm256_loadu_si256((const __m256i *)((const uint16_t *)row + k));
    if (dtype == FP16) return _mm512_cvtph_ps(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

TARGET_AVX512 INLINE Span prepare_row(const Linear *p, int dtype, int64_t m, const Rows *rows, uint16_t *const *x) {
    const Operand *a = &p->a;
    const int terms = terms_of(dtype);
    const int64_t step = step_of(rows);
    const int width = dtype == FP32 ? 4 : dtype == FP4 ? 1 : 2;
    const void *row = (const uint8_t *)a->data + m * a->data_stride * width;
    const uint8_t *scale = dtype == FP4 ? a->scale + m * a->scale_stride : NULL;
    const __m256i pairs = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m512i exponent = _mm512_set1_epi32(0x7F800000), high_half = _mm512_set1_epi32((int)0xFFFF0000u);
    __m512i below = _mm512_set1_epi32(-1), largest = _mm512_setzero_si512();
    for (int64_t k = 0; k < p->K; k += 16) {
        const int64_t at = k / STEP_K * step + k % STEP_K;
        __m512 value = load_activations(dtype, p->format, row, scale, k);
        const __m512i bits = _mm512_castps_si512(value);
        const __m512i magnitude = _mm512_andnot_si512(_mm512_set1_epi32((int)0x80000000u), bits);
        const __mmask16 finite = _mm512_cmplt_epu32_mask(magnitude, exponent);
        const __mmask16 nan = _mm512_cmpgt_epu32_mask(magnitude, exponent);
        below = _mm512_min_epu32(below, _mm512_sub_epi32(magnitude, _mm512_set1_epi32(1)));
        largest = _mm512_mask_max_epu32(largest, finite, largest, magnitude);
        value = _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7FC00000)));
#pragma GCC unroll 3
        for (int t = 0; t < terms; t++) {
            const __m512i term = _mm512_and_si512(_mm512_castps_si512(value), high_half);
            const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(term, 16));
            _mm256_storeu_si256((__m256i *)(x[t] + at), _mm256_shuffle_epi8(words, pairs));
            /* Inf - Inf would be NaN: the terms after an infinite one are 0. */
            value = _mm512_maskz_sub_ps(finite, value, _mm512_castsi512_ps(term));
        }
    }
    if (p->K % STEP_K)
        for (int t = 0; t < terms; t++) memset(x[t] + p->K / STEP_K * step + 16, 0, 16 * sizeof(uint16_t));
    Span span = {_mm512_reduce_min_epu32(below) + 1, _mm512_reduce_max_epu32(largest)};
    if (dtype == FP4 && p->format == MXFP4)
        for (int64_t i = 0; i < p->K / 32; i++)
            if (scale[i] > 250 && scale[i] != 255) span = NOT_TAME;
    return span;
}

TARGET_AVX512 static Span prepare_avx512(const Linear *p, int64_t m, const Rows *rows) {
    uint16_t *x[3];
    for (int t = 0; t < rows->terms; t++) x[t] = (uint16_t *)rows->x + offset_of(rows, m * rows->terms + t);
    switch (p->a.dtype) {
    case FP32: return prepare_row(p, FP32, rows->m0 + m, rows, x);
    case BF16: return prepare_row(p, BF16, rows->m0 + m, rows, x);
    case FP16: return prepare_row(p, FP16, rows->m0 + m, rows, x);
    default: return prepare_row(p, FP4, rows->m0 + m, rows, x);
    }
}

/* --- avx512: weights --------------------------------------------------------------------------------------------- */

TARGET_AVX512 static void gather_avx512(const uint8_t *from, const uint8_t *next, int64_t stride, int64_t rows,
                                        int64_t bytes, int unit, uint8_t *to) {
    const __m512i bytes_of_rows = _mm512_set_epi8(
        63, 59, 55, 51, 47, 43, 39, 35, 31, 27, 23, 19, 15, 11, 7, 3,
        62, 58, 54, 50, 46, 42, 38, 34, 30, 26, 22, 18, 14, 10, 6, 2,
        61, 57, 53, 49, 45, 41, 37, 33, 29, 25, 21, 17, 13, 9, 5, 1,
        60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
    for (int64_t at = 0; at < bytes; at += 64) {
        const int64_t some = min64(64, bytes - at);
        const __mmask64 mask = some == 64 ? ~(__mmask64)0 : ((__mmask64)1 << some) - 1;
        __m512i in[16], mid[16];
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) {
            const uint8_t *row = from + (r < rows ? r : rows - 1) * stride + at;
            _mm_prefetch((const char *)next + r * stride + at, _MM_HINT_T1);
            in[r] = _mm512_maskz_loadu_epi8(mask, row);
        }
        /* 16 x 16 transpose of dwords: within 4 x 4 squares, then the squares. */
#pragma GCC unroll 4
        for (int q = 0; q < 16; q += 4) {
            const __m512i a = _mm512_unpacklo_epi32(in[q], in[q + 1]), b = _mm512_unpackhi_epi32(in[q], in[q + 1]);
            const __m512i c = _mm512_unpacklo_epi32(in[q + 2], in[q + 3]);
            const __m512i d = _mm512_unpackhi_epi32(in[q + 2], in[q + 3]);
            mid[q] = _mm512_unpacklo_epi64(a, c);
            mid[q + 1] = _mm512_unpackhi_epi64(a, c);
            mid[q + 2] = _mm512_unpacklo_epi64(b, d);
            mid[q + 3] = _mm512_unpackhi_epi64(b, d);
        }
        const int vectors = (int)((some + 3) / 4);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512i a = _mm512_shuffle_i32x4(mid[i], mid[i + 4], 0x88);
            const __m512i b = _mm512_shuffle_i32x4(mid[i + 8], mid[i + 12], 0x88);
            const __m512i c = _mm512_shuffle_i32x4(mid[i], mid[i + 4], 0xDD);
            const __m512i d = _mm512_shuffle_i32x4(mid[i + 8], mid[i + 12], 0xDD);
            in[i] = _mm512_shuffle_i32x4(a, b, 0x88);
            in[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88);
            in[i + 8] = _mm512_shuffle_i32x4(a, b, 0xDD);
            in[i + 12] = _mm512_shuffle_i32x4(c, d, 0xDD);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i >= vectors) break;
            const __m512i v = unit == 1 ? _mm512_permutexvar_epi8(bytes_of_rows, in[i]) : in[i];
            _mm512_storeu_si512(to + at * LANES + i * 64, v);
        }
    }
}

/* Scales of a block, 16 rows. e4m3 comes as value * 2^-8 (an fp16 with another bias), for store_rows_avx512 to undo.
 * NaN codes are not looked at here: `top` gathers the largest magnitude codes, and nan_rows reads it. */
TARGET_AVX512 INLINE __m512 load_scales(const uint8_t *scales, int format, __m128i *top) {
    const __m128i codes = _mm_loadu_si128((const __m128i *)scales);
    if (format == NVFP4) {
        *top = _mm_max_epu8(*top, _mm_and_si128(codes, _mm_set1_epi8(0x7F)));
        const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
        return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xBF80)));
    }
    *top = _mm_max_epu8(*top, codes);
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23);
    return _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(0x00400000)));
}

TARGET_AVX512 INLINE __mmask16 nan_rows(__m128i top, int format) {
    return _mm_cmpeq_epi8_mask(top, _mm_set1_epi8((char)(format == NVFP4 ? 0x7F : 0xFF)));
}

/* bf16 of the 16 codes, twice: vpermw reads 5 bits of a word, the fifth of which is the next code's. */
TARGET_AVX512 INLINE __m512i bf16_table(void) {
    return _mm512_set_epi16((short)0xC0C0, (short)0xC080, (short)0xC040, (short)0xC000, (short)0xBFC0, (short)0xBF80,
                            (short)0xBF00, (short)0x8000, 0x40C0, 0x4080, 0x4040, 0x4000, 0x3FC0, 0x3F80, 0x3F00, 0,
                            (short)0xC0C0, (short)0xC080, (short)0xC040, (short)0xC000, (short)0xBFC0, (short)0xBF80,
                            (short)0xBF00, (short)0x8000, 0x40C0, 0x4080, 0x4040, 0x4000, 0x3FC0, 0x3F80, 0x3F00, 0);
}

TARGET_AVX512 INLINE __m512i decode_pairs(__m512i table, __m512i line, int i) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi32(line, 4 * i), table);
}

/* --- avx512: results --------------------------------------------------------------------------------------------- */

/* As store_row for all prepared rows: the terms of each are added up, the smallest first, and multiplied by two powers
 * of two, which together fp32 may not hold. */
TARGET_AVX512 static void store_rows_avx512(const Linear *p, const Rows *rows, int64_t g, float factor, float factor2,
                                            const float *sums, int64_t stride) {
    const int64_t n = g * LANES, columns = min64(LANES, p->N - n);
    const __mmask16 mask = (__mmask16)((1u << columns) - 1);
    float bias[LANES] = {0};
    if (p->bias)
        for (int64_t j = 0; j < columns; j++) bias[j] = load_float(p->bias, n + j, p->bias_dtype);
    const __m512 added = _mm512_loadu_ps(bias);
    const int terms = rows->terms;
    for (int64_t m = 0; m < rows->rows; m++, sums += terms * stride) {
        __m512 value = _mm512_loadu_ps(sums + (terms - 1) * stride);
        for (int t = terms - 2; t >= 0; t--) value = _mm512_add_ps(value, _mm512_loadu_ps(sums + t * stride));
        value = _mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(factor)), _mm512_set1_ps(factor2));
        value = _mm512_mul_ps(value, _mm512_set1_ps(p->a.global_scale));
        value = _mm512_add_ps(_mm512_mul_ps(value, _mm512_set1_ps(p->b.global_scale)), added);
        const int64_t at = (rows->m0 + m) * p->out_stride + n;
        if (p->out_dtype == FP32) {
            _mm512_mask_storeu_ps((float *)p->out + at, mask, value);
            continue;
        }
        __m256i words;
        if (p->out_dtype == FP16) {
            words = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        } else {
            const __m512i bits = _mm512_castps_si512(value), odd = _mm512_srli_epi32(_mm512_slli_epi32(bits, 15), 31);
            const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
            const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
            words = _mm512_cvtepi32_epi16(
                _mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7FC00000)), 16));
        }
        _mm256_mask_storeu_epi16((uint16_t *)p->out + at, mask, words);
    }
}

/* --- avx512: vdpbf16ps ------------------------------------------------------------------------------------------- */

/* sums[rows][16] += x[rows] times lines of K elements. A row's operations don't depend on `rows`. */
TARGET_AVX512 INLINE void tile_avx512(int rows, int format, const uint16_t *x, int64_t stride, Lines w, int64_t K,
                                      float *sums) {
    const int block = block_size(format);
    const __m512i table = bf16_table();
    __m128i top = _mm_setzero_si128();
    __m512 sum[8];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) sum[m] = _mm512_loadu_ps(sums + m * LANES);
    for (int64_t k0 = 0; k0 < K; k0 += block) {
        const __m512 scale = load_scales(w.scales + k0 / block * LANES, format, &top);
        __m512 part[8];
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) part[m] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int l = 0; l < block / LINE_K; l++) {
            const int64_t k = k0 + l * LINE_K;
            _mm_prefetch((const char *)w.lines + k * 8 + PREFETCH, _MM_HINT_T0);
            const __m512i line = _mm512_loadu_si512(w.lines + k * 8);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const __m512i codes = decode_pairs(table, line, i);
#pragma GCC unroll 8
                for (int m = 0; m < rows; m++) {
                    int32_t pair;
                    memcpy(&pair, x + m * stride + k + 2 * i, 4);
                    part[m] = _mm512_dpbf16_ps(part[m], (__m512bh)codes, (__m512bh)_mm512_set1_epi32(pair));
                }
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) sum[m] = _mm512_fmadd_ps(part[m], scale, sum[m]);
    }
    const __mmask16 nan = nan_rows(top, format);
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
        _mm512_storeu_ps(sums + m * LANES, _mm512_mask_mov_ps(sum[m], nan, _mm512_set1_ps(NAN)));
}

TARGET_AVX512 INLINE void tiles_avx512(int format, const Rows *rows, int64_t k0, Lines w, int64_t K, float *sums) {
    const int64_t count = rows->rows * rows->terms, stride = rows->tile;
    const uint16_t *x = (const uint16_t *)rows->x + k0;
    int64_t m = 0;
    for (; m + 8 <= count; m += 8) tile_avx512(8, format, x + m * stride, stride, w, K, sums + m * LANES);
    x += m * stride;
    sums += m * LANES;
    switch (count - m) {
    case 7: tile_avx512(7, format, x, stride, w, K, sums); break;
    case 6: tile_avx512(6, format, x, stride, w, K, sums); break;
    case 5: tile_avx512(5, format, x, stride, w, K, sums); break;
    case 4: tile_avx512(4, format, x, stride, w, K, sums); break;
    case 3: tile_avx512(3, format, x, stride, w, K, sums); break;
    case 2: tile_avx512(2, format, x, stride, w, K, sums); break;
    case 1: tile_avx512(1, format, x, stride, w, K, sums); break;
    }
}

TARGET_AVX512 static void group_avx512(const Linear *p, const Rows *rows, int64_t g, LinesBuffer *buffer, float *sums) {
    const int64_t count = rows->rows * rows->terms;
    const int64_t step = p->b.tiled && count <= 8 ? p->K : CHUNK_K;
    memset(sums, 0, count * LANES * sizeof(float));
    for (int64_t k0 = 0; k0 < p->K; k0 += step) {
        const int64_t k1 = min64(p->K, k0 + step);
        const Lines w = lines_of(p, g, k0, k1, gather_avx512, buffer);
        if (p->format == NVFP4)
            tiles_avx512(NVFP4, rows, k0, w, k1 - k0, sums);
        else
            tiles_avx512(MXFP4, rows, k0, w, k1 - k0, sums);
    }
    store_rows_avx512(p, rows, g, p->format == NVFP4 ? 256 : 1, 1, sums, LANES);
}

/* --- amx --------------------------------------------------------------------------------------------------------- */

/* bf16 of code * scale is made in integers. A table gives a code's sign and exponent, the latter too high; a
 * subtraction with saturation brings it down by what the scale says and leaves zeros zero. For e4m3 the bits of
 * 1.5 * scale are those of scale plus 64..84, by the scale's significand: the table has seven ones under the exponent
 * of a code of significand 1.5, and an AND leaves those bits of them. All values are made too large by a power of two,
 * about 2^60 at the most, so that tame activations times them are far from the subnormals; store_rows_avx512 undoes
 * it. */
enum {
    TILE_WORDS = 16 * STEP_K,
    RING = 4,                      /* steps decoded ahead of the tiles that use them; a power of two */
    TOP_EXPONENT = 252,            /* of code 1.0 in the table */
    RAISED = 60,                   /* power of two by which values are too large; for e8m0 that of the largest scale */
    MAX_SPREAD = 60,               /* ratio of e8m0 scales, as a power of two, that leaves the least product normal */
};

/* Sign and exponent of each code, the exponent 125 too high. */
static const uint16_t RAISED_FOR_E8M0[16] = {
    0, 0x7D80, 0x7E00, 0x7E40, 0x7E80, 0x7EC0, 0x7F00, 0x7F40,
    0, 0xFD80, 0xFE00, 0xFE40, 0xFE80, 0xFEC0, 0xFF00, 0xFF40};
/* With seven ones in place of a significand of 1.5. */
static const uint16_t RAISED_FOR_E4M3[16] = {
    0, 0x7D80, 0x7E00, 0x7E7F, 0x7E80, 0x7EFF, 0x7F00, 0x7F7F,
    0, 0xFD80, 0xFE00, 0xFE7F, 0xFE80, 0xFEFF, 0xFF00, 0xFF7F};

/* The low or high bytes of a table, four times: vpermb reads 6 bits of a byte, two of which are the next code's. Twice
 * vpermb beats vpermw, which keeps both ports for 512 bits busy (Sapphire Rapids). */
TARGET_AVX512 INLINE __m512i raised_bytes(int format, int high) {
    const __m256i words = _mm256_loadu_si256((const __m256i *)(format == NVFP4 ? RAISED_FOR_E4M3 : RAISED_FOR_E8M0));
    return _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(high ? _mm256_srli_epi16(words, 8) : words));
}

/* The scale codes of 16 rows, each in the four bytes of its row. */
TARGET_AVX512 INLINE __m512i spread_codes(const uint8_t *scales) {
    const __m512i row_of_byte = _mm512_set_epi32(
        0x0F0F0F0F, 0x0E0E0E0E, 0x0D0D0D0D, 0x0C0C0C0C, 0x0B0B0B0B, 0x0A0A0A0A, 0x09090909, 0x08080808,
        0x07070707, 0x06060606, 0x05050505, 0x04040404, 0x03030303, 0x02020202, 0x01010101, 0);
    return _mm512_permutexvar_epi8(row_of_byte, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)scales)));
}

/* A word of each dword's low half in both its halves. */
TARGET_AVX512 INLINE __m512i both_halves(__m512i words) { return _mm512_or_si512(words, _mm512_slli_epi32(words, 16)); }

/* A group of weights. */
typedef struct {
    const uint8_t *codes;          /* lines, or the first of 16 LINEAR rows */
    int64_t stride, row_bytes;     /* of LINEAR rows; 0 if lines */
    const uint8_t *scales;         /* [k / block_size][16 rows] */
    const uint8_t *next_scales;    /* those that will be read after these: two groups on if tiled */
} Weights;

/* What a group's decoding carries along. */
typedef struct {
    int base;                      /* e8m0: what is subtracted from the exponent, plus the scale's code */
    __m128i top;                   /* see load_scales */
} Decoder;

/* What turns a block's raised codes into values, in every byte or word of a row. */
typedef struct {
    __m512i down;                  /* words that are subtracted */
    __m512i more;                  /* e4m3: bytes, bits of 1.5 * scale less those of scale */
    __m512i sign;                  /* e4m3 that may be negative: words, the scale's sign */
} BlockScale;

/* That of 16 scale codes. `usual`: all are positive normal e4m3. */
TARGET_AVX512 INLINE BlockScale block_scale(int format, int usual, const uint8_t *scales, Decoder *decoder) {
    BlockScale scale = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    if (format == NVFP4 && usual) {
        /* bf16 of scale * 2^-8 is (code << 4) + (112 << 7). */
        const __m512i codes = spread_codes(scales), minuend = _mm512_set1_epi16((TOP_EXPONENT - RAISED - 112) << 7);
        const __m512i one = _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi16(0x0FF0));
        scale.down = _mm512_sub_epi16(minuend, one);
        const __m128i more = _mm_setr_epi8(64, 72, 80, 84, 80, 76, 72, 68, 64, 72, 80, 84, 80, 76, 72, 68);
        scale.more = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(more), codes);
    } else if (format == NVFP4) {
        const __m512 signed_value = load_scales(scales, NVFP4, &decoder->top), value = _mm512_abs_ps(signed_value);
        const __m512 half_more = _mm512_mul_ps(value, _mm512_set1_ps(1.5f));
        const __mmask16 zero = _mm512_testn_epi32_mask(_mm512_castps_si512(value), _mm512_castps_si512(value));
        const __m512i one = _mm512_srli_epi32(_mm512_castps_si512(value), 16);
        const __m512i three = _mm512_srli_epi32(_mm512_castps_si512(half_more), 16);
        const __m512i minuend = _mm512_set1_epi32((TOP_EXPONENT - RAISED) << 7);
        scale.down = both_halves(
            _mm512_mask_mov_epi32(_mm512_sub_epi32(minuend, one), zero, _mm512_set1_epi32(0xFFFF)));
        const __m512i twice = both_halves(_mm512_sub_epi32(three, one));
        scale.more = _mm512_or_si512(twice, _mm512_slli_epi32(twice, 8));
        const __m512i high = _mm512_and_si512(_mm512_castps_si512(signed_value), _mm512_set1_epi32((int)0x80000000u));
        scale.sign = _mm512_or_si512(high, _mm512_srli_epi32(high, 16));
    } else {
        const __m512i codes = _mm512_srli_epi16(spread_codes(scales), 8);
        decoder->top = _mm_max_epu8(decoder->top, _mm_loadu_si128((const __m128i *)scales));
        const __m512i exponent = _mm512_sub_epi16(_mm512_set1_epi16((short)decoder->base), codes);
        scale.down = _mm512_slli_epi16(_mm512_min_epu16(exponent, _mm512_set1_epi16(255)), 7);
    }
    return scale;
}

/* 16 bytes of 16 LINEAR rows -> 4 lines. */
TARGET_AVX512 INLINE void transpose_step(const uint8_t *from, int64_t stride, __m512i *lines) {
    __m512i in[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        const uint8_t *row = from + r * stride;
        in[r] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)row));
        in[r] = _mm512_inserti32x4(in[r], _mm_loadu_si128((const __m128i *)(row + 4 * stride)), 1);
        in[r] = _mm512_inserti32x4(in[r], _mm_loadu_si128((const __m128i *)(row + 8 * stride)), 2);
        in[r] = _mm512_inserti32x4(in[r], _mm_loadu_si128((const __m128i *)(row + 12 * stride)), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(in[0], in[1]), b = _mm512_unpackhi_epi32(in[0], in[1]);
    const __m512i c = _mm512_unpacklo_epi32(in[2], in[3]), d = _mm512_unpackhi_epi32(in[2], in[3]);
    lines[0] = _mm512_unpacklo_epi64(a, c);
    lines[1] = _mm512_unpackhi_epi64(a, c);
    lines[2] = _mm512_unpacklo_epi64(b, d);
    lines[3] = _mm512_unpackhi_epi64(b, d);
}

/* The codes of 32 k from k0 (16, if `half`) as 4 lines, and a request for codes that are read some steps later. */
TARGET_AVX512 INLINE void load_step(int half, const Weights *w, int64_t k0, __m512i *lines) {
    if (!w->stride) {
        const uint8_t *from = w->codes + k0 * 8;
#pragma GCC unroll 4
        for (int l = 0; l < (half ? 2 : 4); l++) {
            _mm_prefetch((const char *)from + l * 64 + PREFETCH, _MM_HINT_T0);
            lines[l] = _mm512_loadu_si512(from + l * 64);
        }
        return;
    }
    transpose_step(w->codes + k0 / 2, w->stride, lines);
    /* Each fourth of a cache line's steps asks for a fourth of the rows. */
    const int64_t quarter = k0 / STEP_K % 4, ahead = k0 / 2 + ROW_PREFETCH;
    const uint8_t *row = w->codes + ahead + (ahead < w->row_bytes ? 0 : LANES * w->stride - w->row_bytes);
    for (int r = 0; r < 4; r++) _mm_prefetch((const char *)row + (4 * quarter + r) * w->stride, _MM_HINT_T0);
}

/* The codes of 32 k (16, if `half`) -> a B tile: bf16 [16 pairs][16 rows][2]. `usual` as for block_scale. */
TARGET_AVX512 INLINE void decode_step(int format, int usual, int half, const Weights *w, int64_t k0,
                                      Decoder *decoder, uint16_t *to) {
    const int block = block_size(format);
    __m512i lines[4];
    load_step(half, w, k0, lines);
    _mm_prefetch((const char *)w->next_scales + k0 / block * LANES, _MM_HINT_T0);
    const __m512i low_bytes = raised_bytes(format, 0), high_bytes = raised_bytes(format, 1);
    const __m512i exponent = _mm512_set1_epi8((char)0x80), upper = _mm512_set1_epi16((short)0xFF00);
#pragma GCC unroll 2
    for (int k = 0; k < STEP_K; k += block) {
        if (half && k) {
            for (int i = 0; i < 8; i++) _mm512_store_si512(to + TILE_WORDS / 2 + i * 32, _mm512_setzero_si512());
            break;
        }
        const BlockScale scale = block_scale(format, usual, w->scales + (k0 + k) / block * LANES, decoder);
#pragma GCC unroll 4
        for (int l = 0; l < block / LINE_K; l++) {
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const __m512i line = lines[k / LINE_K + l], codes = i ? _mm512_srli_epi16(line, 4) : line;
                __m512i low = _mm512_permutexvar_epi8(codes, low_bytes);
                const __m512i high = _mm512_permutexvar_epi8(codes, high_bytes);
                /* low & (more | exponent) */
                if (format == NVFP4) low = _mm512_ternarylogic_epi32(low, scale.more, exponent, 0xE0);
                /* Words of the even bytes, then of the odd. */
                __m512i value[2] = {_mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, upper, 0xF4),
                                    _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, upper, 0xF8)};
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    value[h] = _mm512_subs_epu16(value[h], scale.down);
                    if (format == NVFP4 && !usual) value[h] = _mm512_xor_si512(value[h], scale.sign);
                    _mm512_store_si512(to + (k + l * LINE_K) * 16 + (i + 2 * h) * 32, value[h]);
                }
            }
        }
    }
}

typedef struct {
    uint8_t smallest, largest;
} CodeSpan;

TARGET_AVX512 INLINE CodeSpan join(CodeSpan a, CodeSpan b) {
    return (CodeSpan){a.smallest < b.smallest ? a.smallest : b.smallest, a.largest > b.largest ? a.largest : b.largest};
}

TARGET_AVX512 static CodeSpan run_span(const uint8_t *codes, int64_t count) {
    __m512i low = _mm512_set1_epi8(-1), top = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 64) {
        const __mmask64 mask = count - i >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (count - i)) - 1;
        const __m512i some = _mm512_mask_loadu_epi8(_mm512_set1_epi8(-1), mask, codes + i);
        low = _mm512_min_epu8(low, some);
        top = _mm512_mask_max_epu8(top, _mm512_cmpneq_epi8_mask(some, _mm512_set1_epi8(-1)), top, some);
    }
    uint8_t lows[64], tops[64];
    _mm512_storeu_si512(lows, low);
    _mm512_storeu_si512(tops, top);
    CodeSpan span = {255, 0};
    for (int i = 0; i < 64; i++) span = join(span, (CodeSpan){lows[i], tops[i]});
    return span;
}

/* Of e8m0 codes other than NaN, and other than those of blocks of zeros if `careful`. Padding is left out. */
TARGET_AVX512 static CodeSpan scale_span(const Linear *p, int64_t g, int careful) {
    const Operand *b = &p->b;
    const int64_t rows = min64(LANES, p->N - g * LANES), blocks = p->K / 32;
    const uint8_t *codes = b->scale + g * LANES * b->scale_stride;
    const uint8_t *data = (const uint8_t *)b->data + g * LANES * b->data_stride;
    CodeSpan span = {255, 0};
    if (!careful) {
        /* A group in one run if tiled (rows of padding at its end apart), a row in one run if LINEAR. */
        const int64_t runs = b->tiled ? 1 : rows, run = b->tiled ? blocks * LANES : blocks;
        if (!b->tiled || rows == LANES) {
            for (int64_t r = 0; r < runs; r++) span = join(span, run_span(codes + r * b->scale_stride, run));
            return span;
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < blocks; i++) {
            uint8_t any = 0;
            for (int q = 0; q < 4; q++)
                for (int byte = 0; byte < 4; byte++)
                    any |= b->tiled ? data[i * 256 + q * 64 + r * 4 + byte]
                                    : data[r * b->data_stride + i * 16 + q * 4 + byte];
            const uint8_t code = b->tiled ? codes[i * LANES + r] : codes[r * b->scale_stride + i];
            if (code == 255 || !(any & 0x77)) continue;
            span.smallest = code < span.smallest ? code : span.smallest;
            span.largest = code > span.largest ? code : span.largest;
        }
    return span;
}

/* Whether bf16 of one exponent range can hold every value of a group; gives its largest e8m0 code. */
static int fits_bf16(const Linear *p, int64_t g, int *largest) {
    *largest = 0;
    if (p->format == NVFP4) return 1;
    for (int careful = 0; careful < 2; careful++) {
        const CodeSpan span = scale_span(p, g, careful);
        *largest = span.largest;
        if (span.largest - span.smallest <= MAX_SPREAD) return 1;
    }
    return 0;
}

/* Whether all e4m3 scales are positive normal numbers: codes 0x08..0x7E. */
TARGET_AVX512 static int are_usual(const uint8_t *scales, int64_t count) {
    __m512i top = _mm512_setzero_si512();
    const __m512i least = _mm512_set1_epi8(8);
    for (int64_t i = 0; i < count; i += 64) {
        const __mmask64 mask = count - i >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (count - i)) - 1;
        top = _mm512_max_epu8(top, _mm512_sub_epi8(_mm512_mask_loadu_epi8(least, mask, scales + i), least));
    }
    return !_mm512_cmpgt_epu8_mask(top, _mm512_set1_epi8(0x7E - 8));
}

enum { SUMS_STRIDE = 2 * LANES, MAX_TILES = 4 };

/* The sums of up to 4 tiles stay in tile registers 0..3: row tiles x groups, of 2 x 2 at most or 4 x 1. Tiles of
 * activations are in 4 and 5, of weights in 6 and 7. Numbers of tile registers must be constants. */
TARGET_AMX INLINE void multiply_step(int row_tiles, int groups, const uint16_t *x, int64_t tile, const uint16_t *w,
                                     int64_t group_words) {
    _tile_loadd(6, w, 64);
    _tile_loadd(4, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (groups > 1) {
        _tile_loadd(7, w + group_words, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (row_tiles > 1) {
            _tile_loadd(5, x + tile, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        return;
    }
    if (row_tiles > 1) {
        _tile_loadd(5, x + tile, 64);
        _tile_dpbf16ps(1, 5, 6);
    }
    if (row_tiles > 2) {
        _tile_loadd(4, x + 2 * tile, 64);
        _tile_dpbf16ps(2, 4, 6);
    }
    if (row_tiles > 3) {
        _tile_loadd(5, x + 3 * tile, 64);
        _tile_dpbf16ps(3, 5, 6);
    }
}

TARGET_AMX static void zero_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

TARGET_AMX static void store_sums(int row_tiles, int groups, float *sums) {
    const int64_t bytes = SUMS_STRIDE * sizeof(float), tile = 16 * SUMS_STRIDE;
    _tile_stored(0, sums, bytes);
    if (groups > 1) {
        _tile_stored(1, sums + LANES, bytes);
        if (row_tiles > 1) {
            _tile_stored(2, sums + tile, bytes);
            _tile_stored(3, sums + tile + LANES, bytes);
        }
        return;
    }
    if (row_tiles > 1) _tile_stored(1, sums + tile, bytes);
    if (row_tiles > 2) _tile_stored(2, sums + 2 * tile, bytes);
    if (row_tiles > 3) _tile_stored(3, sums + 3 * tile, bytes);
}

/* Rows x (whole tiles of them) times the lines of some groups. Each step is decoded a little before it is multiplied,
 * for the two to overlap; decoding again for other rows costs less than keeping what was decoded. */
TARGET_AMX INLINE void multiply(int format, int usual, int row_tiles, int groups, const uint16_t *x, int64_t step,
                                int64_t tile, const Weights *w, int64_t K, Decoder *decoders, uint16_t *ring) {
    const int64_t steps = (K + STEP_K - 1) / STEP_K;
    const int half_step = format == NVFP4 && K % STEP_K != 0;
    for (int64_t s = 0; s < steps + RING / 2; s++) {
        if (s < steps) {
            uint16_t *to = ring + s % RING * TILE_WORDS;
            const int half = half_step && s == steps - 1;
#pragma GCC unroll 2
            for (int i = 0; i < groups; i++) {
                if (half)
                    decode_step(format, usual, 1, w + i, s * STEP_K, decoders + i, to + i * RING * TILE_WORDS);
                else
                    decode_step(format, usual, 0, w + i, s * STEP_K, decoders + i, to + i * RING * TILE_WORDS);
            }
        }
        const int64_t done = s - RING / 2;
        if (done >= 0)
            multiply_step(row_tiles, groups, x + done * step, tile, ring + done % RING * TILE_WORDS, RING * TILE_WORDS);
    }
}

typedef void Multiply(int row_tiles, int groups, const uint16_t *x, int64_t step, int64_t tile, const Weights *w,
                      int64_t K, Decoder *decoders, uint16_t *ring);

#define DEFINE_MULTIPLY(name, format, usual)                                                                         \
    TARGET_AMX static void name(int row_tiles, int groups, const uint16_t *x, int64_t step, int64_t tile,            \
                                const Weights *w, int64_t K, Decoder *decoders, uint16_t *ring) {                    \
        if (groups == 2 && row_tiles == 2)                                                                           \
            multiply(format, usual, 2, 2, x, step, tile, w, K, decoders, ring);                                      \
        else if (groups == 2)                                                                                        \
            multiply(format, usual, 1, 2, x, step, tile, w, K, decoders, ring);                                      \
        else if (row_tiles == 1)                                                                                     \
            multiply(format, usual, 1, 1, x, step, tile, w, K, decoders, ring);                                      \
        else if (row_tiles == 2)                                                                                     \
            multiply(format, usual, 2, 1, x, step, tile, w, K, decoders, ring);                                      \
        else if (row_tiles == 3)                                                                                     \
            multiply(format, usual, 3, 1, x, step, tile, w, K, decoders, ring);                                      \
        else                                                                                                         \
            multiply(format, usual, 4, 1, x, step, tile, w, K, decoders, ring);                                      \
    }
DEFINE_MULTIPLY(multiply_mxfp4, MXFP4, 0)
DEFINE_MULTIPLY(multiply_nvfp4, NVFP4, 0)
DEFINE_MULTIPLY(multiply_usual_nvfp4, NVFP4, 1)

typedef struct {
    LinesBuffer lines[2];
    uint16_t *ring;                /* [2 groups][RING][TILE_WORDS] */
    float *sums;
} Workspace;

/* Group g, of LINEAR weights with its scales in `buffer`, and its codes too if they are not 16 rows of whole steps. */
static Weights weights_of(const Linear *p, int64_t g, LinesBuffer *buffer) {
    const Operand *b = &p->b;
    if (b->tiled || p->N - g * LANES < LANES || p->K % STEP_K) {
        const Lines w = lines_of(p, g, 0, p->K, gather_avx512, buffer);
        return (Weights){w.lines, 0, 0, w.scales, w.scales + (b->tiled ? 2 * LANES * b->scale_stride : 0)};
    }
    const uint8_t *scales = b->scale + g * LANES * b->scale_stride;
    gather_avx512(scales, scales + 2 * LANES * b->scale_stride, b->scale_stride, LANES, p->K / block_size(p->format), 1,
                  buffer->scales);
    const uint8_t *codes = (const uint8_t *)b->data + g * LANES * b->data_stride;
    return (Weights){codes, b->data_stride, p->K / 2, buffer->scales, buffer->scales};
}

/* Groups g0.. of weights (1 or 2) with all prepared rows; those that don't fit are marked in `left`. */
TARGET_AMX static void unit_amx(const Linear *p, const Rows *rows, int64_t g0, int groups, Workspace *space,
                                uint8_t *left) {
    const int64_t count = rows->rows * rows->terms, step = step_of(rows);
    /* 32 LINEAR rows, a power of two apart, would not fit the sets of L1 that they share. */
    const int tiles = (int)((count + 15) / 16), together = tiles <= 2 && p->b.tiled ? groups : 1;
    Decoder decoders[2];
    float factors[2];                               /* besides 2^-RAISED */
    Weights w[2];
    int usual = p->format == NVFP4;
    for (int i = 0; i < groups; i++) {
        int largest;
        left[g0 + i] = !fits_bf16(p, g0 + i, &largest);
        decoders[i] = (Decoder){TOP_EXPONENT - 127 - RAISED + largest, _mm_setzero_si128()};
        factors[i] = p->format == NVFP4 ? 256 : e8m0_decode((uint8_t)largest);
        w[i] = weights_of(p, g0 + i, space->lines + i);
        usual = usual && are_usual(w[i].scales, p->K / 16 * LANES);
    }
    Multiply *run = p->format == MXFP4 ? multiply_mxfp4 : usual ? multiply_usual_nvfp4 : multiply_nvfp4;
    for (int i = 0; i < groups; i += together) {
        zero_sums();
        run(tiles, together, rows->x, step, rows->tile, w + i, p->K, decoders + i, space->ring);
        store_sums(tiles, together, space->sums + i * LANES);
    }
    for (int i = 0; i < groups; i++) {
        float *sums = space->sums + i * LANES;
        const __mmask16 nan = nan_rows(decoders[i].top, p->format);
        for (int64_t m = 0; nan && m < count; m++)
            _mm512_mask_storeu_ps(sums + m * SUMS_STRIDE, nan, _mm512_set1_ps(NAN));
        store_rows_avx512(p, rows, g0 + i, 1 / (float)((int64_t)1 << RAISED), factors[i], sums, SUMS_STRIDE);
    }
}

TARGET_AMX static void release_tiles(void) { _tile_release(); }

/* --- x86: rows, units, threads ----------------------------------------------------------------------------------- */

/* Prepare rows m0.. of a; those that are not tame become zeros and are listed in `wild`. Returns how many. */
static int64_t prepare_rows(const Linear *p, Rows *rows, int64_t *wild) {
    Span spans[ROWS_AT_ONCE];
    const int64_t count = rows->rows;
    const int threads = count * p->K > 1 << 16 ? p->threads : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const unsigned old = exact_float();
#pragma omp for
        for (int64_t m = 0; m < count; m++)
            spans[m] = p->tier == AVX2 ? prepare_avx2(p, rows->m0 + m, (float *)rows->x + m * rows->tile)
                                       : prepare_avx512(p, m, rows);
        restore_float(old);
    }
    int64_t wilds = 0;
    for (int64_t m = 0; m < count; m++) {
        if (is_tame(spans[m], p->a.dtype)) continue;
        wild[wilds++] = rows->m0 + m;
        if (p->tier == AVX2) {
            memset((float *)rows->x + m * rows->tile, 0, rows->tile * sizeof(float));
            continue;
        }
        for (int64_t i = m * rows->terms; i < (m + 1) * rows->terms; i++)
            for (int64_t k = 0; k < p->K; k += STEP_K)
                memset((uint16_t *)rows->x + offset_of(rows, i) + k / STEP_K * step_of(rows), 0, 2 * STEP_K);
    }
    return wilds;
}

static int x86_linear(const Linear *p) {
    const int amx = p->tier == AMX, terms = p->tier == AVX2 ? 1 : terms_of(p->a.dtype);
    /* With AMX as many as there are tiles for: they stay in L2 while all weights pass. */
    const int64_t at_once = min64(p->M, (amx ? 16 * MAX_TILES : ROWS_AT_ONCE) / terms), groups = groups_of(p);
    Rows rows = {.terms = terms, .height = amx ? min64(at_once * terms, 16) : 1};
    /* Where tiles are single rows, they lie an odd number of lines apart, not to meet in one set of the cache. */
    rows.tile = amx ? rows.height * round_up(p->K, STEP_K) : round_up(p->K, 64) + 32;
    const int64_t tiles = (at_once * terms + rows.height - 1) / rows.height;
    const int64_t bytes = tiles * rows.tile * (p->tier == AVX2 ? 4 : 2);
    rows.x = allocate(bytes);
    uint8_t *left = calloc(groups, 1);              /* groups that no panel can hold */
    int64_t *wild = malloc(ROWS_AT_ONCE * sizeof *wild);
    int failed = !rows.x || !left || !wild;
    for (rows.m0 = 0; rows.m0 < p->M && !failed; rows.m0 += at_once) {
        rows.rows = min64(at_once, p->M - rows.m0);
        const int64_t count = rows.rows * terms;
        if (count % rows.height) memset(rows.x, 0, bytes);
        const int64_t wilds = prepare_rows(p, &rows, wild);
        const int unit = amx ? 2 : 1;
        const int64_t units = (groups + unit - 1) / unit, share = units / (8 * p->threads);
        const int64_t at_a_time = share > 1 ? share : 1;
        const size_t sums_bytes = round_up(count, 16) * (amx ? SUMS_STRIDE : LANES) * sizeof(float);
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
        {
            const unsigned old = exact_float();
            Workspace space;
            space.sums = allocate(sums_bytes);
            space.ring = allocate(amx ? 2 * RING * TILE_WORDS * sizeof(uint16_t) : 0);
            for (int i = 0; i < 2; i++) space.lines[i] = lines_buffer(p, amx ? p->K : CHUNK_K);
            const int ready =
                space.ring && space.sums && !is_missing(p, space.lines[0]) && !is_missing(p, space.lines[1]);
            if (!ready) {
#pragma omp atomic write
                failed = 1;
            }
            if (amx) configure_tiles((int)rows.height);
#pragma omp for schedule(dynamic, at_a_time)
            for (int64_t u = 0; u < units; u++) {
                if (!ready) continue;
                const int64_t g0 = u * unit, g1 = min64(groups, g0 + unit);
                if (p->tier == AVX2) {
                    group_avx2(p, &rows, u, space.lines, space.sums);
                    continue;
                }
                if (!amx) {
                    group_avx512(p, &rows, u, space.lines, space.sums);
                    continue;
                }
                unit_amx(p, &rows, g0, (int)(g1 - g0), &space, left);
            }
            if (amx) release_tiles();
            for (int i = 0; i < 2; i++) free(space.lines[i].lines);
            free(space.ring);
            free(space.sums);
            restore_float(old);
        }
        if (!failed && amx && memchr(left, 1, groups)) failed = exact_range(p, rows.m0, rows.rows, left);
        if (!failed && wilds) failed = exact_rows(p, wild, wilds, NULL);
    }
    free(wild);
    free(left);
    free(rows.x);
    return failed ? -1 : 0;
}

#endif

/* --- entry ------------------------------------------------------------------------------------------------------- */

/* 0, or -1 where memory ran out. */
EXPORT int nibblas_linear(const Linear *p) {
    if (p->M <= 0 || p->N <= 0) return 0;
#ifdef NIBBLAS_X86
    if (p->tier > PORTABLE) return x86_linear(p);
#endif
    return portable_linear(p);
}
