// c = a @ b.T, both NVFP4 in LINEAR layouts, for at most 8 rows of a: b (N, K) as mma operand A, a (M, K) as operand B,
// the product transposed, in integers.
//
// Twice an element is an integer up to 12, and a byte permutation looks up four at a time with the codes themselves as
// its selector: it gives 0 where a code has its sign bit, and with all signs flipped the others. An mma of k32 takes both,
// times a and times -a, so that no sign is ever put in place. Its sum over a block is exact; it is then multiplied by the
// scales of the block in fp32, exactly too, and added up.
//
// A warp takes 16 rows of b, walks along K in stages of two chunks of 128 columns, and has DEPTH stages on their way from
// memory to a ring in shared memory. Of a chunk lane (g, t) has blocks 2t and 2t + 1 of rows g and g + 8. Those of
// different t must not be summed by one mma: of operand B's 8 columns, two rows of a for each t, a column is zero but
// where it meets its own t. So lane (g, t) receives the sums of its own blocks with both rows of a. A single row of a
// has its two columns times the lane's two blocks: of the two sums of a block with them one is of use.
//
// Set by the compiler's options:
// M            rows of a
// ROW_WARPS    warps of a CTA beside each other along N, 16 rows of b each
// K_WARPS      warps that split K; their sums are added in a fixed order
// DEPTH        as above
// LINES        1 if a copy of a warp takes whole lines of 128 bytes, 0 if halves of twice as many rows
// MIN_BLOCKS   CTAs that must fit on a multiprocessor

constexpr int THREADS = ROW_WARPS * K_WARPS * 32;
constexpr int ROWS = ROW_WARPS * 16;
constexpr int PAIRS = (M + 1) / 2;           // of rows of a
constexpr int CODES = 2048, STAGE = CODES + 256;  // bytes of a stage: codes [16][8] of 16 (LINES) or [2 chunks][2][32 lanes] of 16, scales [16][16]
constexpr int A_STAGE = 512;                 // bytes of a: [2 chunks][2 blocks][2 halves][4 t] of 4 a, 4 -a, 4 a, 4 -a
constexpr u32 ZERO = 0x4B400000u;            // 1.5 * 2^23 in fp32: with an integer added, it is that much more in fp32 too

struct Arguments {
    const u8 *b, *b_scales, *a, *a_scales;
    u8* out;
    const u8* bias;                       // (N,) or null
    const float *a_global, *b_global;     // or null
    u64 b_pitch, b_scales_pitch, a_pitch, a_scales_pitch, out_pitch;  // bytes between rows
    u64 b_batch, b_scales_batch, a_batch, a_scales_batch, out_batch;  // bytes between matrices
    u32 a_global_batch, b_global_batch;   // floats between global scales
    int N, K;
    int bias_type, out_type;
};

#ifndef NIBBLAS_ON_CPU
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Asynchronous copies to shared memory.
__device__ __forceinline__ void copy_16(u8* to, const u8* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory");
}

// Zeros where it is not wanted.
__device__ __forceinline__ void copy_8(u8* to, const u8* from, bool wanted) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
        :: "r"(shared_address(to)), "l"(from), "r"(wanted ? 8 : 0) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

// Reads 16 bytes of shared memory, and those 64 further on, in the lanes that want them, and leaves x alone in the others.
__device__ __forceinline__ void load_where(bool wanted, uint4 (&x)[2], const u8* from) {
    asm volatile("{.reg .pred wanted; setp.ne.u32 wanted, %9, 0; @wanted ld.shared.v4.u32 {%0, %1, %2, %3}, [%8];"
        "@wanted ld.shared.v4.u32 {%4, %5, %6, %7}, [%8 + 64];}"
        : "+r"(x[0].x), "+r"(x[0].y), "+r"(x[0].z), "+r"(x[0].w), "+r"(x[1].x), "+r"(x[1].y), "+r"(x[1].z), "+r"(x[1].w)
        : "r"(shared_address(from)), "r"((u32)wanted));
}

// A byte for each of the lower four nibbles of `which`: the n-th of 8, all bits its highest if n is 8 or more.
__device__ __forceinline__ u32 permute(u32 lower, u32 upper, u32 which) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(lower), "r"(upper), "r"(which));
    return bytes;
}

// A value that is not computed again where it is needed.
__device__ __forceinline__ void keep(u32& x) { asm volatile("" : "+r"(x)); }

// Said so, it is not done once more for the upper half.
__device__ __forceinline__ u32 flip_signs(u32 codes) {
    u32 flipped;
    asm("xor.b32 %0, %1, 0x88888888;" : "=r"(flipped) : "r"(codes));
    return flipped;
}

// Two e4m3 bytes as two fp16.
__device__ __forceinline__ u32 decode_scales(u16 bytes) {
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes));
    return pair;
}

// c += a (unsigned) times b (signed).
__device__ __forceinline__ void mma(u32 (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

// Twice the magnitudes that codes 0 to 7 stand for, a byte each.
struct Table {
    u32 lower, upper;

    // Of the lower four codes in a word, a byte each: of those without a sign bit; of the others 0.
    __device__ __forceinline__ u32 positive(u32 codes) const { return permute(lower, upper, codes); }
};

// Bytes x - y, of bytes under 128.
__device__ __forceinline__ u32 minus(u32 x, u32 y) { return ((x | 0x80808080u) - y) ^ 0x80808080u; }

__device__ __forceinline__ float low_half(u32 pair) { return half_to_float((u16)pair); }
__device__ __forceinline__ float high_half(u32 pair) { return half_to_float((u16)(pair >> 16)); }

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) nibblas_linear_fp4(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // the compiler then knows that it is uniform
    const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const int batch = blockIdx.y, first_row = blockIdx.x * ROWS;
    const int chunks = p.K >> 7, stages = (chunks + 1) >> 1;
    const int count = (stages - k_warp + K_WARPS - 1) / K_WARPS;  // a warp's stages: k_warp and every K_WARPS-th on

    // threadIdx.y is 0, which the compiler doesn't know: of a constant it would make a new one for each use.
    const Table table = {0x03020100u + threadIdx.y, 0x0C080604u};

    // Shared memory: rings; a [M][stages] of A_STAGE; its scales [M][stages][16]; sums [K_WARPS][M][ROWS].
    const int a_pitch = stages * A_STAGE + 64;
    u8* const ring = shared + warp * (DEPTH * STAGE);
    u8* const a = shared + ROW_WARPS * K_WARPS * DEPTH * STAGE;
    float* const a_scales = (float*)(a + M * a_pitch);
    float* const sums = a_scales + M * stages * 16;

    // Of a thread reads 32 codes at a time, the first of them before b, which would keep them waiting.
    const int units = stages * 8;
    int unit = threadIdx.x;
    uint4 a_codes;
    u16 two_scales;
    const auto read_a = [&]() {
        const int m = M == 1 ? 0 : unit / units, u = unit - m * units;
        a_codes = make_uint4(0, 0, 0, 0);
        two_scales = 0;
        if (unit < M * units && u < chunks * 4) {
            a_codes = *(const uint4*)(p.a + batch * p.a_batch + m * p.a_pitch + u * 16);
            two_scales = *(const u16*)(p.a_scales + batch * p.a_scales_batch + m * p.a_scales_pitch + u * 2);
        }
    };
    const auto write_a = [&]() {
        if (unit >= M * units) return;
        const int m = M == 1 ? 0 : unit / units, u = unit - m * units;
        const u32 words[4] = {a_codes.x, a_codes.y, a_codes.z, a_codes.w};
        #pragma unroll
        for (int w = 0; w < 2; w++) {
            u8* const to = a + m * a_pitch + (u >> 2) * 256 + w * 128 + (u & 3) * 16;
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 same[2], negated[2];
                #pragma unroll
                for (int q = 0; q < 2; q++) {
                    const u32 four = words[w * 2 + h] >> 16 * q;
                    const u32 plus = table.positive(four), less = table.positive(four ^ 0x8888u);
                    same[q] = minus(plus, less);
                    negated[q] = minus(less, plus);
                }
                *(uint4*)(to + h * 64) = make_uint4(same[0], negated[0], same[1], negated[1]);
            }
        }
        const u32 pair = decode_scales(two_scales);
        float* const scale = a_scales + (m * units + u) * 2;
        scale[0] = low_half(pair);
        scale[1] = high_half(pair);
    };
    read_a();

    // A copy of a warp takes 128 bytes of 4 rows (LINES), or 64 bytes of 8.
    constexpr int AT_ONCE = LINES ? 4 : 8, ROW_COPIES = 16 / AT_ONCE;
    const int warp_row = first_row + row_warp * 16;
    const int line = lane / (32 / AT_ONCE), piece = lane % (32 / AT_ONCE);
    const u8* codes[ROW_COPIES];
    #pragma unroll
    for (int r = 0; r < ROW_COPIES; r++) {
        const u64 row = min(warp_row + line + AT_ONCE * r, p.N - 1);  // past the last it is read again, and not stored
        codes[r] = p.b + batch * p.b_batch + row * p.b_pitch + k_warp * 128 + piece * 16;
    }
    const u8* scales = p.b_scales + batch * p.b_scales_batch
        + (u64)min(warp_row + (lane >> 1), p.N - 1) * p.b_scales_pitch + k_warp * 16 + (lane & 1) * 8;
    // Halves of a line change places in odd rows, or the banks of two rows would meet.
    u32 to = LINES ? line * 128 + (piece ^ (line & 1) << 2) * 16 : lane * 16;
    keep(to);
    int wanted = 0;
    u8* fill = ring;
    const auto copy_stage = [&]() {
        if (wanted < count) {
            // Of a chunk past K the codes are whatever was there, as a is zero; the scales must not be NaN.
            const bool whole = (k_warp + wanted * K_WARPS) * 2 + 1 < chunks;
            #pragma unroll
            for (int r = 0; r < ROW_COPIES; r++) {
                if (!LINES || whole || piece < 4) copy_16(fill + r * 512 + to, codes[r]);
                if (!LINES && whole) copy_16(fill + r * 512 + to + 1024, codes[r] + 64);
                codes[r] += K_WARPS * 128;
            }
            copy_8(fill + CODES + lane * 8, scales, whole || !(lane & 1));
            scales += K_WARPS * 16;
        }
        commit();
        wanted++;
        fill += STAGE;
        if (fill == ring + DEPTH * STAGE) fill = ring;
    };
    #pragma unroll 1
    for (int d = 0; d < DEPTH; d++) copy_stage();

    while (true) {
        write_a();
        unit += THREADS;
        if (unit >= M * units) break;
        read_a();
    }
    __syncthreads();

    float sum[2][M] = {};
    uint4 x[PAIRS][2] = {};  // operand B of a block, by halves: zero in the lanes that are not asked for a
    const u8* mine = a + (g & 1) * (M == 1 ? 128 : a_pitch) + k_warp * A_STAGE + t * 16;
    const float* scale_of_a = a_scales + k_warp * 16 + t * 2;
    const u8* stage = ring;
    #pragma unroll 1
    for (int s = 0; s < count; s++) {
        wait_copies<DEPTH - 1>();
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 word[2];
            u32 pair[2];
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                const int from = LINES ? r * 1024 + g * 128 + ((i ^ g & 1) * 4 + t) * 16 : i * 1024 + r * 512 + lane * 16;
                word[r] = *(const uint4*)(stage + from);
                pair[r] = decode_scales(*(const u16*)(stage + CODES + (g + 8 * r) * 16 + i * 8 + t * 2));
            }
            #pragma unroll
            for (int w = 0; w < 2; w++) {
                u32 plus[2][4], less[2][4];
                float scale[2];
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    const u32 words[2] = {w ? word[r].z : word[r].x, w ? word[r].w : word[r].y};
                    #pragma unroll
                    for (int q = 0; q < 4; q++) {
                        plus[r][q] = table.positive(words[q / 2] >> 16 * (q % 2));
                        less[r][q] = table.positive(flip_signs(words[q / 2]) >> 16 * (q % 2));
                    }
                    scale[r] = w ? high_half(pair[r]) : low_half(pair[r]);
                }
                u32 c[PAIRS][4];
                #pragma unroll
                for (int n = 0; n < PAIRS; n++) {
                    const bool is_mine = g >> 1 == t && (M == 1 || n * 2 + (g & 1) < M);
                    if (M > 1 || w == 0) load_where(is_mine, x[n], mine + n * 2 * a_pitch + i * 256 + w * 128);
                    c[n][0] = c[n][1] = c[n][2] = c[n][3] = ZERO;
                }
                #pragma unroll
                for (int q = 0; q < 4; q++) {
                    #pragma unroll
                    for (int n = 0; n < PAIRS; n++) {
                        const uint4 half = x[n][q / 2];
                        const u32 same = q % 2 ? half.z : half.x, negated = q % 2 ? half.w : half.y;
                        mma(c[n], plus[0][q], plus[1][q], less[0][q], less[1][q], same, negated);
                    }
                }
                #pragma unroll
                for (int m = 0; m < M; m++) {
                    const float times = scale_of_a[m * units * 2 + i * 8 + w], zero = -__uint_as_float(ZERO) * times;
                    #pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float block = __uint_as_float(c[m / 2][r * 2 + (M == 1 ? w : m % 2)]);
                        sum[r][m] = fmaf(fmaf(block, times, zero), scale[r], sum[r][m]);
                    }
                }
            }
        }
        mine += K_WARPS * A_STAGE;
        scale_of_a += K_WARPS * 16;
        stage += STAGE;
        if (stage == ring + DEPTH * STAGE) stage = ring;
        __syncwarp();  // all lanes have read what is overwritten now
        copy_stage();
    }

    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float value = sum[r][m];
            value += __shfl_xor_sync(~0u, value, 1);
            value += __shfl_xor_sync(~0u, value, 2);
            if (t == 0) sums[(k_warp * M + m) * ROWS + row_warp * 16 + g + 8 * r] = value;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < M * ROWS; i += THREADS) {
        const int row = first_row + i % ROWS, m = i / ROWS;
        if (row >= p.N) continue;
        float total = 0.0f;
        #pragma unroll
        for (int k = 0; k < K_WARPS; k++) total += sums[k * M * ROWS + i];
        total *= 0.25f;  // both operands were doubled
        if (p.a_global) total *= p.a_global[batch * p.a_global_batch];
        if (p.b_global) total *= p.b_global[batch * p.b_global_batch];
        if (p.bias) total += to_float(p.bias, row, p.bias_type);
        store(p.out + batch * p.out_batch + m * p.out_pitch, row, p.out_type, total);
    }
}
