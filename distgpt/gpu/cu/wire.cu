// Arithmetic of gradients between GPUs: stochastic rounding to bfloat16, and sums over ranks.
#include "common.cuh"

__device__ __forceinline__ int own_place() { return blockIdx.x * blockDim.x + threadIdx.x; }

// out ← one of the two bfloat16 around x. The nearer one is more likely. See `Wire.dither`.
extern "C" __global__ void dither(unsigned short* out, const real* x, int index, int key, int n) {
    const int i = own_place();
    if (i < n) out[i] = dithered(float(x[i]), unsigned(index) + unsigned(i), unsigned(key));
}

__device__ __forceinline__ real widened(real x) { return x; }

__device__ __forceinline__ real widened(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

// total (n,) ← the sum over the rows of parts (ranks, stride), in order
template <typename T>
__device__ __forceinline__ void add_rows(real* total, const T* parts, int ranks, int stride, int n) {
    const int i = own_place();
    if (i >= n) return;
    real sum = widened(parts[i]);
    for (int rank = 1; rank < ranks; rank++) sum += widened(parts[size_t(rank) * stride + i]);
    total[i] = sum;
}

extern "C" __global__ void add_parts(real* total, const real* parts, int ranks, int stride, int n) {
    add_rows(total, parts, ranks, stride, n);
}

extern "C" __global__ void add_narrow_parts(real* total, const unsigned short* parts, int ranks, int stride,
                                            int n) {
    add_rows(total, parts, ranks, stride, n);
}

// out ← x
extern "C" __global__ void widen(real* out, const unsigned short* x, int n) {
    const int i = own_place();
    if (i < n) out[i] = widened(x[i]);
}
