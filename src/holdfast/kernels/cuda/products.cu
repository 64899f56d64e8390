// A product of matrices with the MLP's activation at its end, for Hopper's matrix units (sm_90a).
//
//   forward    inner = a bᵀ + bias,  active = act(inner)                       a [M, K], b [N, K]
//   backward   d = (a b) · act'(inner),  active = act(inner),  sums of d        a [M, K], b [K, N]
//
// A product alone leaves a pass over [M, N] for the activation to read and write again. Here sixteen warps share a
// processor and none waits for another's kind of work:
//
//   copies     one warp asks the copy engine for the next pieces of a and b, three ahead; the processors of a cluster
//              take tiles below each other, so that each fetches a part of b's piece and sends it to all
//   values     seven warps take a finished tile from shared memory, work out the activation and write the results, a
//              row's 512 bytes at a time
//   products   two groups of four, 64 rows of a tile of 128 x 256 each, accumulate in registers, leave the tile in
//              shared memory as bf16 and go on with the next one
//
// Sums of columns are added in one order: over a warp's rows, over seven warps, and one partial row a tile is left to
// the caller. M is free; N and K are multiples of 256 and 64 (see products.py).
//
// Compiled at run time with BACKWARD and QUICK defined as 0 or 1.

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 3, CLUSTER = 2;
constexpr int VALUE_WARPS = 7;
constexpr u32 A_BYTES = ROWS * DEPTH * 2, B_BYTES = COLUMNS * DEPTH * 2, TILE_BYTES = ROWS * COLUMNS * 2;
constexpr u32 AT_A = 0, AT_B = AT_A + STAGES * A_BYTES, AT_TILE = AT_B + STAGES * B_BYTES;
constexpr u32 AT_EXTRA = AT_TILE + TILE_BYTES;  // forward: the bias; backward: a tile's sums, seven warps, two turns
constexpr int VALUES = 32 * VALUE_WARPS, THREADS = 256 + 32 + VALUES;
constexpr int AHEAD = (64 + 2 * VALUE_WARPS - 1) / (2 * VALUE_WARPS);  // half of a warp's rows of half a tile
constexpr int TILE_THERE = 1, TILE_READ = 3;    // barriers of a tile's upper half; the lower half's are the next ones
constexpr int BIAS_STRIDE = 68;                 // of the 64 columns that a thread of four holds: no two in one bank

// -- the card's own instructions --------------------------------------------------------------------------------------

// The same place in one of the cluster's processors, and an arrival there.
__device__ __forceinline__ u32 place_in(u32 at, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_here(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_to_all(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"((unsigned short)((1 << CLUSTER) - 1)) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void group_wait(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void group_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

#define EIGHT(v, i) \
    "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3]), "+f"(v[i + 4]), "+f"(v[i + 5]), "+f"(v[i + 6]), \
        "+f"(v[i + 7])
#define HALF(v, i) \
    EIGHT(v, i), EIGHT(v, i + 8), EIGHT(v, i + 16), EIGHT(v, i + 24), EIGHT(v, i + 32), EIGHT(v, i + 40), \
        EIGHT(v, i + 48), EIGHT(v, i + 56)

// sum (+)= a b, 64 x 256 x 16, in two halves: one would not fit into the registers that a thread starts with.
template <int FIRST>
__device__ __forceinline__ void multiply_half(float (&sum)[128], u64 a, u64 b, u32 add) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, add, 1, 1, 0, %67;\n"
        "}\n"
        : HALF(sum, FIRST)
        : "l"(a), "l"(b), "r"(add), "n"(BACKWARD));
}

__device__ __forceinline__ void multiply(float (&sum)[128], u64 a, u64 b, u32 add) {
    multiply_half<0>(sum, a, b, add);
    multiply_half<64>(sum, a, b + (B_BYTES / 2 >> 4), add);
}

// -- the activation ---------------------------------------------------------------------------------------------------

// What x is multiplied by, and the activation's derivative. The normal distribution's share below x is 1 / (1 + 2^-l),
// with l, the base-two logarithm of the odds, an odd polynomial: GELU is 1.5e-5 at most from the true one, and as a
// bf16 number the nearest one for 97 of 100 inputs, its neighbour for the others.
__device__ __forceinline__ float gate_of(float x, float& slope) {
#if QUICK
    const float gate = inverse(1.0f + power_of_two(x * -2.4554669595930156f));
    slope = fmaf(1.702f * x * gate, 1.0f - gate, gate);
#else
    const float square = x * x;
    float odds = fmaf(square, -1.73053587e-6f, 5.26110491e-5f);
    odds = fmaf(square, odds, 6.26041312e-4f);
    odds = fmaf(square, odds, -1.05918590e-1f);
    odds = fmaf(square, odds, -2.30159175f);
    const float gate = inverse(1.0f + power_of_two(x * odds));
    slope = fmaf(x * power_of_two(square * -0.7213475204444817f), 0.3989422804014327f, gate);
#endif
    return gate;
}

// Tiles in the order in which they are taken: a band of rows goes through all columns, so that a comes from memory once
// and from the cache after.
__device__ __forceinline__ void place_of(int tile, int high, int across, int& down, int& right) {
    constexpr int BAND = 44 / CLUSTER;
    const int band = tile / (BAND * across), rows = min(BAND, high - BAND * band), inside = tile - band * BAND * across;
    right = inside / rows;
    down = BAND * band + inside % rows;
}

// A row of what went into the activation: 0 where there is none.
__device__ __forceinline__ uint4 fetched(const unsigned short* from, bool there) {
    uint4 row = make_uint4(0, 0, 0, 0);
    if (there) row = __ldcs((const uint4*)from);
    return row;
}

// -- the kernel -------------------------------------------------------------------------------------------------------

// forward: first = inner (or null, where nothing is learned from it), second = active, side = bias [N] (bf16).
// backward: first = d, second = active, side = inner.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
activation_product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, void* first, void* second,
                   const void* side, float* sums, int M, int N, int K) {
    extern __shared__ char raw[];
    const u32 base = (address_of(raw) + 1023) & ~1023u;
    char* const memory = raw + (base - address_of(raw));
    __shared__ alignas(8) u64 full[STAGES], empty[STAGES];
    __shared__ int left_sums[2];
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int across = N / COLUMNS, pieces = K / DEPTH;
    const int tiles = (M + CLUSTER * ROWS - 1) / (CLUSTER * ROWS) * across;  // of a cluster: tiles below each other
    const int mine = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER, high = tiles / across;

    u32 at_full = address_of(full), at_empty = address_of(empty);
    asm volatile("" : "+r"(at_full), "+r"(at_empty));  // worked out once

    if (threadIdx.x == 0) {
        left_sums[0] = left_sums[1] = 0;
        for (int i = 0; i < STAGES; i++) {
            barrier_init(at_full + 8 * i, 1);
            barrier_init(at_empty + 8 * i, 2 * CLUSTER);
        }
        barriers_are_there();
    }
#if !BACKWARD
    for (int i = threadIdx.x; i < N; i += THREADS) {
        const int inside = i % COLUMNS;  // column 8 j + 2 q + e is the 2 j + e-th of those who hold q
        const int at = i / COLUMNS * 4 * BIAS_STRIDE + inside % 8 / 2 * BIAS_STRIDE + inside / 8 * 2 + inside % 2;
        ((float*)(memory + AT_EXTRA))[at] = __uint_as_float((u32)((const unsigned short*)side)[i] << 16);
    }
#endif
    __syncthreads();
    cluster_sync();

    if (threadIdx.x < 32 + VALUES) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
        if (threadIdx.x < 32) {  // copies
            if (lane == 0) {
                int stage = 0;
                u32 turn = 1;
                for (int tile = mine; tile < tiles; tile += clusters) {
                    int down, right;
                    place_of(tile, high, across, down, right);
                    const int row = (down * CLUSTER + (int)rank) * ROWS, column = right * COLUMNS;
                    for (int k = 0; k < pieces; k++) {
                        const u32 arrived = at_full + 8 * stage;
                        const u32 part = base + AT_B + stage * B_BYTES + rank * (B_BYTES / CLUSTER);
                        const int from = column + (int)rank * (COLUMNS / CLUSTER);
                        barrier_wait(at_empty + 8 * stage, turn);
                        barrier_expect(arrived, A_BYTES + B_BYTES);
                        copy_here(base + AT_A + stage * A_BYTES, &a, k * DEPTH, row, arrived);
#if BACKWARD
#pragma unroll
                        for (int i = 0; i < COLUMNS / CLUSTER / 64; i++)
                            copy_to_all(part + i * (B_BYTES / 4), &b, from + 64 * i, k * DEPTH, arrived);
#else
                        copy_to_all(part, &b, k * DEPTH, from, arrived);
#endif
                        if (++stage == STAGES) stage = 0, turn ^= 1;
                    }
                }
            }
        } else {  // values
            const int first_row = threadIdx.x / 32 - 1;
            group_arrive(TILE_READ, 128 + VALUES);
            group_arrive(TILE_READ + 1, 128 + VALUES);
            const u64 stride = (u64)VALUE_WARPS * N;  // between a warp's rows
#if BACKWARD
            int turn = 0;
            uint4 inner[AHEAD];  // rows to come, asked for while the ones before are worked on
            {
                int down, right;
                place_of(mine, high, across, down, right);
                const int top = (CLUSTER * down + (int)rank) * ROWS + first_row;
                const u64 place = (u64)top * N + right * COLUMNS + lane * 8;
                const unsigned short* const from = (const unsigned short*)side + place;
#pragma unroll
                for (int i = 0; i < AHEAD; i++) inner[i] = fetched(from + i * stride, top + VALUE_WARPS * i < M);
            }
#endif
            for (int tile = mine; tile < tiles; tile += clusters) {
                const bool last = tile + clusters >= tiles;
                int down, right;
                place_of(tile, high, across, down, right);
                down = CLUSTER * down + (int)rank;
#if BACKWARD
                float total[8] = {};
                int next_down = down, next_right = right;
                if (!last) {
                    place_of(tile + clusters, high, across, next_down, next_right);
                    next_down = CLUSTER * next_down + (int)rank;
                }
#endif
#pragma unroll 1
                for (int half = 0; half < 2; half++) {
                    const int top = down * ROWS + 64 * half, there = min(64, M - top) - first_row;
                    const u64 place = (u64)(top + first_row) * N + right * COLUMNS + lane * 8;
                    unsigned short* to_first = (unsigned short*)first + place;
                    unsigned short* to_second = (unsigned short*)second + place;
                    const char* const from = memory + AT_TILE + (64 * half + first_row) * (COLUMNS * 2);
#if BACKWARD
                    const unsigned short* ask = (const unsigned short*)side + place + AHEAD * stride;
                    const int next_top = half == 0 ? top + 64 : next_down * ROWS;
                    const int next_there = half == 1 && last ? 0 : min(64, M - next_top) - first_row;
                    const u64 next_place =
                        (u64)(next_top + first_row) * N + (half == 0 ? right : next_right) * COLUMNS + lane * 8;
#endif
                    group_wait(TILE_THERE + half, 128 + VALUES);
#pragma unroll
                    for (int i = 0; i < 2 * AHEAD; i++) {
                        const int row = VALUE_WARPS * i;
                        const int turned = (lane ^ ((row + first_row) & 7)) << 4;
                        uint4 here = *(const uint4*)(from + row * (COLUMNS * 2) + turned);
                        if (row + VALUE_WARPS > 64 && row + first_row > 63) here = make_uint4(0, 0, 0, 0);  // another's
                        const u32 four[4] = {here.x, here.y, here.z, here.w};
                        u32 one[4], two[4];
#if BACKWARD
                        const uint4 then = inner[i % AHEAD];
                        const u32 of[4] = {then.x, then.y, then.z, then.w};
                        if (i == AHEAD) ask = (const unsigned short*)side + next_place;
                        const int far = VALUE_WARPS * AHEAD;
                        const bool asked = i < AHEAD ? row + far < there : row - far < next_there;
                        inner[i % AHEAD] = fetched(ask, asked);
                        ask += stride;
#endif
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            float slope_0, slope_1;
#if BACKWARD
                            const float x_0 = lower(of[e]), x_1 = upper(of[e]);
                            const float gate_0 = gate_of(x_0, slope_0), gate_1 = gate_of(x_1, slope_1);
                            const float d_0 = lower(four[e]) * slope_0, d_1 = upper(four[e]) * slope_1;
                            total[2 * e] += d_0;
                            total[2 * e + 1] += d_1;
                            one[e] = packed(d_0, d_1);
#else
                            const float x_0 = lower(four[e]), x_1 = upper(four[e]);
                            const float gate_0 = gate_of(x_0, slope_0), gate_1 = gate_of(x_1, slope_1);
                            one[e] = four[e];
#endif
                            two[e] = packed(x_0 * gate_0, x_1 * gate_1);
                        }
                        if (row < there) {
                            if (BACKWARD || first) __stcs((uint4*)to_first, make_uint4(one[0], one[1], one[2], one[3]));
                            __stcs((uint4*)to_second, make_uint4(two[0], two[1], two[2], two[3]));
                        }
                        to_first += stride;
                        to_second += stride;
                    }
                    if (!last) group_arrive(TILE_READ + half, 128 + VALUES);
                }
#if BACKWARD
                // Whichever warp is the last to leave its sums adds up all seven, in their order.
                float* const each = (float*)(memory + AT_EXTRA) + turn * (VALUE_WARPS * COLUMNS);
#pragma unroll
                for (int e = 0; e < 2; e++)
                    *(float4*)(each + first_row * COLUMNS + lane * 8 + 4 * e) =
                        make_float4(total[4 * e], total[4 * e + 1], total[4 * e + 2], total[4 * e + 3]);
                __threadfence_block();
                __syncwarp();
                int before = 0;
                if (lane == 0) before = atomicAdd(&left_sums[turn], 1);
                if (__shfl_sync(0xFFFFFFFFu, before, 0) == VALUE_WARPS - 1) {
                    __threadfence_block();
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float4 all = *(const float4*)(each + lane * 8 + 4 * e);
#pragma unroll
                        for (int other = 1; other < VALUE_WARPS; other++) {
                            const float4 more = *(const float4*)(each + other * COLUMNS + lane * 8 + 4 * e);
                            all.x += more.x, all.y += more.y, all.z += more.z, all.w += more.w;
                        }
                        *(float4*)(sums + (u64)down * N + right * COLUMNS + lane * 8 + 4 * e) = all;
                    }
                    if (lane == 0) left_sums[turn] = 0;
                }
                turn ^= 1;
#endif
            }
        }
    } else {  // products
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        const int half = threadIdx.x / 128 - (32 + VALUES) / 128;
        const int row = 16 * warp + lane % 16;  // whose eight values this thread names to stmatrix
        const u32 out = base + AT_TILE + (64 * half + row) * (COLUMNS * 2);
        const u32 turned = (u32)(lane / 16) ^ (u32)(lane & 7);
        const u32 free = place_in(at_empty, thread < CLUSTER ? thread : 0);
        float sum[128];
        int stage = 0;
        u32 turn = 0;
        for (int tile = mine; tile < tiles; tile += clusters) {
#if !BACKWARD
            int down, right;
            place_of(tile, high, across, down, right);
            const float4* bias = (const float4*)(memory + AT_EXTRA) + (right * 4 + lane % 4) * (BIAS_STRIDE / 4);
#pragma unroll
            for (int j = 0; j < 16; j++) {
                const float4 four = bias[j];
                sum[8 * j + 0] = sum[8 * j + 2] = four.x;
                sum[8 * j + 1] = sum[8 * j + 3] = four.y;
                sum[8 * j + 4] = sum[8 * j + 6] = four.z;
                sum[8 * j + 5] = sum[8 * j + 7] = four.w;
            }
#endif
            int before = stage;
            for (int k = 0; k < pieces; k++) {
                barrier_wait(at_full + 8 * stage, turn);
                const u64 left = described(base + AT_A + stage * A_BYTES + half * (A_BYTES / 2));
                const u64 other = described(base + AT_B + stage * B_BYTES, BACKWARD ? 128 * DEPTH : 16);
                products_begin();
#pragma unroll
                for (int part = 0; part < DEPTH / 16; part++)  // 16 columns of a are 32 bytes on; 16 rows of b 2 KiB
                    multiply(sum, left + 2 * part, other + (BACKWARD ? 128 : 2) * part,
                             BACKWARD ? (u32)((k | part) != 0) : 1u);
                products_end();
                if (k > 0) {
                    products_wait<1>();
                    settled(sum);
                    if (thread < CLUSTER) barrier_arrive(free + 8 * before);
                }
                before = stage;
                if (++stage == STAGES) stage = 0, turn ^= 1;
            }
            products_wait<0>();
            settled(sum);
            if (thread < CLUSTER) barrier_arrive(free + 8 * before);
            group_wait(TILE_READ + half, 128 + VALUES);  // the last tile has been read
#pragma unroll
            for (int j = 0; j < 16; j++)
                put(out + (((u32)(2 * j) ^ turned) << 4), packed(sum[8 * j + 0], sum[8 * j + 1]),
                    packed(sum[8 * j + 2], sum[8 * j + 3]), packed(sum[8 * j + 4], sum[8 * j + 5]),
                    packed(sum[8 * j + 6], sum[8 * j + 7]));
            group_arrive(TILE_THERE + half, 128 + VALUES);
        }
    }
    cluster_sync();  // a processor that is sent something is still there
}
