// What the products of cuda_linear_sm90.cu and cuda_linear_wide_sm90.cu share: weights as layouts.FragmentCodes and
// FragmentScales store them, decoded into registers of the tensor cores, and copies to shared memory.
//
// FORMAT       16 or 32, the block size: NVFP4 or MXFP4

// Asynchronous copies to shared memory.
__device__ __forceinline__ void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Waits for a barrier of this CTA; `cluster`: whose data came from other CTAs.
template <bool cluster>
__device__ __forceinline__ void wait_barrier(u32 barrier, u32 phase) {
    if (cluster) {
        asm volatile("{.reg .pred done; wait_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;"
            "@!done bra wait_%=;}" :: "r"(barrier), "r"(phase) : "memory");
    } else {
        asm volatile("{.reg .pred done; wait_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
            "@!done bra wait_%=;}" :: "r"(barrier), "r"(phase) : "memory");
    }
}

__device__ __forceinline__ u32 rotate_right(u32 x, int n) { return __funnelshift_r(x, x, n); }

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 c;
    asm("{mul.bf16x2 %0, %1, %2;}" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// Scales of rows g (low half) and g + 8 (high half) as bf16. NVFP4: e5m3 bytes, times 2^119. MXFP4: e8m0 bytes.
__device__ __forceinline__ u32 decode_scales(u32 word, int which) {
    if (FORMAT == 16) {
        if (which) word = rotate_right(word, 8);
        return (word & 0x0FF00FF0u) | 0x70007000u;
    }
    return __byte_perm(word, 0, 0x4140) << 7;
}

// Eight codes as four pairs of bf16 (times 2^-126): rows g, g+8, g, g+8. layouts.FragmentCodes packs the word.
__device__ __forceinline__ void decode(u32 word, u32 scales, u32 (&pairs)[4]) {
    constexpr u32 mask = 0x81C081C0u;
    u32 g = low_twice(scales), g8 = high_twice(scales);
    pairs[0] = multiply(word & mask, g);
    pairs[1] = multiply((word << 4) & mask, g8);
    pairs[2] = multiply(rotate_right(word, 6) & mask, g);
    pairs[3] = multiply(((word << 6) ^ (word >> 2)) & mask, g8);
}

// A sum of a row of weights as decoded above, made whole. all_chunks: of 128 columns, that the row has.
__device__ __forceinline__ float finished(float value, const unsigned char* scales, int row, int all_chunks) {
    if (FORMAT == 16) return value * 128.0f;  // codes were times 2^-126, scales 2^119
    const unsigned char* largest = scales + (u64)((row >> 4) + 1) * (all_chunks * 64 + 16) - 16;
    return ldexpf(value, (int)largest[row & 15] - 128);
}

// Two fp16 as two bf16 next to each, and what is left of them.
__device__ __forceinline__ void split(u32& pair, u32& rest) {
    float x[2];
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(x[0]), "=f"(x[1]) : "r"(pair));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x[1]), "f"(x[0]));
    const float near[2] = {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
    #pragma unroll
    for (int i = 0; i < 2; i++) x[i] = fabsf(x[i]) <= 65504.0f ? x[i] - near[i] : 0.0f;  // Inf - Inf would be NaN
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rest) : "f"(x[1]), "f"(x[0]));
}
