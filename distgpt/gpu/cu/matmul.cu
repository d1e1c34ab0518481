// Two matrix products from textbooks, for comparison: what a GPU does with them shows what libraries are for.
#include "common.cuh"

constexpr int TILE = 16;

// out ← a · b for each of gridDim.z pairs: a (m, k), b (k, n). One thread an element, straight from memory.
extern "C" __global__ void matmul_naive(stored* out, const stored* a, const stored* b, int m, int n, int k) {
    const int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    if (row >= m || column >= n) return;
    const size_t pair = blockIdx.z;
    const stored *x = a + (pair * m + row) * k, *y = b + pair * k * n + column;
    real sum = 0;
    for (int i = 0; i < k; i++) sum += to_real(x[i]) * to_real(y[size_t(i) * n]);
    out[(pair * m + row) * n + column] = to_stored(sum);
}

// The same with tiles in shared memory: each number is read from memory once per tile, not once per element.
extern "C" __global__ void matmul_tiled(stored* out, const stored* a, const stored* b, int m, int n, int k) {
    __shared__ real left[TILE][TILE], right[TILE][TILE + 1];
    const int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    const size_t pair = blockIdx.z;
    real sum = 0;
    for (int first = 0; first < k; first += TILE) {
        const int across = first + threadIdx.x, down = first + threadIdx.y;
        left[threadIdx.y][threadIdx.x] =
            row < m && across < k ? to_real(a[(pair * m + row) * k + across]) : real(0);
        right[threadIdx.y][threadIdx.x] =
            down < k && column < n ? to_real(b[(pair * k + down) * n + column]) : real(0);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILE; i++) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) out[(pair * m + row) * n + column] = to_stored(sum);
}
