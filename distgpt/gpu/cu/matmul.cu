// Matmul kernels: linear layers with few rows for decoding, and two textbook versions for comparison.
#include "common.cuh"

// ---- few rows, bound by reading the weights

// y[row, j] ← onto[row, j] + x[row] · w[j] + b[j], one warp per j; x (rows, c), w (outputs, c), y and onto
// (rows, outputs)
template <int W>
__device__ void linear_few_rows(stored* y, const stored* onto, const stored* x, const stored* w,
                                const stored* b, int rows, int outputs, int c) {
    const int j = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (j >= outputs) return;  // a whole warp
    for (int row = 0; row < rows; row++) {
        real sum = 0;
#pragma unroll 4
        for (int k = lane * W; k < c; k += WARP * W) {
            const Elements<W> weight = load<W>(w + size_t(j) * c + k), value = load<W>(x + size_t(row) * c + k);
#pragma unroll
            for (int i = 0; i < W; i++) sum += weight.at[i] * value.at[i];
        }
        sum = warp_sum(sum);
        const size_t at = size_t(row) * outputs + j;
        if (b) sum += to_real(b[j]);
        if (lane == 0) y[at] = to_stored(sum + (onto ? to_real(onto[at]) : real(0)));
    }
}

KERNEL(linear_few_rows,
       (stored * y, const stored* onto, const stored* x, const stored* w, const stored* b, int rows,
        int outputs, int c),
       (y, onto, x, w, b, rows, outputs, c))

// ---- textbook versions

constexpr int TILE = 16;

// out ← a · b for each of gridDim.z pairs: a (m, k), b (k, n). One thread per element, directly from memory.
extern "C" __global__ void matmul_naive(stored* out, const stored* a, const stored* b, int m, int n, int k) {
    const int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    if (row >= m || column >= n) return;
    const size_t pair = blockIdx.z;
    const stored *x = a + (pair * m + row) * k, *y = b + pair * k * n + column;
    real sum = 0;
    for (int i = 0; i < k; i++) sum += to_real(x[i]) * to_real(y[size_t(i) * n]);
    out[(pair * m + row) * n + column] = to_stored(sum);
}

// out ← a · b with tiles in shared memory. Each element is read from memory once per tile, not once per
// product.
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
