// Sums over rows and over whole arrays, in two steps of fixed order, so that they do not depend on timing.
#include "common.cuh"

// partial (slices, c) ← sums over the rows of each slice of x (n, c)
template <int W>
__device__ void sum_slices(real* partial, const stored* x, int n, int c) {
    const Slice<W> slice(n);
    Elements<W> sum = {};
    if (slice.column < c) {
#pragma unroll 4
        for (int row = slice.first; row < slice.last; row += DOWN) {
            const Elements<W> v = load<W>(x + size_t(row) * c + slice.column);
            sum += v;
        }
    }
    hand_over_columns(partial, sum, c);
}

KERNEL(sum_slices, (real* partial, const stored* x, int n, int c), (partial, x, n, c))

// out (width,) ← or += the sum of the rows of partial (parts, stride). A block has WARP columns by WARP rows.
extern "C" __global__ void __launch_bounds__(WARP * WARP)
sum_parts(real* out, const real* partial, int parts, int stride, int width, int accumulate) {
    __shared__ real sums[WARP][WARP + 1];
    const int lane = threadIdx.x % WARP, down = threadIdx.x / WARP;
    const int j = blockIdx.x * WARP + lane;
    real sum = 0;
    if (j < width)
        for (int row = down; row < parts; row += WARP) sum += partial[size_t(row) * stride + j];
    sums[down][lane] = sum;
    __syncthreads();
    const real total = warp_sum(sums[lane][down]);  // each warp adds up one column
    const int column = blockIdx.x * WARP + down;
    if (lane == 0 && column < width) out[column] = (accumulate ? out[column] : real(0)) + total;
}

// total[0] ← or += scale · Σ x, in one block
extern "C" __global__ void __launch_bounds__(1024)
sum_all(real* total, const real* x, int n, double scale, int accumulate) {
    double sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) total[0] = (accumulate ? total[0] : real(0)) + real(scale * sum);
}

template <int W, typename T>
__device__ __forceinline__ Elements<W> load_any(const T* p) {
    if constexpr (sizeof(T) == sizeof(real)) return load_real<W>(p);
    else return load<W>(p);
}

constexpr int PIECE = 4096;  // elements, as in core/ops/api.py

// pieces (blocks,) ← Σ x² of each block's piece: the same for any GPU, and for any rank with the piece
template <typename T>
__device__ __forceinline__ void add_squares(double* pieces, const T* x, long long n) {
    constexpr int W = 16 / sizeof(T);
    real sum = 0;
    const long long begin = (long long)(blockIdx.x) * PIECE, end = begin + PIECE;
#pragma unroll
    for (long long i = begin + threadIdx.x * W; i < end; i += blockDim.x * W) {
        if (i + W <= n) {
            const Elements<W> v = load_any<W>(x + i);
#pragma unroll
            for (int k = 0; k < W; k++) sum += v.at[k] * v.at[k];
        } else {
            for (long long k = i; k < n; k++) {
                const real v = load_any<1>(x + k).at[0];
                sum += v * v;
            }
        }
    }
    const double total = block_sum(double(sum));
    if (threadIdx.x == 0) pieces[blockIdx.x] = total;
}

extern "C" __global__ void squares(double* pieces, const real* x, long long n) {
    add_squares(pieces, x, n);
}

extern "C" __global__ void squares_of_stored(double* pieces, const stored* x, long long n) {
    add_squares(pieces, x, n);
}

// total[0] ← Σ partial, in one block
extern "C" __global__ void __launch_bounds__(1024)
add_up(double* total, const double* partial, int parts) {
    double sum = 0;
    for (int i = threadIdx.x; i < parts; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) total[0] = sum;
}
