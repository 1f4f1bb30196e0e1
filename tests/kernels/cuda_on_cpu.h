// CUDA C++ compiled for a CPU, to see what a kernel computes where there is no GPU: a thread is a fiber that runs until it
// waits for others. What a kernel says in PTX is said here in C++: define NIBBLAS_ON_CPU, include this, then the kernel.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)
#define __grid_constant__

struct uint4 { uint32_t x, y, z, w; };
struct Index { int x, y, z; };

alignas(128) unsigned char shared[227 << 10];
static Index threadIdx, blockIdx;

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

template <class To, class From> static inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

static inline float __uint_as_float(uint32_t bits) { return bits_as<float>(bits); }

// Fibers

struct Barrier {
    int size, arrived = 0, times = 0;
    void wait();
};

struct Warp {
    Barrier barrier{32};
    uint32_t a[32][4], b[32][2], exchanged[32];
};

static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> is_done;
static std::vector<Warp> warps;
static Barrier block{0};
static int running;
static bool moved;  // whether any thread got further since the scheduler began a round

void Barrier::wait() {
    const int now = times;
    moved = true;
    if (++arrived == size) {
        arrived = 0;
        times++;
    }
    while (times == now) swapcontext(&fibers[running], &scheduler);
    moved = true;
}

static inline void __syncthreads() { block.wait(); }

static inline Warp& my_warp() { return warps[threadIdx.x / 32]; }

static inline void __syncwarp() { my_warp().barrier.wait(); }

static inline uint32_t __shfl_sync(uint32_t, uint32_t value, int from) {
    Warp& warp = my_warp();
    warp.exchanged[threadIdx.x % 32] = value;
    warp.barrier.wait();
    const uint32_t found = warp.exchanged[from & 31];
    my_warp().barrier.wait();
    return found;
}

static inline float __shfl_xor_sync(uint32_t, float value, int mask) {
    return bits_as<float>(__shfl_sync(~0u, bits_as<uint32_t>(value), (threadIdx.x % 32) ^ mask));
}

// Asynchronous copies take place when they are waited for: whoever reads too early sees what was there before.

struct Copies {
    std::vector<std::function<void()>> open;
    std::deque<std::vector<std::function<void()>>> committed;
};

static std::vector<Copies> copies;  // of each thread

static inline void copy(uint8_t* to, const uint8_t* from, int bytes, bool wanted) {
    if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) {
        fprintf(stderr, "a copy of %d bytes at an address that is no multiple of that\n", bytes);
        abort();
    }
    copies[running].open.push_back([=] { wanted ? (void)memcpy(to, from, bytes) : (void)memset(to, 0, bytes); });
}

static inline void copy_16(uint8_t* to, const uint8_t* from) { copy(to, from, 16, true); }
static inline void copy_8(uint8_t* to, const uint8_t* from, bool wanted) { copy(to, from, 8, wanted); }

static inline void commit() {
    Copies& mine = copies[running];
    mine.committed.push_back(std::move(mine.open));
    mine.open.clear();
}

template <int PENDING> static inline void wait_copies() {
    auto& committed = copies[running].committed;
    for (; (int)committed.size() > PENDING; committed.pop_front())
        for (const auto& take_place : committed.front()) take_place();
}

// Runs a kernel for every block; shared memory holds NaN before each.
template <class Kernel> static void run_blocks(Kernel kernel, int blocks_x, int blocks_y, int threads) {
    static void (*enter)();
    static Kernel* to_run;
    to_run = &kernel;
    enter = [] {
        (*to_run)();
        is_done[running] = 1;
        moved = true;
        swapcontext(&fibers[running], &scheduler);
    };
    constexpr size_t stack = 256 << 10;
    const std::unique_ptr<char[]> stacks(new char[stack * threads]);
    for (int block_y = 0; block_y < blocks_y; block_y++)
        for (int block_x = 0; block_x < blocks_x; block_x++) {
            memset(shared, 0xFF, sizeof shared);
            blockIdx = {block_x, block_y, 0};
            fibers.assign(threads, {});
            is_done.assign(threads, 0);
            warps.assign(threads / 32, {});
            copies.assign(threads, {});
            block = {threads};
            for (int i = 0; i < threads; i++) {
                getcontext(&fibers[i]);
                fibers[i].uc_stack.ss_sp = stacks.get() + stack * i;
                fibers[i].uc_stack.ss_size = stack;
                makecontext(&fibers[i], enter, 0);
            }
            for (int left = threads; left;) {
                moved = false;
                for (running = 0; running < threads; running++) {
                    if (is_done[running]) continue;
                    threadIdx = {running, 0, 0};
                    swapcontext(&scheduler, &fibers[running]);
                    left -= is_done[running];
                }
                if (!moved) {
                    fprintf(stderr, "threads wait for each other for ever\n");
                    abort();
                }
            }
        }
}

// Numbers

static inline float half_to_float(uint16_t bits) { return bits_as<_Float16>(bits); }
static inline uint16_t float_to_half(float value) { return bits_as<uint16_t>((_Float16)value); }

static inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    if (value != value) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static inline float e4m3_to_float(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent ? __builtin_ldexpf(8 + mantissa, exponent - 10) : __builtin_ldexpf(mantissa, -9);
    if ((code & 127) == 127) value = __builtin_nanf("");
    return code & 128 ? -value : value;
}

static inline void load_where(bool wanted, uint4 (&x)[2], const uint8_t* from) {
    if ((uintptr_t)from % 16) {
        fprintf(stderr, "a read of 16 bytes at an address that is no multiple of 16\n");
        abort();
    }
    if (wanted) x[0] = *(const uint4*)from, x[1] = *(const uint4*)(from + 64);
}

// PTX ISA, prmt: with its highest bit a selector takes only the sign of the byte.
static inline uint32_t permute(uint32_t lower, uint32_t upper, uint32_t which) {
    const uint64_t table = (uint64_t)upper << 32 | lower;
    uint32_t bytes = 0;
    for (int i = 0; i < 4; i++) {
        const int selector = which >> 4 * i & 15;
        const uint8_t byte = table >> 8 * (selector & 7);
        bytes |= (uint32_t)(selector & 8 ? (byte & 128 ? 0xFF : 0) : byte) << 8 * i;
    }
    return bytes;
}

static inline void keep(uint32_t&) {}

static inline uint32_t flip_signs(uint32_t codes) { return codes ^ 0x88888888u; }

static inline uint32_t decode_scales(uint16_t bytes) {
    return float_to_half(e4m3_to_float(bytes)) | (uint32_t)float_to_half(e4m3_to_float(bytes >> 8)) << 16;
}

// m16n8k32 of u8 and s8, PTX ISA, "Matrix Fragments for mma.m16n8k32": lane (g, t) holds of A rows g and g + 8, columns
// 4t and 4t + 16 with the next three; of B the same rows of column g; of C rows g and g + 8, columns 2t and the next.
static inline void mma(uint32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    memcpy(my_warp().a[lane], a, sizeof a);
    memcpy(my_warp().b[lane], b, sizeof b);
    my_warp().barrier.wait();
    const Warp& warp = my_warp();
    for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        for (int k = 0; k < 32; k++) {
            const int part = k % 16 / 4, upper = k / 16;
            const uint8_t x = warp.a[row % 8 * 4 + part][row / 8 + 2 * upper] >> 8 * (k % 4);
            const int8_t y = warp.b[column * 4 + part][upper] >> 8 * (k % 4);
            c[i] += x * y;
        }
    }
    my_warp().barrier.wait();
}
