// The first step of the attention gradient. It is separate from attention.cu, which compiles slowly, because
// attention_mma.cu also needs it. Macros: HEAD, and DELTA_LANES, the threads per row and head.
#include "common.cuh"

constexpr int W = HEAD % PACK == 0 ? PACK : 1;  // elements per access

// delta ← Σ dy · y over a head, which is Σ p · (dy vᵀ) over its keys; `count` is rows · heads
// delta (sequences, heads, T) of real, dy and y (rows, heads · HEAD)
extern "C" __global__ void attention_delta(real* delta, const stored* dy, const stored* y, int count,
                                           int seq_len, int n_head) {
    const long long index = (long long)blockIdx.x * (blockDim.x / DELTA_LANES) + threadIdx.x / DELTA_LANES;
    const int lane = threadIdx.x % DELTA_LANES, head = int(index % n_head);
    const long long row = index / n_head;
    real sum = 0;
    if (index < count) {
        for (int d = lane * W; d < HEAD; d += DELTA_LANES * W) {
            const Elements<W> a = load<W>(dy + index * HEAD + d), b = load<W>(y + index * HEAD + d);
#pragma unroll
            for (int i = 0; i < W; i++) sum += a.at[i] * b.at[i];
        }
    }
#pragma unroll
    for (int step = DELTA_LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    if (lane == 0 && index < count) delta[(row / seq_len * n_head + head) * seq_len + row % seq_len] = sum;
}
