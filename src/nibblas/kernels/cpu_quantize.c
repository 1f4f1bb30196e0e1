/* quantize and dequantize, bit for bit as quantize.py has them; docs/formats.md states each rule.
 *
 * Every product, sum and division is one fp32 operation in the reference's order: nothing here may be contracted or
 * reassociated.
 */
#include "cpu_common.h"

/* In the order of formats.py's scale_rules; cpu_quantize.py numbers them. */
enum { ABSMAX, FOUR_OVER_SIX, SEARCH_E4M3, EVEN, FLOOR, RCEIL, SEARCH_E8M0 };

enum { LARGEST_E4M3 = 0x7E, LARGEST_E8M0 = 254 };

/* Elements that a thread takes at a time: whole groups of blocks on every tier. */
enum { PIECE = 1 << 14 };

typedef struct {
    int64_t rows, K;
    const void *x;                 /* (rows, K), or what dequantize writes */
    int64_t x_stride;              /* elements */
    uint8_t *data, *scale;         /* (rows, K / 2), (rows, K / block_size), contiguous */
    float global_scale;
    int32_t x_dtype, format, rule, threads, tier;
} Quantize;

INLINE float inverse_power(int exponent) { return e8m0_decode((uint8_t)(LARGEST_E8M0 - exponent)); }

#define UNROLL _Pragma("GCC unroll 16")

#ifdef NIBBLAS_X86
#define LANES 16
#define TARGET TARGET_AVX512
#define TIER(name) name##_avx512
#include "cpu_quantize_lanes.h"

#define LANES 8
#define TARGET TARGET_AVX2
#define TIER(name) name##_avx2
#include "cpu_quantize_lanes.h"
#endif

#define LANES 4
#define TARGET
#define TIER(name) name##_portable
#include "cpu_quantize_lanes.h"

/* Some elements of one row (of all rows, where they lie side by side). */
typedef struct {
    int64_t x_at, at, count; /* elements: where x, and data and scale, have the first one, and how many */
} Piece;

/* Largest magnitude among the finite elements, as fp32 bits. */
INLINE uint32_t amax_piece(const Quantize *p, Piece piece) {
    if (p->x_dtype == FP32) {
        const int32_t *bits = (const int32_t *)p->x + piece.x_at;
        int32_t largest = 0;
        for (int64_t i = 0; i < piece.count; i++) {
            const int32_t magnitude = bits[i] & INT32_MAX, finite = magnitude < 0x7F800000 ? magnitude : 0;
            largest = finite > largest ? finite : largest;
        }
        return (uint32_t)largest;
    }
    const int16_t *bits = (const int16_t *)p->x + piece.x_at, infinity = p->x_dtype == BF16 ? 0x7F80 : 0x7C00;
    int16_t largest = 0;
    for (int64_t i = 0; i < piece.count; i++) {
        const int16_t magnitude = bits[i] & INT16_MAX, finite = magnitude < infinity ? magnitude : 0;
        largest = finite > largest ? finite : largest;
    }
    return bits_of(load_float(&largest, 0, p->x_dtype));
}

INLINE void dequantize_blocks(const Quantize *p, Piece piece, int block, int dtype) {
    void *out = (void *)p->x;
    for (int64_t i = 0; i < piece.count; i += block) {
        const float step = scale_decode(p->scale[(piece.at + i) / block], p->format) * p->global_scale;
        const uint8_t *data = p->data + (piece.at + i) / 2;
        float values[32];
        for (int j = 0; j < block; j++) values[j] = E2M1_VALUES[data[j / 2] >> (j % 2 * 4) & 15] * step;
        for (int j = 0; j < block; j++) store_float(out, piece.x_at + i + j, dtype, values[j]);
    }
}

INLINE void dequantize_piece(const Quantize *p, Piece piece) {
    const int block = p->format == NVFP4 ? 16 : 32;
    if (p->x_dtype == FP32)
        dequantize_blocks(p, piece, block, FP32);
    else if (p->x_dtype == BF16)
        dequantize_blocks(p, piece, block, BF16);
    else
        dequantize_blocks(p, piece, block, FP16);
}

/* One job on one piece, for each tier. */
enum { QUANTIZE, AMAX, DEQUANTIZE };

#define DO_PIECE(target, tier)                                                                                      \
    target static uint32_t do_piece_##tier(const Quantize *p, int job, Piece piece) {                               \
        const int block = p->format == NVFP4 ? 16 : 32;                                                             \
        if (job == QUANTIZE)                                                                                        \
            quantize_blocks_##tier(p, (const uint8_t *)p->x + piece.x_at * (p->x_dtype == FP32 ? 4 : 2),            \
                                   piece.count / block, p->data + piece.at / 2, p->scale + piece.at / block);       \
        if (job == DEQUANTIZE) dequantize_piece(p, piece);                                                          \
        return job == AMAX ? amax_piece(p, piece) : 0;                                                              \
    }

DO_PIECE(, portable)
#ifdef NIBBLAS_X86
DO_PIECE(TARGET_AVX2, avx2)
DO_PIECE(TARGET_AVX512, avx512)
#endif

static uint32_t all_pieces(const Quantize *p, int job) {
    uint32_t (*do_piece)(const Quantize *, int, Piece) = do_piece_portable;
#ifdef NIBBLAS_X86
    if (p->tier >= AVX2) do_piece = p->tier >= AVX512 ? do_piece_avx512 : do_piece_avx2;
#endif
    uint32_t largest = 0;
    const int64_t all = p->rows * p->K, run = p->x_stride == p->K ? all : p->K, pieces = (run + PIECE - 1) / PIECE;
    const int threads = all > PIECE ? p->threads : 1;
#pragma omp parallel num_threads(threads) reduction(max : largest) if (threads > 1)
    {
        const unsigned old = exact_float();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (run ? all / run * pieces : 0); i++) {
            const int64_t row = i / pieces, k = i % pieces * PIECE;
            const Piece piece = {row * p->x_stride + k, row * p->K + k, min64(run - k, PIECE)};
            const uint32_t found = do_piece(p, job, piece);
            largest = found > largest ? found : largest;
        }
        restore_float(old);
    }
    return largest;
}

EXPORT void nibblas_quantize(const Quantize *p) { all_pieces(p, QUANTIZE); }

EXPORT void nibblas_dequantize(const Quantize *p) { all_pieces(p, DEQUANTIZE); }

EXPORT float nibblas_amax(const Quantize *p) { return float_of(all_pieces(p, AMAX)); }
