// c = a @ b.T for few rows of a: b (N, K) FP4 as mma operand A, a (M, K) as operand B, the product transposed.
//
// A warp takes ROW_TILES tiles of 16 rows of b and walks along K in chunks of 128 columns. DEPTH chunks are on their way
// from memory to a ring in shared memory, in which each lane writes and reads 36 or 34 bytes of its own: a ring of
// registers would make a warp wait for its newest load, as all of them count on one scoreboard. K is split over the
// warps of a CTA and the CTAs of a cluster; their sums meet in the shared memory of the CTA that writes the rows, and
// are added there in a fixed order.
//
// Set by the compiler's options:
// FORMAT       16 or 32, the block size: NVFP4 or MXFP4 (cuda_linear_sm90.h)
// TERMS        bf16 terms an element of a is split into: 1 for bf16, 2 for fp16 (the split is exact)
// COLUMN_TILES tiles of 8 columns of c.T, TERMS columns for a row of a
// ROW_WARPS, K_WARPS, CLUSTER, ROW_TILES, DEPTH as above
// MIN_BLOCKS   CTAs that must fit on a multiprocessor
// ONE_CHAIN    set where a column's sum must not depend on how many columns there are
// DEPENDENT    set where a grid may start before the one before it has ended: until then it reads nothing but b

constexpr int WARPS = ROW_WARPS * K_WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int SLICES = CLUSTER * K_WARPS;
constexpr int TILES = ROW_WARPS * ROW_TILES;            // tiles of a CTA, shared by its cluster
constexpr int OWNED = (TILES + CLUSTER - 1) / CLUSTER;  // tiles whose rows one CTA writes
constexpr int LANE_SCALES = FORMAT == 16 ? 4 : 2;       // bytes of scales of a lane in a chunk
#ifdef WARPGROUPS
constexpr int HEAD = 1024;                              // bytes of shared memory for barriers
#else
constexpr int HEAD = 128;
#endif
constexpr int ROWS = COLUMN_TILES * 8 / TERMS;           // rows of a that a CTA takes: its blockIdx.z-th so many
constexpr int STAGE = 1024 + 32 * LANE_SCALES;          // bytes of a chunk of a tile

struct Arguments {
    const uint4* codes;
    const unsigned char* scales;
    const unsigned char* a;
    unsigned char* out;
    const unsigned char* bias;      // (N,) or null
    const float* global_scale;      // or null
    u64 a_pitch, out_pitch;         // bytes between rows
    u64 a_batch, out_batch, codes_batch, scales_batch;  // bytes between matrices
    u32 global_batch;               // floats between global scales
    int M, N, K;
    int bias_type, out_type;
};

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

#ifdef DEPENDENT
constexpr bool IS_DEPENDENT = true;
#else
constexpr bool IS_DEPENDENT = false;
#endif

__device__ __forceinline__ void let_next_grid_start() {
    if (IS_DEPENDENT) asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ void wait_for_grid_before() {
    if (IS_DEPENDENT) asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Partial sums of a lane to the CTA that adds them up; `arrived` there counts the bytes.
__device__ __forceinline__ void send(u32 to, u32 arrived, u32 rank, const float (&sum)[4]) {
    if (CLUSTER > 1) {
        asm volatile("{.reg .b32 to, arrived; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 arrived, %1, %2;"
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [arrived];}"
            :: "r"(to), "r"(arrived), "r"(rank), "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]) : "memory");
    } else {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
            :: "r"(to), "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]) : "memory");
    }
}

// Where the 16 bytes of columns 8u..8u+7 of a chunk lie: the four lanes of a row read one run of 64 bytes at a time.
__device__ __forceinline__ int unit(int u) {
    return FORMAT == 16 ? (u & 8) | (u & 1) << 2 | (u >> 1 & 3) : (u & 3) << 2 | u >> 2;
}

// The barrier on which partial sums arrive, with the bytes that it waits for.
__device__ __forceinline__ void expect_sums(u32 arrived, int rank) {
    if (threadIdx.x == 0) {
        const int owned = (TILES - rank + CLUSTER - 1) / CLUSTER;
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(arrived) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
            :: "r"(arrived), "r"(SLICES * owned * COLUMN_TILES * 512) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
}

__device__ __forceinline__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Sums of a lane over its slice, of a tile of the CTA and a column tile, to the CTA that writes the tile's rows.
__device__ __forceinline__ void send_sum(u32 partial, u32 arrived, int slice, int tile, int column_tile, const float (&sum)[4]) {
    const u32 slot = (slice * OWNED + tile / CLUSTER) * COLUMN_TILES + column_tile;
    send(partial + slot * 512 + (threadIdx.x & 31) * 16, arrived, tile % CLUSTER, sum);
}

// Adds what arrived at [SLICES][OWNED][COLUMN_TILES][32 lanes] float4, slice after slice, and writes the rows.
__device__ __forceinline__ void write_rows(const Arguments& p, const unsigned char* partial, u32 arrived, int group, int rank, int batch, float global_scale) {
    const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3, first_m = blockIdx.z * ROWS;
    if (CLUSTER > 1) wait_barrier<true>(arrived, 0);
    else __syncthreads();
    for (int e = threadIdx.x; e < OWNED * COLUMN_TILES * 32; e += THREADS) {
        const int n_tile = (e >> 5) % COLUMN_TILES, in_group = (e >> 5) / COLUMN_TILES * CLUSTER + rank;
        if (in_group >= TILES) continue;
        float total[4] = {};
        #pragma unroll
        for (int s = 0; s < SLICES; s++) {
            const float4 part = *(const float4*)(partial + (s * (OWNED * COLUMN_TILES * 32) + e) * 16);
            total[0] += part.x;
            total[1] += part.y;
            total[2] += part.z;
            total[3] += part.w;
        }
        #pragma unroll
        for (int i = 0; i < 4; i += TERMS) {
            const int row = (group * TILES + in_group) * 16 + g + (i & 2) * 4;
            const int m = first_m + (TERMS == 1 ? n_tile * 8 + t * 2 + (i & 1) : n_tile * 4 + t);
            if (row >= p.N || m >= p.M) continue;
            float value = TERMS == 1 ? total[i] : total[i] + total[i + TERMS - 1];
            value = finished(value, p.scales + batch * p.scales_batch, row, (p.K + 127) >> 7) * global_scale;
            if (p.bias) value += to_float(p.bias, row, p.bias_type);
            store(p.out + batch * p.out_batch + m * p.out_pitch, row, p.out_type, value);
        }
    }
}

#ifndef WARPGROUPS

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, MIN_BLOCKS) nibblas_linear(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(128) unsigned char shared[];
    let_next_grid_start();
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // the compiler then knows that it is uniform
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int group = blockIdx.x / CLUSTER, batch = blockIdx.y;
    const int all_tiles = (p.N + 15) >> 4, all_chunks = (p.K + 127) >> 7;
    const int M = min(p.M - (int)blockIdx.z * ROWS, ROWS);
    const unsigned char* const a = p.a + batch * p.a_batch + blockIdx.z * ROWS * p.a_pitch;

    const int row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const int begin = rank * all_chunks / CLUSTER, chunks = (rank + 1) * all_chunks / CLUSTER - begin;
    const int first = k_warp * chunks / K_WARPS, count = (k_warp + 1) * chunks / K_WARPS - first;

    // Shared memory: a barrier; [SLICES][OWNED][COLUMN_TILES][32 lanes] float4 sums; rings; a.
    const u32 arrived = shared_address(shared), partial = arrived + HEAD;
    const u32 ring = partial + SLICES * OWNED * COLUMN_TILES * 512 + warp * (DEPTH * ROW_TILES * STAGE);
    unsigned char* const a_shared = shared + HEAD + SLICES * OWNED * COLUMN_TILES * 512 + WARPS * DEPTH * ROW_TILES * STAGE;

    // Rows of a, split into terms, to shared memory [M * TERMS][chunks][16 units][8] bf16, zero past K. They are asked
    // for before the codes, which would keep them waiting.
    const int a_pitch = chunks * 256 + 64, units = max(chunks * 16, 1);
    const int rows_a_step = THREADS / units, units_a_step = THREADS - rows_a_step * units;
    int m = threadIdx.x / units, u = threadIdx.x - m * units;
    if (!chunks) m = M;
    constexpr int BATCH = COLUMN_TILES == 1 ? 4 : 8;
    uint4 x[BATCH];
    unsigned char* to[BATCH];
    const auto read_a = [&]() {
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int k = begin * 128 + u * 8;
            to[i] = m < M ? a_shared + m * TERMS * a_pitch + (u >> 4) * 256 + unit(u & 15) * 16 : nullptr;
            x[i] = make_uint4(0, 0, 0, 0);
            if (m < M && k < p.K) x[i] = *(const uint4*)(a + m * p.a_pitch + k * 2);
            m += rows_a_step;
            u += units_a_step;
            if (u >= units) u -= units, m++;
        }
    };
    const auto write_a = [&]() {
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (!to[i]) continue;
            if (TERMS == 2) {
                uint4 rest;
                split(x[i].x, rest.x);
                split(x[i].y, rest.y);
                split(x[i].z, rest.z);
                split(x[i].w, rest.w);
                *(uint4*)(to[i] + a_pitch) = rest;
            }
            *(uint4*)to[i] = x[i];
        }
    };
    if (!IS_DEPENDENT) read_a();

    const unsigned char* codes[ROW_TILES];
    const unsigned char* scales[ROW_TILES];
    #pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        // Past the last tile a warp repeats it, and its sums are not stored.
        const int tile = min(group * TILES + row_warp * ROW_TILES + r, all_tiles - 1);
        const u64 chunk = (u64)tile * all_chunks + begin + first;
        codes[r] = (const unsigned char*)p.codes + batch * p.codes_batch + chunk * 1024 + lane * 16;
        scales[r] = p.scales + batch * p.scales_batch + chunk * (32 * LANE_SCALES) + (lane & (8 * LANE_SCALES - 1)) * 4;
        if (FORMAT == 32) scales[r] += tile * 16;
    }
    int wanted = 0;
    u32 fill = ring;
    const auto copy_chunk = [&]() {
        if (wanted < count) {
            #pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const u32 to = fill + r * STAGE;
                copy_16(to + lane * 16, codes[r]);
                copy_16(to + lane * 16 + 512, codes[r] + 512);
                if (FORMAT == 16 || lane < 16) copy_4(to + 1024 + lane * 4, scales[r]);
                codes[r] += 1024;
                scales[r] += 32 * LANE_SCALES;
            }
        }
        wanted++;
        fill += ROW_TILES * STAGE;
        if (fill == ring + DEPTH * ROW_TILES * STAGE) fill = ring;
    };

    #pragma unroll 1
    for (int d = 0; d < DEPTH; d++) {
        copy_chunk();
        commit();
    }

    if (IS_DEPENDENT) {
        wait_for_grid_before();
        read_a();
    }
    write_a();
    while (m < M) {
        read_a();
        write_a();
    }
    if (CLUSTER > 1) {
        expect_sums(arrived, rank);
        arrive_in_cluster();
    }
    const float global_scale = p.global_scale ? p.global_scale[batch * p.global_batch] : 1.0f;

    const int columns = M * TERMS;
    const unsigned char* column[COLUMN_TILES];
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
        // Past the last column a lane repeats it, and its sums are not stored.
        column[n] = a_shared + min(n * 8 + g, columns - 1) * a_pitch + first * 256 + t * 16;
    }
    // Two chains of sums where one would make the tensor core wait for itself.
#ifdef ONE_CHAIN
    constexpr int CHAINS = 1;
#else
    constexpr int CHAINS = COLUMN_TILES * ROW_TILES < 3 ? 2 : 1;
#endif
    float sum[CHAINS][ROW_TILES][COLUMN_TILES][4] = {};

    __syncthreads();

    u32 stage = ring;
    #pragma unroll 1
    for (int c = 0; c < count; c++) {
        wait_copies<DEPTH - 1>();
        if (FORMAT == 32) __syncwarp();  // a lane reads half of what its neighbour copied
        uint4 word[ROW_TILES][2];
        u32 scale[ROW_TILES];
        #pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            const u32 from = stage + r * STAGE;
            #pragma unroll
            for (int half = 0; half < 2; half++)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                    : "=r"(word[r][half].x), "=r"(word[r][half].y), "=r"(word[r][half].z), "=r"(word[r][half].w)
                    : "r"(from + half * 512 + lane * 16));
            if (FORMAT == 16) {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scale[r]) : "r"(from + 1024 + lane * 4));
            } else {
                unsigned short pair;
                asm volatile("ld.shared.u16 %0, [%1];" : "=h"(pair) : "r"(from + 1024 + lane * 2));
                scale[r] = pair;
            }
        }
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 s[ROW_TILES];
            #pragma unroll
            for (int r = 0; r < ROW_TILES; r++) s[r] = decode_scales(scale[r], half);
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                uint4 x[COLUMN_TILES];
                #pragma unroll
                for (int n = 0; n < COLUMN_TILES; n++) x[n] = *(const uint4*)(column[n] + half * 128 + i * 64);
                #pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    u32 pairs[4];
                    decode(i ? word[r][half].z : word[r][half].x, s[r], pairs);
                    #pragma unroll
                    for (int n = 0; n < COLUMN_TILES; n++) mma(sum[0][r][n], pairs, x[n].x, x[n].y);
                    decode(i ? word[r][half].w : word[r][half].y, s[r], pairs);
                    #pragma unroll
                    for (int n = 0; n < COLUMN_TILES; n++) mma(sum[CHAINS - 1][r][n], pairs, x[n].z, x[n].w);
                }
            }
        }
        #pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) column[n] += 256;
        if (FORMAT == 32) __syncwarp();
        copy_chunk();
        commit();
        stage += ROW_TILES * STAGE;
        if (stage == ring + DEPTH * ROW_TILES * STAGE) stage = ring;
    }

    // A CTA's shared memory may be written once it has begun to run and set up its barrier.
    if (CLUSTER > 1) wait_for_cluster();
    #pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        #pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
            if (CHAINS == 2)
                #pragma unroll
                for (int i = 0; i < 4; i++) sum[0][r][n][i] += sum[1][r][n][i];
            send_sum(partial, arrived, rank * K_WARPS + k_warp, row_warp * ROW_TILES + r, n, sum[0][r][n]);
        }
    }
    write_rows(p, shared + HEAD, arrived, group, rank, batch, global_scale);
}

#else

// For more columns: wgmma, which reads a from shared memory by itself and leaves the issue slots to the decoding.
// A warpgroup takes ROW_TILES bands of 64 rows, a tile a warp; all warps of a CTA take the same chunks. Shared memory
// holds DEPTH + 2 chunks of a as wgmma takes them: [2 halves][columns][8 units of 4 lanes' pairs], units swizzled.

constexpr int COLUMNS = COLUMN_TILES * 8;
constexpr int A_HALF = COLUMNS * 128;
constexpr int A_CHUNK = 2 * A_HALF;
constexpr int A_SLOTS = DEPTH + 2;
constexpr int WARP_ROWS = (ROWS + WARPS - 1) / WARPS;
// Where registers are short: fewer words at a time, and no product is under way from a chunk into the next.
constexpr bool TIGHT = COLUMN_TILES * ROW_TILES > 8 || TERMS == 2;
constexpr int BATCH = TIGHT ? 2 : 4;

#define SUM4(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define SUM16(j) SUM4(j), SUM4(j + 1), SUM4(j + 2), SUM4(j + 3)
#define PAIRS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

__device__ __forceinline__ void wgmma(float (&c)[COLUMN_TILES][4], const u32 (&a)[4], u64 b) {
    if constexpr (COLUMN_TILES == 2) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
            "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;" : SUM4(0), SUM4(1) : PAIRS, "l"(b));
    } else if constexpr (COLUMN_TILES == 4) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
            "%11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;" : SUM16(0) : PAIRS, "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
            "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;" : SUM16(0), SUM16(4) : PAIRS, "l"(b));
    }
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, MIN_BLOCKS) nibblas_linear(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    let_next_grid_start();
    const int lane = threadIdx.x & 31;
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int group = blockIdx.x / CLUSTER, batch = blockIdx.y;
    const int all_tiles = (p.N + 15) >> 4, all_chunks = (p.K + 127) >> 7;
    const int M = min(p.M - (int)blockIdx.z * ROWS, ROWS);
    const unsigned char* const a = p.a + batch * p.a_batch + blockIdx.z * ROWS * p.a_pitch;
    const int begin = rank * all_chunks / CLUSTER, count = (rank + 1) * all_chunks / CLUSTER - begin;

    // Shared memory: barriers; a; rings. In their place, once all CTAs of the cluster have used them, the sums.
    const u32 arrived = shared_address(shared), base = arrived + HEAD;
    const u32 a_ring = base, ring = base + A_SLOTS * A_CHUNK + warp * (DEPTH * ROW_TILES * STAGE);
    const auto tile_of = [&](int r) { return ((warp >> 2) * ROW_TILES + r) * 4 + (warp & 3); };

    const unsigned char* codes[ROW_TILES];
    const unsigned char* scales[ROW_TILES];
    #pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        const int tile = min(group * TILES + tile_of(r), all_tiles - 1);
        const u64 chunk = (u64)tile * all_chunks + begin;
        codes[r] = (const unsigned char*)p.codes + batch * p.codes_batch + chunk * 1024 + lane * 16;
        scales[r] = p.scales + batch * p.scales_batch + chunk * (32 * LANE_SCALES) + (lane & (8 * LANE_SCALES - 1)) * 4;
        if (FORMAT == 32) scales[r] += tile * 16;
    }
    const auto copy_chunk = [&](int c, u32 fill) {
        if (c < count) {
            #pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const u32 to = fill + r * STAGE;
                copy_16(to + lane * 16, codes[r]);
                copy_16(to + lane * 16 + 512, codes[r] + 512);
                if (FORMAT == 16 || lane < 16) copy_4(to + 1024 + lane * 4, scales[r]);
                codes[r] += 1024;
                scales[r] += 32 * LANE_SCALES;
            }
        }
    };

    // Of a row's chunk a lane copies pairs lane and lane + 32: the t-th of a unit, which is a word's first or second.
    const int t = FORMAT == 16 ? lane >> 3 : lane >> 4, unit = FORMAT == 16 ? lane & 7 : lane & 15;
    const int m = warp * TERMS;
    static_assert(WARPS % 4 == 0, "the swizzles of a warp's rows differ in one bit or not at all");
    const u32 a_offset = (unit >> 3) * A_HALF + m * 128 + ((unit ^ m) & 7) * 16 + t * 4;
    const u32 rest_offset = (unit >> 3) * A_HALF + (m + 1) * 128 + ((unit ^ (m + 1)) & 7) * 16 + t * 4;
    constexpr u32 A_NEXT = FORMAT == 16 ? A_HALF : 8;  // from pair lane to pair lane + 32
    const unsigned char* row[WARP_ROWS];
    #pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) row[i] = a + min(warp + i * WARPS, M - 1) * p.a_pitch + begin * 256 + lane * 4;
    int left = p.K - begin * 128 - lane * 2;
    const auto copy_a = [&](int c, u32 to) {
        if (c < count) {
            const int bytes[2] = {left > 0 ? 4 : 0, left > 64 ? 4 : 0};  // of the rest zeros are written
            #pragma unroll
            for (int i = 0; i < WARP_ROWS; i++) {
                if (ROWS % WARPS && warp + i * WARPS >= ROWS) continue;
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 there = to + half * A_NEXT + i * (WARPS * TERMS * 128);
                    const u32 flip = (i * WARPS * TERMS & 7) * 16;
                    if (TERMS == 1) {
                        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                            :: "r"(there + (a_offset ^ flip)), "l"(row[i] + half * 128), "r"(bytes[half]) : "memory");
                    } else {
                        u32 x = bytes[half] ? *(const u32*)(row[i] + half * 128) : 0, rest;
                        split(x, rest);
                        asm volatile("st.shared.u32 [%0], %1;" :: "r"(there + (a_offset ^ flip)), "r"(x) : "memory");
                        asm volatile("st.shared.u32 [%0], %1;" :: "r"(there + (rest_offset ^ flip)), "r"(rest) : "memory");
                    }
                }
                row[i] += 256;
            }
            left -= 128;
        }
    };

    // Of a chunk's part of a every warp copies some rows: its barrier counts the warps that have done so.
    const u32 filled = arrived + 16;
    if (threadIdx.x == 0) {
        #pragma unroll
        for (int s = 0; s < A_SLOTS; s++)
            asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(filled + s * 8), "r"(WARPS) : "memory");
    }
    if (CLUSTER > 1) expect_sums(arrived, rank);
    if (IS_DEPENDENT) {
        #pragma unroll 1
        for (int d = 0; d < DEPTH; d++) copy_chunk(d, ring + d * ROW_TILES * STAGE);
        wait_for_grid_before();
    }
    #pragma unroll 1
    for (int d = 0; d < DEPTH; d++) {
        if (!IS_DEPENDENT) copy_chunk(d, ring + d * ROW_TILES * STAGE);
        copy_a(d, a_ring + d * A_CHUNK);
        commit();
    }
    const float global_scale = p.global_scale ? p.global_scale[batch * p.global_batch] : 1.0f;
    __syncthreads();
    const auto tell_filled = [&](int slot) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(filled + slot * 8) : "memory");
    };

    float sum[ROW_TILES][COLUMN_TILES][4] = {};
    u32 stage = ring;
    int slot = 0, next_slot = 1 % A_SLOTS, fill_slot = DEPTH % A_SLOTS, phase = 0;
    wait_copies<DEPTH - 1>();
    tell_filled(0);
    #pragma unroll 1
    for (int c = 0; c < count; c++) {
        wait_barrier<false>(filled + slot * 8, phase);
        // Swizzled by 128 bytes: 1024 from 8 columns to the next 8. A step of 16 elements of K adds 32 bytes.
        const u64 a_stage = (u64)((a_ring + slot * A_CHUNK) >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
        u32 pairs[2][BATCH][4];
        #pragma unroll
        for (int step = 0; step < 8 / BATCH * ROW_TILES; step++) {
            const int r = step % ROW_TILES, first = step / ROW_TILES * BATCH;  // tile, word
            const u32 from = stage + r * STAGE;
            u32 word[BATCH], scale;
            if (BATCH == 4) {
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(word[0]), "=r"(word[1]), "=r"(word[2 % BATCH]),
                    "=r"(word[3 % BATCH]) : "r"(from + first * 128 + lane * 16));
            } else {
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1])
                    : "r"(from + (first & 4) * 128 + lane * 16 + (first & 2) * 4));
            }
            if (FORMAT == 16) {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scale) : "r"(from + 1024 + lane * 4));
            } else {
                unsigned short two;
                asm volatile("ld.shared.u16 %0, [%1];" : "=h"(two) : "r"(from + 1024 + lane * 2));
                scale = two;
            }
            const u32 s = decode_scales(scale, first >= 4);
            #pragma unroll
            for (int i = 0; i < BATCH; i++) decode(word[i], s, pairs[step & 1][i]);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int i = 0; i < BATCH; i++) {
                wgmma(sum[r], pairs[step & 1][i], a_stage + ((first >> 2) * A_HALF + ((first & 3) + i) * 32) / 16);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (TIGHT && step == 8 / BATCH * ROW_TILES - 1) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            else asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (step == 0) {
                // This warp has no more use for the chunk before this one, and, as all have told of this chunk, nobody
                // for the chunk before that, whose slot is filled again.
                wait_copies<DEPTH - 2>();
                tell_filled(next_slot);
                copy_a(c + DEPTH, a_ring + fill_slot * A_CHUNK);
            }
        }
        if (FORMAT == 32) __syncwarp();
        copy_chunk(c + DEPTH, stage);
        commit();
        stage = stage == ring + (DEPTH - 1) * ROW_TILES * STAGE ? ring : stage + ROW_TILES * STAGE;
        slot = next_slot;
        phase ^= slot == 0;
        next_slot = next_slot == A_SLOTS - 1 ? 0 : next_slot + 1;
        fill_slot = fill_slot == A_SLOTS - 1 ? 0 : fill_slot + 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");

    wait_copies<0>();
    if (CLUSTER > 1) {
        arrive_in_cluster();
        wait_for_cluster();
    } else {
        __syncthreads();
    }
    #pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
        #pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) send_sum(base, arrived, rank, tile_of(r), n, sum[r][n]);
    write_rows(p, shared + HEAD, arrived, group, rank, batch, global_scale);
}

#endif
