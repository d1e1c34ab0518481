// Tensor cores and what feeds them, for compute capability 8.0 and later: a warp's product of bfloat16
// matrices with sums in float, matrices out of shared memory, copies into it that do not wait.
//
// All 32 lanes call these together. How numbers lie in them is the PTX ISA's, "Matrix Fragments for
// mma.m16n8k16 with floating point type"; with g = lane / 4 and t = lane % 4, two numbers per register, the
// one of the lower column (of b: row) in its low half:
//
//   a, 16 x 16   a[0] row g,     columns 2t, 2t + 1      a[2] row g,     columns 2t + 8, 2t + 9
//                a[1] row g + 8, columns 2t, 2t + 1      a[3] row g + 8, columns 2t + 8, 2t + 9
//   b, 16 x 8    b0   column g,  rows 2t, 2t + 1         b1   column g,  rows 2t + 8, 2t + 9
//   c, 16 x 8    c[0], c[1] row g, columns 2t, 2t + 1    c[2], c[3] row g + 8, the same columns
//
// Where there is no GPU, whoever compiles this provides the same functions.
#pragma once

#if defined(__CUDA_ARCH__)

typedef unsigned SharedAddress;  // counts bytes

__device__ __forceinline__ SharedAddress shared_address(const void* p) {
    return SharedAddress(__cvta_generic_to_shared(p));
}

// c += a b
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 rows of 16 bytes: lane 8 i + j says where row j of matrix i lies. to[i] gets columns 2t
// and 2t + 1 of row g of matrix i ("ldmatrix" in the PTX ISA).
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// The same of the transposed matrices: rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// BYTES, 4 or 16, from memory to shared memory, or zeros where `there` is false; then `from` is not read.
template <int BYTES>
__device__ __forceinline__ void start_copy(SharedAddress to, const void* from, bool there) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(to), "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                     : "memory");
    } else {
        static_assert(BYTES == 4, "a size that is not needed");
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     :
                     : "r"(to), "l"(__cvta_generic_to_global(from)), "r"(there ? 4 : 0)
                     : "memory");
    }
}

// Until the thread's own copies have arrived; those of other threads need a barrier after it.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Two numbers in one register, each rounded to the nearest
__device__ __forceinline__ unsigned pair_of(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif
