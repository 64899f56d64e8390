// What the kernels for Hopper share (sm_90a): the card's own instructions, by names that say what they do. Stands before
// products.cu and attention.cu when they are compiled.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ u32 address_of(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// -- barriers in shared memory ----------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barriers_are_there() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// -- the matrix units -------------------------------------------------------------------------------------------------

// What they read: rows of 64 values, 128 bytes, swizzled, eight rows a step; ``aside`` is the way to the next 64 columns
// where columns lie side by side, and is not looked at elsewhere.
__device__ __forceinline__ u64 described(u32 at, u32 aside = 16) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64)(aside >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

template <int N>
__device__ __forceinline__ void settled(float (&values)[N]) {  // what is read of them is read behind this
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(values[i])::"memory");
}

// Four matrices of 8 x 8 from a warp's registers to shared memory, as the products leave them.
__device__ __forceinline__ void put(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d) : "memory");
}

// -- numbers ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float lower(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float upper(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ u32 packed(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
