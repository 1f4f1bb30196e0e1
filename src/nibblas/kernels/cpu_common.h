/* What the CPU kernels share: codes, dtypes, tiers of instructions, the floating-point environment. */
#ifndef NIBBLAS_CPU_COMMON_H
#define NIBBLAS_CPU_COMMON_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__) && ((defined(__clang__) && __clang_major__ >= 14) || (!defined(__clang__) && __GNUC__ >= 11))
#define NIBBLAS_X86 1
#include <immintrin.h>
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni")))
#define TARGET_AMX                                                                                              \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,"  \
                          "amx-tile,amx-bf16")))
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* Numbers shared with cpu_library.py. */
enum { FP32, BF16, FP16, FP4 };
enum { NVFP4, MXFP4 };
enum { PORTABLE, AVX2, AVX512, AMX };

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* aligned_alloc wants whole multiples of the alignment. */
INLINE void *allocate(size_t bytes) { return aligned_alloc(64, (bytes + 127) & ~(size_t)63); }

INLINE uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

INLINE float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Scale codes, exact. e4m3 is read as an fp16 with another bias: value * 2^-8, subnormals included. */
INLINE float e4m3_decode(uint8_t code) {
    const uint32_t magnitude = code & 0x7F;
    const float value = (magnitude >> 3) ? float_of((magnitude << 20) + (120u << 23)) : (float)magnitude * 0x1p-9f;
    const float signless = magnitude == 0x7F ? NAN : value;
    return code & 0x80 ? -signless : signless;
}

/* 0 is 2^-127, a subnormal. */
INLINE float e8m0_decode(uint8_t code) {
    return float_of(code == 255 ? 0x7FC00000u : code ? (uint32_t)code << 23 : 0x00400000u);
}

INLINE float scale_decode(uint8_t code, int format) {
    return format == NVFP4 ? e4m3_decode(code) : e8m0_decode(code);
}

static const float E2M1_VALUES[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/* Branch-free, so that loops of them become vectors on every tier. */
INLINE float fp16_decode(uint16_t h) {
    const uint32_t magnitude = (uint32_t)(h & 0x7FFF) << 13;
    const uint32_t rebiased = bits_of(float_of(magnitude) * 0x1p112f);
    const uint32_t special = magnitude | 0x7F800000u;
    return float_of((magnitude >= 0x0F800000u ? special : rebiased) | (uint32_t)(h & 0x8000) << 16);
}

INLINE uint16_t fp16_encode(float f) {
    const uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, magnitude = u & 0x7FFFFFFF;
    const uint32_t normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    /* 0.5 has fp16's smallest step as its last bit. */
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t large = magnitude > 0x7F800000u ? 0x7E00 : 0x7C00;
    return (uint16_t)(sign | (magnitude >= 0x477FF000u ? large : finite));
}

INLINE uint16_t bf16_encode(float f) {
    const uint32_t u = bits_of(f), rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
    return (uint16_t)((u & 0x7FFFFFFF) > 0x7F800000u ? (u >> 16 | 0x40) : rounded);
}

INLINE float load_float(const void *x, int64_t i, int dtype) {
    if (dtype == FP32) return ((const float *)x)[i];
    const uint16_t h = ((const uint16_t *)x)[i];
    return dtype == BF16 ? float_of((uint32_t)h << 16) : fp16_decode(h);
}

INLINE void store_float(void *out, int64_t i, int dtype, float value) {
    if (dtype == FP32)
        ((float *)out)[i] = value;
    else
        ((uint16_t *)out)[i] = dtype == BF16 ? bf16_encode(value) : fp16_encode(value);
}

/* Round to nearest even and keep subnormals, whatever the caller's thread is set to; gives back the old setting. */
INLINE unsigned exact_float(void) {
#if defined(__x86_64__)
    unsigned old;
    const unsigned exact = 0x1F80;
    __asm__ volatile("stmxcsr %0" : "=m"(old));
    __asm__ volatile("ldmxcsr %0" : : "m"(exact));
    return old;
#else
    return 0;
#endif
}

INLINE void restore_float(unsigned old) {
#if defined(__x86_64__)
    __asm__ volatile("ldmxcsr %0" : : "m"(old));
#else
    (void)old;
#endif
}

#ifdef NIBBLAS_X86

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_a_row[16];
    uint8_t rows[16];
} TileConfig;

/* Eight tiles of 64 bytes a row: 0..5 of `rows` rows, 6 and 7 of 16. */
TARGET_AMX static inline void configure_tiles(int rows) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes_a_row[i] = 64;
        config.rows[i] = (uint8_t)(i < 6 ? rows : 16);
    }
    /* gcc 11 and 12 say that ldtilecfg reads 8 bytes, and drop the rest of the config as dead. */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

#endif

#endif
