/* What this machine can do at best, for floors: measured rates of one or more threads.
 *
 * Each probe repeats a fixed piece of work on every thread until 0.15 s have passed and adds up the rates, so that
 * threads which the system starves don't count as machine limits twice.
 */
#include "cpu_common.h"
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

enum { PROBE_CHAINS = 12, PROBE_STEPS = 4096 };
static const double PROBE_SECONDS = 0.15;

/* Written to, so that no work is dead. */
static volatile float sink;

/* --- memory ------------------------------------------------------------------------------------------------------ */

static uint64_t read_portable(const uint64_t *from, int64_t words) {
    uint64_t sums[8] = {0};
    for (int64_t i = 0; i + 8 <= words; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += from[i + j];
    return sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

#ifdef NIBBLAS_X86
TARGET_AVX512 static uint64_t read_avx512(const uint64_t *from, int64_t words) {
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t i = 0; i + 32 <= words; i += 32) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            _mm_prefetch((const char *)(from + i + 8 * j) + 4096, _MM_HINT_T0);
            sums[j] = _mm512_add_epi64(sums[j], _mm512_loadu_si512(from + i + 8 * j));
        }
    }
    return _mm512_reduce_add_epi64(
        _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3])));
}
#endif

/* Bytes a second of reading the buffer once, each thread its share. */
EXPORT double nibblas_probe_read(const void *buffer, int64_t bytes, int threads, int tier) {
    const int64_t words = bytes / 8 / threads / 32 * 32;
    uint64_t total = 0;
    const double start = now();
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        const uint64_t *from = (const uint64_t *)buffer + t * words;
#ifdef NIBBLAS_X86
        if (tier >= AVX512) {
            total += read_avx512(from, words);
            continue;
        }
#endif
        (void)tier;
        total += read_portable(from, words);
    }
    const double seconds = now() - start;
    sink = (float)total;
    return (double)words * 8 * threads / seconds;
}

/* --- arithmetic -------------------------------------------------------------------------------------------------- */

/* Each function does PROBE_STEPS * PROBE_CHAINS instructions of its kind and returns the operations that makes. */
typedef double Work(void);

static double fp32_portable(void) {
    float sums[PROBE_CHAINS][4];
    for (int i = 0; i < PROBE_CHAINS; i++)
        for (int j = 0; j < 4; j++) sums[i][j] = sink;
    for (int s = 0; s < PROBE_STEPS; s++)
        for (int i = 0; i < PROBE_CHAINS; i++)
            for (int j = 0; j < 4; j++) sums[i][j] = sums[i][j] * 0.5f + 1.0f;
    float total = 0;
    for (int i = 0; i < PROBE_CHAINS; i++)
        for (int j = 0; j < 4; j++) total += sums[i][j];
    sink = total;
    return 2.0 * 4 * PROBE_CHAINS * PROBE_STEPS;
}

#ifdef NIBBLAS_X86
TARGET_AVX2 static double fp32_avx2(void) {
    __m256 sums[PROBE_CHAINS], a = _mm256_set1_ps(0.5f);
#pragma GCC unroll 12
    for (int i = 0; i < PROBE_CHAINS; i++) sums[i] = _mm256_set1_ps(sink);
    for (int s = 0; s < PROBE_STEPS; s++)
#pragma GCC unroll 12
        for (int i = 0; i < PROBE_CHAINS; i++) sums[i] = _mm256_fmadd_ps(sums[i], a, a);
    for (int i = 1; i < PROBE_CHAINS; i++) sums[0] = _mm256_add_ps(sums[0], sums[i]);
    sink = _mm256_cvtss_f32(sums[0]);
    return 2.0 * 8 * PROBE_CHAINS * PROBE_STEPS;
}

TARGET_AVX512 static double fp32_avx512(void) {
    __m512 sums[PROBE_CHAINS], a = _mm512_set1_ps(0.5f);
#pragma GCC unroll 12
    for (int i = 0; i < PROBE_CHAINS; i++) sums[i] = _mm512_set1_ps(sink);
    for (int s = 0; s < PROBE_STEPS; s++)
#pragma GCC unroll 12
        for (int i = 0; i < PROBE_CHAINS; i++) sums[i] = _mm512_fmadd_ps(sums[i], a, a);
    for (int i = 1; i < PROBE_CHAINS; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    sink = _mm512_cvtss_f32(sums[0]);
    return 2.0 * 16 * PROBE_CHAINS * PROBE_STEPS;
}

TARGET_AVX512 static double bf16_avx512(void) {
    __m512 sums[PROBE_CHAINS];
    __m512bh a = (__m512bh)_mm512_set1_epi32((int)bits_of(sink));
#pragma GCC unroll 12
    for (int i = 0; i < PROBE_CHAINS; i++) sums[i] = _mm512_set1_ps(sink);
    for (int s = 0; s < PROBE_STEPS; s++)
#pragma GCC unroll 12
        for (int i = 0; i < PROBE_CHAINS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], a, a);
    for (int i = 1; i < PROBE_CHAINS; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    sink = _mm512_cvtss_f32(sums[0]);
    return 2.0 * 32 * PROBE_CHAINS * PROBE_STEPS;
}

TARGET_AVX512 static double int8_avx512(void) {
    __m512i sums[PROBE_CHAINS], a = _mm512_set1_epi32((int)bits_of(sink));
#pragma GCC unroll 12
    for (int i = 0; i < PROBE_CHAINS; i++) sums[i] = _mm512_set1_epi32(i);
    for (int s = 0; s < PROBE_STEPS; s++)
#pragma GCC unroll 12
        for (int i = 0; i < PROBE_CHAINS; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], a, a);
    for (int i = 1; i < PROBE_CHAINS; i++) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
    sink = (float)_mm512_cvtsi512_si32(sums[0]);
    return 2.0 * 64 * PROBE_CHAINS * PROBE_STEPS;
}

TARGET_AMX static double bf16_amx(void) {
    _Alignas(64) static const uint8_t zeros[1024];
    configure_tiles(16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, zeros, 64);
    _tile_loadd(6, zeros, 64);
    for (int s = 0; s < PROBE_STEPS / 4; s++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_release();
    return 2.0 * 16 * 16 * 32 * PROBE_STEPS;
}
#endif

static double rate_of(Work *work, int threads) {
    double rate = 0;
#pragma omp parallel num_threads(threads) reduction(+ : rate)
    {
        const unsigned old = exact_float();
        work();
        double operations = 0, seconds;
        const double start = now();
        do {
            operations += work();
            seconds = now() - start;
        } while (seconds < PROBE_SECONDS);
        rate += operations / seconds;
        restore_float(old);
    }
    return rate;
}

/* Operations a second (a multiply-add is two) by what the multipliers take: FP32, BF16, or FP4 for int8 dot products.
 * 0 where the tier has no such instruction. */
EXPORT double nibblas_probe_rate(int type, int threads, int tier) {
#ifdef NIBBLAS_X86
    if (type == FP32) return rate_of(tier >= AVX512 ? fp32_avx512 : tier == AVX2 ? fp32_avx2 : fp32_portable, threads);
    if (type == BF16 && tier == AMX) return rate_of(bf16_amx, threads);
    if (type == BF16) return tier == AVX512 ? rate_of(bf16_avx512, threads) : 0;
    if (type == FP4) return tier >= AVX512 ? rate_of(int8_avx512, threads) : 0;
#else
    (void)tier;
    if (type == FP32) return rate_of(fp32_portable, threads);
#endif
    return 0;
}
