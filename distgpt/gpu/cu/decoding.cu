// Decoding outside of the passes: move positions of a cache, find the most likely tokens, sample a token.
#include "common.cuh"

// Positions 0 … kept of slot `target` ← positions from `count` on of slot `source`. If there are angles,
// (> count, half), keys are rotated back by `count` positions. caches (planes / 2, 2, n_lanes, kv_heads, t_max, head).
//
// A thread owns elements j and j + half of a head of a plane, for its block's part of the positions (`part` of
// them) in ascending order. So with a single part, a slot may move within itself.
extern "C" __global__ void
move_cached(stored* caches, const real* cos, const real* sin, int planes, int n_lanes, int kv_heads, int t_max,
            int head, int target, int source, int count, int kept, int part) {
    const int half = (head + 1) / 2, unit = blockIdx.x * blockDim.x + threadIdx.x;
    if (unit >= planes * kv_heads * half) return;
    const int j = unit % half, kv_head = unit / half % kv_heads, plane = unit / half / kv_heads;
    const bool turns = cos && plane % 2 == 0, pairs = j + half < head;
    const real c = turns ? cos[size_t(count) * half + j] : 1, s = turns ? sin[size_t(count) * half + j] : 0;
    const size_t lane = size_t(kv_heads) * t_max * head, within = size_t(kv_head) * t_max * head + j;
    const stored* from = caches + (size_t(plane) * n_lanes + source) * lane + within + size_t(count) * head;
    stored* to = caches + (size_t(plane) * n_lanes + target) * lane + within;
    const int first = blockIdx.y * part, stop = min(first + part, kept);
    for (int t = first; t < stop; t++) {
        const size_t at = size_t(t) * head;
        const real left = to_real(from[at]), right = pairs ? to_real(from[at + half]) : 0;
        to[at] = to_stored(left * c + right * s);
        if (pairs) to[at + half] = to_stored(right * c - left * s);
    }
}

struct Scored {
    real score;
    int token;
};

// The order of tokens: by score, then by number.
__device__ __forceinline__ bool ahead(Scored a, Scored b) {
    return a.score > b.score || (a.score == b.score && a.token < b.token);
}

constexpr real HIGHEST = real(sizeof(real) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308);
constexpr int NOBODY = 0x7fffffff;

// A thread's first token after `before`.
__device__ __forceinline__ Scored next_of(const stored* row, int vocab, Scored before) {
    Scored best = {-HIGHEST, NOBODY};
    for (int j = threadIdx.x; j < vocab; j += blockDim.x) {
        const Scored x = {to_real(row[j]), j};
        if (ahead(before, x) && ahead(x, best)) best = x;
    }
    return best;
}

__device__ __forceinline__ Scored first_of_warp(Scored x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        const Scored other = {__shfl_xor_sync(ALL, x.score, step), __shfl_xor_sync(ALL, x.token, step)};
        if (ahead(other, x)) x = other;
    }
    return x;
}

// The first token of a block, returned to every thread. All threads must call.
__device__ __forceinline__ Scored first_of_block(Scored x) {
    __shared__ Scored of_warp[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = first_of_warp(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    x = first_of_warp(lane < warps ? of_warp[lane] : Scored{-HIGHEST, NOBODY});
    __syncthreads();  // all threads have read it before the next write
    return x;
}

// tokens (rows, k) ← the k most likely tokens by scores (rows, width), of which the first `vocab` count, in
// order; found (rows, k + 1) ← their scores, and log Σ exp of all, NaN if one is not finite. One block per
// row. After each token, only the thread that had it reads its scores again.
extern "C" __global__ void __launch_bounds__(1024)
topk_logits(int* tokens, real* found, const stored* scores, int vocab, int width, int k) {
    const stored* row = scores + size_t(blockIdx.x) * width;
    Scored mine = next_of(row, vocab, {HIGHEST, -1});
    real top = 0;
    for (int i = 0; i < k; i++) {
        const Scored first = first_of_block(mine);
        if (i == 0) top = first.score;
        if (threadIdx.x == 0) {
            tokens[size_t(blockIdx.x) * k + i] = first.token;
            found[size_t(blockIdx.x) * (k + 1) + i] = first.score;
        }
        if (mine.token == first.token) mine = next_of(row, vocab, first);
    }
    real total = 0, broken = 0;
    for (int j = threadIdx.x; j < vocab; j += blockDim.x) {
        const real x = to_real(row[j]);
        total += exp(x - top);
        broken += x - x;  // 0 unless x is not finite
    }
    total = block_sum(total);
    broken = block_sum(broken);
    if (threadIdx.x == 0) found[size_t(blockIdx.x) * (k + 1) + k] = top + log(total) + broken;
}

// tokens (rows) ← by the first `vocab` scores (rows, width), the token at which the running sum of p =
// exp((score - highest) / temperature) exceeds uniform · Σ p, in token order; found (rows, 2) ← its score,
// and Σ p. how (rows, 2): temperature and uniform number. One block per row, with adjacent tokens in each
// warp. Sums are in float64 and in a fixed order; float32 would lose a small p.
extern "C" __global__ void __launch_bounds__(1024)
drawn(int* tokens, double* found, const stored* scores, const double* how, int vocab, int width) {
    __shared__ double of_warp[WARP];
    const stored* row = scores + size_t(blockIdx.x) * width;
    const real temperature = real(how[size_t(blockIdx.x) * 2]);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int each = (vocab + blockDim.x - 1) / blockDim.x * WARP;
    const int first = warp * each, stop = min(first + each, vocab);
    const real top = first_of_block(next_of(row, vocab, {HIGHEST, -1})).score;
    double sum = 0;
    for (int j = first + lane; j < stop; j += WARP) sum += exp((to_real(row[j]) - top) / temperature);
    sum = warp_sum(sum);
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
    double total = 0, before = 0, reached = 0;
    for (int i = 0; i < warps; i++) total += of_warp[i];
    const double wanted = how[size_t(blockIdx.x) * 2 + 1] * total;
    int chosen = 0;  // the last nonempty warp whose previous sum does not exceed `wanted`
    for (int i = 0; i < warps; i++) {
        if (of_warp[i] > 0 && reached <= wanted) {
            chosen = i;
            before = reached;
        }
        reached += of_warp[i];
    }
    if (warp != chosen) return;
    int token = first;  // the last token of the warp with the same property
    for (int start = first; start < stop && before <= wanted; start += WARP) {
        const int j = start + lane;
        const double p = j < stop ? double(exp((to_real(row[j]) - top) / temperature)) : 0;
        double running = p;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const double lower = __shfl_up_sync(ALL, running, step);
            if (lane >= step) running += lower;
        }
        const double lower = __shfl_up_sync(ALL, running, 1);  // running - p would lose small values
        if (p > 0 && before + (lane > 0 ? lower : 0) <= wanted) token = j;
        before += warp_sum(p);
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) token = max(token, __shfl_xor_sync(ALL, token, step));
    if (lane > 0) return;
    tokens[blockIdx.x] = token;
    found[size_t(blockIdx.x) * 2] = to_real(row[token]);
    found[size_t(blockIdx.x) * 2 + 1] = total;
}
