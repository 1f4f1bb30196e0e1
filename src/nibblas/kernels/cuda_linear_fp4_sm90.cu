// c = a @ b.T, both NVFP4 in LINEAR layouts, for at most 8 rows of a: b (N, K) as mma operand A, a (M, K) as operand B,
// the product transposed.
//
// A CTA takes 16 rows of b, its WARPS warps split K. A warp walks in chunks of 128 columns, two at a time, with the next
// two on their way: a lane (g, t) reads 32 codes of rows g and g + 8, 16 bytes each. A product doesn't care for the order
// of its terms, so the lane's own codes serve as its mma fragments, four of a row at a time, and a lies in shared memory
// in the same order. An element is code * scale, exact in fp16 with the 2^-14 that the cheap decoding leaves on it.
// The warps' sums are added in a fixed order.

constexpr int THREADS = WARPS * 32;
constexpr float UNIT = 268435456.0f;  // 2^28: both operands were times 2^-14

struct Arguments {
    const u8 *b, *b_scales, *a, *a_scales;
    u8* out;
    const u8* bias;                       // (N,) or null
    const float *a_global, *b_global;     // or null
    u64 b_pitch, b_scales_pitch, a_pitch, a_scales_pitch, out_pitch;  // bytes between rows
    u64 b_batch, b_scales_batch, a_batch, a_scales_batch, out_batch;  // bytes between matrices
    u32 a_global_batch, b_global_batch;   // floats between global scales
    int M, N, K;
    int bias_type, out_type;
};

#ifndef NIBBLAS_ON_CPU
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// Two e4m3 bytes as two fp16.
__device__ __forceinline__ u32 decode_scales(u16 bytes) {
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes));
    return pair;
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

// Eight codes as four pairs of fp16 times 2^-14: codes 0 and 4, 1 and 5, 2 and 6, 3 and 7. The exponent and the bit of
// mantissa of a code become the lowest bits of the exponent and the highest of the mantissa.
__device__ __forceinline__ void decode(u32 word, u32 scale, u32 (&pairs)[4]) {
    constexpr u32 sign = 0x80008000u, rest = 0x0E000E00u;
    pairs[0] = multiply((word << 12 & sign) | (word << 9 & rest), scale);
    pairs[1] = multiply((word << 8 & sign) | (word << 5 & rest), scale);
    pairs[2] = multiply((word << 4 & sign) | (word << 1 & rest), scale);
    pairs[3] = multiply((word & sign) | (word >> 3 & rest), scale);
}

// What a lane reads of two chunks: codes of rows g and g + 8, and 4 of the 16 bytes of scales of each.
struct Step {
    uint4 codes[2][2];
    u32 scales[2];
};

extern "C" __global__ void __launch_bounds__(THREADS) nibblas_linear_fp4(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(16) u8 shared[];  // a: [M][K / 8 + 1] of 8 elements; sums: [WARPS][8][16]
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
    const int batch = blockIdx.y, first_row = blockIdx.x * 16;
    const int words = p.K >> 3, chunks = p.K >> 7;
    const int begin = warp * chunks / WARPS, end = (warp + 1) * chunks / WARPS;
    uint4* const elements = (uint4*)shared;
    float* const sums = (float*)(elements + p.M * (words + 1));

    const uint4* codes[2];
    const u32* scales[2];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        const u64 row = min(first_row + g + 8 * r, p.N - 1);  // past the last row it is read again, and not stored
        codes[r] = (const uint4*)(p.b + batch * p.b_batch + row * p.b_pitch) + t;
        scales[r] = (const u32*)(p.b_scales + batch * p.b_scales_batch + row * p.b_scales_pitch) + t;
    }
    const auto load = [&](Step& step, int chunk) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            if (chunk < end) step.codes[0][r] = load_once(codes[r] + chunk * 4);
            if (chunk + 1 < end) step.codes[1][r] = load_once(codes[r] + chunk * 4 + 4);
            if (chunk + (t >> 1) < end) step.scales[r] = scales[r][chunk * 2];
        }
    };
    Step now, next;
    load(now, begin);

    for (int i = threadIdx.x; i < p.M * words; i += THREADS) {
        const int m = i / words, word = i - m * words;
        const u8 scale = p.a_scales[batch * p.a_scales_batch + m * p.a_scales_pitch + (word >> 1)];
        u32 pairs[4];
        decode(((const u32*)(p.a + batch * p.a_batch + m * p.a_pitch))[word], low_twice(decode_scales(scale)), pairs);
        elements[m * (words + 1) + word] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    __syncthreads();

    float sum[2][4] = {};
    // Columns of c.T past M are not stored: whatever they are made of, the last row of a is at hand.
    const uint4* const mine = elements + min(g, p.M - 1) * (words + 1) + t * 4;
    #pragma unroll 2
    for (int chunk = begin; chunk < end; chunk += 2) {
        load(next, chunk + 2);
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 scale[2];
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 four = __shfl_sync(~0u, now.scales[r], (lane & ~3) + 2 * i + (t >> 1));
                scale[r] = decode_scales((u16)(four >> 16 * (t & 1)));
            }
            if (chunk + i >= end) continue;
            const u32 word[2][4] = {
                {now.codes[i][0].x, now.codes[i][0].y, now.codes[i][0].z, now.codes[i][0].w},
                {now.codes[i][1].x, now.codes[i][1].y, now.codes[i][1].z, now.codes[i][1].w}};
            #pragma unroll
            for (int w = 0; w < 4; w++) {
                const uint4 x = mine[(chunk + i) * 16 + w];
                u32 upper[4], lower[4];
                decode(word[0][w], w < 2 ? low_twice(scale[0]) : high_twice(scale[0]), upper);
                decode(word[1][w], w < 2 ? low_twice(scale[1]) : high_twice(scale[1]), lower);
                mma(sum[0], upper[0], lower[0], upper[1], lower[1], x.x, x.y);
                mma(sum[1], upper[2], lower[2], upper[3], lower[3], x.z, x.w);
            }
        }
        now = next;
    }

    #pragma unroll
    for (int i = 0; i < 4; i++)
        sums[(warp * 8 + 2 * t + (i & 1)) * 16 + g + (i & 2) * 4] = sum[0][i] + sum[1][i];
    __syncthreads();
    for (int i = threadIdx.x; i < p.M * 16; i += THREADS) {
        const int row = first_row + (i & 15), m = i >> 4;
        if (row >= p.N) continue;
        float total = 0.0f;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w * 128 + i];
        total *= UNIT;
        if (p.a_global) total *= p.a_global[batch * p.a_global_batch];
        if (p.b_global) total *= p.b_global[batch * p.b_global_batch];
        if (p.bias) total += to_float(p.bias, row, p.bias_type);
        store(p.out + batch * p.out_batch + m * p.out_pitch, row, p.out_type, total);
    }
}
