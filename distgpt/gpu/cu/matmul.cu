// Linear layers of few rows, for decoding, where reading the weights takes the time.
#include "common.cuh"

// y[row, j] ← onto[row, j] + x[row] · w[j] + b[j], a warp for each j; x (rows, c), w (outputs, c),
// y and onto (rows, outputs)
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
