// x -> NVFP4 (BLOCK 16) or MXFP4 (BLOCK 32) in LINEAR layouts, x fp32, bf16 or fp16 (TYPE), by rules that take the scale
// from the block's largest magnitude. Byte for byte nibblas.quantize; compile with --fmad=false, as it rounds each product.
//
// A thread takes CHUNKS times 16 elements: a block of NVFP4, half a block of MXFP4. All its loads are on their way before
// the first is used. Integer instructions run at half the rate of fp32's, so rounding is done in fp32.

constexpr int WORDS = TYPE == FP32 ? 16 : 8;  // of 16 elements
constexpr int AMAX_VECTORS = 4;               // 16 bytes each, that a thread of the first pass reads at a time
constexpr u32 INFINITY_BITS = 0x7F800000, MAGNITUDE_BITS = 0x7FFFFFFF;

struct Arguments {
    const u8* x;
    u32* partial;         // PARTIALS maxima of the first pass, from which global_scale is made and written; or null
    float* global_scale;  // NVFP4 only
    u8 *data, *scale;
    u64 chunks;           // of 16 elements
    u32 ctas;
    u32 rounding;         // MXFP4: added to the bits of the largest magnitude, may carry into its exponent
    float top;            // NVFP4: 6 times the largest scale
};

#ifndef NIBBLAS_ON_CPU
__device__ __forceinline__ uint4 load_vector(const uint4* from) {
    uint4 x;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}

// The larger magnitude in each element of two words, NaN if either is; its sign is anything.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 c;
    if (TYPE == FP32) asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else if (TYPE == BF16) asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

__device__ __forceinline__ u8 float_to_e4m3(float value) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    return (u8)pair;
}

__device__ __forceinline__ float e4m3_to_float(u8 code) {
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)code));
    return half_to_float((u16)pair);
}

// 1 / x for x and 1 / x normal, off by a unit in the last place at most.
__device__ __forceinline__ float approximate_inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Bytes of two words by a selector of four nibbles: 0..7 is a byte, 8 more is that byte's highest bit eight times.
__device__ __forceinline__ u32 permute(u32 lower, u32 upper, u32 which) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(lower), "r"(upper), "r"(which));
    return bytes;
}

__device__ __forceinline__ void start_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

// The elements of words, fp32.
template <int N> __device__ __forceinline__ void widen(const u32 (&words)[N], float (&values)[TYPE == FP32 ? N : 2 * N]) {
    #pragma unroll
    for (int i = 0; i < N; i++) {
        if (TYPE == FP32) values[i] = __uint_as_float(words[i]);
        else if (TYPE == BF16) {
            values[2 * i] = __uint_as_float(words[i] << 16);
            values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        } else {
            values[2 * i] = half_to_float((u16)words[i]);
            values[2 * i + 1] = half_to_float((u16)(words[i] >> 16));
        }
    }
}

// fp32 bits of the largest magnitude; those of Inf or more where there is a NaN or Inf.
template <int N> __device__ __forceinline__ u32 largest(const u32 (&words)[N]) {
    u32 most = words[0];
    #pragma unroll
    for (int i = 1; i < N; i++) most = larger(most, words[i]);
    if (TYPE == FP32) return most & MAGNITUDE_BITS;
    most = larger(most, most >> 16) & 0x7FFF;
    return TYPE == BF16 ? most << 16 : __float_as_uint(half_to_float((u16)most));
}

// What quotients by a divisor need of it.
struct Divisor {
    float value, inverse, rest;  // of 16 bits: inverse * (1 + rest) is 1 / value, rest rounded up

    __device__ __forceinline__ explicit Divisor(float d) : value(d), inverse(approximate_inverse(d)) {
        if (TYPE == FP32) {
            rest = fmaf(-d, inverse, 1.0f);
            inverse = fmaf(inverse, rest, inverse);  // RN(1 / d), as the compiler divides
        } else {
            // 16 or 13 bits: times the 8 or 11 of an element a product is exact.
            inverse = __uint_as_float(__float_as_uint(inverse) & (TYPE == BF16 ? 0xFFFFFF00u : 0xFFFFF800u));
            rest = fmaf(-d, inverse, 1.0f);
            rest = __fmaf_ru(rest, rest, rest);
        }
    }

    // |x| / value, with the e2m1 code of the rounded quotient. An fp32 quotient is the rounded one (Markstein: its
    // reciprocal is rounded right); of those of 16 bits all next to a midpoint of e2m1 were tried (test_every_divisor).
    __device__ __forceinline__ float quotient(float x) const {
        float q = fabsf(x) * inverse;
        if (TYPE != FP32) return fmaf(q, rest, q);
        #pragma unroll
        for (int i = 0; i < 2; i++) q = fmaf(fmaf(-value, q, fabsf(x)), inverse, q);
        return q;
    }
};

// The e2m1 code nearest to q in [0, 7), ties to even: in the lowest bits, above them those of 2^23. Between the values of
// e2m1 codes rise linearly, by steps of .5, of 1 from 2 on, and of 2 from 4 on: the least of three lines, each rounded.
constexpr float ROUND = 8388608.0f;  // 2^23: fp32 has no fractions from there on
constexpr u32 ROUND_BITS = 0x4B000000;

__device__ __forceinline__ int rounded(float q) {
    const float halves = fmaf(q, 2.0f, ROUND), ones = q + (ROUND + 2.0f), twos = fmaf(q, 0.5f, ROUND + 4.0f);
    return min(min((int)__float_as_uint(halves), (int)__float_as_uint(ones)), (int)__float_as_uint(twos));
}

// Codes of eight quotients, the first in the lowest nibble, without signs.
__device__ __forceinline__ u32 eight_codes(const float* quotients) {
    u32 codes = rounded(quotients[7]);
    #pragma unroll
    for (int i = 6; i >= 0; i--) codes = codes * 16 + rounded(quotients[i]);
    return codes - ROUND_BITS * 0x11111111u;
}

// The signs of eight elements at bits 3, 7, .. 31: pairs are words whose bits 15 and 31 are signs.
__device__ __forceinline__ u32 eight_signs(u32 a, u32 b, u32 c, u32 d) {
    const u32 first = permute(a, b, 0x7531), second = permute(c, d, 0x7531);
    return (permute(first, second, 0xECA8) & 0x08080808u) | (permute(first, second, 0x7531) & 0x80808080u);
}

// The codes of 16 elements: their words, and their magnitudes over the divisor.
__device__ __forceinline__ u64 sixteen_codes(const u32 (&words)[WORDS], const float (&quotients)[16]) {
    u32 pairs[8];
    #pragma unroll
    for (int i = 0; i < 8; i++)
        pairs[i] = TYPE == FP32 ? permute(words[2 * i % WORDS], words[(2 * i + 1) % WORDS], 0x7632) : words[i % WORDS];
    const u32 low = eight_codes(quotients) | eight_signs(pairs[0], pairs[1], pairs[2], pairs[3]);
    const u32 high = eight_codes(quotients + 8) | eight_signs(pairs[4], pairs[5], pairs[6], pairs[7]);
    return (u64)high << 32 | low;
}

extern "C" __global__ void __launch_bounds__(THREADS) nibblas_quantize(const __grid_constant__ Arguments p) {
    // From the end, where the first pass left x in the cache.
    const u64 first = (u64)(p.ctas - 1 - blockIdx.x) * (THREADS * CHUNKS) + threadIdx.x;
    const int left = (int)min(p.chunks - min(first, p.chunks), (u64)(THREADS * CHUNKS));
    const uint4* const x = (const uint4*)p.x + first * (WORDS / 4);
    u64* const data = (u64*)p.data + first;
    u8* const scale = p.scale + first / (BLOCK / 16);
    u32 words[CHUNKS][WORDS] = {};
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        if (i * THREADS >= left) continue;
        #pragma unroll
        for (int j = 0; j < WORDS; j += 4) {
            const uint4 four = load_vector(x + i * (THREADS * WORDS / 4) + j / 4);
            words[i][j] = four.x, words[i][j + 1] = four.y, words[i][j + 2] = four.z, words[i][j + 3] = four.w;
        }
    }
    float global_scale = 1.0f;
    if (BLOCK == 16) {
        if (p.partial) {
            wait_for_last_kernel();  // x was there before it began
            u32 amax = 0;
            #pragma unroll
            for (int i = 0; i < PARTIALS / 32; i++) amax = max(amax, p.partial[i * 32 + (threadIdx.x & 31)]);
            amax = __reduce_max_sync(~0u, amax);
            global_scale = fmaxf(__uint_as_float(amax) / p.top, 0x1p-126f);
            if (blockIdx.x == 0 && threadIdx.x == 0) *p.global_scale = global_scale;
        } else global_scale = *p.global_scale;
    }

    #pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        float values[16];
        widen(words[i], values);
        u32 bits = largest(words[i]), code;
        if (BLOCK == 32) bits = max(bits, __shfl_sync(~0u, bits, (threadIdx.x & 31) ^ 1));
        const float amax = __uint_as_float(bits);
        const bool finite = bits < INFINITY_BITS;
        bool empty = !finite;
        if (BLOCK == 16) {
            code = float_to_e4m3(amax / (6.0f * global_scale));
            float d = e4m3_to_float(code) * global_scale;
            empty |= d == 0.0f;
            // Seldom: elements to be clamped, or an inverse near or beyond the largest number. The least cannot be met, as
            // d is hardly more than amax / 6.
            if (!(amax < 6.75f * d && d > 0x1p-80f)) {
                const u32 exponent = max(__float_as_uint(d) >> 23, 1u);
                const float six = 6.0f * d, power = __uint_as_float((254 - exponent) << 23);
                #pragma unroll
                for (int j = 0; j < 16; j++) values[j] = fminf(fabsf(values[j]), six) * power;
                d *= power;
            }
            const Divisor divisor(d);
            #pragma unroll
            for (int j = 0; j < 16; j++) values[j] = divisor.quotient(values[j]);
        } else {
            code = (u32)max((int)((bits + p.rounding) >> 23) - 2, 0);
            // A power of two: multiplying by its inverse is the same division.
            const float inverse = __uint_as_float((254 - code) << 23);
            #pragma unroll
            for (int j = 0; j < 16; j++) values[j] = fabsf(values[j]) * inverse;
            if (amax * inverse >= 7.0f) {
                #pragma unroll
                for (int j = 0; j < 16; j++) values[j] = fminf(values[j], 6.0f);
            }
        }
        if (!finite) code = BLOCK == 16 ? 0x7F : 0xFF;
        const u64 codes = empty ? 0 : sixteen_codes(words[i], values);
        if (i * THREADS < left) {
            data[i * THREADS] = codes;
            if (BLOCK == 16 || threadIdx.x % 2 == 0) scale[i * THREADS / (BLOCK / 16)] = (u8)code;
        }
    }
}

// fp32 bits of the largest finite magnitude that a CTA meets -> partial[CTA].
extern "C" __global__ void __launch_bounds__(AMAX_THREADS) nibblas_amax(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(16) u8 shared[];
    start_next_kernel();
    const u64 vectors = p.chunks * (WORDS / 4), step = (u64)PARTIALS * AMAX_THREADS * AMAX_VECTORS;
    u32 most = 0;
    for (u64 start = (u64)blockIdx.x * AMAX_THREADS * AMAX_VECTORS + threadIdx.x; start < vectors; start += step) {
        u32 words[4 * AMAX_VECTORS] = {};
        #pragma unroll
        for (int i = 0; i < AMAX_VECTORS; i++) {
            const u64 vector = start + i * AMAX_THREADS;
            if (vector >= vectors) continue;
            const uint4 four = load_vector((const uint4*)p.x + vector);
            words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
        u32 bits = largest(words);
        if (bits >= INFINITY_BITS) {  // seldom: of the finite ones alone
            float values[TYPE == FP32 ? 4 * AMAX_VECTORS : 8 * AMAX_VECTORS];
            widen(words, values);
            bits = 0;
            #pragma unroll
            for (float value : values) {
                const u32 magnitude = __float_as_uint(fabsf(value));
                if (magnitude < INFINITY_BITS) bits = max(bits, magnitude);
            }
        }
        most = max(most, bits);
    }
    most = __reduce_max_sync(~0u, most);
    u32* const warps = (u32*)shared;
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < AMAX_THREADS / 32; i++) most = max(most, warps[i]);
        p.partial[blockIdx.x] = most;
    }
}
