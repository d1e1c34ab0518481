// What decoding does beside the passes: positions of a cache move, and the likeliest tokens are found.
#include "common.cuh"

// Of lane `target` positions 0 … kept ← those from `count` on of lane `source`, keys turned back by `count`
// positions where there are angles, (> count, half). caches (planes / 2, 2, n_lanes, kv_heads, t_max, head).
//
// A thread owns elements j and j + half of a head of a plane, for the positions of its block's part (of `part`
// positions), which it takes upwards: so a lane may move within itself, if there is one part.
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

// The order of tokens: by score, equal ones by number.
__device__ __forceinline__ bool ahead(Scored a, Scored b) {
    return a.score > b.score || (a.score == b.score && a.token < b.token);
}

constexpr real HIGHEST = real(sizeof(real) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308);
constexpr int NOBODY = 0x7fffffff;

// A thread's own first token behind `before`.
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

// tokens (rows, k) ← the k likeliest by scores (rows, width), of which `vocab` count, in order; found
// (rows, k + 1) ← their scores, and log Σ exp of all, NaN where one is not finite. A block for each row: after
// each token only the thread that had it looks at its scores again.
extern "C" __global__ void __launch_bounds__(1024)
likeliest(int* tokens, real* found, const stored* scores, int vocab, int width, int k) {
    __shared__ Scored of_warp[WARP];
    const stored* row = scores + size_t(blockIdx.x) * width;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    Scored mine = next_of(row, vocab, {HIGHEST, -1});
    real top = 0;
    for (int i = 0; i < k; i++) {
        const Scored best = first_of_warp(mine);
        if (lane == 0) of_warp[warp] = best;
        __syncthreads();
        const Scored first = first_of_warp(lane < warps ? of_warp[lane] : Scored{-HIGHEST, NOBODY});
        __syncthreads();  // all have read before the next is written
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
        broken += x - x;  // 0, but for what is not finite
    }
    total = block_sum(total);
    broken = block_sum(broken);
    if (threadIdx.x == 0) found[size_t(blockIdx.x) * (k + 1) + k] = top + log(total) + broken;
}
