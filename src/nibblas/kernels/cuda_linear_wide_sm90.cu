// c = a @ b.T for many rows of a: b (N, K) FP4, decoded into registers as wgmma's operand A, a (M, K) as operand B in
// shared memory, the product transposed.
//
// Two kernels. `nibblas_arrange` writes a once as wgmma reads it, the columns of a scale block where the lane that holds
// the block needs them, so that `nibblas_linear_wide` fetches a chunk of 128 columns of K by one bulk copy. The second
// starts while the first still runs and fetches weights meanwhile.
//
// A CTA takes TILES tiles of 16 rows of b and COLUMNS columns of c.T. One thread has chunks of a copied into a ring of
// DEPTH stages; WARPGROUPS of four warps copy their own weights, decode and multiply: the tensor cores work on one half of a
// tile's chunk while the next is decoded. K is split over the CTAs of a cluster, which lay their sums down in shared memory;
// each adds up some rows of c, CTA after CTA.
//
// Set by the compiler's options, beside FORMAT (cuda_linear_sm90.h):
// TERMS        bf16 terms an element of a is split into: 1 for bf16, 2 for fp16 (the split is exact)
// COLUMN_TILES tiles of 8 columns of c.T, TERMS columns for a row of a: 6, 8, 12, 16, 24, 32
// WARPGROUPS, CLUSTER, DEPTH as above
// ROW_TILES    tiles of 16 rows of b that a warp takes
// MIN_BLOCKS   CTAs that must fit on a multiprocessor

constexpr int WARPS = WARPGROUPS * 4;                   // that multiply
constexpr int TILES = WARPS * ROW_TILES;
constexpr int MULTIPLIERS = WARPS * 32, THREADS = MULTIPLIERS + 128;
constexpr int COLUMNS = COLUMN_TILES * 8;
constexpr int ROWS = COLUMNS / TERMS;                   // rows of a
constexpr int A_HALF = COLUMNS * 128, A_CHUNK = 2 * A_HALF;
constexpr int SCALE_BYTES = FORMAT == 16 ? 128 : 64;    // of a chunk of 16 rows of b by 128 columns; its codes take 1024
constexpr int B_CHUNK = ROW_TILES * (1024 + SCALE_BYTES);   // of a warp
constexpr int HEAD = 1024;                              // bytes of shared memory for barriers
constexpr int PITCH = TILES * 16 + 4;                   // floats between columns of sums: no two lanes meet in a bank
// Registers of a thread: as all get them at the start, as copying ones keep them, and as the others have them then.
constexpr int REGISTERS = 65536 / (THREADS * MIN_BLOCKS) / 8 * 8, COPYING = 40;
constexpr int LEFT = (REGISTERS * THREADS - COPYING * 128) / MULTIPLIERS / 8 * 8;
constexpr int MULTIPLYING = LEFT < 240 ? LEFT : 240;

// --- a, as wgmma reads it --------------------------------------------------------------------------------------------

struct ArrangeArguments {
    const u8* a;                // (L, M, K)
    u8* image;                  // (L, blocks of ROWS rows, chunks, 2 halves, COLUMNS, 128 bytes), units swizzled
    u64 a_pitch, a_batch;       // bytes between rows, matrices
    int M, K;
};

constexpr int ARRANGERS = 256;

extern "C" __global__ void __launch_bounds__(ARRANGERS) nibblas_arrange(const __grid_constant__ ArrangeArguments p) {
    asm volatile("griddepcontrol.launch_dependents;");
    // A thread writes a unit of 16 bytes: the u-th pair of the four lanes' blocks.
    const int chunks = (p.K + 127) >> 7, blocks = gridDim.y;
    const int index = blockIdx.x * ARRANGERS + threadIdx.x;
    const int u = index & 7, half = index >> 3 & 1, m = (index >> 4) % ROWS, chunk = (index >> 4) / ROWS;
    if (chunk >= chunks) return;
    const int row = blockIdx.y * ROWS + m;
    const u8* const from = p.a + blockIdx.z * p.a_batch + row * p.a_pitch;
    u32 x[4], rest[4];
    #pragma unroll
    for (int t = 0; t < 4; t++) {
        const int k = chunk * 128 + (FORMAT == 16 ? half * 64 + t * 16 : t * 32 + half * 16) + u * 2;
        x[t] = row < p.M && k < p.K ? *(const u32*)(from + k * 2) : 0;
        if (TERMS == 2) split(x[t], rest[t]);
    }
    u8* const to = p.image + ((u64)(blockIdx.z * blocks + blockIdx.y) * chunks + chunk) * A_CHUNK + half * A_HALF;
    const int n = m * TERMS;
    *(uint4*)(to + n * 128 + ((u ^ n) & 7) * 16) = make_uint4(x[0], x[1], x[2], x[3]);
    if (TERMS == 2) *(uint4*)(to + (n + 1) * 128 + ((u ^ (n + 1)) & 7) * 16) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
}

// --- the product -----------------------------------------------------------------------------------------------------

struct Arguments {
    const u8* codes;
    const u8* scales;
    const u8* image;                // of a, as nibblas_arrange writes it
    u8* out;
    const u8* bias;                 // (N,) or null
    const float* global_scale;      // or null
    u64 out_pitch;                  // bytes between rows
    u64 out_batch, codes_batch, scales_batch;   // bytes between matrices
    u32 global_batch;               // floats between global scales
    int M, N, K;
    int bias_type, out_type;
    int blocks;                     // of ROWS rows of a
    int pad;
};

__device__ __forceinline__ void bulk_copy(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void init_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

// The CTA's threads that multiply have come here, and see what the others wrote before.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" :: "n"(MULTIPLIERS) : "memory"); }

// The same of all CTAs of the cluster.
__device__ __forceinline__ void meet_in_cluster() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else meet();
}

// Shared memory at the same address of another CTA of the cluster.
__device__ __forceinline__ u32 in_cta(u32 address, int rank) {
    if (CLUSTER == 1) return address;
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ float4 load_sums(u32 address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
    return x;
}

#define SUM4(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define SUM16(j) SUM4(j), SUM4(j + 1), SUM4(j + 2), SUM4(j + 3)
#define REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_24 REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_32 REGISTERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_48 REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_64 REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_96 REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_128 REGISTERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, " \
    "%109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA(columns, registers, a0, a1, a2, a3, at, ...) asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns \
    "k16.f32.bf16.bf16 {" registers "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at ", 1, 1, 1, 0;" \
    : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

__device__ __forceinline__ void wgmma(float (&c)[COLUMN_TILES][4], const u32 (&a)[4], u64 b) {
#if COLUMN_TILES == 6
    WGMMA(48, REGISTERS_24, 24, 25, 26, 27, 28, SUM16(0), SUM4(4), SUM4(5));
#elif COLUMN_TILES == 8
    WGMMA(64, REGISTERS_32, 32, 33, 34, 35, 36, SUM16(0), SUM16(4));
#elif COLUMN_TILES == 12
    WGMMA(96, REGISTERS_48, 48, 49, 50, 51, 52, SUM16(0), SUM16(4), SUM16(8));
#elif COLUMN_TILES == 16
    WGMMA(128, REGISTERS_64, 64, 65, 66, 67, 68, SUM16(0), SUM16(4), SUM16(8), SUM16(12));
#elif COLUMN_TILES == 24
    WGMMA(192, REGISTERS_96, 96, 97, 98, 99, 100, SUM16(0), SUM16(4), SUM16(8), SUM16(12), SUM16(16), SUM16(20));
#elif COLUMN_TILES == 32
    WGMMA(256, REGISTERS_128, 128, 129, 130, 131, 132, SUM16(0), SUM16(4), SUM16(8), SUM16(12), SUM16(16), SUM16(20),
        SUM16(24), SUM16(28));
#else
#error "COLUMN_TILES: see above"
#endif
}

// What a CTA computes, and where in its shared memory it has barriers and the rings of a and, for each warp, of b.
struct Work {
    int group, block, batch, begin, count, all_chunks, all_tiles;   // begin, count: chunks of K
    u32 full, empty, a_ring, b_ring;
};

// A thread has a's chunks copied, as stages get free.
__device__ __forceinline__ void copy_a(const Arguments& p, const Work& w) {
    const u8* a = p.image + ((u64)(w.batch * p.blocks + w.block) * w.all_chunks + w.begin) * A_CHUNK;
    int slot = 0, phase = 1;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    #pragma unroll 1
    for (int c = 0; c < w.count; c++) {
        if (c >= DEPTH) wait_barrier<false>(w.empty + slot * 8, phase);
        arrive_expecting(w.full + slot * 8, A_CHUNK);
        bulk_copy(w.a_ring + slot * A_CHUNK, a, A_CHUNK, w.full + slot * 8);
        a += A_CHUNK;
        if (++slot == DEPTH) slot = 0, phase ^= 1;
    }
}

// Which of the CTA's tiles is a warp's r-th: a warpgroup's lie beside each other.
__device__ __forceinline__ int tile_of(int warp, int r) { return ((warp >> 2) * ROW_TILES + r) * 4 + (warp & 3); }

__device__ __forceinline__ void multiply_chunks(const Arguments& p, const Work& w, int warp, float (&sum)[ROW_TILES][COLUMN_TILES][4]) {
    const int lane = threadIdx.x & 31;
    // Each lane copies what it reads itself, but of MXFP4's scales.
    const u8* codes[ROW_TILES];
    const u8* scales[ROW_TILES];
    #pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        const int tile = min(w.group * TILES + tile_of(warp, r), w.all_tiles - 1);  // past the last one it is repeated
        const u64 chunk = (u64)tile * w.all_chunks + w.begin;
        codes[r] = p.codes + w.batch * p.codes_batch + chunk * 1024 + lane * 16;
        scales[r] = p.scales + w.batch * p.scales_batch + chunk * SCALE_BYTES + (FORMAT == 32 ? tile * 16 : 0) + lane * 4;
    }
    const u32 ring = w.b_ring + warp * (DEPTH * B_CHUNK);
    const auto copy_b = [&](int c, int slot) {
        if (c < w.count) {
            #pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const u32 to = ring + slot * B_CHUNK + r * (1024 + SCALE_BYTES);
                copy_16(to + lane * 16, codes[r]);
                copy_16(to + lane * 16 + 512, codes[r] + 512);
                if (lane * 4 < SCALE_BYTES) copy_4(to + 1024 + lane * 4, scales[r]);
                codes[r] += 1024;
                scales[r] += SCALE_BYTES;
            }
        }
        commit();
    };
    #pragma unroll 1
    for (int d = 0; d < DEPTH; d++) copy_b(d, d);
    int slot = 0, before = 0, phase = 0;
    #pragma unroll 1
    for (int c = 0; c < w.count; c++) {
        wait_copies<DEPTH - 1>();
        if (FORMAT == 32) __syncwarp();
        wait_barrier<false>(w.full + slot * 8, phase);
        // Swizzled by 128 bytes: 1024 from 8 columns to the next 8. A step of 16 elements of K adds 32 bytes.
        const u64 a = (u64)((w.a_ring + slot * A_CHUNK) >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
        u32 pairs[2][4][4];
        #pragma unroll
        for (int step = 0; step < 2 * ROW_TILES; step++) {
            const int r = step % ROW_TILES, half = step / ROW_TILES;
            const u32 from = ring + slot * B_CHUNK + r * (1024 + SCALE_BYTES);
            u32 word[4], scale;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                : "r"(from + half * 512 + lane * 16));
            if (FORMAT == 16) {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scale) : "r"(from + 1024 + lane * 4));
            } else {
                u16 two;
                asm volatile("ld.shared.u16 %0, [%1];" : "=h"(two) : "r"(from + 1024 + lane * 2));
                scale = two;
            }
            const u32 s = decode_scales(scale, half);
            #pragma unroll
            for (int i = 0; i < 4; i++) decode(word[i], s, pairs[step & 1][i]);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int i = 0; i < 4; i++) wgmma(sum[r], pairs[step & 1][i], a + (half * A_HALF + i * 32) / 16);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (step == 0 && c && lane == 0) arrive(w.empty + before * 8);  // nothing reads the chunk before any more
        }
        if (FORMAT == 32) __syncwarp();
        copy_b(c + DEPTH, slot);
        before = slot;
        if (++slot == DEPTH) slot = 0, phase ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    wait_copies<0>();
}

// A CTA's sums in its shared memory: [COLUMNS][PITCH], the rows of b side by side.
__device__ __forceinline__ void lay_down(float* sums, int warp, const float (&sum)[ROW_TILES][COLUMN_TILES][4]) {
    const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
    #pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        float* const to = sums + t * 2 * PITCH + tile_of(warp, r) * 16 + g;
        #pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) to[(n * 8 + (i & 1)) * PITCH + (i & 2) * 4] = sum[r][n][i];
    }
}

__device__ __forceinline__ void add(float4& total, const float4& x) {
    total.x += x.x;
    total.y += x.y;
    total.z += x.z;
    total.w += x.w;
}

// Four elements of a row of c, from their sums.
__device__ __forceinline__ void write_four(const Arguments& p, const Work& w, int m, int row, float4 total, float global_scale) {
    const u8* const scales = p.scales + w.batch * p.scales_batch;
    u8* const to = p.out + w.batch * p.out_batch + (u64)(w.block * ROWS + m) * p.out_pitch;
    float value[4] = {total.x, total.y, total.z, total.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row + i >= p.N) continue;
        value[i] = finished(value[i], scales, row + i, w.all_chunks) * global_scale;
        if (p.bias) value[i] += to_float(p.bias, row + i, p.bias_type);
    }
    const int size = p.out_type == FP32 ? 4 : 2;
    if (row + 4 > p.N || ((u64)to + row * size) % (4 * size)) {
        #pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + i < p.N) store(to, row + i, p.out_type, value[i]);
    } else if (p.out_type == FP32) {
        *(float4*)(to + row * 4) = make_float4(value[0], value[1], value[2], value[3]);
    } else {
        u16 bits[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) bits[i] = p.out_type == BF16 ? float_to_bf16(value[i]) : float_to_half(value[i]);
        *(uint2*)(to + row * 2) = make_uint2(bits[0] | (u32)bits[1] << 16, bits[2] | (u32)bits[3] << 16);
    }
}

// Adds up the sums of the cluster's CTAs, each CTA its share of c's rows; a thread has several elements on their way.
__device__ __forceinline__ void write_rows(const Arguments& p, const Work& w, u32 sums, int rank, float global_scale) {
    constexpr int QUADS = TILES * 4, AT_ONCE = 4;
    const int M = min(p.M - w.block * ROWS, ROWS), first = rank * M / CLUSTER;
    const int count = ((rank + 1) * M / CLUSTER - first) * QUADS;
    for (int base = threadIdx.x; base < count; base += AT_ONCE * MULTIPLIERS) {
        float4 total[AT_ONCE] = {};
        #pragma unroll
        for (int s = 0; s < CLUSTER; s++) {
            #pragma unroll
            for (int term = 0; term < TERMS; term++) {
                float4 part[AT_ONCE];
                #pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    const int e = min(base + j * MULTIPLIERS, count - 1);
                    part[j] = load_sums(in_cta(sums + (((first + e / QUADS) * TERMS + term) * PITCH + e % QUADS * 4) * 4, s));
                }
                #pragma unroll
                for (int j = 0; j < AT_ONCE; j++) add(total[j], part[j]);
            }
        }
        #pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int e = base + j * MULTIPLIERS, row = w.group * TILES * 16 + e % QUADS * 4;
            if (e < count && row < p.N) write_four(p, w, first + e / QUADS, row, total[j], global_scale);
        }
    }
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, MIN_BLOCKS) nibblas_linear_wide(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(1024) u8 shared[];
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // the compiler then knows that it is uniform
    const int rank = blockIdx.x % CLUSTER, index = blockIdx.x / CLUSTER;
    Work w;
    w.group = index / p.blocks;     // CTAs that read the same weights run at the same time
    w.block = index % p.blocks;
    w.batch = blockIdx.y;
    w.all_tiles = (p.N + 15) >> 4;
    w.all_chunks = (p.K + 127) >> 7;
    w.begin = rank * w.all_chunks / CLUSTER;
    w.count = (rank + 1) * w.all_chunks / CLUSTER - w.begin;
    // In place of the rings, once all chunks are done, are the sums.
    w.full = shared_address(shared);
    w.empty = w.full + DEPTH * 8;
    w.a_ring = w.full + HEAD;
    w.b_ring = w.a_ring + DEPTH * A_CHUNK;
    if (threadIdx.x == 0) {
        #pragma unroll
        for (int s = 0; s < DEPTH; s++) {
            init_barrier(w.full + s * 8, 1);
            init_barrier(w.empty + s * 8, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COPYING));
        if (threadIdx.x == MULTIPLIERS) copy_a(p, w);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(MULTIPLYING));
    const float global_scale = p.global_scale ? p.global_scale[w.batch * p.global_batch] : 1.0f;
    float sum[ROW_TILES][COLUMN_TILES][4] = {};
    multiply_chunks(p, w, warp, sum);
    float* const sums = (float*)(shared + HEAD);
    meet();
    lay_down(sums, warp, sum);
    meet_in_cluster();
    write_rows(p, w, shared_address(sums), rank, global_scale);
    if (CLUSTER > 1) meet_in_cluster();  // a CTA's shared memory is there until all have read it
}
