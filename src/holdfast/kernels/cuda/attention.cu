// Attention for one head of one picture, and its backward pass, for Hopper's matrix units (sm_90a).
//
//   p = softmax(q kᵀ / 8), out = p v   ->   dv = pᵀ g,  ds = p (g vᵀ - Σ out g),  dk = dsᵀ q / 8,  dq = ds k / 8
//
// Four warps take a head. All of its q, k, v (and g) stay in shared memory, two heads a processor, and while one waits
// or works on values the other's products run. Rows come in blocks of 64. Forward a block's scores are all there at
// once, in registers. Backward come keys first, whose dk and dv are summed over all queries, then queries, whose dq is
// summed over all keys. Scores are worked out twice, which costs two products of seven; in exchange nothing goes from one
// group of warps to another, and there is no waiting in the middle. p and ds go from the registers they are made in into
// the next product.
//
// Compiled at run time for one LENGTH, with COLUMNS_0 + COLUMNS_1 + COLUMNS_2 >= LENGTH columns of a block in three
// turns, multiples of 16 all. What is read behind a row's end is 0 or is multiplied by 0, and what is written there is
// cut off by the copy engine.

constexpr int WIDTH = 64;
constexpr int BLOCKS = (LENGTH + 63) / 64;
constexpr int ALL_COLUMNS = COLUMNS_0 + COLUMNS_1 + COLUMNS_2;
constexpr int ROWS = (LENGTH + 7) / 8 * 8;
constexpr u32 TILE = ROWS * WIDTH * 2, LAST_TILE = ALL_COLUMNS * WIDTH * 2;
constexpr u32 AT_Q = 0, AT_K = AT_Q + TILE, AT_V = AT_K + TILE, AT_G = AT_V + TILE;
constexpr u32 AT_STAGE = AT_G + LAST_TILE;        // 64 rows on their way out; also what a block reads behind g
constexpr u32 AT_LEVELS = AT_STAGE + 64 * WIDTH * 2;  // two floats a query: its level and Σ out g
constexpr u32 AT_BARRIER = AT_LEVELS + 256 * 8;
constexpr u32 FORWARD_V = 2 * TILE, FORWARD_STAGE = FORWARD_V + LAST_TILE;
constexpr u32 FORWARD_BARRIER = FORWARD_STAGE + 64 * WIDTH * 2;
#define NOTHING __int_as_float(0xFF800000)  // log 0
constexpr float SHARP = 0.125f * 1.4426950408889634f, SOFT = 0.125f;

__device__ __forceinline__ void copy_here(u32 to, const TensorMap* map, int x, int y, int z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_away(const TensorMap* map, int x, int y, int z, u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n"
        "cp.async.bulk.commit_group;" ::"l"(map), "r"(x), "r"(y), "r"(z), "r"(from) : "memory");
}

// A barrier that opens when so many bytes have come.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    barrier_init(barrier, 1);
    barriers_are_there();
    barrier_expect(barrier, bytes);
}

// Written out by attention.py. first_scores<N>(sum, a, b), scores<N>(sum, a, b): sum = a bᵀ and sum += a bᵀ,
// 64 x N x 16, both from shared memory; first_gather(sum, a, ..., b), gather(...): the same for a b, 64 x 64 x 16, with a
// from registers.
MULTIPLY

// Scores and their gradients for N columns from ``start``: s = rows columnsᵀ, d = gradients valuesᵀ.
template <int N>
__device__ __forceinline__ void begin(float (&s)[COLUMNS_0 / 2], float (&d)[COLUMNS_0 / 2], u32 rows, u32 columns,
                                      u32 other_rows, u32 other_columns, int start) {
    const u64 a = described(rows), b = described(columns + start * 128);
    products_begin();
    first_scores<N>(s, a, b);
#pragma unroll
    for (int part = 1; part < 4; part++) scores<N>(s, a + 2 * part, b + 2 * part);
    products_end();
    const u64 e = described(other_rows), f = described(other_columns + start * 128);
    products_begin();
    first_scores<N>(d, e, f);
#pragma unroll
    for (int part = 1; part < 4; part++) scores<N>(d, e + 2 * part, f + 2 * part);
    products_end();
}

// to += a b with a, 64 x N, made of the numbers in ``values``, and b the N rows from ``at``.
template <int N, bool FIRST>
__device__ __forceinline__ void gather_all(float (&to)[32], const u32 (&a)[COLUMNS_0 / 4], u32 at) {
    const u64 b = described(at);
    products_begin();
    if (FIRST) first_gather(to, a[0], a[1], a[2], a[3], b);
#pragma unroll
    for (int part = FIRST; part < N / 16; part++)
        gather(to, a[4 * part], a[4 * part + 1], a[4 * part + 2], a[4 * part + 3], b + part * 128);
    products_end();
}

// 64 rows of results, by way of shared memory to the copy engine. All 128 threads, each with an upper and a lower row.
__device__ __forceinline__ void send(const float (&values)[32], float above, float below, u32 stage,
                                     const TensorMap* map, int column, int row, int image) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 to = stage + (16 * warp + lane % 16) * 128, turned = (u32)(lane / 16) ^ (u32)(lane & 7);
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++)
        put(to + (((u32)(2 * j) ^ turned) << 4), packed(values[8 * j + 0] * above, values[8 * j + 1] * above),
            packed(values[8 * j + 2] * below, values[8 * j + 3] * below),
            packed(values[8 * j + 4] * above, values[8 * j + 5] * above),
            packed(values[8 * j + 6] * below, values[8 * j + 7] * below));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) copy_away(map, column, row, image, stage);
}

// A block of keys and N queries from START: dv += pᵀ g, dk += dsᵀ q. Scores are on their way.
template <int N, int START>
__device__ __forceinline__ void keys(float (&s)[COLUMNS_0 / 2], float (&d)[COLUMNS_0 / 2], float (&dk)[32],
                                     float (&dv)[32], u32 base, const char* memory, bool real) {
    const float4* const levels = (const float4*)(memory + AT_LEVELS) + START / 2 + threadIdx.x % 4;  // two queries each
    u32 a[COLUMNS_0 / 4] = {}, b[COLUMNS_0 / 4] = {};
    products_wait<1>();
    settled(s);
    if (real) {
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const float4 two = levels[4 * j];
            s[4 * j + 0] = power_of_two(fmaf(s[4 * j + 0], SHARP, two.x));
            s[4 * j + 1] = power_of_two(fmaf(s[4 * j + 1], SHARP, two.z));
            s[4 * j + 2] = power_of_two(fmaf(s[4 * j + 2], SHARP, two.x));
            s[4 * j + 3] = power_of_two(fmaf(s[4 * j + 3], SHARP, two.z));
            a[2 * j + 0] = packed(s[4 * j + 0], s[4 * j + 1]);
            a[2 * j + 1] = packed(s[4 * j + 2], s[4 * j + 3]);
        }
    }
    products_wait<0>();
    settled(d);
    if (real) {
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const float4 two = levels[4 * j];
            b[2 * j + 0] = packed(s[4 * j + 0] * (d[4 * j + 0] - two.y), s[4 * j + 1] * (d[4 * j + 1] - two.w));
            b[2 * j + 1] = packed(s[4 * j + 2] * (d[4 * j + 2] - two.y), s[4 * j + 3] * (d[4 * j + 3] - two.w));
        }
    }
    gather_all<N, START == 0>(dv, a, base + AT_G + START * 128);
    gather_all<N, START == 0>(dk, b, base + AT_Q + START * 128);
}

// A block of queries and N keys from START: dq += ds k. Scores are on their way.
template <int N, int START>
__device__ __forceinline__ void queries(float (&s)[COLUMNS_0 / 2], float (&d)[COLUMNS_0 / 2], float (&dq)[32], u32 base,
                                        float2 upper_row, float2 lower_row, bool real) {
    u32 a[COLUMNS_0 / 4] = {};
    products_wait<1>();
    settled(s);
    if (real) {
#pragma unroll
        for (int j = 0; j < N / 2; j++)
            s[j] = power_of_two(fmaf(s[j], SHARP, j % 4 < 2 ? upper_row.x : lower_row.x));
    }
    products_wait<0>();
    settled(d);
    if (real) {
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            float ds[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                ds[e] = s[4 * j + e] * (d[4 * j + e] - (e < 2 ? upper_row.y : lower_row.y));
                const int key = START + 8 * j + 2 * (int)(threadIdx.x % 4) + e % 2;
                if (START + 8 * j + 8 > LENGTH && key >= LENGTH) ds[e] = 0.0f;
            }
            a[2 * j + 0] = packed(ds[0], ds[1]);
            a[2 * j + 1] = packed(ds[2], ds[3]);
        }
    }
    gather_all<N, START == 0>(dq, a, base + AT_K + START * 128);
}

extern "C" __global__ void __launch_bounds__(128, 2)
attend(const __grid_constant__ TensorMap from_packed, const __grid_constant__ TensorMap values_from_packed,
       const __grid_constant__ TensorMap to_out, float* levels, int span, int heads) {
    extern __shared__ __align__(1024) char raw[];
    const u32 base = address_of(raw);
    const u32 barrier = base + FORWARD_BARRIER;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int image = blockIdx.x / heads, head = blockIdx.x % heads, between = heads * WIDTH, column = head * WIDTH;

    if (base % 1024 != 0) __trap();  // nothing else is in shared memory
    if (thread == 0) {
        expect(barrier, 2 * TILE + LAST_TILE);
        copy_here(base + AT_Q, &from_packed, column, 0, image, barrier);
        copy_here(base + AT_K, &from_packed, between + column, 0, image, barrier);
        copy_here(base + FORWARD_V, &values_from_packed, 2 * between + column, 0, image, barrier);
    }
    __syncthreads();
    barrier_wait(barrier, 0);
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
        float s[ALL_COLUMNS / 2], mixed[32];
        const u64 a = described(base + AT_Q + block * 8192), b = described(base + AT_K);
        products_begin();
        first_scores<ALL_COLUMNS>(s, a, b);
#pragma unroll
        for (int part = 1; part < 4; part++) scores<ALL_COLUMNS>(s, a + 2 * part, b + 2 * part);
        products_end();
        products_wait<0>();
        settled(s);
        float top[2], total[2] = {};
        top[0] = top[1] = NOTHING;
#pragma unroll
        for (int j = 0; j < ALL_COLUMNS / 2; j++) {
            if (j / 4 * 8 + 8 > LENGTH && j / 4 * 8 + 2 * (lane % 4) + j % 2 >= LENGTH) s[j] = NOTHING;
            top[j / 2 % 2] = fmaxf(top[j / 2 % 2], s[j]);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            top[e] = fmaxf(top[e], __shfl_xor_sync(0xFFFFFFFFu, top[e], 1));
            top[e] = fmaxf(top[e], __shfl_xor_sync(0xFFFFFFFFu, top[e], 2)) * SHARP;
        }
        u32 p[ALL_COLUMNS / 4];
#pragma unroll
        for (int j = 0; j < ALL_COLUMNS / 4; j++) {
            const float first = power_of_two(fmaf(s[2 * j], SHARP, -top[j % 2]));
            const float second = power_of_two(fmaf(s[2 * j + 1], SHARP, -top[j % 2]));
            total[j % 2] += first + second;
            p[j] = packed(first, second);
        }
        const u64 values = described(base + FORWARD_V);
        products_begin();
        first_gather(mixed, p[0], p[1], p[2], p[3], values);
#pragma unroll
        for (int part = 1; part < ALL_COLUMNS / 16; part++)
            gather(mixed, p[4 * part], p[4 * part + 1], p[4 * part + 2], p[4 * part + 3], values + part * 128);
        products_end();
#pragma unroll
        for (int e = 0; e < 2; e++) {
            total[e] += __shfl_xor_sync(0xFFFFFFFFu, total[e], 1);
            total[e] += __shfl_xor_sync(0xFFFFFFFFu, total[e], 2);
            const int row = block * 64 + 16 * warp + lane / 4 + 8 * e;
            if (lane % 4 == 0 && row < span)
                levels[(u64)blockIdx.x * span + row] = row < LENGTH ? -top[e] - log2f(total[e]) : NOTHING;
        }
        products_wait<0>();
        settled(mixed);
        send(mixed, 1.0f / total[0], 1.0f / total[1], base + FORWARD_STAGE, &to_out, column, block * 64, image);
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(128, 2)
attend_backward(const __grid_constant__ TensorMap from_packed, const __grid_constant__ TensorMap from_gradient,
                const __grid_constant__ TensorMap to_result, const unsigned short* out, const float* levels,
                float* sums, int span, int heads) {
    extern __shared__ __align__(1024) char raw[];
    const u32 base = address_of(raw);
    const u32 barrier = base + AT_BARRIER;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int image = blockIdx.x / heads, head = blockIdx.x % heads, between = heads * WIDTH, column = head * WIDTH;

    if (base % 1024 != 0) __trap();  // nothing else is in shared memory
    if (thread == 0) {
        expect(barrier, 3 * TILE + LAST_TILE);
        copy_here(base + AT_K, &from_packed, between + column, 0, image, barrier);
        copy_here(base + AT_Q, &from_packed, column, 0, image, barrier);
        copy_here(base + AT_V, &from_packed, 2 * between + column, 0, image, barrier);
        copy_here(base + AT_G, &from_gradient, column, 0, image, barrier);
    }
    // Σ out g of a query, one a thread at a time
    float2* const noted = (float2*)(raw + AT_LEVELS);
    uint4 row[2][8];
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        const int query = thread + 128 * turn;
        if (query < LENGTH) {
            const uint4* const from = (const uint4*)(out + ((u64)image * LENGTH + query) * between + column);
#pragma unroll
            for (int i = 0; i < 8; i++) row[turn][i] = from[i];
        }
    }
    __syncthreads();
    barrier_wait(barrier, 0);
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        const int query = thread + 128 * turn;
        float2 one = make_float2(NOTHING, 0.0f);
        if (query < LENGTH) {
            one.x = levels[(u64)blockIdx.x * span + query];
            const char* const g = raw + AT_G + query * 128;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint4 four = *(const uint4*)(g + ((i ^ (query & 7)) << 4));
                const u32 x[4] = {four.x, four.y, four.z, four.w};
                const u32 y[4] = {row[turn][i].x, row[turn][i].y, row[turn][i].z, row[turn][i].w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    one.y = fmaf(lower(x[e]), lower(y[e]), one.y);
                    one.y = fmaf(upper(x[e]), upper(y[e]), one.y);
                }
            }
        }
        noted[query] = one;
    }
    __syncthreads();

    float* const mine = sums + (u64)image * 3 * between + column;
    {   // shares add up to 1, so that the sums of dv are those of g
        float all[32];
        u32 ones[COLUMNS_0 / 4];
#pragma unroll
        for (int i = 0; i < COLUMNS_0 / 4; i++) ones[i] = 0x3F803F80u;
        gather_all<COLUMNS_0, true>(all, ones, base + AT_G);
        gather_all<COLUMNS_1, false>(all, ones, base + AT_G + COLUMNS_0 * 128);
        gather_all<COLUMNS_2, false>(all, ones, base + AT_G + (COLUMNS_0 + COLUMNS_1) * 128);
        products_wait<0>();
        settled(all);
        if (thread < 4) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                *(float2*)(mine + 2 * between + 8 * j + 2 * thread) = make_float2(all[4 * j], all[4 * j + 1]);
        }
        if (thread < 64) mine[between + thread] = 0.0f;  // a softmax does not see what all keys share
    }

#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
        const u32 rows = base + AT_K + block * 8192, values = base + AT_V + block * 8192;
        const bool real = block * 64 + 16 * warp < LENGTH;  // a warp without rows only lends itself to the products
        float s[COLUMNS_0 / 2], d[COLUMNS_0 / 2], dk[32], dv[32];
        begin<COLUMNS_0>(s, d, rows, base + AT_Q, values, base + AT_G, 0);
        keys<COLUMNS_0, 0>(s, d, dk, dv, base, raw, real);
        begin<COLUMNS_1>(s, d, rows, base + AT_Q, values, base + AT_G, COLUMNS_0);
        keys<COLUMNS_1, COLUMNS_0>(s, d, dk, dv, base, raw, real);
        begin<COLUMNS_2>(s, d, rows, base + AT_Q, values, base + AT_G, COLUMNS_0 + COLUMNS_1);
        keys<COLUMNS_2, COLUMNS_0 + COLUMNS_1>(s, d, dk, dv, base, raw, real);
        products_wait<0>();
        settled(dk);
        settled(dv);
        send(dv, 1.0f, 1.0f, base + AT_STAGE, &to_result, 2 * between + column, block * 64, image);
        send(dk, SOFT, SOFT, base + AT_STAGE, &to_result, between + column, block * 64, image);
    }
    float total[16] = {};
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
        const u32 rows = base + AT_Q + block * 8192, gradients = base + AT_G + block * 8192;
        const int first = block * 64 + 16 * warp + lane / 4;
        const float2 upper_row = noted[first], lower_row = noted[first + 8];
        float s[COLUMNS_0 / 2], d[COLUMNS_0 / 2], dq[32];
        begin<COLUMNS_0>(s, d, rows, base + AT_K, gradients, base + AT_V, 0);
        queries<COLUMNS_0, 0>(s, d, dq, base, upper_row, lower_row, first - lane / 4 < LENGTH);
        begin<COLUMNS_1>(s, d, rows, base + AT_K, gradients, base + AT_V, COLUMNS_0);
        queries<COLUMNS_1, COLUMNS_0>(s, d, dq, base, upper_row, lower_row, first - lane / 4 < LENGTH);
        begin<COLUMNS_2>(s, d, rows, base + AT_K, gradients, base + AT_V, COLUMNS_0 + COLUMNS_1);
        queries<COLUMNS_2, COLUMNS_0 + COLUMNS_1>(s, d, dq, base, upper_row, lower_row, first - lane / 4 < LENGTH);
        products_wait<0>();
        settled(dq);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (first < LENGTH) total[2 * j + e] += dq[4 * j + e];
                if (first + 8 < LENGTH) total[2 * j + e] += dq[4 * j + 2 + e];
            }
        send(dq, SOFT, SOFT, base + AT_STAGE, &to_result, column, block * 64, image);
    }
    // dq's sums: over the eight rows that a warp's threads hold, then over warps
    float* const each = (float*)(raw + AT_LEVELS);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float one = total[i];
#pragma unroll
        for (int far = 4; far < 32; far *= 2) one += __shfl_xor_sync(0xFFFFFFFFu, one, far);
        if (lane < 4) each[warp * 64 + i / 2 * 8 + 2 * lane + i % 2] = one;
    }
    __syncthreads();
    if (thread < 64)
        mine[thread] = SOFT * ((each[thread] + each[64 + thread]) + (each[128 + thread] + each[192 + thread]));
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
