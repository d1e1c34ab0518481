// Causal attention of a few new rows to a cache of keys and values, for decoding.
//
// Grid (sequences · heads, new rows, parts), block WARPS · 32 threads. The keys that a row sees are divided
// into the parts of the grid. With more than one part, attention_cached_join (sequences · heads, new rows;
// one warp) combines them. The positions of new rows in the cache are read on the device, so that a recorded
// launch can be repeated at any position. Macros: HEAD, GROUP (query heads per key/value head), WINDOW. At
// most t_max positions may be filled.
#include "common.cuh"
#include "seen.cuh"

constexpr int W = HEAD % PACK == 0 ? PACK : 1;
constexpr int PIECES = HEAD / W;  // of at most 256 elements; one thread each
constexpr int WARPS = 8;
constexpr int TOGETHER = GROUP + 2;  // heads of q, k and v that are used together
constexpr real LOWEST = real(-1e30);  // below every score; exp of a difference to it is 0 or 1

__device__ constexpr int lanes_for(int pieces) {
    int lanes = 1;
    while (lanes < pieces && lanes < WARP) lanes *= 2;
    return lanes;
}

constexpr int LANES = lanes_for(PIECES);  // lanes per key
constexpr int EACH = (PIECES + LANES - 1) / LANES;
constexpr int KEYS = WARPS * WARP / LANES;  // keys per block iteration

// The state after some keys: the highest score, Σ exp(score - top), Σ exp(score - top) · value.
struct Partial {
    real top = LOWEST, total = 0;
    Elements<W> sum[EACH] = {};

    __device__ void rise(real highest) {
        const real fade = exp(top - highest);
        top = highest;
        total *= fade;
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int i = 0; i < W; i++) sum[e].at[i] *= fade;
    }
};

__device__ __forceinline__ int piece(int e) { return threadIdx.x % LANES + e * LANES; }

__device__ __forceinline__ void load_pieces(Elements<W> (&x)[EACH], const stored* p) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        x[e] = {};
        if (piece(e) < PIECES) x[e] = load<W>(p + piece(e) * W);
    }
}

// y ← softmax(q kᵀ / √HEAD, causal) v for new rows at start, start + 1, …; cache ← their keys and values.
// start (starts,): of all sequences or each. lanes (sequences,): each sequence's slot in the cache, or null;
// -1: it sees nothing, y is 0, and nothing is stored.
// y (sequences · rows, heads · HEAD), cache (2, n_lanes, heads / GROUP, t_max, HEAD),
// qkv (sequences · rows, (heads + 2 heads / GROUP) · HEAD).
// With multiple parts, y is unchanged and parts (sequences · heads, rows, parts, HEAD + 2) is filled.
extern "C" __global__ void __launch_bounds__(WARPS * WARP)
attention_cached(stored* y, stored* cache, real* parts, const stored* qkv, const int* start, int starts,
                 const int* lanes, int n_lanes, int n_head, int t_max) {
    const int row = blockIdx.y, new_rows = gridDim.y, part = blockIdx.z, n_parts = gridDim.z;
    const int seq = blockIdx.x / n_head, head = blockIdx.x % n_head, lane = lanes ? lanes[seq] : seq;
    const int begin = start[seq % starts], last = begin + row;
    const long long channels = (long long)n_head * HEAD, kv_channels = channels / GROUP;
    const stored* new_q = qkv + (long long)seq * new_rows * TOGETHER * kv_channels + head * HEAD;
    const long long aside = channels + (head / GROUP - head) * HEAD;  // offset from q to k
    const int kv_heads = n_head / GROUP, from_lane = lane < 0 ? 0 : lane;
    stored* keys = cache + ((long long)from_lane * kv_heads + head / GROUP) * t_max * HEAD;
    stored* values = keys + (long long)n_lanes * kv_heads * t_max * HEAD;
    const int lowest = window_begin(last);
    const int per_part = (last - lowest + n_parts) / n_parts;  // last + 1 - lowest keys, rounded up
    const int from = lowest + part * per_part, to = lane < 0 ? from : min(from + per_part, last + 1);
    const real scale = 1 / sqrt(real(HEAD));

    Elements<W> q[EACH];
    load_pieces(q, new_q + row * TOGETHER * kv_channels);
    Partial mine;
#pragma unroll 2
    for (int first = from; first < to; first += KEYS) {  // all lanes stay together for the shuffles
        const int t = first + threadIdx.x / LANES;
        Elements<W> k[EACH] = {}, v[EACH] = {};
        if (t < to) {
            const stored* new_k = new_q + (t - begin) * TOGETHER * kv_channels + aside;
            load_pieces(k, t < begin ? keys + (long long)t * HEAD : new_k);
            load_pieces(v, t < begin ? values + (long long)t * HEAD : new_k + kv_channels);
        }
        real score = 0;
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int i = 0; i < W; i++) score += q[e].at[i] * k[e].at[i];
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) score += __shfl_xor_sync(ALL, score, step);
        score *= scale;
        if (t < to) {
            if (mine.top < score) mine.rise(score);
            const real p = exp(score - mine.top);
            mine.total += p;
#pragma unroll
            for (int e = 0; e < EACH; e++)
#pragma unroll
                for (int i = 0; i < W; i++) mine.sum[e].at[i] += p * v[e].at[i];
        }
    }

    // lane groups of a warp, then warps of the block, in a fixed order
#pragma unroll
    for (int step = LANES; step < WARP; step *= 2) {
        const real other = __shfl_xor_sync(ALL, mine.top, step);
        mine.rise(mine.top < other ? other : mine.top);
        mine.total += __shfl_xor_sync(ALL, mine.total, step);
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int i = 0; i < W; i++) mine.sum[e].at[i] += __shfl_xor_sync(ALL, mine.sum[e].at[i], step);
    }
    __shared__ real tops[WARPS], totals[WARPS], sums[WARPS][HEAD];
    const int warp = threadIdx.x / WARP;
    if (threadIdx.x % WARP < LANES) {
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int i = 0; i < W; i++)
                if (piece(e) < PIECES) sums[warp][piece(e) * W + i] = mine.sum[e].at[i];
        if (threadIdx.x % WARP == 0) tops[warp] = mine.top, totals[warp] = mine.total;
    }
    __syncthreads();
    real highest = LOWEST, total = 0;
    for (int w = 0; w < WARPS; w++) highest = highest < tops[w] ? tops[w] : highest;
    for (int w = 0; w < WARPS; w++) total += totals[w] * exp(tops[w] - highest);
    real* out = parts + (((long long)blockIdx.x * new_rows + row) * n_parts + part) * (HEAD + 2);
    for (int d = threadIdx.x; d < HEAD; d += WARPS * WARP) {
        real sum = 0;
        for (int w = 0; w < WARPS; w++) sum += sums[w][d] * exp(tops[w] - highest);
        if (n_parts == 1) {
            y[((long long)seq * new_rows + row) * channels + head * HEAD + d] = to_stored(lane < 0 ? 0 : sum / total);
        } else {
            out[d] = sum;
        }
    }
    if (n_parts > 1 && threadIdx.x == 0) out[HEAD] = highest, out[HEAD + 1] = total;
    if (lane >= 0 && part == 0 && head % GROUP == 0 && threadIdx.x < PIECES) {
        const stored* new_k = new_q + row * TOGETHER * kv_channels + aside + threadIdx.x * W;
        const long long at = (long long)last * HEAD + threadIdx.x * W;
        store<W>(keys + at, load<W>(new_k));
        store<W>(values + at, load<W>(new_k + kv_channels));
    }
}

extern "C" __global__ void __launch_bounds__(WARP)
attention_cached_join(stored* y, const real* parts, int n_head, int n_parts) {
    const int row = blockIdx.y, new_rows = gridDim.y;
    const real* in = parts + ((long long)blockIdx.x * new_rows + row) * n_parts * (HEAD + 2);
    real highest = LOWEST, total = 0;
    for (int p = 0; p < n_parts; p++) {
        const real top = in[p * (HEAD + 2) + HEAD];
        highest = highest < top ? top : highest;
    }
    for (int p = 0; p < n_parts; p++)
        total += in[p * (HEAD + 2) + HEAD + 1] * exp(in[p * (HEAD + 2) + HEAD] - highest);
    stored* out = y + ((long long)(blockIdx.x / n_head) * new_rows + row) * n_head * HEAD
                  + blockIdx.x % n_head * HEAD;
    for (int d = threadIdx.x; d < HEAD; d += WARP) {
        real sum = 0;
        for (int p = 0; p < n_parts; p++)
            sum += in[p * (HEAD + 2) + d] * exp(in[p * (HEAD + 2) + HEAD] - highest);
        out[d] = to_stored(total == 0 ? 0 : sum / total);  // 0: not a sequence
    }
}
