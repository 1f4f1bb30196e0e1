// Elements of tensors, and pairs of them, as the CUDA kernels read and write them. Sources are compiled behind this.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { FP32, BF16, FP16 };

#ifndef NIBBLAS_ON_CPU
__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u16 float_to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// One half of a pair, twice. Said so, a multiplication can read it off the pair itself.
__device__ __forceinline__ u32 low_twice(u32 a) {
    u32 c;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(c) : "r"(a));
    return c;
}

__device__ __forceinline__ u32 high_twice(u32 a) {
    u32 c;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(c) : "r"(a));
    return c;
}
#endif

__device__ __forceinline__ float to_float(const u8* p, int index, int type) {
    if (type == FP32) return ((const float*)p)[index];
    const u16 bits = ((const u16*)p)[index];
    return type == BF16 ? __uint_as_float((u32)bits << 16) : half_to_float(bits);
}

__device__ __forceinline__ void store(u8* p, int index, int type, float value) {
    if (type == FP32) ((float*)p)[index] = value;
    else ((u16*)p)[index] = type == BF16 ? float_to_bf16(value) : float_to_half(value);
}
