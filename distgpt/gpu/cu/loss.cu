// Softmax cross-entropy of rows of logits, forward and backward in place. One block per row.
#include "common.cuh"

constexpr real LOWEST = real(sizeof(real) == 4 ? -3.4028234663852886e38 : -1.7976931348623157e308);

// e^(x - top). In float, one instruction with sufficient precision, so that memory access is the only limit.
__device__ __forceinline__ float share_of(float x, float top) {
    return exp2_fast((x - top) * 1.4426950408889634f);
}
__device__ __forceinline__ double share_of(double x, double top) { return exp(x - top); }

// A running maximum and the sum of e^(x - maximum).
struct Sum {
    real top, total;
};

__device__ __forceinline__ Sum join(Sum a, Sum b) {
    const real top = a.top < b.top ? b.top : a.top;
    return {top, a.total * share_of(a.top, top) + b.total * share_of(b.top, top)};
}

__device__ __forceinline__ Sum over_warp(Sum x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        x = join(x, {__shfl_xor_sync(ALL, x.top, step), __shfl_xor_sync(ALL, x.total, step)});
    return x;
}

__device__ __forceinline__ Sum over_block(Sum x) {
    __shared__ Sum of_warp[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = over_warp(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return over_warp(lane < warps ? of_warp[lane] : Sum{LOWEST, 0});
}

// Logits from element j on. After the last token, they are values whose exp is 0.
template <int W>
__device__ __forceinline__ Elements<W> load_scores(const stored* row, int j, int vocab) {
    Elements<W> x = load<W>(row + j);
    if (j + W > vocab) {
#pragma unroll
        for (int i = 0; i < W; i++)
            if (j + i >= vocab) x.at[i] = LOWEST;
    }
    return x;
}

// losses[row] ← log Σ e^logits - logits[target], 0 for a target below 0; with `gradient`, logits ← scale ·
// (softmax - onehot), 0 from `vocab` on. The second pass runs backward, since the last data read is still
// cached.
template <int W>
__device__ void cross_entropy(real* losses, stored* logits, const int* targets, int vocab, int width,
                              double scale, int gradient) {
    stored* row = logits + size_t(blockIdx.x) * width;
    const int target = targets[blockIdx.x], step = blockDim.x * W;
    if (target < 0) {  // ignored target
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        for (int at = threadIdx.x * W; gradient && at < width; at += step) store<W>(row + at, Elements<W>{});
        return;
    }
    Sum sum{LOWEST, 0};
    int j = threadIdx.x * W;
#pragma unroll 2
    for (; j < vocab; j += step) {
        const Elements<W> x = load_scores<W>(row, j, vocab);
        real top = sum.top;
#pragma unroll
        for (int i = 0; i < W; i++) top = top < x.at[i] ? x.at[i] : top;
        real total = sum.total * share_of(sum.top, top);
#pragma unroll
        for (int i = 0; i < W; i++) total += share_of(x.at[i], top);
        sum = {top, total};
    }
    const real hit = to_real(row[target]);  // before any thread writes
    sum = over_block(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = sum.top + log(sum.total) - hit;
    if (!gradient) return;
    const real factor = real(scale) / sum.total;
    for (; j < width; j += step) {  // padding after the last tokens
        Elements<W> none;
#pragma unroll
        for (int i = 0; i < W; i++) none.at[i] = 0;
        store<W>(row + j, none);
    }
    for (j -= step; j >= 0; j -= step) {
        if (j >= vocab) continue;
        Elements<W> x = load_scores<W>(row, j, vocab);
#pragma unroll
        for (int i = 0; i < W; i++) x.at[i] = factor * share_of(x.at[i], sum.top);
        if (j <= target && target < j + W) {
#pragma unroll
            for (int i = 0; i < W; i++)
                if (j + i == target) x.at[i] -= real(scale);
        }
        store<W>(row + j, x);
    }
}

KERNEL(cross_entropy,
       (real * losses, stored* logits, const int* targets, int vocab, int width, double scale, int gradient),
       (losses, logits, targets, vocab, width, scale, gradient))
